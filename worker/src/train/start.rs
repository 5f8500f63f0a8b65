//! The initial state of a run: new weights, given weights, or a checkpoint. Rank 0 reads files and sends their
//! content to the other ranks, which need not have the files.

use super::{TrainError, Training, plan::RunPlan, pretrained, replicas::compare_replicas};
use crate::{
    checkpoint::{self, Best, CheckpointError, OWN_DISK_NOTE, State, StopProgress},
    precision::SkippedSteps,
};
use lockstep_comm::ProcessGroup;
use lockstep_data::{
    DataError,
    held_out::foreign_divisions,
    loader::{DataSource, Shape},
};
use lockstep_engine::{
    Distribution, Engine, OptimizerState, StateDict,
    net::{self, whitening::Patches},
    plan::Plan,
    slots,
};
use lockstep_host::tensors::{
    HostTensor, NamedTensors,
    fit::{Shapes, compare, shapes},
};
use lockstep_protocol::{
    agent::AttemptEvent,
    dataset::classes_differ,
    inspect::TRAINED_VALIDATION,
    numbers::plural,
    schedule::{self, Schedule},
    spec::{BrokenFiles, Precision, ValidationDivision, read_leniently},
};
use serde::{Serialize, de::DeserializeOwned};
use std::path::{Path, PathBuf};

/// Maximum number of pictures whose patches determine the filters of a whitening convolution.
const MAX_WHITENING_PICTURES: u64 = 2000;

/// A checkpoint from which a run continues, and its folder.
pub(super) type NewestCheckpoint = (PathBuf, checkpoint::LoadedCheckpoint);

/// The state in which a run begins.
#[derive(Default)]
pub(super) struct InitialState {
    /// Number of optimizer steps done by earlier runs.
    pub(super) step: u64,
    pub(super) best: Option<Best>,
    pub(super) stop_progress: Option<StopProgress>,
    pub(super) skipped: SkippedSteps,
    /// Whether the checkpoint's step was not evaluated, because the earlier run stopped first.
    pub(super) is_evaluation_missing: bool,
    /// How this run, and the runs from which it continues, divided pictures into training and validation.
    pub(super) validation_divisions: Vec<ValidationDivision>,
    /// Lines for the log.
    pub(super) notes: Vec<String>,
}

/// Collective: chooses the floating-point format of the run. If `precision = "auto"`, a run that has changed from float16 to
/// bfloat16 continues in bfloat16.
pub(super) fn choose_precision(training: &Training<'_>) -> Result<Precision, TrainError> {
    let requested = training.spec.train.precision;
    let Some(folder) = training.resume else { return Ok(requested) };
    if requested != Precision::Auto || !training.device.backend.needs().half_precision {
        return Ok(requested);
    }
    // The newest readable state. A damaged checkpoint is set aside later, and the previous checkpoint is used.
    let newest = || {
        let older = checkpoint::list(training.checkpoints).ok()?.into_iter().rev();
        let folders =
            older.map(|(epoch, step)| training.checkpoints.join(checkpoint::folder_name(epoch, step)));
        std::iter::once(folder.to_path_buf())
            .chain(folders)
            .find_map(|folder| Some(checkpoint::unverified_state(&folder)?.precision))
    };
    let has_left_float16 = training.is_first().then(|| newest() == Some(Precision::Bf16));
    Ok(if broadcast_json(training.group.as_ref(), has_left_float16)? { Precision::Bf16 } else { requested })
}

