//! Styles and scripts, embedded in the binary.

use super::extract::Path;
use crate::error::{Error, Result};
use axum::{
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use rust_embed::RustEmbed;
use sha2::{Digest, Sha256};
use std::{fmt::Write as _, sync::OnceLock};

#[derive(RustEmbed)]
#[folder = "../static"]
struct Assets;

/// Where this build's files are served: below a name made of their content.
pub(crate) fn folder() -> &'static str {
    static FOLDER: OnceLock<String> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let mut paths: Vec<_> = Assets::iter().collect();
        paths.sort();
        let mut hash = Sha256::new();
        for path in paths {
            hash.update(path.as_bytes());
            hash.update(Assets::get(&path).map(|file| file.metadata.sha256_hash()).unwrap_or_default());
        }
        let mut folder = String::from("/static/v-");
        for byte in &hash.finalize()[..6] {
            let _ = write!(folder, "{byte:02x}");
        }
        folder
    })
}

/// `GET /static/{path}`. Below this build's own folder a browser may keep them for good. Elsewhere (a page that an
/// older server wrote) they are asked for again each time, and answered with 304 while they are the same.
pub(crate) async fn asset(Path(path): Path<String>, headers: HeaderMap) -> Result<Response> {
    let versioned = path.strip_prefix("v-").and_then(|rest| rest.split_once('/'));
    let own = versioned.is_some_and(|(version, _)| folder().ends_with(version));
    let path = versioned.map_or(path.as_str(), |(_, file)| file);
    let file = Assets::get(path).ok_or_else(|| Error::NotFound("there is no such file".into()))?;
    let mut tag = String::from("\"");
    for byte in &file.metadata.sha256_hash()[..12] {
        let _ = write!(tag, "{byte:02x}");
    }
    tag.push('"');
    let known =
        headers.get(header::IF_NONE_MATCH).and_then(|v| v.to_str().ok()).is_some_and(|v| v.contains(&tag));
    let keep = if own { "public, max-age=31536000, immutable" } else { "no-cache" };
    let common = [(header::ETAG, tag), (header::CACHE_CONTROL, keep.to_owned())];
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
