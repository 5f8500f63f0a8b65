//! `lockstep validate`: checks a specification like a submission, without creating a job.

use super::{
    age::format_duration,
    api::{Api, ServerArgs},
    block_on, dataset, file,
    job_file::{self, UnknownPath},
    output, sweep, train,
};
use lockstep_data::loader::DataSource;
use lockstep_host::cache;
use lockstep_protocol::{
    JobSpec,
    dataset::Dataset,
    numbers::plural,
    spec::{self, BrokenFiles, SpecError},
};
use lockstep_worker::checkpoint;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::Path;

/// Check a job file without submitting it
///
/// With a server, runs all checks of a submission (dataset, pretrained weights, slots) and stores no job. Without a server, or if the
/// server does not have the dataset, checks the file and the pictures at the path of the dataset, and says what is not checked. The
/// settings of every trial of a sweep are checked, and the first trial on the server. Exit status 0: no mistake; 2: mistakes, all listed;
/// 1: the server given by --server does not respond.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    file: job_file::FileArgs,
    #[command(flatten)]
    server: ServerArgs,
}

/// The fields of the server's response that this command uses.
#[derive(Deserialize)]
struct Plan {
    spec: JobSpec,
    samples: u64,
    /// Whether `samples` and the numbers of steps are expected values, because pictures are held out at random.
    #[serde(default)]
    is_expected: bool,
    global_batch_size: u64,
    steps_per_epoch: u64,
    total_steps: u64,
    #[serde(default)]
    warnings: Vec<String>,
    estimate: Option<Estimate>,
}

/// The time of training, from the speed of the earlier job with this name.
#[derive(Deserialize)]
struct Estimate {
    secs: f64,
    name: String,
}

/// Checks as much as possible locally, then on the server.
///
/// # Errors
/// Exit status 2 if the file has mistakes, each on its own line; 1 if the server given by --server does not respond.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut document = args.file.read()?;
    let (trials, mistakes) = match sweep::find_mistakes(&document) {
        Some((trials, mistakes)) => (Some(trials), mistakes),
        None => (None, job_file::parse(&document).err().unwrap_or_default()),
    };
    let api = args.server.api()?;
    let mut can_ask_server = args.server.is_named() || block_on(async { Ok(api.is_reachable().await) })?;
    if can_ask_server
        && let Err(error) = block_on(job_file::replace_dataset_paths(&api, &mut document, UnknownPath::Keep))
    {
        // Another program, or another user's server, may listen at the default address.
        if args.server.is_named() {
            return Err(error);
        }
        can_ask_server = false;
    }
    if !can_ask_server || !job_file::dataset_paths(&document).is_empty() {
        return check_without_dataset(args, &api, can_ask_server, &document, mistakes);
    }
    // The server's error also lists the mistakes in the file, so it is returned first.
    let response: Value = block_on(api.post("/jobs/validate", &document))?;
    if !mistakes.is_empty() {
        return Err(job_file::mistakes_error(&args.file.job, &mistakes));
    }
    let plan: Plan = serde_json::from_value(response.clone())?;
    output::warn_each(&plan.warnings);
    if args.server.json {
        return output::json(&response);
    }
    let spec = &plan.spec;
    // Without "skip", a warning above names the broken files.
    if spec.data.broken_files == BrokenFiles::Skip
        && let Ok(Some(Dataset { name, info, .. })) =
            block_on(dataset::find_by_name(&api, &spec.data.dataset))
        && info.broken_count > 0
    {
        output::warn(format_args!(
            "note: {} of {name} cannot be used, and training leaves out such files; `lockstep dataset inspect {name}` lists them",
            plural(info.broken_count, "file")
        ));
    }
    let about = if plan.is_expected { "about " } else { "" };
    let trial_note = if trials.is_some() { " for the first trial" } else { "" };
    let estimate = plan.estimate.map(|Estimate { secs, name }| {
        format!(
            ", about {} of training{trial_note}, as fast as the job {name:?}",
            format_duration(secs.round() as i64)
        )
    });
    output::line(format_args!(
        "{} has no mistake: {}{about}{}, {} a step, {about}{} an epoch, {}{}{}",
        args.file.job.display(),
        trials.map(|trials| format!("{}, ", plural(trials as u64, "trial"))).unwrap_or_default(),
        plural(plan.samples, "training picture"),
        plan.global_batch_size,
        plural(plan.steps_per_epoch, "step"),
        if spec.train.steps.is_none() { about } else { "" },
        plural(plan.total_steps, "step"),
        estimate.unwrap_or_default()
    ))
}

