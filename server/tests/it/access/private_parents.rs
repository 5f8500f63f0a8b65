//! A fork that others see does not tell them which job it was made from, where that is private to its owner.

use super::{People, people};
use crate::{
    agent::{Agent, losses, running},
    document::a_job,
    test_server::{Stream, TestServer, spec},
};
use lockstep_protocol::agent::Source;
use reqwest::Client;
use serde_json::{Value, json};

/// Mona's private job, and her fork of it that all may see.
async fn forked(server: &mut TestServer, agent: &mut Agent, mona: &Client) -> (String, String) {
    let admin = std::mem::replace(&mut server.http, mona.clone());
    let (secret, _) = a_job(server, agent, |spec| {
        spec["name"] = json!("secret run");
        spec["private"] = json!(true);
    })
    .await;
    server.http = admin;
    let open = json!({"set": {"private": false}});
    let (status, fork) = server.send_as(mona, "POST", &format!("/jobs/{secret}/fork"), Some(open)).await;
    assert!(status == 201 && fork["spec"]["private"] != true, "{fork}");
    assert_eq!(fork["cause"]["words"], "forked from a private job at step 5");
    (secret, fork["id"].as_str().unwrap().to_owned())
}

/// What a person can read of a job, all of it as text.
async fn all_of(server: &TestServer, who: &Client, token: &str, id: &str) -> Vec<(String, String)> {
    let mut read = Vec::new();
    let own = [
        "",
        "/history",
        "/events",
        "/attempts",
        "/checkpoints",
        "/logs",
        "/metrics?name=loss",
        "/metrics.csv",
    ];
    let own = own.map(|path| format!("/jobs/{id}{path}"));
    let lists = [
        "/jobs?fields=id,parent,cause,reason,spec",
        "/jobs",
        "/jobs/groups?by=name",
        "/queue",
        "/annotations",
    ];
    for path in own.into_iter().chain(lists.map(str::to_owned)) {
        let response = who.get(server.url(&format!("/api/v1{path}"))).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        read.push((path, response.text().await.unwrap()));
    }
    for path in [format!("/jobs/{id}"), "/".to_owned(), "/queue".to_owned()] {
        let page = who.get(server.url(&path)).send().await.unwrap();
        assert_eq!(page.status(), 200, "{path}");
        read.push((format!("the page {path}"), page.text().await.unwrap()));
    }
    let mut stream = Stream::open(server.socket_request(&format!("/jobs/{id}/stream?since=0"), token)).await;
    let frames = stream.until(|frame| frame["type"] == "live").await;
    read.push(("the stream".to_owned(), Value::from(frames).to_string()));
    read
}

#[tokio::test]
async fn a_public_fork_names_a_private_parent_only_to_its_readers() {
    let mut server = TestServer::with(|c| c.dataset_roots = vec!["/".into()]).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let People { mona, otto, ada, .. } = people(&server).await;
    let (_, otto_s) = server.client_of("otto", "submit").await;
    let mut list = Stream::open(server.socket_request("/stream", &otto_s)).await;
    list.until(|frame| frame["type"] == "live").await;
    let (secret, fork) = forked(&mut server, &mut agent, &mona).await;
    let attempt = agent.expect_start().await.attempt;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 5), losses(0, 6..=9)]).await;

    // Others: nothing of it anywhere, neither as it is read nor as it happens.
    let read = all_of(&server, &otto, &otto_s, &fork).await;
    for (what, text) in &read {
        assert!(!text.contains(&secret) && !text.contains("secret run"), "{what}: {text}");
    }
    let happened =
        list.until(|frame| frame["job"]["id"] == *fork && frame["job"]["state"] == "running").await;
    assert!(!Value::from(happened).to_string().contains(&secret));
    let (_, history) = server.send_as(&otto, "GET", &format!("/jobs/{fork}/history"), None).await;
    let begin = (&history["parent"], &history["entries"][0]["what"], &history["entries"][0]["checkpoint"]);
    assert_eq!(begin, (&Value::Null, &json!("forked"), &json!(format!("{fork}-1-5"))), "{history}");

    // Those who see it are told, and it names its fork to them.
    for (name, who) in [("mona", &mona), ("ada", &ada)] {
        let (_, job) = server.send_as(who, "GET", &format!("/jobs/{fork}"), None).await;
        let parent = json!({"job": secret, "checkpoint": format!("{secret}-1-5")});
        assert_eq!(job["parent"], parent, "{name}");
        let (_, history) = server.send_as(who, "GET", &format!("/jobs/{fork}/history"), None).await;
        assert_eq!(
            (&history["parent"]["job"], &history["parent"]["name"]),
            (&json!(secret), &json!("secret run"))
        );
        let (_, history) = server.send_as(who, "GET", &format!("/jobs/{secret}/history"), None).await;
        let forks = (&history["forks"][0]["job"], &history["forks"][0]["checkpoint"]);
        assert_eq!(forks, (&json!(fork), &json!(format!("{secret}-1-5"))), "{history}");
        let page = who.get(server.url(&format!("/jobs/{fork}"))).send().await.unwrap().text().await.unwrap();
        assert!(page.contains(&format!("href=\"/jobs/{secret}\"")), "{name}: the page links to it");
    }

    // When it is gone, as well.
    assert_eq!(server.send_as(&mona, "DELETE", &format!("/jobs/{secret}"), None).await.0, 204);
    for (what, text) in all_of(&server, &otto, &otto_s, &fork).await {
        assert!(!text.contains(&secret), "{what}: {text}");
    }
    server.stop().await;
}

#[tokio::test]
async fn forks_name_public_parents_and_own_private_ones() {
    let mut server = TestServer::with(|c| c.dataset_roots = vec!["/".into()]).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let People { mona, otto, .. } = people(&server).await;
    server.http = mona.clone();
    for private in [false, true] {
        let (id, checkpoint) = a_job(&server, &mut agent, |spec| spec["private"] = json!(private)).await;
        let (status, fork) = server.post(&format!("/jobs/{id}/fork"), &json!({})).await;
        assert_eq!((status, &fork["parent"]["checkpoint"]), (201, &json!(checkpoint)), "{fork}");
        assert_eq!(fork["cause"]["job"], json!(id));
        let fork = fork["id"].as_str().unwrap();
        let attempt = agent.expect_start().await.attempt;
        let ended = lockstep_protocol::agent::Ending::Succeeded { step: 100 };
        agent.end(&attempt, ended).await;
        let (_, history) = server.get(&format!("/jobs/{fork}/history")).await;
        assert_eq!(history["entries"][0]["checkpoint"], json!(checkpoint), "{history}");
    }
    // A private fork of a job that all see is named to others nowhere.
    let (id, _) = a_job(&server, &mut agent, |_| {}).await;
    let private = json!({"set": {"private": true}});
    let (status, fork) = server.post(&format!("/jobs/{id}/fork"), &private).await;
    assert_eq!(status, 201, "{fork}");
    let (_, otto_s) = server.client_of("otto", "submit").await;
    for (what, text) in all_of(&server, &otto, &otto_s, &id).await {
        assert!(!text.contains(fork["id"].as_str().unwrap()), "{what}: {text}");
    }
    // A job that was no fork was submitted.
    let (status, job) = server.post("/jobs", &spec()).await;
    assert_eq!(status, 201, "{job}");
    let (_, history) = server.get(&format!("/jobs/{}/history", job["id"].as_str().unwrap())).await;
    assert_eq!(history["entries"][0]["what"], "submitted");
    server.stop().await;
}
