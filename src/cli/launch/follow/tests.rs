//! Tests against a server that does not respond to the first requests, like a restarting server.

use super::*;
use crate::cli::{
    api::Api,
    launch::{Launch, bundle::Node, tests::parse},
};
use lockstep_protocol::{JobId, spec::JobSpec};
use serde_json::json;
use std::{
    io::{BufRead, BufReader},
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Time limit for a reaction to an agent's exit. Longer than any request in these tests, and shorter than the time for which a launch waits
/// out an outage.
const DEADLINE: Duration = Duration::from_secs(30);

/// Closes the first `broken` connections, then responds like a server with this job and an agent `node`. Also counts connections.
fn server(broken: usize, job: &Value) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let connection_count = Arc::new(AtomicUsize::new(0));
    let (counter, job) = (Arc::clone(&connection_count), job.to_string());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let first = lines.next().and_then(Result::ok).unwrap_or_default();
            if counter.fetch_add(1, Ordering::SeqCst) < broken {
                continue;
            }
            lines.map_while(Result::ok).find(String::is_empty);
            let body = match first.contains("/agents") {
                true => json!({"agents": [{"name": "node", "online": true}]}).to_string(),
                false => job.clone(),
            };
            let head =
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length";
            let _ = write!(stream, "{head}: {}\r\n\r\n{body}", body.len());
        }
    });
    (url, connection_count)
}

fn job_in(state: &str, attempt: u32) -> Value {
    json!({
        "id": JobId::generate(), "name": "test", "state": state, "reason": null, "spec": JobSpec::default(), "attempt": attempt, "ranks": 1,
        "project": "default", "tags": [],
        "agents": [], "step": 0, "epoch": 0, "total_steps": 0, "steps_per_epoch": 0, "images_per_second": null, "eta_secs": null,
        "created_at": "2026-01-02T03:04:05Z", "started_at": null, "finished_at": null, "best": null, "last": {}, "last_seq": 1, "sparkline": [],
    })
}

fn launch_at(url: &str, job: &Value) -> Launch {
    let args = parse(&["job", "--with", "ssh", "--detach", "--server", url]);
    let (api, job) = (Api::new(url, None, None).unwrap(), serde_json::from_value(job.clone()).unwrap());
    Launch::new(&Arc::new(args), &api, job, Vec::new(), None)
}

/// A process that ends like ssh after a broken connection.
fn broken_ssh(dir: &Path) -> LauncherProcess {
    let mut command = Command::new("sh");
    command.args(["-c", "echo the connection broke >&2; exit 255"]);
    LauncherProcess::start("node", command, &[], &dir.join("log"), explain).unwrap()
}

fn explain(_: &str, status: ExitStatus, last: &str) -> String {
    format!("{status}: {last}")
}

#[tokio::test]
async fn the_exit_of_the_last_agent_is_reported_after_failed_requests() {
    let dir = tempfile::tempdir().unwrap();
    let job = job_in("running", 1);
    let (url, connection_count) = server(3, &job);
    let launch = launch_at(&url, &job);
    let mut processes = [broken_ssh(dir.path())];
    let failure = tokio::time::timeout(DEADLINE, wait_for_failure(&launch, &mut processes)).await;
    let failure = failure.expect("a report in time").to_string();
    assert!(failure.contains("no agent of this launch is left, and the job is running"), "{failure}");
    assert!(failure.contains("the connection broke"), "{failure}");
    assert!(connection_count.load(Ordering::SeqCst) > 3, "requests were retried");
}

/// Without the failed agent, the other agent would wait for ranks that never come.
#[tokio::test]
async fn a_failed_agent_ends_the_launch_only_before_a_new_attempt() {
    let dir = tempfile::tempdir().unwrap();
    for (first_attempt, attempt, is_ended) in [(0, 0, true), (1, 1, true), (1, 2, false)] {
        let (url, _) = server(0, &job_in("restarting", attempt));
        let launch = launch_at(&url, &job_in("restarting", first_attempt));
        let mut sleep = Command::new("sleep");
        sleep.arg("60");
        let other = LauncherProcess::start("other", sleep, &[], &dir.path().join("other"), explain).unwrap();
        let mut processes = [broken_ssh(dir.path()), other];
        let patience = if is_ended { DEADLINE } else { POLL_INTERVAL * 5 };
        let failure = tokio::time::timeout(patience, wait_for_failure(&launch, &mut processes)).await;
        processes[1].child.kill().unwrap();
        processes[1].child.wait().unwrap();
        let failure = failure.ok().map(|error| error.to_string());
        assert_eq!(failure.is_some(), is_ended, "{first_attempt}, {attempt}: {failure:?}");
        assert!(failure.is_none_or(|failure| failure.contains("the connection broke")));
    }
}

#[tokio::test]
async fn a_launch_waits_for_agents_during_a_server_restart() {
    let dir = tempfile::tempdir().unwrap();
    let job = job_in("queued", 0);
    let (url, _) = server(3, &job);
    let mut launch = launch_at(&url, &job);
    let node = json!({"name": "node", "agent_id": "a", "token": "t", "slots": 1, "device": "cpu"});
    launch.bundle.nodes.push(serde_json::from_value::<Node>(node).unwrap());
    let mut command = Command::new("sleep");
    command.arg("60");
    let mut processes =
        [LauncherProcess::start("node", command, &[], &dir.path().join("log"), explain).unwrap()];
    let online = tokio::time::timeout(DEADLINE, wait_until_online(&launch, &mut processes)).await;
    processes[0].child.kill().unwrap();
    processes[0].child.wait().unwrap();
    online.expect("the agents are online").unwrap();
}
