//! Rank 0's reports about layers: the description of the network, the median time of each layer, and, every `log.histograms`
//! steps, histograms of weights and gradients.

mod histogram;

use super::{Run, TrainError, Training};
use crate::planning::{self, Planned};
use histogram::histograms;
use lockstep_engine::{
    LayerTime,
    net::{Network, Op, TensorId},
    plan::Plan,
};
use lockstep_host::usage::peak_memory_bytes;
use lockstep_protocol::{agent::AttemptEvent, network::NetworkDescription};

/// The first step of an attempt (from 1) whose layers are timed. Earlier steps load kernels and allocate memory.
const FIRST_TIMED_STEP: u64 = 3;
/// Number of steps whose layers are timed. They are few, because the operations of a timed step do not overlap.
const TIMED_STEPS: u64 = 5;
/// Number of steps after the first timed step whose median time is compared with the prediction.
const COMPARED_STEPS: usize = 10;
/// Number of steps from a timed step to the next. The compared steps are between the first two timed steps.
const TIMING_INTERVAL: u64 = COMPARED_STEPS as u64 + 1;

/// The layers about which rank 0 reports. Other ranks only time the same steps.
#[derive(Default)]
pub(super) struct Layers {
    description: NetworkDescription,
    /// The output of each layer.
    outputs: Vec<TensorId>,
    /// The measured times of each layer in microseconds, one for each timed step.
    micros: Vec<Vec<f64>>,
    /// The first step whose layers are timed, as in [`Run::step`].
    first_timed_step: u64,
    /// The durations of the compared steps in seconds. Steps that waited for pictures are left out.
    step_secs: Vec<f64>,
}

impl Layers {
    /// Prepares a run that has done `step` steps. Rank 0 reports the network's description.
    pub(super) fn prepare(
        training: &Training<'_>,
        network: &Network,
        planned: Option<&Planned>,
        step: u64,
    ) -> Self {
        // All ranks time the same steps, because a timed step is not replayed as a graph, and its collectives match only those
        // of other timed steps.
        let mut layers = Self { first_timed_step: step + FIRST_TIMED_STEP, ..Self::default() };
        if training.is_first() {
            layers.description = network.describe();
            layers.outputs = network.ops.iter().map(Op::output).collect();
            let parallel = &training.spec.parallel;
            match planned {
                Some(planned) => layers.description = planned.describe(network),
                None if parallel.is_hybrid() => {
                    layers.description.plan = Some(planning::describe(&Plan::of(parallel), network));
                }
                None => {}
            }
            training.observer.event(&AttemptEvent::Network(layers.description.clone()));
        }
        layers
    }

    fn is_timed(&self, step: u64) -> bool {
        (0..TIMED_STEPS).any(|number| step == self.first_timed_step + number * TIMING_INTERVAL)
    }

    /// Records the times of a step's layers. The description then has the medians over all timed steps.
    fn record(&mut self, times: &[LayerTime]) {
        let Self { description, outputs, micros, .. } = self;
        micros.resize(outputs.len(), Vec::new());
        for time in times {
            let mut layers = description.layers.iter().zip(outputs.iter());
            let position = layers.position(|(layer, output)| match &time.name {
                Some(name) => *name == layer.name,
                None => *output == time.output,
            });
            if let Some(position) = position {
                micros[position].push(time.micros);
            }
        }
        for (layer, micros) in description.layers.iter_mut().zip(micros) {
            if !micros.is_empty() {
                layer.time_us = Some(median(micros) as f32);
            }
        }
        *description.timed_steps.get_or_insert(0) += 1;
    }

    /// Records that a step took `secs`. After enough steps, returns the measured time in milliseconds.
    fn record_step_time(&mut self, step: u64, secs: f64) -> Option<f32> {
        let plan = self.description.plan.as_mut()?;
        if step <= self.first_timed_step || plan.measured_step_ms.is_some() {
            return None;
        }
        self.step_secs.push(secs);
        if self.step_secs.len() < COMPARED_STEPS {
            return None;
        }
        let measured = (1e3 * median(&mut self.step_secs)) as f32;
        plan.measured_step_ms = Some(measured);
        Some(measured)
    }

    /// The position of a parameter in the network: the position of its layer, and weights before biases.
    fn position(&self, parameter: &str) -> (usize, bool) {
        let (layer_name, tensor) = parameter.rsplit_once('.').unwrap_or((parameter, ""));
        let layers = &self.description.layers;
        let position = layers.iter().position(|layer| layer.name == layer_name);
        (position.unwrap_or(layers.len()), tensor == "bias")
    }
}

/// Returns the median of at least one value. Sorts the values.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len() - 1;
    f64::midpoint(values[last / 2], values[last.div_ceil(2)])
}

impl Run<'_> {
    /// Whether histograms of this step are reported.
    fn has_histograms(&self, step: u64) -> bool {
        let every = self.training.spec.log.histograms;
        every > 0 && step.is_multiple_of(every)
    }

    /// Requests the reports about layers of the next step from the engine. Keeping gradients is collective.
    pub(super) fn request_layer_reports(&mut self) -> Result<(), TrainError> {
        let next = self.step + 1;
        if self.has_histograms(next) {
            self.engine.keep_gradients()?;
        }
        if self.layers.is_timed(next) {
            self.engine.time_layers();
        }
        Ok(())
    }

    /// Reports the times of layers, after a timed step was started.
    pub(super) fn report_layer_times(&mut self) {
        if !self.layers.is_timed(self.step) {
            return;
        }
        let times = self.engine.layer_times();
        if times.is_empty() || !self.training.is_first() {
            return;
        }
        self.layers.record(&times);
        self.training.observer.event(&AttemptEvent::Network(self.layers.description.clone()));
    }

    /// Reports the measured memory, and the measured and the predicted time of a step, when enough steps are done.
    pub(super) fn compare_step_time(&mut self, step: u64, secs: f64) {
        let Some(measured) = self.layers.record_step_time(step, secs) else { return };
        let on_device = Some(self.engine.memory_bytes()).filter(|bytes| *bytes > 0);
        if let Some(plan) = &mut self.layers.description.plan {
            plan.measured_memory_bytes = on_device.or_else(peak_memory_bytes);
            let predicted = plan.predicted.as_ref().map(|predicted| {
                let advice = plan.advice().map(|advice| format!("; {advice}")).unwrap_or_default();
                format!("; {:.1} ms were predicted{advice}", predicted.step_ms)
            });
            self.training.log([format!("a step takes {measured:.1} ms{}", predicted.unwrap_or_default())]);
        }
        self.training.observer.event(&AttemptEvent::Network(self.layers.description.clone()));
    }

    /// Reports the histograms of a finished step whose gradients were kept.
    pub(super) fn report_histograms(&mut self) -> Result<(), TrainError> {
        if !self.has_histograms(self.step) {
            return Ok(());
        }
        self.drain()?;
        if self.training.is_first() {
            let (weights, gradients) = (self.engine.parameters()?, self.engine.gradients()?);
            let mut report = histograms(self.step, &weights, &gradients);
            report.layers.sort_by_cached_key(|histogram| self.layers.position(&histogram.name));
            self.training.observer.event(&AttemptEvent::Histograms(report));
        }
        Ok(())
    }
}
