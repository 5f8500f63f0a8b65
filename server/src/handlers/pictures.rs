//! Pictures of datasets, as stored and as jobs see them. An agent reads them.

use super::{
    extract::{Path, Query, count},
    jobs,
};
use crate::{
    access::Caller,
    agent_requests,
    app::App,
    error::{Error, Problem, Result},
};
use axum::{Extension, Json, extract::State};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest},
    inspect::{Pick, Samples},
};
use serde::Deserialize;
use std::time::Duration;
use utoipa::IntoParams;

const DEFAULT: u32 = 60;
const MOST: u32 = 200;
const PATIENCE: Duration = Duration::from_secs(120);
/// Augmented versions of one picture.
const VERSIONS: u32 = 5;

/// Which pictures.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct SamplesQuery {
    /// `train` when absent.
    split: Option<String>,
    /// A class's name; all when absent.
    class: Option<String>,
    /// A seed: pictures in a mixed order, which is the same for the same seed; as they are stored when absent, or with `augmented`.
    shuffle: Option<u64>,
    /// Pictures to leave out at the start.
    #[serde(default)]
    offset: u64,
    /// 1 to 200; 60 when absent.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// A job's id: training pictures as that job's augmentation makes them in each of five epochs.
    augmented: Option<String>,
}

/// Pictures of a dataset
#[utoipa::path(get, path = "/datasets/{name}/samples", tag = "datasets", params(("name" = String, Path), SamplesQuery),
    responses((status = 200, body = Samples), (status = 404, body = Problem), (status = 422, body = Problem), (status = 503, body = Problem)))]
pub(crate) async fn of_dataset(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    Query(query): Query<SamplesQuery>,
) -> Result<Json<Samples>> {
    let dataset = app.store.dataset(&name).await?;
    let dataset = dataset.ok_or_else(|| Error::NotFound("no dataset has this name".into()))?;
    let split = query.split.unwrap_or_else(|| "train".into());
    let limit = count("limit", query.limit, DEFAULT, MOST)?;
    let pick = match &query.augmented {
        None => {
            let SamplesQuery { class, shuffle, offset, .. } = query;
            Pick::Stored { split, class, shuffle, offset, limit }
        }
        Some(id) => {
            let spec = jobs::seen(&app, &caller, id).await?.spec;
            Pick::Seen {
                data: Box::new(spec.data),
                seed: spec.train.seed,
                validation: false,
                // A place beyond the last picture is the agent's to refuse.
                places: (query.offset..query.offset.saturating_add(u64::from(limit.div_ceil(VERSIONS))))
                    .collect(),
                epochs: (0..VERSIONS).collect(),
            }
        }
    };
    ask(&app, dataset.path, pick).await
}

/// Which of a job's pictures.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct IndicesQuery {
    /// `index` of mistakes in an evaluation, with commas between: places in the split.
    indices: String,
    /// Take the training split instead of the validation one.
    #[serde(default)]
    train: bool,
}

/// Pictures as a job sees them
#[utoipa::path(get, path = "/jobs/{id}/samples", tag = "checkpoints", params(("id" = String, Path), IndicesQuery),
    responses((status = 200, body = Samples), (status = 404, body = Problem), (status = 422, body = Problem), (status = 503, body = Problem)))]
pub(crate) async fn of_job(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(query): Query<IndicesQuery>,
) -> Result<Json<Samples>> {
    let job = jobs::find(&app, &id).await?;
    jobs::check_readable(&job)?;
    let spec = job.spec;
    let dataset = app.store.dataset(&spec.data.dataset).await?;
    // Another may have its name by now.
    let dataset = dataset.filter(|dataset| caller.sees(dataset.private, dataset.owner.as_deref()));
    let dataset =
        dataset.ok_or_else(|| Error::NotFound("the job's dataset is no longer registered".into()))?;
    let places: std::result::Result<Vec<u64>, _> =
        query.indices.split(',').filter(|p| !p.is_empty()).take(MOST as usize).map(str::parse).collect();
    let places =
        places.map_err(|_| Error::BadRequest("indices are numbers with commas between them".into()))?;
    let pick = Pick::Seen {
        data: Box::new(spec.data),
        seed: spec.train.seed,
        validation: !query.train,
        places,
        epochs: Vec::new(),
    };
    ask(&app, dataset.path, pick).await
}

async fn ask(app: &App, path: String, pick: Pick) -> Result<Json<Samples>> {
    match agent_requests::call(app, AgentRequest::Samples { path, pick }, PATIENCE).await {
        Ok(AgentReply::Samples(samples)) => Ok(Json(samples)),
        Ok(_) => Err(Error::Internal("an agent answered something else than pictures".into())),
        Err(error) => Err(error.without_pointer()),
    }
}
