//! `lockstep sweep`: sweeps that a server runs.

use super::{
    age::age,
    api::{Api, Outage, ServerArgs},
    block_on,
    compare::{BestAccuracy, explain_insignificance},
    confirm::confirm,
    delete::delete_all,
    output,
    sweep::setting_in_words,
};
use lockstep_protocol::{
    JobState,
    numbers::{plural, value},
    sweep::{Sweep, SweepState, Trial},
};
use serde_json::{Value, json};
use std::{collections::BTreeSet, time::Duration};

#[derive(clap::Subcommand)]
pub(crate) enum Action {
    /// List the sweeps, newest first
    List(ServerArgs),
    /// Show a sweep's trials
    Show(SweepArgs),
    /// Pause a sweep: no trial starts or resumes; a running trial continues to its end, or to its next rung (an epoch at which trials are
    /// compared)
    Pause(SweepArgs),
    /// Resume a paused sweep
    Resume(SweepArgs),
    /// Cancel a sweep and its unfinished trials; the trials keep their checkpoints
    Cancel(SweepArgs),
    /// Delete a sweep that has ended; its jobs remain, as jobs without a sweep, unless --jobs is given
    Delete {
        #[command(flatten)]
        args: SweepArgs,
        /// Also delete the sweep's jobs, with their history, logs and checkpoints
        #[arg(long)]
        jobs: bool,
        /// Do not ask for confirmation; required without a terminal
        #[arg(long, short)]
        yes: bool,
    },
}

#[derive(clap::Args)]
pub(crate) struct SweepArgs {
    /// The sweep's id, the start of its id, or its name
    sweep: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs the action.
///
/// # Errors
/// Exit status 2 if the sweep does not exist, or its state does not allow the change.
pub(crate) fn run(action: Action) -> anyhow::Result<()> {
    match action {
        Action::List(server) => {
            let sweeps: Vec<Sweep> = block_on(server.api()?.list("/sweeps"))?;
            if server.json {
                return output::json(&sweeps);
            }
            if sweeps.is_empty() {
                return output::line("no sweeps; submit a job file with a section `sweep`, or with --sweep");
            }
            output::table_of_names(
                &["SWEEP", "NAME", "STATE", "ENDED", "BEST", "STEPS", "SUBMITTED"],
                &["NAME"],
                sweeps.iter().map(row),
            )
        }
        Action::Show(SweepArgs { sweep, server }) => {
            let api = server.api()?;
            let sweep = block_on(api.find_sweep(&sweep))?;
            if server.json {
                return output::json(&sweep);
            }
            output::line(describe_method(&sweep))?;
            let metric = format!("BEST {}", sweep.metric.to_uppercase());
            output::table_of_names(
                &["TRIAL", "JOB", "STATE", "SETTING", &metric, "EPOCH", "STEPS"],
                &["SETTING"],
                sweep.trials.iter().map(|trial| row_of_trial(&sweep, trial)),
            )?;
            output::line(describe(&sweep))?;
            let notes = [mean_of_folds(&sweep), explain_close_result(&sweep), sweep.paused_in_words()];
            notes.into_iter().flatten().try_for_each(output::line)
        }
        Action::Pause(args) => change_state(&args, "pause"),
        Action::Resume(args) => change_state(&args, "resume"),
        Action::Cancel(args) => change_state(&args, "cancel"),
        Action::Delete { args: SweepArgs { sweep, server }, jobs, yes } => {
            let api = server.api()?;
            let id = block_on(async {
                let Sweep { id, name, trials, .. } = api.find_only_sweep(&sweep).await?;
                let trial_jobs: Vec<_> =
                    trials.into_iter().filter_map(|trial| trial.job).filter(|_| jobs).collect();
                let question = if jobs {
                    format!(
                        "Delete the sweep {name} ({id}) and {} with their history, logs and checkpoints? This cannot be undone.",
                        plural(trial_jobs.len() as u64, "job")
                    )
                } else {
                    format!("Delete the sweep {name} ({id})? Its jobs remain.")
                };
                confirm(yes, question, &id)?;
                delete_all(&api, &trial_jobs, server.json).await?;
                api.delete(&format!("/sweeps/{id}")).await?;
                Ok(id)
            })?;
            output::print(server.json, &json!({ "deleted": id }), format_args!("{id} deleted"))
        }
    }
}

/// Prints a submitted sweep: its warnings, id, URL, number of trials and name.
///
/// # Errors
/// Standard output is closed.
pub(crate) fn announce(api: &Api, sweep: &Sweep, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        return output::json(sweep);
    }
    output::warn_each(&sweep.warnings);
    let trials = plural(u64::from(sweep.trial_count), "trial");
    output::line(format_args!("{0}  {1}/sweeps/{0}  {trials} of {2}", sweep.id, api.base, sweep.name))
}

