//! Forks: new jobs that continue from a checkpoint of another job with changed settings. The checkpoint's files are checked against the
//! manifest, so that a damaged checkpoint is refused at once, and not after the ranks have waited for slots.

use crate::api::prelude::*;
use crate::{
    api::{
        checkpoints,
        jobs::{
            self, CheckReport, CheckedSpec,
            check::Start,
            fit::{self, TrainingPictures},
            submission,
        },
        run_to_completion,
    },
    auth::Auth,
    checkpoints::{manifest::verify_checkpoint, object_store_fetches},
    http::extract::Body,
    lifecycle::{Fork, external::refuse_external},
    scheduler::{Scheduler, dispatch},
    store::{CheckpointRow, Store, StoreError},
    util::blocking,
};
use axum::{extract::OriginalUri, http::HeaderMap};
use lockstep_protocol::{
    Job, JobId,
    job::Parent,
    reason::{Reason, ReasonKind},
    schedule::{self, Schedule},
    spec::{JobSpec, Recipe, SpecError, ValidationDivision, from_json, key_parts, set_key},
};
use serde_json::Value;
use std::{fs, io, path::Path as FilePath};

/// The checkpoint and the changed settings of a fork.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ForkRequest {
    /// Id of a checkpoint, `best`, `latest` (default), or the number of a step.
    #[schema(value_type = Option<String>)]
    checkpoint: Value,
    /// Keys of the specification with new values, nested (`{"train": {"lr": 0.1}}`) or by path (`{"train.lr": 0.1}`). null resets a key to
    /// its default or to the value of its recipe. With another `data.dataset`, the validation split is chosen again, unless
    /// `data.validation` was given.
    #[schema(value_type = Object)]
    set: serde_json::Map<String, Value>,
}

/// Fork a job
///
/// Makes a new job that continues from a checkpoint of this job. Weights, optimizer state and the position in the data are preserved, even
/// with another number of ranks or another batch size. If the new optimizer has another kind of state (`adamw` after `momentum`), it begins
/// with a fresh state, and the job's log reports this.
#[utoipa::path(post, path = "/jobs/{id}/fork", tag = "jobs", params(("id" = String, Path),
        ("Idempotency-Key" = Option<String>, Header, description = "At most 255 characters, chosen by the client")),
    request_body = ForkRequest,
    responses((status = 201, body = Job, headers(("Location" = String))), (status = 200, body = Job, description = "An earlier identical request has made this job"),
        (status = 409, body = Problem, description = "The job has no such checkpoint"),
        (status = 422, body = Problem, description = "Settings are invalid or do not fit the checkpoint, or the checkpoint is damaged")))]
pub(crate) async fn fork(
    State(scheduler): State<Arc<Scheduler>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    headers: HeaderMap,
    OriginalUri(uri): OriginalUri,
    Body(request, bytes): Body<ForkRequest>,
) -> Result<Response> {
    let key = jobs::idempotency_key(&auth, &caller, &headers, &uri, &bytes)?;
    let (status, job) = match jobs::find_earlier_job(&*scheduler.store, &caller, key.as_ref()).await? {
        Some(job) => (StatusCode::OK, job),
        None => {
            let (parent_job, source, CheckedSpec { spec, warnings, .. }) =
                prepare(&scheduler, &caller, &id, request).await?;
            let making = async move { make(&scheduler, &caller, &parent_job, source, spec, key).await };
            let (status, job) = run_to_completion(making).await?;
            (status, Job { warnings, ..job })
        }
    };
    Ok((status, [(header::LOCATION, format!("/api/v1/jobs/{}", job.id))], Json(job)).into_response())
}

