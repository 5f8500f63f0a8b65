//! The CPU engine: float32, NHWC; the reference for every other engine. Convolutions multiply in float32 or in bfloat16, which rounds their
//! inputs, weights and gradients; everything else, the last layer included, is float32 in both formats.
//!
//! Work is divided into chunks that depend only on shapes, never on the number of threads or on timing:
//! the same job on the same number of ranks gives the same bits. Networks of the CIFAR family give the
//! same bits on any number of ranks; see [`gradient`].

mod average;
mod backend;
mod backward;
mod exchange;
mod executor;
mod forward;
mod gradient;
mod groups;
mod layout;
mod margin;
mod pieces;
mod reduce;
mod sample;
mod split_loss;
mod stages;
mod state;
#[cfg(test)]
mod tests;

use super::{
    Distribution, Engine, EngineConfig, EngineError, EvalResult, HostTensor, LayerTime, NamedTensors,
    OptimizerState, StateDict, StepResult, Writers,
    check::{self, PartOf},
    distribution,
    fuse::{Capabilities, FusedOp},
    layers::layer_times,
    optimizer::state_shapes,
    plan::{self, Mesh, Plan},
    thread_pool, unknown_size,
};
use crate::net::{Axes, Network};
use average::Average;
pub(super) use backend::Cpu;
pub use backend::MAX_CPU_SLOTS;
use executor::{Executor, RUNNING};
use lockstep_comm::ProcessGroup;
use lockstep_data::loader::{Batch, BatchFormat, DataSource};
use lockstep_host::tensors::TensorSource;
use lockstep_kernels::{batch_norm, conv, elementwise, linear, loss, pool};
use lockstep_protocol::{numbers::plural, spec::Precision};
use std::{sync::Arc, time::Duration};

/// Fusion on CPUs: memory bandwidth limits cores, so batch norm, addition and ReLU are one pass.
fn capabilities() -> Capabilities {
    Capabilities { norm_add_relu: true, ..Capabilities::default() }
}

/// Builds the engine of one rank. `initial` has the tensors of the whole `network`. `format` is the format of the convolutions.
pub(super) fn build(
    network: Arc<Network>,
    initial: &dyn TensorSource,
    config: EngineConfig,
    comm: Arc<dyn ProcessGroup>,
    plan: &Plan,
    format: conv::Format,
) -> Result<Box<dyn Engine>, EngineError> {
    let threads = thread_pool(config.threads)?;
    let mut plan = plan.clone();
    if plan.cuts.is_empty() {
        // Chosen once, so that networks for all image sizes have the same cuts. `Executor::new` reports errors in the plan.
        plan.cuts = plan::cuts(&network, plan.mesh.stage).unwrap_or_default();
    }
    let mut executor = Executor::new(network.clone(), &plan, config, &comm, capabilities())?;
    executor.scratch = conv::Scratch::new(format);
    let networks = vec![network.clone()];
    let initial = PartOf::new(initial, &network, &executor.network)?;
    let mut engine = CpuEngine {
        threads,
        executor,
        network,
        networks,
        plan,
        comm,
        average: None,
        evaluated: EvalResult::default(),
    };
    engine.set_parameters(&initial)?;
    if engine.executor.state.memory.is_some() {
        engine.comm.barrier()?;
    }
    Ok(Box::new(engine))
}

struct CpuEngine {
    threads: rayon::ThreadPool,
    executor: Executor,
    /// The whole network (not this rank's part) for the current image size.
    network: Arc<Network>,
    /// The whole network for each prepared image size.
    networks: Vec<Arc<Network>>,
    plan: Plan,
    comm: Arc<dyn ProcessGroup>,
    average: Option<Average>,
    /// Results since the last [`Engine::finish_evaluation`].
    evaluated: EvalResult,
}

impl Engine for CpuEngine {
    fn take_data(&mut self, _data: &DataSource) -> Result<BatchFormat, EngineError> {
        // Only the first stage needs pictures; the others need only labels.
        let is_first = self.executor.network.stage().0 == 0;
        Ok(if is_first { BatchFormat::Normalised } else { BatchFormat::AugmentParams })
    }

