//! Dispatch: carries out the scheduler's plans, and fences attempts whose lease has expired.

use crate::{
    agents::leases::{AttemptPart, RanksEnd},
    checkpoints::{Wait, object_store_fetches::CHECK_TIMEOUT},
    config::FairShare,
    lifecycle::{self, EndOnAgent},
    scheduler::{AgentState, Plan, Scheduler, Snapshot, YieldingJob, plan},
    store::{AttemptRow, JobRow, Occupant, Result, unreadable},
    util::failure_log::FailureLog,
};
use ends::{end_attempt_on_agent, order_stop, send_stop};
use lockstep_protocol::{
    job::{Job, JobId},
    reason::{Reason, ReasonKind, Text},
};
use preempt::preempt;
use reasons::UnstoredReasons;
use start::start_all;
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

mod ends;
mod needs;
mod preempt;
mod reasons;
mod resume_point;
mod start;

pub(crate) use ends::{
    StopMode, note_ranks_ended, note_ready, requeue_after_leave, requeue_declined, stop_other_agents,
    stop_reason,
};
pub(crate) use needs::is_checkpoint_id;

/// Interval between two rounds without a notification.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Interval between two comparisons of all waiting jobs with the store.
const COMPARE_INTERVAL: Duration = Duration::from_secs(2);

/// Interval between two rounds while ranks of an attempt have lost contact with each other, so that a lost agent is given up at once.
const LOST_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum wait of a round for reported ends of attempts that are not stored yet. A slow database does not delay the round further.
const ENDS_TIMEOUT: Duration = Duration::from_millis(100);
/// Number of heartbeat intervals after which a silent agent counts as lost, if ranks of its attempt have lost contact with each other.
const LOST_AFTER_HEARTBEATS: f64 = 1.25;
/// Minimum silence after which an agent counts as lost.
const MIN_SILENCE: Duration = Duration::from_secs(1);
/// Time in which agents reconnect after the start of the server. Agents try every 3 s.
const RECONNECT_TIME: Duration = Duration::from_secs(4);

/// At the server's start, gives each attempt that may write a full lease, within which its agents must report.
pub(crate) async fn restore_leases(scheduler: &Scheduler) -> Result<()> {
    for AttemptRow { attempt, places } in scheduler.store.live_attempts().await? {
        let agents: Vec<_> = places.iter().map(|place| place.agent_id.clone()).collect();
        // The agents report after reconnecting whether they got the order to start.
        scheduler.agents.leases.add(attempt.clone(), places);
        // If the ranks must end, the `Welcome` message to each agent repeats the order, so no other order is needed.
        scheduler.agents.leases.note_stop_requested(&attempt);
        if agents.len() > 1
            && let Some(row) = scheduler.store.job(&attempt.job).await?
        {
            for agent in &agents {
                if let Some(end) = lifecycle::find_end_on_agent(&row, agent) {
                    scheduler.agents.leases.note_end(&attempt, agent, RanksEnd::of(end));
                }
            }
            let unreachable: Vec<_> = row.progress.unreachable.iter().copied().collect();
            scheduler.agents.leases.mark_unreachable(&attempt, &unreachable);
        }
    }
    Ok(())
}

/// Checks leases and plans starts until dropped.
pub(crate) async fn run(scheduler: Arc<Scheduler>) {
    let unstored = UnstoredReasons::default();
    tokio::join!(
        run_rounds(&scheduler, &unstored),
        compare_queue(&scheduler),
        unstored.store_all(&scheduler)
    );
}

/// Compares the queue with the store. This is a separate task, because the comparison of a long queue would delay rounds.
async fn compare_queue(scheduler: &Scheduler) {
    let mut failure_log = FailureLog::default();
    loop {
        tokio::time::sleep(COMPARE_INTERVAL).await;
        let compared = scheduler.waiting.mark_differences(&*scheduler.store).await;
        let failed = "the queue could not be compared with the store";
        failure_log.log(&compared, failed, "the queue is compared with the store again");
        if matches!(compared, Ok(true)) {
            scheduler.agents.leases.wake_dispatch();
        }
    }
}

