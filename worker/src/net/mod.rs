//! Networks as data: a list of operations with shapes and parameter names that every engine runs.

mod graph;
pub mod init;
mod memory;
pub mod resnet;

pub use graph::{Network, Op, Parameter, Role, TensorId, TensorShape};
