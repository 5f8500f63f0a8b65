//! A job's TOML file: reads the file, applies `--set`, checks the job, and replaces paths of datasets by names that the server knows.

use super::{
    WrongRequest,
    api::{Api, format_mistake},
    dataset, file, output, sweep, usage_error,
};
use lockstep_engine::plan;
use lockstep_protocol::{
    JobSpec,
    spec::{self, KNOWN_WEIGHTS, SpecError, apply_set, shortened, toml_document},
};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

/// Maximum size of a job file. The server has the same limit for a specification.
const JOB_FILE_BYTES: u64 = 1 << 20;

/// A job file, and options that change it or make it a sweep.
#[derive(clap::Args)]
pub(crate) struct FileArgs {
    /// The job's specification, a TOML file
    #[arg(value_name = "JOB.toml")]
    pub(crate) job: PathBuf,
    /// Change a key of the specification, such as train.lr=0.1 (may be repeated); an empty value, as in train.epochs=, removes the key
    #[arg(long = "set", value_name = "KEY.PATH=VALUE")]
    sets: Vec<String>,
    /// A sweep with a trial for each of these values of a key (may be repeated: a trial for each combination of values)
    #[arg(long = "sweep", value_name = "KEY.PATH=V1,V2,...")]
    sweeps: Vec<String>,
    /// Cross-validation: a sweep with a trial for each of K stratified folds of the training pictures (data.folds, data.fold)
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(2..=100))]
    pub(crate) folds: Option<u32>,
}

impl FileArgs {
    /// Returns the file's document with the changes.
    ///
    /// # Errors
    /// Exit status 2.
    pub(crate) fn read(&self) -> anyhow::Result<Value> {
        let mut document = read_document(&self.job, &self.sets)?;
        sweep::write_grid(&self.job, &mut document, &self.sweeps, self.folds)?;
        Ok(document)
    }
}

/// What [`replace_dataset_paths`] does with a path at which no dataset is registered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum UnknownPath {
    /// Registers the path under its folder's name, so that the file that `lockstep init` writes works with `train` and with `submit`.
    Register,
    /// Leaves the path in the document.
    Keep,
}

/// Replaces the path of each dataset by the dataset's registered name, also among the values of a sweep. Returns the names under which this
/// call has registered paths.
pub(super) async fn replace_dataset_paths(
    api: &Api,
    document: &mut Value,
    unknown_path: UnknownPath,
) -> anyhow::Result<Vec<String>> {
    let private = document.get("private").and_then(Value::as_bool).unwrap_or(false);
    let mut registered = Vec::new();
    for pointer in pointers_to(document, "data", "dataset") {
        let Some(given) = document.pointer_mut(&pointer) else { continue };
        let Some(text) = given.as_str() else { continue };
        if !text.contains(std::path::is_separator) {
            if unknown_path == UnknownPath::Register
                && Path::new(text).is_dir()
                && dataset::find_by_name(api, text).await?.is_none()
            {
                return Err(usage_error(format!(
                    "data.dataset: no dataset is called {text:?}; the folder ./{text} exists: write ./{text}, or register the folder \
                     with `lockstep dataset add {text} {text}`"
                )));
            }
            continue;
        }
        let path = PathBuf::from(text);
        let found = match dataset::find_by_path(api, &path).await? {
            Some(found) => found,
            None if unknown_path == UnknownPath::Register && path.is_dir() => {
                let name = dataset_name(&path);
                output::warn(format_args!("registering {} as the dataset {name}", path.display()));
                let dataset = dataset::register_as(api, &name, &path, private).await?;
                registered.push(name);
                dataset
            }
            None if unknown_path == UnknownPath::Register && !path.exists() => {
                return Err(usage_error(format!(
                    "data.dataset: {}; the server has no dataset at this path either (`lockstep dataset list` shows its datasets)",
                    file::missing_path_message(&path)
                )));
            }
            None => continue,
        };
        *given = Value::String(found.name);
    }
    Ok(registered)
}

/// Submits a document with `post`, after [`replace_dataset_paths`] has registered its datasets. If the server refuses the submission,
/// removes these datasets again.
///
/// # Errors
/// See [`replace_dataset_paths`]. Also the errors of `post`.
pub(super) async fn submit<T>(
    api: &Api,
    document: &mut Value,
    post: impl AsyncFnOnce(&Value) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let registered = replace_dataset_paths(api, document, UnknownPath::Register).await?;
    let submitted = post(document).await;
    // After any other error, the server may have stored the job.
    if submitted.as_ref().is_err_and(|error| error.is::<WrongRequest>()) {
        for name in registered {
            if api.delete(&format!("/datasets/{name}")).await.is_ok() {
                output::warn(format_args!(
                    "the dataset {name} is removed again, because the submission is refused"
                ));
            }
        }
    }
    submitted
}

