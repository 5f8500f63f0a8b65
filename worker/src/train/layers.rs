//! Rank 0's reports about layers: the network's description, the time of each layer, and every `log.histograms` steps histograms of
//! weights and gradients.

mod histogram;

use super::{Run, TrainError, Training};
use histogram::histograms;
use lockstep_engine::net::{Network, TensorId};
use lockstep_protocol::{
    agent::AttemptEvent,
    network::{LayerDescription, NetworkDescription},
};

/// The step of an attempt whose layers are timed, from 1: the first ones load kernels and allocate.
const TIMED_STEP: u64 = 3;

/// The reports that a step makes in addition to its result.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerReports {
    histograms: bool,
    times: bool,
}

/// The layers that rank 0 reports about; other ranks only time the same step.
#[derive(Default)]
pub(super) struct Layers {
    description: Vec<LayerDescription>,
    /// The output of each layer.
    outputs: Vec<TensorId>,
    /// The step that is timed, counted as [`Run::step`].
    timed: u64,
}

impl Layers {
    /// For a run that has done `step` steps. Rank 0 reports the network's description.
    pub(super) fn describe(training: &Training<'_>, network: &Network, step: u64) -> Self {
        // On all ranks: a step that is timed is not replayed, and its collectives are those of ranks that do the same.
        let mut layers = Self { timed: step + TIMED_STEP, ..Self::default() };
        if training.is_first() {
            let (description, outputs) = network.describe();
            training.observer.event(&AttemptEvent::Network(description.clone()));
            (layers.description, layers.outputs) = (description.layers, outputs);
        }
        layers
    }

    /// Where a parameter stands in the network: its layer's place, and a bias after its weight.
    fn place(&self, parameter: &str) -> (usize, bool) {
        let (layer, tensor) = parameter.rsplit_once('.').unwrap_or((parameter, ""));
        let place = self.description.iter().position(|of| of.name == layer);
        (place.unwrap_or(self.description.len()), tensor == "bias")
    }
}

impl Run<'_> {
    /// Requests from the engine what the next step reports in addition to its result. Keeping gradients is collective.
    pub(super) fn request_layer_reports(&mut self) -> Result<LayerReports, TrainError> {
        let (next, every) = (self.step + 1, self.training.spec.log.histograms);
        let histograms = every > 0 && next.is_multiple_of(every);
        if histograms {
            self.engine.keep_gradients()?;
        }
        let times = next == self.layers.timed;
        if times {
            self.engine.time_layers();
        }
        Ok(LayerReports { histograms, times })
    }

    /// Reports the layers' times, after the step was started that measures them.
    pub(super) fn report_layer_times(&mut self, reports: LayerReports) {
        if !reports.times {
            return;
        }
        let times = self.engine.layer_times();
        if times.is_empty() || !self.training.is_first() {
            return;
        }
        let Layers { description, outputs, .. } = &mut self.layers;
        for time in &times {
            let mut layers = description.iter_mut().zip(outputs.iter());
            let layer = layers.find(|(layer, output)| match &time.name {
                Some(name) => *name == layer.name,
                None => **output == time.output,
            });
            if let Some((layer, _)) = layer {
                layer.time_us = Some(time.micros as f32);
            }
        }
        let description = NetworkDescription { layers: description.clone() };
        self.training.observer.event(&AttemptEvent::Network(description));
    }

    /// Reports the histograms of a step that has kept its gradients, once it is done.
    pub(super) fn report_histograms(&mut self, reports: LayerReports) -> Result<(), TrainError> {
        if !reports.histograms {
            return Ok(());
        }
        self.drain()?;
        if self.training.is_first() {
            let (weights, gradients) = (self.engine.parameters()?, self.engine.gradients()?);
            let mut found = histograms(self.step, &weights, &gradients, self.training.threads);
            found.layers.sort_by_cached_key(|of| self.layers.place(&of.name));
            self.training.observer.event(&AttemptEvent::Histograms(found));
        }
        Ok(())
    }
}
