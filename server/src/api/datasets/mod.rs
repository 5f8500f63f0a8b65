//! Registered datasets. The server does not open their files; an agent inspects them.

pub(crate) mod bundled;
pub(crate) mod inspections;
pub(crate) mod pages;
pub(crate) mod uploads;

use super::{
    list::{List, ListParams, list_of},
    run_to_completion,
};
use crate::api::prelude::*;
use crate::{
    datasets::{
        Datasets,
        changes::{self, Comparison},
    },
    http::{conditional::json_with_etag, error::Code, extract::Body},
    store::Store,
};
use axum::http::HeaderMap;
use inspections::{INSPECTION_TIMEOUT, Inspected, InspectionProgress, NotInspected, WaitQuery};
use lockstep_protocol::{
    Job,
    dataset::{Dataset, DatasetInfo},
    labels::{CASE_IS_IGNORED, plain_name_mistake},
    numbers::plural,
    spec::SpecError,
};
use std::time::Duration;

const MAX_PATH_BYTES: usize = 4096;
const MAX_NAME_BYTES: usize = 100;
/// Maximum time that the check of a job waits for the inspection of a dataset that has changed.
const REFRESH_WAIT: Duration = Duration::from_secs(10);
/// Maximum number of jobs that an error message names.
const MAX_NAMED_JOBS: usize = 10;

list_of! {
    /// A page of datasets.
    DatasetList
    /// Ordered by name, unless `sort` is given.
    datasets: Dataset
}

const LIST: List<Dataset> = List {
    name: "datasets",
    sorts: &[
        ("name", |dataset| dataset.name.as_str().into()),
        ("created", |dataset| dataset.added_at.into()),
    ],
    default_sort: "name",
    id: |dataset| &dataset.name,
    created: Some(|dataset| dataset.added_at),
};

/// A dataset to register.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewDataset {
    /// The name for `data.dataset` of jobs: 1 to 100 letters, digits, `-`, `_` and `.`.
    pub(crate) name: String,
    /// Absolute path on the machines that train on the dataset.
    pub(crate) path: String,
    /// Whether only the owner and admins see the dataset.
    #[serde(default)]
    pub(crate) private: bool,
}

/// Returns the datasets that a caller may see.
pub(super) async fn visible_datasets(store: &dyn Store, caller: &Caller) -> Result<Vec<Dataset>> {
    let mut datasets = store.datasets().await?;
    datasets.retain(|dataset| caller.sees(dataset.private, dataset.owner.as_deref()));
    Ok(datasets)
}

/// Register a dataset
///
/// An agent inspects the files and detects their format. The first inspection of many pictures takes minutes. A response 202 contains the
/// progress; repeat the request until the response is 201. If a dataset's folder no longer exists, a request with its name and a new path
/// changes the path. The pictures must be the same. The status is 201 also then.
#[utoipa::path(post, path = "/datasets", tag = "datasets", params(WaitQuery), request_body = NewDataset,
    responses((status = 201, body = Dataset), (status = 202, body = InspectionProgress, description = "The files are being inspected; ask again"), (status = 409, body = Problem, description = "The name is taken"),
        (status = 503, body = Problem, description = "No agent is online to inspect the files")))]
pub(crate) async fn create(
    State(datasets): State<Arc<Datasets>>,
    Extension(caller): Extension<Caller>,
    Query(wait): Query<WaitQuery>,
    Body(new, _): Body<NewDataset>,
) -> Inspected<Response> {
    Ok(created_response(register(&datasets, &caller, new, wait.max_wait()?).await?))
}

fn created_response(dataset: Dataset) -> Response {
    let location = [(header::LOCATION, format!("/api/v1/datasets/{}", dataset.name))];
    (StatusCode::CREATED, location, Json(dataset)).into_response()
}