/// Returns the paths of datasets in a job's document, also among the values of a sweep.
pub(super) fn dataset_paths(document: &Value) -> Vec<&Path> {
    let pointers = pointers_to(document, "data", "dataset");
    let values = pointers.iter().filter_map(|pointer| document.pointer(pointer)?.as_str());
    values.filter(|text| text.contains(std::path::is_separator)).map(Path::new).collect()
}

/// Returns a mistake for each path in a job's document that [`replace_dataset_paths`] cannot register, because another dataset has the
/// name.
pub(super) async fn find_taken_names(api: &Api, document: &Value) -> anyhow::Result<Vec<SpecError>> {
    let mut mistakes = Vec::new();
    // The values of a sweep may repeat a path.
    let paths: BTreeSet<&Path> = dataset_paths(document).into_iter().filter(|path| path.is_dir()).collect();
    for path in paths {
        if let Some(other) = dataset::find_by_name(api, &dataset_name(path)).await? {
            let detail = dataset::name_taken_message(&other, path);
            mistakes.push(SpecError { pointer: "/data/dataset".into(), detail });
        }
    }
    Ok(mistakes)
}

/// Adds the mistakes that only the server has found (`remote`) to a job's `local` mistakes, so that the user can correct all of them at
/// once. A dataset that is not registered is not a mistake if it exists on this machine, because `lockstep submit` registers it.
pub(super) fn merge_mistakes(
    document: &Value,
    mut local: Vec<SpecError>,
    mut remote: Vec<SpecError>,
) -> Vec<SpecError> {
    let is_on_this_machine =
        dataset_paths(document).into_iter().any(|path| lockstep_data::canonical(path).is_ok());
    let ignores_dataset = is_on_this_machine || local.iter().any(|known| known.pointer == "/data/dataset");
    remote.retain(|mistake| {
        // A local mistake of a sweep also names its trials.
        let is_same =
            |known: &SpecError| known.pointer == mistake.pointer && known.detail.starts_with(&mistake.detail);
        let is_ignored = ignores_dataset && mistake.pointer == "/data/dataset";
        !is_ignored && !local.iter().any(is_same)
    });
    local.append(&mut remote);
    local
}

/// Returns JSON pointers to all values of a key: the value in the job, and the values in its section `sweep`.
fn pointers_to(document: &Value, section: &str, key: &str) -> Vec<String> {
    let mut pointers = vec![format!("/{section}/{key}")];
    for parameter in [format!("{section}/{key}"), format!("{section}.{key}")] {
        let values = format!("/sweep/parameters/{parameter}/values");
        let count = document.pointer(&values).and_then(Value::as_array).map_or(0, Vec::len);
        pointers.extend((0..count).map(|index| format!("{values}/{index}")));
    }
    pointers
}

/// Returns the name under which a folder is registered: the folder's name, with invalid characters replaced.
pub(super) fn dataset_name(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let plain = name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' });
    let plain: String = plain.skip_while(|c| *c == '.').take(100).collect();
    if plain.is_empty() { "dataset".into() } else { plain }
}

/// Reads a TOML file, applies `sets` and makes paths absolute.
///
/// # Errors
/// Exit status 2 if the file cannot be read, or a change is invalid.
pub(super) fn read_document(path: &Path, sets: &[String]) -> anyhow::Result<Value> {
    let mut document = read_document_as_written(path, sets)?;
    make_paths_absolute(&mut document);
    Ok(document)
}

/// Like [`read_document`], with paths as the file has them.
///
/// # Errors
/// See [`read_document`].
pub(super) fn read_document_as_written(path: &Path, sets: &[String]) -> anyhow::Result<Value> {
    let shown = path.display();
    let text = read_text(path)?;
    let mut document = toml_document(&text).map_err(|e| usage_error(format!("{shown}: {}", e.detail)))?;
    apply_sets(&mut document, sets)?;
    Ok(document)
}

/// Applies the values of `--set` to a job's document.
///
/// # Errors
/// Exit status 2 if a change is invalid.
pub(super) fn apply_sets(document: &mut Value, sets: &[String]) -> anyhow::Result<()> {
    sets.iter().try_for_each(|set| {
        apply_set(document, set).map_err(|e| usage_error(format!("--set {}: {e}", shortened(set))))
    })
}

