//! Evaluations of checkpoints on validation pictures. An agent computes an evaluation once. The result is stored in the job's folder and is
//! deleted with the job.

use crate::api::prelude::*;
use crate::{
    agents::{
        Agents, RequestError, requests,
        shared_requests::{Joined, Sent},
    },
    api::{
        checkpoints::{self, Weights},
        datasets,
        jobs::{
            self,
            fit::{self, TrainingPictures},
            submission,
        },
    },
    datasets::Datasets,
    http::extract::{self, parse_job_id},
    lifecycle::external::refuse_external,
    scheduler::Scheduler,
    store::{CheckpointRow, StoreError},
    util::regular_files,
};
use lockstep_protocol::{
    Job, JobSpec,
    agent::{AgentReply, AgentRequest},
    dataset::{Dataset, ValidationSet},
    inspect::{
        DEFAULT_NEIGHBOURS, EvaluateModel, MAX_CONCURRENT_REQUESTS, MAX_NEIGHBOURS, ModelEvaluation,
        NearestNeighbours,
    },
    spec::Validation,
};
use std::time::Duration;

/// Time limit of an evaluation. A large validation split takes long on a busy machine's CPU.
const EVALUATION_TIMEOUT: Duration = Duration::from_secs(3600);

/// The progress of an evaluation.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct UnderWay {
    /// A text about the progress.
    detail: String,
    /// The machine that computes the evaluation; null until a machine is chosen.
    agent: Option<String>,
    /// Number of earlier evaluations in the machine's queue. A machine computes two evaluations at a time.
    ahead: usize,
}

impl UnderWay {
    fn of(sent: &Sent, agents: &Agents, row: &CheckpointRow) -> Self {
        let name = format!("checkpoint {}-{}", row.info.epoch, row.info.step);
        let position = sent
            .get()
            .and_then(|(agent, request)| Some((agent.row.name.clone(), agents.requests_ahead(*request)?)));
        let detail = match &position {
            None => format!("{name} is about to be evaluated; ask again"),
            Some((agent, ahead)) if *ahead < MAX_CONCURRENT_REQUESTS => {
                format!("{name} is being evaluated on {agent}; ask again")
            }
            Some((agent, ahead)) => {
                format!(
                    "{name} waits on {agent}, behind {}; ask again",
                    lockstep_protocol::numbers::plural(*ahead as u64, "other evaluation")
                )
            }
        };
        let (agent, ahead) = position.unzip();
        Self { detail, agent, ahead: ahead.unwrap_or(0) }
    }
}

/// Parameters of `GET /jobs/{id}/evaluation`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct EvaluationQuery {
    /// Id of a checkpoint, `best` (default) or `latest`.
    checkpoint: Option<String>,
    /// The weights to use: `model` for the trained weights (default), `ema` for their moving average.
    #[serde(default)]
    #[param(inline)]
    weights: Weights,
    /// Name of a registered dataset with the same classes, in place of the job's dataset. The evaluation is on the split that a new job on
    /// that dataset would use for validation, or on all pictures of a dataset that has only a training split.
    dataset: Option<String>,
}

/// Parameters of `GET /jobs/{id}/evaluation/neighbours`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct NeighboursQuery {
    /// Id of a checkpoint, `best` (default) or `latest`.
    checkpoint: Option<String>,
    /// The weights to use: `model` for the trained weights (default), `ema` for their moving average.
    #[serde(default)]
    #[param(inline)]
    weights: Weights,
    /// Name of a registered dataset with any classes, in place of the job's dataset.
    dataset: Option<String>,
    /// Number of neighbours that vote, 1 to 1000 (default 20).
    k: Option<u32>,
}

