//! The description of this machine.

use lockstep_host::{
    cores, cpu_name, hostname,
    usage::{disk_free, memory_free_and_total},
};
use lockstep_protocol::agent::Machine;
use std::path::Path;

/// Describes this machine. Free disk space is measured at `dir`.
pub(super) fn describe(dir: &Path) -> Machine {
    let (_, memory_bytes) = memory_free_and_total();
    Machine {
        hostname: hostname(),
        cpu: cpu_name(),
        cores: cores(),
        memory_bytes,
        disk_free_bytes: disk_free(dir).unwrap_or(0),
        version: env!("CARGO_PKG_VERSION").into(),
        ..Machine::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_cores_memory_and_a_name() {
        let machine = describe(Path::new("/"));
        assert!(!machine.hostname.is_empty() && !machine.cpu.is_empty());
        assert!(machine.cores >= 1 && machine.memory_bytes > 1 << 20 && machine.disk_free_bytes > 0);
    }
}
