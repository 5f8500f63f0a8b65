//! Decides the next actions for the trials of a sweep: a pure function of the stored rows.
//!
//! Trials are compared at rungs by synchronous successive halving (Jamieson and Talwalkar, 2016): of the `n` trials that reach a rung, the
//! best `n / reduction` continue. A trial continues as soon as it is certain to be among the best, whatever the metrics of the remaining
//! trials will be, and ends as soon as it is certain not to be. So the result depends only on the trials' metrics, and not on the order in
//! which trials reach a rung, which depends on the number of slots, restarts of the server and lost ranks. Asynchronous halving would keep
//! slots busy at the end of a rung, but its result depends on this order.

use crate::{
    lifecycle::{Rung, trial},
    store::{JobRow, SweepRow},
};
use lockstep_protocol::{
    job::JobState,
    spec::{SweepMetric, SweepSpec, read_sweep},
    sweep::SweepState,
};
use std::cmp::Reverse;

/// The input of a decision, apart from the trials.
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    pub(crate) state: SweepState,
    pub(crate) metric: SweepMetric,
    pub(crate) reduction: u32,
    /// The epochs after which trials are compared. The last epoch ends training.
    pub(crate) rungs: Vec<u32>,
    /// Number of trials, including trials that have not started.
    pub(crate) trial_count: u32,
    pub(crate) max_concurrent: u32,
}

impl Rules {
    /// The rules of a stored sweep; `None` if this version cannot read its section.
    pub(crate) fn of(row: &SweepRow) -> Option<Self> {
        let SweepSpec { metric, reduction, max_concurrent, .. } = read_sweep(row.spec.get("sweep")?).ok()?;
        Some(Self {
            metric,
            reduction: reduction.max(2),
            max_concurrent: max_concurrent.unwrap_or(u32::MAX),
            ..Self::to_cancel(row)
        })
    }

    /// Rules for a sweep that is being cancelled: no trial starts or is compared.
    pub(crate) fn to_cancel(row: &SweepRow) -> Self {
        Self {
            state: row.state,
            metric: SweepMetric { name: "val_accuracy", maximize: true },
            reduction: 2,
            rungs: row.rungs.clone(),
            trial_count: u32::try_from(row.settings.len()).unwrap_or(u32::MAX),
            max_concurrent: 0,
        }
    }
}

/// The stage of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The trial is queued, trains, or is paused but not by its sweep.
    Active,
    /// The trial waits at a rung for its sweep.
    AtRung,
    /// The trial's job has ended.
    Ended,
}

/// A trial that has started.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TrialState {
    pub(crate) number: u32,
    pub(crate) stage: Stage,
    /// The metric at each rung that the trial has reached: the best value so far. `None` if the newest value was not finite.
    pub(crate) values: Vec<Option<f64>>,
}

impl TrialState {
    /// The state of a trial. `None` if the job is not a trial.
    pub(crate) fn of(rules: &Rules, row: &JobRow) -> Option<Self> {
        let job = &row.job;
        let metric = |rung: &Rung| rules.metric.of(rung.val_accuracy, rung.val_loss);
        let mut values: Vec<_> = row.progress.rungs.iter().map(metric).collect();
        if job.state == JobState::Succeeded {
            // A trial that stopped early, or was retried after it had ended at a rung, has not paused at the remaining rungs.
            values.resize(rules.rungs.len().max(values.len()), metric(&trial::rung(row, job.epoch)));
        }
        let stage = match job.state {
            state if state.is_final() => Stage::Ended,
            _ if job.waits_for_sweep() => Stage::AtRung,
            _ => Stage::Active,
        };
        Some(Self { number: job.trial.as_ref()?.number, stage, values })
    }

    /// The metric at a rung, if it is known. `Some(None)`, the worst, for a trial that ended before the rung.
    fn value_at(&self, rung: usize) -> Option<Option<f64>> {
        self.values.get(rung).copied().or_else(|| (self.stage == Stage::Ended).then_some(None))
    }
}

