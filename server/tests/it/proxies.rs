//! The server behind a proxy: forwarded headers, host names and origins, rate limits, and the access log.

use crate::{
    starting::start_error,
    test_server::{
        TestServer, client, client_without_redirects, config, refused_status, wait_until, with_form,
    },
};
use lockstep_server::AccessLogTo;
use serde_json::json;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};
use tokio_tungstenite::connect_async;

const PUBLIC: &str = "https://lockstep.example.org";

/// Starts a server behind a proxy at 127.0.0.1.
async fn behind_proxy(change: impl FnOnce(&mut lockstep_server::ServeConfig)) -> TestServer {
    TestServer::with(|c| {
        c.trusted_proxies = vec!["127.0.0.1".parse().unwrap()];
        c.public_url = Some(PUBLIC.parse().unwrap());
        change(c);
    })
    .await
}

#[tokio::test]
async fn host_names_and_origins_must_be_those_of_the_public_url() {
    let server = behind_proxy(|_| {}).await;
    let get = |host: &str, forwarded: &[(&str, &str)]| {
        let mut request = server.http.get(server.url("/healthz")).header("host", host);
        for (name, value) in forwarded {
            request = request.header(*name, *value);
        }
        async move { request.send().await.unwrap() }
    };
    for (host, forwarded, status) in [
        ("lockstep.example.org", None, 200),
        ("Lockstep.Example.org:8443", None, 200),
        ("localhost", None, 200),
        ("evil.example", None, 421),
        ("127.0.0.1", Some("lockstep.example.org"), 200),
        ("127.0.0.1", Some("evil.example"), 421),
        ("evil.example", Some("lockstep.example.org"), 421),
        ("127.0.0.1", Some("evil.example, lockstep.example.org"), 200),
        ("127.0.0.1", Some("lockstep.example.org, evil.example"), 421),
        ("lockstep.example.org.evil.example", None, 421),
    ] {
        let headers: Vec<_> = forwarded.map(|host| ("x-forwarded-host", host)).into_iter().collect();
        let response = get(host, &headers).await;
        assert_eq!(response.status().as_u16(), status, "{host} {forwarded:?}");
        assert!(!response.headers().contains_key("strict-transport-security"), "no HSTS over HTTP");
    }
    // HSTS is set for the public name over HTTPS, and for no other name of the machine.
    let https = ("x-forwarded-proto", "https");
    let response = get("lockstep.example.org", &[https]).await;
    assert_eq!(response.headers()["strict-transport-security"], "max-age=31536000");
    assert!(!get("localhost", &[https]).await.headers().contains_key("strict-transport-security"));

    let post = async |origin: &str, proto: &str| {
        let request = server.http.post(server.url("/api/v1/jobs")).header("host", "lockstep.example.org");
        let request = request.header("origin", origin).header("x-forwarded-proto", proto);
        server.send(request.json(&crate::test_server::spec())).await.0
    };
    // 422: the origin is accepted, but there is no dataset.
    for (origin, proto, status) in [
        (PUBLIC, "https", 422),
        (PUBLIC, "http", 422),
        ("http://lockstep.example.org", "https", 403),
        ("https://lockstep.example.org:8443", "https", 403),
        ("https://evil.example", "https", 403),
        ("https://lockstep.example.org.evil.example", "https", 403),
        ("null", "https", 403),
    ] {
        assert_eq!(post(origin, proto).await, status, "{origin} {proto}");
    }
    let websocket_request = |origin: &str| {
        let mut request = server.socket_request("/stream", &server.token);
        request.headers_mut().insert("origin", origin.parse().unwrap());
        request.headers_mut().insert("host", "lockstep.example.org".parse().unwrap());
        request
    };
    assert!(connect_async(websocket_request(PUBLIC)).await.is_ok());
    assert_eq!(refused_status(websocket_request("https://evil.example")).await, 403);
    server.stop().await;
}

