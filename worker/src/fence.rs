//! The deadline until which ranks may continue: a file in the agent's folder with the time in hundredths of a second
//! since boot. Changes of the time of day do not affect it.
//!
//! The agent updates the deadline while it is in contact with the server. If the agent has ended, is suspended or has
//! lost the connection, the deadline passes, and the agent's ranks end themselves before the server starts the job elsewhere.

use rustix::time::{ClockId, clock_gettime};
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// The length of the file: the padded number and a newline.
const FILE_BYTES: usize = 20;

/// The time since boot, in hundredths of a second.
fn uptime() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    (now.tv_sec * 100 + now.tv_nsec / 10_000_000) as u64
}

/// The agent's side: writes the deadline.
#[derive(Debug)]
pub(crate) struct Fence {
    file: File,
    /// The path of the file, for ranks.
    pub(crate) path: PathBuf,
}

impl Fence {
    /// Opens or creates the file in an agent's folder.
    pub(crate) fn open(agent_dir: &Path) -> io::Result<Self> {
        let path = agent_dir.join("lease");
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path)?;
        Ok(Self { file, path })
    }

    /// Lets ranks continue for `duration` from now. The file is overwritten in place with a fixed length, so this works
    /// on a full disk, and readers never see a partial number.
    pub(crate) fn set(&self, duration: Duration) -> io::Result<()> {
        let deadline = uptime() + u64::try_from(duration.as_millis() / 10).unwrap_or(u64::MAX / 2);
        self.file.write_all_at(format!("{deadline:>width$}\n", width = FILE_BYTES - 1).as_bytes(), 0)
    }
}

/// The ranks' side: whether the deadline has passed. A rank keeps the file open, because a new folder at the same path has
/// the lease of another agent. A file without a deadline does not end ranks.
pub(crate) fn has_passed(file: &File) -> bool {
    let mut text = [0; FILE_BYTES];
    let is_read = file.read_exact_at(&mut text, 0).is_ok();
    let deadline = str::from_utf8(&text).ok().filter(|_| is_read).and_then(|text| text.trim().parse().ok());
    deadline.is_some_and(|deadline: u64| uptime() > deadline)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::wait_until;

    #[test]
    fn a_deadline_can_be_set_extended_and_missed() {
        let dir = tempfile::tempdir().unwrap();
        let fence = Fence::open(dir.path()).unwrap();
        let file = File::open(&fence.path).unwrap();
        assert!(!has_passed(&file), "no deadline was set");
        fence.set(Duration::from_secs(100)).unwrap();
        assert!(!has_passed(&file));
        fence.set(Duration::ZERO).unwrap();
        wait_until("the deadline never passed", || has_passed(&file));
        fence.set(Duration::from_secs(100)).unwrap();
        assert!(!has_passed(&file), "the deadline was extended");
        std::fs::rename(&fence.path, dir.path().join("moved")).unwrap();
        fence.set(Duration::ZERO).unwrap();
        std::thread::sleep(Duration::from_millis(30));
        let other = Fence::open(dir.path()).unwrap();
        other.set(Duration::from_secs(100)).unwrap();
        assert!(has_passed(&file), "another agent at the same path does not extend this lease");
    }
}
