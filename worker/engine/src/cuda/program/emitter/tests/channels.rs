//! Operators that the ranks of a model group split.

use super::*;
use crate::net::Placement;
use Split::{Groups, In, Out};
use std::collections::BTreeSet;

const PICTURES: usize = 2;

type Shards = &'static [(&'static str, Split)];

/// A network that can be split over two and over three ranks. No operation is between its last two convolutions.
fn network() -> Arc<Network> {
    let mut net = Network::new("splits", 8, 3, 10);
    let x = net.conv("conv1", net.input(), 48, 3, 1);
    let x = net.batch_norm("bn1", x);
    let shortcut = net.relu(x);
    let x = net.conv("conv2", shortcut, 48, 3, 2);
    let x = net.batch_norm("bn2", x);
    let x = net.relu(x);
    let x = net.padded_conv("conv3", x, 48, (3, 1, 1), 3);
    let x = net.batch_norm("bn3", x);
    let x = net.relu(x);
    let x = net.conv("conv4", x, 48, 1, 1);
    let x = net.conv("conv5", x, 48, 1, 1);
    let branch = net.batch_norm("bn5", x);
    let x = net.conv("down.0", shortcut, 48, 1, 2);
    let shortcut = net.batch_norm("down.1", x);
    let x = net.add(branch, shortcut);
    let x = net.relu(x);
    let x = net.global_average_pool(x);
    net.linear("fc", x, 10);
    Arc::new(net)
}

/// Strategies with which activations change between all placements.
const STRATEGIES: [Shards; 7] = [
    &[("conv2", Out), ("conv3", Groups)],
    &[("conv1", Out), ("conv2", In), ("down.0", In), ("fc", In)],
    &[("conv1", Out), ("conv2", Out), ("down.0", Out), ("fc", Out)],
    &[("conv4", In), ("conv5", Out), ("fc", Out)],
    &[("conv4", In), ("conv5", In)],
    &[("conv4", Out), ("conv5", Out)],
    // Every operator.
    &[("conv*", Out), ("conv3", Groups), ("down.0", Out), ("fc", Out)],
];

/// In every number format, with one copy of the network and with two: all ranks call the same collectives in the same order.
#[test]
fn commands_of_split_operators_are_valid_and_match_other_ranks() {
    let small = network();
    let large = [
        (
            build(Arch::ResNet18, Stem::Imagenet, 64, 1001),
            &[("layer4.*.conv1", Out), ("layer4.*.conv2", In)][..],
        ),
        (build(Arch::ResNet50, Stem::Cifar, 32, 10), &[("layer2.*", Out), ("layer1.*.conv3", In)][..]),
        (build(Arch::ResNeXt50_32x4d, Stem::Cifar, 32, 10), &[("layer4.*.conv2", Groups), ("fc", In)][..]),
    ];
    let all = large.iter().map(|(network, shards)| (network, *shards, 2));
    let of_small = STRATEGIES.iter().flat_map(|shards| [(&small, *shards, 2), (&small, *shards, 3)]);
    for (network, shards, model) in all.chain(of_small) {
        for (dtype, accumulates, data_ranks) in
            [(DType::F32, false, 1), (DType::F16, false, 2), (DType::Bf16, true, 2)]
        {
            for phase in [Phase::Train(ONLY), Phase::Evaluate] {
                let calls = |rank: usize| {
                    let part = part(network, [1, 1, model], rank, shards);
                    let setting = Setting::new(&part, PICTURES, dtype, 90, Ranks::Nccl);
                    let setting = Setting { accumulates, data_ranks, computes_sums: true, ..setting };
                    assert!(setting.plan.splits_operators);
                    setting.emit_valid(phase, false);
                    let commands = setting.emit_valid(phase, true).commands;
                    // Calls between copies of the network differ, because each rank adds up the gradients of its own part.
                    let is_shared = |call: &String| !call.contains(" Data ");
                    collective_calls(&commands).into_iter().filter(is_shared).collect::<Vec<_>>()
                };
                let first = calls(0);
                assert!((1..model).all(|rank| calls(rank) == first), "{shards:?} {phase:?}");
            }
        }
    }
}

/// The values that a rank has under a placement, of the pictures of `model` ranks with `pixels` pixels of `channels` channels.
/// `value` takes the indices of picture, pixel and channel.
fn values_of(
    placement: &Placement,
    (rank, model): (usize, usize),
    [pixels, channels]: [usize; 2],
    value: impl Fn([usize; 3]) -> f32,
) -> Vec<f32> {
    let (mut pictures, mut own) = (0..model * PICTURES, 0..channels);
    match placement {
        Placement::Batch => pictures = rank * PICTURES..(rank + 1) * PICTURES,
        Placement::Channels(bounds) => own = bounds[rank]..bounds[rank + 1],
        Placement::Whole | Placement::Partial => {}
    }
    let mut all = Vec::new();
    for picture in pictures {
        for pixel in 0..pixels {
            all.extend(own.clone().map(|channel| value([picture, pixel, channel])));
        }
    }
    all
}

