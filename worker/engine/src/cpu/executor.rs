//! One rank's step: forward, backward, all-reduce and update, over reused buffers.

use super::{
    batch_norm::Statistics,
    conv,
    exchange::Pictures,
    groups::{ByAxes, Groups, TimesByAxes},
    layout::Layout,
    loss,
    reduce::Reducer,
    sample::{HeadParameter, Sample, SampledRows},
    split_loss::{self, Classes, Labels},
    state::{Sharding, State},
};
use crate::{
    EngineConfig, EngineError, EvalResult, StepResult,
    fuse::{self, Capabilities, FusedOp},
    loss::Order,
    net::{Axes, Network, Placement, TensorId},
    plan::{self, Pass, Plan},
    prepared_step::{PreparedStep, StepPart},
};
use lockstep_comm::{ProcessGroup, SingleRank};
use lockstep_data::loader::Batch;
use lockstep_kernels::sums;
use lockstep_protocol::agent::AxisTimes;
use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

/// Networks with at most this many parameters sum gradients in float64, which is exact: the CIFAR family (ResNet-110 has 1.7
/// million). Sending twice the bytes takes little time compared with their steps.
const F64_GRADIENTS_UP_TO: usize = 2_000_000;

/// Names of a batch norm's running statistics, in the order of [`Norm::running`].
pub(super) const RUNNING: [&str; 2] = ["running_mean", "running_var"];

/// A batch norm's state, except for trained parameters.
pub(super) struct Norm {
    pub(super) name: String,
    /// Whether a model group splits the channels.
    pub(super) is_split: bool,
    /// Running mean and variance.
    pub(super) running: [Vec<f32>; 2],
}

/// Reusable buffers for the gradients of activations. Only the first step allocates.
#[derive(Default)]
pub(super) struct BufferPool(Vec<Vec<f32>>);

impl BufferPool {
    /// A buffer of `len` arbitrary values.
    pub(super) fn alloc(&mut self, len: usize) -> Vec<f32> {
        let fits = (0..self.0.len()).filter(|&i| self.0[i].capacity() >= len);
        let Some(best) = fits.min_by_key(|&i| self.0[i].capacity()) else { return vec![0.0; len] };
        let mut buffer = self.0.swap_remove(best);
        buffer.resize(len, 0.0);
        buffer
    }

    pub(super) fn free(&mut self, buffer: Vec<f32>) {
        self.0.push(buffer);
    }

    /// `sum += part`; frees `part`.
    pub(super) fn add(&mut self, sum: &mut [f32], part: Vec<f32>) {
        sums::add(sum, &part);
        self.free(part);
    }
}

/// What a forward pass keeps for the backward pass of the same micro-batch.
#[derive(Clone)]
pub(super) struct MicroBatchState {
    /// By tensor: its values, with space for the largest batch so far.
    pub(super) activations: Vec<Vec<f32>>,
    /// By output tensor of a max pooling: the window position of each maximum.
    pub(super) argmax: Vec<Vec<u8>>,
    /// By batch norm: the statistics with which it normalised.
    pub(super) statistics: Vec<Statistics>,
    pub(super) pictures: Pictures,
}

/// One rank's part of the network with its state, and the buffers of a step.
pub(super) struct Executor {
    pub(super) network: Arc<Network>,
    pub(super) config: EngineConfig,
    /// Number of ranks that see different pictures.
    data_ranks: u32,
    pub(super) all_ranks: Arc<dyn ProcessGroup>,
    /// The groups of ranks that share copies of the network; `None` if each rank has a whole copy.
    pub(super) groups: Option<Groups>,
    /// The sampled classes of the current step, if the step samples classes.
    pub(super) sample: Option<Arc<Sample>>,
    pub(super) ops: Vec<FusedOp>,
    capabilities: Capabilities,
    pub(super) layout: Layout,
    pub(super) state: State,
    pub(super) norms: Vec<Norm>,
    /// Running means and variances before the current step, whose forward passes change them. `None` outside a step, and
    /// for a single rank.
    running_before: Option<Vec<[Vec<f32>; 2]>>,
    pub(super) current: MicroBatchState,
    /// Micro-batches between their forward and backward passes, except the current one.
    pub(super) in_flight: Vec<MicroBatchState>,
    /// By tensor: the channel sums that the convolution before a batch norm has computed with its output.
    pub(super) sums: Vec<Vec<f64>>,
    /// By tensor: gradients from each operation that reads the tensor.
    pub(super) gradient_parts: Vec<Vec<Vec<f32>>>,
    /// Gradient of a stage's input that has not been sent to the preceding stage yet.
    pub(super) input_gradient: Option<Vec<f32>>,
    pub(super) pool: BufferPool,
    /// Scratch memory with the number format of the convolutions.
    pub(super) scratch: conv::Scratch,
    /// Whether gradients are summed in float64; see [`super::gradient`].
    pub(super) has_f64_gradients: bool,
    /// Scratch memory for each share of a batch; see [`super::gradient`].
    pub(super) scratches: Vec<conv::Scratch>,
    pub(super) reducer: Reducer,
    /// By operation: time so far in the current step, if this step is timed.
    pub(super) times: Option<Vec<Duration>>,
}

