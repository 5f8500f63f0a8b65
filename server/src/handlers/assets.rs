//! Styles and scripts, embedded in the binary.

use super::extract::Path;
use crate::error::{Error, Result};
use axum::{
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use rust_embed::RustEmbed;
use std::fmt::Write as _;

#[derive(RustEmbed)]
#[folder = "../static"]
struct Assets;

/// `GET /static/{path}`. Asked for again each time, and answered with 304 while it is the same: a server
/// of a new version never meets scripts of the old one.
pub(crate) async fn asset(Path(path): Path<String>, headers: HeaderMap) -> Result<Response> {
    let file = Assets::get(&path).ok_or_else(|| Error::NotFound("there is no such file".into()))?;
    let mut tag = String::from("\"");
    for byte in &file.metadata.sha256_hash()[..12] {
        let _ = write!(tag, "{byte:02x}");
    }
    tag.push('"');
    let known =
        headers.get(header::IF_NONE_MATCH).and_then(|v| v.to_str().ok()).is_some_and(|v| v.contains(&tag));
    let common = [(header::ETAG, tag), (header::CACHE_CONTROL, "no-cache".to_owned())];
    if known {
        return Ok((StatusCode::NOT_MODIFIED, common).into_response());
    }
    let kind = match path.rsplit_once('.').map(|(_, extension)| extension) {
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("png") => "image/png",
        _ => "application/octet-stream",
    };
    Ok((common, [(header::CONTENT_TYPE, kind)], file.data).into_response())
}
