//! Pages of jobs: stored data in the views of `lockstep_web`.

use super::{ListQuery, check_readable, diagnose, diagnosis, find_visible, panels, submit};
use crate::api::prelude::*;
use crate::{
    agents::Agents,
    api::{
        checkpoints, datasets,
        html::{Page, html},
        server_url::ServerUrl,
    },
    auth::Auth,
    http::extract::{Body, PageQuery, parse_job_id},
    ingest::run_files::RunFiles,
    metrics::Metrics,
    scheduler::Scheduler,
    store::JobFilter,
};
use axum::{Form, response::Redirect};
use lockstep_protocol::{Job, spec::JobSpec};
use lockstep_web::{compare, job as job_views, jobs as jobs_views, submit as submit_views};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Number of rows that the server renders, which fit on a screen. The script or a link loads further rows.
const RENDERED_ROWS: u32 = 25;

/// `GET /`
pub(crate) async fn home() -> Redirect {
    Redirect::to("/jobs")
}

/// `GET /jobs`
pub(crate) async fn jobs(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
    PageQuery(query): PageQuery<ListQuery>,
) -> Page {
    // An invalid filter in the URL is ignored.
    let mut filter = query
        .filter(&caller)
        .unwrap_or_else(|_| JobFilter { seen_by: caller.viewer_name(), ..JobFilter::default() });
    if query.limit.is_none() {
        filter.limit = RENDERED_ROWS;
    }
    let mut page = scheduler.store.jobs(&filter).await?;
    page.jobs.iter_mut().for_each(|job| scheduler.fill_in(job));
    diagnosis::mark_trained_validation(&*scheduler.store, &mut page.jobs).await?;
    let any_job = JobFilter { limit: 1, seen_by: caller.viewer_name(), ..JobFilter::default() };
    let has_jobs = !page.jobs.is_empty() || !scheduler.store.jobs(&any_job).await?.jobs.is_empty();
    html(jobs_views::JobsPage {
        jobs: page.jobs,
        filter: jobs_views::JobFilter {
            states: filter.states,
            text: filter.text.or(filter.name).unwrap_or_default(),
            project: filter.project.unwrap_or_default(),
            tag: filter.tags.join(","),
            owner: filter.owner.unwrap_or_default(),
            sort: query.sort.clone().unwrap_or_default(),
            other_parameters: query.params_without_field(),
        },
        has_jobs,
        next: query.next_cursor(page.next.as_ref())?,
        server_url,
        user: caller.current_user(),
    })
}

/// Maximum number of jobs that are read to find a free name.
const MAX_CLONES_READ: u32 = 200;

/// `GET /jobs/new`: initial values of the form.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct NewJobQuery {
    preset: Option<String>,
    dataset: Option<String>,
    /// A job to submit again.
    from: Option<String>,
    /// A setting of the job to change, such as `train.epochs=20`. With `model.pretrained`, the form is for fine-tuning these weights.
    set: Option<String>,
}

/// `GET /jobs/new`
pub(crate) async fn new_job(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
    PageQuery(query): PageQuery<NewJobQuery>,
) -> Page {
    let datasets = datasets::visible_datasets(&*scheduler.store, &caller).await?;
    let mut page = submit_views::SubmitPage::fresh(
        query.preset.as_deref(),
        query.dataset.as_deref(),
        datasets,
        count_slots(&scheduler.agents),
        server_url,
        caller.current_user(),
    );
    if let Some(id) = &query.from {
        let job = find_visible(&scheduler, &caller, id).await?;
        check_readable(&job)?;
        let name = free_name(&scheduler, &caller, &job.name).await?;
        let mut cloned = (job.name.clone(), submit_views::Form::from_spec(&job.spec));
        let setting = query.set.as_deref().and_then(|set| set.split_once('='));
        page.form = if let Some(("model.pretrained", weights)) = setting {
            let dataset = page.datasets.iter().find(|dataset| dataset.name == job.spec.data.dataset);
            // The form writes these out, which does not change them.
            if let Some(dataset) = dataset {
                let mut spec = job.spec.clone();
                submit_views::Form::write_dataset_defaults(&mut spec, &dataset.info);
                cloned.1 = submit_views::Form::from_spec(&spec);
            }
            let spec = JobSpec { name, tags: Vec::new(), ..job.spec };
            submit_views::Form::finetuning(spec, weights, dataset.map(|dataset| &dataset.info))
        } else {
            // A sweep's jobs have its id as a tag; a clone is not a job of the sweep.
            let is_sweep = |tag: &String| job.trial.as_ref().is_some_and(|trial| trial.sweep == *tag);
            let tags = job.tags.iter().filter(|tag| !is_sweep(tag)).cloned().collect();
            submit_views::Form::from_spec(&JobSpec { name, tags, ..job.spec })
        };
        if let Some((key, value)) = setting {
            page.form.set(key, value);
        }
        page.differences = page.form.differences(&cloned.0, &cloned.1);
    } else if query.dataset.is_some() {
        let name = page.form.text("name").to_owned();
        if jobs_with_name_part(&scheduler, &caller, &name).await?.iter().any(|job| job.name == name) {
            page.form.set("name", free_name(&scheduler, &caller, &name).await?);
        }
    }
    html(page)
}

