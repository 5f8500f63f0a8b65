//! Tries every route and method without a token and with each scope. The tables below say which scopes each route accepts.

use crate::test_server::{TestServer, assert_refused, client_without_redirects, wait_until};
use lockstep_server::{openapi, page_paths};
use reqwest::{Client, Method};
use serde_json::json;
use tokio_tungstenite::connect_async;

/// Routes that need no token.
const OPEN: [&str; 6] =
    ["/login", "/login/oidc", "/login/oidc/callback", "/static/{*path}", "/healthz", "/readyz"];
/// Routes that need `admin` for all methods.
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
/// Routes that every signed-in person may use with all methods, because they affect only this person.
const OWN: [&str; 4] = ["/logout", "/api/v1/login-links", "/account", "/api/v1/password"];
/// Routes that only read, also with POST.
const SEARCHES: [&str; 4] = [
    "/api/v1/jobs/form",
    "/api/2.0/mlflow/experiments/search",
    "/api/2.0/mlflow/runs/search",
    "/api/2.0/mlflow/logged-models/search",
];
pub(super) const METHODS: [Method; 7] =
    [Method::GET, Method::HEAD, Method::OPTIONS, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];

/// Methods that change nothing.
pub(super) const SAFE: [Method; 3] = [Method::GET, Method::HEAD, Method::OPTIONS];

/// The scopes that a route accepts; `None` for an open route.
pub(super) fn sufficient_scopes(method: &Method, path: &str) -> Option<&'static [&'static str]> {
    let is_safe = SAFE.contains(method);
    if OPEN.contains(&path) {
        return None;
    }
    Some(match path {
        path if path.starts_with("/api/v1/agent/") => &["agent"],
        _ if ADMIN.contains(&path) => &["admin"],
        _ if is_safe || OWN.contains(&path) || SEARCHES.contains(&path) => &["read", "submit", "admin"],
        _ => &["submit", "admin"],
    })
}

pub(super) fn every_path() -> Vec<String> {
    let document = openapi();
    let mut paths: Vec<String> = document["paths"].as_object().unwrap().keys().cloned().collect();
    paths.extend(page_paths().into_iter().map(str::to_owned));
    assert!(paths.len() > 45, "{paths:?}");
    // Paths without a route also need a token, so that strangers cannot find out which routes exist.
    paths.extend(["/nothing", "/api/v1/nothing", "/jobs/x/y", "/api"].map(str::to_owned));
    paths
}

/// The response to a request: not signed in, forbidden, or another status.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    SignIn,
    Forbidden,
    Status(u16),
}

pub(super) async fn send_request(
    server: &TestServer,
    client: &Client,
    method: &Method,
    path: &str,
) -> Outcome {
    let concrete =
        path.replace("{id}", "j00000000000000000000000000").replace(['{', '}', '*'], "").replace("//", "/");
    let response = client.request(method.clone(), server.url(&concrete)).send().await.unwrap();
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let location = headers.get("location").map_or("", |location| location.to_str().unwrap());
    if status == 401 {
        assert_eq!(headers["www-authenticate"], "Bearer", "{method} {path}");
        let is_mlflow = ["/api/2.0/mlflow", "/api/3.0/mlflow"].iter().any(|prefix| path.starts_with(prefix));
        let content_type = if is_mlflow { "application/json" } else { "application/problem+json" };
        assert_eq!(headers["content-type"], content_type, "{method} {path}");
        return Outcome::SignIn;
    }
    match status {
        403 => Outcome::Forbidden,
        // The page to sign in. Signing out also redirects there, but removes the cookie.
        303 if location.starts_with("/login") && !headers.contains_key("set-cookie") => Outcome::SignIn,
        other => Outcome::Status(other),
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
    let with_expired = client_without_redirects(&expired);
    wait_until("the token expires", async || {
        send_request(&server, &with_expired, &Method::GET, "/api/v1/jobs").await == Outcome::SignIn
    })
    .await;
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
            let accepted = sufficient_scopes(method, &path);
            for (who, client) in &nobody {
                let outcome = send_request(&server, client, method, &path).await;
                match accepted {
                    Some(_) => assert_eq!(outcome, Outcome::SignIn, "{who}: {method} {path}"),
                    // On /login, a wrong token is a failed sign-in.
                    None => assert!(
                        outcome != Outcome::Forbidden && (outcome != Outcome::SignIn || path == "/login"),
                        "{who}: {method} {path}: {outcome:?}"
                    ),
                }
            }
            for (scope, client) in &scoped {
                let outcome = send_request(&server, client, method, &path).await;
                match accepted {
                    Some(accepted) if !accepted.contains(scope) => {
                        assert_eq!(outcome, Outcome::Forbidden, "{scope}: {method} {path}");
                    }
                    _ => {
                        assert!(
                            matches!(outcome, Outcome::Status(_)),
                            "{scope}: {method} {path}: {outcome:?}"
                        )
                    }
                }
            }
        }
    }
    server.stop().await;
}

