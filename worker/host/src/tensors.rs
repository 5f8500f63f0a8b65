//! Named tensors in host memory, exchanged by engines, checkpoints and initialisation.

pub mod fit;

use std::collections::BTreeMap;

/// A tensor in host memory: row-major, float32.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor {
    /// torchvision's layout: OIHW for convolutions, `[out, in]` for linear, `[channels]` for batch norm.
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// Tensors under torchvision's names (`layer1.0.conv1.weight`, `bn1.running_mean`, ...).
/// Without `num_batches_tracked`, which the checkpoint writer adds.
pub type NamedTensors = BTreeMap<String, HostTensor>;

/// Named tensors that are read in parts, so that tensors whose values are computed while they are read need no memory.
pub trait TensorSource: Sync {
    /// Name, shape and number of values of each tensor.
    fn list(&self) -> Vec<(&str, &[usize], usize)>;
    /// Fills `to` with the values of the tensor `name` from value `from` on. Returns false if there is no such tensor.
    fn read(&self, name: &str, from: usize, to: &mut [f32]) -> bool;
}

impl TensorSource for NamedTensors {
    fn list(&self) -> Vec<(&str, &[usize], usize)> {
        self.iter().map(|(name, tensor)| (name.as_str(), &tensor.shape[..], tensor.values.len())).collect()
    }

    fn read(&self, name: &str, from: usize, to: &mut [f32]) -> bool {
        let Some(tensor) = self.get(name) else { return false };
        to.copy_from_slice(&tensor.values[from..from + to.len()]);
        true
    }
}