async fn run_rounds(scheduler: &Scheduler, unstored: &UnstoredReasons) {
    let mut failure_log = FailureLog::default();
    loop {
        let done = run_round(scheduler, unstored).await;
        failure_log.log(&done, "a round of dispatch failed", "rounds of dispatch succeed again");
        let poll = if scheduler.agents.leases.any_attempt_lost_contact() {
            LOST_POLL_INTERVAL
        } else {
            POLL_INTERVAL
        };
        tokio::select! {
            () = scheduler.agents.leases.wake.notified() => {}
            () = tokio::time::sleep(poll) => {}
        }
    }
}

async fn run_round(scheduler: &Scheduler, unstored: &UnstoredReasons) -> Result<()> {
    for expired in scheduler.agents.leases.expired_parts() {
        // The agent may have reconnected while other agents were given up.
        if scheduler.agents.leases.is_renewed(&expired) {
            continue;
        }
        let job = expired.attempt.job.clone();
        let secs = scheduler.agents.leases.duration.as_secs_f64();
        skip_permanent_error(&job, expire(scheduler, expired, secs, None).await)?;
    }
    let max_silence = scheduler.config.heartbeat.mul_f64(LOST_AFTER_HEARTBEATS).max(MIN_SILENCE);
    // An agent that was connected before this server was started may be reconnecting.
    let uptime = scheduler.up_since.elapsed();
    let silence = |id: &str| scheduler.agents.silence(id).or_else(|| uptime.checked_sub(RECONNECT_TIME));
    let is_silent = |id: &str| silence(id).is_some_and(|silence| silence > max_silence);
    for expired in
        scheduler.agents.leases.agents_to_give_up(is_silent, |id| scheduler.agents.is_connected(id))
    {
        let job = expired.attempt.job.clone();
        let silence = scheduler.agents.silence(&expired.place.agent_id).unwrap_or(uptime).as_secs_f64();
        scheduler.agents.leases.give_up(&expired);
        let why_early = "the ranks of other machines have lost contact with its ranks";
        let ended = expire(scheduler, expired, (silence * 10.0).round() / 10.0, Some(why_early)).await;
        skip_permanent_error(&job, ended)?;
    }
    // The claims of this round would wait for the transaction of these ends anyway, and this round can then use the freed slots.
    if scheduler.agents.inbox.has_waiting_ends() {
        let _ = tokio::time::timeout(ENDS_TIMEOUT, scheduler.agents.inbox.flush()).await;
    }
    let (snapshot, plan) = make_plan(scheduler).await?;
    carry_out(scheduler, &snapshot, plan, unstored).await
}

/// Plans again and again until all checkpoints that the planned starts need are known.
async fn make_plan(scheduler: &Scheduler) -> Result<(Snapshot, Plan)> {
    let mut snapshot = take_snapshot(scheduler).await?;
    let check_deadline = Instant::now() + CHECK_TIMEOUT;
    loop {
        let plan = plan(&snapshot);
        if plan.unknown_checkpoints.is_empty() {
            return Ok((snapshot, plan));
        }
        for (row, reader) in plan.unknown_checkpoints {
            let wait = match scheduler.checkpoints.find_wait(&row, &reader, check_deadline).await {
                Err(error) if !error.is_temporary() => {
                    let why = Reason::from(error.to_string()).into();
                    skip_permanent_error(&row.job.id, Err(error))?;
                    Some(Wait { why, keeps_slots: false })
                }
                found => found?,
            };
            snapshot.checkpoint_waits.insert((row.job.id.clone(), reader), wait);
        }
    }
}

