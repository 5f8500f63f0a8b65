//! Why jobs and attempts ended, and idempotency keys of forks.

use crate::{
    agent::{checkpoint, losses, running, server_with_agent, start_job},
    test_server::{TestServer, assert_mistake},
};
use lockstep_protocol::{
    agent::{AttemptEvent, Ending, Source},
    job::JobState,
    reason::ReasonKind,
};
use serde_json::{Value, json};

fn rank_killed(rank: u32, step: u64) -> Ending {
    Ending::Failed { reason: ReasonKind::RankKilled { rank, step, signal: 9 }.into(), retriable: true }
}

/// Creates the manifest of the checkpoint of epoch 1 and step 50, because a fork checks the manifest.
fn create_checkpoint_folder(server: &TestServer, id: &str) {
    let folder = server.job_dir(id).join("checkpoints/1-50");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("MANIFEST.json"), "{}").unwrap();
}

#[tokio::test]
async fn attempts_record_why_they_ended_and_where_they_began() {
    let (server, mut agent) = server_with_agent(2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let attempts = format!("/jobs/{id}/attempts");

    let first = agent.expect_start().await.attempt;
    let records = vec![running(100, 0), losses(0, 1..=41), checkpoint(40)];
    agent.report(&first, Source::Rank(0), 0, records).await;
    let (_, response) = server.get(&attempts).await;
    assert_eq!(
        (&response["attempts"][0]["state"], &response["attempts"][0]["ended_at"]),
        (&json!("running"), &Value::Null)
    );
    agent.end(&first, rank_killed(1, 41)).await;
    let second = agent.expect_start().await.attempt;
    let job = server.job(&id).await;
    assert_eq!((job.reason, job.cause), (None, None), "a started job has no reason");
    let restarting =
        server.stored_events(&id).await.into_iter().find(|e| e["state"] == "restarting").unwrap();
    assert_eq!(
        restarting["reason"],
        "rank 1 was killed by signal 9 at step 41; attempt 2 starts from step 40"
    );
    assert_eq!(
        (&restarting["cause"]["code"], &restarting["cause"]["next"]),
        (&json!("rank_killed"), &json!({"does": "restart", "attempt": 2, "from_step": 40}))
    );
    // Then a pause, a cancellation and a success.
    agent.report(&second, Source::Rank(0), 0, vec![running(100, 40)]).await;
    server.order(&id, "pause").await;
    agent.next().await;
    agent.end(&second, Ending::Stopped).await;
    server.order(&id, "resume").await;
    let third = agent.expect_start().await.attempt;
    server.order(&id, "cancel").await;
    agent.next().await;
    agent.end(&third, Ending::Stopped).await;
    server.order(&id, "retry").await;
    let fourth = agent.expect_start().await.attempt;
    agent.report(&fourth, Source::Rank(0), 0, vec![running(100, 40)]).await;
    agent.end(&fourth, Ending::Succeeded { step: 100 }).await;

    let (_, response) = server.get(&attempts).await;
    let start_checkpoint = json!(format!("{id}-1-40"));
    let expected = [
        ("failed", json!("rank_killed"), Value::Null, json!(41)),
        ("paused", json!("paused_by_user"), start_checkpoint.clone(), json!(40)),
        // The attempt was cancelled before its first step.
        ("cancelled", json!("cancelled_by_user"), start_checkpoint.clone(), Value::Null),
        ("succeeded", Value::Null, start_checkpoint, json!(100)),
    ];
    for ((number, (state, code, start_checkpoint, step)), response) in
        (1..).zip(expected).zip(response["attempts"].as_array().unwrap())
    {
        assert_eq!((&response["attempt"], &response["state"]), (&json!(number), &json!(state)), "{response}");
        assert_eq!(
            (&response["reason"]["code"], &response["checkpoint"], &response["step"]),
            (&code, &start_checkpoint, &step),
            "{response}"
        );
        assert!(response["ended_at"].is_string() && response["agents"] == json!(["a"]), "{response}");
    }
    let reason = &response["attempts"][0]["reason"];
    assert_eq!((&reason["rank"], &reason["step"], &reason["signal"]), (&json!(1), &json!(41), &json!(9)));
    assert_eq!(reason["words"], "rank 1 was killed by signal 9 at step 41");

    // A restart of the server changes nothing.
    let server = TestServer::open(server.stop().await, |_| {}).await;
    assert_eq!(server.get(&attempts).await.1, response);
    assert_eq!(server.get("/jobs/j00000000000000000000000000/attempts").await.0, 404);
    // A job without an attempt has an empty list.
    let waiting = server.submit(|_| {}).await.id;
    let empty = json!({"attempts": [], "next_cursor": null});
    assert_eq!(server.get(&format!("/jobs/{waiting}/attempts")).await, (200, empty));
    server.stop().await;
}

#[tokio::test]
async fn a_job_that_stops_early_succeeds_with_a_reason() {
    let (server, mut agent, id, attempt) = start_job(|spec| spec["stop"] = json!({"patience": 2})).await;
    let detail = "validation accuracy has not improved on the 91.2 % of epoch 1 in 2 validations";
    let early = AttemptEvent::StoppedEarly { step: 50, why: detail.into() };
    let records = vec![running(100, 0), losses(0, 1..=50), checkpoint(50), early];
    agent.report(&attempt, Source::Rank(0), 0, records).await;
    agent.end(&attempt, Ending::Succeeded { step: 50 }).await;
    let job = server.job(&id).await;
    let message = format!("stopped early: {detail}");
    assert_eq!((job.state, job.step, job.reason.as_deref()), (JobState::Succeeded, 50, Some(&*message)));
    let (_, attempts) = server.get(&format!("/jobs/{id}/attempts")).await;
    let attempt = &attempts["attempts"][0];
    assert_eq!(
        (&attempt["state"], &attempt["reason"]["code"]),
        (&json!("succeeded"), &json!("stopped_early"))
    );
    let (_, page) = server.get_text(&format!("/jobs/{id}")).await;
    assert!(page.contains("Stopped early:") && page.contains(detail), "{page}");
    // A fork with the same patience would stop before its first step.
    create_checkpoint_folder(&server, &id);
    let fork = async |set: Value| server.post(&format!("/jobs/{id}/fork"), &json!({ "set": set })).await;
    assert_mistake(fork(json!({})).await, "/stop/patience", "");
    for patience in [json!(3), Value::Null] {
        assert_eq!(fork(json!({ "stop.patience": patience })).await.0, 201);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_change_of_precision_is_reported_while_the_job_runs() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let change =
        AttemptEvent::PrecisionFallback { step: 41, what: "the gradients of 5 steps in a row".into() };
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), losses(0, 1..=41), change]).await;
    let message = "float16 could not hold the gradients of 5 steps in a row: training continues in bfloat16 after step 41";
    let job = server.job(&id).await;
    assert_eq!((job.state, job.reason.as_deref()), (JobState::Running, Some(message)));
    let response = server.stored_events(&id).await.into_iter().rfind(|e| e["type"] == "state").unwrap();
    assert_eq!(
        (&response["state"], &response["cause"]["code"]),
        (&json!("running"), &json!("precision_fallback"))
    );
    let (_, page) = server.get_text(&format!("/jobs/{id}")).await;
    assert!(page.contains(message));
    agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
    assert_eq!(server.job(&id).await.reason, None, "a job that has succeeded has no reason");
    server.stop().await;
}

