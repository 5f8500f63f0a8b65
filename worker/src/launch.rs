//! Rank processes: started in a group of their own, found again by whoever comes back, ended for sure.
//!
//! A rank outlives its agent. What identifies it is on disk beside its records: process id, the time
//! it was started (a process id is used again, the pair is not) and the boot it belongs to.

use crate::{
    host::{boot_id, write_private, write_whole},
    rank::RankConfig,
};
use lockstep_protocol::fault;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// How a rank process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// With this status.
    Status(i32),
    /// Killed by this signal.
    Signal(i32),
    /// While no agent was there to see it; what it recorded says more.
    Unseen,
}

/// A rank process, ours or one that an earlier agent started.
#[derive(Debug)]
pub struct RankProcess {
    rank: u32,
    mark: Mark,
    /// Absent when an earlier agent started it.
    child: Option<Child>,
    exit: Option<Exit>,
}

/// Which process a rank is: the file `rank.<r>.pid`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Mark {
    pid: i32,
    /// Clock ticks after boot (`/proc/<pid>/stat`, field 22).
    start_time: u64,
    boot_id: String,
}

/// The file of `rank` with `extension` in an attempt's folder.
pub fn rank_file(attempt_dir: &Path, rank: u32, extension: &str) -> PathBuf {
    attempt_dir.join(format!("rank.{rank}.{extension}"))
}

impl RankProcess {
    /// Writes `rank.<r>.json` and starts the rank on it; what it prints goes to `rank.<r>.stderr`.
    ///
    /// # Errors
    /// The sentence names the file or program that could not be used.
    pub fn start(program: &Path, config: &RankConfig) -> io::Result<Self> {
        let dir = config.attempt_dir();
        let named = |path: &Path, e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        let config_path = rank_file(&dir, config.rank, "json");
        write_private(&config_path, &serde_json::to_vec_pretty(config)?)?;
        let stderr_path = rank_file(&dir, config.rank, "stderr");
        let stderr = File::create(&stderr_path).map_err(|e| named(&stderr_path, e))?;
        let stdout = stderr.try_clone()?;
        let attempt = &config.start.attempt;
        let mut command = Command::new(program);
        command.envs(config.device().backend.environment(config.gpu.as_ref())?);
        let child = command
            .arg("rank")
            .arg(&config_path)
            .args(["--job", attempt.job.as_str()])
            .args(["--attempt", &attempt.attempt.to_string()])
            .args(["--rank", &config.rank.to_string()])
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            // Its own group: a Ctrl-C meant for the agent is not meant for it.
            .process_group(0)
            .spawn()
            .map_err(|e| named(program, e))?;
        let pid = child.id().cast_signed();
        // A process that has ended already is still there until we have waited for it.
        let start_time = stat(pid).map_or(0, |s| s.start_time);
        let mark = Mark { pid, start_time, boot_id: boot_id() };
        let mut process = Self { rank: config.rank, mark, child: Some(child), exit: None };
        let mark_path = rank_file(&dir, config.rank, "pid");
        if let Err(error) = write_whole(&mark_path, &serde_json::to_vec(&process.mark)?) {
            process.signal(Signal::KILL);
            process.poll();
            return Err(error);
        }
        Ok(process)
    }

    /// Takes over a rank that an earlier agent started. It may be gone: [`RankProcess::poll`] says.
    pub fn adopt(attempt_dir: &Path, rank: u32) -> Self {
        let recorded = fs::read(rank_file(attempt_dir, rank, "pid"))
            .ok()
            .and_then(|text| serde_json::from_slice::<Mark>(&text).ok())
            .filter(|mark| mark.boot_id == boot_id());
        // The agent may have died between the start and the writing.
        let mark = recorded.or_else(|| find_by_argument(&rank_file(attempt_dir, rank, "json")));
        let exit = mark.is_none().then_some(Exit::Unseen);
        let mark = mark.unwrap_or(Mark { pid: 0, start_time: 0, boot_id: String::new() });
        Self { rank, mark, child: None, exit }
    }

    /// Its rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How it ended, when it has. Once gone it stays gone.
    pub fn poll(&mut self) -> Option<Exit> {
        if self.exit.is_none() {
            self.exit = match &mut self.child {
                Some(child) => match child.try_wait() {
                    Ok(None) => None,
                    Ok(Some(status)) => Some(match (status.code(), status.signal()) {
                        (Some(code), _) => Exit::Status(code),
                        (None, Some(signal)) => Exit::Signal(signal),
                        (None, None) => Exit::Unseen,
                    }),
                    Err(_) => (!self.is_there()).then_some(Exit::Unseen),
                },
                None => (!self.is_there()).then_some(Exit::Unseen),
            };
        }
        self.exit
    }

