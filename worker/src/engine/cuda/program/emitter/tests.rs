//! Emission without a GPU: what lies where, for how long, and that nobody reads what is not there.

use super::*;
use crate::net::resnet;
use lockstep_protocol::spec::{Arch, ModelSpec, Stem};
use std::path::PathBuf;

const ONLY: MicroBatch = MicroBatch { first: true, last: true, whole: true };

fn build(arch: Arch, stem: Stem, side: usize, classes: usize) -> Arc<Network> {
    Arc::new(resnet::build(&ModelSpec { arch, stem, ..ModelSpec::default() }, side, 3, classes).unwrap())
}

fn plan(network: &Arc<Network>, batch: usize, dtype: DType, capability: u32) -> StepPlan {
    let capabilities = capabilities(Ops::multiplies_matrices(capability, dtype));
    StepPlan::new(network.clone(), batch, dtype, capabilities).unwrap()
}

/// The trace of a pass, and how much memory it takes.
fn trace(plan: &StepPlan, phase: Phase, side_stream: bool) -> (String, usize) {
    let mut emitter = GraphEmitter::new(plan, None, side_stream);
    emitter.trace = Some(Trace::default());
    emitter.network(phase, Input::Staged { at: 0, form: Form::Bytes }).unwrap();
    for (_, read) in std::mem::take(&mut emitter.pending) {
        read.into_iter().for_each(|allocation| emitter.free(allocation));
    }
    assert!(emitter.shared.is_empty(), "{}: freed less often than it is owned", plan.network.arch);
    let trace = emitter.trace.take().unwrap();
    let live: Vec<Content> = trace.live().collect();
    match phase {
        Phase::Train(_) => assert_eq!(live, [], "{}", plan.network.arch),
        Phase::Evaluate => {
            assert_eq!(live, [Content::Activation(plan.network.logits())], "{}", plan.network.arch);
        }
    }
    assert!(!trace.text.contains("!!"), "{}:\n{}", plan.network.arch, trace.text);
    (trace.text, emitter.arena.peak)
}

/// In every format, on GPUs with and without matrix kernels: allocations do not overlap, everything that is read has been
/// made, and everything is freed once.
#[test]
fn the_memory_of_every_network_is_sound() {
    let mut networks = crate::engine::cuda::tests::operations();
    networks.extend(crate::engine::unfused::networks());
    networks.push(build(Arch::ResNet18, Stem::Imagenet, 224, 1000));
    networks.push(build(Arch::ResNeXt50_32x4d, Stem::Cifar, 32, 10));
    for network in &networks {
        for (dtype, capability) in [(DType::F32, 90), (DType::F16, 90), (DType::Bf16, 90), (DType::F16, 80)] {
            let plan = plan(network, 32, dtype, capability);
            for (phase, side_stream) in
                [(Phase::Train(ONLY), true), (Phase::Train(ONLY), false), (Phase::Evaluate, true)]
            {
                trace(&plan, phase, side_stream);
            }
        }
    }
}

/// `worker/tests/plans/resnet50.txt` has what is fused, the order of operations and the memory of ResNet-50 at 224 pixels, a
/// batch of 256 and float16, on Hopper. After a change that is meant, write it anew with
/// `LOCKSTEP_WRITE_PLANS=1 cargo test -p lockstep-worker --lib the_plan_of_resnet50`, and read the difference.
#[test]
fn the_plan_of_resnet50_is_the_one_on_disk() {
    let network = build(Arch::ResNet50, Stem::Imagenet, 224, 1000);
    let plan = plan(&network, 256, DType::F16, 90);
    let (training, trains) = trace(&plan, Phase::Train(ONLY), true);
    let (_, alone) = trace(&plan, Phase::Train(ONLY), false);
    let (evaluation, evaluates) = trace(&plan, Phase::Evaluate, true);
    assert_eq!(arena_bytes(&plan, true).unwrap(), trains.max(alone).max(evaluates));
    let text = format!(
        "ResNet-50, pictures of 224x224, 1000 classes, a batch of 256, float16, compute capability 9.0.\n\
         \n\
         What is fused, the order of operations, and the memory of activations and gradients: each operation with what it\n\
         allocates (how much, at which offset) and frees. tN is tensor N of the network. A batch norm's backward pass leaves\n\
         the gradient of its input where that was. \"wait\": the main stream waits for a weight gradient of the side stream,\n\
         to use again what that has read. What weight gradients read is freed then, or at the end.\n\
         \n\
         Memory: {} MiB to train, {} MiB without a side stream, {} MiB to evaluate.\n\
         \n\
         # A training step\n{training}\n# An evaluation\n{evaluation}",
        trains >> 20,
        alone >> 20,
        evaluates >> 20,
    );
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plans/resnet50.txt"));
    if std::env::var_os("LOCKSTEP_WRITE_PLANS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let wanted = std::fs::read_to_string(&path).unwrap();
    let differs = text.lines().zip(wanted.lines()).enumerate().find(|(_, (ours, theirs))| ours != theirs);
    if let Some((line, (ours, theirs))) = differs {
        panic!(
            "{} has another plan, first in line {}:\n{theirs}\nNow it is:\n{ours}",
            path.display(),
            line + 1
        );
    }
    assert_eq!(text.len(), wanted.len(), "{} has another plan", path.display());
}

#[test]
fn networks_that_it_does_not_run_are_refused_with_the_layer() {
    let refused = |network: Network| {
        let plan = StepPlan::new(Arc::new(network), 8, DType::F32, capabilities(false));
        plan.unwrap_err().to_string()
    };
    let mut net = Network::new("headless", 8, 3, 8);
    let x = net.conv("conv1", net.input(), 8, 3, 1);
    net.global_average_pool(x);
    assert!(refused(net.clone()).contains("headless, which does not end in a linear layer"));

    let mut net = Network::new("odd", 8, 3, 8);
    let x = net.conv("conv1", net.input(), 12, 3, 1);
    let x = net.global_average_pool(x);
    net.linear("fc", x, 8);
    assert!(refused(net).contains("12 channels, which is not a multiple of 8"));

    let mut net = Network::new("flat", 8, 3, 8);
    let x = net.conv("conv1", net.input(), 8, 3, 1);
    net.linear("classifier", x, 8);
    assert!(refused(net).contains("the linear layer classifier over more than one pixel"));

    let mut net = Network::new("early", 8, 3, 8);
    let x = net.max_pool(net.input(), 3, 2);
    let x = net.conv("conv1", x, 8, 3, 1);
    let x = net.global_average_pool(x);
    net.linear("fc", x, 8);
    assert!(refused(net).contains("early, in which something else than a convolution reads the pictures"));
}
