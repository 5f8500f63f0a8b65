//! The history and the speed of jobs.

use crate::{
    agent::{Agent, checkpoint, dataset_info, hello, losses, running, server_with_agent, start_job},
    test_server::{TestServer, column, spec, wait_until},
};
use lockstep_protocol::{
    agent::{AttemptEvent, Ending, Source},
    job::JobState,
    metric::MetricColumn,
    reason::ReasonKind,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

async fn read_history(server: &TestServer, id: &str) -> Value {
    server.get_ok(&format!("/jobs/{id}/history")).await
}

/// Returns event and attempt of each entry. Checks that the times ascend.
fn summarize(history: &Value) -> Vec<String> {
    let entries = history["entries"].as_array().unwrap();
    let times: Vec<jiff::Timestamp> =
        entries.iter().map(|e| e["at"].as_str().unwrap().parse().unwrap()).collect();
    assert!(times.is_sorted(), "{times:?}");
    let number = |e: &Value| e["attempt"].as_u64().map(|n| format!(" {n}")).unwrap_or_default();
    entries.iter().map(|e| format!("{}{}", e["what"].as_str().unwrap(), number(e))).collect()
}

#[tokio::test]
async fn the_history_shows_who_requested_changes_only_to_permitted_readers() {
    let (server, mut agent) = server_with_agent(2).await;
    let id = server.submit(|s| s["recovery"] = json!({"max_restarts": 1})).await.id.to_string();
    let first = agent.expect_start().await;
    agent
        .report(&first.attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=60), checkpoint(50)])
        .await;
    let reason = ReasonKind::RankKilled { rank: 1, step: 60, signal: 9 }.into();
    agent.end(&first.attempt, Ending::Failed { reason, retriable: true }).await;

    let second = agent.expect_start().await;
    agent.report(&second.attempt, Source::Rank(0), 0, vec![running(100, 50), checkpoint(70)]).await;
    let eva = server.submitter("eva").await;
    let request = async |action: &str| {
        let response = eva.post(server.url(&format!("/api/v1/jobs/{id}/{action}"))).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 202, "{}", response.text().await.unwrap());
    };
    request("pause").await;
    agent.expect_stop().await;
    agent.end(&second.attempt, Ending::Stopped).await;
    assert_eq!(server.job(&id).await.state, JobState::Paused);
    request("resume").await;
    let third = agent.expect_start().await;
    agent.report(&third.attempt, Source::Rank(0), 0, vec![running(100, 70)]).await;
    agent.end(&third.attempt, Ending::Succeeded { step: 100 }).await;

    let reported = read_history(&server, &id).await;
    let expected = [
        "submitted",
        "started 1",
        "ended 1",
        "started 2",
        "pause_requested",
        "ended 2",
        "resumed",
        "started 3",
        "ended 3",
    ];
    assert_eq!(summarize(&reported), expected, "{reported:#}");
    assert_eq!((&reported["next_cursor"], reported.get("total")), (&Value::Null, None), "{reported:#}");
    // Pages of every size contain the same entries. Each page has parent, forks and queue.
    for limit in [1, 4, expected.len(), 1000] {
        let mut entries = Vec::new();
        for page in server.read_pages(&format!("/jobs/{id}/history?count=true&limit={limit}")).await {
            assert_eq!(
                (&page["total"], &page["forks"]),
                (&json!(expected.len()), &reported["forks"]),
                "{page}"
            );
            entries.extend(page["entries"].as_array().unwrap().clone());
        }
        assert_eq!(json!(entries), reported["entries"], "{limit}");
    }
    for query in ["limit=0", "limit=1001", "cursor=x"] {
        assert_eq!(server.get(&format!("/jobs/{id}/history?{query}")).await.0, 400, "{query}");
    }
    let (_, page) = server
        .get(&format!("/jobs/{id}/attempts?sort=-attempt&limit=1&fields=attempt,state&count=true"))
        .await;
    assert_eq!((&page["attempts"][0]["attempt"], &page["total"]), (&json!(3), &json!(3)), "{page}");
    let cursor = page["next_cursor"].as_str().unwrap();
    let (_, page) = server.get(&format!("/jobs/{id}/attempts?sort=-attempt&limit=2&cursor={cursor}")).await;
    assert_eq!(column(&page["attempts"], "attempt"), [2, 1]);
    assert_eq!(page["next_cursor"], Value::Null);
    let entry = |n: usize| &reported["entries"][n];
    assert_eq!(
        (&entry(2)["state"], &entry(2)["rank"], &entry(2)["step"]),
        (&json!("failed"), &json!(1), &json!(60))
    );
    assert_eq!(entry(2)["reason"]["code"], "rank_killed");
    assert_eq!(entry(2)["next_checkpoint"], format!("{id}-1-50"));
    assert_eq!(
        (&entry(1)["checkpoint"], &entry(3)["checkpoint"]),
        (&Value::Null, &json!(format!("{id}-1-50")))
    );
    assert_eq!(entry(5)["next_checkpoint"], format!("{id}-1-70"));
    assert_eq!((&entry(4)["who"], &entry(6)["who"]), (&json!("eva"), &json!("eva")));
    assert_eq!(
        (&reported["queue"], &reported["parent"], &reported["forks"]),
        (&Value::Null, &Value::Null, &json!([]))
    );

    // Other callers than owner and admins do not see who requested changes.
    let (_, read_by_eva) = server.send_as(&eva, "GET", &format!("/jobs/{id}/history"), None).await;
    assert_eq!(summarize(&read_by_eva), expected);
    let (submitted, rest) = read_by_eva["entries"].as_array().unwrap().split_first().unwrap();
    let owner = server.job(&id).await.owner;
    assert!(owner.is_some());
    assert_eq!((&submitted["who"], &entry(0)["who"]), (&json!(owner), &json!(owner)), "the owner is visible");
    assert!(rest.iter().all(|e| e.get("who").is_none()), "{read_by_eva:#}");

    // A job that is cancelled before it starts has only these two entries, and the first job's history stays the same. The owner sees who
    // requested changes.
    assert_eq!(server.post("/agents/id-a/drain", &json!({})).await.0, 204);
    let (_, job) = server.send_as(&eva, "POST", "/jobs", Some(spec())).await;
    let her_job = job["id"].as_str().unwrap();
    server.order(her_job, "cancel").await;
    let (_, read_by_eva) = server.send_as(&eva, "GET", &format!("/jobs/{her_job}/history"), None).await;
    assert_eq!(column(&read_by_eva["entries"], "what"), ["submitted", "cancelled"], "{read_by_eva:#}");
    assert_eq!(json!(column(&read_by_eva["entries"], "who")), json!(["eva", owner]), "{read_by_eva:#}");
    assert_eq!(summarize(&read_history(&server, &id).await), expected);
    assert_eq!(server.get("/jobs/j00000000000000000000000000/history").await.0, 404);
    server.stop().await;
}