/// Checks what is possible without the dataset, or without a server. Reports these mistakes together with the `mistakes` in the file.
fn check_without_dataset(
    args: &Args,
    api: &Api,
    can_ask_server: bool,
    document: &Value,
    mut mistakes: Vec<SpecError>,
) -> anyhow::Result<()> {
    // For a sweep, the files of the first trial's job are checked.
    let trials = sweep::trial_documents(document);
    let document_of_job = trials.first().unwrap_or(document);
    let (spec, _) = spec::read(document_of_job);
    mistakes.extend(mistakes_in_files(document, spec.as_ref()));
    let is_path = spec.as_ref().is_some_and(|spec| spec.data.dataset.contains(std::path::is_separator));
    // Other mistakes could cause a mistake here.
    if let Some(spec) = spec.as_ref().filter(|_| is_path && mistakes.is_empty()) {
        let gives_validation =
            document_of_job.pointer("/data/validation").is_some_and(|value| !value.is_null());
        mistakes.extend(mistake_with_pictures(spec, gives_validation));
    }
    if can_ask_server {
        mistakes = job_file::merge_mistakes(document, mistakes, block_on(api.find_mistakes(document))?);
        mistakes.extend(block_on(job_file::find_taken_names(api, document))?);
    }
    if !mistakes.is_empty() {
        return Err(job_file::mistakes_error(&args.file.job, &mistakes));
    }
    let why = if can_ask_server {
        "no dataset is registered at the path in data.dataset, so its classes were not checked: `lockstep submit` registers the path, \
         and `lockstep train` uses it"
            .to_owned()
    } else {
        let pictures = if is_path { "" } else { " its pictures," };
        format!(
            "no server answers at {}, so the dataset's registration,{pictures} its classes and the number of slots were not checked",
            api.base
        )
    };
    if args.server.json {
        return output::json(&json!({ "spec": spec, "warnings": [why] }));
    }
    output::warn(format_args!("warning: {why}"));
    output::line(format_args!("{} has no mistake", args.file.job.display()))
}

/// Checks that the pictures on this machine suffice for the job, as its ranks do when they start.
fn mistake_with_pictures(spec: &JobSpec, gives_validation: bool) -> Option<SpecError> {
    let path = Path::new(&spec.data.dataset);
    let mut spec = spec.clone();
    if !gives_validation {
        train::choose_validation(&mut spec, path);
    }
    let samples = match DataSource::open(path, &spec.data, spec.train.seed) {
        Ok(data) => data.shape.train_samples,
        // The error names the key, or files.
        Err(error) => return Some(SpecError { pointer: String::new(), detail: error.to_string() }),
    };
    (spec.steps_per_epoch(samples) == 0).then(|| SpecError {
        pointer: format!("/train/{}", spec.train.batch_key()),
        detail: format!(
            "{} are fewer than one step uses ({}): lower this, or set data.drop_remainder = false",
            plural(samples, "training picture"),
            spec.global_batch_size()
        ),
    })
}

/// Checks that the paths of datasets exist on this machine, and that weights on this machine can be read.
fn mistakes_in_files(document: &Value, spec: Option<&JobSpec>) -> Vec<SpecError> {
    let mut mistakes = Vec::new();
    for path in job_file::dataset_paths(document) {
        if lockstep_data::canonical(path).is_err() {
            let detail = file::missing_path_message(path);
            mistakes.push(SpecError { pointer: "/data/dataset".into(), detail });
        }
    }
    let pretrained = spec.and_then(|spec| spec.model.pretrained.as_deref());
    let path = pretrained.and_then(|given| cache::find_weights(given).ok());
    // Any other value is the id of a checkpoint, or a path or a name of weights on the machine that trains.
    if let Some(path) = path.filter(|path| path.exists()) {
        let files = checkpoint::model_files(&path).map_err(|e| e.to_string());
        let result =
            files.and_then(|files| files.iter().try_for_each(|file| checkpoint::shapes(file).map(drop)));
        let mistake = |detail| SpecError { pointer: "/model/pretrained".into(), detail };
        mistakes.extend(result.err().map(mistake));
    }
    mistakes
}
