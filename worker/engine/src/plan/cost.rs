//! A cost model of plans: time and memory of each operation on one rank, from the figures of a [`Machine`]. It has few
//! terms (ParaDL, arXiv 2104.09075). An operation takes as long as its arithmetic or its memory traffic,
//! whichever is longer. An exchange has the latency of a tree and the bytes of a ring. Devices also lose time before and
//! after an exchange between kernels. Gradients are reduced concurrently with the backward pass of the layers before.
//! Stages wait for the slowest stage. The model does not include the preparation of pictures, evaluation and checkpoints.

use super::{Mesh, Plan, lower, stages::values_moved};
use crate::{
    LayerTime,
    net::{Axes, Network, Op, Placement, TensorId},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Size of a weight, of a gradient, and of a value of the optimizer's state.
const WEIGHT_BYTES: f64 = 4.0;
/// Size of a sum for batch norm's statistics.
const STATISTIC_BYTES: f64 = 8.0;
/// Number of products of a convolution or linear layer in a step: the output, the input's gradient and the weight's
/// gradient.
const PRODUCTS: f64 = 3.0;
/// The fraction of a step's arithmetic that is in the backward pass, which overlaps with the reduction of gradients.
const BACKWARD: f64 = 2.0 / 3.0;
/// What an exchange through NCCL between two kernels takes in addition to its messages: neither kernel overlaps with it, the
/// ranks wait for the slowest one, and batch norm needs more kernels. H200: 14 to 22 us per batch norm (ResNet-18 and 50,
/// 224 to 2048 pixels), and about 18 us per exchange of a split last layer.
const BETWEEN_KERNELS_SECS: f64 = 18e-6;
/// By what fraction kernels of the backward pass take longer while NCCL reduces gradients on some of the multiprocessors. H200: 0.5
/// for ResNet-18 and 50 with 1,000,000 classes.
const REDUCTION_SLOWDOWN: f64 = 0.5;
/// Number of messages of a send with its acknowledgement.
const ACKNOWLEDGED: f64 = 2.0;
/// Factor of the products of a device's 7x7 convolution of the pictures if ranks share rows: tensor cores then multiply 7x7 pixels of
/// eight channels. Otherwise pictures are folded to 16 channels, and the kernel has 4x4 pixels.
const UNFOLDED: f64 = (8.0 * 49.0) / (16.0 * 16.0);
/// A pooling behind the exchange of rows is not fused with the batch norm before it, so the activation between them and its gradient
/// are each written and read.
const UNFUSED_POOLING_PASSES: f64 = 4.0;
const MODEL: Axes = Axes { model: true, height: false };
const HEIGHT: Axes = Axes { model: false, height: true };

/// The devices of ranks and the connections between them, as measured and stored by `lockstep plan`, or as read from a
/// file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The device of a rank: `CPU, 2 threads`, `NVIDIA H200, fp16`.
    pub device: String,
    /// The backend's name: `cpu`, `cuda`.
    pub backend: String,
    /// Number of ranks per machine.
    pub ranks: usize,
    /// Memory per rank.
    pub memory_bytes: u64,
    /// Whether ranks of one machine share one copy of the weights, and sum gradients in place.
    pub shared_memory: bool,
    pub rates: Rates,
    /// The connection between ranks of one machine. `None` if only one rank was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Link>,
    /// The connection between machines. `None` if it is the same as within a machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between: Option<Link>,
}

/// How fast a rank computes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Size of a value of an activation.
    pub value_bytes: u64,
    /// Floating-point operations per second by kind of operation: `conv1x1`, `conv3x3`, `conv7x7`, `grouped`, `linear`.
    pub flops_per_second: BTreeMap<String, f64>,
    /// Rates of linear layers by size, smallest first. If empty, the rate `linear` applies to all sizes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub linear: Vec<LinearRate>,
    /// Memory bandwidth of passes over activations and weights.
    pub memory_bytes_per_second: f64,
}

/// How fast a rank computes linear layers of a certain size: small matrices do not use a whole device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearRate {
    /// Number of pictures of the measured step.
    pub pictures: f64,
    /// Number of floating-point operations of the layer in this step.
    pub operations: f64,
    pub flops_per_second: f64,
    /// Memory bandwidth of the update of the weights. Passes over small activations are slower than this.
    pub update_bytes_per_second: f64,
}

impl LinearRate {
    /// The size of the layer: this number is proportional to the number of weights.
    fn operations_per_picture(&self) -> f64 {
        self.operations / self.pictures
    }
}

/// A connection between ranks: the latency of a short message, and the bandwidth of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    pub latency_us: f64,
    pub bytes_per_second: f64,
}

impl Link {
    /// Computes a link from measured all-reduces over `ranks` ranks: the microseconds of a short all-reduce, and the bytes
    /// per second of a long all-reduce.
    pub fn of_all_reduce(ranks: usize, short_us: f64, bytes_per_second: f64) -> Self {
        let group = Group { ranks: ranks.max(2), link: None, is_local: true };
        Self {
            latency_us: short_us / (2.0 * group.tree_depth()),
            bytes_per_second: group.ring_bytes(bytes_per_second),
        }
    }
}

