//! Histograms of a network's layers, and panels of charts.

use lockstep_protocol::{histograms::HistogramKind, job::JobId};
use serde::Serialize;
use utoipa::ToSchema;

/// The job or project that panels belong to.
#[derive(Debug, Clone, Copy)]
pub enum PanelsOf<'a> {
    Job(&'a JobId),
    /// Panels of a project, for its jobs without their own panels.
    Project(&'a str),
}

/// A filter for histograms. `None` matches all.
#[derive(Debug, Clone, Default)]
pub struct HistogramFilter {
    /// Only histograms of weights, or of gradients.
    pub kind: Option<HistogramKind>,
    /// Only histograms of this layer.
    pub layer: Option<String>,
    /// Only histograms of this step.
    pub step: Option<u64>,
}

/// Histogram of the weights or gradients of a layer at a step.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Histogram {
    pub step: u64,
    pub attempt: u32,
    pub layer: String,
    pub kind: HistogramKind,
    /// The smallest finite value.
    pub min: f32,
    /// The largest finite value.
    pub max: f32,
    /// Number of values in each of 64 bins of equal width from `min` to `max`.
    pub counts: Vec<u32>,
}

/// A layer and the kind of its values.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct HistogramLayer {
    pub name: String,
    pub kind: HistogramKind,
}

/// The layers and steps that have histograms.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HistogramIndex {
    /// The layers and kinds of the newest step, in the network's order.
    pub layers: Vec<HistogramLayer>,
    /// The steps, ascending.
    pub steps: Vec<u64>,
}
