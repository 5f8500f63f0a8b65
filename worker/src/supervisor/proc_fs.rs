//! Processes as the kernel describes them in `/proc`; see proc_pid_stat(5).

use std::{fs, path::Path};

/// The fields of one process that are used.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stat {
    /// `R`, `S`, `D`, `T`, `Z`, ...
    pub(super) state: char,
    /// Its process group.
    pub(super) group: i32,
    /// Clock ticks after boot.
    pub(super) start_time: u64,
    /// Clock ticks that all its threads have run.
    pub(super) cpu_ticks: u64,
    pub(super) resident_pages: u64,
}

impl Stat {
    /// It has ended; somebody has yet to wait for it.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Suspended by a signal or a debugger.
    pub(super) fn is_suspended(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }
}

/// Reads `/proc/<pid>/stat`; `None` when there is no such process.
pub(super) fn stat(pid: i32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses, which may hold anything.
    let mut fields = text[text.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let group = fields.nth(1)?.parse().ok()?;
    let mut number = |skipped: usize| fields.nth(skipped)?.parse::<u64>().ok();
    let (user, system) = (number(8)?, number(0)?);
    let start_time = number(6)?;
    let resident_pages = number(1)?;
    Some(Stat { state, group, start_time, cpu_ticks: user + system, resident_pages })
}

/// All processes of this machine that can be seen.
pub(super) fn all() -> impl Iterator<Item = (i32, Stat)> {
    pids().filter_map(|pid| Some((pid, stat(pid)?)))
}

/// The leader of a process group that was started with `rank <config_path>` among its arguments.
pub(super) fn find_rank(config_path: &Path) -> Option<(i32, Stat)> {
    let wanted = config_path.as_os_str().as_encoded_bytes();
    pids().find_map(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let arguments: Vec<_> = line.split(|b| *b == 0).collect();
        arguments.windows(2).any(|pair| pair == [&b"rank"[..], wanted]).then_some(())?;
        // Not a child of it that has not become another program yet.
        stat(pid).filter(|s| s.group == pid).map(|s| (pid, s))
    })
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}
