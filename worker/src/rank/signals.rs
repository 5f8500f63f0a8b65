//! The signals that a rank handles, and its agent's lease.

use super::{
    EXIT_FAILED, EXIT_STOPPED, LEAVE_WITHIN, RankConfig, RankState, error::RankError, leave, report_failure,
};
use crate::{fence, report::Reporter};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// How often the agent's lease is checked. Ranks end if the lease has expired in two successive checks, so that ranks
/// of a machine that was suspended can continue.
const LEASE_EVERY: Duration = Duration::from_secs(1);

/// Handles signals and the lease:
/// - SIGTERM and SIGINT: stops in order. If the step, the other ranks and the checkpoint take longer than the configuration allows, it
///   exits by force, and the error says what is lost.
/// - SIGUSR1: stops in order, however long the step takes.
/// - SIGHUP is ignored.
/// - An expired lease of the agent: ends at once, because others may have the job.
pub(super) fn listen_to_signals(
    config: &RankConfig,
    state: &Arc<RankState>,
    reporter: &Arc<Reporter>,
) -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (state, reporter) = (state.clone(), reporter.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut term, mut int, mut hangup, mut patient) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
            signal(SignalKind::hangup())?,
            signal(SignalKind::user_defined1())?,
        )
    };
    let config = config.clone();
    let within = Duration::from_secs(config.stop_within_secs.into());
    let wait = async move {
        let mut overdue = 0;
        let mut until = None;
        loop {
            let late = async {
                match until {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = late => break,
                _ = term.recv() => until = until.or_else(|| Some(begin_stop(&state, within))),
                _ = int.recv() => until = until.or_else(|| Some(begin_stop(&state, within))),
                _ = patient.recv() => state.stop.store(true, Ordering::Relaxed),
                _ = hangup.recv() => {}
                () = tokio::time::sleep(LEASE_EVERY) => {
                    overdue = if config.lease.as_deref().and_then(fence::overdue).is_some() { overdue + 1 } else { 0 };
                    if overdue > 1 {
                        let why = "the agent did not extend its lease in time";
                        state.abort(why);
                        report_failure(&config, &state, &reporter, &RankError::Stalled(why.into()));
                        let _ = reporter.flush();
                        leave(EXIT_FAILED, LEAVE_WITHIN);
                    }
                }
            }
        }
        let why = format!("the step or its checkpoint was not done within {} s", within.as_secs());
        state.abort(&why);
        tokio::time::sleep(LEAVE_WITHIN).await;
        // The rank still waits for something that cannot be interrupted otherwise. (A rank that has ended in order is
        // already exiting.)
        let lost = state.describe_lost_steps(config.rank).filter(|_| !state.ended.load(Ordering::Relaxed));
        if lost.is_none() && state.ended.load(Ordering::Relaxed) {
            return;
        }
        let status = lost.as_ref().map_or(EXIT_STOPPED, |_| EXIT_FAILED);
        if let Some(lost) = lost {
            let interrupted = RankError::Interrupted { why, lost, secondary: false, unreachable: Vec::new() };
            report_failure(&config, &state, &reporter, &interrupted);
        }
        let _ = reporter.flush();
        leave(status, LEAVE_WITHIN);
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || runtime.block_on(wait))?;
    Ok(())
}

/// Asks the rank to stop. Returns the time by which it must have ended.
fn begin_stop(state: &RankState, within: Duration) -> tokio::time::Instant {
    state.stop.store(true, Ordering::Relaxed);
    tokio::time::Instant::now() + within
}
