//! Emission without a GPU: the emitted commands, and the position and lifetime of allocations. No command may read memory that is not
//! written.

use super::*;
use crate::{
    Optimizer,
    cuda::{
        command::{Access, Arg, verify::collective_calls},
        program::text::text,
    },
    net::resnet,
    plan::{self, Mesh, Plan},
};
use lockstep_protocol::spec::{Arch, ModelSpec, OptimizerKind, ShardSpec, Split, Stem};
use std::path::Path;

mod channels;
mod mutations;
mod rows;
mod sharded;
mod signatures;
mod split_head;
mod stages;

/// The only micro-batch of a step, with a full batch.
const ONLY: MicroBatch = MicroBatch { is_first: true, is_last: true, is_full: true, pass: None };

fn build(arch: Arch, stem: Stem, side: usize, classes: usize) -> Arc<Network> {
    Arc::new(resnet::build(&ModelSpec { arch, stem, ..ModelSpec::default() }, side, 3, classes).unwrap())
}

/// The part of a network that rank `rank` has on a mesh of `[stage, height, model]` ranks.
fn part(network: &Network, mesh: [usize; 3], rank: usize, shards: &[(&str, Split)]) -> Arc<Network> {
    let shard = |(pattern, split): &(&str, Split)| ShardSpec { pattern: (*pattern).into(), split: *split };
    let [stage, height, model] = mesh;
    let plan = Plan::on(Mesh { stage, data: 1, height, model }, shards.iter().map(shard).collect());
    Arc::new(plan::lower(network, &plan, rank).unwrap())
}

/// The parts of all ranks.
fn parts(network: &Network, mesh: [usize; 3]) -> Vec<Arc<Network>> {
    let ranks: usize = mesh.iter().product();
    (0..ranks).map(|rank| part(network, mesh, rank, &[])).collect()
}

/// The commands of a part of a list.
fn of_part(commands: &[Command], part: Part) -> impl Iterator<Item = &Command> {
    let begin = commands.iter().position(|c| *c == Command::Part(part)).unwrap() + 1;
    commands[begin..].iter().take_while(|c| !matches!(c, Command::Part(_)))
}

fn plan(network: &Arc<Network>, batch: usize, dtype: DType, capability: u32) -> StepPlan {
    let capabilities = capabilities(Ops::multiplies_matrices(capability, dtype));
    StepPlan::new(network.clone(), batch, dtype, capabilities).unwrap()
}

/// How the ranks of a group reduce statistics.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ranks {
    Single,
    Local,
    PeerMemory,
    Nccl,
}

/// The inputs of an emission, on a GPU with 132 multiprocessors.
struct Setting {
    plan: StepPlan,
    layout: Layout,
    norms: Vec<NormSite>,
    statistics: Option<Statistics>,
    /// This rank's share of the optimizer's state. `None` if ranks do not divide it.
    share: Option<Share>,
    capability: u32,
    optimizer: OptimizerKind,
    accumulates: bool,
    data_ranks: usize,
    /// Whether convolutions compute the sums for batch norms wherever possible.
    computes_sums: bool,
}

impl Setting {
    fn new(network: &Arc<Network>, batch: usize, dtype: DType, capability: u32, ranks: Ranks) -> Self {
        Self::with_share(network, batch, dtype, capability, (ranks, None))
    }

    fn with_share(
        network: &Arc<Network>,
        batch: usize,
        dtype: DType,
        capability: u32,
        (ranks, share): (Ranks, Option<Share>),
    ) -> Self {
        let plan = plan(network, batch, dtype, capability);
        let part_count = share.unwrap_or(Share::WHOLE).ranks;
        let layout = Layout::new(&plan, part_count);
        let (norms, _) = norm_sites(&plan, &layout, &RunningLayout::for_network(network, plan.norms()));
        let channels: Vec<usize> = norms.iter().map(NormSite::channels).collect();
        let statistics = match ranks {
            Ranks::Single => None,
            Ranks::Local => Some(Statistics::Local),
            Ranks::PeerMemory => Some(Statistics::peer_memory(&channels, 2).0),
            Ranks::Nccl => Some(Statistics::Nccl),
        };
        let optimizer = OptimizerKind::Momentum;
        Self {
            plan,
            layout,
            norms,
            statistics,
            share,
            capability,
            optimizer,
            accumulates: false,
            data_ranks: 1,
            computes_sums: false,
        }
    }

