//! `lockstep submit`: submits a job.

use super::{
    api::{Api, ServerArgs, mistake},
    block_on, dataset, file, output, watch, wrong,
};
use lockstep_protocol::{
    Job, JobSpec,
    spec::{SpecError, apply_set, from_json, shortened, toml_document},
};
use serde_json::Value;
use std::{
    io::{self, IsTerminal as _},
    path::{Path, PathBuf},
};

/// What the server takes as a specification, too.
const JOB_FILE_BYTES: u64 = 1 << 20;

/// Submit a job
///
/// On a terminal its progress is shown until it ends; Ctrl-C ends that and not the job. Elsewhere, and with --detach, the job's id and
/// address are printed. A data.dataset that is a path stands for the dataset that is registered there, and is registered if it is not.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The job's specification, a TOML file
    #[arg(value_name = "JOB.toml")]
    job: PathBuf,
    /// Change a key of it, such as train.lr=0.1 (may be repeated)
    #[arg(long = "set", value_name = "KEY.PATH=VALUE")]
    sets: Vec<String>,
    /// The project that it belongs to, in place of the file's
    #[arg(long)]
    project: Option<String>,
    /// A tag, besides the file's (may be repeated)
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Notes on it, in place of the file's
    #[arg(long)]
    notes: Option<String>,
    /// Show its progress until it ends, as on a terminal without --detach; exit with status 1 unless it succeeds
    #[arg(long)]
    watch: bool,
    /// Print its id and address alone, as where there is no terminal
    #[arg(long, conflicts_with = "watch")]
    detach: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Checks the specification here, then there, and submits it.
///
/// # Errors
/// Exit status 2 with every mistake in the specification on a line of its own.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let mut document = document(&args.job, &args.sets)?;
    label(&mut document, &args);
    let own = from_json(&document).err().unwrap_or_default();
    let api = match args.server.api() {
        Ok(api) => api,
        Err(error) if own.is_empty() => return Err(error),
        Err(_) => return check(&args.job, &document).map(drop),
    };
    // Somebody at a terminal wants to see it; a program reads the id.
    let watches = args.watch
        || !args.detach && !args.server.json && io::stdout().is_terminal() && io::stderr().is_terminal();
    block_on(async {
        let named = name_dataset(&api, &mut document, own.is_empty()).await;
        if !own.is_empty() {
            return Err(all_mistakes(&api, &args.job, &document, &own).await);
        }
        named?;
        let job: Job = api.post("/jobs", &document).await?;
        job.warnings.iter().for_each(|warning| output::warn(format_args!("warning: {warning}")));
        if watches {
            if !args.server.json {
                output::line(format_args!("{}  {}/jobs/{}", job.id, api.base(), job.id))?;
            }
            watch::announce(&job);
            return watch::to_the_end(&api, job, args.server.json).await;
        }
        if args.server.json {
            output::json(&job)
        } else {
            output::line(format_args!("{}  {}/jobs/{}", job.id, api.base(), job.id))
        }
    })
}

/// Puts project, tags and notes of the command line into the specification.
fn label(document: &mut Value, args: &Args) {
    let Value::Object(table) = document else { return };
    for (key, value) in [("project", &args.project), ("notes", &args.notes)] {
        if let Some(value) = value {
            table.insert(key.to_owned(), value.as_str().into());
        }
    }
    if args.tags.is_empty() {
        return;
    }
    let tags = table.entry("tags").or_insert_with(|| Value::Array(Vec::new()));
    // What is no list is the check's to name.
    if let Value::Array(tags) = tags {
        tags.extend(args.tags.iter().map(|tag| Value::String(tag.clone())));
    }
}

