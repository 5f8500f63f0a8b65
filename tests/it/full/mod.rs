//! What only `bash tests/run full` runs, apart from what other tests use of it: the commands of README.md and docs/, the example jobs, speed,
//! launchers with the real programs that launch (Slurm, Open MPI, OpenSSH's server, torchrun) and an API server like Kubernetes', networks in PyTorch, and
//! jobs over several hosts, which are network namespaces of this machine.

mod examined;
mod example_job;
mod examples;
mod first_loss;
pub(crate) mod hosts;
mod interfaces;
mod launch;
mod launch_gangs;
mod launch_hosts;
mod launchers;
mod lost_hosts;
mod pytorch;
mod sweep;
mod throughput;
