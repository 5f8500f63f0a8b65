//! What a plan costs: time and memory of each operation on one rank, from the figures of a [`Machine`]. It is a model with few terms
//! (ParaDL, arXiv 2104.09075): each operation takes its arithmetic or its passes over memory, whichever is longer; an exchange takes the
//! turns of a tree and the bytes of a ring; gradients are summed beside the backward pass; stages wait for the slowest one. Preparing
//! pictures, evaluation and checkpoints are not in it.

use super::{Mesh, Plan, lower};
use crate::{
    LayerTime,
    net::{Axes, Network, Op, Placement, TensorId},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes of a weight, a gradient, and a value of the optimizer's state.
const WEIGHT_BYTES: f64 = 4.0;
/// Bytes of a sum of batch norm's statistics.
const STATISTIC_BYTES: f64 = 8.0;
/// Products of a convolution or linear layer in a step: the output, the input's gradient, the weight's gradient.
const PRODUCTS: f64 = 3.0;
/// The part of a step's arithmetic that is the backward pass, beside which gradients are summed.
const BACKWARD: f64 = 2.0 / 3.0;

/// What ranks compute on and how they are connected: measured by `lockstep plan`, stored, and read from a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// A rank's: `CPU, 2 threads`, `NVIDIA H200, fp16`.
    pub device: String,
    /// The backend's name: `cpu`, `cuda`.
    pub backend: String,
    /// Ranks that one machine has.
    pub ranks: usize,
    /// Memory of a rank.
    pub memory_bytes: u64,
    /// Ranks of one machine have the weights once, and add gradients up in place.
    pub shared_memory: bool,
    pub rates: Rates,
    /// Between ranks of one machine; absent where one rank was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Link>,
    /// Between machines; absent: as within one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between: Option<Link>,
}

/// How fast a rank computes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Bytes of a value of an activation.
    pub value_bytes: u64,
    /// Floating-point operations a second by kind of operation: `conv1x1`, `conv3x3`, `conv7x7`, `grouped`, `linear`.
    pub flops_per_second: BTreeMap<String, f64>,
    /// Of linear layers by their size, the smallest first; `linear` for any size if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub linear: Vec<LinearRate>,
    /// In passes over activations and weights.
    pub memory_bytes_per_second: f64,
}

/// How fast a rank computes linear layers of a size: matrices that are too small leave a device idle.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearRate {
    /// Floating-point operations in a step.
    pub operations: f64,
    pub flops_per_second: f64,
}

/// A connection between ranks: the time of a short message, and what a rank sends in a second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    pub latency_us: f64,
    pub bytes_per_second: f64,
}

impl Link {
    /// From all-reduces of `ranks` ranks: the microseconds of a short one, and the bytes a second of a long one.
    pub fn of_all_reduce(ranks: usize, short_us: f64, bytes_per_second: f64) -> Self {
        let group = Group { ranks: ranks.max(2), link: None };
        Self {
            latency_us: short_us / (2.0 * group.turns()),
            bytes_per_second: group.turned(bytes_per_second),
        }
    }
}

impl Machine {
    /// # Errors
    /// A figure that is no positive number.
    pub fn check(&self) -> Result<(), String> {
        let Rates { flops_per_second, memory_bytes_per_second, .. } = &self.rates;
        let links = self.within.iter().chain(&self.between);
        let mut figures: Vec<(&str, f64)> = vec![
            ("ranks", self.ranks as f64),
            ("memory_bytes", self.memory_bytes as f64),
            ("value_bytes", self.rates.value_bytes as f64),
            ("memory_bytes_per_second", *memory_bytes_per_second),
            // The largest, so that there is one.
            ("flops_per_second", flops_per_second.values().copied().fold(0.0, f64::max)),
        ];
        figures.extend(flops_per_second.iter().map(|(kind, rate)| (kind.as_str(), *rate)));
        figures.extend(
            self.rates
                .linear
                .iter()
                .flat_map(|of| [("operations", of.operations), ("flops_per_second", of.flops_per_second)]),
        );
        figures.extend(
            links.flat_map(|l| [("latency_us", l.latency_us), ("bytes_per_second", l.bytes_per_second)]),
        );
        let wrong = figures.into_iter().find(|(_, figure)| !figure.is_finite() || *figure <= 0.0);
        wrong.map_or(Ok(()), |(name, figure)| Err(format!("{name} is {figure} and must be a number above 0")))
    }
}

