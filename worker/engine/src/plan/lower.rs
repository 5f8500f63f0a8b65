//! Lowers a whole network to one rank's part.
//!
//! Operators without a strategy compute each rank's own pictures, as in data parallelism, without communication in the model group. An
//! operator with a strategy gets its input in the placement that the strategy requires. Batch norms, ReLUs, additions and poolings keep
//! the placement of their input. Where an operator needs an activation in another placement, one [`Op::Redistribute`] precedes all
//! operators that need this placement.
//!
//! The ranks of a height group have a range of the rows of each activation up to the global pooling. [`Op::Halo`] fetches the rows of
//! other ranks that windows reach, for any kernel, stride, padding and division of the rows.
//!
//! The result is cut into stages at points where later operations need only one earlier activation. A rank has only the operations
//! and parameters of its stage. Neighbouring stages have this activation in the same placement.

use super::{Plan, cuts, stages::stage_of};
use crate::{
    EngineError,
    net::{Network, NetworkPart, Op, Placement, Rows, TensorId, bounds},
};
use lockstep_protocol::spec::{ShardSpec, Split};
use std::sync::Arc;

/// The part of `network` that `rank` computes under `plan`.
///
/// # Errors
/// A strategy matches no operator, or an operator that it cannot split. The error names all such strategies and operators, and the
/// possible splits.
pub fn lower(network: &Network, plan: &Plan, rank: usize) -> Result<Network, String> {
    check(network, plan).map_err(|problems| format!("parallel: {problems}"))?;
    let (mut picture, height) = (network.tensors[network.input()], plan.mesh.height);
    let rows = (height > 1).then(|| Rows::shared(picture.height, height));
    let part = NetworkPart {
        rank: plan.mesh.model_rank(rank),
        placements: vec![Placement::Batch],
        height_rank: plan.mesh.height_rank(rank),
        rows: vec![rows],
        stage: 0,
        stages: 1,
    };
    picture.height = part.height(network.input()).unwrap_or(picture.height);
    let local = Network { tensors: vec![picture], ops: Vec::new(), part: None, ..network.clone() };
    let mut lowering = Lowering {
        whole: network,
        plan,
        local,
        part,
        local_ids: vec![network.input(); network.tensors.len()],
        whole_ids: vec![network.input()],
    };
    // By operation of the whole network: the number of local operations so far.
    let mut ends = Vec::new();
    for op in &network.ops {
        lowering.push(op);
        ends.push(lowering.local.ops.len());
    }
    // The loss needs each rank's own pictures, or all pictures and a range of the classes.
    lowering.without_partial(lowering.local_ids[network.logits()]);
    let Lowering { local, part, .. } = lowering;
    let (stage, stages) = (plan.mesh.stage_rank(rank), plan.mesh.stage);
    if stages == 1 {
        return Ok(Network { part: Some(Arc::new(part)), ..local });
    }
    let mut bounds = if plan.cuts.is_empty() { cuts(network, stages)? } else { plan.cuts.clone() };
    bounds.iter_mut().for_each(|cut| *cut = ends[*cut - 1]);
    let bounds = [&[0][..], &bounds, &[local.ops.len()]].concat();
    Ok(stage_of(&local, &part, bounds[stage]..bounds[stage + 1], (stage, stages)))
}

/// The part of `network` that `rank` computes: the whole network under data parallelism, else the result of [`lower()`].
///
/// # Errors
/// As for [`lower()`].
pub fn part_of(network: &Arc<Network>, plan: &Plan, rank: u32) -> Result<Arc<Network>, EngineError> {
    if plan.is_data() {
        return Ok(network.clone());
    }
    lower(network, plan, rank as usize).map(Arc::new).map_err(EngineError::Parameters)
}

/// Maximum number of operators that an error names.
const MAX_NAMES: usize = 10;

/// Checks that [`lower()`] can apply `plan` to `network`.
pub(super) fn check(network: &Network, plan: &Plan) -> Result<(), String> {
    let problems = problems(network, plan);
    if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
}

/// The operators that a strategy may name.
pub(super) fn operators(network: &Network) -> impl Iterator<Item = (&str, &Op)> {
    network.ops.iter().filter_map(|op| match op {
        Op::Conv { name, .. } | Op::Linear { name, .. } => Some((name.as_str(), op)),
        _ => None,
    })
}

