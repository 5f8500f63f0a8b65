//! What this machine has for training, with what to do about it, and whether ranks reach each other.

pub(crate) mod gather;

use crate::{
    agent::machine,
    comm::{CommError, ProcessGroup, Reduction, rendezvous::RendezvousError},
    gpu::{
        devices::{self, Gpu, Link},
        libraries::{self, Libraries, Which},
        nvjpeg,
    },
    team::{Member, Met},
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::Path,
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
    let mut findings = vec![cpu(), simd(), memory(), disk(dir), shared_memory(), open_files(), loopback()];
    findings.extend(gpus());
    findings
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

/// What there is of GPUs, and of what ranks on them need.
fn gpus() -> Vec<Finding> {
    let libraries = Libraries::find();
    let driver = fs::read_to_string("/proc/driver/nvidia/version").ok();
    if driver.is_none() && libraries.get(Which::Driver).is_none() {
        let advice = "Jobs train on the CPU. For GPUs install NVIDIA's driver (nvidia-smi must work), and in a \
                      container pass them in (docker run --gpus all).";
        return vec![finding("GPUs", Grade::Note, "no NVIDIA driver found".into(), advice)];
    }
    let all = match devices::all(&libraries) {
        Ok(all) if !all.is_empty() => all,
        other => {
            let found = other.err().unwrap_or_else(|| "NVIDIA's driver is there, but shows no GPU".into());
            let advice = "Look whether nvidia-smi lists GPUs; in a container pass them in (docker run --gpus all). \
                          Until then jobs train on the CPU.";
            return vec![finding("GPUs", Grade::Note, found, advice)];
        }
    };
    let mut findings = vec![driver_finding(driver.as_deref())];
    findings.extend(all.iter().map(gpu));
    findings.extend(visible(&libraries, all.len()));
    if all.len() > 1 {
        findings.extend(links(&libraries, &all));
    }
    let cuda = libraries.get(Which::Driver).and_then(|driver| driver.version().ok());
    for which in Which::ALL.into_iter().filter(|which| *which != Which::Nvml) {
        findings.push(library(&libraries, which, all.len(), cuda.as_deref()));
    }
    if libraries.get(Which::Nvjpeg).is_some() {
        findings.push(jpeg_decoder(nvjpeg::hardware()));
    }
    findings
}

/// Whether GPUs decode JPEG files; `found` is of one of them.
fn jpeg_decoder(found: Result<String, String>) -> Finding {
    match found {
        Ok(found) => finding("JPEG decoder", Grade::Ok, format!("in each GPU: {found}"), ""),
        Err(why) => {
            let advice = "JPEG files are decoded on cores. A100, A30 and GPUs of the Ada, Hopper and Blackwell families have a decoder; it needs the \
                          driver's libnvcuvid.so.1, which a container gets with \
                          NVIDIA_DRIVER_CAPABILITIES=compute,utility,video.";
            finding("JPEG decoder", Grade::Note, why, advice)
        }
    }
}

fn driver_finding(version: Option<&str>) -> Finding {
    let line = version.and_then(|text| text.lines().next()).unwrap_or("").trim_start_matches("NVRM version:");
    let found = if line.trim().is_empty() { "version unknown".into() } else { line.trim().to_owned() };
    finding("GPU driver", Grade::Ok, found, "")
}

fn gpu(gpu: &Gpu) -> Finding {
    let Gpu { index, uuid, name, memory_bytes, memory_used_bytes, pci, divided } = gpu;
    let what = format!("GPU {index}");
    let used = gib(*memory_used_bytes);
    let found = format!("{name}, {used} in use of {}, {pci}, {uuid}", gib(*memory_bytes));
    if *divided {
        let advice =
            "It is divided (MIG), which Lockstep does not use: `nvidia-smi -mig 0` as root makes it whole.";
        return finding(&what, Grade::Note, found, advice);
    }
    if *memory_used_bytes > memory_bytes / 10 {
        let advice =
            "Other programs hold its memory (nvidia-smi shows them): jobs may run out of it, and slow down.";
        return finding(&what, Grade::Note, found, advice);
    }
    finding(&what, Grade::Ok, found, "")
}

fn visible(libraries: &Libraries, all: usize) -> Option<Finding> {
    let value = std::env::var_os(devices::VISIBLE)?;
    let shown = format!("{}={}", devices::VISIBLE, value.to_string_lossy());
    Some(match devices::visible(libraries) {
        Ok(gpus) if gpus.is_empty() => {
            let advice = "Unset it, or jobs train on the CPU.";
            finding("visible", Grade::Note, format!("{shown} hides all GPUs"), advice)
        }
        Ok(gpus) => {
            let numbers: Vec<_> = gpus.iter().map(|gpu| gpu.index.to_string()).collect();
            let found = format!("{} of {all}: {} ({shown})", gpus.len(), numbers.join(", "));
            finding("visible", Grade::Ok, found, "")
        }
        Err(error) => finding("visible", Grade::Problem, error, "Correct it, or unset it to use all GPUs."),
    })
}

fn links(libraries: &Libraries, gpus: &[Gpu]) -> Vec<Finding> {
    let links = match devices::links(libraries, gpus) {
        Ok(links) => links,
        Err(error) => {
            let advice = "`nvidia-smi topo -m` may say more; training works, at a speed to be measured.";
            return vec![finding("links", Grade::Note, error, advice)];
        }
    };
    // All alike, as on most machines: one line.
    let mut kinds: Vec<(&str, bool, Vec<String>)> = Vec::new();
    for Link { between: (one, other), by, peer_access } in &links {
        let pair = format!("{one}-{other}");
        match kinds.iter_mut().find(|(b, p, _)| b == by && p == peer_access) {
            Some((.., pairs)) => pairs.push(pair),
            None => kinds.push((by, *peer_access, vec![pair])),
        }
    }
    let all = kinds.len() == 1;
    kinds
        .into_iter()
        .map(|(by, peer_access, pairs)| {
            let pairs = if all { "every pair".to_owned() } else { format!("pairs {}", pairs.join(", ")) };
            if peer_access {
                return finding("links", Grade::Ok, format!("{pairs}: {by}, with peer access"), "");
            }
            let advice = "Data between them goes through the host's memory: slower. In a virtual machine the host \
                          may block it (ACS); consumer GPUs do not offer it.";
            finding("links", Grade::Note, format!("{pairs}: {by}, no peer access"), advice)
        })
        .collect()
}

/// A library; `cuda` is what the driver supports, such as `13.0`.
fn library(libraries: &Libraries, which: Which, gpus: usize, cuda: Option<&str>) -> Finding {
    let Some(library) = libraries.get(which) else {
        // One GPU does without NCCL.
        let needed = Which::needed(u32::try_from(gpus).unwrap_or(u32::MAX)).contains(&which);
        let grade = if needed { Grade::Problem } else { Grade::Note };
        return finding(which.name(), grade, "not found".into(), which.advice());
    };
    let place = library.path.display();
    let version = match library.version() {
        Ok(version) => version,
        Err(error) => return finding(which.name(), Grade::Problem, error, which.advice()),
    };
    let found = match which {
        Which::Driver => format!("supports CUDA {version}: {place}"),
        _ => format!("{version}: {place}"),
    };
    let major = |version: &str| version.split('.').next().and_then(|n| n.parse::<u32>().ok());
    if which == Which::Nvrtc && cuda.is_some_and(|cuda| major(&version) > major(cuda)) {
        let advice = "It is newer than the driver: update the driver, or pip install nvidia-cuda-nvrtc-cu12.";
        return finding(which.name(), Grade::Problem, found, advice);
    }
    finding(which.name(), Grade::Ok, found, "")
}

/// What the ranks found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gathered {
    /// `CPU` or `GPU`.
    pub device: String,
    /// Every rank's value: its own number.
    pub values: Vec<f32>,
    /// Time of an all-reduce of 1 KiB, in microseconds: the best on CPUs, the mean of many on GPUs.
    pub short_us: f64,
    /// All-reduced bytes of a 16 MiB vector, a second.
    pub bytes_per_second: f64,
    /// Why the GPUs do not share memory, if they do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_peer_memory: Option<String>,
}