/// Returns the newest jobs that the caller may see and whose names contain `part`.
async fn jobs_with_name_part(scheduler: &Scheduler, caller: &Caller, part: &str) -> Result<Vec<Job>> {
    let name = Some(part.to_owned());
    let filter =
        JobFilter { name, seen_by: caller.viewer_name(), limit: MAX_CLONES_READ, ..JobFilter::default() };
    Ok(scheduler.store.jobs(&filter).await?.jobs)
}

/// Returns a name for a clone of a job: `pets (2)` for `pets`, or the next number that no job has.
async fn free_name(scheduler: &Scheduler, caller: &Caller, name: &str) -> Result<String> {
    let stem = match name.strip_suffix(')').and_then(|rest| rest.rsplit_once(" (")) {
        Some((stem, number)) if number.parse::<u32>().is_ok() => stem,
        _ => name,
    };
    let clones = jobs_with_name_part(scheduler, caller, &format!("{stem} (")).await?;
    let mut names = (2..).map(|number: usize| format!("{stem} ({number})"));
    Ok(names.find(|name| clones.iter().all(|job| job.name != *name)).unwrap_or_default())
}

fn count_slots(agents: &Agents) -> u32 {
    agents.online().iter().map(|a| a.row.slots.len() as u32).sum()
}

/// `POST /jobs/new`: submits the form without scripts.
pub(crate) async fn submit_job(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
    Form(pairs): Form<Vec<(String, String)>>,
) -> Page {
    let form = submit_views::Form::from_pairs(pairs);
    let (idempotency_key, launched) = (None, false);
    match submit(&scheduler, &caller, &form.document(), idempotency_key, launched).await {
        Ok((_, job)) => Ok(Redirect::to(&format!("/jobs/{}", job.id)).into_response()),
        Err(Error::Invalid(mistakes)) => {
            let datasets = datasets::visible_datasets(&*scheduler.store, &caller).await?;
            let (slots, user) = (count_slots(&scheduler.agents), caller.current_user());
            let differences = String::new();
            let page =
                submit_views::SubmitPage { form, differences, mistakes, datasets, slots, server_url, user };
            Ok((StatusCode::UNPROCESSABLE_ENTITY, html(page)?).into_response())
        }
        Err(other) => Err(other.into()),
    }
}

/// The form's texts, by the names of the fields, and the section `sweep`.
#[derive(Debug, Deserialize)]
pub(crate) struct FormTexts {
    fields: BTreeMap<String, String>,
    sweep: Option<Value>,
}

/// `POST /api/v1/jobs/form`: the job file that the form describes, as JSON and as TOML.
pub(crate) async fn job_file(Body(texts, _): Body<FormTexts>) -> Result<Json<Value>> {
    let mut document = submit_views::Form::from_pairs(texts.fields).document();
    if let Some(sweep) = texts.sweep {
        document["sweep"] = sweep;
    }
    let toml = submit_views::job_file(&document);
    Ok(Json(json!({"document": document, "toml": toml})))
}

/// `GET /jobs/{id}`
pub(crate) async fn job(
    State(scheduler): State<Arc<Scheduler>>,
    State(metrics): State<Arc<Metrics>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Page {
    let id = parse_job_id(&id)?;
    let row = scheduler
        .store
        .job(&id)
        .await?
        .ok_or_else(|| Error::NotFound("No job has this id. It may have been deleted.".into()))?;
    let job = diagnose(&metrics, &scheduler, &caller, row).await?;
    let reports = scheduler.store.rank_reports(&id, job.attempt).await?;
    let places = scheduler.store.places(&id, job.attempt).await?;
    let ranks = (0..job.rank_count_now())
        .map(|rank| {
            let place = places.iter().find(|p| p.ranks.iter().any(|(r, _)| *r == rank));
            job_views::RankEntry {
                rank,
                agent: place.map(|place| place.agent.clone()).unwrap_or_default(),
                report: reports.iter().find(|(r, _)| *r == rank).map(|(_, report)| report.clone()),
            }
        })
        .collect();
    let checkpoints = checkpoints::of_job(&scheduler.checkpoints, &id).await?;
    let may_change = auth.may_change(&caller, job.owner.as_deref());
    let panels = panels::job_panels(&*scheduler.store, &id, &job.project).await?;
    let has_histograms = !scheduler.store.histogram_index(&id).await?.steps.is_empty();
    let has_network = scheduler.store.network(&id).await?.is_some();
    let files = if job.external.is_some() {
        let run = RunFiles::of(scheduler.config.job_dir(&id));
        tokio::task::spawn_blocking(move || run.list().unwrap_or_default()).await.unwrap_or_default()
    } else {
        Vec::new()
    };
    html(job_views::JobPage {
        job,
        ranks,
        checkpoints,
        files,
        user: caller.current_user(),
        may_change,
        panels,
        has_histograms,
        has_network,
        has_object_store: scheduler.checkpoints.object_store.is_some(),
    })
}

/// `GET /compare`. The page's script reads the jobs' ids from the URL.
pub(crate) async fn compare(Extension(caller): Extension<Caller>) -> Page {
    html(compare::ComparePage { user: caller.current_user() })
}