impl Machine {
    /// Checks that all figures are positive numbers.
    ///
    /// # Errors
    /// A figure is not a positive number.
    pub fn check(&self) -> Result<(), String> {
        let Rates { flops_per_second, memory_bytes_per_second, .. } = &self.rates;
        let links = self.within.iter().chain(&self.between);
        let mut figures: Vec<(&str, f64)> = vec![
            ("ranks", self.ranks as f64),
            ("memory_bytes", self.memory_bytes as f64),
            ("value_bytes", self.rates.value_bytes as f64),
            ("memory_bytes_per_second", *memory_bytes_per_second),
            // The largest rate. Without rates it is 0, which is an error.
            ("flops_per_second", flops_per_second.values().copied().fold(0.0, f64::max)),
        ];
        figures.extend(flops_per_second.iter().map(|(kind, rate)| (kind.as_str(), *rate)));
        figures.extend(self.rates.linear.iter().flat_map(|rate| {
            [
                ("pictures", rate.pictures),
                ("operations", rate.operations),
                ("flops_per_second", rate.flops_per_second),
                ("update_bytes_per_second", rate.update_bytes_per_second),
            ]
        }));
        figures.extend(
            links.flat_map(|l| [("latency_us", l.latency_us), ("bytes_per_second", l.bytes_per_second)]),
        );
        let wrong = figures.into_iter().find(|(_, figure)| !figure.is_finite() || *figure <= 0.0);
        wrong.map_or(Ok(()), |(name, figure)| Err(format!("{name} is {figure} and must be a number above 0")))
    }
}

impl Rates {
    /// Computes rates from the `times` of `network`'s operations in a step of `pictures` pictures. Rates are scaled so
    /// that the predicted step takes `step_secs`, including the update, with `state_per_weight` values of a weight in the
    /// optimizer.
    ///
    /// # Errors
    /// No convolution or linear layer was timed, or no other operation.
    pub fn fit(
        network: &Network,
        pictures: f64,
        times: &[LayerTime],
        (step_secs, state_per_weight): (f64, f64),
        value_bytes: u64,
    ) -> Result<Self, String> {
        let find = |time: &LayerTime| {
            let is_timed_op = |op: &&Op| match (&time.name, op) {
                (Some(of), Op::Conv { name, .. } | Op::BatchNorm { name, .. } | Op::Linear { name, .. }) => {
                    of == name
                }
                (None, op) => op.output() == time.output,
                _ => false,
            };
            network.ops.iter().find(is_timed_op)
        };
        // (operations, seconds) by kind. An operation that is fused into a convolution has no separate time.
        let mut sums: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
        let mut memory_secs = 0.0;
        for time in times.iter().filter(|time| time.micros > 0.0) {
            let Some(op) = find(time) else { continue };
            match kind(op) {
                None => memory_secs += time.micros / 1e6,
                Some(kind) => {
                    let [operations, secs] = sums.entry(kind).or_default();
                    *operations += pictures * operations_of(network, op);
                    *secs += time.micros / 1e6;
                }
            }
        }
        if sums.is_empty() || memory_secs <= 0.0 {
            return Err("the engine has not timed its operations".into());
        }
        let bytes: f64 = network.ops.iter().map(|op| pictures * values_moved(network, op)).sum();
        let bytes_per_second = bytes * value_bytes as f64 / memory_secs;
        let parameters: f64 = network.ops.iter().map(|op| weights_of(network, op)).sum();
        let update_secs = parameters * update_bytes(state_per_weight) / bytes_per_second;
        let secs = sums.values().map(|[_, secs]| secs).sum::<f64>() + memory_secs + update_secs;
        let scale = secs / step_secs;
        let rate = |[operations, secs]: &[f64; 2]| LinearRate {
            pictures,
            operations: *operations,
            flops_per_second: scale * operations / secs,
            update_bytes_per_second: scale * bytes_per_second,
        };
        Ok(Self {
            value_bytes,
            linear: sums.get("linear").map(rate).into_iter().collect(),
            flops_per_second: sums
                .into_iter()
                .map(|(kind, [operations, secs])| (kind.to_owned(), scale * operations / secs))
                .collect(),
            memory_bytes_per_second: scale * bytes_per_second,
        })
    }

