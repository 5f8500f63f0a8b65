//! Where a run begins: fresh weights, given weights, or a checkpoint. Rank 0 reads files and sends their content, so the others
//! need not have them.

use super::{TrainError, Training, pretrained, setup::Plan};
use crate::{
    checkpoint::{self, Best, CheckpointError, OWN_DISK_NOTE, OptimizerNote, State},
    comm::{ProcessGroup, Reduction},
    data::loader::Shape,
    engine::{Engine, NamedTensors, OptimizerState, StateDict, slots},
    net,
    precision::SkippedSteps,
    tensors::fit::{compare, shapes},
};
use lockstep_protocol::{
    agent::AttemptEvent,
    dataset::classes_differ,
    spec::{OptimizerKind, Precision},
};
use std::path::{Path, PathBuf};

pub(super) struct InitialState {
    /// Optimizer steps done before.
    pub(super) step: u64,
    pub(super) best: Option<Best>,
    pub(super) skipped: SkippedSteps,
    /// The step has no evaluation yet: the earlier run was stopped before it.
    pub(super) unmeasured: bool,
}

/// With `precision = "auto"`, the number format that the checkpoint's run used last: a run that has left float16 does not return to
/// it. The same on every rank.
pub(super) fn precision(training: &Training<'_>) -> Result<Option<Precision>, TrainError> {
    let Some(folder) = training.resume else { return Ok(None) };
    if training.spec.train.precision != Precision::Auto || !training.device.backend.needs().half_precision {
        return Ok(None);
    }
    // The newest that can be read: a damaged one will be set aside for the one before it.
    let newest = || {
        let older = checkpoint::list(training.checkpoints).ok()?.into_iter().rev();
        let folders =
            older.map(|(epoch, step)| training.checkpoints.join(checkpoint::folder_name(epoch, step)));
        std::iter::once(folder.to_path_buf()).chain(folders).find_map(|folder| checkpoint::precision(&folder))
    };
    let left_float16 = training.group.rank() == 0 && newest() == Some(Precision::Bf16);
    let mut votes = [f64::from(u8::from(left_float16))];
    training.group.all_reduce((&mut votes).into(), Reduction::Sum)?;
    Ok((votes != [0.0]).then_some(Precision::Bf16))
}

/// Sets the engine's weights; the same on every rank afterwards.
pub(super) fn begin(
    training: &Training<'_>,
    plan: &Plan,
    shape: &Shape,
    engine: &mut dyn Engine,
) -> Result<InitialState, TrainError> {
    if let Some(folder) = training.resume {
        return resume(training, plan, &shape.classes, engine, folder);
    }
    let pretrained = training.spec.model.pretrained.as_deref();
    if let Some(path) = pretrained
        && training.group.rank() == 0
    {
        let network = net::build(&training.spec.model, shape.image_size, shape.channels, shape.classes.len())
            .map_err(TrainError::Impossible)?;
        let weights = pretrained::weights(training, Path::new(path), engine.parameters()?, network.head())?;
        engine.set_parameters(&weights)?;
    }
    if pretrained.is_some() || training.spec.parallel.parameter_broadcast {
        engine.broadcast_parameters()?;
    }
    Ok(InitialState { step: 0, best: None, skipped: SkippedSteps::default(), unmeasured: false })
}

fn resume(
    training: &Training<'_>,
    plan: &Plan,
    classes: &[String],
    engine: &mut dyn Engine,
    folder: &Path,
) -> Result<InitialState, TrainError> {
    let group = training.group.as_ref();
    let loaded = if group.rank() == 0 { Some(newest_whole(training, folder)?) } else { None };
    let (state, parameters, optimizer, average) = match loaded {
        Some((place, (state, parameters, optimizer))) => {
            fits(training, &place, classes, &parameters, &engine.parameters()?)?;
            // Rank 0 alone keeps it.
            let average = match training.spec.train.ema_decay > 0.0 {
                true => checkpoint::load_average(&place)?,
                false => None,
            };
            (Some(state), Some(parameters), Some(optimizer), average)
        }
        None => (None, None, None, None),
    };
    let state = shared_state(group, state)?;
    let parameters = shared(group, engine.parameters()?, parameters)?;
    // Older checkpoints do not name it: it was always SGD.
    let note = state.optimizer.unwrap_or(OptimizerNote { kind: OptimizerKind::Momentum, updates: 0 });
    let kind = training.spec.train.optimizer;
    let carries_over = slots(note.kind) == slots(kind);
    let optimizer = match carries_over {
        true => {
            let slots = shared(group, engine.optimizer_state()?.slots, optimizer)?;
            Some(OptimizerState { slots, updates: note.updates })
        }
        false => None,
    };
    let loaded = StateDict { parameters, optimizer, average, loss_scaling: state.loss_scaling };
    // Ranks may share the weights: all have to have read the old ones before they change.
    group.barrier()?;
    engine.load_state_dict(&loaded)?;
    // Nor may a rank use the new ones before rank 0 has written them.
    group.barrier()?;

    let step = if state.global_batch_size == plan.global_batch_size
        && state.steps_per_epoch == plan.steps_per_epoch
    {
        state.step
    } else {
        // Another batch size: the same place in the data, counted in steps of this one.
        let in_epoch = state.data_position.samples_in_epoch / plan.global_batch_size;
        u64::from(state.data_position.epoch) * plan.steps_per_epoch + in_epoch.min(plan.steps_per_epoch - 1)
    };
    if step > plan.total_steps {
        return Err(TrainError::Impossible(format!(
            "checkpoint {} is of step {step} and the training ends at step {}: nothing is left to do; set more train.epochs \
             (or train.steps)",
            checkpoint::folder_name(state.epoch, state.step),
            plan.total_steps
        )));
    }
    if group.rank() == 0 {
        let observer = training.observer;
        if step == plan.total_steps {
            observer.log("the checkpoint is of the last step: nothing is left to train");
        }
        observer.log(&format!(
            "continuing from checkpoint {} at step {step}",
            checkpoint::folder_name(state.epoch, state.step)
        ));
        if state.random_state.seed != training.spec.train.seed {
            observer.log("train.seed is not the checkpoint's: the order of the pictures changes here");
        }
        if !carries_over {
            observer.log(&format!(
                "train.optimizer is {} and was {}, which kept other numbers: its state begins anew, at zero",
                kind.name(),
                note.kind.name()
            ));
        }
        if step != state.step {
            observer.log(&format!(
                "a step takes {} pictures now and took {}: step {} counts as {step}",
                plan.global_batch_size, state.global_batch_size, state.step
            ));
        }
    }
    // On a machine with a disk of its own the best one may be on the server alone.
    let is_own_disk = training.checkpoints.parent().is_some_and(|job| job.join(OWN_DISK_NOTE).exists());
    let best = state.best.filter(|best| {
        let place = checkpoint::folder_name(best.epoch, best.step);
        let is_there = is_own_disk || training.checkpoints.join(place).exists();
        best.metric == training.spec.checkpoint.keep_best && is_there
    });
    let mut skipped = state.skipped_steps;
    if step != state.step {
        // Their steps are counted for the other batch size.
        skipped.recent.clear();
    }
    let unmeasured = step == state.step && state.val_accuracy.is_none();
    Ok(InitialState { step, best, skipped, unmeasured })
}

