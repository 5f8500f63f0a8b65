//! Dispatch: starts queued jobs on free slots, and fences attempts whose lease has expired.

use crate::{
    app::App,
    failing::Failing,
    leases::{EndAt, Expired},
    lifecycle::{self, PlaceEnd},
    store::{AttemptRow, JobRow, Result, quarantine},
};
use ends::{end_attempt, end_place, order_stop};
use lockstep_protocol::{
    agent::ToAgent,
    job::{Job, JobId, JobState},
    reason::{Facts, Reason, ReasonCode},
};
use place::{Placed, place};
use share::{Queue, share, shares};
use slots::Round;
use start::start_all;
use std::{sync::Arc, time::Duration};

mod candidates;
mod ends;
mod fewer;
mod gang;
mod left;
mod needs;
mod place;
mod preempt;
mod reasons;
mod share;
mod slots;
mod start;
mod unreported;
mod waits;

pub(crate) use ends::{declined, ended_at, leaves, left, ready, wanted};
pub(crate) use gang::most_slots;
pub(crate) use needs::is_checkpoint_id;
pub(crate) use slots::device_for;

/// The queue is checked this often even without a notification.
const POLL: Duration = Duration::from_millis(500);
/// How often all waiting jobs are compared with the store.
const COMPARE_EVERY: Duration = Duration::from_secs(2);

/// The same while ranks of an attempt have lost each other: an agent that is gone is to be given up at once.
const POLL_LOST: Duration = Duration::from_millis(100);
/// A round waits no longer than this for ends of attempts that have come and are not stored yet: a slow database does not keep it back.
const ENDS_WAIT: Duration = Duration::from_millis(100);
/// An agent of such an attempt that is gone is not waited for when it has been silent for so many heartbeats.
const LATE: f64 = 1.25;
/// But for so long at least.
const SILENT: Duration = Duration::from_secs(1);
/// An agent that is there is back so soon after the start of a server: it tries again every 3 s at least.
const BACK_WITHIN: Duration = Duration::from_secs(4);

/// At start, gives every attempt that may write one full lease, within which its agent must report.
pub(crate) async fn restore(app: &App) -> Result<()> {
    for AttemptRow { attempt, places, .. } in app.store.live_attempts().await? {
        let agents: Vec<_> = places.iter().map(|place| place.agent_id.clone()).collect();
        // Where its agents have the order to start, they say so when they are back.
        app.leases.hold(attempt.clone(), places, false);
        // Agents that come back are notified by their welcome.
        app.leases.note_stop_requested(&attempt);
        if agents.len() > 1
            && let Some(row) = app.store.job(&attempt.job).await?
        {
            for agent in &agents {
                if let Some(end) = lifecycle::end_at(&row, agent) {
                    app.leases.ended_at(&attempt, agent, EndAt::of(end));
                }
            }
            let unreachable: Vec<_> = row.progress.unreachable.iter().copied().collect();
            app.leases.unreachable(&attempt, &unreachable);
        }
    }
    Ok(())
}

/// Checks leases and queue until dropped.
pub(crate) async fn run(app: App) {
    tokio::join!(rounds(&app), comparisons(&app), reasons::run(app.clone()));
}

/// Rounds do not wait for the comparison of a long queue.
async fn comparisons(app: &App) {
    let mut failing = Failing::default();
    loop {
        tokio::time::sleep(COMPARE_EVERY).await;
        match app.waiting.compare(&*app.store).await {
            Ok(true) => app.leases.poke(),
            Ok(false) => {}
            Err(error) => {
                if failing.is_new(&error) {
                    tracing::warn!(%error, "the queue could not be compared with the store; trying again");
                }
                continue;
            }
        }
        if let Some(failures) = failing.ended() {
            tracing::info!(failures, "the queue is compared with the store again");
        }
    }
}

