//! `lockstep show`: one job.

use super::{
    api::{Api, ServerArgs},
    block_on, output,
};
use lockstep_protocol::{Job, attempt::Attempt};
use serde::{Deserialize, Serialize};

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
    let (job, Attempts { attempts }) = block_on(async {
        let job = api.find_job(&args.job).await?;
        let attempts = api.get(&format!("/jobs/{}/attempts", job.id)).await?;
        anyhow::Ok((job, attempts))
    })?;
    if args.server.json {
        return output::json(&Shown { job, attempts });
    }
    for (key, value) in lines(&job).into_iter().chain(attempts.iter().map(line)) {
        output::line(format_args!("{key:<20}{value}"))?;
    }
    output::line(format_args!("\n{}", toml::to_string(&job.spec)?.trim_end()))
}

/// The answer of `GET /jobs/{id}/attempts`.
#[derive(Deserialize)]
struct Attempts {
    attempts: Vec<Attempt>,
}

/// A job as the server tells it, and its attempts.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    job: Job,
    attempts: Vec<Attempt>,
}

/// `attempt 1   failed at step 41: rank 1 was killed by signal 9 at step 41; it began from 1-40`
fn line(attempt: &Attempt) -> (String, String) {
    let mut told = attempt.state.to_string();
    if let Some(reason) = &attempt.reason {
        told += &format!(": {}", reason.words());
    } else if let Some(step) = attempt.step {
        told += &format!(" at step {step}");
    }
    if let Some(checkpoint) = &attempt.checkpoint {
        told += &format!("; it began from checkpoint {checkpoint}");
    }
    (format!("attempt {}", attempt.attempt), told)
}

fn lines(job: &Job) -> Vec<(String, String)> {
    let percent = |value: f64| format!("{:.2} %", value * 100.0);
    let mut lines = vec![("job", job.id.to_string()), ("name", job.name.clone())];
    let state = match &job.reason {
        Some(reason) => format!("{}: {reason}", job.state),
        None => job.state.to_string(),
    };
    lines.push(("state", state));
    if let Some(flaw) = &job.unreadable {
        lines.push(("unreadable", flaw.clone()));
    }
    if let Some(parent) = &job.parent {
        lines.push(("forked from", format!("job {}, checkpoint {}", parent.job, parent.checkpoint)));
    }
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
    lines.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
