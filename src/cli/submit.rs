//! `lockstep submit`: submits a job or a sweep.

use super::{
    api::ServerArgs,
    block_on,
    job_file::{self, UnknownPath, check, merge_mistakes, mistakes_error, replace_dataset_paths},
    output, sweep, sweeps, watch,
};
use lockstep_protocol::{Job, sweep::Sweep};
use serde_json::Value;
use std::io::{self, IsTerminal as _};

/// Submit a job or a sweep
///
/// On a terminal, the command shows the job's progress until the job ends; Ctrl-C ends the display, not the job. Without a terminal, and
/// with --detach, the command prints the job's id and URL. If data.dataset is a path, it stands for the dataset that is registered at that
/// path; an unregistered path is registered. A section `sweep` in the file, --sweep or --folds makes the submission a sweep: the server
/// starts a job for each of the sweep's settings.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    file: job_file::FileArgs,
    /// Project of the job, instead of the file's
    #[arg(long)]
    project: Option<String>,
    /// Tag, in addition to the file's tags (may be repeated)
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Notes on the job, instead of the file's notes
    #[arg(long)]
    notes: Option<String>,
    /// Show the progress of the job or sweep until it ends, even without a terminal; exit with status 1 if the job does not succeed, the
    /// sweep does not finish, or a trial that the sweep does not end early does not succeed. With --json, print each event of a job as a
    /// line and the job as the last line, with `"type": "job"`, or the sweep at its end as the only line
    #[arg(long)]
    watch: bool,
    /// Print only the id and URL, even on a terminal
    #[arg(long, conflicts_with = "watch")]
    detach: bool,
    #[command(flatten)]
    server: ServerArgs,
}

/// Checks the specification locally and on the server, and submits it.
///
/// # Errors
/// Exit status 2. The message lists every mistake in the specification.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let mut document = args.file.read()?;
    add_labels(&mut document, &args);
    if sweep::check(&args.file.job, &document)?.is_some() {
        return submit_sweep(&args, document);
    }
    let local_mistakes = job_file::parse(&document).err().unwrap_or_default();
    let api = match args.server.api() {
        Ok(api) => api,
        Err(error) if local_mistakes.is_empty() => return Err(error),
        Err(_) => return check(&args.file.job, &document).map(drop),
    };
    block_on(async {
        if !local_mistakes.is_empty() {
            // The server may be unreachable, or not allow the requests.
            let _ = replace_dataset_paths(&api, &mut document, UnknownPath::Keep).await;
            let found = api.find_mistakes(&document).await.unwrap_or_default();
            let mistakes = merge_mistakes(&document, local_mistakes, found);
            return Err(mistakes_error(&args.file.job, &mistakes));
        }
        let post = async |document: &Value| api.post("/jobs", document).await;
        let job: Job = job_file::submit(&api, &mut document, post).await?;
        output::warn_each(&job.warnings);
        let (follows, as_json) = (shows_progress(&args), args.server.json);
        // `show_to_end` with JSON prints the job itself.
        if !(follows && as_json) {
            output::print(as_json, &job, format_args!("{0}  {1}/jobs/{0}", job.id, api.base))?;
        }
        if follows { watch::show_to_end(&api, job, as_json).await } else { Ok(()) }
    })
}

/// Whether to show the progress: for a person on a terminal, but not for a program that reads the id.
fn shows_progress(args: &Args) -> bool {
    args.watch
        || !args.detach && !args.server.json && io::stdout().is_terminal() && io::stderr().is_terminal()
}

/// Submits a file with a section `sweep`, after the local checks.
fn submit_sweep(args: &Args, mut document: Value) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let post = async |document: &Value| api.post_once("/sweeps", document).await;
        let sweep: Sweep = job_file::submit(&api, &mut document, post).await?;
        let (follows, as_json) = (shows_progress(args), args.server.json);
        // `follow_to_end` with JSON prints only the sweep at its end.
        if !(follows && as_json) {
            sweeps::announce(&api, &sweep, as_json)?;
        }
        if args.file.folds.is_some() && !as_json {
            let (base, id) = (&api.base, &sweep.id);
            output::line(format_args!("mean and standard deviation: {base}/jobs?tag={id}&group_by=tag"))?;
        }
        if follows { sweeps::follow_to_end(&api, sweep, as_json).await } else { Ok(()) }
    })
}

/// Writes project, tags and notes of the command line into the specification.
fn add_labels(document: &mut Value, args: &Args) {
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
    // If `tags` is not a list, the later check reports it.
    if let Value::Array(tags) = tags {
        tags.extend(args.tags.iter().map(|tag| Value::String(tag.clone())));
    }
}
