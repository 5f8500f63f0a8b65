//! One attempt on this machine: its ranks started or taken over, watched, ended, and the verdict.

use super::{
    home::Held,
    lease::Lease,
    machine,
    salvage::Told,
    verdict::{Failure, RankEnd, cause},
};
use crate::{
    gpu::RankGpu,
    launch::{Exit, RankProcess, rank_file},
    rank::RankConfig,
    report::{Records, Tail, TailError, events_path},
};
use lockstep_protocol::agent::{AttemptEvent, AttemptRef, CheckpointInfo, Ending, LogLine};
use rustix::process::Signal;
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::{Notify, mpsc};

/// How often processes are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often their records are looked at.
const READ_EVERY: Duration = Duration::from_millis(100);
/// From TERM to KILL.
const GRACE: Duration = Duration::from_secs(5);
/// For ranks that are to keep a checkpoint, before TERM: when they are paused, and when their agent is to end.
const PAUSE: Duration = Duration::from_secs(120);
const LEAVE: Duration = Duration::from_secs(20);
/// Ranks that are still there this long after the first KILL are named and given up.
const UNKILLABLE: Duration = Duration::from_secs(30);
/// A rank that only lost contact to another waits this long for the other's own reason.
const SETTLE: Duration = Duration::from_secs(1);
/// What is shown of what a dead rank printed outside its log.
const STDERR_LINES: usize = 20;
const STDERR_BYTES: usize = 64 << 10;

/// What the agent tells an attempt to do.
#[derive(Debug)]
pub(super) enum Order {
    /// The server says so; `patient`: they are to finish their step and keep a checkpoint.
    Stop { patient: bool },
    /// This agent is about to end, in order: they are to keep a checkpoint first.
    Leave,
    /// There is no room for what they say any more: they are to keep a checkpoint and end.
    Full(String),
}

/// The agent's hold on an attempt, whose watching is a task of its own.
#[derive(Debug)]
pub(super) struct Attempt {
    held: Held,
    orders: mpsc::UnboundedSender<Order>,
    over: Arc<AtomicBool>,
}

/// What attempts share.
#[derive(Debug, Clone)]
pub(super) struct Surroundings {
    pub(super) program: PathBuf,
    pub(super) lease: Arc<Lease>,
    /// Where ranks find until when they may go on without an agent.
    pub(super) fence: PathBuf,
    /// What must be so before ranks are started.
    pub(super) check: fn(&Held) -> Result<(), String>,
    /// Rung when an attempt is over.
    pub(super) bell: Arc<Notify>,
    /// The UUIDs of this machine's GPUs, by slot.
    pub(super) gpus: Arc<BTreeMap<u32, String>>,
}

impl Attempt {
    /// Starts its ranks; `refusal` says why they cannot be started.
    pub(super) fn start(held: Held, refusal: Option<String>, around: Surroundings) -> Self {
        Self::watched(held, around, Beginning::Launch { refusal })
    }

    /// Takes over what an earlier agent started, alive, dead or never begun.
    pub(super) fn adopt(held: Held, around: Surroundings) -> Self {
        Self::watched(held, around, Beginning::Adopt)
    }

    fn watched(held: Held, around: Surroundings, beginning: Beginning) -> Self {
        let (orders, received) = mpsc::unbounded_channel();
        let over = Arc::new(AtomicBool::new(false));
        if matches!(beginning, Beginning::Adopt) && ending(&held.attempt_dir()).is_some() {
            over.store(true, Ordering::Release);
        } else {
            let over = over.clone();
            let held = held.clone();
            tokio::spawn(async move {
                let beginning = checked(beginning, &held, around.check).await;
                Supervisor::new(held, &around, beginning).run(received, &around).await;
                over.store(true, Ordering::Release);
                around.bell.notify_one();
            });
        }
        Self { held, orders, over }
    }

