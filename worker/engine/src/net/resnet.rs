//! ResNets (He et al. 2015), with torchvision's structure and parameter names.
//!
//! ResNet-18 to 152 are torchvision's, the 1.5 variant: a bottleneck's stride is in its 3x3
//! convolution. ResNeXts (Xie et al. 2017) and wide ResNets (Zagoruyko and Komodakis 2016) are ResNet-50 and 101 with
//! other bottlenecks. The CIFAR family (section 4.2 of He et al.) has three stages of 16, 32 and 64
//! channels; parameters are named as in torchvision's ResNets, with a 1x1 convolution and batch norm as shortcut wherever the
//! shape changes.

use super::{Network, TensorId};
use lockstep_protocol::spec::{Arch, ModelSpec, Stem};

/// The convolutions of a residual block's branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    /// Two 3x3 convolutions.
    Basic,
    /// 1x1, 3x3, and 1x1 with four times the stage's channels. The 3x3 convolution has `groups`. The first two convolutions
    /// have `groups * width_per_group` output channels per 64 channels of the stage (torchvision's terms).
    Bottleneck { groups: usize, width_per_group: usize },
}

const fn bottleneck(groups: usize, width_per_group: usize) -> Block {
    Block::Bottleneck { groups, width_per_group }
}

/// Kind of block, and number of blocks of each stage.
fn stages(arch: Arch) -> (Block, &'static [usize]) {
    match arch {
        Arch::ResNet18 => (Block::Basic, &[2, 2, 2, 2]),
        Arch::ResNet34 => (Block::Basic, &[3, 4, 6, 3]),
        Arch::ResNet50 => (bottleneck(1, 64), &[3, 4, 6, 3]),
        Arch::ResNet101 => (bottleneck(1, 64), &[3, 4, 23, 3]),
        Arch::ResNet152 => (bottleneck(1, 64), &[3, 8, 36, 3]),
        Arch::ResNeXt50_32x4d => (bottleneck(32, 4), &[3, 4, 6, 3]),
        Arch::ResNeXt101_32x8d => (bottleneck(32, 8), &[3, 4, 23, 3]),
        Arch::ResNeXt101_64x4d => (bottleneck(64, 4), &[3, 4, 23, 3]),
        Arch::WideResNet50_2 => (bottleneck(1, 128), &[3, 4, 6, 3]),
        Arch::WideResNet101_2 => (bottleneck(1, 128), &[3, 4, 23, 3]),
        Arch::ResNet20 => (Block::Basic, &[3, 3, 3]),
        Arch::ResNet32 => (Block::Basic, &[5, 5, 5]),
        Arch::ResNet44 => (Block::Basic, &[7, 7, 7]),
        Arch::ResNet56 => (Block::Basic, &[9, 9, 9]),
        Arch::ResNet110 => (Block::Basic, &[18, 18, 18]),
        // Not a ResNet: `build` refuses it.
        Arch::CifarNet => (Block::Basic, &[1]),
    }
}

/// Builds the network that `model` names, for square inputs of `image_size` pixels and `channels` channels.
///
/// # Errors
/// The image is too small for the architecture. The error is a sentence.
pub fn build(
    model: &ModelSpec,
    image_size: usize,
    channels: usize,
    classes: usize,
) -> Result<Network, String> {
    if model.arch == Arch::CifarNet {
        return Err("cifarnet is not a ResNet".into());
    }
    let stem = model.stem_for(image_size);
    let smallest = (1..).find(|&size| halvings_fit(model.arch, stem, size)).unwrap_or(1);
    if !halvings_fit(model.arch, stem, image_size) {
        let stem = stem.as_str();
        return Err(format!(
            "an image size of {image_size} is too small for {} with the {stem} stem, whose last stage would \
             halve a single pixel; the smallest is {smallest}",
            model.arch.as_str()
        ));
    }

    let (block, blocks) = stages(model.arch);
    let width = if model.arch.is_cifar_family() { 16 } else { 64 };
    let mut net = Network::new(model.arch.as_str(), image_size, channels, classes);
    net.frozen_norm = model.freeze_norm;
    let (kernel, stride) = if stem == Stem::Imagenet { (7, 2) } else { (3, 1) };
    let mut x = net.conv("conv1", net.input(), width, kernel, stride);
    x = net.batch_norm("bn1", x);
    x = net.relu(x);
    if stem == Stem::Imagenet {
        x = net.max_pool(x, 3, 2);
    }
    for (stage, &count) in blocks.iter().enumerate() {
        for index in 0..count {
            let name = format!("layer{}.{index}", stage + 1);
            let stride = if stage > 0 && index == 0 { 2 } else { 1 };
            x = push_block(&mut net, &name, block, x, width << stage, stride);
        }
    }
    x = net.global_average_pool(x);
    net.linear("fc", x, classes);
    Ok(net)
}

/// Whether the input of every operation with stride 2 has more than one pixel.
fn halvings_fit(arch: Arch, stem: Stem, image_size: usize) -> bool {
    let in_stem = if stem == Stem::Imagenet { 2 } else { 0 };
    let halvings = in_stem + stages(arch).1.len() - 1;
    let mut side = image_size;
    for _ in 0..halvings {
        if side < 2 {
            return false;
        }
        side = side.div_ceil(2);
    }
    side > 0
}