/// Simulates a command of every rank (`commands`) on the ranks' memory.
fn run(memory: &mut [Vec<f32>], commands: &[&Command]) {
    let at = |operand: &Operand| operand.offset / 4;
    let copy = |memory: &mut [Vec<f32>], [from, to]: [(usize, usize); 2], count: usize| {
        let values = memory[from.0][from.1..from.1 + count].to_vec();
        memory[to.0][to.1..to.1 + count].copy_from_slice(&values);
    };
    let ranks = memory.len();
    for (rank, command) in commands.iter().enumerate() {
        match command {
            Command::Kernel { kernel, .. } => {
                let [from, to] = [0, 1].map(|arg| place(&kernel.args[arg]));
                let number = |arg: usize| number(&kernel.args[arg]);
                match kernel.name {
                    "copy_channels" => {
                        let [rows, groups, of_from, of_to, first, first_to] = [2, 3, 4, 5, 6, 7].map(number);
                        for row in 0..rows {
                            let from = from + 8 * (first + row * of_from);
                            let to = to + 8 * (first_to + row * of_to);
                            copy(memory, [(rank, from), (rank, to)], 8 * groups);
                        }
                    }
                    "scale_values" => copy(memory, [(rank, from), (rank, to)], number(2)),
                    "clear_padded_pictures" => {}
                    other => panic!("{other}"),
                }
            }
            Command::Exchange { sends, .. } => {
                for (peer, sent) in sends {
                    let Command::Exchange { receives, .. } = commands[*peer as usize] else {
                        panic!("no exchange on {peer}")
                    };
                    let (_, to) = receives.iter().find(|(of, _)| *of as usize == rank).unwrap();
                    assert_eq!(sent.bytes, to.bytes);
                    copy(memory, [(rank, at(sent)), (*peer as usize, at(to))], sent.bytes / 4);
                }
            }
            // For all ranks at once, at the turn of the first rank.
            Command::Collective { kind, count, .. } if rank == 0 => {
                let ends: Vec<[usize; 2]> = commands
                    .iter()
                    .map(|command| match command {
                        Command::Collective { from, to, group: Group::Model, .. } => [at(from), at(to)],
                        other => panic!("{other:?}"),
                    })
                    .collect();
                let sum = |memory: &[Vec<f32>], first: usize| -> Vec<f32> {
                    let of = |i: usize| {
                        memory
                            .iter()
                            .zip(&ends)
                            .map(|(memory, [from, _])| memory[from + first + i])
                            .sum::<f32>()
                    };
                    (0..*count).map(of).collect()
                };
                match kind {
                    Collective::AllGather => {
                        for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
                            let target = ends[to][1] + from * count;
                            copy(memory, [(from, ends[from][0]), (to, target)], *count);
                        }
                    }
                    Collective::ReduceScatter => {
                        let sums: Vec<_> = (0..ranks).map(|rank| sum(memory, rank * count)).collect();
                        for ((memory, [_, to]), sum) in memory.iter_mut().zip(&ends).zip(&sums) {
                            memory[*to..][..*count].copy_from_slice(sum);
                        }
                    }
                    Collective::AllReduce => {
                        let sum = sum(memory, 0);
                        for (memory, [_, to]) in memory.iter_mut().zip(&ends) {
                            memory[*to..][..*count].copy_from_slice(&sum);
                        }
                    }
                }
            }
            _ => {}
        }
    }
}

/// The offset, in values, of the activation or gradient that a part of a list redistributes.
fn source(commands: &[&Command]) -> usize {
    let at = commands.iter().find_map(|command| match command {
        Command::Collective { kind: Collective::AllGather | Collective::ReduceScatter, from, .. } => {
            Some(*from)
        }
        Command::Kernel { kernel, .. } => match kernel.args[..2] {
            [Arg::In(from), Arg::Out(_)] => Some(from),
            _ => None,
        },
        _ => None,
    });
    at.unwrap().offset / 4
}

