//! Tests that only `bash tests/run full` runs: the commands of README.md and docs/, the example jobs, speed, launchers with real programs (Slurm,
//! Open MPI, OpenSSH's server, torchrun) and a simulated Kubernetes API server, networks in PyTorch, and jobs over several hosts, which are
//! network namespaces of this machine. Quick tests use some of the helpers.

mod doctor_hosts;
mod example_job;
mod examples;
mod external_launchers;
mod first_loss;
pub(crate) mod hosts;
mod launch;
mod launch_hosts;
mod lost_hosts;
mod network_interfaces;
mod pytorch;
mod sweep;
mod throughput;
