//! Networks as data: a list of operations with shapes and parameter names that every engine runs.

mod describe;
mod graph;
pub mod init;
mod memory;
mod placement;
pub mod resnet;

pub use graph::{Network, Op, Parameter, Role};
pub use lockstep_kernels::TensorShape;
pub use placement::{Axes, NetworkPart, Placement, Rows, Slice, TensorId, bounds};

use lockstep_protocol::spec::ModelSpec;

/// The network that `model` names for square inputs of `image_size` pixels and `channels` channels: the one place that
/// knows which family an architecture is of.
///
/// # Errors
/// A sentence when the image is too small for the architecture, or there is nothing to classify.
pub fn build(
    model: &ModelSpec,
    image_size: usize,
    channels: usize,
    classes: usize,
) -> Result<Network, String> {
    resnet::build(model, image_size, channels, classes)
}
