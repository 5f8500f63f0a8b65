//! Pipeline stages: where a network is cut, and the schedule of a step's micro-batches.

use crate::net::{Network, NetworkPart, Op, TensorId};
use std::{collections::HashMap, ops::Range, sync::Arc};

/// A pass of a stage over a micro-batch, with the micro-batch's index in the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    Forward(usize),
    Backward(usize),
}

/// The 1F1B schedule of stage `stage` (PipeDream-Flush, Narayanan et al. 2021). At most `stages - stage` micro-batches are between
/// their forward and backward passes. With one stage, each micro-batch's backward pass directly follows its forward pass.
pub fn schedule(stage: usize, stages: usize, micro_batches: usize) -> Vec<Pass> {
    let ahead = (stages - 1 - stage).min(micro_batches);
    let mut passes: Vec<Pass> = (0..ahead).map(Pass::Forward).collect();
    for micro_batch in 0..micro_batches {
        passes.extend((micro_batch + ahead < micro_batches).then_some(Pass::Forward(micro_batch + ahead)));
        passes.push(Pass::Backward(micro_batch));
    }
    passes
}

/// How many multiply-adds of a convolution's forward product take, with the two products of its backward pass, as long as reading or
/// writing one value. Measured on an H200 in 16-bit formats: 2 bytes at 4.5 TB/s, and 6 floating-point operations at 350 TFLOPS.
const MULTIPLY_ADDS_PER_VALUE: u64 = 26;

/// Cuts a network into stages so that the slowest stage is as fast as possible, as estimated by [`op_cost`]. Returns the index of the first
/// operation of each stage except the first.
///
/// # Errors
/// The network can only be cut into fewer stages.
pub fn cuts(network: &Network, stages: usize) -> Result<Vec<usize>, String> {
    // Each stage is a sequence of parts that cannot be cut. Part `i` ends before operation `ends[i]`.
    let mut ends = borders(network);
    ends.push(network.ops.len());
    if stages > ends.len() {
        return Err(format!(
            "parallel.pipeline = {stages} is too high: {} can be cut into at most {} stages, at the borders of its blocks",
            network.arch,
            ends.len()
        ));
    }
    // `costs[i]` is the cost of the parts from 0 to `i`.
    let costs: Vec<u64> =
        ends.iter().map(|end| network.ops[..*end].iter().map(|op| op_cost(network, op)).sum()).collect();
    // Dynamic programming. `best[i]` describes the best stages for the parts from 0 to `i`: the cost of the slowest stage, and the
    // cuts. It begins with one stage, and each iteration adds a stage.
    let mut best: Vec<(u64, Vec<usize>)> = costs.iter().map(|cost| (*cost, Vec::new())).collect();
    for _ in 1..stages {
        let with_another_stage = |last: usize| {
            // The other stages end with part `previous`, and the new stage has the parts after it.
            let slowest = |previous: &usize| best[*previous].0.max(costs[last] - costs[*previous]);
            let Some(previous) = (0..last).min_by_key(slowest) else { return (u64::MAX, Vec::new()) };
            (slowest(&previous), [&best[previous].1[..], &[ends[previous]]].concat())
        };
        best = (0..ends.len()).map(with_another_stage).collect();
    }
    Ok(best.pop().map(|(_, cuts)| cuts).unwrap_or_default())
}

/// Indices of the operations before which the network can be cut: convolutions and linear layers (so that each stage has
/// parameters) whose input is the only earlier activation that is still needed.
fn borders(network: &Network) -> Vec<usize> {
    let mut last_readers = vec![0; network.tensors.len()];
    for (index, op) in network.ops.iter().enumerate() {
        op.inputs().into_iter().for_each(|input| last_readers[input] = index);
    }
    let is_border = |at: &usize| {
        let made_before = std::iter::once(network.input()).chain(network.ops[..*at].iter().map(Op::output));
        let alive: Vec<TensorId> = made_before.filter(|tensor| last_readers[*tensor] >= *at).collect();
        let op = &network.ops[*at];
        matches!(op, Op::Conv { .. } | Op::Linear { .. }) && alive == op.inputs()
    };
    (1..network.ops.len()).filter(is_border).collect()
}

/// The time of an operation per picture, in multiply-adds.
fn op_cost(network: &Network, op: &Op) -> u64 {
    let shape = |tensor: TensorId| network.tensors[tensor];
    let multiply_adds = match *op {
        Op::Conv { input, output, kernel, groups, .. } => {
            (shape(output).len() * kernel * kernel * shape(input).channels / groups) as u64
        }
        Op::Linear { input, output, .. } => (shape(input).len() * shape(output).len()) as u64,
        _ => 0,
    };
    multiply_adds + MULTIPLY_ADDS_PER_VALUE * values_moved(network, op) as u64
}