/// Evaluate a checkpoint
///
/// Returns per-class scores, the confusion matrix and the most confident mistakes on the validation pictures of the job's dataset or of
/// another dataset. The evaluation is computed at the first request, and again if the pictures have changed. This may take a while: 202
/// means that the evaluation is in progress; repeat the request.
#[utoipa::path(get, path = "/jobs/{id}/evaluation", tag = "checkpoints", params(("id" = String, Path), EvaluationQuery),
    responses((status = 200, body = ModelEvaluation), (status = 202, body = UnderWay, description = "The evaluation is in progress or in the queue"),
        (status = 409, body = Problem, description = "The checkpoint is still being uploaded from another machine, or the job is a run from elsewhere"),
        (status = 422, body = Problem), (status = 503, body = Problem, description = "No agent is online, or the agent disconnected during the evaluation; ask again")))]
pub(crate) async fn evaluation(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(query): Query<EvaluationQuery>,
) -> Result<Response> {
    find(&scheduler, &caller, &id, query, None).await
}

/// Evaluate a checkpoint by nearest neighbours
///
/// The `k` nearest training pictures vote on the class of each validation picture, by the cosine similarity of embeddings (the inputs of
/// the network's last layer). The last layer is not used, so the number of its classes does not matter. The evaluation is computed at the
/// first request, and again if the validation pictures have changed. An agent embeds every picture on its CPU cores, which may take a
/// while: 202 means that the evaluation is in progress; repeat the request.
#[utoipa::path(get, path = "/jobs/{id}/evaluation/neighbours", tag = "checkpoints", params(("id" = String, Path), NeighboursQuery),
    responses((status = 200, body = NearestNeighbours), (status = 202, body = UnderWay, description = "The evaluation is in progress or in the queue"),
        (status = 409, body = Problem, description = "The checkpoint is still being uploaded from another machine, or the job is a run from elsewhere"),
        (status = 422, body = Problem), (status = 503, body = Problem, description = "No agent is online, or the agent disconnected during the evaluation; ask again")))]
pub(crate) async fn neighbours(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(query): Query<NeighboursQuery>,
) -> Result<Response> {
    let NeighboursQuery { checkpoint, weights, dataset, k } = query;
    let k = extract::check_count("k", k, DEFAULT_NEIGHBOURS, MAX_NEIGHBOURS)?;
    let query = EvaluationQuery { checkpoint, weights, dataset };
    find(&scheduler, &caller, &id, query, Some(k)).await
}

