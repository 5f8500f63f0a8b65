//! One rank's process: signals, polling, and making sure that it has ended.

use super::proc_fs::{self, stat};
use lockstep_host::{SECRETS, boot_id};
use lockstep_protocol::fault;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde::{Deserialize, Serialize};
use std::{
    fmt, io,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, ChildStderr, ChildStdout, Command, ExitStatus},
};

/// How a rank process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// With this status.
    Status(i32),
    /// By this signal.
    Signal(i32),
    /// Unobserved; its records say more.
    Unseen,
}

/// As the standard library displays it: `exit status: 1`, `signal: 9 (SIGKILL)`.
impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Status(status) => write!(f, "{}", ExitStatus::from_raw(status << 8)),
            Exit::Signal(signal) => write!(f, "{}", ExitStatus::from_raw(*signal)),
            Exit::Unseen => f.write_str("ended unseen"),
        }
    }
}

/// Which process group a rank's process is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnixProcessGroup {
    /// Its own: Ctrl-C in its parent's terminal does not reach it, and what it starts ends with it.
    Own,
    /// That of its parent: Ctrl-C ends both.
    Inherited,
}

/// Which process a rank is: the file `rank.<r>.pid`. A process id is used again, the pair with the start time is not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) pid: i32,
    /// Clock ticks after boot (`/proc/<pid>/stat`, field 22).
    pub(super) start_time: u64,
    pub(super) boot_id: String,
}

impl Identity {
    /// The identity of a process that runs, or has ended and was not waited for.
    pub(super) fn of(pid: i32) -> Self {
        Self { pid, start_time: stat(pid).map_or(0, |s| s.start_time), boot_id: boot_id() }
    }
}

/// A rank process, started by this process or by an earlier one.
#[derive(Debug)]
pub struct RankProcess {
    rank: u32,
    group: UnixProcessGroup,
    pub(super) identity: Identity,
    /// Absent when an earlier process started it.
    child: Option<Child>,
    exit: Option<Exit>,
}

impl RankProcess {
    /// Starts `command` as `rank`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn spawn(rank: u32, command: &mut Command, group: UnixProcessGroup) -> io::Result<Self> {
        if group == UnixProcessGroup::Own {
            command.process_group(0);
        }
        for name in SECRETS {
            command.env_remove(name);
        }
        let child = command.spawn()?;
        let identity = Identity::of(child.id().cast_signed());
        Ok(Self { rank, group, identity, child: Some(child), exit: None })
    }

    /// A process that an earlier one started in a group of its own; `None`: it cannot be found, so it has ended.
    pub(super) fn adopted(rank: u32, identity: Option<Identity>) -> Self {
        let exit = identity.is_none().then_some(Exit::Unseen);
        let identity = identity.unwrap_or(Identity { pid: 0, start_time: 0, boot_id: String::new() });
        Self { rank, group: UnixProcessGroup::Own, identity, child: None, exit }
    }

    /// Its rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// What it prints, where its command pipes that; once.
    pub fn take_output(&mut self) -> (Option<ChildStdout>, Option<ChildStderr>) {
        self.child.as_mut().map_or((None, None), |child| (child.stdout.take(), child.stderr.take()))
    }

    /// How it ended, when it has; from then on always the same.
    pub fn poll(&mut self) -> Option<Exit> {
        if self.exit.is_none() {
            self.exit = match self.child.as_mut().map(Child::try_wait) {
                Some(Ok(None)) => None,
                Some(Ok(Some(status))) => Some(match (status.code(), status.signal()) {
                    (Some(code), _) => Exit::Status(code),
                    (None, Some(signal)) => Exit::Signal(signal),
                    (None, None) => Exit::Unseen,
                }),
                Some(Err(_)) | None => (!self.is_there()).then_some(Exit::Unseen),
            };
        }
        self.exit
    }

    /// Signals it, and its process group where that is its own, if it is still the same process.
    pub fn signal(&mut self, signal: Signal) {
        if self.poll().is_none() {
            self.send(signal);
        }
    }

    /// Kills it and waits until it is gone, when this process has started it.
    pub(super) fn kill_and_wait(&mut self) {
        self.signal(Signal::KILL);
        if let Some(child) = self.child.as_mut().filter(|_| self.exit.is_none()) {
            // Another process has waited for it: it has ended all the same.
            let _ = child.wait();
        }
    }

    /// Processes that are left of it: itself, or others of its own group that it started. Each with its state as
    /// proc_pid_stat(5) names it; `D` is one that the kernel does not let go.
    pub fn remains(&self) -> Vec<(i32, char)> {
        let Identity { pid: own, start_time, .. } = self.identity;
        // While a group has members its number is not reused: a process that has the number now is unrelated, and so is its group.
        if own == 0 || stat(own).is_some_and(|s| s.start_time != start_time) {
            return Vec::new();
        }
        proc_fs::all()
            .filter(|(pid, s)| match self.group {
                _ if *pid == own => true,
                UnixProcessGroup::Own => s.group == own,
                UnixProcessGroup::Inherited => false,
            })
            .filter(|(_, s)| !s.has_ended())
            .map(|(pid, s)| (pid, s.state))
            .collect()
    }

    /// Kills what is left of its group when it has gone itself; true when nothing is left.
    pub fn sweep(&mut self) -> bool {
        if self.remains().is_empty() {
            return true;
        }
        self.send(Signal::KILL);
        false
    }

    /// Whether it is suspended (SIGSTOP, a debugger) rather than slow.
    pub fn is_suspended(&self) -> bool {
        self.exit.is_none() && stat(self.identity.pid).is_some_and(|s| s.is_suspended())
    }

    fn is_there(&self) -> bool {
        stat(self.identity.pid).is_some_and(|s| s.start_time == self.identity.start_time && !s.has_ended())
    }

    /// It may end at this very moment; the next poll shows it.
    fn send(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.identity.pid) else { return };
        if fault::point("rank.signal").is_ok() {
            let _ = match self.group {
                UnixProcessGroup::Own => kill_process_group(pid, signal),
                UnixProcessGroup::Inherited => kill_process(pid, signal),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_said_as_the_system_says_it() {
        assert_eq!(Exit::Status(7).to_string(), "exit status: 7");
        assert_eq!(Exit::Signal(9).to_string(), "signal: 9 (SIGKILL)");
    }

    #[test]
    fn killing_one_that_shares_our_process_group_spares_this_process() {
        let mut command = Command::new("sleep");
        let mut process =
            RankProcess::spawn(0, command.arg("1000"), UnixProcessGroup::Inherited).expect("sleep is there");
        assert_eq!((process.poll(), process.remains().len()), (None, 1));
        process.kill_and_wait();
        assert_eq!(process.poll(), Some(Exit::Signal(9)));
        assert!(process.sweep());
    }

    #[test]
    fn a_stranger_who_has_the_number_of_a_rank_is_spared_with_its_group() {
        let mut command = Command::new("sleep");
        let mut stranger =
            RankProcess::spawn(0, command.arg("1000"), UnixProcessGroup::Own).expect("sleep is there");
        let Identity { pid, start_time, boot_id } = &stranger.identity;
        let before = Identity { pid: *pid, start_time: start_time - 1, boot_id: boot_id.clone() };
        let mut rank = RankProcess::adopted(0, Some(before));
        assert!(rank.sweep(), "{:?}", rank.remains());
        assert_eq!((stranger.poll(), stranger.remains().len()), (None, 1));
        stranger.kill_and_wait();
    }
}
