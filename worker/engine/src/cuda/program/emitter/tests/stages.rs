//! Pipeline stages.

use super::*;

/// Bytes of a micro-batch's part of a region: more than any test needs.
const PART_BYTES: usize = 1 << 32;

/// The passes of a step on one stage, as the engine launches them.
fn step(setting: &Setting, micro_batches: usize) -> Vec<Command> {
    let (stage, stages) = setting.plan.network.stage();
    let in_flight = (stages - stage).min(micro_batches);
    let mut commands = Vec::new();
    for (number, pass) in StagePass::schedule((stage, stages), micro_batches, in_flight) {
        let (is_first, is_last) = (number == 0, number + 1 == micro_batches);
        let emitted = setting
            .emit_valid(Phase::Train(MicroBatch { is_first, is_last, pass: Some(pass), ..ONLY }), true);
        assert!(emitted.arena_bytes < PART_BYTES);
        commands.extend(emitted.into_pass(pass, |region| match region {
            Region::Arena | Region::Control | Region::NormValues => PART_BYTES,
            _ => 0,
        }));
    }
    commands
}

/// A message of a stage: the other stage, whether that stage receives the message, and the message's bytes.
type Message = (usize, bool, usize);

/// The messages of each of a stage's exchanges with other stages, in order.
fn messages(commands: &[Command]) -> Vec<Vec<Message>> {
    let exchange = |command: &Command| {
        let Command::Exchange { group: Group::Stage, sends, receives, .. } = command else { return None };
        let sent = sends.iter().map(|(stage, at)| (*stage as usize, true, at.bytes));
        let received = receives.iter().map(|(stage, at)| (*stage as usize, false, at.bytes));
        Some(sent.chain(received).collect())
    };
    commands.iter().filter_map(exchange).collect()
}

/// Checks that no stage waits forever if each sender waits for its receiver, and that both ends of a message agree on its bytes. The
/// last exchange, before the update, is among all stages.
fn check_messages(of_stages: &[Vec<Vec<Message>>]) {
    let mut done = vec![0; of_stages.len()];
    let next = |done: &[usize], stage: usize| of_stages[stage].get(done[stage]);
    loop {
        let pair = (0..of_stages.len()).find_map(|stage| {
            let [(to, true, bytes)] = next(&done, stage)?[..] else { return None };
            let is_awaited = next(&done, to).is_some_and(|other| other[..] == [(stage, false, bytes)]);
            is_awaited.then_some([stage, to])
        });
        let Some(pair) = pair else { break };
        pair.into_iter().for_each(|stage| done[stage] += 1);
    }
    for (stage, messages) in of_stages.iter().enumerate() {
        assert_eq!(done[stage] + 1, messages.len(), "stage {stage} waits forever");
        for (other, of_other) in of_stages.iter().enumerate().filter(|(other, _)| *other != stage) {
            let bytes_of = |messages: &[Message], peer: usize, sent: bool| -> Vec<usize> {
                messages
                    .iter()
                    .filter(|(stage, is_sent, _)| (*stage, *is_sent) == (peer, sent))
                    .map(|m| m.2)
                    .collect()
            };
            let (sends, receives) = (messages.last().unwrap(), of_other.last().unwrap());
            assert_eq!(bytes_of(sends, other, true), bytes_of(receives, stage, false), "{stage} and {other}");
            assert!(!bytes_of(sends, other, true).is_empty());
        }
    }
}

/// Each pass is valid, separately and within a whole step, and neighbours exchange the messages that the other stage expects.
#[test]
fn commands_of_stages_are_valid_and_their_messages_match() {
    let (bottleneck, pooled) =
        (build(Arch::ResNet50, Stem::Cifar, 32, 10), build(Arch::ResNet18, Stem::Imagenet, 64, 1001));
    for (network, count, dtype, micro_batches) in [
        (&bottleneck, 2, DType::F16, 1),
        (&bottleneck, 4, DType::F16, 6),
        (&bottleneck, 3, DType::Bf16, 2),
        (&pooled, 10, DType::F32, 3),
        (&pooled, 2, DType::F16, 5),
    ] {
        for ranks in [Ranks::Single, Ranks::Nccl] {
            let of_stages: Vec<_> = parts(network, [count, 1, 1])
                .iter()
                .map(|stage| {
                    let accumulates = micro_batches > 1;
                    let setting = Setting { accumulates, ..Setting::new(stage, 8, dtype, 90, ranks) };
                    for side_stream in [false, true] {
                        setting.emit_valid(Phase::Train(ONLY), side_stream);
                        setting.emit_valid(Phase::Evaluate, side_stream);
                    }
                    let commands = step(&setting, micro_batches);
                    let case = format!("{} in {count}, {dtype:?}, {ranks:?}", network.arch);
                    assert_eq!(verify::verify(&commands, false), Ok(()), "{case}");
                    messages(&commands)
                })
                .collect();
            check_messages(&of_stages);
        }
    }
}

/// An evaluation passes all stages, and only the last stage has logits.
#[test]
fn evaluations_pass_from_stage_to_stage() {
    let network = build(Arch::ResNet18, Stem::Cifar, 32, 10);
    let passed: Vec<_> = parts(&network, [3, 1, 1])
        .iter()
        .map(|stage| {
            let setting = Setting::new(stage, 8, DType::F32, 90, Ranks::Single);
            let commands = setting.emit_valid(Phase::Evaluate, true).commands;
            assert_eq!(count(&commands, "cross_entropy"), usize::from(stage.is_last_stage()));
            messages(&commands)
        })
        .collect();
    let bytes = |messages: &[Message]| messages[0].2;
    assert_eq!(passed[0].len() + passed[2].len(), passed[1].len());
    let [sent, received] = [&passed[0][0], &passed[1][0]];
    assert_eq!((&sent[..], &received[..]), (&[(1, true, bytes(sent))][..], &[(0, false, bytes(sent))][..]));
}

#[test]
fn a_message_that_a_stage_misses_is_refused() {
    let stages = parts(&build(Arch::ResNet18, Stem::Cifar, 32, 10), [3, 1, 1]);
    let setting = Setting { accumulates: true, ..Setting::new(&stages[1], 8, DType::F16, 90, Ranks::Single) };
    let commands = step(&setting, 3);
    let receives = |c: &Command| matches!(c, Command::Exchange { receives, .. } if !receives.is_empty());
    let numbers = numbers(&commands, receives);
    assert_eq!(numbers.len(), 3 + 3 + 1);
    for number in numbers {
        let refused = verify::verify(&without(&commands, number), false).unwrap_err();
        assert!(refused.contains("is read before it is written"), "{refused}");
    }
}
