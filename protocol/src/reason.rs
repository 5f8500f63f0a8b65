//! Why a job, or one of its attempts, is in its state: a code on which programs may decide, the facts of the code, and
//! an English sentence made of both. Programs must not decide on the sentence.

use crate::{numbers::plural, spec::Device};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::IgnoredAny};
use serde_json::{Map, Value};
use std::{fmt, ops::Deref};
use utoipa::ToSchema;

/// Maximum length of a text in a reason, in bytes.
const TEXT_BYTES: usize = 2000;

/// Maximum number of jobs in [`SlotWait::kept_for`].
pub const MAX_KEPT_FOR: usize = 16;

/// Maximum number of machines whose slots a reason's words name. [`SlotWait::slots_on`] may have one more machine: the words then say
/// that there are others.
pub const MAX_SLOTS_ON: usize = 8;

/// A text in a reason: at most 2000 bytes, the rest is cut off.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(from = "String")]
pub struct Text(String);

impl From<String> for Text {
    fn from(mut text: String) -> Self {
        text.truncate(text.floor_char_boundary(TEXT_BYTES));
        Self(text)
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// The kind of a reason, named by `code`, with its facts. New kinds may be added; a program that does not know a code shows
/// `words`. `rank` is the rank that failed first, `step` the number of optimizer steps done at that time, `secs` for how
/// many seconds a condition lasted (silence, no progress, too few free slots), `agent` an agent's name, `job` another job's id, and `detail`
/// further words for a person.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "code", rename_all = "snake_case")]
pub enum ReasonKind {
    // Reported by a rank or its agent.
    /// A rank reported a failure.
    RankFailed { rank: u32, step: u64, detail: Text },
    /// A rank's process ended by itself, with this exit status.
    RankExited { rank: u32, step: u64, exit_status: i32, detail: Option<Text> },
    /// A rank was killed by a signal.
    RankKilled { rank: u32, step: u64, signal: i32 },
    /// A rank got a signal to stop that its agent had not sent.
    RankStopped { rank: u32, step: u64 },
    /// A rank ended, and how is unknown, because the agent that had started it was no longer running.
    RankVanished { rank: u32, step: u64 },
    /// A rank did no step for longer than `recovery.stall_timeout_secs` (`secs`), or reported itself that it cannot
    /// continue (`detail`).
    Stalled { rank: u32, step: u64, secs: Option<f64>, detail: Option<Text> },
    /// The loss or weights are no longer finite.
    Diverged { rank: u32, step: u64, detail: Text },
    /// float16 could not represent the numbers of training, which continues in bfloat16.
    PrecisionFallback { step: u64, detail: Text },
    /// float16 could not represent the numbers of training, and the job requires float16.
    PrecisionTooNarrow { rank: u32, step: u64, detail: Text },
    /// The metric of `[stop]` has not improved for a while: the job has succeeded before its last step.
    StoppedEarly { step: u64, detail: Text },
    /// A machine or a GPU had no memory left; with `signal` if the system therefore killed a rank.
    OutOfMemory { rank: Option<u32>, step: Option<u64>, signal: Option<i32>, detail: Text },
    /// The dataset's files cannot be read, or have changed since the job began; without `rank`, no rank was started.
    DatasetUnusable { rank: Option<u32>, step: Option<u64>, detail: Text },
    /// No disk space for checkpoints.
    DiskFull { detail: Text },
    /// Too little shared memory for NCCL.
    SharedMemoryTooSmall { detail: Text },
    /// The ranks could not be started.
    NotStarted { detail: Text },
    /// Ranks, which `detail` names, do not end, even after SIGKILL.
    Unkillable { agent: Text, detail: Text },
    /// The agent has received nothing from its server for longer than the lease.
    ServerSilent { secs: f64 },
    /// Too many records wait for the server on the agent's disk.
    SpoolFull { agent: Text, size_bytes: u64 },
    /// An agent was killed before it had started the ranks, while it copied their dataset or made its checks.
    AgentRestarted { agent: Text },
    /// The ranks ended, and no rank reported why.
    Unexplained,

    // Reported by the server.
    /// Cancelled on request; `detail` names remaining work for a person.
    CancelledByUser { detail: Option<Text> },
    /// The job's ranks are being stopped, because the job was cancelled.
    Cancelling,
    /// Paused on request; `detail` is why the ranks did not end as requested.
    PausedByUser { detail: Option<Text> },
    /// The job's ranks write a checkpoint and stop, because the job was paused.
    Pausing,
    /// The job's ranks write a checkpoint and stop, because a job of higher priority takes their slots. A private job is
    /// not named.
    Preempting { job: Option<Text>, priority: i32 },
    /// A job of higher priority took the job's slots.
    Preempted { job: Option<Text>, priority: i32, detail: Option<Text> },
    /// Resumed on request.
    ResumedByUser,
    /// Paused at a rung of its sweep, which compares trials after this epoch.
    PausedBySweep { epoch: u32 },
    /// Resumed by its sweep: the trial is among the best at its rung.
    ResumedBySweep,
    /// Ended by its sweep: other trials are better at the rung.
    EndedBySweep,
    /// Retried on request.
    RetriedByUser,
    /// A fork of another job (`job`), whose name is `detail`. A private job is not named.
    Forked { step: u64, job: Option<Text>, checkpoint: Option<Text>, detail: Option<Text> },
    /// An agent was silent for longer than its lease.
    AgentLost { agent: Text, attempt: u32, step: u64, secs: f64, detail: Option<Text> },
    /// An agent is online, but without the attempt's ranks.
    AgentWithoutRanks { agent: Text, attempt: u32, step: u64 },
    /// An agent is online, but the order to start the attempt's ranks never reached it.
    StartLost { agent: Text, attempt: u32, step: u64 },
    /// An agent was shut down, not killed.
    AgentStopped { agent: Option<Text>, detail: Option<Text> },
    /// An agent went offline after its slots were assigned to the job, and before the ranks were started.
    AgentLeft { agent: Text },
    /// An agent is online but did not start the attempt: its folder cannot be written, or it is shutting down.
    AgentDeclined { agent: Text, detail: Text },
    /// The dataset is no longer registered.
    DatasetMissing { dataset: Text },
    /// The checkpoint to begin from no longer exists.
    CheckpointMissing { checkpoint: Text },
    /// A path leads to a folder that jobs may not read (`serve --dataset-root`), by a link that is newer than the job.
    PathNotAllowed { detail: Text },
    /// Another version of this program stored the specification.
    UnreadableSpec { detail: Text },
    /// Waits: no agent is online.
    NoAgentOnline,
    /// Waits: all online agents take only other jobs. `detail` names the drained machines.
    NoAgentAccepts { detail: Option<Text> },
    /// Waits: no machine has enough slots of the job's device.
    TooFewSlots(SlotWait),
    /// Waits: the machines have enough slots together, but other machines cannot reach the machines in `detail`.
    MachinesApart { device: Device, slots_needed: u32, detail: Text },
    /// Waits for a checkpoint that an agent uploads, or that comes from the object store; `detail` is why the last try to
    /// fetch it from the object store failed.
    WaitingForCheckpoint { checkpoint: Text, agent: Option<Text>, detail: Option<Text> },
    /// Waits until slots are free.
    WaitingForSlots(SlotWait),
    /// Waits until somebody resumes the sweep (`sweep`, an id) of which the job is a trial; `detail` is the sweep's name.
    WaitingForSweep { sweep: Text, detail: Text },
    /// The attempt has fewer ranks than the job, because not all ranks found a slot. `detail` is how the last attempt ended.
    FewerRanks { ranks: u32, slots_needed: u32, secs: f64, detail: Option<Text> },
    /// The program of a run from elsewhere has sent nothing for a while.
    RunSilent { secs: f64 },
    /// A sentence for a person, without facts.
    Unspecified { detail: Text },
    /// Any other code, or a code without its facts: another version wrote it, with a sentence.
    #[serde(untagged)]
    Other(UnknownCode),
}

/// The code of a kind that this version does not know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnknownCode {
    pub code: Text,
}

/// The slots that a waiting job needs, and the slots of the online machines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlotWait {
    /// Device of the slots: `cpu` or `cuda`.
    pub device: Device,
    pub slots_needed: u32,
    /// Number of free slots among `slots_total`.
    pub slots_free: u32,
    /// Number of slots of the machine with the most slots, or of several machines that can share the job.
    pub slots_total: u32,
    /// Name of the machine with the slots of `slots_total`; absent if there are several machines.
    pub agent: Option<Text>,
    /// Number of machines whose slots are in `slots_total`, if several.
    pub machines: Option<u32>,
    /// Number of free slots that are kept for earlier jobs in the queue.
    pub slots_kept: Option<u32>,
    /// Names of the jobs for which slots are kept, in the order of the queue; a private job's name is empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept_for: Vec<Text>,
    /// Slots of each machine that takes the job, if there are several: at most nine machines, those with the most free slots first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots_on: Vec<AgentSlots>,
    /// Further reasons why the job waits.
    pub detail: Option<Text>,
}

