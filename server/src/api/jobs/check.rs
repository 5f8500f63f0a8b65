//! Checks of a specification that need the server's data: whether the dataset is registered and fits, and whether the machines have enough
//! slots for the ranks.

use crate::api::prelude::*;
use crate::{
    agents::Agents,
    api::{
        datasets,
        jobs::submission::{self, WeightsCheck},
        list,
    },
    http::extract::JobFile,
    scheduler::{Scheduler, device_for, max_capacity_of},
    store::JobFilter,
};
use lockstep_protocol::{
    Job, JobId, JobSpec, JobState,
    dataset::Dataset,
    limits::MAX_MISTAKES,
    numbers::plural,
    spec::{
        self, Arch, Device, ImageSize, Setting, SpecError, SweepSpec, Validation, read_sweep, shortened,
        split_sweep, trial_document,
    },
    throughput::Throughput,
};
use serde_json::Value;
use std::collections::HashSet;

/// Parameter of submissions by programs that also start the job's agents.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct LaunchQuery {
    /// Set this if agents for the job will be started afterwards. The job may then have more ranks than the online machines have slots.
    #[serde(default)]
    pub(in crate::api) launched: bool,
}

/// Result of checking a specification.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CheckReport {
    /// The complete specification, with all defaults.
    spec: JobSpec,
    /// Number of training pictures, from which the numbers of steps are computed.
    samples: u64,
    /// Whether `samples` and the numbers of steps are expected values, because pictures are held out at random.
    is_expected: bool,
    global_batch_size: u64,
    steps_per_epoch: u64,
    total_steps: u64,
    /// Number of trials, for a job file with a section `sweep`. The other fields describe the first trial, but `spec` does not contain the
    /// first trial's setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    trials: Option<usize>,
    /// The section `sweep`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    sweep: Option<Value>,
    /// Warnings about the job, as text.
    warnings: Vec<String>,
    /// Estimated training time, from the speed of an earlier job; absent if no comparable job was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    estimate: Option<Estimate>,
}

/// Estimated time of a job's steps, from the speed of an earlier job with the same network, image size, precision, batch sizes and number
/// of ranks, which has not failed and whose machines are online.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Estimate {
    /// Estimated seconds, without the time in the queue and the time of evaluations and checkpoints.
    secs: f64,
    /// Id of the earlier job.
    #[schema(value_type = String)]
    job: JobId,
    /// Name of the earlier job.
    name: String,
}

/// Maximum number of jobs that an estimate considers, the newest first.
const MAX_COMPARED_JOBS: u32 = 100;
/// Minimum number of steps of a measured job. With fewer steps, the start-up dominates the speed.
const MIN_MEASURED_STEPS: u64 = 20;

/// Check a specification without submitting it
///
/// Also accepts a job file with a section `sweep`, like `POST /sweeps`.
#[utoipa::path(post, path = "/jobs/validate", tag = "jobs", request_body(content((JobSpec = "application/json"), (String = "application/toml"))),
    params(LaunchQuery), responses((status = 200, body = CheckReport)))]
pub(crate) async fn validate(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Query(LaunchQuery { launched }): Query<LaunchQuery>,
    JobFile(document, _): JobFile,
) -> Result<Json<CheckReport>> {
    if let Some((section, job)) = split_sweep(&document) {
        // Only the first trial is checked completely. A submission checks all trials, and chooses the sweep's id.
        let (full_checks, id) = (1, "sweep");
        let checked = check_sweep(&scheduler, &caller, (&section, &job), id, full_checks, launched).await?;
        let estimate = match checked.trials.first() {
            Some(first) => estimate(&scheduler, &caller, first).await?,
            None => None,
        };
        return Ok(Json(CheckReport { estimate, ..checked.report(section, &job)? }));
    }
    let checked = check(&scheduler, &caller, &document, Start::FirstStep { launched }).await?;
    let estimate = estimate(&scheduler, &caller, &checked).await?;
    Ok(Json(CheckReport { estimate, ..checked.report() }))
}

