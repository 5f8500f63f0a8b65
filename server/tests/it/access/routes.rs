//! Every route and method with every kind of token: nothing is open that is not listed here, and no scope suffices that should not.

use crate::test_server::{TIMEOUT, TestServer, client_without_redirects};
use lockstep_server::{openapi, page_paths};
use reqwest::{Client, Method};
use serde_json::json;
use std::time::Instant;

/// What is open to strangers, to look at.
const OPEN: [&str; 6] =
    ["/login", "/login/oidc", "/login/oidc/callback", "/static/{*path}", "/healthz", "/readyz"];
/// What needs `admin`, whatever the method.
const ADMIN: [&str; 15] = [
    "/api/v1/tokens",
    "/api/v1/tokens/{id}",
    "/api/v1/people",
    "/api/v1/people/{name}",
    "/people",
    "/api/v1/audit",
    "/audit",
    "/api/v1/agents/{id}",
    "/api/v1/agents/{id}/drain",
    "/api/v1/agents/{id}/undrain",
    "/api/v1/webhooks",
    "/api/v1/webhooks/{id}",
    "/api/v1/webhooks/{id}/test",
    "/api/v1/webhooks/{id}/deliveries",
    "/webhooks",
];
/// What every signed-in person may do, whatever the method: it concerns nobody else.
const OWN: [&str; 4] = ["/logout", "/api/v1/login-links", "/account", "/api/v1/password"];
/// What only looks, whatever the method.
const SEARCHES: [&str; 3] = [
    "/api/2.0/mlflow/experiments/search",
    "/api/2.0/mlflow/runs/search",
    "/api/2.0/mlflow/logged-models/search",
];
pub(super) const METHODS: [Method; 7] =
    [Method::GET, Method::HEAD, Method::OPTIONS, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];

const SAFE: [Method; 3] = [Method::GET, Method::HEAD, Method::OPTIONS];

/// The scopes that suffice; none: it is open.
pub(super) fn sufficient(method: &Method, path: &str) -> Option<&'static [&'static str]> {
    let safe = SAFE.contains(method);
    if ["/login", "/healthz", "/readyz"].contains(&path) || (OPEN.contains(&path) && safe) {
        return None;
    }
    Some(match path {
        path if path.starts_with("/api/v1/agent/") => &["agent"],
        _ if ADMIN.contains(&path) => &["admin"],
        _ if safe || OWN.contains(&path) || SEARCHES.contains(&path) => &["read", "submit", "admin"],
        _ => &["submit", "admin"],
    })
}

pub(super) fn every_path() -> Vec<String> {
    let document = serde_json::to_value(openapi()).unwrap();
    let mut paths: Vec<String> = document["paths"].as_object().unwrap().keys().cloned().collect();
    paths.extend(page_paths().into_iter().map(str::to_owned));
    assert!(paths.len() > 45, "{paths:?}");
    // Addresses that there are not tell strangers nothing either.
    paths.extend(["/nothing", "/api/v1/nothing", "/jobs/x/y", "/api"].map(str::to_owned));
    paths
}

/// How a request is answered: not signed in, forbidden, or anything else.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    SignIn,
    Forbidden,
    Else(u16),
}

pub(super) async fn ask(server: &TestServer, client: &Client, method: &Method, path: &str) -> Outcome {
    let nothing =
        path.replace("{id}", "j00000000000000000000000000").replace(['{', '}', '*'], "").replace("//", "/");
    let response = client.request(method.clone(), server.url(&nothing)).send().await.unwrap();
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let to = headers.get("location").map_or("", |to| to.to_str().unwrap());
    if status == 401 {
        assert_eq!(headers["www-authenticate"], "Bearer", "{method} {path}");
        assert_eq!(headers["content-type"], "application/problem+json", "{method} {path}");
        return Outcome::SignIn;
    }
    match status {
        403 => Outcome::Forbidden,
        // The page to sign in. Signing out leads there as well, and takes the cookie away.
        303 if to.starts_with("/login") && !headers.contains_key("set-cookie") => Outcome::SignIn,
        other => Outcome::Else(other),
    }
}

