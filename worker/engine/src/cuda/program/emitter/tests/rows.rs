//! Rows of pictures that ranks share.

use super::*;
use crate::net::Rows;

const PICTURES: usize = 2;

/// Windows of several sizes and strides, which reach over several ranks.
fn large_windows() -> Arc<Network> {
    let mut net = Network::new("large windows", 26, 3, 10);
    let x = net.conv("conv1", net.input(), 8, 7, 2);
    let x = net.batch_norm("bn1", x);
    let x = net.relu(x);
    let x = net.max_pool(x, 5, 2);
    let shortcut = net.max_pool(x, 3, 1);
    let x = net.conv("conv2", shortcut, 16, 5, 1);
    let x = net.batch_norm("bn2", x);
    let other = net.conv("conv3", shortcut, 16, 1, 1);
    let x = net.add(x, other);
    let x = net.conv("conv4", x, 16, 1, 2);
    let x = net.global_average_pool(x);
    net.linear("fc", x, 10);
    Arc::new(net)
}

fn setting(part: &Arc<Network>, dtype: DType, statistics: Statistics) -> Setting {
    Setting { statistics: Some(statistics), ..Setting::new(part, PICTURES, dtype, 90, Ranks::Local) }
}

/// All ranks call the same collectives, and each rank receives the rows that other ranks send to it.
#[test]
fn commands_of_ranks_that_share_rows_are_valid_and_match() {
    let (bottleneck, pooled) =
        (build(Arch::ResNet50, Stem::Cifar, 32, 10), build(Arch::ResNet18, Stem::Imagenet, 96, 1001));
    for (network, height, model) in
        [(&bottleneck, 3, 1), (&pooled, 2, 1), (&pooled, 3, 2), (&large_windows(), 4, 1)]
    {
        for (dtype, accumulates) in [(DType::F32, false), (DType::F16, false), (DType::Bf16, true)] {
            for has_own_statistics in [false, true] {
                let phases = [
                    Phase::Train(ONLY),
                    Phase::Train(MicroBatch { is_last: false, is_full: false, ..ONLY }),
                    Phase::Evaluate,
                ];
                for phase in phases {
                    if phase == phases[1] && !accumulates {
                        continue;
                    }
                    let (mut collectives, mut pieces) = (Vec::new(), Vec::new());
                    for part in parts(network, [1, height, model]) {
                        let statistics = if has_own_statistics {
                            Statistics::LocalWithExchanges
                        } else {
                            Statistics::Nccl
                        };
                        let setting = setting(&part, dtype, statistics);
                        let setting =
                            Setting { accumulates, computes_sums: true, data_ranks: height, ..setting };
                        setting.emit_valid(phase, false);
                        let commands = setting.emit_valid(phase, true).commands;
                        let mut calls = collective_calls(&commands);
                        calls.retain(|call| !call.starts_with("Exchange"));
                        collectives.push(calls);
                        pieces.push(pieces_of(&commands, height));
                    }
                    assert!(collectives.iter().all(|calls| *calls == collectives[0]), "{phase:?}");
                    for rank in 0..height {
                        for peer in 0..height {
                            let [sends, receives] =
                                [&pieces[rank * model][peer][0], &pieces[peer * model][rank][1]];
                            assert_eq!(sends, receives, "{}: {rank} to {peer}, {phase:?}", network.arch);
                        }
                        let has_sent = pieces[rank * model].iter().any(|[sends, _]| !sends.is_empty());
                        assert!(has_sent, "rank {rank} sends nothing");
                    }
                }
            }
        }
    }
}

/// By peer: the sizes in bytes of the messages that a rank sends to the peer, and of the messages that the peer sends to the rank, in
/// order.
fn pieces_of(commands: &[Command], height: usize) -> Vec<[Vec<usize>; 2]> {
    let mut all = vec![[Vec::new(), Vec::new()]; height];
    for command in commands {
        let Command::Exchange { sends, receives, group: Group::Height, .. } = command else { continue };
        for (which, pieces) in [sends, receives].into_iter().enumerate() {
            for (peer, at) in pieces {
                all[*peer as usize][which].push(at.bytes);
            }
        }
    }
    all
}

/// A rank's memory, and the commands of one operation that are still to be run.
struct Rank {
    arena: Vec<f32>,
    commands: Vec<Command>,
}

impl Rank {
    /// Runs and removes the commands before the exchange.
    fn run_before_exchange(&mut self) {
        let at = self.commands.iter().position(|c| matches!(c, Command::Exchange { .. }));
        let rest = self.commands.split_off(at.unwrap_or(self.commands.len()));
        self.run();
        self.commands = rest;
    }

