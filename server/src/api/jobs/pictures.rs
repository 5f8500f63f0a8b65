//! Pictures of datasets, as stored and as jobs see them. An agent reads the pictures.

use crate::api::prelude::*;
use crate::{
    agents::requests,
    api::{
        datasets, jobs,
        list::{self, Pages},
    },
    datasets::Datasets,
    http::extract::check_count,
    scheduler::Scheduler,
};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest},
    dataset::Dataset,
    inspect::{Pick, Samples},
};
use std::time::Duration;

const DEFAULT_PICTURES: u32 = 60;
const MAX_PICTURES: u32 = 200;
/// The default split.
const TRAIN: &str = "train";
/// Time limit for an agent to read the pictures.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Number of augmented versions of each picture.
const VERSIONS: u32 = 5;

/// Parameters of `GET /datasets/{name}/samples`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct SamplesQuery {
    /// Name of a split (default `train`).
    split: Option<String>,
    /// Name of a class (default: all classes).
    class: Option<String>,
    /// Seed of a random order, which is the same for the same seed. By default, and with `augmented`, pictures are in the stored order.
    shuffle: Option<u64>,
    /// Number of pictures to skip at the start; not together with `cursor`.
    offset: Option<u64>,
    /// Page size, 1 to 200 (default 60).
    #[param(minimum = 1, maximum = 200)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page, requested with the same `split`, `class`, `shuffle` and `augmented`.
    cursor: Option<String>,
    /// Id of a job. Returns training pictures, each in five versions, as the job augments them in its first five epochs.
    augmented: Option<String>,
}

impl SamplesQuery {
    /// Describes the selected pictures and their order, for cursors.
    fn order(&self) -> String {
        let Self { split, class, shuffle, augmented, .. } = self;
        if let Some(job) = augmented {
            return format!("augmented {job}");
        }
        let (split, class) = (split.as_deref().unwrap_or(TRAIN), class.as_deref().unwrap_or_default());
        let shuffle = shuffle.map_or(String::new(), |seed| format!(" shuffled {seed}"));
        format!("{split} {class}{shuffle}")
    }

    /// Returns the number of pictures before this page.
    fn previous_count(&self, pages: Pages) -> Result<u64> {
        if self.cursor.is_some() && self.offset.is_some() {
            let detail = "offset and cursor cannot be combined; leave one of them out";
            return Err(Error::BadRequest(detail.into()));
        }
        let position = pages.decode(self.cursor.as_deref())?;
        Ok(position.or(self.offset).unwrap_or(0))
    }
}

/// Identifies a dataset in cursors. The name is not sufficient, because another dataset may have the name later.
fn dataset_id(dataset: &Dataset) -> String {
    format!("{} {}", dataset.name, dataset.added_at)
}

/// A page of a dataset's pictures.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SamplePage {
    #[serde(flatten)]
    samples: Samples,
    /// Value of `cursor` for the next page; null on the last page.
    next_cursor: Option<String>,
}

/// Show pictures of a dataset
#[utoipa::path(get, path = "/datasets/{name}/samples", tag = "datasets", params(("name" = String, Path), SamplesQuery),
    responses((status = 200, body = SamplePage), (status = 422, body = Problem)))]
pub(crate) async fn of_dataset(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    Query(query): Query<SamplesQuery>,
) -> Result<Json<SamplePage>> {
    let dataset = datasets::find(&*scheduler.store, &name).await?;
    let limit = check_count("limit", query.limit, DEFAULT_PICTURES, MAX_PICTURES)?;
    let (order, id) = (query.order(), dataset_id(&dataset));
    let pages = Pages::new("samples", &order).owned_by("dataset", &id);
    let begin = query.previous_count(pages)?;
    // Saturating, because a client's cursor may contain any number.
    let end_after = |pictures: u64| begin.saturating_add(pictures);
    let (pick, end) = match query.augmented {
        None => {
            let SamplesQuery { split, class, shuffle, .. } = query;
            let split = split.unwrap_or_else(|| TRAIN.into());
            (Pick::Stored { split, class, shuffle, offset: begin, limit }, end_after(u64::from(limit)))
        }
        Some(id) => {
            let spec = jobs::find_visible(&scheduler, &caller, &id).await?.spec;
            // `limit` counts the versions of a picture separately.
            let end = end_after(u64::from(limit.div_ceil(VERSIONS)));
            let pick = Pick::Seen {
                data: Box::new(spec.data),
                seed: spec.train.seed,
                validation: false,
                // The agent refuses an offset beyond the last picture.
                places: (begin..end).collect(),
                epochs: (0..VERSIONS).collect(),
            };
            (pick, end)
        }
    };
    let samples = read_pictures(&scheduler.datasets, dataset.path, pick).await?;
    let next_cursor = (end < samples.total).then(|| pages.encode(&end)).transpose()?;
    Ok(Json(SamplePage { samples, next_cursor }))
}

/// Parameters of `GET /jobs/{id}/samples`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct IndicesQuery {
    /// At most 200 comma-separated indices of pictures in the split, such as `index` of mistakes in an evaluation.
    indices: String,
    /// Whether to use the training split instead of the validation split.
    #[serde(default)]
    train: bool,
}

/// Show pictures as a job sees them
#[utoipa::path(get, path = "/jobs/{id}/samples", tag = "checkpoints", params(("id" = String, Path), IndicesQuery),
    responses((status = 200, body = Samples), (status = 422, body = Problem)))]
pub(crate) async fn of_job(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(query): Query<IndicesQuery>,
) -> Result<Json<Samples>> {
    let job = jobs::find(&scheduler, &id).await?;
    jobs::check_readable(&job)?;
    let spec = job.spec;
    let dataset = scheduler.store.dataset(&spec.data.dataset).await?;
    // Another dataset may have this name now, so access is checked again.
    let dataset = dataset.filter(|dataset| caller.sees(dataset.private, dataset.owner.as_deref()));
    let dataset = dataset.ok_or_else(|| {
        Error::NotFound(
            "the job's dataset is no longer registered; upload or add it again under its name".into(),
        )
    })?;
    let indices: Vec<&str> = list::split_list(Some(&query.indices)).collect();
    if indices.len() > MAX_PICTURES as usize {
        let detail = format!(
            "indices names {} pictures, but may name at most {MAX_PICTURES}; request further pictures separately",
            indices.len()
        );
        return Err(Error::BadRequest(detail));
    }
    let places = indices.into_iter().map(str::parse).collect::<Result<Vec<u64>, _>>();
    let places =
        places.map_err(|_| Error::BadRequest("indices must be whole numbers, separated by commas".into()))?;
    let pick = Pick::Seen {
        data: Box::new(spec.data),
        seed: spec.train.seed,
        validation: !query.train,
        places,
        epochs: Vec::new(),
    };
    Ok(Json(read_pictures(&scheduler.datasets, dataset.path, pick).await?))
}

async fn read_pictures(datasets: &Datasets, path: String, pick: Pick) -> Result<Samples> {
    datasets.roots.check_registered(&path).await.map_err(Error::unprocessable)?;
    let request = AgentRequest::Samples { path, pick, allowed: datasets.roots.allowed_folders() };
    match requests::call(&datasets.agents, request, TIMEOUT).await {
        Ok(AgentReply::Samples(samples)) => Ok(samples),
        Ok(_) => Err(Error::Internal("an agent replied with something other than pictures".into())),
        Err(error) => Err(error.without_pointer()),
    }
}