/// Checks a request for a fork. Returns the job, its checkpoint and the fork's checked specification.
///
/// # Errors
/// The request has mistakes (all are returned), or the checkpoint is not available.
async fn prepare(
    scheduler: &Scheduler,
    caller: &Caller,
    id: &str,
    request: ForkRequest,
) -> Result<(Job, CheckpointRow, CheckedSpec)> {
    let parent_job = jobs::find(scheduler, id).await?;
    jobs::check_readable(&parent_job)?;
    refuse_external(&parent_job, "forked").map_err(StoreError::from)?;
    let source = choose(&*scheduler.store, &parent_job, &request.checkpoint).await?;
    checkpoints::ensure_on_disk(&scheduler.checkpoints, &source).await?;
    let mut document = serde_json::to_value(&parent_job.spec)?;
    document["name"] = fork_name(&parent_job.name).into();
    // The fork keeps its parent's tags, and so stays in the same groups.
    document["tags"] = parent_job.tags.clone().into();
    let gives_validation = request.set.contains_key("data.validation")
        || request.set.get("data").is_some_and(|data| data.get("validation").is_some());
    for (path, value) in request.set {
        merge(&mut document, &path, value)?;
    }
    check_recipe(&parent_job, &document)?;
    let pretrained = document.pointer("/model/pretrained").and_then(Value::as_str);
    if pretrained != parent_job.spec.model.pretrained.as_deref() {
        let detail = "must not be changed, because a fork begins with its checkpoint's weights; leave the key out, or submit a new job";
        return Err(Error::invalid("/model/pretrained", detail));
    }
    if !gives_validation {
        choose_validation_again(&*scheduler.store, &parent_job, &mut document).await?;
    }
    let mut checked = jobs::check(scheduler, caller, &document, Start::Checkpoint).await?;
    let CheckedSpec { spec, dataset, .. } = &checked;
    let trained = TrainingPictures::of(&scheduler.checkpoints.folder(&source)).await;
    let mut mistakes = fit::mistakes(trained.as_ref(), &parent_job.spec, spec, dataset);
    let (steps_per_epoch, total_steps) = step_counts(&parent_job, &checked);
    let (step, new_step) =
        (source.info.step, renumbered_step(&parent_job, source.info.step, spec, steps_per_epoch));
    if new_step >= total_steps {
        let pointer = if spec.train.steps.is_some() { "/train/steps" } else { "/train/epochs" };
        let renumbered = if new_step == step {
            String::new()
        } else {
            format!(", which counts as step {new_step} of the fork,")
        };
        let detail = format!(
            "the checkpoint is of step {step}{renumbered} and the training ends at step {total_steps}: no steps are left; set a larger \
             number"
        );
        mistakes.push(SpecError { pointer: pointer.into(), detail });
    }
    mistakes.extend(early_stop_mistake(&parent_job, &source, spec));
    check_mistakes(mistakes)?;
    let old_schedule =
        Schedule::new(&parent_job.spec.train, parent_job.steps_per_epoch, parent_job.total_steps);
    let new_schedule = Schedule::new(&spec.train, steps_per_epoch, total_steps);
    let schedule_warning = schedule::describe_change(&old_schedule, step, &new_schedule, new_step);
    let warnings = [schedule_warning, validation_warning("the parent", &parent_job.spec, spec)];
    checked.warnings.extend(warnings.into_iter().flatten());
    Ok((parent_job, source, checked))
}

/// Returns the mistake if the section `stop` ended the parent at this checkpoint, and would end the fork there, too.
fn early_stop_mistake(parent_job: &Job, source: &CheckpointRow, spec: &JobSpec) -> Option<SpecError> {
    let parent_spec = &parent_job.spec;
    let Some(ReasonKind::StoppedEarly { step, .. }) = parent_job.cause.as_ref().map(Reason::kind) else {
        return None;
    };
    let has_same_metric = spec.stop.metric == parent_spec.stop.metric
        && ValidationDivision::of(&spec.data) == ValidationDivision::of(&parent_spec.data);
    let would_stop =
        has_same_metric && *step == source.info.step && spec.stop.patience? <= parent_spec.stop.patience?;
    let detail = "the job stopped early at this checkpoint, and the fork would stop there, too: set a larger stop.patience, or remove it";
    would_stop.then(|| SpecError { pointer: "/stop/patience".into(), detail: detail.into() })
}

