//! Programs that launch jobs on clusters, run on this machine: OpenSSH's server, Slurm with several nodes, and a simulated
//! Kubernetes API server.

mod kubernetes;
mod slurm;
mod sshd;

pub(crate) use kubernetes::{Kubernetes, POD, rules as kubernetes_rules};
pub(crate) use slurm::Slurm;
pub(crate) use sshd::Sshd;

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Searches for a program in PATH and in root's folders.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(more).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// The path of a program that tests/run installs. Panics if the program is missing.
pub(crate) fn program(name: &str, package: &str) -> PathBuf {
    find_program(name).unwrap_or_else(|| panic!("{name} is missing: install {package}, as tests/run does"))
}

/// Runs a command, which must succeed, and returns its output.
fn run_ok(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(status.success(), "{command:?}: {}{}", text(&stdout), text(&stderr));
    text(&stdout)
}

/// The command lines of all processes, which every user can read.
pub(crate) fn command_lines() -> Vec<String> {
    let entries = std::fs::read_dir("/proc").expect("processes").filter_map(Result::ok);
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " ")).collect()
}

/// Ends the process whose id is in a file.
fn terminate(pid_file: &Path) {
    let pid = std::fs::read_to_string(pid_file).ok().and_then(|text| text.trim().parse().ok());
    if let Some(pid) = pid {
        crate::server::signal(pid, rustix::process::Signal::TERM);
    }
}