impl Executor {
    pub(super) fn new(
        network: Arc<Network>,
        plan: &Plan,
        config: EngineConfig,
        comm: &Arc<dyn ProcessGroup>,
        capabilities: Capabilities,
    ) -> Result<Self, EngineError> {
        let network = plan::part_of(&network, plan, comm.rank())?;
        config.loss.check_part(&network).map_err(EngineError::Parameters)?;
        let ops = fuse::fuse(&network, &capabilities);
        let layout = Layout::new(&network, &ops);
        let has_f64_gradients = layout.whole_len <= F64_GRADIENTS_UP_TO;
        let norms = norms(&network, &ops);
        let tensors = network.tensors.len();
        let data_ranks = plan.mesh.readers() as u32;
        let (stage, stages) = network.stage();
        let max_in_flight = (stages - stage).min(config.accumulate.max(1));
        let groups = if plan.is_data() { None } else { Some(Groups::split(plan.mesh, comm.as_ref())?) };
        let memory_group: &dyn ProcessGroup = if plan.is_data() { comm.as_ref() } else { &SingleRank };
        let model_group = groups.as_ref().map(|groups| groups.model.clone());
        let sharding = (plan.optimizer_sharding && comm.size() > 1).then(|| {
            let gradient_groups = groups.as_ref().map(|groups| groups.gradients.clone());
            Sharding::new(&layout, gradient_groups.unwrap_or_else(|| ByAxes::uniform(comm.clone())))
        });
        let state =
            State::new(&layout, has_f64_gradients, config.optimizer, memory_group, model_group, sharding)?;
        let reducer = Reducer::new(comm, groups.as_ref(), state.memory.as_ref(), state.is_sharded())
            .map_err(|e| EngineError::Parameters(format!("cannot start the communication thread: {e}")))?;
        let statistics = |norm: &Norm| Statistics::from_running(&norm.running[0], &norm.running[1]);
        let current = MicroBatchState {
            activations: vec![Vec::new(); tensors],
            argmax: vec![Vec::new(); tensors],
            statistics: norms.iter().map(statistics).collect(),
            pictures: Pictures::of_one_rank(0),
        };
        Ok(Self {
            state,
            has_f64_gradients,
            scratches: Vec::new(),
            in_flight: vec![current.clone(); max_in_flight - 1],
            current,
            sums: vec![Vec::new(); tensors],
            gradient_parts: vec![Vec::new(); tensors],
            input_gradient: None,
            pool: BufferPool::default(),
            scratch: conv::Scratch::default(),
            network,
            config,
            data_ranks,
            all_ranks: comm.clone(),
            groups,
            sample: None,
            ops,
            capabilities,
            layout,
            norms,
            running_before: None,
            reducer,
            times: None,
        })
    }

    /// Continues with the same network for another image size: parameters stay, buffers grow.
    pub(super) fn set_network(&mut self, network: Arc<Network>) {
        self.ops = fuse::fuse(&network, &self.capabilities);
        self.network = network;
    }

    /// Number of values that this rank has of an activation.
    pub(super) fn value_count(&self, tensor: TensorId) -> usize {
        self.current.pictures.count(self.network.placement(tensor)) * self.network.tensors[tensor].len()
    }

