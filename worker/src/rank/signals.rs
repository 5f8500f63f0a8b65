//! The signals that a rank handles, and its agent's lease.

use super::{
    EXIT_FAILED, EXIT_STOPPED, LEAVE_WITHIN, RankConfig, RankState, error::RankError, report_failure,
};
use crate::{fence, report::Reporter};
use lockstep_host::exit_without_handlers;
use std::{
    fs::File,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// Interval between two checks of the agent's lease. A rank ends when two successive checks find that the lease has
/// expired, because after a suspension of the machine the agent may still extend the lease between the two checks.
const LEASE_EVERY: Duration = Duration::from_secs(1);

/// Handles signals and the lease:
/// - SIGTERM and SIGINT: the rank finishes its step, writes a checkpoint with the other ranks, and exits. After
///   [`RankConfig::stop_within_secs`], it exits by force, and its error says which steps are lost.
/// - SIGUSR1: the same without a time limit.
/// - SIGHUP: ignored.
/// - An expired lease of the agent: the rank exits at once, because the job may have been started elsewhere.
pub(super) fn listen_to_signals(
    config: &RankConfig,
    state: &Arc<RankState>,
    reporter: &Arc<Reporter>,
) -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (state, reporter) = (state.clone(), reporter.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut term, mut int, mut hangup, mut user1) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
            signal(SignalKind::hangup())?,
            signal(SignalKind::user_defined1())?,
        )
    };
    let config = config.clone();
    let open_lease = |path: &PathBuf| File::open(path).map_err(|error| lockstep_host::with_path(path, error));
    let lease = config.lease.as_ref().map(open_lease).transpose()?;
    let stop_within = Duration::from_secs(config.stop_within_secs.into());
    let listening = async move {
        let mut expired_checks = 0;
        let mut stop_deadline = None;
        loop {
            let stop_deadline_passes = async {
                match stop_deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop_deadline_passes => break,
                _ = term.recv() => stop_deadline = stop_deadline.or_else(|| Some(begin_stop(&state, stop_within))),
                _ = int.recv() => stop_deadline = stop_deadline.or_else(|| Some(begin_stop(&state, stop_within))),
                _ = user1.recv() => state.stop.store(true, Ordering::Relaxed),
                _ = hangup.recv() => {}
                () = tokio::time::sleep(LEASE_EVERY) => {
                    let has_expired = lease.as_ref().is_some_and(fence::has_passed);
                    expired_checks = if has_expired { expired_checks + 1 } else { 0 };
                    if expired_checks > 1 {
                        let why = "the agent did not extend its lease in time";
                        state.abort(why);
                        report_failure(&config, &state, &reporter, &RankError::Stalled(why.into()));
                        let _ = reporter.flush();
                        exit_without_handlers(EXIT_FAILED);
                    }
                }
            }
        }
        let why = format!("the step or its checkpoint was not done within {} s", stop_within.as_secs());
        state.abort(&why);
        tokio::time::sleep(LEAVE_WITHIN).await;
        let lost = state.describe_lost_steps(config.rank);
        if state.has_ended.load(Ordering::Relaxed) {
            // The process is already exiting.
            return;
        }
        // The training thread is still waiting for something that `abort` does not interrupt.
        let status = lost.as_ref().map_or(EXIT_STOPPED, |_| EXIT_FAILED);
        if let Some(lost) = lost {
            let interrupted = RankError::Interrupted { why, lost, secondary: false, unreachable: Vec::new() };
            report_failure(&config, &state, &reporter, &interrupted);
        }
        let _ = reporter.flush();
        exit_without_handlers(status);
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || runtime.block_on(listening))?;
    Ok(())
}

/// Asks the rank to stop. Returns the time by which it must have ended.
fn begin_stop(state: &RankState, stop_within: Duration) -> tokio::time::Instant {
    state.stop.store(true, Ordering::Relaxed);
    tokio::time::Instant::now() + stop_within
}
