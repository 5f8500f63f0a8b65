//! Metrics of a job: exact points if they fit into a response, otherwise buckets with minimum, maximum and mean.

use crate::api::prelude::*;
use crate::{
    api::{jobs, large, list},
    http::{attachment::attachment, extract::check_count},
    metrics::{
        self,
        chunk::{Bucket, SeriesKey},
        compaction, query,
    },
    scheduler::Scheduler,
    store::{self, MetricChunk, MetricFilter, Store},
};
use axum::{body::Body, http::HeaderValue};
use futures_util::{StreamExt, stream};
use lockstep_protocol::{
    job::Job,
    metric::{self, MetricColumn},
    spec::nearest,
};
use std::{
    borrow::Cow,
    collections::{HashMap, VecDeque},
    fmt::Write as _,
};

const DEFAULT_POINTS: u32 = 1000;
const MAX_POINTS: u32 = 10_000;
/// Number of events in each query for the CSV file.
const CSV_EVENTS: u32 = 500;

/// Parameters of `GET /jobs/{id}/metrics`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct MetricsQuery {
    /// Name of a metric, such as `loss` (default: all metrics).
    pub(super) name: Option<String>,
    /// Comma-separated ranks, such as `0,1` (default: all ranks).
    pub(super) ranks: Option<String>,
    /// First step.
    pub(super) from: Option<u64>,
    /// Last step.
    pub(super) to: Option<u64>,
    /// Maximum number of buckets of each series, 1 to 10000 (default 1000).
    #[param(minimum = 1, maximum = 10000)]
    pub(super) points: Option<u32>,
}

impl MetricsQuery {
    pub(crate) fn filter(&self) -> Result<MetricFilter> {
        if let Some(mistake) = self.name.as_deref().and_then(metric::name_mistake) {
            return Err(Error::BadRequest(mistake));
        }
        let ranks = list::split_list(self.ranks.as_deref()).map(str::parse).collect::<Result<_, _>>();
        let ranks = ranks.map_err(|_| {
            Error::BadRequest("ranks must be numbers with commas between them, such as 0,1".into())
        })?;
        Ok(MetricFilter {
            name: self.name.clone(),
            ranks,
            from: self.from,
            to: self.to,
            ..MetricFilter::default()
        })
    }
}

/// Checks that at least one of the jobs can have a metric of this name. Runs from elsewhere may have metrics of any name.
pub(crate) fn check_name<'a>(name: Option<&str>, jobs: impl IntoIterator<Item = &'a Job>) -> Result<()> {
    let Some(name) = name.filter(|name| !metric::NAMES.contains(name)) else { return Ok(()) };
    if jobs.into_iter().any(|job| job.external.is_some()) {
        return Ok(());
    }
    let near = nearest(name, metric::NAMES.iter().copied());
    let near = near.map(|near| format!("did you mean {near:?}? ")).unwrap_or_default();
    Err(Error::BadRequest(format!(
        "no metric is called {name:?}; {near}the metrics are {}",
        metric::NAMES.join(", ")
    )))
}

/// Metrics of a job.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Metrics {
    /// Number of the last event that the response includes. A stream with this number as `since` continues from there.
    as_of_seq: u64,
    /// Whether the response has every point. `min`, `max` and `mean` of each point are then equal.
    exact: bool,
    /// Number of steps in a bucket; 1 if `exact`.
    bucket_steps: u64,
    pub(super) series: Vec<Series>,
}

/// One metric of one rank in one attempt. `null` stands for values that are not finite.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
pub(crate) struct Series {
    name: String,
    rank: u32,
    attempt: u32,
    /// The first step of each bucket.
    pub(super) steps: Vec<u64>,
    min: Vec<Option<f32>>,
    max: Vec<Option<f32>>,
    mean: Vec<Option<f32>>,
}

