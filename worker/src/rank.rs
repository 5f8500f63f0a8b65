//! One rank of an attempt: rendezvous, engine, training and exit.
//! The last record of a rank reports why it ends: finished, stopped, or failed with a reason. On SIGTERM and SIGINT, a
//! rank first finishes its step and writes a checkpoint. It continues if its terminal or its agent disappears.

mod config;
mod error;
mod machine_metrics;
mod signals;
mod spare;
#[cfg(test)]
mod tests;

pub use config::{KILLED_AFTER_SECS, RankConfig, STOP_WITHIN_SECS, TO_LEAVE_SECS};
pub use spare::run_spare;

use crate::{
    report::{Observer, Reporter},
    train::{Outcome, TrainError, Training, train},
};
use error::RankError;
use lockstep_comm::{
    ProcessGroup, SingleRank, any_rank, first_differing_rank,
    rendezvous::{RendezvousConfig, Store},
    ring::Ring,
    shm::ShmProcessGroup,
    watchdog::Watchdog,
};
use lockstep_data::ChangeDetection;
use lockstep_host::{exit_without_handlers, lock};
use lockstep_protocol::agent::{AttemptEvent, RankReport};
use signals::listen_to_signals;
use std::{
    net::{IpAddr, ToSocketAddrs},
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

/// The exit status of a rank whose training is complete.
pub const EXIT_FINISHED: i32 = 0;
/// The exit status of a rank that failed. Its last record is `RankFailed`.
pub const EXIT_FAILED: i32 = 1;
/// The exit status of a rank that was asked to stop (SIGTERM or SIGINT) and lost no step.
pub const EXIT_STOPPED: i32 = 3;
/// The exit status of a rank that has reached the epoch after which its job pauses.
pub const EXIT_PAUSED: i32 = 4;

/// Time limit for all ranks to join the rendezvous.
const RENDEZVOUS_TIMEOUT: Duration = Duration::from_secs(30);
/// Added to the time after which ranks consider a silent rank dead, so that the agent, which knows more, reports the silence
/// first.
const COMM_TIMEOUT_MARGIN: Duration = Duration::from_secs(15);
/// Time for the training thread to end after its collective calls were aborted. Then the process exits by force.
const LEAVE_WITHIN: Duration = Duration::from_millis(1000);
/// The time by which the watchdog reports a stall earlier than the agent (or a tenth of the limit, if that is less), because the
/// watchdog knows which ranks are behind.
const WATCHDOG_MARGIN: Duration = Duration::from_secs(3);

/// Runs the rank configured in the file at `config_path`, and exits with its status.
pub fn run(config_path: &Path) -> ! {
    let config = std::fs::read(config_path).and_then(|json| Ok(serde_json::from_slice(&json)?));
    exit_without_handlers(match config {
        Ok(config) => run_config(&config),
        Err(error) => {
            tracing::error!("{}: {error}", config_path.display());
            EXIT_FAILED
        }
    })
}

/// Runs a rank in this process, and returns its exit status.
pub fn run_config(config: &RankConfig) -> i32 {
    let reporter = match Reporter::create(&config.attempt_dir(), config.rank) {
        Ok(reporter) => Arc::new(reporter),
        Err(error) => {
            tracing::error!("{error}");
            return EXIT_FAILED;
        }
    };
    let state = Arc::new(RankState::default());
    install_panic_hook();
    let result = listen_to_signals(config, &state, &reporter).map_err(RankError::from).and_then(|()| {
        catch_unwind(AssertUnwindSafe(|| run_attempt(config, &state, &reporter))).unwrap_or_else(|_| {
            let message = lock(&PANIC).take();
            Err(RankError::System(std::io::Error::other(message.unwrap_or_else(|| "a panic".into()))))
        })
    });
    let asked_to_stop = state.stop.load(Ordering::Relaxed);
    if result.is_ok() {
        state.has_ended.store(true, Ordering::Relaxed);
    }
    let status = match result {
        Ok(Outcome::Finished { .. }) => EXIT_FINISHED,
        Ok(Outcome::Stopped { .. }) => EXIT_STOPPED,
        Ok(Outcome::Paused { .. }) => EXIT_PAUSED,
        // The other ranks were asked to stop as well, and some have already ended.
        Err(error) if asked_to_stop && error.is_secondary() => match state.describe_lost_steps(config.rank) {
            None => EXIT_STOPPED,
            Some(lost) => {
                let (why, unreachable) = (error.to_string(), error.unreachable().to_vec());
                let interrupted = RankError::Interrupted { why, lost, secondary: true, unreachable };
                report_failure(config, &state, &reporter, &interrupted);
                EXIT_FAILED
            }
        },
        Err(error) => {
            report_failure(config, &state, &reporter, &error);
            EXIT_FAILED
        }
    };
    if let Err(error) = reporter.flush() {
        tracing::error!("the last reports could not be written: {error}");
    }
    status
}

fn report_failure(config: &RankConfig, state: &RankState, reporter: &Reporter, error: &RankError) {
    let rank = config.rank;
    if state.has_written_last_record.swap(true, Ordering::Relaxed) {
        return;
    }
    let step = state.progress.load(Ordering::Relaxed);
    let reason = error.to_string();
    reporter.log(&format!("failed after step {step}: {reason}"));
    reporter.event(&AttemptEvent::Rank {
        rank,
        report: RankReport {
            status: "failed".into(),
            step,
            pid: std::process::id(),
            device: config.device().to_string(),
            ..RankReport::default()
        },
    });
    let (retriable, secondary) = (error.is_retriable(), error.is_secondary());
    let (code, unreachable) = (error.code(), error.unreachable().to_vec());
    let failed = AttemptEvent::RankFailed { rank, step, reason, code, retriable, secondary, unreachable };
    reporter.event(&failed);
}

fn run_attempt(
    config: &RankConfig,
    state: &Arc<RankState>,
    reporter: &Arc<Reporter>,
) -> Result<Outcome, RankError> {
    let start = &config.start;
    let device = config.device();
    let needs = device.backend.needs();
    device.backend.preflight(start.world_size).map_err(TrainError::Impossible)?;
    // The device warms up while the ranks meet and the dataset is opened.
    device.backend.warm_up(device.ordinal, start.world_size, Some(start.spec.train.precision));

    let stall_timeout = Duration::from_secs(start.spec.recovery.stall_timeout_secs.into());
    let mut store = None;
    let comm: Arc<dyn ProcessGroup> = if start.world_size == 1 {
        Arc::new(SingleRank)
    } else {
        let mut joined = Store::join(RendezvousConfig {
            addr: start.master_addr.clone(),
            port: start.master_port,
            secret: start.secret.clone().into_bytes(),
            rank: config.rank,
            world_size: start.world_size,
            timeout: RENDEZVOUS_TIMEOUT,
            stop: state.stop.clone(),
        })?;
        if let Some(ip) = start.network.as_ref().and_then(|network| outside_address(&network.address)) {
            joined.prefer_local_ip(ip);
        }
        log_listen_address(config, reporter);
        let ring = Ring::connect(&joined, stall_timeout + COMM_TIMEOUT_MARGIN)?;
        check_backends(&joined, device.backend.name())?;
        let next_is_elsewhere = ring.next_is_elsewhere().unwrap_or(false);
        let comm: Arc<dyn ProcessGroup> = if needs.shared_memory {
            ShmProcessGroup::upgrade(ring).map_err(TrainError::from)?
        } else {
            ring
        };
        warn_if_unencrypted(comm.as_ref(), next_is_elsewhere, needs.shared_memory, reporter)?;
        let joined = Arc::new(joined);
        // The store stays open until the process of rank 0 ends, because other ranks may still send requests.
        let _ = state.store.set(joined.clone());
        store = Some(joined);
        comm
    };
    let _ = state.comm.set(comm.clone());

    let watchdog = if needs.watchdog {
        Some(start_watchdog(config, state, reporter, store.clone(), stall_timeout)?)
    } else {
        None
    };
    let _metrics = machine_metrics::start(config, reporter, &state.progress);

    let checkpoints = config.checkpoints_dir();
    let resume = start.resume.as_ref().map(|name| checkpoints.join(name));
    let dataset = lockstep_data::resolve(Path::new(&start.dataset_path), start.files.dataset_in.as_ref());
    let dataset = dataset.map_err(TrainError::Impossible)?;
    let outcome = train(&Training {
        spec: &start.spec,
        dataset: &dataset,
        pretrained_folders: start.files.weights_in.as_ref(),
        // An agent, which sets `lease`, has examined the files before the job's first start.
        changes: if config.lease.is_some() { ChangeDetection::Folders } else { ChangeDetection::Files },
        checkpoints: &checkpoints,
        resume: resume.as_deref(),
        pause_after: start.pause_after,
        device,
        local_ranks: config.local_ranks,
        threads: config.threads as usize,
        group: comm,
        store,
        watchdog: watchdog.clone(),
        observer: reporter.as_ref(),
        stop: &state.stop,
        progress: &state.progress,
        checkpointed_step: &state.checkpointed_step,
        stop_within: Duration::from_secs(config.stop_within_secs.into()),
    });
    match (outcome, watchdog.as_ref().and_then(|watchdog| watchdog.stall_reason())) {
        // After the watchdog has ended the step, the error is an aborted collective. Report the stall instead.
        (Err(_), Some(why)) => Err(RankError::Stalled(why.into())),
        (outcome, _) => Ok(outcome?),
    }
}

/// Parses an address, or resolves a name to an address that is not a loopback address.
fn outside_address(address: &str) -> Option<IpAddr> {
    if let Ok(ip) = address.parse() {
        return Some(ip);
    }
    let found = (address, 0).to_socket_addrs().ok()?;
    found.map(|socket_addr| socket_addr.ip()).find(|ip| !ip.is_loopback())
}

/// Collective: fails if ranks have different backends, which would not call the same collectives.
fn check_backends(store: &Store, own_backend: &str) -> Result<(), RankError> {
    let names = store.all_gather("backend", own_backend.as_bytes())?;
    first_differing_rank(&names).map_or(Ok(()), |rank| {
        let [first, other] = [0, rank].map(|rank| String::from_utf8_lossy(&names[rank]));
        Err(RankError::Train(TrainError::Impossible(format!(
            "rank {rank} computes with {other} and rank 0 with {first}: all ranks of a job need the same kind of device. Set \
             parallel.device, and leave out machines without this device (lockstep doctor shows a machine's devices)"
        ))))
    })
}

/// The first rank of each machine logs the address at which its ranks listen for ranks of other machines.
fn log_listen_address(config: &RankConfig, reporter: &Reporter) {
    let ranks: Vec<_> = config.start.ranks.iter().map(|(rank, _)| rank.to_string()).collect();
    let is_first = config.start.ranks.iter().all(|(rank, _)| *rank >= config.rank);
    if let Some(network) = config.start.network.as_ref().filter(|_| is_first) {
        let (who, listen) = if ranks.len() == 1 { ("rank", "listens") } else { ("ranks", "listen") };
        reporter.log(&format!("{who} {} {listen} at {}", ranks.join(", "), network.in_words()));
    }
}

/// Collective: rank 0 logs a warning if any rank sends gradients to another machine, because they are not encrypted.
fn warn_if_unencrypted(
    comm: &dyn ProcessGroup,
    next_is_elsewhere: bool,
    is_on_cores: bool,
    reporter: &Reporter,
) -> Result<(), RankError> {
    if any_rank(comm, next_is_elsewhere).map_err(TrainError::from)? && comm.rank() == 0 {
        reporter.log(&unencrypted_warning(is_on_cores));
    }
    Ok(())
}

/// The warning. Neither the ring nor NCCL encrypts, even if the server and its agents use certificates.
fn unencrypted_warning(is_on_cores: bool) -> String {
    let nccl = if is_on_cores { "" } else { ", nor does NCCL authenticate them" };
    format!(
        "ranks are on several machines, and their connections are not encrypted{nccl}: keep these machines in a private network or \
         behind WireGuard (docs/team.md, What is not encrypted)"
    )
}

/// Starts the watchdog, which ends this rank when steps no longer complete, even while a thread waits for the GPU.
fn start_watchdog(
    config: &RankConfig,
    state: &Arc<RankState>,
    reporter: &Arc<Reporter>,
    store: Option<Arc<Store>>,
    stall_timeout: Duration,
) -> std::io::Result<Arc<Watchdog>> {
    let (config, state, reporter) = (config.clone(), state.clone(), reporter.clone());
    // The agent notices the silence but not its reason, so the agent's limit is longer.
    let limit = stall_timeout - (stall_timeout / 10).min(WATCHDOG_MARGIN);
    Watchdog::start(store, limit, move |why| {
        reporter.log(why);
        state.abort(why);
        std::thread::sleep(LEAVE_WITHIN);
        // The process is still running, because a thread waits for the GPU and cannot be interrupted.
        report_failure(&config, &state, &reporter, &RankError::Stalled(why.into()));
        let _ = reporter.flush();
        exit_without_handlers(EXIT_FAILED);
    })
}

/// State that the training thread and the threads for signals and the watchdog share.
#[derive(Default)]
struct RankState {
    stop: Arc<AtomicBool>,
    /// Number of completed steps of the run.
    progress: Arc<AtomicU64>,
    /// The step of the newest checkpoint known to this rank.
    checkpointed_step: AtomicU64,
    has_written_last_record: AtomicBool,
    /// Whether training has ended without an error, because the rank has finished, paused, or stopped with all other ranks.
    has_ended: AtomicBool,
    comm: OnceLock<Arc<dyn ProcessGroup>>,
    store: OnceLock<Arc<Store>>,
}

impl RankState {
    fn abort(&self, reason: &str) {
        if let Some(comm) = self.comm.get() {
            comm.abort(reason);
        }
    }

    /// A message about the steps that are lost if this process ends now. `None` if no steps are lost.
    fn describe_lost_steps(&self, rank: u32) -> Option<String> {
        let (step, checkpointed_step) =
            (self.progress.load(Ordering::Relaxed), self.checkpointed_step.load(Ordering::Relaxed));
        if step <= checkpointed_step {
            return None;
        }
        Some(match (rank, checkpointed_step) {
            (0, 0) => format!("There is no checkpoint yet: steps 1 to {step} are lost"),
            (0, _) => format!(
                "The newest checkpoint is of step {checkpointed_step}: steps {} to {step} are lost",
                checkpointed_step + 1
            ),
            // During training, only rank 0 knows about checkpoints.
            _ => format!("This rank has seen no checkpoint of step {step}"),
        })
    }
}

static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Makes panics store their message in [`PANIC`], in addition to printing it.
fn install_panic_hook() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let words = format!("internal error (a bug in lockstep): {panic}").replace('\n', " ");
            *lock(&PANIC) = Some(words);
            print(panic);
        }));
    });
}
