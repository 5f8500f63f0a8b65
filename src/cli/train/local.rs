//! The ranks of this machine, without an agent: started, watched, ended.

use super::{
    super::{block_on, output},
    show::Show,
};
use lockstep_worker::{
    engine::registry,
    host::own_program,
    launch::{Exit, RankProcess, rank_file},
    rank::{EXIT_FINISHED, EXIT_STOPPED, RankConfig, end_by_force_within, run_config},
    report::{Tail, events_path},
};
use rustix::process::Signal;
use std::{
    fs,
    time::{Duration, Instant},
};
use tokio::signal::unix::{SignalKind, signal};

const LOOK_EVERY: Duration = Duration::from_millis(50);
/// When one rank has failed the others notice by themselves; who does not within this is told.
const SETTLE: Duration = Duration::from_secs(2);
/// From TERM to KILL, of ranks whose peer has failed.
const GRACE: Duration = Duration::from_secs(6);
/// From TERM to KILL, of ranks that are to keep a checkpoint: longer than they give themselves. Whoever does not want to
/// wait presses Ctrl-C again.
const STOP: Duration = Duration::from_secs(25);

/// For the end of a process whose rank has failed in it.
const EXIT_WITHIN: Duration = Duration::from_secs(5);

/// How it went.
pub(super) enum Ended {
    /// With the last validation's accuracy, 0 to 1.
    Succeeded { accuracy: Option<f64>, step: u64 },
    /// This rank is done; rank 0, in another process, says the rest.
    Elsewhere,
    /// Somebody pressed Ctrl-C, or sent a signal. Whether there is a checkpoint of the step shows on disk.
    Stopped { step: u64 },
    /// Why, for a person.
    Failed(String),
}

/// Cores that this process may use.
pub(super) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// Starts a process a rank and shows how they fare until all are gone.
///
/// # Errors
/// A process cannot be started.
pub(super) fn run(configs: &[RankConfig]) -> anyhow::Result<Ended> {
    block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut ranks = Ranks { processes: Vec::new(), told: None, patience: GRACE };
        let program = own_program()?;
        for config in configs {
            ranks.processes.push(RankProcess::start(&program, config)?);
        }
        let dir = configs[0].attempt_dir();
        let mut tails: Vec<_> = configs.iter().map(|c| Tail::open(&events_path(&dir, c.rank), 0)).collect();
        let mut show = Show::new();
        let mut interrupted = false;
        let mut trouble: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = interrupt.recv() => (interrupted, _) = (true, ranks.end(STOP)),
                _ = terminate.recv() => (interrupted, _) = (true, ranks.end(STOP)),
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
            let exits: Vec<_> = ranks.processes.iter_mut().map(RankProcess::poll).collect();
            for tail in &mut tails {
                loop {
                    let events = tail.poll()?;
                    if events.is_empty() {
                        break;
                    }
                    show.see(events);
                }
            }
            if exits.iter().all(Option::is_some) {
                break;
            }
            let failed = |exit: &Option<Exit>| exit.is_some_and(|e| e != Exit::Status(EXIT_FINISHED));
            if exits.iter().any(failed)
                && trouble.get_or_insert_with(Instant::now).elapsed() > SETTLE
                && ranks.told.is_none()
            {
                ranks.end(GRACE);
            }
            ranks.insist();
        }
        show.finish();
        let exits: Vec<_> = ranks.processes.iter_mut().filter_map(RankProcess::poll).collect();
        Ok(verdict(configs, &exits, &show, interrupted))
    })
}

/// The rank processes. Whatever ends this command (a closed pipe, an error) ends them, too.
struct Ranks {
    processes: Vec<RankProcess>,
    /// When they were told to end, and whether they were killed.
    told: Option<(Instant, bool)>,
    /// How long they have from then.
    patience: Duration,
}

impl Ranks {
    /// Tells all to end within `patience`; those who were told before are killed.
    fn end(&mut self, patience: Duration) {
        self.patience = patience;
        let (signal, told) = match self.told {
            None => (Signal::TERM, (Instant::now(), false)),
            Some((since, _)) => (Signal::KILL, (since, true)),
        };
        self.told = Some(told);
        self.processes.iter_mut().for_each(|process| process.signal(signal));
    }

