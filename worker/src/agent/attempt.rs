//! One attempt on this machine: starts or adopts its ranks, watches and ends them, and records how it ended.

use super::{
    dataset_copy::{self, Copies, HINT},
    fetch,
    lease::Lease,
    place::is_own_disk,
    preflight::Refusal,
    remote::Remote,
    state_dir::StoredAttempt,
};
use crate::report::Tail;
use lockstep_protocol::{
    agent::{AttemptEvent, AttemptRef, Ending, StartAttempt},
    reason::{Reason, ReasonCode},
};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::sync::{Notify, mpsc, oneshot};
use watch::Watch;

mod conclusion;
mod gang;
mod watch;

pub(super) use gang::{Gang, free_port};

/// Orders from the agent to an attempt.
#[derive(Debug)]
pub(super) enum Order {
    /// The server orders it. `patient`: ranks finish their step and write a checkpoint first.
    Stop { patient: bool },
    /// This agent is shutting down in an orderly way: ranks write a checkpoint first.
    Leave,
    /// The spool is full: ranks write a checkpoint and end.
    Full(Reason),
}

impl Order {
    /// How an attempt ends that gets this order.
    fn ending(self) -> Ending {
        match self {
            Order::Stop { .. } | Order::Leave => Ending::Stopped,
            Order::Full(reason) => Ending::Failed { reason, retriable: true },
        }
    }
}

/// The agent's handle of an attempt, which a task of its own watches.
#[derive(Debug)]
pub(super) struct Attempt {
    stored: StoredAttempt,
    orders: mpsc::UnboundedSender<Order>,
    over: Arc<AtomicBool>,
    /// Present if other agents have ranks of the attempt, too.
    gang: Option<Gang>,
}

/// See [`AttemptContext::check`].
pub(super) type Check =
    fn(&StoredAttempt, &Path, &[String], &AtomicBool, Option<&str>) -> Result<(), Refusal>;

/// What the attempts of an agent share.
#[derive(Debug, Clone)]
pub(super) struct AttemptContext {
    pub(super) program: PathBuf,
    pub(super) lease: Arc<Lease>,
    /// The file with the deadline of the agent's lease, which ranks read.
    pub(super) fence: PathBuf,
    /// The check before ranks of this program are started; it may return early when it is cancelled.
    pub(super) check: Check,
    /// Notified when an attempt is over.
    pub(super) wake: Arc<Notify>,
    /// The client for files of the server; none where there is no server.
    pub(super) remote: Option<Arc<Remote>>,
    /// Datasets that this machine has from the server; none where nothing is copied.
    pub(super) copies: Option<Arc<Copies>>,
    /// How long ranks that are asked to end have for their step and its checkpoint, where this agent is about to end, too.
    pub(super) stop_within_secs: u32,
    /// The devices of ranks, by slot; none for ranks on CPU cores.
    pub(super) devices: Arc<BTreeMap<u32, String>>,
}

impl AttemptContext {
    /// The devices of an attempt's ranks here, in rank order; none where they compute on CPU cores.
    pub(super) fn devices_of(&self, start: &StartAttempt) -> Vec<String> {
        let given = start.ranks.iter().map(|(_, slot)| self.devices.get(slot).cloned());
        given.collect::<Option<_>>().unwrap_or_default()
    }
}

impl Attempt {
    /// Starts its ranks; `refusal` is why they cannot be started.
    pub(super) fn start(stored: StoredAttempt, refusal: Option<Refusal>, context: AttemptContext) -> Self {
        Self::watched(stored, context, StartMode::Launch { refusal })
    }

    /// Adopts what an earlier agent started, alive, dead or never begun.
    pub(super) fn adopt(stored: StoredAttempt, context: AttemptContext) -> Self {
        Self::watched(stored, context, StartMode::Adopt)
    }

    fn watched(stored: StoredAttempt, context: AttemptContext, mode: StartMode) -> Self {
        let (orders, mut received) = mpsc::unbounded_channel();
        let over = Arc::new(AtomicBool::new(false));
        let gang = stored.start.is_shared().then(Gang::new);
        if matches!(mode, StartMode::Adopt) && ending(&stored).is_some() {
            over.store(true, Ordering::Release);
            release(context.copies.as_ref(), &stored.start.attempt);
        } else {
            let over = over.clone();
            let (mut stored, gang) = (stored.clone(), gang.clone());
            let attempt = stored.start.attempt.clone();
            tokio::spawn(async move {
                let mode = checked(mode, &mut stored, &context, gang.as_ref(), &mut received).await;
                let (watch, ranks) = Watch::begin(stored, &context, received, mode);
                watch.run(ranks).await;
                release(context.copies.as_ref(), &attempt);
                over.store(true, Ordering::Release);
                context.wake.notify_one();
            });
        }
        Self { stored, orders, over, gang }
    }

    pub(super) fn attempt(&self) -> &AttemptRef {
        &self.stored.start.attempt
    }

    pub(super) fn stored(&self) -> &StoredAttempt {
        &self.stored
    }

    pub(super) fn gang(&self) -> Option<&Gang> {
        self.gang.as_ref()
    }

    /// Every rank has ended and all records are on disk.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Whether its end, which is on disk, is a failure.
    pub(super) fn has_failed(&self) -> bool {
        matches!(ending(&self.stored), Some(Ending::Failed { .. } | Ending::Secondary { .. }))
    }