/// The slots of an agent, counted only for the device that a job needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentSlots {
    /// The agent's name.
    pub agent: Text,
    pub free: u32,
    pub total: u32,
}

/// The kind of failure that a rank reports of itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    Diverged,
    PrecisionTooNarrow,
    OutOfMemory,
    DatasetUnusable,
    Stalled,
    #[default]
    #[serde(other)]
    Other,
}

impl FailureCode {
    /// The reason of an attempt that failed because `rank` reported this failure.
    pub fn reason_kind(self, rank: u32, step: u64, detail: Text) -> ReasonKind {
        match self {
            FailureCode::Diverged => ReasonKind::Diverged { rank, step, detail },
            FailureCode::PrecisionTooNarrow => ReasonKind::PrecisionTooNarrow { rank, step, detail },
            FailureCode::OutOfMemory => {
                ReasonKind::OutOfMemory { rank: Some(rank), step: Some(step), signal: None, detail }
            }
            FailureCode::DatasetUnusable => {
                ReasonKind::DatasetUnusable { rank: Some(rank), step: Some(step), detail }
            }
            FailureCode::Stalled => ReasonKind::Stalled { rank, step, secs: None, detail: Some(detail) },
            FailureCode::Other => ReasonKind::RankFailed { rank, step, detail },
        }
    }
}

