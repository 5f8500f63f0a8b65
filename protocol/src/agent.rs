//! Messages between server and agent: one websocket per agent, each message a binary frame of MessagePack with named fields.
//!
//! A rank appends its events to a file of numbered records. Its agent (any agent that finds the file) sends them on,
//! from the number that the server has acknowledged. So whichever of the three processes dies, no event is lost and none
//! is stored twice: the files are the spool.

mod dataset_files;
mod events;
mod fencing;
mod files;
mod machine;
mod requests;

pub use crate::allowed::{AllowedFolders, refusal};
pub use dataset_files::{
    ANEW_BYTES, DATASET_PART_BYTES, DATASET_PARTS, DATASET_PARTS_BYTES, DatasetEntry, DatasetPart,
    DatasetParts, PART_CHANGED, PART_FOLLOWS, PART_REFUSED, SUM_BYTES,
};
pub use events::{AttemptEvent, CheckpointInfo, Ending, Evaluation, LogLine, RankReport};
pub use fencing::FencingToken;
pub use files::{MARK, StartFiles, UploadState, WhatIsNeeded};
pub use machine::{GpuSample, Machine, MachineSample, MachineWarning};
pub use requests::{AgentReply, AgentRequest, RequestQueue};

use crate::{job::JobId, spec::JobSpec, wire::Part};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Raised when a message changes in a way that older programs cannot read.
pub const PROTOCOL_VERSION: u32 = 5;

/// The oldest version whose agents a server still accepts. Up to 4, fencing tokens were numbers.
pub const OLDEST_PROTOCOL_VERSION: u32 = 5;

/// One place a rank can run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Slot {
    pub index: u32,
    /// `cpu` or `cuda`.
    pub device: String,
    /// `4 cores of AMD EPYC`, `NVIDIA H200`.
    pub name: String,
    /// GPU memory; 0 for a CPU slot.
    pub memory_bytes: u64,
    /// Which GPU it is (`GPU-...`); absent for a CPU slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
}

/// One attempt of a job, as agents and server name it to each other.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttemptRef {
    pub job: JobId,
    pub attempt: u32,
    /// Grows with every attempt of any job, and has a random part. The store refuses writes with another one. So an attempt that was
    /// given up and still runs somewhere changes nothing, and neither does a caller that does not know the token.
    pub fencing_token: FencingToken,
}

impl AttemptRef {
    /// The name of the attempt's folder: its number and 32 random bits of its fencing token, or the number alone if no server has started
    /// it. A database that was put back gives numbers out again, and records of the earlier attempt must not be taken for the new one's.
    pub fn folder_name(&self) -> String {
        match self.fencing_token.secret >> 96 {
            0 => self.attempt.to_string(),
            bits => format!("{}-{bits:08x}", self.attempt),
        }
    }
}

/// Messages of an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    /// First on every connection.
    Hello {
        protocol: u32,
        /// Made once and kept in the agent's directory, so a restarted agent is the same agent.
        agent_id: String,
        /// Random, of this process of the agent: two that run at once with one id, as a copied directory makes them, are told apart.
        #[serde(default)]
        process: String,
        name: String,
        machine: Machine,
        slots: Vec<Slot>,
        /// Attempts whose ranks are alive here.
        attempts: Vec<AttemptRef>,
        /// Serve this job alone.
        only_job: Option<JobId>,
        /// Why the agent takes no new work, as text for people; absent if it takes work. Running ranks continue.
        #[serde(default)]
        no_work: Option<String>,
    },
    /// Every `heartbeat_secs` of `Welcome`.
    Heartbeat {
        attempts: Vec<AttemptRef>,
        /// As in `Hello`.
        #[serde(default)]
        no_work: Option<String>,
    },
    /// The order to start this attempt was not carried out, and nothing of it is here; the agent takes no work, for this reason.
    Declined { attempt: AttemptRef, reason: String },
    /// Records `first..first + events.len()` of one source of an attempt, to be stored before they
    /// are acknowledged. Records below the acknowledged number are ignored by the server.
    Report { attempt: AttemptRef, source: Source, first: u64, events: Vec<AttemptEvent> },
    /// The reply to `Request`; an error is a sentence for people.
    Reply {
        /// The request's.
        id: u64,
        reply: Result<AgentReply, String>,
    },
    /// What the machine measures now, every few seconds; to a server whose `Welcome` takes it.
    Sample(Box<MachineSample>),
    /// What `doctor`'s quick checks found when the agent started; to a server whose `Welcome` takes it.
    Findings { findings: Vec<MachineWarning> },
    /// For an attempt over several machines: the preflight check is done on this one. Its ranks start at `Launch`. Sent again on every
    /// connection.
    Ready {
        attempt: AttemptRef,
        /// The port where rank 0 will listen; only sent by rank 0's agent.
        port: Option<u16>,
    },
    /// The agent is shutting down in an orderly way and takes no new work.
    Leaving { reason: String },
    /// A part of any of these that is too long to go at once.
    Part(Part),
}