    pub(super) fn attempt(&self) -> &AttemptRef {
        &self.held.start.attempt
    }

    pub(super) fn held(&self) -> &Held {
        &self.held
    }

    /// Every rank is gone and all that is to be said is on disk.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Whether its end, which is on disk, is a failure.
    pub(super) fn has_failed(&self) -> bool {
        matches!(ending(&self.held.attempt_dir()), Some(Ending::Failed { .. }))
    }

    pub(super) fn order(&self, order: Order) {
        // Over already: there is nobody left to tell.
        let _ = self.orders.send(order);
    }
}

/// A beginning whose preflight is done: looking at a large dataset takes its time.
async fn checked(beginning: Beginning, held: &Held, check: fn(&Held) -> Result<(), String>) -> Beginning {
    let Beginning::Launch { refusal: None } = beginning else { return beginning };
    let held = held.clone();
    let found = tokio::task::spawn_blocking(move || check(&held)).await;
    Beginning::Launch {
        refusal: found.unwrap_or_else(|e| Err(format!("looking at what they need failed: {e}"))).err(),
    }
}

/// The file of the agent's own records of an attempt.
pub(super) fn agent_events_path(attempt_dir: &Path) -> PathBuf {
    attempt_dir.join("agent.events")
}

/// How an attempt ended, when that is written.
fn ending(attempt_dir: &Path) -> Option<Ending> {
    let mut tail = Tail::open(&agent_events_path(attempt_dir), 0);
    while let Ok(events) = tail.poll() {
        if events.is_empty() {
            break;
        }
        for event in events {
            if let AttemptEvent::Ended(ending) = event {
                return Some(ending);
            }
        }
    }
    None
}

/// What is watched of a rank.
struct Watched {
    process: RankProcess,
    tail: Tail,
    end: RankEnd,
    last_news: Instant,
    /// Lines of its log so far.
    lines: u64,
    told: Told,
    unreadable: Option<String>,
}

impl Watched {
    fn new(process: RankProcess, dir: &Path) -> Self {
        let rank = process.rank();
        Self {
            process,
            tail: Tail::open(&events_path(dir, rank), 0),
            end: RankEnd { rank, ..RankEnd::default() },
            last_news: Instant::now(),
            lines: 0,
            told: Told::default(),
            unreadable: None,
        }
    }

    /// Reads what the rank has recorded since.
    fn read(&mut self) {
        loop {
            match self.tail.poll() {
                Ok(events) if events.is_empty() => return,
                Ok(events) => {
                    self.last_news = Instant::now();
                    events.iter().for_each(|event| self.note(event));
                }
                Err(error) => {
                    if matches!(error, TailError::Damaged { .. }) {
                        self.unreadable = Some(error.to_string());
                    }
                    return;
                }
            }
        }
    }

    fn note(&mut self, event: &AttemptEvent) {
        self.told.note(event);
        let step = &mut self.end.step;
        match event {
            AttemptEvent::Running { start_step, .. } => *step = (*step).max(*start_step),
            AttemptEvent::Metrics { columns, .. } => {
                *step = columns.iter().filter_map(|c| c.steps.last().copied()).fold(*step, u64::max);
            }
            AttemptEvent::Log { lines, .. } => {
                self.lines = lines.iter().map(|l| l.number).fold(self.lines, u64::max);
            }
            AttemptEvent::Rank { report, .. } => {
                *step = (*step).max(report.step);
                self.end.finished |= report.status == "finished";
            }
            AttemptEvent::RankFailed { step: at, reason, retriable, secondary, .. } => {
                *step = (*step).max(*at);
                let (reason, retriable, secondary) = (reason.clone(), *retriable, *secondary);
                self.end.failure.get_or_insert(Failure { reason, retriable, secondary });
            }
            _ => {}
        }
    }

