//! One metric of several jobs at once, to compare them.

use super::metrics::{self, Metrics, MetricsQuery};
use crate::api::prelude::*;
use crate::{
    api::{jobs, large, list},
    http::extract::check_count,
    metrics::query,
    scheduler::Scheduler,
};

/// Maximum number of jobs in a request.
const MAX_JOBS: usize = 50;
const DEFAULT_POINTS: u32 = 500;
const MAX_POINTS: u32 = 10_000;
/// Maximum product of the parameter `points` and the number of jobs.
const MAX_TOTAL_POINTS: usize = 100_000;
/// Maximum number of buckets in a response. Each rank and attempt of a job has its own series.
const MAX_RESPONSE_BUCKETS: usize = 1_000_000;

/// Parameters of `GET /metrics/query`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct JobsMetricsQuery {
    /// Comma-separated ids of 1 to 50 jobs.
    jobs: String,
    /// Name of a metric, such as `loss`.
    name: String,
    /// Comma-separated ranks, such as `0,1` (default: all ranks).
    ranks: Option<String>,
    /// First step.
    from: Option<u64>,
    /// Last step.
    to: Option<u64>,
    /// Maximum number of buckets of each series, 1 to 10000 (default 500). `points` times the number of jobs must be at most 100000.
    #[param(minimum = 1, maximum = 10000)]
    points: Option<u32>,
}

/// A metric of several jobs.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct JobsMetrics {
    /// In the order of the request.
    jobs: Vec<JobMetrics>,
}

/// The metric of one job.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct JobMetrics {
    /// The job's id.
    job: String,
    #[serde(flatten)]
    metrics: Metrics,
}

/// Show a metric of several jobs
///
/// Returns for each job the response of `GET /jobs/{id}/metrics`: exact points if they fit, otherwise buckets of equal ranges of steps.
#[utoipa::path(get, path = "/metrics/query", tag = "metrics", params(JobsMetricsQuery),
    responses((status = 200, body = JobsMetrics), (status = 404, body = Problem, description = "No job has one of the ids; the problem names the id")))]
pub(crate) async fn find(
    State(scheduler): State<Arc<Scheduler>>,
    State(stored_metrics): State<Arc<crate::metrics::Metrics>>,
    Extension(caller): Extension<Caller>,
    Query(params): Query<JobsMetricsQuery>,
) -> Result<Response> {
    let ids = list::split_unique(Some(&params.jobs));
    if !(1..=MAX_JOBS).contains(&ids.len()) {
        let detail = format!(
            "jobs must be 1 to {MAX_JOBS} ids, separated by commas; request the metric of further jobs separately"
        );
        return Err(Error::BadRequest(detail));
    }
    let points = check_count("points", params.points, DEFAULT_POINTS, MAX_POINTS)? as usize;
    if points * ids.len() > MAX_TOTAL_POINTS {
        return Err(Error::BadRequest(format!(
            "{points} points for each of {} jobs are more than {MAX_TOTAL_POINTS} in all; request at most {} points, or fewer jobs",
            ids.len(),
            MAX_TOTAL_POINTS / ids.len()
        )));
    }
    let JobsMetricsQuery { name, ranks, from, to, .. } = params;
    let filter = MetricsQuery { name: Some(name.clone()), ranks, from, to, points: None }.filter()?;
    let mut jobs = Vec::with_capacity(ids.len());
    for id in &ids {
        let job = jobs::find_visible(&scheduler, &caller, id).await.map_err(|error| match error {
            Error::NotFound(_) => {
                Error::NotFound(format!("no job has the id {:?}", lockstep_protocol::spec::shortened(id)))
            }
            other => other,
        })?;
        jobs.push(job);
    }
    metrics::check_name(Some(&name), &jobs)?;
    let (mut results, mut bucket_count) = (Vec::new(), 0);
    for job in jobs {
        let metrics: Metrics =
            metrics::to_response(query::find(&stored_metrics, &job, &filter, points).await?);
        bucket_count += metrics.series.iter().map(|series| series.steps.len()).sum::<usize>();
        if bucket_count > MAX_RESPONSE_BUCKETS {
            return Err(Error::BadRequest(format!(
                "the response would have more than {MAX_RESPONSE_BUCKETS} points, because each rank and attempt has a series; request \
                 fewer points, ranks or jobs"
            )));
        }
        results.push(JobMetrics { job: job.id.to_string(), metrics });
    }
    large::json_response(JobsMetrics { jobs: results }).await
}
