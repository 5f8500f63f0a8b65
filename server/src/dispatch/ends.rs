//! Ending attempts from outside: by the server or a user, not by their ranks.

use super::leaving_reason;
use crate::{
    agents::Online,
    app::App,
    leases::EndAt,
    lifecycle::{self, PlaceEnd},
    store::{JobRow, Place, Result, StoreError},
};
use lockstep_protocol::{
    agent::{AttemptRef, Ending, ToAgent},
    job::{JobId, JobState},
    reason::{Facts, Reason, ReasonCode},
    stream::EventBody,
};
use std::time::Duration;

/// A leaving agent whose connection was cut off is gone when nothing came from it for so long.
const GONE: Duration = Duration::from_secs(10);

/// An agent that was stopped in an orderly way has disconnected: the attempts that it did not finish go back to the queue. One that was
/// `cut_off`, as a record of it could not be kept, connects again, as often as it takes, sends its last reports once more and says again that it leaves.
pub(crate) async fn left(app: &App, agent: Online, reason: String, cut_off: bool) {
    if !cut_off {
        let why = leaving_reason(&agent.row.name, &reason);
        return requeue(app, &agent.row.id, why, |_| true).await;
    }
    let (app, id) = (app.clone(), agent.row.id.clone());
    let had: Vec<_> = app.leases.of_agent(&id).into_iter().map(|(attempt, _)| attempt).collect();
    tokio::spawn(async move {
        while app.leases.of_agent(&id).iter().any(|(attempt, _)| had.contains(attempt)) {
            let is_silent = app.agents.silence(&id).is_none_or(|silence| silence >= GONE);
            if is_silent && !app.agents.is_connected(&id) {
                let why = leaving_reason(&agent.row.name, &reason);
                return requeue(&app, &id, why, |attempt| had.contains(attempt)).await;
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(500)) => {}
                () = app.stopping.cancelled() => return,
            }
        }
    });
}

/// An agent has not carried out the order to start an attempt: it goes back to the queue, for another one.
pub(crate) async fn declined(app: &App, agent_id: &str, declined: &AttemptRef, reason: String) {
    let places = app.leases.places_of(&declined.job);
    let agent = places.into_iter().find(|place| place.agent_id == agent_id).map(|place| place.agent);
    let why =
        Reason::new(ReasonCode::AgentDeclined, Facts { agent, detail: Some(reason), ..Facts::default() });
    requeue(app, agent_id, why, |attempt| attempt == declined).await;
}

/// Puts attempts of an agent that has left them back into the queue.
async fn requeue(app: &App, agent_id: &str, why: Reason, concerns: impl Fn(&AttemptRef) -> bool) {
    app.inbox.flush().await;
    for (attempt, held) in app.leases.of_agent(agent_id) {
        if !concerns(&attempt) {
            continue;
        }
        let places = app.leases.places(&attempt);
        let mine = held.iter().find(|place| place.agent_id == agent_id);
        let why = why.clone();
        let done = if places > 1
            && let Some(place) = mine
        {
            end_place(app, &attempt, (place, places), true, move |_| PlaceEnd::Left(why.clone())).await
        } else {
            end_attempt(app, &attempt, move |row| lifecycle::requeue(row, &why, crate::now())).await
        };
        if let Err(error) = done {
            return tracing::warn!(%error, "the jobs of an agent that left wait for their leases");
        }
    }
}