async fn rounds(app: &App) {
    let mut failing = Failing::default();
    loop {
        match round(app).await {
            Ok(()) => {
                if let Some(failures) = failing.ended() {
                    tracing::info!(failures, "dispatch does its rounds again");
                }
            }
            Err(error) if failing.is_new(&error) => {
                tracing::warn!(%error, "dispatch could not do its round; trying again");
            }
            Err(_) => {}
        }
        let poll = if app.leases.is_contact_lost() { POLL_LOST } else { POLL };
        tokio::select! {
            () = app.leases.wake.notified() => {}
            () = tokio::time::sleep(poll) => {}
        }
    }
}

async fn round(app: &App) -> Result<()> {
    for expired in app.leases.expired() {
        // Its agent may have come back while others were given up.
        if app.leases.is_renewed(&expired) {
            continue;
        }
        let job = expired.attempt.job.clone();
        let secs = app.leases.duration.as_secs_f64();
        skip_permanent_error(&job, expire(app, expired, secs, None).await)?;
    }
    let limit = app.config.heartbeat.mul_f64(LATE).max(SILENT);
    // One that was there before this server was started may be on its way back.
    let up = app.up_since.elapsed();
    let silence = |id: &str| app.agents.silence(id).or_else(|| up.checked_sub(BACK_WITHIN));
    let is_silent = |id: &str| silence(id).is_some_and(|silence| silence > limit);
    for expired in app.leases.abandoned(is_silent, |id| app.agents.is_connected(id)) {
        let job = expired.attempt.job.clone();
        let silence = app.agents.silence(&expired.place.agent_id).unwrap_or(up).as_secs_f64();
        app.leases.give_up(&expired);
        let how = "the ranks of other machines have lost those on it";
        let ended = expire(app, expired, (silence * 10.0).round() / 10.0, Some(how)).await;
        skip_permanent_error(&job, ended)?;
    }
    // Claims would wait for the transaction that stores them anyway; their slots would wait for the next round.
    if app.inbox.has_ends() {
        let _ = tokio::time::timeout(ENDS_WAIT, app.inbox.flush()).await;
    }
    let mut round = Round::begin(app);
    let by = shares(app);
    let mut queue = Queue::new(app.store.slots_of_shares(by).await?);
    let rows = app.waiting.read(&*app.store).await?;
    let mut waiting = Vec::with_capacity(rows.len());
    let mut looked = Ok(());
    // Jobs take turns among those of their priority alone.
    for level in rows.chunk_by(|one, next| one.job.spec.priority == next.job.spec.priority) {
        looked = look_at(app, level, &mut queue, &mut round, &mut waiting).await;
        if looked.is_err() {
            break;
        }
    }
    // Also after an error: those before it have their slots. Everything else can wait until they are started.
    let started = start_all(app, std::mem::take(&mut round.starts)).await;
    for (row, why) in std::mem::take(&mut round.reasons) {
        reasons::note(app, &row, &why);
    }
    started?;
    looked?;
    app.checkpoint_waits.keep(&waiting);
    // Before the places: whoever reads the new places finds what belongs to them.
    app.reservations.keep(round.kept, crate::now());
    app.wait_reasons.keep(waiting);
    Ok(())
}

/// Looks at the waiting jobs of a priority, each in its turn. Those that wait on are added to `waiting`.
async fn look_at(
    app: &App,
    level: &[Arc<JobRow>],
    queue: &mut Queue<Arc<JobRow>>,
    round: &mut Round,
    waiting: &mut Vec<JobId>,
) -> Result<()> {
    let by = shares(app);
    queue.fill(level.iter().map(|row| (share(by, &row.job), Arc::clone(row))));
    let mut given = 0;
    while let Some(row) = queue.next(given) {
        let mut placed = Ok(Placed::Waits);
        if matches!(row.job.state, JobState::Queued | JobState::Restarting) && !app.leases.in_backoff(&row) {
            placed = place(app, &row, round).await;
            if let Err(error) = &placed
                && !error.may_pass()
            {
                round.waits(&row, Reason::from(error.to_string()));
            }
        }
        given = if matches!(placed, Ok(Placed::Starts | Placed::Kept)) { row.job.ranks } else { 0 };
        if !matches!(placed, Ok(Placed::Starts)) {
            waiting.push(row.job.id.clone());
        }
        skip_permanent_error(&row.job.id, placed.map(drop))?;
    }
    Ok(())
}