async fn estimate(scheduler: &Scheduler, caller: &Caller, checked: &CheckedSpec) -> Result<Option<Estimate>> {
    let CheckedSpec { spec, dataset, .. } = checked;
    let filter =
        JobFilter { limit: MAX_COMPARED_JOBS, seen_by: caller.viewer_name(), ..JobFilter::default() };
    let jobs = scheduler.store.jobs(&filter).await?.jobs;
    let online = scheduler.agents.online();
    let is_online =
        |job: &Job| job.agents.iter().all(|name| online.iter().any(|agent| agent.row.name == *name));
    let measured = jobs.into_iter().filter_map(|job| {
        let is_measured =
            job.state != JobState::Failed && job.step >= MIN_MEASURED_STEPS && !job.agents.is_empty();
        let speed = job.images_per_second.filter(|speed| is_measured && *speed > 0.0)?;
        (is_as_fast(spec, &job) && is_online(&job)).then_some((job, speed))
    });
    let measured: Vec<_> = measured.collect();
    let same_pictures = measured.iter().find(|(job, _)| job.spec.data.dataset == spec.data.dataset);
    let samples = training_samples(spec, dataset);
    let pictures = Throughput::new(spec, samples).pictures_until(spec.total_steps(samples));
    Ok(same_pictures.or(measured.first()).map(|(job, speed)| Estimate {
        secs: pictures as f64 / speed,
        job: job.id.clone(),
        name: job.name.clone(),
    }))
}

/// Whether a new job with this specification should train about as fast as an earlier job.
fn is_as_fast(spec: &JobSpec, job: &Job) -> bool {
    let other = &job.spec;
    // Without `data.image_size`, the dataset determines the size.
    let has_same_size = spec.data.image_size == other.data.image_size
        && (spec.data.image_size.is_some() || spec.data.dataset == other.data.dataset);
    job.external.is_none()
        && has_same_size
        && (spec.model.arch, spec.model.stem) == (other.model.arch, other.model.stem)
        && spec.train.precision == other.train.precision
        && (spec.global_batch_size(), spec.train.accumulate)
            == (other.global_batch_size(), other.train.accumulate)
        && spec.parallel == other.parallel
}

/// A specification that passed all checks.
#[derive(Debug)]
pub(in crate::api) struct CheckedSpec {
    pub(in crate::api) spec: JobSpec,
    pub(in crate::api) dataset: Dataset,
    /// Warnings about the job, as text.
    pub(in crate::api) warnings: Vec<String>,
}

impl CheckedSpec {
    pub(in crate::api) fn report(self) -> CheckReport {
        let Self { spec, dataset, warnings } = self;
        let samples = training_samples(&spec, &dataset);
        CheckReport {
            samples,
            is_expected: has_expected_samples(&spec, &dataset),
            global_batch_size: spec.global_batch_size(),
            steps_per_epoch: spec.steps_per_epoch(samples),
            total_steps: spec.total_steps(samples),
            trials: None,
            sweep: None,
            warnings,
            estimate: None,
            spec,
        }
    }
}

/// Where the training of a checked job begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::api) enum Start {
    /// At the first step, possibly with pretrained weights. If `launched`, the job's agents are started later, so the slots are not
    /// checked.
    FirstStep { launched: bool },
    /// At the checkpoint of another job, so pretrained weights are not checked.
    Checkpoint,
}

/// Checks a document: the specification itself, its dataset and slots on this server, and its pretrained weights.
pub(in crate::api) async fn check(
    scheduler: &Scheduler,
    caller: &Caller,
    document: &Value,
    start: Start,
) -> Result<CheckedSpec> {
    let datasets = current_datasets(scheduler, caller, [document]).await?;
    check_with_datasets(scheduler, caller, &datasets, document, start).await
}

/// Returns the datasets that the caller may see. A dataset that a document names is inspected again if its files have changed. If that is
/// not possible, the dataset has a warning that says why.
async fn current_datasets<'a>(
    scheduler: &Scheduler,
    caller: &Caller,
    documents: impl IntoIterator<Item = &'a Value>,
) -> Result<Vec<(Dataset, Option<String>)>> {
    let names: HashSet<&str> = documents.into_iter().filter_map(dataset_name).collect();
    let mut current = Vec::new();
    for mut dataset in datasets::visible_datasets(&*scheduler.store, caller).await? {
        let is_named = names.contains(dataset.name.as_str());
        let warning =
            if is_named { datasets::refresh(&scheduler.datasets, &mut dataset).await } else { None };
        current.push((dataset, warning));
    }
    Ok(current)
}

fn dataset_name(document: &Value) -> Option<&str> {
    document.pointer("/data/dataset").and_then(Value::as_str)
}

