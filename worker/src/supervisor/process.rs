//! The process of a rank: signals, polling, and verification that it has ended.

use super::proc_fs::{self, stat};
use lockstep_host::{SECRET_VARIABLES, boot_id};
use lockstep_protocol::fault;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command},
};

/// How a rank process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Status(i32),
    Signal(i32),
    /// The end was not observed. The rank's records may tell more.
    Unseen,
}

/// The identity of a rank's process: the file `rank.<r>.pid`. Process ids are reused, but not together with the same
/// start time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) pid: i32,
    /// Start time in clock ticks after boot (`/proc/<pid>/stat`, field 22).
    pub(super) start_time: u64,
    pub(super) boot_id: String,
}

impl Identity {
    /// The identity of a process that is running or is a zombie.
    pub(super) fn of(pid: i32) -> Self {
        Self { pid, start_time: stat(pid).map_or(0, |s| s.start_time), boot_id: boot_id() }
    }
}

/// A rank process, started by this process or by an earlier supervisor. It has a process group of its own: Ctrl-C in the
/// parent's terminal does not reach it, and processes that it starts end with it.
#[derive(Debug)]
pub struct RankProcess {
    pub(super) rank: u32,
    pub(super) identity: Identity,
    /// `None` if an earlier supervisor started the process.
    child: Option<Child>,
    exit: Option<Exit>,
}

impl RankProcess {
    /// Starts `command` as the process of `rank`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn spawn(rank: u32, command: &mut Command) -> io::Result<Self> {
        command.process_group(0);
        for name in SECRET_VARIABLES {
            command.env_remove(name);
        }
        let child = command.spawn()?;
        let identity = Identity::of(child.id().cast_signed());
        Ok(Self { rank, identity, child: Some(child), exit: None })
    }

    /// Adopts a process that an earlier supervisor started. `identity` is `None` if no process was found, so the rank
    /// has ended.
    pub(super) fn from_identity(rank: u32, identity: Option<Identity>) -> Self {
        let exit = identity.is_none().then_some(Exit::Unseen);
        let identity = identity.unwrap_or(Identity { pid: 0, start_time: 0, boot_id: String::new() });
        Self { rank, identity, child: None, exit }
    }

    /// Writes `bytes` to the standard input of the process, and closes the standard input.
    ///
    /// # Errors
    /// The process has closed its standard input, or its command does not pipe it.
    pub(super) fn write_to_stdin(&mut self, bytes: &[u8]) -> io::Result<()> {
        let stdin = self.child.as_mut().and_then(|child| child.stdin.take());
        stdin.ok_or(io::ErrorKind::BrokenPipe)?.write_all(bytes)
    }

    /// How the process ended, if it has ended. The result does not change afterwards.
    pub fn poll(&mut self) -> Option<Exit> {
        if self.exit.is_none() {
            self.exit = match self.child.as_mut().map(Child::try_wait) {
                Some(Ok(None)) => None,
                Some(Ok(Some(status))) => Some(match (status.code(), status.signal()) {
                    (Some(code), _) => Exit::Status(code),
                    (None, Some(signal)) => Exit::Signal(signal),
                    (None, None) => Exit::Unseen,
                }),
                Some(Err(_)) | None => (!self.is_running()).then_some(Exit::Unseen),
            };
        }
        self.exit
    }

    /// Sends a signal to the process group. Does nothing if the process has ended.
    pub fn signal(&mut self, signal: Signal) {
        if self.poll().is_none() {
            self.send(signal);
        }
    }

    /// Kills the process, and waits for its end if this process has started it.
    pub(super) fn kill_and_wait(&mut self) {
        self.signal(Signal::KILL);
        if let Some(child) = self.child.as_mut().filter(|_| self.exit.is_none()) {
            // Fails if the process was already reaped, so it has ended.
            let _ = child.wait();
        }
    }

    /// The ids and states of the rank's remaining processes: the process itself, and all of its group. States are
    /// those of proc_pid_stat(5), such as `D` for blocked in the kernel.
    pub fn remaining_processes(&self) -> Vec<(i32, char)> {
        let Identity { pid: rank_pid, start_time, .. } = self.identity;
        // The id of a process group is not reused while the group has members. So if the process id has been reused, no
        // process of this group is left.
        if rank_pid == 0 || stat(rank_pid).is_some_and(|s| s.start_time != start_time) {
            return Vec::new();
        }
        proc_fs::all()
            .filter(|(pid, s)| (*pid == rank_pid || s.group == rank_pid) && !s.has_ended())
            .map(|(pid, s)| (pid, s.state))
            .collect()
    }

    /// Kills the remaining processes of the rank. Returns true if none were left.
    pub fn kill_remaining(&mut self) -> bool {
        if self.remaining_processes().is_empty() {
            return true;
        }
        self.send(Signal::KILL);
        false
    }

    /// Whether the process is suspended (SIGSTOP, a debugger) rather than slow.
    pub fn is_suspended(&self) -> bool {
        self.exit.is_none() && stat(self.identity.pid).is_some_and(|s| s.is_suspended())
    }

    fn is_running(&self) -> bool {
        stat(self.identity.pid).is_some_and(|s| s.start_time == self.identity.start_time && !s.has_ended())
    }

    /// Sends a signal, and ignores errors, because the process may just have ended, which the next poll shows.
    fn send(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.identity.pid) else { return };
        if fault::point("rank.signal").is_ok() {
            let _ = kill_process_group(pid, signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_a_reused_id_and_its_group_are_not_killed() {
        let mut command = Command::new("sleep");
        let mut stranger = RankProcess::spawn(0, command.arg("1000")).expect("sleep is installed");
        let Identity { pid, start_time, boot_id } = &stranger.identity;
        let before = Identity { pid: *pid, start_time: start_time - 1, boot_id: boot_id.clone() };
        let mut rank = RankProcess::from_identity(0, Some(before));
        assert!(rank.kill_remaining(), "{:?}", rank.remaining_processes());
        assert_eq!((stranger.poll(), stranger.remaining_processes().len()), (None, 1));
        stranger.kill_and_wait();
    }
}
