//! The configuration of the CUDA engine.

use crate::plan::Plan;
use lockstep_comm::{rendezvous::Store, watchdog::Watchdog};
use lockstep_protocol::spec::{LossScale, Precision};
use std::sync::Arc;

/// Settings of the CUDA engine in addition to [`crate::EngineConfig`].
#[derive(Debug, Clone)]
pub(super) struct GpuConfig {
    /// How the network is parallelised over the ranks.
    pub(super) parallel_plan: Plan,
    /// CUDA's number of the device in this process.
    pub(super) ordinal: i32,
    pub(super) precision: Precision,
    /// Loss scaling for fp16.
    pub(super) loss_scale: LossScale,
    /// Whether every run must compute the same bits.
    pub(super) deterministic: bool,
    /// The rendezvous store. `None` for a single rank.
    pub(super) store: Option<Arc<Store>>,
    /// Notified of every submitted and every completed step.
    pub(super) watchdog: Option<Arc<Watchdog>>,
    /// Number of engines that this process has built before. It makes an engine's keys in the store unique.
    pub(super) generation: u32,
}
