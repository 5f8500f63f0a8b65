//! Sweeps: jobs that are submitted with several settings. A sweep starts a job (a trial) for each setting, and resumes or ends trials at
//! rungs. Sweeps have no state in memory: `decide` computes the actions from the rows of the sweep and its trials, and each action is one
//! transaction. A server that was killed between two actions computes the remaining actions after its start.

mod decide;

use crate::{
    lifecycle::trial,
    scheduler::{
        Scheduler,
        dispatch::{self, StopRequest},
        new_jobs::{NewJobError, add_job, new_job},
    },
    store::{JobRow, NewTrial, Result, StoreError, SweepRow},
    util::failure_log::FailureLog,
};
use decide::{Action, Rules, TrialState, decide};
use lockstep_protocol::{
    JobId,
    backoff::Backoff,
    job::{Job, JobState, TrialOf},
    reason::{Reason, ReasonKind},
    spec::Setting,
    sweep::{Sweep, SweepState, Trial},
};
use std::{sync::Arc, time::Duration};
use tokio::time::sleep;

/// Maximum pause between two rounds over all sweeps. A change of a trial or a sweep starts a round at once.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Pauses before a failed round is retried: the first and the longest.
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));

/// Advances all sweeps. Runs until dropped.
pub(crate) async fn run(scheduler: Arc<Scheduler>) {
    let (mut failure_log, mut backoff) = (FailureLog::default(), RETRY);
    loop {
        let advanced = advance_all(&scheduler).await;
        failure_log.log(&advanced, "sweeps could not be advanced", "sweeps advance again");
        let pause = match advanced {
            Ok(()) => {
                backoff = RETRY;
                MAX_PAUSE
            }
            Err(_) => backoff.next_pause(),
        };
        tokio::select! {
            () = scheduler.sweeps_changed.notified() => {}
            () = sleep(pause) => {}
        }
    }
}

async fn advance_all(scheduler: &Scheduler) -> Result<()> {
    let mut first_error = Ok(());
    for sweep in scheduler.store.unfinished_sweeps().await? {
        let result = match advance(scheduler, &sweep).await {
            Err(error @ StoreError::Corrupt(_)) if sweep.state == SweepState::Running => {
                pause(scheduler, &sweep, &error.to_string()).await
            }
            result => result,
        };
        // An error of a sweep does not stop the remaining sweeps.
        first_error = first_error.and(result);
    }
    first_error
}

async fn advance(scheduler: &Scheduler, sweep: &SweepRow) -> Result<()> {
    let store = &scheduler.store;
    let rules = match Rules::of(sweep) {
        Some(rules) => rules,
        None if sweep.state == SweepState::Cancelled => Rules::to_cancel(sweep),
        None => {
            let why = "another version of lockstep stored the sweep, and this version cannot read it";
            return pause(scheduler, sweep, why).await;
        }
    };
    let rows = store.trials(&sweep.id).await?;
    let failed: Vec<&Job> = rows.iter().map(|row| &row.job).filter(|job| failed_by_dataset(job)).collect();
    if sweep.state != SweepState::Cancelled
        && let Some(job) = failed.first()
    {
        // The other trials would fail, too.
        let reason = job.reason.as_deref().unwrap_or_default();
        let ids: Vec<&str> = failed.iter().map(|job| job.id.as_str()).collect();
        let why = format!(
            "the job {} failed: {reason}; solve the problem, retry the job (on its page, or with `lockstep retry {}`), then resume the sweep",
            job.name,
            ids.join(" ")
        );
        return pause(scheduler, sweep, &why).await;
    }
    let trials: Vec<_> = rows.iter().filter_map(|row| TrialState::of(&rules, row)).collect();
    let mut specs = None;
    for action in decide(&rules, &trials) {
        let job_id = |number: u32| {
            let found =
                rows.iter().find(|row| row.job.trial.as_ref().is_some_and(|trial| trial.number == number));
            found.map(|row| row.job.id.clone()).ok_or(StoreError::NotFound("trial"))
        };
        let at = crate::now();
        let result = match action {
            Action::Start { number, pause_after } => {
                if specs.is_none() {
                    specs = Some(store.sweep_specs(&sweep.id).await?);
                }
                let spec = specs.iter().flatten().nth(number as usize - 1).cloned();
                let Some(spec) = spec else {
                    let why = "the trials' specifications are missing in the database";
                    return pause(scheduler, sweep, why).await;
                };
                let id = TrialOf { sweep: sweep.id.clone(), number };
                let mut new = new_job(JobId::generate(), spec, sweep.ownership.owner.clone());
                new.trial = Some(NewTrial { id, pause_after });
                match add_job(scheduler, new).await {
                    Ok(_) => Ok(()),
                    Err(NewJobError::Store(error)) if error.is_temporary() => Err(error),
                    // For example a full disk, or a removed dataset. A person must solve the problem and resume the sweep.
                    Err(error) => {
                        let why = format!("trial {number} cannot start: {error}");
                        return pause(scheduler, sweep, &why).await;
                    }
                }
            }
            Action::Promote { number, pause_after } => {
                let promote = move |row: &mut JobRow| trial::promote(row, pause_after, at);
                scheduler.events.change_job(&job_id(number)?, Box::new(promote)).await.map(drop)
            }
            Action::End { number } => {
                let end = move |row: &mut JobRow| trial::end(row, at);
                scheduler.events.change_job(&job_id(number)?, Box::new(end)).await.map(drop)
            }
            Action::Cancel { number } => {
                dispatch::stop(scheduler, &job_id(number)?, StopRequest::Cancel).await.map(drop)
            }
            Action::Finish => {
                let state = match sweep.state {
                    SweepState::Cancelled => SweepState::Cancelled,
                    _ => SweepState::Finished,
                };
                store.set_sweep_state(&sweep.id, state, None, Some(at)).await.map(drop)
            }
        };
        match result {
            // Somebody has changed the trial meanwhile. The next round sees the change.
            Err(StoreError::Refused(_) | StoreError::NotFound(_)) => {}
            result => result?,
        }
    }
    Ok(())
}

