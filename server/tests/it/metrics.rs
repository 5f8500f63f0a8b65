//! Metrics of long runs: rollups agree with the points at every resolution, before and after compaction.

use crate::{
    agent::{Agent, running, start_job},
    postgres,
    test_server::{TestServer, wait_until},
};
use lockstep_protocol::{
    agent::{AttemptEvent, Ending, Source},
    metric::MetricColumn,
};
use lockstep_server::ServeConfig;
use serde_json::{Value, json};
use std::time::Duration;

const STEPS: u64 = 20_000;

/// The value of a step: a spike at one step, NaN in one range, and otherwise noise that depends only on the step.
fn value(rank: u32, step: u64) -> f32 {
    match step {
        7_777 => 99.0,
        12_000..=12_099 => f32::NAN,
        _ => (step.wrapping_mul(2_654_435_761) % 1000) as f32 / 1000.0 + rank as f32,
    }
}

fn points(rank: u32, from: u64, to: u64) -> AttemptEvent {
    let column = |name: &str, steps: Vec<u64>| MetricColumn {
        name: name.into(),
        values: steps.iter().map(|s| value(rank, *s)).collect(),
        steps,
    };
    let mut columns = vec![column("loss", (from..=to).collect())];
    if to.is_multiple_of(1000) {
        columns.push(column("val_loss", vec![to]));
    }
    AttemptEvent::Metrics { rank, columns }
}

/// Compares every bucket of a response with the points.
fn check_buckets(response: &Value, from: u64, to: u64, max: usize) {
    let width = response["bucket_steps"].as_u64().unwrap();
    assert_eq!(response["series"].as_array().unwrap().len(), 2);
    for series in response["series"].as_array().unwrap() {
        let rank = series["rank"].as_u64().unwrap() as u32;
        let steps: Vec<u64> =
            series["steps"].as_array().unwrap().iter().map(|s| s.as_u64().unwrap()).collect();
        assert!(steps.len() <= max && steps.len() * 20 > max, "{} buckets of at most {max}", steps.len());
        // The buckets cover the range.
        assert!(steps[0] <= from && *steps.last().unwrap() + width > to);
        for (i, first) in steps.iter().enumerate() {
            let end = steps.get(i + 1).copied().unwrap_or_else(|| (first + width).min(to + 1).min(STEPS + 1));
            let finite: Vec<f32> = (*first..end).map(|s| value(rank, s)).filter(|v| v.is_finite()).collect();
            let stat = |key: &str| series[key][i].as_f64().map(|v| v as f32);
            if finite.is_empty() {
                assert_eq!((stat("min"), stat("mean")), (None, None), "no finite value at {first}");
                continue;
            }
            // The bucket at the end is returned whole, so it may contain later points.
            if i + 1 == steps.len() && to < STEPS {
                continue;
            }
            assert_eq!(stat("min"), finite.iter().copied().reduce(f32::min), "rank {rank}, step {first}");
            assert_eq!(stat("max"), finite.iter().copied().reduce(f32::max), "rank {rank}, step {first}");
            let mean = finite.iter().map(|v| f64::from(*v)).sum::<f64>() / finite.len() as f64;
            assert!((f64::from(stat("mean").unwrap()) - mean).abs() < 1e-4);
        }
    }
}

