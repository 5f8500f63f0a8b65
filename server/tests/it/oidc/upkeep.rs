//! A provider that is down, changes its keys, or has an invalid description.

use super::provider::{Browser, Provider, Signer};
use crate::test_server::{TestServer, wait_until};
use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Redirect},
    routing::get,
};
use lockstep_protocol::people::Role;
use lockstep_server::OidcConfig;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::net::TcpListener;

/// Starts a provider, whose description is the result of `describe` for the issuer's URL. Returns the status with which a server begins a
/// sign-in.
async fn begin_status<R: IntoResponse + 'static>(
    describe: impl Fn(&str) -> R + Clone + Send + Sync + 'static,
) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let issuer = format!("http://{}", listener.local_addr().unwrap());
    let issuer_url = issuer.clone();
    let routes = Router::new()
        .route("/.well-known/openid-configuration", get(async move || describe(&issuer_url).into_response()))
        .route("/other", get(async || "{}"));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    let config = OidcConfig::new(issuer.parse().unwrap(), "x".into());
    let server = TestServer::with(|c| c.oidc = Some(config)).await;
    let status = Browser::new(&server).get("/login/oidc").await.status().as_u16();
    server.stop().await;
    status
}

#[tokio::test]
async fn a_server_starts_while_the_provider_is_down() {
    // Nothing listens at this address until the provider starts.
    let reserved = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = reserved.local_addr().unwrap();
    drop(reserved);
    let config = OidcConfig::new(format!("http://{address}").parse().unwrap(), super::CLIENT.into());
    let server = TestServer::with(|c| {
        c.oidc = Some(OidcConfig {
            client_secret: Some(super::SECRET.parse().unwrap()),
            role: Some(Role::Viewer),
            ..config
        });
    })
    .await;
    let mut browser = Browser::new(&server);
    for n in 0..20 {
        let response = browser.get("/login/oidc").await;
        assert_eq!(response.status(), 503, "{n}: does not count as a failed attempt");
        let page = response.text().await.unwrap();
        assert!(
            page.contains("127.0.0.1 cannot be reached at the moment") && page.contains("name=\"token\""),
            "{page}"
        );
    }
    let provider = Provider::at(TcpListener::bind(address).await.unwrap()).await;
    wait_until("the server retries", async || browser.get("/login/oidc").await.status() == 303).await;
    assert_eq!(browser.sign_in(&provider).await.status(), 303);
    server.stop().await;
}

#[tokio::test]
async fn new_keys_are_fetched_on_demand_with_a_rate_limit() {
    let provider = Provider::start().await;
    let rotate = |kid: &'static str| {
        let key = Signer::ec();
        provider.change(|b| (b.keys, b.header, b.signer) = (vec![key.public(kid)], json!({"kid": kid}), key));
    };
    let requests = || provider.read(|b| b.key_requests);
    let server = provider.server(|c| (c.role, c.key_refresh) = (Some(Role::Viewer), Duration::ZERO)).await;
    assert_eq!(Browser::new(&server).sign_in(&provider).await.status(), 303);
    assert_eq!(Browser::new(&server).sign_in(&provider).await.status(), 303);
    assert_eq!(requests(), 1, "the server caches the keys");
    rotate("second");
    assert_eq!(Browser::new(&server).sign_in(&provider).await.status(), 303);
    assert_eq!(requests(), 2);
    rotate("second");
    assert_eq!(Browser::new(&server).sign_in(&provider).await.status(), 303, "a new key with the same id");
    assert_eq!(requests(), 3);
    provider.change(|b| b.header = json!({"kid": "unknown"}));
    assert!(Browser::new(&server).sign_in_error(&provider, 401).await.contains("does not publish"));
    assert_eq!(requests(), 4);
    server.stop().await;

    // With the default interval, tokens with unknown keys cause at most one request in 30 s.
    let server = provider.server(|c| c.role = Some(Role::Viewer)).await;
    for n in 0..3 {
        assert!(
            Browser::new(&server).sign_in_error(&provider, 401).await.contains("does not publish"),
            "{n}"
        );
    }
    assert_eq!(requests(), 5);
    server.stop().await;
}

#[tokio::test]
async fn responses_of_providers_are_limited_and_need_https() {
    const MAX: usize = 256 << 10;
    let url = "https://a.example";
    let complete =
        json!({"issuer": "ISSUER", "authorization_endpoint": url, "token_endpoint": url, "jwks_uri": url});
    for (bytes, status) in [(MAX, 303), (MAX + 1, 503)] {
        let text = complete.to_string();
        let describe = move |issuer: &str| {
            let text = text.replace("ISSUER", issuer);
            format!("{text}{}", " ".repeat(bytes - text.len()))
        };
        assert_eq!(begin_status(describe).await, status, "{bytes}");
    }
    let with_value = |name: &str, value: &str| {
        let mut complete = complete.clone();
        complete[name] = json!(value);
        complete
    };
    let mut without_keys = complete.clone();
    without_keys.as_object_mut().unwrap().remove("jwks_uri");
    let cases: [(Value, u16); 7] = [
        (with_value("issuer", "https://evil.example"), 503),
        (with_value("token_endpoint", "http://a.example"), 503),
        (with_value("jwks_uri", "file:///etc/passwd"), 503),
        (with_value("authorization_endpoint", "javascript:alert(1)"), 503),
        (with_value("userinfo_endpoint", "http://169.254.169.254/"), 503),
        (without_keys, 503),
        (json!([]), 503),
    ];
    for (description, status) in cases {
        let text = description.to_string();
        assert_eq!(
            begin_status(move |issuer: &str| text.replace("ISSUER", issuer)).await,
            status,
            "{description}"
        );
    }
    // Redirects are refused, and so is an endless body.
    assert_eq!(begin_status(|_| Redirect::to("/other")).await, 503);
    let endless = |_: &str| {
        let chunks = futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>("[".repeat(4096)));
        Body::from_stream(chunks)
    };
    assert_eq!(begin_status(endless).await, 503);
}