    /// Allocates activations for the current pictures; never shrinks.
    pub(super) fn reserve(&mut self) {
        let outputs = self.ops.iter().map(FusedOp::output);
        for tensor in std::iter::once(self.network.input()).chain(outputs) {
            let len = self.value_count(tensor);
            if self.current.activations[tensor].len() < len {
                self.current.activations[tensor] = vec![0.0; len];
            }
        }
        for op in &self.ops {
            if let FusedOp::MaxPool { output, .. } = *op {
                let len = self.value_count(output);
                let argmax = &mut self.current.argmax[output];
                argmax.resize(len.max(argmax.len()), 0);
            }
        }
    }

    /// One optimizer step; see [`crate::Engine::train_step`].
    pub(super) fn train_step(&mut self, batches: &[Batch], lr: f32) -> Result<StepResult, EngineError> {
        let PreparedStep { parts, gradient_scale } =
            PreparedStep::of(batches, &self.config, self.data_ranks)?;
        if parts.is_empty() {
            return Ok(StepResult::default());
        }
        let sampled = self.choose_classes(batches)?;
        self.state.begin(lr, sampled);
        if self.groups.is_some() || self.data_ranks > 1 {
            self.running_before = Some(self.norms.iter().map(|norm| norm.running.clone()).collect());
        }
        // Discards waiting times of evaluations.
        if let Some(groups) = &self.groups {
            groups.take_waited(&TimesByAxes::default());
        }
        let mut measured = loss::Loss::default();
        let (stage, stages) = self.network.stage();
        for pass in plan::schedule(stage, stages, parts.len()) {
            let (Pass::Forward(index) | Pass::Backward(index)) = pass;
            let micro_batch @ StepPart { batch, stat_pictures, .. } = parts[index];
            self.swap_in_flight(index);
            if pass == Pass::Backward(index) {
                self.backward(micro_batch)?;
            } else {
                let labels = self.exchange_labels(batch)?;
                self.forward(&batch.images, Some(stat_pictures))?;
                if self.network.is_last_stage() {
                    let part = self.loss_and_gradient(batch, &labels, gradient_scale)?;
                    measured.sum += part.sum;
                    measured.correct += part.correct;
                }
            }
            self.swap_in_flight(index);
        }
        self.send_input_gradient()?;
        let square_sum = self.update()?;
        (self.running_before, self.sample) = (None, None);
        // Only the last stage has a loss and predictions. Each stage has the gradients of its own parameters.
        let mut sums = [square_sum, measured.sum, measured.correct as f64];
        if let Some(groups) = &self.groups {
            groups.stage.all_reduce((&mut sums).into())?;
        }
        let waited = std::mem::take(&mut self.reducer.waited);
        let axis_secs = self.groups.as_ref().map(|groups| groups.take_waited(&waited));
        let [square_sum, loss_sum, correct] = sums;
        let samples: usize = batches.iter().map(|b| b.labels.len()).sum();
        let divisor: f64 = batches.iter().map(|batch| self.config.loss.divisor(batch)).sum();
        Ok(StepResult {
            loss: if samples > 0 { (loss_sum / divisor) as f32 } else { 0.0 },
            correct: correct as u32,
            samples: samples as u32,
            grad_norm: square_sum.sqrt() as f32,
            step_secs: 0.0,
            all_reduce_secs: axis_secs.map_or_else(|| waited.sum().as_secs_f64(), AxisTimes::sum),
            axis_secs,
            loss_scale: None,
        })
    }

    /// The classes of this rank, if it has the last layer.
    pub(super) fn own_classes(&self) -> Range<usize> {
        let split = self.network.split_channels(self.network.logits());
        split.map_or(0..self.network.classes, |(own, _)| own)
    }