/// Every rank gets the values of its placement. If these are sums, they are the sums over all ranks.
#[test]
fn activations_and_gradients_change_their_placement() {
    let mut tested = BTreeSet::new();
    for (shards, model) in STRATEGIES.iter().flat_map(|shards| [(*shards, 2), (*shards, 3)]) {
        let settings: Vec<Setting> = (0..model)
            .map(|rank| {
                let part = part(&network(), [1, 1, model], rank, shards);
                Setting::new(&part, PICTURES, DType::F32, 90, Ranks::Nccl)
            })
            .collect();
        let emitted: Vec<Emitted> =
            settings.iter().map(|setting| setting.emit_valid(Phase::Train(ONLY), true)).collect();
        let (plan, network) = (&settings[0].plan, &settings[0].plan.network);
        for (index, op) in plan.ops.iter().enumerate() {
            let FusedOp::Redistribute { input, output } = *op else { continue };
            let backward = [output, input].map(|tensor| network.placement(tensor).of_gradient());
            let forward = [input, output].map(|tensor| network.placement(tensor).clone());
            for (part, [from, to], content) in [
                (Part::Forward(index), forward, Content::Activation(output)),
                (Part::Backward(index), backward, Content::Gradient(input)),
            ] {
                let lists: Vec<Vec<&Command>> = emitted
                    .iter()
                    .map(|emitted| {
                        let starts =
                            |c: &&Command| c.stream().is_some() && !matches!(c, Command::Wait { .. });
                        of_part(&emitted.commands, part)
                            .filter(|c| starts(c) || matches!(c, Command::Alloc { .. }))
                            .collect()
                    })
                    .collect();
                // Not simulated: gradients of pictures, which do not exist, and lists that also add a shortcut.
                let adds = |c: &&Command| matches!(c, Command::Kernel { kernel, .. } if kernel.name == "add");
                if matches!(part, Part::Backward(_)) && network.is_pictures(input)
                    || lists[0].iter().any(adds)
                {
                    continue;
                }
                let pixels = network.tensors[input].pixels();
                let channels = match (&from, &to) {
                    (Placement::Channels(bounds), _) | (_, Placement::Channels(bounds)) => bounds[model],
                    _ => plan.values_per_picture(input) / pixels,
                };
                let value =
                    |[picture, pixel, channel]: [usize; 3]| (picture * 1000 + pixel * 50 + channel) as f32;
                // Ranks have different parts of a sum.
                let weight = |rank: usize| if from == Placement::Partial { (rank + 1) as f32 } else { 1.0 };
                let total_weight =
                    if from == Placement::Partial { (model * (model + 1) / 2) as f32 } else { 1.0 };
                let mut memory: Vec<Vec<f32>> =
                    emitted.iter().map(|emitted| vec![f32::NAN; emitted.arena_bytes / 4]).collect();
                for (rank, (memory, list)) in memory.iter_mut().zip(&lists).enumerate() {
                    let own =
                        values_of(&from, (rank, model), [pixels, channels], |of| weight(rank) * value(of));
                    memory[source(list)..][..own.len()].copy_from_slice(&own);
                }
                assert!(lists.iter().all(|list| list.len() == lists[0].len()));
                for number in 0..lists[0].len() {
                    run(&mut memory, &lists.iter().map(|list| list[number]).collect::<Vec<_>>());
                }
                for (rank, (memory, list)) in memory.iter().zip(&lists).enumerate() {
                    let offset = list.iter().find_map(|command| match command {
                        Command::Alloc { content: of, at } if *of == content => Some(at.offset / 4),
                        _ => None,
                    });
                    let expected =
                        values_of(&to, (rank, model), [pixels, channels], |of| total_weight * value(of));
                    assert!(
                        memory[offset.unwrap()..][..expected.len()] == expected,
                        "{shards:?}, {model} ranks: {from:?} to {to:?}, rank {rank}"
                    );
                }
                let kind = |placement: &Placement| match placement {
                    Placement::Batch => "batch",
                    Placement::Whole => "whole",
                    Placement::Channels(_) => "channels",
                    Placement::Partial => "sum",
                };
                tested.insert([kind(&from), kind(&to)]);
            }
        }
    }
    // From batch, channels and sum to every other placement except sum, and from channels to other channels.
    assert_eq!(tested.len(), 8, "{tested:?}");
}

#[test]
fn splits_that_gpus_do_not_compute_are_refused_with_what_to_do() {
    let network = build(Arch::ResNet18, Stem::Cifar, 32, 10);
    let narrow = build(Arch::ResNet20, Stem::Cifar, 32, 10);
    let error = refused(part(&narrow, [1, 1, 4], 0, &[("layer1.0.conv1", Out)]));
    assert!(error.contains("layer1.0.conv1 is split") && error.contains("while a rank has 4"), "{error}");
    let split = part(&network, [1, 1, 2], 0, &[("layer4.0.conv1", Out)]);
    let error = refused(Network { frozen_norm: true, ..Network::clone(&split) });
    assert!(error.contains("layer4.0.conv1 is split") && error.contains("model.freeze_norm"), "{error}");
    let error = refused(part(&network, [1, 2, 2], 0, &[("fc", In)]));
    assert!(error.contains("fc is split") && error.contains("parallel.height"), "{error}");
    // The split of the last layer over its classes is that of a plan without strategies.
    let mesh = [1, 1, 2];
    assert_eq!(part(&network, mesh, 0, &[("fc", Out)]), part(&network, mesh, 0, &[]));
}