    /// Looks whether the process has ended; its last words are read before that is believed.
    fn look(&mut self, dir: &Path) {
        if self.end.exit.is_none()
            && let Some(exit) = self.process.poll()
        {
            self.read();
            self.end.exit = Some(exit);
            self.end.last_stderr_line = stderr_lines(dir, self.end.rank).pop();
            self.end.no_memory = stderr_text(dir, self.end.rank).contains("memory allocation of");
        }
    }
}

enum Beginning {
    Launch { refusal: Option<String> },
    Adopt,
}

struct Supervisor {
    held: Held,
    dir: PathBuf,
    ranks: Vec<Watched>,
    /// Decided before the ranks are gone.
    verdict: Option<Ending>,
    /// Since when the ranks are told to end, and how often they were killed.
    ending: Option<(Instant, u32)>,
    /// Until then they may finish their step and keep a checkpoint.
    patience: Option<Instant>,
    trouble_since: Option<Instant>,
    /// Processes that the kernel's OOM killer had ended when this began.
    oom_kills: Option<u64>,
}

impl Supervisor {
    fn new(held: Held, around: &Surroundings, beginning: Beginning) -> Self {
        let dir = held.attempt_dir();
        let mut this = Self {
            held,
            dir,
            ranks: Vec::new(),
            verdict: None,
            ending: None,
            patience: None,
            trouble_since: None,
            oom_kills: machine::oom_kills(),
        };
        match beginning {
            Beginning::Launch { refusal } => {
                let launched = refusal.map_or_else(|| this.launch(around), |r| Err(io::Error::other(r)));
                if let Err(error) = launched {
                    let reason = format!("the ranks were not started: {error}");
                    this.end(Some(Ending::Failed { reason, retriable: false }), None);
                }
            }
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

    async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>, around: &Surroundings) {
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
        let (verdict, patience) = match order {
            Order::Stop { patient: false } => (Ending::Stopped, None),
            Order::Stop { patient: true } => (Ending::Stopped, Some(PAUSE)),
            Order::Leave => (Ending::Stopped, Some(LEAVE)),
            Order::Full(reason) => (Ending::Failed { reason, retriable: true }, Some(LEAVE)),
        };
        if self.ending.is_some() && patience.is_none() && self.patience.take().is_some() {
            // Asked nicely before; now it is urgent.
            self.ending = Some((Instant::now(), 0));
            return self.signal(Signal::TERM);
        }
        // What was decided first stays.
        self.end(self.ending.is_none().then_some(verdict), patience);
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
            if since.elapsed() >= GRACE + Duration::from_secs(1) * killed {
                self.ending = Some((since, killed + 1));
                self.signal(Signal::KILL);
            }
            return;
        }
        if let Some(silent) = around.lease.overdue() {
            let secs = silent.as_secs();
            let reason = format!("the server was silent for {secs} s, so its agent ended the ranks");
            return self.end(Some(Ending::Failed { reason, retriable: true }), None);
        }
        let ends: Vec<_> = self.ranks.iter().map(|r| r.end.clone()).collect();
        if let Some((_, provisional)) = cause(&ends) {
            let since = *self.trouble_since.get_or_insert_with(Instant::now);
            if !provisional || since.elapsed() >= SETTLE {
                self.end(None, None);
            }
        } else if let Some(reason) = self.stalled() {
            self.end(Some(Ending::Failed { reason, retriable: true }), None);
        }
    }

    /// Whether ranks were killed again and again and are still there.
    fn is_hopeless(&self) -> bool {
        self.patience.is_none() && self.ending.is_some_and(|(since, _)| since.elapsed() > GRACE + UNKILLABLE)
    }

