//! A public fork of a private job does not show its parent to other people.

use super::{People, add_people};
use crate::{
    agent::{Agent, losses, running, server_with_agent},
    document::create_failed_job,
    test_server::{Stream, TestServer},
};
use lockstep_protocol::agent::Source;
use reqwest::Client;
use serde_json::{Value, json};

/// Creates a private job of Mona and a public fork of it. Returns both ids.
async fn create_public_fork(server: &mut TestServer, agent: &mut Agent, mona: &Client) -> (String, String) {
    let admin = std::mem::replace(&mut server.http, mona.clone());
    let (secret, _) = create_failed_job(server, agent, |spec| {
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

/// Returns everything that a person can read about a job: pairs of a name and a text.
async fn read_everything(server: &TestServer, who: &Client, token: &str, id: &str) -> Vec<(String, String)> {
    let mut texts = Vec::new();
    let job_paths = [
        "",
        "/history",
        "/events",
        "/attempts",
        "/checkpoints",
        "/logs",
        "/metrics?name=loss",
        "/metrics.csv",
    ];
    let job_paths = job_paths.map(|path| format!("/jobs/{id}{path}"));
    let list_paths = [
        "/jobs?fields=id,parent,cause,reason,spec",
        "/jobs",
        "/jobs/groups?by=name",
        "/queue",
        "/annotations",
    ];
    for path in job_paths.into_iter().chain(list_paths.map(str::to_owned)) {
        let response = who.get(server.url(&format!("/api/v1{path}"))).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        texts.push((path, response.text().await.unwrap()));
    }
    for path in [format!("/jobs/{id}"), "/".to_owned(), "/queue".to_owned()] {
        let page = who.get(server.url(&path)).send().await.unwrap();
        assert_eq!(page.status(), 200, "{path}");
        texts.push((format!("the page {path}"), page.text().await.unwrap()));
    }
    let mut stream = Stream::open(server.socket_request(&format!("/jobs/{id}/stream?since=0"), token)).await;
    let frames = stream.until(|frame| frame["type"] == "live").await;
    texts.push(("the stream".to_owned(), Value::from(frames).to_string()));
    texts
}

#[tokio::test]
async fn a_public_fork_shows_a_private_parent_only_to_its_readers() {
    let (mut server, mut agent) = server_with_agent(2).await;
    let People { mona, otto, otto_secret, ada, .. } = add_people(&server).await;
    let mut list = server.stream_list(&otto_secret).await;
    let (secret, fork) = create_public_fork(&mut server, &mut agent, &mona).await;
    let attempt = agent.expect_start().await.attempt;
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 5), losses(0, 6..=9)]).await;

    // For others, neither responses nor streams contain the parent.
    let texts = read_everything(&server, &otto, &otto_secret, &fork).await;
    for (source, text) in &texts {
        assert!(!text.contains(&secret) && !text.contains("secret run"), "{source}: {text}");
    }
    let frames = list.until(|frame| frame["job"]["id"] == *fork && frame["job"]["state"] == "running").await;
    assert!(!Value::from(frames).to_string().contains(&secret));
    let (_, history) = server.send_as(&otto, "GET", &format!("/jobs/{fork}/history"), None).await;
    let begin = (&history["parent"], &history["entries"][0]["what"], &history["entries"][0]["checkpoint"]);
    assert_eq!(begin, (&Value::Null, &json!("forked"), &json!(format!("{fork}-1-5"))), "{history}");

    // For people who may see the parent, the fork names its parent, and the parent names its fork.
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
        assert!(
            page.contains(&format!("href=\"/jobs/{secret}\"")),
            "{name}: the fork's page links to the parent"
        );
    }

    // The deleted parent is not shown either.
    assert_eq!(server.send_as(&mona, "DELETE", &format!("/jobs/{secret}"), None).await.0, 204);
    for (source, text) in read_everything(&server, &otto, &otto_secret, &fork).await {
        assert!(!text.contains(&secret), "{source}: {text}");
    }
    server.stop().await;
}

#[tokio::test]
async fn forks_show_public_parents_and_own_private_parents() {
    let (mut server, mut agent) = server_with_agent(2).await;
    let People { mona, otto, otto_secret, .. } = add_people(&server).await;
    server.http = mona.clone();
    for private in [false, true] {
        let (id, checkpoint) =
            create_failed_job(&server, &mut agent, |spec| spec["private"] = json!(private)).await;
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
    // A public job does not show its private forks to others.
    let (id, _) = create_failed_job(&server, &mut agent, |_| {}).await;
    let private = json!({"set": {"private": true}});
    let fork = server.create(&format!("/jobs/{id}/fork"), &private).await;
    for (source, text) in read_everything(&server, &otto, &otto_secret, &id).await {
        assert!(!text.contains(fork["id"].as_str().unwrap()), "{source}: {text}");
    }
    // The history of a job that is not a fork begins with its submission.
    let job = server.submit(|_| {}).await;
    let history = server.get_ok(&format!("/jobs/{}/history", job.id)).await;
    assert_eq!(history["entries"][0]["what"], "submitted");
    server.stop().await;
}
