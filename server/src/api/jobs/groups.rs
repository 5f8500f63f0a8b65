//! Groups of jobs, with mean and spread of metrics over the jobs of each group.

use super::{group_keys, list::ListQuery, sorting::numeric_sort_key};
use crate::api::prelude::*;
use crate::{
    api::{
        large,
        list::{self, Elements, Key, MAX_LIMIT, Page, Pages, list_of},
    },
    http::extract::check_count,
    store::{GroupRow, GroupValue, MeanAndSpread, RunningStatistics, Store},
};
use jiff::Timestamp;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

const DEFAULT_LIMIT: u32 = 100;
/// Maximum number of groups on all pages.
const MAX_GROUPS: usize = 10_000;
/// Maximum number of metrics in a request.
const MAX_METRICS: usize = 16;
/// Maximum size of a group's values in a cursor, in bytes. Longer values are replaced by their hash.
const MAX_ID_BYTES: usize = 600;

/// Parameters of `GET /jobs/groups`. The filters are the same as in `GET /jobs`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct GroupsQuery {
    /// Keys to group by, 1 to 3, comma-separated: `project`, `owner`, `tag`, `state`, `name`, or settings with one value such as
    /// `model.arch,train.lr`.
    #[serde(default)]
    #[param(required = true)]
    by: String,
    /// Comma-separated names of at most 16 numbers whose mean and spread over the jobs of each group are returned. All numeric sort keys of
    /// jobs are possible, such as `loss,best,spec.train.lr`.
    metrics: Option<String>,
    /// Sort key: `group` (the common values), `jobs` (the number of jobs), `newest`, or one of `metrics` (the metric's mean; for
    /// `best`, the group's highest value), with a leading `-` for descending order (default `group`).
    sort: Option<String>,
    /// Maximum number of groups on a page, 1 to 1000 (default 100).
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page, requested with the same `by` and `sort`.
    cursor: Option<String>,
    /// Whether to return the number of groups on all pages as `total`.
    count: Option<bool>,
    /// Comma-separated states: only jobs in one of these states.
    state: Option<String>,
    /// Only jobs whose name contains this text.
    name: Option<String>,
    /// Only jobs whose name, tags or notes contain this text.
    q: Option<String>,
    /// Comma-separated conditions on settings: only jobs that fulfil all of them.
    #[serde(rename = "where")]
    #[param(rename = "where")]
    conditions: Option<String>,
    /// Only jobs of this person or token.
    owner: Option<String>,
    /// Only jobs of this project.
    project: Option<String>,
    /// Comma-separated tags: only jobs with all of these tags.
    tag: Option<String>,
    /// Only jobs submitted at this time or later (RFC 3339).
    created_after: Option<String>,
    /// Only jobs submitted before this time (RFC 3339).
    created_before: Option<String>,
}

list_of! {
    /// A page of groups.
    GroupList
    /// In the order of `sort`.
    groups: Group
}

/// Jobs with common values.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Group {
    /// Common values of the jobs, one for each key of `by`; null if the jobs have no value. `GET /jobs` with the same `by` and with these
    /// values as `group` lists the jobs.
    values: Vec<GroupValue>,
    /// Number of jobs in any state.
    jobs: u64,
    /// Number of jobs in each state, without states that no job is in: `{"running": 2, "failed": 1}`.
    states: BTreeMap<&'static str, u64>,
    /// Submission time of the newest job.
    newest_at: Timestamp,
    /// Mean and spread of each of the requested `metrics`, by name.
    metrics: BTreeMap<String, MeanAndSpread>,
    /// Identifies the group in cursors, and orders groups with equal sort keys.
    #[serde(skip)]
    id: String,
}

impl Group {
    fn new(row: GroupRow, metrics: &[&str]) -> Result<Self> {
        let mut id = serde_json::to_string(&row.values)?;
        if id.len() > MAX_ID_BYTES {
            id = hex::encode(Sha256::digest(&id));
        }
        let statistics = row.metrics.iter().map(RunningStatistics::statistics);
        Ok(Self {
            jobs: row.states.values().sum(),
            states: row.states,
            newest_at: row.newest_at,
            metrics: metrics.iter().map(|name| (*name).to_owned()).zip(statistics).collect(),
            values: row.values,
            id,
        })
    }

    fn key(&self, by: &str) -> Key {
        match by {
            "group" => group_keys::sort_key(&self.values),
            "jobs" => Some(self.jobs as f64).into(),
            "newest" => self.newest_at.into(),
            "best" => self.metrics.get(by).and_then(|statistics| statistics.max).into(),
            metric => self.metrics.get(metric).and_then(|statistics| statistics.mean).into(),
        }
    }
}

/// List groups of jobs
///
/// Returns for each group the number of jobs in each state, and mean and standard deviation of metrics, for example over jobs that differ
/// only in their seed. All matching jobs are included, except private jobs of other people. With `by=tag`, a job is in the group of each of
/// its tags.
#[utoipa::path(get, path = "/jobs/groups", tag = "jobs", params(GroupsQuery), responses((status = 200, body = GroupList)))]
pub(crate) async fn list(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<GroupsQuery>,
) -> Result<Json<GroupList>> {
    let by = group_keys::parse_by(&query.by)?;
    let names = list::split_unique(query.metrics.as_deref());
    if names.len() > MAX_METRICS {
        let detail = format!("metrics has {} names; give at most {MAX_METRICS}", names.len());
        return Err(Error::BadRequest(detail));
    }
    let metrics = names.iter().map(|name| numeric_sort_key(name)).collect::<Result<Vec<_>>>()?;
    let limit = check_count("limit", query.limit, DEFAULT_LIMIT, MAX_LIMIT)? as usize;
    let sort = query.sort.as_deref().filter(|sort| !sort.is_empty()).unwrap_or("group");
    let (sorted_by, _) = list::split_sort_key(sort);
    if !["group", "jobs", "newest"].contains(&sorted_by) && !names.contains(&sorted_by) {
        return Err(Error::BadRequest(format!(
            "sort is {:?}, but must be group, jobs, newest or one of metrics; to sort by a metric, add it to metrics",
            lockstep_protocol::spec::shortened(sorted_by)
        )));
    }
    let jobs = ListQuery {
        state: query.state,
        name: query.name,
        q: query.q,
        conditions: query.conditions,
        owner: query.owner,
        project: query.project,
        tag: query.tag,
        created_after: query.created_after,
        created_before: query.created_before,
        ..ListQuery::default()
    };
    // A permit for any `limit`, because each request reads all matching jobs, and the database has few readers.
    let _permit = large::acquire_permit(MAX_LIMIT).await?;
    let rows = store.job_groups(&jobs.filter(&caller)?, &by, &metrics, MAX_GROUPS).await?;
    let Some(rows) = rows else {
        return Err(Error::BadRequest(format!(
            "by {} makes more than {MAX_GROUPS} groups: group by a value that more jobs have in common, or filter the jobs",
            lockstep_protocol::spec::shortened(&query.by)
        )));
    };
    let mut groups = rows.into_iter().map(|row| Group::new(row, &names)).collect::<Result<Vec<_>>>()?;
    let total = (query.count == Some(true)).then_some(groups.len() as u64);
    let key = |group: &Group| group.key(sorted_by);
    let pages = Pages::new("groups", sort).owned_by("grouping", &query.by);
    let cursor = query.cursor.as_deref();
    let next_cursor = list::sort_and_cut(&mut groups, pages, key, |group| &group.id, cursor, limit)?;
    let elements = Elements { items: groups, fields: None };
    Ok(Json(Page { elements, next_cursor, total }.into()))
}