/// Logs a permanent error of one job, so that the others are still dispatched. Transient errors end the round.
fn skip_permanent_error(job: &JobId, done: Result<()>) -> Result<()> {
    match done {
        Err(error) if !error.may_pass() => {
            quarantine::log_once(&format!("job {job} cannot be dispatched: {error}"));
            Ok(())
        }
        other => other,
    }
}

/// Fences an attempt whose lease has expired on one of its agents. Its job is restarted or, without restarts left, fails: of several
/// agents once the others have ended their ranks. `how` says why an agent is given up that is silent for `secs` and may come back within its lease.
async fn expire(app: &App, expired: Expired, secs: f64, how: Option<&str>) -> Result<()> {
    let Expired { attempt, place, places, had_order } = expired;
    // A connection over which nothing comes ends a moment later than the lease.
    let heard_since = crate::now() - app.leases.duration / 2;
    let online = app.agents.online();
    let is_heard = online.iter().any(|o| o.row.id == place.agent_id && o.row.last_seen_at >= heard_since);
    let code = match is_heard && how.is_none() {
        true if had_order => ReasonCode::AgentWithoutRanks,
        true => ReasonCode::StartLost,
        false => ReasonCode::AgentLost,
    };
    let facts = Facts {
        agent: Some(place.agent.clone()),
        attempt: Some(attempt.attempt),
        secs: (code == ReasonCode::AgentLost).then_some(secs),
        detail: how.map(Into::into),
        ..Facts::default()
    };
    let why = move |row: &JobRow| {
        // Before this server was started, perhaps.
        let has_trained = row.progress.has_trained();
        let code = match &code {
            ReasonCode::StartLost if has_trained => &ReasonCode::AgentWithoutRanks,
            code => code,
        };
        Reason::new(code.clone(), Facts { step: Some(row.job.step), ..facts.clone() })
    };
    if places > 1 {
        end_place(app, &attempt, (&place, places), false, move |row| PlaceEnd::Lost(why(row))).await?;
    } else {
        end_attempt(app, &attempt, move |row| lifecycle::lost(row, &why(row), crate::now())).await?;
    }
    let reason = if how.is_some() { "the attempt has ended without it" } else { "its lease ran out" };
    let reason = reason.to_owned();
    app.agents.send(&place.agent_id, ToAgent::Stop { attempt, reason, patient: false });
    Ok(())
}

/// How a job says that its agent was stopped in order.
pub(crate) fn leaving_reason(agent: &str, reason: &str) -> Reason {
    let facts = Facts { agent: Some(agent.into()), detail: Some(reason.into()), ..Facts::default() };
    Reason::new(ReasonCode::AgentStopped, facts)
}

/// What a user wants of a job's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    Cancel,
    Pause,
}

/// Cancels or pauses a job: at once when nothing of it runs, else by ordering its agents to stop its ranks.
///
/// # Errors
/// Its state forbids it, or there is none.
pub(crate) async fn stop(app: &App, id: &JobId, wish: Wish) -> Result<Job> {
    let places = app.leases.places_of(id);
    let online = app.agents.online();
    let reachable = places.iter().any(|p| online.iter().any(|o| o.row.id == p.agent_id));
    let change = move |row: &mut JobRow| match wish {
        Wish::Cancel => lifecycle::cancel(row, reachable, crate::now()),
        Wish::Pause => lifecycle::pause(row, crate::now()),
    };
    let changed = app.store.change_job(id, Box::new(change)).await?;
    app.announce(&changed);
    order_stop(app, id).await?;
    Ok(changed.job)
}
