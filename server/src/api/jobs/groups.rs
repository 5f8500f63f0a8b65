//! Groups of jobs, with mean and spread of metrics over all jobs of each.

use super::{group_keys, list::ListQuery, sorting::number};
use crate::{
    api::list::{self, Key, MAX_LIMIT, Pages},
    auth::access::Caller,
    http::{
        error::{Error, Problem, Result},
        extract::{Query, count},
    },
    store::{GroupRow, GroupValue, Spread, Store},
};
use axum::{Extension, Json, extract::State};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::sync::Semaphore;
use utoipa::{IntoParams, ToSchema};

const DEFAULT_LIMIT: u32 = 100;
/// Groups on all pages together.
const MOST_GROUPS: usize = 10_000;
/// Metrics of one request.
const MOST_METRICS: usize = 16;
/// Bytes of a group's values in a cursor; longer ones are there by their hash.
const ID_BYTES: usize = 600;

/// Requests that are grouped at the same time: each reads all jobs that match, and readers of the database are few.
static AT_ONCE: Semaphore = Semaphore::const_new(2);
const PATIENCE: Duration = Duration::from_secs(10);

/// Which groups of which jobs. What narrows the jobs is as at `GET /jobs`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct GroupsQuery {
    /// 1 to 3 of `project`, `owner`, `tag`, `state`, `name` and settings with one value, with commas between: `model.arch,train.lr`.
    #[serde(default)]
    #[param(required = true)]
    by: String,
    /// Mean and spread of these over the jobs of each group, with commas between, at most 16: numbers that jobs can be sorted by, such as
    /// `loss,best,spec.train.lr`.
    metrics: Option<String>,
    /// `group` (by what the jobs have in common), `jobs` (how many), `newest`, or one of `metrics`, which stands for its mean; `-` before it for the
    /// largest first. `group` when absent.
    sort: Option<String>,
    /// At most so many groups: 1 to 1000; 100 when absent.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the page before, with the same `by` and `sort`.
    cursor: Option<String>,
    /// Also how many groups there are on all pages together, as `total`.
    count: Option<bool>,
    /// Jobs in one of these states.
    state: Option<String>,
    /// Jobs with it in their name.
    name: Option<String>,
    /// Jobs with it in their name, a tag or their notes.
    q: Option<String>,
    /// Jobs whose settings fulfil these.
    #[serde(rename = "where")]
    #[param(rename = "where")]
    conditions: Option<String>,
    /// Jobs of this person or token.
    owner: Option<String>,
    /// Jobs of this project.
    project: Option<String>,
    /// Jobs with all of these tags.
    tag: Option<String>,
    /// Jobs submitted at this time or later.
    created_after: Option<String>,
    /// Jobs submitted before this time.
    created_before: Option<String>,
}

/// A page of groups.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupList {
    /// In the order of `sort`.
    groups: Vec<Group>,
    /// Give it as `cursor` for the next page; null on the last.
    next_cursor: Option<String>,
    /// With `count=true`: groups on all pages together.
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
}

/// Jobs that have something in common.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Group {
    /// One for each of `by`; null where the jobs have none. `GET /jobs?by=...&group=` and these lists the jobs.
    values: Vec<GroupValue>,
    /// Jobs in any state.
    jobs: u64,
    /// Jobs in each state that any is in: `{"running": 2, "failed": 1}`.
    states: BTreeMap<&'static str, u64>,
    /// When its newest job was submitted.
    #[schema(value_type = String)]
    newest_at: Timestamp,
    /// By the names of the request.
    metrics: BTreeMap<String, MeanAndSpread>,
    /// For the order and for cursors.
    #[serde(skip)]
    id: String,
}

/// A metric over the jobs of a group that have a value of it.
#[derive(Debug, Serialize, ToSchema)]
struct MeanAndSpread {
    /// Jobs with a value.
    n: u64,
    /// Null where no job has a value.
    mean: Option<f64>,
    /// Standard deviation of a sample, divided by n - 1; null for fewer than two values.
    std: Option<f64>,
    /// The lowest value.
    min: Option<f64>,
    /// The highest value.
    max: Option<f64>,
}

