//! A spare process: it executes a rank's program, has opened a GPU, and waits to become a rank on this GPU.

use super::process::RankProcess;
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

/// How long to wait for the end of a spare whose GPU a new process needs.
const END_TIMEOUT: Duration = Duration::from_secs(3);

/// A process started as `rank --spare GPU`. It is killed when this value is dropped, and ends by itself when its parent
/// ends, because its standard input is then closed.
#[derive(Debug)]
pub struct Spare {
    /// `None` after the spare has become a rank or was killed.
    process: Option<RankProcess>,
    /// The GPU and all GPUs that the process sees.
    pub(super) gpu: RankGpu,
    environment: Vec<(OsString, OsString)>,
    program_version: (u64, u64, i64, i64),
}

impl Spare {
    /// Starts `program`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(program: &Path, gpu: &RankGpu) -> io::Result<Self> {
        let environment = registry::device_of(Some(gpu), Device::Auto).backend.environment(Some(gpu))?;
        let program_version = program_version(program)?;
        let mut command = Command::new(program);
        command
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .args(["rank", "--spare", &serde_json::to_string(gpu)?])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = RankProcess::spawn(0, &mut command)?;
        Ok(Self { process: Some(process), gpu: gpu.clone(), environment, program_version })
    }

    pub fn is_alive(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| process.poll().is_none())
    }

    /// Whether the spare is alive, and has the same program and additional environment variables as a new process.
    pub(super) fn is_usable_as(&mut self, program: &Path, environment: &[(OsString, OsString)]) -> bool {
        self.is_alive()
            && self.environment == environment
            && program_version(program).is_ok_and(|version| version == self.program_version)
    }

    /// Kills the process, and waits for its end.
    pub(super) fn end(mut self) {
        if let Some(process) = self.process.take() {
            kill_and_wait(process);
        }
    }

    /// The process, which becomes `rank` when the path of a configuration is written to it.
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

/// Kills a process, and waits for its end in a separate thread, because closing a GPU may take a second. The receiver
/// is disconnected when the process has ended.
fn kill(mut process: RankProcess) -> Receiver<()> {
    process.signal(Signal::KILL);
    let (sender, receiver) = channel();
    // If no thread can be started, the process stays a zombie until this process ends.
    let _ = thread::Builder::new().name("spare".into()).spawn(move || {
        process.kill_and_wait();
        drop(sender);
    });
    receiver
}

/// Kills a process, and waits until it no longer uses its GPU, but at most for [`END_TIMEOUT`].
pub(super) fn kill_and_wait(process: RankProcess) {
    let _ = kill(process).recv_timeout(END_TIMEOUT);
}

/// Identifies the version of an executable: device, inode and modification time.
fn program_version(program: &Path) -> io::Result<(u64, u64, i64, i64)> {
    fs::metadata(program).map(|file| (file.dev(), file.ino(), file.mtime(), file.mtime_nsec()))
}
