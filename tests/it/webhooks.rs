//! `lockstep webhook`.

use crate::server::{Agents, Server, wait_until};
use serde_json::json;

#[tokio::test]
async fn webhooks_are_added_tested_and_removed_by_command() {
    let server = Server::start_with(Agents::None).await;
    let url = "http://localhost:1/hook";
    let secret = server.cli(&["webhook", "add", url, "--form", "slack", "--event", "job.failed"]);
    assert!(secret.ok().starts_with("whsec_"), "{}", secret.stdout);
    server.cli(&["webhook", "add", "nothing"]).assert_usage_error(&["url: must be a URL"]);
    server
        .cli(&["webhook", "add", url, "--event", "job.exploded"])
        .assert_usage_error(&["the events are job.started, job.preempted"]);
    server
        .cli(&["webhook", "add", "mailto:ada@example.org", "--form", "email"])
        .assert_usage_error(&["LOCKSTEP_SMTP"]);
    let listed = server.cli(&["webhook", "list"]);
    let line = listed.ok().lines().nth(1).expect("a webhook below the header");
    let words: Vec<_> = line.split_whitespace().collect();
    assert_eq!(words[1..], ["enabled", "slack", url, "job.failed"]);
    let tested = server.cli(&["webhook", "test", words[0]]);
    assert!(tested.stderr.contains("--webhooks-allow-private"), "{}", tested.stderr);
    server.cli(&["webhook", "list"]).assert_prints(&[" failed: "]);
    server.cli(&["webhook", "remove", words[0]]).ok();
    server
        .cli(&["webhook", "remove", words[0]])
        .assert_usage_error(&["no webhook has this id; `lockstep webhook list` shows"]);
    let added = server.cli(&["webhook", "add", url, "--project", "shose"]);
    assert!(added.stderr.contains("no job has the project \"shose\" yet"), "{}", added.stderr);
    server.cli(&["webhook", "add", url, "--event", "job.started"]).ok();
    server.create("/runs", &json!({"id": "started", "name": "started"})).await;
    let list = || server.cli(&["webhook", "list"]).stdout;
    let waits = " waiting after a failed attempt: ";
    wait_until("the list has the error of a waiting message", || list().contains(waits), list).await;
    server.cli(&["webhook", "remove", "../people"]).assert_usage_error(&["no webhook has this id"]);
    server.stop().await;
}
