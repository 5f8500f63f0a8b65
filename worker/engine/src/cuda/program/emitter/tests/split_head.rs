//! The last layer split over its classes.

use super::*;
use crate::{LossConfig, Margin, check::PartOf, net::init};
use lockstep_host::tensors::NamedTensors;
use lockstep_protocol::spec::{LossKind, LossSpec};

/// Uneven parts of the classes, in one chunk and in several; with one copy of the network and with two.
#[test]
fn commands_are_valid_and_match_those_of_the_other_ranks() {
    for (classes, model, chunks) in [(10, 2, 1), (7, 4, 1), (1001, 2, 63)] {
        let network = build(Arch::ResNet50, Stem::Cifar, 32, classes);
        for (dtype, ranks, optimizer) in [
            (DType::F32, Ranks::PeerMemory, OptimizerKind::Momentum),
            (DType::F16, Ranks::Nccl, OptimizerKind::AdamW),
            (DType::Bf16, Ranks::Local, OptimizerKind::Nesterov),
            (DType::Bf16, Ranks::Local, OptimizerKind::AdamW),
        ] {
            for (data_ranks, accumulates) in [(1, false), (2, false), (2, true)] {
                let collectives = |rank: usize, is_full: bool| {
                    let part = part(&network, [1, 1, model], rank, &[]);
                    let setting = Setting::new(&part, 32, dtype, 90, ranks);
                    let setting = Setting { optimizer, data_ranks, accumulates, ..setting };
                    let head = setting.plan.head.as_ref().unwrap();
                    assert_eq!((head.chunk_count, setting.plan.padded_classes % (8 * chunks)), (chunks, 0));
                    let mut all = Vec::new();
                    for phase in [Phase::Train(MicroBatch { is_full, ..ONLY }), Phase::Evaluate] {
                        for side_stream in [false, true] {
                            all = collective_calls(&setting.emit_valid(phase, side_stream).commands);
                        }
                        if matches!(phase, Phase::Train(_)) {
                            let groups = ["Model", "Data"]
                                .map(|group| all.iter().filter(|call| call.contains(group)).count());
                            // Model: features, labels, records, the features' gradient, squares. Data: gradients of matrix and bias.
                            assert_eq!(groups, [5, if data_ranks > 1 { 2 } else { 0 }], "{all:?}");
                        }
                    }
                    let train = Phase::Train(MicroBatch { is_full, ..ONLY });
                    all.extend(collective_calls(&setting.emit_valid(train, true).commands));
                    if accumulates {
                        for (is_first, is_last) in [(true, false), (false, false), (false, true)] {
                            let phase = Phase::Train(MicroBatch { is_first, is_last, is_full, ..ONLY });
                            all.extend(collective_calls(&setting.emit_valid(phase, true).commands));
                        }
                    }
                    all
                };
                let first = collectives(0, true);
                for rank in 0..model {
                    assert_eq!(first, collectives(rank, rank == 0), "{classes} classes, rank {rank}");
                }
            }
        }
    }
}

#[test]
fn a_missing_exchange_is_refused() {
    let part = part(&build(Arch::ResNet18, Stem::Cifar, 32, 1001), [1, 1, 2], 1, &[]);
    let setting = Setting::new(&part, 32, DType::Bf16, 90, Ranks::PeerMemory);
    let commands = setting.emit_valid(Phase::Train(ONLY), true).commands;
    let exchanges = |c: &Command| matches!(c, Command::Collective { group: Group::Model, .. });
    let numbers = numbers(&commands, exchanges);
    assert_eq!(numbers.len(), 5);
    for number in numbers {
        assert!(verify::verify(&without(&commands, number), false).is_err(), "{:?}", commands[number]);
    }
}

/// Kernels and convolutions of the operations up to the pooling, by name and geometry.
fn backbone(commands: &[Command], ops: usize) -> Vec<String> {
    let mut inside = false;
    let mut all = Vec::new();
    for command in commands {
        match command {
            Command::Part(Part::Forward(op) | Part::Backward(op)) => inside = *op < ops,
            Command::Part(_) => inside = false,
            Command::Kernel { kernel, .. } if inside => {
                all.push(format!("{} {}", kernel.name, kernel.geometry));
            }
            Command::Convolution { convolution, .. } if inside => all.push(convolution.to_string()),
            _ => {}
        }
    }
    all
}

#[test]
fn the_backbone_equals_that_of_data_parallelism() {
    let network = build(Arch::ResNet50, Stem::Imagenet, 224, 1000);
    let emitted = |network: &Arc<Network>| {
        let setting = Setting::new(network, 256, DType::Bf16, 90, Ranks::PeerMemory);
        (setting.emit_valid(Phase::Train(ONLY), true), setting)
    };
    let (whole, setting) = emitted(&network);
    let (split, split_setting) = emitted(&part(&network, [1, 1, 2], 0, &[]));
    let ops = setting.plan.ops.len() - 1;
    let [whole_backbone, split_backbone] = [&whole, &split].map(|emitted| backbone(&emitted.commands, ops));
    assert!(whole_backbone.len() > 200 && whole_backbone == split_backbone);
    // The logits are allocated once.
    let logits = split_setting.plan.network.logits();
    let of_logits = |content: &Content| matches!(content, Content::Activation(tensor) | Content::Gradient(tensor) if *tensor == logits);
    let allocated = |c: &&Command| matches!(c, Command::Alloc { content, .. } if of_logits(content));
    assert_eq!(split.commands.iter().filter(allocated).count(), 1);
}

