//! Initial weights from a seed, identical on every engine and machine.
//!
//! A value depends on (seed, parameter name, index) alone: SplitMix64's output function over a
//! counter, whose key is hashed from seed and name. Logarithm and cosine come from the `libm`
//! crate, because a system's own differ in the last bit.

use super::{Network, Parameter, Role};
use crate::tensors::{HostTensor, NamedTensors};
use rayon::prelude::*;

/// Values a task makes; even, because normals come in pairs.
const CHUNK: usize = 1 << 14;

/// He initialisation (fan-out, normal; of a grouped convolution fan-out counts the outputs of all groups, as in
/// torchvision) for convolutions, ones and zeros for batch norm, PyTorch's
/// uniform for the linear layer. With `zero_init_residual` every residual block starts as the
/// identity: gamma of the last batch norm of its branch is 0 (Goyal et al. 2017).
pub fn initial_parameters(network: &Network, zero_init_residual: bool, seed: u64) -> NamedTensors {
    let linear_inputs = |name: &str| {
        // A bias has its weight's fan-in: `fc.bias` -> `fc.weight`.
        let weight = name.replace(".bias", ".weight");
        network.parameters().into_iter().find(|p| p.name == weight).map_or(1, |p| p.shape[1])
    };
    network
        .parameters()
        .into_iter()
        .map(|p| {
            let key = key(seed, &p.name);
            let values = match p.role {
                Role::ConvWeight => {
                    let fan_out = p.shape[0] * p.shape[2] * p.shape[3];
                    normal(key, p.len(), (2.0 / fan_out as f64).sqrt())
                }
                Role::Gamma { ends_branch } if ends_branch && zero_init_residual => vec![0.0; p.len()],
                Role::Gamma { .. } | Role::RunningVar => vec![1.0; p.len()],
                Role::Beta | Role::RunningMean => vec![0.0; p.len()],
                Role::LinearWeight | Role::LinearBias => {
                    uniform(key, p.len(), 1.0 / (linear_inputs(&p.name) as f64).sqrt())
                }
            };
            let Parameter { name, shape, .. } = p;
            (name, HostTensor { shape, values })
        })
        .collect()
}

/// SplitMix64's output function (Steele, Lea, Flood 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// FNV-1a of the name, mixed with the seed.
fn key(seed: u64, name: &str) -> u64 {
    let hash = name
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3));
    mix(mix(seed.wrapping_add(0x9E37_79B9_7F4A_7C15)) ^ hash)
}

/// Value `index` of a stream, strictly between 0 and 1.
fn unit(key: u64, index: u64) -> f64 {
    let bits = mix(key.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15))) >> 11;
    (bits as f64 + 0.5) / (1u64 << 53) as f64
}

fn uniform(key: u64, len: usize, bound: f64) -> Vec<f32> {
    (0..len as u64).map(|i| ((2.0 * unit(key, i) - 1.0) * bound) as f32).collect()
}

/// Box and Muller's pairs.
fn normal(key: u64, len: usize, std: f64) -> Vec<f32> {
    let mut values = vec![0.0f32; len];
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
        for (pair, out) in values.chunks_mut(2).enumerate() {
            let first = (chunk * CHUNK + 2 * pair) as u64;
            let radius = std * (-2.0 * libm::log(unit(key, first))).sqrt();
            let (sin, cos) = libm::sincos(std::f64::consts::TAU * unit(key, first + 1));
            out[0] = (radius * cos) as f32;
            if let Some(second) = out.get_mut(1) {
                *second = (radius * sin) as f32;
            }
        }
    });
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::resnet;
    use lockstep_protocol::spec::{Arch, ModelSpec};

    fn network() -> Network {
        resnet::build(&ModelSpec { arch: Arch::ResNet20, ..ModelSpec::default() }, 32, 3, 10).unwrap()
    }

    #[test]
    fn values_have_the_published_distributions() {
        let all = initial_parameters(&network(), false, 7);
        let w = &all["layer3.1.conv1.weight"].values;
        let n = w.len() as f64;
        let mean = w.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let std = (w.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n).sqrt();
        let expected = (2.0 / (64.0 * 9.0f64)).sqrt();
        assert!(mean.abs() < 4.0 * expected / n.sqrt(), "{mean}");
        assert!((std / expected - 1.0).abs() < 0.02, "{std} instead of {expected}");
        let fc = &all["fc.weight"].values;
        assert!(fc.iter().all(|v| v.abs() <= 0.125) && fc.iter().any(|v| v.abs() > 0.12));
        assert!(all["layer1.0.bn2.weight"].values.iter().all(|&v| v == 1.0));
    }

    /// `kaiming_normal_(mode="fan_out")` counts all outputs of the weight, whatever the groups.
    #[test]
    fn grouped_convolutions_begin_as_torchvision_s() {
        let model = ModelSpec { arch: Arch::ResNeXt50_32x4d, ..ModelSpec::default() };
        let all = initial_parameters(&resnet::build(&model, 32, 3, 10).unwrap(), true, 7);
        for (name, outputs) in [("layer1.0.conv2.weight", 128), ("layer4.2.conv2.weight", 1024)] {
            let w = &all[name].values;
            let std = (w.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / w.len() as f64).sqrt();
            let expected = (2.0 / f64::from(outputs * 9)).sqrt();
            assert!((std / expected - 1.0).abs() < 0.05, "{name}: {std} instead of {expected}");
        }
        let zero: Vec<_> =
            all.iter().filter(|(n, t)| n.ends_with("weight") && t.values[0] == 0.0).map(|(n, _)| n).collect();
        assert_eq!(zero.len(), 16);
        assert!(zero.iter().all(|n| n.ends_with("bn3.weight")), "{zero:?}");
    }

    #[test]
    fn zero_init_residual_zeroes_only_the_last_gamma_of_each_branch() {
        let all = initial_parameters(&network(), true, 7);
        let zero: Vec<_> =
            all.iter().filter(|(n, t)| n.ends_with("weight") && t.values[0] == 0.0).map(|(n, _)| n).collect();
        assert_eq!(zero.len(), 9);
        assert!(zero.iter().all(|n| n.ends_with("bn2.weight")), "{zero:?}");
    }

    #[test]
    fn the_same_on_every_machine() {
        // Pinned: a change here changes every run of every user.
        let all = initial_parameters(&network(), false, 0);
        let first: Vec<u32> = all["conv1.weight"].values[..3].iter().map(|v| v.to_bits()).collect();
        assert_eq!(first, PINNED, "{first:?}");
        assert_ne!(all, initial_parameters(&network(), false, 1));
    }

    const PINNED: [u32; 3] = [3_182_163_078, 1_034_881_237, 1_025_365_299];
}
