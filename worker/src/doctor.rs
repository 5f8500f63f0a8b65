//! What this machine has for training, with what to do about it, and whether ranks reach each other.

use crate::{
    agent::machine,
    comm::{Alone, CommError, Communicator, Reduction, ring::Ring},
    rendezvous::{Meeting, RendezvousError, Store},
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

const GIB: u64 = 1 << 30;
/// Below this a job's checkpoints and logs soon fill a disk.
const LITTLE_DISK: u64 = 5 * GIB;
/// A rank of ResNet-50 at batch 32 takes about this much.
const LITTLE_MEMORY: u64 = 2 * GIB;
/// NCCL's own advice for `/dev/shm`.
const LITTLE_SHM: u64 = GIB;
/// A server with many open pages needs some.
const FEW_FILES: u64 = 1024;
const PATIENCE: Duration = Duration::from_secs(20);

/// How a finding is to be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// As it should be.
    Ok,
    /// Works, but.
    Note,
    /// Training will fail or crawl.
    Problem,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// `CPU`, `memory`, ...
    pub what: String,
    pub grade: Grade,
    /// What is there.
    pub found: String,
    /// What to do about it, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

fn finding(what: &str, grade: Grade, found: String, advice: &str) -> Finding {
    let advice = (grade != Grade::Ok || !advice.is_empty()).then(|| advice.into());
    Finding { what: what.into(), grade, found, advice }
}

/// Looks at everything; `dir` is where data would lie.
pub fn examine(dir: &Path) -> Vec<Finding> {
    vec![cpu(), simd(), memory(), disk(dir), shared_memory(), open_files(), loopback(), gpu()]
}

fn cpu() -> Finding {
    let this = machine::look(Path::new("/"));
    let found = format!("{}, {} cores for this process", this.cpu, this.cores);
    if this.cores == 1 {
        let advice = "Ranks share one core: more ranks train the same, not faster.";
        return finding("CPU", Grade::Note, found, advice);
    }
    finding("CPU", Grade::Ok, found, "")
}

fn simd() -> Finding {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags: Vec<&str> = text
        .lines()
        .find_map(|line| line.strip_prefix("flags").or_else(|| line.strip_prefix("Features")))
        .unwrap_or("")
        .split_whitespace()
        .collect();
    let has = |flag| flags.contains(&flag);
    let arm = cfg!(target_arch = "aarch64");
    if has("avx512f") {
        finding("SIMD", Grade::Ok, "AVX-512".into(), "")
    } else if has("avx2") && has("fma") {
        finding("SIMD", Grade::Ok, "AVX2 with FMA".into(), "")
    } else if arm {
        finding("SIMD", Grade::Ok, "NEON".into(), "")
    } else {
        let advice = "The CPU engine will be slow. In a virtual machine, pass the host's CPU model through.";
        finding("SIMD", Grade::Problem, "neither AVX2 nor AVX-512".into(), advice)
    }
}

fn memory() -> Finding {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    let (total, free) = (bytes("MemTotal:"), bytes("MemAvailable:"));
    // A container's limit is the smaller truth (control groups version 2).
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max").filter(|limit| *limit < total);
    let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0);
    let (total, free) = match limit {
        Some(limit) => (limit, free.min(limit.saturating_sub(used))),
        None => (total, free),
    };
    let found = format!("{} free of {}", gib(free), gib(total));
    let grade = if free < LITTLE_MEMORY { Grade::Problem } else { Grade::Ok };
    let advice = if free < LITTLE_MEMORY {
        "A rank of ResNet-50 at batch 32 needs about 2 GiB: stop other programs, or train a smaller network."
    } else {
        ""
    };
    finding("memory", grade, found, advice)
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / GIB as f64)
}

fn free_space(path: &Path) -> Option<u64> {
    rustix::fs::statvfs(path).ok().map(|s| s.f_bavail * s.f_frsize)
}

fn disk(dir: &Path) -> Finding {
    let shown = dir.display();
    let writable = tempfile::tempfile_in(dir);
    if let Err(error) = writable {
        let advice = "Choose another folder (--data-dir, --out), or give yourself the right to write here.";
        return finding("disk", Grade::Problem, format!("{shown} cannot be written: {error}"), advice);
    }
    let free = free_space(dir).unwrap_or(0);
    let found = format!("{} free in {shown}", gib(free));
    if free < LITTLE_DISK {
        return finding("disk", Grade::Note, found, "Make room, or lower checkpoint.keep.");
    }
    finding("disk", Grade::Ok, found, "")
}

