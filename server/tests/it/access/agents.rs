//! The identity of an agent follows from its token.

use crate::{
    agent::{Agent, hello, losses, running, start_job},
    test_server::{TIMEOUT, TestServer, refused_status},
};
use lockstep_protocol::agent::{FromAgent, Source, ToAgent};
use serde_json::json;
use std::time::{Duration, Instant};

/// A `Hello` with this id. The list of machines shows all ids, so an agent could send another agent's id.
fn hello_as(id: &str, name: &str) -> FromAgent {
    let mut hello = hello(name, 2, Vec::new());
    if let FromAgent::Hello { agent_id, .. } = &mut hello {
        *agent_id = id.into();
    }
    hello
}

/// Connects, and returns the reason for which the server refuses the agent.
async fn refusal(server: &TestServer, token: &str, hello: FromAgent) -> String {
    Agent::connect_with_token(server, token, hello).await.err().expect("refused")
}

#[tokio::test]
async fn a_token_belongs_to_one_agent_and_needs_the_agent_scope() {
    let server = TestServer::new().await;
    for scope in ["read", "submit", "admin"] {
        let (_, token) = server.make_token(&json!({"name": scope, "scope": scope})).await;
        let status = refused_status(server.socket_request("/agent/socket", &token)).await;
        assert_eq!(status, 403, "{scope}");
    }
    let token_a = server.agent_token("a").await;
    // The token belongs to the first new agent of this name.
    let reason = refusal(&server, &token_a, hello_as("id-b", "b")).await;
    assert!(reason.contains("another agent") && reason.contains("--agent id-b"), "{reason}");
    let first =
        Agent::connect_with_token(&server, &token_a, hello_as("id-a", "a")).await.expect("the name fits");
    assert!(refusal(&server, &token_a, hello_as("id-c", "a")).await.contains("another agent"));
    first.disconnect();
    // The same agent may change its name and connect again.
    let renamed =
        Agent::connect_with_token(&server, &token_a, hello_as("id-a", "renamed")).await.expect("the id fits");
    let again =
        Agent::connect_with_token(&server, &token_a, hello_as("id-a", "a")).await.expect("the id fits");
    drop((renamed, again));

    // A token for a new agent is not valid for a known agent, even if the known agent sends the new name.
    let token_fresh = server.agent_token("fresh").await;
    assert!(refusal(&server, &token_fresh, hello_as("id-a", "fresh")).await.contains("another agent"));
    let second_token_a = server.agent_token("a").await;
    assert!(refusal(&server, &second_token_a, hello_as("id-d", "a")).await.contains("another agent"));
    let known = Agent::connect_with_token(&server, &second_token_a, hello_as("id-a", "a")).await;
    assert!(known.is_ok(), "an admin's new token for a known name is valid for the known agent");
    assert!(Agent::connect_with_token(&server, &token_fresh, hello_as("id-fresh", "fresh")).await.is_ok());
    // Another agent cannot take the name of a machine that is offline.
    let reason = refusal(&server, &token_a, hello_as("id-a", "fresh")).await;
    assert!(reason.contains("the name of another machine") && reason.contains("--name"), "{reason}");
    server.stop().await;
}

#[tokio::test]
async fn an_agent_with_a_revoked_token_is_disconnected() {
    let server = TestServer::new().await;
    let body = json!({"name": "a", "scope": "agent", "agent": "a"});
    let (id, token) = server.make_token(&body).await;
    let mut agent = Agent::connect_with_token(&server, &token, hello("a", 2, Vec::new())).await.unwrap();
    let since = Instant::now();
    assert_eq!(server.delete(&format!("/tokens/{id}")).await.0, 204);
    assert_eq!(agent.next().await, None);
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    assert_eq!(refused_status(server.socket_request("/agent/socket", &token)).await, 401);
    server.stop().await;
}

#[tokio::test]
async fn reports_are_accepted_only_from_the_attempt_s_agent() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    assert_eq!(agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await, 1);

    // Another known agent, which has all data of the attempt but was not assigned to it.
    let mut other = Agent::connect(&server, hello("other", 2, Vec::new())).await.unwrap();
    let events = vec![losses(0, 1..=5)];
    other.send_report(&attempt, Source::Rank(0), 1, events.clone()).await;
    // The server tells the other agent to stop the attempt.
    assert!(matches!(other.next().await, Some(ToAgent::Stop { .. })));
    // The assigned agent with a wrong fencing token.
    let mut guessed = attempt.clone();
    guessed.fencing_token.secret ^= 1;
    agent.send_report(&guessed, Source::Rank(0), 1, events.clone()).await;
    agent.expect_stop().await;
    let points = format!("SELECT count(*) FROM events WHERE job_id = '{id}' AND kind = 'metrics'");
    assert_eq!(server.query_number(&points).await, 0);
    assert_eq!(agent.report(&attempt, Source::Rank(0), 1, events).await, 2);
    assert_eq!(server.query_number(&points).await, 1);
    server.stop().await;
}

/// This happens if a machine is cloned together with its agent's folder.
#[tokio::test]
async fn a_second_process_with_an_agent_s_id_is_refused_while_the_first_is_online() {
    let server = TestServer::new().await;
    let token = server.agent_token("a").await;
    let hello_from = |process_name: &str| {
        let mut hello = hello("a", 2, Vec::new());
        if let FromAgent::Hello { process, .. } = &mut hello {
            *process = process_name.into();
        }
        hello
    };
    let connect = async |process| Agent::connect_with_token(&server, &token, hello_from(process)).await;
    let mut first = connect("one").await.unwrap();
    for _ in 0..3 {
        let why = connect("two").await.err().expect("refused");
        assert!(why.contains("wait: this agent is accepted once") && why.contains("file agent_id"), "{why}");
    }
    let (_, shown) = server.get("/agents").await;
    let warning = shown["agents"][0]["warnings"][0]["text"].as_str().unwrap();
    assert!(
        shown["agents"][0]["online"] == true && warning.contains("identity tries to connect from 127.0.0.1"),
        "{shown}"
    );
    let (_, page) = server.get_text("/machines").await;
    assert!(page.contains("identity tries to connect from 127.0.0.1"), "{page}");
    // The same process connects again before the server notices the end of the earlier connection.
    let again = connect("one").await.unwrap();
    assert!(first.next().await.is_none(), "the first connection ends");
    again.disconnect();
    let since = Instant::now();
    while let Err(why) = connect("two").await {
        assert!(since.elapsed() < TIMEOUT, "{why}");
    }
    server.stop().await;

    // After a power failure the machine has a new process, while the earlier connection still seems open.
    let server = TestServer::with(|config| config.lease = Duration::from_secs(10)).await;
    let token = server.agent_token("a").await;
    let _first = Agent::connect_with_token(&server, &token, hello_from("one")).await.unwrap();
    let since = Instant::now();
    while let Err(why) = Agent::connect_with_token(&server, &token, hello_from("two")).await {
        assert!(since.elapsed() < Duration::from_secs(9), "{why}");
    }
    server.stop().await;
}