    fn facts(&self) -> Facts<'_> {
        Facts {
            plan: &self.plan,
            layout: &self.layout,
            norms: &self.norms,
            ops: Ops::new(self.plan.dtype, 132, self.capability),
            optimizer: Optimizer { kind: self.optimizer, ..Optimizer::default() },
            label_smoothing: 0.1,
            has_class_weights: true,
            accumulates: self.accumulates,
            has_dynamic_scale: true,
            statistics: self.statistics.as_ref(),
            data_ranks: self.data_ranks,
            share: self.share,
            computes_sums: Box::new(move |convolution| self.computes_sums && convolution.groups == 1),
            scaling: None,
        }
    }

    /// Emits the commands, with or without a second stream for weight gradients. Returns them with the result of their verification.
    fn emit(&self, phase: Phase, side_stream: bool) -> (Emitted, Result<(), String>) {
        let stream = if side_stream { StreamId::Side } else { StreamId::Main };
        let emitted = emit(&self.facts(), phase, Input::NONE, stream).unwrap();
        let checked = verify::verify(&emitted.commands, phase.carries_over());
        (emitted, checked)
    }

    /// Emits the commands, and checks them and the arguments of their kernels.
    fn emit_valid(&self, phase: Phase, side_stream: bool) -> Emitted {
        let (emitted, checked) = self.emit(phase, side_stream);
        let name = &self.plan.network.arch;
        assert_eq!(checked, Ok(()), "{name}, {:?}, {phase:?}\n{}", self.plan.dtype, self.text(&emitted));
        let logits = Content::Activation(self.plan.network.logits());
        let has_logits = phase == Phase::Evaluate && self.plan.network.is_last_stage();
        let expected: &[Content] = if has_logits { &[logits] } else { &[] };
        assert_eq!(still_allocated(&emitted.commands), expected, "{name}, {phase:?}");
        for command in &emitted.commands {
            if let Command::Kernel { kernel, .. } = command {
                signatures::check(kernel);
            }
        }
        emitted
    }

    fn text(&self, emitted: &Emitted) -> String {
        text(&self.facts(), &emitted.commands)
    }
}

/// The contents of the memory that is still allocated at the end of a list.
fn still_allocated(commands: &[Command]) -> Vec<Content> {
    let mut live = Vec::new();
    for command in commands {
        match command {
            Command::Alloc { content, at } => live.push((*at, *content)),
            Command::Free { at } => live.retain(|(other, _)| other != at),
            _ => {}
        }
    }
    live.into_iter().map(|(_, content)| content).collect()
}

/// Checks lists of commands in every number format, on GPUs with and without matrix kernels, for one rank and for groups. Memory that is
/// read must be written before and not freed, and streams must wait for each other where necessary.
fn check_commands(networks: &[Arc<Network>]) {
    for network in networks {
        for (dtype, capability) in [(DType::F32, 90), (DType::F16, 90), (DType::Bf16, 90), (DType::F16, 80)] {
            for ranks in [Ranks::Single, Ranks::Local, Ranks::PeerMemory, Ranks::Nccl] {
                let mut setting = Setting::new(network, 32, dtype, capability, ranks);
                for (accumulates, computes_sums) in [(false, false), (true, false), (false, true)] {
                    (setting.accumulates, setting.computes_sums) = (accumulates, computes_sums);
                    for side_stream in [true, false] {
                        setting.emit_valid(Phase::Train(ONLY), side_stream);
                        setting.emit_valid(Phase::Evaluate, side_stream);
                    }
                    for (is_first, is_last) in [(true, false), (false, false), (false, true)] {
                        if accumulates {
                            setting.emit_valid(Phase::Train(MicroBatch { is_first, is_last, ..ONLY }), true);
                        }
                    }
                }
            }
        }
    }
}

/// A CifarNet has GELUs, an unfused bias, poolings before batch norms, and untrained weights, whose gradients are zero.
#[test]
fn the_commands_of_a_cifarnet_are_valid() {
    let network = cifarnet();
    check_commands(std::slice::from_ref(&network));
    let setting = Setting::new(&network, 32, DType::F16, 90, Ranks::Single);
    let commands = setting.emit_valid(Phase::Train(ONLY), true).commands;
    assert_eq!((count(&commands, "zero_gradient"), count(&commands, "row_sums")), (1, 1));
    assert_eq!((count(&commands, "gelu_forward"), count(&commands, "gelu_backward")), (7, 7));
    assert_eq!(setting.layout.filters().len(), 6);
}

fn cifarnet() -> Arc<Network> {
    let model = ModelSpec { arch: Arch::CifarNet, ..ModelSpec::default() };
    Arc::new(crate::net::build(&model, 32, 3, 10).unwrap())
}