/// Sends requests with the headers that browsers add if another web page causes the request.
#[tokio::test]
async fn pages_of_other_origins_are_refused_on_every_route_that_changes_something() {
    const REFUSAL: &str = "requests from other web pages are refused";
    let server = TestServer::new().await;
    server.add_person("ada", "admin").await;
    let ada = server.signed_in("ada").await;
    let agent = client_without_redirects(&server.agent_token("somebody").await);
    let stranger = client_without_redirects("");
    let own_origin = format!("http://{}", server.address);
    let mut refused = 0;
    for path in every_path() {
        let url =
            server.url(&path.replace("{id}", "j00000000000000000000000000").replace(['{', '}', '*'], ""));
        for method in METHODS.iter().filter(|method| !SAFE.contains(method)) {
            let by_cookie = || ada.client.request(method.clone(), &url).header("cookie", &ada.cookie);
            let by_token = || server.http.request(method.clone(), &url);
            // The check does not depend on the method, so other methods than POST get only two of the requests.
            let count = if *method == Method::POST { usize::MAX } else { 2 };
            for request in [
                by_cookie().header("origin", "https://evil.example"),
                by_cookie().header("origin", "null"),
                by_cookie().header("origin", ""),
                by_cookie().header("sec-fetch-site", "cross-site"),
                by_cookie().header("sec-fetch-site", "same-site"),
                by_token().header("origin", "https://evil.example"),
                agent.request(method.clone(), &url).header("origin", "https://evil.example"),
                stranger.request(method.clone(), &url).header("origin", "http://127.0.0.1:1"),
            ]
            .into_iter()
            .take(count)
            {
                let response = request.send().await.unwrap();
                let (status, text) = (response.status().as_u16(), response.text().await.unwrap());
                assert!(status == 403 && text.contains(REFUSAL), "{method} {path}: {status} {text}");
                refused += 1;
            }
            // After POST /logout, all requests of this cookie would be redirected to sign in.
            if path != "/logout" {
                let text =
                    by_cookie().header("origin", &own_origin).send().await.unwrap().text().await.unwrap();
                assert!(!text.contains(REFUSAL), "{method} {path}: from the server's own page");
            }
        }
    }
    assert!(refused > 1000, "{refused}");
    let mut websocket = server.socket_request("/stream", &server.token);
    websocket.headers_mut().insert("origin", own_origin.parse().unwrap());
    assert!(connect_async(websocket).await.is_ok());
    server.stop().await;
}

#[tokio::test]
async fn with_no_auth_every_route_is_open_to_this_machine() {
    let server = TestServer::with(|c| c.no_auth = true).await;
    assert!(!server.dir.path().join("token").exists(), "the server creates no token");
    for path in ["/jobs", "/api/v1/jobs", "/api/v1/tokens", "/account", "/audit", "/metrics"] {
        assert_eq!(server.get_text(path).await.0, 200, "{path}");
    }
    // A token for another server is ignored.
    let client = client_without_redirects("whatever");
    assert_eq!(server.send(client.get(server.url("/api/v1/jobs"))).await.0, 200);
    assert_refused(server.post("/login-links", &json!({})).await, 409, "--no-auth");
    let person = json!({"name": "ada", "role": "admin", "password": "correct horse"});
    assert_refused(server.post("/people", &person).await, 409, "--no-auth");
    server.stop().await;
}

#[tokio::test]
async fn pages_redirect_to_sign_in_and_headers_must_be_bearer_tokens() {
    let server = TestServer::new().await;
    let nobody = client_without_redirects("");
    for (method, path, location) in [
        (Method::GET, "/", "/login"),
        (Method::GET, "/jobs?name=a%20b&owner=c", "/login?next=/jobs%3Fname%3Da%2520b%26owner%3Dc"),
        // The sign-in page does not repeat a POST.
        (Method::POST, "/jobs/new", "/login"),
    ] {
        let response = nobody.request(method, server.url(path)).send().await.unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.headers()["location"]),
            (303, &location.parse().unwrap())
        );
    }
    for header in ["Basic YTpi", "Bearer", "lockstep_x", "Bearer ä"] {
        let response = nobody.get(server.url("/api/v1/jobs")).header("authorization", header);
        assert_eq!(response.send().await.unwrap().status(), 401, "{header}");
    }
    let lower_case = nobody
        .get(server.url("/api/v1/jobs"))
        .header("authorization", format!("bearer  {}", server.token))
        .send();
    assert_eq!(lower_case.await.unwrap().status(), 200, "schemes ignore case (RFC 9110)");
    server.stop().await;
}
