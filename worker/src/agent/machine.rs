//! The description of this machine.

use crate::host::{cores, cpu_name, hostname};
use lockstep_protocol::agent::Machine;
use std::{fs, path::Path};

/// Describes this machine; `dir` is where its free disk space is measured.
pub fn describe(dir: &Path) -> Machine {
    let disk_free_bytes = rustix::fs::statvfs(dir).map_or(0, |s| s.f_bavail * s.f_frsize);
    Machine {
        hostname: hostname(),
        cpu: cpu_name(),
        cores: cores(),
        memory_bytes: memory_bytes(),
        disk_free_bytes,
        version: env!("CARGO_PKG_VERSION").into(),
    }
}

fn memory_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kibibytes = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_what_every_machine_has() {
        let machine = describe(Path::new("/"));
        assert!(!machine.hostname.is_empty() && !machine.cpu.is_empty());
        assert!(machine.cores >= 1 && machine.memory_bytes > 1 << 20 && machine.disk_free_bytes > 0);
    }
}
