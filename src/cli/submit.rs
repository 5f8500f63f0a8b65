//! `lockstep submit`: a specification becomes a job.

use super::{
    api::{Api, ServerArgs, mistake},
    block_on, output, watch, wrong,
};
use lockstep_protocol::{
    Job,
    spec::{apply_set, from_json, shortened, toml_document},
};
use serde_json::Value;
use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

/// What the server takes as a specification, too.
const JOB_FILE_BYTES: u64 = 1 << 20;

/// Submit a job
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The job's specification, a TOML file
    #[arg(value_name = "JOB.toml")]
    job: PathBuf,
    /// Change a key of it, such as train.lr=0.1 (may be repeated)
    #[arg(long = "set", value_name = "KEY.PATH=VALUE")]
    sets: Vec<String>,
    /// Stay and show its progress; exit with 1 unless it succeeds
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Checks the specification here, then there, and submits it.
///
/// # Errors
/// Exit status 2 with every mistake in the specification on a line of its own.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let document = read(&args.job, &args.sets)?;
    let api = Api::new(&args.server.server)?;
    block_on(async {
        let job: Job = api.post("/jobs", &document).await?;
        job.warnings.iter().for_each(|warning| output::warn(format_args!("warning: {warning}")));
        if args.watch {
            if !args.server.json {
                output::line(format_args!("{}  {}/jobs/{}", job.id, api.base(), job.id))?;
            }
            return watch::to_the_end(&api, job, args.server.json).await;
        }
        if args.server.json {
            output::json(&job)
        } else {
            output::line(format_args!("{}  {}/jobs/{}", job.id, api.base(), job.id))
        }
    })
}

/// Reads a TOML file, applies `sets` and looks for mistakes.
///
/// # Errors
/// Exit status 2: the file cannot be read, or all that is wrong in it.
fn read(path: &Path, sets: &[String]) -> anyhow::Result<Value> {
    let shown = path.display();
    let text = job_file(path)?;
    let mut document = toml_document(&text).map_err(|e| wrong(format!("{shown}: {}", e.detail)))?;
    for set in sets {
        apply_set(&mut document, set).map_err(|e| wrong(format!("--set {}: {e}", shortened(set))))?;
    }
    make_paths_absolute(&mut document);
    from_json(&document).map_err(|mistakes| {
        let lines: Vec<_> = mistakes.iter().map(|m| mistake(&m.pointer, &m.detail)).collect();
        wrong(format!("{shown} has {}:\n  {}", count(lines.len(), "mistake"), lines.join("\n  ")))
    })?;
    Ok(document)
}

/// The text of a job file, or of a pipe that one comes through.
///
/// # Errors
/// Exit status 2: it is a folder, too large for a specification, no text, or cannot be read.
pub(crate) fn job_file(path: &Path) -> anyhow::Result<String> {
    let failed = |e: io::Error| wrong(format!("{}: {e}", path.display()));
    let file = File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.is_dir() {
        return Err(wrong(format!("{}: is a folder; give a job's TOML file", path.display())));
    }
    let mut bytes = Vec::new();
    file.take(JOB_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > JOB_FILE_BYTES {
        return Err(wrong(format!("{}: is larger than 1 MiB; a job's TOML file is not", path.display())));
    }
    String::from_utf8(bytes).map_err(|_| wrong(format!("{}: is no text (UTF-8)", path.display())))
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