/// Sets the engine's initial state: new weights, pretrained weights, or a checkpoint, which rank 0 has `loaded`. If the network is split
/// among ranks, each rank gets its part. Otherwise, all ranks get the same weights.
pub(super) fn initialize(
    training: &Training<'_>,
    plan: &RunPlan,
    data: &DataSource,
    engine: &mut dyn Engine,
    loaded: Option<NewestCheckpoint>,
) -> Result<InitialState, TrainError> {
    if let Some(folder) = training.resume {
        return resume(training, plan, data, engine, folder, loaded);
    }
    let pretrained = training.spec.model.pretrained.as_deref();
    let path = pretrained.filter(|_| training.is_first()).map(pretrained::find).transpose()?;
    let mut notes = Vec::new();
    if pretrained.is_some() {
        let mut weights = None;
        if let Some(path) = &path {
            let (zero_init_residual, seed) =
                (training.spec.model.zero_init_residual, training.spec.train.seed);
            let initial = net::init::initial_parameters(&plan.network, zero_init_residual, seed);
            let (found, found_notes) = pretrained::load(training, path, initial, plan.network.head())?;
            (weights, notes) = (Some(found), found_notes);
        }
        // If the network is split among ranks, each sets its part of the weights here. Otherwise, the ranks receive the
        // weights below.
        if training.spec.parallel.is_hybrid() {
            let distribution = distribution(training, plan)?;
            let own = distribution.scatter(weights, distribution.shapes())?;
            engine.set_parameters(&own)?;
        } else if let Some(weights) = weights {
            engine.set_parameters(&weights)?;
        }
    }

    let whitened = net::whitening::whitened_parameter(&plan.network).filter(|_| pretrained.is_none());
    if let Some(name) = whitened
        && training.is_first()
    {
        let mut weights = engine.parameters()?;
        let skips_broken = training.spec.data.broken_files == BrokenFiles::Skip;
        weights.insert(name.into(), whitening_filters(data, skips_broken)?);
        engine.set_parameters(&weights)?;
    }

    let parallel = &training.spec.parallel;
    let needs_broadcast = match pretrained {
        // The ranks have set their parts of the same weights above.
        Some(_) => !parallel.is_hybrid(),
        None if whitened.is_some() => true,
        // Every rank draws the same weights, unless the ranks' programs differ. A comparison is faster than sending a wide head.
        None if parallel.parameter_broadcast => {
            let differences = compare_replicas(training, engine)?;
            training
                .log(differences.iter().map(|what| format!("{what}: rank 0 sends its weights to all ranks")));
            differences.is_some()
        }
        None => false,
    };
    if needs_broadcast {
        engine.broadcast_parameters()?;
    }

    let mut divisions = Vec::new();
    if pretrained.is_some() {
        // A checkpoint of Lockstep records the pictures on which it was trained.
        let found = path.map(|path| {
            let folder = if path.is_dir() { Some(path.as_path()) } else { path.parent() };
            folder.and_then(checkpoint::unverified_state).map(|state| state.divisions)
        });
        divisions = broadcast_json(training.group.as_ref(), found.map(Option::unwrap_or_default))?;
        notes.extend(describe_trained_validation(training, data, &divisions));
    }
    let validation_divisions = add_own_division(divisions, training);
    Ok(InitialState { validation_divisions, notes, ..InitialState::default() })
}

/// Filters that whiten patches of at most [`MAX_WHITENING_PICTURES`] training pictures, spread over the split. If `skips_broken`,
/// pictures that can no longer be read are left out.
fn whitening_filters(data: &DataSource, skips_broken: bool) -> Result<HostTensor, TrainError> {
    let Shape { channels, train_samples, mean, std, .. } = &data.shape;
    let count = (*train_samples).min(MAX_WHITENING_PICTURES);
    let mut patches = None;
    let (is_validation, epoch) = (false, None);
    for index in 0..count {
        let position = data.training_position(index * train_samples / count);
        let (_, picture) = match data.picture(is_validation, position, epoch) {
            Err(DataError::File { .. }) if skips_broken => continue,
            labelled => labelled?,
        };
        let values: Vec<f32> = picture
            .pixels
            .iter()
            .enumerate()
            .map(|(i, byte)| (f32::from(*byte) / 255.0 - mean[i % channels]) / std[i % channels])
            .collect();
        patches.get_or_insert_with(|| Patches::new(picture.width as usize, *channels)).add(&values);
    }
    Ok(patches.unwrap_or_else(|| Patches::new(0, *channels)).filters())
}

/// The divisions by which a run has trained, including its own.
fn add_own_division(
    mut divisions: Vec<ValidationDivision>,
    training: &Training<'_>,
) -> Vec<ValidationDivision> {
    let own = ValidationDivision::of(&training.spec.data);
    if !divisions.contains(&own) {
        divisions.push(own);
    }
    divisions
}