#[test]
fn the_commands_of_a_bottleneck_network_are_valid() {
    check_commands(&[build(Arch::ResNet50, Stem::Cifar, 32, 10)]);
}

/// `tests/run` skips this test, except `tests/run full`.
mod full {
    use super::*;

    #[test]
    fn the_commands_of_every_other_network_are_valid() {
        let mut networks = crate::cuda::tests::operations();
        networks.extend(crate::fixtures::networks());
        networks.push(build(Arch::ResNet18, Stem::Imagenet, 224, 1000));
        networks.push(build(Arch::ResNeXt50_32x4d, Stem::Cifar, 32, 10));
        check_commands(&networks);
    }
}

#[test]
fn every_optimizer_s_update_is_valid() {
    use OptimizerKind::{AdamW, Lamb, Lars, Momentum, Muon, Nesterov};
    for (optimizer, kernel) in [
        (Momentum, "sgd_momentum"),
        (Nesterov, "sgd_nesterov"),
        (Lars, "sgd_lars"),
        (AdamW, "adamw"),
        (Lamb, "lamb"),
        (Muon, "muon_update"),
    ] {
        for network in [build(Arch::ResNet18, Stem::Cifar, 32, 10), cifarnet()] {
            for (dtype, accumulates, ranks) in [
                (DType::F32, false, Ranks::Single),
                (DType::F16, false, Ranks::Nccl),
                (DType::F16, true, Ranks::Single),
            ] {
                let setting = Setting::new(&network, 32, dtype, 90, ranks);
                let setting = Setting { optimizer, accumulates, ..setting };
                let commands = setting.emit_valid(Phase::Train(ONLY), true).commands;
                assert_eq!(count(&commands, kernel), 1, "{kernel}");
            }
        }
    }
}

/// The list without the command with index `number`.
fn without(commands: &[Command], number: usize) -> Vec<Command> {
    [&commands[..number], &commands[number + 1..]].concat()
}

/// The indices of the commands for which `predicate` is true, in order.
fn numbers(commands: &[Command], predicate: impl Fn(&Command) -> bool) -> Vec<usize> {
    (0..commands.len()).filter(|number| predicate(&commands[*number])).collect()
}

fn announces_update(command: &Command) -> bool {
    command.accesses().contains(&(UPDATING, Access::Write))
}

/// The offset of an operand in float32 values.
fn place(arg: &Arg) -> usize {
    match arg {
        Arg::In(at) | Arg::Out(at) | Arg::InOut(at) => at.offset / 4,
        other => panic!("{other:?}"),
    }
}

fn number(arg: &Arg) -> usize {
    match *arg {
        Arg::U32(number) => number as usize,
        Arg::U64(number) => number as usize,
        other => panic!("{other:?}"),
    }
}

fn count(commands: &[Command], name: &str) -> usize {
    commands.iter().filter(|c| matches!(c, Command::Kernel { kernel, .. } if kernel.name == name)).count()
}

/// Frozen batch norms need no exchange between ranks, their parameters and statistics are not written, and they have no gradients.
#[test]
fn frozen_batch_norms_are_only_applied() {
    let mut networks = crate::cuda::tests::operations();
    networks.extend(crate::fixtures::networks());
    networks.push(build(Arch::ResNet18, Stem::Imagenet, 224, 1000));
    networks.push(build(Arch::ResNet50, Stem::Imagenet, 224, 1000));
    for network in networks {
        let network = Arc::new(Network { frozen_norm: true, ..Network::clone(&network) });
        for (dtype, capability) in [(DType::F32, 90), (DType::F16, 90), (DType::Bf16, 80)] {
            for ranks in [Ranks::Single, Ranks::Local] {
                for accumulates in [false, true] {
                    let computes_sums = true;
                    let setting = Setting {
                        accumulates,
                        computes_sums,
                        ..Setting::new(&network, 32, dtype, capability, ranks)
                    };
                    let commands = setting.emit_valid(Phase::Train(ONLY), true).commands;
                    setting.emit_valid(Phase::Train(ONLY), false);
                    setting.emit_valid(Phase::Evaluate, true);
                    if accumulates {
                        setting.emit_valid(
                            Phase::Train(MicroBatch { is_last: false, is_full: false, ..ONLY }),
                            true,
                        );
                    }
                    check_frozen(&setting, &commands);
                }
            }
        }
    }
}