fn shared_memory() -> Finding {
    match rustix::fs::statvfs("/dev/shm") {
        Ok(s) if s.f_blocks * s.f_frsize < LITTLE_SHM => {
            let advice = "CPU ranks do not use it; GPUs of one machine do: docker run --shm-size=1g.";
            finding("/dev/shm", Grade::Note, gib(s.f_blocks * s.f_frsize), advice)
        }
        Ok(s) => finding("/dev/shm", Grade::Ok, gib(s.f_blocks * s.f_frsize), ""),
        Err(error) => {
            let advice = "CPU ranks do not use it; GPUs of one machine do: mount a tmpfs there.";
            finding("/dev/shm", Grade::Note, error.to_string(), advice)
        }
    }
}

fn open_files() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let found = limit.map_or("no limit".into(), |n| format!("{n} at once"));
    if limit.is_some_and(|n| n < FEW_FILES) {
        return finding("open files", Grade::Note, found, "Raise it before serving: ulimit -n 4096.");
    }
    finding("open files", Grade::Ok, found, "")
}

fn loopback() -> Finding {
    let try_it = || -> std::io::Result<Duration> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let began = Instant::now();
        let _caller = TcpStream::connect_timeout(&listener.local_addr()?, PATIENCE)?;
        listener.accept()?;
        Ok(began.elapsed())
    };
    match try_it() {
        Ok(_) => finding("loopback", Grade::Ok, "programs here can connect to each other".into(), ""),
        Err(error) => {
            let advice = "Ranks meet on 127.0.0.1: bring the loopback interface up (ip link set lo up) and \
                          look for a firewall that blocks it.";
            finding("loopback", Grade::Problem, error.to_string(), advice)
        }
    }
}

fn gpu() -> Finding {
    let Ok(version) = fs::read_to_string("/proc/driver/nvidia/version") else {
        let advice = "Jobs train on the CPU. For GPUs install NVIDIA's driver (nvidia-smi must work), and in a \
                      container pass them in (docker run --gpus all).";
        return finding("GPUs", Grade::Note, "no NVIDIA driver found".into(), advice);
    };
    let driver = version.lines().next().unwrap_or("").trim_start_matches("NVRM version:").trim().to_owned();
    let models: Vec<String> = fs::read_dir("/proc/driver/nvidia/gpus")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|gpu| fs::read_to_string(gpu.path().join("information")).ok())
        .filter_map(|text| text.lines().find_map(|l| l.strip_prefix("Model:").map(|m| m.trim().to_owned())))
        .collect();
    let found = format!("{} ({}); driver: {driver}", models.len(), models.join(", "));
    finding("GPUs", Grade::Note, found, "This build has no CUDA engine yet: jobs train on the CPU.")
}

/// One rank of the all-gather that `doctor` runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GatherRank {
    pub rank: u32,
    pub world_size: u32,
    /// On 127.0.0.1.
    pub port: u16,
    pub secret: String,
}

/// What the ranks found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gathered {
    /// Every rank's value: its own number.
    pub values: Vec<f32>,
    /// Best time of an all-reduce of 1 KiB, in microseconds.
    pub short_us: f64,
    /// All-reduced bytes of a 16 MiB vector, a second.
    pub bytes_per_second: f64,
}

/// Why ranks of this machine do not reach each other.
#[derive(Debug, thiserror::Error)]
pub enum GatherError {
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Meets the other ranks and gathers.
///
/// # Errors
/// They do not come, or do not answer.
pub fn gather(rank: &GatherRank) -> Result<Gathered, GatherError> {
    let mut kept = None;
    let comm: Arc<dyn Communicator> = if rank.world_size == 1 {
        Arc::new(Alone)
    } else {
        let store = Store::join(Meeting {
            addr: "127.0.0.1".into(),
            port: rank.port,
            secret: rank.secret.clone().into_bytes(),
            rank: rank.rank,
            world_size: rank.world_size,
            timeout: PATIENCE,
            stop: Arc::default(),
        })?;
        let ring = Ring::connect(&store, PATIENCE)?;
        kept = Some(store);
        ring
    };
    let values = comm.all_gather(&[rank.rank as f32])?;
    let best_secs = |length: usize, rounds: u32| -> Result<f64, CommError> {
        let mut vector = vec![1.0; length];
        let mut best = f64::MAX;
        for _ in 0..rounds {
            let began = Instant::now();
            comm.all_reduce(&mut vector, Reduction::Mean)?;
            best = best.min(began.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    let short_us = best_secs(256, 200)? * 1e6;
    let bytes_per_second = f64::from(16u32 << 20) / best_secs(4 << 20, 5)?.max(1e-9);
    comm.barrier()?;
    drop(kept);
    Ok(Gathered { values, short_us, bytes_per_second })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_not_in_order_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let findings = examine(dir.path());
        for finding in &findings {
            assert!(!finding.found.is_empty(), "{finding:?}");
            let advised = finding.advice.as_ref().is_some_and(|a| !a.is_empty());
            assert_eq!(advised, finding.grade != Grade::Ok, "{finding:?}");
        }
        let disk = examine(&dir.path().join("none")).into_iter().find(|f| f.what == "disk").unwrap();
        assert_eq!(disk.grade, Grade::Problem);
    }
}
