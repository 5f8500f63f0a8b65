//! The queue: what waits, in the order in which dispatch looks at it, and what is kept for whom.

use crate::{
    agents::Agents,
    api::list::{Elements, Fields, MAX_LIMIT, Pages},
    auth::access::Caller,
    http::{
        error::{Error, Problem, Result},
        extract::{Query, count, search_text},
    },
    scheduler::{self, Scheduler},
    store::JobRow,
};
use axum::{Extension, Json, extract::State};
use lockstep_protocol::{
    job::JobId,
    labels,
    queue::{QueueList, QueuedJob, Reservation},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};
use utoipa::IntoParams;

const DEFAULT_LIMIT: u32 = 100;
/// The only order, for cursors.
const PAGES: Pages = Pages::new("queue", "place");
const FIELDS: &[&str] = &[
    "place",
    "id",
    "name",
    "state",
    "project",
    "owner",
    "priority",
    "ranks",
    "waiting_since",
    "reason",
    "kept_slots",
];

/// Which part of the queue.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct QueueQuery {
    /// At most so many jobs: 1 to 1000; 100 when absent.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Only these fields of each job, with commas between.
    #[param(min_length = 1)]
    fields: Option<String>,
    /// Also how many jobs there are on all pages together, as `total`.
    count: Option<bool>,
    /// Jobs of this project.
    pub(crate) project: Option<String>,
    /// Jobs of this person or token; at most 200 characters.
    pub(crate) owner: Option<String>,
}

impl QueueQuery {
    /// Whether it asks for the first page.
    pub(crate) fn is_first(&self) -> bool {
        self.cursor.is_none()
    }

    /// As the page asks: its title says how many there are.
    pub(crate) fn counted(self) -> Self {
        Self { count: Some(true), ..self }
    }

    /// Project and owner, where the list is narrowed to them; an empty one is none.
    ///
    /// # Errors
    /// A name that no project can have, or an owner's that is too long.
    fn filters(&self) -> Result<(Option<&str>, Option<&str>)> {
        search_text("owner", self.owner.as_deref())?;
        let project = self.project.as_deref().filter(|project| !project.is_empty());
        if let Some(mistake) = project.and_then(labels::project_mistake) {
            return Err(Error::BadRequest(format!("project {mistake}")));
        }
        Ok((project, self.owner.as_deref().filter(|owner| !owner.is_empty())))
    }
}

/// As [`QueueList`].
#[derive(Debug, Serialize)]
pub(crate) struct QueuePage {
    pub(crate) jobs: Elements<QueuedJob>,
    pub(crate) reservations: Vec<Reservation>,
    pub(crate) next_cursor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) total: Option<u64>,
}

/// The queue
///
/// Jobs that wait for slots, in the order in which they are given some: by priority, then fair share where the server has it, then age; with
/// what each of them waits for, and what is kept for it. Jobs that are private to others have a place and no name; with `project` or
/// `owner` they are left out. Places are counted over the whole queue, and change from one page to the next as jobs start.
#[utoipa::path(get, path = "/queue", tag = "jobs", params(QueueQuery),
    responses((status = 200, body = QueueList), (status = 400, body = Problem), (status = 422, body = Problem)))]
pub(crate) async fn list(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<QueueQuery>,
) -> Result<Json<QueuePage>> {
    Ok(Json(page(&scheduler, &caller, &query).await?))
}

/// # Errors
/// A limit, field, filter or cursor that is none, or the store's.
pub(crate) async fn page(scheduler: &Scheduler, caller: &Caller, query: &QueueQuery) -> Result<QueuePage> {
    let limit = count("limit", query.limit, DEFAULT_LIMIT, MAX_LIMIT)? as usize;
    let (project, owner) = query.filters()?;
    let fields = Fields::parse(query.fields.as_deref(), FIELDS)?;
    let from: Option<(u64, Option<JobId>)> = PAGES.read(query.cursor.as_deref())?;
    let mut rows = scheduler.waiting.read(&*scheduler.store).await?;
    // As the newest round of dispatch looked at it; what has come since stays in the order of priority and age.
    scheduler.last_plan.sort(&mut rows, |row| &row.job.id);
    let kept = scheduler.last_plan.reservations();
    let slots = kept_slots(&kept);
    let reservations = reservations(&scheduler.agents, caller, kept, &rows);
    let wanted = |row: &JobRow, is_seen: bool| {
        let is = |asked: Option<&str>, has: Option<&str>| asked.is_none() || is_seen && asked == has;
        is(project, Some(&row.job.project)) && is(owner, row.job.owner.as_deref())
    };
    let placed = rows.iter().zip(1..).map(|(row, place)| (place, row, sees(caller, row)));
    let mut jobs: Vec<Placed> = placed
        .filter(|(_, row, is_seen)| wanted(row, *is_seen))
        .map(|(place, row, is_seen)| Placed { place, row: is_seen.then_some(row) })
        .collect();
    let total = (query.count == Some(true)).then_some(jobs.len() as u64);
    if let Some(from) = &from {
        let places: Vec<_> = jobs.iter().map(|job| (job.place, job.row.map(|row| &row.job.id))).collect();
        jobs.drain(..behind(&places, from));
    }
    let more = jobs.len() > limit;
    jobs.truncate(limit);
    let last = jobs.last().filter(|_| more).map(|last| (last.place, last.row.map(|row| &row.job.id)));
    let next_cursor = last.map(|last| PAGES.cursor(&last)).transpose()?;
    let items = jobs.into_iter().map(|job| queued(scheduler, &slots, job)).collect();
    Ok(QueuePage { jobs: Elements { items, fields }, reservations, next_cursor, total })
}