/// An action for a sweep or for the trial with this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Starts a trial, which pauses after the epoch `pause_after`. Without `pause_after`, the trial trains to the end.
    Start { number: u32, pause_after: Option<u32> },
    /// Resumes a trial at a rung, with `pause_after` as in `Start`.
    Promote { number: u32, pause_after: Option<u32> },
    /// Ends a trial at a rung, because other trials are better.
    End { number: u32 },
    /// Cancels a trial of a cancelled sweep.
    Cancel { number: u32 },
    /// Ends the sweep, because all its trials have ended.
    Finish,
}

/// Decides the next actions. `trials`: the started trials, in any order.
pub(crate) fn decide(rules: &Rules, trials: &[TrialState]) -> Vec<Action> {
    let live = || trials.iter().filter(|trial| trial.stage != Stage::Ended);
    if rules.state == SweepState::Cancelled && live().next().is_some() {
        return live().map(|trial| Action::Cancel { number: trial.number }).collect();
    }
    let have_started = trials.len() >= rules.trial_count as usize;
    if live().next().is_none() && (have_started || rules.state == SweepState::Cancelled) {
        return vec![Action::Finish];
    }
    let (mut promoted, mut actions) = compare(rules, trials);
    if rules.state != SweepState::Running {
        return actions;
    }
    let active_count = trials.iter().filter(|trial| trial.stage == Stage::Active).count();
    let startable_count = (rules.max_concurrent as usize).saturating_sub(active_count);
    let pause_after = |rung: usize| rules.rungs.get(rung).copied().filter(|_| rung + 1 < rules.rungs.len());
    let new = (1..=rules.trial_count).filter(|number| trials.iter().all(|trial| trial.number != *number));
    let starts = new.map(|number| Action::Start { number, pause_after: pause_after(0) });
    // Trials at later rungs come first, because more computation was spent on them.
    promoted.sort_by_key(|(_, rung)| Reverse(*rung));
    let promotions = promoted
        .into_iter()
        .map(|(number, rung)| Action::Promote { number, pause_after: pause_after(rung + 1) });
    actions.extend(promotions.chain(starts).take(startable_count));
    actions
}

/// Compares the trials at each rung. Returns the waiting trials that are certain to be among the best, each with its rung, and actions that
/// end the waiting trials that are certain not to be. If a failed trial is retried and is better than a trial that was promoted instead,
/// the promoted trial ends at its next rung.
fn compare(rules: &Rules, trials: &[TrialState]) -> (Vec<(u32, usize)>, Vec<Action>) {
    let (mut promoted, mut ends) = (Vec::new(), Vec::new());
    // The trials that are certain to reach the rung, and the number of trials that will reach it.
    let (mut entrants, mut entrant_count) = (trials.iter().collect::<Vec<_>>(), rules.trial_count as usize);
    for rung in 0..rules.rungs.len().saturating_sub(1) {
        let continuing_count = (entrant_count / rules.reduction as usize).max(1);
        let waits = |trial: &TrialState| trial.stage == Stage::AtRung && trial.values.len() == rung + 1;
        if entrants.len() == entrant_count {
            let has_entered = |trial: &TrialState| entrants.iter().any(|other| other.number == trial.number);
            let displaced = trials.iter().filter(|trial| waits(trial) && !has_entered(trial));
            ends.extend(displaced.map(|trial| Action::End { number: trial.number }));
        }
        let mut known: Vec<_> =
            entrants.iter().filter_map(|trial| Some((*trial, trial.value_at(rung)?))).collect();
        known.sort_by(|(a, x), (b, y)| rules.metric.order(*x, *y).then(a.number.cmp(&b.number)));
        // Each trial without a known metric may turn out to be better than all known trials.
        let unknown_count = entrant_count.saturating_sub(known.len());
        let certain_count = continuing_count.saturating_sub(unknown_count);
        for (index, (trial, _)) in known.iter().enumerate() {
            if waits(trial) && index < certain_count {
                promoted.push((trial.number, rung));
            } else if waits(trial) && index >= continuing_count {
                ends.push(Action::End { number: trial.number });
            }
        }
        entrants = known.into_iter().take(certain_count).map(|(trial, _)| trial).collect();
        entrant_count = continuing_count;
    }
    (promoted, ends)
}

#[cfg(test)]
mod tests;
