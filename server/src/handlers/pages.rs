//! HTML pages: stored data in the views of `lockstep_web`.

use super::{
    agents, audit,
    datasets::{self, NewDataset, Registered},
    extract::{PageQuery, Path, job_id},
    inspections::LONGEST_WAIT,
    jobs::{self, ListQuery},
    join, panels,
    server_url::ServerUrl,
};
use crate::{
    access::Caller,
    app::App,
    artifact_store::StoredState,
    artifacts,
    error::{Code, Error, PageError},
    gate::AuditSubject,
    store::JobFilter,
};
use axum::{
    Extension, Form,
    extract::State,
    http::StatusCode,
    response::{Html, IntoResponse, Redirect, Response},
};
use lockstep_protocol::{access::Scope, spec::JobSpec};
use lockstep_web::{
    audit as audit_views, compare, datasets as dataset_views, job as job_views, jobs as jobs_views,
    layout::Viewer, machines, submit,
};
use serde::Deserialize;

/// Rows of the list as the server writes it: what fits a screen. The script reads on, or the link below them.
const ROWS: u32 = 25;

pub(super) type Page = Result<Response, PageError>;

pub(super) fn html(rendered: Result<String, impl std::fmt::Display>) -> Page {
    let html = rendered.map_err(|e| PageError(Error::Internal(format!("a page could not be made: {e}"))))?;
    Ok(Html(html).into_response())
}

/// Who looks at a page.
pub(super) fn viewer(caller: &Caller) -> Viewer {
    caller.viewer()
}

/// `GET /`
pub(crate) async fn home() -> Redirect {
    Redirect::to("/jobs")
}

/// `GET /jobs`
pub(crate) async fn jobs(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
    PageQuery(query): PageQuery<ListQuery>,
) -> Page {
    // An invalid filter in the address shows everything.
    let mut filter = query
        .filter(&caller)
        .unwrap_or_else(|_| JobFilter { seen_by: caller.sees_as(), ..JobFilter::default() });
    if query.limit.is_none() {
        filter.limit = ROWS;
    }
    let mut page = app.store.jobs(&filter).await?;
    page.jobs.iter_mut().for_each(|job| app.last_plan.tell(job));
    let any = !page.jobs.is_empty()
        || !app
            .store
            .jobs(&JobFilter { limit: 1, seen_by: caller.sees_as(), ..JobFilter::default() })
            .await?
            .jobs
            .is_empty();
    html(
        jobs_views::JobsPage {
            jobs: page.jobs,
            filter: jobs_views::JobFilter {
                states: filter.states,
                text: filter.text.or(filter.name).unwrap_or_default(),
                project: filter.project.unwrap_or_default(),
                tag: filter.tags.join(","),
                owner: filter.owner.unwrap_or_default(),
                sort: query.sort.clone().unwrap_or_default(),
                kept: query.kept(),
            },
            any,
            next: query.next_cursor(page.next.as_ref())?,
            server_url,
            now: crate::now(),
            viewer: viewer(&caller),
        }
        .render(),
    )
}

/// What stands in a new form.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct NewJobQuery {
    preset: Option<String>,
    dataset: Option<String>,
    /// A job to submit again.
    from: Option<String>,
}

/// `GET /jobs/new`
pub(crate) async fn new_job(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
    PageQuery(query): PageQuery<NewJobQuery>,
) -> Page {
    let datasets = datasets::seen_by(&app, &caller).await?;
    let mut page = submit::SubmitPage::fresh(
        query.preset.as_deref(),
        query.dataset.as_deref(),
        datasets,
        slots(&app),
        server_url,
    );
    page.viewer = viewer(&caller);
    if let Some(id) = &query.from {
        let job = jobs::seen(&app, &caller, id).await?;
        jobs::check_readable(&job)?;
        let tags = job.tags.clone();
        page.form = submit::Form::from_spec(&JobSpec { tags, ..job.spec });
    }
    html(page.render())
}

fn slots(app: &App) -> u32 {
    app.agents.online().iter().map(|a| a.row.slots.len() as u32).sum()
}

