//! The id of a request, which is in its response (`x-request-id`), its log lines and the audit log. `tower-http` creates and returns the
//! id. This module checks ids from clients.

use axum::{
    extract::Request,
    http::{HeaderName, HeaderValue},
};
use tower_http::request_id::RequestId;
use tracing::Span;

pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// Maximum length of an id from a client.
const MAX_CHARS: usize = 64;

/// Removes a client's id that could forge a log line. An id may have letters, digits, `-`, `_` and `.`.
pub(crate) async fn remove_unsafe(mut request: Request) -> Request {
    let is_safe = |id: &HeaderValue| {
        let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
        (1..=MAX_CHARS).contains(&id.len()) && id.as_bytes().iter().all(is_plain)
    };
    if !request.headers().get_all(HEADER).iter().all(is_safe) {
        request.headers_mut().remove(HEADER);
    }
    request
}

/// The id of a request. Empty if the request has no id yet.
pub(crate) fn read(request: &Request) -> &str {
    let id = request.extensions().get::<RequestId>();
    id.and_then(|id| id.header_value().to_str().ok()).unwrap_or_default()
}

/// The span of a request, with which the log lines of the request begin.
pub(crate) fn span(request: &Request) -> Span {
    tracing::info_span!("request", id = read(request))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    #[tokio::test]
    async fn unsafe_request_ids_are_replaced() {
        let is_kept = async |id: &str| {
            let request = Request::builder().header(HEADER, id).body(Body::empty());
            remove_unsafe(request.expect("a request")).await.headers().contains_key(HEADER)
        };
        let longest = "a".repeat(MAX_CHARS);
        for id in ["a", "2f-A_b.c", &longest] {
            assert!(is_kept(id).await, "{id}");
        }
        for id in ["", "a b", "a\"b", "ä", &format!("{longest}a")] {
            assert!(!is_kept(id).await, "{id}");
        }
    }
}
