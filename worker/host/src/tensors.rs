//! Named tensors on the host, which engines, checkpoints and initialisation exchange.

pub mod fit;

use std::collections::BTreeMap;

/// A tensor on the host: row-major, float32.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor {
    /// torchvision's layout: OIHW for convolutions, `[out, in]` for linear, `[channels]` for batch norm.
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// Tensors under torchvision's names (`layer1.0.conv1.weight`, `bn1.running_mean`, ...).
/// `num_batches_tracked` is not among them: the checkpoint writer adds it.
pub type NamedTensors = BTreeMap<String, HostTensor>;