    /// Collective over all ranks: chooses the classes of a step. Ranks with the same classes have different labels but sum their
    /// gradients, so the sample includes the labels of all ranks and of all micro-batches.
    pub(super) fn choose_classes(&mut self, batches: &[Batch]) -> Result<Option<SampledRows>, EngineError> {
        let loss = &self.config.loss;
        if !loss.samples_classes() {
            return Ok(None);
        }
        let labels = batches.iter().flat_map(|batch| batch.labels.iter().chain(&batch.mixed_labels));
        let labels: Vec<u8> = labels.flat_map(|label| label.to_le_bytes()).collect();
        let gathered = self.all_ranks.all_gather_bytes(&labels)?;
        if !self.network.is_last_stage() {
            return Ok(None);
        }
        let own = self.own_classes();
        let order = Order::new(loss.seed, self.state.updates, own.start, own.len());
        let mut rows: Vec<u32> =
            (0..loss.drawn_count(own.len()) as u32).map(|index| order.class(index)).collect();
        let labels = gathered.iter().flat_map(|labels| labels.as_chunks::<4>().0);
        let labels = labels.map(|label| u32::from_le_bytes(*label) as usize);
        rows.extend(labels.filter(|label| own.contains(label)).map(|label| (label - own.start) as u32));
        rows.sort_unstable();
        rows.dedup();
        let sample = Arc::new(Sample { rows });
        self.sample = Some(sample.clone());
        let parameters = ["weight", "bias"].map(|suffix| {
            let index = self.layout.index_of(&format!("{}.{suffix}", self.network.head()));
            let range = &self.layout.parameters[index].range;
            HeadParameter { index, offset: range.start, width: range.len() / own.len() }
        });
        Ok(Some(SampledRows { sample, parameters }))
    }

    /// Collective in the model group: exchanges each rank's number of pictures and labels for this micro-batch.
    fn exchange_labels(&mut self, batch: &Batch) -> Result<Labels, EngineError> {
        let Some(groups) = &self.groups else {
            self.current.pictures = Pictures::of_one_rank(batch.labels.len());
            return Ok(Labels::default());
        };
        let (pictures, labels) = split_loss::gather_labels(&groups.model, batch)?;
        self.current.pictures = pictures;
        Ok(labels)
    }

    /// Computes the loss of this rank's pictures, and the gradient of the logits, times `scale`, for [`Executor::backward`].
    fn loss_and_gradient(
        &mut self,
        batch: &Batch,
        labels: &Labels,
        scale: f64,
    ) -> Result<loss::Loss, EngineError> {
        let (tensor, all_classes) = (self.network.logits(), self.network.classes);
        let classes = Classes { own: self.own_classes(), sample: self.sample.as_deref() };
        let len = self.current.pictures.count(self.network.placement(tensor)) * classes.len();
        let mut gradient = self.pool.alloc(len);
        let mut values = std::mem::take(&mut self.current.activations[tensor]);
        let logits = &mut values[..len];
        let add_margin = |logits: &mut [f32], labels: &[u32]| {
            let labels = labels.iter().map(|label| classes.position(*label as usize));
            let margin = self.config.loss.margin.as_ref();
            margin.map_or_else(Vec::new, |margin| margin.apply_margin(logits, classes.len(), labels))
        };
        let smoothing = self.config.loss.label_smoothing;
        let is_split = self.network.split_channels(tensor).is_some();
        // Accuracy is computed without the margin.
        let (loss, margin_slopes) = match &self.groups {
            Some(_) if is_split && self.current.pictures.total() == 0 => (loss::Loss::default(), Vec::new()),
            Some(groups) if is_split => {
                let best = split_loss::largest_logits(&groups.model, logits, &classes)?;
                let slopes = add_margin(logits, &labels.first);
                let loss = split_loss::cross_entropy(
                    &groups.model,
                    logits,
                    (&self.current.pictures, labels),
                    (&classes, all_classes),
                    &best,
                    smoothing,
                    (&mut gradient[..], scale),
                )?;
                (loss, slopes)
            }
            _ => {
                // A sample includes every label.
                let positions = |labels: &[u32]| -> Vec<u32> {
                    labels.iter().map(|label| classes.position(*label as usize).unwrap_or(0) as u32).collect()
                };
                let labels = positions(&batch.labels);
                let mixed = batch.mixed().map(|(labels, lambda)| (positions(labels), lambda));
                let mixed = mixed.as_ref().map(|(labels, lambda)| (&labels[..], *lambda));
                let (count, into) = (classes.len(), Some((&mut gradient[..], scale)));
                let has_margin = self.config.loss.margin.is_some();
                let without_margin =
                    has_margin.then(|| loss::cross_entropy(logits, &labels, None, count, 0.0, None, None));
                let slopes = add_margin(logits, &batch.labels);
                let weights = self.config.loss.class_weights.as_deref();
                let loss = loss::cross_entropy(logits, &labels, mixed, count, smoothing, weights, into);
                (loss::Loss { correct: without_margin.unwrap_or(loss).correct, ..loss }, slopes)
            }
        };
        margin_slopes.into_iter().for_each(|(index, slope)| gradient[index] *= slope as f32);
        self.current.activations[tensor] = values;
        self.gradient_parts[tensor].push(gradient);
        Ok(loss)
    }