/// The sentence for a kind and its facts.
impl fmt::Display for ReasonKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use ReasonKind::*;
        match self {
            RankKilled { rank, step, signal } => {
                write!(f, "rank {rank} was killed by signal {signal} at step {step}")
            }
            RankExited { rank, step, exit_status, detail } => {
                let why = with_separator(": ", detail);
                write!(f, "rank {rank} ended with exit status {exit_status} at step {step}{why}")
            }
            RankStopped { rank, step } => {
                write!(f, "rank {rank} was stopped at step {step}, and not by its agent")
            }
            RankVanished { rank, step } => {
                write!(f, "rank {rank} ended at step {step}; how is unknown, because the agent that started it had ended")
            }
            Stalled { rank, step, secs: Some(secs), detail } => {
                write!(f, "rank {rank} made no progress for {secs} s at step {step}{}", with_separator("; ", detail))
            }
            OutOfMemory { signal: Some(_), detail, .. } => write!(
                f,
                "killed: out of memory ({detail}). Lower train.batch_size (or train.global_batch_size) or parallel.ranks, or use a \
                 machine with more memory"
            ),
            Stalled { rank, step, secs: None, detail } => {
                write!(f, "rank {rank} failed at step {step}{}", with_separator(": ", detail))
            }
            RankFailed { rank, step, detail }
            | PrecisionTooNarrow { rank, step, detail }
            | OutOfMemory { rank: Some(rank), step: Some(step), signal: None, detail }
            | DatasetUnusable { rank: Some(rank), step: Some(step), detail } => {
                write!(f, "rank {rank} failed at step {step}: {detail}")
            }
            // All ranks diverge together, and the detail has the step.
            Diverged { detail, .. } => write!(f, "{detail}"),
            NotStarted { detail }
            | DatasetUnusable { detail, .. }
            | DiskFull { detail }
            | SharedMemoryTooSmall { detail } => write!(f, "the ranks were not started: {detail}"),
            Unkillable { agent, detail } => write!(
                f,
                "{detail} has not ended after SIGKILL: it holds its memory until {agent} is restarted"
            ),
            ServerSilent { secs } => {
                write!(f, "the server was silent for {secs} s, so the agent ended the ranks")
            }
            SpoolFull { agent, size_bytes } => {
                let size = *size_bytes as f64 / 1e6;
                write!(
                    f,
                    "the spool of agent {agent:?} is full: {size:.0} MB of records wait for the server (--spool-mib)"
                )
            }
            PrecisionFallback { step, detail } => {
                write!(f, "float16 could not hold {detail}: training continues in bfloat16 after step {step}")
            }
            StoppedEarly { detail, .. } => write!(f, "stopped early: {detail}"),
            AgentRestarted { agent } => {
                write!(f, "agent {agent:?} was restarted before it had started the ranks")
            }
            Unexplained => f.write_str("the ranks ended, and none of them reported why"),
            CancelledByUser { detail } => write!(f, "cancelled on request{}", with_separator("; ", detail)),
            Cancelling => f.write_str("being cancelled: its ranks are stopping"),
            PausedByUser { detail } => write!(f, "paused on request{}", in_parentheses(detail)),
            Pausing => f.write_str("being paused: its ranks finish their step and write a checkpoint"),
            Preempting { job, priority } => {
                let by = other_job(job, *priority);
                write!(f, "being preempted by {by}: its ranks finish their step and write a checkpoint")
            }
            Preempted { job, priority, detail } => {
                write!(f, "preempted by {}{}", other_job(job, *priority), in_parentheses(detail))
            }
            ResumedByUser => f.write_str("resumed on request"),
            PausedBySweep { epoch } => write!(f, "paused at a rung of its sweep, after epoch {epoch}"),
            ResumedBySweep => f.write_str("resumed by its sweep: it is among the best at its rung"),
            EndedBySweep => f.write_str(
                "ended by its sweep: other trials are better at its rung. It keeps its checkpoint; `lockstep retry` \
                 continues its training",
            ),
            RetriedByUser => f.write_str("retried on request"),
            Forked { step, job: None, .. } => write!(f, "forked from a private job at step {step}"),
            Forked { step, job: Some(id), detail: None, .. } => {
                write!(f, "forked from ({id}) at step {step}")
            }
            Forked { step, job: Some(id), detail: Some(name), .. } => {
                write!(f, "forked from {name:?} ({id}) at step {step}")
            }
            AgentLost { agent, step, secs, detail, .. } => {
                let at = at_step(*step);
                write!(f, "agent {agent:?} was silent for {secs} s{at}{}", with_separator("; ", detail))
            }
            AgentWithoutRanks { agent, attempt, step } => {
                write!(f, "agent {agent:?} has no ranks of attempt {attempt}{}", at_step(*step))
            }
            StartLost { agent, attempt, .. } => {
                write!(f, "the order to start attempt {attempt} did not reach agent {agent:?}")
            }
            AgentStopped { agent: Some(agent), detail } => {
                write!(f, "agent {agent:?} was shut down{}", in_parentheses(detail))
            }
            AgentStopped { agent: None, detail } => {
                write!(f, "its agent was shut down{}", in_parentheses(detail))
            }
            AgentDeclined { agent, detail } => write!(f, "agent {agent:?} did not start the job: {detail}"),
            AgentLeft { agent } => {
                write!(f, "agent {agent:?} disconnected before it could start the ranks")
            }
            DatasetMissing { dataset } => {
                write!(f, "dataset {dataset:?} is no longer registered; add it again and retry the job")
            }
            CheckpointMissing { checkpoint } => write!(
                f,
                "model.pretrained: checkpoint {checkpoint:?} no longer exists; name another one and submit the job again"
            ),
            UnreadableSpec { detail } => write!(
                f,
                "another version of lockstep stored this job, and this version cannot start it ({detail}); run that \
                 version, or submit the job again"
            ),
            NoAgentOnline => f.write_str("no agent is online; the page Machines has the commands that start one"),
            NoAgentAccepts { detail } => {
                let drained =
                    detail.as_deref().map_or(String::new(), |names| format!("; {}", undrain_advice(names)));
                write!(f, "no online agent takes this job{drained}")
            }
            TooFewSlots(wait) => wait.write_too_few(f),
            WaitingForSlots(wait) => wait.write_waiting(f),
            MachinesApart { device, slots_needed, detail } => {
                let needed = slots(*device, *slots_needed);
                let start = if detail.contains(", ") { "these agents" } else { "that agent" };
                write!(
                    f,
                    "needs {needed}; the online machines have enough together, but other machines cannot reach {detail}: \
                     start {start} with --advertise ADDRESS"
                )
            }
            WaitingForCheckpoint { checkpoint, agent: None, detail } => {
                let failed = with_separator("; the last try failed: ", detail);
                write!(f, "waits for checkpoint {checkpoint} from the object store{failed}")
            }
            WaitingForCheckpoint { checkpoint, agent: Some(agent), .. } => {
                write!(f, "waits until agent {agent:?} has uploaded checkpoint {checkpoint}")
            }
            WaitingForSweep { sweep, detail } => {
                write!(f, "its sweep {detail} is paused; `lockstep sweep resume {sweep}` lets the trial start")
            }
            FewerRanks { ranks, slots_needed, secs, detail } => write!(
                f,
                "trains with {ranks} of {slots_needed} ranks, because for {secs} s there were not enough free slots for \
                 all{}",
                with_separator("; the last attempt: ", detail)
            ),
            RunSilent { secs } => {
                write!(f, "its program has sent nothing for {secs} s; the run continues when it sends again")
            }
            OutOfMemory { detail, .. } | PathNotAllowed { detail } | Unspecified { detail } => {
                f.write_str(detail)
            }
            Other(UnknownCode { code }) => f.write_str(&code.replace('_', " ")),
        }
    }
}