impl Rates {
    /// From the `times` of `network`'s operations in a step of `pictures` pictures, scaled so that all together take `step_secs`, and the
    /// update of `state` values that the optimizer keeps of each weight is among them.
    ///
    /// # Errors
    /// There are no times of one of convolutions, linear layers, or what lies between.
    pub fn fit(
        network: &Network,
        pictures: f64,
        times: &[LayerTime],
        (step_secs, state): (f64, f64),
        value_bytes: u64,
    ) -> Result<Self, String> {
        let find = |time: &LayerTime| {
            let is_it = |op: &&Op| match (&time.name, op) {
                (Some(of), Op::Conv { name, .. } | Op::BatchNorm { name, .. } | Op::Linear { name, .. }) => {
                    of == name
                }
                (None, op) => op.output() == time.output,
                _ => false,
            };
            network.ops.iter().find(is_it)
        };
        // (operations, seconds) by kind; what is fused into a convolution has no time of its own.
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
        let bytes: f64 = network.ops.iter().map(|op| pictures * passes_of(network, op)).sum();
        let bytes_per_second = bytes * value_bytes as f64 / memory_secs;
        let parameters: f64 = network.ops.iter().map(|op| weights_of(network, op)).sum();
        let update_secs = parameters * update_bytes(state) / bytes_per_second;
        let secs = sums.values().map(|[_, secs]| secs).sum::<f64>() + memory_secs + update_secs;
        let scale = secs / step_secs;
        let rate = |[operations, secs]: &[f64; 2]| LinearRate {
            operations: *operations,
            flops_per_second: scale * operations / secs,
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

    /// Adds the rate of the head of `network`, which is wider than that of [`Rates::fit`]: a step of `pictures` pictures took `step_secs`,
    /// in which everything but the head took what these rates predict.
    pub fn add_head(&mut self, network: &Network, pictures: f64, (step_secs, state): (f64, f64)) {
        let (mut head_secs, mut operations) = (step_secs, 0.0);
        for op in &network.ops {
            match kind(op) {
                Some("linear") => operations += pictures * operations_of(network, op),
                _ => head_secs -= self.secs(network, op, pictures),
            }
            head_secs -= weights_of(network, op) * update_bytes(state) / self.memory_bytes_per_second;
        }
        // A step that is faster than its update as predicted says nothing about the head.
        if head_secs > 0.0 {
            self.linear.push(LinearRate { operations, flops_per_second: operations / head_secs });
            self.linear.sort_by(|a, b| a.operations.total_cmp(&b.operations));
        }
    }

    /// Seconds of an operation in a step of `pictures` pictures: its arithmetic or its passes over memory, whichever is longer.
    fn secs(&self, network: &Network, op: &Op, pictures: f64) -> f64 {
        let value = self.value_bytes as f64;
        match kind(op) {
            Some(kind) => {
                let operations = pictures * operations_of(network, op);
                let passes = PRODUCTS * weights_of(network, op) * value / self.memory_bytes_per_second;
                (operations / self.flops_of(kind, operations)).max(passes)
            }
            None => pictures * passes_of(network, op) * value / self.memory_bytes_per_second,
        }
    }

    /// The rate of a linear layer of `operations`: between two measured sizes, the logarithms of rate and size grow together.
    fn linear_of(&self, operations: f64) -> Option<f64> {
        let larger = self.linear.partition_point(|of| of.operations <= operations);
        let smaller = larger.checked_sub(1).map(|place| self.linear[place]);
        match (smaller, self.linear.get(larger)) {
            (Some(a), Some(b)) => {
                let share = (operations / a.operations).ln() / (b.operations / a.operations).ln();
                Some(a.flops_per_second * (b.flops_per_second / a.flops_per_second).powf(share))
            }
            (Some(only), None) | (None, Some(&only)) => Some(only.flops_per_second),
            (None, None) => None,
        }
    }

    /// The rate of `operations` of a kind; of a kind that was not measured, the mean of those that were.
    fn flops_of(&self, kind: &str, operations: f64) -> f64 {
        let all = &self.flops_per_second;
        if kind == "linear"
            && let Some(rate) = self.linear_of(operations)
        {
            return rate;
        }
        all.get(kind).copied().unwrap_or_else(|| all.values().sum::<f64>() / all.len().max(1) as f64)
    }
}

/// What is computed in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Of all ranks together.
    pub pictures: u64,
    /// Micro-batches.
    pub accumulate: u64,
    /// Values that are kept of each weight besides itself and its gradient: the optimizer's, and a moving average.
    pub state: u64,
    pub sync_batch_norm: bool,
}

impl Workload {
    /// The pictures of a rank in a micro-batch; `None`: ranks that see different pictures cannot have equally many.
    fn pictures_of_rank(&self, mesh: Mesh) -> Option<u64> {
        let parts = self.accumulate.max(1) * (mesh.data * mesh.model) as u64;
        (self.pictures >= parts && self.pictures.is_multiple_of(parts)).then(|| self.pictures / parts)
    }
}

/// What an operation costs the rank with the largest part of it: rank 0.
#[derive(Debug, Clone, PartialEq)]
pub struct OperatorCost {
    /// Where its output is.
    pub placement: Placement,
    /// Whether ranks share the rows of its output.
    pub shares_rows: bool,
    pub memory_bytes: f64,
    /// Bytes that a rank sends in a step: activations, their gradients and those of weights.
    pub sent_bytes: f64,
    /// Milliseconds of a step: arithmetic, and the exchange of what it needs.
    pub ms: f64,
}

/// What a plan costs a rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Cost {
    /// Of each operation of the whole network.
    pub operators: Vec<OperatorCost>,
    /// Milliseconds of a step: all of it, and its parts.
    pub step_ms: f64,
    pub compute_ms: f64,
    /// Of activations, statistics and losses.
    pub exchange_ms: f64,
    /// In which a stage has no micro-batch to compute.
    pub bubble_ms: f64,
    /// Sums of gradients, as far as the backward pass does not hide them.
    pub gradients_ms: f64,
    pub update_ms: f64,
    pub images_per_second: f64,
    pub memory_bytes: f64,
}