/// Returns the number of steps in an epoch, and in the whole run. With the same pictures and global batch size, an epoch has the number of
/// steps that the parent's ranks have counted.
fn step_counts(parent_job: &Job, CheckedSpec { spec, dataset, .. }: &CheckedSpec) -> (u64, u64) {
    let parent_spec = &parent_job.spec;
    let is_counted = parent_job.steps_per_epoch > 0
        && ValidationDivision::of(&parent_spec.data) == ValidationDivision::of(&spec.data)
        && parent_spec.data.drop_remainder == spec.data.drop_remainder
        && parent_spec.global_batch_size() == spec.global_batch_size();
    let samples = jobs::training_samples(spec, dataset);
    let steps_per_epoch = if is_counted { parent_job.steps_per_epoch } else { spec.steps_per_epoch(samples) };
    let epochs = u64::from(spec.train.epochs());
    (steps_per_epoch, spec.train.steps.unwrap_or(steps_per_epoch * epochs))
}

/// Returns the fork's step at the position in the data of the parent's step `step`, as the ranks compute it.
fn renumbered_step(parent_job: &Job, step: u64, spec: &JobSpec, steps_per_epoch: u64) -> u64 {
    let (old_steps, old_batch) = (parent_job.steps_per_epoch, parent_job.spec.global_batch_size());
    let is_same = (old_steps, old_batch) == (steps_per_epoch, spec.global_batch_size());
    // A parent that never ran has not counted its steps.
    let Some(epoch) = step.checked_div(old_steps).filter(|_| !is_same) else { return step };
    let step_in_epoch = step % old_steps * old_batch / spec.global_batch_size().max(1);
    epoch * steps_per_epoch + step_in_epoch.min(steps_per_epoch.saturating_sub(1))
}

/// Returns a warning if the validation pictures of a job with the weights of an earlier one may include pictures that the earlier one
/// trained on. `earlier`: `the parent`, for example.
pub(in crate::api) fn validation_warning(
    earlier: &str,
    earlier_spec: &JobSpec,
    spec: &JobSpec,
) -> Option<String> {
    let (old, new) = (ValidationDivision::of(&earlier_spec.data), ValidationDivision::of(&spec.data));
    (new.holds_out() && old.dataset == new.dataset && old != new).then(|| {
        format!(
            "data.validation, data.validation_seed or data.fold is not as in {earlier}: the job is validated on pictures that {earlier} \
             trained on, so its accuracy says less about new pictures. The job's log has the number of these pictures"
        )
    })
}

/// Check a fork without making it
///
/// Returns the report on the fork's specification. Warnings say whether the schedule of the learning rate changes, and whether the fork's
/// validation pictures include pictures that the job has trained on.
#[utoipa::path(post, path = "/jobs/{id}/fork/check", tag = "jobs", request_body = ForkRequest,
    responses((status = 200, body = CheckReport), (status = 409, body = Problem, description = "The job has no such checkpoint")))]
pub(crate) async fn check(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Body(request, _): Body<ForkRequest>,
) -> Result<Json<CheckReport>> {
    let (_, _, checked) = prepare(&scheduler, &caller, &id, request).await?;
    Ok(Json(checked.report()))
}