fn with_separator(separator: &str, detail: &Option<Text>) -> String {
    detail.as_ref().map_or(String::new(), |detail| format!("{separator}{detail}"))
}

fn in_parentheses(detail: &Option<Text>) -> String {
    detail.as_ref().map_or(String::new(), |detail| format!(" ({detail})"))
}

/// ` at step 12`, the last step that the server knows; empty before the first step.
fn at_step(step: u64) -> String {
    if step > 0 { format!(" at step {step}") } else { String::new() }
}

/// Another job, which may be private.
fn other_job(job: &Option<Text>, priority: i32) -> String {
    match job {
        Some(job) => format!("job {job} of priority {priority}"),
        None => format!("a job of priority {priority}"),
    }
}

/// Advice about drained machines, with their names.
pub fn undrain_advice(names: &str) -> String {
    format!("drained: {names} (`lockstep machine undrain` or the page Machines gives them work again)")
}

fn slots(device: Device, count: u32) -> String {
    plural(count.into(), device.kind().map_or("slot", |kind| kind.slot_name))
}

impl SlotWait {
    fn write_too_few(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slots_free: free, slots_total: total, detail, .. } = self;
        let (by_machine, detail_text) = (self.free_by_machine(), with_separator("; ", detail));
        write!(f, "needs {}", slots(self.device, self.slots_needed))?;
        match (self.machines, &self.agent) {
            _ if *total == 0 => {
                let which =
                    if detail.is_none() { "online machine has" } else { "machine that is not drained has" };
                write!(f, ", and no {which} any{detail_text}")
            }
            (Some(machines), _) => write!(
                f,
                "; {machines} online machines have {total} in all, {free} of them free{by_machine}{detail_text}"
            ),
            (None, agent) => {
                let agent = agent.as_deref().unwrap_or_default();
                let which = if self.slots_on.is_empty() {
                    "only online machine for it"
                } else {
                    "largest online machine"
                };
                write!(f, "; the {which}, {agent:?}, has {total}{by_machine}{detail_text}")
            }
        }
    }

    fn write_waiting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (free, total, kept) = (self.slots_free, self.slots_total, self.kept_in_words());
        write!(f, "waits for {}", slots(self.device, self.slots_needed))?;
        match self.machines {
            Some(machines) => write!(f, ": {free} of {total} on {machines} machines free{kept}")?,
            // The list of machines has this machine, too.
            None if kept.is_empty() && !self.slots_on.is_empty() => {}
            None => {
                let agent = self.agent.as_deref().unwrap_or_default();
                write!(f, ": {free} of {total} on {agent:?} free{kept}")?;
            }
        }
        write!(f, "{}{}", self.free_by_machine(), with_separator("; ", &self.detail))
    }

    /// `, 1 of them kept for "a"`: the jobs for which free slots are kept. Empty without such jobs.
    fn kept_in_words(&self) -> String {
        let name = |name: &Text| if name.is_empty() { "another job".to_owned() } else { format!("{name:?}") };
        let names = match self.kept_for.as_slice() {
            [] => return String::new(),
            [one] => name(one),
            [one, other] => format!("{} and {}", name(one), name(other)),
            [one, others @ ..] => format!("{} and {} other jobs", name(one), others.len()),
        };
        match self.slots_kept {
            Some(kept) if kept != self.slots_free => format!(", {kept} of them kept for {names}"),
            _ => format!(", kept for {names}"),
        }
    }

    /// `; free on each machine: 1 of 2 on "a", 0 of 4 on "b"`. Empty if a single machine takes the job.
    fn free_by_machine(&self) -> String {
        if self.slots_on.is_empty() {
            return String::new();
        }
        let named = self.slots_on.iter().take(MAX_SLOTS_ON);
        let named: Vec<_> =
            named.map(|on| format!("{} of {} on {:?}", on.free, on.total, on.agent)).collect();
        let others = if self.slots_on.len() > MAX_SLOTS_ON { ", and others" } else { "" };
        format!("; free on each machine: {}{others}", named.join(", "))
    }
}