/// Whether a job failed because its dataset is missing, or could not be read when the ranks were to be started.
fn failed_by_dataset(job: &Job) -> bool {
    let kind = job.cause.as_ref().map(Reason::kind);
    job.state == JobState::Failed
        && matches!(
            kind,
            Some(ReasonKind::DatasetUnusable { rank: None, .. } | ReasonKind::DatasetMissing { .. })
        )
}

/// Pauses a running sweep, so that no trial starts until somebody resumes the sweep.
async fn pause(scheduler: &Scheduler, sweep: &SweepRow, why: &str) -> Result<()> {
    if sweep.state == SweepState::Running {
        tracing::warn!(sweep = %sweep.id, why, "a sweep is paused");
        scheduler.store.set_sweep_state(&sweep.id, SweepState::Paused, Some(why), None).await?;
    }
    Ok(())
}

/// Returns a sweep and its trials as clients see them.
pub(crate) fn describe(row: &SweepRow, jobs: &[JobRow]) -> Sweep {
    let rules = Rules::of(row);
    let number_of = |row: &JobRow| row.job.trial.as_ref().map(|trial| trial.number);
    // Trials start in the order of their numbers.
    let last_started = match row.state {
        SweepState::Finished => u32::MAX,
        _ => jobs.iter().filter_map(number_of).max().unwrap_or(0),
    };
    let trial_of = |(number, setting): (u32, &Setting)| {
        let job = jobs.iter().find(|row| number_of(row) == Some(number));
        let state = rules.as_ref().zip(job).and_then(|(rules, job)| TrialState::of(rules, job));
        let values = state.map(|state| state.values).unwrap_or_default();
        let so_far = || {
            let (rules, row) = rules.as_ref().zip(job).filter(|(_, row)| !row.job.state.is_final())?;
            let results = trial::rung(row, row.job.epoch);
            rules.metric.of(results.val_accuracy, results.val_loss)
        };
        Trial {
            number,
            setting: setting.clone(),
            job: job.map(|row| row.job.id.clone()),
            deleted: job.is_none() && number <= last_started,
            state: job.map(|row| row.job.state),
            ended_early: job.is_some_and(|row| row.job.ended_early()),
            rung: u32::try_from(values.len()).unwrap_or(u32::MAX),
            metric: values.last().copied().unwrap_or_else(so_far),
            val_pictures: job.and_then(|row| row.job.last.val_pictures),
            epoch: job.and_then(|row| match row.job.state {
                JobState::Succeeded => Some(row.job.epoch),
                _ => row.progress.rungs.last().map(|rung| rung.epoch),
            }),
            step: job.map_or(0, |row| row.job.step),
        }
    };
    let trials: Vec<_> = (1..).zip(&row.settings).map(trial_of).collect();
    // With a single rung, trials that still train are not placed behind trials that have ended.
    let rung = |trial: &Trial| if row.rungs.len() > 1 { trial.rung } else { 0 };
    let best = rules.as_ref().and_then(|rules| {
        let compared = trials.iter().filter(|trial| trial.metric.is_some());
        compared.min_by(|a, b| {
            rung(b)
                .cmp(&rung(a))
                .then_with(|| rules.metric.order(a.metric, b.metric))
                .then_with(|| a.number.cmp(&b.number))
        })
    });
    let has_ended = |trial: &&Trial| match row.finished_at {
        Some(_) => trial.number <= last_started,
        None => trial.state.is_some_and(|state| state.is_final()),
    };
    let is_paused = |row: &&JobRow| row.job.state == JobState::Paused && !row.job.waits_for_sweep();
    let paused = jobs.iter().filter(|_| row.finished_at.is_none()).filter(is_paused).filter_map(number_of);
    Sweep {
        id: row.id.clone(),
        name: row.name.clone(),
        project: row.project.clone(),
        state: row.state,
        reason: row.reason.clone(),
        owner: row.ownership.owner.clone(),
        private: row.ownership.private,
        spec: row.spec.clone(),
        metric: rules.as_ref().map_or("val_accuracy", |rules| rules.metric.name).to_owned(),
        rungs: row.rungs.clone(),
        warnings: Vec::new(),
        trial_count: u32::try_from(trials.len()).unwrap_or(u32::MAX),
        ended: u32::try_from(trials.iter().filter(has_ended).count()).unwrap_or(u32::MAX),
        paused: paused.collect(),
        best: best.cloned(),
        steps: trials.iter().map(|trial| trial.step).sum(),
        trials,
        created_at: row.created_at,
        finished_at: row.finished_at,
    }
}