/// Stores the new job with the checkpoint in its folder.
async fn make(
    scheduler: &Scheduler,
    caller: &Caller,
    parent_job: &Job,
    source: CheckpointRow,
    mut spec: JobSpec,
    key: Option<jobs::IdempotencyKey>,
) -> Result<(StatusCode, Job)> {
    // Other people may see the fork but not its parent, so the fork must not show the parent's name and tags.
    let hides_parent = parent_job.spec.private && !spec.private;
    if hides_parent {
        if spec.name == fork_name(&parent_job.name) {
            "fork".clone_into(&mut spec.name);
        }
        if spec.tags == parent_job.tags {
            spec.tags.clear();
        }
        // The key has no effect on a fork. It is cleared if it names a checkpoint, whose job may be private, too.
        spec.model.pretrained.take_if(|given| dispatch::is_checkpoint_id(given));
    }
    let fork_id = JobId::generate();
    let source_folder = scheduler.checkpoints.folder(&source);
    let target_folder = scheduler.config.job_dir(&fork_id).join("checkpoints");
    let name = format!("{}-{}", source.info.epoch, source.info.step);
    let copy_checkpoint = async || {
        let (source_folder, target_folder, name) =
            (source_folder.clone(), target_folder.clone(), name.clone());
        blocking(move || copy(&source_folder, &target_folder, &name)).await
    };
    let mut copied = copy_checkpoint().await;
    // The object store may have an undamaged copy.
    if matches!(&copied, Err(error) if error.kind() == io::ErrorKind::InvalidData)
        && let copies = scheduler.checkpoints.copies_of(&source).await?
        && let Some((fetch, _)) = object_store_fetches::check(&scheduler.checkpoints, &source, &copies, None)
    {
        let _ = tokio::fs::remove_dir_all(scheduler.config.job_dir(&fork_id)).await;
        checkpoints::await_fetch(&scheduler.config, &source, fetch).await?;
        copied = copy_checkpoint().await;
    }
    if let Err(error) = copied {
        let _ = tokio::fs::remove_dir_all(scheduler.config.job_dir(&fork_id)).await;
        if error.kind() == io::ErrorKind::InvalidData {
            let which = format_args!("checkpoint {}", source.id);
            return Err(checkpoints::damaged_error(which, &error.to_string()));
        }
        if error.kind() == io::ErrorKind::NotFound && !scheduler.checkpoints.folder(&source).exists() {
            return Err(checkpoints::removed_error());
        }
        return Err(Error::Unavailable(format!("checkpoint {} cannot be copied: {error}", source.id)));
    }
    let parent = Parent { job: parent_job.id.to_string(), checkpoint: source.id.clone() };
    // Everybody who sees the fork can read the reason.
    let unless_hidden = |text: &str| (!hides_parent).then(|| text.into());
    let reason = ReasonKind::Forked {
        step: source.info.step,
        job: unless_hidden(&parent.job),
        checkpoint: unless_hidden(&parent.checkpoint),
        detail: unless_hidden(&parent_job.name),
    }
    .into();
    let checkpoint = lockstep_protocol::agent::CheckpointInfo { best: false, ..source.info };
    let fork = Fork { reason, parent, hides_parent, checkpoint };
    let created = jobs::store_job(scheduler, caller, fork_id, spec, key, Some(fork)).await?;
    // Updates open pages of the parent. A failure does not undo the fork.
    if let Err(error) = scheduler.events.hub.send_labels(jobs::find(scheduler, parent_job.id.as_str())).await
    {
        tracing::debug!(?error, "the pages of a fork's parent were not notified");
    }
    Ok(created)
}

/// Refuses another recipe, which would have no effect because every key already has a value.
fn check_recipe(parent_job: &Job, document: &Value) -> Result<()> {
    let recipe = document.pointer("/train/recipe").and_then(Value::as_str);
    if recipe.is_none() || recipe == parent_job.spec.train.recipe.map(Recipe::as_str) {
        return Ok(());
    }
    let detail = "must not be changed, because a fork keeps the values of all its parent's settings; set the keys that should differ";
    Err(Error::invalid("/train/recipe", detail))
}

/// For another dataset, removes the parent's validation split from the document, so that a split is chosen as for a new job. A split that
/// the parent's user gave stays. A stored specification does not show whether the split was given, so a split that equals the automatic
/// choice is removed.
async fn choose_validation_again(store: &dyn Store, parent_job: &Job, document: &mut Value) -> Result<()> {
    let mut before = serde_json::to_value(&parent_job.spec)?;
    if document.pointer("/data/dataset") == before.pointer("/data/dataset") {
        return Ok(());
    }
    // If the parent's dataset is no longer registered, its splits are unknown.
    let Some(dataset) = store.dataset(&parent_job.spec.data.dataset).await? else { return Ok(()) };
    remove_validation(&mut before);
    let Ok(mut chosen) = from_json(&before) else { return Ok(()) };
    submission::choose_validation(&mut chosen, &dataset);
    if chosen.data.validation == parent_job.spec.data.validation {
        remove_validation(document);
    }
    Ok(())
}

