//! Every route and method as a viewer, as the member whose job it is, and as another member; with a private job and with an open one; by
//! tokens that these people have made and by the sessions of their browsers.

use super::routes::{METHODS, Outcome, ask, every_path, sufficient};
use crate::{
    agent::{Agent, dataset_info},
    document::a_job,
    test_server::{TestServer, client, client_builder, client_without_redirects, spec},
};
use reqwest::{Client, Method, header::HeaderMap};
use serde_json::json;

/// What a member reads of others by a method that may change something.
const READING: [&str; 3] =
    ["/api/v1/jobs/{id}/fork", "/api/v1/jobs/{id}/fork/check", "/api/v1/checkpoints/{id}/predict"];
/// Where a person finds what is its own.
const OWN_TOKENS: [&str; 2] = ["/api/v1/tokens", "/api/v1/tokens/{id}"];

fn is_about(path: &str) -> bool {
    let starts = [
        "/jobs/{id}",
        "/api/v1/jobs/{id}",
        "/api/v1/runs/{id}",
        "/api/v1/checkpoints/{id}",
        "/api/v1/datasets/{name}",
        "/sweeps/{id}",
        "/api/v1/sweeps/{id}",
        "/models/{name}",
        "/api/v1/models/{name}",
    ];
    starts.iter().any(|start| path.starts_with(start))
}

/// How people show who they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Token,
    Session,
}

impl By {
    /// Somebody's program or browser; `token` is one that the person has made.
    async fn client(self, server: &TestServer, name: &str, token: &str) -> Client {
        if self == By::Token {
            return client_without_redirects(token);
        }
        let cookie = server.signed_in(name).await.cookie.parse().unwrap();
        let headers = HeaderMap::from_iter([(reqwest::header::COOKIE, cookie)]);
        let client = client_builder("").default_headers(headers).redirect(reqwest::redirect::Policy::none());
        client.build().unwrap()
    }
}

#[tokio::test]
async fn every_route_as_viewer_as_member_and_as_another_member() {
    walk(By::Token).await;
}

#[tokio::test]
async fn every_route_in_the_browsers_of_a_viewer_a_member_and_another_member() {
    walk(By::Session).await;
}

async fn walk(by: By) {
    let mut server = TestServer::with(|c| c.dataset_roots = vec!["/".into()]).await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    for (name, role) in [("vera", "viewer"), ("mona", "member"), ("otto", "member")] {
        server.add_person(name, role).await;
    }
    let mut people = Vec::new();
    for (name, scope) in [("vera", "read"), ("otto", "submit"), ("mona", "submit")] {
        people.push((name, scope, server.client_of(name, scope).await.1));
    }
    let mona = people[2].2.clone();
    server.http = client(&mona);
    let mut objects = Vec::new();
    for (private, dataset) in [(true, "hidden"), (false, "open")] {
        let (job, checkpoint) = a_job(&server, &mut agent, |spec| spec["private"] = private.into()).await;
        let new = json!({"name": dataset, "path": format!("/{dataset}"), "private": private});
        let ((status, made), ()) =
            tokio::join!(server.post("/datasets", &new), agent.answer_inspection(Ok(dataset_info())));
        assert_eq!(status, 201, "{made}");
        // A model of the same name.
        assert_eq!(server.post("/models", &json!({"name": dataset, "job": job})).await.0, 201);
        let alias = server.http.put(server.url(&format!("/api/v1/models/{dataset}/aliases/champion")));
        assert_eq!(server.send(alias.json(&json!({"version": 1}))).await.0, 200);
        objects.push((private, job, checkpoint, dataset));
    }
    agent.disconnect();
    let mut sweeps = Vec::new();
    for (private, ..) in &objects {
        let mut swept = spec();
        swept["private"] = (*private).into();
        swept["sweep"] = json!({"method": "grid", "parameters": {"train.lr": {"values": [0.1]}}});
        let (status, made) = server.post("/sweeps", &swept).await;
        assert_eq!(status, 201, "{made}");
        sweeps.push(made["id"].as_str().unwrap().to_owned());
    }
    // What others do is refused, so the owner finds all of it, and takes it away at last.
    for (name, scope, token) in &people {
        let mut who = by.client(&server, name, token).await;
        for ((private, job, checkpoint, dataset), sweep) in objects.iter().zip(&sweeps) {
            for path in every_path() {
                let id = match path.as_str() {
                    path if path.contains("/checkpoints/{id}") => checkpoint,
                    path if path.contains("/sweeps/{id}") => sweep,
                    _ => job,
                };
                let real = path.replace("{id}", id).replace("{file}", "model.safetensors");
                let real = real.replace("{version}", "1").replace("{alias}", "champion");
                let real = real.replace("{name}", if path.contains("/people/") { "vera" } else { dataset });
                // What looks without an answer's body is asked by tokens.
                let is_asked =
                    |method: &&Method| by == By::Token || ![Method::HEAD, Method::OPTIONS].contains(method);
                for method in METHODS.iter().filter(is_asked) {
                    let safe = [Method::GET, Method::HEAD, Method::OPTIONS].contains(method);
                    // Its own: the answers differ as it takes them away, and none is 403.
                    let owns = *name == "mona" && is_about(&path);
                    let outcome = ask(&server, &who, method, &real).await;
                    let what = format!("{name} by {by:?}: {method} {path} (private: {private}): {outcome:?}");
                    if by == By::Session && path == "/logout" && *method == Method::POST {
                        assert_eq!(
                            ask(&server, &who, &Method::GET, "/jobs").await,
                            Outcome::SignIn,
                            "{what}"
                        );
                        who = by.client(&server, name, token).await;
                        continue;
                    }
                    let enough = sufficient(method, &path).is_none_or(|enough| enough.contains(scope));
                    if !enough && !OWN_TOKENS.contains(&path.as_str()) {
                        assert_eq!(outcome, Outcome::Forbidden, "{what}");
                    } else if is_about(&path) && !owns && *private {
                        assert_eq!(outcome, Outcome::Else(404), "{what}");
                    } else if is_about(&path) && !owns && !safe && !READING.contains(&path.as_str()) {
                        assert_eq!(outcome, Outcome::Forbidden, "{what}");
                    } else {
                        assert!(matches!(outcome, Outcome::Else(_)), "{what}");
                        // Unless it has taken it away.
                        if is_about(&path) && safe && *name != "mona" {
                            assert_ne!(outcome, Outcome::Else(404), "{what}");
                        }
                    }
                }
            }
        }
    }
    server.stop().await;
}