/// What `plan` costs.
///
/// # Errors
/// As [`lower`](super::lower()), or the pictures cannot be divided so; a sentence.
pub fn cost(network: &Network, plan: &Plan, machine: &Machine, work: &Workload) -> Result<Cost, String> {
    let mesh = plan.mesh;
    let Some(own) = work.pictures_of_rank(mesh) else {
        return Err(format!(
            "the {} pictures of a step cannot be divided over {} ranks and {} micro-batches",
            work.pictures,
            mesh.data * mesh.model,
            work.accumulate
        ));
    };
    let stage = |stage: usize| -> Result<Stage, String> {
        let local = lower(network, plan, stage * mesh.ranks_of_stage())?;
        Ok(Walk { local: &local, plan, machine, work, own: own as f64 }.stage(stage))
    };
    let stages = (0..mesh.stage).map(stage).collect::<Result<Vec<_>, _>>()?;
    let most = |of: fn(&Stage) -> f64| stages.iter().map(of).fold(0.0, f64::max);
    let [compute, exchange] = stages
        .iter()
        .map(|stage| [stage.spent.compute, stage.spent.exchange])
        .max_by(|a, b| (a[0] + a[1]).total_cmp(&(b[0] + b[1])))
        .unwrap_or_default();
    // A micro-batch is in one stage at a time.
    let (times, empty) = (work.accumulate.max(1) as f64, (mesh.stage - 1) as f64);
    let bubble = empty * (compute + exchange);
    let (gradients, update) = (most(|stage| stage.gradients), most(|stage| stage.update));
    let step = times * (compute + exchange) + bubble + gradients + update;
    let memory_bytes = most(|stage| stage.memory_bytes);
    Ok(Cost {
        operators: stages.into_iter().flat_map(|stage| stage.operators).collect(),
        step_ms: 1e3 * step,
        compute_ms: 1e3 * times * compute,
        exchange_ms: 1e3 * times * exchange,
        bubble_ms: 1e3 * bubble,
        gradients_ms: 1e3 * gradients,
        update_ms: 1e3 * update,
        images_per_second: work.pictures as f64 / step,
        memory_bytes,
    })
}

/// What a stage costs its first rank: seconds of a micro-batch, and of what comes once a step.
struct Stage {
    operators: Vec<OperatorCost>,
    spent: Spent,
    gradients: f64,
    update: f64,
    memory_bytes: f64,
}

struct Walk<'a> {
    /// The rank's part of the network.
    local: &'a Network,
    plan: &'a Plan,
    machine: &'a Machine,
    work: &'a Workload,
    /// A rank's own pictures in a micro-batch.
    own: f64,
}

