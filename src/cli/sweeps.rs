//! `lockstep sweep`: sweeps that a server runs.

use super::{
    age::age,
    api::{ServerArgs, list},
    block_on, output,
};
use lockstep_protocol::{
    numbers::{percent, value},
    sweep::{Sweep, Trial},
};
use serde_json::{Value, json};

/// Show, pause and cancel sweeps, which `lockstep submit` starts from a file with a section `sweep`
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// List the sweeps, newest first
    List {
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Show a sweep's trials
    Show(SweepArgs),
    /// Pause a sweep: no trial starts or resumes; running trials continue to their next rung, or to their end
    Pause(SweepArgs),
    /// Resume a paused sweep
    Resume(SweepArgs),
    /// Cancel a sweep and its unfinished trials, which keep their checkpoints
    Cancel(SweepArgs),
}

#[derive(clap::Args)]
struct SweepArgs {
    /// The sweep's id, the start of its id, or its name
    sweep: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs the action.
///
/// # Errors
/// Exit status 2 if the sweep does not exist, or its state does not allow the change.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    match args.action {
        Action::List { server } => {
            let all = block_on(server.api()?.all("/sweeps", "sweeps", &[], None))?;
            let sweeps: Vec<Sweep> = list(&Value::Array(all), "sweeps")?;
            if server.json {
                return output::json(&sweeps);
            }
            if sweeps.is_empty() {
                return output::line("no sweeps; submit a job file with a section `sweep`");
            }
            let rows: Vec<_> = sweeps.iter().map(row).collect();
            output::table_of_names(
                ["SWEEP", "NAME", "STATE", "OVER", "BEST", "STEPS", "SUBMITTED"],
                &["NAME"],
                &rows,
            )
        }
        Action::Show(SweepArgs { sweep, server }) => {
            let found = block_on(server.api()?.find_sweep(&sweep, false))?;
            if server.json {
                return output::json(&found);
            }
            output::line(head(&found))?;
            let rows: Vec<_> = found.trials.iter().map(|trial| row_of_trial(&found, trial)).collect();
            let metric = metric_name(&found).to_uppercase();
            output::table_of_names(
                ["TRIAL", "JOB", "STATE", "SETTING", &metric, "EPOCH", "STEPS"],
                &["SETTING"],
                &rows,
            )?;
            output::line(in_words(&found))?;
            found.paused_in_words().map_or(Ok(()), output::line)
        }
        Action::Pause(one) => change(&one, "pause"),
        Action::Resume(one) => change(&one, "resume"),
        Action::Cancel(one) => change(&one, "cancel"),
    }
}

fn change(SweepArgs { sweep, server }: &SweepArgs, what: &str) -> anyhow::Result<()> {
    let api = server.api()?;
    let changed: Sweep = block_on(async {
        let Sweep { id, .. } = api.find_sweep(sweep, true).await?;
        api.post(&format!("/sweeps/{id}/{what}"), &json!({})).await
    })?;
    if server.json { output::json(&changed) } else { output::line(in_words(&changed)) }
}

/// `cifar-lr: asha, compared by val_accuracy after epochs 1, 3, 9, 27`
fn head(sweep: &Sweep) -> String {
    let method = sweep.spec.pointer("/sweep/method").and_then(Value::as_str).unwrap_or_default();
    let rungs: Vec<_> = sweep.rungs.iter().map(u32::to_string).collect();
    let epochs = if rungs.len() == 1 { "epoch" } else { "epochs" };
    format!(
        "{}: {method}, compared by {} after {epochs} {}",
        sweep.name,
        metric_name(sweep),
        rungs.join(", ")
    )
}

/// `val_accuracy` or `val_loss`.
fn metric_name(sweep: &Sweep) -> &str {
    sweep.spec.pointer("/sweep/metric/name").and_then(Value::as_str).unwrap_or("val_accuracy")
}

/// `sweep-1a2b3c4d5e6f is running: 3 of 27 trials over, 400 steps`
fn in_words(sweep: &Sweep) -> String {
    let Sweep { id, state, ended, trial_count, steps, .. } = sweep;
    let why = sweep.reason.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
    format!("{id} is {}{why}: {ended} of {trial_count} trials over, {steps} steps", state.as_str())
}

fn metric(sweep: &Sweep, trial: &Trial) -> String {
    let is_loss = metric_name(sweep) == "val_loss";
    let shown = trial.metric.map(|metric| if is_loss { value(metric) } else { percent(metric) });
    shown.unwrap_or_default()
}

fn setting(trial: &Trial) -> String {
    let one = |(key, value): (&String, &Value)| format!("{key}={value}");
    trial.setting.iter().map(one).collect::<Vec<_>>().join(" ")
}

fn row(sweep: &Sweep) -> [String; 7] {
    let best = sweep.best.as_ref().map(|best| format!("{} {}", metric(sweep, best), setting(best)));
    [
        sweep.id.clone(),
        sweep.name.clone(),
        sweep.state.as_str().to_owned(),
        format!("{} of {}", sweep.ended, sweep.trial_count),
        best.unwrap_or_default(),
        sweep.steps.to_string(),
        format!("{} ago", age(sweep.created_at)),
    ]
}

fn row_of_trial(sweep: &Sweep, trial: &Trial) -> [String; 7] {
    let state = match trial.state {
        Some(state) => state.as_str(),
        None if trial.deleted => "deleted",
        None => "not started",
    };
    let is_best = sweep.best.as_ref().is_some_and(|best| best.number == trial.number);
    [
        trial.number.to_string(),
        trial.job.as_ref().map(ToString::to_string).unwrap_or_default(),
        format!("{state}{}", if is_best { ", best" } else { "" }),
        setting(trial),
        metric(sweep, trial),
        trial.epoch.map(|epoch| epoch.to_string()).unwrap_or_default(),
        trial.step.to_string(),
    ]
}
