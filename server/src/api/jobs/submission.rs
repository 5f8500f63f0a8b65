//! Parts of the check of a specification (`check.rs`): the default validation split, warnings, and pretrained weights.

use crate::api::prelude::*;
use crate::{
    agents::{RequestError, requests},
    api::checkpoints,
    scheduler::{Scheduler, dispatch},
    store::Store,
};
use lockstep_protocol::{
    JobSpec,
    agent::{AgentReply, AgentRequest},
    dataset::{Dataset, default_validation, held_out_share},
    inspect::FitWeights,
    models::{SCHEME, VersionName},
    numbers::plural,
    pickle,
    spec::{BrokenFiles, KNOWN_WEIGHTS, ParallelSpec, SpecError, TrainSpec, Validation, nearest},
};
use std::time::Duration;

/// Time limit for an agent to check the header of a weights file. Without an answer, the ranks check the file when the job starts.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of broken files that a warning names.
const MAX_NAMED: usize = 3;

/// Chooses the validation split for a document that names none: a split that the dataset has, or a fraction of the training pictures.
pub(crate) fn choose_validation(spec: &mut JobSpec, dataset: &Dataset) {
    let Validation::Split(default_split) = &spec.data.validation else { return };
    if default_split == "none" || spec.data.folds.is_some() {
        return;
    }
    let splits: Vec<_> = dataset.info.splits.iter().filter(|split| split.samples > 0).collect();
    if let Some(split) = default_validation(default_split, splits.iter().map(|split| split.name.as_str())) {
        spec.data.validation = Validation::Split(split.to_owned());
    } else if let [train] = splits[..] {
        spec.data.validation = Validation::Fraction(held_out_share(train.samples));
    }
}

/// Returns warnings about the dataset (broken files, and classes without pictures), unusual values, and a mode without effect.
pub(crate) fn warnings(spec: &JobSpec, dataset: &Dataset) -> Vec<String> {
    let lacking = dataset.info.classes_lacking_pictures(&spec.data);
    let lacking = lacking.map(|words| format!("dataset {}: {words}", dataset.name));
    let broken = broken_files_warning(spec, dataset);
    broken
        .into_iter()
        .chain(enlarged_warning(spec, dataset))
        .chain(lacking)
        .chain(unusual_values(&spec.train))
        .chain(no_split_warning(&spec.parallel))
        .collect()
}

/// Above these values, a learning rate or a number of epochs is probably a typing error.
const MAX_USUAL_LR: f32 = 10.0;
const MAX_USUAL_EPOCHS: u32 = 10_000;

/// Pictures are far enlarged from this factor on.
const FAR_ENLARGED: u32 = 4;

/// Returns a warning if the pictures are far enlarged for a network with random weights. Trained weights may need large pictures.
fn enlarged_warning(spec: &JobSpec, dataset: &Dataset) -> Option<String> {
    let size = spec.data.image_size.as_ref()?.last();
    let side = dataset.info.short_side();
    (spec.model.pretrained.is_none() && side > 0 && size >= FAR_ENLARGED * side).then(|| {
        format!(
            "data.image_size is {size}, and the pictures' shorter sides have {side} pixels (median): enlarged pictures show no more detail, \
             but take longer to train on"
        )
    })
}

/// Returns warnings about values that are probably typing errors.
fn unusual_values(train: &TrainSpec) -> impl Iterator<Item = String> {
    let lr = Some(train.lr).filter(|lr| *lr > MAX_USUAL_LR);
    let lr = lr.map(|lr| format!("train.lr = {lr} is unusually high: the loss may soon be infinite"));
    let epochs = train.epochs.filter(|epochs| *epochs > MAX_USUAL_EPOCHS);
    lr.into_iter().chain(epochs.map(|epochs| format!("train.epochs = {epochs} is unusually high")))
}

/// Returns a warning if a job of mode `hybrid` splits nothing, so that it trains as with mode `data`.
fn no_split_warning(parallel: &ParallelSpec) -> Option<String> {
    let is_split = parallel.model * parallel.height * parallel.pipeline > 1 || parallel.optimizer_sharding;
    (parallel.is_hybrid() && !is_split).then(|| {
        "parallel.mode = \"hybrid\" without a split is data parallel: set parallel.model, parallel.height or parallel.pipeline to 2 or more"
            .into()
    })
}