/// Show metrics for a chart
///
/// Buckets are equal ranges of steps, the same for every series, counted from step 1; the first bucket also has step 0. The boundaries of
/// buckets depend only on the stored points and the request, not on when points were stored. Buckets at the ends of the requested range are
/// returned complete.
#[utoipa::path(get, path = "/jobs/{id}/metrics", tag = "metrics", params(("id" = String, Path), MetricsQuery),
    responses((status = 200, body = Metrics)))]
pub(crate) async fn find(
    State(scheduler): State<Arc<Scheduler>>,
    State(metrics): State<Arc<metrics::Metrics>>,
    Path(id): Path<String>,
    Query(query): Query<MetricsQuery>,
) -> Result<Response> {
    let filter = query.filter()?;
    let job = jobs::find(&scheduler, &id).await?;
    check_name(filter.name.as_deref(), [&job])?;
    let points = check_count("points", query.points, DEFAULT_POINTS, MAX_POINTS)? as usize;
    let result = query::find(&metrics, &job, &filter, points).await?;
    large::json_response(to_response(result)).await
}

/// Converts the result of a query to the response.
pub(crate) fn to_response(result: query::ChartData) -> Metrics {
    Metrics {
        as_of_seq: result.as_of,
        exact: result.is_exact,
        bucket_steps: result.bucket_steps,
        series: result.series.into_iter().map(to_series).collect(),
    }
}

fn to_series((key, buckets): (SeriesKey, Vec<Bucket>)) -> Series {
    let SeriesKey { name, attempt, rank } = key;
    let column = |value: fn(&Bucket) -> f32| {
        buckets.iter().map(|b| (b.finite_points > 0).then(|| value(b))).collect::<Vec<_>>()
    };
    Series {
        name,
        rank,
        attempt,
        min: column(|b| b.min),
        max: column(|b| b.max),
        mean: column(|b| (b.sum / b.finite_points as f64) as f32),
        steps: buckets.iter().map(|b| b.step).collect(),
    }
}

/// Export all points as CSV
///
/// Columns: attempt, rank, name, step, value. Points are in the order in which they were stored. If the job ended long ago, points are
/// ordered by name and rank instead, and a step that a run from elsewhere logged several times has only its last value. The parameter
/// `points` has no effect.
#[utoipa::path(get, path = "/jobs/{id}/metrics.csv", tag = "metrics", params(("id" = String, Path), MetricsQuery),
    responses((status = 200, content_type = "text/csv", body = String)))]
pub(crate) async fn csv(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
    Query(query): Query<MetricsQuery>,
) -> Result<Response> {
    let filter = query.filter()?;
    // As in `find`, an invalid `points` is refused, although it has no effect here.
    check_count("points", query.points, DEFAULT_POINTS, MAX_POINTS)?;
    let job = jobs::find(&scheduler, &id).await?;
    check_name(filter.name.as_deref(), [&job])?;
    let name = attachment(&format!("{}-metrics.csv", job.name));
    let csv = Csv::new(scheduler.store.clone(), job, filter).await?;
    let heading = stream::once(async { Ok("attempt,rank,name,step,value\n".to_owned()) });
    let parts = stream::try_unfold(csv, |mut csv| async move {
        let part = csv.next_part().await?;
        Ok::<_, store::StoreError>(part.map(|part| (part, csv)))
    });
    let kind = HeaderValue::from_static("text/csv; charset=utf-8");
    let headers = [(header::CONTENT_TYPE, kind), (header::CONTENT_DISPOSITION, name)];
    Ok((headers, Body::from_stream(heading.chain(parts))).into_response())
}

/// A file that is produced in parts while it is sent, so that long runs fit into the server's memory.
struct Csv {
    store: Arc<dyn Store>,
    job: Job,
    filter: MetricFilter,
    /// Series (metric and rank) whose chunks are not sent yet. Some points of these series are only in chunks. The points in chunks are
    /// sent first, then the points in events.
    series: VecDeque<(String, u32)>,
    /// Number of the last event whose points are in chunks, by metric and rank.
    watermarks: HashMap<(String, u32), u64>,
    /// Number of the last event that needs no reading: at first the last event whose points compaction has moved into chunks, later the last
    /// event that was read.
    after: u64,
}

