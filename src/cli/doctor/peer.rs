//! `lockstep doctor --peer`, which `doctor --hosts` starts on each machine over SSH. Describes the machine, listens for connections of
//! other machines, and connects to other machines on request. Messages are lines of JSON over standard input and output.

use super::super::usage_error;
use lockstep_host::{
    gpu::{RankGpu, devices},
    nccl_variable, own_program,
};
use lockstep_worker::{
    doctor::{AllGatherResult, Facts, LinkMeasurement, listen, probe},
    local_group::{self, Member},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::SocketAddr,
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    process::Command,
    time::Duration,
};

/// Environment variable with the secret of this check. The secret is not an argument, because other accounts can read arguments.
const SECRET: &str = "LOCKSTEP_DOCTOR_SECRET";
/// Maximum length of a line in either direction.
pub(super) const LINE_BYTES: u64 = 64 << 10;
/// Time limit of a pair's all-reduces: NCCL's first start may take a minute or more.
pub(super) const ALL_REDUCE_TIMEOUT: Duration = Duration::from_secs(90);

/// The first line that this process receives.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Start {
    pub(super) secret: String,
    /// The hostfile's variables for this machine.
    pub(super) env: BTreeMap<String, String>,
}

/// Each later line that this process receives.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// Measure the link to the machine that listens at `to`.
    Probe { to: SocketAddr },
    /// Form a group of two ranks with another machine, on the first GPU of each.
    Meet { rank: u32, addr: String, port: u16 },
}

/// A machine's description.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Greeting {
    pub(super) facts: Facts,
    /// Port for probes.
    pub(super) port: u16,
    /// Free port for a rendezvous.
    pub(super) meeting_port: u16,
}

/// A message from a machine: first its description, then a response to each order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum PeerMessage {
    Hello(Greeting),
    Link(Result<LinkMeasurement, String>),
    Met(Result<Option<AllGatherResult>, String>),
    /// The reason why the machine cannot take orders.
    Failed(String),
}

/// Handles orders until standard input ends.
///
/// # Errors
/// Standard input has an invalid line, or standard output is closed.
pub(super) fn run() -> anyhow::Result<()> {
    let Ok(secret) = std::env::var(SECRET) else { return start_with_environment() };
    let (facts, port) = match start_listening(&secret) {
        Ok(started) => started,
        Err(why) => return send(&PeerMessage::Failed(why)),
    };
    let meeting_port = lockstep_comm::rendezvous::free_port(&facts.address.to_string())?;
    send(&PeerMessage::Hello(Greeting { facts: facts.clone(), port, meeting_port }))?;
    let mut lines = BufReader::new(io::stdin());
    loop {
        let mut line = Vec::new();
        (&mut lines).take(LINE_BYTES).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        let order = serde_json::from_slice(&line).map_err(|e| usage_error(format!("standard input: {e}")))?;
        send(&match order {
            Order::Probe { to } => PeerMessage::Link(probe(to, secret.as_bytes())),
            Order::Meet { rank, addr, port } => {
                PeerMessage::Met(run_all_reduces(&facts, &secret, rank, addr, port))
            }
        })?;
    }
}

/// Returns the machine's facts and the port on which it now listens.
fn start_listening(secret: &str) -> Result<(Facts, u16), String> {
    let facts = Facts::find()?;
    let port = listen(facts.address, secret.into())
        .map_err(|e| format!("cannot listen at {}: {e}", facts.address))?;
    Ok((facts, port))
}

/// Reads the first line, and starts this program again with the line's environment variables, which decide where libraries are found and
/// which network interface is used.
fn start_with_environment() -> anyhow::Result<()> {
    // Reads exactly this line: the rest of the input is for the program that replaces this one (exec).
    let mut input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() < LINE_BYTES as usize && input.read(&mut byte)? == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    let Start { secret, env } = serde_json::from_slice(&line).map_err(|e| {
        usage_error(format!("--peer is for `lockstep doctor --hosts`, which starts it ({e})"))
    })?;
    Err(Command::new(own_program()?).args(["doctor", "--peer"]).envs(env).env(SECRET, secret).exec().into())
}

fn send(message: &PeerMessage) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, message)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Runs the all-reduces in a separate process, which is killed if NCCL hangs. Returns rank 0's result.
fn run_all_reduces(
    facts: &Facts,
    secret: &str,
    rank: u32,
    addr: String,
    port: u16,
) -> Result<Option<AllGatherResult>, String> {
    let first = devices::usable(None)?.gpus.into_iter().next();
    let gpu = first.map(|gpu| RankGpu { ordinal: 0, visible: vec![gpu.uuid] });
    let interface = facts.interface.clone().filter(|_| nccl_variable().is_none());
    let member = Member { rank, world_size: 2, addr, port, secret: secret.into(), gpu, interface };
    let stdout = local_group::run(&["doctor".into()], &[member], ALL_REDUCE_TIMEOUT)?;
    (rank == 0).then(|| super::parse_result(&stdout)).transpose()
}