fn resume(
    training: &Training<'_>,
    plan: &RunPlan,
    data: &DataSource,
    engine: &mut dyn Engine,
    folder: &Path,
    loaded: Option<NewestCheckpoint>,
) -> Result<InitialState, TrainError> {
    let shape = &data.shape;
    let group = training.group.as_ref();
    let distribution = distribution(training, plan)?;
    let (mut state, mut parameters, mut optimizer, mut average) = (None, None, None, None);
    if let Some((path, loaded)) = loaded {
        check_compatible(training, &path, &shape.classes, &loaded.parameters, &distribution.shapes())?;
        if training.spec.train.ema_decay > 0.0 {
            average = checkpoint::load_average(&path)?;
        }
        (state, parameters, optimizer) =
            (Some(loaded.state), Some(loaded.parameters), Some(loaded.optimizer));
    }
    let state: State = broadcast_json(group, state)?;
    let parameters = scatter(&distribution, "weights", parameters, distribution.shapes())?;
    let saved_optimizer = state.optimizer;
    let kind = training.spec.train.optimizer;
    let keeps_optimizer = slots(saved_optimizer.kind) == slots(kind);
    let optimizer = if keeps_optimizer {
        let shapes = distribution.slot_shapes(&plan.config.optimizer);
        let slots = scatter(&distribution, "optimizer state", optimizer, shapes)?;
        Some(OptimizerState { slots, updates: saved_optimizer.updates })
    } else {
        None
    };
    // Only rank 0 has the average. If the network is split among ranks, each has the average of its part.
    if training.spec.parallel.is_hybrid()
        && broadcast_json(group, training.is_first().then_some(average.is_some()))?
    {
        let part = scatter(&distribution, "average of the weights", average, distribution.shapes())?;
        average = Some(part);
    }
    let loaded = StateDict { parameters, optimizer, average, loss_scaling: state.loss_scaling };
    // Ranks may share the memory of the weights, so all must have read the old weights before they change.
    group.barrier()?;
    engine.load_state_dict(&loaded)?;
    // No rank may use the new weights before rank 0 has written them.
    group.barrier()?;

    let step = if state.global_batch_size == plan.global_batch_size
        && state.steps_per_epoch == plan.steps_per_epoch
    {
        state.step
    } else {
        // The batch size has changed, so the run continues at the step with the same position in the data.
        let position = state.data_position;
        let step_in_epoch = position.samples_in_epoch / plan.global_batch_size;
        u64::from(position.epoch) * plan.steps_per_epoch + step_in_epoch.min(plan.steps_per_epoch - 1)
    };
    if step > plan.total_steps {
        return Err(TrainError::Impossible(format!(
            "checkpoint {} is of step {step}{} and the training ends at step {}: nothing is left to do; increase train.epochs \
             (or train.steps)",
            checkpoint::folder_name(state.epoch, state.step),
            if step == state.step {
                String::new()
            } else {
                format!(" ({})", describe_renumbering(&state, plan, step))
            },
            plan.total_steps
        )));
    }

    let mut notes = Vec::new();
    if step == plan.total_steps {
        notes.push("the checkpoint is of the last step: nothing is left to train".into());
    }
    notes.push(format!(
        "continuing from checkpoint {} at step {step}",
        checkpoint::folder_name(state.epoch, state.step)
    ));
    notes.extend(describe_validation_change(training, data, &state));
    if state.random_state.seed != training.spec.train.seed {
        notes.push(
            "train.seed differs from the checkpoint's: the order of the pictures changes at this step".into(),
        );
    }
    if !keeps_optimizer {
        notes.push(format!(
            "train.optimizer is {} and was {}, whose state is different: the optimizer's state starts again at zero",
            kind.as_str(),
            saved_optimizer.kind.as_str()
        ));
    }
    if step != state.step {
        notes.push(describe_renumbering(&state, plan, step));
    }
    if training.is_first() {
        notes.extend(describe_schedule_change(training, &state, folder, plan, step));
    }

    // If this machine has its own disk, the best checkpoint may be only on the server.
    let is_own_disk = training.checkpoints.parent().is_some_and(|job| job.join(OWN_DISK_NOTE).exists());
    let best = state.best.filter(|best| {
        let name = checkpoint::folder_name(best.epoch, best.step);
        let exists = is_own_disk || training.checkpoints.join(name).exists();
        // A best value for other pictures is not comparable.
        best.metric == training.spec.checkpoint.keep_best && exists && state.validation == shape.validation
    });
    let stop_progress = state.stop.filter(|progress| {
        progress.metric == training.spec.stop.metric && state.validation == shape.validation
    });
    let validation_divisions = add_own_division(state.divisions, training);
    let mut skipped = state.skipped_steps;
    if step != state.step {
        // The recorded step numbers belong to another batch size.
        skipped.recent.clear();
    }
    let is_evaluation_missing = step == state.step && state.val_accuracy.is_none();
    Ok(InitialState {
        step,
        best,
        stop_progress,
        skipped,
        is_evaluation_missing,
        validation_divisions,
        notes,
    })
}

