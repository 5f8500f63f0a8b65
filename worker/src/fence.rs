//! The deadline of the agent's lease, until which ranks may continue: one number in the agent's folder, in hundredths of a
//! second since the machine was started, which setting the clock does not change.
//!
//! The agent writes it anew while the server responds. An agent that is gone, stopped or cut off does not,
//! and its ranks end themselves: by then the server has given the job to others.

use rustix::time::{ClockId, clock_gettime};
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// The file's length: digits and a newline.
const DIGITS: usize = 20;

/// Hundredths of a second since the start of the machine.
fn uptime() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    (now.tv_sec * 100 + now.tv_nsec / 10_000_000) as u64
}

/// The agent's side.
#[derive(Debug)]
pub(crate) struct Fence {
    file: File,
    path: PathBuf,
}

impl Fence {
    /// Makes or takes over the file in an agent's folder.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(crate) fn open(agent_dir: &Path) -> io::Result<Self> {
        let path = agent_dir.join("lease");
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path)?;
        Ok(Self { file, path })
    }

    /// Where ranks find it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Ranks may continue for `left` from now. Written in place with a fixed length, so it works on a full disk and is never torn.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn set(&self, left: Duration) -> io::Result<()> {
        let deadline = uptime() + u64::try_from(left.as_millis() / 10).unwrap_or(u64::MAX / 2);
        self.file.write_all_at(format!("{deadline:>width$}\n", width = DIGITS - 1).as_bytes(), 0)
    }
}

/// A rank's side: by how much the deadline is past, if it is. A file that cannot be read fences nobody: a folder
/// that was removed is no sign that others have the job.
pub(crate) fn overdue(path: &Path) -> Option<Duration> {
    let deadline: u64 = fs::read_to_string(path).ok()?.trim().parse().ok()?;
    let past = uptime().checked_sub(deadline).filter(|past| *past > 0)?;
    Some(Duration::from_millis(past * 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_kept_moved_and_passed() {
        let dir = tempfile::tempdir().unwrap();
        let fence = Fence::open(dir.path()).unwrap();
        assert_eq!(overdue(fence.path()), None, "no word yet");
        fence.set(Duration::from_secs(100)).unwrap();
        assert_eq!(overdue(fence.path()), None);
        fence.set(Duration::ZERO).unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(10);
        while overdue(fence.path()).is_none() {
            assert!(std::time::Instant::now() < until);
            std::thread::yield_now();
        }
        fence.set(Duration::from_secs(100)).unwrap();
        assert_eq!(overdue(fence.path()), None, "the next agent came in time");
        assert_eq!(overdue(Path::new("/nowhere")), None);
    }
}