/// Returns a warning about broken files of the dataset, which may make the job fail. The job is not refused, because the files may have
/// been repaired since the dataset was inspected.
fn broken_files_warning(spec: &JobSpec, dataset: &Dataset) -> Option<String> {
    let info = &dataset.info;
    if info.broken_count == 0 || spec.data.broken_files == BrokenFiles::Skip {
        return None;
    }
    let named: Vec<_> = info.broken.iter().take(MAX_NAMED).map(ToString::to_string).collect();
    let named = named.join("; ");
    let unnamed_count = info.broken_count.saturating_sub(info.broken.len().min(MAX_NAMED) as u64);
    let unnamed = if unnamed_count > 0 { format!("; and {unnamed_count} more") } else { String::new() };
    let files = plural(info.broken_count, "file");
    Some(format!(
        "{files} of {} could not be used when the dataset was inspected. With data.broken_files = \"fail\", the job fails if a file \
         is still unusable: repair or move the files, or set data.broken_files = \"skip\" to leave them out ({named}{unnamed})",
        dataset.name
    ))
}

/// The result of checking the pretrained weights of a job.
#[derive(Debug)]
pub(crate) enum WeightsCheck {
    /// The job has no pretrained weights, or no mistake in them was found.
    Fit,
    Mistake(SpecError),
    /// No agent could check the weights; the value is a warning. The ranks check the weights when the job starts.
    NotChecked(String),
}

/// Replaces the name of a model version (`models:/shoes@champion`) with its checkpoint, so that a moved alias does not change the job.
/// Returns the mistake in the name, if any.
pub(crate) async fn resolve_version(
    store: &dyn Store,
    caller: &Caller,
    spec: &mut JobSpec,
) -> Result<Option<SpecError>> {
    let Some(given) = spec.model.pretrained.take_if(|given| given.starts_with(SCHEME)) else {
        return Ok(None);
    };
    let mistake = |detail: String| Ok(Some(SpecError { pointer: "/model/pretrained".into(), detail }));
    let name: VersionName = match given.parse() {
        Ok(name) => name,
        Err(detail) => {
            let advice = model_advice(store, caller, given.trim_start_matches(SCHEME)).await?;
            return mistake(detail + &advice.unwrap_or_default());
        }
    };
    let versions = store.model_versions(Some(&name.model)).await?;
    let visible = versions.iter().filter(|row| caller.sees_owned(&row.ownership));
    match visible.map(|row| &row.version).find(|version| name.selector.matches(version)) {
        Some(version) => {
            spec.model.pretrained = Some(version.checkpoint.clone());
            Ok(None)
        }
        None => mistake(format!(
            "no version is called {name}; the page Models and `lockstep model list` list the models"
        )),
    }
}

/// Returns the end of an error about weights that do not exist: the newest version of the model with this name, if there is one.
async fn model_advice(store: &dyn Store, caller: &Caller, given: &str) -> Result<Option<String>> {
    let versions = store.model_versions(Some(given)).await?;
    let visible = versions.iter().filter(|row| caller.sees_owned(&row.ownership));
    let newest = visible.map(|row| row.version.version).max();
    Ok(newest.map(|version| format!("; did you mean \"{SCHEME}{given}/{version}\"?")))
}

/// Returns a warning if the job whose checkpoint is `model.pretrained` may have trained on the validation pictures.
pub(crate) async fn trained_validation_warning(store: &dyn Store, spec: &JobSpec) -> Result<Option<String>> {
    let Some(given) = spec.model.pretrained.as_deref().filter(|given| dispatch::is_checkpoint_id(given))
    else {
        return Ok(None);
    };
    let Some(row) = store.checkpoint(given).await? else { return Ok(None) };
    let source = store.job(&row.job).await?;
    Ok(source.and_then(|source| {
        checkpoints::fork::validation_warning("the run of the weights", &source.job.spec, spec)
    }))
}

