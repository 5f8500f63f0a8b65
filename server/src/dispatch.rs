//! Dispatch: carries out what the scheduler plans, and fences attempts whose lease has expired.

use crate::{
    app::App,
    artifact_fetches::CheckWait,
    artifacts,
    config::FairShare,
    failing::Failing,
    leases::{EndAt, Expired},
    lifecycle::{self, PlaceEnd},
    scheduler::{AgentState, Plan, Snapshot, Wait, Yielding, plan},
    store::{AttemptRow, JobRow, Occupant, Result, quarantine},
};
use ends::{end_attempt, end_place, order_stop};
use lockstep_protocol::{
    agent::ToAgent,
    job::{Job, JobId},
    reason::{Facts, Reason, ReasonCode},
};
use preempt::preempt;
use reasons::Unstored;
use start::start_all;
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

mod ends;
mod left;
mod needs;
mod preempt;
mod reasons;
mod start;
mod unreported;

pub(crate) use ends::{declined, ended_at, leaves, left, ready, wanted};
pub(crate) use needs::is_checkpoint_id;

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
    let unstored = Unstored::default();
    tokio::join!(rounds(&app, &unstored), comparisons(&app), unstored.store_all(&app));
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

async fn rounds(app: &App, unstored: &Unstored) {
    let mut failing = Failing::default();
    loop {
        match round(app, unstored).await {
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

async fn round(app: &App, unstored: &Unstored) -> Result<()> {
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
    let (snapshot, plan) = make_plan(app).await?;
    carry_out(app, &snapshot, plan, unstored).await
}

/// Plans, and looks for the checkpoints that the planned starts need until all of them are known.
async fn make_plan(app: &App) -> Result<(Snapshot, Plan)> {
    let mut snapshot = take_snapshot(app).await?;
    let mut patience = CheckWait::default();
    loop {
        let plan = plan(&snapshot);
        if plan.unknown.is_empty() {
            return Ok((snapshot, plan));
        }
        for (row, reader) in plan.unknown {
            let wait = match artifacts::wait_for_newer(app, &row, &reader, &mut patience).await {
                Err(error) if !error.may_pass() => {
                    let why = Reason::from(error.to_string()).into();
                    skip_permanent_error(&row.job.id, Err(error))?;
                    Some(Wait { why, is_kept: false })
                }
                found => found?,
            };
            snapshot.checkpoints.insert((row.job.id.clone(), reader), wait);
        }
    }
}

async fn take_snapshot(app: &App) -> Result<Snapshot> {
    let now = crate::now();
    let mut held = app.leases.all_slots_in_use();
    let agents = app.agents.online().into_iter().map(|agent| {
        let id = &agent.row.id;
        let is_drained = app.agents.is_draining(id);
        let takes_work = agent.leaving.is_none()
            && agent.no_work.is_none()
            // An agent that was cut off is online until its connection times out, and would hear of no start.
            && agent.row.last_seen_at > now - app.leases.duration
            && !app.leases.is_cut_off(id)
            && !is_drained;
        let in_use = held.remove(id).unwrap_or_default();
        Arc::new(AgentState { only_job: agent.only_job, takes_work, is_drained, in_use, row: agent.row })
    });
    let agents = agents.collect();
    let fair_share = match app.config.fair_share {
        // Where nobody is asked who they are, jobs have no owner.
        FairShare::Owner if app.config.no_auth => FairShare::Project,
        by => by,
    };
    let slots_of_shares = app.store.slots_of_shares(fair_share).await?;
    let waiting = app.waiting.read(&*app.store).await?;
    let yielding = if waiting.is_empty() { Vec::new() } else { yielding(app).await? };
    let (started_at, checkpoints) = (app.started_at, HashMap::new());
    Ok(Snapshot { now, started_at, agents, waiting, yielding, fair_share, slots_of_shares, checkpoints })
}

/// Running jobs whose slots others may count on, in the order of their priorities.
async fn yielding(app: &App) -> Result<Vec<Yielding>> {
    let (mut by, ending) = (app.store.yielding().await?, app.leases.ending());
    let known: HashSet<JobId> = by.iter().map(|by| by.job.clone()).collect();
    // Those that end because their ranks have on another agent: nobody has to be stopped, so their priority does not matter.
    let also = ending.iter().filter(|job| !known.contains(*job)).map(|job| Occupant {
        job: job.clone(),
        priority: i32::MAX,
        preemptible: false,
        ends: false,
        preempted: false,
    });
    by.extend(also);
    let ending: HashSet<JobId> = ending.into_iter().collect();
    let with_slots = |by: Occupant| {
        let places = app.leases.places_of(&by.job);
        let slots = places
            .into_iter()
            .flat_map(|place| place.ranks.into_iter().map(move |(_, slot)| (place.agent_id.clone(), slot)));
        let ends = by.ends || ending.contains(&by.job);
        Yielding { slots: slots.collect(), by, ends }
    };
    Ok(by.into_iter().map(with_slots).collect())
}

/// Starts and preempts as planned, then shows the plan.
async fn carry_out(app: &App, snapshot: &Snapshot, mut plan: Plan, unstored: &Unstored) -> Result<()> {
    let planned = plan.starts.len();
    let mut starts = std::mem::take(&mut plan.starts).into_iter();
    for preemption in std::mem::take(&mut plan.preemptions) {
        // Nobody is preempted for slots that a job before was given and did not take.
        let before = preemption.starts_before - (planned - starts.len());
        let before = starts.by_ref().take(before).collect();
        if !start_all(app, before).await? || !preempt(app, snapshot, &preemption).await? {
            // The next plan finds why the job waits.
            let id = &preemption.row.job.id;
            plan.waiting.iter_mut().filter(|of| of.row.job.id == *id).for_each(|of| of.why = None);
        }
    }
    // Everything else can wait until these are started.
    start_all(app, starts.collect()).await?;
    let waiting: Vec<_> = plan.waiting.iter().map(|waiting| waiting.row.job.id.clone()).collect();
    app.checkpoint_waits.keep(&waiting);
    for (row, why) in plan.waiting.iter().filter_map(|of| Some((&of.row, of.why.as_ref()?))) {
        unstored.note(app, row, why);
    }
    app.last_plan.replace(plan);
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
