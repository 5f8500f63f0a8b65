//! `lockstep show`: one job.

use super::{
    api::{Api, ServerArgs},
    block_on, output,
};
use lockstep_protocol::Job;

/// Show one job
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Its id, the start of its id, or its name
    job: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// Prints what the server knows of a job.
///
/// # Errors
/// Exit status 2 when there is no such job.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let api = Api::new(&args.server.server)?;
    let job = block_on(api.find_job(&args.job))?;
    if args.server.json {
        return output::json(&job);
    }
    for (key, value) in lines(&job) {
        output::line(format_args!("{key:<20}{value}"))?;
    }
    output::line(format_args!("\n{}", toml::to_string(&job.spec)?.trim_end()))
}

fn lines(job: &Job) -> Vec<(&'static str, String)> {
    let percent = |value: f64| format!("{:.2} %", value * 100.0);
    let mut lines = vec![("job", job.id.to_string()), ("name", job.name.clone())];
    let state = match &job.reason {
        Some(reason) => format!("{}: {reason}", job.state),
        None => job.state.to_string(),
    };
    lines.push(("state", state));
    lines.push(("ranks", job.ranks.to_string()));
    if job.attempt > 0 {
        lines.push(("attempt", job.attempt.to_string()));
    }
    if !job.agents.is_empty() {
        lines.push(("on", job.agents.join(", ")));
    }
    if job.total_steps > 0 {
        lines.push(("step", format!("{} of {}, epoch {}", job.step, job.total_steps, job.epoch)));
    }
    let optional = [
        ("images a second", job.images_per_second.map(|v| format!("{v:.0}"))),
        ("seconds left", job.eta_secs.map(|v| format!("{v:.0}"))),
        ("loss", job.last.loss.map(|v| format!("{v:.4}"))),
        ("validation accuracy", job.last.val_accuracy.map(percent)),
        ("best", job.best.map(|best| format!("{} after epoch {}", percent(best.value), best.epoch))),
        ("created", Some(job.created_at.to_string())),
        ("started", job.started_at.map(|t| t.to_string())),
        ("finished", job.finished_at.map(|t| t.to_string())),
    ];
    lines.extend(optional.into_iter().filter_map(|(key, value)| Some((key, value?))));
    lines
}
