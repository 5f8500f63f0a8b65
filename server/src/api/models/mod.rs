//! Registered models: names for checkpoints, with versions that never change and aliases that move.

pub(crate) mod pages;

use super::{
    checkpoints,
    list::{List, ListParams, list_of},
};
use crate::api::prelude::*;
use crate::{
    auth::Auth,
    checkpoints::Checkpoints,
    datasets::notes,
    http::{
        authorize::AuditSubject,
        error::{Code, run_blocking},
        extract::{Body, parse_job_id},
    },
    store::{CheckpointRow, NewVersion, Store},
    util::regular_files,
};
use lockstep_protocol::{
    checkpoint_files::STATE,
    dataset::DatasetNote,
    labels::{self, CASE_IS_IGNORED},
    models::{Model, ModelVersion, Selector, alias_mistake, name_mistake},
};
use serde_json::json;
use std::collections::BTreeMap;

list_of! {
    /// A page of models with at least one version that the caller may see.
    ModelList
    /// Ordered by name, unless `sort` is given.
    models: Model
}

const LIST: List<Model> = List {
    name: "models",
    sorts: &[
        ("name", |model| model.name.as_str().into()),
        ("created", |model| model.newest.registered_at.into()),
    ],
    default_sort: "name",
    id: |model| &model.name,
    created: Some(|model| model.newest.registered_at),
};

/// A model with all its versions.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelDetail {
    name: String,
    /// Newest first.
    versions: Vec<ModelVersion>,
}

/// A version to register. The first version makes the model.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewModel {
    /// The model's name: 1 to 100 letters, digits, `-`, `_` and `.`.
    name: String,
    /// Id of a checkpoint, whose job must have ended.
    checkpoint: Option<String>,
    /// In place of `checkpoint`, the id of a job, whose best checkpoint is registered (the newest if no checkpoint was validated).
    job: Option<String>,
    /// Text about the version, at most 20 000 bytes.
    #[serde(default)]
    description: String,
}

/// The version for an alias.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AliasTarget {
    /// Number of the version.
    version: u32,
}

/// Returns the versions that a caller may see, of one model or of all models.
async fn visible_versions(
    store: &dyn Store,
    caller: &Caller,
    model: Option<&str>,
) -> Result<Vec<ModelVersion>> {
    let mut rows = store.model_versions(model).await?;
    rows.retain(|row| caller.sees_owned(&row.ownership));
    Ok(rows.into_iter().map(|row| row.version).collect())
}

/// Returns the models that a caller may see, by name.
async fn visible_models(store: &dyn Store, caller: &Caller) -> Result<Vec<Model>> {
    let versions = visible_versions(store, caller, None).await?;
    let of_models = versions.chunk_by(|a, b| a.model == b.model);
    Ok(of_models.filter_map(|versions| Model::of(versions.to_vec())).collect())
}

/// Returns a version that a caller may see.
///
/// # Errors
/// 404: no model that the caller may see has this name, or the model has no such version.
async fn find(store: &dyn Store, caller: &Caller, model: &str, selector: &Selector) -> Result<ModelVersion> {
    let versions = visible_versions(store, caller, Some(model)).await?;
    if versions.is_empty() {
        return Err(no_such_model());
    }
    let found = versions.into_iter().find(|version| selector.matches(version));
    found.ok_or_else(|| {
        Error::NotFound(match selector {
            Selector::Number(number) => format!("the model {model:?} has no version {number}"),
            Selector::Alias(alias) => format!("the model {model:?} has no alias {alias:?}"),
        })
    })
}

/// List models
///
/// `sort`: `name`, `created` (when the newest version was registered).
#[utoipa::path(get, path = "/models", tag = "models", params(ListParams), responses((status = 200, body = ModelList)))]
pub(crate) async fn list(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Query(params): Query<ListParams>,
) -> Result<Json<ModelList>> {
    Ok(Json(LIST.page(None, visible_models(&*store, &caller).await?, &params)?.into()))
}