/// The checkpoint in `folder`, or the newest one before it that is whole. A damaged one is set aside and named; without any, the run
/// does not begin anew by itself: that is for a person to decide.
fn newest_whole(
    training: &Training<'_>,
    folder: &Path,
) -> Result<(PathBuf, (State, NamedTensors, NamedTensors)), TrainError> {
    let wanted = folder.file_name().and_then(|n| n.to_str()).and_then(checkpoint::parse_folder_name);
    let Some((epoch, step)) = wanted.filter(|_| folder.parent() == Some(training.checkpoints)) else {
        // The user's own folder, named on the command line.
        return Ok((folder.into(), checkpoint::load(folder)?));
    };
    let mut candidates = vec![(epoch, step)];
    let older = checkpoint::list(training.checkpoints)?;
    candidates.extend(older.into_iter().rev().filter(|(e, s)| (*s, *e) < (step, epoch)));
    let mut damage = Vec::new();
    for (epoch, step) in candidates {
        let place = training.checkpoints.join(checkpoint::folder_name(epoch, step));
        match checkpoint::load(&place) {
            Ok(loaded) => return Ok((place, loaded)),
            // It may be whole. Another attempt reads it again.
            Err(error @ CheckpointError::Io { .. }) => return Err(error.into()),
            Err(error) => {
                let observer = training.observer;
                observer.log(&format!("{error}; it is set aside and the one before it is used"));
                if place.exists() {
                    checkpoint::set_aside(&place)?;
                }
                observer.event(&AttemptEvent::CheckpointRemoved { epoch, step });
                damage.push(error.to_string());
            }
        }
    }
    Err(TrainError::Impossible(format!(
        "no whole checkpoint is left to continue from ({}); submit the job anew to begin from the start",
        damage.join("; ")
    )))
}

/// Whether a checkpoint, which is whole, is one of this job's network and of the classes that its dataset has.
fn fits(
    training: &Training<'_>,
    folder: &Path,
    classes: &[String],
    given: &NamedTensors,
    own: &NamedTensors,
) -> Result<(), TrainError> {
    let refuse = |text: String| {
        let arch = training.spec.model.arch.name();
        Err(TrainError::Impossible(format!(
            "checkpoint {} does not fit this job ({arch}, dataset {}): {text}. To train another network or dataset from \
             its weights, begin a new job with model.pretrained",
            folder.display(),
            training.spec.data.dataset
        )))
    };
    // Tensors alone are not enough: another dataset may have as many classes. Not every file has class names.
    if let Ok(about) = checkpoint::metadata(&folder.join(checkpoint::MODEL))
        && let Some(text) = about.get("classes")
        && let Ok(trained) = serde_json::from_str::<Vec<String>>(text)
        && let Some(difference) = classes_differ(&trained, classes)
    {
        return refuse(difference);
    }
    compare(&shapes(given), &shapes(own), None).map_or_else(refuse, |_| Ok(()))
}

/// Rank 0's `loaded` on every rank; `template` has the names and shapes that it must have.
fn shared(
    group: &dyn ProcessGroup,
    template: NamedTensors,
    loaded: Option<NamedTensors>,
) -> Result<NamedTensors, TrainError> {
    if let Some(loaded) = &loaded
        && shapes(loaded) != shapes(&template)
    {
        let text = "the optimizer state of the checkpoint does not belong to its weights";
        return Err(TrainError::Impossible(text.into()));
    }
    let mut tensors = loaded.unwrap_or(template);
    for tensor in tensors.values_mut() {
        group.broadcast((&mut tensor.values).into(), 0)?;
    }
    Ok(tensors)
}

/// Rank 0's state on every rank, by its JSON text.
fn shared_state(group: &dyn ProcessGroup, state: Option<State>) -> Result<State, TrainError> {
    let mut text = match &state {
        Some(state) => serde_json::to_vec(state).map_err(std::io::Error::from)?,
        None => Vec::new(),
    };
    let mut length = [text.len() as f64];
    group.broadcast((&mut length).into(), 0)?;
    text.resize(length[0] as usize, 0);
    group.broadcast((&mut text).into(), 0)?;
    Ok(serde_json::from_slice(&text).map_err(std::io::Error::from)?)
}
