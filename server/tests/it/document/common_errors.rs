//! Errors of all operations that occur before the handler: the rate limit, another origin, and a NUL in the URL.

use super::{CheckedApi, operations};
use crate::test_server::TestServer;
use std::collections::BTreeSet;

#[tokio::test]
async fn common_refusals_are_documented_for_every_call() {
    let server = TestServer::with(|c| {
        c.trusted_proxies = vec!["127.0.0.1".parse().unwrap()];
        c.requests_per_second = 1;
    })
    .await;
    let (_, document) = server.get("/openapi.json").await;
    let operations = operations(&document);
    assert!(operations.len() > 60, "{}", operations.len());
    let mut api = CheckedApi { server: &server, document, seen: BTreeSet::new() };
    for (n, (method, path, _)) in operations.iter().enumerate() {
        let (method, path) = (method.as_str(), path.as_str());
        let fill = |name: &str| {
            let names = ["{id}", "{name}", "{file}", "{job}", "{attempt}"];
            names.iter().fold(path.to_owned(), |path, placeholder| path.replace(placeholder, name))
        };
        // With an unknown token, requests within the limit have no effect.
        let unknown_token = "Bearer lst_nothing";
        let mut sent = 0;
        loop {
            let forwarded = |r: reqwest::RequestBuilder| r.header("x-forwarded-for", "203.0.113.7");
            let response = api
                .request(method, &fill("1"), |r| forwarded(r).header("authorization", unknown_token))
                .await;
            if response.0 == 429 {
                break;
            }
            sent += 1;
            assert!(sent < 100, "{method} {path} is never refused");
        }
        // An address that has sent no request yet.
        let other_address = format!("198.51.{}.{}", n / 200, n % 200 + 1);
        let from_other_address = |r: reqwest::RequestBuilder| r.header("x-forwarded-for", &other_address);
        let from_other_origin = |r: reqwest::RequestBuilder| {
            from_other_address(r).header("upgrade", "websocket").header("origin", "http://evil.example")
        };
        assert_eq!(api.request(method, &fill("1"), from_other_origin).await.0, 403, "{method} {path}");
        let nul = format!("{}?x=%00", fill("1"));
        assert_eq!(api.request(method, &nul, from_other_address).await.0, 400, "{method} {path}");
    }
    server.stop().await;
}