/// Show a model
#[utoipa::path(get, path = "/models/{name}", tag = "models", responses((status = 200, body = ModelDetail)))]
pub(crate) async fn show(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<Json<ModelDetail>> {
    let mut versions = visible_versions(&*store, &caller, Some(&name)).await?;
    if versions.is_empty() {
        return Err(no_such_model());
    }
    versions.reverse();
    Ok(Json(ModelDetail { name, versions }))
}

fn no_such_model() -> Error {
    Error::NotFound("no model has this name".into())
}

/// Register a checkpoint
///
/// The checkpoint becomes the next version of the model; the first version makes the model. A job with versions cannot be run again or
/// deleted.
#[utoipa::path(post, path = "/models", tag = "models", request_body = NewModel,
    responses((status = 201, body = ModelVersion, headers(("Location" = String))), (status = 404, body = Problem),
        (status = 409, body = Problem, description = "The job has not ended, its checkpoint is still being uploaded, or another owner's model has the name")))]
pub(crate) async fn create(
    State(checkpoints): State<Arc<Checkpoints>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Body(new, _): Body<NewModel>,
) -> Result<impl IntoResponse> {
    let model = new.name.clone();
    check_field("/name", name_mistake(&model))?;
    // The middleware checks only models that are named in the URL.
    let versions = checkpoints.store.model_versions(None).await?;
    let existing = versions
        .iter()
        .find(|row| row.version.model == model)
        .or_else(|| versions.iter().find(|row| row.version.model.eq_ignore_ascii_case(&model)));
    if let Some(existing) = existing {
        let known = &existing.version.model;
        if !auth.may_change(&caller, existing.ownership.owner.as_deref()) {
            let detail = format!("the model {known:?} belongs to somebody else; choose another name");
            return Err(Error::WithCode(Code::NameTaken, detail));
        }
        if *known != model {
            let detail = format!(
                "a model is already called {known:?}{CASE_IS_IGNORED}; use this name, or choose another"
            );
            return Err(Error::WithCode(Code::NameTaken, detail));
        }
    }
    check_field("/description", labels::notes_mistake(&new.description))?;
    let row = choose_checkpoint(&checkpoints, &auth, &caller, &new).await?;
    checkpoints::ensure_on_disk(&checkpoints, &row).await?;
    let (programs, dataset_fingerprint) = lineage(&checkpoints, &row).await?;
    let version = {
        // The lock prevents the removal of the checkpoint.
        let _lock = checkpoints.removal_lock.lock().await;
        let copies = checkpoints.copies_of(&row).await?;
        if !checkpoints.has_copy(&row, &copies) {
            return Err(checkpoints::removed_error());
        }
        let new_version = NewVersion {
            model: model.clone(),
            job: row.job,
            checkpoint: row.id,
            dataset_fingerprint,
            programs,
            description: new.description,
            registered_by: caller.owner().map(str::to_owned),
            at: crate::now(),
        };
        checkpoints.store.add_model_version(&new_version).await?
    };
    let location = format!("/api/v1/models/{model}/versions/{version}");
    let version = find(&*checkpoints.store, &caller, &model, &Selector::Number(version)).await?;
    let subject = AuditSubject(format!("{model}/{}", version.version));
    Ok((StatusCode::CREATED, Extension(subject), [(header::LOCATION, location)], Json(version)))
}

/// Returns the checkpoint that a request names. The caller must be allowed to change the checkpoint's job.
///
/// # Errors
/// 404: the job or checkpoint does not exist, or the caller may not see it. 403: the job belongs to somebody else.
async fn choose_checkpoint(
    checkpoints: &Checkpoints,
    auth: &Auth,
    caller: &Caller,
    new: &NewModel,
) -> Result<CheckpointRow> {
    let store = &*checkpoints.store;
    let (job, named_row) = match (&new.checkpoint, &new.job) {
        (Some(id), None) => {
            let row = checkpoints::find(store, id).await?;
            (row.job.clone(), Some(row))
        }
        (None, Some(id)) => (parse_job_id(id)?, None),
        _ => return Err(Error::invalid("", "give either checkpoint or job")),
    };
    let ownership = store.job_ownership(&job).await?;
    let Some(ownership) = ownership.filter(|ownership| caller.sees_owned(ownership)) else {
        let detail = if named_row.is_some() { "no checkpoint has this id" } else { "no job has this id" };
        return Err(Error::NotFound(detail.into()));
    };
    if !auth.may_change(caller, ownership.owner.as_deref()) {
        let detail = "the job belongs to somebody else; only the owner and admins may register its checkpoints, because a job with \
                      registered versions cannot be deleted";
        return Err(Error::Forbidden(detail.into()));
    }
    match named_row {
        Some(row) => Ok(row),
        None => checkpoints::choose(store.checkpoints(&job).await?, "best"),
    }
}

