//! `lockstep edit`: changes a job's priority, project, notes or tags.

use super::{api::ServerArgs, block_on, output};
use clap::ArgGroup;
use lockstep_protocol::Job;
use serde_json::{Map, Value};

/// Change a job's priority in the queue, its project, notes or tags
#[derive(clap::Args)]
#[command(
    override_usage = "lockstep edit [OPTIONS] <JOB>",
    group = ArgGroup::new("change").required(true).multiple(true).args(["priority", "project", "notes", "tags"])
)]
pub(crate) struct Args {
    /// The job's id, the start of its id, or its name
    job: String,
    /// Priority from -1000 to 1000: waiting jobs with a higher priority start first. For a running job it takes effect when the job waits
    /// again
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

/// Sends the change and prints the job's new properties.
///
/// # Errors
/// Exit status 2 if the job does not exist or a value is invalid.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = args.server.api()?;
    let fields = [
        ("priority", args.priority.map(Value::from)),
        ("project", args.project.map(Value::from)),
        ("notes", args.notes.map(Value::from)),
        ("tags", args.tags.map(Value::from)),
    ];
    // Absent fields stay unchanged.
    let change: Map<String, Value> =
        fields.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
    block_on(async {
        let job = api.find_job(&args.job).await?;
        let path = format!("/jobs/{}", job.id);
        api.patch::<Value>(&path, &change).await?;
        let job: Job = api.get(&path).await?;
        let tags = if job.tags.is_empty() { "none".into() } else { job.tags.join(", ") };
        let (id, name, priority) = (&job.id, output::one_line(&job.name), job.spec.priority);
        let notes = job.notes.as_deref().filter(|notes| !notes.is_empty());
        let notes = notes.map(|notes| format!(", notes {}", output::one_line(notes))).unwrap_or_default();
        let is_deferred = args.priority.is_some() && job.state.is_active();
        let when = if is_deferred { " (takes effect when the job waits again)" } else { "" };
        let text =
            format!("{id} {name}: priority {priority}{when}, project {}, tags {tags}{notes}", job.project);
        output::print(args.server.json, &job, text)
    })
}