/// Checks a registration, lets an agent inspect the files, and stores the dataset. Waits for the inspection for at most `max_wait`.
///
/// # Errors
/// The registration has mistakes (all are returned), the name is taken, or the inspection failed.
pub(crate) async fn register(
    datasets: &Arc<Datasets>,
    caller: &Caller,
    new: NewDataset,
    max_wait: Duration,
) -> Inspected<Dataset> {
    let mut errors: Vec<SpecError> = name_mistake(&new.name).into_iter().collect();
    errors.extend(path_mistake(datasets, caller, &new.path).await);
    check_mistakes(errors)?;
    if let Some(existing) = datasets.store.dataset(&new.name).await?
        && caller.sees(existing.private, existing.owner.as_deref())
    {
        let Dataset { name, path, owner, .. } = &existing;
        if *path == new.path {
            let detail = format!(
                "the dataset {name:?} is already registered at this path; `lockstep dataset inspect` shows it"
            );
            return Err(Error::WithCode(Code::NameTaken, detail).into());
        }
        // A new path does not make a public dataset private.
        if (caller.sees_all() || caller.owns(owner.as_deref()))
            && (existing.private || !new.private)
            && matches!(changes::compare(&existing).await, Comparison::Missing)
        {
            return replace_path(datasets, existing, new.path, max_wait).await;
        }
    }
    check_free(datasets, caller, &new.name).await?;
    let dataset = inspect_new(datasets, caller, new, max_wait).await?;
    datasets.store.add_dataset(&dataset).await?;
    Ok(dataset)
}

/// Stores the new path of a dataset whose folder was moved. Jobs need not end first, because they train on the same pictures.
async fn replace_path(
    datasets: &Arc<Datasets>,
    dataset: Dataset,
    new_path: String,
    max_wait: Duration,
) -> Inspected<Dataset> {
    let (new_path, info) = inspections::inspect(datasets, new_path, max_wait).await?;
    let info = check_info(datasets, &new_path, info)?;
    if info.fingerprint.is_none() || info.fingerprint != dataset.info.fingerprint {
        let Dataset { name, path, .. } = &dataset;
        let detail = format!(
            "a dataset is already called {name:?}; its folder {path} no longer exists, and the pictures at {new_path} differ from its \
             pictures: choose another name, or remove that dataset first (on the page Datasets, or with `lockstep dataset remove {name}`)"
        );
        return Err(Error::WithCode(Code::NameTaken, detail).into());
    }
    let dataset = Dataset { path: new_path, info, ..dataset };
    datasets.store.update_dataset(&dataset).await?;
    Ok(dataset)
}

/// Checks that no dataset has this name, or a name that differs from it only in capitals.
async fn check_free(datasets: &Datasets, caller: &Caller, name: &str) -> Result<()> {
    let registered = datasets.store.datasets().await?;
    let Some(existing) = registered.iter().find(|dataset| dataset.name.eq_ignore_ascii_case(name)) else {
        return Ok(());
    };
    let case_is_ignored = if existing.name == name { "" } else { CASE_IS_IGNORED };
    let may_remove = caller.sees_all() || caller.owns(existing.owner.as_deref());
    let removal = if may_remove { ", or remove that dataset first" } else { "" };
    let detail = format!(
        "a dataset is already called {:?}{case_is_ignored}; choose another name{removal}",
        existing.name
    );
    Err(Error::WithCode(Code::NameTaken, detail))
}

/// Lets an agent inspect files of an allowed path. Returns the dataset to store.
async fn inspect_new(
    datasets: &Arc<Datasets>,
    caller: &Caller,
    new: NewDataset,
    max_wait: Duration,
) -> Inspected<Dataset> {
    let (path, info) = inspections::inspect(datasets, new.path, max_wait).await?;
    Ok(Dataset {
        name: new.name,
        info: check_info(datasets, &path, info)?,
        path,
        added_at: crate::now(),
        owner: caller.owner().map(str::to_owned),
        private: new.private,
    })
}

/// Checks the canonical path of a dataset, and the result of its inspection, which is returned.
///
/// # Errors
/// The files are outside the folders that are allowed for datasets, or cannot be trained on.
fn check_info(datasets: &Datasets, path: &str, info: DatasetInfo) -> Result<DatasetInfo> {
    check_field("/path", datasets.roots.check_found(path).err().or_else(|| info_mistake(&info)))?;
    Ok(info)
}

/// Returns the reason why a dataset cannot be trained on or stored, if there is one. Numbers that are not finite cannot be stored as JSON.
fn info_mistake(info: &DatasetInfo) -> Option<String> {
    if info.classes.is_empty() {
        Some("has no classes".into())
    } else if !info.broken.is_empty()
        && let Some(detail) = info.too_few_pictures()
    {
        Some(detail)
    } else if ![1, 3].contains(&info.channels) {
        let channels = plural(info.channels.into(), "channel");
        Some(format!("has pictures of {channels}, but pictures must have 1 or 3 channels"))
    } else if !info.mean.iter().all(|mean| mean.is_finite()) {
        Some("has pictures whose mean is not a finite number".into())
    } else if !info.std.iter().all(|std| std.is_finite() && *std > 0.0) {
        Some("has pictures whose standard deviation is not a number above 0".into())
    } else {
        info.too_long()
    }
}