/// All problems of the strategies of `plan` for `network`.
fn problems(network: &Network, plan: &Plan) -> Vec<String> {
    let mut problems = Vec::new();
    let is_unknown = |shard: &&ShardSpec| !operators(network).any(|(name, _)| shard.matches(name));
    let unknown: Vec<_> =
        plan.shards.iter().filter(is_unknown).map(|shard| format!("{:?}", shard.pattern)).collect();
    if !unknown.is_empty() {
        let names: Vec<_> = operators(network).map(|(name, _)| name).take(MAX_NAMES).collect();
        let omitted = match operators(network).count().saturating_sub(MAX_NAMES) {
            0 => String::new(),
            count => format!(" and {count} more (lockstep plan lists them)"),
        };
        problems.push(format!(
            "{} has no operator named {}; its operators are {}{omitted}",
            network.arch,
            unknown.join(" or "),
            names.join(", ")
        ));
    }
    problems.extend(cuts(network, plan.mesh.stage).err());
    let (height, rows) = (plan.mesh.height, network.tensors[network.input()].height);
    if height > rows {
        problems.push(format!("{height} ranks cannot share the {rows} rows of a picture (parallel.height)"));
    }
    for (name, op) in operators(network) {
        let pixels = network.tensors[op.inputs()[0]].pixels();
        if height > 1 && pixels > 1 && matches!(op, Op::Linear { .. }) {
            problems.push(format!(
                "{name} reads {pixels} pixels, whose rows ranks cannot share (parallel.height)"
            ));
        }
        let Some(split) = plan.split_of(network, name) else { continue };
        let channels = |tensor: TensorId| network.tensors[tensor].channels;
        let (groups, inputs) = match *op {
            Op::Conv { groups, input, .. } => (groups, channels(input)),
            // With several pixels, a range of inputs is not a range of channels.
            _ if network.tensors[op.inputs()[0]].pixels() > 1 => (1, 0),
            _ => (1, channels(op.inputs()[0])),
        };
        let counts = [
            (Split::Out, if groups == 1 { channels(op.output()) } else { 0 }),
            (Split::In, if groups == 1 { inputs } else { 0 }),
            (Split::Groups, if groups == 1 { 0 } else { groups }),
        ];
        let suffices = |count: usize| count >= plan.mesh.model;
        let count = counts.iter().find(|(other, _)| *other == split).map_or(0, |(_, count)| *count);
        if suffices(count) {
            continue;
        }
        let what = match *op {
            Op::Linear { .. } => format!("a linear layer of {} -> {} values", inputs, channels(op.output())),
            _ if groups > 1 => format!("a convolution of {groups} groups"),
            _ => format!("a convolution of {} -> {} channels", inputs, channels(op.output())),
        };
        let splits: Vec<_> = counts
            .iter()
            .filter(|(_, count)| suffices(*count))
            .map(|(possible, _)| format!("{:?}", possible.as_str()))
            .collect();
        let splits = if splits.is_empty() { "nothing".into() } else { splits.join(" or ") };
        let limit =
            if count > 0 { format!(" (parallel.model may be at most {count})") } else { String::new() };
        problems.push(format!(
            "{name} cannot be split by {:?} over {} ranks{limit}: it is {what}, which can be split by {splits}",
            split.as_str(),
            plan.mesh.model
        ));
    }
    problems
}

/// The local network so far, which is the result of lowering the first operations of the whole network.
struct Lowering<'a> {
    whole: &'a Network,
    plan: &'a Plan,
    local: Network,
    part: NetworkPart,
    /// By tensor of the whole network: the tensor's ID in the local network.
    local_ids: Vec<TensorId>,
    /// By tensor of the local network: the tensor's ID in the whole network.
    whole_ids: Vec<TensorId>,
}

