//! Starts or adopts the ranks of an attempt, and decides when they end.

use super::{
    super::{
        lease::Lease, preflight::Refusal, salvage::ReportedCheckpoints, spares::Spares,
        state_dir::StoredAttempt,
    },
    AttemptContext, Order, StartMode,
};
use crate::{
    checkpoint,
    rank::RankConfig,
    supervisor::{
        EndDelays, Orphans, Policy, Rank, RankEnd, RankGroup, RankProcess, RecordSink, Stop, configs,
        supervise,
    },
};
use lockstep_protocol::{
    agent::{AttemptEvent, Ending},
    reason::{Reason, ReasonKind},
};
use std::{
    convert::Infallible,
    io,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{sync::mpsc, task::spawn_blocking};

/// Interval between two reads of the ranks' records.
const READ_EVERY: Duration = Duration::from_millis(100);
/// Time from SIGTERM to SIGKILL.
pub(super) const GRACE: Duration = Duration::from_secs(5);
/// Time from SIGTERM to SIGKILL after another rank was killed or died, if no checkpoint is being written. The work of
/// the remaining ranks is then lost. They end by themselves, unless they wait for their GPU.
const GRACE_AFTER_DEATH: Duration = Duration::from_millis(1500);
/// Time before SIGTERM for ranks that were asked to write a checkpoint and end.
const SAVE_LIMIT: Duration = Duration::from_secs(120);
/// Time for the other ranks after the first rank has ended, if ranks stop without an order of this agent.
const OTHERS_END_LIMIT: Duration = Duration::from_secs(20);
/// Time to wait for a rank's own reason after another rank has lost the connection to it.
const PROVISIONAL_DELAY: Duration = Duration::from_secs(1);

/// The part of a rank's records that the agent keeps in memory.
#[derive(Default)]
pub(super) struct RecordSummary {
    /// The number of lines of the rank's log so far.
    pub(super) lines: u64,
    pub(super) reported: ReportedCheckpoints,
    /// Whether the rank has recorded the results of a step.
    is_training: bool,
}

impl RecordSink for RecordSummary {
    fn record(&mut self, event: AttemptEvent) {
        self.reported.record(&event);
        // Every rank reports this metric for each step. Metrics of the machine are reported before the first step, too.
        self.is_training |= matches!(&event, AttemptEvent::Metrics { columns, .. } if columns.iter().any(|c| c.name == "step_ms"));
        if let AttemptEvent::Log { lines, .. } = event {
            self.lines = lines.iter().map(|line| line.number).fold(self.lines, u64::max);
        }
    }
}

/// An attempt whose ranks are being watched.
pub(super) struct Watch {
    pub(super) stored: StoredAttempt,
    lease: Arc<Lease>,
    /// The earliest time to start spares for the next attempt. They start only after a rank has begun to train, because the rank
    /// then has the GPU memory that it needs. `None` after they were started.
    next_spares: Option<(Instant, Arc<Spares>)>,
    orders: mpsc::UnboundedReceiver<Order>,
    last_read: Instant,
    /// The attempt's ending, if it was decided before all ranks had ended.
    pub(super) decided: Option<Ending>,
    /// Whether the ranks end because another rank was killed or died.
    has_peer_died: bool,
    /// Time before SIGTERM for ranks that should write a checkpoint, if `is_leaving`.
    leave_within: Duration,
    /// Whether this agent is about to end, or its spool is full.
    is_leaving: bool,
    /// The number of processes that the kernel's OOM killer had killed when this watch began.
    pub(super) oom_kills: Option<u64>,
}

impl Watch {
    /// Starts the ranks, or adopts the ranks of an earlier agent.
    pub(super) async fn begin(
        stored: StoredAttempt,
        context: &AttemptContext,
        orders: mpsc::UnboundedReceiver<Order>,
        mode: StartMode,
    ) -> (Self, RankGroup<RecordSummary>) {
        let mut this = Self {
            stored,
            lease: context.lease.clone(),
            next_spares: Some((Instant::now() + context.spare_delay, context.spares.clone())),
            orders,
            last_read: Instant::now(),
            decided: None,
            has_peer_died: false,
            leave_within: Duration::from_secs(context.stop_within_secs.into()),
            is_leaving: false,
            oom_kills: lockstep_host::oom_kills(),
        };
        let mut ranks = RankGroup::new(Orphans::Stay);
        ranks.kills_suspended = true;
        let decided = match mode {
            StartMode::Launch => {
                let launched = this.launch(context, &mut ranks).await;
                launched.err().map(|error| refusal_ending(Refusal::NotStarted(error.to_string())))
            }
            StartMode::Over(ending) => Some(ending),
            StartMode::Adopt => {
                let dir = this.stored.attempt_dir();
                let adopt = |(rank, _): &(u32, u32)| this.watch_rank(RankProcess::adopt(&dir, *rank));
                ranks.ranks = this.stored.start.ranks.iter().map(adopt).collect();
                this.has_started_no_rank().then(|| restart_ending(context))
            }
        };
        if decided.is_some() {
            this.decided = decided;
            ranks.stop(Stop::Terminate);
        }
        (this, ranks)
    }

    async fn launch(&self, context: &AttemptContext, ranks: &mut RankGroup<RecordSummary>) -> io::Result<()> {
        let start = &self.stored.start;
        let devices = context.devices_of(start);
        for config in configs(start, &devices, Some(&context.fence), &self.stored.job_dir) {
            let config = RankConfig { stop_within_secs: context.stop_within_secs, ..config };
            let (program, spare) = (context.program.clone(), context.spares.take(config.slot));
            // Blocks until a spare that cannot become the rank has ended.
            let start = move || RankProcess::start(&program, &config, spare);
            ranks.ranks.push(self.watch_rank(spawn_blocking(start).await??));
        }
        Ok(())
    }

    /// Whether an earlier agent ended before it started any of the ranks.
    fn has_started_no_rank(&self) -> bool {
        let dir = self.stored.attempt_dir();
        !self.stored.start.ranks.iter().any(|(rank, _)| RankProcess::has_begun(&dir, *rank))
    }

    fn watch_rank(&self, process: RankProcess) -> Rank<RecordSummary> {
        Rank::of_attempt(process, &self.stored.attempt_dir(), RecordSummary::default())
    }

    /// Watches the ranks until they end, and records how the attempt ended.
    pub(super) async fn run(mut self, mut ranks: RankGroup<RecordSummary>) {
        let Ok(()) = supervise(&mut self, &mut ranks).await;
        self.conclude(ranks).await;
    }

    /// Whether a rank is running and a checkpoint is being written.
    fn is_writing(&self, ranks: &RankGroup<RecordSummary>) -> bool {
        ranks.ends().any(|end| end.exit.is_none())
            && checkpoint::is_being_written(&self.stored.checkpoints_dir())
    }

    /// The reason that names the slowest rank, if a rank has reported nothing for too long.
    fn stall_reason(&self, ranks: &RankGroup<RecordSummary>) -> Option<Reason> {
        let secs = self.stored.start.spec.recovery.stall_timeout_secs;
        let limit = Duration::from_secs(secs.into());
        let running = || ranks.ranks.iter().filter(|rank| rank.end.exit.is_none());
        running().find(|rank| rank.last_report.elapsed() > limit)?;
        // Ranks that wait for the slowest rank are equally silent.
        let slowest = running().min_by_key(|rank| {
            (!rank.process.is_suspended(), rank.end.step, rank.last_report, rank.end.rank)
        })?;
        let RankEnd { rank, step, .. } = slowest.end;
        let suspended = slowest.process.is_suspended();
        let detail = suspended.then(|| "its process is suspended (SIGSTOP)".into());
        Some(ReasonKind::Stalled { rank, step, secs: Some(secs.into()), detail }.into())
    }
}

impl Policy for Watch {
    type Records = RecordSummary;
    type Order = Order;
    type Error = Infallible;

    const POLL_EVERY: Duration = Duration::from_millis(20);

    async fn next_order(&mut self) -> Order {
        match self.orders.recv().await {
            Some(order) => order,
            None => std::future::pending().await,
        }
    }

    fn obey(&mut self, order: Order, ranks: &mut RankGroup<RecordSummary>) {
        let how = match &order {
            Order::Stop { patient: false } => Stop::Terminate,
            Order::Stop { patient: true } => Stop::Save { within: SAVE_LIMIT },
            Order::Leave | Order::SpoolFull(_) => Stop::Save { within: self.leave_within },
        };
        self.is_leaving |= matches!(order, Order::Leave | Order::SpoolFull(_));
        // Only the first decision counts.
        if !ranks.is_stopping() {
            self.decided = Some(order.ending());
        }
        ranks.stop(how);
    }

    fn observe(&mut self, ranks: &mut RankGroup<RecordSummary>) -> Result<(), Infallible> {
        if self.last_read.elapsed() >= READ_EVERY {
            self.last_read = Instant::now();
            for rank in &mut ranks.ranks {
                // Damage is reported at the end. A file that cannot be read now may be readable later.
                let _ = rank.read();
            }
            if ranks.ranks.iter().any(|rank| rank.sink.is_training)
                && let Some((_, spares)) = self.next_spares.take_if(|(at, _)| Instant::now() >= *at)
            {
                spares.fill();
            }
        }
        Ok(())
    }

    fn decide(&mut self, ranks: &mut RankGroup<RecordSummary>) {
        let failed = |reason| Some(Ending::Failed { reason, retriable: true });
        if let Some(silent) = self.lease.silence_if_expired() {
            self.decided = failed(ReasonKind::ServerSilent { secs: silent.as_secs() as f64 }.into());
        } else if ranks.failure_cause().is_some() {
            // Ranks that stop without an order of this agent, such as after a user's signal, have time for their
            // checkpoint.
            let stopping =
                if self.is_leaving { self.leave_within } else { OTHERS_END_LIMIT.max(self.leave_within) };
            let delays = EndDelays { certain: Duration::ZERO, provisional: PROVISIONAL_DELAY, stopping };
            if !ranks.must_end(delays) {
                return;
            }
            self.has_peer_died = ranks.ends().any(RankEnd::is_death);
        } else if let Some(reason) = self.stall_reason(ranks) {
            self.decided = failed(reason);
        } else {
            return;
        }
        ranks.stop(Stop::Terminate);
    }

    fn grace(&self, ranks: &RankGroup<RecordSummary>) -> Duration {
        if self.has_peer_died && !self.is_writing(ranks) { GRACE_AFTER_DEATH } else { GRACE }
    }
}

/// The ending of an attempt whose agent ended before it started any rank.
fn restart_ending(context: &AttemptContext) -> Ending {
    let agent = context.remote.name.as_str().into();
    Ending::Failed { reason: ReasonKind::AgentRestarted { agent }.into(), retriable: true }
}

pub(super) fn refusal_ending(refusal: Refusal) -> Ending {
    let retriable = matches!(refusal, Refusal::CheckpointDamaged(_));
    let kind = match refusal {
        Refusal::DatasetUnusable(why) => {
            ReasonKind::DatasetUnusable { rank: None, step: None, detail: why.into() }
        }
        Refusal::DiskFull(why) => ReasonKind::DiskFull { detail: why.into() },
        Refusal::SharedMemoryTooSmall(why) => ReasonKind::SharedMemoryTooSmall { detail: why.into() },
        Refusal::CheckpointDamaged(why) | Refusal::NotStarted(why) => {
            ReasonKind::NotStarted { detail: why.into() }
        }
    };
    Ending::Failed { reason: kind.into(), retriable }
}
