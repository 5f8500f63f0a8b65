//! Checks whether a machine is ready to train: its hardware and software, and whether ranks can reach each other.

mod facts;
mod gpus;
mod link;

pub use crate::links::AllGatherResult;
pub use facts::Facts;
pub use link::{LinkMeasurement, listen, probe};

use crate::{
    links,
    local_group::{JoinedGroup, Member},
    planning::gigabytes,
};
use lockstep_host::{
    cores, cpu_name,
    gpu::libraries::{self, Library},
    usage::{disk_free, memory_free_and_total},
};
use serde::{Deserialize, Serialize};
use std::{
    net::{TcpListener, TcpStream},
    path::Path,
    time::Duration,
};

const GIB: u64 = 1 << 30;
/// The minimum free disk space. With less, a job's checkpoints and logs soon fill the disk.
const MIN_FREE_DISK: u64 = 5 * GIB;
/// The minimum free memory. A rank of ResNet-50 with a batch size of 32 needs about as much.
const MIN_FREE_MEMORY: u64 = 2 * GIB;
/// The size of `/dev/shm` that NCCL recommends.
const MIN_SHM: u64 = GIB;
/// The minimum limit of open files. A server with many open pages needs more.
const MIN_OPEN_FILES: u64 = 1024;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// Everything is in order.
    Ok,
    /// Training works, with a limitation.
    Note,
    /// Training will probably fail or be very slow.
    Problem,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// What was checked: `CPU`, `memory`, ...
    pub what: String,
    pub grade: Grade,
    pub found: String,
    /// What to do, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// A finding that needs no attention.
fn ok(what: &str, found: impl Into<String>) -> Finding {
    Finding { what: what.into(), grade: Grade::Ok, found: found.into(), advice: None }
}

/// A finding with advice.
pub fn finding(what: &str, grade: Grade, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { what: what.into(), grade, found: found.into(), advice: Some(advice.into()) }
}

/// Runs all checks. `dir` is the folder for data. If `quick`, checks that allocate GPU memory are skipped, because ranks may
/// need all of it.
pub fn examine(dir: &Path, quick: bool) -> Vec<Finding> {
    let mut findings = vec![cpu(), simd(), memory(), disk(dir), shared_memory(), open_files(), loopback()];
    findings.extend(gpus::findings(quick));
    findings
}

fn cpu() -> Finding {
    let found = format!("{}, {} cores for this process", cpu_name(), cores());
    if cores() == 1 {
        let advice = "Ranks share one core: more ranks do not train faster.";
        return finding("CPU", Grade::Note, found, advice);
    }
    ok("CPU", found)
}

fn simd() -> Finding {
    #[cfg(target_arch = "x86_64")]
    let found = if is_x86_feature_detected!("avx512f") {
        Some("AVX-512")
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        Some("AVX2 with FMA")
    } else {
        None
    };
    #[cfg(not(target_arch = "x86_64"))]
    let found = cfg!(target_arch = "aarch64").then_some("NEON");
    match found {
        Some(found) => ok("SIMD", found),
        None => {
            let advice =
                "The CPU engine will be slow. In a virtual machine, pass the host's CPU model through.";
            finding("SIMD", Grade::Problem, "neither AVX2 nor AVX-512", advice)
        }
    }
}

fn memory() -> Finding {
    let (free, total) = memory_free_and_total();
    let found = format!("{} free of {}", gigabytes(free as f64), gigabytes(total as f64));
    if free < MIN_FREE_MEMORY {
        let advice = "A rank of ResNet-50 at batch 32 needs about 2 GB: stop other programs, or train a smaller \
                      network.";
        return finding("memory", Grade::Problem, found, advice);
    }
    ok("memory", found)
}

fn disk(dir: &Path) -> Finding {
    let shown = dir.display();
    if let Err(error) = tempfile::tempfile_in(dir) {
        let advice = "Choose another folder (--data-dir, --out), or make this folder writable.";
        return finding("disk", Grade::Problem, format!("{shown} cannot be written: {error}"), advice);
    }
    let free = disk_free(dir).unwrap_or(0);
    let found = format!("{} free in {shown}", gigabytes(free as f64));
    if free < MIN_FREE_DISK {
        return finding("disk", Grade::Note, found, "Free some space, or lower checkpoint.keep.");
    }
    ok("disk", found)
}

fn shared_memory() -> Finding {
    let (found, what_to_do) = match rustix::fs::statvfs("/dev/shm").map(|s| s.f_blocks * s.f_frsize) {
        Ok(bytes) if bytes >= MIN_SHM => return ok("/dev/shm", gigabytes(bytes as f64)),
        Ok(bytes) => (gigabytes(bytes as f64), "Enlarge it: docker run --shm-size=1g."),
        Err(error) => (error.to_string(), "Mount a tmpfs at /dev/shm."),
    };
    let advice = format!("NCCL uses /dev/shm between GPUs of one machine. {what_to_do}");
    finding("/dev/shm", Grade::Note, found, advice)
}

fn open_files() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let found = limit.map_or("no limit".into(), |n| format!("{n} at once"));
    if limit.is_some_and(|n| n < MIN_OPEN_FILES) {
        let advice = "Raise the limit before you start a server: ulimit -n 4096.";
        return finding("open files", Grade::Note, found, advice);
    }
    ok("open files", found)
}

fn loopback() -> Finding {
    let connect = || -> std::io::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let _caller = TcpStream::connect_timeout(&listener.local_addr()?, CONNECT_TIMEOUT)?;
        listener.accept().map(drop)
    };
    match connect() {
        Ok(()) => ok("loopback", "programs on this machine can connect to each other"),
        Err(error) => {
            let advice = "Ranks connect on 127.0.0.1: bring the loopback interface up (ip link set lo up) and \
                          look for a firewall that blocks it.";
            finding("loopback", Grade::Problem, error.to_string(), advice)
        }
    }
}

/// Meets the other ranks and runs an all-gather, over NCCL if this rank has a GPU.
///
/// # Errors
/// A rank does not arrive or does not respond.
pub fn gather(member: &Member) -> Result<AllGatherResult, String> {
    if member.gpu.is_some() {
        libraries::check_loadable(&[Library::Driver, Library::Nccl])?;
    }
    let JoinedGroup { comm, store } = member.meet(CONNECT_TIMEOUT).map_err(|e| e.to_string())?;
    let ordinal = member.gpu.as_ref().map(|gpu| gpu.ordinal);
    links::measure(comm.as_ref(), store.as_deref(), ordinal).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_note_and_problem_has_advice() {
        let dir = tempfile::tempdir().unwrap();
        let findings = examine(dir.path(), false);
        for finding in &findings {
            assert!(!finding.found.is_empty(), "{finding:?}");
            let advised = finding.advice.as_ref().is_some_and(|a| !a.is_empty());
            assert_eq!(advised, finding.grade != Grade::Ok, "{finding:?}");
        }
        let disk = examine(&dir.path().join("none"), true).into_iter().find(|f| f.what == "disk").unwrap();
        assert_eq!(disk.grade, Grade::Problem);
    }
}
