//! The list of jobs: filters, order and fields.

use crate::api::prelude::*;
use crate::{
    api::{
        jobs::{conditions, diagnosis, group_keys, sorting::parse_sort},
        large,
        list::{self, Elements, Fields, MAX_LIMIT, Page, Pages, list_of},
    },
    http::extract::{check_count, check_search_text},
    scheduler::Scheduler,
    store::JobFilter,
};
use lockstep_protocol::{Job, JobState, labels, metric};

const DEFAULT_LIMIT: u32 = 50;

list_of! {
    /// A page of jobs.
    JobList
    /// In the order of `sort`. With `fields`, each job has only those fields.
    jobs: Job
}

/// Parameters of `GET /jobs`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Comma-separated states: only jobs in one of these states, such as `running,failed`.
    pub(super) state: Option<String>,
    /// Only jobs whose name contains this text of at most 200 characters.
    pub(super) name: Option<String>,
    /// Only jobs whose name, tags or notes contain this text of at most 200 characters.
    pub(super) q: Option<String>,
    /// At most 10 comma-separated conditions on settings and results: only jobs that fulfil all of them, such as
    /// `train.lr>0.1,model.arch=resnet50,best>0.9`. Operators are `=`, `!=`, `<`, `<=`, `>` and `>=`; for texts and words only `=` and
    /// `!=`.
    #[serde(rename = "where")]
    #[param(rename = "where")]
    pub(super) conditions: Option<String>,
    /// Only jobs submitted by this person, or with a token of this name.
    pub(super) owner: Option<String>,
    /// Only jobs of this project.
    pub(super) project: Option<String>,
    /// Comma-separated tags: only jobs with all of these tags.
    pub(super) tag: Option<String>,
    /// With `group`: the keys of a group, as in `GET /jobs/groups`.
    pub(super) by: Option<String>,
    /// With `by`: only jobs of the group with these `values`, as JSON with one value for each key of `by`, such as `["resnet20",0.1]`.
    pub(super) group: Option<String>,
    /// Only jobs submitted at this time or later (RFC 3339).
    #[param(format = DateTime)]
    pub(super) created_after: Option<String>,
    /// Only jobs submitted before this time (RFC 3339).
    #[param(format = DateTime)]
    pub(super) created_before: Option<String>,
    /// Sort key, with a leading `-` for descending order (default `-created`): `created`, `started`, `finished`, `name`, `state`,
    /// `project`, `owner`, `priority`, `step`, `epoch`, `attempt`, `ranks`, `speed` (images per second), `best`, the newest value of a
    /// metric (`loss`, `accuracy`, `val_loss`, `val_accuracy`, `lr` and all others that ranks report), `tag:` with a tag (jobs with the tag come last), or
    /// `spec.` with a key of the specification such as `spec.train.lr` (lists are sorted by their text).
    pub(crate) sort: Option<String>,
    /// Page size, 1 to 1000 (default 50). A page also ends after 4 MiB, and then has a `next_cursor`.
    #[param(minimum = 1, maximum = 1000)]
    pub(crate) limit: Option<u32>,
    /// `next_cursor` of the previous page, requested with the same `sort`.
    pub(super) cursor: Option<String>,
    /// Comma-separated names of the fields to return of each job, such as `id,name,state`. Jobs have `notes` only if `notes` is named here.
    pub(super) fields: Option<String>,
    /// Comma-separated names of further metrics to return in `last` of each job, such as `grad_norm,step_ms`. `loss`, `accuracy`, `lr`,
    /// `val_loss` and `val_accuracy` are always included.
    #[param(min_length = 1)]
    pub(super) metrics: Option<String>,
    /// Whether to return the number of jobs on all pages as `total`.
    pub(super) count: Option<bool>,
}