/// `POST /jobs/new`: the form without scripts.
pub(crate) async fn submit_job(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
    Form(pairs): Form<Vec<(String, String)>>,
) -> Page {
    let form = submit::Form::from_pairs(pairs);
    match jobs::submit(&app, &caller, &form.document(), None).await {
        Ok((_, job)) => Ok(Redirect::to(&format!("/jobs/{}", job.id)).into_response()),
        Err(Error::Invalid(mistakes)) => {
            let datasets = datasets::seen_by(&app, &caller).await?;
            let page = submit::SubmitPage {
                form,
                mistakes,
                datasets,
                slots: slots(&app),
                server_url,
                viewer: viewer(&caller),
            };
            Ok((StatusCode::UNPROCESSABLE_ENTITY, html(page.render())?).into_response())
        }
        Err(other) => Err(PageError(other)),
    }
}

/// `GET /jobs/{id}`
pub(crate) async fn job(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
    Path(id): Path<String>,
) -> Page {
    let id = job_id(&id)?;
    let row = app
        .store
        .job(&id)
        .await?
        .ok_or_else(|| Error::NotFound("No job has this id. It may have been deleted.".into()))?;
    let job = jobs::shown_to(&app, &caller, row).await?;
    let reports = app.store.rank_reports(&id, job.attempt).await?;
    let places = app.store.places(&id, job.attempt).await?;
    let ranks = (0..job.ranks_now())
        .map(|rank| {
            let place = places.iter().find(|p| p.ranks.iter().any(|(r, _)| *r == rank));
            job_views::RankSeat {
                rank,
                agent: place.map(|place| place.agent.clone()).unwrap_or_default(),
                report: reports.iter().find(|(r, _)| *r == rank).map(|(_, report)| report.clone()),
            }
        })
        .collect();
    let rows = app.store.checkpoints(&id).await?;
    let checkpoints = rows
        .into_iter()
        .map(|row| {
            let stored = artifacts::stored_state(&app, &row).map(StoredState::as_str);
            job_views::Checkpoint { id: row.id, attempt: row.attempt, info: row.info, stored }
        })
        .collect();
    let attempts = app.store.attempts(&id).await?;
    let may_change = caller.may(Scope::Submit)
        && (!app.access.has_people() || caller.sees_all() || caller.owns(job.owner.as_deref()));
    let panels = panels::of_job(&app, &id, &job.project).await?;
    let has_histograms = !app.store.histogram_index(&id).await?.steps.is_empty();
    let has_network = app.store.network(&id).await?.is_some();
    let folder = app.job_dir(&id);
    let size_bytes = tokio::task::spawn_blocking(move || folder_bytes(&folder)).await.ok().flatten();
    html(
        job_views::JobPage {
            job,
            ranks,
            checkpoints,
            attempts,
            size_bytes,
            server_url,
            viewer: viewer(&caller),
            may_change,
            panels: panels.into(),
            has_histograms,
            has_network,
            has_artifact_store: app.artifact_store.is_some(),
        }
        .render(),
    )
}

/// What deleting a folder frees; `None` when it cannot be read.
pub(super) fn folder_bytes(folder: &std::path::Path) -> Option<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(folder).ok()? {
        let entry = entry.ok()?;
        let kind = entry.file_type().ok()?;
        total += if kind.is_dir() {
            folder_bytes(&entry.path()).unwrap_or(0)
        } else {
            entry.metadata().map_or(0, |m| m.len())
        };
    }
    Some(total)
}

/// `GET /compare`: which jobs stands in the address; the script reads them.
pub(crate) async fn compare(Extension(caller): Extension<Caller>) -> Page {
    html(compare::ComparePage { viewer: viewer(&caller) }.render())
}

/// `GET /datasets`
pub(crate) async fn datasets(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
) -> Page {
    datasets_page(&app, &caller, server_url, dataset_views::DatasetForm::default()).await
}

async fn datasets_page(
    app: &App,
    caller: &Caller,
    server_url: String,
    form: dataset_views::DatasetForm,
) -> Page {
    let datasets = datasets::seen_by(app, caller).await?;
    let may_change =
        |owner: Option<&str>| !app.access.has_people() || caller.sees_all() || caller.owns(owner);
    let changeable = datasets.iter().filter(|d| may_change(d.owner.as_deref())).map(|d| d.name.clone());
    let changeable = changeable.collect();
    let page = dataset_views::DatasetsPage {
        datasets,
        changeable,
        may_add: app.dataset_roots.may_name(caller),
        form,
        server_url,
        now: crate::now(),
        viewer: viewer(caller),
    };
    html(page.render())
}

