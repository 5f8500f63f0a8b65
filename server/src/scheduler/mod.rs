//! The scheduler: which waiting job gets which slots, and why the other jobs wait.
//!
//! [`plan`] is a pure function from a [`Snapshot`] to a [`Plan`]. Dispatch takes the snapshot and carries out the plan. Pages and REST show
//! the newest plan ([`LastPlan`]). The rules, in the order in which they are applied to a job:
//!
//! 1. Jobs are considered by priority, then fair share (`share.rs`), then age. Slots that a job gets or reserves are not available to later
//!    jobs.
//! 2. A job that cannot be read never starts, and no trial of a paused sweep does. A restarting job first waits for its backoff.
//! 3. A job gets all of its slots or none: on one agent, otherwise on the fewest agents that reach each other (`gang.rs`). An agent that is
//!    drained, is being stopped, is silent or was given up takes no job, and an agent of a launch takes only the launch's job.
//! 4. A job that does not fit counts on slots of jobs that are ending, then on slots of preemptible jobs of lower priority (`preempt.rs`).
//!    These slots are reserved for the job.
//! 5. A job that has lost an attempt takes fewer ranks once it has waited for `recovery.wait_seconds` (`fewer.rs`).
//! 6. Otherwise the agents with the most slots, free or in use, are reserved for the job, so that small jobs do not starve a large one.
//! 7. A job that has its slots may have to wait for its newest checkpoint. Other jobs get the slots meanwhile, unless the checkpoint is
//!    only being checked.

use crate::{
    agents::Agents,
    checkpoints::{Checkpoints, Wait},
    config::{FairShare, ServeConfig},
    datasets::Datasets,
    events::Events,
    store::{AgentRow, JobRow, Occupant, ShareUse, Store},
    util::tasks::Tasks,
};
use jiff::Timestamp;
use lockstep_protocol::{
    backoff::Backoff,
    job::{Job, JobId, JobState, TrialOf},
    reason::{Reason, ReasonKind},
};
use place::place_job;
use round::Round;
use share::{Queue, share};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Notify;

mod candidates;
pub(crate) mod dispatch;
mod fewer;
mod gang;
mod last_plan;
pub(crate) mod new_jobs;
mod place;
mod preempt;
mod reasons;
mod round;
mod share;
pub(crate) mod sweeps;
mod waiting_jobs;

pub(crate) use candidates::address;
pub(crate) use gang::max_capacity_of;
pub(crate) use last_plan::LastPlan;
pub(crate) use round::device_for;
pub(crate) use waiting_jobs::JobQueue;

/// Backoff of restarts: the first restart is immediate, and the second waits for the first pause.
const RESTART: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));

/// The queue, the newest plan, and the parts of the server that carry out plans.
pub(crate) struct Scheduler {
    pub(crate) config: Arc<ServeConfig>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) events: Arc<Events>,
    pub(crate) agents: Arc<Agents>,
    pub(crate) checkpoints: Arc<Checkpoints>,
    pub(crate) datasets: Arc<Datasets>,
    /// The queue.
    pub(crate) waiting: Arc<JobQueue>,
    pub(crate) last_plan: LastPlan,
    /// Notified when a sweep, or a trial of a sweep, has changed.
    pub(crate) sweeps_changed: Arc<Notify>,
    pub(crate) tasks: Tasks,
    /// When this server started, on the wall clock and on the monotonic clock.
    started_at: Timestamp,
    up_since: Instant,
}

impl Scheduler {
    pub(crate) fn new(
        checkpoints: Arc<Checkpoints>,
        datasets: Arc<Datasets>,
        waiting: Arc<JobQueue>,
        sweeps_changed: Arc<Notify>,
        tasks: Tasks,
    ) -> Self {
        Self {
            config: Arc::clone(&checkpoints.config),
            store: Arc::clone(&checkpoints.store),
            events: Arc::clone(&checkpoints.events),
            agents: Arc::clone(&checkpoints.agents),
            checkpoints,
            datasets,
            waiting,
            last_plan: LastPlan::default(),
            sweeps_changed,
            tasks,
            started_at: crate::now(),
            up_since: Instant::now(),
        }
    }

    /// Fills in what the database does not have of a job: a waiting job's place and current reason, and why reports cannot be stored now.
    pub(crate) fn fill_in(&self, job: &mut Job) {
        self.last_plan.fill_in(job);
        self.events.show_store_failure(job);
    }
}

/// The input of a plan.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) now: Timestamp,
    /// When the server started. Shortly after, agents may still be reconnecting.
    pub(crate) started_at: Timestamp,
    /// The connected agents, by name.
    pub(crate) agents: Vec<Arc<AgentState>>,
    /// Waiting jobs: the highest priority first, then the oldest.
    pub(crate) waiting: Vec<Arc<JobRow>>,
    /// Running jobs whose slots other jobs may count on: the lowest priority first, then the newest.
    pub(crate) yielding_jobs: Vec<YieldingJob>,
    /// The names of the sweeps whose waiting trials must not start, by id.
    pub(crate) paused_sweeps: HashMap<String, String>,
    pub(crate) fair_share: FairShare,
    /// The use of slots by owner or project, as `fair_share` says.
    pub(crate) slots_of_shares: HashMap<String, ShareUse>,
    /// Whether jobs must wait for a checkpoint, by job and the agent of rank 0, which reads it. `None`: the job need not wait.
    pub(crate) checkpoint_waits: HashMap<(JobId, String), Option<Wait>>,
}