    /// Signals its process group, if it is still the process we mean.
    pub fn signal(&mut self, signal: Signal) {
        if self.poll().is_none()
            && let Some(group) = Pid::from_raw(self.mark.pid)
        {
            send(group, signal);
        }
    }

    /// Processes that are left of it: itself, or others of its group that it started. Each with its state as
    /// proc_pid_stat(5) names it; `D` is one that the kernel does not let go.
    pub fn remains(&self) -> Vec<(i32, char)> {
        if self.mark.pid == 0 {
            return Vec::new();
        }
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
            .filter_map(|pid| Some((pid, stat(pid)?)))
            // A later process may have its number: that one would be younger than its own group's leader.
            .filter(|(pid, s)| {
                let its_group =
                    s.group == self.mark.pid && (*pid != s.group || s.start_time == self.mark.start_time);
                its_group && !matches!(s.state, 'Z' | 'X')
            })
            .map(|(pid, s)| (pid, s.state))
            .collect()
    }

    /// Kills what is left of its group when it has gone itself; true when nothing is left.
    pub fn sweep(&mut self) -> bool {
        if self.remains().is_empty() {
            return true;
        }
        if let Some(group) = Pid::from_raw(self.mark.pid) {
            send(group, Signal::KILL);
        }
        false
    }

    /// Whether it is suspended (SIGSTOP, a debugger) rather than slow.
    pub fn is_suspended(&self) -> bool {
        self.exit.is_none() && stat(self.mark.pid).is_some_and(|s| matches!(s.state, 'T' | 't'))
    }

    fn is_there(&self) -> bool {
        stat(self.mark.pid)
            .is_some_and(|s| s.start_time == self.mark.start_time && !matches!(s.state, 'Z' | 'X'))
    }
}

/// Signals a group. It may end at this very moment: the next look at it tells.
fn send(group: Pid, signal: Signal) {
    if fault::point("rank.signal").is_ok() {
        let _ = kill_process_group(group, signal);
    }
}

struct Stat {
    state: char,
    group: i32,
    start_time: u64,
}