    /// Which rank holds up the others, when one has had nothing to say for too long.
    fn stalled(&self) -> Option<String> {
        let secs = self.held.start.spec.recovery.stall_timeout_secs;
        let limit = Duration::from_secs(secs.into());
        let running = || self.ranks.iter().filter(|r| r.end.exit.is_none());
        running().find(|r| r.last_news.elapsed() > limit)?;
        // Those that wait for it are as silent as it is.
        let slowest =
            running().min_by_key(|r| (!r.process.is_suspended(), r.end.step, r.last_news, r.end.rank))?;
        let RankEnd { rank, step, .. } = slowest.end;
        let suspended =
            if slowest.process.is_suspended() { "; its process is suspended (SIGSTOP)" } else { "" };
        Some(format!("rank {rank} made no progress for {secs} s at step {step}{suspended}"))
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
            let unexplained = || Ending::Failed { reason: "the ranks ended".into(), retriable: true };
            self.verdict.clone().or_else(|| Some(cause(&ends)?.0)).unwrap_or_else(unexplained)
        };
        let ending = self.labelled(ending, &ends, left);
        tracing::info!(job = %self.held.start.attempt.job, attempt = self.held.start.attempt.attempt, ?ending, "attempt ended");
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
        let killed = |end: &RankEnd| end.exit == Some(Exit::Signal(9)) && !end.told_to_end;
        let by_kernel = self.oom_kills.zip(machine::oom_kills()).is_some_and(|(before, now)| now > before);
        let by_kernel = by_kernel && ends.iter().any(killed);
        let refused = ends.iter().any(RankEnd::was_refused_memory);
        match (ending, left) {
            (ending, Some(left)) => {
                let before = match ending {
                    Ending::Failed { reason, .. } => format!("{reason}; "),
                    _ => String::new(),
                };
                let machine = machine::hostname();
                let reason = format!(
                    "{before}{left} does not end, not even by SIGKILL: it holds its memory until {machine} is restarted"
                );
                Ending::Failed { reason, retriable: false }
            }
            (Ending::Failed { reason, .. }, None) if by_kernel || refused => {
                let how = if by_kernel {
                    "the kernel ended it to free memory"
                } else {
                    "it may have no more (ulimit -v)"
                };
                let reason = format!(
                    "killed: out of memory ({reason}; {how}). Lower train.batch_size or parallel.ranks, or use a \
                     machine with more memory"
                );
                Ending::Failed { reason, retriable: false }
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

/// The end of what a rank printed outside its log.
fn stderr_text(dir: &Path, rank: u32) -> String {
    let bytes = fs::read(rank_file(dir, rank, "stderr")).unwrap_or_default();
    String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(STDERR_BYTES)..]).into_owned()
}

/// The last lines of what a rank printed outside its log.
fn stderr_lines(dir: &Path, rank: u32) -> Vec<String> {
    let text = stderr_text(dir, rank);
    let lines: Vec<_> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let cut = |line: &&str| line[..line.floor_char_boundary(4096)].to_owned();
    lines[lines.len().saturating_sub(STDERR_LINES)..].iter().map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Reporter;
    use lockstep_protocol::{agent::StartAttempt, job::JobId, metric::MetricColumn, spec::JobSpec};
    use std::os::unix::fs::PermissionsExt;

    struct Place {
        dir: tempfile::TempDir,
        held: Held,
        around: Surroundings,
    }

    /// A job folder, and a shell script in the ranks' place; `$R` is its rank.
    fn place(ranks: u32, script: &str) -> Place {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        fs::write(&program, format!("#!/bin/sh\nR=$8\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let start = StartAttempt {
            attempt: AttemptRef { job: JobId::generate(), attempt: 1, token: 1 },
            spec: JobSpec::default(),
            dataset_path: "/none".into(),
            world_size: ranks,
            ranks: (0..ranks).map(|r| (r, r)).collect(),
            master_addr: "127.0.0.1".into(),
            master_port: 1,
            secret: String::new(),
            job_dir: None,
            resume: None,
        };
        let held = Held { start, job_dir: dir.path().join("job") };
        fs::create_dir_all(held.attempt_dir()).unwrap();
        let around = Surroundings {
            program,
            lease: Arc::new(Lease::new()),
            fence: dir.path().join("lease"),
            check: |_| Ok(()),
            bell: Arc::new(Notify::new()),
            gpus: Arc::default(),
        };
        Place { dir, held, around }
    }

    impl Place {
        /// What a rank has recorded.
        fn recorded(&self, rank: u32, events: &[AttemptEvent]) {
            let reporter = Reporter::create(&self.held.attempt_dir(), rank).unwrap();
            reporter.log("one line");
            events.iter().for_each(|event| reporter.event(event));
            reporter.close().unwrap();
        }

        async fn end_of(&self, attempt: &Attempt) -> Ending {
            let over = async {
                while !attempt.is_over() {
                    self.around.bell.notified().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), over).await.expect("it never ended");
            for (rank, _) in &self.held.start.ranks {
                let mut process = RankProcess::adopt(&self.held.attempt_dir(), *rank);
                assert!(process.poll().is_some(), "rank {rank} is still there");
            }
            ending(&self.held.attempt_dir()).unwrap()
        }

        /// The log lines that the agent added.
        fn added_lines(&self) -> Vec<LogLine> {
            let mut tail = Tail::open(&agent_events_path(&self.held.attempt_dir()), 0);
            let events = tail.poll().unwrap();
            let lines = events.into_iter().filter_map(|event| match event {
                AttemptEvent::Log { lines, .. } => Some(lines),
                _ => None,
            });
            lines.flatten().collect()
        }
    }

    fn step(step: u64) -> AttemptEvent {
        let column = MetricColumn { name: "loss".into(), steps: vec![step], values: vec![1.0] };
        AttemptEvent::Metrics { rank: 0, columns: vec![column] }
    }

    fn reason(ending: Ending) -> String {
        match ending {
            Ending::Failed { reason, retriable: true } => reason,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn ranks_that_end_well_succeed() {
        let place = place(2, "exit 0");
        place.recorded(0, &[step(12)]);
        let attempt = Attempt::start(place.held.clone(), None, place.around.clone());
        assert_eq!(place.end_of(&attempt).await, Ending::Succeeded { step: 12 });
        assert!(!attempt.has_failed());
    }

    #[tokio::test]
    async fn a_killed_rank_ends_the_others_and_is_named() {
        let place =
            place(3, "[ $R = 1 ] && { echo last words >&2; kill -9 $$; }; while :; do sleep 0.05; done");
        place.recorded(1, &[step(41)]);
        let attempt = Attempt::start(place.held.clone(), None, place.around.clone());
        assert_eq!(reason(place.end_of(&attempt).await), "rank 1 was killed by signal 9 at step 41");
        let lines = place.added_lines();
        // Numbered on from the rank's own line.
        assert_eq!((lines[0].number, lines[0].text.as_str()), (2, "last words"));
    }

    #[tokio::test]
    async fn a_rank_that_ignores_term_is_killed() {
        let place = place(1, "trap '' TERM; echo up; while :; do sleep 0.05; done");
        let attempt = Attempt::start(place.held.clone(), None, place.around.clone());
        let stderr = rank_file(&place.held.attempt_dir(), 0, "stderr");
        while fs::read_to_string(&stderr).unwrap_or_default().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let told = Instant::now();
        attempt.order(Order::Stop { patient: false });
        assert_eq!(place.end_of(&attempt).await, Ending::Stopped);
        assert!(told.elapsed() >= GRACE);
    }

    #[tokio::test]
    async fn a_patient_stop_lets_them_finish_and_an_urgent_one_does_not_wait() {
        let script = "trap 'sleep 0.3; echo kept; exit 3' USR1; echo up; while :; do sleep 0.05; done";
        for urgent in [false, true] {
            let place = place(2, script);
            let attempt = Attempt::start(place.held.clone(), None, place.around.clone());
            let said = |rank| {
                fs::read_to_string(rank_file(&place.held.attempt_dir(), rank, "stderr")).unwrap_or_default()
            };
            while said(0).is_empty() || said(1).is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            attempt.order(Order::Stop { patient: true });
            if urgent {
                attempt.order(Order::Stop { patient: false });
            }
            assert_eq!(place.end_of(&attempt).await, Ending::Stopped);
            assert_eq!(said(0).contains("kept") && said(1).contains("kept"), !urgent);
        }
    }

    #[tokio::test]
    async fn what_a_rank_started_ends_with_it() {
        let place = place(1, "sleep 1000 & echo $!; kill -9 $$");
        let attempt = Attempt::start(place.held.clone(), None, place.around.clone());
        place.end_of(&attempt).await;
        let said = fs::read_to_string(rank_file(&place.held.attempt_dir(), 0, "stderr")).unwrap();
        let child = said.trim();
        let state = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z"), "{state}");
    }

    #[tokio::test]
    async fn what_is_missing_is_said_before_anything_starts() {
        let mut place = place(2, "exit 0");
        place.around.check = super::super::preflight::check;
        let attempt = Attempt::start(place.held.clone(), None, place.around.clone());
        match place.end_of(&attempt).await {
            Ending::Failed { reason, retriable: false } => {
                assert!(reason.contains("dataset /none cannot be read"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        assert!(!rank_file(&place.held.attempt_dir(), 0, "pid").exists());
    }

    #[tokio::test]
    async fn a_suspended_rank_is_found_out() {
        let mut place = place(2, "[ $R = 1 ] && kill -STOP $$; while :; do :; done");
        place.held.start.spec.recovery.stall_timeout_secs = 1;
        let attempt = Attempt::start(place.held.clone(), None, place.around.clone());
        let reason = reason(place.end_of(&attempt).await);
        assert!(reason.starts_with("rank 1 made no progress for 1 s at step 0"), "{reason}");
        assert!(reason.contains("suspended"), "{reason}");
    }

    #[tokio::test]
    async fn ranks_are_fenced_when_the_server_stays_silent() {
        let place = place(2, "while :; do sleep 0.05; done");
        place.around.lease.set_length(Duration::from_millis(300));
        let attempt = Attempt::start(place.held.clone(), None, place.around.clone());
        assert!(reason(place.end_of(&attempt).await).contains("the server was silent"));
    }

    #[tokio::test]
    async fn the_next_agent_takes_over_the_living_and_the_dead() {
        let place = place(2, "while :; do sleep 0.05; done");
        let mut first =
            Supervisor::new(place.held.clone(), &place.around, Beginning::Launch { refusal: None });
        place.recorded(0, &[step(7)]);
        // The first agent is gone; rank 1 dies unseen.
        first.ranks[1].process.signal(Signal::KILL);
        while first.ranks[1].process.poll().is_none() {
            tokio::task::yield_now().await;
        }
        let adopted = Attempt::adopt(place.held.clone(), place.around.clone());
        // Reaps rank 0, whose parent this process is.
        let reaper = tokio::spawn(async move {
            while first.ranks[0].process.poll().is_none() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let ending = place.end_of(&adopted).await;
        assert_eq!(reason(ending.clone()), "rank 1 died at step 0 while no agent was watching it");
        reaper.await.unwrap();
        // A third agent finds it over and adds nothing.
        let third = Attempt::adopt(place.held.clone(), place.around.clone());
        assert!(third.is_over() && third.has_failed());
        assert_eq!(self::ending(&place.held.attempt_dir()), Some(ending));
    }

    #[tokio::test]
    async fn a_program_that_does_not_start_is_named() {
        let mut place = place(2, "exit 0");
        place.around.program = place.dir.path().join("nowhere");
        let attempt = Attempt::start(place.held.clone(), None, place.around.clone());
        match place.end_of(&attempt).await {
            Ending::Failed { reason, retriable: false } => assert!(reason.contains("nowhere"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}