/// Why the checkpoint's step has another number in this run. The position in the data is the same.
fn describe_renumbering(state: &State, plan: &RunPlan, step: u64) -> String {
    let mut why = Vec::new();
    if state.global_batch_size != plan.global_batch_size {
        why.push(format!(
            "a step uses {} pictures now and used {}",
            plan.global_batch_size, state.global_batch_size
        ));
    }
    if state.steps_per_epoch != plan.steps_per_epoch {
        let steps = plural(plan.steps_per_epoch, "step");
        why.push(format!("an epoch has {steps} now and had {}", state.steps_per_epoch));
    }
    format!(
        "{}: step {} counts as {step}, the same position in epoch {}",
        why.join(", "),
        state.step,
        state.epoch
    )
}

/// A log line about the learning rate. `None` if it continues as in the checkpoint's run.
fn describe_schedule_change(
    training: &Training<'_>,
    state: &State,
    folder: &Path,
    plan: &RunPlan,
    step: u64,
) -> Option<String> {
    let metadata = checkpoint::folder_metadata(folder).ok()?;
    let (old_spec, _) = read_leniently(&serde_json::from_str(metadata.get("spec")?).ok()?);
    let epochs = u64::from(old_spec.train.epochs());
    let total = old_spec.train.steps.unwrap_or(state.steps_per_epoch * epochs);
    let old = Schedule::new(&old_spec.train, state.steps_per_epoch, total);
    let new = Schedule::new(&training.spec.train, plan.steps_per_epoch, plan.total_steps);
    schedule::describe_change(&old, state.step, &new, step)
}

/// Log lines for a run that is validated with other pictures than the checkpoint: both sets of pictures, and on how many of the
/// new pictures the checkpoint was trained. Empty if the pictures are the same.
fn describe_validation_change(training: &Training<'_>, data: &DataSource, state: &State) -> Vec<String> {
    let (now, before) = (data.shape.validation.as_ref(), state.validation.as_ref());
    let Some(now) = now.filter(|now| before != Some(*now)) else { return Vec::new() };
    let previous = before
        .map_or("none".into(), |before| format!("{} (fingerprint {})", before.pictures, before.fingerprint));
    let differ = format!(
        "this run is validated with other pictures than the checkpoint: {} (fingerprint {}), previously {previous}. Do not compare \
         accuracies before and after this step",
        now.pictures, now.fingerprint
    );
    std::iter::once(differ).chain(describe_trained_validation(training, data, &state.divisions)).collect()
}

/// A log line about how many validation pictures the initial weights were trained on, according to the `divisions` of
/// earlier runs.
fn describe_trained_validation(
    training: &Training<'_>,
    data: &DataSource,
    divisions: &[ValidationDivision],
) -> Option<String> {
    let count = data.count_trained_on(&foreign_divisions(divisions, &training.spec.data));
    (count > 0).then(|| {
        format!(
            "{count} of the {} {TRAINED_VALIDATION}: their accuracy does not show how well \
             the model handles new pictures",
            plural(data.shape.validation_samples, "validation picture")
        )
    })
}

