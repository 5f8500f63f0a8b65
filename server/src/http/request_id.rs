//! A name for each request, in its answer (`x-request-id`), in the log lines that it causes, and in the audit log.

use axum::{
    extract::Request,
    http::{HeaderName, HeaderValue},
    middleware::Next,
    response::Response,
};
use tracing::Instrument;

const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// Longest id that is taken over from a client.
const CHARS: usize = 64;

/// Letters, digits, `-`, `_` and `.`.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestId(pub(crate) String);

/// A client's own id, if it is one that may stand in a log.
fn given(request: &Request) -> Option<String> {
    let id = request.headers().get(HEADER)?.to_str().ok()?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    ((1..=CHARS).contains(&id.len()) && id.bytes().all(is_plain)).then(|| id.to_owned())
}

pub(crate) async fn name(mut request: Request, next: Next) -> Response {
    let id = given(&request).unwrap_or_else(|| uuid::Uuid::new_v4().simple().to_string());
    request.extensions_mut().insert(RequestId(id.clone()));
    let span = tracing::info_span!("request", id);
    let mut response = next.run(request).instrument(span).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    #[test]
    fn an_id_that_could_forge_log_lines_is_not_taken_over() {
        let of = |id: &str| {
            let request = Request::builder().header("x-request-id", id).body(Body::empty());
            given(&request.expect("a request"))
        };
        let longest = "a".repeat(CHARS);
        for id in ["a", "2f-A_b.c", &longest] {
            assert_eq!(of(id).as_deref(), Some(id));
        }
        for id in ["", "a b", "a\"b", "ä", &format!("{longest}a")] {
            assert_eq!(of(id), None, "{id}");
        }
    }
}
