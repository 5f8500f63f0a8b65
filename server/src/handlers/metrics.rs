//! Metrics: exact points when they fit, else buckets of minimum, maximum and mean.

use super::extract::{Path, Query, job_id};
use crate::{
    app::App,
    error::{Error, Problem, Result},
    handlers::jobs,
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
use lockstep_protocol::metric::{self, MetricColumn};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt::Write as _};
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
/// points however they came.
#[utoipa::path(get, path = "/jobs/{id}/metrics", tag = "metrics", params(("id" = String, Path), MetricsQuery),
    responses((status = 200, body = Metrics), (status = 400, body = Problem), (status = 404, body = Problem)))]
pub(crate) async fn query(
    State(app): State<App>,
    Path(id): Path<String>,
    Query(query): Query<MetricsQuery>,
) -> Result<Json<Metrics>> {
    let filter = query.filter()?;
    jobs::find(&app, &id).await?;
    let (as_of_seq, columns) = app.store.metrics(&job_id(&id)?, &filter).await?;
    let points = query.points.unwrap_or(DEFAULT_POINTS).clamp(1, MAX_POINTS) as usize;
    let (exact, series) = bucket(columns, &filter, points);
    Ok(Json(Metrics { as_of_seq, exact, series }))
}

fn bucket(
    columns: Vec<(u32, u32, MetricColumn)>,
    filter: &MetricFilter,
    points: usize,
) -> (bool, Vec<Series>) {
    let mut raw: BTreeMap<(String, u32, u32), Vec<(u64, f32)>> = BTreeMap::new();
    let (from, to) = (filter.from.unwrap_or(0), filter.to.unwrap_or(u64::MAX));
    for (rank, attempt, column) in columns {
        let wanted = column.steps.iter().copied().zip(column.values).filter(|(s, _)| (from..=to).contains(s));
        raw.entry((column.name, attempt, rank)).or_default().extend(wanted);
    }
    raw.retain(|_, values| !values.is_empty());
    let exact = raw.values().all(|v| v.len() <= points);
    let first = raw.values().filter_map(|v| v.first()).map(|p| p.0).min().unwrap_or(0);
    let last = raw.values().filter_map(|v| v.last()).map(|p| p.0).max().unwrap_or(0);
    let width = if exact { 1 } else { (last - first + 1).div_ceil(points as u64).max(1) };
    let series = raw.into_iter().map(|((name, attempt, rank), values)| {
        let mut series = Series {
            name,
            rank,
            attempt,
            steps: Vec::new(),
            min: Vec::new(),
            max: Vec::new(),
            mean: Vec::new(),
        };
        for run in values.chunk_by(|a, b| !exact && (a.0 - first) / width == (b.0.max(a.0) - first) / width) {
            let finite: Vec<f32> = run.iter().map(|p| p.1).filter(|v| v.is_finite()).collect();
            let some = |v: f32| (!finite.is_empty()).then_some(v);
            series.steps.push(run[0].0);
            series.min.push(some(finite.iter().copied().fold(f32::INFINITY, f32::min)));
            series.max.push(some(finite.iter().copied().fold(f32::NEG_INFINITY, f32::max)));
            series
                .mean
                .push(some((finite.iter().map(|v| f64::from(*v)).sum::<f64>() / finite.len() as f64) as f32));
        }
        series
    });
    (exact, series.collect())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn column(steps: std::ops::RangeInclusive<u64>) -> MetricColumn {
        MetricColumn {
            name: "loss".into(),
            values: steps.clone().map(|s| s as f32).collect(),
            steps: steps.collect(),
        }
    }

    #[test]
    fn points_that_fit_are_exact() {
        let (exact, series) =
            bucket(vec![(0, 1, column(1..=5)), (0, 1, column(6..=9))], &MetricFilter::default(), 9);
        assert!(exact && series.len() == 1);
        assert_eq!(series[0].steps, (1..=9).collect::<Vec<_>>());
        assert_eq!(
            (series[0].min.clone(), series[0].mean.clone()),
            (series[0].max.clone(), series[0].max.clone())
        );
    }

    #[test]
    fn buckets_do_not_depend_on_how_points_came() {
        let whole =
            bucket(vec![(0, 1, column(1..=1000)), (1, 1, column(1..=900))], &MetricFilter::default(), 10);
        let parts =
            (0..100).map(|i| (0, 1, column(i * 10 + 1..=i * 10 + 10))).chain([(1, 1, column(1..=900))]);
        let (exact, series) = bucket(parts.collect(), &MetricFilter::default(), 10);
        assert!(!exact && series == whole.1);
        assert_eq!(
            (series[0].steps[1], series[0].min[1], series[0].max[1], series[0].mean[1]),
            (101, Some(101.0), Some(200.0), Some(150.5))
        );
        assert_eq!((series[0].steps.len(), series[1].steps.len()), (10, 9));
    }

    #[test]
    fn what_is_not_finite_is_null_alone_and_left_out_in_company() {
        let mut column = column(1..=4);
        column.values[0] = f32::NAN;
        let (_, exact) = bucket(vec![(0, 1, column.clone())], &MetricFilter::default(), 10);
        assert_eq!(exact[0].mean, [None, Some(2.0), Some(3.0), Some(4.0)]);
        let (_, coarse) = bucket(vec![(0, 1, column)], &MetricFilter::default(), 2);
        assert_eq!(coarse[0].mean, [Some(2.0), Some(3.5)]);
    }
}
