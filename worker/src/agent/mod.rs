//! The agent, one a machine: connects to a server, starts the ranks it is told to, watches them, and
//! tells what they record. It may die at any moment and come back: ranks train on meanwhile, and the
//! next agent on the same folder takes them over.

mod attempt;
mod lease;
pub mod machine;
mod outbox;
mod preflight;
mod salvage;
mod session;
mod signals;
mod slots;
pub mod state_dir;

use crate::{fence::Fence, host, supervisor::RankProcess};
use attempt::{Attempt, Order, Surroundings};
use lease::Lease;
use lockstep_protocol::{
    agent::{AttemptRef, FencingToken, Slot, StartAttempt},
    job::JobId,
    reason::{Facts, Reason, ReasonCode},
};
use preflight::Refusal;
use session::{Outcome, Session};
use signals::Signals;
use slots::slots;
use state_dir::{Held, StateDir, StateDirError};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// First pause before connecting again, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3));
/// An orderly stop tells the server what there is to tell for at most this long after the last rank
/// is gone; the rest is on disk.
const FAREWELL: Duration = Duration::from_secs(5);

/// How often the spool is measured.
const MEASURE_EVERY: Duration = Duration::from_secs(5);

/// How an agent runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// `http://HOST:PORT` (or `ws://`).
    pub server: String,
    /// Sent as `Authorization: Bearer`.
    pub token: Option<String>,
    /// Shown on the dashboard; the host's name when absent.
    pub name: Option<String>,
    /// The agent's own folder.
    pub dir: PathBuf,
    /// Places for ranks on the CPU, whatever GPUs there are. When absent, a place a GPU; and where there
    /// is none, as many as there are cores.
    pub cpu_slots: Option<u32>,
    /// Of the visible GPUs, those to use: numbers or UUIDs, separated by commas.
    pub gpus: Option<String>,
    /// Serve this job alone, and end with it.
    pub only_job: Option<JobId>,
    /// The program that ranks are, started with `rank FILE ...`; this very binary when absent.
    pub program: Option<PathBuf>,
    /// What ranks have said and no server has taken may use so much of the disk; then they keep a checkpoint and end.
    pub spool_bytes: u64,
    /// End when the process that started this one has ended and no rank is alive here.
    pub follow_parent: bool,
}

/// Why an agent ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// It was asked for something impossible.
    #[error("{0}")]
    Wrong(String),
    /// Its folder.
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    /// The server does not want it.
    #[error("the server at {server} refused this agent: {reason}")]
    Refused {
        /// The server's address.
        server: String,
        /// What it said.
        reason: String,
    },
    /// The one job that it served has failed.
    #[error("the job failed on this agent")]
    JobFailed,
    /// The system.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

impl AgentError {
    /// Whether the request was wrong, rather than something failed while running.
    pub fn is_wrong_request(&self) -> bool {
        matches!(self, AgentError::Wrong(_) | AgentError::StateDir(_))
    }
}

/// Runs an agent until it is told to end.
///
/// SIGTERM or SIGINT end it in order: the server is told, ranks are ended, then it returns; a second
/// one kills the ranks. SIGUSR1 lets go: it returns at once and leaves the ranks to the next agent.
///
/// # Errors
/// See [`AgentError`]. A server that does not answer is no error: it is tried for ever.
pub async fn run(options: Options) -> Result<(), AgentError> {
    let request = session::request(&options.server, options.token.as_deref()).map_err(AgentError::Wrong)?;
    let slots = slots(&options).map_err(AgentError::Wrong)?;
    let state_dir = StateDir::open(&options.dir)?;
    let fence = Fence::open(state_dir.dir())?;
    let lease = Arc::new(Lease::new());
    let around = Surroundings {
        program: options.program.clone().map_or_else(host::own_program, Ok)?,
        lease: lease.clone(),
        fence: fence.path().to_owned(),
        check: preflight::check,
        bell: Arc::new(Notify::new()),
        devices: Arc::new(slots.iter().filter_map(|s| Some((s.index, s.uuid.clone()?))).collect()),
    };
    // Before ranks are adopted that look at it; ends with this process.
    let fencing = tokio::spawn(lease::keep_fence(fence, lease));
    let adopted: Vec<_> = state_dir.held();
    let mut agent = Agent {
        name: options.name.clone().unwrap_or_else(host::hostname),
        slots,
        only_job: options.only_job.clone(),
        state_dir,
        around,
        attempts: BTreeMap::new(),
        leaving: None,
        spool_bytes: options.spool_bytes,
        measured: Instant::now(),
        parent: options.follow_parent.then(rustix::process::getppid).flatten(),
        only_job_failed: false,
        only_job_over: None,
    };
    for held in adopted {
        tracing::info!(job = %held.start.attempt.job, attempt = held.start.attempt.attempt, "found an earlier agent's attempt");
        agent.take(Attempt::adopt(held, agent.around.clone()));
    }
    let result = agent.serve(&options.server, &request).await;
    fencing.abort();
    result
}