#[tokio::test]
async fn a_long_run_s_metrics_are_correct_at_every_resolution() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let mut records = agent.report(&attempt, Source::Rank(0), 0, vec![running(STEPS, 0)]).await;
    let mut other_records = 0;
    for first in (1..=STEPS).step_by(1000) {
        for rank in 0..2 {
            let batch: Vec<_> =
                (first..first + 1000).step_by(4).map(|from| points(rank, from, from + 3)).collect();
            let next_record = if rank == 0 { &mut records } else { &mut other_records };
            *next_record = agent.report(&attempt, Source::Rank(rank), *next_record, batch).await;
        }
    }
    let get = async |query: &str| server.get_ok(&format!("/jobs/{id}/metrics?name=loss&{query}")).await;
    let queries = [
        ("points=100", 1, STEPS, 100),
        ("points=1000", 1, STEPS, 1000),
        // The range ends in the first half of its last bucket.
        ("points=300&from=7001&to=12984", 7001, 12_984, 300),
    ];
    let mut before = Vec::new();
    for (query, from, to, max) in queries {
        let response = get(query).await;
        assert_eq!(response["exact"], false);
        check_buckets(&response, from, to, max);
        before.push(response["series"].clone());
    }
    assert!(before[0].to_string().contains("99.0"), "the spike is lost");

    // A short range is exact: it has every point.
    let short = get("points=200&from=7700&to=7850").await;
    assert_eq!((short["exact"].as_bool(), short["bucket_steps"].as_u64()), (Some(true), Some(1)));
    assert_eq!(short["series"][0]["steps"].as_array().unwrap().len(), 151);
    assert_eq!(short["series"][0]["min"], short["series"][0]["max"]);
    // A few points are exact, also over a long range.
    let (_, sparse) = server.get(&format!("/jobs/{id}/metrics?name=val_loss&points=50")).await;
    assert_eq!(sparse["exact"], true);
    assert_eq!(sparse["series"][0]["steps"].as_array().unwrap().len(), 20);

    // Waits until more than 50 of 80 events are compacted into chunks: 40 reports with two events each (loss and val_loss).
    let watermark =
        format!("SELECT COALESCE((SELECT watermark FROM metric_compaction WHERE job_id = '{id}'), 0)");
    wait_until("events are compacted", async || server.query_number(&watermark).await > 50).await;
    let losses = format!("FROM metric_chunks WHERE job_id = '{id}' AND name = 'loss'");
    let first = server.query_number(&format!("SELECT min(first_step) {losses}")).await;
    let last = server.query_number(&format!("SELECT max(last_step) {losses}")).await;
    assert!(first == 1 && last >= 12_000, "{first} to {last}");
    agent.end(&attempt, Ending::Succeeded { step: STEPS }).await;
    let dir = server.stop().await;
    let server = TestServer::open(dir, |_| {}).await;
    for ((query, ..), before) in queries.iter().zip(before) {
        let (_, response) = server.get(&format!("/jobs/{id}/metrics?name=loss&{query}")).await;
        assert_eq!(response["series"], before, "{query}");
    }
    server.stop().await;
}

/// Returns the lines of a job's CSV file, sorted, because their order depends on the compaction.
async fn read_csv(server: &TestServer, id: &str) -> Vec<String> {
    let (status, text) = server.get_text(&format!("/api/v1/jobs/{id}/metrics.csv")).await;
    assert_eq!(status, 200);
    let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
    lines.sort_unstable();
    lines
}

async fn test_removal_of_points(database: Option<String>) {
    let open = |keep| {
        let database = database.clone();
        move |config: &mut ServeConfig| {
            config.keep_points = keep;
            config.database = database.or(config.database.take());
        }
    };
    let server = TestServer::with(open(Duration::from_secs(3600))).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let (id, attempt) = agent.start_job(&server, |_| {}).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(300, 0)]).await;
    for rank in 0..2 {
        // Rank 0 has already sent its record 0.
        let first_record = u64::from(rank == 0);
        let records = (1..=300).map(|step| points(rank, step, step)).collect();
        agent.report(&attempt, Source::Rank(rank), first_record, records).await;
    }
    let seq = server.job(&id).await.last_seq;
    agent.end(&attempt, Ending::Succeeded { step: 300 }).await;
    let rows = format!("SELECT count(*) FROM events WHERE kind = 'metrics' AND job_id = '{id}'");
    assert_eq!(server.query_number(&rows).await, 2, "one row per report");
    let read_metrics = async |server: &TestServer| {
        let mut responses = Vec::new();
        for query in ["", "?name=loss&points=20", "?name=accuracy", "?ranks=1&from=10&to=50"] {
            let (status, mut response) = server.get(&format!("/jobs/{id}/metrics{query}")).await;
            assert_eq!(status, 200);
            response["as_of_seq"].take();
            responses.push(response);
        }
        responses
    };
    let (before, lines) = (read_metrics(&server).await, read_csv(&server, &id).await);
    assert_eq!(lines.len(), 1 + 2 * 300);
    let events = server.stored_events(&id).await;
    assert_eq!(events.iter().filter(|e| e["type"] == "metrics").count(), 2);
    let dir = server.stop().await;

    let server = TestServer::open(dir, open(Duration::from_millis(200))).await;
    wait_until("points are removed from events", async || server.query_number(&rows).await == 0).await;
    assert_eq!(read_metrics(&server).await, before);
    assert_eq!(read_csv(&server, &id).await, lines);
    // Whatever `since` is, the stream begins after the removed points. Other events stay.
    for since in [0, 3, seq] {
        let frames = server.stream(&id, since).await.until(|f| f["type"] == "live").await;
        assert_eq!((&frames[0]["first_seq"], &frames[0]["last_seq"]), (&json!(seq + 1), &json!(seq + 1)));
        assert_eq!(frames[1], *events.last().unwrap(), "since {since}");
        assert_eq!(frames.len(), 3);
    }
    server.stop().await;
}

#[tokio::test]
async fn points_of_finished_jobs_move_from_events_to_metrics() {
    test_removal_of_points(None).await;
}

#[tokio::test]
async fn points_of_finished_jobs_move_from_events_to_metrics_in_postgres() {
    test_removal_of_points(Some(postgres::database())).await;
}