/// Seconds in which a rank computes and exchanges, and bytes that it sends.
#[derive(Debug, Clone, Copy, Default)]
struct Spent {
    compute: f64,
    exchange: f64,
    sent: f64,
}

impl Walk<'_> {
    /// Stage number `number`, or the only one.
    fn stage(&self, number: usize) -> Stage {
        let Self { local, machine, work, plan, .. } = self;
        let value = machine.rates.value_bytes as f64;
        let picture = self.own * local.tensors[local.input()].len() as f64 * value;
        let (mut operators, mut all, mut largest) = (Vec::new(), Spent::default(), picture);
        // What is exchanged for the next operation, and kept of it.
        let (mut before, mut kept_before) = (Spent::default(), picture);
        let (mut gradient_secs, mut update_secs) = (0.0, 0.0);
        // Micro-batches between their forward and their backward pass.
        let in_flight = work.accumulate.max(1).min((plan.mesh.stage - number) as u64) as f64;
        if number > 0 {
            // The gradient of the stage's input is sent to the stage before.
            self.to_stage(self.values(local.input()) * value, &mut before);
        }
        for op in &local.ops {
            let output = op.output();
            let bytes = self.values(output) * value;
            largest = f64::max(largest, bytes);
            if let Op::Redistribute { .. } | Op::Halo { .. } | Op::MeanOfRows { .. } = op {
                self.exchange(op, &mut before);
                kept_before += bytes;
                continue;
            }
            let (mut spent, weights) = (std::mem::take(&mut before), weights_of(local, op));
            self.compute(op, &mut spent);
            let trains = weights > 0.0 && !(local.frozen_norm && matches!(op, Op::BatchNorm { .. }));
            let (mut sent, mut memory) = (0.0, std::mem::take(&mut kept_before));
            if trains {
                let (secs, sent_gradient) = self.gradient(output, weights * WEIGHT_BYTES);
                sent += sent_gradient;
                // Divided state: gradients are scattered beside the backward pass, and weights gathered after the update.
                let gathered =
                    if plan.optimizer_sharding && !self.shares_memory() { 0.5 * secs } else { 0.0 };
                gradient_secs += secs - gathered;
                update_secs += gathered;
                // Ranks update a part each that have the weights once, or divide the optimizer's state.
                let parts = self.dividing(output);
                update_secs +=
                    weights / parts * update_bytes(work.state as f64) / machine.rates.memory_bytes_per_second;
            }
            memory += match op {
                Op::Conv { .. } | Op::Relu { .. } | Op::Gelu { .. } | Op::MaxPool { .. } => bytes,
                // Logits and their gradient, in float32.
                Op::Linear { .. } => 2.0 * self.values(output) * WEIGHT_BYTES,
                _ => 0.0,
            };
            let state = weights * work.state as f64 / self.dividing(output);
            let gradients = if self.shares_memory() { weights / plan.mesh.ranks() as f64 } else { weights };
            let half = if value < WEIGHT_BYTES { value } else { 0.0 };
            memory = in_flight * memory + (weights + gradients + state) * WEIGHT_BYTES + weights * half;
            let times = work.accumulate.max(1) as f64;
            operators.push(OperatorCost {
                placement: local.placement(output).clone(),
                shares_rows: local.rows(output).is_some(),
                memory_bytes: memory,
                sent_bytes: sent + times * spent.sent,
                ms: 1e3 * times * (spent.compute + spent.exchange),
            });
            all.compute += spent.compute;
            all.exchange += spent.exchange;
        }
        if number + 1 == plan.mesh.stage {
            self.loss(&mut before);
        } else {
            self.to_stage(self.values(local.logits()) * value, &mut before);
        }
        all.exchange += before.exchange;
        let times = work.accumulate.max(1) as f64;
        if let Some(last) = operators.last_mut() {
            last.ms += 1e3 * times * before.exchange;
            last.sent_bytes += times * before.sent;
        }
        // They are summed in the last micro-batch.
        let gradients = f64::max(0.0, gradient_secs - BACKWARD * all.compute);
        // Besides what is kept there are an activation and its gradient at a time.
        let memory_bytes = operators.iter().map(|of| of.memory_bytes).sum::<f64>() + 2.0 * largest;
        Stage { operators, spent: all, gradients, update: update_secs, memory_bytes }
    }

    /// Ranks of which each has a part of the optimizer's state of the operation that makes `output`.
    fn dividing(&self, output: TensorId) -> f64 {
        match (self.shares_memory(), self.plan.optimizer_sharding) {
            (true, _) => self.plan.mesh.ranks() as f64,
            (false, true) => self.group(true, self.local.axes(output)).ranks as f64,
            (false, false) => 1.0,
        }
    }

    /// An activation or its gradient for the neighbouring stage.
    fn to_stage(&self, bytes: f64, spent: &mut Spent) {
        let Machine { ranks, within, between, .. } = *self.machine;
        let link = if self.plan.mesh.ranks() > ranks { between.or(within) } else { within };
        self.send(Group { ranks: 2, link }, 1.0, bytes, spent);
    }

    /// Whether all ranks have the weights once.
    fn shares_memory(&self) -> bool {
        self.machine.shared_memory && self.plan.is_data() && self.plan.mesh.ranks() <= self.machine.ranks
    }

    /// Values of an activation on this rank.
    fn values(&self, tensor: TensorId) -> f64 {
        let of_group = *self.local.placement(tensor) != Placement::Batch;
        let pictures = self.own * if of_group { self.plan.mesh.model as f64 } else { 1.0 };
        pictures * self.local.tensors[tensor].len() as f64
    }

    fn compute(&self, op: &Op, spent: &mut Spent) {
        let pictures = self.values(op.output()) / self.local.tensors[op.output()].len().max(1) as f64;
        spent.compute += self.machine.rates.secs(self.local, op, pictures);
        // Sums in memory that ranks share take no time to speak of.
        let is_synced = self.work.sync_batch_norm && !self.local.frozen_norm && !self.shares_memory();
        if matches!(op, Op::BatchNorm { .. }) && is_synced {
            let channels = self.local.tensors[op.output()].channels as f64;
            let group = self.group(true, self.local.axes(op.output()));
            // Forward and backward: two sums a channel.
            (0..2).for_each(|_| self.all_reduce(group, 2.0 * channels * STATISTIC_BYTES, spent));
        }
    }

    /// An exchange of activations in the forward pass, and of their gradients in the backward pass.
    fn exchange(&self, op: &Op, spent: &mut Spent) {
        let (input, output) = (op.inputs()[0], op.output());
        let (value, mesh) = (self.machine.rates.value_bytes as f64, self.plan.mesh);
        let share = 1.0 / mesh.model as f64;
        match op {
            Op::Redistribute { .. } => {
                let (from, to) = (self.local.placement(input), self.local.placement(output));
                // Of all pictures of the group with all channels.
                let whole = match (from, to) {
                    (Placement::Partial, _) => self.values(input),
                    (_, Placement::Whole) => self.values(output),
                    _ => self.values(input) * mesh.model as f64,
                };
                let times = match (from, to) {
                    (Placement::Partial, Placement::Whole) => 2.0,
                    (Placement::Partial, _) | (_, Placement::Whole) => 1.0,
                    _ => share,
                };
                let sent = times * (1.0 - share) * whole * value;
                let group = self.group(false, Axes { model: true, height: false });
                self.send(group, 2.0 * group.turns(), 2.0 * sent, spent);
            }
            Op::Halo { .. } => {
                let rows = |tensor: TensorId| self.local.rows(tensor).map(|rows| rows.of_rank[0].clone());
                let (Some(own), Some(reached)) = (rows(input), rows(output)) else { return };
                let others = (reached.end - own.end).max(0) as f64;
                let row = self.values(input) / (own.end - own.start).max(1) as f64;
                let group = self.group(false, Axes { model: false, height: true });
                self.send(group, 2.0, 2.0 * others * row * value, spent);
            }
            Op::MeanOfRows { .. } => {
                let group = self.group(false, Axes { model: false, height: true });
                self.all_reduce(group, self.values(output) * value, spent);
            }
            _ => {}
        }
    }

    /// Split classes: three numbers a picture are reduced one after another.
    fn loss(&self, spent: &mut Spent) {
        if let Placement::Channels(_) = self.local.placement(self.local.logits()) {
            let group = self.group(false, Axes { model: true, height: false });
            let bytes = self.own * self.plan.mesh.model as f64 * STATISTIC_BYTES;
            (0..3).for_each(|_| self.all_reduce(group, bytes, spent));
        }
    }

    /// Seconds in which a gradient is summed, and bytes that a rank sends for it.
    fn gradient(&self, output: TensorId, bytes: f64) -> (f64, f64) {
        if self.shares_memory() {
            return (bytes / self.machine.rates.memory_bytes_per_second, 0.0);
        }
        let mut spent = Spent::default();
        let group = self.group(true, self.local.axes(output));
        // Gradients go in buckets, whose turns overlap.
        self.send(group, 0.0, group.turned(bytes), &mut spent);
        (spent.exchange, spent.sent)
    }

    fn group(&self, data: bool, axes: Axes) -> Group {
        let mesh = self.plan.mesh;
        let mut group = Group { ranks: 1, link: None };
        let mut spans = 1;
        for (takes_part, ranks, stride) in [
            (axes.model, mesh.model, 1),
            (axes.height, mesh.height, mesh.model),
            (data, mesh.data, mesh.model * mesh.height),
        ] {
            if takes_part && ranks > 1 {
                group.ranks *= ranks;
                spans = stride * ranks;
            }
        }
        let within = self.machine.within;
        group.link = if spans > self.machine.ranks { self.machine.between.or(within) } else { within };
        group
    }

    fn all_reduce(&self, group: Group, bytes: f64, spent: &mut Spent) {
        self.send(group, 2.0 * group.turns(), group.turned(bytes), spent);
    }

    fn send(&self, group: Group, turns: f64, bytes: f64, spent: &mut Spent) {
        if let Some(link) = group.link.filter(|_| group.ranks > 1) {
            spent.exchange += turns * link.latency_us / 1e6 + bytes / link.bytes_per_second;
            spent.sent += bytes;
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Group {
    ranks: usize,
    link: Option<Link>,
}

impl Group {
    /// Messages one after another until a short value is with all ranks, as in a tree.
    fn turns(&self) -> f64 {
        (self.ranks as f64).log2()
    }

    /// Bytes that each rank of a ring sends for an all-reduce of `bytes`.
    fn turned(&self, bytes: f64) -> f64 {
        2.0 * (self.ranks - 1) as f64 / self.ranks as f64 * bytes
    }
}

/// The kind of an operation that is arithmetic; `None`: its time is that of its passes over memory.
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

/// Weights and biases of an operation.
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

/// Floating-point operations of a picture in a step, forward and backward.
fn operations_of(network: &Network, op: &Op) -> f64 {
    let input = op.inputs()[0];
    let products = if network.is_pictures(input) { PRODUCTS - 1.0 } else { PRODUCTS };
    2.0 * products * network.tensors[op.output()].pixels() as f64 * weights_of(network, op)
}

/// Values of a picture that passes over memory read and write in a step, forward and backward. ReLUs go with what comes before them.
fn passes_of(network: &Network, op: &Op) -> f64 {
    let [from, to] = [op.inputs()[0], op.output()].map(|tensor| network.tensors[tensor].len() as f64);
    match op {
        // Statistics, output; two sums, input's gradient.
        Op::BatchNorm { .. } => 8.0 * to,
        Op::Add { .. } => 2.0 * to,
        Op::MaxPool { .. } | Op::GlobalAveragePool { .. } => 2.0 * (from + to),
        _ => 0.0,
    }
}

/// Bytes of memory that the update of a weight reads and writes: its gradient, itself, and what is kept of it.
fn update_bytes(state: f64) -> f64 {
    WEIGHT_BYTES * (1.0 + 2.0 * (1.0 + state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_layer_has_the_rate_of_its_size() {
        let rate = |operations, flops_per_second| LinearRate { operations, flops_per_second };
        let mut rates = Rates {
            value_bytes: 2,
            flops_per_second: [("conv1x1".to_owned(), 3e14), ("linear".to_owned(), 1e13)].into(),
            linear: vec![rate(1e9, 1e13), rate(1e11, 1e14), rate(1e12, 4e14)],
            memory_bytes_per_second: 1e12,
        };
        for (operations, flops) in
            [(1.0, 1e13), (1e9, 1e13), (1e10, 1e13 * 10f64.sqrt()), (1e11, 1e14), (1e12, 4e14), (1e15, 4e14)]
        {
            let found = rates.flops_of("linear", operations);
            assert!((found / flops - 1.0).abs() < 1e-9, "{operations}: {found} instead of {flops}");
        }
        assert_eq!(rates.flops_of("conv1x1", 1e11), 3e14);
        rates.linear.clear();
        assert_eq!(rates.flops_of("linear", 1e12), 1e13);
    }
}
