//! Short-lived rank processes of this machine that measure something together and then end: those of
//! `doctor` and of `bench`.

use crate::{
    comm::{
        ProcessGroup, SingleRank,
        rendezvous::{Meeting, RendezvousError, Store, free_port},
        ring::Ring,
    },
    gpu::{RankGpu, devices::Gpu},
    host::own_program,
};
use serde::{Deserialize, Serialize};
use std::{
    ffi::OsString,
    io::{self, Read},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Carries a member's part to its process; not an argument, because others can read those.
const VARIABLE: &str = "LOCKSTEP_TEAM_MEMBER";
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// One rank of a team.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub rank: u32,
    pub world_size: u32,
    /// On 127.0.0.1.
    pub port: u16,
    pub secret: String,
    /// Absent: it computes on CPU cores.
    pub gpu: Option<RankGpu>,
}

/// A member among the others.
pub struct Met {
    pub comm: Arc<dyn ProcessGroup>,
    /// Absent in a team of one.
    pub store: Option<Arc<Store>>,
}

impl Member {
    /// This process's part, when it is one of a team.
    ///
    /// # Errors
    /// The variable that says so holds something else.
    pub fn of_this_process() -> Result<Option<Self>, String> {
        let Ok(part) = std::env::var(VARIABLE) else { return Ok(None) };
        serde_json::from_str(&part).map(Some).map_err(|e| format!("{VARIABLE}: {e}"))
    }

    /// Meets the others.
    ///
    /// # Errors
    /// They do not come within `patience`.
    pub fn meet(&self, patience: Duration) -> Result<Met, RendezvousError> {
        if self.world_size == 1 {
            return Ok(Met { comm: Arc::new(SingleRank), store: None });
        }
        let store = Store::join(Meeting {
            addr: "127.0.0.1".into(),
            port: self.port,
            secret: self.secret.clone().into_bytes(),
            rank: self.rank,
            world_size: self.world_size,
            timeout: patience,
            stop: Arc::default(),
        })?;
        let ring = Ring::connect(&store, patience)?;
        Ok(Met { comm: ring, store: Some(Arc::new(store)) })
    }
}

/// A team of `world_size`, on the first of `gpus` or, when there are none, on CPU cores.
///
/// # Errors
/// No port is free.
pub fn members(world_size: u32, gpus: &[Gpu]) -> io::Result<Vec<Member>> {
    let port = free_port("127.0.0.1")?;
    let secret = uuid::Uuid::new_v4().simple().to_string();
    let visible: Vec<_> = gpus.iter().take(world_size as usize).map(|gpu| gpu.uuid.clone()).collect();
    let member = |rank: u32| Member {
        rank,
        world_size,
        port,
        secret: secret.clone(),
        gpu: (!visible.is_empty()).then(|| RankGpu { ordinal: rank.cast_signed(), visible: visible.clone() }),
    };
    Ok((0..world_size).map(member).collect())
}

/// Runs this very program with `arguments`, a process a member, and gives what rank 0 printed.
///
/// # Errors
/// The first member that fails, in its own words; the others are ended. Or `limit` has passed.
pub fn run(arguments: &[OsString], members: &[Member], limit: Duration) -> Result<Vec<u8>, String> {
    let mut team = Team { processes: Vec::new() };
    for member in members {
        let rank = member.rank;
        let process = start(arguments, member).map_err(|e| format!("rank {rank} cannot be started: {e}"))?;
        team.processes.push(process);
    }
    let began = Instant::now();
    loop {
        let mut running = false;
        for (rank, process) in team.processes.iter_mut().enumerate() {
            match process.child.try_wait().map_err(|e| e.to_string())? {
                None => running = true,
                Some(status) if status.success() => {}
                Some(status) => {
                    let words = process.errors.take().map_or_else(Vec::new, joined);
                    let words = String::from_utf8_lossy(&words).trim().to_owned();
                    let words = if words.is_empty() { status.to_string() } else { words };
                    return Err(format!("rank {rank}: {words}"));
                }
            }
        }
        if !running {
            break;
        }
        if began.elapsed() > limit {
            return Err(format!("not done after {:.0} s", limit.as_secs_f64()));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let first = team.processes.first_mut().and_then(|process| process.printed.take());
    Ok(first.map_or_else(Vec::new, joined))
}

/// A member's process, and what it prints meanwhile.
struct Process {
    child: Child,
    printed: Option<JoinHandle<Vec<u8>>>,
    errors: Option<JoinHandle<Vec<u8>>>,
}

/// Whatever ends this, ends its processes.
struct Team {
    processes: Vec<Process>,
}

impl Drop for Team {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // Most have ended by themselves.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

fn start(arguments: &[OsString], member: &Member) -> io::Result<Process> {
    let mut command = Command::new(own_program()?);
    command
        .args(arguments)
        .env(VARIABLE, serde_json::to_string(member)?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(gpu) = &member.gpu {
        command.envs(gpu.environment()?);
    }
    let mut child = command.spawn()?;
    let printed = child.stdout.take().map(read).transpose()?;
    let errors = child.stderr.take().map(read).transpose()?;
    Ok(Process { child, printed, errors })
}

fn read(mut from: impl Read + Send + 'static) -> io::Result<JoinHandle<Vec<u8>>> {
    std::thread::Builder::new().name("output".into()).spawn(move || {
        let mut bytes = Vec::new();
        // What came before a failure is worth having.
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}

fn joined(thread: JoinHandle<Vec<u8>>) -> Vec<u8> {
    thread.join().unwrap_or_default()
}
