//! Processes according to `/proc`; see proc_pid_stat(5).

use std::{fs, path::Path};

/// The used fields of `/proc/<pid>/stat`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stat {
    /// `R`, `S`, `D`, `T`, `Z`, ...
    pub(super) state: char,
    pub(super) group: i32,
    /// Start time in clock ticks after boot.
    pub(super) start_time: u64,
    /// CPU time of all threads in clock ticks.
    pub(super) cpu_ticks: u64,
    pub(super) resident_pages: u64,
}

impl Stat {
    /// Whether the process has ended. It may still be a zombie.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Whether the process is suspended by a signal or a debugger.
    pub(super) fn is_suspended(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }
}

/// Reads `/proc/<pid>/stat`. `None` if there is no such process.
pub(super) fn stat(pid: i32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses, which may contain any characters.
    let mut fields = text[text.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let group = fields.nth(1)?.parse().ok()?;
    // Fields 14, 15, 22 and 24 of proc_pid_stat(5).
    let mut number = |skipped: usize| fields.nth(skipped)?.parse::<u64>().ok();
    let (user, system) = (number(8)?, number(0)?);
    let start_time = number(6)?;
    let resident_pages = number(1)?;
    Some(Stat { state, group, start_time, cpu_ticks: user + system, resident_pages })
}

/// All visible processes of this machine.
pub(super) fn all() -> impl Iterator<Item = (i32, Stat)> {
    pids().filter_map(|pid| Some((pid, stat(pid)?)))
}

/// The leader of a process group that was started with the arguments `rank <config_path>`.
pub(super) fn find_rank(config_path: &Path) -> Option<(i32, Stat)> {
    let path = config_path.as_os_str().as_encoded_bytes();
    pids().find_map(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let arguments: Vec<_> = line.split(|b| *b == 0).collect();
        arguments.windows(2).any(|pair| pair == [&b"rank"[..], path]).then_some(())?;
        // Excludes a forked child of the rank, which has the same arguments until it executes another program.
        stat(pid).filter(|s| s.group == pid).map(|s| (pid, s))
    })
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}