#[tokio::test]
async fn a_browser_signs_in_through_the_proxy_with_its_own_address() {
    let server = behind_proxy(|_| {}).await;
    let link = server.create("/login-links", &serde_json::json!({})).await;
    let url = link["url"].as_str().unwrap();
    let path = url.strip_prefix(PUBLIC).unwrap_or_else(|| panic!("{url}"));
    let request = client_without_redirects("").get(server.url(path)).header("x-forwarded-proto", "https");
    let response = request.header("x-forwarded-for", "203.0.113.7").send().await.unwrap();
    let cookie = response.headers()["set-cookie"].to_str().unwrap();
    assert!(cookie.contains("; Secure"), "{cookie}");
    let (_, audit) = server.get("/audit").await;
    let entry = &audit["entries"][0];
    assert_eq!((&entry["action"], &entry["address"]), (&"sign in".into(), &"203.0.113.7".into()), "{audit}");
    // Failed attempts count per client, not per proxy.
    let guess = async |from: &str| {
        let request = client_without_redirects("").post(server.url("/login")).header("x-forwarded-for", from);
        with_form(request, "token=x").send().await.unwrap().status().as_u16()
    };
    for _ in 0..10 {
        assert_eq!(guess("203.0.113.7").await, 401);
    }
    assert_eq!(guess("203.0.113.7").await, 429);
    assert_eq!(guess("203.0.113.8").await, 401);
    server.stop().await;
}

#[tokio::test]
async fn forwarded_headers_are_trusted_only_from_the_proxy() {
    let server = TestServer::with(|c| {
        c.trusted_proxies = vec!["192.0.2.77".parse().unwrap()];
        c.public_url = Some(PUBLIC.parse().unwrap());
    })
    .await;
    let request = server.http.get(server.url("/healthz")).header("x-forwarded-host", "localhost");
    let request = request.header("host", "evil.example").header("x-forwarded-proto", "https");
    assert_eq!(request.send().await.unwrap().status().as_u16(), 421);
    let request = server.http.get(server.url("/healthz")).header("x-forwarded-proto", "https");
    let response = request.header("host", "lockstep.example.org").send().await.unwrap();
    assert!(!response.headers().contains_key("strict-transport-security"));
    server.stop().await;
}

#[tokio::test]
async fn the_rate_limit_of_an_address_does_not_apply_to_agents() {
    let server = behind_proxy(|c| c.requests_per_second = 1).await;
    let token = server.agent_token("a").await;
    let (agent, unknown, admin) = (client(&token), client(&"x".repeat(43)), client(&server.token));
    let ask = async |caller: &reqwest::Client| {
        let request = caller.get(server.url("/api/v1/agent/socket")).header("x-forwarded-for", "203.0.113.7");
        request.send().await.unwrap().status().as_u16()
    };
    // 426: the agent is authenticated, but the request is not a websocket.
    for n in 0..30 {
        assert_eq!(ask(&agent).await, 426, "{n}");
    }
    // Other clients with this address are limited to one request per second, with any token.
    for caller in [&unknown, &admin] {
        let mut responses = Vec::new();
        while responses.last() != Some(&429) {
            responses.push(ask(caller).await);
            assert!(responses.len() < 20, "{responses:?}");
        }
    }
    server.stop().await;
}

/// Sends requests, numbered from 0, until a limit of five a second refuses one. Returns the response to the refused request.
async fn until_limited(ask: impl AsyncFn(usize) -> reqwest::Response) -> reqwest::Response {
    let start = Instant::now();
    for accepted in 0..1000 {
        let response = ask(accepted).await;
        if response.status().as_u16() == 429 {
            let max = 50 + (start.elapsed().as_secs_f64() * 5.0).ceil() as usize;
            assert!((50..=max).contains(&accepted), "{accepted} of {max}");
            assert_eq!(response.headers()["retry-after"], "1");
            assert_eq!(response.headers()["content-type"], "application/problem+json");
            return response;
        }
        assert_eq!(response.status().as_u16(), 200);
    }
    panic!("no limit is reached");
}