/// Appends a block whose convolutions have the names `name.conv1` and so on. `width` is the stage's number of channels.
fn push_block(
    net: &mut Network,
    name: &str,
    block: Block,
    input: TensorId,
    width: usize,
    stride: usize,
) -> TensorId {
    // (kernel, stride, channels, groups) of each convolution of the branch.
    let (convs, out_channels) = match block {
        Block::Basic => (vec![(3, stride, width, 1), (3, 1, width, 1)], width),
        Block::Bottleneck { groups, width_per_group } => {
            let inner = width * width_per_group / 64 * groups;
            (vec![(1, 1, inner, 1), (3, stride, inner, groups), (1, 1, 4 * width, 1)], 4 * width)
        }
    };
    let mut x = input;
    for (i, &(kernel, stride, channels, groups)) in convs.iter().enumerate() {
        let window = (kernel, stride, kernel / 2);
        x = net.padded_conv(format!("{name}.conv{}", i + 1), x, channels, window, groups);
        x = net.batch_norm(format!("{name}.bn{}", i + 1), x);
        if i + 1 < convs.len() {
            x = net.relu(x);
        }
    }
    let mut shortcut = input;
    if stride != 1 || net.tensors[input].channels != out_channels {
        shortcut = net.conv(format!("{name}.downsample.0"), input, out_channels, 1, stride);
        shortcut = net.batch_norm(format!("{name}.downsample.1"), shortcut);
    }
    let sum = net.add(x, shortcut);
    net.relu(sum)
}

/// A network of a test, for pictures with three channels.
#[cfg(test)]
pub(crate) fn of(arch: Arch, image_size: usize, classes: usize) -> Network {
    build(&ModelSpec { arch, ..ModelSpec::default() }, image_size, 3, classes).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::Op;
    use std::collections::BTreeMap;

    fn model(arch: Arch, stem: Stem) -> ModelSpec {
        ModelSpec { arch, stem, ..ModelSpec::default() }
    }

    #[test]
    fn parameter_counts_are_the_published_ones() {
        // torchvision's model table, and table 6 of the paper (0.27 to 1.7 million parameters, plus
        // the projection shortcuts used here).
        for (arch, count) in [
            (Arch::ResNet18, 11_689_512),
            (Arch::ResNet34, 21_797_672),
            (Arch::ResNet50, 25_557_032),
            (Arch::ResNet101, 44_549_160),
            (Arch::ResNet152, 60_192_808),
            (Arch::ResNeXt50_32x4d, 25_028_904),
            (Arch::ResNeXt101_32x8d, 88_791_336),
            (Arch::ResNeXt101_64x4d, 83_455_272),
            (Arch::WideResNet50_2, 68_883_240),
            (Arch::WideResNet101_2, 126_886_696),
        ] {
            let net = build(&model(arch, Stem::Imagenet), 224, 3, 1000).unwrap();
            assert_eq!(net.parameter_count(), count, "{}", arch.as_str());
        }
        assert_eq!(build(&model(Arch::ResNet20, Stem::Auto), 32, 3, 10).unwrap().parameter_count(), 272_474);
    }

    #[test]
    fn groups_have_the_published_widths() {
        // Table 1 of Xie et al. 2017: 128, 256, 512 and 1024 channels in 32 groups.
        let net = build(&model(Arch::ResNeXt50_32x4d, Stem::Imagenet), 224, 3, 1000).unwrap();
        let shapes: BTreeMap<_, _> = net.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
        for (stage, width) in [(1, 128), (2, 256), (3, 512), (4, 1024)] {
            let shape = |name: &str| &shapes[&format!("layer{stage}.0.{name}.weight")];
            assert_eq!(*shape("conv2"), [width, width / 32, 3, 3]);
            assert_eq!(*shape("conv3"), [2 * width, width, 1, 1]);
        }
        let grouped = net.ops.iter().filter(|op| matches!(op, Op::Conv { groups: 32, kernel: 3, .. }));
        assert_eq!(grouped.count(), 16);
    }

    #[test]
    fn resizing_equals_building_for_that_size() {
        for arch in [Arch::ResNet20, Arch::ResNet18, Arch::ResNet50, Arch::ResNeXt50_32x4d] {
            for stem in [Stem::Cifar, Stem::Imagenet] {
                let at = |side: usize| build(&model(arch, stem), side, 3, 10).unwrap();
                assert!(at(24).resized(57) == at(57) && at(57).resized(24) == at(24), "{arch:?}, {stem:?}");
            }
        }
    }

    #[test]
    fn the_default_stem_depends_on_the_image_size() {
        assert_eq!(model(Arch::ResNet50, Stem::Auto).stem_for(95), Stem::Cifar);
        assert_eq!(model(Arch::ResNet50, Stem::Auto).stem_for(96), Stem::Imagenet);
        assert_eq!(model(Arch::ResNet56, Stem::Auto).stem_for(224), Stem::Cifar);
        let at_224 = build(&model(Arch::ResNet50, Stem::Auto), 224, 3, 1000).unwrap();
        let last_map = at_224.tensors[at_224.logits() - 2];
        assert_eq!((last_map.height, last_map.channels), (7, 2048));
    }

    #[test]
    fn too_small_images_are_refused_with_the_smallest_size() {
        let error = build(&model(Arch::ResNet50, Stem::Imagenet), 16, 3, 10).unwrap_err();
        assert!(error.contains("the smallest is 17"), "{error}");
        assert!(build(&model(Arch::ResNet50, Stem::Imagenet), 17, 3, 10).is_ok());
        assert!(build(&model(Arch::ResNet20, Stem::Auto), 0, 3, 10).is_err());
        assert!(build(&model(Arch::ResNet20, Stem::Auto), 28, 1, 10).is_ok());
    }
}