/// A folder to inspect.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Folder {
    /// Absolute path on the machines that train on the folder.
    path: String,
}

/// Result of inspecting a folder.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InspectedFolder {
    /// The canonical path, without symbolic links.
    path: String,
    info: DatasetInfo,
}

/// Inspect a folder without registering it
#[utoipa::path(post, path = "/datasets/inspect", tag = "datasets", params(WaitQuery), request_body = Folder,
    responses((status = 200, body = InspectedFolder), (status = 202, body = InspectionProgress, description = "The files are being inspected; ask again")))]
pub(crate) async fn inspect(
    State(datasets): State<Arc<Datasets>>,
    Extension(caller): Extension<Caller>,
    Query(wait): Query<WaitQuery>,
    Body(folder, _): Body<Folder>,
) -> Inspected<Json<InspectedFolder>> {
    check_mistakes(path_mistake(&datasets, &caller, &folder.path).await.into_iter().collect())?;
    let (path, info) = inspections::inspect(&datasets, folder.path, wait.max_wait()?).await?;
    let info = check_info(&datasets, &path, info)?;
    Ok(Json(InspectedFolder { path, info }))
}

/// Inspect a registered dataset again
///
/// The result replaces the dataset's stored information, even while jobs train on the dataset.
#[utoipa::path(post, path = "/datasets/{name}/inspect", tag = "datasets", params(("name" = String, Path), WaitQuery),
    responses((status = 200, body = Dataset), (status = 202, body = InspectionProgress, description = "The files are being inspected; ask again"), (status = 422, body = Problem),
        (status = 503, body = Problem, description = "No agent is online to inspect the files")))]
pub(crate) async fn inspect_again(
    State(datasets): State<Arc<Datasets>>,
    Query(wait): Query<WaitQuery>,
    Path(name): Path<String>,
) -> Inspected<Json<Dataset>> {
    let dataset = find(&*datasets.store, &name).await?;
    Ok(Json(inspect_registered(&datasets, dataset, wait.max_wait()?).await?))
}

/// Lets an agent inspect a registered dataset, and stores the result. Waits for the inspection for at most `max_wait`.
async fn inspect_registered(
    datasets: &Arc<Datasets>,
    dataset: Dataset,
    max_wait: Duration,
) -> Inspected<Dataset> {
    let (path, info) = inspections::inspect(datasets, dataset.path.clone(), max_wait).await?;
    let dataset = Dataset { info: check_info(datasets, &path, info)?, ..dataset };
    datasets.store.update_dataset(&dataset).await?;
    Ok(dataset)
}

/// Inspects a dataset again if it has changed since its last inspection. If the inspection fails or the files are missing, `dataset` stays
/// as it is, and a warning is returned. If the inspection takes longer than [`REFRESH_WAIT`], `dataset` stays as it is, and later checks
/// get the result.
pub(super) async fn refresh(datasets: &Arc<Datasets>, dataset: &mut Dataset) -> Option<String> {
    match changes::compare(dataset).await {
        Comparison::Unchanged => return None,
        Comparison::Missing => {
            return Some(format!(
                "the folder of the dataset {:?}, {}, no longer exists on the server's machine: the job fails unless the machine that \
                 trains has the folder. If the folder was moved, register the new path under the same name: \
                 `lockstep dataset add {} NEWPATH`",
                dataset.name, dataset.path, dataset.name
            ));
        }
        Comparison::Changed => {}
    }
    let (shared, registered) = (Arc::clone(datasets), dataset.clone());
    let inspection =
        run_to_completion(
            async move { Ok(inspect_registered(&shared, registered, INSPECTION_TIMEOUT).await) },
        );
    let Ok(inspection) = tokio::time::timeout(REFRESH_WAIT, inspection).await else { return None };
    match inspection.map_err(NotInspected::Failed).flatten() {
        Ok(inspected) => {
            *dataset = inspected;
            None
        }
        Err(NotInspected::UnderWay(_)) => None,
        Err(NotInspected::Failed(error)) => {
            let name = &dataset.name;
            // Locations of mistakes would refer to a request to register a dataset.
            let why = error.detail();
            Some(format!(
                "the files of the dataset {name:?} have changed, and could not be inspected again: {why}. The job was checked with the \
                 numbers of the last inspection"
            ))
        }
    }
}

pub(super) async fn find(store: &dyn Store, name: &str) -> Result<Dataset> {
    store.dataset(name).await?.ok_or_else(|| Error::NotFound("no dataset has this name".into()))
}

