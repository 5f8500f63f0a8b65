//! The list of the queue: order, reasons, reservations.

use crate::{
    agent::{Agent, server_with_agent, server_with_drained_agent},
    test_server::{TIMEOUT, TestServer},
};
use lockstep_protocol::{agent::Ending, job::Job};
use lockstep_server::FairShare;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::Instant;

/// Submits a job with this name and number of ranks, and with these other keys.
pub async fn submit(server: &TestServer, name: &str, ranks: u32, change: Value) -> Job {
    server
        .submit(|spec| {
            spec["name"] = json!(name);
            spec["parallel"]["ranks"] = json!(ranks);
            for (key, value) in change.as_object().unwrap() {
                spec[key] = value.clone();
            }
        })
        .await
}

/// Waits until `is_expected` is true for the queue, and returns the queue. Dispatch plans twice a second.
async fn wait_for_queue(server: &TestServer, what: &str, is_expected: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let queue = server.get_ok("/queue").await;
        if is_expected(&queue) {
            return queue;
        }
        assert!(Instant::now() < deadline, "{what}: {queue:#}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn names(queue: &Value) -> Vec<&str> {
    queue["jobs"].as_array().unwrap().iter().map(|job| job["name"].as_str().unwrap_or("")).collect()
}

/// Whether exactly these jobs wait, in this order, each with a reason.
fn has_jobs(queue: &Value, expected: &[&str]) -> bool {
    names(queue) == expected && queue["jobs"].as_array().unwrap().iter().all(|job| !job["reason"].is_null())
}

#[tokio::test]
async fn slots_are_assigned_in_listed_order_and_jobs_have_reasons() {
    let server = TestServer::with(|c| c.fair_share = FairShare::Project).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    assert_eq!(server.get("/queue").await.1, json!({"jobs": [], "reservations": [], "next_cursor": null}));
    let vision = || json!({"project": "vision"});
    let mut running = Vec::new();
    for name in ["first", "second"] {
        submit(&server, name, 1, vision()).await;
        running.push(agent.expect_start().await.attempt);
    }
    let older = submit(&server, "older", 1, vision()).await;
    submit(&server, "old", 1, vision()).await;
    submit(&server, "audio", 1, json!({"project": "audio"})).await;
    submit(&server, "urgent", 1, json!({"project": "vision", "priority": 1})).await;
    let order = ["urgent", "audio", "older", "old"];
    let queue = wait_for_queue(&server, "by priority, share and age", |queue| has_jobs(queue, &order)).await;
    let jobs = queue["jobs"].as_array().unwrap();
    for (job, place) in jobs.iter().zip(1..) {
        assert_eq!(
            (&job["place"], &job["ranks"], &job["state"]),
            (&json!(place), &json!(1), &json!("queued"))
        );
        // The job's own history has the same place and reason.
        let (_, history) = server.get(&format!("/jobs/{}/history", job["id"].as_str().unwrap())).await;
        assert_eq!(
            (&history["queue"]["place"], &history["queue"]["reason"]),
            (&json!(place), &job["reason"])
        );
        assert_eq!(job["reason"]["words"], "waits for 1 slot: 0 of 2 on \"a\" free");
    }
    let (urgent, listed_older) = (&jobs[0], &jobs[2]);
    assert_eq!((&urgent["priority"], &urgent["project"]), (&json!(1), &json!("vision")));
    let since: jiff::Timestamp = listed_older["waiting_since"].as_str().unwrap().parse().unwrap();
    assert_eq!(since, older.created_at);
    assert!(listed_older["owner"].is_string(), "{listed_older}");
    // Freed slots are reserved for the first job.
    let reserved = json!({"agent_id": "id-a", "agent": "a", "job": urgent["id"], "name": "urgent", "free": [], "ending": [],
        "whole_machine": true, "since": queue["reservations"][0]["since"]});
    assert_eq!(queue["reservations"], json!([reserved]));

    // A filtered list has each job's place in the whole queue.
    let (_, audio) = server.get("/queue?project=audio&count=true&fields=place,name").await;
    assert_eq!((&audio["jobs"], &audio["total"]), (&json!([{"place": 2, "name": "audio"}]), &json!(1)));
    let owner = listed_older["owner"].as_str().unwrap();
    assert_eq!(names(&server.get(&format!("/queue?owner={owner}")).await.1), order);
    assert_eq!(names(&server.get("/queue?owner=nobody").await.1), [""; 0]);

    // Jobs start in the listed order.
    for (attempt, expected) in running.iter().zip(&order) {
        agent.end(attempt, Ending::Succeeded { step: 1 }).await;
        assert_eq!(server.job(agent.expect_start().await.attempt.job.as_str()).await.name, *expected);
    }
    // Each project has one slot: the oldest job is first.
    submit(&server, "last", 1, json!({"project": "audio"})).await;
    let order = ["older", "last", "old"];
    wait_for_queue(&server, "by age, as the shares are equal", |queue| has_jobs(queue, &order)).await;
    server.stop().await;
}

#[tokio::test]
async fn the_queue_is_paged_and_refuses_unknown_parameters() {
    let (server, _agent) = server_with_drained_agent().await;
    let mut ids = Vec::new();
    for name in ["a", "b", "c", "d", "e"] {
        ids.push(submit(&server, name, 1, json!({})).await.id);
    }
    let queue =
        wait_for_queue(&server, "all jobs wait", |queue| has_jobs(queue, &["a", "b", "c", "d", "e"])).await;
    assert_eq!(queue["jobs"][0]["reason"]["code"], "no_agent_accepts");
    assert_eq!(queue["reservations"], json!([]), "a drained machine has no reservations");
    for limit in 1..=6 {
        let mut listed = Vec::new();
        for page in server.read_pages(&format!("/queue?limit={limit}&count=true")).await {
            assert_eq!(page["total"], 5, "{page}");
            assert!(page["jobs"].as_array().unwrap().len() <= limit);
            listed.extend(names(&page).into_iter().map(str::to_owned));
        }
        assert_eq!(listed.concat(), "abcde", "{limit}");
    }
    // A job of the first page leaves the queue: the second page still has all other jobs.
    let (_, first_page) = server.get("/queue?limit=2").await;
    assert_eq!(server.post(&format!("/jobs/{}/cancel", ids[1]), &json!({})).await.0, 202);
    let (_, next_page) =
        server.get(&format!("/queue?cursor={}", first_page["next_cursor"].as_str().unwrap())).await;
    assert_eq!(names(&next_page), ["c", "d", "e"]);

    let (_, list) = server.get("/jobs?limit=1").await;
    let cursor_of_jobs = format!("cursor={}", list["next_cursor"].as_str().unwrap());
    assert_eq!(server.get("/queue?limit=1000").await.0, 200);
    // An owner may have at most 200 characters.
    for (letters, expected) in [(200, 200), (201, 422)] {
        let (status, response) = server.get(&format!("/queue?owner={}", "a".repeat(letters))).await;
        assert_eq!(status, expected, "{response}");
    }
    for (query, message) in [
        ("limit=0", "1 to 1000"),
        ("limit=1001", "1 to 1000"),
        ("fields=place,nam", "did you mean \\\"name\\\""),
        ("projekt=x", "did you mean \\\"project\\\""),
        ("project=a%20b", "project has a space"),
        ("cursor=x", "the cursor is not valid for this list"),
        (cursor_of_jobs.as_str(), "another list"),
    ] {
        let (status, problem) = server.get(&format!("/queue?{query}")).await;
        assert!(status == 400 && problem.to_string().contains(message), "{query}: {status} {problem}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_machine_is_reserved_for_a_large_job() {
    let (server, mut agent) = server_with_agent(2).await;
    submit(&server, "running", 1, json!({})).await;
    let running = agent.expect_start().await.attempt;
    let large = submit(&server, "the large", 2, json!({})).await;
    let small = submit(&server, "small", 1, json!({})).await;
    let both_wait = |queue: &Value| {
        let is_reserved = queue["reservations"][0]["job"] == json!(large.id);
        has_jobs(queue, &["the large", "small"]) && is_reserved
    };
    let queue = wait_for_queue(&server, "both jobs wait", both_wait).await;
    let reservation = &queue["reservations"][0];
    let expected = json!({"agent_id": "id-a", "agent": "a", "job": large.id, "name": "the large", "free": [1], "ending": [],
        "whole_machine": true, "since": reservation["since"]});
    assert_eq!(queue["reservations"], json!([expected]));
    assert_eq!((&queue["jobs"][0]["kept_slots"], &queue["jobs"][1]["kept_slots"]), (&json!(1), &json!(0)));
    let message = |index: usize| &queue["jobs"][index]["reason"]["words"];
    assert_eq!(message(0), "waits for 2 slots: 1 of 2 on \"a\" free");
    assert_eq!(message(1), "waits for 1 slot: 1 of 2 on \"a\" free, kept for \"the large\"");
    // The machine's slots, and the pages.
    let (_, agents) = server.get("/agents").await;
    let slots = agents["agents"][0]["slots"].as_array().unwrap();
    assert_eq!((&slots[0]["job"], &slots[0]["kept_for"]), (&json!(running.job), &Value::Null));
    let kept_for = json!({"job": large.id, "since": reservation["since"]});
    assert_eq!((&slots[1]["job"], &slots[1]["kept_for"]), (&Value::Null, &kept_for));
    let (_, machines) = server.get_text("/machines").await;
    assert!(
        machines.contains(&format!("kept for <a href=\"/jobs/{}\">the large</a>", large.id)),
        "{machines}"
    );
    let (status, page) = server.get_text("/queue").await;
    assert!(status == 200 && page.contains("2 jobs wait · 1 slot kept"), "{page}");
    assert!(page.contains("slot 1, and every other slot that becomes free"), "{page}");
    assert!(page.find("the large</a>") < page.find("small</a>"), "{page}");
    for (query, message) in [("?project=none", "No waiting job matches"), ("?owner=", "2 jobs wait")] {
        assert!(server.get_text(&format!("/queue{query}")).await.1.contains(message), "{query}");
    }
    // The reservation stays in later rounds of dispatch.
    let later = server.get("/queue").await.1;
    assert_eq!(later["reservations"], queue["reservations"]);
    agent.end(&running, Ending::Succeeded { step: 1 }).await;
    let started = agent.expect_start().await;
    assert_eq!((&started.attempt.job, started.ranks.len()), (&large.id, 2));
    let small_is_next =
        |queue: &Value| has_jobs(queue, &["small"]) && queue["reservations"][0]["job"] == json!(small.id);
    let queue = wait_for_queue(&server, "the small job is next", small_is_next).await;
    assert_eq!((&queue["reservations"][0]["free"], &queue["jobs"][0]["kept_slots"]), (&json!([]), &json!(0)));
    agent.end(&started.attempt, Ending::Succeeded { step: 1 }).await;
    assert_eq!(agent.expect_start().await.attempt.job, small.id);
    let queue = wait_for_queue(&server, "nothing waits", |queue| has_jobs(queue, &[])).await;
    assert_eq!(queue["reservations"], json!([]));
    assert!(server.get_text("/queue").await.1.contains("Nothing waits"));
    server.stop().await;
}

#[tokio::test]
async fn preempted_jobs_keep_slots_while_writing_checkpoints() {
    let (server, mut agent) = server_with_agent(2).await;
    let low = submit(&server, "low", 2, json!({"preemptible": true})).await;
    let attempt = agent.expect_start().await.attempt;
    let high = submit(&server, "high", 1, json!({"priority": 5})).await;
    assert!(agent.expect_stop().await);
    let is_reserved =
        |queue: &Value| has_jobs(queue, &["high"]) && queue["reservations"][0]["ending"] == json!([0]);
    let queue = wait_for_queue(&server, "a slot is reserved", is_reserved).await;
    let reservation = &queue["reservations"][0];
    assert_eq!(
        (&reservation["job"], &reservation["free"], &reservation["whole_machine"]),
        (&json!(high.id), &json!([]), &json!(false))
    );
    assert_eq!(queue["jobs"][0]["kept_slots"], 1);
    let message = queue["jobs"][0]["reason"]["words"].as_str().unwrap();
    assert!(message.ends_with("jobs of lower priority are being preempted"), "{message}");
    // The preempted job still has its slots.
    let (_, agents) = server.get("/agents").await;
    let slots = agents["agents"][0]["slots"].as_array().unwrap();
    let slot = |n: usize| (slots[n]["job"].clone(), slots[n]["kept_for"]["job"].clone());
    assert_eq!((slot(0), slot(1)), ((json!(low.id), json!(high.id)), (json!(low.id), Value::Null)));
    assert!(server.get_text("/queue").await.1.contains("slot 0 whose job is ending"));

    agent.end(&attempt, Ending::Stopped).await;
    assert_eq!(agent.expect_start().await.attempt.job, high.id);
    // The preempted job waits since it was queued again, not since its submission.
    let is_back = |queue: &Value| has_jobs(queue, &["low"]) && queue["reservations"][0]["free"] == json!([1]);
    let queue = wait_for_queue(&server, "the preempted job waits again", is_back).await;
    let since: jiff::Timestamp = queue["jobs"][0]["waiting_since"].as_str().unwrap().parse().unwrap();
    let (_, attempts) = server.get(&format!("/jobs/{}/attempts", low.id)).await;
    let ended: jiff::Timestamp = attempts["attempts"][0]["ended_at"].as_str().unwrap().parse().unwrap();
    assert!(since > low.created_at && since.duration_since(ended).abs() < jiff::SignedDuration::from_secs(1));
    assert_eq!(queue["reservations"][0]["job"], json!(low.id));
    server.stop().await;
}