/// Waits until `code` is the reason for which the job waits. Returns the job's position in the queue and the reason.
async fn wait_for_reason(server: &TestServer, id: &str, code: &str) -> Value {
    let mut queue = Value::Null;
    wait_until(&format!("{id} waits for {code}"), async || {
        queue = read_history(server, id).await["queue"].take();
        queue["reason"]["code"] == code
    })
    .await;
    queue
}

#[tokio::test]
async fn a_waiting_job_shows_its_place_and_current_reason() {
    let (server, mut agent) = server_with_agent(2).await;
    let first = server.submit(|_| {}).await.id.to_string();
    let start = agent.expect_start().await;
    agent.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    let waiting = server.submit(|_| {}).await.id.to_string();
    let urgent = server.submit(|s| s["priority"] = json!(5)).await.id.to_string();
    let reason = async |id: &str, code: &str| wait_for_reason(&server, id, code).await;
    assert_eq!(reason(&urgent, "waiting_for_slots").await["place"], 1);
    assert_eq!(reason(&waiting, "waiting_for_slots").await["place"], 2);
    assert_eq!(read_history(&server, &first).await["queue"], Value::Null);

    // The `reason` of a resumed job is still the reason why its last attempt ended. The reason of its wait is in the history's `queue`.
    server.order(&first, "pause").await;
    agent.expect_stop().await;
    agent.end(&start.attempt, Ending::Stopped).await;
    let next = agent.expect_start().await;
    assert_eq!(next.attempt.job.as_str(), urgent);
    agent.report(&next.attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    server.order(&first, "resume").await;
    let queue = reason(&first, "waiting_for_slots").await;
    assert_eq!(queue["place"], 1, "the resumed job is older");
    assert!(server.job(&first).await.reason.unwrap().contains("continues from step 10"));
    // Without the machine, jobs do not wait for its slots any more.
    agent.disconnect();
    reason(&first, "no_agent_online").await;
    server.stop().await;
}

#[tokio::test]
async fn a_restart_of_the_server_causes_no_events_of_waiting_jobs() {
    let (server, mut agent) = server_with_agent(2).await;
    server.submit(|_| {}).await;
    let start = agent.expect_start().await;
    let waiting = server.submit(|_| {}).await.id.to_string();
    let events = format!("SELECT last_seq FROM jobs WHERE id = '{waiting}'");
    let stored = format!("SELECT count(*) FROM jobs WHERE id = '{waiting}' AND reason IS NOT NULL");
    wait_until("the reason is stored", async || server.query_number(&stored).await > 0).await;
    let before = server.query_number(&events).await;

    agent.disconnect();
    let dir = server.stop().await;
    let start_time = Instant::now();
    let server = TestServer::open(dir, |_| {}).await;
    // The server shows the current reason, although the machine may reconnect at any moment.
    wait_for_reason(&server, &waiting, "no_agent_online").await;
    let later = server.submit(|s| s["parallel"]["ranks"] = json!(1)).await.id.to_string();
    let _agent = Agent::connect(&server, hello("a", 2, vec![start.attempt])).await.unwrap();
    wait_for_reason(&server, &waiting, "waiting_for_slots").await;
    // Reasons are stored in order. So when the reason of a later job is stored, no reason of an earlier job is pending.
    let stored =
        format!("SELECT count(*) FROM jobs WHERE id = '{later}' AND cause LIKE '%waiting_for_slots%'");
    wait_until("the reason is stored", async || server.query_number(&stored).await > 0).await;
    // If the machine reconnects more than four seconds after the start, the server correctly stores an event for `no_agent_online`. So the
    // number of events is compared only after a faster reconnect.
    let is_in_time = start_time.elapsed() < Duration::from_secs(4);
    assert!(server.query_number(&events).await == before || !is_in_time, "more than {before} events");
    server.stop().await;
}

#[tokio::test]
async fn parent_and_fork_name_each_other_even_after_the_parent_s_deletion() {
    let (server, mut agent, parent, attempt) = start_job(|s| s["name"] = json!("origin")).await;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    // A fork checks the manifest.
    let folder = server.job_dir(&parent).join("checkpoints/1-10");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("MANIFEST.json"), "{}").unwrap();
    let set = json!({"set": {"name": "child"}});
    let fork = server.create(&format!("/jobs/{parent}/fork"), &set).await;
    let source = format!("{parent}-1-10");
    let parent_of_fork = json!({"job": parent, "checkpoint": source});
    assert_eq!(fork["parent"], parent_of_fork);
    assert_eq!((&fork["cause"]["code"], &fork["cause"]["step"]), (&json!("forked"), &json!(10)));
    let child = fork["id"].as_str().unwrap();
    agent.expect_start().await;

    let (origin, fork) = (server.job(&parent).await, server.job(child).await);
    assert!(origin.owner.is_some());
    let history = read_history(&server, child).await;
    let expected = json!({"job": parent, "name": "origin", "state": "succeeded", "checkpoint": source,
        "who": origin.owner, "at": origin.created_at});
    assert_eq!(history["parent"], expected);
    let entry = &history["entries"][0];
    assert_eq!((&entry["what"], &entry["checkpoint"]), (&json!("forked"), &json!(source)));
    assert_eq!((&entry["who"], &entry["at"]), (&json!(fork.owner), &json!(fork.created_at)));
    let forks = read_history(&server, &parent).await["forks"].take();
    assert_eq!(forks.as_array().unwrap().len(), 1);
    let keys = ["job", "name", "checkpoint", "who", "at"].map(|key| &forks[0][key]);
    assert_eq!(json!(keys), json!([child, "child", source, fork.owner, fork.created_at]));

    assert_eq!(server.delete(&format!("/jobs/{parent}")).await.0, 204);
    let orphan = read_history(&server, child).await;
    assert_eq!(orphan["parent"], json!({"job": parent, "name": null, "state": null, "checkpoint": source}));
    assert_eq!(server.get(&format!("/jobs/{child}")).await.1["parent"], parent_of_fork);
    let (_, attempts) = server.get(&format!("/jobs/{child}/attempts")).await;
    assert_eq!(attempts["attempts"][0]["checkpoint"], format!("{child}-1-10"));
    let (_, page) = server.get_text(&format!("/jobs/{child}")).await;
    assert!(page.contains(&format!("href=\"/jobs/{parent}\"")), "the page links to the parent");
    server.stop().await;
}

