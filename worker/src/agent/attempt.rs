//! One attempt on this machine: starts or adopts its ranks, watches and ends them, and records how the attempt ended.

use super::{
    dataset_copy::{self, Copies, DATASET_PATH_HINT},
    fetch,
    lease::Lease,
    place::is_own_disk,
    preflight::Refusal,
    remote::Remote,
    spares::Spares,
    state_dir::StoredAttempt,
};
use crate::report::Tail;
use lockstep_protocol::{
    agent::{AttemptEvent, AttemptRef, Ending, StartAttempt},
    reason::Reason,
};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::sync::{Notify, mpsc, oneshot};
use watch::{Watch, refusal_ending};

mod conclusion;
mod gang;
mod watch;

pub(super) use gang::Gang;

#[derive(Debug)]
pub(super) enum Order {
    /// The server ordered the attempt to stop. If `patient`, ranks first finish their step and write a checkpoint.
    Stop { patient: bool },
    /// This agent stops in an orderly way. Ranks write a checkpoint first.
    Leave,
    /// The records that the server has not stored (the spool) take too much disk space. Ranks write a checkpoint and end.
    SpoolFull(Reason),
}

impl Order {
    /// How an attempt ends after this order.
    fn ending(self) -> Ending {
        match self {
            Order::Stop { .. } | Order::Leave => Ending::Stopped,
            Order::SpoolFull(reason) => Ending::Failed { reason, retriable: true },
        }
    }
}

/// The agent's handle of an attempt. A separate task watches the attempt.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) stored: StoredAttempt,
    orders: mpsc::UnboundedSender<Order>,
    is_over: Arc<AtomicBool>,
    /// Present if other agents also have ranks of the attempt.
    pub(super) gang: Option<Gang>,
}

/// See [`AttemptContext::check`].
pub(super) type Check = fn(
    stored: &StoredAttempt,
    program: &Path,
    devices: &[String],
    cancelled: &AtomicBool,
    machine: &str,
) -> Result<(), Refusal>;

/// State that the attempts of an agent share.
#[derive(Debug, Clone)]
pub(super) struct AttemptContext {
    pub(super) program: PathBuf,
    pub(super) lease: Arc<Lease>,
    /// The file with the deadline of the agent's lease, which ranks read.
    pub(super) fence: PathBuf,
    /// The check before ranks are started. It may return early if it is cancelled.
    pub(super) check: Check,
    /// Wakes the agent when an attempt has ended.
    pub(super) wake: Arc<Notify>,
    pub(super) remote: Arc<Remote>,
    /// Copies of the server's datasets on this machine. `None` if datasets are not copied.
    pub(super) copies: Option<Arc<Copies>>,
    /// Time for ranks to finish their step and write a checkpoint, if this agent is about to end or its spool is full.
    pub(super) stop_within_secs: u32,
    /// The devices of ranks, by slot. Empty for ranks on CPU cores.
    pub(super) devices: Arc<BTreeMap<u32, String>>,
    /// Processes that are started before a job needs them, and become ranks of later attempts.
    pub(super) spares: Arc<Spares>,
    /// Time from the start of ranks to the start of the next spares on the same GPUs. Spares that start at once would slow down
    /// short jobs.
    pub(super) spare_delay: Duration,
}

impl AttemptContext {
    /// The devices of an attempt's ranks on this machine, in rank order. Empty for ranks on CPU cores.
    pub(super) fn devices_of(&self, start: &StartAttempt) -> Vec<String> {
        let devices = start.ranks.iter().map(|(_, slot)| self.devices.get(slot).cloned());
        devices.collect::<Option<_>>().unwrap_or_default()
    }

    /// Releases the copy of the dataset after the end of an attempt.
    fn release_copy(&self, attempt: &AttemptRef) {
        self.copies.iter().for_each(|copies| copies.release(attempt));
    }
}

impl Attempt {
    /// Checks whether the ranks can be started, and starts them.
    pub(super) fn start(stored: StoredAttempt, context: AttemptContext) -> Self {
        Self::begin_watch(stored, context, StartMode::Launch)
    }

    /// Adopts an attempt of an earlier agent, whose ranks may be alive, dead or never started.
    pub(super) fn adopt(stored: StoredAttempt, context: AttemptContext) -> Self {
        Self::begin_watch(stored, context, StartMode::Adopt)
    }

    fn begin_watch(stored: StoredAttempt, context: AttemptContext, mode: StartMode) -> Self {
        let (orders, mut incoming_orders) = mpsc::unbounded_channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let gang = stored.start.is_shared().then(Gang::new);
        if matches!(mode, StartMode::Adopt) && recorded_ending(&stored).is_some() {
            is_over.store(true, Ordering::Release);
            context.release_copy(&stored.start.attempt);
        } else {
            let is_over = is_over.clone();
            let (mut stored, gang) = (stored.clone(), gang.clone());
            let attempt = stored.start.attempt.clone();
            tokio::spawn(async move {
                let mode = match mode {
                    StartMode::Launch => {
                        run_checks(&mut stored, &context, gang.as_ref(), &mut incoming_orders).await
                    }
                    mode => mode,
                };
                let (watch, ranks) = Watch::begin(stored, &context, incoming_orders, mode).await;
                watch.run(ranks).await;
                context.release_copy(&attempt);
                is_over.store(true, Ordering::Release);
                context.wake.notify_one();
                context.spares.fill();
            });
        }
        Self { stored, orders, is_over, gang }
    }