/// Same as [`check`], with `datasets`, the result of [`current_datasets`].
async fn check_with_datasets(
    scheduler: &Scheduler,
    caller: &Caller,
    datasets: &[(Dataset, Option<String>)],
    document: &Value,
    start: Start,
) -> Result<CheckedSpec> {
    let mut weights_warning = None;
    // The checks below also run for a document with mistakes, so that all mistakes are reported at once.
    let (mut spec, mut errors) = spec::read(document);
    // A mistake in parallel.mode does not affect the checks below.
    let causes = errors.iter().map(|e| e.pointer.clone()).filter(|pointer| pointer != "/parallel/mode");
    let document_mistakes = DocumentMistakes(causes.collect());
    let error_at = |pointer: &str, detail: String| SpecError { pointer: pointer.into(), detail };
    let name = dataset_name(document).unwrap_or_default();
    let (dataset, refresh_warning) = datasets.iter().find(|(d, _)| d.name == name).cloned().unzip();
    if dataset.is_none() && !name.is_empty() {
        let names = datasets.iter().map(|(dataset, _)| dataset.name.as_str());
        errors.push(error_at("/data/dataset", no_dataset_message(name, names)));
    }
    if let (Some(spec), Some(dataset)) = (&mut spec, &dataset)
        && document.pointer("/data/validation").is_none_or(Value::is_null)
    {
        submission::choose_validation(spec, dataset);
    }
    if let (Some(spec), Start::FirstStep { .. }) = (&mut spec, start) {
        errors.extend(submission::resolve_version(&*scheduler.store, caller, spec).await?);
    }
    if let Some(spec) = &spec
        && start != (Start::FirstStep { launched: true })
        && !document_mistakes.has_any_in(&["/parallel/ranks", "/parallel/device", "/train/precision"])
    {
        errors.extend(slots_mistake(&scheduler.agents, spec));
    }
    if let (Some(spec), Some(dataset)) = (&spec, &dataset) {
        // The job's evaluations and page show pictures of the dataset.
        if dataset.private && !spec.private {
            let detail = format!(
                "must be true, because the dataset {} is private and the job's page shows the dataset's pictures",
                dataset.name
            );
            errors.push(error_at("/private", detail));
        }
        let mistakes = dataset_mistakes(spec, dataset);
        errors.extend(mistakes.into_iter().filter(|mistake| !document_mistakes.may_cause(mistake)));
    }
    if let Some(spec) = &spec
        && start != Start::Checkpoint
        && !document_mistakes.has_any_in(&["/model", "/data", "/train/recipe"])
    {
        match submission::check_pretrained(scheduler, caller, spec, dataset.as_ref()).await? {
            WeightsCheck::Fit => {}
            WeightsCheck::Mistake(mistake) => errors.push(mistake),
            WeightsCheck::NotChecked(warning) => weights_warning = Some(warning),
        }
    }
    match (spec, dataset) {
        (Some(spec), Some(dataset)) if errors.is_empty() => {
            let mut warnings = submission::warnings(&spec, &dataset);
            warnings.extend(refresh_warning.flatten());
            warnings.extend(weights_warning);
            warnings.extend(unsaved_best_warning(&spec, &dataset));
            warnings.extend(few_pictures_warning(&spec, &dataset));
            Ok(CheckedSpec { spec, dataset, warnings })
        }
        _ => Err(Error::Invalid(errors)),
    }
}

/// A sweep that passed all checks.
pub(in crate::api) struct CheckedSweep {
    pub(in crate::api) sweep: SweepSpec,
    /// The settings of all trials.
    pub(in crate::api) settings: Vec<Setting>,
    /// The checked trials.
    pub(in crate::api) trials: Vec<CheckedSpec>,
}

impl CheckedSweep {
    /// The report on the first trial, for a job file with this section and job.
    fn report(self, section: Value, job: &Value) -> Result<CheckReport> {
        let first = self.trials.into_iter().next();
        let first = first.ok_or_else(|| Error::Internal("a checked sweep has no trials".into()))?;
        let report = first.report();
        let spec = spec::read(job).0.unwrap_or_else(|| report.spec.clone());
        Ok(CheckReport { spec, trials: Some(self.settings.len()), sweep: Some(section), ..report })
    }
}

