//! A client that compares every response with the OpenAPI document.

use crate::test_server::TestServer;
use reqwest::{Method, RequestBuilder};
use serde_json::Value;
use std::collections::BTreeSet;

/// Sends requests, and fails if a response is not documented.
pub(super) struct CheckedApi<'a> {
    pub(super) server: &'a TestServer,
    pub(super) document: Value,
    /// Operations and statuses of responses so far.
    pub(super) seen: BTreeSet<(String, u16)>,
}

impl CheckedApi<'_> {
    /// The document's template of a path. A template with the same words is preferred to one with parameters.
    fn template_of(&self, target: &str) -> &str {
        let path: Vec<&str> = target.split('?').next().unwrap_or_default().split('/').collect();
        let templates = self.document["paths"].as_object().unwrap().keys().filter(|template| {
            let parts: Vec<&str> = template.split('/').collect();
            parts.len() == path.len()
                && parts.iter().zip(&path).all(|(part, word)| part.starts_with('{') || part == word)
        });
        templates.min_by_key(|template| template.matches('{').count()).expect("a documented path")
    }

    /// Sends a request to a path, and compares the response with the document.
    pub(super) async fn request(
        &mut self,
        method: &str,
        target: &str,
        change: impl FnOnce(RequestBuilder) -> RequestBuilder,
    ) -> (u16, Value) {
        let template = self.template_of(target).to_owned();
        let verb = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
        let request = change(self.server.http.request(verb, self.server.url(target)));
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let content_type = response.headers().get("content-type").map(|v| v.to_str().unwrap().to_owned());
        let retry_after = response.headers().get("retry-after").map(|v| v.to_str().unwrap().to_owned());
        let bytes = response.bytes().await.unwrap();
        let call = format!("{method} {template}");
        self.seen.insert((call.clone(), status));
        let documented = &self.document["paths"][&template][method]["responses"][status.to_string()];
        assert!(
            documented.is_object(),
            "{call}: {status} is not documented: {}",
            String::from_utf8_lossy(&bytes)
        );
        let seconds = retry_after.map(|seconds| seconds.parse::<u64>().expect("seconds"));
        let has_retry_after = documented["headers"]["Retry-After"].is_object();
        assert_eq!(
            seconds.is_some_and(|seconds| seconds > 0),
            has_retry_after,
            "{call}: {status} with {seconds:?}"
        );
        let content = documented["content"].as_object();
        if bytes.is_empty() {
            assert!(content.is_none_or(serde_json::Map::is_empty), "{call}: {status} has no body");
        } else {
            let content_type = content_type.unwrap_or_default();
            let content_type = content_type.split(';').next().unwrap_or_default();
            assert!(
                content.is_some_and(|content| content.contains_key(content_type)),
                "{call}: {status} with type {content_type:?} is not documented; documented: {content:?}"
            );
        }
        (status, serde_json::from_slice(&bytes).unwrap_or_default())
    }

    /// Sends a request with a body to a path below `/api/v1`. The response must have the expected status.
    pub(super) async fn expect(
        &mut self,
        method: &str,
        path: &str,
        body: Option<Value>,
        expected: u16,
    ) -> Value {
        let with_body = |request: RequestBuilder| match body {
            Some(body) => request.json(&body),
            None => request,
        };
        let (status, response) = self.request(method, &format!("/api/v1{path}"), with_body).await;
        assert_eq!(status, expected, "{method} {path}: {response}");
        response
    }
}
