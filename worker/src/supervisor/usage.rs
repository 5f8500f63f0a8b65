//! The resources used by a rank's process.

use super::{launch::rank_file, proc_fs::stat, process::Identity};
use std::{fs, path::Path, time::Instant};

/// Clock ticks per second of CPU times in `/proc`, on every supported architecture.
const TICKS_PER_SEC: f64 = 100.0;

/// The CPU time so far, and the memory now. Two measurements with equal `process` are of the same process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankUsage {
    pub at: Instant,
    /// Process id and start time.
    pub process: (i32, u64),
    /// CPU time of all threads, over all CPUs.
    pub cpu_secs: f64,
    /// Resident memory.
    pub memory_bytes: u64,
}

/// The usage of a running rank, whose process is named by the rank's `.pid` file.
pub fn rank_usage(attempt_dir: &Path, rank: u32) -> Option<RankUsage> {
    let recorded = fs::read(rank_file(attempt_dir, rank, "pid")).ok()?;
    let Identity { pid, start_time, .. } = serde_json::from_slice(&recorded).ok()?;
    let now = stat(pid).filter(|now| now.start_time == start_time && !now.has_ended())?;
    Some(RankUsage {
        at: Instant::now(),
        process: (pid, start_time),
        cpu_secs: now.cpu_ticks as f64 / TICKS_PER_SEC,
        memory_bytes: now.resident_pages * rustix::param::page_size() as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_process_is_measured_and_a_reused_id_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let own = Identity::of(std::process::id().cast_signed());
        let write = |identity: &Identity| {
            fs::write(rank_file(dir.path(), 3, "pid"), serde_json::to_vec(identity).unwrap()).unwrap();
        };
        assert_eq!(rank_usage(dir.path(), 3), None, "no file");
        write(&own);
        let first = rank_usage(dir.path(), 3).unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while rank_usage(dir.path(), 3).unwrap().cpu_secs <= first.cpu_secs {
            assert!(std::time::Instant::now() < until, "the process never used CPU time");
        }
        assert!(first.memory_bytes > 1 << 20, "{first:?}");
        write(&Identity { start_time: own.start_time + 1, ..own });
        assert_eq!(rank_usage(dir.path(), 3), None);
    }
}