/// What the agent is made of, whether connected or not.
struct Agent {
    name: String,
    slots: Vec<Slot>,
    only_job: Option<JobId>,
    state_dir: StateDir,
    around: Surroundings,
    /// By fencing token: the order of their starts.
    attempts: BTreeMap<(FencingToken, AttemptKey), Attempt>,
    /// Since when an orderly stop is under way.
    leaving: Option<Leaving>,
    spool_bytes: u64,
    /// When the spool was last measured.
    measured: Instant,
    /// The process that started this one, when its end is to be followed.
    parent: Option<rustix::process::Pid>,
    only_job_failed: bool,
    /// Since when the one job that is served has no attempt here.
    only_job_over: Option<Instant>,
}

type AttemptKey = (JobId, u32);

struct Leaving {
    told: bool,
    ranks_gone: Option<Instant>,
}

/// What a signal or the state of things asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    GoOn,
    /// Return.
    End,
}

impl Agent {
    async fn serve(&mut self, server: &str, request: &session::Address) -> Result<(), AgentError> {
        let mut signals = Signals::new()?;
        let mut pause = RETRY.0;
        let mut complained = false;
        loop {
            let asked = Instant::now();
            let connecting = Session::connect(request);
            let session = tokio::select! {
                session = connecting => session,
                let_go = signals.next() => {
                    if self.signalled(let_go) == Turn::End {
                        return self.result();
                    }
                    continue;
                }
            };
            let lost = match session {
                Ok(session) => {
                    complained = false;
                    match session.run(self, &mut signals).await {
                        Outcome::End => return self.result(),
                        Outcome::Refused(reason) => {
                            let server = server.to_owned();
                            return Err(AgentError::Refused { server, reason });
                        }
                        Outcome::Lost { reason, welcomed } => {
                            if welcomed {
                                pause = RETRY.0;
                            }
                            reason
                        }
                    }
                }
                Err(reason) => {
                    // A server that is gone cannot have given the work to others, and its next one grants a whole
                    // lease first. One that cannot be reached can: then the lease runs on.
                    if self.state_dir.server_is_gone() {
                        self.around.lease.renew(asked);
                    }
                    reason
                }
            };
            if !std::mem::replace(&mut complained, true) {
                tracing::warn!(%server, %lost, "no connection to the server; trying on");
            }
            if self.wait(jittered(pause), &mut signals).await == Turn::End {
                return self.result();
            }
            pause = (pause * 2).min(RETRY.1);
        }
    }

    fn result(&self) -> Result<(), AgentError> {
        if self.only_job_failed { Err(AgentError::JobFailed) } else { Ok(()) }
    }

    /// Waits without a connection, still listening.
    async fn wait(&mut self, pause: Duration, signals: &mut Signals) -> Turn {
        let until = tokio::time::Instant::now() + pause;
        loop {
            let bell = self.around.bell.clone();
            tokio::select! {
                let_go = signals.next() => {
                    if self.signalled(let_go) == Turn::End { return Turn::End }
                }
                () = bell.notified() => {}
                () = tokio::time::sleep_until(until) => return self.look_around(false),
            }
            if self.look_around(false) == Turn::End {
                return Turn::End;
            }
        }
    }

    fn take(&mut self, attempt: Attempt) {
        let AttemptRef { job, attempt: number, fencing_token } = attempt.attempt().clone();
        self.attempts.insert((fencing_token, (job, number)), attempt);
    }

    /// Every attempt that the server has not heard the end of.
    fn attempt_refs(&self) -> Vec<AttemptRef> {
        self.attempts.values().map(|a| a.attempt().clone()).collect()
    }

    /// A signal has come.
    fn signalled(&mut self, let_go: bool) -> Turn {
        if let_go {
            tracing::info!("letting go: the ranks stay for the next agent");
            return Turn::End;
        }
        if self.leaving.is_some() {
            tracing::warn!("second signal: killing the ranks");
            for attempt in self.attempts.values().filter(|a| !a.is_over()) {
                let held = attempt.held();
                for (rank, _) in &held.start.ranks {
                    RankProcess::adopt(&held.attempt_dir(), *rank).signal(rustix::process::Signal::KILL);
                }
            }
            return Turn::End;
        }
        tracing::info!("ending in order");
        self.leaving = Some(Leaving { told: false, ranks_gone: None });
        for attempt in self.attempts.values() {
            attempt.order(Order::Leave);
        }
        Turn::GoOn
    }

