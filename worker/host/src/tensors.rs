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