impl From<&Spread> for MeanAndSpread {
    fn from(of: &Spread) -> Self {
        Self { n: of.n, mean: of.mean(), std: of.std(), min: of.min(), max: of.max() }
    }
}

impl Group {
    fn new(row: GroupRow, metrics: &[&str]) -> Result<Self> {
        let json = serde_json::to_string(&row.values);
        let mut id = json.map_err(|e| Error::Internal(format!("a group: {e}")))?;
        if id.len() > ID_BYTES {
            id = hex::encode(Sha256::digest(&id));
        }
        Ok(Self {
            jobs: row.states.iter().map(|(_, count)| count).sum(),
            states: row.states.into_iter().map(|(state, count)| (state.as_str(), count)).collect(),
            newest_at: row.newest_at,
            metrics: metrics
                .iter()
                .map(|name| (*name).to_owned())
                .zip(row.metrics.iter().map(Into::into))
                .collect(),
            values: row.values,
            id,
        })
    }

    fn key(&self, by: &str) -> Key {
        match by {
            "group" => group_keys::key(&self.values),
            "jobs" => Some(self.jobs as f64).into(),
            "newest" => self.newest_at.into(),
            metric => self.metrics.get(metric).and_then(|of| of.mean).into(),
        }
    }
}

/// The names of metrics in a request, each once.
fn names(text: Option<&str>) -> Result<Vec<&str>> {
    let mut names: Vec<&str> = Vec::new();
    for name in text.unwrap_or_default().split(',').map(str::trim).filter(|name| !name.is_empty()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.len() > MOST_METRICS {
        return Err(Error::BadRequest(format!(
            "metrics has {} names; give at most {MOST_METRICS}",
            names.len()
        )));
    }
    Ok(names)
}

/// List groups of jobs
///
/// Over all jobs that match, however many: how many there are, in which states, and mean and standard deviation of metrics, such as over
/// jobs that differ in their seed alone. A job is in the group of each of its tags. Jobs that are private to others do not count.
#[utoipa::path(get, path = "/jobs/groups", tag = "jobs", params(GroupsQuery),
    responses((status = 200, body = GroupList), (status = 400, body = Problem)))]
pub(crate) async fn list(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<GroupsQuery>,
) -> Result<Json<GroupList>> {
    let by = group_keys::by(&query.by)?;
    let names = names(query.metrics.as_deref())?;
    let metrics = names.iter().map(|name| number(name)).collect::<Result<Vec<_>>>()?;
    let limit = count("limit", query.limit, DEFAULT_LIMIT, MAX_LIMIT)? as usize;
    let sort = query.sort.as_deref().filter(|sort| !sort.is_empty()).unwrap_or("group");
    let (sorted_by, _) = list::sort_key(sort);
    if !["group", "jobs", "newest"].contains(&sorted_by) && !names.contains(&sorted_by) {
        return Err(Error::BadRequest(format!(
            "groups are sorted by group, jobs, newest or one of metrics; name {:?} in metrics, too",
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
    let turn = tokio::time::timeout(PATIENCE, AT_ONCE.acquire()).await;
    let _turn = turn.map_err(|_| Error::Unavailable("others are grouping jobs; try again".into()))?;
    let found = store.job_groups(&jobs.filter(&caller)?, &by, &metrics, MOST_GROUPS).await?;
    let Some(found) = found else {
        return Err(Error::BadRequest(format!(
            "by {} makes more than {MOST_GROUPS} groups: group by something that more jobs have in common, or narrow the jobs",
            lockstep_protocol::spec::shortened(&query.by)
        )));
    };
    let mut groups = found.into_iter().map(|row| Group::new(row, &names)).collect::<Result<Vec<_>>>()?;
    let total = (query.count == Some(true)).then_some(groups.len() as u64);
    let key = |group: &Group| group.key(sorted_by);
    let pages = Pages::new("groups", sort).of_grouping(&query.by);
    let cursor = query.cursor.as_deref();
    let next_cursor = list::part(&mut groups, pages, key, |group| &group.id, cursor, limit)?;
    Ok(Json(GroupList { groups, next_cursor, total }))
}