/// The rows of a sample may be fewer or more than this rank's classes.
#[test]
fn rows_of_sampled_classes_are_gathered_and_put_back() {
    use OptimizerKind::{AdamW, Momentum, Nesterov};
    for (classes, chunks) in [(1001, 6), (7, 5)] {
        let network = build(Arch::ResNet18, Stem::Cifar, 32, classes);
        for (dtype, optimizer, slots) in [
            (DType::F32, Momentum, 1),
            (DType::F16, AdamW, 2),
            (DType::Bf16, Nesterov, 1),
            (DType::Bf16, AdamW, 2),
        ] {
            let collectives = |rank: usize| {
                let part = part(&network, [1, 1, 2], rank, &[]);
                let mut setting =
                    Setting { optimizer, ..Setting::new(&part, 32, dtype, 90, Ranks::PeerMemory) };
                let loss = LossConfig { sample_share: 0.1, ..LossConfig::default() };
                setting.plan = setting.plan.clone().with_loss(&loss);
                assert_eq!(setting.plan.sampled_classes().unwrap().chunk_count, chunks);
                for side_stream in [false, true] {
                    let commands = setting.emit_valid(Phase::Train(ONLY), side_stream).commands;
                    // Of the matrix: the trained weights, their low-precision copy, and the optimizer's slots.
                    let copies = if dtype == DType::F32 { 1 } else { 2 };
                    for (name, expected) in [
                        ("sample_classes", 1),
                        ("gather_rows", copies + slots),
                        ("scatter_rows", copies + slots),
                        ("gather_values", 1 + slots),
                        ("scatter_values", 1 + slots),
                    ] {
                        assert_eq!(count(&commands, name), expected, "{name}, {dtype:?}, {optimizer:?}");
                    }
                }
                let evaluated = setting.emit_valid(Phase::Evaluate, true).commands;
                assert_eq!(count(&evaluated, "sample_classes"), 0);
                [
                    collective_calls(&setting.emit_valid(Phase::Train(ONLY), true).commands),
                    collective_calls(&evaluated),
                ]
            };
            assert_eq!(collectives(0), collectives(1));
        }
    }
}

/// For a whole head, a split head with and without a stored gradient, and a sampled head.
#[test]
fn a_margin_changes_labels_logits_and_gradients_of_features_and_weights() {
    let network = build(Arch::ResNet18, Stem::Cifar, 32, 1001);
    let margin = Margin::of(&LossSpec { kind: LossKind::ArcFace, ..LossSpec::default() });
    for (model, accumulates, sample_share) in
        [(1, false, 1.0), (2, false, 1.0), (2, true, 1.0), (2, false, 0.1)]
    {
        let part = if model == 1 { network.clone() } else { part(&network, [1, 1, model], 1, &[]) };
        for (dtype, ranks) in
            [(DType::F32, Ranks::Nccl), (DType::F16, Ranks::Local), (DType::Bf16, Ranks::PeerMemory)]
        {
            let mut setting = Setting { accumulates, ..Setting::new(&part, 32, dtype, 90, ranks) };
            let loss = LossConfig { sample_share, margin, ..LossConfig::default() };
            setting.plan = setting.plan.clone().with_loss(&loss);
            for side_stream in [false, true] {
                for (phase, expected) in [(Phase::Train(ONLY), [2, 2, 1]), (Phase::Evaluate, [2, 1, 0])] {
                    let commands = setting.emit_valid(phase, side_stream).commands;
                    let actual =
                        ["row_factors", "scale_cosines", "put_margin"].map(|name| count(&commands, name));
                    assert_eq!(actual, expected, "{model} {dtype:?} {phase:?}");
                    // A gradient that is computed twice is corrected twice, chunk by chunk.
                    let corrected = match phase {
                        Phase::Evaluate => 0,
                        Phase::Train(_) if setting.plan.recomputes_head_gradient(accumulates, 1) => {
                            1 + 2 * setting.plan.chunk_count()
                        }
                        Phase::Train(_) => 2,
                    };
                    assert_eq!(count(&commands, "remove_along"), corrected, "{model} {dtype:?}");
                }
            }
        }
    }
}

#[test]
fn parameters_of_all_ranks_are_the_network_s() {
    let network = build(Arch::ResNet20, Stem::Cifar, 32, 11);
    let initial = init::initial_parameters(&network, false, 1);
    let mut head = Vec::new();
    for rank in 0..4 {
        let part = part(&network, [1, 1, 4], rank, &[]);
        let setting = Setting::new(&part, 8, DType::F32, 90, Ranks::Local);
        let layout = &setting.layout;
        let flat = layout.flatten(None, &PartOf::new(&initial, &network, &part).unwrap()).unwrap();
        let mut back = NamedTensors::new();
        layout.export(None, &flat, &mut back);
        assert!(back.keys().eq(initial.keys().filter(|name| !name.contains("running"))));
        assert!(back["conv1.weight"] == initial["conv1.weight"]);
        head.extend_from_slice(&back["fc.weight"].values);
        // The ranks have 3, 3, 3 and 2 classes, each padded to 8.
        let [split, whole] = layout.split_and_whole();
        assert_eq!((split[0].clone(), split[1].len()), (0..1024, 1024));
        assert_eq!(whole[0].start, 1024);
        assert!(layout.buckets[0].start == 1024, "the first bucket has the parameters that every rank has");
    }
    assert_eq!(head, initial["fc.weight"].values);
}
