//! Tests of the CPU engine.

mod bfloat16;
mod cifarnet;
mod fusion;
mod gradients;
mod undo;

use crate::net::{Network, resnet};
use lockstep_protocol::spec::{Arch, ModelSpec};
use std::sync::Arc;

/// ResNet-20 for pictures of `side` pixels and ten classes.
fn resnet20(side: usize) -> Arc<Network> {
    let model = ModelSpec { arch: Arch::ResNet20, ..ModelSpec::default() };
    Arc::new(resnet::build(&model, side, 3, 10).unwrap())
}