/// Checks a sweep with this id. The first `full_checks` trials are checked as by [`check`]; of the other trials, only the documents are
/// checked.
///
/// # Errors
/// The sweep or its trials have mistakes (each distinct mistake is returned once), or the database cannot be read.
pub(in crate::api) async fn check_sweep(
    scheduler: &Scheduler,
    caller: &Caller,
    (section, job): (&Value, &Value),
    id: &str,
    full_checks: usize,
    launched: bool,
) -> Result<CheckedSweep> {
    let sweep = read_sweep(section).map_err(|mut mistakes| {
        mistakes.extend(spec::key_mistakes(section, job));
        Error::Invalid(mistakes)
    })?;
    let settings = sweep.settings();
    let start = Start::FirstStep { launched };
    let (mut mistakes, mut trials) = (Vec::new(), Vec::new());
    let documents: Vec<_> = settings.iter().map(|setting| trial_document(job, setting, id)).collect();
    let datasets = current_datasets(scheduler, caller, documents.iter().take(full_checks).flatten()).await?;
    for (index, document) in documents.into_iter().enumerate() {
        let trial_mistakes = match document {
            Err(detail) => vec![SpecError { pointer: "/sweep/parameters".into(), detail }],
            Ok(document) if index >= full_checks => spec::read(&document).1,
            Ok(document) => match check_with_datasets(scheduler, caller, &datasets, &document, start).await {
                Ok(checked) => {
                    let conflicts = sweep.check_with_trial(&checked.spec);
                    trials.push(checked);
                    conflicts
                }
                Err(Error::Invalid(mistakes)) => mistakes,
                Err(other) => return Err(other),
            },
        };
        for mistake in trial_mistakes {
            if mistakes.len() < MAX_MISTAKES && !mistakes.contains(&mistake) {
                mistakes.push(mistake);
            }
        }
    }
    check_mistakes(mistakes)?;
    Ok(CheckedSweep { sweep, settings, trials })
}

/// Returns a warning if validations and checkpoints fall on different steps, so that the best network may not be kept.
fn unsaved_best_warning(spec: &JobSpec, dataset: &Dataset) -> Option<String> {
    let save_every = spec.checkpoint.every_steps.filter(|steps| *steps > 0)?;
    let samples = training_samples(spec, dataset);
    let validation_every = spec.steps_per_epoch(samples) * u64::from(spec.evaluate.every_epochs);
    let is_kept =
        validation_every.is_multiple_of(save_every) || spec.total_steps(samples) <= validation_every;
    let is_validated = validation_every > 0 && spec.data.validation != Validation::Split("none".into());
    if !is_validated || is_kept || spec.checkpoint.keep_best == "none" {
        return None;
    }
    Some(format!(
        "the network is validated every {validation_every} steps and saved every {save_every} steps, so the best network is kept only if \
         both happen at the same step. Set checkpoint.every_epochs in place of every_steps, or every_steps to a divisor of \
         {validation_every}"
    ))
}

/// Returns a warning if a job that holds out a fraction of the pictures at random may be left with too few pictures: fewer than one step
/// takes, or none for validation.
fn few_pictures_warning(spec: &JobSpec, dataset: &Dataset) -> Option<String> {
    let Validation::Fraction(fraction) = spec.data.validation else { return None };
    let train = dataset.info.split("train")?.samples as f64;
    if !has_expected_samples(spec, dataset) {
        return None;
    }
    let [min_held_out, max_held_out] = dataset.info.held_out_bounds(fraction, spec.data.validation_seed);
    let batch = spec.global_batch_size();
    let safe_batch = (train - max_held_out).max(1.0) as u64;
    if spec.data.drop_remainder && batch > safe_batch {
        let pictures = plural(batch, "picture");
        return Some(format!(
            "data.validation = {fraction} decides at random for each picture. A step takes {pictures}, and the job fails if fewer are left \
             to train on: a step of at most {safe_batch} is safe"
        ));
    }
    (min_held_out <= 0.0).then(|| {
        let info = &dataset.info;
        let seed = info.held_out.as_ref().map(|held_out| held_out.validation_seed);
        let seed = seed.filter(|seed| info.count_held_out(&spec.data.validation, *seed).is_some());
        let advice = match seed {
            Some(seed) => {
                format!("set data.validation_seed = {seed}, which holds out pictures of as many classes as possible")
            }
            None => "give a larger fraction".into(),
        };
        format!(
            "data.validation = {fraction} decides at random for each of {train} training pictures, and the job fails if none is held out: \
             {advice}"
        )
    })
}

/// Pointers of the mistakes in the document itself. For the keys at these pointers, the specification has the default or the recipe's
/// value, so further mistakes may be only consequences.
struct DocumentMistakes(Vec<String>);

