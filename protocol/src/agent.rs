//! Messages between server and agent: one websocket per agent, each message a binary frame of MessagePack with named fields.
//!
//! A rank appends its events to a file of numbered records. The agent that started the rank, or a later agent that finds
//! the file, sends the records that the server has not acknowledged. So whether rank, agent or server dies, no event is
//! lost and none is stored twice: the files are the spool.

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
pub use events::{AttemptEvent, AxisTimes, CheckpointInfo, Ending, Evaluation, LogLine, RankReport};
pub use fencing::FencingToken;
pub use files::{MARK, StartFiles, UploadState, WhatIsNeeded};
pub use machine::{Agent, GpuSample, KeptFor, Machine, MachineSample, MachineWarning, SlotUse};
pub use requests::{AgentReply, AgentRequest, RequestQueue};

use crate::{job::JobId, spec::JobSpec, wire::Part};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Version of these messages, raised when older programs cannot read them. A server accepts only agents with the same version.
pub const PROTOCOL_VERSION: u32 = 6;

/// A slot, on which one rank can run: a GPU, or a share of CPU cores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Slot {
    pub index: u32,
    /// `cpu` or `cuda`.
    pub device: String,
    /// Name of the device, such as `4 cores of AMD EPYC` or `NVIDIA H200`.
    pub name: String,
    /// GPU memory; 0 for a CPU slot.
    pub memory_bytes: u64,
    /// UUID of the GPU (`GPU-...`); absent for a CPU slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
}

/// One attempt of a job, as agents and server refer to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttemptRef {
    pub job: JobId,
    pub attempt: u32,
    /// Contains a number that grows with every attempt of any job, and a random secret. The store refuses writes with any other token. So
    /// an attempt that was given up and still runs somewhere cannot change anything, and neither can a caller that does not know the token.
    pub fencing_token: FencingToken,
}

impl AttemptRef {
    /// The name of the attempt's folder: the attempt's number and 32 random bits of its fencing token, or only the number if no server
    /// started the attempt. A database restored from a backup assigns numbers again, so the number alone could name the folder of another
    /// attempt.
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
    /// The first message on every connection.
    Hello {
        protocol: u32,
        /// Made once and kept in the agent's directory, so a restarted agent is still the same agent.
        agent_id: String,
        /// Random id of this agent process. It distinguishes two processes with the same agent id, which run if a directory was copied.
        #[serde(default)]
        process: String,
        name: String,
        machine: Machine,
        slots: Vec<Slot>,
        /// Attempts whose ranks are alive on this machine.
        attempts: Vec<AttemptRef>,
        /// The only job that the agent serves; absent if it serves any job.
        only_job: Option<JobId>,
        /// Why the agent accepts no new work, as text for people; absent if the agent accepts work. Running ranks continue.
        no_work: Option<String>,
    },
    /// Sent every `heartbeat_secs` of `Welcome`. The fields have the same meaning as in `Hello`.
    Heartbeat { attempts: Vec<AttemptRef>, no_work: Option<String> },
    /// The agent did not start this attempt and has none of its ranks. `reason`: why the agent accepts no work.
    Declined { attempt: AttemptRef, reason: String },
    /// Records `first..first + events.len()` of one source of an attempt. The server stores them before it acknowledges them, and ignores
    /// records that it has acknowledged.
    Report { attempt: AttemptRef, source: Source, first: u64, events: Vec<AttemptEvent> },
    /// The reply to `Request`. An error is a sentence for people.
    Reply {
        /// The request's id.
        id: u64,
        reply: Result<AgentReply, String>,
    },
    /// Measurements of the machine, every few seconds.
    Sample(Box<MachineSample>),
    /// Findings of `doctor`'s quick checks at the agent's start.
    Findings { findings: Vec<MachineWarning> },
    /// For an attempt on several machines: this machine's preflight check is done, and its ranks wait for `Launch`. Sent again on every
    /// connection.
    Ready {
        attempt: AttemptRef,
        /// The port on which rank 0 will listen; only rank 0's agent sends it.
        port: Option<u16>,
    },
    /// The agent is shutting down in an orderly way and accepts no new work.
    Leaving { reason: String },
    /// A part of a message that is too long for one frame.
    Part(Part),
}

/// The writer of a file of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Rank(u32),
    Agent,
}

/// The number of stored records of a source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acknowledged {
    pub attempt: AttemptRef,
    pub source: Source,
    /// Records `0..records` are stored.
    pub records: u64,
    /// Whether a client watches the job live: the agent should then send points at once instead of collecting them.
    pub watched: bool,
}

