//! ResNets (He et al. 2015), with torchvision's structure and parameter names.
//!
//! ResNet-18 to 152 are torchvision's, the 1.5 variant: a bottleneck's stride is in its 3x3
//! convolution. The CIFAR family (section 4.2 of the paper) has three stages of 16, 32 and 64
//! channels under the same names, with a 1x1 convolution and batch norm as shortcut wherever the
//! shape changes.

use super::{Network, TensorId};
use lockstep_protocol::spec::{Arch, ModelSpec, Stem};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    /// Two 3x3 convolutions.
    Basic,
    /// 1x1, 3x3, 1x1 with four times the channels.
    Bottleneck,
}

/// (kind of block, blocks of each stage).
fn stages(arch: Arch) -> (Block, &'static [usize]) {
    match arch {
        Arch::ResNet18 => (Block::Basic, &[2, 2, 2, 2]),
        Arch::ResNet34 => (Block::Basic, &[3, 4, 6, 3]),
        Arch::ResNet50 => (Block::Bottleneck, &[3, 4, 6, 3]),
        Arch::ResNet101 => (Block::Bottleneck, &[3, 4, 23, 3]),
        Arch::ResNet152 => (Block::Bottleneck, &[3, 8, 36, 3]),
        Arch::ResNet20 => (Block::Basic, &[3, 3, 3]),
        Arch::ResNet32 => (Block::Basic, &[5, 5, 5]),
        Arch::ResNet44 => (Block::Basic, &[7, 7, 7]),
        Arch::ResNet56 => (Block::Basic, &[9, 9, 9]),
        Arch::ResNet110 => (Block::Basic, &[18, 18, 18]),
    }
}

/// The network that `model` names for square inputs of `image_size` pixels and `channels` channels.
///
/// # Errors
/// A sentence when the image is too small for the architecture, or there is nothing to classify.
pub fn build(
    model: &ModelSpec,
    image_size: usize,
    channels: usize,
    classes: usize,
) -> Result<Network, String> {
    if channels == 0 || classes == 0 {
        return Err(format!(
            "a network needs at least one input channel and one class, not {channels} and {classes}"
        ));
    }
    let stem = model.stem_for(image_size);
    let smallest = (1..).find(|&size| halvings_fit(model.arch, stem, size)).unwrap_or(1);
    if !halvings_fit(model.arch, stem, image_size) {
        let stem = stem.name();
        return Err(format!(
            "an image size of {image_size} is too small for {} with the {stem} stem, whose last stage would \
             halve a single pixel; the smallest is {smallest}",
            model.arch.name()
        ));
    }

    let (block, blocks) = stages(model.arch);
    let width = if model.arch.is_cifar_family() { 16 } else { 64 };
    let mut net = Network::new(model.arch.name(), image_size, channels, classes);
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
            x = residual(&mut net, &name, block, x, width << stage, stride);
        }
    }
    x = net.global_average_pool(x);
    net.linear("fc", x, classes);
    Ok(net)
}

/// Whether no operation of stride 2 meets a single pixel.
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

fn residual(
    net: &mut Network,
    name: &str,
    block: Block,
    input: TensorId,
    width: usize,
    stride: usize,
) -> TensorId {
    let out_channels = if block == Block::Bottleneck { 4 * width } else { width };
    // (kernel, stride, channels) of each convolution of the branch.
    let convs: &[(usize, usize, usize)] = match block {
        Block::Basic => &[(3, stride, width), (3, 1, width)],
        Block::Bottleneck => &[(1, 1, width), (3, stride, width), (1, 1, out_channels)],
    };
    let mut x = input;
    for (i, &(kernel, stride, channels)) in convs.iter().enumerate() {
        x = net.conv(format!("{name}.conv{}", i + 1), x, channels, kernel, stride);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn model(arch: Arch, stem: Stem) -> ModelSpec {
        ModelSpec { arch, stem, ..ModelSpec::default() }
    }

    #[test]
    fn the_published_parameter_counts() {
        // torchvision's model table, and table 6 of the paper (0.27 to 1.7 million, plus the
        // projection shortcuts used here).
        for (arch, count) in [
            (Arch::ResNet18, 11_689_512),
            (Arch::ResNet34, 21_797_672),
            (Arch::ResNet50, 25_557_032),
            (Arch::ResNet101, 44_549_160),
            (Arch::ResNet152, 60_192_808),
        ] {
            let net = build(&model(arch, Stem::Imagenet), 224, 3, 1000).unwrap();
            assert_eq!(net.parameter_count(), count, "{}", arch.name());
        }
        assert_eq!(build(&model(Arch::ResNet20, Stem::Auto), 32, 3, 10).unwrap().parameter_count(), 272_474);
    }

    #[test]
    fn the_stem_follows_the_image() {
        assert_eq!(model(Arch::ResNet50, Stem::Auto).stem_for(95), Stem::Cifar);
        assert_eq!(model(Arch::ResNet50, Stem::Auto).stem_for(96), Stem::Imagenet);
        assert_eq!(model(Arch::ResNet56, Stem::Auto).stem_for(224), Stem::Cifar);
        let at_224 = build(&model(Arch::ResNet50, Stem::Auto), 224, 3, 1000).unwrap();
        let last_map = at_224.tensors[at_224.logits() - 2];
        assert_eq!((last_map.height, last_map.channels), (7, 2048));
    }

    #[test]
    fn images_too_small_are_refused_with_the_smallest_that_fits() {
        let error = build(&model(Arch::ResNet50, Stem::Imagenet), 16, 3, 10).unwrap_err();
        assert!(error.contains("the smallest is 17"), "{error}");
        assert!(build(&model(Arch::ResNet50, Stem::Imagenet), 17, 3, 10).is_ok());
        assert!(build(&model(Arch::ResNet20, Stem::Auto), 0, 3, 10).is_err());
        assert!(build(&model(Arch::ResNet20, Stem::Auto), 28, 1, 10).is_ok());
    }
}
