//! The queue: waiting jobs in the order in which dispatch considers them, and the slots that are reserved for them.

use crate::api::prelude::*;
use crate::{
    agents::Agents,
    api::list::{Elements, Fields, MAX_LIMIT, Pages},
    http::extract::{check_count, check_search_text},
    scheduler::{self, Scheduler},
    store::JobRow,
};
use lockstep_protocol::{
    job::JobId,
    labels,
    queue::{QueueList, QueuedJob, Reservation},
};

const DEFAULT_LIMIT: u32 = 100;
/// Pages of the queue for cursors. The only sort key is the place.
const PAGES: Pages = Pages::new("queue", "place");

/// Parameters of `GET /queue`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct QueueQuery {
    /// Maximum number of jobs on a page, 1 to 1000 (default 100).
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    pub(super) cursor: Option<String>,
    /// Comma-separated names of the fields to return of each job.
    fields: Option<String>,
    /// Whether to return the number of jobs on all pages as `total`.
    pub(super) count: Option<bool>,
    /// Only jobs of this project.
    pub(crate) project: Option<String>,
    /// Only jobs of this person or token; at most 200 characters.
    pub(crate) owner: Option<String>,
}

impl QueueQuery {
    /// Returns the project and the owner to filter by. Empty parameters are ignored.
    fn filters(&self) -> Result<(Option<&str>, Option<&str>)> {
        check_search_text("owner", self.owner.as_deref())?;
        let project = self.project.as_deref().filter(|project| !project.is_empty());
        if let Some(mistake) = project.and_then(labels::project_mistake) {
            return Err(Error::BadRequest(format!("project {mistake}")));
        }
        Ok((project, self.owner.as_deref().filter(|owner| !owner.is_empty())))
    }
}

/// The response in the form of [`QueueList`].
#[derive(Debug, Serialize)]
pub(crate) struct QueuePage {
    pub(crate) jobs: Elements<QueuedJob>,
    pub(crate) reservations: Vec<Reservation>,
    pub(crate) next_cursor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) total: Option<u64>,
}

/// Show the queue
///
/// Jobs that wait for slots, in the order in which they get slots: by priority, then by fair share if the server uses it, then
/// by age. Each job has the reason for waiting and the number of slots that are reserved for it. Private jobs of other people have only a
/// position, and are left out with `project` or `owner`. Positions count all jobs of the queue, and may change between two pages as jobs
/// start.
#[utoipa::path(get, path = "/queue", tag = "jobs", params(QueueQuery),
    responses((status = 200, body = QueueList), (status = 422, body = Problem)))]
pub(crate) async fn list(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<QueueQuery>,
) -> Result<Json<QueuePage>> {
    Ok(Json(read_page(&scheduler, &caller, &query).await?))
}

pub(crate) async fn read_page(
    scheduler: &Scheduler,
    caller: &Caller,
    query: &QueueQuery,
) -> Result<QueuePage> {
    let limit = check_count("limit", query.limit, DEFAULT_LIMIT, MAX_LIMIT)? as usize;
    let (project, owner) = query.filters()?;
    let fields = Fields::parse::<QueuedJob>(query.fields.as_deref())?;
    let cursor: Option<(u64, Option<JobId>)> = PAGES.decode(query.cursor.as_deref())?;
    let mut rows = scheduler.waiting.read(&*scheduler.store).await?;
    // Uses the order of the newest round of dispatch. Jobs that were queued since then follow in the order of priority and age.
    scheduler.last_plan.sort(&mut rows, |row| &row.job.id);
    let planned = scheduler.last_plan.reservations();
    let reservations = reservations(&scheduler.agents, caller, &planned, &rows);
    let is_requested = |row: &JobRow, is_visible: bool| {
        let matches =
            |filter: Option<&str>, value: Option<&str>| filter.is_none() || is_visible && filter == value;
        matches(project, Some(&row.job.project)) && matches(owner, row.job.owner.as_deref())
    };
    let placed = rows.iter().zip(1..).map(|(row, place)| (place, row, caller.sees_job(&row.job)));
    let mut jobs: Vec<QueueEntry> = placed
        .filter(|(_, row, is_visible)| is_requested(row, *is_visible))
        .map(|(place, row, is_visible)| QueueEntry { place, row: is_visible.then_some(row) })
        .collect();
    let total = (query.count == Some(true)).then_some(jobs.len() as u64);
    if let Some(cursor) = &cursor {
        let places: Vec<_> = jobs.iter().map(|job| (job.place, job.row.map(|row| &row.job.id))).collect();
        jobs.drain(..previous_count(&places, cursor));
    }
    let has_more = jobs.len() > limit;
    jobs.truncate(limit);
    let last = jobs.last().filter(|_| has_more).map(|job| (job.place, job.row.map(|row| &row.job.id)));
    let next_cursor = last.map(|last| PAGES.encode(&last)).transpose()?;
    let items = jobs.into_iter().map(|job| queued_job(scheduler, &planned, job)).collect();
    Ok(QueuePage { jobs: Elements { items, fields }, reservations, next_cursor, total })
}

