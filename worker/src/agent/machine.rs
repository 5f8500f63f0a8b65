//! What this machine is and where on it ranks can run.

use crate::{gpu::devices::Gpu, host::hostname};
use lockstep_protocol::agent::{Machine, Slot};
use std::{fs, path::Path};

/// Looks at this machine; `dir` is where its free disk is measured.
pub fn look(dir: &Path) -> Machine {
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

/// Cores that this process may use (its affinity and control group counted).
pub fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// `count` places for ranks on the CPU. They share its cores: an attempt's ranks get as many threads
/// each as there are cores for one.
pub fn cpu_slots(count: u32) -> Vec<Slot> {
    let cores = cores();
    let share = match cores / count.max(1) {
        0 => format!("1/{} core", count.div_ceil(cores)),
        1 => "1 core".to_owned(),
        n => format!("{n} cores"),
    };
    let name = format!("{share} of {}", cpu_name());
    (0..count)
        .map(|index| Slot { index, device: "cpu".into(), name: name.clone(), memory_bytes: 0, uuid: None })
        .collect()
}

/// A place a GPU, numbered as `nvidia-smi` numbers them.
pub fn gpu_slots(gpus: &[Gpu]) -> Vec<Slot> {
    gpus.iter()
        .map(|gpu| Slot {
            index: gpu.index,
            device: "cuda".into(),
            name: gpu.name.clone(),
            memory_bytes: gpu.memory_bytes,
            uuid: Some(gpu.uuid.clone()),
        })
        .collect()
}

fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned()).filter(|name| !name.is_empty())
    };
    value("model name").or_else(|| value("Model")).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn memory_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kibibytes = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) * 1024
}

/// How many processes the kernel has ended so far because memory ran out.
pub(super) fn oom_kills() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/vmstat").ok()?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_what_every_machine_has() {
        let machine = look(Path::new("/"));
        assert!(!machine.hostname.is_empty() && !machine.cpu.is_empty());
        assert!(machine.cores >= 1 && machine.memory_bytes > 1 << 20 && machine.disk_free_bytes > 0);
        let slots = cpu_slots(3);
        assert_eq!(slots.iter().map(|s| s.index).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(slots.iter().all(|s| s.device == "cpu" && s.name.contains("core")));
    }
}