fn step_ms(rank: u32, steps: std::ops::RangeInclusive<u64>, ms: f32) -> AttemptEvent {
    let steps: Vec<_> = steps.collect();
    let values = vec![ms; steps.len()];
    AttemptEvent::Metrics { rank, columns: vec![MetricColumn { name: "step_ms".into(), steps, values }] }
}

#[tokio::test]
async fn speed_counts_pictures_per_second_and_is_streamed() {
    let (server, mut agent) = server_with_agent(2).await;
    assert_eq!(dataset_info().splits[0].samples, 1000);
    // Steps of 2 x 16 pictures: each epoch has 31 complete steps and one step of 8 pictures.
    let job = server.submit(|s| {
        s["train"]["batch_size"] = json!(16);
        s["data"]["drop_remainder"] = json!(false);
    });
    let id = job.await.id.to_string();
    let start = agent.expect_start().await;
    let mut stream = server.stream(&id, 0).await;
    stream.until(|frame| frame["type"] == "live").await;
    let begin =
        AttemptEvent::Running { total_steps: 64, steps_per_epoch: 32, start_step: 0, train_samples: 1000 };
    agent
        .report(&start.attempt, Source::Rank(0), 0, vec![begin, losses(0, 1..=32), step_ms(0, 1..=32, 100.0)])
        .await;
    // Steps that rank 1 reports are not counted again.
    agent.report(&start.attempt, Source::Rank(1), 0, vec![losses(1, 1..=32), step_ms(1, 1..=32, 90.0)]).await;
    let job = server.job(&id).await;
    let speed = job.images_per_second.unwrap();
    assert!((speed - 1000.0 / 3.2).abs() < 1e-3, "{speed}");
    assert!((job.eta_secs.unwrap() - 3.2).abs() < 1e-3, "{job:?}");
    let reported = loop {
        let frame = stream.frame().await.unwrap();
        if frame["type"] == "progress" && frame["step"] == 32 && frame["images_per_second"].is_number() {
            break frame;
        }
    };
    assert_eq!(
        (reported["images_per_second"].as_f64(), reported["eta_secs"].as_f64()),
        (Some(speed), job.eta_secs)
    );
    assert!(reported.get("seq").is_none(), "progress is not an event");

    // The speed stays after the end. The next attempt measures its own steps.
    let reason = ReasonKind::RankKilled { rank: 0, step: 32, signal: 9 }.into();
    agent.end(&start.attempt, Ending::Failed { reason, retriable: true }).await;
    let next = agent.expect_start().await;
    assert_eq!(server.job(&id).await.images_per_second, Some(speed));
    let restart =
        AttemptEvent::Running { total_steps: 64, steps_per_epoch: 32, start_step: 0, train_samples: 1000 };
    agent.report(&next.attempt, Source::Rank(0), 0, vec![restart]).await;
    assert_eq!(server.job(&id).await.images_per_second, Some(speed), "the speed stays until the first step");
    agent.report(&next.attempt, Source::Rank(0), 1, vec![losses(0, 1..=2), step_ms(0, 1..=2, 50.0)]).await;
    agent.end(&next.attempt, Ending::Succeeded { step: 64 }).await;
    let done = server.job(&id).await;
    assert!((done.images_per_second.unwrap() - 64.0 / 0.1).abs() < 1e-3, "{done:?}");
    assert_eq!(done.eta_secs, None);

    // The measured speed is used to estimate jobs of the same network only.
    for (arch, expected) in [("resnet20", Some(2000.0 / 640.0)), ("resnet32", None)] {
        let mut spec = serde_json::to_value(&done.spec).unwrap();
        spec["model"]["arch"] = json!(arch);
        let (_, plan) = server.post("/jobs/validate", &spec).await;
        let secs = plan["estimate"]["secs"].as_f64();
        assert_eq!(
            secs.map(|secs| (secs * 1e3).round()),
            expected.map(|secs| f64::round(secs * 1e3)),
            "{plan}"
        );
        assert!(secs.is_none() || plan["estimate"]["job"] == id, "{plan}");
        spec["sweep"] = json!({"method": "grid", "parameters": {"train.lr": {"values": [0.1, 0.05]}}});
        let (_, sweep) = server.post("/jobs/validate", &spec).await;
        // The estimate is of the first trial.
        assert_eq!((&sweep["trials"], &sweep["estimate"]), (&json!(2), &plan["estimate"]));
    }
    server.stop().await;
}