#[tokio::test]
async fn reasons_of_later_versions_are_stored() {
    let (server, mut agent) = server_with_agent(2).await;
    // A reason with a code and facts of a later version.
    let reason =
        json!({"code": "eclipse", "moons": 2, "words": "too dark", "next": {"does": "wait", "nights": 1}});
    let (id, attempt) = agent.start_job(&server, |s| s["recovery"] = json!({"max_restarts": 0})).await;
    let event = json!({"type": "ended", "how": "failed", "reason": reason, "retriable": true});
    let unknown = json!({"type": "weather", "wind": 7});
    agent
        .send(json!({"type": "report", "attempt": attempt, "source": "agent", "first": 0, "events": [unknown, event]}))
        .await;
    agent.next().await;
    let job = server.job(&id).await;
    let full_reason = "too dark; no restart is allowed (recovery.max_restarts = 0)";
    assert_eq!((job.state, job.reason.as_deref()), (JobState::Failed, Some(full_reason)));
    let (_, response) = server.get(&format!("/jobs/{id}/attempts")).await;
    assert_eq!(response["attempts"][0]["reason"]["code"], "eclipse", "{response}");
    assert_eq!(response["attempts"][0]["reason"]["words"], "too dark", "{response}");
    server.stop().await;
}

#[tokio::test]
async fn idempotency_keys_belong_to_one_path() {
    let (server, mut agent) = server_with_agent(2).await;
    let mut job_ids = Vec::new();
    for _ in 0..2 {
        let (id, attempt) = agent.start_job(&server, |_| {}).await;
        agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(50)]).await;
        agent.end(&attempt, Ending::Succeeded { step: 100 }).await;
        create_checkpoint_folder(&server, &id);
        job_ids.push(id);
    }
    let fork = |id: &str| {
        let url = server.url(&format!("/api/v1/jobs/{id}/fork"));
        server.send(server.http.post(url).header("idempotency-key", "k").json(&json!({})))
    };
    let (status, created) = fork(&job_ids[0]).await;
    assert_eq!(status, 201, "{created}");
    let (status, repeated) = fork(&job_ids[0]).await;
    assert_eq!((status, &repeated["id"]), (200, &created["id"]));
    // The same key and body on another path is refused.
    assert_eq!(fork(&job_ids[1]).await.0, 409);
    server.stop().await;
}
