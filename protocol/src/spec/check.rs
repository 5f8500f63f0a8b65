//! Reads a specification and reports every mistake at once: first the shape of the document against
//! [`KEYS`], then the combinations that cannot work.

use super::{
    Arch, DataSpec, ImageSize, JobSpec, KNOWN_WEIGHTS, OptimizerKind, Recipe,
    document::toml_document,
    fewer_ranks,
    foreign::{equivalent_key, key_advice},
    keys::{KEYS, MAX_LR, Section},
    loss,
    mistake::{Mistakes, SpecError, escaped, shortened, type_of},
    nearest::nearest,
    shard, stop,
    train::DEFAULT_EPOCHS,
};
use crate::{
    invisible::first_invisible,
    limits::{KEY_BYTES, MAX_MISTAKES, MIN_HISTOGRAM_INTERVAL},
    numbers::plural,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::fmt::Write as _;

/// Reads a specification from JSON. A [`Recipe`] is resolved: every key that the document does not give has the
/// recipe's value. The resolved specification reads back the same.
///
/// # Errors
/// Every mistake in the document: first wrong values and unknown keys (with the nearest right name), section by section
/// as in [`KEYS`], then invisible characters, then combinations that cannot work.
pub fn from_json(document: &Value) -> Result<JobSpec, Vec<SpecError>> {
    match read(document) {
        (Some(spec), errors) if errors.is_empty() => Ok(spec),
        (_, errors) => Err(errors),
    }
}

/// As [`from_json`], but returns a specification for a document with mistakes, too. In this specification, keys with a mistake
/// have their default or the recipe's value, so callers can check the other keys.
pub fn read(document: &Value) -> (Option<JobSpec>, Vec<SpecError>) {
    let (mut document, mut errors) = check_shape(document);
    check_texts(&document, &mut errors);
    // Keys with a mistake have been removed, so the other keys can be read, and their combinations checked too.
    let recipe = document.pointer("/train/recipe").and_then(|name| Recipe::deserialize(name).ok());
    let has_lr = document.pointer("/train/lr").is_some();
    if let (Some(recipe), Value::Object(document)) = (recipe, &mut document) {
        recipe.fill(document);
    }
    let spec = match serde_json::from_value::<JobSpec>(document) {
        Ok(mut spec) => {
            if let Some(recipe) = recipe.filter(|_| !has_lr) {
                spec.train.lr = scaled_lr(recipe, &spec, &mut errors);
            }
            spec
        }
        Err(e) => {
            if errors.is_empty() {
                errors.push(SpecError { pointer: String::new(), detail: e.to_string() });
            }
            return (None, errors);
        }
    };
    check_combinations(&spec, &mut errors);
    (Some(spec), errors)
}

/// Reads a specification from TOML.
///
/// # Errors
/// As [`from_json`]; a syntax error names its line and column.
pub fn from_toml(text: &str) -> Result<JobSpec, Vec<SpecError>> {
    from_json(&toml_document(text).map_err(|e| vec![e])?)
}

/// Reads a specification that another version of this program stored. Keys that cannot be read have their default, and
/// the errors name them. Not for specifications that people submit.
pub fn read_leniently(document: &Value) -> (JobSpec, Vec<SpecError>) {
    let (document, mut errors) = check_shape(document);
    match serde_json::from_value(document) {
        Ok(spec) => (spec, errors),
        Err(e) => {
            errors.push(SpecError { pointer: String::new(), detail: e.to_string() });
            (JobSpec::default(), errors)
        }
    }
}

/// Mistakes in the keys and values of a document. Combinations are not checked.
pub(super) fn check_keys(document: &Value) -> Vec<SpecError> {
    check_shape(document).1
}

/// The recipe's learning rate for the job's batch size; a mistake if it exceeds the maximum of `train.lr`.
fn scaled_lr(recipe: Recipe, spec: &JobSpec, errors: &mut Vec<SpecError>) -> f32 {
    let lr = recipe.lr_for(spec) as f32;
    if f64::from(lr) > MAX_LR {
        let detail = format!(
            "recipe {:?} scales the learning rate with the number of pictures in a step: {lr} for {} pictures is too high; give lr, at \
             most {MAX_LR}",
            recipe.as_str(),
            spec.global_batch_size()
        );
        Mistakes(errors).add("/train/lr", detail);
    }
    lr
}

/// Checks keys and values against [`KEYS`]. Returns the document without the keys that have mistakes, and the mistakes.
fn check_shape(document: &Value) -> (Value, Vec<SpecError>) {
    let mut errors = Vec::new();
    let mut document = document.clone();
    let Value::Object(top) = &mut document else {
        let detail = format!("a specification is a table of keys; this is {}", type_of(&document));
        return (document, vec![SpecError { pointer: String::new(), detail }]);
    };
    let top_names = KEYS[0].keys.iter().map(|(k, _)| *k).chain(KEYS[1..].iter().map(|s| s.name));
    check_section(top, &KEYS[0], &top_names.collect::<Vec<_>>(), &mut errors);
    for section in &KEYS[1..] {
        match top.get_mut(section.name) {
            None => {}
            Some(Value::Object(table)) => {
                let names: Vec<_> = section.keys.iter().map(|(k, _)| *k).collect();
                check_section(table, section, &names, &mut errors);
            }
            Some(other) => {
                let detail = format!("must be a table of keys, is {}", type_of(other));
                errors.push(SpecError { pointer: format!("/{}", section.name), detail });
                top.remove(section.name);
            }
        }
    }
    (document, errors)
}

/// Refuses invisible characters in texts. [`Kind::check`](super::Kind::check) refuses control characters.
fn check_texts(document: &Value, errors: &mut Vec<SpecError>) {
    let mut check_text = |pointer: String, value: &Value| {
        if let Some(invisible) = value.as_str().and_then(first_invisible) {
            let detail = format!("must not have invisible characters, has {invisible:?}");
            errors.push(SpecError { pointer, detail });
        }
    };
    // Notes may have line breaks, and nothing is looked up by them.
    for (key, value) in document.as_object().into_iter().flatten().filter(|(key, _)| *key != "notes") {
        check_text(format!("/{key}"), value);
        for (inner, value) in value.as_object().into_iter().flatten() {
            check_text(format!("/{key}/{inner}"), value);
        }
    }
}

/// Checks the keys and values of one section, and removes the keys with mistakes. `names` are all keys that the section may have.
pub(super) fn check_section(
    table: &mut Map<String, Value>,
    section: &Section,
    names: &[&str],
    errors: &mut Vec<SpecError>,
) {
    let section_pointer = if section.name.is_empty() { String::new() } else { format!("/{}", section.name) };
    let pointer = |key: &str| format!("{section_pointer}/{}", escaped(key));
    for (key, kind) in section.keys {
        // JSON's null is an absent key.
        if table.get(*key).is_some_and(Value::is_null) {
            table.remove(*key);
        }
        if let Some(value) = table.get(*key)
            && let Err(detail) = kind.check(value)
        {
            errors.push(SpecError { pointer: pointer(key), detail });
            table.remove(*key);
        }
    }
    let mut unlisted_count = 0;
    table.retain(|key, _| {
        let is_known = names.contains(&key.as_str());
        if !is_known && errors.len() < MAX_MISTAKES {
            // A pointer is as long as its key, so a very long key gets the section's pointer and is shortened in the detail.
            let pointer = if key.len() > KEY_BYTES { section_pointer.clone() } else { pointer(key) };
            errors.push(SpecError { pointer, detail: unknown_key(key, section.name, names) });
        } else if !is_known {
            unlisted_count += 1;
        }
        is_known
    });
    if unlisted_count > 0 {
        errors.push(SpecError {
            pointer: section_pointer,
            detail: format!("and {unlisted_count} more unknown keys"),
        });
    }
}

fn unknown_key(key: &str, section: &str, names: &[&str]) -> String {
    let others = || KEYS.iter().filter(move |s| s.name != section);
    let mut detail = format!("no key is called {:?} here", shortened(key));
    if let Some(advice) = key_advice(key) {
        return format!("{detail}; {advice}");
    }
    let foreign = equivalent_key(key);
    if key == "sweep" && section.is_empty() {
        detail = "this file is a sweep of several jobs, and only one job is accepted here: submit a sweep with `lockstep submit FILE` \
                  or POST /api/v1/sweeps"
            .into();
    } else if let Some((owner, meant)) = foreign.filter(|(owner, _)| *owner != section) {
        let _ =
            write!(detail, "; did you mean {meant:?}? It belongs to [{owner}]: write it as {owner}.{meant}");
    } else if let Some(near) = foreign.map(|(_, meant)| meant).or_else(|| nearest(key, names.iter().copied()))
    {
        let _ = write!(detail, "; did you mean {near:?}?");
    } else if let Some(near) = nearest(key, others().flat_map(|s| s.keys.iter().map(|(k, _)| *k)))
        && let Some(owner) = others().find(|s| s.keys.iter().any(|(k, _)| *k == near))
    {
        let owner = if owner.name.is_empty() {
            "the top of the document".into()
        } else {
            format!("[{0}]: write it as {0}.{near}", owner.name)
        };
        let it = if near == key { "it".into() } else { format!("did you mean {near:?}? It") };
        let _ = write!(detail, "; {it} belongs to {owner}");
    } else {
        let _ = write!(detail, "; the keys are {}", names.join(", "));
    }
    detail
}

fn check_combinations(spec: &JobSpec, errors: &mut Vec<SpecError>) {
    // A wrong mode was reported and replaced by the default. The other keys need not fit the default, so they are not checked with it.
    let has_valid_mode = errors.iter().all(|error| error.pointer != "/parallel/mode");
    let errors = &mut Mistakes(errors);
    if spec.data.dataset.trim().is_empty() {
        errors.add("/data/dataset", "is missing: give a registered dataset's name (`lockstep dataset list`), or on the command line a path");
    }
    if spec.train.recipe == Some(Recipe::Finetune) && spec.model.pretrained.is_none() {
        let arch = spec.model.arch.as_str();
        let public = if KNOWN_WEIGHTS.contains(&arch) {
            format!(", or {arch:?} after `lockstep weights get {arch}` on the machine that trains")
        } else {
            String::new()
        };
        errors.add(
            "/model/pretrained",
            format!(
                "recipe \"finetune\" continues from trained weights: give a version of a model (models:/NAME@ALIAS), a \
                 checkpoint's id or a safetensors file with torchvision's names{public}"
            ),
        );
    }
    let arch = spec.model.arch.as_str();
    if let Some(weights) = spec.model.pretrained.as_deref().filter(|given| KNOWN_WEIGHTS.contains(given))
        && weights != arch
    {
        errors.add(
            "/model/pretrained",
            format!(
                "{weights} names the weights of a {weights}, not of a {arch}: set model.arch = {weights:?}"
            ),
        );
    }
    if spec.model.freeze_norm && spec.model.pretrained.is_none() {
        errors.add(
            "/model/freeze_norm",
            "keeps the batch norm of trained weights, but the job has no trained weights: set model.pretrained, or \
             freeze_norm = false",
        );
    }
    if spec.train.epochs.is_some() && spec.train.steps.is_some() {
        errors.add("/train/steps", "give either epochs or steps, not both");
    }
    match (spec.train.batch_size, spec.train.global_batch_size) {
        (Some(_), Some(_)) => errors.add(
            "/train/global_batch_size",
            "give either batch_size (per rank) or global_batch_size, not both",
        ),
        (None, Some(global)) => {
            let parts = spec.parallel.data_ranks().saturating_mul(spec.train.accumulate).max(1);
            if !global.is_multiple_of(parts) {
                let below = global / parts * parts;
                let near =
                    if below == 0 { parts.to_string() } else { format!("{below} or {}", below + parts) };
                errors.add(
                    "/train/global_batch_size",
                    format!(
                        "{global} cannot be divided over {} x {}; {near} can",
                        spec.parallel.sets_in_words(),
                        plural(spec.train.accumulate.into(), "micro-batch")
                    ),
                );
            }
        }
        _ => {}
    }
    if spec.checkpoint.every_epochs.is_some() && spec.checkpoint.every_steps.is_some() {
        errors.add("/checkpoint/every_steps", "give either every_epochs or every_steps, not both");
    }
    if (1..MIN_HISTOGRAM_INTERVAL).contains(&spec.log.histograms) {
        errors.add(
            "/log/histograms",
            format!(
                "{} steps are too few: each histogram reads all weights and gradients; give {MIN_HISTOGRAM_INTERVAL} or more, or \
                 0 for none",
                spec.log.histograms
            ),
        );
    }
    if spec.train.schedule == super::ScheduleKind::Step && spec.train.milestones.is_empty() {
        errors.add(
            "/train/milestones",
            "schedule \"step\" needs the epochs at which the learning rate falls, such as [30, 60, 80]",
        );
    }
    if let (Some(mean), Some(std)) = (&spec.data.mean, &spec.data.std)
        && mean.len() != std.len()
    {
        errors.add("/data/std", format!("has {} values, but mean has {}", std.len(), mean.len()));
    }
    let precision = spec.train.precision;
    let is_half = matches!(precision, super::Precision::Bf16 | super::Precision::Fp16);
    let device = spec.parallel.device.kind();
    if let Some(kind) = device.filter(|kind| is_half && !kind.half_precisions.contains(&precision)) {
        let (engine, precisions) = (kind.display_name, kind.precisions);
        let detail = format!("the {engine} engine computes in {precisions}: use one of these, or \"auto\"");
        errors.add("/train/precision", detail);
    }
    if spec.data.validation == super::Validation::Split("train".into()) {
        errors.add(
            "/data/validation",
            "validating on the training split measures nothing: give another split, a fraction, or \"none\"",
        );
    }
    if spec.model.arch == Arch::CifarNet && spec.parallel.mode != "data" {
        errors.add(
            "/model/arch",
            "cifarnet cannot be split among ranks: set parallel.mode = \"data\", or choose another network",
        );
    }
    check_folds(spec, errors);
    check_sizes(spec, errors);
    check_muon(spec, errors);
    if ![1, 2, 6].contains(&spec.evaluate.views) {
        let detail = format!("{} views do not exist: give 1, 2 or 6", spec.evaluate.views);
        errors.add("/evaluate/views", detail);
    }
    if spec.evaluate.views > 1 && spec.parallel.mode != "data" {
        errors.add(
            "/evaluate/views",
            "ranks that share a network evaluate one view of each picture: give 1, or parallel.mode = \"data\"",
        );
    }
    if has_valid_mode {
        shard::check_combinations(spec, errors);
    }
    loss::check_combinations(spec, errors);
    stop::check_combinations(spec, errors);
    if let Some(detail) = fewer_ranks::mistake(spec) {
        errors.add("/recovery/min_ranks", detail);
    }
    // The default `val_accuracy` is harmless without validation.
    if !spec.data.is_validated() && spec.checkpoint.keep_best == "val_loss" {
        errors.add(
            "/checkpoint/keep_best",
            "there is no val_loss without validation: set data.validation, or \"none\" here",
        );
    }
}

fn check_folds(spec: &JobSpec, errors: &mut Mistakes<'_>) {
    match (spec.data.folds, spec.data.fold) {
        (Some(folds), None) => {
            errors.add(
                "/data/fold",
                format!("is missing: give the fold on which this job is validated, 1 to {folds}"),
            );
        }
        (None, Some(_)) => {
            errors.add("/data/folds", "is missing: give the number of folds to which data.fold belongs");
        }
        (Some(folds), Some(fold)) if fold > folds => {
            errors.add("/data/fold", format!("there is no fold {fold} of {folds}: give 1 to {folds}"));
        }
        _ => {}
    }
}

/// Refuses Muon where a rank does not have the whole matrix of each convolution, or batch norms are not trained.
fn check_muon(spec: &JobSpec, errors: &mut Mistakes<'_>) {
    if spec.train.optimizer != OptimizerKind::Muon {
        return;
    }
    let parallel = &spec.parallel;
    if parallel.mode != "data" || parallel.optimizer_sharding {
        errors.add(
            "/train/optimizer",
            "muon needs the whole matrix of each convolution on every rank: set parallel.mode = \"data\" without \
             parallel.optimizer_sharding, or choose another optimizer",
        );
    }
    if spec.model.freeze_norm {
        errors.add(
            "/model/freeze_norm",
            "muon sets the norms of filters, which needs batch norms that are trained: set freeze_norm = false, or choose \
             another optimizer",
        );
    }
}

fn check_sizes(spec: &JobSpec, errors: &mut Mistakes<'_>) {
    let DataSpec { image_size, validation_size, resize_size, .. } = &spec.data;
    let sizes = image_size.as_ref().map(ImageSize::sizes).unwrap_or_default();
    let smallest = sizes.first().map(|first| first.size).or(*validation_size);
    if let Some(size) = smallest.filter(|size| *size < 16)
        && !spec.model.arch.is_cifar_family()
    {
        errors.add(
            "/data/image_size",
            format!(
                "{size} is too small for {}: its last stage would have no pixels left; give 16 or more",
                spec.model.arch.as_str()
            ),
        );
    }
    let epochs =
        spec.train.epochs.unwrap_or(if spec.train.steps.is_some() { u32::MAX } else { DEFAULT_EPOCHS });
    if let Some(late) = sizes.iter().find(|from| from.epoch > epochs) {
        errors.add(
            "/data/image_size",
            format!(
                "{} pixels begin in epoch {}, but the run ends with epoch {epochs}",
                late.size, late.epoch
            ),
        );
    }
    if let (Some(last), Some(validation)) = (sizes.last(), *validation_size)
        && validation < last.size
    {
        errors.add(
            "/data/validation_size",
            format!(
                "{validation} pixels are less than the size that training ends with; give {} or more",
                last.size
            ),
        );
    }
    if spec.model.arch == Arch::CifarNet && (sizes.len() > 1 || validation_size.is_some()) {
        let pointer = if validation_size.is_some() { "/data/validation_size" } else { "/data/image_size" };
        errors.add(pointer, "cifarnet has one size of pictures: give one image_size, or another network");
    }
    // On GPUs the stem for large pictures reads blocks of 2 x 2 pixels if the size is even. All sizes of a run use the same form
    // of the stem, so several sizes must be even.
    let all = sizes.iter().map(|from| from.size).chain(*validation_size);
    let first = all.clone().next();
    if all.clone().any(|size| Some(size) != first)
        && let Some(odd) = all.clone().find(|size| !size.is_multiple_of(2))
    {
        let pointer =
            if *validation_size == Some(odd) { "/data/validation_size" } else { "/data/image_size" };
        errors.add(pointer, format!("{odd} is odd: all sizes of a run with several sizes must be even"));
    }
    if let (Some(resize_size), Some(size)) = (*resize_size, spec.data.effective_validation_size())
        && resize_size < size
    {
        let key = if validation_size.is_some() { "validation_size" } else { "image_size" };
        errors.add(
            "/data/resize_size",
            format!(
                "{resize_size} pixels are less than the crop that follows, {key} = {size}; give {} or more",
                size.saturating_mul(256) / 224
            ),
        );
    }
}
