//! What ranks said of the layers of a job's network: how weights and gradients are distributed, and what the network looks like.

use crate::{
    api::jobs,
    http::{
        error::{Error, Problem, Result},
        extract::{Path, Query},
    },
    scheduler::Scheduler,
    store::{HistogramFilter, HistogramRow, Store},
};
use axum::{Json, extract::State};
use lockstep_protocol::{histograms::HistogramKind, network::NetworkDescription};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};

/// Which histograms.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct HistogramQuery {
    /// `weight` or `gradient`; both when absent.
    kind: Option<String>,
    /// A layer's name, as `layers` of the answer has it.
    layer: Option<String>,
    /// One of `steps` of the answer.
    step: Option<u64>,
}

/// Histograms of a job's layers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Histograms {
    /// Steps that there are histograms of, ascending: at most 200. Of a run with more, steps that are about equally far apart
    /// are kept, with the first and the newest.
    steps: Vec<u64>,
    /// What there are histograms of at the newest step, in the network's order.
    layers: Vec<HistogramLayer>,
    /// By step, then in the network's order. Empty when neither `layer` nor `step` is given.
    histograms: Vec<Histogram>,
}

/// What a histogram is of.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HistogramLayer {
    name: String,
    kind: HistogramKind,
}

/// The values of a layer at a step.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Histogram {
    step: u64,
    attempt: u32,
    layer: String,
    kind: HistogramKind,
    /// The smallest finite value.
    min: f32,
    /// The largest finite value.
    max: f32,
    /// How many values lie in each of 64 bins, equal in width from `min` to `max`.
    counts: Vec<u32>,
}

impl From<HistogramRow> for Histogram {
    fn from(row: HistogramRow) -> Self {
        let HistogramRow { step, attempt, layer, kind, min, max, counts } = row;
        Self { step, attempt, layer, kind, min, max, counts }
    }
}

fn kind(text: &str) -> Result<HistogramKind> {
    let all = [HistogramKind::Weight, HistogramKind::Gradient];
    let found = all.into_iter().find(|kind| kind.name() == text);
    found.ok_or_else(|| Error::BadRequest("kind must be weight or gradient".into()))
}

/// Histograms of weights and gradients
///
/// A job has some when its `log.histograms` is set. First ask without parameters for the layers and steps that there are, then
/// with a layer for its histograms at every step, or with a step for those of every layer.
#[utoipa::path(get, path = "/jobs/{id}/histograms", tag = "metrics", params(("id" = String, Path), HistogramQuery),
    responses((status = 200, body = Histograms), (status = 400, body = Problem), (status = 404, body = Problem)))]
pub(crate) async fn histograms(
    State(scheduler): State<Arc<Scheduler>>,
    State(store): State<Arc<dyn Store>>,
    Path(id): Path<String>,
    Query(query): Query<HistogramQuery>,
) -> Result<Json<Histograms>> {
    let kind = query.kind.as_deref().map(kind).transpose()?;
    let job = jobs::find(&scheduler, &id).await?;
    let index = store.histogram_index(&job.id).await?;
    let rows = if query.layer.is_some() || query.step.is_some() {
        let filter = HistogramFilter { kind, layer: query.layer, step: query.step };
        store.histograms(&job.id, &filter).await?
    } else {
        Vec::new()
    };
    let layers = index.layers.into_iter().filter(|(_, of)| kind.is_none_or(|kind| kind == *of));
    Ok(Json(Histograms {
        steps: index.steps,
        layers: layers.map(|(name, kind)| HistogramLayer { name, kind }).collect(),
        histograms: rows.into_iter().map(Histogram::from).collect(),
    }))
}

/// A job's network
///
/// Its layers in the order in which a picture passes them; empty until an attempt has reported them.
#[utoipa::path(get, path = "/jobs/{id}/network", tag = "metrics", params(("id" = String, Path)),
    responses((status = 200, body = NetworkDescription), (status = 404, body = Problem)))]
pub(crate) async fn network(
    State(scheduler): State<Arc<Scheduler>>,
    State(store): State<Arc<dyn Store>>,
    Path(id): Path<String>,
) -> Result<Json<NetworkDescription>> {
    let job = jobs::find(&scheduler, &id).await?;
    let network = store.network(&job.id).await?;
    Ok(Json(network.unwrap_or_default()))
}
