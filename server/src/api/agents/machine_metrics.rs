//! Measurements of a machine over the last day, for charts.

use crate::api::prelude::*;
use crate::{
    agents::{
        Agents,
        machines::{GPU_METRICS, MACHINE_METRICS, Point, RETENTION, bucket_means, minute_of, point_of},
    },
    api::list,
    http::extract::check_count,
    store::Store,
};
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};

const MAX_POINTS: u32 = 2000;

/// Parameters of `GET /agents/{id}/metrics`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct MachineMetricsQuery {
    /// The earliest time, such as `2026-01-02T03:04:05Z`, at most a day ago (default: a day ago).
    #[param(format = DateTime)]
    since: Option<String>,
    /// Number of equal intervals, 1 to 2000. The response then has a mean for each interval. By default, the response has a mean for each
    /// minute, and every sample of the last ten minutes.
    #[param(minimum = 1, maximum = 2000)]
    points: Option<u32>,
}

/// Measurements of a machine. All lists have the length of `at_ms`; `null` stands for a missing value.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MachineMetrics {
    /// Times by the server's clock, in milliseconds since 1970. The time of a mean is the end of its interval.
    at_ms: Vec<i64>,
    /// Measurements by name: `cpu_utilization`, `load`, `memory_used_bytes`, `disk_used_bytes`, `disk_read_bytes_per_second`,
    /// `disk_written_bytes_per_second`, `network_received_bytes_per_second` and `network_sent_bytes_per_second`.
    machine: BTreeMap<&'static str, Vec<Option<f32>>>,
    /// Measurements of each slot that is a GPU.
    gpus: Vec<GpuMetrics>,
}

/// Measurements of a GPU.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GpuMetrics {
    slot: u32,
    /// Measurements by name: `utilization`, `memory_used_bytes`, `temperature_celsius` and `power_watts`.
    metrics: BTreeMap<&'static str, Vec<Option<f32>>>,
}

/// Show a machine's measurements
///
/// Returns every sample of the last ten minutes (a sample every five seconds), and a mean for each minute of the last day.
#[utoipa::path(get, path = "/agents/{id}/metrics", tag = "agents", params(("id" = String, Path), MachineMetricsQuery),
    responses((status = 200, body = MachineMetrics)))]
pub(crate) async fn find(
    State(store): State<Arc<dyn Store>>,
    State(agents): State<Arc<Agents>>,
    Path(id): Path<String>,
    Query(query): Query<MachineMetricsQuery>,
) -> Result<Json<MachineMetrics>> {
    check_count("points", query.points, MAX_POINTS, MAX_POINTS)?;
    let now = crate::now();
    let since = list::parse_time("since", query.since.as_deref())?;
    let since = since.map_or(now - RETENTION, |since| since.max(now - RETENTION));
    super::find(&*store, &id).await?;
    let mut points = read_points(&*store, &agents, &id, since).await?;
    if let Some(interval_count) = query.points {
        points = bucket_means(&points, since, now.max(since), interval_count);
    }
    Ok(Json(to_columns(&points)))
}

/// Returns the measurements from `since` on, in order.
async fn read_points(store: &dyn Store, agents: &Agents, id: &str, since: Timestamp) -> Result<Vec<Point>> {
    // Read before the query, so that a minute that is stored in between is read twice rather than not at all.
    let (unstored, recent) = agents.machines.measurements_since(id, since);
    let mut minutes: BTreeMap<i64, Point> = BTreeMap::new();
    for row in store.machine_minutes(id, minute_of(since)).await?.iter().chain(&unstored) {
        if let Some(point) = point_of(row) {
            minutes.insert(row.minute, point);
        }
    }
    // The newest samples replace the means of their minutes.
    let recent_from = recent.first().map(|point| point.at);
    let is_older = |point: &Point| point.at >= since && recent_from.is_none_or(|from| point.at < from);
    Ok(minutes.into_values().filter(is_older).chain(recent).collect())
}

fn to_columns(points: &[Point]) -> MachineMetrics {
    let column = |value: &dyn Fn(&Point) -> Option<f32>| -> Vec<_> {
        points.iter().map(|point| value(point).filter(|value| value.is_finite())).collect()
    };
    let machine = MACHINE_METRICS.into_iter().enumerate();
    let machine = machine.map(|(index, name)| (name, column(&|point| Some(point.machine[index]))));
    let slots: BTreeSet<u32> = points.iter().flat_map(|p| p.gpus.iter().map(|(slot, _)| *slot)).collect();
    let gpu = |slot: u32| {
        let values = |point: &Point| Some(point.gpus.iter().find(|(s, _)| *s == slot)?.1);
        let metrics = GPU_METRICS.into_iter().enumerate();
        let metrics = metrics.map(|(index, name)| (name, column(&|point| Some(values(point)?[index]))));
        GpuMetrics { slot, metrics: metrics.collect() }
    };
    MachineMetrics {
        at_ms: points.iter().map(|point| point.at.as_millisecond()).collect(),
        machine: machine.collect(),
        gpus: slots.into_iter().map(gpu).collect(),
    }
}