    /// While no server takes them, records stay on this machine's disk; there is an end to that.
    fn measure_spool(&mut self) {
        if self.measured.elapsed() < MEASURE_EVERY {
            return;
        }
        self.measured = Instant::now();
        let size = |a: &Attempt| {
            let dir = a.held().attempt_dir();
            let ranks = a.held().start.ranks.iter().map(|(rank, _)| crate::report::events_path(&dir, *rank));
            ranks.filter_map(|path| path.metadata().ok()).map(|m| m.len()).sum::<u64>()
        };
        let bytes: u64 = self.attempts.values().map(size).sum();
        if bytes > self.spool_bytes {
            let facts = Facts { agent: Some(self.name.clone()), size_bytes: Some(bytes), ..Facts::default() };
            let reason = Reason::new(ReasonCode::SpoolFull, facts);
            tracing::error!(%reason, "the ranks keep a checkpoint and end");
            for attempt in self.attempts.values().filter(|a| !a.is_over()) {
                attempt.order(Order::Full(reason.clone()));
            }
        }
    }

    /// Whether it is time to end.
    fn look_around(&mut self, connected: bool) -> Turn {
        let all_over = self.attempts.values().all(Attempt::is_over);
        if !connected && !all_over {
            self.measure_spool();
        }
        if let Some(leaving) = &mut self.leaving {
            if !all_over {
                return Turn::GoOn;
            }
            let since = *leaving.ranks_gone.get_or_insert_with(Instant::now);
            let told = self.attempts.is_empty() && leaving.told;
            if told || !connected || since.elapsed() > FAREWELL {
                return Turn::End;
            }
            return Turn::GoOn;
        }
        if self.parent.is_some() && self.parent != rustix::process::getppid() && all_over {
            tracing::info!("the server that started this agent is gone, and no rank is left here");
            return Turn::End;
        }
        // A failed attempt may be followed by another one.
        let patience = if self.only_job_failed { Duration::from_secs(60) } else { Duration::ZERO };
        match self.only_job_over {
            Some(since) if self.attempts.is_empty() && since.elapsed() >= patience => Turn::End,
            _ => Turn::GoOn,
        }
    }

    /// The server says to start ranks.
    fn start(&mut self, mut start: StartAttempt) {
        let key = (start.attempt.fencing_token, (start.attempt.job.clone(), start.attempt.attempt));
        if self.attempts.contains_key(&key) || self.leaving.is_some() {
            return;
        }
        let mut no_port = None;
        if start.master_port == 0 {
            // Free now; should somebody take it before rank 0 does, the rank says so and the next
            // attempt gets another one.
            match std::net::TcpListener::bind((start.master_addr.as_str(), 0)).and_then(|l| l.local_addr()) {
                Ok(address) => start.master_port = address.port(),
                Err(error) => {
                    no_port = Some(format!("{} has no free port for them: {error}", start.master_addr))
                }
            }
        }
        let own_dir = self.state_dir.job_dir(&start.attempt);
        let job_dir = start.job_dir.as_ref().map_or_else(|| own_dir.clone(), PathBuf::from);
        let mut held = Held { start, job_dir };
        if let Err(error) = std::fs::create_dir_all(held.attempt_dir()) {
            tracing::error!(%error, dir = %held.attempt_dir().display(), "using the agent's own folder instead");
            held.job_dir = own_dir;
        }
        // Ranks without a note of them on disk would be lost with this process.
        let noted = std::fs::create_dir_all(held.attempt_dir()).and_then(|()| self.state_dir.hold(&held));
        let refusal = noted.err().map(|e| format!("the agent cannot keep a note of them: {e}")).or(no_port);
        let refusal = refusal.map(Refusal::other);
        tracing::info!(job = %held.start.attempt.job, attempt = held.start.attempt.attempt, ranks = held.start.ranks.len(), "starting");
        self.only_job_failed = false;
        self.only_job_over = None;
        self.take(Attempt::start(held, refusal, self.around.clone()));
    }

    /// The server knows all of an attempt that is over, or wants none of it.
    fn forget(&mut self, attempt: &AttemptRef) {
        let key = (attempt.fencing_token, (attempt.job.clone(), attempt.attempt));
        if let Some(attempt) = self.attempts.remove(&key) {
            if self.only_job.as_ref() == Some(&attempt.attempt().job) {
                self.only_job_failed = attempt.has_failed();
                self.only_job_over = Some(Instant::now());
            }
            self.state_dir.forget(attempt.attempt());
        }
    }
}

/// Between half of `pause` and all of it, so that many agents do not come back at the same moment.
fn jittered(pause: Duration) -> Duration {
    let random = uuid::Uuid::new_v4().as_u128() as u16;
    pause.mul_f64(0.5 + 0.5 * f64::from(random) / f64::from(u16::MAX))
}
