//! Starts, monitors and ends the ranks of this machine without an agent.

use super::{
    super::{block_on, output, serve::StopSignals},
    show::TrainingDisplay,
};
use anyhow::Context as _;
use lockstep_host::own_program;
use lockstep_protocol::agent::AttemptEvent;
use lockstep_worker::{
    checkpoint,
    rank::{EXIT_FINISHED, EXIT_STOPPED, RankConfig, run_config},
    report::{Tail, TailError, events_path},
    supervisor::{EndDelays, Exit, Orphans, Policy, Rank, RankEnd, RankGroup, RankProcess, Stop, supervise},
};
use std::{fs, path::Path, time::Duration};
use tokio::signal::unix::{Signal, SignalKind, signal};

const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for the other ranks to detect that a rank has failed, and to end. After this time they get SIGTERM. Ranks that stop in order have
/// the time that a rank allows itself for its checkpoint.
const END_DELAYS: EndDelays = {
    let delay = Duration::from_secs(2);
    EndDelays { certain: delay, provisional: delay, stopping: Duration::from_secs(20) }
};
/// Time from SIGTERM to SIGKILL for ranks after another rank has failed.
const KILL_DELAY: Duration = Duration::from_secs(6);
/// Time from SIGTERM to SIGKILL for ranks that write a checkpoint. Longer than the time that ranks allow themselves. A second Ctrl-C ends
/// the ranks at once.
const STOP_KILL_DELAY: Duration = Duration::from_secs(25);

/// The outcome of training.
pub(super) enum Outcome {
    Succeeded {
        /// Accuracy of the last validation (0 to 1), and its number of pictures. `None` without validation.
        accuracy: Option<(f64, u64)>,
        /// The last step.
        step: u64,
        /// The end of a sentence about the checkpoints, which names the best checkpoint if there is one.
        best_note: Option<String>,
    },
    /// Stopped by Ctrl-C or a signal. The folder shows whether a checkpoint of this step exists.
    Stopped { step: u64 },
    /// Training failed. If `is_retriable`, training that continues from a checkpoint may succeed.
    Failed { reason: String, is_retriable: bool },
}

fn make_folder(path: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(path).with_context(|| path.display().to_string())
}

/// Starts a process for each rank and shows progress until all have ended.
///
/// # Errors
/// A process cannot be started, or a rank's records cannot be read.
pub(super) fn run(configs: &[RankConfig]) -> anyhow::Result<Outcome> {
    let first = &configs[0];
    make_folder(&first.attempt_dir())?;
    let checkpoints = checkpoint::infos(&first.checkpoints_dir())?;
    block_on(async {
        let ranks: Vec<_> = configs.iter().map(|config| config.rank).collect();
        let mut command = Command {
            signals: StopSignals::listen()?,
            hangup: if ignores_hangup() { None } else { Some(signal(SignalKind::hangup())?) },
            is_interrupted: false,
            display: TrainingDisplay::new(&first.start.spec, &ranks, checkpoints),
        };
        // Ranks also end when this command ends because of an error or a closed pipe. After SIGKILL of this command they continue to train.
        let mut ranks = RankGroup::new(Orphans::Terminate);
        let program = own_program()?;
        for config in configs {
            let process = RankProcess::start(&program, config, None)?;
            ranks.ranks.push(Rank::of_attempt(process, &config.attempt_dir(), Vec::new()));
        }
        supervise(&mut command, &mut ranks).await?;
        command.display.finish();
        if let Some(survivor) = ranks.kill_remaining().await {
            output::warn(format_args!("{survivor} does not end, even after SIGKILL"));
        }
        Ok(determine_outcome(&ranks, &command.display, command.is_interrupted))
    })
}

type Ranks = RankGroup<Vec<AttemptEvent>>;

/// The state of this command while its ranks train.
struct Command {
    signals: StopSignals,
    /// The signal that a closed terminal sends. `None` if this process ignores the signal.
    hangup: Option<Signal>,
    is_interrupted: bool,
    display: TrainingDisplay,
}

/// Whether this process was started with SIGHUP ignored, as under nohup(1) (proc_pid_status(5)).
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}

impl Policy for Command {
    type Records = Vec<AttemptEvent>;
    /// Ctrl-C, SIGTERM, or a closed terminal.
    type Order = ();
    type Error = TailError;

    const POLL_EVERY: Duration = POLL_INTERVAL;