    /// Adds the rates of the head of `network`, which is wider than the head in [`Rates::fit`]. A step of `pictures`
    /// pictures took `step_secs`. The time of the head is `step_secs` minus the predicted times of all other operations. It
    /// consists of the head's products, whose time is in `times`, and of the update of the head's weights.
    pub fn add_head(
        &mut self,
        network: &Network,
        pictures: f64,
        times: &[LayerTime],
        (step_secs, state_per_weight): (f64, f64),
    ) {
        let (mut head_secs, mut product_secs) = (step_secs, 0.0);
        let (mut operations, mut weights) = (0.0, 0.0);
        for op in &network.ops {
            if let Op::Linear { name, .. } = op {
                let of_op = times.iter().filter(|time| time.name.as_ref() == Some(name));
                product_secs += of_op.map(|time| time.micros / 1e6).sum::<f64>();
                operations += pictures * operations_of(network, op);
                weights += weights_of(network, op);
            } else {
                head_secs -= self.secs(network, op, pictures);
                head_secs -=
                    weights_of(network, op) * update_bytes(state_per_weight) / self.memory_bytes_per_second;
            }
        }
        // Nothing remains if the step was faster than predicted without the head. The step whose operations were timed may have
        // been slower than `step_secs`, so a tenth of the head's time is left for the update.
        product_secs = f64::min(product_secs, 0.9 * head_secs);
        if product_secs > 0.0 {
            self.linear.push(LinearRate {
                pictures,
                operations,
                flops_per_second: operations / product_secs,
                update_bytes_per_second: weights * update_bytes(state_per_weight)
                    / (head_secs - product_secs),
            });
            self.linear.sort_by(|a, b| a.operations_per_picture().total_cmp(&b.operations_per_picture()));
        }
    }

    /// Seconds of an operation in a step of `pictures` pictures: of its arithmetic or its memory traffic, whichever is
    /// longer.
    fn secs(&self, network: &Network, op: &Op, pictures: f64) -> f64 {
        let value_bytes = self.value_bytes as f64;
        match kind(op) {
            Some(kind) => {
                let operations = pictures * operations_of(network, op);
                let passes = PRODUCTS * weights_of(network, op) * value_bytes / self.memory_bytes_per_second;
                (operations / self.flops_of(kind, operations, pictures)).max(passes)
            }
            None => pictures * values_moved(network, op) * value_bytes / self.memory_bytes_per_second,
        }
    }

    /// The rates of a linear layer with `operations_per_picture`: interpolated linearly between two measured sizes, with logarithms
    /// of rates and size.
    fn linear_of(&self, operations_per_picture: f64) -> Option<LinearRate> {
        let larger =
            self.linear.partition_point(|rate| rate.operations_per_picture() <= operations_per_picture);
        let smaller = larger.checked_sub(1).map(|index| self.linear[index]);
        match (smaller, self.linear.get(larger)) {
            (Some(a), Some(b)) => {
                let [small, large] = [a, *b].map(|rate| rate.operations_per_picture());
                let share = (operations_per_picture / small).ln() / (large / small).ln();
                let between = |a: f64, b: f64| a * (b / a).powf(share);
                Some(LinearRate {
                    flops_per_second: between(a.flops_per_second, b.flops_per_second),
                    update_bytes_per_second: between(a.update_bytes_per_second, b.update_bytes_per_second),
                    ..a
                })
            }
            (Some(only), None) | (None, Some(&only)) => Some(only),
            (None, None) => None,
        }
    }

    /// Memory bandwidth of the update of an operation's weights.
    fn update_bytes_per_second(&self, network: &Network, op: &Op) -> f64 {
        let rate = match op {
            Op::Linear { .. } => self.linear_of(operations_of(network, op)),
            _ => None,
        };
        rate.map_or(self.memory_bytes_per_second, |rate| rate.update_bytes_per_second)
    }

    /// The rate of `operations` of a kind over `pictures` pictures. For a kind that was not measured, the mean of all measured rates.
    /// A slow linear layer takes as long as reading its weights: more pictures than measured take the same time, until the layer has
    /// the rate of the fastest kind of operation.
    fn flops_of(&self, kind: &str, operations: f64, pictures: f64) -> f64 {
        let rates = &self.flops_per_second;
        if kind == "linear"
            && let Some(LinearRate { flops_per_second, pictures: measured, .. }) =
                self.linear_of(operations / pictures)
        {
            let fastest = rates.values().copied().fold(flops_per_second, f64::max);
            return (flops_per_second * (pictures / measured).max(1.0)).min(fastest);
        }
        rates.get(kind).copied().unwrap_or_else(|| rates.values().sum::<f64>() / rates.len().max(1) as f64)
    }
}

/// The work of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Number of pictures of a step on all ranks together.
    pub pictures: u64,
    /// Number of micro-batches.
    pub accumulate: u64,
    /// Number of values per weight that are kept besides the weight and its gradient: the optimizer's slots, and a
    /// moving average.
    pub state_per_weight: u64,
    pub sync_batch_norm: bool,
}

impl Workload {
    /// Number of pictures of a rank in a micro-batch. `None` if the pictures cannot be divided evenly over the ranks
    /// that see different pictures.
    fn pictures_of_rank(&self, mesh: Mesh) -> Option<u64> {
        let parts = self.accumulate.max(1) * mesh.readers() as u64;
        (self.pictures >= parts && self.pictures.is_multiple_of(parts)).then(|| self.pictures / parts)
    }
}