impl DocumentMistakes {
    /// Whether the document has a mistake at or below one of these pointers.
    fn has_any_in(&self, ancestors: &[&str]) -> bool {
        let is_below = |pointer: &str, ancestor: &str| {
            pointer.strip_prefix(ancestor).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.0.iter().any(|pointer| ancestors.iter().any(|ancestor| is_below(pointer, ancestor)))
    }

    /// Whether `mistake` may be a consequence of the mistakes in the document.
    fn may_cause(&self, mistake: &SpecError) -> bool {
        match mistake.pointer.as_str() {
            "/train/batch_size" | "/train/global_batch_size" => {
                self.has_any_in(&["/train", "/parallel/ranks", "/data/validation", "/data/drop_remainder"])
            }
            "/parallel/model" => self.has_any_in(&["/parallel"]),
            // A recipe sets image sizes, means and the validation.
            pointer => self.has_any_in(&[pointer, "/train/recipe", "/data/image_size"]),
        }
    }
}

/// Returns the error message if no dataset is called `name`. `names`: the names of the datasets, of which the most similar is suggested.
pub(in crate::api) fn no_dataset_message<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.collect();
    let hint = if names.is_empty() {
        "no dataset is registered yet; add one with `lockstep dataset add NAME PATH`".to_owned()
    } else {
        list::suggest(name, &names, "the datasets are")
    };
    let fetch = match name {
        "cifar10" | "cifar100" => format!("; `lockstep dataset get {name}` fetches it"),
        "fashion-mnist" => "; \"Use the bundled pictures\" on the page of a new job (POST /api/v1/datasets/bundled) registers the 9,000 \
             pictures that come with the server, and `lockstep dataset get fashion-mnist` downloads all 70,000"
            .to_owned(),
        _ => String::new(),
    };
    format!("no dataset is called {:?}; {hint}{fetch}", shortened(name))
}

/// Returns the mistake if the machines online have too few slots for the job's ranks.
fn slots_mistake(agents: &Agents, spec: &JobSpec) -> Option<SpecError> {
    let online = agents.online();
    if online.is_empty() {
        return None;
    }
    let device = device_for(spec);
    let mut slots = online.iter().flat_map(|agent| &agent.row.slots);
    let is_cpu = device == Device::Cpu || slots.all(|slot| slot.device == Device::Cpu.as_str());
    let capacity = max_capacity_of(online.into_iter().map(|agent| agent.row), device);
    let max_slots = capacity.slots;
    if max_slots >= spec.parallel.ranks as usize {
        return None;
    }
    if max_slots == 0 {
        let gpu = device.kind().filter(|kind| kind.is_accelerator);
        let (pointer, detail) = match (gpu, spec.parallel.device) {
            (Some(kind), Device::Auto) => (
                "/train/precision",
                format!(
                    "no machine online has a {}; use fp32 or auto, or bf16 with parallel.device = \"cpu\" on processors with AVX512-BF16",
                    kind.slot_name
                ),
            ),
            (Some(kind), _) => (
                "/parallel/device",
                format!(
                    "no machine online has a {} (a {} slot); \"auto\" uses any device",
                    kind.slot_name, kind.name
                ),
            ),
            _ => ("/parallel/device", "no machine online has a slot".into()),
        };
        return Some(SpecError { pointer: pointer.into(), detail });
    }
    let unit = device.kind().map_or("slot", |kind| kind.slot_name);
    let units = if max_slots == 1 { unit.to_owned() } else { format!("{unit}s") };
    let ranks = spec.parallel.ranks;
    // A machine's number of CPU slots can be changed by an option.
    let more_slots = if is_cpu {
        ", or give a machine more slots: `lockstep serve --cpu-slots N` or `lockstep agent --cpu-slots N`"
    } else {
        ""
    };
    let detail = if capacity.machines > 1 {
        format!(
            "{ranks} ranks, but the {} machines online that can share a job have {max_slots} {units} in all; use at most {max_slots}, or \
             join another machine{more_slots}",
            capacity.machines
        )
    } else {
        format!(
            "{ranks} ranks, but the largest machine online has {max_slots} {units}; use at most {max_slots}, or join a machine with \
             more{more_slots}"
        )
    };
    Some(SpecError { pointer: "/parallel/ranks".into(), detail })
}

