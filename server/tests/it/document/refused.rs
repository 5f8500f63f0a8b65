//! What any call may be answered before its handler is asked: by the rate limit, for another page, and for an address with a NUL.

use super::{Held, calls};
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
    let calls = calls(&document);
    assert!(calls.len() > 60, "{}", calls.len());
    let mut held = Held { server: &server, document, given: BTreeSet::new() };
    for (n, (method, path, _)) in calls.iter().enumerate() {
        let (method, path) = (method.as_str(), path.as_str());
        let named = |name: &str| {
            let names = ["{id}", "{name}", "{file}", "{job}", "{attempt}"];
            names.iter().fold(path.to_owned(), |path, place| path.replace(place, name))
        };
        // A token that nobody has: what the limit still lets through does nothing.
        let nobody = "Bearer lst_nothing";
        let mut asked = 0;
        loop {
            let forwarded = |r: reqwest::RequestBuilder| r.header("x-forwarded-for", "203.0.113.7");
            let ask =
                held.ask(method, path, &named("1"), |r| forwarded(r).header("authorization", nobody)).await;
            if ask.0 == 429 {
                break;
            }
            asked += 1;
            assert!(asked < 100, "{method} {path} is never refused");
        }
        // From an address that has asked for nothing yet.
        let other = format!("198.51.{}.{}", n / 200, n % 200 + 1);
        let from_other = |r: reqwest::RequestBuilder| r.header("x-forwarded-for", &other);
        let foreign = |r: reqwest::RequestBuilder| {
            from_other(r).header("upgrade", "websocket").header("origin", "http://evil.example")
        };
        assert_eq!(held.ask(method, path, &named("1"), foreign).await.0, 403, "{method} {path}");
        let nul = format!("{}?x=%00", named("1"));
        assert_eq!(held.ask(method, path, &nul, from_other).await.0, 400, "{method} {path}");
    }
    server.stop().await;
}
