//! An agent is who its token says.

use crate::{
    agent::{Agent, hello, losses, running},
    test_server::{TIMEOUT, TestServer},
};
use futures_util::{SinkExt, StreamExt};
use lockstep_protocol::agent::{FromAgent, Source, ToAgent};
use serde_json::json;
use std::time::{Duration, Instant};
use tokio_tungstenite::{
    connect_async,
    tungstenite::{self, Message},
};

/// As somebody who has read another agent's id in the list of machines.
fn hello_as(id: &str, name: &str) -> FromAgent {
    let mut said = hello(name, 2, Vec::new());
    if let FromAgent::Hello { agent_id, .. } = &mut said {
        *agent_id = id.into();
    }
    said
}

async fn refused(server: &TestServer, token: &str, said: FromAgent) -> String {
    Agent::connect_with_token(server, token, said).await.err().expect("refused")
}

/// What comes before anybody is known is short: 16 MB of nothing would take half a gigabyte while it is decoded.
#[tokio::test]
async fn the_first_message_of_a_connection_has_a_length() {
    let server = TestServer::new().await;
    let token = server.agent_token("a").await;
    for (bytes, wanted) in [(2 << 20, "cannot be read"), ((2 << 20) + 1, "longer than the 2 MiB")] {
        let (mut socket, _) =
            connect_async(server.socket_request("/agent/socket", &token)).await.expect("a socket");
        socket.send(Message::Binary(vec![0xc0; bytes].into())).await.expect("sent");
        let closed = loop {
            match socket.next().await {
                Some(Ok(Message::Close(Some(frame)))) => break frame.reason.to_string(),
                Some(Ok(_)) => {}
                other => panic!("{bytes}: {other:?}"),
            }
        };
        assert!(closed.contains(wanted), "{bytes}: {closed}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_token_belongs_to_one_agent_and_needs_the_agent_scope() {
    let server = TestServer::new().await;
    for scope in ["read", "submit", "admin"] {
        let (_, token) = server.make_token(&json!({"name": scope, "scope": scope})).await;
        match connect_async(server.socket_request("/agent/socket", &token)).await {
            Err(tungstenite::Error::Http(response)) => assert_eq!(response.status().as_u16(), 403, "{scope}"),
            other => panic!("{scope}: {other:?}"),
        }
    }
    let a = server.agent_token("a").await;
    // Bound to the first new agent of that name, and to no other from then on.
    let said = refused(&server, &a, hello_as("id-b", "b")).await;
    assert!(said.contains("another agent") && said.contains("--agent id-b"), "{said}");
    let first = Agent::connect_with_token(&server, &a, hello_as("id-a", "a")).await.expect("its name");
    assert!(refused(&server, &a, hello_as("id-c", "a")).await.contains("another agent"));
    first.disconnect();
    // The same agent may take another name, and connect again.
    let renamed = Agent::connect_with_token(&server, &a, hello_as("id-a", "renamed")).await.expect("its id");
    let again = Agent::connect_with_token(&server, &a, hello_as("id-a", "a")).await.expect("its id");
    drop((renamed, again));

    // A token for a new agent does not become a known one's, whatever that is called.
    let fresh = server.agent_token("fresh").await;
    assert!(refused(&server, &fresh, hello_as("id-a", "fresh")).await.contains("another agent"));
    let by_name = server.agent_token("a").await;
    assert!(refused(&server, &by_name, hello_as("id-d", "a")).await.contains("another agent"));
    let known = Agent::connect_with_token(&server, &by_name, hello_as("id-a", "a")).await;
    assert!(known.is_ok(), "by its name an admin makes a known agent another token");
    assert!(Agent::connect_with_token(&server, &fresh, hello_as("id-fresh", "fresh")).await.is_ok());
    // A machine that is away keeps its name.
    let said = refused(&server, &a, hello_as("id-a", "fresh")).await;
    assert!(said.contains("the name of another machine") && said.contains("--name"), "{said}");
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
    match connect_async(server.socket_request("/agent/socket", &token)).await {
        Err(tungstenite::Error::Http(response)) => assert_eq!(response.status().as_u16(), 401),
        other => panic!("{other:?}"),
    }
    server.stop().await;
}

#[tokio::test]
async fn reports_are_accepted_only_from_the_attempt_s_agent() {
    let server = TestServer::new().await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let attempt = agent.expect_start().await.attempt;
    assert_eq!(agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0)]).await, 1);

    // Another agent, well known to the server, that has learned everything but has not been given the attempt.
    let mut other = Agent::connect(&server, hello("other", 2, Vec::new())).await.unwrap();
    let forged = |attempt, first| FromAgent::Report {
        attempt,
        source: Source::Rank(0),
        first,
        events: vec![losses(0, 1..=5)],
    };
    other.send(forged(attempt.clone(), 1)).await;
    assert!(
        matches!(other.next().await, Some(ToAgent::Stop { .. })),
        "it is told that it has no such attempt"
    );
    // The right agent that guesses the attempt's fencing token.
    let mut guessed = attempt.clone();
    guessed.fencing_token.secret ^= 1;
    agent.send(forged(guessed, 1)).await;
    assert!(matches!(agent.next().await, Some(ToAgent::Stop { .. })));
    let points = format!("SELECT count(*) FROM events WHERE job_id = '{id}' AND kind = 'metrics'");
    assert_eq!(server.query_number(&points).await, 0);
    assert_eq!(agent.report(&attempt, Source::Rank(0), 1, vec![losses(0, 1..=5)]).await, 2);
    assert_eq!(server.query_number(&points).await, 1);
    server.stop().await;
}

/// As a machine that was cloned with its agent's folder does it.
#[tokio::test]
async fn a_second_process_with_an_agent_s_identity_is_refused_while_the_first_is_alive() {
    let server = TestServer::new().await;
    let token = server.agent_token("a").await;
    let of = |name: &str| {
        let mut said = hello("a", 2, Vec::new());
        if let FromAgent::Hello { process, .. } = &mut said {
            *process = name.into();
        }
        said
    };
    let connect = async |process| Agent::connect_with_token(&server, &token, of(process)).await;
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
    // The same process is back before the server knows that its earlier connection is over.
    let again = connect("one").await.unwrap();
    assert!(first.next().await.is_none(), "its first connection ends");
    again.disconnect();
    let since = Instant::now();
    while let Err(why) = connect("two").await {
        assert!(since.elapsed() < TIMEOUT, "{why}");
    }
    server.stop().await;

    // A machine that lost its power is back, and its connection is still there.
    let server = TestServer::with(|config| config.lease = Duration::from_secs(4)).await;
    let token = server.agent_token("a").await;
    let _first = Agent::connect_with_token(&server, &token, of("one")).await.unwrap();
    let since = Instant::now();
    while let Err(why) = Agent::connect_with_token(&server, &token, of("two")).await {
        assert!(since.elapsed() < Duration::from_secs(3), "{why}");
    }
    server.stop().await;
}