/// Returns the mistake in a dataset's name, if any.
fn name_mistake(name: &str) -> Option<SpecError> {
    let mistake = |detail| Some(SpecError { pointer: "/name".into(), detail });
    if ["inspect", "bundled", "uploads"].contains(&name) {
        return mistake(format!("is reserved for the call /api/v1/datasets/{name}; choose another name"));
    }
    plain_name_mistake(name, MAX_NAME_BYTES).and_then(mistake)
}

/// Returns the mistake in the path of a request, if any.
async fn path_mistake(datasets: &Datasets, caller: &Caller, path: &str) -> Option<SpecError> {
    let detail = if !path.starts_with('/') {
        "must be an absolute path, such as /data/cifar10, on the machines that train on the dataset".into()
    } else if path.len() > MAX_PATH_BYTES {
        format!("has {} bytes, but must have at most {MAX_PATH_BYTES}", path.len())
    } else if path.contains('\0') {
        "must not contain a zero byte".into()
    } else {
        datasets.roots.check_requested(path, caller).await.err()?
    };
    Some(SpecError { pointer: "/path".into(), detail })
}

/// List datasets
///
/// `sort`: `name`, `created` (the time of registration).
#[utoipa::path(get, path = "/datasets", tag = "datasets", params(ListParams),
    responses((status = 200, body = DatasetList), (status = 304, description = "The list is unchanged since the response whose `ETag` is in `If-None-Match`")))]
pub(crate) async fn list(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    Query(params): Query<ListParams>,
) -> Result<Response> {
    json_with_etag(
        &headers,
        &DatasetList::from(LIST.page(None, visible_datasets(&*store, &caller).await?, &params)?),
    )
}

/// Show a dataset
#[utoipa::path(get, path = "/datasets/{name}", tag = "datasets",
    responses((status = 200, body = Dataset), (status = 304, description = "The dataset is unchanged since the response whose `ETag` is in `If-None-Match`")))]
pub(crate) async fn show(
    State(store): State<Arc<dyn Store>>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Result<Response> {
    json_with_etag(&headers, &find(&*store, &name).await?)
}

/// Remove a dataset
///
/// The dataset's files are removed only if they were uploaded. Finished jobs keep the dataset's name; they cannot be evaluated or run again
/// until a dataset is registered under this name.
#[utoipa::path(delete, path = "/datasets/{name}", tag = "datasets",
    responses((status = 204), (status = 409, body = Problem, description = "Unfinished jobs train on the dataset; the problem names them")))]
pub(crate) async fn delete(
    State(datasets): State<Arc<Datasets>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    let store = &datasets.store;
    let uploaded =
        store.dataset(&name).await?.and_then(|dataset| datasets.roots.upload_folder(&dataset.path));
    let removed = match uploaded {
        Some(folder) => run_to_completion(uploads::remove(Arc::clone(&datasets), name.clone(), folder)).await,
        None => store.remove_dataset(&name).await.map_err(Error::from),
    };
    match removed {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(error @ Error::WithCode(Code::DatasetInUse, _)) => {
            let mut jobs = store.unfinished_jobs().await?;
            jobs.retain(|job| job.spec.data.dataset == name);
            if !jobs.iter().all(|job| caller.sees_job(job)) {
                let detail = "jobs of other people train on this dataset, and some of these jobs are private; ask an admin for the names";
                return Err(Error::WithCode(Code::DatasetInUse, detail.into()));
            }
            // If no job is left, the jobs have ended meanwhile.
            Err(if jobs.is_empty() {
                error
            } else {
                Error::WithCode(Code::DatasetInUse, in_use_message(&jobs))
            })
        }
        Err(error) => Err(error),
    }
}

/// Formats an error message such as `2 jobs train on this dataset: j1 ("a", running), j2 ("b", queued); cancel these jobs first`.
fn in_use_message(jobs: &[Job]) -> String {
    let named =
        jobs.iter().take(MAX_NAMED_JOBS).map(|job| format!("{} ({:?}, {})", job.id, job.name, job.state));
    let named = named.collect::<Vec<_>>().join(", ");
    match jobs.len() {
        1 => format!("a job trains on this dataset: {named}; cancel the job first"),
        n if n > MAX_NAMED_JOBS => {
            let unnamed = n - MAX_NAMED_JOBS;
            format!("{n} jobs train on this dataset: {named} and {unnamed} more; cancel these jobs first")
        }
        n => format!("{n} jobs train on this dataset: {named}; cancel these jobs first"),
    }
}