/// The cost of an operation on rank 0, which has the largest part.
#[derive(Debug, Clone, PartialEq)]
pub struct OperatorCost {
    pub placement: Placement,
    /// Whether ranks share the rows of the output.
    pub shares_rows: bool,
    pub memory_bytes: f64,
    /// Bytes that a rank sends in a step: activations, their gradients, and gradients of weights.
    pub sent_bytes: f64,
    /// Milliseconds per step of the computation, and of the exchange of its inputs.
    pub ms: f64,
}

/// The cost of a plan for one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Cost {
    /// The cost of each operation of the whole network.
    pub operators: Vec<OperatorCost>,
    /// Milliseconds of a step. The next five fields are its parts.
    pub step_ms: f64,
    pub compute_ms: f64,
    /// Exchanges of activations, statistics and losses.
    pub exchange_ms: f64,
    /// Time in which a stage has no micro-batch to compute.
    pub bubble_ms: f64,
    /// The part of the reduction of gradients that does not overlap with the backward pass.
    pub gradients_ms: f64,
    pub update_ms: f64,
    pub images_per_second: f64,
    pub memory_bytes: f64,
}

/// The cost of `plan`.
///
/// # Errors
/// As for [`lower`](super::lower()), or the pictures cannot be divided over the ranks; a sentence.
pub fn cost(network: &Network, plan: &Plan, machine: &Machine, work: &Workload) -> Result<Cost, String> {
    let mesh = plan.mesh;
    let Some(own_pictures) = work.pictures_of_rank(mesh) else {
        return Err(format!(
            "the {} pictures of a step cannot be divided over {} ranks and {} micro-batches",
            work.pictures,
            mesh.readers(),
            work.accumulate
        ));
    };
    let stage = |stage: usize| -> Result<Stage, String> {
        let local = lower(network, plan, stage * mesh.ranks_of_stage())?;
        Ok(StageModel { local: &local, plan, machine, work, own_pictures: own_pictures as f64 }.cost(stage))
    };
    let stages = (0..mesh.stage).map(stage).collect::<Result<Vec<_>, _>>()?;
    let largest = |value: fn(&Stage) -> f64| stages.iter().map(value).fold(0.0, f64::max);
    let spent = |stage: &Stage| stage.spent.compute + stage.spent.exchange;
    let slowest = stages.iter().max_by(|a, b| spent(a).total_cmp(&spent(b))).map(|stage| stage.spent);
    let Spent { compute, exchange, .. } = slowest.unwrap_or_default();
    let micro_batches = work.accumulate.max(1) as f64;
    // In the bubble, a micro-batch passes through the other stages.
    let bubble = stages.iter().map(spent).sum::<f64>() - (compute + exchange);
    let (gradients, update) = (largest(|stage| stage.gradients), largest(|stage| stage.update));
    let step = micro_batches * (compute + exchange) + bubble + gradients + update;
    let memory_bytes = largest(|stage| stage.memory_bytes);
    Ok(Cost {
        operators: stages.into_iter().flat_map(|stage| stage.operators).collect(),
        step_ms: 1e3 * step,
        compute_ms: 1e3 * micro_batches * compute,
        exchange_ms: 1e3 * micro_batches * exchange,
        bubble_ms: 1e3 * bubble,
        gradients_ms: 1e3 * gradients,
        update_ms: 1e3 * update,
        images_per_second: work.pictures as f64 / step,
        memory_bytes,
    })
}

/// The cost of a stage on its first rank, in seconds: `spent` per micro-batch, `gradients` and `update` per step.
struct Stage {
    operators: Vec<OperatorCost>,
    spent: Spent,
    gradients: f64,
    update: f64,
    memory_bytes: f64,
}

/// The input of the cost model for one stage.
struct StageModel<'a> {
    /// The rank's part of the network.
    local: &'a Network,
    plan: &'a Plan,
    machine: &'a Machine,
    work: &'a Workload,
    /// Number of a rank's own pictures in a micro-batch.
    own_pictures: f64,
}

/// Seconds in which a rank computes and exchanges data, and bytes that it sends.
#[derive(Debug, Clone, Copy, Default)]
struct Spent {
    compute: f64,
    exchange: f64,
    sent: f64,
}

