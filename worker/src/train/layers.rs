//! What rank 0 says of the network's layers: their description, how long each takes, and every `log.histograms` steps how their
//! weights and gradients are distributed.

mod histogram;

use super::{Run, TrainError, Training};
use crate::{
    data::loader::Shape,
    net::{self, TensorId},
};
use histogram::histograms;
use lockstep_protocol::{
    agent::AttemptEvent,
    network::{LayerDescription, NetworkDescription},
};

/// The step of an attempt whose layers are timed, from 1: the first ones load kernels and allocate.
const TIMED_STEP: u64 = 3;

/// What a step is asked for in addition to its result.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerReports {
    histograms: bool,
    times: bool,
}

/// What rank 0 knows of the layers; nothing on other ranks.
#[derive(Default)]
pub(super) struct Layers {
    description: Vec<LayerDescription>,
    /// What each layer makes.
    outputs: Vec<TensorId>,
    /// The step that is timed, counted as [`Run::step`].
    timed: u64,
}

impl Layers {
    /// Of a run that has done `step` steps, whose network rank 0 describes.
    pub(super) fn describe(training: &Training<'_>, shape: &Shape, step: u64) -> Self {
        if training.group.rank() != 0 {
            return Self::default();
        }
        let model = &training.spec.model;
        let network = net::build(model, shape.image_size, shape.channels, shape.classes.len());
        let Ok(network) = network else { return Self::default() };
        let (description, outputs) = network.describe();
        training.observer.event(&AttemptEvent::Network(description.clone()));
        Self { description: description.layers, outputs, timed: step + TIMED_STEP }
    }

    /// Where a parameter stands in the network: its layer's place, and a bias after its weight.
    fn place(&self, parameter: &str) -> (usize, bool) {
        let (layer, tensor) = parameter.rsplit_once('.').unwrap_or((parameter, ""));
        let place = self.description.iter().position(|of| of.name == layer);
        (place.unwrap_or(self.description.len()), tensor == "bias")
    }
}

impl Run<'_> {
    /// Asks the engine for what the next step is to find out in addition to its result. All ranks keep their gradients together.
    pub(super) fn ask_of_layers(&mut self) -> Result<LayerReports, TrainError> {
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

    /// The layers' times, after the start of the step that was to measure them.
    pub(super) fn report_layer_times(&mut self, asked: LayerReports) {
        if !asked.times {
            return;
        }
        let times = self.engine.layer_times();
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
        if !times.is_empty() {
            let description = NetworkDescription { layers: description.clone() };
            self.training.observer.event(&AttemptEvent::Network(description));
        }
    }

    /// The histograms of a step that was to keep its gradients, when it is done.
    pub(super) fn report_histograms(&mut self, asked: LayerReports) -> Result<(), TrainError> {
        if !asked.histograms {
            return Ok(());
        }
        self.drain()?;
        if self.is_first() {
            let (weights, gradients) = (self.engine.parameters()?, self.engine.gradients()?);
            let mut found = histograms(self.step, &weights, &gradients, self.training.threads);
            found.layers.sort_by_cached_key(|of| self.layers.place(&of.name));
            self.training.observer.event(&AttemptEvent::Histograms(found));
        }
        Ok(())
    }
}
