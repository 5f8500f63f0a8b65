//! Tries every route and method as a viewer, as the owner of a job and as another member, for a private job and a public job, with tokens
//! and with sessions.

use super::routes::{METHODS, Outcome, SAFE, every_path, send_request, sufficient_scopes};
use crate::{
    agent::{Agent, dataset_info},
    document::create_failed_job,
    test_server::{TestServer, client, client_builder, client_without_redirects, spec},
};
use reqwest::{Client, Method, header::HeaderMap};
use serde_json::json;

/// Routes with unsafe methods that need only the right to read the object.
const READ_ONLY: [&str; 3] =
    ["/api/v1/jobs/{id}/fork", "/api/v1/jobs/{id}/fork/check", "/api/v1/checkpoints/{id}/predict"];
/// Routes with which every person manages tokens of their own.
const OWN_TOKENS: [&str; 2] = ["/api/v1/tokens", "/api/v1/tokens/{id}"];

/// Whether a route belongs to an object with an owner.
fn is_of_object(path: &str) -> bool {
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

/// The kind of credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Token,
    Session,
}

impl By {
    /// A client of a person. `token` is a token of this person.
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
async fn every_route_with_tokens_of_a_viewer_an_owner_and_another_member() {
    try_all_routes(By::Token).await;
}

#[tokio::test]
async fn every_route_with_sessions_of_a_viewer_an_owner_and_another_member() {
    try_all_routes(By::Session).await;
}

async fn try_all_routes(by: By) {
    // Members may register only folders below a root.
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
        let (job, checkpoint) =
            create_failed_job(&server, &mut agent, |spec| spec["private"] = private.into()).await;
        let new = json!({"name": dataset, "path": format!("/{dataset}"), "private": private});
        agent.register_dataset(&server, &new, dataset_info()).await;
        // A model with the same name as the dataset.
        assert_eq!(server.post("/models", &json!({"name": dataset, "job": job})).await.0, 201);
        let alias = format!("/models/{dataset}/aliases/champion");
        assert_eq!(server.put(&alias, &json!({"version": 1})).await.0, 200);
        objects.push((private, job, checkpoint, dataset));
    }
    agent.disconnect();
    let mut sweeps = Vec::new();
    for (private, ..) in &objects {
        let mut spec = spec();
        spec["private"] = (*private).into();
        spec["sweep"] = json!({"method": "grid", "parameters": {"train.lr": {"values": [0.1]}}});
        let sweep = server.create("/sweeps", &spec).await;
        sweeps.push(sweep["id"].as_str().unwrap().to_owned());
    }
    // The owner comes last, because the owner's requests delete the objects. The server refuses the requests of the people before.
    for (name, scope, token) in &people {
        let mut who = by.client(&server, name, token).await;
        for ((private, job, checkpoint, dataset), sweep) in objects.iter().zip(&sweeps) {
            for path in every_path() {
                let id = match path.as_str() {
                    path if path.contains("/checkpoints/{id}") => checkpoint,
                    path if path.contains("/sweeps/{id}") => sweep,
                    _ => job,
                };
                let target = path.replace("{id}", id).replace("{file}", "model.safetensors");
                let target = target.replace("{version}", "1").replace("{alias}", "champion");
                let target =
                    target.replace("{name}", if path.contains("/people/") { "vera" } else { dataset });
                // Methods without a body are tried only with tokens.
                let is_tried =
                    |method: &&Method| by == By::Token || ![Method::HEAD, Method::OPTIONS].contains(method);
                for method in METHODS.iter().filter(is_tried) {
                    let is_safe = SAFE.contains(method);
                    let is_read_only = is_safe || READ_ONLY.contains(&path.as_str());
                    // The owner's requests delete the objects, so the owner's responses vary, but none is 403.
                    let is_owner = *name == "mona" && is_of_object(&path);
                    let outcome = send_request(&server, &who, method, &target).await;
                    let what = format!("{name} by {by:?}: {method} {path} (private: {private}): {outcome:?}");
                    if by == By::Session && path == "/logout" && *method == Method::POST {
                        assert_eq!(
                            send_request(&server, &who, &Method::GET, "/jobs").await,
                            Outcome::SignIn,
                            "{what}"
                        );
                        who = by.client(&server, name, token).await;
                        continue;
                    }
                    let has_scope = sufficient_scopes(method, &path).is_none_or(|s| s.contains(scope));
                    if !has_scope && !OWN_TOKENS.contains(&path.as_str()) {
                        assert_eq!(outcome, Outcome::Forbidden, "{what}");
                    } else if is_of_object(&path) && !is_owner && *private {
                        assert_eq!(outcome, Outcome::Status(404), "{what}");
                    } else if is_of_object(&path) && !is_owner && !is_read_only {
                        assert_eq!(outcome, Outcome::Forbidden, "{what}");
                    } else {
                        assert!(matches!(outcome, Outcome::Status(_)), "{what}");
                        // The object still exists, because only the owner deletes it.
                        if is_of_object(&path) && is_safe && *name != "mona" {
                            assert_ne!(outcome, Outcome::Status(404), "{what}");
                        }
                    }
                }
            }
        }
    }
    server.stop().await;
}