    /// Adds the time since `began` to the operation at `index`, if this step is timed.
    pub(super) fn add_time(&mut self, index: usize, began: Instant) {
        if let Some(time) = self.times.as_mut().and_then(|times| times.get_mut(index)) {
            *time += began.elapsed();
        }
    }

    /// Takes part in the update until it is done. Returns the sum of squares of the reduced gradient.
    fn update(&mut self) -> Result<f64, EngineError> {
        if self.reducer.reduces_gradients() {
            // No weight changes before all buckets have arrived: if a rank is lost, all weights still belong to one step.
            for bucket in 0..self.layout.buckets.len() {
                *self.state.gradient(bucket) = self.reducer.finish_bucket(self.layout.axes[bucket])?;
            }
            (0..self.layout.buckets.len()).for_each(|bucket| self.state.complete(bucket));
        }
        let (square_sum, waited) = self.state.finish()?;
        self.reducer.waited.add(Axes { model: true, height: true }, waited);
        Ok(square_sum)
    }

    /// See [`crate::Engine::undo_unfinished_steps`]. Ranks that share memory cannot undo: they update pieces of the weights while
    /// the backward pass still runs.
    pub(super) fn undo_step(&mut self) -> bool {
        if self.state.memory.is_some() {
            return false;
        }
        for (norm, running) in self.norms.iter_mut().zip(self.running_before.take().unwrap_or_default()) {
            norm.running = running;
        }
        true
    }

    /// The result of one batch; see [`crate::Engine::start_evaluation`].
    pub(super) fn evaluate(&mut self, batch: &Batch) -> Result<EvalResult, EngineError> {
        let logits = self.predict(batch)?;
        if !self.network.is_last_stage() {
            return Ok(EvalResult::default());
        }
        let loss = loss::cross_entropy(&logits, &batch.labels, None, self.network.classes, 0.0, None, None);
        Ok(EvalResult { loss_sum: loss.sum, correct: loss.correct, samples: batch.labels.len() as u64 })
    }

    /// Logits of this rank's pictures with running statistics. Empty on all stages except the last.
    pub(super) fn predict(&mut self, batch: &Batch) -> Result<Vec<f32>, EngineError> {
        self.exchange_labels(batch)?;
        self.forward(&batch.images, None)?;
        if !self.network.is_last_stage() {
            return Ok(Vec::new());
        }
        let (tensor, own_pictures) = (self.network.logits(), self.current.pictures.own_range().len());
        let placement = self.network.placement(tensor);
        let len = self.value_count(tensor);
        let logits = &self.current.activations[tensor][..len];
        if *placement == Placement::Batch {
            return Ok(logits.to_vec());
        }
        let mut own_logits = vec![0.0; own_pictures * self.network.classes];
        self.redistribute(tensor, (placement, &Placement::Batch), logits, &mut own_logits)?;
        Ok(own_logits)
    }
}

/// The batch norms in forward order, with initial running statistics.
fn norms(network: &Network, ops: &[FusedOp]) -> Vec<Norm> {
    let mut norms: Vec<(usize, Norm)> = ops
        .iter()
        .filter_map(|op| match op {
            FusedOp::Norm(fuse::Norm { name, norm, input, .. }) => {
                let channels = network.tensors[*input].channels;
                let is_split = network.split_channels(*input).is_some();
                let running = [vec![0.0; channels], vec![1.0; channels]];
                Some((*norm, Norm { name: name.clone(), is_split, running }))
            }
            _ => None,
        })
        .collect();
    norms.sort_by_key(|(norm, _)| *norm);
    norms.into_iter().map(|(_, norm)| norm).collect()
}