    fn add_image_sizes(&mut self, training: &[usize], evaluation: &[usize]) -> Result<(), EngineError> {
        let sizes = training.iter().chain(evaluation);
        self.networks.extend(sizes.map(|size| Arc::new(self.network.resized(*size))));
        Ok(())
    }

    fn set_image_size(&mut self, image_size: usize) -> Result<(), EngineError> {
        if self.network.image_size != image_size {
            let network = self.networks.iter().find(|network| network.image_size == image_size);
            self.network = network.ok_or_else(|| unknown_size(image_size))?.clone();
            self.executor.set_network(plan::part_of(&self.network, &self.plan, self.comm.rank())?);
        }
        Ok(())
    }

    fn start_step(&mut self, micro_batches: &[Batch], lr: f32) -> Result<Option<StepResult>, EngineError> {
        for batch in micro_batches {
            self.check_batch(batch)?;
        }
        let executor = &mut self.executor;
        self.threads.install(|| executor.train_step(micro_batches, lr)).map(Some)
    }

    fn keep_gradients(&mut self) -> Result<(), EngineError> {
        Ok(self.executor.state.keep_gradients(self.comm.as_ref())?)
    }

    fn gradients(&self) -> Result<NamedTensors, EngineError> {
        let Executor { layout, state, .. } = &self.executor;
        let mut tensors = NamedTensors::new();
        if let Some(reduced) = state.reduced_gradients() {
            layout.export(None, reduced, &mut tensors);
        }
        for parameter in layout.parameters.iter().filter(|parameter| parameter.is_frozen) {
            tensors.remove(&parameter.name);
        }
        Ok(tensors)
    }

    fn time_layers(&mut self) {
        self.executor.times = Some(vec![Duration::ZERO; self.executor.ops.len()]);
    }

    fn layer_times(&mut self) -> Vec<LayerTime> {
        let times = self.executor.times.take().unwrap_or_default();
        let micros = times.iter().map(|time| time.as_secs_f64() * 1e6);
        let mut layers =
            if times.is_empty() { Vec::new() } else { layer_times(&self.executor.ops, micros.enumerate()) };
        // Tensors have other IDs in a part of a network, so layers without a name cannot be identified.
        layers.retain(|layer| self.plan.is_data() || layer.name.is_some());
        layers
    }

    fn start_evaluation(&mut self, batch: &Batch) -> Result<(), EngineError> {
        self.check_batch(batch)?;
        let executor = &mut self.executor;
        self.evaluated += self.threads.install(|| executor.evaluate(batch))?;
        Ok(())
    }

    fn finish_evaluation(&mut self) -> Result<EvalResult, EngineError> {
        Ok(std::mem::take(&mut self.evaluated))
    }

    fn predict(&mut self, batch: &Batch) -> Result<Vec<f32>, EngineError> {
        self.check_batch(batch)?;
        let executor = &mut self.executor;
        self.threads.install(|| executor.predict(batch))
    }

    fn parameters(&self) -> Result<NamedTensors, EngineError> {
        let running = self.executor.norms.iter().map(|norm| &norm.running);
        Ok(self.export(&self.executor.state.weights, running))
    }

    fn set_parameters(&mut self, values: &dyn TensorSource) -> Result<(), EngineError> {
        check::check(&self.executor.network, values)?;
        let writes = self.writes_weights();
        let Executor { layout, state, norms, .. } = &mut self.executor;
        self.threads.install(|| {
            if writes {
                layout.import(None, values, &mut state.weights);
            }
            for norm in norms {
                read_running(values, &norm.name, &mut norm.running);
            }
        });
        Ok(())
    }

    fn update_average(&mut self, decay: f64) -> Result<(), EngineError> {
        let Executor { state, norms, .. } = &self.executor;
        match &mut self.average {
            Some(average) => self.threads.install(|| average.update(decay, &state.weights, norms)),
            None => self.average = Some(Average::new(&state.weights, norms)),
        }
        Ok(())
    }

    fn has_average(&self) -> bool {
        self.average.is_some()
    }

    fn averaged(&self) -> Result<Option<NamedTensors>, EngineError> {
        let export = |average: &Average| self.export(&average.weights, average.running.iter());
        Ok(self.average.as_ref().map(export))
    }

