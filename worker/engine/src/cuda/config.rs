//! The configuration of the CUDA engine.

use lockstep_comm::{rendezvous::Store, watchdog::Watchdog};
use lockstep_protocol::spec::{LossScale, Precision};
use std::sync::Arc;

/// What the CUDA engine is given in addition to what every engine is.
#[derive(Debug, Clone)]
pub(super) struct GpuConfig {
    /// As CUDA numbers the devices that this process sees.
    pub(super) ordinal: i32,
    pub(super) precision: Precision,
    /// For fp16.
    pub(super) loss_scale: LossScale,
    /// The same bits in every run.
    pub(super) deterministic: bool,
    /// Where the ranks meet; absent for a single rank.
    pub(super) store: Option<Arc<Store>>,
    /// Notified of every step that is submitted and completed.
    pub(super) watchdog: Option<Arc<Watchdog>>,
    /// Ranks divide the optimizer's state among them.
    pub(super) optimizer_sharding: bool,
    /// Engines that this process has built before: each connects its ranks' GPUs under names of its own.
    pub(super) generation: u32,
}