/// The consequence of a reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "does", rename_all = "snake_case")]
pub enum Next {
    /// Another attempt starts from the checkpoint of `from_step`; null: from the beginning. If `or_newer` is true, the attempt starts
    /// from a newer checkpoint if there is one that the last attempt has not reported.
    Restart {
        attempt: u32,
        from_step: Option<u64>,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        or_newer: bool,
    },
    /// The job waits for slots, and then continues.
    Continue { from_step: Option<u64> },
    /// The job continues when somebody resumes it.
    ContinueWhenResumed { from_step: Option<u64> },
    /// No further attempt starts, because `recovery.max_restarts` allows only this many restarts.
    GiveUp { restarts: u32 },
}

impl fmt::Display for Next {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from =
            |step: &Option<u64>| step.map_or("the beginning".to_owned(), |step| format!("step {step}"));
        match self {
            Next::Restart { attempt, from_step, or_newer } => {
                let newer = if *or_newer { ", or from a newer checkpoint if one was written" } else { "" };
                write!(f, "attempt {attempt} starts from {}{newer}", from(from_step))
            }
            Next::Continue { from_step } => write!(f, "continues from {}", from(from_step)),
            Next::ContinueWhenResumed { from_step } => {
                write!(f, "continues from {} when resumed", from(from_step))
            }
            Next::GiveUp { restarts: 0 } => f.write_str("no restart is allowed (recovery.max_restarts = 0)"),
            Next::GiveUp { restarts: 1 } => {
                f.write_str("it had been restarted once, as often as recovery.max_restarts allows")
            }
            Next::GiveUp { restarts } => {
                write!(f, "it had been restarted {restarts} times, as often as recovery.max_restarts allows")
            }
        }
    }
}

