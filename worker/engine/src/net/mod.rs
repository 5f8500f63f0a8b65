//! Networks as data: a list of operations with shapes and parameter names that every engine runs.

mod cifarnet;
mod describe;
mod graph;
pub mod init;
mod memory;
mod placement;
pub mod resnet;
pub mod whitening;

pub use graph::{Network, Op, Parameter, Role};
pub use lockstep_kernels::TensorShape;
pub use placement::{Axes, NetworkPart, Placement, Rows, Slice, TensorId, bounds};

use lockstep_protocol::spec::{Arch, ModelSpec};

/// Builds the network that `model` names, for square inputs of `image_size` pixels and `channels` channels. Only this
/// function maps architectures to families of networks.
///
/// # Errors
/// The image is too small for the architecture, or there are no classes. The error is a sentence.
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
    match model.arch {
        Arch::CifarNet => cifarnet::build(model, image_size, channels, classes),
        _ => resnet::build(model, image_size, channels, classes),
    }
}
