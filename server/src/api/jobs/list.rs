//! The list of jobs: which, in which order, and what of each.

use crate::{
    api::{
        jobs::{conditions, group_keys, sorting::sort},
        large,
        list::{self, Elements, Fields, MAX_LIMIT, Pages},
    },
    auth::access::Caller,
    http::{
        error::{Error, Problem, Result},
        extract::{Query, count, search_text},
    },
    scheduler::Scheduler,
    store::{JobFilter, Store},
};
use axum::{Extension, extract::State, response::Response};
use lockstep_protocol::{Job, JobState, labels, metric};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};

const DEFAULT_LIMIT: u32 = 50;

/// Of a job, as in JSON.
pub(super) const FIELDS: &[&str] = &[
    "id",
    "name",
    "state",
    "reason",
    "cause",
    "failure",
    "project",
    "tags",
    "queue",
    "notes",
    "parent",
    "trial",
    "owner",
    "unreadable",
    "external",
    "spec",
    "batch",
    "attempt",
    "ranks",
    "agents",
    "step",
    "epoch",
    "total_steps",
    "steps_per_epoch",
    "images_per_second",
    "eta_secs",
    "created_at",
    "started_at",
    "finished_at",
    "ran_secs",
    "best",
    "last",
    "last_seq",
    "sparkline",
];

/// A page of jobs.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct JobList {
    /// In the order of `sort`; with `fields`, those fields alone.
    #[schema(value_type = Vec<Job>)]
    jobs: Elements<Job>,
    /// Give it as `cursor` for the next page; null on the last.
    next_cursor: Option<String>,
    /// With `count=true`: jobs on all pages together.
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
}

/// Which jobs.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// In one of these states, with commas between: `running,failed`.
    pub(super) state: Option<String>,
    /// Part of the name, at most 200 characters.
    pub(super) name: Option<String>,
    /// Part of the name, of a tag or of the notes, at most 200 characters.
    pub(super) q: Option<String>,
    /// Whose settings fulfil all of these, with commas between: `train.lr>0.1,model.arch=resnet50`. `=`, `!=`, `<`, `<=`, `>`, `>=`;
    /// texts and words with `=` and `!=` alone. At most 10.
    #[serde(rename = "where")]
    #[param(rename = "where")]
    pub(super) conditions: Option<String>,
    /// The person who submitted it, or the name of the token that did.
    pub(super) owner: Option<String>,
    /// Of this project.
    pub(super) project: Option<String>,
    /// With all of these tags, with commas between.
    pub(super) tag: Option<String>,
    /// Of one group of `GET /jobs/groups`: what jobs are grouped by there, and with `group` the `values` of the group, as JSON.
    pub(super) by: Option<String>,
    /// `["resnet20",0.1]`: `values` of a group, one for each of `by`.
    pub(super) group: Option<String>,
    /// Submitted at this time or later (RFC 3339).
    #[param(format = DateTime)]
    pub(super) created_after: Option<String>,
    /// Submitted before this time (RFC 3339).
    #[param(format = DateTime)]
    pub(super) created_before: Option<String>,
    /// `created`, `started`, `finished`, `name`, `state`, `project`, `owner`, `priority`, `step`, `epoch`, `attempt`, `ranks`, `speed` (images per
    /// second), `loss`, `accuracy`, `val_loss`, `val_accuracy`, `lr` and every other metric (the newest), `best`, `tag:` and a tag (those that
    /// have it come last), or a key of the specification such as `spec.train.lr`, lists by their text; `-` before it for the largest first.
    /// `-created` when absent.
    pub(crate) sort: Option<String>,
    /// At most so many: 1 to 1000; 50 when absent. A page also ends once its jobs have 4 MiB; it then has a `next_cursor`.
    #[param(minimum = 1, maximum = 1000)]
    pub(crate) limit: Option<u32>,
    /// `next_cursor` of the page before, with the same `sort`.
    pub(super) cursor: Option<String>,
    /// Only these fields of each job, with commas between: `id,name,state`. `notes` are in a list only when they are named here.
    #[param(min_length = 1)]
    pub(super) fields: Option<String>,
    /// These metrics in `last` of each job, too, with commas between: `grad_norm,step_ms`. `loss`, `accuracy`, `lr`, `val_loss` and
    /// `val_accuracy` are always there.
    #[param(min_length = 1)]
    pub(super) metrics: Option<String>,
    /// Also how many jobs match on all pages together, as `total`.
    pub(super) count: Option<bool>,
}