/// Parses and checks a job's document.
///
/// # Errors
/// Exit status 2. The message lists every mistake in the document.
pub(super) fn check(path: &Path, document: &Value) -> anyhow::Result<JobSpec> {
    parse(document).map_err(|mistakes| mistakes_error(path, &mistakes))
}

/// Returns the error for a job file with these mistakes, one per line.
pub(super) fn mistakes_error(path: &Path, mistakes: &[SpecError]) -> anyhow::Error {
    let lines: Vec<_> = mistakes.iter().map(|m| format_mistake(&m.pointer, &m.detail)).collect();
    let count = match lines.len() {
        1 => "a mistake".to_owned(),
        count => format!("{count} mistakes"),
    };
    usage_error(format!("{} has {count}:\n  {}", path.display(), lines.join("\n  ")))
}

/// Parses a job's document, and checks that its strategies fit its network.
///
/// # Errors
/// Returns every mistake in the document.
pub(super) fn parse(document: &Value) -> Result<JobSpec, Vec<SpecError>> {
    let (spec, mut mistakes) = spec::read(document);
    // The strategies are also checked if the document has other mistakes, unless a mistake concerns the network.
    let names_network = document.pointer("/model/arch").is_some();
    let is_network_wrong = mistakes.iter().any(|mistake| mistake.pointer.starts_with("/model"));
    if let Some(spec) = &spec
        && (mistakes.is_empty() || (names_network && !is_network_wrong))
        && let Err(detail) = plan::check(spec)
    {
        mistakes.push(SpecError { pointer: "/parallel".into(), detail });
    }
    match spec.filter(|_| mistakes.is_empty()) {
        Some(spec) => Ok(spec),
        None => Err(mistakes),
    }
}

/// Returns the path of a job's dataset on this machine, if it exists. A relative path refers to the working directory or to the job file's
/// folder.
pub(super) fn find_dataset(spec: &JobSpec, job_file: &Path) -> Option<PathBuf> {
    let given = Path::new(&spec.data.dataset);
    let existing = |path: &Path| lockstep_data::canonical(path).ok();
    existing(given).or_else(|| existing(&job_file.parent()?.join(given)))
}

/// Reads the text of a job file, or of a pipe that this process has inherited (`/dev/stdin`, `<(command)`).
///
/// # Errors
/// Exit status 2 if the file is neither a regular file nor such a pipe, is too large, is not text, or cannot be read.
fn read_text(path: &Path) -> anyhow::Result<String> {
    let error = |detail: &str| usage_error(format!("{}: {detail}", path.display()));
    if path.is_dir() {
        return Err(error("is a folder; give a job's TOML file"));
    }
    if path.try_exists().is_ok_and(|exists| !exists) {
        return Err(error("does not exist; give a job's TOML file"));
    }
    let too_large = "is larger than 1 MiB, the maximum size of a job file";
    let bytes = file::read(path, JOB_FILE_BYTES, too_large).map_err(|detail| error(&detail))?;
    String::from_utf8(bytes).map_err(|_| error("is not text (UTF-8)"))
}

/// Makes paths absolute, because the server has another working directory.
pub(super) fn make_paths_absolute(document: &mut Value) {
    let mut make_absolute = |section: &str, key: &str, is_path: fn(&str) -> bool| {
        for pointer in pointers_to(document, section, key) {
            let Some(value) = document.pointer_mut(&pointer) else { continue };
            if let Some(text) = value.as_str()
                && is_path(text)
                && let Ok(absolute) = lockstep_data::canonical(Path::new(text))
            {
                *value = Value::String(absolute.to_string_lossy().into_owned());
            }
        }
    };
    make_absolute("data", "dataset", |text| text.contains(std::path::is_separator));
    // Other values are ids of checkpoints, names of downloaded weights, or paths on the machine that trains.
    make_absolute("model", "pretrained", |text| !KNOWN_WEIGHTS.contains(&text) && Path::new(text).exists());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_job_file_larger_than_a_mebibyte_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.toml");
        let mut text = String::from("[data]\ndataset = \"d\"\n");
        text.extend(std::iter::repeat_n('#', (1 << 20) - text.len()));
        fs::write(&path, &text).unwrap();
        assert_eq!(read_document(&path, &[]).expect("it is read")["data"]["dataset"], "d");
        fs::write(&path, text + "#").unwrap();
        let message = read_document(&path, &[]).unwrap_err().to_string();
        assert!(
            message.ends_with("job.toml: is larger than 1 MiB, the maximum size of a job file"),
            "{message}"
        );
    }
}
