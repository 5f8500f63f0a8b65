//! The CPU engine: float32, NHWC; the reference for every other engine.

pub mod conv;

use super::{Engine, EngineConfig, EngineError, NamedTensors};
use crate::{comm::Communicator, net::Network};
use std::sync::Arc;

pub(super) fn build(
    _: Arc<Network>,
    _: &NamedTensors,
    _: EngineConfig,
    _: Arc<dyn Communicator>,
) -> Result<Box<dyn Engine>, EngineError> {
    Err(EngineError::Parameters("not built yet".into()))
}