/// Why ranks of this machine do not reach each other.
#[derive(Debug, thiserror::Error)]
pub enum GatherError {
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("{0}")]
    Libraries(String),
}

/// Meets the other ranks and gathers, over NCCL when this one has a GPU.
///
/// # Errors
/// They do not come, or do not answer.
pub fn gather(member: &Member) -> Result<Gathered, GatherError> {
    if member.gpu.is_some() {
        libraries::ready(&[Which::Driver, Which::Nccl]).map_err(GatherError::Libraries)?;
    }
    let Met { comm, store } = member.meet(PATIENCE)?;
    let gathered = match (&member.gpu, &store) {
        (Some(gpu), Some(store)) => {
            let found = gather::gather(store, gpu.ordinal)?;
            Gathered {
                device: "GPU".into(),
                values: found.values,
                short_us: found.short_us,
                bytes_per_second: found.bytes_per_second,
                no_peer_memory: found.no_peer_memory,
            }
        }
        _ => over_tcp(comm.as_ref())?,
    };
    comm.barrier()?;
    Ok(gathered)
}

fn over_tcp(comm: &dyn ProcessGroup) -> Result<Gathered, CommError> {
    let mut values = vec![0.0f32; comm.size() as usize];
    comm.all_gather((&[comm.rank() as f32]).into(), (&mut values).into())?;
    let best_secs = |length: usize, rounds: u32| -> Result<f64, CommError> {
        let mut vector = vec![1.0; length];
        let mut best = f64::MAX;
        for _ in 0..rounds {
            let began = Instant::now();
            comm.all_reduce((&mut vector).into(), Reduction::Mean)?;
            best = best.min(began.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    let short_us = best_secs(256, 200)? * 1e6;
    let bytes_per_second = f64::from(16u32 << 20) / best_secs(4 << 20, 5)?.max(1e-9);
    Ok(Gathered { device: "CPU".into(), values, short_us, bytes_per_second, no_peer_memory: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_gpus_gets_one_note_about_them() {
        let about: Vec<_> = gpus();
        if about.len() == 1 {
            assert_eq!((about[0].what.as_str(), about[0].grade), ("GPUs", Grade::Note));
            assert!(about[0].advice.as_ref().is_some_and(|a| a.contains("CPU")), "{about:?}");
        }
    }

    #[test]
    fn a_library_that_is_missing_is_a_problem_with_a_way_to_get_it() {
        let nothing = Libraries::default();
        let cudnn = library(&nothing, Which::Cudnn, 1, Some("13.0"));
        assert_eq!((cudnn.what.as_str(), cudnn.grade), ("cuDNN", Grade::Problem));
        assert!(cudnn.advice.unwrap().contains("pip install nvidia-cudnn"));
        assert_eq!(library(&nothing, Which::Nccl, 1, None).grade, Grade::Note);
        assert_eq!(library(&nothing, Which::Nccl, 2, None).grade, Grade::Problem);
    }

    #[test]
    fn nobody_needs_a_jpeg_decoder_and_without_one_the_doctor_says_what_decodes() {
        assert_eq!(library(&Libraries::default(), Which::Nvjpeg, 1, None).grade, Grade::Note);
        let without = jpeg_decoder(Err("this GPU has no JPEG decoder".into()));
        assert_eq!(without.grade, Grade::Note);
        assert!(without.advice.unwrap().contains("on cores"));
        assert_eq!(jpeg_decoder(Ok("8 engines".into())).grade, Grade::Ok);
    }

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