/// Why a job or an attempt is in its state. The words are made together with the reason, so a program of another
/// version that does not know the code shows the same words.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Reason {
    // Boxed, so that messages with a reason stay small.
    #[serde(flatten, serialize_with = "serialize_facts")]
    #[schema(value_type = ReasonKind)]
    kind: Box<ReasonKind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<Next>,
    /// Sentence for a person: `rank 3 was killed by signal 9 at step 1041; attempt 2 starts from step 1000`.
    #[schema(value_type = String)]
    words: Text,
}

/// The code and its facts. Facts that are not known are absent in JSON, not null.
fn facts(kind: &ReasonKind) -> Map<String, Value> {
    let Ok(Value::Object(mut facts)) = serde_json::to_value(kind) else { return Map::new() };
    facts.retain(|_, fact| !fact.is_null());
    facts
}

fn serialize_facts<S: Serializer>(kind: &ReasonKind, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(facts(kind))
}

impl Reason {
    /// Adds a consequence to the reason and to its words.
    #[must_use]
    pub fn then(mut self, next: Next) -> Self {
        self.words = format!("{}; {next}", self.words).into();
        self.next = Some(next);
        self
    }

    pub fn kind(&self) -> &ReasonKind {
        &self.kind
    }

    pub fn next(&self) -> Option<&Next> {
        self.next.as_ref()
    }