/// Checks whether a job can begin with the weights of `model.pretrained`. An agent that has the file reads its header. Without a dataset,
/// the classes are unknown, and only the path or the id is checked.
///
/// # Errors
/// The database cannot be read, or the checkpoint cannot be fetched from the object store now.
pub(crate) async fn check_pretrained(
    scheduler: &Scheduler,
    caller: &Caller,
    spec: &JobSpec,
    dataset: Option<&Dataset>,
) -> Result<WeightsCheck> {
    let Some(given) = &spec.model.pretrained else { return Ok(WeightsCheck::Fit) };
    let mistake =
        |detail: String| Ok(WeightsCheck::Mistake(SpecError { pointer: "/model/pretrained".into(), detail }));
    if given.contains("://") {
        return mistake(
            "is a URL, but must be a path, because weights are read from files: download the file to the machines that train, and give its \
             path there"
                .into(),
        );
    }
    let is_number = |part: &str| part.parse::<u64>().is_ok();
    if given.split_once('-').is_some_and(|(epoch, step)| is_number(epoch) && is_number(step)) {
        return mistake(format!(
            "{given:?} lacks the job's id: write JOB-{given}. `lockstep checkpoints JOB` lists the full ids, and Fork on the job's \
             page leads to a new job with a checkpoint's weights"
        ));
    }
    let is_checkpoint = dispatch::is_checkpoint_id(given);
    // A name refers to one file of public weights in the cache directory of the agent's account, so everybody may give it.
    let is_known_name = KNOWN_WEIGHTS.contains(&given.as_str());
    let weights = if is_checkpoint {
        let row = scheduler.store.checkpoint(given).await?;
        let ownership = match &row {
            Some(row) => scheduler.store.job_ownership(&row.job).await?,
            None => None,
        };
        let is_visible = ownership.is_some_and(|ownership| caller.sees_owned(&ownership));
        match row.filter(|_| is_visible) {
            Some(_) if dataset.is_none() => return Ok(WeightsCheck::Fit),
            Some(row) => {
                let source = scheduler.store.job(&row.job).await?.map(|source| source.job);
                let arch =
                    source.filter(|source| source.unreadable.is_none()).map(|source| source.spec.model.arch);
                if let Some(arch) = arch.filter(|arch| *arch != spec.model.arch) {
                    let (arch, other) = (arch.as_str(), spec.model.arch.as_str());
                    return mistake(format!(
                        "{given} has the weights of a {arch}, not of a {other}: choose the network {arch} (model.arch)"
                    ));
                }
                match checkpoints::ensure_on_disk(&scheduler.checkpoints, &row).await {
                    // The agent's check of the weights reports a checkpoint that is missing or damaged.
                    Ok(()) | Err(Error::NotFound(_) | Error::Conflict(_) | Error::WithCode(..)) => {}
                    Err(error) => return Err(error),
                }
                scheduler.checkpoints.folder(&row).to_string_lossy().into_owned()
            }
            None => {
                return mistake(format!(
                    "no checkpoint has the id {given:?}; the checkpoint may have been removed: the job's page and `lockstep checkpoints JOB` list \
                     a job's checkpoints"
                ));
            }
        }
    } else {
        if !is_known_name && let Err(detail) = scheduler.datasets.roots.check_weights(given, caller).await {
            let advice = model_advice(&*scheduler.store, caller, given).await?;
            return mistake(detail + &advice.unwrap_or_default());
        }
        given.clone()
    };
    let Some(Dataset { info, .. }) = dataset else { return Ok(WeightsCheck::Fit) };
    let request = AgentRequest::FitWeights(FitWeights {
        weights,
        model: spec.model.clone(),
        image_size: spec.data.effective_validation_size().unwrap_or(info.height),
        channels: info.channels,
        classes: u32::try_from(info.classes.len()).unwrap_or(u32::MAX),
        allowed: if is_checkpoint || is_known_name {
            None
        } else {
            scheduler.datasets.roots.allowed_weights_folders(given)
        },
    });
    let why = match requests::call(&scheduler.agents, request, HEADER_TIMEOUT).await {
        Ok(AgentReply::Weights { mistake: None }) => return Ok(WeightsCheck::Fit),
        Ok(AgentReply::Weights { mistake: Some(detail) }) => {
            let advice = model_advice(&*scheduler.store, caller, given).await?;
            return mistake(detail + &advice.unwrap_or_default());
        }
        Err(error @ RequestError::NobodyHasFiles { .. }) if is_known_name => {
            let why = error.in_words();
            return mistake(format!(
                "{why}; run `lockstep weights get {given}` on the machine that trains, or ask whoever runs it; a \
                 model or checkpoint of this server needs no download"
            ));
        }
        Err(error @ RequestError::NobodyHasFiles { .. }) => {
            let near =
                nearest(given, KNOWN_WEIGHTS.into_iter()).map(|near| format!("; did you mean {near:?}?"));
            let advice = model_advice(&*scheduler.store, caller, given).await?.or(near);
            return mistake(error.in_words() + &advice.unwrap_or_default());
        }
        Err(RequestError::NobodyOnline) => "no agent is online".to_owned(),
        Ok(_) => "an agent gave an unexpected reply".to_owned(),
        Err(error) => error.in_words(),
    };
    // No agent could read the file, but the file is named like a pickle, which is never loaded.
    if pickle::has_pickle_extension(given) {
        return mistake(format!("{given}: {}", pickle::conversion_advice(given)));
    }
    Ok(WeightsCheck::NotChecked(format!(
        "model.pretrained {given:?} was not checked ({why}): if the file is missing or does not fit, the job fails when it starts"
    )))
}
