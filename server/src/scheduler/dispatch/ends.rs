//! Ends of attempts that are caused by the server, an agent or a user, not by the ranks; and the orders to agents to stop ranks.

use super::leaving_reason;
use crate::{
    agents::{OnlineAgent, leases::RanksEnd},
    lifecycle::{self, EndOnAgent},
    scheduler::Scheduler,
    store::{JobRow, Place, Result, StoreError},
};
use lockstep_protocol::{
    agent::{AttemptRef, Ending, ToAgent},
    job::{Job, JobId, JobState},
    reason::{Reason, ReasonKind},
};
use std::{sync::Arc, time::Duration};

/// How ranks that must end are stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopMode {
    AtOnce,
    /// The ranks may write a checkpoint first.
    AfterCheckpoint,
}

/// Silence after which a leaving agent whose connection was cut off counts as lost.
const MAX_SILENCE: Duration = Duration::from_secs(10);

/// Requeues the jobs of unfinished attempts of an agent that was stopped in an orderly way. If the agent `was_cut_off`, because one of its
/// records could not be stored, it reconnects, sends its last reports again, and announces again that it is leaving. The jobs are then only
/// requeued here if the agent does not reconnect.
pub(crate) async fn requeue_after_leave(
    scheduler: &Arc<Scheduler>,
    agent: OnlineAgent,
    reason: String,
    was_cut_off: bool,
) {
    let (id, why) = (agent.row.id.clone(), leaving_reason(&agent.row.name, &reason));
    if !was_cut_off {
        return requeue(scheduler, &id, why, |_| true).await;
    }
    let scheduler = Arc::clone(scheduler);
    let unfinished: Vec<_> =
        scheduler.agents.leases.attempts_on(&id).into_iter().map(|(attempt, _)| attempt).collect();
    tokio::spawn(async move {
        while scheduler.agents.leases.attempts_on(&id).iter().any(|(attempt, _)| unfinished.contains(attempt))
        {
            let is_silent = scheduler.agents.silence(&id).is_none_or(|silence| silence >= MAX_SILENCE);
            if is_silent && !scheduler.agents.is_connected(&id) {
                return requeue(&scheduler, &id, why, |attempt| unfinished.contains(attempt)).await;
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(500)) => {}
                () = scheduler.tasks.stopping.cancelled() => return,
            }
        }
    });
}

/// Requeues the job of an attempt that an agent has declined to start.
pub(crate) async fn requeue_declined(
    scheduler: &Scheduler,
    agent_id: &str,
    declined: &AttemptRef,
    reason: String,
) {
    let places = scheduler.agents.leases.places_of(&declined.job);
    let agent = places.into_iter().find(|place| place.agent_id == agent_id).map(|place| place.agent);
    let why = ReasonKind::AgentDeclined { agent: agent.unwrap_or_default().into(), detail: reason.into() };
    requeue(scheduler, agent_id, why.into(), |attempt| attempt == declined).await;
}

/// Requeues the jobs of an agent's attempts for which `is_affected` is true.
async fn requeue(
    scheduler: &Scheduler,
    agent_id: &str,
    why: Reason,
    is_affected: impl Fn(&AttemptRef) -> bool,
) {
    scheduler.agents.inbox.flush().await;
    for (attempt, places) in scheduler.agents.leases.attempts_on(agent_id) {
        let Some(place) = places.iter().find(|place| place.agent_id == agent_id) else { continue };
        if !is_affected(&attempt) {
            continue;
        }
        let (why, agent_count) = (why.clone(), scheduler.agents.leases.agent_count(&attempt));
        let end = move |_: &JobRow| EndOnAgent::LeftUnreported(why.clone());
        let mode = StopMode::AfterCheckpoint;
        if let Err(error) = end_attempt_on_agent(scheduler, &attempt, place, agent_count, mode, end).await {
            return tracing::warn!(%error, "the jobs of an agent that left wait for their leases");
        }
    }
}