/// Interval between two requests for the state of a sweep.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Follows a sweep until it ends: prints a line for each trial that ends, then the best trial, or the mean of the folds of a
/// cross-validation. With `as_json`, prints only the final sweep, as a line.
///
/// # Errors
/// A trial did not succeed, the sweep did not finish, or the server was unreachable for too long.
pub(crate) async fn follow_to_end(api: &Api, mut sweep: Sweep, as_json: bool) -> anyhow::Result<()> {
    output::warn(format_args!(
        "Ctrl-C ends this display and not the sweep. `lockstep sweep show {0}` shows its trials; `lockstep sweep cancel {0}` stops the \
         sweep",
        sweep.id
    ));
    let path = format!("/sweeps/{}", sweep.id);
    let (mut printed_trials, mut outage) = (BTreeSet::new(), Outage::default());
    while sweep.finished_at.is_none() {
        tokio::time::sleep(POLL_INTERVAL).await;
        let previous_state = sweep.state;
        match api.get(&path).await {
            Ok(newest) => sweep = newest,
            Err(error) => {
                outage.tolerate(error, |text| output::warn(text))?;
                continue;
            }
        }
        outage.report_restored(|text| output::warn(text));
        if sweep.state != previous_state && sweep.finished_at.is_none() {
            output::warn(describe(&sweep));
        }
        let has_ended = |trial: &&Trial| trial.state.is_some_and(JobState::is_final);
        for trial in sweep.trials.iter().filter(has_ended) {
            if printed_trials.insert(trial.number) && !as_json {
                output::line(trial_in_words(&sweep, trial))?;
            }
        }
    }
    if as_json {
        output::line(serde_json::to_string(&sweep)?)?;
    } else {
        output::line(describe(&sweep))?;
        if is_cross_validation(&sweep) {
            mean_of_folds(&sweep).map_or(Ok(()), output::line)?;
        } else if let Some(best) = &sweep.best {
            output::line(format_args!("best: {}", trial_in_words(&sweep, best)))?;
        }
    }
    let is_unsuccessful = |trial: &&Trial| trial.state != Some(JobState::Succeeded) && !trial.ended_early;
    let failure_count = sweep.trials.iter().filter(is_unsuccessful).count();
    anyhow::ensure!(sweep.state == SweepState::Finished, "the sweep is {}", sweep.state.as_str());
    anyhow::ensure!(failure_count == 0, "{} did not succeed", plural(failure_count as u64, "trial"));
    Ok(())
}

/// Whether the trials differ only in `data.fold`, as with `--folds`. Then no trial is the best, because each trial has other validation
/// pictures.
fn is_cross_validation(sweep: &Sweep) -> bool {
    !sweep.trials.is_empty() && sweep.trials.iter().all(|trial| trial.setting.keys().eq(["data.fold"]))
}

/// Formats the result of a cross-validation: `val_accuracy 84.20 ± 1.31 % (mean ± standard deviation of 3 of 3 folds)`. `None` for other
/// sweeps, and before two trials have succeeded.
fn mean_of_folds(sweep: &Sweep) -> Option<String> {
    let succeeded = sweep.trials.iter().filter(|trial| trial.state == Some(JobState::Succeeded));
    let values: Vec<f64> = succeeded.filter_map(|trial| trial.metric).collect();
    if !is_cross_validation(sweep) || values.len() < 2 {
        return None;
    }
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (count - 1.0)).sqrt();
    let result = match sweep.metric.as_str() {
        "val_loss" => format!("{} ± {}", value(mean), value(deviation)),
        _ => format!("{:.2} ± {:.2} %", 100.0 * mean, 100.0 * deviation),
    };
    let (metric, folds) = (&sweep.metric, plural(u64::from(sweep.trial_count), "fold"));
    Some(format!("{metric} {result} (mean ± standard deviation of {count} of {folds})"))
}