    /// The sentence for a person.
    pub fn words(&self) -> &str {
        &self.words
    }

    /// The code in JSON: `rank_killed`.
    pub fn code(&self) -> String {
        facts(&self.kind).get("code").and_then(Value::as_str).unwrap_or_default().to_owned()
    }

    /// The rank that failed first, and the optimizer steps done at that time, as far as they are facts of the reason.
    pub fn rank_and_step(&self) -> (Option<u32>, Option<u64>) {
        let facts = facts(&self.kind);
        let fact = |name: &str| facts.get(name).and_then(Value::as_u64);
        (fact("rank").and_then(|rank| u32::try_from(rank).ok()), fact("step"))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words)
    }
}

impl From<ReasonKind> for Reason {
    fn from(kind: ReasonKind) -> Self {
        let words = kind.to_string().into();
        Self { kind: Box::new(kind), next: None, words }
    }
}

/// A reason with words but without a code.
impl From<String> for Reason {
    fn from(words: String) -> Self {
        ReasonKind::Unspecified { detail: words.into() }.into()
    }
}

impl From<&str> for Reason {
    fn from(words: &str) -> Self {
        words.to_owned().into()
    }
}

/// Also accepts codes, facts and consequences that this version does not know: a newer server may send them.
impl<'a> Deserialize<'a> for Reason {
    fn deserialize<D: Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Complete {
            #[serde(flatten)]
            kind: ReasonKind,
            next: Option<NextOrUnknown>,
            #[serde(default)]
            words: Text,
        }
        /// A consequence, or a value that this version does not know.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum NextOrUnknown {
            Next(Next),
            Unknown(IgnoredAny),
        }
        let Complete { kind, next, words } = Complete::deserialize(from)?;
        let next = match next {
            Some(NextOrUnknown::Next(next)) => Some(next),
            Some(NextOrUnknown::Unknown(_)) | None => None,
        };
        let words = if words.is_empty() { kind.to_string().into() } else { words };
        Ok(Reason { kind: Box::new(kind), next, words })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_value, json, to_value};

    #[test]
    fn json_is_one_flat_object_with_the_facts_of_its_code() {
        let next = Next::Restart { attempt: 2, from_step: Some(1000), or_newer: false };
        let killed = Reason::from(ReasonKind::RankKilled { rank: 3, step: 1041, signal: 9 }).then(next);
        let words = "rank 3 was killed by signal 9 at step 1041; attempt 2 starts from step 1000";
        let json = json!({"code": "rank_killed", "rank": 3, "step": 1041, "signal": 9, "words": words,
            "next": {"does": "restart", "attempt": 2, "from_step": 1000}});
        assert_eq!((to_value(&killed).unwrap(), killed.code()), (json.clone(), "rank_killed".to_owned()));
        // A code without facts, one whose facts are a struct, and the format that agents speak.
        let reasons = [killed, ReasonKind::Unexplained.into(), ReasonKind::WaitingForSlots(wait()).into()];
        for reason in reasons {
            assert_eq!(from_value::<Reason>(to_value(&reason).unwrap()).unwrap(), reason);
            let packed = rmp_serde::to_vec_named(&reason).unwrap();
            assert_eq!(rmp_serde::from_slice::<Reason>(&packed).unwrap(), reason);
        }
    }

    #[test]
    fn an_unknown_code_keeps_its_name_and_words() {
        let newer = json!({"code": "moon_phase", "rank": 1, "phase": 0.5, "next": {"does": "wait", "until": 3},
            "words": "too dark"});
        // A known code without its facts.
        let bare = json!({"code": "rank_killed", "words": "gone"});
        for (json, code, words) in [(newer, "moon_phase", "too dark"), (bare, "rank_killed", "gone")] {
            let read: Reason = from_value(json).unwrap();
            assert_eq!(read.kind(), &ReasonKind::Other(UnknownCode { code: code.into() }));
            assert_eq!((read.words(), read.next()), (words, None));
            assert_eq!(to_value(&read).unwrap(), json!({"code": code, "words": words}));
        }
    }

    #[test]
    fn texts_beyond_the_limit_are_cut_off() {
        let reason = |bytes: usize| Reason::from("ä".repeat(bytes / 2));
        assert_eq!(reason(TEXT_BYTES).words().len(), TEXT_BYTES);
        assert_eq!(reason(TEXT_BYTES + 2).words().len(), TEXT_BYTES);
        let long = json!({"code": "agent_left", "words": "w".repeat(3000), "agent": "a".repeat(3000)});
        let read: Reason = from_value(long).unwrap();
        let ReasonKind::AgentLeft { agent } = read.kind() else { panic!("{read:?}") };
        assert_eq!((read.words().len(), agent.len()), (TEXT_BYTES, TEXT_BYTES));
    }

    fn wait() -> SlotWait {
        SlotWait {
            device: Device::Cpu,
            slots_needed: 2,
            slots_free: 2,
            slots_total: 4,
            agent: Some("a".into()),
            machines: None,
            slots_kept: None,
            kept_for: Vec::new(),
            slots_on: Vec::new(),
            detail: None,
        }
    }

    #[test]
    fn a_wait_names_the_jobs_for_which_slots_are_kept() {
        let waits = |slots_kept: u32, names: &[&str]| {
            let kept_for = names.iter().map(|name| (*name).into()).collect();
            ReasonKind::WaitingForSlots(SlotWait { slots_kept: Some(slots_kept), kept_for, ..wait() })
                .to_string()
        };
        let free = "waits for 2 slots: 2 of 4 on \"a\" free";
        assert_eq!(waits(0, &[]), free);
        assert_eq!(waits(2, &["large"]), format!("{free}, kept for \"large\""));
        assert_eq!(waits(1, &["large"]), format!("{free}, 1 of them kept for \"large\""));
        assert_eq!(waits(2, &["", "b"]), format!("{free}, kept for another job and \"b\""));
        assert_eq!(waits(2, &["a", "b", ""]), format!("{free}, kept for \"a\" and 2 other jobs"));
    }

    #[test]
    fn a_wait_names_every_machine_that_takes_the_job() {
        use ReasonKind::{TooFewSlots, WaitingForSlots};
        let on = |agent: &str, free, total| AgentSlots { agent: agent.into(), free, total };
        let slots_on = vec![on("a", 1, 2), on("b", 0, 2)];
        let one = SlotWait { slots_needed: 4, slots_free: 1, slots_on, ..wait() };
        let two = SlotWait { agent: None, machines: Some(2), ..one.clone() };
        let machines = "; free on each machine: 1 of 2 on \"a\", 0 of 2 on \"b\"";
        for (kind, message) in [
            (WaitingForSlots(two.clone()), "waits for 4 slots: 1 of 4 on 2 machines free"),
            (WaitingForSlots(one.clone()), "waits for 4 slots"),
            (TooFewSlots(two.clone()), "needs 4 slots; 2 online machines have 4 in all, 1 of them free"),
            (TooFewSlots(one), "needs 4 slots; the largest online machine, \"a\", has 4"),
        ] {
            assert_eq!(kind.to_string(), format!("{message}{machines}"));
        }
        let slots_on = (0..20).map(|n| on(&format!("m{n}"), 0, 1)).collect();
        let many = WaitingForSlots(SlotWait { slots_on, ..two }).to_string();
        assert!(many.ends_with("0 of 1 on \"m7\", and others"), "{many}");
    }
}
