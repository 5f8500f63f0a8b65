//! Layers of a job's network, as reported by ranks: the structure of the network, and histograms of weights and gradients.

use crate::api::prelude::*;
use crate::{
    api::jobs,
    scheduler::Scheduler,
    store::{Histogram, HistogramFilter, HistogramLayer},
};
use lockstep_protocol::{histograms::HistogramKind, network::NetworkDescription};

/// Parameters of `GET /jobs/{id}/histograms`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct HistogramQuery {
    /// Kind of histograms: `weight` or `gradient` (default: both).
    kind: Option<String>,
    /// Name of a layer, from `layers` of the response.
    layer: Option<String>,
    /// A step, from `steps` of the response.
    step: Option<u64>,
}

/// Histograms of a job's layers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Histograms {
    /// Steps with histograms, ascending, at most 200. In longer runs, the first and newest step and about equally spaced steps between them
    /// are kept.
    steps: Vec<u64>,
    /// Layers with histograms at the newest step, in the network's order.
    layers: Vec<HistogramLayer>,
    /// Ordered by step, then in the network's order. Empty if neither `layer` nor `step` is given.
    histograms: Vec<Histogram>,
}

/// Show histograms of weights and gradients
///
/// A job has histograms if `log.histograms` is set. Without parameters, the response lists the layers and steps with histograms. With
/// `layer`, the response has the layer's histograms at every step; with `step`, the histograms of every layer at that step.
#[utoipa::path(get, path = "/jobs/{id}/histograms", tag = "metrics", params(("id" = String, Path), HistogramQuery),
    responses((status = 200, body = Histograms)))]
pub(crate) async fn histograms(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
    Query(query): Query<HistogramQuery>,
) -> Result<Json<Histograms>> {
    let kind = query.kind.as_deref().map(str::parse::<HistogramKind>).transpose();
    let kind = kind.map_err(|_| Error::BadRequest("kind must be weight or gradient".into()))?;
    let job = jobs::find(&scheduler, &id).await?;
    let mut index = scheduler.store.histogram_index(&job.id).await?;
    index.layers.retain(|layer| kind.is_none_or(|kind| kind == layer.kind));
    let histograms = if query.layer.is_some() || query.step.is_some() {
        let filter = HistogramFilter { kind, layer: query.layer, step: query.step };
        scheduler.store.histograms(&job.id, &filter).await?
    } else {
        Vec::new()
    };
    Ok(Json(Histograms { steps: index.steps, layers: index.layers, histograms }))
}

/// Show a job's network
///
/// The layers are in the order in which a picture passes them; empty until an attempt has reported them.
#[utoipa::path(get, path = "/jobs/{id}/network", tag = "metrics", responses((status = 200, body = NetworkDescription)))]
pub(crate) async fn network(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
) -> Result<Json<NetworkDescription>> {
    let job = jobs::find(&scheduler, &id).await?;
    let network = scheduler.store.network(&job.id).await?;
    Ok(Json(network.unwrap_or_default()))
}
