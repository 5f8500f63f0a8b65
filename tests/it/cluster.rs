//! The programs that launch jobs on clusters, real ones, on this machine: OpenSSH's server, and Slurm with several nodes. In place of
//! Kubernetes there is an API server of the tests' own.

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

/// A program of this machine, also where only root looks.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(more).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// As [`find_program`], for one that tests/run installs.
pub(crate) fn program(name: &str, package: &str) -> PathBuf {
    find_program(name)
        .unwrap_or_else(|| panic!("there is no {name} here: install {package}, as tests/run does"))
}

/// Runs a command that must succeed; its output.
fn done(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(status.success(), "{command:?}: {}{}", text(&stdout), text(&stderr));
    text(&stdout)
}

/// Every command line and the environment of every process: what others, and the same user, can read.
pub(crate) fn command_lines() -> Vec<String> {
    let entries = std::fs::read_dir("/proc").expect("processes").filter_map(Result::ok);
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " ")).collect()
}

/// Ended with the test, by its process id.
fn end(pid_file: &Path) {
    let pid = std::fs::read_to_string(pid_file).ok().and_then(|text| text.trim().parse().ok());
    if let Some(pid) = pid {
        crate::server::signal(pid, rustix::process::Signal::TERM);
    }
}
