//! The network of Jordan 2024 (arXiv 2404.00498) for CIFAR-10 in seconds.
//!
//! The first convolution, of 2x2 pixels, whitens patches ([`super::whitening`]); only its bias is trained. Three groups of 64, 256
//! and 256 channels follow. Each has two 3x3 convolutions with batch norm (without scale) and GELU, and a 2x2 max pooling after the
//! first convolution. A max pooling over all remaining pixels and a linear layer give the logits. The first filters of a 3x3
//! convolution, one per input channel, begin as the identity (dirac initialisation).
//!
//! Differences: the paper divides the logits by the number of features, which here is part of the initial weights of the linear
//! layer. The linear layer has a bias, which begins at 0. Batch norm's epsilon is 1e-5, as in all networks here.

use super::{
    Network, Parameter, Role,
    init::Draw,
    whitening::{KERNEL, WHITENED},
};
use lockstep_kernels::{batch_norm::MOMENTUM, draws::uniform};
use lockstep_protocol::spec::{Arch, ModelSpec};
use std::ops::RangeInclusive;

/// Channels of the three groups.
const WIDTHS: [usize; 3] = [64, 256, 256];
/// Sizes of pictures with which 1 to 15 rows remain for the last pooling.
const SIDES: RangeInclusive<usize> = 9..=128;

/// See [`super::build`].
pub(super) fn build(
    model: &ModelSpec,
    image_size: usize,
    channels: usize,
    classes: usize,
) -> Result<Network, String> {
    if !SIDES.contains(&image_size) {
        return Err(format!(
            "an image size of {image_size} does not fit cifarnet, which is for pictures of about 32 pixels: give {} to {}",
            SIDES.start(),
            SIDES.end()
        ));
    }
    let mut net = Network::new(Arch::CifarNet.as_str(), image_size, channels, classes);
    net.frozen_norm = model.freeze_norm;
    let mut x = net.padded_conv("whiten", net.input(), 2 * channels * KERNEL * KERNEL, (KERNEL, 1, 0), 1);
    x = net.gelu(Some("whiten"), x);
    let mut fixed = vec![WHITENED.to_owned()];
    for (number, width) in (1..).zip(WIDTHS) {
        x = net.conv(format!("group{number}.conv1"), x, width, 3, 1);
        x = net.padded_max_pool(x, 2, 2, 0);
        x = net.batch_norm(format!("group{number}.norm1"), x);
        x = net.gelu(None, x);
        x = net.conv(format!("group{number}.conv2"), x, width, 3, 1);
        x = net.batch_norm(format!("group{number}.norm2"), x);
        x = net.gelu(None, x);
        fixed.extend(["norm1", "norm2"].map(|norm| format!("group{number}.{norm}.weight")));
    }
    let side = net.tensors[x].height;
    x = net.padded_max_pool(x, side, side, 0);
    net.linear("head", x, classes);
    net.fixed = fixed;
    Ok(net)
}

impl Network {
    /// Share of a batch in the running statistics of batch norms (PyTorch's `momentum`).
    pub(crate) fn running_momentum(&self) -> f32 {
        // A run has 200 steps, so the last batches count more than in other networks.
        if self.arch == Arch::CifarNet.as_str() { 0.4 } else { MOMENTUM }
    }
}

/// Initial values of a weight or bias. `None` if they are the same as in other networks.
pub(super) fn initial(parameter: &Parameter, key: u64) -> Option<Draw> {
    let len = parameter.len();
    match (parameter.role, &parameter.shape[..]) {
        (Role::ConvWeight, &[_, inputs, kernel, _]) => {
            // The identity in the first filters, PyTorch's default in the others.
            let filter = inputs * kernel * kernel;
            let bound = 1.0 / (filter as f64).sqrt();
            if parameter.name == WHITENED {
                return Some(Draw::Uniform(key, bound));
            }
            let mut values = vec![0.0; len];
            uniform(key, 0, &mut values, bound);
            for (output, values) in values.chunks_exact_mut(filter).enumerate().take(inputs) {
                values.fill(0.0);
                values[output * kernel * kernel + kernel * kernel / 2] = 1.0;
            }
            Some(Draw::Given(values))
        }
        // As if the weights had a standard deviation of 1 and the logits were divided by the number of features.
        (Role::LinearWeight, &[_, inputs]) => Some(Draw::Uniform(key, 3f64.sqrt() / inputs as f64)),
        (Role::LinearBias, _) => Some(Draw::Constant(0.0)),
        // PyTorch's default for a convolution's bias, 1 / sqrt(values of a patch). There are two biases for each value.
        (Role::Beta, _) if parameter.name == "whiten.bias" => {
            Some(Draw::Uniform(key, 1.0 / (len as f64 / 2.0).sqrt()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::init::initial_parameters;

    fn network(side: usize, channels: usize) -> Result<Network, String> {
        build(&ModelSpec { arch: Arch::CifarNet, ..ModelSpec::default() }, side, channels, 10)
    }

    #[test]
    fn shapes_and_parameter_counts_match_the_paper() {
        let net = network(32, 3).unwrap();
        let sides: Vec<usize> = net.tensors.iter().map(|tensor| tensor.height).collect();
        assert_eq!(&sides[..4], [32, 31, 31, 31]);
        assert_eq!(sides[net.logits() - 2..], [3, 1, 1]);
        let filters = 24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256;
        let trained: usize = net.parameters().iter().filter(|p| net.trains(p)).map(Parameter::len).sum();
        assert_eq!(trained, 24 + 9 * filters + 2 * (64 + 256 + 256) + 2560 + 10);
        assert!(
            network(8, 3).is_err()
                && network(129, 3).is_err()
                && network(9, 1).is_ok()
                && network(128, 3).is_ok()
        );
    }

    #[test]
    fn initial_convolutions_are_the_identity_and_logits_are_small() {
        let parameters = initial_parameters(&network(32, 3).unwrap(), false, 3);
        let filters = &parameters["group2.conv1.weight"].values;
        for (output, filter) in filters.chunks_exact(64 * 9).enumerate() {
            let ones: Vec<usize> = (0..filter.len()).filter(|&at| filter[at] == 1.0).collect();
            if output < 64 {
                assert_eq!((ones, filter.iter().sum::<f32>()), (vec![output * 9 + 4], 1.0));
            } else {
                assert!(ones.is_empty() && filter.iter().any(|v| *v != 0.0));
            }
        }
        let head = &parameters["head.weight"].values;
        let std = (head.iter().map(|v| v * v).sum::<f32>() / head.len() as f32).sqrt();
        assert!((std * 256.0 - 1.0).abs() < 0.05, "{std}");
        assert!(parameters["head.bias"].values.iter().all(|v| *v == 0.0));
    }
}
