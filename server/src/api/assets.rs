//! Styles and scripts, embedded in the binary.

use crate::api::prelude::*;
use crate::http::conditional;
use axum::http::HeaderMap;
use rust_embed::RustEmbed;
use sha2::{Digest, Sha256};
use std::sync::OnceLock;

#[derive(RustEmbed)]
#[folder = "../static"]
struct Assets;

/// Path below which this build's files are served. It contains a hash of their contents.
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
        format!("/static/v-{}", hex::encode(&hash.finalize()[..6]))
    })
}

/// `GET /static/{path}`. In this build's folder, browsers may cache files forever. Elsewhere (from a page that an older server wrote),
/// browsers revalidate each time, and get 304 if the file is unchanged.
pub(crate) async fn asset(Path(path): Path<String>, headers: HeaderMap) -> Result<Response> {
    let versioned = path.strip_prefix("v-").and_then(|rest| rest.split_once('/'));
    let is_of_this_build = versioned.is_some_and(|(version, _)| folder().ends_with(version));
    let path = versioned.map_or(path.as_str(), |(_, file)| file);
    let file = Assets::get(path).ok_or_else(|| Error::NotFound("there is no such file".into()))?;
    let tag = format!("\"{}\"", hex::encode(&file.metadata.sha256_hash()[..12]));
    let is_unchanged = conditional::client_has(&headers, &tag);
    let caching = if is_of_this_build { "public, max-age=31536000, immutable" } else { "no-cache" };
    let common = [(header::ETAG, tag), (header::CACHE_CONTROL, caching.to_owned())];
    if is_unchanged {
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
