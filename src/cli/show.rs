//! `lockstep show`: prints one job.

use super::{
    api::{JobArgs, parse_list},
    block_on, output,
};
use lockstep_protocol::{
    Job, JobSpec,
    agent::CheckpointInfo,
    best::best_checkpoint,
    job::Batch,
    labels::DEFAULT_PROJECT,
    network::{NetworkDescription, PlanDescription},
    numbers::{loss, rate, value},
    reason::Reason,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Prints a job.
///
/// # Errors
/// Exit status 2 if the job does not exist.
pub(crate) fn run(args: JobArgs) -> anyhow::Result<()> {
    let api = args.server.api()?;
    block_on(async {
        let job = api.find_job(&args.job).await?;
        let path = format!("/jobs/{}", job.id);
        let response: Value = api.get(&format!("{path}/attempts")).await?;
        if args.server.json {
            // Prints the attempts as the server sent them, including fields of a newer server.
            let attempts = response.get("attempts").cloned().unwrap_or_else(|| json!([]));
            return output::json(&JobWithAttempts { job, attempts });
        }
        let attempts: Vec<AttemptRow> = parse_list(&response, "attempts")?;
        let checkpoints: Vec<CheckpointInfo> = api.list(&format!("{path}/checkpoints")).await?;
        let plan = if job.spec.parallel.mode == "data" {
            None
        } else {
            api.get::<NetworkDescription>(&format!("{path}/network")).await?.plan
        };
        let plan = plan.map(|plan| ("plan".to_owned(), describe_plan(&plan)));
        let last_ranks = attempts.last().and_then(|attempt| attempt.ranks);
        let attempts =
            attempts.iter().map(|attempt| describe_attempt(attempt, job.ranks, job.reason.as_deref()));
        for (key, value) in
            describe_job(&job, &checkpoints, last_ranks).into_iter().chain(plan).chain(attempts)
        {
            output::line(format_args!("{key:<19} {value}"))?;
        }
        let settings = match &job.external {
            Some(run) => {
                serde_json::to_string_pretty(&json!({"config": run.config, "summary": run.summary}))?
            }
            None => format!(
                "# Settings that differ from the defaults, and the recipe's settings; --json prints all settings\n{}",
                changed_settings(&job.spec)?
            ),
        };
        output::line(format_args!("\n{}", settings.trim_end()))
    })
}

/// Returns the settings that differ from the defaults, and the recipe's settings, as a job file.
fn changed_settings(spec: &JobSpec) -> anyhow::Result<String> {
    Ok(toml::to_string(&toml::Table::try_from(spec.non_default())?)?)
}

/// The printed fields of an attempt. A newer server may send a state that this version does not know.
#[derive(Deserialize)]
pub(super) struct AttemptRow {
    pub(super) attempt: u32,
    /// The state's name.
    state: String,
    pub(super) reason: Option<Reason>,
    checkpoint: Option<String>,
    step: Option<u64>,
    ranks: Option<u32>,
}

/// A job as the server sent it, and its attempts.
#[derive(Serialize)]
struct JobWithAttempts {
    #[serde(flatten)]
    job: Job,
    attempts: Value,
}

/// Formats an attempt: `attempt 1   failed at step 41: rank 1 was killed by signal 9 at step 41; it began from checkpoint
/// 1-40; it had 4 of 8 ranks`. Leaves out a reason that is the job's reason, because the job's state shows it.
fn describe_attempt(attempt: &AttemptRow, job_ranks: u32, reason_of_job: Option<&str>) -> (String, String) {
    let mut text = attempt.state.clone();
    if let Some(reason) = attempt.reason.as_ref().filter(|reason| reason_of_job != Some(reason.words())) {
        // Some reasons begin with the state, such as "paused on request".
        text = match reason.words() {
            words if words.starts_with(&text) => words.to_owned(),
            words => format!("{text}: {words}"),
        };
    } else if let Some(step) = attempt.step {
        text += &format!(" at step {step}");
    }
    if let Some(checkpoint) = &attempt.checkpoint {
        text += &format!("; it began from checkpoint {checkpoint}");
    }
    if let Some(ranks) = attempt.ranks.filter(|ranks| (1..job_ranks).contains(ranks)) {
        let has = if ["starting", "running"].contains(&&*attempt.state) { "has" } else { "had" };
        text += &format!("; it {has} {ranks} of {job_ranks} ranks");
    }
    (format!("attempt {}", attempt.attempt), text)
}

/// Describes the plan that the ranks run, with the predicted and the measured time of a step.
fn describe_plan(plan: &PlanDescription) -> String {
    let prediction = plan.predicted.as_ref();
    let predicted = prediction.map(|prediction| format!("; predicted {:.1} ms a step", prediction.step_ms));
    let measured = plan.measured_step_ms.map(|ms| format!("; measured {ms:.1} ms a step"));
    let why = prediction.map(|prediction| format!("; {}", prediction.why));
    let advice = plan.advice().map(|advice| format!("; {advice}"));
    [Some(plan.words.clone()), predicted, measured, why, advice].into_iter().flatten().collect()
}

fn describe_job(job: &Job, checkpoints: &[CheckpointInfo], last_ranks: Option<u32>) -> Vec<(String, String)> {
    let percent = |value: f64| format!("{:.2} %", value * 100.0);
    let state = match &job.reason {
        Some(reason) => format!("{}: {reason}", job.state_in_words()),
        None => job.state_in_words().to_owned(),
    };
    let place = job.queue.as_ref().map(|queue| {
        // The state above may have another reason, such as the end of the last attempt.
        let reason =
            queue.reason.as_ref().map(Reason::words).filter(|words| job.reason.as_deref() != Some(*words));
        let reason = reason.map(|words| format!(": {words}")).unwrap_or_default();
        format!("place {}{reason}", queue.place)
    });
    // A job that has ended had the ranks of its last attempt.
    let ranks = last_ranks.filter(|_| job.state.is_final()).unwrap_or_else(|| job.rank_count_now());
    let fewer = Some(ranks).filter(|ranks| (1..job.ranks).contains(ranks));
    let spec = fewer.map_or_else(|| job.spec.clone(), |ranks| job.spec.clone().on_ranks(ranks));
    let ranks = match fewer {
        _ if job.external.is_some() => format!("{} (run from elsewhere)", job.ranks),
        Some(fewer) => format!("{fewer} of {}", job.ranks),
        None => job.ranks.to_string(),
    };
    let parallel = &spec.parallel;
    let (mut pictures, mut pipeline) = (None, None);
    if job.batch.is_some() {
        let Batch { batch_size, accumulate, global_batch_size, .. } = Batch::of(&spec);
        let micro = if accumulate == 1 { String::new() } else { format!(" x {accumulate} micro-batches") };
        let ranks = parallel.sets_in_words();
        pictures = Some(format!("{global_batch_size}: {batch_size} a rank{micro} x {ranks}"));
        pipeline = parallel.pipeline_in_words(accumulate);
    }
    let divides_state = parallel.optimizer_sharding && job.ranks > 1;
    let lines = [
        ("job", Some(job.id.to_string())),
        ("name", Some(job.name.clone())),
        ("state", Some(state)),
        ("queue", place),
        ("project", Some(job.project.clone()).filter(|project| project != DEFAULT_PROJECT)),
        ("tags", (!job.tags.is_empty()).then(|| job.tags.join(", "))),
        ("notes", job.notes.clone().filter(|notes| !notes.is_empty())),
        ("unreadable", job.unreadable.clone()),
        (
            "forked from",
            job.parent.as_ref().map(|parent| format!("job {}, checkpoint {}", parent.job, parent.checkpoint)),
        ),
        ("ranks", Some(ranks)),
        ("pictures a step", pictures),
        ("pipeline", pipeline),
        (
            "optimizer state",
            divides_state.then(|| "divided over the ranks; the log shows the bytes of each rank".into()),
        ),
        ("attempt", (job.attempt > 0).then(|| job.attempt.to_string())),
        ("on", (!job.agents.is_empty()).then(|| job.agents.join(", "))),
        (
            "step",
            (job.total_steps > 0)
                .then(|| format!("{} of {}, epoch {}", job.step, job.total_steps, job.epoch)),
        ),
        // A job that waits has no speed.
        ("images a second", job.images_per_second.filter(|_| !job.state.is_waiting()).map(rate)),
        ("seconds left", job.eta_secs.map(|v| format!("{v:.0}"))),
        ("loss", job.last.loss.map(|v| format!("{} (newest step)", loss(v)))),
        ("validation accuracy", job.last.accuracy_in_words()),
        ("best", job.best.map(|best| format!("{} at {}", percent(best.value), best.epoch_or_step()))),
        (
            "best checkpoint",
            best_checkpoint(checkpoints)
                .and_then(|(c, _)| Some(format!("{}-{}, {}", c.epoch, c.step, c.accuracy_in_words()?))),
        ),
        ("diagnosis", job.diagnosis.clone()),
        ("created", Some(job.created_at.to_string())),
        ("started", job.started_at.map(|t| t.to_string())),
        ("finished", job.finished_at.map(|t| t.to_string())),
        (
            "ran",
            job.ran_secs.map(|secs| {
                let attempts = if job.state.is_active() { " in earlier attempts" } else { "" };
                format!("{secs:.0} s{attempts}, without pauses and waiting")
            }),
        ),
    ];
    let mut lines: Vec<_> = lines.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
    if job.external.is_some() {
        let others = job.last.by_name().filter(|(name, _)| !["loss", "val_accuracy"].contains(name));
        lines.extend(others.map(|(name, newest)| (name, value(newest))));
    }
    lines.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::spec::{from_json, from_toml};

    #[test]
    fn only_settings_that_differ_from_the_defaults_are_printed() {
        let mut spec = JobSpec { name: "mine".into(), ..JobSpec::default() };
        spec.data.dataset = "pets".into();
        spec.train.lr = 0.25;
        assert_eq!(
            changed_settings(&spec).unwrap(),
            "name = \"mine\"\n\n[data]\ndataset = \"pets\"\n\n[train]\nlr = 0.25\n"
        );
        // The recipe flips pictures, and the default does not.
        let job = json!({
            "name": "mine",
            "data": {"dataset": "pets", "horizontal_flip": false},
            "train": {"recipe": "imagenet"},
        });
        let spec = from_json(&job).unwrap();
        let printed: JobSpec = from_toml(&changed_settings(&spec).unwrap()).unwrap();
        assert_eq!(printed, spec);
        assert!(!printed.data.horizontal_flip);
    }

    #[test]
    fn unknown_states_of_attempts_are_shown_as_sent() {
        let response = json!({"attempts": [
            {"attempt": 1, "state": "hibernating", "reason": null, "checkpoint": null, "step": 41, "ranks": 4, "moons": 2},
            {"attempt": "two"},
            {"attempt": 2, "state": "running", "reason": null, "checkpoint": null, "ranks": 4},
            {"attempt": 3, "state": "failed", "reason": {"code": "eclipse", "words": "too dark"}, "checkpoint": "j-1-40"},
            {"attempt": 4, "state": "paused", "reason": {"code": "eclipse", "words": "paused in the dark"}},
        ]});
        let attempts: Vec<AttemptRow> = parse_list(&response, "attempts").unwrap();
        let lines: Vec<_> = attempts.iter().map(|attempt| describe_attempt(attempt, 8, None)).collect();
        let line = |number: u32, text: &str| (format!("attempt {number}"), text.to_owned());
        let expected = [
            line(1, "hibernating at step 41; it had 4 of 8 ranks"),
            line(2, "running; it has 4 of 8 ranks"),
            line(3, "failed: too dark; it began from checkpoint j-1-40"),
            line(4, "paused in the dark"),
        ];
        assert_eq!(lines, expected);
        let repeated = describe_attempt(&attempts[2], 8, Some("too dark"));
        assert_eq!(repeated, line(3, "failed; it began from checkpoint j-1-40"));
    }
}