    fn insist(&mut self) {
        if let Some((since, false)) = self.told
            && since.elapsed() > self.patience
        {
            self.told = Some((since, true));
            self.processes.iter_mut().for_each(|process| process.signal(Signal::KILL));
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.processes.iter_mut().for_each(|process| process.signal(Signal::TERM));
    }
}

/// The first cause of all that ranks said and how they ended.
fn verdict(configs: &[RankConfig], exits: &[Exit], show: &Show, interrupted: bool) -> Ended {
    if exits.iter().all(|exit| *exit == Exit::Status(EXIT_FINISHED)) {
        return Ended::Succeeded { accuracy: show.accuracy, step: show.step };
    }
    let told = |secondary: bool| {
        let failure = show.failures.iter().find(|f| f.secondary == secondary)?;
        let (rank, step) = (failure.rank, failure.step);
        Some(Ended::Failed(format!("rank {rank} failed at step {step}: {}", failure.reason)))
    };
    if let Some(ended) = told(false) {
        return ended;
    }
    let in_order = |exit: &Exit| matches!(exit, Exit::Status(EXIT_FINISHED | EXIT_STOPPED));
    if interrupted || exits.iter().all(in_order) {
        return Ended::Stopped { step: show.step };
    }
    // One that has said why it ends ends itself by force.
    let has_said = |rank: u32| show.failures.iter().any(|failure| failure.rank == rank);
    let killed = (0..).zip(exits).position(|(rank, exit)| matches!(exit, Exit::Signal(_)) && !has_said(rank));
    if let Some(rank) = killed
        && let Exit::Signal(signal) = exits[rank]
    {
        return Ended::Failed(format!("rank {rank} was killed by signal {signal} at step {}", show.step));
    }
    let silent = exits.iter().position(|exit| !in_order(exit));
    told(true).unwrap_or_else(|| {
        let rank = silent.unwrap_or(0);
        let path = rank_file(&configs[rank].attempt_dir(), rank as u32, "stderr");
        let said = fs::read_to_string(path).unwrap_or_default();
        let last = said.lines().last().unwrap_or("it left no word");
        Ended::Failed(format!("rank {rank} ended at step {}: {last}", show.step))
    })
}

/// Runs one rank in this process and shows how it fares when it is rank 0.
///
/// # Errors
/// No thread can be had, or the rank's records cannot be read.
pub(super) fn run_here(config: &RankConfig) -> anyhow::Result<Ended> {
    let mut tail = Tail::open(&events_path(&config.attempt_dir(), config.rank), 0);
    let mut show = Show::new();
    let rank = config.clone();
    let training = std::thread::Builder::new().name("rank".into()).spawn(move || run_config(&rank))?;
    loop {
        // Asked before the last look, so that nothing is missed.
        let over = training.is_finished();
        loop {
            let events = tail.poll()?;
            if events.is_empty() {
                break;
            }
            show.see(events);
        }
        if over {
            break;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    show.finish();
    let status = training.join().unwrap_or(-1);
    Ok(match status {
        EXIT_FINISHED if config.rank > 0 => Ended::Elsewhere,
        EXIT_FINISHED => Ended::Succeeded { accuracy: show.accuracy, step: show.step },
        // Checkpoints are where rank 0 is.
        EXIT_STOPPED if config.rank > 0 => Ended::Failed(format!("stopped after step {}", show.step)),
        EXIT_STOPPED => Ended::Stopped { step: show.step },
        _ => {
            // The reason is shown in a moment. CUDA's own end may wait for ranks that are gone.
            end_by_force_within(EXIT_WITHIN);
            // Exit handlers free what aborts use.
            let are_over = registry::wait_for_aborts(EXIT_WITHIN / 2);
            let reason = show.failures.pop().map_or_else(|| "it left no word".into(), |f| f.reason);
            let said = format!("rank {} failed at step {}: {reason}", config.rank, show.step);
            if !are_over {
                output::warn(&said);
                registry::exit(1, Duration::ZERO);
            }
            Ended::Failed(said)
        }
    })
}