impl StageModel<'_> {
    fn cost(&self, number: usize) -> Stage {
        let Self { local, machine, work, plan, .. } = self;
        let (value_bytes, micro_batches) = (machine.rates.value_bytes as f64, work.accumulate.max(1) as f64);
        let picture_bytes = self.own_pictures * local.tensors[local.input()].len() as f64 * value_bytes;
        let (mut operators, mut total, mut largest) = (Vec::new(), Spent::default(), picture_bytes);
        // The exchange of the next operation's inputs, and the bytes that are kept of these inputs.
        let (mut input_exchange, mut input_bytes) = (Spent::default(), picture_bytes);
        let mut update_secs = 0.0;
        // By operation: seconds of its backward pass, and of the reduction of its gradient.
        let mut reductions: Vec<[f64; 2]> = Vec::new();
        // Number of micro-batches between their forward and their backward pass.
        let in_flight = micro_batches.min((plan.mesh.stage - number) as f64);
        if number > 0 {
            // The gradient of the stage's input is sent to the preceding stage.
            self.add_stage_transfer(self.values(local.input()) * value_bytes, &mut input_exchange);
        }
        for op in &local.ops {
            let output = op.output();
            let bytes = self.values(output) * value_bytes;
            largest = f64::max(largest, bytes);
            if let Op::Redistribute { .. } | Op::Halo { .. } | Op::MeanOfRows { .. } = op {
                self.add_exchange(op, &mut input_exchange);
                input_bytes += bytes;
                continue;
            }
            let (mut spent, weights) = (std::mem::take(&mut input_exchange), weights_of(local, op));
            self.add_compute(op, &mut spent);
            let is_trained = weights > 0.0 && !(local.frozen_norm && matches!(op, Op::BatchNorm { .. }));
            let (mut sent, mut memory) = (0.0, std::mem::take(&mut input_bytes));
            let mut reduction_secs = 0.0;
            if is_trained {
                // Sums of gradients over micro-batches are float32. They are written for each micro-batch, and read for each but the
                // first one. On a device, another pass adds the gradient to the sum.
                let later_batches = work.accumulate.saturating_sub(1) as f64;
                let gradient_bytes = if later_batches > 0.0 { WEIGHT_BYTES } else { value_bytes };
                if later_batches > 0.0 {
                    let added_bytes = if machine.shared_memory { 0.0 } else { value_bytes + WEIGHT_BYTES };
                    let bytes_per_weight = later_batches * WEIGHT_BYTES / (later_batches + 1.0) + added_bytes;
                    spent.compute += weights * bytes_per_weight / machine.rates.memory_bytes_per_second;
                }
                let (secs, sent_gradient) = self.gradient_reduction(output, weights * gradient_bytes);
                sent += sent_gradient;
                // With divided state, gradients are reduce-scattered during the backward pass, and weights are gathered
                // after the update.
                if plan.optimizer_sharding && !self.shares_memory() {
                    reduction_secs = 0.5 * secs;
                    update_secs += 0.5 * self.gradient_reduction(output, weights * value_bytes).0;
                } else {
                    reduction_secs = secs;
                }
                // Ranks that share one copy of the weights, or that divide the optimizer's state, each update a part.
                let parts = self.state_parts(output);
                update_secs += weights / parts * update_bytes(work.state_per_weight as f64)
                    / machine.rates.update_bytes_per_second(local, op);
            }
            reductions.push([BACKWARD * spent.compute, reduction_secs]);
            memory += match op {
                Op::Conv { .. } | Op::Relu { .. } | Op::Gelu { .. } | Op::MaxPool { .. } => bytes,
                // Logits and their gradient, in float32.
                Op::Linear { .. } => 2.0 * self.values(output) * WEIGHT_BYTES,
                _ => 0.0,
            };
            let state = weights * work.state_per_weight as f64 / self.state_parts(output);
            let gradients = if self.shares_memory() { weights / plan.mesh.ranks() as f64 } else { weights };
            // Devices that compute in 16 bits also have a copy of the weights in 16 bits.
            let copy_bytes = if value_bytes < WEIGHT_BYTES { value_bytes } else { 0.0 };
            memory = in_flight * memory + (weights + gradients + state) * WEIGHT_BYTES + weights * copy_bytes;
            operators.push(OperatorCost {
                placement: local.placement(output).clone(),
                shares_rows: local.rows(output).is_some(),
                memory_bytes: memory,
                sent_bytes: sent + micro_batches * spent.sent,
                ms: 1e3 * micro_batches * (spent.compute + spent.exchange),
            });
            total.compute += spent.compute;
            total.exchange += spent.exchange;
        }
        if number + 1 == plan.mesh.stage {
            self.add_loss(&mut input_exchange);
        } else {
            self.add_stage_transfer(self.values(local.logits()) * value_bytes, &mut input_exchange);
        }
        total.exchange += input_exchange.exchange;
        if let Some(last) = operators.last_mut() {
            last.ms += 1e3 * micro_batches * input_exchange.exchange;
            last.sent_bytes += micro_batches * input_exchange.sent;
        }
        let gradients = self.gradients_secs(&reductions);
        // In addition, one activation and its gradient are in memory at a time.
        let memory_bytes =
            operators.iter().map(|operator| operator.memory_bytes).sum::<f64>() + 2.0 * largest;
        Stage { operators, spent: total, gradients, update: update_secs, memory_bytes }
    }

    /// Seconds that the reduction of gradients adds to the last micro-batch. By operation, `reductions` has the seconds of its backward
    /// pass, and of the reduction of its gradient. The reduction begins when the gradient is complete and the preceding reduction has
    /// ended, or, on devices that sum gradients over micro-batches, after the backward pass.
    fn gradients_secs(&self, reductions: &[[f64; 2]]) -> f64 {
        let [backward, reduction] = [0, 1].map(|part| reductions.iter().map(|secs| secs[part]).sum::<f64>());
        if self.machine.shared_memory {
            return f64::max(0.0, reduction - backward);
        }
        if self.work.accumulate > 1 || self.exchanges_between_kernels() {
            return reduction;
        }
        // The times at which the backward pass of an operation and the reduction of its gradient end.
        let (mut pass_end, mut reduction_end, mut slowdown) = (0.0, 0.0, 0.0);
        for &[backward, reduction] in reductions.iter().rev() {
            let overlap = f64::max(0.0, reduction_end - pass_end);
            let concurrent = f64::min(backward, overlap / (1.0 + REDUCTION_SLOWDOWN));
            slowdown += REDUCTION_SLOWDOWN * concurrent;
            pass_end += backward + REDUCTION_SLOWDOWN * concurrent;
            if reduction > 0.0 {
                reduction_end = f64::max(reduction_end, pass_end) + reduction;
            }
        }
        slowdown + f64::max(0.0, reduction_end - pass_end)
    }

    /// Number of parts into which ranks divide the optimizer's state of the operation with this output.
    fn state_parts(&self, output: TensorId) -> f64 {
        if self.shares_memory() {
            self.plan.mesh.ranks() as f64
        } else if self.plan.optimizer_sharding {
            self.pictures_group(self.local.axes(output)).ranks as f64
        } else {
            1.0
        }
    }

    /// Adds the exchange of an activation or its gradient with the neighbouring stage.
    fn add_stage_transfer(&self, bytes: f64, spent: &mut Spent) {
        let Machine { ranks, within, between, .. } = *self.machine;
        let is_local = self.plan.mesh.ranks() <= ranks;
        let link = if is_local { within } else { between.or(within) };
        self.add_between_kernels(Group { ranks: 2, link, is_local }, 1.0, bytes, spent);
    }

    /// Whether all ranks share one copy of the weights.
    fn shares_memory(&self) -> bool {
        self.machine.shared_memory && self.plan.is_data() && self.plan.mesh.ranks() <= self.machine.ranks
    }

    /// Number of values of an activation on this rank.
    fn values(&self, tensor: TensorId) -> f64 {
        let of_group = *self.local.placement(tensor) != Placement::Batch;
        let pictures = self.own_pictures * if of_group { self.plan.mesh.model as f64 } else { 1.0 };
        pictures * self.local.tensors[tensor].len() as f64
    }

    /// Adds the computation of an operation, and for a batch norm the exchange of its statistics.
    fn add_compute(&self, op: &Op, spent: &mut Spent) {
        let pictures = self.values(op.output()) / self.local.tensors[op.output()].len().max(1) as f64;
        let shares_pictures = self.local.is_pictures(op.inputs()[0]) && self.plan.mesh.height > 1;
        let is_unfolded = !self.machine.shared_memory && kind(op) == Some("conv7x7") && shares_pictures;
        let products = if is_unfolded { UNFOLDED } else { 1.0 };
        spent.compute += products * self.machine.rates.secs(self.local, op, pictures);
        // Sums in shared memory take negligible time.
        let is_synced = self.work.sync_batch_norm && !self.local.frozen_norm && !self.shares_memory();
        if matches!(op, Op::BatchNorm { .. }) && is_synced {
            let channels = self.local.tensors[op.output()].channels as f64;
            let group = self.pictures_group(self.local.axes(op.output()));
            // Two sums per channel, in the forward and in the backward pass.
            let bytes = 2.0 * channels * STATISTIC_BYTES;
            let sent_bytes = (group.ranks - 1) as f64 * bytes;
            if self.uses_peer_memory(group) {
                (0..2).for_each(|_| self.add_transfer(group, 1.0, sent_bytes, spent));
            } else {
                (0..2).for_each(|_| self.add_all_reduce(group, bytes, spent));
            }
        }
    }

    /// Whether each rank writes batch norm's sums to the memory of all others from within a kernel, as devices of one machine do.
    fn uses_peer_memory(&self, group: Group) -> bool {
        !self.machine.shared_memory && group.is_local && !self.exchanges_between_kernels()
    }

    /// Whether devices share rows or have stages, so that they exchange activations on the stream of the kernels. They also sum gradients
    /// and batch norm's statistics on this stream.
    fn exchanges_between_kernels(&self) -> bool {
        self.plan.mesh.height * self.plan.mesh.stage > 1
    }

    /// Adds an exchange of activations in the forward pass, and of their gradients in the backward pass.
    fn add_exchange(&self, op: &Op, spent: &mut Spent) {
        let (input, output) = (op.inputs()[0], op.output());
        let (value_bytes, mesh) = (self.machine.rates.value_bytes as f64, self.plan.mesh);
        let share = 1.0 / mesh.model as f64;
        match op {
            Op::Redistribute { .. } => {
                let (from, to) = (self.local.placement(input), self.local.placement(output));
                // Number of values of all pictures of the group with all channels.
                let all_values = match (from, to) {
                    (Placement::Partial, _) => self.values(input),
                    (_, Placement::Whole) => self.values(output),
                    _ => self.values(input) * mesh.model as f64,
                };
                // An all-reduce sends all values twice, a reduce-scatter or all-gather once, an all-to-all only a rank's share.
                let transfers = match (from, to) {
                    (Placement::Partial, Placement::Whole) => 2.0,
                    (Placement::Partial, _) | (_, Placement::Whole) => 1.0,
                    _ => share,
                };
                let sent = transfers * (1.0 - share) * all_values * value_bytes;
                let group = self.axes_group(MODEL);
                (0..2).for_each(|_| self.add_between_kernels(group, group.tree_depth(), sent, spent));
            }
            Op::Halo { lowest, .. } => {
                let (Some(own_rows), Some(reached_rows)) = (self.local.rows(input), self.local.rows(output))
                else {
                    return;
                };
                let mut ranks = own_rows.of_rank.iter().zip(&reached_rows.of_rank);
                let has_messages =
                    ranks.any(|(own, reached)| reached.start < own.start || own.end < reached.end);
                let (own, reached) = (&own_rows.of_rank[0], &reached_rows.of_rank[0]);
                let fetched_rows = (reached.end - own.end).max(0) as f64;
                let row_len = self.values(input) / (own.end - own.start).max(1) as f64;
                // The activation is copied, and in the backward pass its gradient. Pictures have no gradient.
                let passes = if self.local.is_pictures(input) { 1 } else { 2 };
                let mut copied = f64::from(passes) * (self.values(input) + self.values(output));
                let mut messages = 1.0;
                if !self.machine.shared_memory {
                    // The rows of each picture are a message of their own.
                    messages = ACKNOWLEDGED * self.own_pictures;
                    copied += if *lowest { UNFUSED_POOLING_PASSES * self.values(input) } else { 0.0 };
                }
                spent.compute += copied * value_bytes / self.machine.rates.memory_bytes_per_second;
                if has_messages {
                    let (group, bytes) = (self.axes_group(HEIGHT), fetched_rows * row_len * value_bytes);
                    (0..passes).for_each(|_| self.add_between_kernels(group, messages, bytes, spent));
                }
            }
            Op::MeanOfRows { .. } => {
                let group = self.axes_group(HEIGHT);
                self.add_all_reduce(group, self.values(output) * value_bytes, spent);
            }
            _ => {}
        }
    }

    /// Adds the exchanges of the loss if classes are split: three all-reduces of one number per picture.
    fn add_loss(&self, spent: &mut Spent) {
        if let Placement::Channels(_) = self.local.placement(self.local.logits()) {
            let group = self.axes_group(MODEL);
            let bytes = self.own_pictures * self.plan.mesh.model as f64 * STATISTIC_BYTES;
            (0..3).for_each(|_| self.add_all_reduce(group, bytes, spent));
        }
    }

    /// Seconds of the reduction of a gradient, and bytes that a rank sends for it.
    fn gradient_reduction(&self, output: TensorId, bytes: f64) -> (f64, f64) {
        if self.shares_memory() {
            return (bytes / self.machine.rates.memory_bytes_per_second, 0.0);
        }
        let mut spent = Spent::default();
        let group = self.pictures_group(self.local.axes(output));
        // Gradients are sent in buckets, whose latencies overlap.
        self.add_transfer(group, 0.0, group.ring_bytes(bytes), &mut spent);
        (spent.exchange, spent.sent)
    }

    /// The ranks over whose pictures a sum is taken: those along `data` and `axes`.
    fn pictures_group(&self, axes: Axes) -> Group {
        self.group(axes, self.plan.mesh.data)
    }

    /// The ranks along `axes`, for one coordinate on `data`.
    fn axes_group(&self, axes: Axes) -> Group {
        self.group(axes, 1)
    }

    fn group(&self, axes: Axes, data_ranks: usize) -> Group {
        let mesh = self.plan.mesh;
        let mut group = Group { ranks: 1, link: None, is_local: true };
        // Number of consecutive ranks that include the group.
        let mut spans = 1;
        for (ranks, stride) in [
            (if axes.model { mesh.model } else { 1 }, 1),
            (if axes.height { mesh.height } else { 1 }, mesh.model),
            (data_ranks, mesh.model * mesh.height),
        ] {
            if ranks > 1 {
                group.ranks *= ranks;
                spans = stride * ranks;
            }
        }
        let within = self.machine.within;
        group.is_local = spans <= self.machine.ranks;
        group.link = if group.is_local { within } else { self.machine.between.or(within) };
        group
    }

    fn add_all_reduce(&self, group: Group, bytes: f64, spent: &mut Spent) {
        self.add_between_kernels(group, 2.0 * group.tree_depth(), group.ring_bytes(bytes), spent);
    }

    /// Adds an exchange of `bytes` per rank, in successive `messages`, between two kernels of a device.
    fn add_between_kernels(&self, group: Group, messages: f64, bytes: f64, spent: &mut Spent) {
        if group.ranks > 1 && group.link.is_some() && !self.machine.shared_memory {
            spent.exchange += BETWEEN_KERNELS_SECS;
        }
        self.add_transfer(group, messages, bytes, spent);
    }

    /// Adds an exchange of `bytes` per rank, in successive `messages`.
    fn add_transfer(&self, group: Group, messages: f64, bytes: f64, spent: &mut Spent) {
        if let Some(link) = group.link.filter(|_| group.ranks > 1) {
            spent.exchange += messages * link.latency_us / 1e6 + bytes / link.bytes_per_second;
            spent.sent += bytes;
        }
    }
}