/// Applies `change` to the job of an attempt, if the attempt may still write. Returns the job; `None` if it was deleted.
async fn change_live(
    scheduler: &Scheduler,
    attempt: &AttemptRef,
    change: impl Fn(&mut JobRow) -> lifecycle::ChangeResult + Send + Sync + 'static,
) -> Result<Option<Job>> {
    let expected = attempt.clone();
    let change = move |row: &mut JobRow| {
        if row.live_attempt().as_ref() == Some(&expected) { change(row) } else { Ok(Vec::new()) }
    };
    match scheduler.events.change_job(&attempt.job, Box::new(change)).await {
        Ok(changed) => Ok(Some(changed.job)),
        Err(StoreError::NotFound(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Ends an attempt by `change`, if the attempt may still write, and releases its slots.
pub(super) async fn end_attempt(
    scheduler: &Scheduler,
    attempt: &AttemptRef,
    change: impl Fn(&mut JobRow) -> lifecycle::ChangeResult + Send + Sync + 'static,
) -> Result<()> {
    change_live(scheduler, attempt, change).await?;
    // The attempt has ended, regardless of the job's new state.
    scheduler.agents.leases.release(&attempt.job, attempt.attempt);
    Ok(())
}

/// Records that the ranks of an attempt on `agent_count` agents have ended on one agent, which has not reported how they ended. The other
/// agents are ordered to end their ranks; the attempt ends with the last agent. `mode`: how the other ranks end.
pub(super) async fn end_attempt_on_agent(
    scheduler: &Scheduler,
    attempt: &AttemptRef,
    place: &Place,
    agent_count: usize,
    mode: StopMode,
    end: impl Fn(&JobRow) -> EndOnAgent + Send + Sync + 'static,
) -> Result<()> {
    let agent_id = place.agent_id.clone();
    let change = move |row: &mut JobRow| {
        let end = end(row);
        lifecycle::record_end_on_agent(row, agent_count, &agent_id, end, crate::now())
    };
    let job = change_live(scheduler, attempt, change).await?;
    // If this change ended the attempt, its publication has released the slots. Otherwise the job may already have another attempt.
    if job.is_none_or(|job| job.attempt != attempt.attempt) {
        scheduler.agents.leases.release(&attempt.job, attempt.attempt);
    }
    let others = scheduler.agents.leases.note_end(attempt, &place.agent_id, RanksEnd::Unknown);
    let reason = format!("its ranks on {:?} have ended", place.agent);
    send_stop(scheduler, &others, attempt, &reason, mode);
    Ok(())
}

/// Handles the stored end of an attempt's ranks on an agent. If the ranks failed, the other agents are ordered to stop their ranks, which
/// may not notice the failure, because a machine that disappears closes no connection.
pub(crate) fn note_ranks_ended(scheduler: &Scheduler, attempt: &AttemptRef, agent_id: &str, ending: &Ending) {
    let has_failed = !matches!(ending, Ending::Succeeded { .. } | Ending::Stopped);
    let place =
        scheduler.agents.leases.places_of(&attempt.job).into_iter().find(|place| place.agent_id == agent_id);
    let how = match ending {
        Ending::Secondary { .. } => RanksEnd::LostContact,
        _ => RanksEnd::OtherCause,
    };
    let others = scheduler.agents.leases.note_end(attempt, agent_id, how);
    if has_failed && let Some(place) = place {
        let reason = format!("its ranks on {:?} have ended", place.agent);
        send_stop(scheduler, &others, attempt, &reason, StopMode::AtOnce);
    }
}

/// Orders agents to end their ranks of an attempt.
pub(super) fn send_stop(
    scheduler: &Scheduler,
    places: &[Place],
    attempt: &AttemptRef,
    reason: &str,
    mode: StopMode,
) {
    for place in places {
        let (attempt, reason) = (attempt.clone(), reason.to_owned());
        let patient = mode == StopMode::AfterCheckpoint;
        scheduler.agents.send(&place.agent_id, ToAgent::Stop { attempt, reason, patient });
    }
}

/// Orders the other agents of a leaving agent's attempts to end their ranks with a checkpoint, as the leaving agent does.
pub(crate) fn stop_other_agents(scheduler: &Scheduler, agent_id: &str, agent: &str) {
    for (attempt, places) in scheduler.agents.leases.attempts_on(agent_id) {
        let others: Vec<_> = places.into_iter().filter(|place| place.agent_id != agent_id).collect();
        send_stop(
            scheduler,
            &others,
            &attempt,
            &format!("{agent:?} is being stopped in order"),
            StopMode::AfterCheckpoint,
        );
    }
}

/// Notes that an agent has finished its preflight check. Once all agents of the attempt have finished it, the ranks start.
pub(crate) fn note_ready(scheduler: &Scheduler, attempt: AttemptRef, agent_id: &str, port: Option<u16>) {
    let Some((master_port, places)) = scheduler.agents.leases.note_ready(&attempt, agent_id, port) else {
        return;
    };
    for place in places {
        // An agent that has already started its ranks ignores the message.
        scheduler.agents.send(&place.agent_id, ToAgent::Launch { attempt: attempt.clone(), master_port });
    }
}

/// Orders the agents of a job to end its ranks, if the job must stop.
pub(super) async fn order_stop(scheduler: &Scheduler, job: &JobId) -> Result<()> {
    let places = scheduler.agents.leases.places_of(job);
    if let Some(row) = scheduler.store.job(job).await?
        && let Some(attempt) = row.live_attempt()
        && let Some((reason, mode)) = stop_reason(&row)
    {
        send_stop(scheduler, &places, &attempt, &reason, mode);
        scheduler.agents.leases.note_stop_requested(&attempt);
    }
    Ok(())
}

/// The reason why a job's ranks must end, and how; `None` if they need not end.
pub(crate) fn stop_reason(row: &JobRow) -> Option<(String, StopMode)> {
    match (&row.cancel_reason, row.job.state) {
        (Some(cancel_reason), _) => Some((cancel_reason.words().to_owned(), StopMode::AtOnce)),
        (None, JobState::Pausing) => {
            let why = match row.job.cause.as_ref().map(Reason::kind) {
                Some(preempting @ ReasonKind::Preempting { .. }) => preempting.to_string(),
                _ => ReasonKind::PausedByUser { detail: None }.to_string(),
            };
            Some((why, StopMode::AfterCheckpoint))
        }
        (None, _) => None,
    }
}
