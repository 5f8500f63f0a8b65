//! What only `bash tests/run full` runs: launchers with the real programs that launch (Slurm, Open MPI, OpenSSH's server, torchrun) and
//! an API server like Kubernetes', and jobs over several hosts, which are network namespaces of this machine.

mod examined;
pub(crate) mod hosts;
mod interfaces;
mod launch;
mod launch_gangs;
mod launch_hosts;
mod launchers;
mod lost_hosts;