impl Lowering<'_> {
    fn push(&mut self, op: &Op) {
        let (inputs, placement) = match *op {
            Op::Conv { ref name, groups, .. } => self.place_operator(name, groups, op),
            Op::Linear { ref name, .. } => self.place_operator(name, 1, op),
            Op::Add { branch, shortcut, .. } => {
                let branch = self.without_partial(self.local_ids[branch]);
                let placement = self.part.placements[branch].clone();
                (vec![branch, self.redistribute(self.local_ids[shortcut], &placement)], placement)
            }
            _ => {
                let input = self.without_partial(self.local_ids[op.inputs()[0]]);
                (vec![input], self.part.placements[input].clone())
            }
        };
        let (inputs, rows) = self.extend_rows(op, inputs);
        let mut output = self.add_tensor(op.output(), placement.clone(), rows);
        let mut local = op.on(&inputs, output);
        if let Op::Conv { input, groups, .. } = &mut local {
            let group_channels = self.whole.tensors[op.inputs()[0]].channels / *groups;
            if *groups > 1 {
                *groups = self.local.tensors[*input].channels / group_channels;
            }
        }
        self.local.ops.push(local);
        if matches!(op, Op::GlobalAveragePool { .. }) && self.part.rows[inputs[0]].is_some() {
            let input = std::mem::replace(&mut output, self.add_tensor(op.output(), placement, None));
            self.local.ops.push(Op::MeanOfRows { input, output });
        }
        self.local_ids[op.output()] = output;
    }

    /// The operation's inputs, extended by all rows that its windows reach, and the rows of its output.
    fn extend_rows(&mut self, op: &Op, inputs: Vec<TensorId>) -> (Vec<TensorId>, Option<Rows>) {
        let Some(rows) = self.part.rows[inputs[0]].clone() else { return (inputs, None) };
        let (kernel, stride, padding, lowest) = match *op {
            Op::Conv { kernel, stride, padding, .. } => (kernel, stride, padding, false),
            Op::MaxPool { kernel, stride, padding, .. } => (kernel, stride, padding, true),
            Op::GlobalAveragePool { .. } => return (inputs, None),
            _ => return (inputs, Some(rows)),
        };
        let output_rows = Rows::shared(self.whole.tensors[op.output()].height, self.plan.mesh.height);
        let reached = rows.reached(&output_rows, kernel, stride, padding);
        if reached == rows {
            return (inputs, Some(output_rows));
        }
        let input = inputs[0];
        let existing = self.find_output(|op, output| {
            let is_same = matches!(op, Op::Halo { input: of, lowest: l, .. } if (*of, *l) == (input, lowest));
            is_same && self.part.rows[output].as_ref() == Some(&reached)
        });
        let extended = existing.unwrap_or_else(|| {
            let placement = self.part.placements[input].clone();
            let output = self.add_tensor(self.whole_ids[input], placement, Some(reached));
            self.local.ops.push(Op::Halo { input, output, lowest });
            output
        });
        (vec![extended], Some(output_rows))
    }

    /// The input of a convolution or linear layer in the placement that its strategy requires, and the placement of its output.
    fn place_operator(&mut self, name: &str, groups: usize, op: &Op) -> (Vec<TensorId>, Placement) {
        let (model, input) = (self.plan.mesh.model, self.local_ids[op.inputs()[0]]);
        let [from, to] = [op.inputs()[0], op.output()].map(|tensor| self.whole.tensors[tensor].channels);
        let (required, produced) = match self.plan.split_of(self.whole, name) {
            None => (Placement::Batch, Placement::Batch),
            Some(Split::Out) => (Placement::Whole, Placement::Channels(bounds(to, 1, model))),
            Some(Split::In) => {
                let required = match &self.part.placements[input] {
                    split @ Placement::Channels(_) => split.clone(),
                    _ => Placement::Channels(bounds(from, 1, model)),
                };
                (required, Placement::Partial)
            }
            Some(Split::Groups) => {
                let split = |channels: usize| Placement::Channels(bounds(channels, channels / groups, model));
                (split(from), split(to))
            }
        };
        (vec![self.redistribute(input, &required)], produced)
    }

    /// The activation in a placement that non-linear operations can read: a partial sum is reduced, to each rank's own pictures.
    fn without_partial(&mut self, tensor: TensorId) -> TensorId {
        match self.part.placements[tensor] {
            Placement::Partial => self.redistribute(tensor, &Placement::Batch),
            _ => tensor,
        }
    }

    /// The activation in another placement.
    fn redistribute(&mut self, tensor: TensorId, placement: &Placement) -> TensorId {
        if self.part.placements[tensor] == *placement {
            return tensor;
        }
        let existing = self.find_output(|op, output| {
            let is_of_tensor = matches!(op, Op::Redistribute { input, .. } if *input == tensor);
            is_of_tensor && self.part.placements[output] == *placement
        });
        existing.unwrap_or_else(|| {
            let rows = self.part.rows[tensor].clone();
            let output = self.add_tensor(self.whole_ids[tensor], placement.clone(), rows);
            self.local.ops.push(Op::Redistribute { input: tensor, output });
            output
        })
    }

    /// The output of the operation for which `is_same` returns true, if there is one so far.
    fn find_output(&self, is_same: impl Fn(&Op, TensorId) -> bool) -> Option<TensorId> {
        self.local.ops.iter().find(|op| is_same(op, op.output())).map(Op::output)
    }

    /// Adds an activation to the local network: this rank's part of `whole`.
    fn add_tensor(&mut self, whole: TensorId, placement: Placement, rows: Option<Rows>) -> TensorId {
        let mut shape = self.whole.tensors[whole];
        self.part.placements.push(placement);
        self.part.rows.push(rows);
        let tensor = self.local.tensors.len();
        if let Some((channels, _)) = self.part.channels(tensor) {
            shape.channels = channels.len();
        }
        shape.height = self.part.height(tensor).unwrap_or(shape.height);
        self.local.tensors.push(shape);
        self.whole_ids.push(whole);
        tensor
    }
}