/// Number of values per picture and step that an operation reads from and writes to memory, forward and backward. ReLUs
/// are counted with the preceding operation.
pub(super) fn values_moved(network: &Network, op: &Op) -> f64 {
    let [from, to] = [op.inputs()[0], op.output()].map(|tensor| network.tensors[tensor].len() as f64);
    match op {
        // Forward: reads the input twice, writes the output. Backward: reads input and gradient twice, writes the input's gradient.
        Op::BatchNorm { .. } => 8.0 * to,
        Op::Add { .. } => 2.0 * to,
        Op::MaxPool { .. } | Op::GlobalAveragePool { .. } => 2.0 * (from + to),
        _ => 0.0,
    }
}

/// Extracts the operations `range` of a rank's network as stage `stage` of `stages`. The first tensor of the result is the
/// output of the preceding stage, and the last tensor is the input of the next stage.
pub(super) fn stage_of(
    local: &Network,
    part: &NetworkPart,
    range: Range<usize>,
    (stage, stages): (usize, usize),
) -> Network {
    let input = range.start.checked_sub(1).map_or(local.input(), |before| local.ops[before].output());
    let ops = &local.ops[range];
    let tensors: Vec<TensorId> = std::iter::once(input).chain(ops.iter().map(Op::output)).collect();
    let new_ids: HashMap<TensorId, TensorId> =
        tensors.iter().enumerate().map(|(new_id, tensor)| (*tensor, new_id)).collect();
    let renumbered = |op: &Op| {
        let inputs: Vec<TensorId> = op.inputs().iter().map(|input| new_ids[input]).collect();
        op.on(&inputs, new_ids[&op.output()])
    };
    let part = NetworkPart {
        placements: tensors.iter().map(|tensor| part.placements[*tensor].clone()).collect(),
        rows: tensors.iter().map(|tensor| part.rows[*tensor].clone()).collect(),
        stage,
        stages,
        ..*part
    };
    Network {
        tensors: tensors.iter().map(|tensor| local.tensors[*tensor]).collect(),
        ops: ops.iter().map(renumbered).collect(),
        part: Some(Arc::new(part)),
        ..local.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        net::resnet,
        plan::{Mesh, Plan, lower},
    };
    use lockstep_protocol::spec::{Arch, ShardSpec, Split};
    use std::collections::VecDeque;

    fn network(arch: Arch) -> Network {
        resnet::of(arch, 32, 10)
    }

    #[test]
    fn four_stages_compute_six_micro_batches_in_the_published_order() {
        let text = |stage: usize| -> String {
            let word = |pass: &Pass| match pass {
                Pass::Forward(micro_batch) => format!("f{micro_batch}"),
                Pass::Backward(micro_batch) => format!("b{micro_batch}"),
            };
            schedule(stage, 4, 6).iter().map(word).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(text(0), "f0 f1 f2 f3 b0 f4 b1 f5 b2 b3 b4 b5");
        assert_eq!(text(2), "f0 f1 b0 f2 b1 f3 b2 f4 b3 f5 b4 b5");
        assert_eq!(text(3), "f0 b0 f1 b1 f2 b2 f3 b3 f4 b4 f5 b5");
    }

    /// Each pass waits for the same pass of the neighbouring stage, and a stage never keeps more activations than documented.
    #[test]
    fn every_schedule_ends_and_keeps_few_activations() {
        for (stages, micro_batches) in (1..6).flat_map(|stages| (0..9).map(move |count| (stages, count))) {
            let mut remaining: Vec<VecDeque<Pass>> =
                (0..stages).map(|stage| schedule(stage, stages, micro_batches).into()).collect();
            let mut done: Vec<Vec<Pass>> = vec![Vec::new(); stages];
            let mut has_advanced = true;
            while std::mem::take(&mut has_advanced) {
                for stage in 0..stages {
                    let Some(pass) = remaining[stage].front().copied() else { continue };
                    let is_ready = match pass {
                        Pass::Forward(_) => stage == 0 || done[stage - 1].contains(&pass),
                        Pass::Backward(micro_batch) => {
                            done[stage].contains(&Pass::Forward(micro_batch))
                                && (stage + 1 == stages || done[stage + 1].contains(&pass))
                        }
                    };
                    if is_ready {
                        done[stage].extend(remaining[stage].pop_front());
                        has_advanced = true;
                    }
                    let forward = done[stage].iter().filter(|pass| matches!(pass, Pass::Forward(_))).count();
                    let kept = forward - (done[stage].len() - forward);
                    assert!(kept <= stages - stage && kept <= micro_batches.max(1), "{stages} {stage}");
                }
            }
            assert!(
                remaining.iter().all(VecDeque::is_empty),
                "{stages} stages, {micro_batches} micro-batches"
            );
            for of_stage in done {
                let numbers =
                    |is: fn(&Pass) -> Option<usize>| of_stage.iter().filter_map(is).collect::<Vec<_>>();
                let all: Vec<usize> = (0..micro_batches).collect();
                assert_eq!(numbers(|p| if let Pass::Forward(n) = p { Some(*n) } else { None }), all);
                assert_eq!(numbers(|p| if let Pass::Backward(n) = p { Some(*n) } else { None }), all);
            }
        }
    }

    #[test]
    fn cuts_are_at_the_borders_of_blocks_and_balance_the_time() {
        let first = |arch: Arch, stages: usize| -> Vec<String> {
            let network = network(arch);
            let name = |cut: &usize| match &network.ops[*cut] {
                Op::Conv { name, .. } | Op::Linear { name, .. } => name.clone(),
                op => panic!("{op:?}"),
            };
            cuts(&network, stages).unwrap().iter().map(name).collect()
        };
        assert_eq!(first(Arch::ResNet20, 1), [""; 0]);
        assert_eq!(first(Arch::ResNet20, 3), ["layer1.2.conv1", "layer2.2.conv1"]);
        assert_eq!(first(Arch::ResNet18, 2), ["layer2.1.conv1"]);
        // The maximum number of stages: the stem, nine blocks, the last layer.
        let all = first(Arch::ResNet20, 11);
        assert_eq!((all.len(), all[0].as_str(), all[9].as_str()), (10, "layer1.0.conv1", "fc"));
        let error = cuts(&network(Arch::ResNet20), 12).unwrap_err();
        assert_eq!(
            error,
            "parallel.pipeline = 12 is too high: resnet20 can be cut into at most 11 stages, at the borders of its blocks"
        );
        for (arch, max_stages) in [(Arch::ResNet50, 18), (Arch::ResNeXt50_32x4d, 18), (Arch::ResNet152, 52)] {
            let network = network(arch);
            assert!(
                cuts(&network, max_stages).is_ok() && cuts(&network, max_stages + 1).is_err(),
                "{arch:?}"
            );
            let costs = |cuts: &[usize]| {
                let ends = [cuts, &[network.ops.len()]].concat();
                let mut from = 0;
                let stages = ends.into_iter().map(|end| &network.ops[std::mem::replace(&mut from, end)..end]);
                stages.map(|ops| ops.iter().map(|op| op_cost(&network, op)).sum()).collect::<Vec<u64>>()
            };
            let four = costs(&cuts(&network, 4).unwrap());
            let mean = four.iter().sum::<u64>() / 4;
            assert!(four.iter().all(|cost| *cost < mean * 5 / 4), "{arch:?}: {four:?}");
        }
    }

    /// Under every plan, each operation and each parameter is on exactly one stage, and neighbouring stages
    /// agree on the tensors that are sent.
    #[test]
    fn the_stages_together_have_the_whole_network() {
        let network = network(Arch::ResNet20);
        let shards = vec![ShardSpec { pattern: "layer3.*".into(), split: Split::Out }];
        for (mesh, shards) in [
            (Mesh { stage: 4, data: 2, height: 1, model: 1 }, Vec::new()),
            (Mesh { stage: 3, data: 1, height: 1, model: 2 }, shards.clone()),
            (Mesh { stage: 2, data: 1, height: 2, model: 2 }, shards),
        ] {
            let lowered = |mesh: Mesh, rank: usize| {
                let plan = Plan::on(mesh, shards.clone());
                lower(&network, &plan, rank).unwrap()
            };
            for rank in 0..mesh.ranks_of_stage() {
                let whole = lowered(Mesh { stage: 1, ..mesh }, rank);
                let stages: Vec<Network> = (0..mesh.stage)
                    .map(|stage| lowered(mesh, stage * mesh.ranks_of_stage() + rank))
                    .collect();
                let parameters: Vec<_> = stages.iter().flat_map(Network::parameters).collect();
                assert_eq!(parameters, whole.parameters(), "{mesh:?}");
                assert_eq!(stages.iter().map(|stage| stage.ops.len()).sum::<usize>(), whole.ops.len());
                for (stage, pair) in stages.windows(2).enumerate() {
                    let (sent, received) = (pair[0].logits(), pair[1].input());
                    assert_eq!(pair[0].tensors[sent], pair[1].tensors[received]);
                    assert_eq!(pair[0].placement(sent), pair[1].placement(received));
                    assert_eq!(pair[0].rows(sent), pair[1].rows(received));
                    assert_eq!(pair[1].stage(), (stage + 1, mesh.stage));
                    assert!(!pair[1].is_pictures(received), "a received tensor has a gradient");
                }
            }
        }
    }
}