/// Returns the versions of the programs that wrote a checkpoint, and the dataset's fingerprint at the job's first start.
async fn lineage(
    checkpoints: &Checkpoints,
    row: &CheckpointRow,
) -> Result<(BTreeMap<String, String>, Option<DatasetNote>)> {
    #[derive(Default, Deserialize)]
    struct State {
        #[serde(default)]
        versions: BTreeMap<String, String>,
    }
    // Fields that are missing in the checkpoint are empty in the registered version, too.
    let state = regular_files::read(&checkpoints.folder(row).join(STATE)).await.unwrap_or_default();
    let State { versions } = serde_json::from_slice(&state).unwrap_or_default();
    let job_dir = checkpoints.config.job_dir(&row.job);
    Ok((versions, run_blocking(move || notes::dataset_note(&job_dir)).await?))
}

/// Show a version
#[utoipa::path(get, path = "/models/{name}/versions/{version}", tag = "models", responses((status = 200, body = ModelVersion)))]
pub(crate) async fn show_version(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Path((name, version)): Path<(String, u32)>,
) -> Result<Json<ModelVersion>> {
    Ok(Json(find(&*store, &caller, &name, &Selector::Number(version)).await?))
}

/// Remove a version
///
/// The version's number is not used again. The job keeps the checkpoint.
#[utoipa::path(delete, path = "/models/{name}/versions/{version}", tag = "models",
    responses((status = 204), (status = 409, body = Problem, description = "An alias names the version")))]
pub(crate) async fn remove_version(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Path((name, version)): Path<(String, u32)>,
) -> Result<StatusCode> {
    let found = find(&*store, &caller, &name, &Selector::Number(version)).await?;
    if !found.aliases.is_empty() {
        let detail = format!(
            "the version has the alias {}; move or remove its aliases first",
            found.aliases.join(", ")
        );
        return Err(Error::Conflict(detail));
    }
    store.remove_model_version(&name, version).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Show the version of an alias
#[utoipa::path(get, path = "/models/{name}/aliases/{alias}", tag = "models", responses((status = 200, body = ModelVersion)))]
pub(crate) async fn show_alias(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Path((name, alias)): Path<(String, String)>,
) -> Result<Json<ModelVersion>> {
    Ok(Json(find(&*store, &caller, &name, &Selector::Alias(alias)).await?))
}

/// Move an alias to a version
///
/// The alias is created if it does not exist.
#[utoipa::path(put, path = "/models/{name}/aliases/{alias}", tag = "models", request_body = AliasTarget,
    responses((status = 200, body = ModelVersion)))]
pub(crate) async fn put_alias(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
    Path((name, alias)): Path<(String, String)>,
    Body(AliasTarget { version }, _): Body<AliasTarget>,
) -> Result<(Extension<AuditSubject>, Json<ModelVersion>)> {
    check_field("/alias", alias_mistake(&alias))?;
    let selector = Selector::Number(version);
    find(&*store, &caller, &name, &selector).await?;
    let before = find(&*store, &caller, &name, &Selector::Alias(alias.clone())).await.ok();
    store.set_model_alias(&name, &alias, Some(version)).await?;
    let before = json!({"version": before.map(|before| before.version)});
    let changes = AuditSubject::of_changes(&before, &json!({"version": version}));
    Ok((Extension(changes), Json(find(&*store, &caller, &name, &selector).await?)))
}

/// Remove an alias
#[utoipa::path(delete, path = "/models/{name}/aliases/{alias}", tag = "models", responses((status = 204)))]
pub(crate) async fn remove_alias(
    State(store): State<Arc<dyn Store>>,
    Path((name, alias)): Path<(String, String)>,
) -> Result<StatusCode> {
    store.set_model_alias(&name, &alias, None).await?;
    Ok(StatusCode::NO_CONTENT)
}