/// Whether the job's number of training pictures is only expected: it holds out a fraction, and no inspection has counted these pictures.
fn has_expected_samples(spec: &JobSpec, dataset: &Dataset) -> bool {
    let data = &spec.data;
    data.folds.is_none()
        && matches!(data.validation, Validation::Fraction(_))
        && dataset.info.count_held_out(&data.validation, data.validation_seed).is_none()
}

/// Number of training pictures that are not held out for validation (see [`has_expected_samples`]).
pub(in crate::api) fn training_samples(spec: &JobSpec, dataset: &Dataset) -> u64 {
    let train = dataset.info.train_samples();
    match (&spec.data.validation, spec.data.fold.zip(spec.data.folds)) {
        // Folds are numbered from 1. The first folds have one more picture if the pictures cannot be divided evenly. Duplicate pictures,
        // which stay in one fold, are not considered.
        (_, Some((fold, folds))) => {
            let (fold, folds) = (u64::from(fold), u64::from(folds.max(1)));
            train - train / folds - u64::from(fold <= train % folds)
        }
        (Validation::Fraction(fraction), None) => {
            let expected = ((train as f64 * fraction).round() as u64).clamp(1.min(train), train);
            let counted = dataset.info.count_held_out(&spec.data.validation, spec.data.validation_seed);
            train.saturating_sub(counted.unwrap_or(expected))
        }
        (Validation::Split(_), None) => train,
    }
}

fn dataset_mistakes(spec: &JobSpec, dataset: &Dataset) -> Vec<SpecError> {
    let mut errors = Vec::new();
    let mut mistake =
        |pointer: &str, detail: String| errors.push(SpecError { pointer: pointer.into(), detail });
    let info = &dataset.info;
    if let Validation::Split(name) = &spec.data.validation
        && name != "none"
        && spec.data.folds.is_none()
        && info.split(name).is_none()
    {
        let names: Vec<_> = info.splits.iter().map(|s| s.name.as_str()).filter(|n| *n != "train").collect();
        let condition = if info.unlabelled.contains(name) { " that has labels" } else { "" };
        let existing = if names.is_empty() { "only a training split".into() } else { names.join(", ") };
        mistake(
            "/data/validation",
            format!(
                "{} has no split {name:?}{condition}; it has {existing}. A fraction such as 0.1 holds pictures out of the training split",
                dataset.name
            ),
        );
    }
    let train = info.split("train");
    if let (Some(weights), Some(train)) = (&spec.loss.class_weights, train)
        && let Err(detail) = weights.of(&info.classes, &train.per_class)
    {
        mistake("/loss/class_weights", detail);
    }
    if let Some(detail) = spec.parallel.too_many_ranks(info.classes.len()) {
        mistake("/parallel/model", detail);
    }
    let sizes = spec.data.image_size.as_ref().map(ImageSize::sizes).unwrap_or_default();
    let rows = sizes.first().map_or(info.height, |smallest| smallest.size);
    if rows > 0
        && let Some(detail) = spec.parallel.too_few_rows(rows)
    {
        mistake("/parallel/height", detail);
    }
    if spec.model.arch != Arch::CifarNet
        && let Some(detail) = spec.parallel.too_few_channels(info.channels)
    {
        mistake("/parallel/shard", detail);
    }
    if let (Some(folds), Some(train)) = (spec.data.folds, train)
        && train.samples < u64::from(folds)
    {
        let detail = format!(
            "{folds} folds, but only {} in {}",
            plural(train.samples, "training picture"),
            dataset.name
        );
        mistake("/data/folds", detail);
    }
    if spec.data.image_size.is_none() && (info.height == 0 || info.height != info.width) {
        mistake(
            "/data/image_size",
            format!("is missing: the pictures of {} have different sizes or are not square", dataset.name),
        );
    }
    if let (None, Some(validation)) = (&spec.data.image_size, spec.data.validation_size)
        && validation < info.height
    {
        let detail = format!("{validation} pixels, but the pictures have {0}; give {0} or more", info.height);
        mistake("/data/validation_size", detail);
    }
    let samples = training_samples(spec, dataset);
    if spec.data.drop_remainder && samples < spec.global_batch_size() {
        let about = if has_expected_samples(spec, dataset) { "about " } else { "" };
        mistake(
            &format!("/train/{}", spec.train.batch_key()),
            format!(
                "one step takes {} over all ranks, but {} has {about}{samples} to train on: lower the batch size, or set \
                 data.drop_remainder = false",
                plural(spec.global_batch_size(), "picture"),
                dataset.name
            ),
        );
    }
    errors
}
