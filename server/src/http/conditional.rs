//! Conditional requests (RFC 9110, section 13) for content with an entity tag.

use crate::http::error::Result;
use axum::{
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use http_range_header::parse_range_header;
use serde::Serialize;
use sha2::{Digest, Sha256};

/// Value of `Cache-Control`: clients may cache the response, but must revalidate it before each use.
pub(crate) const CACHING: &str = "private, no-cache";

/// A response with `value` as JSON and an entity tag of its content, or 304 if the client already has this content. The tag is weak,
/// because responses may be compressed.
pub(crate) fn json_with_etag(headers: &HeaderMap, value: &impl Serialize) -> Result<Response> {
    let body = serde_json::to_vec(value)?;
    let tag = format!("\"{}\"", hex::encode(&Sha256::digest(&body)[..16]));
    let caching = [(header::ETAG, format!("W/{tag}")), (header::CACHE_CONTROL, CACHING.into())];
    if client_has(headers, &tag) {
        return Ok((StatusCode::NOT_MODIFIED, caching).into_response());
    }
    Ok((caching, [(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// Whether the client has the content with this tag, because `If-None-Match` contains `tag`. The response is then 304.
pub(crate) fn client_has(headers: &HeaderMap, tag: &str) -> bool {
    let mut lists = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|v| v.to_str().ok());
    lists.any(|list| list.trim() == "*" || tags(list).any(|known| known == tag))
}

/// Whether `Range` applies. `Range` is ignored if `If-Range` is present and is not `tag`, because the client then has a part of other
/// content. Dates in `If-Range` never match, because all content here has a tag.
pub(crate) fn range_applies(headers: &HeaderMap, tag: &str) -> bool {
    headers.get(header::IF_RANGE).is_none_or(|condition| condition == tag)
}

/// The tags of a list, without the mark of weak tags, as required for the weak comparison. A tag may contain a comma.
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

/// Removes a `Range` that is not a single valid range of bytes. The request then gets the whole content (RFC 9110, section 14.2).
pub(crate) fn keep_one_range(headers: &mut HeaderMap) {
    let ranges = headers.get(header::RANGE).and_then(|value| {
        // Only the size of the content can make a valid range unsatisfiable, which is answered with 416.
        parse_range_header(value.to_str().ok()?).ok()?.validate(u64::MAX).ok()
    });
    if ranges.is_none_or(|ranges| ranges.len() != 1) {
        headers.remove(header::RANGE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers_with(name: header::HeaderName, value: &str) -> HeaderMap {
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
            assert_eq!(client_has(&headers_with(header::IF_NONE_MATCH, value), "\"a\""), known, "{value}");
        }
        assert!(!client_has(&HeaderMap::new(), "\"a\""));
        for (value, applies) in
            [("\"a\"", true), ("W/\"a\"", false), ("\"b\"", false), ("Sat, 01 Jan 2028 00:00:00 GMT", false)]
        {
            assert_eq!(range_applies(&headers_with(header::IF_RANGE, value), "\"a\""), applies, "{value}");
        }
        assert!(range_applies(&HeaderMap::new(), "\"a\""));
    }

    #[test]
    fn only_a_single_byte_range_is_used() {
        for (value, is_kept) in [
            ("bytes=0-1", true),
            ("bytes=7-7", true),
            ("bytes=5-", true),
            ("bytes=-5", true),
            ("bytes=10-5", false),
            ("bytes=a-b", false),
            ("bytes=-", false),
            ("bytes=99999999999999999999999-", false),
            ("items=0-1", false),
            ("bytes=0-1,3-4", false),
        ] {
            let mut headers = headers_with(header::RANGE, value);
            keep_one_range(&mut headers);
            assert_eq!(headers.contains_key(header::RANGE), is_kept, "{value}");
        }
    }
}
