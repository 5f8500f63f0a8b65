//! Chooses a run's plan before anything is allocated (`parallel.mode = "auto"`), and predicts its cost.

use super::{TrainError, Training, memory::check_sample, start::broadcast_json};
use crate::planning::{self, Planned};
use lockstep_engine::net::Network;
use lockstep_protocol::spec::JobSpec;

pub(super) struct Choice {
    /// The job, with the plan in place of `auto`.
    pub(super) spec: JobSpec,
    /// On rank 0, the predictions, if the machine's figures are known.
    pub(super) planned: Option<Planned>,
}

/// Collective: chooses the plan. `network` is for the largest training pictures. If the mode is `auto`, figures of this machine
/// that are not stored are measured.
pub(super) fn choose(training: &Training<'_>, network: &Network) -> Result<Choice, TrainError> {
    let &Training { spec, device, local_ranks, threads, .. } = training;
    let (group, is_first) = (training.group.as_ref(), training.is_first());
    let sample = planning::sample_to_measure(spec, network, device, threads);
    let needs_figures = is_first && (spec.parallel.is_auto() || spec.parallel.is_hybrid());
    let stored = if needs_figures { planning::stored_figures(&sample, device, group.size()) } else { None };
    let stored = stored.map(|(machine, _)| machine);
    if !spec.parallel.is_auto() {
        let planned = stored.and_then(|machine| Planned::of(spec, network, &machine).ok());
        return Ok(Choice { spec: spec.clone(), planned });
    }
    let has_stored = broadcast_json(group, is_first.then_some(stored.is_some()))?;
    let machine = if has_stored {
        stored
    } else {
        check_sample(spec, &sample, device.backend.needs(), local_ranks)?;
        training.log(["measuring operators and links, to choose a plan"]);
        let measured = planning::measure(&sample, device, local_ranks, group, training.store.as_deref())?;
        if is_first {
            planning::store_figures(&measured, &sample, device, group.size());
        }
        is_first.then_some(measured)
    };
    let planned = machine.map(|machine| -> Result<_, String> {
        let planned = Planned::of(spec, network, &machine)?;
        let resolved = planned.resolve(spec, &machine);
        planned.memory_shortage(&machine).map_or(Ok((planned, resolved)), Err)
    });
    let resolved = planned.clone().map(|planned| planned.map(|(_, resolved)| resolved));
    let spec = broadcast_json::<Result<JobSpec, String>>(group, resolved)?.map_err(TrainError::Impossible)?;
    Ok(Choice { spec, planned: planned.and_then(Result::ok).map(|(planned, _)| planned) })
}
