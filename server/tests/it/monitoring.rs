//! `GET /metrics`, and the dashboard in `deploy/` that queries it.

use crate::agent::{line, running, start_job};
use lockstep_protocol::{
    agent::{AttemptEvent, Source},
    metric::MetricColumn,
};
use serde_json::Value;
use std::collections::BTreeSet;

const DASHBOARD: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/grafana.json"));

/// Returns the metrics of a server with a job that has trained three steps, after a request for a missing job.
async fn read_metrics() -> String {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let step_times = |rank| {
        let column = MetricColumn { name: "step_ms".into(), steps: vec![1, 2, 3], values: vec![5.0; 3] };
        AttemptEvent::Metrics { rank, columns: vec![column] }
    };
    let events_of_rank_0 = vec![running(10, 0), step_times(0), line(0, 1, "a line")];
    agent.report(&attempt, Source::Rank(0), 0, events_of_rank_0).await;
    agent.report(&attempt, Source::Rank(1), 0, vec![step_times(1)]).await;
    server.job(&id).await;
    assert_eq!(server.get("/jobs/j00000000000000000000000000").await.0, 404);
    assert_eq!(server.get_text("/nowhere").await.0, 404);
    let (status, text) = server.get_text("/metrics").await;
    assert_eq!(status, 200);
    server.stop().await;
    text
}

/// The value of a sample, by its name and labels.
fn value(text: &str, sample: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    rest.map(|value| value.parse().expect("a number"))
}

/// All texts under the key `expr`.
fn queries(json: &Value) -> Vec<&str> {
    match json {
        Value::Object(map) => {
            let query = map.get("expr").and_then(Value::as_str);
            query.into_iter().chain(map.values().flat_map(queries)).collect()
        }
        Value::Array(items) => items.iter().flat_map(queries).collect(),
        _ => Vec::new(),
    }
}

#[tokio::test]
async fn metrics_cover_jobs_machines_requests_and_lag() {
    let text = read_metrics().await;
    let job_route = "{route=\"/api/v1/jobs/{id}\",status=";
    let requests = |labels: &str| format!("lockstep_http_request_duration_seconds_count{labels}");
    let (success, missing) = (format!("{job_route}\"2xx\"}}"), format!("{job_route}\"4xx\"}}"));
    for (sample, expected) in [
        ("lockstep_jobs{state=\"running\"}", 1.0),
        ("lockstep_jobs{state=\"queued\"}", 0.0),
        ("lockstep_agents_online", 1.0),
        ("lockstep_slots", 2.0),
        ("lockstep_slots_busy", 2.0),
        // A step counts once, not once per rank.
        ("lockstep_steps_total", 3.0),
        // The log line is months old.
        ("lockstep_ingest_lag_seconds_bucket{le=\"60\"}", 0.0),
        ("lockstep_ingest_lag_seconds_count{}", 1.0),
        // Paths with different ids have the same labels.
        (requests(&success).as_str(), 1.0),
        (requests(&missing).as_str(), 1.0),
        (requests("{route=\"none\",status=\"4xx\"}").as_str(), 1.0),
    ] {
        assert_eq!(value(&text, sample), Some(expected), "{sample}\n{text}");
    }
    assert!(value(&text, "lockstep_database_bytes") > Some(4096.0), "{text}");

    // Every metric of the dashboard exists, and every metric is on the dashboard.
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let queries = queries(&dashboard);
    let names =
        queries.iter().flat_map(|query| query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'));
    let queried: BTreeSet<_> = names.filter(|word| word.starts_with("lockstep_")).collect();
    for name in &queried {
        let is_sample = |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        assert!(text.lines().any(is_sample), "{name}\n{text}");
    }
    for family in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
        assert!(queried.iter().any(|name| name.starts_with(family)), "no panel shows {family}");
    }
}

/// Only `tests/run full` runs these tests.
mod full {
    use super::read_metrics;
    use std::{
        io::Write,
        process::{Command, Stdio},
    };

    /// promtool checks names, units, types and help texts.
    #[tokio::test]
    async fn promtool_accepts_the_metrics() {
        let text = read_metrics().await;
        let mut command = Command::new("promtool");
        command.args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut promtool = command.spawn().expect("promtool, of the package prometheus");
        let mut input = promtool.stdin.take().expect("its standard input");
        input.write_all(text.as_bytes()).expect("promtool reads");
        drop(input);
        let output = promtool.wait_with_output().expect("promtool ends");
        assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
    }
}