/// A job and its position in the queue; `row` is `None` for a private job of another person.
struct QueueEntry<'a> {
    place: u64,
    row: Option<&'a Arc<JobRow>>,
}

/// Returns the number of jobs on previous pages. The cursor has the place and id of the last job on these pages. Since then, the place may
/// have changed.
fn previous_count(jobs: &[(u64, Option<&JobId>)], (last_place, last_id): &(u64, Option<JobId>)) -> usize {
    let index = last_id.as_ref().and_then(|last_id| jobs.iter().position(|(_, id)| *id == Some(last_id)));
    match (index, last_id) {
        (Some(index), _) => index + 1,
        // The last job no longer waits, so the next job has the same or an earlier place.
        (None, Some(_)) => jobs.partition_point(|(place, _)| place < last_place),
        // The last job is private to another person, so only its place is known.
        (None, None) => jobs.partition_point(|(place, _)| place <= last_place),
    }
}

fn queued_job(
    scheduler: &Scheduler,
    planned: &[scheduler::Reservation],
    QueueEntry { place, row }: QueueEntry,
) -> QueuedJob {
    let Some(row) = row else {
        return QueuedJob { place, ..QueuedJob::default() };
    };
    let job = &row.job;
    let waiting = scheduler.last_plan.find(&job.id);
    let reserved = planned.iter().filter(|reservation| reservation.job == job.id);
    let slots: usize = reserved.map(|reservation| reservation.free.len() + reservation.ending.len()).sum();
    QueuedJob {
        place,
        // The plan has no reason for a job that waits before its next attempt.
        reason: waiting.and_then(|waiting| waiting.reason).or_else(|| job.cause.clone()),
        kept_slots: Some(u32::try_from(slots).unwrap_or(u32::MAX)),
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

/// Returns the reservations of waiting jobs, in the order of the queue.
fn reservations(
    agents: &Agents,
    caller: &Caller,
    planned: &[scheduler::Reservation],
    rows: &[Arc<JobRow>],
) -> Vec<Reservation> {
    let online = agents.online();
    let shown = planned.iter().filter_map(|reservation| {
        // Skips a job that has just started, and a machine that has just disconnected.
        let row = rows.iter().find(|row| row.job.id == reservation.job)?;
        let agent = online.iter().find(|agent| agent.row.id == reservation.agent_id)?;
        let is_visible = caller.sees_job(&row.job);
        Some(Reservation {
            agent: agent.row.name.clone(),
            agent_id: reservation.agent_id.clone(),
            job: is_visible.then(|| row.job.id.clone()),
            name: is_visible.then(|| row.job.name.clone()),
            free: reservation.free.clone(),
            ending: reservation.ending.clone(),
            whole_machine: reservation.is_whole_machine,
            since: reservation.since,
        })
    });
    shown.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_continue_correctly_after_jobs_have_left_the_queue() {
        let ids: Vec<JobId> = (0..4).map(|_| JobId::generate()).collect();
        let queue = |indices: &[usize]| -> Vec<(u64, Option<&JobId>)> {
            // The last job is private to another person.
            (1..).zip(indices).map(|(place, i)| (place, ids.get(*i).filter(|_| *i != 3))).collect()
        };
        let last = (2, Some(ids[1].clone()));
        assert_eq!(previous_count(&queue(&[0, 1, 2]), &last), 2);
        assert_eq!(previous_count(&queue(&[1, 2]), &last), 1, "a job before it has started");
        assert_eq!(previous_count(&queue(&[0, 2]), &last), 1, "the last job has started");
        assert_eq!(previous_count(&queue(&[]), &last), 0);
        assert_eq!(previous_count(&queue(&[0, 3, 2]), &(2, None)), 2, "a private job has only a place");
        assert_eq!(previous_count(&queue(&[0, 1, 2]), &(u64::MAX, None)), 3);
    }
}
