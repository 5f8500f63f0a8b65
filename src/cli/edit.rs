//! `lockstep edit`: changes a job's priority, project, notes or tags.

use super::{api::ServerArgs, block_on, output};
use clap::ArgGroup;
use lockstep_protocol::Job;
use reqwest::Method;
use serde::Serialize;

/// Change a job's priority in the queue, its project, notes or tags
#[derive(clap::Args)]
#[command(
    override_usage = "lockstep edit [OPTIONS] <JOB>",
    group = ArgGroup::new("change").required(true).multiple(true).args(["priority", "project", "notes", "tags"])
)]
pub(crate) struct Args {
    /// The job's id, the start of its id, or its name
    job: String,
    /// Priority from -1000 to 1000: waiting jobs with a higher priority start first. It has no effect on a running job
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    priority: Option<i32>,
    /// The project to which the job belongs
    #[arg(long)]
    project: Option<String>,
    /// Notes that replace the job's notes
    #[arg(long)]
    notes: Option<String>,
    /// Tag (may be repeated); these tags replace the job's tags
    #[arg(long = "tag", value_name = "TAG")]
    tags: Option<Vec<String>>,
    #[command(flatten)]
    server: ServerArgs,
}

/// The body of the request. Absent fields stay unchanged.
#[derive(Serialize)]
struct Change {
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    project: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    notes: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tags: Option<Vec<String>>,
}

/// Sends the change and prints the job's new properties.
///
/// # Errors
/// Exit status 2 if the job does not exist or a value is invalid.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    let change =
        Change { priority: args.priority, project: args.project, notes: args.notes, tags: args.tags };
    block_on(async {
        let job = api.find_job(&args.job).await?;
        let path = format!("/jobs/{}", job.id);
        api.request(Method::PATCH, &path, Some(&change)).await?;
        let job: Job = api.get(&path).await?;
        if args.server.json {
            return output::json(&job);
        }
        let tags = if job.tags.is_empty() { "none".into() } else { job.tags.join(", ") };
        output::line(format_args!(
            "{} {}: priority {}, project {}, tags {tags}",
            job.id,
            output::one_line(&job.name),
            job.spec.priority,
            job.project
        ))
    })
}
