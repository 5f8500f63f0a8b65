//! What a job's ranks said of its network's layers, and the panels of its page.

use lockstep_protocol::{histograms::HistogramKind, job::JobId};

/// Whose panels.
#[derive(Debug, Clone, Copy)]
pub enum PanelsOf<'a> {
    /// Of one job.
    Job(&'a JobId),
    /// Of the jobs of a project that have none of their own.
    Project(&'a str),
}

/// Which histograms; what is `None` matches all.
#[derive(Debug, Clone, Default)]
pub struct HistogramFilter {
    /// Of weights or of gradients.
    pub kind: Option<HistogramKind>,
    /// Of this layer.
    pub layer: Option<String>,
    /// Of this step.
    pub step: Option<u64>,
}

/// One histogram.
#[derive(Debug, Clone, PartialEq)]
pub struct HistogramRow {
    /// The step.
    pub step: u64,
    /// That reported it.
    pub attempt: u32,
    /// The layer.
    pub layer: String,
    /// What of it.
    pub kind: HistogramKind,
    /// The smallest value.
    pub min: f32,
    /// The largest value.
    pub max: f32,
    /// In bins of the same width.
    pub counts: Vec<u32>,
}

/// Of which layers and steps there are histograms.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HistogramIndex {
    /// Those of the newest step, in the network's order.
    pub layers: Vec<(String, HistogramKind)>,
    /// Ascending.
    pub steps: Vec<u64>,
}