/// Returns the stored evaluation, or computes an evaluation: by the network's scores, or with `neighbours` by that number of neighbours.
async fn find(
    scheduler: &Arc<Scheduler>,
    caller: &Caller,
    id: &str,
    query: EvaluationQuery,
    neighbours: Option<u32>,
) -> Result<Response> {
    let job = jobs::find(scheduler, id).await?;
    refuse_external(&job, "evaluated").map_err(StoreError::from)?;
    let rows = scheduler.store.checkpoints(&parse_job_id(id)?).await?;
    let row = checkpoints::choose(rows, query.checkpoint.as_deref().unwrap_or("best"))?;
    // Another dataset may have the name of the job's dataset now, so access is checked again.
    if let Some(ownership) = scheduler.store.dataset_ownership(&job.spec.data.dataset).await?
        && query.dataset.is_none()
        && !caller.sees_owned(&ownership)
    {
        return Err(no_longer_registered(&job.spec));
    }

    let weights_suffix = if query.weights == Weights::Ema { "-ema" } else { "" };
    let other = match query.dataset.as_deref() {
        None => None,
        // The name of a registered dataset is safe in a file's name.
        Some(name) => {
            let datasets = datasets::visible_datasets(&*scheduler.store, caller).await?;
            let found = datasets.iter().find(|dataset| dataset.name == name).cloned();
            let names = datasets.iter().map(|dataset| dataset.name.as_str());
            Some(found.ok_or_else(|| Error::unprocessable(jobs::no_dataset_message(name, names)))?)
        }
    };
    // A request that names the job's own dataset also gets the job's validation pictures.
    let other = other.filter(|other| other.name != job.spec.data.dataset);
    // A dataset that was registered again under the same name is another dataset.
    let dataset_suffix =
        other.as_ref().map(|d| format!("@{}@{}", d.name, d.added_at.as_millisecond())).unwrap_or_default();
    let method_suffix = neighbours.map(|k| format!("-{k}-neighbours")).unwrap_or_default();
    let (epoch, step) = (row.info.epoch, row.info.step);
    let name = format!("{epoch}-{step}{weights_suffix}{method_suffix}{dataset_suffix}.json");
    let file = scheduler.config.job_dir(&row.job).join("evaluations").join(name);
    let response =
        |evaluation: Vec<u8>| ([(header::CONTENT_TYPE, "application/json")], evaluation).into_response();
    if let Ok(stored) = regular_files::read(&file).await
        && is_of_current_pictures(scheduler, &job, other.as_ref(), &stored).await
    {
        return Ok(response(stored));
    }

    checkpoints::ensure_on_disk(&scheduler.checkpoints, &row).await?;
    let request = agent_request(scheduler, &row, query.weights, other, neighbours).await?;
    let work = |sent: Sent| {
        let (agents, file) = (scheduler.agents.clone(), file.clone());
        async move {
            match requests::call_shared(&agents, request, EVALUATION_TIMEOUT, &sent).await? {
                AgentReply::Evaluation(result) if neighbours.is_none() => save(&file, &result).await,
                AgentReply::Neighbours(result) if neighbours.is_some() => save(&file, &result).await,
                _ => {
                    let detail = "the agent's response is not the requested evaluation; run the same version of lockstep on both machines";
                    Err(RequestError::Refused(detail.to_owned()))
                }
            }
        }
    };
    let evaluations = &scheduler.checkpoints.evaluations;
    match evaluations.join_or_start(file.clone(), scheduler.config.response_wait, work).await {
        Joined::Ended(Ok(())) => Ok(response(regular_files::read(&file).await?)),
        Joined::Ended(Err(error)) => Err(error.without_pointer()),
        Joined::Running(sent) => {
            let progress = UnderWay::of(&sent, &scheduler.agents, &row);
            Ok((StatusCode::ACCEPTED, Json(progress)).into_response())
        }
    }
}

/// The sets of pictures in a stored [`ModelEvaluation`] or [`NearestNeighbours`].
#[derive(Deserialize)]
struct EvaluatedPictures {
    validation: Option<ValidationSet>,
    listed: Option<ValidationSet>,
}

/// Whether the pictures of a stored evaluation are the dataset's current pictures. Also true if no agent can tell, because the evaluation
/// states which pictures it is for.
async fn is_of_current_pictures(
    scheduler: &Scheduler,
    job: &Job,
    other: Option<&Dataset>,
    stored: &[u8],
) -> bool {
    let Ok(stored) = serde_json::from_slice::<EvaluatedPictures>(stored) else { return false };
    let Ok((spec, dataset)) = resolve_dataset(&scheduler.datasets, job, other.cloned()).await else {
        return true;
    };
    let request = AgentRequest::ValidationSet {
        path: dataset.path,
        data: Box::new(spec.data),
        allowed: scheduler.datasets.roots.allowed_folders(),
    };
    match requests::call(&scheduler.agents, request, scheduler.config.response_wait).await {
        Ok(AgentReply::ValidationSet { found }) => found == stored.listed.or(stored.validation),
        _ => true,
    }
}

/// The error if the dataset of a job was removed.
fn no_longer_registered(spec: &JobSpec) -> Error {
    Error::unprocessable(format!(
        "the dataset {0:?} is no longer registered; upload or register it again under this name (`lockstep dataset add {0} PATH`), \
         or evaluate another dataset (`lockstep evaluate JOB --dataset NAME`)",
        spec.data.dataset
    ))
}

