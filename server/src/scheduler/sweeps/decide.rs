//! What follows for the trials of a sweep: a pure function from what is stored.
//!
//! Trials are compared at rungs, as successive halving has it (Jamieson and Talwalkar, 2016): of the `n` trials that come to a rung, the
//! best `n / reduction` train on. A trial trains on as soon as it is certain to be among them, whatever the others come to, and ends as
//! soon as it is certain not to be. So which trials train how far follows from their metrics, and not from the order in which they
//! arrive: not from the slots, from restarts of the server, or from lost ranks. Asynchronous halving would keep slots busy at the end of
//! a rung, but its result depends on who arrives first.

use crate::store::{JobRow, SweepRow};
use lockstep_protocol::{
    job::JobState,
    spec::{SweepMetric, SweepSpec, read_sweep},
    sweep::SweepState,
};
use std::cmp::Reverse;

/// What a sweep decides by, apart from its trials.
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    pub(crate) state: SweepState,
    pub(crate) metric: SweepMetric,
    pub(crate) reduction: u32,
    /// Epochs, the last of which ends the training.
    pub(crate) rungs: Vec<u32>,
    /// Number of trials, including trials that have not started.
    pub(crate) trials: u32,
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
            trials: u32::try_from(row.settings.len()).unwrap_or(u32::MAX),
            max_concurrent: 0,
        }
    }
}

/// What a trial does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It waits for slots, trains, or was paused by somebody else than its sweep.
    Active,
    /// It waits at a rung for its sweep.
    AtRung,
    /// Its job is over.
    Over,
}

/// A trial that has started.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TrialState {
    pub(crate) number: u32,
    pub(crate) stage: Stage,
    /// The metric at each rung that it has reached; `None` where it had no finite value.
    pub(crate) values: Vec<Option<f64>>,
}

impl TrialState {
    /// The state of a trial's job; `None` if the job is no trial.
    pub(crate) fn of(rules: &Rules, row: &JobRow) -> Option<Self> {
        let (job, last) = (&row.job, &row.job.last);
        let mut values: Vec<_> =
            row.progress.rungs.iter().map(|rung| rules.metric.of(rung.val_accuracy, rung.val_loss)).collect();
        if job.state == JobState::Succeeded {
            // It may have stopped early, or been retried at a rung, and so past the others.
            values.resize(
                rules.rungs.len().max(values.len()),
                rules.metric.of(last.val_accuracy, last.val_loss),
            );
        }
        let stage = match job.state {
            state if state.is_final() => Stage::Over,
            _ if job.waits_for_sweep() => Stage::AtRung,
            _ => Stage::Active,
        };
        Some(Self { number: job.trial.as_ref()?.number, stage, values })
    }

    /// The metric at a rung, if it is known; `Some(None)`, the worst, for a trial that was over before.
    fn at(&self, rung: usize) -> Option<Option<f64>> {
        self.values.get(rung).copied().or_else(|| (self.stage == Stage::Over).then_some(None))
    }
}

/// What is to be done, for trials by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// `pause_after`: the epoch of the first rung; `None` trains to the end.
    Start { number: u32, pause_after: Option<u32> },
    /// A trial at a rung trains on, likewise.
    Promote { number: u32, pause_after: Option<u32> },
    /// A trial at a rung is worse than others.
    End { number: u32 },
    /// The sweep is being cancelled.
    Cancel { number: u32 },
    /// Every trial is over.
    Finish,
}

/// What is to be done now. `trials` are those that have started, in any order.
pub(crate) fn decide(rules: &Rules, trials: &[TrialState]) -> Vec<Action> {
    let live = || trials.iter().filter(|trial| trial.stage != Stage::Over);
    if rules.state == SweepState::Cancelled && live().next().is_some() {
        return live().map(|trial| Action::Cancel { number: trial.number }).collect();
    }
    let have_started = trials.len() >= rules.trials as usize;
    if live().next().is_none() && (have_started || rules.state == SweepState::Cancelled) {
        return vec![Action::Finish];
    }
    let (mut promoted, mut actions) = compare(rules, trials);
    if rules.state != SweepState::Running {
        return actions;
    }
    let active = trials.iter().filter(|trial| trial.stage == Stage::Active).count();
    let free = (rules.max_concurrent as usize).saturating_sub(active);
    let pause_after = |rung: usize| rules.rungs.get(rung).copied().filter(|_| rung + 1 < rules.rungs.len());
    let new = (1..=rules.trials).filter(|number| trials.iter().all(|trial| trial.number != *number));
    let starts = new.map(|number| Action::Start { number, pause_after: pause_after(0) });
    // Trials that have come far use what was spent on them.
    promoted.sort_by_key(|(_, rung)| Reverse(*rung));
    let promotions = promoted
        .into_iter()
        .map(|(number, rung)| Action::Promote { number, pause_after: pause_after(rung + 1) });
    actions.extend(promotions.chain(starts).take(free));
    actions
}

/// Trials that wait at a rung and are certain to be among the best there, with the rung, and the ends of those that are certain not to be.
/// A trial that trained on because another one had failed ends at its next rung if that one was retried and has taken its place.
fn compare(rules: &Rules, trials: &[TrialState]) -> (Vec<(u32, usize)>, Vec<Action>) {
    let (mut promoted, mut ends) = (Vec::new(), Vec::new());
    // Those that are certain to come to the rung, and how many will.
    let (mut entered, mut places) = (trials.iter().collect::<Vec<_>>(), rules.trials as usize);
    for rung in 0..rules.rungs.len().saturating_sub(1) {
        let keep = (places / rules.reduction as usize).max(1);
        let waits = |trial: &TrialState| trial.stage == Stage::AtRung && trial.values.len() == rung + 1;
        if entered.len() == places {
            let has_entered = |trial: &TrialState| entered.iter().any(|other| other.number == trial.number);
            let displaced = trials.iter().filter(|trial| waits(trial) && !has_entered(trial));
            ends.extend(displaced.map(|trial| Action::End { number: trial.number }));
        }
        let mut known: Vec<_> = entered.iter().filter_map(|trial| Some((*trial, trial.at(rung)?))).collect();
        known.sort_by(|(a, x), (b, y)| rules.metric.order(*x, *y).then(a.number.cmp(&b.number)));
        // Each of the others may turn out to be better than all of these.
        let unknown = places.saturating_sub(known.len());
        let certain = keep.saturating_sub(unknown);
        for (place, (trial, _)) in known.iter().enumerate() {
            if waits(trial) && place < certain {
                promoted.push((trial.number, rung));
            } else if waits(trial) && place >= keep {
                ends.push(Action::End { number: trial.number });
            }
        }
        entered = known.into_iter().take(certain).map(|(trial, _)| trial).collect();
        places = keep;
    }
    (promoted, ends)
}

#[cfg(test)]
mod tests;