/// `POST /datasets`: the form without scripts.
pub(crate) async fn add_dataset(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
    Form(new): Form<NewDataset>,
) -> Page {
    let (name, path) = (new.name.clone(), new.path.clone());
    let mut form = dataset_views::DatasetForm { name, path, ..Default::default() };
    let status = match datasets::register(&app, &caller, new, LONGEST_WAIT).await {
        Ok(Registered::Done(dataset)) => {
            let created = Extension(AuditSubject(dataset.name));
            return Ok((created, Redirect::to("/datasets")).into_response());
        }
        Ok(Registered::UnderWay(under_way)) => {
            form.path_error = Some(format!("{}: send this form again to continue", under_way.detail));
            StatusCode::ACCEPTED
        }
        Err(Error::Invalid(mistakes)) => {
            for mistake in mistakes {
                let field =
                    if mistake.pointer == "/name" { &mut form.name_error } else { &mut form.path_error };
                *field = Some(mistake.detail);
            }
            StatusCode::UNPROCESSABLE_ENTITY
        }
        Err(Error::Conflict(detail, _) | Error::Of(Code::NameTaken, detail)) => {
            form.name_error = Some(detail);
            StatusCode::CONFLICT
        }
        Err(other) => return Err(PageError(other)),
    };
    Ok((status, datasets_page(&app, &caller, server_url, form).await?).into_response())
}

/// `GET /machines`
pub(crate) async fn machines(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server_url): ServerUrl,
) -> Page {
    let mut cards = Vec::new();
    let all = agents::all(&app, &caller).await?;
    let names: Vec<_> = all.iter().map(|agent| agent.name.clone()).collect();
    for agent in all {
        let mut slots = Vec::new();
        for held in agent.slots {
            let holder = match held.job {
                Some(id) => app.store.job(&id).await?.map(|row| machines::Holder {
                    job_id: id.to_string(),
                    job_name: row.job.name,
                    rank: held.rank.unwrap_or(0),
                }),
                None => held.rank.map(|rank| machines::Holder {
                    job_id: String::new(),
                    job_name: "private".into(),
                    rank,
                }),
            };
            let kept_for = match held.kept_for {
                Some(agents::KeptFor { job: Some(id), .. }) => app
                    .store
                    .job(&id)
                    .await?
                    .map(|row| machines::KeptFor { job_id: id.to_string(), job_name: row.job.name }),
                Some(agents::KeptFor { job: None, .. }) => {
                    Some(machines::KeptFor { job_id: String::new(), job_name: "a private job".into() })
                }
                None => None,
            };
            slots.push(machines::SlotCell { slot: held.slot, holder, kept_for });
        }
        cards.push(machines::AgentCard {
            id: agent.id,
            name: agent.name,
            online: agent.online,
            draining: agent.draining,
            last_seen_at: agent.last_seen_at,
            connected_at: agent.connected_at,
            lease_secs_left: agent.lease_secs_left,
            // An old one is not shown as if it were now.
            sample: agent
                .sample
                .filter(|_| agent.online && agent.sample_age_secs.is_some_and(|age| age < 30.0)),
            warnings: agent.warnings,
            machine: agent.machine,
            slots,
        });
    }
    html(
        machines::MachinesPage {
            agents: cards,
            join: join::commands(&app, &server_url, &names, viewer(&caller).is_admin),
            now: crate::now(),
            viewer: viewer(&caller),
        }
        .render(),
    )
}

/// `GET /audit`
pub(crate) async fn audit(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    PageQuery(query): PageQuery<audit::AuditQuery>,
) -> Page {
    let audit::AuditPage { entries, next_cursor: next } = audit::page(&app, &query).await?;
    let lines = entries.items.into_iter().map(|entry| audit_views::AuditLine {
        at: entry.at,
        who: entry.who,
        address: entry.address,
        action: entry.action,
        object: entry.object,
        status: entry.status,
        request_id: entry.request_id,
    });
    html(audit_views::AuditPage { lines: lines.collect(), next, viewer: viewer(&caller) }.render())
}

/// Any other address.
pub(crate) async fn not_found() -> PageError {
    PageError(Error::NotFound("There is no page at this address.".into()))
}