#[tokio::test]
async fn rate_limited_addresses_are_told_when_to_retry() {
    let server = behind_proxy(|c| c.requests_per_second = 5).await;
    let ask = async |forwarded: &str| {
        let request = server.http.get(server.url("/api/v1/jobs")).header("x-forwarded-for", forwarded);
        request.send().await.unwrap()
    };
    // The proxy appends the client's address. Addresses before it come from the client and are ignored.
    let refused =
        until_limited(async |n| ask(&format!("10.9.{}.{}, 203.0.113.7", n / 256, n % 256)).await).await;
    assert!(refused.headers().contains_key("content-security-policy"));
    let text = refused.text().await.unwrap();
    assert!(text.contains("429") && text.contains("--requests-per-second"), "{text}");
    assert_eq!(ask("203.0.113.8").await.status().as_u16(), 200, "other addresses are not limited");
    let local = server.http.get(server.url("/api/v1/jobs")).send().await.unwrap();
    assert_eq!(local.status().as_u16(), 200, "local requests are not limited");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(ask("203.0.113.7").await.status().as_u16(), 200, "the limit has ended");
    server.stop().await;
}

#[tokio::test]
async fn rate_limits_of_tokens_apply_at_every_address() {
    let server = behind_proxy(|c| c.token_requests_per_second = 5).await;
    let (_, limited_token) = server.make_token(&json!({"name": "one", "scope": "read"})).await;
    let (_, other_token) = server.make_token(&json!({"name": "two", "scope": "read"})).await;
    let agent_token = server.agent_token("a").await;
    let ask = async |token: &str, path: &str, forwarded_for: Option<&str>| {
        let request = client(token).get(server.url(path));
        let request = match forwarded_for {
            Some(address) => request.header("x-forwarded-for", address),
            None => request,
        };
        request.send().await.unwrap()
    };
    let addresses = [Some("203.0.113.7"), Some("203.0.113.8"), None];
    let refused = until_limited(async |n| ask(&limited_token, "/api/v1/jobs", addresses[n % 3]).await).await;
    let text = refused.text().await.unwrap();
    assert!(text.contains("--token-requests-per-second") && !text.contains(&limited_token), "{text}");
    for forwarded_for in addresses {
        let response = ask(&other_token, "/api/v1/jobs", forwarded_for).await;
        assert_eq!(response.status().as_u16(), 200, "another token is not limited ({forwarded_for:?})");
    }
    // Agents have a higher limit: twice the limit of other tokens.
    for _ in 0..100 {
        let response = ask(&agent_token, "/api/v1/agent/attempts/nothing/1", None).await;
        assert_ne!(response.status().as_u16(), 429);
    }
    server.stop().await;
}

#[tokio::test]
async fn the_access_log_has_a_line_per_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let log_path = path.clone();
    let server = behind_proxy(|c| c.access_log = Some(AccessLogTo::File(log_path))).await;
    let request = server.http.get(server.url("/api/v1/jobs?limit=7&name=hush"));
    let response = request.header("x-forwarded-for", "203.0.113.7").send().await.unwrap();
    let length = response.bytes().await.unwrap().len();
    server.http.get(server.url("/nothing")).header("host", "evil.example").send().await.unwrap();
    drop(connect_async(server.socket_request("/stream", &server.token)).await.unwrap());
    let mut text = String::new();
    wait_until("the log has three lines", async || {
        text = fs::read_to_string(&path).unwrap();
        text.lines().count() >= 3
    })
    .await;
    let lines: Vec<Vec<_>> = text.lines().map(|line| line.split(' ').collect()).collect();
    assert!(lines.iter().all(|line| line.len() == 8), "{lines:?}");
    let length = length.to_string();
    assert_eq!(lines[0][1..6], ["203.0.113.7", "GET", "/api/v1/jobs?limit&name", "200", &length]);
    assert_eq!(lines[1][1..5], ["127.0.0.1", "GET", "/nothing", "421"]);
    assert_eq!(lines[2][1..5], ["127.0.0.1", "GET", "/api/v1/stream", "101"]);
    assert!(lines[0][0].parse::<jiff::Timestamp>().is_ok() && lines[0][6].parse::<f64>().is_ok());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    server.stop().await;

    let mut config = config(&dir);
    config.access_log = Some(AccessLogTo::File(dir.path().to_owned()));
    let error = start_error(config).await.to_string();
    assert!(error.contains("--access-log"), "{error}");
}