#[tokio::test]
async fn open_routes_report_their_methods() {
    let server = TestServer::new().await;
    for token in ["", server.token.as_str()] {
        let client = client_without_redirects(token);
        for path in ["/healthz", "/readyz"] {
            for method in [Method::TRACE, Method::POST, Method::DELETE] {
                let response = client.request(method.clone(), server.url(path)).send().await.unwrap();
                assert_eq!(response.status().as_u16(), 405, "{method} {path}");
                assert_eq!(response.headers()["allow"], "GET,HEAD", "{method} {path}");
            }
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn every_route_refuses_missing_tokens_and_insufficient_scopes() {
    let server = TestServer::new().await;
    let mut tokens = Vec::new();
    for scope in ["read", "submit", "admin"] {
        tokens.push((scope, server.make_token(&json!({"name": scope, "scope": scope})).await.1));
    }
    tokens.push(("agent", server.agent_token("somebody").await));
    let (id, revoked) = server.make_token(&json!({"name": "revoked", "scope": "admin"})).await;
    assert_eq!(server.delete(&format!("/tokens/{id}")).await.0, 204);
    let expired = json!({"name": "expired", "scope": "admin", "expires_in_secs": 1});
    let (_, expired) = server.make_token(&expired).await;
    let since = Instant::now();
    while ask(&server, &client_without_redirects(&expired), &Method::GET, "/api/v1/jobs").await
        != Outcome::SignIn
    {
        assert!(since.elapsed() < TIMEOUT, "it never expires");
    }
    let scoped: Vec<_> =
        tokens.iter().map(|(scope, token)| (*scope, client_without_redirects(token))).collect();
    let nobody = [
        ("nobody", client_without_redirects("")),
        ("a stranger", client_without_redirects("lockstep_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")),
        ("revoked", client_without_redirects(&revoked)),
        ("expired", client_without_redirects(&expired)),
    ];
    for path in every_path() {
        for method in &METHODS {
            let enough = sufficient(method, &path);
            for (who, client) in &nobody {
                let outcome = ask(&server, client, method, &path).await;
                match enough {
                    Some(_) => assert_eq!(outcome, Outcome::SignIn, "{who}: {method} {path}"),
                    // A wrong token is answered as a failed sign-in.
                    None => assert!(
                        outcome != Outcome::Forbidden && (outcome != Outcome::SignIn || path == "/login"),
                        "{who}: {method} {path}: {outcome:?}"
                    ),
                }
            }
            for (scope, client) in &scoped {
                let outcome = ask(&server, client, method, &path).await;
                match enough {
                    Some(enough) if !enough.contains(scope) => {
                        assert_eq!(outcome, Outcome::Forbidden, "{scope}: {method} {path}");
                    }
                    _ => {
                        assert!(matches!(outcome, Outcome::Else(_)), "{scope}: {method} {path}: {outcome:?}")
                    }
                }
            }
        }
    }
    server.stop().await;
}

/// As browsers send it with what another page makes them ask: whoever is signed in, nothing is changed, not even looked up.
#[tokio::test]
async fn pages_of_other_origins_are_refused_on_every_route_that_changes_something() {
    const WORDS: &str = "requests from other web pages are refused";
    let server = TestServer::new().await;
    server.add_person("ada", "admin").await;
    let ada = server.signed_in("ada").await;
    let agent = client_without_redirects(&server.agent_token("somebody").await);
    let stranger = client_without_redirects("");
    let own = format!("http://{}", server.address);
    let mut refused = 0;
    for path in every_path() {
        let url =
            server.url(&path.replace("{id}", "j00000000000000000000000000").replace(['{', '}', '*'], ""));
        for method in METHODS.iter().filter(|method| !SAFE.contains(method)) {
            let by_cookie = || ada.client.request(method.clone(), &url).header("cookie", &ada.cookie);
            let by_token = || server.http.request(method.clone(), &url);
            // A method differs from others by nothing that a browser says of the page.
            let all = if *method == Method::POST { usize::MAX } else { 2 };
            for request in [
                by_cookie().header("origin", "https://evil.example"),
                by_cookie().header("origin", "null"),
                by_cookie().header("sec-fetch-site", "cross-site"),
                by_cookie().header("sec-fetch-site", "same-site"),
                by_token().header("origin", "https://evil.example"),
                agent.request(method.clone(), &url).header("origin", "https://evil.example"),
                stranger.request(method.clone(), &url).header("origin", "http://127.0.0.1:1"),
            ]
            .into_iter()
            .take(all)
            {
                let response = request.send().await.unwrap();
                let (status, text) = (response.status().as_u16(), response.text().await.unwrap());
                assert!(status == 403 && text.contains(WORDS), "{method} {path}: {status} {text}");
                refused += 1;
            }
            // Signed out, it would be told to sign in.
            if path != "/logout" {
                let text = by_cookie().header("origin", &own).send().await.unwrap().text().await.unwrap();
                assert!(!text.contains(WORDS), "{method} {path}: our own page");
            }
        }
    }
    assert!(refused > 1000, "{refused}");
    server.stop().await;
}

#[tokio::test]
async fn without_authentication_everything_is_open_to_this_machine() {
    let server = TestServer::with(|c| c.no_auth = true).await;
    assert!(!server.dir.path().join("token").exists(), "no token is made");
    for path in ["/jobs", "/api/v1/jobs", "/api/v1/tokens", "/audit", "/metrics"] {
        assert_eq!(server.get_text(path).await.0, 200, "{path}");
    }
    // A program that has a token for other servers need not forget it.
    let client = client_without_redirects("whatever");
    assert_eq!(server.send(client.get(server.url("/api/v1/jobs"))).await.0, 200);
    let (status, problem) = server.post("/login-links", &json!({})).await;
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("--no-auth"), "{problem}");
    server.stop().await;
}

#[tokio::test]
async fn pages_redirect_to_sign_in_and_headers_must_be_bearer_tokens() {
    let server = TestServer::new().await;
    let nobody = client_without_redirects("");
    let response = nobody.get(server.url("/jobs?state=running&name=a%20b")).send().await.unwrap();
    assert_eq!(response.status(), 303);
    assert_eq!(response.headers()["location"], "/login?next=/jobs%3Fstate%3Drunning%26name%3Da%2520b");
    let response = nobody.post(server.url("/jobs/new")).send().await.unwrap();
    assert_eq!(response.headers()["location"], "/login", "what was posted is not repeated");
    for header in ["Basic YTpi", "Bearer", "lockstep_x", "Bearer ä"] {
        let response = nobody.get(server.url("/api/v1/jobs")).header("authorization", header);
        assert_eq!(response.send().await.unwrap().status(), 401, "{header}");
    }
    let lower = nobody
        .get(server.url("/api/v1/jobs"))
        .header("authorization", format!("bearer  {}", server.token))
        .send();
    assert_eq!(lower.await.unwrap().status(), 200, "as RFC 9110 has schemes");
    server.stop().await;
}