/// A job with mistakes of its own, with those that only the server knows: all can be mended at once.
async fn all_mistakes(api: &Api, path: &Path, document: &Value, own: &[SpecError]) -> anyhow::Error {
    let mut lines: Vec<_> = own.iter().map(|m| mistake(&m.pointer, &m.detail)).collect();
    for (pointer, detail) in api.mistakes(document).await {
        let line = mistake(&pointer, &detail);
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    wrong(mistaken(path, &lines))
}

/// Puts the name of the dataset that is registered at a path in the place of that path. One that is not is registered under the name
/// of its folder if it `may` be: the file that `lockstep init` writes is for `train` and for this.
pub(super) async fn name_dataset(api: &Api, document: &mut Value, may: bool) -> anyhow::Result<()> {
    let private = document.get("private").and_then(Value::as_bool).unwrap_or(false);
    let Some(given) = document.pointer_mut("/data/dataset") else { return Ok(()) };
    let Some(path) = given.as_str().filter(|text| text.contains(std::path::is_separator)).map(PathBuf::from)
    else {
        return Ok(());
    };
    let found = match dataset::at(api, &path).await? {
        Some(found) => found,
        None if may && path.is_dir() => {
            let name = dataset_name(&path);
            output::warn(format_args!("registering {} as the dataset {name}", path.display()));
            dataset::register_as(api, &name, &path, private).await?
        }
        None => return Ok(()),
    };
    *given = Value::String(found.name);
    Ok(())
}

/// What a folder is registered as: its name, with what no dataset's name has left out.
fn dataset_name(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let plain = name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' });
    let plain: String = plain.skip_while(|c| *c == '.').take(100).collect();
    if plain.is_empty() { "dataset".into() } else { plain }
}

/// Reads a TOML file and applies `sets`.
///
/// # Errors
/// Exit status 2: the file cannot be read, or a change is none.
pub(super) fn document(path: &Path, sets: &[String]) -> anyhow::Result<Value> {
    let shown = path.display();
    let text = job_file(path)?;
    let mut document = toml_document(&text).map_err(|e| wrong(format!("{shown}: {}", e.detail)))?;
    for set in sets {
        apply_set(&mut document, set).map_err(|e| wrong(format!("--set {}: {e}", shortened(set))))?;
    }
    make_paths_absolute(&mut document);
    Ok(document)
}

/// Looks for mistakes.
///
/// # Errors
/// Exit status 2: all that is wrong in it.
pub(super) fn check(path: &Path, document: &Value) -> anyhow::Result<JobSpec> {
    from_json(document).map_err(|mistakes| {
        let lines: Vec<_> = mistakes.iter().map(|m| mistake(&m.pointer, &m.detail)).collect();
        wrong(mistaken(path, &lines))
    })
}

/// Mistakes in a job's file, each on a line of its own.
pub(super) fn mistaken(path: &Path, lines: &[String]) -> String {
    format!("{} has {}:\n  {}", path.display(), count(lines.len(), "mistake"), lines.join("\n  "))
}

/// The text of a job file, or of a pipe that the shell has connected.
///
/// # Errors
/// Exit status 2: it is no regular file, too large for a specification, no text, or cannot be read.
pub(crate) fn job_file(path: &Path) -> anyhow::Result<String> {
    let failed = |detail: &str| wrong(format!("{}: {detail}", path.display()));
    if path.is_dir() {
        return Err(failed("is a folder; give a job's TOML file"));
    }
    let larger = "is larger than 1 MiB; a job's TOML file is not";
    let bytes = file::read(path, JOB_FILE_BYTES, larger).map_err(|detail| failed(&detail))?;
    String::from_utf8(bytes).map_err(|_| failed("is no text (UTF-8)"))
}

/// A path means one relative to here; the server stands somewhere else.
fn make_paths_absolute(document: &mut Value) {
    let mut absolute = |pointer: &str, is_path: fn(&str) -> bool| {
        let Some(value) = document.pointer_mut(pointer) else { return };
        if let Some(text) = value.as_str()
            && is_path(text)
            && let Ok(absolute) = lockstep_worker::data::canonical(Path::new(text))
        {
            *value = Value::String(absolute.to_string_lossy().into_owned());
        }
    };
    absolute("/data/dataset", |text| text.contains(std::path::is_separator));
    // Else a checkpoint's id, or a path on the machine that trains.
    absolute("/model/pretrained", |text| Path::new(text).exists());
}

fn count(n: usize, noun: &str) -> String {
    if n == 1 { format!("a {noun}") } else { format!("{n} {noun}s") }
}
