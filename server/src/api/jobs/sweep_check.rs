//! Checks of a job file with a section `sweep`: of the section, and of the job of each trial.

use super::check::{Checked, Plan, Slots, check_with};
use crate::{
    auth::access::Caller,
    http::error::{Error, Result},
    scheduler::Scheduler,
};
use lockstep_protocol::{
    limits::MISTAKES,
    spec::{self, Setting, SpecError, SweepSpec, read_sweep, trial_document},
};
use serde_json::Value;

/// A sweep without a mistake.
pub(in crate::api) struct CheckedSweep {
    pub(in crate::api) sweep: SweepSpec,
    /// Of all trials.
    pub(in crate::api) settings: Vec<Setting>,
    /// Those that were checked.
    pub(in crate::api) trials: Vec<Checked>,
}

impl CheckedSweep {
    /// What the first trial comes to, for the job file of these parts.
    pub(super) fn plan(self, section: Value, job: &Value) -> Result<Plan> {
        let first = self.trials.into_iter().next();
        let first = first.ok_or_else(|| Error::Internal("a sweep without trials was checked".into()))?;
        Ok(first.plan().of_sweep(spec::read(job).0, self.settings.len(), section))
    }
}

/// Checks a sweep with this id, and the first `most` of its trials as [`super::check`] does; of the others, their documents.
///
/// # Errors
/// Every mistake, once.
pub(in crate::api) async fn check_sweep(
    scheduler: &Scheduler,
    caller: &Caller,
    (section, job): (&Value, &Value),
    id: &str,
    most: usize,
    slots: Slots,
) -> Result<CheckedSweep> {
    let sweep = read_sweep(section).map_err(Error::Invalid)?;
    let settings = sweep.settings();
    let (mut mistakes, mut trials) = (Vec::new(), Vec::new());
    for (index, setting) in settings.iter().enumerate() {
        let found = match trial_document(job, setting, id) {
            Err(detail) => vec![SpecError { pointer: "/sweep/parameters".into(), detail }],
            Ok(document) if index >= most => spec::read(&document).1,
            Ok(document) => match check_with(scheduler, caller, &document, true, slots).await {
                Ok(checked) => {
                    let found = sweep.check(&checked.spec);
                    trials.push(checked);
                    found
                }
                Err(Error::Invalid(found)) => found,
                Err(other) => return Err(other),
            },
        };
        for mistake in found {
            if mistakes.len() < MISTAKES && !mistakes.contains(&mistake) {
                mistakes.push(mistake);
            }
        }
    }
    if mistakes.is_empty() {
        Ok(CheckedSweep { sweep, settings, trials })
    } else {
        Err(Error::Invalid(mistakes))
    }
}