async fn take_snapshot(scheduler: &Scheduler) -> Result<Snapshot> {
    let now = crate::now();
    let mut jobs_in_slots = scheduler.agents.leases.jobs_in_slots();
    let agents = scheduler.agents.online().into_iter().map(|agent| {
        let id = &agent.row.id;
        let is_drained = scheduler.agents.is_draining(id);
        let takes_work = agent.leave_reason.is_none()
            && agent.no_work_reason.is_none()
            // An agent that the network no longer reaches is online until its connection times out, but no start would reach it.
            && agent.row.last_seen_at > now - scheduler.agents.leases.duration
            && !scheduler.agents.leases.is_given_up(id)
            && !is_drained;
        let slots_in_use = jobs_in_slots.remove(id).unwrap_or_default().into_keys().collect();
        Arc::new(AgentState {
            only_job: agent.only_job,
            takes_work,
            is_drained,
            slots_in_use,
            row: agent.row,
        })
    });
    let agents = agents.collect();
    let fair_share = match scheduler.config.fair_share {
        // Without authentication, jobs have no owner.
        FairShare::Owner if scheduler.config.no_auth => FairShare::Project,
        fair_share => fair_share,
    };
    let slots_of_shares = scheduler.store.slots_of_shares(fair_share).await?;
    let waiting = scheduler.waiting.read(&*scheduler.store).await?;
    let yielding_jobs = if waiting.is_empty() { Vec::new() } else { yielding_jobs(scheduler).await? };
    let paused_sweeps = if waiting.iter().any(|row| row.job.trial.is_some()) {
        scheduler.store.paused_sweeps().await?
    } else {
        HashMap::new()
    };
    Ok(Snapshot {
        now,
        started_at: scheduler.started_at,
        agents,
        waiting,
        yielding_jobs,
        paused_sweeps,
        fair_share,
        slots_of_shares,
        checkpoint_waits: HashMap::new(),
    })
}

/// Running jobs whose slots other jobs may count on, by ascending priority.
async fn yielding_jobs(scheduler: &Scheduler) -> Result<Vec<YieldingJob>> {
    let (mut occupants, ending) =
        (scheduler.store.yielding_jobs().await?, scheduler.agents.leases.ending_jobs());
    let known: HashSet<JobId> = occupants.iter().map(|occupant| occupant.job.clone()).collect();
    // Jobs whose ranks have ended on one of their agents will end everywhere. They need no preemption, so their priority does not matter.
    let only_ending = ending.iter().filter(|job| !known.contains(*job)).map(|job| Occupant {
        job: job.clone(),
        priority: i32::MAX,
        preemptible: false,
        must_end: false,
        is_being_preempted: false,
    });
    occupants.extend(only_ending);
    let ending: HashSet<JobId> = ending.into_iter().collect();
    let with_slots = |occupant: Occupant| {
        let places = scheduler.agents.leases.places_of(&occupant.job);
        let slots = places
            .into_iter()
            .flat_map(|place| place.ranks.into_iter().map(move |(_, slot)| (place.agent_id.clone(), slot)));
        let is_ending = occupant.must_end || ending.contains(&occupant.job);
        YieldingJob { slots: slots.collect(), occupant, is_ending }
    };
    Ok(occupants.into_iter().map(with_slots).collect())
}

/// Starts and preempts jobs as planned, then publishes the plan.
async fn carry_out(
    scheduler: &Scheduler,
    snapshot: &Snapshot,
    mut plan: Plan,
    unstored: &UnstoredReasons,
) -> Result<()> {
    let planned = plan.starts.len();
    let mut starts = std::mem::take(&mut plan.starts).into_iter();
    for preemption in std::mem::take(&mut plan.preemptions) {
        // Starts before this preemption come first, because if one of them fails, its slots are free, and the preemption may not be needed.
        let earlier_count = preemption.starts_before - (planned - starts.len());
        let earlier = starts.by_ref().take(earlier_count).collect();
        if !start_all(scheduler, earlier).await? || !preempt(scheduler, snapshot, &preemption).await? {
            // The next plan has the reason why the job waits.
            let id = &preemption.row.job.id;
            let waiting = plan.waiting.iter_mut().filter(|waiting| waiting.row.job.id == *id);
            waiting.for_each(|waiting| waiting.why = None);
        }
    }
    start_all(scheduler, starts.collect()).await?;
    scheduler.checkpoints.waits.retain(&plan.waiting.iter().map(|waiting| &waiting.row.job.id).collect());
    let with_reason = plan.waiting.iter().filter_map(|waiting| Some((&waiting.row, waiting.why.as_ref()?)));
    for (row, why) in with_reason {
        unstored.note(scheduler, row, why);
    }
    scheduler.last_plan.replace(plan);
    Ok(())
}

