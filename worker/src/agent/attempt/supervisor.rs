//! Starts or takes over the ranks of an attempt, watches and ends them, and gives the verdict.

use super::{
    super::{
        home::Held,
        machine,
        preflight::Refusal,
        verdict::{RankEnd, cause},
    },
    Beginning, Order, Surroundings, agent_events_path,
    watched::{Watched, stderr_lines},
};
use crate::{
    checkpoint,
    gpu::RankGpu,
    host,
    launch::{Exit, RankProcess},
    rank::RankConfig,
    report::Records,
};
use lockstep_protocol::{
    agent::{AttemptEvent, CheckpointInfo, Ending, LogLine},
    reason::{Facts, Reason, ReasonCode},
};
use rustix::process::Signal;
use std::{
    fs, io,
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// How often processes are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often their records are looked at.
const READ_EVERY: Duration = Duration::from_millis(100);
/// From TERM to KILL.
pub(super) const GRACE: Duration = Duration::from_secs(5);
/// The same when another rank was killed or died: what the others still do is in vain, unless rank 0 is writing a
/// checkpoint. They end by themselves; what holds one up is its GPU.
const GRACE_AFTER_DEATH: Duration = Duration::from_millis(1500);
/// For ranks that are to keep a checkpoint, before TERM: when they are paused, and when their agent is to end.
const PAUSE: Duration = Duration::from_secs(120);
const LEAVE: Duration = Duration::from_secs(20);
/// Ranks that are still there this long after the first KILL are named and given up.
const UNKILLABLE: Duration = Duration::from_secs(30);
/// A rank that only lost contact to another waits this long for the other's own reason.
const SETTLE: Duration = Duration::from_secs(1);

pub(super) struct Supervisor {
    held: Held,
    dir: PathBuf,
    pub(super) ranks: Vec<Watched>,
    /// Decided before the ranks are gone.
    verdict: Option<Ending>,
    /// Since when the ranks are told to end, and how often they were killed.
    ending: Option<(Instant, u32)>,
    /// Until then they may finish their step and keep a checkpoint.
    patience: Option<Instant>,
    trouble_since: Option<Instant>,
    /// They end because another one was killed or died.
    peer_died: bool,
    /// Processes that the kernel's OOM killer had ended when this began.
    oom_kills: Option<u64>,
}

impl Supervisor {
    pub(super) fn new(held: Held, around: &Surroundings, beginning: Beginning) -> Self {
        let dir = held.attempt_dir();
        let mut this = Self {
            held,
            dir,
            ranks: Vec::new(),
            verdict: None,
            ending: None,
            patience: None,
            trouble_since: None,
            peer_died: false,
            oom_kills: machine::oom_kills(),
        };
        match beginning {
            Beginning::Launch { refusal } => {
                let launched = refusal
                    .map_or_else(|| this.launch(around).map_err(|e| Refusal::other(e.to_string())), Err);
                if let Err(Refusal { code, detail }) = launched {
                    let reason = Reason::new(code, Facts { detail: Some(detail), ..Facts::default() });
                    this.end(Some(Ending::Failed { reason, retriable: false }), None);
                }
            }
            Beginning::Over(ending) => this.end(Some(ending), None),
            Beginning::Adopt => {
                let adopted =
                    |(rank, _): &(u32, u32)| Watched::new(RankProcess::adopt(&this.dir, *rank), &this.dir);
                this.ranks = this.held.start.ranks.iter().map(adopted).collect();
            }
        }
        this
    }

    fn launch(&mut self, around: &Surroundings) -> io::Result<()> {
        let start = &self.held.start;
        let local_ranks = u32::try_from(start.ranks.len()).unwrap_or(u32::MAX);
        let threads = (machine::cores() / local_ranks.max(1)).max(1);
        // In rank order, for all ranks to see.
        let visible: Vec<String> =
            start.ranks.iter().filter_map(|(_, slot)| around.gpus.get(slot).cloned()).collect();
        for (ordinal, &(rank, slot)) in (0..).zip(&start.ranks) {
            let gpu = (visible.len() == start.ranks.len() && !visible.is_empty())
                .then(|| RankGpu { ordinal, visible: visible.clone() });
            let config = RankConfig {
                start: start.clone(),
                rank,
                slot,
                local_ranks,
                threads,
                gpu,
                lease: Some(around.fence.clone()),
                job_dir: self.held.job_dir.clone(),
            };
            let process = RankProcess::start(&around.program, &config)?;
            self.ranks.push(Watched::new(process, &self.dir));
        }
        Ok(())
    }

    pub(super) async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>, around: &Surroundings) {
        let mut read_at = Instant::now();
        loop {
            tokio::select! {
                Some(order) = orders.recv() => self.obey(order),
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
            self.ranks.iter_mut().for_each(|rank| rank.look(&self.dir));
            if self.ranks.iter().all(|rank| rank.end.exit.is_some()) || self.is_hopeless() {
                break;
            }
            if read_at.elapsed() >= READ_EVERY {
                read_at = Instant::now();
                self.ranks.iter_mut().for_each(Watched::read);
            }
            self.decide(around);
        }
        self.conclude().await;
    }

    fn obey(&mut self, order: Order) {
        let patience = match &order {
            Order::Stop { patient: false } => None,
            Order::Stop { patient: true } => Some(PAUSE),
            Order::Leave | Order::Full(_) => Some(LEAVE),
        };
        if self.ending.is_some() && patience.is_none() && self.patience.take().is_some() {
            // Asked nicely before; now it is urgent.
            self.ending = Some((Instant::now(), 0));
            return self.signal(Signal::TERM);
        }
        // What was decided first stays.
        self.end(self.ending.is_none().then(|| order.ending()), patience);
    }

    /// Ends the ranks when there is a reason to, and sees to it that they do end.
    fn decide(&mut self, around: &Surroundings) {
        if let Some(until) = self.patience {
            let broken = self.ranks.iter().any(|r| {
                r.end.exit.is_some_and(|e| !matches!(e, Exit::Status(crate::rank::EXIT_STOPPED | 0)))
            });
            if broken || Instant::now() >= until {
                self.patience = None;
                self.ending = Some((Instant::now(), 0));
                self.signal(Signal::TERM);
            }
            return;
        }
        if let Some((since, killed)) = self.ending {
            let in_vain = self.peer_died && !self.is_writing();
            let grace = if in_vain { GRACE_AFTER_DEATH } else { GRACE };
            if since.elapsed() >= grace + Duration::from_secs(1) * killed {
                self.ending = Some((since, killed + 1));
                self.signal(Signal::KILL);
            }
            return;
        }
        if let Some(silent) = around.lease.overdue() {
            let facts = Facts { secs: Some(silent.as_secs() as f64), ..Facts::default() };
            let reason = Reason::new(ReasonCode::ServerSilent, facts);
            return self.end(Some(Ending::Failed { reason, retriable: true }), None);
        }
        let ends: Vec<_> = self.ranks.iter().map(|r| r.end.clone()).collect();
        if let Some((_, provisional)) = cause(&ends) {
            let since = *self.trouble_since.get_or_insert_with(Instant::now);
            // Somebody told a rank to stop, and all of them do: rank 0 may still be writing their checkpoint.
            let stopping = ends.iter().all(RankEnd::is_stopping);
            let settle = if stopping { LEAVE } else { SETTLE };
            if !provisional || since.elapsed() >= settle {
                self.peer_died = ends.iter().any(RankEnd::is_death);
                self.end(None, None);
            }
        } else if let Some(reason) = self.stalled() {
            self.end(Some(Ending::Failed { reason, retriable: true }), None);
        }
    }

    /// Whether rank 0 is there, and a checkpoint is begun.
    fn is_writing(&self) -> bool {
        self.ranks.iter().any(|r| r.end.rank == 0 && r.end.exit.is_none())
            && checkpoint::is_being_written(&self.held.job_dir.join("checkpoints"))
    }

    /// Whether ranks were killed again and again and are still there.
    fn is_hopeless(&self) -> bool {
        self.patience.is_none() && self.ending.is_some_and(|(since, _)| since.elapsed() > GRACE + UNKILLABLE)
    }

    /// Which rank holds up the others, when one has had nothing to say for too long.
    fn stalled(&self) -> Option<Reason> {
        let secs = self.held.start.spec.recovery.stall_timeout_secs;
        let limit = Duration::from_secs(secs.into());
        let running = || self.ranks.iter().filter(|r| r.end.exit.is_none());
        running().find(|r| r.last_news.elapsed() > limit)?;
        // Those that wait for it are as silent as it is.
        let slowest =
            running().min_by_key(|r| (!r.process.is_suspended(), r.end.step, r.last_news, r.end.rank))?;
        let RankEnd { rank, step, .. } = slowest.end;
        let suspended = slowest.process.is_suspended();
        let facts = Facts {
            rank: Some(rank),
            step: Some(step),
            secs: Some(secs.into()),
            detail: suspended.then(|| "its process is suspended (SIGSTOP)".to_owned()),
            ..Facts::default()
        };
        Some(Reason::new(ReasonCode::Stalled, facts))
    }

    fn end(&mut self, verdict: Option<Ending>, patience: Option<Duration>) {
        if self.verdict.is_none() {
            self.verdict = verdict;
        }
        if self.ending.is_none() {
            self.ending = Some((Instant::now(), 0));
            for rank in &mut self.ranks {
                rank.look(&self.dir);
                rank.end.told_to_end = rank.end.exit.is_none();
            }
            self.patience = patience.map(|p| Instant::now() + p);
            self.signal(if patience.is_some() { Signal::USR1 } else { Signal::TERM });
        }
    }

    fn signal(&mut self, signal: Signal) {
        for rank in &mut self.ranks {
            // One that is suspended hears of nothing else, and the others wait for it.
            let deaf = rank.process.is_suspended() && signal == Signal::TERM;
            rank.process.signal(if deaf { Signal::KILL } else { signal });
        }
    }

    /// Every rank is gone: writes what is left to say, the verdict last.
    async fn conclude(mut self) {
        self.ranks.iter_mut().for_each(Watched::read);
        let left = self.verify_gone().await;
        let untold = self.untold_checkpoints().await;
        let mut events = Vec::new();
        for watched in &self.ranks {
            let RankEnd { rank, ref exit, .. } = watched.end;
            let mut texts = Vec::new();
            if !watched.end.is_success() && !matches!(exit, Some(Exit::Status(crate::rank::EXIT_STOPPED))) {
                texts = stderr_lines(&self.dir, rank);
            }
            texts.extend(watched.unreadable.clone());
            if rank == 0 {
                let found = |c: &CheckpointInfo| {
                    format!("checkpoint {}-{} was written while the rank ended", c.epoch, c.step)
                };
                texts.extend(untold.iter().map(found));
            }
            if rank == 0 && matches!(self.verdict, Some(Ending::Stopped)) {
                texts.extend(watched.told.lost(watched.end.step, &untold));
            }
            if !texts.is_empty() {
                let at = jiff::Timestamp::now();
                let line = |(number, text)| LogLine { number, at, text };
                let lines = (watched.lines + 1..).zip(texts).map(line).collect();
                events.push(AttemptEvent::Log { rank, lines });
            }
        }
        events.extend(untold.into_iter().map(AttemptEvent::Checkpoint));
        let ends: Vec<_> = self.ranks.iter().map(|r| r.end.clone()).collect();
        let ending = if !ends.is_empty() && ends.iter().all(RankEnd::is_success) {
            Ending::Succeeded { step: ends.iter().map(|r| r.step).max().unwrap_or(0) }
        } else {
            let unexplained = || Ending::Failed { reason: ReasonCode::Unexplained.into(), retriable: true };
            self.verdict.clone().or_else(|| Some(cause(&ends)?.0)).unwrap_or_else(unexplained)
        };
        let ending = self.labelled(ending, &ends, left);
        tracing::info!(job = %self.held.start.attempt.job, attempt = self.held.start.attempt.attempt, "{ending}");
        events.push(AttemptEvent::Ended(ending));
        self.write(&events).await;
    }

    /// Whole checkpoints of this attempt that no rank lived to tell of.
    async fn untold_checkpoints(&self) -> Vec<CheckpointInfo> {
        let Some(first) = self.ranks.iter().find(|r| r.end.rank == 0) else { return Vec::new() };
        let told = first.told.clone();
        let recorded = self.ranks.iter().map(|r| r.end.step).min().unwrap_or(0);
        let directory = self.held.job_dir.join("checkpoints");
        // Large ones take a while to check.
        tokio::task::spawn_blocking(move || told.untold(&directory, recorded)).await.unwrap_or_default()
    }

    /// Proof that nothing of the ranks is left, also of what they started; names what cannot be killed.
    async fn verify_gone(&mut self) -> Option<String> {
        let until = Instant::now() + UNKILLABLE;
        loop {
            // Every one of them is swept, whatever is left of the others.
            let left = self.ranks.iter_mut().filter_map(|rank| (!rank.process.sweep()).then_some(())).count();
            if left == 0 {
                return None;
            }
            if self.is_hopeless() || Instant::now() > until {
                break;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let named = self.ranks.iter().flat_map(|rank| {
            let of = rank.end.rank;
            rank.process.remains().into_iter().map(move |(pid, state)| {
                let why = if state == 'D' { ", blocked in the kernel" } else { "" };
                format!("rank {of} (process {pid}, state {state}{why})")
            })
        });
        let named: Vec<_> = named.collect();
        (!named.is_empty()).then(|| named.join(", "))
    }

    /// Adds to the verdict what only the machine knows.
    fn labelled(&self, ending: Ending, ends: &[RankEnd], left: Option<String>) -> Ending {
        // One that has said why it failed ends itself by a signal.
        let killed =
            |end: &RankEnd| end.exit == Some(Exit::Signal(9)) && !end.told_to_end && end.failure.is_none();
        let by_kernel = self.oom_kills.zip(machine::oom_kills()).is_some_and(|(before, now)| now > before);
        let by_kernel = by_kernel && ends.iter().any(killed);
        let refused = ends.iter().any(RankEnd::was_refused_memory);
        match (ending, left) {
            (ending, Some(left)) => {
                let before = match ending {
                    Ending::Failed { reason, .. } => format!("{reason}; "),
                    _ => String::new(),
                };
                let facts = Facts {
                    detail: Some(format!("{before}{left}")),
                    agent: Some(host::hostname()),
                    ..Facts::default()
                };
                Ending::Failed { reason: Reason::new(ReasonCode::Unkillable, facts), retriable: false }
            }
            (Ending::Failed { reason, .. }, None) if by_kernel || refused => {
                let how = if by_kernel {
                    "the kernel ended it to free memory"
                } else {
                    "it may have no more (ulimit -v)"
                };
                let facts = Facts {
                    // Of whichever the verdict names; memory is refused by an abort.
                    signal: reason.facts().signal.or(Some(if by_kernel { 9 } else { 6 })),
                    detail: Some(format!("{reason}; {how}")),
                    ..reason.facts().clone()
                };
                Ending::Failed { reason: Reason::new(ReasonCode::OutOfMemory, facts), retriable: false }
            }
            (ending, None) => ending,
        }
    }

    /// A full disk delays the verdict; it does not lose it.
    async fn write(&self, events: &[AttemptEvent]) {
        let path = agent_events_path(&self.dir);
        let mut written = 0;
        let mut records = None;
        loop {
            let mut attempt = || -> io::Result<()> {
                let records = match &mut records {
                    Some(records) => records,
                    None => {
                        fs::create_dir_all(&self.dir)?;
                        records.insert(Records::append_to(&path)?)
                    }
                };
                while written < events.len() {
                    // What is not taken now is kept by `records` and written by the next call.
                    written += 1;
                    records.append(&events[written - 1])?;
                }
                records.sync()
            };
            match attempt() {
                Ok(()) => return,
                Err(error) => {
                    tracing::error!(%error, path = %path.display(), "the end of an attempt cannot be written; trying again");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}
