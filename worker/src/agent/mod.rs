//! The agent: one process per machine. It connects to a server, starts and watches ranks as ordered by the server, and
//! reports their records. An agent may die at any moment: ranks continue to train, and the next agent with the same
//! folder adopts them.

mod address;
mod attempt;
mod attempts;
mod cpu_slots;
mod dataset_copy;
mod fetch;
mod findings;
mod lease;
mod machine;
mod network;
mod options;
mod outbox;
mod place;
mod preflight;
mod remote;
mod salvage;
mod sampling;
mod session;
mod signals;
mod size;
mod slots;
mod socket;
mod spares;
pub mod state_dir;
#[cfg(test)]
mod test_server;
mod uploads;

pub use options::{AgentError, Options, Warm};
pub use place::Datasets;

use crate::{fence::Fence, supervisor::RankProcess, tls::IdentityFiles};
use address::Address;
use attempt::{Attempt, AttemptContext};
use attempts::NextAttemptWait;
use lease::Lease;
use lockstep_host::lock;
use lockstep_protocol::{
    agent::{AttemptRef, FencingToken, MachineSample, MachineWarning, Slot},
    backoff::Backoff,
};
use network::Network;
use remote::Remote;
use session::{Outcome, Session};
use signals::{AgentSignal, Signals};
use slots::{nvlink_groups, slots};
use socket::{ConnectError, jittered};
use spares::Spares;
use state_dir::StateDir;
use std::{
    collections::BTreeMap,
    ops::ControlFlow,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::sync::{Notify, OnceCell, watch};

/// Pauses before connecting again.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(3));
/// Time limit for one attempt to connect. Each part of the attempt also has a limit ([`socket::CONNECT_TIMEOUT`]).
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// In an orderly stop, the maximum time for reports to the server after the last rank has ended. Unsent reports stay on
/// disk.
const FINAL_REPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// In an orderly stop, the maximum time to upload checkpoints from the agent's own disk. The next agent with the same
/// folder uploads the rest.
const FINAL_UPLOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The maximum time for uploads after the agent's only job has finished. A large checkpoint takes long over a slow connection.
const ONLY_JOB_UPLOAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// Runs an agent until a signal, or until `only_job` or `follow_parent` ends it.
///
/// SIGTERM and SIGINT stop the agent in an orderly way: it notifies the server, ends its ranks and returns. A second
/// signal kills the ranks. SIGUSR1 detaches: the agent returns at once and leaves the ranks to the next agent.
///
/// # Errors
/// See [`AgentError`]. A server that does not respond is not an error: the agent retries forever.
pub async fn run(options: Options) -> Result<(), AgentError> {
    let address = Arc::new(address::parse(&options).map_err(AgentError::InvalidOptions)?);
    // The server binds a certificate's name to the first agent that uses it, so this name is the agent's default name.
    let certificate_name =
        options.identity.as_ref().map(IdentityFiles::name).transpose().map_err(AgentError::InvalidOptions)?;
    let slots = slots(&options).map_err(AgentError::InvalidOptions)?;
    let network = Network::of(&options)?;
    let state_dir = StateDir::open(&options.dir).map_err(AgentError::InvalidOptions)?;
    let fence = Fence::open(state_dir.dir())?;
    let fence_path = fence.path.clone();
    let lease = Arc::new(Lease::new(fence));
    let name = options.name.clone().or(certificate_name.flatten()).unwrap_or_else(lockstep_host::hostname);
    let agent_id = state_dir.agent_id().to_owned();
    let remote = Arc::new(Remote { address: address.clone(), agent_id, name });
    let uploaded_at = Arc::new(Mutex::new(None));
    let adopted = state_dir.stored_attempts();
    let copies = dataset_copy::open(&options, state_dir.dir(), &adopted)?;
    let program = options.program.clone().map_or_else(lockstep_host::own_program, Ok)?;
    let context = AttemptContext {
        spares: Arc::new(Spares::new(&program, &slots, options.warm)),
        spare_delay: SPARE_DELAY,
        program,
        lease: lease.clone(),
        fence: fence_path,
        check: preflight::check,
        wake: Arc::new(Notify::new()),
        remote: remote.clone(),
        copies,
        stop_within_secs: options.stop_within_secs(),
        devices: Arc::new(slots.iter().filter_map(|s| Some((s.index, s.uuid.clone()?))).collect()),
    };
    // Started before ranks are adopted, because ranks end at the deadline.
    let fencing = tokio::spawn(lease::keep_fence(lease));
    let uploading = tokio::spawn(uploads::run(state_dir.dir().to_owned(), remote, uploaded_at.clone()));
    let samples = sampling::start(state_dir.dir().to_owned(), &slots)?;
    let mut agent = Agent {
        process: uuid::Uuid::new_v4().simple().to_string(),
        nvlink_groups: nvlink_groups(&slots),
        slots,
        network,
        state_dir,
        context,
        attempts: BTreeMap::new(),
        leaving: None,
        no_work: None,
        declined: Vec::new(),
        spool_measured_at: Instant::now(),
        samples,
        findings: Arc::default(),
        parent: options.follow_parent.then(rustix::process::getppid).flatten(),
        next_attempt_wait: None,
        uploaded_at,
        only_job_final_at: None,
        options,
    };
    for stored in adopted {
        tracing::info!(job = %stored.start.attempt.job, attempt = stored.start.attempt.attempt, "found an earlier agent's attempt");
        agent.add_attempt(Attempt::adopt(stored, agent.context.clone()));
    }
    agent.context.spares.fill();
    let result = agent.serve(&address).await;
    fencing.abort();
    uploading.abort();
    result
}

const SPARE_DELAY: Duration = Duration::from_secs(5);
/// Maximum number of different reasons for failed connections that are logged before the next connection.
const MAX_LOGGED_REASONS: usize = 16;
/// Interval after which a reason is logged again.
const REPEAT_REASONS: Duration = Duration::from_secs(5 * 60);

struct Agent {
    options: Options,
    /// Random id of this agent process, see `Hello`.
    process: String,
    slots: Vec<Slot>,
    nvlink_groups: Vec<Vec<u32>>,
    network: Network,
    state_dir: StateDir,
    context: AttemptContext,
    /// By fencing token, which is the order of starts.
    attempts: BTreeMap<FencingToken, Attempt>,
    leaving: Option<Shutdown>,
    /// Why the agent accepts no work: its folder is not writable. `None` while it accepts work.
    no_work: Option<String>,
    /// Attempts that this agent did not start although the server had ordered it, and the reasons.
    declined: Vec<(AttemptRef, String)>,
    spool_measured_at: Instant,
    samples: watch::Receiver<Option<MachineSample>>,
    /// The findings of `doctor`'s quick checks, after they have run.
    findings: Arc<OnceCell<Vec<MachineWarning>>>,
    /// The parent process, if this agent ends with it.
    parent: Option<rustix::process::Pid>,
    /// The wait for another attempt of the agent's only job, from the end of an attempt until an attempt starts.
    next_attempt_wait: Option<NextAttemptWait>,
    /// The last time at which all checkpoints on this agent's own disk had been uploaded.
    uploaded_at: Arc<Mutex<Option<Instant>>>,
    /// When the server reported that the only job has finished.
    only_job_final_at: Option<Instant>,
}

struct Shutdown {
    /// The reason, as sent to the server.
    reason: String,
    /// Whether the reason was sent to the server.
    is_announced: bool,
    /// The time at which all ranks were found to have ended.
    ranks_ended_at: Option<Instant>,
}

impl Agent {
    async fn serve(&mut self, address: &Address) -> Result<(), AgentError> {
        let server = &address.server;
        let mut signals = Signals::new()?;
        let mut backoff = RETRY;
        // Reasons for failed connections that were logged since the last welcome, or in the last minutes.
        let mut logged_reasons = Vec::new();
        let mut forgotten_at = Instant::now();
        loop {
            let began = Instant::now();
            let mut listeners = Vec::new();
            let connecting = async {
                address.check_listeners()?;
                let stream = socket::reach(address).await?;
                // The listener may have changed since the first check. Nothing has been sent on this connection yet.
                listeners = address.check_listeners()?;
                Session::connect(address, stream).await
            };
            // A leaving agent does not wait long for a connection.
            let limit = if self.leaving.is_some() { FINAL_REPORT_TIMEOUT } else { CONNECTION_TIMEOUT };
            let session = tokio::select! {
                session = tokio::time::timeout(limit, connecting) => {
                    session.unwrap_or_else(|_| Err("the server does not answer".to_owned().into()))
                }
                signal = signals.next() => {
                    if self.handle_signal(signal).is_break() {
                        return self.result();
                    }
                    continue;
                }
            };
            let lost = match session {
                Ok(session) => match session.run(self, &mut signals).await {
                    Outcome::End => return self.result(),
                    Outcome::Refused(reason) => {
                        return Err(AgentError::Refused { server: server.clone(), reason });
                    }
                    Outcome::Lost { reason, was_welcomed } => {
                        if was_welcomed {
                            logged_reasons.clear();
                            // If the server closes the connection right after the welcome, the pauses keep
                            // growing.
                            if began.elapsed() > RETRY.longest {
                                backoff = RETRY;
                            }
                            address.record_owners(listeners);
                        }
                        reason
                    }
                },
                // The token is not an agent's, has expired, or was revoked by the `lockstep launch` that created it, so retrying is
                // useless. A certificate may be replaced, and is read again for each connection.
                Err(ConnectError { reason, is_unauthorized, is_forbidden })
                    if (is_forbidden || (is_unauthorized && self.options.only_job.is_some()))
                        && self.attempts.is_empty()
                        && address.identity.is_none() =>
                {
                    return Err(AgentError::Refused { server: server.clone(), reason });
                }
                Err(ConnectError { reason, .. }) => {
                    // A server that has ended cannot have given the work to other agents, and the next server first
                    // grants a full lease. A server that is only unreachable may have given the work away, so the lease is not
                    // renewed.
                    if self.state_dir.server_holds_lock() == Some(false) {
                        self.context.lease.renew(began);
                    }
                    reason
                }
            };
            if forgotten_at.elapsed() > REPEAT_REASONS {
                logged_reasons.clear();
                forgotten_at = Instant::now();
            }
            if logged_reasons.len() < MAX_LOGGED_REASONS && !logged_reasons.contains(&lost) {
                tracing::warn!(%server, %lost, "no connection to the server; retrying");
                logged_reasons.push(lost);
            }
            if self.wait(jittered(backoff.next_pause()), &mut signals).await.is_break() {
                return self.result();
            }
        }
    }

    /// What [`run`] returns if the agent ends now.
    fn result(&mut self) -> Result<(), AgentError> {
        if self.options.until_final && self.only_job_final_at.is_none() {
            return Err(AgentError::Signalled);
        }
        let has_failed = self.next_attempt_wait.as_ref().is_some_and(|wait| wait.has_failed);
        if has_failed { Err(AgentError::JobFailed) } else { Ok(()) }
    }

    /// Waits without a connection. Signals are still handled.
    async fn wait(&mut self, pause: Duration, signals: &mut Signals) -> ControlFlow<()> {
        let until = tokio::time::Instant::now() + pause;
        let is_connected = false;
        loop {
            let wake = self.context.wake.clone();
            tokio::select! {
                signal = signals.next() => self.handle_signal(signal)?,
                () = wake.notified() => {}
                () = tokio::time::sleep_until(until) => return self.check_end(is_connected),
            }
            self.check_end(is_connected)?;
        }
    }

    /// Breaks if the agent must end now.
    fn handle_signal(&mut self, signal: AgentSignal) -> ControlFlow<()> {
        if signal == AgentSignal::Detach {
            tracing::info!("detaching: the ranks stay for the next agent");
            return ControlFlow::Break(());
        }
        if self.leaving.is_some() {
            tracing::warn!("second signal: killing the ranks");
            for attempt in self.attempts.values().filter(|a| !a.is_over()) {
                let stored = &attempt.stored;
                for (rank, _) in &stored.start.ranks {
                    RankProcess::adopt(&stored.attempt_dir(), *rank).signal(rustix::process::Signal::KILL);
                }
            }
            return ControlFlow::Break(());
        }
        tracing::info!("stopping: the ranks finish their step and write a checkpoint");
        self.leave("by a signal".into());
        ControlFlow::Continue(())
    }

    /// Whether all checkpoints that were written before `moment` are on the server.
    fn is_uploaded(&self, moment: Instant) -> bool {
        lock(&self.uploaded_at).is_some_and(|done| done > moment) || uploads::has_no_job(self.state_dir.dir())
    }

    /// Breaks if it is time to end. Without a connection, it also limits the spool.
    fn check_end(&mut self, is_connected: bool) -> ControlFlow<()> {
        let all_over = self.attempts.values().all(Attempt::is_over);
        if !is_connected && !all_over {
            self.measure_spool();
        }
        if let Some(leaving) = &mut self.leaving {
            if !all_over {
                return ControlFlow::Continue(());
            }
            let since = *leaving.ranks_ended_at.get_or_insert_with(Instant::now);
            let is_reported = self.attempts.is_empty() && leaving.is_announced;
            let is_uploaded = is_reported && self.is_uploaded(since);
            let limit = if is_reported { FINAL_UPLOAD_TIMEOUT } else { FINAL_REPORT_TIMEOUT };
            // If attempts are left, the agent connects again, because a server that could not store a report closes the connection.
            let is_cut_off = !is_connected && self.attempts.is_empty();
            if is_uploaded || is_cut_off || since.elapsed() > limit {
                return ControlFlow::Break(());
            }
            return ControlFlow::Continue(());
        }
        if self.parent.is_some() && self.parent != rustix::process::getppid() && all_over {
            tracing::info!(
                "the server that started this agent has ended, and no rank is left on this machine"
            );
            return ControlFlow::Break(());
        }
        if let Some(since) = self.only_job_final_at
            && self.attempts.is_empty()
            && (self.is_uploaded(since) || since.elapsed() > ONLY_JOB_UPLOAD_TIMEOUT)
        {
            tracing::info!("the job is over");
            return ControlFlow::Break(());
        }
        match &self.next_attempt_wait {
            Some(wait)
                if !self.options.until_final
                    && self.attempts.is_empty()
                    && wait.since.elapsed() >= wait.timeout(is_connected)
                    && self.is_uploaded(wait.since) =>
            {
                ControlFlow::Break(())
            }
            _ => ControlFlow::Continue(()),
        }
    }
}