fn remove_validation(document: &mut Value) {
    if let Some(data) = document.get_mut("data").and_then(Value::as_object_mut) {
        data.remove("validation");
    }
}

/// Returns the default name of a fork of the job `name`. The result is shorter than 200 characters, the maximum of a name.
fn fork_name(name: &str) -> String {
    let mut short = name.to_owned();
    short.truncate(short.floor_char_boundary(190));
    format!("{short} (fork)")
}

/// Sets the value at a path of keys. A table is merged into the existing table.
fn merge(document: &mut Value, path: &str, value: Value) -> Result<()> {
    let mistake = |detail: String| Error::invalid("/set", detail);
    // Checked before nested tables are entered, because this limits the depth and the length of the path.
    key_parts(path).map_err(mistake)?;
    if let Value::Object(inner) = value {
        for (key, value) in inner {
            merge(document, &format!("{path}.{key}"), value)?;
        }
        return Ok(());
    }
    // Parses paths in the same way as the command line.
    set_key(document, path, value).map_err(mistake)?;
    // These keys exclude each other, so a new value removes the other key.
    let (table, other) = match path {
        "train.batch_size" => ("train", "global_batch_size"),
        "train.global_batch_size" => ("train", "batch_size"),
        "train.epochs" => ("train", "steps"),
        "train.steps" => ("train", "epochs"),
        "checkpoint.every_steps" => ("checkpoint", "every_epochs"),
        "checkpoint.every_epochs" => ("checkpoint", "every_steps"),
        _ => return Ok(()),
    };
    if let Some(table) = document.get_mut(table).and_then(Value::as_object_mut) {
        table.remove(other);
    }
    Ok(())
}

/// Finds the checkpoint that a request for a fork of `job` names.
async fn choose(store: &dyn Store, job: &Job, requested: &Value) -> Result<CheckpointRow> {
    let rows = store.checkpoints(&job.id).await?;
    let text = match requested {
        Value::Null => "latest".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(step) => step.to_string(),
        _ => return Err(Error::BadRequest("checkpoint must be an id, best, latest or a step".into())),
    };
    checkpoints::find_named(&rows, &text).cloned().ok_or_else(|| {
        let steps: Vec<_> = rows.iter().map(|row| row.info.step.to_string()).collect();
        let existing = if steps.is_empty() {
            "it has no checkpoint yet".into()
        } else {
            format!("it has checkpoints of the steps {}", steps.join(", "))
        };
        Error::WrongState(format!("the job has no checkpoint {text}; {existing}"), job.state)
    })
}

/// Copies the files of a checkpoint atomically into a new folder `name` in `target_folder`, by hard links, or by copies if that folder is
/// on another disk. Links are safe because the files never change, and the links remain if the original checkpoint is deleted.
fn copy(source_folder: &FilePath, target_folder: &FilePath, name: &str) -> io::Result<()> {
    let temporary = target_folder.join(format!(".tmp-{name}"));
    fs::create_dir_all(&temporary)?;
    for entry in fs::read_dir(source_folder)? {
        let entry = entry?;
        if !fs::metadata(entry.path())?.is_file() {
            let detail = format!("its {} is not a regular file", entry.file_name().to_string_lossy());
            return Err(io::Error::other(detail));
        }
        let target = temporary.join(entry.file_name());
        if fs::hard_link(entry.path(), &target).is_err() {
            fs::copy(entry.path(), &target)?;
            fs::File::open(&target)?.sync_all()?;
        }
    }
    verify_checkpoint(&temporary)?;
    fs::File::open(&temporary)?.sync_all()?;
    fs::rename(&temporary, target_folder.join(name))?;
    fs::File::open(target_folder)?.sync_all()
}