/// Loads the checkpoint in `folder`, or the newest complete checkpoint before it. A damaged checkpoint is set aside and
/// reported. If no checkpoint is left, the run fails, because the user must decide whether to start again.
pub(super) fn load_newest_valid(
    training: &Training<'_>,
    folder: &Path,
) -> Result<NewestCheckpoint, TrainError> {
    let requested = folder.file_name().and_then(|n| n.to_str()).and_then(checkpoint::parse_folder_name);
    let Some((epoch, step)) = requested.filter(|_| folder.parent() == Some(training.checkpoints)) else {
        // The user's own folder, given on the command line.
        return Ok((folder.into(), checkpoint::load(folder)?));
    };
    let mut candidates = vec![(epoch, step)];
    let older = checkpoint::list(training.checkpoints)?;
    candidates.extend(older.into_iter().rev().filter(|(e, s)| (*s, *e) < (step, epoch)));
    let mut damage = Vec::new();
    for (epoch, step) in candidates {
        let path = training.checkpoints.join(checkpoint::folder_name(epoch, step));
        match checkpoint::load(&path) {
            Ok(loaded) => return Ok((path, loaded)),
            // The checkpoint may be intact. Another attempt reads it again.
            Err(error @ CheckpointError::Io { .. }) => return Err(error.into()),
            Err(error) => {
                let observer = training.observer;
                let is_here = path.exists();
                let aside = if is_here { "it is set aside and " } else { "" };
                observer.log(&format!("{error}; {aside}the previous checkpoint is used"));
                if is_here {
                    checkpoint::set_aside(&path)?;
                }
                observer.event(&AttemptEvent::CheckpointRemoved { epoch, step });
                damage.push(error.to_string());
            }
        }
    }
    Err(TrainError::Impossible(format!(
        "no valid checkpoint is left to continue from ({}); if a backup has its files, put them back and start again; otherwise begin a new \
         run from the start",
        damage.join("; ")
    )))
}

/// Checks that a complete checkpoint belongs to this job's network, and to the classes of its dataset.
fn check_compatible(
    training: &Training<'_>,
    folder: &Path,
    classes: &[String],
    given: &NamedTensors,
    own: &Shapes,
) -> Result<(), TrainError> {
    let refuse = |text: String| {
        let arch = training.spec.model.arch.as_str();
        Err(TrainError::Impossible(format!(
            "checkpoint {} does not fit this job ({arch}, dataset {}): {text}. To train another network or dataset from \
             its weights, begin a new job with model.pretrained",
            folder.display(),
            training.spec.data.dataset
        )))
    };
    // Comparing tensors is not enough, because another dataset may have the same number of classes. Not every file
    // contains class names.
    if let Ok(metadata) = checkpoint::folder_metadata(folder)
        && let Some(text) = metadata.get("classes")
        && let Ok(trained) = serde_json::from_str::<Vec<String>>(text)
        && let Some(difference) = classes_differ(&trained, classes)
    {
        return refuse(difference);
    }
    compare(&shapes(given), own, None).map_or_else(refuse, |_| Ok(()))
}

/// How the ranks share the tensors of the network.
fn distribution<'a>(training: &'a Training<'_>, plan: &'a RunPlan) -> Result<Distribution<'a>, TrainError> {
    Ok(Distribution::new(&plan.network, &Plan::of(&training.spec.parallel), training.group.as_ref())?)
}

/// Sends each rank its parts of the tensors that rank 0 has loaded. The tensors must have the `expected` names and shapes.
/// `what` names the tensors in the error.
fn scatter(
    distribution: &Distribution<'_>,
    what: &str,
    loaded: Option<NamedTensors>,
    expected: Shapes,
) -> Result<NamedTensors, TrainError> {
    if loaded.as_ref().is_some_and(|loaded| shapes(loaded) != expected) {
        return Err(TrainError::Impossible(format!(
            "the {what} of the checkpoint does not fit this network"
        )));
    }
    Ok(distribution.scatter(loaded, expected)?)
}

/// Sends rank 0's `value` to every rank, as JSON. On the other ranks, `value` is `None`.
pub(super) fn broadcast_json<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    value: Option<T>,
) -> Result<T, TrainError> {
    let mut json = match &value {
        Some(value) => serde_json::to_vec(value).map_err(std::io::Error::from)?,
        None => Vec::new(),
    };
    let mut length = [json.len() as f64];
    group.broadcast((&mut length).into())?;
    json.resize(length[0] as usize, 0);
    group.broadcast((&mut json).into())?;
    Ok(serde_json::from_slice(&json).map_err(std::io::Error::from)?)
}