    async fn next_order(&mut self) {
        let Self { signals, hangup, .. } = self;
        let hangup_received = async {
            match hangup {
                Some(signal) => _ = signal.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = signals.next() => {}
            () = hangup_received => {}
        }
    }

    /// The first interrupt makes ranks write a checkpoint; the second kills them.
    fn obey(&mut self, (): (), ranks: &mut Ranks) {
        self.is_interrupted = true;
        ranks.stop(if ranks.is_stopping() { Stop::Kill } else { Stop::Terminate });
    }

    fn observe(&mut self, ranks: &mut Ranks) -> Result<(), TailError> {
        for rank in &mut ranks.ranks {
            let result = rank.read();
            self.display.update(std::mem::take(&mut rank.sink));
            result?;
        }
        Ok(())
    }

    fn decide(&mut self, ranks: &mut Ranks) {
        if ranks.must_end(END_DELAYS) {
            ranks.stop(Stop::Terminate);
        }
    }

    fn grace(&self, _ranks: &Ranks) -> Duration {
        if self.is_interrupted { STOP_KILL_DELAY } else { KILL_DELAY }
    }
}

fn success(display: &TrainingDisplay) -> Outcome {
    Outcome::Succeeded {
        accuracy: display.accuracy,
        step: display.bar.step,
        best_note: display.describe_best(),
    }
}

/// Returns the outcome from the first cause among the ranks' reports and exit statuses.
fn determine_outcome(ranks: &Ranks, display: &TrainingDisplay, is_interrupted: bool) -> Outcome {
    if ranks.ends().all(RankEnd::is_success) {
        return success(display);
    }
    // If a rank has reported a cause, ranks that stopped in order are not the cause.
    let cause = ranks.failure_cause().map(|cause| cause.rank).filter(|end| !end.is_stopping());
    let cause = cause.or_else(|| ranks.ends().find(|end| end.failure.is_some()));
    let has_own_reason = cause.is_some_and(RankEnd::has_own_reason);
    let ended_in_order = |end: &RankEnd| matches!(end.exit, Some(Exit::Status(EXIT_FINISHED | EXIT_STOPPED)));
    if !has_own_reason && (is_interrupted || ranks.ends().all(ended_in_order)) {
        return Outcome::Stopped { step: display.bar.step };
    }
    let without_report = || ranks.ends().find(|end| !ended_in_order(end));
    let Some(RankEnd { rank, step, failure, exit, last_stderr_line, .. }) = cause.or_else(without_report)
    else {
        return Outcome::Stopped { step: display.bar.step };
    };
    let reason = match (failure, exit) {
        (Some(failure), _) => format!("rank {rank} failed at step {step}: {}", failure.reason),
        (None, Some(Exit::Signal(signal))) => {
            // Only agents know whether the kernel has killed processes since the start.
            let hint = if *signal == 9 {
                let batch_key = display.spec.train.batch_key();
                format!("; if memory was exhausted, lower train.{batch_key} or parallel.ranks")
            } else {
                String::new()
            };
            format!("rank {rank} was killed by signal {signal} at step {step}{hint}")
        }
        (None, _) => {
            let last = last_stderr_line.as_deref().unwrap_or("it printed nothing");
            format!("rank {rank} ended at step {step}: {last}")
        }
    };
    Outcome::Failed { reason, is_retriable: failure.as_ref().is_none_or(|failure| failure.retriable) }
}

/// Runs one rank in this process, and shows progress if it is rank 0.
///
/// # Errors
/// No thread can be started, or the rank's records cannot be read.
pub(super) fn run_here(config: &RankConfig) -> anyhow::Result<Outcome> {
    make_folder(&config.attempt_dir())?;
    let mut tail = Tail::open(&events_path(&config.attempt_dir(), config.rank), 0);
    let checkpoints = checkpoint::infos(&config.checkpoints_dir())?;
    let mut display = TrainingDisplay::new(&config.start.spec, &[config.rank], checkpoints);
    let (mut reason, mut is_retriable) = (None, true);
    let rank = config.clone();
    let training = std::thread::Builder::new().name("rank".into()).spawn(move || run_config(&rank))?;
    loop {
        // Checked before the last read, so that no record is missed.
        let is_over = training.is_finished();
        loop {
            let events = tail.poll()?;
            if events.is_empty() {
                break;
            }
            for event in &events {
                if let AttemptEvent::RankFailed { reason: message, retriable, .. } = event {
                    (reason, is_retriable) = (Some(message.clone()), *retriable);
                }
            }
            display.update(events);
        }
        if is_over {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    display.finish();
    let status = training.join().unwrap_or(-1);
    Ok(match status {
        EXIT_FINISHED => success(&display),
        // Only rank 0 writes checkpoints.
        EXIT_STOPPED if config.rank > 0 => {
            Outcome::Failed { reason: format!("stopped after step {}", display.bar.step), is_retriable: true }
        }
        EXIT_STOPPED => Outcome::Stopped { step: display.bar.step },
        _ => {
            let reason = reason.unwrap_or_else(|| "it printed nothing".into());
            let reason = format!("rank {} failed at step {}: {reason}", config.rank, display.bar.step);
            Outcome::Failed { reason, is_retriable }
        }
    })
}