impl ListQuery {
    /// # Errors
    /// A state, project, time, sort, limit or cursor that is none, or a name too long to search for.
    pub(crate) fn filter(&self, caller: &Caller) -> Result<JobFilter> {
        search_text("name", self.name.as_deref())?;
        search_text("q", self.q.as_deref())?;
        search_text("owner", self.owner.as_deref())?;
        let project = self.project.clone().filter(|project| !project.is_empty());
        if let Some(mistake) = project.as_deref().and_then(labels::project_mistake) {
            return Err(Error::BadRequest(format!("project {mistake}")));
        }
        let tags: Vec<String> = parts(self.tag.as_deref()).map(str::to_owned).collect();
        if let Some(mistake) = labels::tags_mistake(&tags) {
            return Err(Error::BadRequest(format!("tag: {mistake}")));
        }
        let mut states: Vec<JobState> = Vec::new();
        for state in parts(self.state.as_deref()) {
            let state = state.parse().map_err(Error::BadRequest)?;
            if !states.contains(&state) {
                states.push(state);
            }
        }
        Ok(JobFilter {
            states,
            name: self.name.clone().filter(|n| !n.is_empty()),
            text: self.q.clone().filter(|text| !text.is_empty()),
            conditions: conditions::parse(self.conditions.as_deref())?,
            owner: self.owner.clone().filter(|owner| !owner.is_empty()),
            seen_by: caller.sees_as(),
            with_notes: false,
            project,
            tags,
            group: group_keys::group(self.by.as_deref(), self.group.as_deref())?,
            created_after: list::time("created_after", self.created_after.as_deref())?,
            created_before: list::time("created_before", self.created_before.as_deref())?,
            sort: sort(self.sort_text())?,
            limit: count("limit", self.limit, DEFAULT_LIMIT, MAX_LIMIT)?,
            cursor: self.pages().read(self.cursor.as_deref())?,
        })
    }

    fn pages(&self) -> Pages<'_> {
        Pages::new("jobs", self.sort_text())
    }

    fn sort_text(&self) -> &str {
        self.sort.as_deref().filter(|sort| !sort.is_empty()).unwrap_or("-created")
    }

    /// What the page with the list has no field for, as it stands in the address.
    pub(crate) fn kept(&self) -> Vec<(&'static str, String)> {
        let given = [
            ("where", &self.conditions),
            ("created_after", &self.created_after),
            ("created_before", &self.created_before),
        ];
        given.into_iter().filter_map(|(key, value)| Some((key, value.clone()?))).collect()
    }

    /// `next_cursor` for a place in this list.
    pub(crate) fn next_cursor(&self, next: Option<&crate::store::Cursor>) -> Result<Option<String>> {
        next.map(|next| self.pages().cursor(next)).transpose()
    }
}

/// # Errors
/// 400: one that there is not.
fn metrics(text: Option<&str>) -> Result<Vec<&'static str>> {
    parts(text).map(|name| list::known_name("metric", name, &metric::NAMES)).collect()
}

/// What stands between commas.
fn parts(text: Option<&str>) -> impl Iterator<Item = &str> {
    text.unwrap_or_default().split(',').map(str::trim).filter(|part| !part.is_empty())
}

/// List jobs
#[utoipa::path(get, path = "/jobs", tag = "jobs", params(ListQuery),
    responses((status = 200, body = JobList), (status = 400, body = Problem), (status = 422, body = Problem)))]
pub(crate) async fn list(
    State(scheduler): State<Arc<Scheduler>>,
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<ListQuery>,
) -> Result<Response> {
    let fields = Fields::parse(query.fields.as_deref(), FIELDS)?;
    let with_notes = fields.as_ref().is_some_and(|fields| fields.has("notes"));
    let filter = JobFilter { with_notes, ..query.filter(&caller)? };
    let metrics = metrics(query.metrics.as_deref())?;
    let _turn = large::turn(filter.limit).await?;
    let mut page = store.jobs(&filter).await?;
    for job in &mut page.jobs {
        // All of them would be most of a long list.
        job.last.others.retain(|name, _| metrics.contains(&name.as_str()));
        scheduler.last_plan.tell(job);
    }
    let total = match query.count {
        Some(true) => Some(store.jobs_counted(&filter).await?),
        _ => None,
    };
    let next_cursor = query.next_cursor(page.next.as_ref())?;
    let jobs = Elements { items: page.jobs, fields };
    large::json(JobList { jobs, next_cursor, total }).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use utoipa::{
        PartialSchema,
        openapi::{RefOr, schema::Schema},
    };

    #[test]
    fn every_field_of_a_job_can_be_asked_for() {
        let RefOr::T(Schema::Object(job)) = Job::schema() else { panic!("a job is an object") };
        let mut documented: Vec<_> = job.properties.keys().map(String::as_str).collect();
        // Only the answer to a submission has warnings, and only that for one job its diagnosis.
        documented.retain(|name| !["warnings", "diagnosis"].contains(name));
        documented.sort_unstable();
        let mut fields = FIELDS.to_vec();
        fields.sort_unstable();
        assert_eq!(fields, documented);
    }

    #[test]
    fn metrics_are_those_that_there_are() {
        assert_eq!(metrics(Some(" grad_norm, step_ms")).unwrap(), ["grad_norm", "step_ms"]);
        assert!(metrics(None).unwrap().is_empty());
        let Err(Error::BadRequest(reported)) = metrics(Some("grad_nrom")) else { panic!("it is none") };
        assert!(
            reported.contains("no metric \"grad_nrom\"") && reported.contains("did you mean \"grad_norm\"?"),
            "{reported}"
        );
    }
}