/// Ranks that exchange values, and the connection between them.
#[derive(Debug, Clone, Copy)]
struct Group {
    ranks: usize,
    /// `None` for a single rank, or if the machine has no such connection.
    link: Option<Link>,
    /// Whether all ranks are on one machine.
    is_local: bool,
}

impl Group {
    /// Number of successive messages until a short value has reached all ranks, as in a tree.
    fn tree_depth(&self) -> f64 {
        (self.ranks as f64).log2()
    }

    /// Bytes that each rank of a ring sends for an all-reduce of `bytes`.
    fn ring_bytes(&self, bytes: f64) -> f64 {
        2.0 * (self.ranks - 1) as f64 / self.ranks as f64 * bytes
    }
}

/// The kind of an operation that is limited by arithmetic. `None` if it is limited by memory bandwidth.
fn kind(op: &Op) -> Option<&'static str> {
    match op {
        Op::Conv { groups: 2.., .. } => Some("grouped"),
        Op::Conv { kernel: 1, .. } => Some("conv1x1"),
        Op::Conv { kernel: 3, .. } => Some("conv3x3"),
        Op::Conv { kernel: 7, .. } => Some("conv7x7"),
        Op::Conv { .. } => Some("conv"),
        Op::Linear { .. } => Some("linear"),
        _ => None,
    }
}

