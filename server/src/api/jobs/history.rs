//! A job's history: its changes of state, with reasons and the people who requested them, and its alerts.

use crate::api::prelude::*;
use crate::{
    api::{
        jobs,
        list::{MAX_LIMIT, Pages},
    },
    auth::Auth,
    http::extract::{check_count, parse_job_id},
    scheduler::Scheduler,
    store::{JobRow, Store},
};
use jiff::Timestamp;
use lockstep_protocol::{
    access::AuditEntry,
    attempt::Attempt,
    history::{Entry, History, Relative, What},
    job::{Job, JobState, Parent},
    reason::{Reason, ReasonKind},
    stream::{Event, EventBody},
};
use std::mem::discriminant;

/// Maximum time between a change of state and the entry of its request in the audit log, which is written after the response.
const MAX_RESPONSE_TIME: jiff::SignedDuration = jiff::SignedDuration::from_secs(30);

/// Parameters of `GET /jobs/{id}/history`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct HistoryQuery {
    /// Page size, 1 to 1000 (default 1000).
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
    /// Whether to return the number of entries on all pages as `total`.
    count: Option<bool>,
}

/// The only order of entries, for cursors.
const ORDER: &str = "at";

/// Show a job's history
///
/// The entries report the start and end of each attempt, all pauses, retries and cancellations, and the alerts of a run from elsewhere. The
/// end of an attempt has the reason, the rank that caused the end, and the checkpoint from which the next attempt continued. The history
/// also has the job's parent and forks, and its place in the queue. Everybody sees who submitted or forked the job. Only the owner and
/// admins see who requested the other changes.
#[utoipa::path(get, path = "/jobs/{id}/history", tag = "jobs", params(("id" = String, Path), HistoryQuery),
    responses((status = 200, body = History)))]
pub(crate) async fn show(
    State(scheduler): State<Arc<Scheduler>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(query): Query<HistoryQuery>,
) -> Result<Json<History>> {
    let limit = check_count("limit", query.limit, MAX_LIMIT, MAX_LIMIT)? as usize;
    let JobRow { mut job, private_parent, .. } =
        jobs::find_row(&*scheduler.store, &parse_job_id(&id)?).await?;
    scheduler.fill_in(&mut job);
    let pages = Pages::new("history", ORDER).owned_by("job", job.id.as_str());
    // Entries are only appended, so a cursor is the number of entries on the previous pages.
    let from: usize = pages.decode(query.cursor.as_deref())?.unwrap_or(0);
    let may_see_who = caller.sees_all() || caller.owns(job.owner.as_deref());
    if may_see_who {
        auth.audit.flush().await;
    }
    let rows = scheduler.store.history(&job, may_see_who).await?;
    let attempts = scheduler.store.attempts(&job.id).await?;
    let origin = private_parent.or_else(|| job.parent.clone());
    let (parent, forked_from) = find_parent(&*scheduler.store, &caller, &job, origin).await?;
    let mut entries = event_entries(&job, forked_from, &rows.events, &rows.requests);
    entries.extend(attempt_entries(attempts, &rows.events));
    // The sort is stable, so a request stays before the attempt's end that followed in the same millisecond.
    entries.sort_by_key(|entry| entry.at);
    let forks = rows.forks.into_iter().filter(|(fork, _)| caller.sees_job(fork));
    let forks = forks.map(|(fork, checkpoint)| to_relative(fork, checkpoint));
    let total = (query.count == Some(true)).then_some(entries.len() as u64);
    let end = from.saturating_add(limit);
    let next_cursor = (entries.len() > end).then(|| pages.encode(&end)).transpose()?;
    entries.truncate(end);
    entries.drain(..from.min(entries.len()));
    Ok(Json(History { parent, forks: forks.collect(), queue: job.queue, entries, next_cursor, total }))
}

/// Returns the parent of a fork, if the caller may see that job, and the id of the checkpoint from which the fork began. If the
/// parent is hidden, the id names the fork's own copy of the checkpoint.
async fn find_parent(
    store: &dyn Store,
    caller: &Caller,
    job: &Job,
    parent: Option<Parent>,
) -> Result<(Option<Relative>, Option<String>)> {
    let Some(Parent { job: id, checkpoint }) = parent else { return Ok((None, None)) };
    let row = match parse_job_id(&id) {
        Ok(id) => store.job(&id).await?,
        Err(_) => None,
    };
    let parent_job = row.map(|row| row.job);
    // A deleted parent is shown unless it was private.
    let is_hidden = parent_job.as_ref().map_or(job.parent.is_none(), |parent| !caller.sees_job(parent));
    if is_hidden {
        let own_copy = checkpoint.strip_prefix(&id).map(|rest| format!("{}{rest}", job.id));
        return Ok((None, Some(own_copy.unwrap_or_default())));
    }
    let parent = match parent_job {
        Some(job) => to_relative(job, checkpoint.clone()),
        None => {
            Relative { job: id, name: None, state: None, checkpoint: checkpoint.clone(), at: None, who: None }
        }
    };
    Ok((Some(parent), Some(checkpoint)))
}

/// Describes a parent or a fork. `checkpoint`: id of the checkpoint from which the fork began.
fn to_relative(job: Job, checkpoint: String) -> Relative {
    Relative {
        job: job.id.to_string(),
        name: Some(job.name),
        state: Some(job.state),
        checkpoint,
        at: Some(job.created_at),
        who: job.owner,
    }
}

