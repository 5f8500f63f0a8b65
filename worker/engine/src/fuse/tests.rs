use super::*;
use crate::net::resnet;
use lockstep_protocol::spec::{Arch, ModelSpec, Stem};

const ALL: Capabilities = Capabilities {
    norm_add_relu: true,
    shortcut_norm: true,
    norm_max_pool: true,
    norm_average_pool: true,
    one_sum_buffer: true,
    wgmma: true,
};

fn build(arch: Arch, stem: Stem, side: usize) -> Network {
    resnet::build(&ModelSpec { arch, stem, ..ModelSpec::default() }, side, 3, 10).unwrap()
}

fn count(ops: &[FusedOp], predicate: impl Fn(&FusedOp) -> bool) -> usize {
    ops.iter().filter(|op| predicate(op)).count()
}

#[test]
fn without_capabilities_nothing_is_fused() {
    let net = build(Arch::ResNet50, Stem::Imagenet, 64);
    let ops = fuse(&net, &Capabilities::default());
    let outputs: Vec<_> = ops.iter().map(FusedOp::output).collect();
    assert_eq!(outputs, net.ops.iter().map(Op::output).collect::<Vec<_>>());
    let reads: Vec<_> = ops.iter().map(FusedOp::reads).collect();
    assert_eq!(reads, net.ops.iter().map(Op::inputs).collect::<Vec<_>>());
    // The text of an operation lists what is fused with it after a semicolon.
    assert!(ops.iter().all(|op| !op.to_string().contains(';')));
}

#[test]
fn a_residual_network_is_fused_to_convolutions_and_norms() {
    let net = build(Arch::ResNet20, Stem::Cifar, 32);
    let ops = fuse(&net, &Capabilities { norm_add_relu: true, ..Capabilities::default() });
    let norms = |with_shortcut, with_relu| {
        count(&ops, |op| {
            matches!(op, FusedOp::Norm(norm)
                if norm.shortcut.is_some() == with_shortcut && norm.relu == with_relu)
        })
    };
    // Batch norms of the stem and inside blocks, at the ends of blocks, and of the two projections.
    assert_eq!((norms(false, true), norms(true, true), norms(false, false)), (10, 9, 2));
    assert_eq!(ops.len(), 21 + 21 + 2);
}

/// For either order of a block's operations, and for tensors with several readers, every tensor that is read is computed.
#[test]
fn every_tensor_is_written_before_it_is_read() {
    let mut nets = vec![
        build(Arch::ResNet50, Stem::Imagenet, 64),
        build(Arch::ResNet18, Stem::Imagenet, 64),
        build(Arch::ResNeXt50_32x4d, Stem::Cifar, 32),
    ];
    // A batch norm's output is added twice; a ReLU's output is pooled and read by a convolution.
    let mut net = Network::new("odd", 32, 3, 10);
    let mut x = net.conv("conv1", net.input(), 64, 3, 1);
    x = net.batch_norm("bn1", x);
    let sum = net.add(x, x);
    let y = net.relu(sum);
    let pooled = net.max_pool(y, 3, 2);
    let z = net.conv("conv2", y, 64, 3, 2);
    let z = net.batch_norm("bn2", z);
    let z = net.add(z, pooled);
    let z = net.global_average_pool(z);
    net.linear("fc", z, 10);
    nets.push(net);
    for net in nets {
        for bits in 0..64u32 {
            let has = |bit: u32| bits >> bit & 1 == 1;
            let capabilities = Capabilities {
                norm_add_relu: has(0),
                shortcut_norm: has(1),
                norm_max_pool: has(2),
                norm_average_pool: has(3),
                one_sum_buffer: has(4),
                wgmma: has(5),
            };
            let ops = fuse(&net, &capabilities);
            let mut computed = vec![net.input()];
            for op in &ops {
                for tensor in op.reads() {
                    assert!(computed.contains(&tensor), "{}: {op} with {capabilities:?}", net.arch);
                }
                if !matches!(op, FusedOp::Norm(Norm { forward: NormForward::InShortcut, .. })) {
                    computed.push(op.output());
                }
            }
            assert!(computed.contains(&net.logits()), "{} with {capabilities:?}", net.arch);
        }
    }
}

#[test]
fn fusion_across_convolutions_requires_matching_shapes() {
    let ops = fuse(&build(Arch::ResNet50, Stem::Imagenet, 224), &ALL);
    // The expanding and reducing convolutions of the first stage.
    let forward = |is: fn(&ConvForward) -> bool| {
        count(&ops, |op| matches!(op, FusedOp::Conv(conv) if is(&conv.forward)))
    };
    assert_eq!(forward(|f| matches!(f, ConvForward::WithNorms { norm_before: Some(_) })), 3);
    assert_eq!(forward(|f| matches!(f, ConvForward::WithNorms { norm_before: None })), 1);
    assert_eq!(forward(|f| matches!(f, ConvForward::WithBlockEnd { .. })), 2);
    let dgrads = |ops: &[FusedOp]| {
        count(ops, |op| matches!(op, FusedOp::Conv(conv) if conv.backward == ConvBackward::DgradInNorm))
    };
    // Of the first convolutions of blocks: 1 and 2 of the first stage (64 outputs), 1 to 3 of the second (128), 1 to 5 of the
    // third (256), and the first blocks of stages 2 and 3, whose projections have a stride.
    assert_eq!(dgrads(&ops), 2 + 4 + 6);
    // ResNeXt's convolutions are twice as wide.
    let ops = fuse(&build(Arch::ResNeXt50_32x4d, Stem::Imagenet, 224), &ALL);
    assert_eq!(
        count(&ops, |op| matches!(op, FusedOp::Conv(conv) if conv.name == "layer1.0.conv3"
        && conv.forward == (ConvForward::Plain { early_statistics: true }))),
        1
    );
    let ops = fuse(&build(Arch::ResNet18, Stem::Imagenet, 224), &ALL);
    assert_eq!(dgrads(&ops), 0);
}