/// A job at its place; without the job, where it is private to somebody else.
struct Placed<'a> {
    place: u64,
    row: Option<&'a Arc<JobRow>>,
}

/// How many of the jobs are on pages before, the last of which ended with this job: it may stand elsewhere now.
fn behind(jobs: &[(u64, Option<&JobId>)], (place, last): &(u64, Option<JobId>)) -> usize {
    let at = last.as_ref().and_then(|id| jobs.iter().position(|(_, job)| *job == Some(id)));
    match (at, last) {
        (Some(at), _) => at + 1,
        // It waits no longer, so the next one has its place or an earlier one.
        (None, Some(_)) => jobs.partition_point(|(of, _)| of < place),
        // One that is private to somebody else.
        (None, None) => jobs.partition_point(|(of, _)| of <= place),
    }
}

/// Slots that are kept for each job.
fn kept_slots(all: &[scheduler::Reservation]) -> HashMap<JobId, u32> {
    let mut slots = HashMap::new();
    for kept in all {
        let more = u32::try_from(kept.free.len() + kept.ending.len()).unwrap_or(u32::MAX);
        let sum: &mut u32 = slots.entry(kept.job.clone()).or_default();
        *sum = sum.saturating_add(more);
    }
    slots
}

fn sees(caller: &Caller, row: &JobRow) -> bool {
    caller.sees(row.job.spec.private, row.job.owner.as_deref())
}

fn queued(scheduler: &Scheduler, slots: &HashMap<JobId, u32>, Placed { place, row }: Placed) -> QueuedJob {
    let Some(row) = row else {
        return QueuedJob { place, ..QueuedJob::default() };
    };
    let job = &row.job;
    QueuedJob {
        place,
        // One that waits before it is tried again has been looked at, and says why itself.
        reason: scheduler
            .last_plan
            .of(&job.id)
            .and_then(|waiting| waiting.reason)
            .or_else(|| job.cause.clone()),
        kept_slots: Some(slots.get(&job.id).copied().unwrap_or(0)),
        id: Some(job.id.clone()),
        name: Some(job.name.clone()),
        state: Some(job.state),
        project: Some(job.project.clone()),
        owner: job.owner.clone(),
        priority: Some(job.spec.priority),
        ranks: Some(job.ranks),
        waiting_since: Some(row.waiting_since.unwrap_or(job.created_at)),
    }
}

/// What is kept for jobs that wait, in the order of the queue.
fn reservations(
    agents: &Agents,
    caller: &Caller,
    all: Vec<scheduler::Reservation>,
    rows: &[Arc<JobRow>],
) -> Vec<Reservation> {
    let wanted: HashSet<&JobId> = all.iter().map(|kept| &kept.job).collect();
    let rows = rows.iter().filter(|row| wanted.contains(&row.job.id));
    let by_id: HashMap<JobId, &Arc<JobRow>> = rows.map(|row| (row.job.id.clone(), row)).collect();
    let online = agents.online();
    let shown = all.into_iter().filter_map(|kept| {
        // One that has just started, or a machine that has just gone.
        let row = by_id.get(&kept.job)?;
        let agent = online.iter().find(|agent| agent.row.id == kept.agent_id)?;
        let is_seen = sees(caller, row);
        Some(Reservation {
            agent: agent.row.name.clone(),
            agent_id: kept.agent_id,
            job: is_seen.then_some(kept.job),
            name: is_seen.then(|| row.job.name.clone()),
            free: kept.free,
            ending: kept.ending,
            whole_machine: kept.whole_machine,
            since: kept.since,
        })
    });
    shown.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_continues_where_the_one_before_ended_whatever_has_left_meanwhile() {
        let ids: Vec<JobId> = (0..4).map(|_| JobId::generate()).collect();
        let queue = |of: &[usize]| -> Vec<(u64, Option<&JobId>)> {
            // The last one is private to somebody else.
            (1..).zip(of).map(|(place, n)| (place, ids.get(*n).filter(|_| *n != 3))).collect()
        };
        let last = (2, Some(ids[1].clone()));
        assert_eq!(behind(&queue(&[0, 1, 2]), &last), 2);
        assert_eq!(behind(&queue(&[1, 2]), &last), 1, "one before it has started");
        assert_eq!(behind(&queue(&[0, 2]), &last), 1, "it has started itself");
        assert_eq!(behind(&queue(&[]), &last), 0);
        assert_eq!(behind(&queue(&[0, 3, 2]), &(2, None)), 2, "a private one has a place alone");
        assert_eq!(behind(&queue(&[0, 1, 2]), &(u64::MAX, None)), 3);
    }
}
