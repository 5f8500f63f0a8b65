//! Short-lived rank processes on this machine that run one measurement together. Used by `doctor` and `bench`.

use lockstep_comm::{
    ProcessGroup, SingleRank,
    rendezvous::{RendezvousConfig, RendezvousError, Store, free_port},
    ring::Ring,
};
use lockstep_engine::registry;
use lockstep_host::{NCCL_INTERFACE_VARIABLE, SECRET_VARIABLES, gpu::RankGpu, memory_file, own_program};
use lockstep_protocol::spec::Device;
use serde::{Deserialize, Serialize};
use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Seek},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

/// The environment variable with a member's description for its process. It is not an argument, because other users
/// can read arguments.
const MEMBER_VARIABLE: &str = "LOCKSTEP_LOCAL_GROUP";
const POLL_EVERY: Duration = Duration::from_millis(5);

/// One rank of the group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub rank: u32,
    pub world_size: u32,
    /// The address at which rank 0 listens.
    pub addr: String,
    pub port: u16,
    pub secret: String,
    /// `None` if the rank computes on CPU cores.
    pub gpu: Option<RankGpu>,
    /// The network interface for NCCL. `None` if NCCL chooses it.
    pub interface: Option<String>,
}

/// A member's connections to the other members.
pub struct JoinedGroup {
    pub comm: Arc<dyn ProcessGroup>,
    /// `None` in a group of one.
    pub store: Option<Arc<Store>>,
}

impl Member {
    /// The member that this process is, if it belongs to a group.
    ///
    /// # Errors
    /// The environment variable is invalid.
    pub fn of_this_process() -> Result<Option<Self>, String> {
        let Ok(json) = std::env::var(MEMBER_VARIABLE) else { return Ok(None) };
        serde_json::from_str(&json).map(Some).map_err(|e| format!("{MEMBER_VARIABLE}: {e}"))
    }

    /// Connects to the other members.
    ///
    /// # Errors
    /// A member does not arrive within `timeout`.
    pub fn meet(&self, timeout: Duration) -> Result<JoinedGroup, RendezvousError> {
        if self.world_size == 1 {
            return Ok(JoinedGroup { comm: Arc::new(SingleRank), store: None });
        }
        let store = Store::join(RendezvousConfig {
            addr: self.addr.clone(),
            port: self.port,
            secret: self.secret.clone().into_bytes(),
            rank: self.rank,
            world_size: self.world_size,
            timeout,
            stop: Arc::default(),
        })?;
        let ring = Ring::connect(&store, timeout)?;
        Ok(JoinedGroup { comm: ring, store: Some(Arc::new(store)) })
    }
}

/// The members of a new group. They run on the first `world_size` of `devices` (UUIDs of a
/// [`Slot`](lockstep_protocol::agent::Slot)), or on CPU cores if `devices` is empty.
///
/// # Errors
/// No port is free.
pub fn members(world_size: u32, devices: &[String]) -> io::Result<Vec<Member>> {
    let port = free_port("127.0.0.1")?;
    let secret = uuid::Uuid::new_v4().simple().to_string();
    let visible: Vec<_> = devices.iter().take(world_size as usize).cloned().collect();
    let member = |rank: u32| Member {
        rank,
        world_size,
        addr: "127.0.0.1".into(),
        port,
        secret: secret.clone(),
        interface: None,
        gpu: (!visible.is_empty()).then(|| RankGpu { ordinal: rank.cast_signed(), visible: visible.clone() }),
    };
    Ok((0..world_size).map(member).collect())
}

/// Runs this executable with `arguments`, one process per member, and returns the output of rank 0.
///
/// # Errors
/// A member fails (the error describes the first failure), or `limit` has passed. The other members are killed.
pub fn run(arguments: &[OsString], members: &[Member], limit: Duration) -> Result<Vec<u8>, String> {
    let mut processes = Processes(Vec::new());
    let mut outputs = Vec::new();
    for member in members {
        let rank = member.rank;
        let (process, output) =
            start(arguments, member).map_err(|e| format!("rank {rank} cannot be started: {e}"))?;
        processes.0.push(process);
        outputs.push(output);
    }
    let began = Instant::now();
    loop {
        let mut have_all_ended = true;
        for ((member, process), (_, stderr)) in members.iter().zip(&mut processes.0).zip(&outputs) {
            let rank = member.rank;
            let Some(status) = process.try_wait().map_err(|e| format!("rank {rank}: {e}"))? else {
                have_all_ended = false;
                continue;
            };
            if !status.success() {
                let stderr = String::from_utf8_lossy(&read_written(stderr)).trim().to_owned();
                let why = if stderr.is_empty() { status.to_string() } else { stderr };
                return Err(format!("rank {rank}: {why}"));
            }
        }
        if have_all_ended {
            return Ok(outputs.first().map_or_else(Vec::new, |(stdout, _)| read_written(stdout)));
        }
        if began.elapsed() > limit {
            return Err(format!("the ranks have not ended after {:.0} s", limit.as_secs_f64()));
        }
        std::thread::sleep(POLL_EVERY);
    }
}

/// The processes of the members. Dropping this value ends them.
struct Processes(Vec<Child>);

impl Drop for Processes {
    fn drop(&mut self) {
        // Kill all of them first, because they may be waiting for each other. Errors do not matter, because a process
        // that has ended needs neither.
        self.0.iter_mut().for_each(|process| drop(process.kill()));
        self.0.iter_mut().for_each(|process| drop(process.wait()));
    }
}

/// Starts a member. Also returns its standard output and its standard error, which are files in memory. The process is
/// in this process's group, so that Ctrl-C ends both.
fn start(arguments: &[OsString], member: &Member) -> io::Result<(Child, (File, File))> {
    let (stdout, stderr) = (memory_file()?, memory_file()?);
    let mut command = Command::new(own_program()?);
    command
        .args(arguments)
        .env(MEMBER_VARIABLE, serde_json::to_string(member)?)
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?);
    let gpu = member.gpu.as_ref();
    command.envs(registry::device_of(gpu, Device::Auto).backend.environment(gpu)?);
    if let Some(interface) = &member.interface {
        // Without `=`, NCCL treats the name as a prefix.
        command.env(NCCL_INTERFACE_VARIABLE, format!("={interface}"));
    }
    for name in SECRET_VARIABLES {
        command.env_remove(name);
    }
    Ok((command.spawn()?, (stdout, stderr)))
}

/// Reads what has been written to a file, as far as that is possible.
fn read_written(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = file.rewind().and_then(|()| file.read_to_end(&mut bytes));
    bytes
}