/// The writer of a file of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Rank(u32),
    Agent,
}

/// How many records of a source are stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acknowledged {
    pub attempt: AttemptRef,
    pub source: Source,
    /// Records `0..records` are stored.
    pub records: u64,
    /// Somebody watches the job live: the agent should send points at once instead of collecting them.
    #[serde(default)]
    pub watched: bool,
}

/// Messages of the server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// Answers `Hello`.
    Welcome {
        heartbeat_secs: f64,
        /// Ranks whose agent has had no `Welcome` or `HeartbeatAck` for this long are fenced.
        lease_secs: f64,
        /// For the attempts of `Hello`, how far each source's records are stored.
        acknowledged: Vec<Acknowledged>,
        /// Attempts of `Hello` that are no longer theirs to run: end them.
        revoked: Vec<AttemptRef>,
        /// The file that this server keeps locked as long as it runs. An agent that finds it locked is on the same machine, and can
        /// distinguish a server that is gone from one that it cannot reach.
        #[serde(default)]
        server_lock: Option<String>,
        /// This server understands `Sample` and `Findings`; older ones end the connection over what they do not know.
        #[serde(default)]
        takes_samples: bool,
    },
    /// Why the connection is about to be closed for good (wrong version, bad token, name taken).
    Refused {
        reason: String,
        /// It may pass: the agent tries again.
        #[serde(default)]
        may_pass: bool,
    },
    HeartbeatAck,
    /// Stored, on disk.
    Ack(Acknowledged),
    Start(Box<StartAttempt>),
    /// All machines of an attempt are `Ready`: start the ranks.
    Launch {
        attempt: AttemptRef,
        /// Where rank 0 listens.
        master_port: u16,
    },
    /// End these ranks: TERM, then KILL. Answered by `Ended(Stopped)`. Attempt 0, which no job has, says to an agent that serves this
    /// job alone that the job is over; earlier agents ignore it.
    Stop {
        attempt: AttemptRef,
        reason: String,
        /// First let them finish their step and write a checkpoint of it, for up to two minutes.
        #[serde(default)]
        patient: bool,
    },
    /// Answered by `Reply` with the same id.
    Request {
        id: u64,
        request: AgentRequest,
    },
    /// A part of any of these that is too long to go at once.
    Part(Part),
}

/// Start these ranks of an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StartAttempt {
    pub attempt: AttemptRef,
    /// Complete: every default filled in.
    pub spec: JobSpec,
    /// The dataset's path on this machine.
    pub dataset_path: String,
    pub world_size: u32,
    /// The ranks to start here: global rank and slot index.
    pub ranks: Vec<(u32, u32)>,
    /// Where rank 0 listens. Port 0: the agent of rank 0 picks a free one.
    pub master_addr: String,
    pub master_port: u16,
    /// Shared secret of the attempt, hexadecimal.
    pub secret: String,
    /// The job's folder when the server's data directory is on this machine; else the agent's own.
    pub job_dir: Option<String>,
    /// Checkpoint to continue from: its folder's name, `<epoch>-<step>`.
    pub resume: Option<String>,
    /// How ranks of other machines reach these; absent where all of them meet at loopback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<RankNetwork>,
    /// For an agent on another machine than the server.
    #[serde(default)]
    pub files: StartFiles,
}

impl StartAttempt {
    /// Whether other agents have ranks of it, too.
    pub fn is_shared(&self) -> bool {
        u32::try_from(self.ranks.len()).is_ok_and(|here| here < self.world_size)
    }
}

/// The network of an attempt's ranks on one machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankNetwork {
    /// The machine's address.
    pub address: String,
    /// The interface that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// How its agent came by the address, in words for the job's log. The agent adds it to what the server sends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named_by: Option<String>,
}

impl RankNetwork {
    /// Where these ranks listen: `10.1.0.5 (eth1), named by NCCL_SOCKET_IFNAME`.
    pub fn in_words(&self) -> String {
        let interface = self.interface.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
        let named_by = self.named_by.as_ref().map(|how| format!(", {how}")).unwrap_or_default();
        format!("{}{interface}{named_by}", self.address)
    }
}
