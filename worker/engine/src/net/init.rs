//! Initial weights from a seed, identical on every engine and machine.
//!
//! A value depends only on (seed, parameter name, index).

use super::{Network, Parameter, Role, cifarnet};
use lockstep_host::tensors::{HostTensor, NamedTensors, TensorSource};
use lockstep_kernels::draws::{key, normal, uniform};
use lockstep_protocol::spec::Arch;
use std::collections::BTreeMap;

/// The initial values of one parameter.
pub(super) enum Draw {
    Constant(f32),
    /// Uniform from `-bound` to `bound`: (key of the random stream, bound).
    Uniform(u64, f64),
    /// Normal with mean 0: (key of the random stream, standard deviation).
    Normal(u64, f64),
    Given(Vec<f32>),
}

impl Draw {
    /// Fills `to` with the values from index `from` on.
    pub(super) fn fill(&self, from: usize, to: &mut [f32]) {
        match self {
            Self::Constant(value) => to.fill(*value),
            Self::Uniform(key, bound) => uniform(*key, from, to, *bound),
            Self::Normal(key, std) => normal(*key, from, to, *std),
            Self::Given(values) => to.copy_from_slice(&values[from..from + to.len()]),
        }
    }
}

/// The initial parameters of a network. A value is drawn when an engine reads it, so a rank of a very wide network draws only the values
/// that it keeps, and needs no memory for other values.
pub struct InitialParameters(BTreeMap<String, (Vec<usize>, Draw)>);

impl InitialParameters {
    /// Convolutions: He initialisation (normal, fan-out; as in torchvision, fan-out counts the outputs of all groups).
    /// Batch norms: ones and zeros. Linear layers: PyTorch's uniform distribution. With `zero_init_residual`, gamma of the last
    /// batch norm of each residual branch is 0, so every block starts as the identity (Goyal et al. 2017). `cifarnet` is
    /// initialised in other ways (`cifarnet::initial`).
    pub fn new(network: &Network, zero_init_residual: bool, seed: u64) -> Self {
        let parameters = network.parameters();
        let linear_inputs = |name: &str| {
            // A bias has the fan-in of its layer's weight: `fc.bias` -> `fc.weight`.
            let weight = name.replace(".bias", ".weight");
            parameters.iter().find(|p| p.name == weight).map_or(1, |p| p.shape[1])
        };
        let draw = |p: &Parameter| {
            let key = key(seed, &p.name);
            let of_arch =
                if network.arch == Arch::CifarNet.as_str() { cifarnet::initial(p, key) } else { None };
            of_arch.unwrap_or_else(|| match p.role {
                Role::ConvWeight => {
                    let fan_out = p.shape[0] * p.shape[2] * p.shape[3];
                    Draw::Normal(key, (2.0 / fan_out as f64).sqrt())
                }
                Role::Gamma { ends_branch } if ends_branch && zero_init_residual => Draw::Constant(0.0),
                Role::Gamma { .. } | Role::RunningVar => Draw::Constant(1.0),
                Role::Beta | Role::RunningMean => Draw::Constant(0.0),
                Role::LinearWeight | Role::LinearBias => {
                    Draw::Uniform(key, 1.0 / (linear_inputs(&p.name) as f64).sqrt())
                }
            })
        };
        Self(parameters.iter().map(|p| (p.name.clone(), (p.shape.clone(), draw(p)))).collect())
    }
}

impl TensorSource for InitialParameters {
    fn list(&self) -> Vec<(&str, &[usize], usize)> {
        self.0.iter().map(|(name, (shape, _))| (name.as_str(), &shape[..], shape.iter().product())).collect()
    }

    fn read(&self, name: &str, from: usize, to: &mut [f32]) -> bool {
        let Some((_, draw)) = self.0.get(name) else { return false };
        draw.fill(from, to);
        true
    }
}

/// All values of [`InitialParameters`].
pub fn initial_parameters(network: &Network, zero_init_residual: bool, seed: u64) -> NamedTensors {
    let initial = InitialParameters::new(network, zero_init_residual, seed);
    let drawn = |(name, shape, len): (&str, &[usize], usize)| {
        let mut values = vec![0.0; len];
        initial.read(name, 0, &mut values);
        (name.to_owned(), HostTensor { shape: shape.to_vec(), values })
    };
    initial.list().into_iter().map(drawn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::resnet;
    use lockstep_protocol::spec::Arch;

    fn network() -> Network {
        resnet::of(Arch::ResNet20, 32, 10)
    }

    #[test]
    fn values_have_the_published_distributions() {
        let parameters = initial_parameters(&network(), false, 7);
        let w = &parameters["layer3.1.conv1.weight"].values;
        let count = w.len() as f64;
        let mean = w.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
        let std = (w.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / count).sqrt();
        let expected = (2.0 / (64.0 * 9.0f64)).sqrt();
        assert!(mean.abs() < 4.0 * expected / count.sqrt(), "{mean}");
        assert!((std / expected - 1.0).abs() < 0.02, "{std} instead of {expected}");
        let fc = &parameters["fc.weight"].values;
        assert!(fc.iter().all(|v| v.abs() <= 0.125) && fc.iter().any(|v| v.abs() > 0.12));
        assert!(parameters["layer1.0.bn2.weight"].values.iter().all(|&v| v == 1.0));
    }

    /// `kaiming_normal_(mode="fan_out")` counts all outputs of the weight, for any number of groups.
    #[test]
    fn grouped_convolutions_are_initialised_as_in_torchvision() {
        let parameters = initial_parameters(&resnet::of(Arch::ResNeXt50_32x4d, 32, 10), true, 7);
        for (name, outputs) in [("layer1.0.conv2.weight", 128), ("layer4.2.conv2.weight", 1024)] {
            let w = &parameters[name].values;
            let std = (w.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / w.len() as f64).sqrt();
            let expected = (2.0 / f64::from(outputs * 9)).sqrt();
            assert!((std / expected - 1.0).abs() < 0.05, "{name}: {std} instead of {expected}");
        }
    }

    #[test]
    fn zero_init_residual_zeroes_only_the_last_gamma_of_each_branch() {
        let bottlenecks = resnet::of(Arch::ResNet50, 32, 10);
        for (network, last, count) in [(network(), "bn2.weight", 9), (bottlenecks, "bn3.weight", 16)] {
            let parameters = initial_parameters(&network, true, 7);
            let is_zero =
                |(name, tensor): &(&String, &HostTensor)| name.ends_with("weight") && tensor.values[0] == 0.0;
            let zero: Vec<_> = parameters.iter().filter(is_zero).map(|(name, _)| name).collect();
            assert!(zero.len() == count && zero.iter().all(|name| name.ends_with(last)), "{zero:?}");
        }
    }

    #[test]
    fn initial_values_never_change() {
        // Pinned: other values would change every training run.
        let parameters = initial_parameters(&network(), false, 0);
        let first: Vec<u32> = parameters["conv1.weight"].values[..3].iter().map(|v| v.to_bits()).collect();
        assert_eq!(first, [3_182_163_078, 1_034_881_237, 1_025_365_299]);
        assert_ne!(parameters, initial_parameters(&network(), false, 1));
    }
}