    /// Runs all commands.
    fn run(&mut self) {
        for command in std::mem::take(&mut self.commands) {
            let Command::Kernel { kernel, .. } = command else { continue };
            self.launch(&kernel);
        }
    }

    /// Simulates a kernel of `rows.cu`.
    fn launch(&mut self, kernel: &Kernel) {
        let (from, to) = (place(&kernel.args[0]), place(&kernel.args[1]));
        let [pictures, quads, from_rows, to_rows] = [2, 3, 4, 5].map(|arg| number(&kernel.args[arg]));
        let length = 4 * quads;
        let line = |from: usize| from..from + length;
        match kernel.name {
            "take_rows" => {
                let offset = (number(&kernel.args[6]) as u32).cast_signed() as isize;
                let Arg::F32(fill) = kernel.args[7] else { panic!("{kernel:?}") };
                for (picture, row) in (0..pictures).flat_map(|p| (0..to_rows).map(move |row| (p, row))) {
                    let target = line(to + (picture * to_rows + row) * length);
                    let of = row as isize + offset;
                    if (0..from_rows as isize).contains(&of) {
                        let source = line(from + (picture * from_rows + of as usize) * length);
                        self.arena.copy_within(source, target.start);
                    } else {
                        self.arena[target].fill(fill);
                    }
                }
            }
            "add_rows" => {
                let first = number(&kernel.args[6]);
                for (picture, row) in (0..pictures).flat_map(|p| (0..from_rows).map(move |row| (p, row))) {
                    let source = self.arena[line(from + (picture * from_rows + row) * length)].to_vec();
                    let target = line(to + (picture * to_rows + first + row) * length);
                    self.arena[target].iter_mut().zip(source).for_each(|(to, value)| *to += value);
                }
            }
            other => panic!("{other}"),
        }
    }
}

/// Simulates an operation on all ranks. Before the operation, each value of a row is `given(rank, picture, row)`. Returns, for each
/// rank, the first value of each row after the operation.
fn simulate(
    ranks: &mut [Rank],
    [from, to]: [&Rows; 2],
    length: usize,
    given: impl Fn(usize, usize, isize) -> f32,
) -> Vec<Vec<f32>> {
    let ends: Vec<[usize; 2]> = ranks
        .iter()
        .map(|rank| {
            let first = rank.commands.iter().find_map(|command| match command {
                Command::Kernel { kernel, .. } if kernel.name == "take_rows" => Some(kernel.args.clone()),
                _ => None,
            });
            [0, 1].map(|arg| place(&first.as_ref().unwrap()[arg]))
        })
        .collect();
    for (number, rank) in ranks.iter_mut().enumerate() {
        let rows = from.of_rank[number].clone();
        for picture in 0..PICTURES {
            for (line, row) in rows.clone().enumerate() {
                let at = ends[number][0] + (picture * rows.len() + line) * length;
                rank.arena[at..at + length].fill(given(number, picture, row));
            }
        }
        rank.run_before_exchange();
    }
    let pieces = |rank: &Rank, peer: usize, receives: bool| -> Vec<Operand> {
        let messages = rank.commands.iter().find_map(|command| match command {
            Command::Exchange { sends, receives: received, .. } => {
                Some(if receives { received } else { sends })
            }
            _ => None,
        });
        let of_peer = messages.into_iter().flatten().filter(|(of, _)| *of as usize == peer);
        of_peer.map(|(_, at)| *at).collect()
    };
    for rank in 0..ranks.len() {
        for peer in 0..ranks.len() {
            let (sends, receives) = (pieces(&ranks[peer], rank, false), pieces(&ranks[rank], peer, true));
            assert_eq!(sends.len(), receives.len());
            for (from, to) in sends.into_iter().zip(receives) {
                let values = ranks[peer].arena[from.offset / 4..from.end() / 4].to_vec();
                ranks[rank].arena[to.offset / 4..to.end() / 4].copy_from_slice(&values);
            }
        }
    }
    let rows_of = |(number, rank): (usize, &mut Rank)| {
        rank.run();
        let rows = to.of_rank[number].len();
        (0..PICTURES * rows).map(|line| rank.arena[ends[number][1] + line * length]).collect()
    };
    ranks.iter_mut().enumerate().map(rows_of).collect()
}