impl Csv {
    async fn new(store: Arc<dyn Store>, job: Job, filter: MetricFilter) -> Result<Self> {
        let after = store.first_seq(&job.id).await? - 1;
        let mut series = Vec::new();
        if after > 0 {
            let (_, chunks) = store.newest_metric_chunks(&job.id).await?;
            let is_requested = |chunk: &MetricChunk| {
                filter.name.as_ref().is_none_or(|name| *name == chunk.name)
                    && (filter.ranks.is_empty() || filter.ranks.contains(&chunk.rank))
            };
            series.extend(chunks.into_iter().filter(is_requested).map(|chunk| (chunk.name, chunk.rank)));
            series.sort();
            series.dedup();
        }
        Ok(Self { store, job, series: series.into(), filter, watermarks: HashMap::new(), after })
    }

    /// Returns the next part of the file; `None` at its end.
    async fn next_part(&mut self) -> store::Result<Option<String>> {
        let mut text = String::new();
        if let Some((name, rank)) = self.series.pop_front() {
            let filter = MetricFilter { name: Some(name.clone()), ranks: vec![rank], ..self.filter.clone() };
            let (watermark, chunks) = self.store.metric_chunks(&self.job.id, 0, &filter).await?;
            for chunk in chunks {
                // A bucket of level 0 is one point.
                let points = compaction::decode_chunk_or_empty(0, &chunk);
                let points =
                    points.into_iter().map(|p| (p.step, if p.finite_points > 0 { p.min } else { f32::NAN }));
                self.write_lines(&mut text, chunk.attempt, rank, &name, points);
            }
            self.watermarks.insert((name, rank), watermark);
            return Ok(Some(text));
        }
        if self.after >= self.job.last_seq {
            return Ok(None);
        }
        let events = self.store.events(&self.job.id, self.after, CSV_EVENTS).await?;
        // If points were moved from unread events into chunks, the file would lack these points. The response is then aborted, so that the
        // file is not mistaken for a complete file.
        if self.store.first_seq(&self.job.id).await? > self.after + 1 {
            let why = "the job's metrics were compacted during this request, so the file would be incomplete; ask again";
            return Err(store::StoreError::Unavailable(why.into()));
        }
        self.after = events.last().map_or(self.job.last_seq, |row| row.seq);
        let name = self.filter.name.as_deref();
        for row in &events {
            let Some((attempt, rank, columns)) = row.metrics(name) else { continue };
            if !self.filter.ranks.is_empty() && !self.filter.ranks.contains(&rank) {
                continue;
            }
            for MetricColumn { name, steps, values } in
                columns.into_iter().filter(|c| self.filter.may_match(c))
            {
                let key = (name, rank);
                if self.watermarks.get(&key).is_none_or(|watermark| row.seq > *watermark) {
                    self.write_lines(&mut text, attempt, rank, &key.0, steps.into_iter().zip(values));
                }
            }
        }
        Ok(Some(text))
    }

    fn write_lines(
        &self,
        text: &mut String,
        attempt: u32,
        rank: u32,
        name: &str,
        points: impl Iterator<Item = (u64, f32)>,
    ) {
        let (from, to) = (self.filter.from.unwrap_or(0), self.filter.to.unwrap_or(u64::MAX));
        let name = csv_field(name);
        for (step, value) in points.filter(|(step, _)| (from..=to).contains(step)) {
            let value = if value.is_finite() { value.to_string() } else { "NaN".to_owned() };
            let _ = writeln!(text, "{attempt},{rank},{name},{step},{value}");
        }
    }
}

/// A metric's name as a field of CSV (RFC 4180). Names have no line breaks ([`metric::name_mistake`]).
fn csv_field(text: &str) -> Cow<'_, str> {
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")).into() } else { text.into() }
}
