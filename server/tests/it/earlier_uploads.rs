//! Uploads of checkpoints of earlier attempts, by an agent that has a later attempt of the job.

use crate::{
    agent::{Agent, checkpoint, hello, running, server_with_agent},
    gangs::rank_killed,
    uploads::{AttemptApi, manifest},
};
use lockstep_protocol::agent::{AttemptRef, Ending, FencingToken, Source};
use serde_json::{Value, json};

#[tokio::test]
async fn a_stop_before_the_dataset_was_copied_does_not_lose_the_last_checkpoint() {
    for action in ["pause", "cancel"] {
        let (server, mut agent) = server_with_agent(2).await;
        let token = server.agent_token("a").await;
        let id = server.submit(|spec| spec["recovery"] = json!({"max_restarts": 1})).await.id.to_string();
        let start = agent.expect_start().await;
        let api =
            |token: &str, agent_id, attempt: &AttemptRef| AttemptApi::new(&server, token, agent_id, attempt);
        let api_1 = api(&token, "id-a", &start.attempt);
        api_1.report_own_disk().await;
        agent.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
        agent.end(&start.attempt, rank_killed(0)).await;
        let start = agent.expect_start().await;
        // The job continues on the machine that has the checkpoint.
        assert_eq!(start.resume.as_deref(), Some("1-10"));

        // The agent copies the dataset, and has not reported its own disk yet.
        let api_2 = api(&token, "id-a", &start.attempt);
        assert_eq!(api_2.request("GET", "/uploads/1-10", vec![]).await.0, 200);
        assert_eq!(api_2.request("GET", "/uploads/1-20", vec![]).await.0, 403, "there is no such checkpoint");
        // Refused: a wrong fencing token, and another agent.
        let fencing_token = FencingToken { secret: 1, ..start.attempt.fencing_token };
        let guessed = AttemptRef { fencing_token, ..start.attempt.clone() };
        assert_eq!(api(&token, "id-a", &guessed).request("GET", "/uploads/1-10", vec![]).await.0, 403);
        let token_b = server.agent_token("b").await;
        let _agent_b = Agent::connect_with_token(&server, &token_b, hello("b", 1, Vec::new())).await.unwrap();
        let api_b = api(&token_b, "id-b", &start.attempt);
        assert_eq!(api_b.request("GET", "/uploads/1-10", vec![]).await.0, 403);

        assert_eq!(server.post(&format!("/jobs/{id}/{action}"), &Value::Null).await.0, 202, "{action}");
        agent.expect_stop().await;
        agent.end(&start.attempt, Ending::Stopped).await;
        assert_eq!(api_2.upload("1-10", manifest(1, 10)).await.0, 204, "{action}");
        let (status, shown) = server.get(&format!("/checkpoints/{id}-1-10")).await;
        assert_eq!((status, shown.get("uploading_from")), (200, None), "{shown}");
        server.stop().await;
    }
}

#[tokio::test]
async fn agents_upload_checkpoints_of_earlier_attempts_after_rank_0_moved() {
    let (server, mut agent) = server_with_agent(2).await;
    let token = server.agent_token("a").await;
    let id = server.submit(|spec| spec["recovery"] = json!({"max_restarts": 1})).await.id.to_string();
    let start = agent.expect_start().await;
    let api = |attempt: &AttemptRef| AttemptApi::new(&server, &token, "id-a", attempt);
    api(&start.attempt).report_own_disk().await;
    let events = vec![running(100, 0), checkpoint(10), checkpoint(20)];
    agent.report(&start.attempt, Source::Rank(0), 0, events).await;
    assert_eq!(api(&start.attempt).upload("1-10", manifest(1, 10)).await.0, 204);
    agent.end(&start.attempt, rank_killed(0)).await;
    let start = agent.expect_start().await;
    let api_2 = api(&start.attempt);
    api_2.report_own_disk().await;
    // Changes the attempt so that another agent has rank 0.
    let places = r#"[{"agent_id":"id-b","agent":"b","ranks":[[0,0]]},{"agent_id":"id-a","agent":"a","ranks":[[1,0]]}]"#;
    let query = format!("UPDATE attempts SET places = '{places}' WHERE job_id = '{id}' AND attempt = 2");
    assert_eq!(server.execute(&query).await, 1);
    let (status, state) = api_2.request("GET", "/uploads/1-10", vec![]).await;
    assert_eq!((status, state["stored"].is_string()), (200, true), "the first upload is stored: {state}");
    assert_eq!(api_2.upload("1-20", manifest(1, 20)).await.0, 204);
    server.stop().await;
}