/// Number of weights and biases of an operation.
fn weights_of(network: &Network, op: &Op) -> f64 {
    let [from, to] = [op.inputs()[0], op.output()].map(|tensor| network.tensors[tensor]);
    let weights = match *op {
        Op::Conv { kernel, groups, .. } => to.channels * (from.channels / groups) * kernel * kernel,
        Op::Linear { .. } => to.channels * (from.len() + 1),
        Op::BatchNorm { .. } => 2 * to.channels,
        _ => 0,
    };
    weights as f64
}

/// Number of floating-point operations per picture and step, forward and backward.
fn operations_of(network: &Network, op: &Op) -> f64 {
    let input = op.inputs()[0];
    let products = if network.is_pictures(input) { PRODUCTS - 1.0 } else { PRODUCTS };
    2.0 * products * network.tensors[op.output()].pixels() as f64 * weights_of(network, op)
}

/// Bytes of the update of a weight: it reads the gradient, and reads and writes the weight and its values in the optimizer.
fn update_bytes(state_per_weight: f64) -> f64 {
    WEIGHT_BYTES * (1.0 + 2.0 * (1.0 + state_per_weight))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_a_linear_layer_depends_on_its_size_and_its_pictures() {
        let rate = |operations, flops_per_second| LinearRate {
            pictures: 64.0,
            operations,
            flops_per_second,
            update_bytes_per_second: 1e12,
        };
        let mut rates = Rates {
            value_bytes: 2,
            flops_per_second: [("conv1x1".to_owned(), 3e14), ("linear".to_owned(), 1e13)].into(),
            linear: vec![rate(1e9, 1e13), rate(1e11, 1e14), rate(1e12, 4e14)],
            memory_bytes_per_second: 1e12,
        };
        for (operations, flops) in
            [(1.0, 1e13), (1e9, 1e13), (1e10, 1e13 * 10f64.sqrt()), (1e11, 1e14), (1e12, 4e14), (1e15, 4e14)]
        {
            let found = rates.flops_of("linear", operations, 64.0);
            assert!((found / flops - 1.0).abs() < 1e-9, "{operations}: {found} instead of {flops}");
        }
        // The same weights and other numbers of pictures.
        for (pictures, flops) in [(32.0, 1e14), (128.0, 2e14), (1024.0, 3e14)] {
            let found = rates.flops_of("linear", 1e11 * pictures / 64.0, pictures);
            assert!((found / flops - 1.0).abs() < 1e-9, "{pictures} pictures: {found} instead of {flops}");
        }
        assert_eq!(rates.flops_of("conv1x1", 1e11, 64.0), 3e14);
        rates.linear.clear();
        assert_eq!(rates.flops_of("linear", 1e12, 64.0), 1e13);
    }
}