/// Returns the reason if an attempt began with fewer ranks than the job has.
fn fewer_ranks_reason(events: &[Event], attempt: u32) -> Option<Reason> {
    events.iter().find_map(|event| match &event.body {
        EventBody::State { state: JobState::Starting, cause: Some(cause), attempt: starting, .. }
            if *starting == attempt && matches!(cause.kind(), ReasonKind::FewerRanks { .. }) =>
        {
            Some(cause.clone())
        }
        _ => None,
    })
}

/// Returns the entries of the starts and ends of attempts.
fn attempt_entries(attempts: Vec<Attempt>, events: &[Event]) -> Vec<Entry> {
    let mut entries = Vec::new();
    let next_checkpoints = attempts.iter().skip(1).map(|next| next.checkpoint.clone()).chain([None]);
    let next_checkpoints: Vec<_> = next_checkpoints.collect();
    for (row, next_checkpoint) in attempts.into_iter().zip(next_checkpoints) {
        let Attempt { attempt, state, reason, checkpoint, step, agents, started_at, ended_at, .. } = row;
        let fewer_ranks = fewer_ranks_reason(events, attempt);
        let what = What::Started { attempt, checkpoint, agents, reason: fewer_ranks };
        entries.push(Entry { at: started_at, what, who: None });
        if let Some(at) = ended_at {
            let rank = reason.as_ref().and_then(|reason| reason.rank_and_step().0);
            let what = What::Ended { attempt, state, rank, reason, step, next_checkpoint };
            entries.push(Entry { at, what, who: None });
        }
    }
    entries
}

/// Returns the entries of the job's changes of state and alerts, without those of its attempts' starts and ends.
fn event_entries(
    job: &Job,
    forked_from: Option<String>,
    events: &[Event],
    requests: &[AuditEntry],
) -> Vec<Entry> {
    let submission = forked_from.map_or(What::Submitted, |checkpoint| What::Forked { checkpoint });
    let mut entries = vec![Entry { at: job.created_at, what: submission, who: job.owner.clone() }];
    let (mut old_state, mut old_kind): (Option<JobState>, Option<&ReasonKind>) = (None, None);
    for Event { seq, at, body } in events {
        if let EventBody::Alert { alert, .. } = body {
            entries.push(Entry { at: *at, what: What::Alert(alert.clone()), who: None });
        }
        let EventBody::State { state, cause, .. } = body else { continue };
        let kind = cause.as_ref().map(Reason::kind);
        let is_new_state = old_state != Some(*state);
        if !is_new_state && old_kind.map(discriminant) == kind.map(discriminant) {
            continue;
        }
        // The entries of attempts report the end of an active or lost attempt. A run from elsewhere has no such entries.
        let was_active = job.external.is_none()
            && old_state.is_some_and(|state| state.is_active() || state == JobState::Lost);
        // The entry of the attempt's end reports a preemption. A user may request a pause in addition.
        let was_preempted = matches!(old_kind, Some(ReasonKind::Preempting { .. }));
        let was_cancelling = matches!(old_kind, Some(ReasonKind::Cancelling));
        let is_inactive_change = is_new_state && !was_active;
        (old_state, old_kind) = (Some(*state), kind);
        let (what, action) = match (state, kind) {
            // The first entry reports the submission, because this event may be missing if the job had many changes of state.
            (JobState::Queued, _) if *seq == 1 => continue,
            (JobState::Queued, Some(ReasonKind::ResumedByUser)) if is_new_state => {
                (What::Resumed, Some("resume"))
            }
            (JobState::Queued, Some(ReasonKind::RetriedByUser)) if is_new_state => {
                (What::Retried, Some("retry"))
            }
            (JobState::Pausing, Some(ReasonKind::Preempting { .. })) => continue,
            (JobState::Pausing, _) if is_new_state || was_preempted => (What::PauseRequested, Some("pause")),
            (JobState::Paused, _) if is_inactive_change => (What::Paused, Some("pause")),
            (_, Some(ReasonKind::Cancelling)) if !was_cancelling => (What::CancelRequested, Some("cancel")),
            (JobState::Cancelled, _) if is_inactive_change => (What::Cancelled, Some("cancel")),
            (JobState::Failed, _) if is_inactive_change => (What::Failed { reason: cause.clone() }, None),
            (JobState::Running, Some(ReasonKind::PrecisionFallback { .. })) => {
                (What::PrecisionChanged { reason: cause.clone() }, None)
            }
            _ => continue,
        };
        let who = action.and_then(|action| find_sender(requests, action, *at));
        entries.push(Entry { at: *at, what, who });
    }
    entries
}

/// Returns the sender of the request with this action whose entry in the audit log is nearest to `at`.
fn find_sender(requests: &[AuditEntry], action: &str, at: Timestamp) -> Option<String> {
    let may_be_request = |entry: &&AuditEntry| {
        let path = entry.object.split('?').next().unwrap_or_default();
        let is_near = entry.at.duration_since(at).abs() <= MAX_RESPONSE_TIME;
        path.rsplit('/').next() == Some(action) && is_near
    };
    let nearest =
        requests.iter().filter(may_be_request).min_by_key(|entry| entry.at.duration_since(at).abs());
    nearest.map(|entry| entry.who.clone()).filter(|who| !who.is_empty())
}
