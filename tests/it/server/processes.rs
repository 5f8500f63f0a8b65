//! The processes and the folder of a test. When the test ends, the processes are killed and the folder is deleted.

use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Child,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// A live process of the program under test.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) args: Vec<String>,
}

impl Process {
    /// `serve`, `agent`, `rank`.
    pub(crate) fn command(&self) -> &str {
        self.args.get(1).map_or("", String::as_str)
    }

    /// The value after an option such as `--rank`.
    pub(crate) fn option(&self, name: &str) -> Option<&str> {
        self.args.iter().skip_while(|a| *a != name).nth(1).map(String::as_str)
    }

    /// The parent of any process.
    pub(crate) fn parent_of(pid: i32) -> Option<i32> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
    }
}

/// Sends a signal. A process that has already ended is no error.
pub(crate) fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

/// A child process that is ended with SIGTERM when it is dropped.
pub(crate) struct Terminated(pub(crate) Child);

impl Drop for Terminated {
    fn drop(&mut self) {
        signal(self.0.id() as i32, Signal::TERM);
        let _ = self.0.wait();
    }
}

/// Processes with `folder` in their arguments. Every process that Lockstep starts has its data directory or a file
/// in it as an argument, so agents and ranks in any process group are found.
pub(crate) fn processes_of(folder: &Path) -> Vec<Process> {
    let folder = folder.to_string_lossy();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| {
            let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let args: Vec<_> = line
                .split(|b| *b == 0)
                .filter(|a| !a.is_empty())
                .map(|a| String::from_utf8_lossy(a).into_owned())
                .collect();
            let is_ours = args.first().is_some_and(|a| a.ends_with("lockstep"))
                && args.iter().any(|a| a.contains(&*folder));
            is_ours.then_some(Process { pid, args })
        })
        .collect()
}

/// A folder of a test. When it is dropped, every process with the folder in its arguments is killed.
pub(crate) struct Folder {
    /// Without symbolic links, as in the arguments of processes.
    path: PathBuf,
    _dir: TempDir,
}

impl Folder {
    pub(crate) fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("lockstep-it-").tempdir().expect("a temporary folder");
        Self { path: dir.path().canonicalize().expect("its path"), _dir: dir }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file and returns its path.
    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        fs::write(&path, content).expect("a file");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        // Repeats, as an agent may start a rank before it is killed.
        loop {
            let left = processes_of(self.path());
            left.iter().for_each(|p| signal(p.pid, Signal::KILL));
            if left.is_empty() || Instant::now() > deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if std::thread::panicking() {
            show_logs(self.path(), self.path());
        }
    }
}

/// The last lines of every log below `folder`, on standard error.
fn show_logs(root: &Path, folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut paths: Vec<_> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            show_logs(root, &path);
        } else if path.extension().is_some_and(|e| e == "log" || e == "stderr") {
            let text = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
            let lines: Vec<_> = text.lines().collect();
            let tail = &lines[lines.len().saturating_sub(40)..];
            let name = path.strip_prefix(root).unwrap_or(&path).display();
            eprintln!("--- {name}\n{}", tail.join("\n"));
        }
    }
}