    fn set_averaged(&mut self, values: &NamedTensors) -> Result<(), EngineError> {
        let Executor { layout, state, norms, network, .. } = &self.executor;
        check::check(network, values)?;
        let mut average = Average::new(&state.weights, norms);
        layout.import(None, values, &mut average.weights);
        for (own, norm) in average.running.iter_mut().zip(norms) {
            read_running(values, &norm.name, own);
        }
        self.average = Some(average);
        Ok(())
    }

    fn optimizer_state(&self) -> Result<OptimizerState, EngineError> {
        let Executor { layout, state, config, .. } = &self.executor;
        let mut slots = NamedTensors::new();
        for (slot, &name) in config.optimizer.slots().iter().enumerate() {
            layout.export(Some(name), &state.optimizer_slot(slot), &mut slots);
        }
        Ok(OptimizerState { slots, updates: state.updates })
    }

    fn set_optimizer_state(&mut self, new: &OptimizerState) -> Result<(), EngineError> {
        let optimizer = self.executor.config.optimizer;
        let network = &self.executor.network;
        check::check_shapes(network, &new.slots, state_shapes(&optimizer, network))?;
        let writes = self.writes_weights();
        let Executor { layout, state, .. } = &mut self.executor;
        state.updates = new.updates;
        if writes {
            let mut flat = vec![0.0; layout.len()];
            for (slot, &name) in optimizer.slots().iter().enumerate() {
                layout.import(Some(name), &new.slots, &mut flat);
                state.set_optimizer_slot(slot, &flat);
            }
        }
        Ok(())
    }

    fn precision(&self) -> Precision {
        match self.executor.scratch.format() {
            conv::Format::Float32 => Precision::Fp32,
            conv::Format::Bfloat16 => Precision::Bf16,
        }
    }

    fn state_dict(&self, writers: &Writers) -> Result<Option<StateDict>, EngineError> {
        let distribution = Distribution::new(&self.network, &self.plan, self.comm.as_ref())?;
        let optimizer = &self.executor.config.optimizer;
        distribution.state_dict(self, writers, optimizer, |keeps| self.gather_optimizer_state(keeps))
    }

    fn undo_unfinished_steps(&mut self) -> Option<Vec<StepResult>> {
        // With a split network or divided optimizer state, no single rank has the whole state.
        let Mesh { stage, model, .. } = self.plan.mesh;
        let has_whole_state = stage * model == 1 && !self.executor.state.is_sharded();
        (has_whole_state && self.executor.undo_step()).then(Vec::new)
    }

    fn checksum(&self) -> Result<[u64; 2], EngineError> {
        let Executor { layout, state, .. } = &self.executor;
        let mut sums = [crc32fast::Hasher::new(), crc32fast::Hasher::new()];
        for parameter in &layout.parameters {
            let values = bytemuck::cast_slice(&state.weights[parameter.range.clone()]);
            sums[usize::from(parameter.is_split)].update(values);
        }
        Ok(sums.map(|sum| sum.finalize().into()))
    }

    fn broadcast_parameters(&mut self) -> Result<(), EngineError> {
        if let Some(groups) = &self.executor.groups {
            let same_part = groups.statistics.group(Axes { model: false, height: true });
            let mut own = self.parameters()?;
            distribution::broadcast(
                &self.executor.network,
                &mut own,
                |values| same_part.call(|comm| comm.broadcast(values.into())),
                |values| groups.model.call(|comm| comm.broadcast(values.into())),
            )?;
            return self.set_parameters(&own);
        }
        if self.executor.state.memory.is_none() {
            self.comm.broadcast((&mut self.executor.state.weights[..]).into())?;
        }
        self.broadcast_statistics()
    }

    fn broadcast_statistics(&mut self) -> Result<(), EngineError> {
        if self.plan.mesh.stage > 1 || self.executor.norms.iter().any(|norm| norm.is_split) {
            // Rank 0 has only a part of the statistics.
            return self.broadcast_parameters();
        }
        let norms = &mut self.executor.norms;
        let mut running: Vec<f32> = norms.iter().flat_map(|norm| norm.running.concat()).collect();
        self.comm.broadcast((&mut running).into())?;
        let mut rest = &running[..];
        for values in norms.iter_mut().flat_map(|norm| &mut norm.running) {
            let (own, others) = rest.split_at(values.len());
            values.copy_from_slice(own);
            rest = others;
        }
        Ok(())
    }

