//! Conditional requests (RFC 9110, section 13) for what has an entity tag.

use crate::error::{Error, Result};
use axum::{
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;

/// Clients may cache an answer, and ask whether it is still the same.
pub(super) const CACHING: &str = "private, no-cache";

/// A value as JSON with an entity tag of its content, or 304 to whoever has it already. The tag is weak: answers are compressed
/// on their way.
///
/// # Errors
/// It cannot be written as JSON.
pub(super) fn tagged(headers: &HeaderMap, value: &impl Serialize) -> Result<Response> {
    let body = serde_json::to_vec(value).map_err(|e| Error::Internal(format!("an answer: {e}")))?;
    let hash = Sha256::digest(&body).iter().take(16).fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    let tag = format!("\"{hash}\"");
    let about = [(header::ETAG, format!("W/{tag}")), (header::CACHE_CONTROL, CACHING.into())];
    if is_known(headers, &tag) {
        return Ok((StatusCode::NOT_MODIFIED, about).into_response());
    }
    Ok((about, [(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// Whether `If-None-Match` says that the client has what is tagged so: then the answer is 304.
pub(super) fn is_known(headers: &HeaderMap, tag: &str) -> bool {
    let mut lists = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|v| v.to_str().ok());
    lists.any(|list| list.trim() == "*" || tags(list).any(|known| known == tag))
}

/// Whether a `Range` counts: not when `If-Range` names something else than what there is, as its parts would not fit.
/// A date does not name it: tags are stronger, and everything that is asked for here has one.
pub(super) fn range_counts(headers: &HeaderMap, tag: &str) -> bool {
    headers.get(header::IF_RANGE).is_none_or(|condition| condition == tag)
}

/// The tags of a list, weak ones as if they were strong: a cache compares them so. A comma may be part of a tag.
fn tags(list: &str) -> impl Iterator<Item = &str> {
    let mut rest = list;
    std::iter::from_fn(move || {
        let start = rest.find('"')?;
        let length = rest[start + 1..].find('"')? + 2;
        let tag = &rest[start..start + length];
        rest = &rest[start + length..];
        Some(tag)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: header::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, value.parse().unwrap())])
    }

    #[test]
    fn tags_are_compared_whole() {
        for (value, known) in [
            ("\"a\"", true),
            ("W/\"a\"", true),
            ("*", true),
            ("\"x,y\", W/\"b\" ,\"a\"", true),
            ("a", false),
            ("\"ab\"", false),
            ("\"b\", \"aa\"", false),
            ("\"", false),
            ("", false),
        ] {
            assert_eq!(is_known(&with(header::IF_NONE_MATCH, value), "\"a\""), known, "{value}");
        }
        assert!(!is_known(&HeaderMap::new(), "\"a\""));
        for (value, counts) in
            [("\"a\"", true), ("W/\"a\"", false), ("\"b\"", false), ("Sat, 01 Jan 2028 00:00:00 GMT", false)]
        {
            assert_eq!(range_counts(&with(header::IF_RANGE, value), "\"a\""), counts, "{value}");
        }
        assert!(range_counts(&HeaderMap::new(), "\"a\""));
    }
}
