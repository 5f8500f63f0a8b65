//! Ranks that divide the optimizer's state.

use super::*;
use OptimizerKind::{AdamW, Lamb, Lars, Momentum, Nesterov};
use lockstep_comm::DataType;
use std::ops::Range;

/// The byte ranges of a region that commands write, in order.
fn written(commands: &[Command], region: Region) -> Vec<(usize, usize)> {
    let mut all: Vec<(usize, usize)> = commands
        .iter()
        .filter(|command| matches!(command, Command::Kernel { .. }))
        .flat_map(Command::accesses)
        .filter(|(operand, access)| operand.region == region && *access != Access::Read)
        .map(|(operand, _)| (operand.offset, operand.end()))
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// All ranks call the same collectives, each rank updates weights that no other rank updates, and all have the same amount of optimizer
/// state.
#[test]
fn ranks_that_divide_optimizer_state_update_all_weights_once() {
    let network = build(Arch::ResNet18, Stem::Cifar, 32, 10);
    for (number, (optimizer, sums)) in
        [(Momentum, 1), (Nesterov, 1), (Lars, 2), (AdamW, 1), (Lamb, 2)].into_iter().enumerate()
    {
        for ranks in [Ranks::Local, Ranks::PeerMemory, Ranks::Nccl] {
            let (count, accumulates) = ([2, 3, 8, 3, 2][number], number % 2 == 0);
            let dtype = if number == 1 { DType::F32 } else { DType::F16 };
            let emitted = (0..count).map(|rank| {
                let share = (ranks, Some(Share { rank, ranks: count }));
                let setting =
                    Setting { optimizer, accumulates, ..Setting::with_share(&network, 32, dtype, 90, share) };
                setting.emit_valid(Phase::Train(ONLY), false);
                setting.emit_valid(Phase::Evaluate, true);
                let commands = setting.emit_valid(Phase::Train(ONLY), true).commands;
                (setting, commands)
            });
            let of_ranks: Vec<_> = emitted.collect();
            let case = format!("{optimizer:?}, {ranks:?}");
            let (setting, commands) = &of_ranks[0];
            let number_of = |predicate: fn(Collective, DataType) -> bool| {
                let is_counted = |c: &&Command| matches!(c, Command::Collective { kind, dtype, .. } if predicate(*kind, *dtype));
                commands.iter().filter(is_counted).count()
            };
            let reduced = setting.layout.buckets.len() + 1;
            assert_eq!(number_of(|kind, _| kind == Collective::ReduceScatter), reduced, "{case}");
            assert_eq!(number_of(|kind, _| kind == Collective::AllGather), reduced, "{case}");
            assert_eq!(number_of(|_, dtype| dtype == DataType::F64), sums, "{case}");
            let trained = setting.layout.trained_len;
            let mut weights = Vec::new();
            for (_, commands) in &of_ranks {
                assert_eq!(collective_calls(commands), collective_calls(&of_ranks[0].1), "{case}");
                weights.extend(written(commands, Region::Weights));
                let slot = written(commands, Region::OptimizerSlot(0));
                assert!(slot.windows(2).all(|pair| pair[0].1 == pair[1].0), "{case}: {slot:?}");
                assert_eq!((slot[0].0, slot.last().unwrap().1), (0, 4 * trained / count), "{case}");
            }
            weights.sort_unstable();
            let ends = (weights[0].0, weights.last().unwrap().1);
            assert!(weights.windows(2).all(|pair| pair[0].1 == pair[1].0), "{case}: {weights:?}");
            assert_eq!(ends, (0, 4 * trained), "{case}");
        }
    }
}

#[test]
fn the_ranks_parts_of_a_parameter_add_up_to_it() {
    let network = build(Arch::ResNet50, Stem::Imagenet, 224, 1000);
    for ranks in [2, 3, 8] {
        let part = |rank| {
            let share = Share { rank, ranks };
            let setting = Setting::with_share(&network, 32, DType::F16, 90, (Ranks::Local, Some(share)));
            let lengths: Vec<_> = setting.layout.own_segments(share).iter().map(Range::len).collect();
            let own: usize = setting.layout.own_ranges(share).map(|own| own.len()).sum();
            (lengths, own, setting.layout)
        };
        let of_ranks: Vec<_> = (0..ranks).map(part).collect();
        let (_, _, layout) = &of_ranks[0];
        for (number, parameter) in layout.parameters_with_gradients().iter().enumerate() {
            let parts: usize = of_ranks.iter().map(|(lengths, ..)| lengths[number]).sum();
            assert_eq!(parts, parameter.range.len(), "{} over {ranks}", parameter.name);
        }
        assert!(of_ranks.iter().all(|(_, own, layout)| own * ranks == layout.trained_len));
        // Padding, which makes the parts equally long, is less than 1 %.
        let parameters: usize = layout.parameters.iter().map(|parameter| parameter.range.len()).sum();
        assert!(layout.trained_len < parameters + parameters / 100, "{} {parameters}", layout.trained_len);
    }
}

#[test]
fn a_gradient_that_is_reduced_after_the_update_has_begun_is_refused() {
    let network = build(Arch::ResNet18, Stem::Cifar, 32, 10);
    for ranks in [Ranks::Local, Ranks::Nccl] {
        let share = (ranks, Some(Share { rank: 0, ranks: 2 }));
        let commands = Setting::with_share(&network, 32, DType::F16, 90, share)
            .emit_valid(Phase::Train(ONLY), true)
            .commands;
        let refusal = |commands: &[Command]| verify::verify(commands, false).unwrap_err();
        let scatter = |c: &Command| matches!(c, Command::Collective { kind: Collective::ReduceScatter, .. });
        let number = commands.iter().rposition(scatter).unwrap();
        let mut late = commands.clone();
        let mut scattered = late.remove(number);
        if let Command::Collective { stream, .. } = &mut scattered {
            *stream = StreamId::Main;
        }
        let update = late.iter().rposition(|c| written(std::slice::from_ref(c), Region::Weights).len() == 1);
        late.insert(update.unwrap(), scattered);
        assert!(refusal(&late).contains("after an update may have begun"), "{ranks:?}");
        let waits_for_sums = |c: &Command| matches!(c, Command::Wait { event: EventId::CollectivesDone, .. });
        if let Some(at) = commands.iter().position(waits_for_sums) {
            assert!(refusal(&without(&commands, at)).contains("may still run"), "{ranks:?}");
        }
        let at = commands.iter().position(announces_update).unwrap();
        assert!(refusal(&without(&commands, at)).contains("it changes weights before"), "{ranks:?}");
    }
}