/// Logs a permanent error of one job, so that the other jobs are still dispatched. Transient errors end the round.
fn skip_permanent_error(job: &JobId, done: Result<()>) -> Result<()> {
    match done {
        Err(error) if !error.is_temporary() => {
            unreadable::log_once(&format!("job {job} cannot be dispatched: {error}"));
            Ok(())
        }
        other => other,
    }
}

/// Fences an attempt whose lease has expired on one of its agents. The job is restarted, or fails if no restarts are left. An attempt on
/// several agents ends once the other agents have ended their ranks. `why_early`: why an agent that has been silent for `secs` is
/// given up before its lease has expired.
async fn expire(
    scheduler: &Scheduler,
    expired: AttemptPart,
    secs: f64,
    why_early: Option<&str>,
) -> Result<()> {
    let AttemptPart { attempt, place, agent_count, had_order } = expired;
    // The connection of a silent agent may still be open for a moment after its lease has expired.
    let heard_since = crate::now() - scheduler.agents.leases.duration / 2;
    let online = scheduler.agents.online();
    let is_heard = online.iter().any(|o| o.row.id == place.agent_id && o.row.last_seen_at >= heard_since);
    let is_online = is_heard && why_early.is_none();
    let (agent, attempt_number) = (Text::from(place.agent.as_str()), attempt.attempt);
    let detail = why_early.map(Text::from);
    let why = move |row: &JobRow| -> Reason {
        let (agent, attempt, step) = (agent.clone(), attempt_number, row.job.step);
        if !is_online {
            return ReasonKind::AgentLost { agent, attempt, step, secs, detail: detail.clone() }.into();
        }
        // The ranks may have trained before this server was started.
        if had_order || row.progress.trained {
            return ReasonKind::AgentWithoutRanks { agent, attempt, step }.into();
        }
        ReasonKind::StartLost { agent, attempt, step }.into()
    };
    let end = move |row: &JobRow| EndOnAgent::Lost(why(row));
    end_attempt_on_agent(scheduler, &attempt, &place, agent_count, StopMode::AtOnce, end).await?;
    let reason =
        if why_early.is_some() { "the attempt has ended without this agent" } else { "its lease ran out" };
    send_stop(scheduler, &[place], &attempt, reason, StopMode::AtOnce);
    Ok(())
}

/// The reason of a job whose agent was stopped in an orderly way.
pub(crate) fn leaving_reason(agent: &str, reason: &str) -> Reason {
    ReasonKind::AgentStopped { agent: Some(agent.into()), detail: Some(reason.into()) }.into()
}

/// A request to stop the ranks of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopRequest {
    Cancel,
    Pause,
}

/// Cancels or pauses a job: at once if none of its ranks run, otherwise by ordering its agents to stop them.
///
/// # Errors
/// The job's state forbids the request, or there is no such job.
pub(crate) async fn stop(scheduler: &Scheduler, id: &JobId, request: StopRequest) -> Result<Job> {
    let places = scheduler.agents.leases.places_of(id);
    let online = scheduler.agents.online();
    let is_reachable = places.iter().any(|p| online.iter().any(|o| o.row.id == p.agent_id));
    let change = move |row: &mut JobRow| match request {
        StopRequest::Cancel => lifecycle::cancel(row, is_reachable, crate::now()),
        StopRequest::Pause => lifecycle::pause(row, crate::now()),
    };
    let changed = scheduler.events.change_job(id, Box::new(change)).await?;
    order_stop(scheduler, id).await?;
    Ok(changed.job)
}
