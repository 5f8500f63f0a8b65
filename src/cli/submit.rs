//! `lockstep submit`: submits a job.

use super::{
    api::{Api, ServerArgs, mistake},
    block_on,
    job_file::{check, document, mistaken, name_dataset},
    output,
    sweep::{self, Sweep},
    watch, wrong,
};
use lockstep_protocol::{
    Job,
    spec::{SpecError, from_json},
};
use serde_json::Value;
use std::{
    io::{self, IsTerminal as _},
    path::{Path, PathBuf},
};

/// Submit a job
///
/// On a terminal its progress is shown until it ends; Ctrl-C ends that and not the job. Elsewhere, and with --detach, the job's id and
/// address are printed. A data.dataset that is a path stands for the dataset that is registered there, and is registered if it is not.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The job's specification, a TOML file
    #[arg(value_name = "JOB.toml")]
    job: PathBuf,
    /// Change a key of it, such as train.lr=0.1 (may be repeated); without a value, as in train.epochs=, the key is left out
    #[arg(long = "set", value_name = "KEY.PATH=VALUE")]
    sets: Vec<String>,
    /// Submit a job for each of these values of a key; with several keys, for each combination (may be repeated)
    #[arg(long = "sweep", value_name = "KEY.PATH=V1,V2,...", conflicts_with = "watch")]
    sweeps: Vec<String>,
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
    if !args.sweeps.is_empty() {
        return run_sweep(&args, &document);
    }
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

/// Submits a job for each combination of the sweep's values.
fn run_sweep(args: &Args, document: &Value) -> anyhow::Result<()> {
    let sweep = Sweep::parse(&args.sweeps)?;
    let api = args.server.api()?;
    block_on(async {
        let tag = sweep::new_tag();
        let documents = sweep::prepare(&api, &args.job, &sweep, document, &tag, false).await?;
        let submitted = sweep::submit(&api, "/jobs", tag, &documents).await?;
        submitted.show(&api, args.server.json)
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
    for (pointer, detail) in api.mistakes(document, false).await {
        let line = mistake(&pointer, &detail);
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    wrong(mistaken(path, &lines))
}
