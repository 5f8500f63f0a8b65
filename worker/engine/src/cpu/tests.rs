//! Tests of the CPU engine.

mod bfloat16;
mod cifarnet;
mod fusion;
mod gradients;
mod undo;

use crate::net::{Network, resnet};
use lockstep_protocol::spec::Arch;
use std::sync::Arc;

/// ResNet-20 for pictures of `side` pixels and ten classes.
fn resnet20(side: usize) -> Arc<Network> {
    Arc::new(resnet::of(Arch::ResNet20, side, 10))
}