/// Returns the dataset of an evaluation (`other`, or the job's) and the job's specification with the validation split for that dataset.
async fn resolve_dataset(
    datasets: &Datasets,
    job: &Job,
    other: Option<Dataset>,
) -> Result<(JobSpec, Dataset)> {
    let mut spec = job.spec.clone();
    let dataset = match other {
        Some(other) => {
            spec.data.dataset.clone_from(&other.name);
            spec.data.validation = JobSpec::default().data.validation;
            (spec.data.folds, spec.data.fold) = (None, None);
            submission::choose_validation(&mut spec, &other);
            choose_split(&mut spec, &other)?;
            other
        }
        None => {
            datasets.store.dataset(&spec.data.dataset).await?.ok_or_else(|| no_longer_registered(&spec))?
        }
    };
    datasets.roots.check_registered(&dataset.path).await.map_err(Error::unprocessable)?;
    Ok((spec, dataset))
}

/// Returns the request to an agent for an evaluation.
async fn agent_request(
    scheduler: &Scheduler,
    row: &CheckpointRow,
    weights: Weights,
    other: Option<Dataset>,
    neighbours: Option<u32>,
) -> Result<AgentRequest> {
    let model = weights.path(&scheduler.checkpoints.folder(row))?;
    let job = jobs::find(scheduler, row.job.as_str()).await?;
    jobs::check_readable(&job)?;
    let (spec, dataset) = resolve_dataset(&scheduler.datasets, &job, other).await?;
    if neighbours.is_some() && spec.data.validation == Validation::Split("train".into()) {
        return Err(Error::unprocessable(format!(
            "{} has only training pictures, and nearest neighbours are counted for validation pictures: add a split called val",
            dataset.name
        )));
    }
    // Refuses different classes before an agent is asked. Nearest neighbours need no common classes.
    if neighbours.is_none()
        && let Some(trained) = TrainingPictures::of(&scheduler.checkpoints.folder(row)).await
        && let Some(detail) = fit::why_not_evaluable(&trained, &dataset)
    {
        return Err(Error::unprocessable(detail));
    }
    Ok(AgentRequest::Evaluate(EvaluateModel {
        model: model.to_string_lossy().into_owned(),
        dataset: dataset.path,
        spec: Box::new(spec),
        allowed: scheduler.datasets.roots.allowed_folders(),
        neighbours,
    }))
}

/// Chooses the split of a dataset other than the job's for an evaluation: the split for validation, or the only split.
///
/// # Errors
/// The dataset has several splits, and none for validation.
fn choose_split(spec: &mut JobSpec, other: &Dataset) -> Result<()> {
    let splits = other.info.splits.iter().filter(|split| split.samples > 0);
    let names: Vec<_> = splits.map(|split| split.name.as_str()).collect();
    match &spec.data.validation {
        Validation::Split(name) if names.contains(&name.as_str()) => Ok(()),
        _ if names == ["train"] => {
            spec.data.validation = Validation::Split("train".into());
            Ok(())
        }
        _ => Err(Error::unprocessable(format!(
            "{} has no split for an evaluation: it has {}, and an evaluation needs a split called test, val, validation, valid, dev \
             or eval: give the split one of these names, and register the dataset again; without --dataset, the held-out pictures are \
             evaluated",
            other.name,
            names.join(", ")
        ))),
    }
}

/// Stores an evaluation atomically. Does not create the job's folder, because a folder of a deleted job would never be removed.
async fn save(file: &std::path::Path, result: &impl Serialize) -> Result<(), RequestError> {
    let written = async {
        let json = serde_json::to_vec(result).map_err(std::io::Error::other)?;
        if let Some(folder) = file.parent() {
            match tokio::fs::create_dir(folder).await {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        let partial = file.with_extension("part");
        tokio::fs::write(&partial, json).await?;
        tokio::fs::rename(&partial, file).await
    };
    let failed = |error| {
        RequestError::Unavailable(format!("{} cannot be written: {error}; ask again", file.display()))
    };
    written.await.map_err(failed)
}
