//! A spare process: a rank's program that has opened a GPU, and waits until it becomes a rank there.

use super::process::{RankProcess, UnixProcessGroup};
use lockstep_engine::registry;
use lockstep_host::gpu::RankGpu;
use lockstep_protocol::spec::Device;
use rustix::process::Signal;
use std::{
    ffi::OsString,
    fs, io,
    os::unix::fs::MetadataExt,
    path::Path,
    process::{Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

/// Time limit for the end of a spare whose GPU a new process needs.
const END_WITHIN: Duration = Duration::from_secs(3);

/// A process that was started as `rank --spare GPU`. It ends when this is dropped, or when the process that started it
/// ends, because its standard input is then closed.
#[derive(Debug)]
pub struct Spare {
    /// `None` after it has become a rank.
    process: Option<RankProcess>,
    gpu: RankGpu,
    environment: Vec<(OsString, OsString)>,
    version: (u64, u64, i64, i64),
}

impl Spare {
    /// Starts `program`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(program: &Path, gpu: &RankGpu) -> io::Result<Self> {
        let environment = registry::device_of(Some(gpu), Device::Auto).backend.environment(Some(gpu))?;
        let version = version(program)?;
        let mut command = Command::new(program);
        command
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .args(["rank", "--spare", &serde_json::to_string(gpu)?])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = RankProcess::spawn(0, &mut command, UnixProcessGroup::Own)?;
        Ok(Self { process: Some(process), gpu: gpu.clone(), environment, version })
    }

    /// The GPU, as its process sees it.
    pub(super) fn gpu(&self) -> &RankGpu {
        &self.gpu
    }

    /// Whether the process is running.
    pub fn is_alive(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| process.poll().is_none())
    }

    /// Whether a new process of `program` with these additional variables would be like this one.
    pub(super) fn is_like(&mut self, program: &Path, environment: &[(OsString, OsString)]) -> bool {
        self.is_alive()
            && self.environment == environment
            && version(program).is_ok_and(|version| version == self.version)
    }

    /// Kills the process, and waits for its end.
    pub(super) fn end(mut self) {
        if let Some(process) = self.process.take() {
            kill_and_wait(process);
        }
    }

    /// The process, which becomes that of `rank` when it is told the path of a configuration.
    pub(super) fn into_process(mut self, rank: u32) -> Option<RankProcess> {
        let mut process = self.process.take()?;
        process.rank = rank;
        Some(process)
    }

    #[cfg(test)]
    pub(super) fn process(&mut self) -> &mut RankProcess {
        self.process.as_mut().unwrap()
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            kill(process);
        }
    }
}

/// Kills a process, and waits for its end on a thread of its own: a driver may take a second to close a GPU. The
/// receiver is disconnected at the end.
fn kill(mut process: RankProcess) -> Receiver<()> {
    process.signal(Signal::KILL);
    let (ended, end) = channel();
    // Without a thread the process stays in the table of processes until this one ends.
    let _ = thread::Builder::new().name("spare".into()).spawn(move || {
        process.kill_and_wait();
        drop(ended);
    });
    end
}

/// Kills a process, and waits until it no longer uses its GPU, but at most for [`END_WITHIN`].
pub(super) fn kill_and_wait(process: RankProcess) {
    let _ = kill(process).recv_timeout(END_WITHIN);
}

/// What differs between two versions of a program's file.
fn version(program: &Path) -> io::Result<(u64, u64, i64, i64)> {
    fs::metadata(program).map(|file| (file.dev(), file.ino(), file.mtime(), file.mtime_nsec()))
}