/// Messages of the server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// Answers `Hello`.
    Welcome {
        heartbeat_secs: f64,
        /// Ranks end themselves if their agent has received no `Welcome` or `HeartbeatAck` for this long.
        lease_secs: f64,
        /// For the attempts of `Hello`: how many records of each source are stored.
        acknowledged: Vec<Acknowledged>,
        /// Attempts of `Hello` that the agent may no longer run and must end.
        revoked: Vec<AttemptRef>,
        /// A file that this server keeps locked while it runs. An agent that finds the file locked is on the same
        /// machine, and can distinguish a dead server from a server that it cannot reach.
        server_lock: Option<String>,
    },
    /// The server refuses this agent (wrong version, bad token, name taken) and closes the connection.
    Refused {
        reason: String,
        /// Whether the reason is temporary, so that the agent retries.
        is_temporary: bool,
    },
    HeartbeatAck,
    /// These records are stored on disk.
    Ack(Acknowledged),
    Start(Box<StartAttempt>),
    /// All machines of an attempt are `Ready`: start the ranks.
    Launch {
        attempt: AttemptRef,
        /// The port on which rank 0 listens.
        master_port: u16,
    },
    /// End these ranks: SIGTERM, then SIGKILL. Answered by `Ended(Stopped)`. `attempt.attempt` = 0 is no attempt:
    /// it tells an agent that serves only this job that the job is over.
    Stop {
        attempt: AttemptRef,
        reason: String,
        /// Whether the ranks may first finish their step and write a checkpoint, for up to two minutes.
        patient: bool,
    },
    /// Answered by `Reply` with the same id.
    Request {
        id: u64,
        request: AgentRequest,
    },
    /// A part of a message that is too long for one frame.
    Part(Part),
}

/// Start these ranks of an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StartAttempt {
    pub attempt: AttemptRef,
    /// Complete, with every default filled in.
    pub spec: JobSpec,
    /// The dataset's path on this machine.
    pub dataset_path: String,
    pub world_size: u32,
    /// The ranks to start on this machine: global rank and slot index.
    pub ranks: Vec<(u32, u32)>,
    /// Address on which rank 0 listens.
    pub master_addr: String,
    /// Port on which rank 0 listens. 0: rank 0's agent chooses a free port.
    pub master_port: u16,
    /// Secret with which the attempt's ranks authenticate each other, hexadecimal.
    pub secret: String,
    /// The job's folder if the server's data directory is on this machine; otherwise the agent uses its own folder.
    pub job_dir: Option<String>,
    /// Checkpoint to continue from: the name of its folder, `<epoch>-<step>`.
    pub resume: Option<String>,
    /// The epoch, counted from 1, after which the ranks write a checkpoint and stop by themselves; absent if they train to the end.
    pub pause_after: Option<u32>,
    /// Address by which ranks of other machines reach these ranks; absent if all ranks meet at loopback.
    pub network: Option<RankNetwork>,
    /// Files that an agent on another machine than the server may lack.
    pub files: StartFiles,
}

impl StartAttempt {
    /// An attempt that no server has started: of a new job, with all `ranks` ranks on this machine.
    pub fn local(spec: JobSpec, dataset_path: impl Into<String>, ranks: u32) -> Self {
        Self {
            attempt: AttemptRef { job: JobId::generate(), attempt: 1, fencing_token: FencingToken::NONE },
            spec,
            dataset_path: dataset_path.into(),
            world_size: ranks,
            ranks: (0..ranks).map(|rank| (rank, rank)).collect(),
            master_addr: "127.0.0.1".into(),
            master_port: 0,
            secret: String::new(),
            job_dir: None,
            resume: None,
            pause_after: None,
            network: None,
            files: StartFiles::default(),
        }
    }

    /// Whether rank 0, which writes the checkpoints, is on this machine.
    pub fn has_rank_0(&self) -> bool {
        self.ranks.iter().any(|(rank, _)| *rank == 0)
    }

    /// Whether other agents also have ranks of this attempt.
    pub fn is_shared(&self) -> bool {
        u32::try_from(self.ranks.len()).is_ok_and(|here| here < self.world_size)
    }
}

/// The network of an attempt's ranks on one machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankNetwork {
    /// The machine's address.
    pub address: String,
    /// The network interface with this address.
    pub interface: Option<String>,
    /// How the agent found the address, such as `named by NCCL_SOCKET_IFNAME`, for the job's log. The agent sets this field.
    pub named_by: Option<String>,
}

impl RankNetwork {
    /// The address of these ranks in words: `10.1.0.5 (eth1), named by NCCL_SOCKET_IFNAME`.
    pub fn in_words(&self) -> String {
        let interface = self.interface.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
        let named_by = self.named_by.as_ref().map(|how| format!(", {how}")).unwrap_or_default();
        format!("{}{interface}{named_by}", self.address)
    }
}