fn check_frozen(setting: &Setting, commands: &[Command]) {
    let (name, norms) = (&setting.plan.network.arch, setting.norms.len());
    assert_eq!(count(commands, "norm_to_scale_and_bias"), norms, "{name}");
    let kernels = |prefix: &str| {
        let starts =
            |c: &&Command| matches!(c, Command::Kernel { kernel, .. } if kernel.name.starts_with(prefix));
        commands.iter().filter(starts).count()
    };
    assert_eq!((kernels("norm_backward"), kernels("norm_backward_frozen")), (norms, norms), "{name}");
    assert_eq!(kernels("norm_statistics") + kernels("norm_finish"), 0, "{name}");
    for site in &setting.norms {
        assert!(site.dgamma.is_none() && site.dbeta.is_none(), "{name}");
        for operand in [site.gamma, site.beta, site.running_mean, site.running_var] {
            let written = commands.iter().flat_map(Command::accesses).any(|(other, access)| {
                access != Access::Read
                    && other.region == operand.region
                    && other.offset < operand.offset + operand.bytes
                    && operand.offset < other.offset + other.bytes
            });
            assert!(!written, "{name}: {operand:?}");
        }
    }
    let expected_calls = match setting.statistics {
        Some(_) => setting.layout.buckets.len() + 1,
        None => 0,
    };
    assert_eq!(collective_calls(commands).len(), expected_calls, "{name}");
}

/// A rank whose last batch is not full calls the same collectives and exchanges in the same order as ranks with a full batch.
#[test]
fn ranks_with_fewer_pictures_call_the_same_collectives() {
    for network in [build(Arch::ResNet50, Stem::Cifar, 64, 10), build(Arch::ResNet18, Stem::Imagenet, 64, 10)]
    {
        for ranks in [Ranks::Local, Ranks::PeerMemory, Ranks::Nccl] {
            let setting =
                Setting { computes_sums: true, ..Setting::new(&network, 256, DType::F16, 90, ranks) };
            let collectives = |is_full: bool| {
                let emitted = setting.emit_valid(Phase::Train(MicroBatch { is_full, ..ONLY }), true);
                collective_calls(&emitted.commands)
            };
            let all = collectives(true);
            assert_eq!(all, collectives(false), "{ranks:?}");
            // Each batch norm has an exchange in both directions. Gradients are reduced in buckets, and the gradients of vectors last.
            let norms = if ranks == Ranks::Local { 0 } else { 2 * setting.norms.len() };
            assert_eq!(all.len(), norms + setting.layout.buckets.len() + 1, "{ranks:?}");
        }
    }
}

/// Only the first batch norm after a convolution uses the sums that the convolution computes, because NCCL reduces them in place.
#[test]
fn two_batch_norms_of_one_convolution_do_not_share_its_sums() {
    let mut net = Network::new("two norms", 32, 3, 10);
    let x = net.conv("conv1", net.input(), 64, 3, 1);
    let (a, b) = (net.batch_norm("bn1", x), net.batch_norm("bn2", x));
    let x = net.add(a, b);
    let x = net.global_average_pool(x);
    net.linear("fc", x, 10);
    let network = Arc::new(net);
    for ranks in [Ranks::Single, Ranks::Nccl] {
        let setting = Setting { computes_sums: true, ..Setting::new(&network, 256, DType::F16, 90, ranks) };
        let commands = setting.emit_valid(Phase::Train(ONLY), true).commands;
        let with_sums =
            |c: &&Command| matches!(c, Command::Convolution { convolution, .. } if convolution.sums);
        assert_eq!(commands.iter().filter(with_sums).count(), 1);
        assert_eq!(count(&commands, "norm_statistics"), 1, "{ranks:?}");
    }
}

/// `worker/engine/tests/plans/resnet50-*.txt` list the fused operations, the commands and the memory of ResNet-50 at 224 pixels and a
/// batch of 256, on Hopper, for each number format. The plans for float16 and bfloat16 are equal. An evaluation in float32 is not
/// listed: it has the same commands as in float16, and twice the memory. After an intended change, rewrite these files with
/// `LOCKSTEP_WRITE_PLANS=1 cargo test -p lockstep-engine --lib the_plans_of_resnet50`, and review the difference.
#[test]
fn the_plans_of_resnet50_match_the_files() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        check_plan(dtype);
    }
}