/// Every rank receives the rows that its windows reach, and the sum of all windows' gradients of its rows.
#[test]
fn rows_come_from_the_ranks_that_have_them_and_gradients_go_back() {
    let networks = [large_windows(), build(Arch::ResNet18, Stem::Imagenet, 96, 10)];
    for (network, height) in [(&networks[0], 2), (&networks[0], 3), (&networks[0], 4), (&networks[1], 3)] {
        let settings: Vec<Setting> = parts(network, [1, height, 1])
            .iter()
            .map(|part| setting(part, DType::F32, Statistics::Nccl))
            .collect();
        let emitted: Vec<Emitted> =
            settings.iter().map(|setting| setting.emit_valid(Phase::Train(ONLY), true)).collect();
        let plan = &settings[0].plan;
        let (mut halos, mut lowest_halos) = (0, 0);
        for (index, op) in plan.ops.iter().enumerate() {
            let FusedOp::Halo { input, output, lowest } = *op else { continue };
            let [own, reached] = [input, output].map(|tensor| plan.network.rows(tensor).unwrap());
            let length = plan.values_per_picture(output) / plan.network.tensors[output].height;
            let ranks = |part: Part| -> Vec<Rank> {
                emitted
                    .iter()
                    .map(|emitted| {
                        let arena = vec![f32::NAN; emitted.arena_bytes / 4];
                        Rank { arena, commands: of_part(&emitted.commands, part).cloned().collect() }
                    })
                    .collect()
            };
            let value = |picture: usize, row: isize| (1000 * picture) as f32 + row as f32;
            let actual =
                simulate(&mut ranks(Part::Forward(index)), [own, reached], length, |_, picture, row| {
                    value(picture, row)
                });
            let outside = if lowest { f32::NEG_INFINITY } else { 0.0 };
            for (rank, actual) in actual.iter().enumerate() {
                let inside = 0..own.whole as isize;
                let expected: Vec<f32> = (0..PICTURES)
                    .flat_map(|picture| reached.of_rank[rank].clone().map(move |row| (picture, row)))
                    .map(|(picture, row)| if inside.contains(&row) { value(picture, row) } else { outside })
                    .collect();
                assert_eq!(*actual, expected, "{}, {index}, rank {rank} of {height}", network.arch);
            }
            (halos, lowest_halos) = (halos + 1, lowest_halos + usize::from(lowest));
            if plan.network.is_pictures(input) {
                continue;
            }
            let gradient =
                |rank: usize, picture: usize, row: isize| (1 + rank * 100 + picture * 10) as f32 + row as f32;
            let back = [reached, own];
            let actual = simulate(&mut ranks(Part::Backward(index)), back, length, gradient);
            for (rank, actual) in actual.iter().enumerate() {
                let of_all = |picture: usize, row: isize| -> f32 {
                    let reach = (0..height).filter(|peer| reached.of_rank[*peer].contains(&row));
                    reach.map(|peer| gradient(peer, picture, row)).sum()
                };
                let expected: Vec<f32> = (0..PICTURES)
                    .flat_map(|picture| own.of_rank[rank].clone().map(move |row| (picture, row)))
                    .map(|(picture, row)| of_all(picture, row))
                    .collect();
                assert_eq!(*actual, expected, "{}, {index}, rank {rank} of {height}", network.arch);
            }
        }
        assert!(halos > 4 && lowest_halos > 0, "{halos} halos, {lowest_halos} of them of poolings");
    }
}

/// Each rank needs memory for its share of the activations, and for the rows of other ranks that its windows reach.
#[test]
fn ranks_that_share_rows_need_less_memory() {
    let network = build(Arch::ResNet50, Stem::Imagenet, 1024, 10);
    let bytes = |part: &Arc<Network>, statistics: Statistics| {
        arena_bytes(&setting(part, DType::Bf16, statistics).facts(), true).unwrap() as f64
    };
    let whole = bytes(&network, Statistics::Nccl);
    for height in [2, 4] {
        for part in parts(&network, [1, height, 1]) {
            let share = bytes(&part, Statistics::Nccl) / whole * height as f64;
            assert!((0.9..1.3).contains(&share), "{height}: {share}");
        }
    }
}

#[test]
fn rows_that_gpus_cannot_share_are_refused_with_what_to_do() {
    let network = build(Arch::ResNet18, Stem::Imagenet, 96, 10);
    let error = refused(part(&network, [1, 4, 1], 0, &[]));
    assert!(
        error.contains("4 GPUs cannot share the 3 rows that layer4.0.conv1 makes")
            && error.contains("height to 3"),
        "{error}"
    );
    let mut net = Network::new("a norm after the pooling", 16, 3, 10);
    let x = net.conv("conv1", net.input(), 8, 3, 1);
    let x = net.global_average_pool(x);
    let x = net.batch_norm("bn1", x);
    net.linear("fc", x, 10);
    let error = refused(part(&net, [1, 2, 1], 0, &[]));
    assert!(error.contains("bn1, a batch norm after the global pooling"), "{error}");
}