    pub(super) fn attempt(&self) -> &AttemptRef {
        &self.stored.start.attempt
    }

    /// Whether every rank has ended and all records are on disk.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(recorded_ending(&self.stored), Some(Ending::Failed { .. } | Ending::Secondary { .. }))
    }

    pub(super) fn send_order(&self, order: Order) {
        // Fails only if the attempt has ended.
        let _ = self.orders.send(order);
    }
}

/// Before any rank is started, runs the preflight check, waits for the checks of the attempt's other machines, and sets the
/// port of rank 0. Examining a large dataset takes time, so an order ends the wait at once, even if a file system does not
/// respond.
async fn run_checks(
    stored: &mut StoredAttempt,
    context: &AttemptContext,
    gang: Option<&Gang>,
    orders: &mut mpsc::UnboundedReceiver<Order>,
) -> StartMode {
    let cancelled = Arc::new(AtomicBool::new(false));
    let checks = async {
        check_with_files(stored, context, &cancelled).await?;
        stored.start.master_port = match gang {
            Some(gang) => gang.wait_for_machines(&stored.start).await?,
            None if stored.start.master_port == 0 => gang::choose_port(&stored.start)?,
            None => stored.start.master_port,
        };
        Ok::<(), Refusal>(())
    };
    tokio::select! {
        checked = checks => match checked {
            Ok(()) => StartMode::Launch,
            Err(refusal) => StartMode::Over(refusal_ending(refusal)),
        },
        Some(order) = orders.recv() => {
            cancelled.store(true, Ordering::Relaxed);
            StartMode::Over(order.ending())
        }
    }
}

/// Runs the preflight check. An agent with its own disk first notifies the server and fetches missing files, and
/// reports the dataset's fingerprint after the check.
async fn check_with_files(
    stored: &mut StoredAttempt,
    context: &AttemptContext,
    cancelled: &Arc<AtomicBool>,
) -> Result<(), Refusal> {
    let (remote, on_own_disk) = (&context.remote, is_own_disk(stored));
    // The report precedes the copy of the dataset, which may take hours. So the server knows at once which machine has the
    // checkpoints on this disk.
    if on_own_disk {
        fetch::report_own_disk(stored, remote).await?;
    }
    if let Some(copies) = &context.copies {
        let registered_path = stored.start.dataset_path.clone();
        dataset_copy::ensure(stored, remote, copies).await?;
        if stored.start.dataset_path != registered_path {
            // The copy is not compared with the registration, because the server's files may have changed since.
            stored.start.files.registered = None;
        }
    }
    if on_own_disk {
        fetch::fetch_missing(stored, remote).await?;
    }
    let mut checked = check_on_thread(stored, context, cancelled).await;
    if on_own_disk && checked.is_ok() {
        checked = fetch::publish_dataset(stored, remote).await;
    }
    // A refusal names the machine if its files can differ from those of other machines: it has its own disk, or an option names the
    // dataset's folder, so that `registered` is still set.
    if on_own_disk || stored.start.files.registered.is_some() {
        return checked.map_err(|refusal| add_machine_name(refusal, &remote.name));
    }
    checked
}

/// Adds the machine's name to a refusal about the dataset, because other machines of the job may have another state of
/// the dataset.
fn add_machine_name(refusal: Refusal, name: &str) -> Refusal {
    match refusal {
        Refusal::DatasetUnusable(why) => {
            Refusal::DatasetUnusable(format!("on the machine {name}: {why} ({DATASET_PATH_HINT})"))
        }
        other => other,
    }
}

/// Runs [`AttemptContext::check`] on a separate thread.
async fn check_on_thread(
    stored: &StoredAttempt,
    context: &AttemptContext,
    cancelled: &Arc<AtomicBool>,
) -> Result<(), Refusal> {
    let (sender, reply) = oneshot::channel();
    let checking = {
        let (stored, cancelled) = (stored.clone(), cancelled.clone());
        let (check, program, devices) =
            (context.check, context.program.clone(), context.devices_of(&stored.start));
        let machine = context.remote.name.clone();
        // Sending fails if the caller no longer waits. The result is then not needed.
        move || drop(sender.send(check(&stored, &program, &devices, &cancelled, &machine)))
    };
    // The thread does not belong to the async runtime, because the runtime would wait for the thread's end.
    let started = std::thread::Builder::new().name("preflight".into()).spawn(checking);
    let failed = |why: String| Err(Refusal::NotStarted(format!("the check before the start failed: {why}")));
    match started {
        Err(error) => failed(error.to_string()),
        Ok(_) => reply.await.unwrap_or_else(|e| failed(e.to_string())),
    }
}

/// The file of the agent's own records of an attempt. Agents of one attempt may share the attempt's folder, so the file
/// name of an agent without rank 0 contains the number of the agent's first rank.
pub(super) fn agent_events_path(stored: &StoredAttempt) -> PathBuf {
    let first = stored.start.ranks.iter().map(|(rank, _)| *rank).min().unwrap_or(0);
    stored.attempt_dir().join(if first == 0 {
        "agent.events".into()
    } else {
        format!("agent.{first}.events")
    })
}

/// How an attempt ended, according to the records on disk. `None` if no end is recorded.
fn recorded_ending(stored: &StoredAttempt) -> Option<Ending> {
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
    Launch,
    Adopt,
    /// The attempt ended before any rank was started.
    Over(Ending),
}

#[cfg(test)]
mod tests;