/// Leaves out blocks of ResNet-50 whose commands equal those of the block before, except for numbers.
fn without_repeated_blocks(text: &str) -> String {
    // Each block (`layer1.0`) with its lines. Other operations have an empty name.
    let mut blocks = vec![("", String::new())];
    for line in text.split_inclusive('\n') {
        // The commands of an operation are indented.
        if !line.starts_with(' ') {
            let block = line.find("layer").map_or("", |at| &line[at..at + "layer1.0".len()]);
            if blocks.last().is_some_and(|(last, _)| *last != block) {
                blocks.push((block, String::new()));
            }
        }
        blocks.last_mut().unwrap().1 += line;
    }
    let without_numbers = |text: &str| text.split(|c: char| c.is_ascii_digit()).collect::<String>();
    blocks.dedup_by_key(|(_, lines)| without_numbers(lines));
    blocks.into_iter().map(|(_, lines)| lines).collect()
}

fn check_plan(dtype: DType) {
    let network = build(Arch::ResNet50, Stem::Imagenet, 224, 1000);
    let setting = Setting::new(&network, 256, dtype, 90, Ranks::Single);
    let format = if dtype == DType::F32 { "float32" } else { "float16" };
    let training = setting.emit_valid(Phase::Train(ONLY), true);
    let one_stream = setting.emit_valid(Phase::Train(ONLY), false);
    let evaluation = setting.emit_valid(Phase::Evaluate, true);
    let peaks = [&training, &one_stream, &evaluation].map(|emitted| emitted.arena_bytes);
    assert_eq!(Some(arena_bytes(&setting.facts(), true).unwrap()), peaks.into_iter().max());
    let [trains, one_stream, evaluates] = peaks.map(|bytes| bytes >> 20);
    let mut text = format!(
        "ResNet-50, pictures of 224x224, 1000 classes, a batch of 256, {format}, compute capability 9.0, 132 multiprocessors.\n\
         \n\
         The fused operations and, for each of them, its commands in order: allocations (size and offset), frees, and launches.\n\
         A launch is \"stream: kernel grid of block: reads -> writes; changes\"; a convolution by cuDNN has its shape instead of a\n\
         grid. tN is the tensor with index N. A batch norm's backward pass writes the gradient of its input over the input.\n\
         The memory that weight gradients read is freed when the main stream has waited for them. A block is left out if\n\
         its commands equal those of the block before, except for numbers.\n\
         \n\
         Memory: {trains} MiB to train, {one_stream} MiB without a side stream, {evaluates} MiB to evaluate.\n\
         \n\
         # A training step\n{}",
        without_repeated_blocks(&setting.text(&training)),
    );
    if dtype != DType::F32 {
        text += "\n# An evaluation\n";
        text += &without_repeated_blocks(&setting.text(&evaluation));
    }
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plans"));
    let path = folder.join(format!("resnet50-{format}.txt"));
    if std::env::var_os("LOCKSTEP_WRITE_PLANS").is_some() {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    let differs =
        text.lines().zip(expected.lines()).enumerate().find(|(_, (actual, expected))| actual != expected);
    if let Some((line, (actual, expected))) = differs {
        panic!(
            "{} has another plan, first in line {}:\n{expected}\nNow it is:\n{actual}",
            path.display(),
            line + 1
        );
    }
    assert_eq!(text.len(), expected.len(), "{} has another plan", path.display());
}

/// The error for a network that GPUs do not compute.
fn refused(network: impl Into<Arc<Network>>) -> String {
    StepPlan::new(network.into(), 8, DType::F32, capabilities(false)).unwrap_err().to_string()
}

#[test]
fn errors_for_unsupported_networks_name_the_layer() {
    let mut net = Network::new("headless", 8, 3, 8);
    let x = net.conv("conv1", net.input(), 8, 3, 1);
    net.global_average_pool(x);
    assert!(refused(net.clone()).contains("a network must end in a linear layer, which headless does not"));

    let mut net = Network::new("odd", 8, 3, 8);
    let x = net.conv("conv1", net.input(), 12, 3, 1);
    let x = net.global_average_pool(x);
    net.linear("fc", x, 8);
    assert!(refused(net).contains("a multiple of 8, but a tensor has 12"));

    let mut net = Network::new("flat", 8, 3, 8);
    let x = net.conv("conv1", net.input(), 8, 3, 1);
    net.linear("classifier", x, 8);
    assert!(refused(net).contains("the linear layer classifier must have one pixel"));

    let mut net = Network::new("early", 8, 3, 8);
    let x = net.max_pool(net.input(), 3, 2);
    let x = net.conv("conv1", x, 8, 3, 1);
    let x = net.global_average_pool(x);
    net.linear("fc", x, 8);
    assert!(refused(net).contains("but another operation of early reads them"));
}
