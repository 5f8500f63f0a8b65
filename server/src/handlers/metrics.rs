//! Metrics: exact points when they fit, else buckets of minimum, maximum and mean.

use super::extract::{Path, Query, job_id};
use crate::{
    app::App,
    error::{Error, Problem, Result},
    handlers::jobs,
    metrics::{chunk::Bucket, query},
    store::MetricFilter,
};
use axum::{
    Json,
    body::Body,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::stream;
use lockstep_protocol::metric;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use utoipa::{IntoParams, ToSchema};

const DEFAULT_POINTS: u32 = 1000;
const MAX_POINTS: u32 = 10_000;
/// Metric events read at a time for the CSV file.
const CSV_EVENTS: u32 = 500;

/// Which metrics, and how finely.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct MetricsQuery {
    /// A metric's name, such as `loss`; all when absent.
    name: Option<String>,
    /// Such as `0,1`; all when absent.
    ranks: Option<String>,
    /// First step.
    from: Option<u64>,
    /// Last step.
    to: Option<u64>,
    /// At most so many buckets a series; 1000 when absent, 10000 at most.
    points: Option<u32>,
}

impl MetricsQuery {
    fn filter(&self) -> Result<MetricFilter> {
        if let Some(name) = &self.name
            && !metric::NAMES.contains(&name.as_str())
        {
            return Err(Error::BadRequest(format!(
                "no metric is called {name:?}; there are {}",
                metric::NAMES.join(", ")
            )));
        }
        let ranks = self
            .ranks
            .iter()
            .flat_map(|r| r.split(','))
            .filter(|r| !r.is_empty())
            .map(str::parse)
            .collect::<std::result::Result<_, _>>();
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

/// Metrics of a job.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Metrics {
    /// Events after this one are not in the answer: go on from here on the stream.
    as_of_seq: u64,
    /// Every point is there, and `min`, `max` and `mean` are the same.
    exact: bool,
    /// Steps that a bucket covers; 1 when exact.
    bucket_steps: u64,
    series: Vec<Series>,
}

/// One metric of one rank in one attempt. `null` stands for what was not finite.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
pub(crate) struct Series {
    name: String,
    rank: u32,
    attempt: u32,
    /// The first step of each bucket.
    steps: Vec<u64>,
    min: Vec<Option<f32>>,
    max: Vec<Option<f32>>,
    mean: Vec<Option<f32>>,
}

/// Metrics for a chart
///
/// Buckets are equal ranges of steps, the same for every series, so the answer is the same for the same
/// points however they came. Those at the ends of a range are told whole.
#[utoipa::path(get, path = "/jobs/{id}/metrics", tag = "metrics", params(("id" = String, Path), MetricsQuery),
    responses((status = 200, body = Metrics), (status = 400, body = Problem), (status = 404, body = Problem)))]
pub(crate) async fn find(
    State(app): State<App>,
    Path(id): Path<String>,
    Query(query): Query<MetricsQuery>,
) -> Result<Json<Metrics>> {
    let filter = query.filter()?;
    jobs::find(&app, &id).await?;
    let points = query.points.unwrap_or(DEFAULT_POINTS).clamp(1, MAX_POINTS) as usize;
    let found = query::find(&app, &job_id(&id)?, &filter, points).await?;
    Ok(Json(Metrics {
        as_of_seq: found.as_of,
        exact: found.exact,
        bucket_steps: found.bucket_steps,
        series: found.series.into_iter().map(series).collect(),
    }))
}

fn series(((name, attempt, rank), buckets): (query::Key, Vec<Bucket>)) -> Series {
    let of = |value: fn(&Bucket) -> f32| {
        buckets.iter().map(|b| (b.finite > 0).then(|| value(b))).collect::<Vec<_>>()
    };
    Series {
        name,
        rank,
        attempt,
        min: of(|b| b.min),
        max: of(|b| b.max),
        mean: of(|b| (b.sum / b.finite as f64) as f32),
        steps: buckets.iter().map(|b| b.step).collect(),
    }
}

/// Every point as CSV
///
/// Columns: attempt, rank, name, step, value; in the order in which they were stored.
#[utoipa::path(get, path = "/jobs/{id}/metrics.csv", tag = "metrics", params(("id" = String, Path), MetricsQuery),
    responses((status = 200, content_type = "text/csv", body = String), (status = 404, body = Problem)))]
pub(crate) async fn csv(
    State(app): State<App>,
    Path(id): Path<String>,
    Query(query): Query<MetricsQuery>,
) -> Result<Response> {
    let filter = query.filter()?;
    let job = jobs::find(&app, &id).await?;
    // Events are read by number, a range at a time, so that no run is too long for the server's memory.
    let last_seq = job.last_seq;
    let name = format!("attachment; filename=\"{}-metrics.csv\"", job.id);
    let parts = stream::try_unfold((None::<u64>, filter), move |(after, filter)| {
        let (app, job) = (app.clone(), job.id.clone());
        async move {
            let header = after.is_none();
            let after = after.unwrap_or(0);
            if !header && after >= last_seq {
                return Ok::<_, Error>(None);
            }
            let events = app.store.events(&job, after, CSV_EVENTS).await?;
            let next = events.last().map_or(last_seq, |e| e.seq);
            let mut text = String::from(if header { "attempt,rank,name,step,value\n" } else { "" });
            for event in &events {
                append_csv(&mut text, &event.body, &filter);
            }
            Ok(Some((text, (Some(next), filter))))
        }
    });
    let parts =
        futures_util::StreamExt::map(parts, |part| part.map_err(|e| std::io::Error::other(format!("{e:?}"))));
    Ok((
        [(header::CONTENT_TYPE, "text/csv; charset=utf-8".to_owned()), (header::CONTENT_DISPOSITION, name)],
        Body::from_stream(parts),
    )
        .into_response())
}

fn append_csv(text: &mut String, body: &str, filter: &MetricFilter) {
    use lockstep_protocol::stream::EventBody;
    let Ok(EventBody::Metrics { attempt, rank, name, steps, values }) = serde_json::from_str(body) else {
        return;
    };
    let wanted = filter.name.as_ref().is_none_or(|n| *n == name)
        && (filter.ranks.is_empty() || filter.ranks.contains(&rank));
    if !wanted {
        return;
    }
    let (from, to) = (filter.from.unwrap_or(0), filter.to.unwrap_or(u64::MAX));
    for (step, value) in steps.iter().zip(values).filter(|(s, _)| (from..=to).contains(*s)) {
        let value = value.map_or_else(|| "NaN".to_owned(), |v| v.to_string());
        let _ = writeln!(text, "{attempt},{rank},{name},{step},{value}");
    }
}
