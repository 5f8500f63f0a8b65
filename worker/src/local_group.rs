//! Short-lived rank processes of this machine that measure something together and then end: those of
//! `doctor` and of `bench`.

use crate::supervisor::{Exit, Orphans, Policy, Rank, RankGroup, RankProcess, UnixProcessGroup, supervise};
use lockstep_comm::{
    ProcessGroup, SingleRank,
    rendezvous::{RendezvousConfig, RendezvousError, Store, free_port},
    ring::Ring,
};
use lockstep_engine::registry;
use lockstep_host::{
    NCCL_INTERFACE,
    gpu::{RankGpu, devices::Gpu},
    own_program,
};
use lockstep_protocol::spec::Device;
use serde::{Deserialize, Serialize};
use std::{
    convert::Infallible,
    ffi::OsString,
    io::{self, Read},
    process::{Command, Stdio},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Carries a member's part to its process; not an argument, because others can read those.
const VARIABLE: &str = "LOCKSTEP_LOCAL_GROUP";

/// One rank of the group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub rank: u32,
    pub world_size: u32,
    /// Where rank 0 listens.
    #[serde(default = "loopback")]
    pub addr: String,
    pub port: u16,
    pub secret: String,
    /// Absent: it computes on CPU cores.
    pub gpu: Option<RankGpu>,
    /// For NCCL; absent: it chooses.
    #[serde(default)]
    pub interface: Option<String>,
}

fn loopback() -> String {
    "127.0.0.1".into()
}

/// A member among the others.
pub struct JoinedGroup {
    pub comm: Arc<dyn ProcessGroup>,
    /// Absent in a group of one.
    pub store: Option<Arc<Store>>,
}

impl Member {
    /// This process's part, when it is one of a group.
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
    pub fn meet(&self, patience: Duration) -> Result<JoinedGroup, RendezvousError> {
        if self.world_size == 1 {
            return Ok(JoinedGroup { comm: Arc::new(SingleRank), store: None });
        }
        let store = Store::join(RendezvousConfig {
            addr: self.addr.clone(),
            port: self.port,
            secret: self.secret.clone().into_bytes(),
            rank: self.rank,
            world_size: self.world_size,
            timeout: patience,
            stop: Arc::default(),
        })?;
        let ring = Ring::connect(&store, patience)?;
        Ok(JoinedGroup { comm: ring, store: Some(Arc::new(store)) })
    }
}

/// A group of `world_size`, on the first of `gpus` or, when there are none, on CPU cores.
///
/// # Errors
/// No port is free.
pub fn members(world_size: u32, gpus: &[Gpu]) -> io::Result<Vec<Member>> {
    let gpus: Vec<_> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    members_on(world_size, &gpus)
}

/// A group of `world_size`, on the first of `devices` (UUIDs of a [`Slot`](lockstep_protocol::agent::Slot)) or, when there are
/// none, on CPU cores.
///
/// # Errors
/// No port is free.
pub fn members_on(world_size: u32, devices: &[String]) -> io::Result<Vec<Member>> {
    let port = free_port("127.0.0.1")?;
    let secret = uuid::Uuid::new_v4().simple().to_string();
    let visible: Vec<_> = devices.iter().take(world_size as usize).cloned().collect();
    let member = |rank: u32| Member {
        rank,
        world_size,
        addr: loopback(),
        port,
        secret: secret.clone(),
        interface: None,
        gpu: (!visible.is_empty()).then(|| RankGpu { ordinal: rank.cast_signed(), visible: visible.clone() }),
    };
    Ok((0..world_size).map(member).collect())
}

/// Runs this very program with `arguments`, a process a member, and gives what rank 0 printed.
///
/// # Errors
/// The first member that fails, in its own words; the others are ended. Or `limit` has passed.
pub fn run(arguments: &[OsString], members: &[Member], limit: Duration) -> Result<Vec<u8>, String> {
    // Whatever ends this, ends its processes.
    let mut ranks = RankGroup::new(Orphans::Kill);
    let mut measuring = Measuring { outputs: Vec::new(), began: Instant::now(), limit };
    for member in members {
        let rank = member.rank;
        let (process, output) =
            start(arguments, member).map_err(|e| format!("rank {rank} cannot be started: {e}"))?;
        ranks.ranks.push(Rank::without_records(process, ()));
        measuring.outputs.push(output);
    }
    measuring.began = Instant::now();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.map_err(|e| e.to_string())?.block_on(supervise(&mut measuring, &mut ranks))?;
    let first = measuring.outputs.first_mut().and_then(|output| output.printed.take());
    Ok(first.map_or_else(Vec::new, joined))
}

/// Waits for members, and gives up with the first that fails.
struct Measuring {
    outputs: Vec<Output>,
    began: Instant,
    limit: Duration,
}

impl Policy for Measuring {
    type Records = ();
    type Order = Infallible;
    type Error = String;

    const POLL_EVERY: Duration = Duration::from_millis(5);

    async fn order(&mut self) -> Infallible {
        std::future::pending().await
    }

    fn obey(&mut self, order: Infallible, _ranks: &mut RankGroup<()>) {
        match order {}
    }

    fn observe(&mut self, ranks: &mut RankGroup<()>) -> Result<(), String> {
        for (end, output) in ranks.ends().zip(&mut self.outputs) {
            if let Some(exit) = end.exit.filter(|exit| *exit != Exit::Status(0)) {
                let words = output.errors.take().map_or_else(Vec::new, joined);
                let words = String::from_utf8_lossy(&words).trim().to_owned();
                let words = if words.is_empty() { exit.to_string() } else { words };
                return Err(format!("rank {}: {words}", end.rank));
            }
        }
        if !ranks.has_ended() && self.began.elapsed() > self.limit {
            return Err(format!("not done after {:.0} s", self.limit.as_secs_f64()));
        }
        Ok(())
    }

    /// A failure ends all of them at once: nothing of theirs is kept.
    fn decide(&mut self, _ranks: &mut RankGroup<()>) {}

    fn grace(&self, _ranks: &RankGroup<()>) -> Duration {
        Duration::ZERO
    }
}

/// What a member prints meanwhile.
struct Output {
    printed: Option<JoinHandle<Vec<u8>>>,
    errors: Option<JoinHandle<Vec<u8>>>,
}

fn start(arguments: &[OsString], member: &Member) -> io::Result<(RankProcess, Output)> {
    let mut command = Command::new(own_program()?);
    command
        .args(arguments)
        .env(VARIABLE, serde_json::to_string(member)?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let gpu = member.gpu.as_ref();
    command.envs(registry::device_of(gpu, Device::Auto).backend.environment(gpu)?);
    if let Some(interface) = &member.interface {
        // Without `=` a name stands for all that begin with it.
        command.env(NCCL_INTERFACE, format!("={interface}"));
    }
    // Ctrl-C ends them with who measures.
    let mut process = RankProcess::spawn(member.rank, &mut command, UnixProcessGroup::Inherited)?;
    let (printed, errors) = process.take_output();
    let output = Output { printed: printed.map(read).transpose()?, errors: errors.map(read).transpose()? };
    Ok((process, output))
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