/// Changes the job of an attempt, if that attempt may still write.
pub(super) async fn end_attempt(
    app: &App,
    attempt: &AttemptRef,
    change: impl Fn(&mut JobRow) -> std::result::Result<Vec<EventBody>, lifecycle::Refused>
    + Send
    + Sync
    + 'static,
) -> Result<()> {
    let expected = attempt.clone();
    let change = move |row: &mut JobRow| {
        if row.live().as_ref() == Some(&expected) { change(row) } else { Ok(Vec::new()) }
    };
    match app.store.change_job(&attempt.job, Box::new(change)).await {
        Ok(changed) => {
            app.announce(&changed);
            // Whatever the job is doing now, it is not this attempt any more.
            app.leases.release(&attempt.job, attempt.attempt);
            Ok(())
        }
        Err(StoreError::NotFound(_)) => {
            app.leases.release(&attempt.job, attempt.attempt);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// The ranks of an attempt with `places` agents have ended on one of them, without its word on how. The others are requested to end theirs;
/// the last end is the attempt's. `patient`: the others may write a checkpoint first, as they may be doing already.
pub(super) async fn end_place(
    app: &App,
    attempt: &AttemptRef,
    (place, places): (&Place, usize),
    patient: bool,
    end: impl Fn(&JobRow) -> PlaceEnd + Send + Sync + 'static,
) -> Result<()> {
    let (expected, agent_id) = (attempt.clone(), place.agent_id.clone());
    let change = move |row: &mut JobRow| {
        if row.live().as_ref() != Some(&expected) {
            return Ok(Vec::new());
        }
        let end = end(row);
        lifecycle::place_ended(row, places, &agent_id, end, crate::now())
    };
    match app.store.change_job(&attempt.job, Box::new(change)).await {
        Ok(changed) => {
            // Of an attempt that is over this releases all.
            app.announce(&changed);
            if changed.job.attempt != attempt.attempt {
                app.leases.release(&attempt.job, attempt.attempt);
            }
            let others = app.leases.ended_at(attempt, &place.agent_id, EndAt::Lost);
            stop_others(app, attempt, &place.agent, &others, patient);
            Ok(())
        }
        Err(StoreError::NotFound(_)) => {
            app.leases.release(&attempt.job, attempt.attempt);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// An agent has said, and the store has it, how the ranks of an attempt have ended there. Unless they are done or were told to, the
/// others are: they do not learn it from their ranks for sure, as a machine that is not there any more hangs up on nobody.
pub(crate) fn ended_at(app: &App, attempt: &AttemptRef, agent_id: &str, ending: &Ending) {
    let failed = !matches!(ending, Ending::Succeeded { .. } | Ending::Stopped);
    let agent = app.leases.places_of(&attempt.job).into_iter().find(|place| place.agent_id == agent_id);
    let how = match ending {
        Ending::Secondary { .. } => EndAt::LostContact,
        _ => EndAt::ByThemselves,
    };
    let others = app.leases.ended_at(attempt, agent_id, how);
    if failed && let Some(agent) = agent {
        stop_others(app, attempt, &agent.agent, &others, false);
    }
}

fn stop_others(app: &App, attempt: &AttemptRef, agent: &str, others: &[Place], patient: bool) {
    for other in others {
        let reason = format!("its ranks on {agent:?} have ended");
        app.agents.send(&other.agent_id, ToAgent::Stop { attempt: attempt.clone(), reason, patient });
    }
}

/// An agent is about to end its ranks in order, with a checkpoint: those of the same attempts on other agents are to do the same.
pub(crate) fn leaves(app: &App, agent_id: &str, agent: &str) {
    for (attempt, places) in app.leases.of_agent(agent_id) {
        for other in places.iter().filter(|place| place.agent_id != agent_id) {
            let (attempt, reason) = (attempt.clone(), format!("{agent:?} is being stopped in order"));
            app.agents.send(&other.agent_id, ToAgent::Stop { attempt, reason, patient: true });
        }
    }
}

/// An agent has done the check before the start. When all have, their ranks start.
pub(crate) fn ready(app: &App, attempt: AttemptRef, agent_id: &str, port: Option<u16>) {
    let Some((master_port, places)) = app.leases.ready(&attempt, agent_id, port) else { return };
    for place in places {
        // One that has started them already ignores it.
        app.agents.send(&place.agent_id, ToAgent::Launch { attempt: attempt.clone(), master_port });
    }
}

/// Tells the agents of a job to end its ranks, if they must.
pub(super) async fn order_stop(app: &App, job: &JobId) -> Result<()> {
    let places = app.leases.places_of(job);
    if let Some(row) = app.store.job(job).await?
        && let (Some(attempt), Some((reason, patient))) = (row.live(), wanted(&row))
    {
        for place in &places {
            let (attempt, reason) = (attempt.clone(), reason.clone());
            app.agents.send(&place.agent_id, ToAgent::Stop { attempt, reason, patient });
        }
        app.leases.note_stop_requested(&attempt);
    }
    Ok(())
}

/// The reason why a job's ranks must end, if they must, and whether they write a checkpoint first.
pub(crate) fn wanted(row: &JobRow) -> Option<(String, bool)> {
    match (&row.stop, row.job.state) {
        (Some(stop), _) => Some((stop.words().to_owned(), false)),
        (None, JobState::Pausing) => {
            let preempting = row.job.cause.clone().filter(|cause| *cause.code() == ReasonCode::Preempting);
            let why = preempting.unwrap_or_else(|| ReasonCode::PausedByUser.into());
            Some((why.words().to_owned(), true))
        }
        (None, _) => None,
    }
}