/// A connected agent.
#[derive(Debug, Clone)]
pub(crate) struct AgentState {
    pub(crate) row: Arc<AgentRow>,
    /// The only job that the agent takes (`None`: any job).
    pub(crate) only_job: Option<JobId>,
    pub(crate) takes_work: bool,
    pub(crate) is_drained: bool,
    /// Slots that attempts hold.
    pub(crate) slots_in_use: HashSet<u32>,
}

/// A slot: the id of its agent, and its index.
pub(crate) type AgentSlot = (String, u32);

/// A running job that ends or may be preempted.
#[derive(Debug, Clone)]
pub(crate) struct YieldingJob {
    pub(crate) occupant: Occupant,
    /// Whether the job's slots become free soon without a further preemption.
    pub(crate) is_ending: bool,
    pub(crate) slots: Vec<AgentSlot>,
}

/// The decisions that follow from a snapshot.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// In the order in which the jobs were considered.
    pub(crate) starts: Vec<Start>,
    pub(crate) preemptions: Vec<Preemption>,
    /// Jobs that keep waiting, in the order in which they were considered.
    pub(crate) waiting: Vec<WaitingJob>,
    pub(crate) reservations: Vec<Reservation>,
    /// Jobs that have slots and may have to wait for a checkpoint that the snapshot does not contain, with the agent of rank 0. The plan
    /// assumes that they need not wait. It must not be carried out before the snapshot contains these checkpoints.
    pub(crate) unknown_checkpoints: Vec<(Arc<JobRow>, String)>,
}

/// A job that starts, with agents and slots. The first agent gets rank 0.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) row: Arc<JobRow>,
    pub(crate) chosen: Vec<(Arc<AgentState>, Vec<u32>)>,
    /// The number of ranks and the reason, if the job starts on fewer ranks.
    pub(crate) fewer_ranks_reason: Option<Reason>,
}

/// Running jobs that end in favour of a waiting job.
#[derive(Debug)]
pub(crate) struct Preemption {
    /// The waiting job.
    pub(crate) row: Arc<JobRow>,
    pub(crate) victims: Vec<JobId>,
    /// Jobs that are already ending and whose slots the waiting job counts on.
    pub(crate) ending: Vec<JobId>,
    /// Number of the plan's starts that come before this preemption.
    pub(crate) starts_before: usize,
}

/// A job that keeps waiting.
#[derive(Debug)]
pub(crate) struct WaitingJob {
    pub(crate) row: Arc<JobRow>,
    /// `None` if the job's own cause is the reason: the job waits for its backoff, or its lost attempt is not handled yet.
    pub(crate) why: Option<Arc<Reason>>,
}

/// The slots that are reserved for a waiting job on one agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reservation {
    pub(crate) job: JobId,
    pub(crate) agent_id: String,
    /// Reserved slots that are free.
    pub(crate) free: Vec<u32>,
    /// Reserved slots of jobs that are ending.
    pub(crate) ending: Vec<u32>,
    /// Whether later jobs get no slots of the agent.
    pub(crate) is_whole_machine: bool,
    /// When the first of successive plans reserved something on the agent for the job.
    pub(crate) since: Timestamp,
}

/// Decides which waiting jobs start on which slots, which running jobs are preempted, and why all other jobs wait.
pub(crate) fn plan(snapshot: &Snapshot) -> Plan {
    let mut round = Round::new(snapshot);
    let mut queue = Queue::new(snapshot.slots_of_shares.clone());
    // Fair share applies only among jobs of the same priority.
    for level in snapshot.waiting.chunk_by(|one, next| one.job.spec.priority == next.job.spec.priority) {
        queue.fill(level.iter().map(|row| (share(snapshot.fair_share, &row.job), row)));
        let mut slots_given = 0;
        while let Some(row) = queue.next(slots_given) {
            slots_given = 0;
            if !is_due(row, snapshot.now) {
                round.plan.waiting.push(WaitingJob { row: Arc::clone(row), why: None });
                continue;
            }
            let paused = |trial: &TrialOf| snapshot.paused_sweeps.get_key_value(&trial.sweep);
            if let Some((sweep, name)) = row.job.trial.as_ref().and_then(paused) {
                let (sweep, detail) = (sweep.as_str().into(), name.as_str().into());
                let why = Arc::new(ReasonKind::WaitingForSweep { sweep, detail }.into());
                round.plan.waiting.push(WaitingJob { row: Arc::clone(row), why: Some(why) });
                continue;
            }
            let wait = place_job(&mut round, row);
            // The job starts if it has no wait.
            if wait.as_ref().is_none_or(|wait| wait.keeps_slots) {
                slots_given = row.job.ranks;
            }
            if let Some(Wait { why, .. }) = wait {
                round.plan.waiting.push(WaitingJob { row: Arc::clone(row), why: Some(why) });
            }
        }
    }
    round.plan
}

/// Whether a job may start now. A lost attempt is handled first, and a restart waits for its backoff.
fn is_due(row: &JobRow, now: Timestamp) -> bool {
    match row.job.state {
        JobState::Queued => true,
        JobState::Restarting => {
            let since = row.waiting_since.unwrap_or(row.job.created_at);
            // If the clock is set back, the backoff must not be prolonged by the same time.
            now.duration_since(since).unsigned_abs() >= backoff(row.restarts)
        }
        _ => false,
    }
}

/// The delay before restart number `restart` of a job, counted from 1.
fn backoff(restart: u32) -> Duration {
    match restart {
        0 | 1 => Duration::ZERO,
        n => RESTART.pause_after(n - 1),
    }
}

#[cfg(test)]
mod tests;