    fn exchange(&self) -> String {
        let Executor { layout, state, config, .. } = &self.executor;
        let saving = if !self.plan.optimizer_sharding || self.comm.size() == 1 {
            String::new()
        } else if state.is_sharded() {
            format!("; {}", state.memory_saving_text(layout.whole_len))
        } else {
            let bytes = 4 * config.optimizer.slots().len() * layout.whole_len;
            let mb = bytes as f64 / 1e6;
            format!(
                "; parallel.optimizer_sharding saves nothing here, because they also share one copy of the optimizer state, {mb:.2} MB"
            )
        };
        if !self.plan.is_data() {
            let is_exchange =
                |op: &&FusedOp| matches!(op, FusedOp::Redistribute { .. } | FusedOp::Halo { .. });
            let exchanges = match self.executor.ops.iter().filter(is_exchange).count() {
                0 => String::new(),
                n => format!("; {} to exchange activations", plural(n as u64, "operation")),
            };
            let (mesh, later_stages) = (self.plan.mesh, self.plan.later_stages_text(&self.network));
            return format!("a mesh of {mesh}{exchanges}{later_stages}{saving}");
        }
        match (&state.shm_unavailable_reason, self.comm.size()) {
            (_, 1) => String::new(),
            (None, _) => {
                format!("ranks share memory with one copy of the weights, and sum gradients in place{saving}")
            }
            (Some(why), _) => format!("ranks exchange gradients over TCP ({why}){saving}"),
        }
    }

    fn device_name(&self) -> String {
        let format = if self.precision() == Precision::Bf16 { ", bf16" } else { "" };
        format!("CPU, {}{format}", plural(self.threads.current_num_threads() as u64, "thread"))
    }
}

impl CpuEngine {
    /// Gathers the whole state of the optimizer. `None` unless this rank `keeps` it. Collective if ranks divide the state.
    fn gather_optimizer_state(&self, keeps: bool) -> Result<Option<OptimizerState>, EngineError> {
        let Executor { layout, state, config, .. } = &self.executor;
        let mut slots = NamedTensors::new();
        for (slot, &name) in config.optimizer.slots().iter().enumerate() {
            if let Some(flat) = state.gather_slot(slot, keeps)? {
                layout.export(Some(name), &flat, &mut slots);
            }
        }
        Ok(keeps.then_some(OptimizerState { slots, updates: state.updates }))
    }

    /// Converts weights in the engine's order, and each batch norm's running mean and variance, to named tensors.
    fn export<'a>(&self, weights: &[f32], running: impl Iterator<Item = &'a [Vec<f32>; 2]>) -> NamedTensors {
        let mut tensors = NamedTensors::new();
        self.executor.layout.export(None, weights, &mut tensors);
        for (norm, statistics) in self.executor.norms.iter().zip(running) {
            for (suffix, values) in RUNNING.into_iter().zip(statistics) {
                let tensor = HostTensor { shape: vec![values.len()], values: values.clone() };
                tensors.insert(format!("{}.{suffix}", norm.name), tensor);
            }
        }
        tensors
    }

    /// Whether this rank writes weights. Of ranks that share one copy of the weights, only rank 0 writes them.
    fn writes_weights(&self) -> bool {
        self.executor.state.memory.is_none() || self.comm.rank() == 0
    }

    fn check_batch(&self, batch: &Batch) -> Result<(), EngineError> {
        let reads_pictures = self.executor.network.stage().0 == 0;
        check::check_batch(&self.network, batch, reads_pictures.then_some(batch.images.len()))
    }
}

/// Fills the running mean and variance of the batch norm `name` from `values`.
fn read_running(values: &dyn TensorSource, name: &str, running: &mut [Vec<f32>; 2]) {
    for (own, suffix) in running.iter_mut().zip(RUNNING) {
        values.read(&format!("{name}.{suffix}"), 0, own);
    }
}