impl ListQuery {
    pub(crate) fn filter(&self, caller: &Caller) -> Result<JobFilter> {
        check_search_text("name", self.name.as_deref())?;
        check_search_text("q", self.q.as_deref())?;
        check_search_text("owner", self.owner.as_deref())?;
        let project = self.project.clone().filter(|project| !project.is_empty());
        if let Some(mistake) = project.as_deref().and_then(labels::project_mistake) {
            return Err(Error::BadRequest(format!("project {mistake}")));
        }
        let tags: Vec<String> = list::split_list(self.tag.as_deref()).map(str::to_owned).collect();
        if let Some(mistake) = labels::tags_mistake(&tags) {
            return Err(Error::BadRequest(format!("tag: {mistake}")));
        }
        let states = list::split_unique(self.state.as_deref()).into_iter();
        let states = states.map(|state| state.parse::<JobState>().map_err(Error::BadRequest));
        Ok(JobFilter {
            states: states.collect::<Result<_>>()?,
            name: self.name.clone().filter(|n| !n.is_empty()),
            text: self.q.clone().filter(|text| !text.is_empty()),
            conditions: conditions::parse(self.conditions.as_deref())?,
            owner: self.owner.clone().filter(|owner| !owner.is_empty()),
            seen_by: caller.viewer_name(),
            with_notes: false,
            project,
            tags,
            group: group_keys::parse_group(self.by.as_deref(), self.group.as_deref())?,
            created_after: list::parse_time("created_after", self.created_after.as_deref())?,
            created_before: list::parse_time("created_before", self.created_before.as_deref())?,
            sort: parse_sort(self.sort_text())?,
            limit: check_count("limit", self.limit, DEFAULT_LIMIT, MAX_LIMIT)?,
            cursor: self.pages().decode(self.cursor.as_deref())?,
        })
    }

    fn pages(&self) -> Pages<'_> {
        Pages::new("jobs", self.sort_text())
    }

    fn sort_text(&self) -> &str {
        self.sort.as_deref().filter(|sort| !sort.is_empty()).unwrap_or("-created")
    }

    /// Returns the parameters for which the page of jobs has no input field, so that its form can preserve them.
    pub(crate) fn params_without_field(&self) -> Vec<(&'static str, String)> {
        let given = [
            ("where", &self.conditions),
            ("created_after", &self.created_after),
            ("created_before", &self.created_before),
        ];
        given.into_iter().filter_map(|(key, value)| Some((key, value.clone()?))).collect()
    }

    /// Encodes a position in this list as `next_cursor`.
    pub(crate) fn next_cursor(&self, next: Option<&crate::store::Cursor>) -> Result<Option<String>> {
        next.map(|next| self.pages().encode(next)).transpose()
    }
}

/// List jobs
#[utoipa::path(get, path = "/jobs", tag = "jobs", params(ListQuery),
    responses((status = 200, body = JobList), (status = 422, body = Problem)))]
pub(crate) async fn list(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<ListQuery>,
) -> Result<Response> {
    let fields = Fields::parse::<Job>(query.fields.as_deref())?;
    let with_notes = fields.as_ref().is_some_and(|fields| fields.has("notes"));
    let filter = JobFilter { with_notes, ..query.filter(&caller)? };
    let metrics = list::split_list(query.metrics.as_deref());
    let metrics = metrics.map(|name| list::find_known_name("metric", name, &metric::NAMES));
    let metrics = metrics.collect::<Result<Vec<_>>>()?;
    let _permit = large::acquire_permit(filter.limit).await?;
    let mut page = scheduler.store.jobs(&filter).await?;
    for job in &mut page.jobs {
        // With all metrics, a long list would consist mostly of metrics.
        job.last.others.retain(|name, _| metrics.contains(&name.as_str()));
        scheduler.fill_in(job);
    }
    if fields.as_ref().is_none_or(|fields| fields.has("trained_validation")) {
        diagnosis::mark_trained_validation(&*scheduler.store, &mut page.jobs).await?;
    }
    let total = match query.count {
        Some(true) => Some(scheduler.store.count_jobs(&filter).await?),
        _ => None,
    };
    let next_cursor = query.next_cursor(page.next.as_ref())?;
    let elements = Elements { items: page.jobs, fields };
    large::json_response(JobList::from(Page { elements, next_cursor, total })).await
}