/// Reads `/proc/<pid>/stat`; see proc_pid_stat(5).
fn stat(pid: i32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses, which may hold anything.
    let mut fields = text[text.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let group = fields.nth(1)?.parse().ok()?;
    let start_time = fields.nth(16)?.parse().ok()?;
    Some(Stat { state, group, start_time })
}

/// The process that was started with this rank file as an argument.
fn find_by_argument(config_path: &Path) -> Option<Mark> {
    let wanted = config_path.as_os_str().as_encoded_bytes();
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let arguments: Vec<_> = line.split(|b| *b == 0).collect();
        arguments.windows(2).any(|pair| pair == [&b"rank"[..], wanted]).then_some(())?;
        // Not a child of it that has not become another program yet.
        let stat = stat(pid).filter(|s| s.group == pid)?;
        Some(Mark { pid, start_time: stat.start_time, boot_id: boot_id() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{engine::toy, gpu::RankGpu};
    use lockstep_protocol::{
        agent::{AttemptRef, StartAttempt},
        job::JobId,
        spec::JobSpec,
    };
    use std::time::{Duration, Instant};

    /// A program that takes a rank's place: `rank <file> --job ...` as shell script.
    fn program(dir: &Path, script: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = dir.join("program");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn config(job_dir: &Path) -> RankConfig {
        let start = StartAttempt {
            attempt: AttemptRef { job: JobId::generate(), attempt: 1, fencing_token: 1 },
            spec: JobSpec::default(),
            dataset_path: "/none".into(),
            world_size: 1,
            ranks: vec![(0, 0)],
            master_addr: "127.0.0.1".into(),
            master_port: 1,
            secret: String::new(),
            job_dir: None,
            resume: None,
        };
        let config = RankConfig {
            start,
            rank: 0,
            slot: 0,
            local_ranks: 1,
            threads: 1,
            gpu: None,
            lease: None,
            job_dir: job_dir.into(),
        };
        fs::create_dir_all(config.attempt_dir()).unwrap();
        config
    }

    fn wait(process: &mut RankProcess) -> Exit {
        let began = Instant::now();
        loop {
            if let Some(exit) = process.poll() {
                return exit;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "it never ended");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn an_exit_status_and_what_was_printed_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let mut process =
            RankProcess::start(&program(dir.path(), "echo out; echo err >&2; exit 7"), &config).unwrap();
        assert_eq!(wait(&mut process), Exit::Status(7));
        let printed = fs::read_to_string(rank_file(&config.attempt_dir(), 0, "stderr")).unwrap();
        assert!(printed.contains("out") && printed.contains("err"), "{printed}");
        // Gone means gone for whoever comes later, too.
        assert_eq!(RankProcess::adopt(&config.attempt_dir(), 0).poll(), Some(Exit::Unseen));
    }

    #[test]
    fn a_rank_on_a_gpu_sees_those_of_its_attempt_and_finds_libraries() {
        let dir = tempfile::tempdir().unwrap();
        let script = program(dir.path(), "echo \"$CUDA_VISIBLE_DEVICES|$LD_LIBRARY_PATH|$HOME\"");
        let printed = |config: &RankConfig| {
            let mut process = RankProcess::start(&script, config).unwrap();
            assert_eq!(wait(&mut process), Exit::Status(0));
            fs::read_to_string(rank_file(&config.attempt_dir(), 0, "stderr")).unwrap()
        };
        let mut config = config(dir.path());
        config.gpu = Some(RankGpu { ordinal: 0, visible: vec!["GPU-b".into(), "GPU-a".into()] });
        let said = printed(&config);
        assert!(said.starts_with("GPU-b,GPU-a|"), "{said}");
        // The rest of the environment is the launcher's.
        let home = std::env::var("HOME").unwrap_or_default();
        assert!(said.trim_end().ends_with(&format!("|{home}")), "{said}");
        // A job for CPUs on the same machine is none of the GPUs' business.
        config.start.spec.parallel.device = lockstep_protocol::spec::Device::Cpu;
        assert!(!printed(&config).contains("GPU-b"));
    }

    #[test]
    fn a_rank_is_started_with_what_its_backend_wants() {
        let dir = tempfile::tempdir().unwrap();
        let script = program(dir.path(), &format!("echo \"${}\"", toy::VISIBLE));
        let mut config = config(dir.path());
        let device = format!("{}a", toy::DEVICE);
        config.gpu = Some(RankGpu { ordinal: 0, visible: vec![device.clone()] });
        let mut process = RankProcess::start(&script, &config).unwrap();
        assert_eq!(wait(&mut process), Exit::Status(0));
        let printed = fs::read_to_string(rank_file(&config.attempt_dir(), 0, "stderr")).unwrap();
        assert_eq!(printed.trim_end(), device);
    }

    #[test]
    fn a_second_agent_finds_it_with_and_without_its_pid_file_and_ends_it() {
        for lose_mark in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let config = config(dir.path());
            let mut started =
                RankProcess::start(&program(dir.path(), "while :; do :; done"), &config).unwrap();
            if lose_mark {
                fs::remove_file(rank_file(&config.attempt_dir(), 0, "pid")).unwrap();
            }
            let began = Instant::now();
            let mut adopted = RankProcess::adopt(&config.attempt_dir(), 0);
            // Its arguments show up a moment after it was started.
            while lose_mark && adopted.poll().is_some() && began.elapsed() < Duration::from_secs(20) {
                adopted = RankProcess::adopt(&config.attempt_dir(), 0);
            }
            assert_eq!(adopted.poll(), None);
            assert!(!adopted.is_suspended());
            adopted.signal(Signal::STOP);
            let began = Instant::now();
            while !adopted.is_suspended() {
                assert!(began.elapsed() < Duration::from_secs(20));
                std::thread::yield_now();
            }
            adopted.signal(Signal::KILL);
            assert_eq!(wait(&mut started), Exit::Signal(9));
            assert_eq!(wait(&mut adopted), Exit::Unseen);
        }
    }

    #[test]
    fn a_process_with_the_same_number_is_not_taken_for_the_rank() {
        let dir = tempfile::tempdir().unwrap();
        let own = stat(std::process::id().cast_signed()).unwrap();
        let mark = Mark {
            pid: std::process::id().cast_signed(),
            start_time: own.start_time + 1,
            boot_id: boot_id(),
        };
        fs::write(rank_file(dir.path(), 0, "pid"), serde_json::to_vec(&mark).unwrap()).unwrap();
        let mut process = RankProcess::adopt(dir.path(), 0);
        // Would end this test if it were.
        process.signal(Signal::KILL);
        assert_eq!(process.poll(), Some(Exit::Unseen));
    }
}