/// Explains why the order of the two best trials may be chance. `None` if the best trial is clearly better, or the trials have different
/// validation pictures.
fn explain_close_result(sweep: &Sweep) -> Option<String> {
    let measure = |trial: &Trial| {
        let (title, pictures) =
            (format!("trial {}", trial.number), trial.val_pictures.filter(|count| *count > 0)?);
        Some(BestAccuracy { title, accuracy: trial.metric?, pictures })
    };
    let mut measured: Vec<BestAccuracy> = sweep.trials.iter().filter_map(measure).collect();
    measured.sort_by(|a, b| b.accuracy.total_cmp(&a.accuracy));
    let [first, second, ..] = measured.as_slice() else { return None };
    let is_comparable =
        sweep.metric == "val_accuracy" && !is_cross_validation(sweep) && first.pictures == second.pictures;
    if is_comparable { explain_insignificance(first, second) } else { None }
}

/// Formats a trial: `trial 3 (train.lr=0.1): succeeded, best val_accuracy 84.2 % ± 2.6 of 200`.
fn trial_in_words(sweep: &Sweep, trial: &Trial) -> String {
    let (setting, state) = (setting_in_words(&trial.setting), trial.state_in_words());
    let metric = sweep.metric_of(trial).map(|metric| format!(", best {} {metric}", sweep.metric));
    format!("trial {} ({setting}): {state}{}", trial.number, metric.unwrap_or_default())
}

fn change_state(SweepArgs { sweep, server }: &SweepArgs, action: &str) -> anyhow::Result<()> {
    let api = server.api()?;
    let changed: Sweep = block_on(async {
        let Sweep { id, .. } = api.find_only_sweep(sweep).await?;
        api.post(&format!("/sweeps/{id}/{action}"), &json!({})).await
    })?;
    output::print(server.json, &changed, describe(&changed))
}

/// Formats a sweep's method: `cifar-lr: asha, compared by val_accuracy after epochs 1, 3, 9, 27`. With a single rung, trials are compared
/// at their end.
fn describe_method(sweep: &Sweep) -> String {
    let method = sweep.spec.pointer("/sweep/method").and_then(Value::as_str).unwrap_or_default();
    let rungs: Vec<_> = sweep.rungs.iter().map(u32::to_string).collect();
    let after = if rungs.len() > 1 { format!(" after epochs {}", rungs.join(", ")) } else { String::new() };
    format!("{}: {method}, compared by {}{after}", sweep.name, sweep.metric)
}

/// Formats a sweep's state: `sweep-1a2b3c4d5e6f is running: 3 of 27 trials have ended, 400 steps`.
fn describe(sweep: &Sweep) -> String {
    let Sweep { id, state, ended, trial_count, steps, .. } = sweep;
    let why = sweep.reason.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
    format!("{id} is {}{why}: {ended} of {trial_count} trials have ended, {steps} steps", state.as_str())
}

fn row(sweep: &Sweep) -> [String; 7] {
    let best = sweep.best.as_ref();
    let best = best.map(|best| {
        format!("{} {}", sweep.metric_of(best).unwrap_or_default(), setting_in_words(&best.setting))
    });
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
    let is_best =
        !is_cross_validation(sweep) && sweep.best.as_ref().is_some_and(|best| best.number == trial.number);
    [
        trial.number.to_string(),
        trial.job.as_ref().map(ToString::to_string).unwrap_or_default(),
        format!("{}{}", trial.state_in_words(), if is_best { ", best" } else { "" }),
        setting_in_words(&trial.setting),
        sweep.metric_of(trial).unwrap_or_default(),
        trial.epoch.map(|epoch| epoch.to_string()).unwrap_or_default(),
        trial.step.to_string(),
    ]
}