    pub(super) fn order(&self, order: Order) {
        // The attempt is over already.
        let _ = self.orders.send(order);
    }
}

/// Waits for the preflight check here and on the attempt's other machines, before any rank is started. Examining a large dataset
/// takes time; an order ends the wait at once, also when a file system does not respond.
async fn checked(
    mode: StartMode,
    stored: &mut StoredAttempt,
    context: &AttemptContext,
    gang: Option<&Gang>,
    orders: &mut mpsc::UnboundedReceiver<Order>,
) -> StartMode {
    let StartMode::Launch { refusal: None } = mode else { return mode };
    let cancelled = Arc::new(AtomicBool::new(false));
    let found = {
        let ready = async {
            with_files(&mut *stored, context, &cancelled).await?;
            match gang {
                Some(gang) => gang.meet(&stored.start).await,
                None => Ok(stored.start.master_port),
            }
        };
        tokio::select! {
            found = ready => found,
            Some(order) = orders.recv() => {
                cancelled.store(true, Ordering::Relaxed);
                return StartMode::Over(order.ending());
            }
        }
    };
    if let Ok(port) = found {
        stored.start.master_port = port;
    }
    StartMode::Launch { refusal: found.err() }
}

/// The preflight check. On a disk of its own, the agent first tells the server so and fetches what is missing, and afterwards reports the
/// dataset's fingerprint.
async fn with_files(
    stored: &mut StoredAttempt,
    context: &AttemptContext,
    cancelled: &Arc<AtomicBool>,
) -> Result<(), Refusal> {
    let on_own_disk = context.remote.as_ref().filter(|_| is_own_disk(stored));
    // Before the dataset, which may take hours: from here on the server knows whose the checkpoints on this disk are.
    if let Some(remote) = on_own_disk {
        fetch::begin(stored, remote).await?;
    }
    if let (Some(remote), Some(copies)) = (&context.remote, &context.copies) {
        let registered_at = stored.start.dataset_path.clone();
        dataset_copy::ensure(stored, remote, copies).await?;
        if stored.start.dataset_path != registered_at {
            // A copy was compared with the server's files, which may have changed since they were registered.
            stored.start.files.registered = None;
        }
    }
    let Some(remote) = on_own_disk else {
        let checked = check_before_start(stored, context, cancelled).await;
        return match &context.remote {
            Some(remote) if stored.start.files.registered.is_some() => {
                checked.map_err(|refusal| on_machine(refusal, &remote.name))
            }
            _ => checked,
        };
    };
    fetch::prepare(stored, remote).await?;
    check_before_start(stored, context, cancelled)
        .await
        .map_err(|refusal| on_machine(refusal, &remote.name))?;
    fetch::publish_dataset(stored, remote).await.map_err(|refusal| on_machine(refusal, &remote.name))
}

/// Adds the machine's name to a refusal about the dataset: other machines of the job may have another state of it.
fn on_machine(refusal: Refusal, name: &str) -> Refusal {
    if refusal.code != ReasonCode::DatasetUnusable {
        return refusal;
    }
    Refusal { detail: format!("on the machine {name}: {} ({HINT})", refusal.detail), ..refusal }
}

/// Releases the copy of the dataset of an attempt that is over.
fn release(copies: Option<&Arc<Copies>>, attempt: &AttemptRef) {
    if let Some(copies) = copies {
        copies.release(attempt);
    }
}

async fn check_before_start(
    stored: &StoredAttempt,
    context: &AttemptContext,
    cancelled: &Arc<AtomicBool>,
) -> Result<(), Refusal> {
    let (sender, reply) = oneshot::channel();
    let checking = {
        let (stored, cancelled) = (stored.clone(), cancelled.clone());
        let (check, program, devices) =
            (context.check, context.program.clone(), context.devices_of(&stored.start));
        // If nobody waits any more, the result does not matter.
        let machine = context.remote.as_ref().map(|remote| remote.name.clone());
        move || drop(sender.send(check(&stored, &program, &devices, &cancelled, machine.as_deref())))
    };
    // Not one of the runtime's threads, whose end the runtime would wait for.
    let started = std::thread::Builder::new().name("preflight".into()).spawn(checking);
    let failed = |why: String| Err(Refusal::other(format!("the check before the start failed: {why}")));
    match started {
        Err(error) => failed(error.to_string()),
        Ok(_) => reply.await.unwrap_or_else(|e| failed(e.to_string())),
    }
}

/// The file of the agent's own records of an attempt. Agents of one attempt may share its folder: each that has not rank 0 has a file
/// with the number of its first rank.
pub(super) fn agent_events_path(stored: &StoredAttempt) -> PathBuf {
    let first = stored.start.ranks.iter().map(|(rank, _)| *rank).min().unwrap_or(0);
    stored.attempt_dir().join(if first == 0 {
        "agent.events".into()
    } else {
        format!("agent.{first}.events")
    })
}

/// How an attempt ended, once that is on disk.
fn ending(stored: &StoredAttempt) -> Option<Ending> {
    let mut tail = Tail::open(&agent_events_path(stored), 0);
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

enum StartMode {
    Launch {
        refusal: Option<Refusal>,
    },
    Adopt,
    /// Before anything was started.
    Over(Ending),
}

#[cfg(test)]
mod tests;
