//! Styles and scripts, embedded in the binary.

use super::bundle;
use crate::{
    http::{
        conditional,
        error::{Error, Result},
        extract::Path,
    },
    util::lock,
};
use axum::{
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use rust_embed::RustEmbed;
use sha2::{Digest, Sha256};
use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{Mutex, OnceLock},
};

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
        hash.update(include_bytes!("bundle.rs"));
        for path in paths {
            hash.update(path.as_bytes());
            hash.update(Assets::get(&path).map(|file| file.metadata.sha256_hash()).unwrap_or_default());
        }
        format!("/static/v-{}", hex::encode(&hash.finalize()[..6]))
    })
}

/// Returns the contents of a file. `all/PAGE.js` has all modules of a page, and `app.css` has all styles.
fn content(path: &str) -> Option<Cow<'static, [u8]>> {
    let page = path.strip_prefix("all/").and_then(|name| name.strip_suffix(".js"));
    if page.is_none() && path != "app.css" {
        return Assets::get(path).map(|file| file.data);
    }
    static MADE: OnceLock<Mutex<HashMap<String, &'static [u8]>>> = OnceLock::new();
    let mut made = lock(MADE.get_or_init(Mutex::default));
    if let Some(bytes) = made.get(path) {
        return Some(Cow::Borrowed(bytes));
    }
    let source = |path: &str| Assets::get(path).and_then(|f| String::from_utf8(f.data.into_owned()).ok());
    let text = match page {
        Some(page) => bundle::page(page, &source),
        None => bundle::styles(&source),
    }?;
    // Leaked, because only a few bundles are made, and they are used as long as the process runs.
    let bytes: &'static [u8] = Vec::leak(text.into_bytes());
    made.insert(path.to_owned(), bytes);
    Some(Cow::Borrowed(bytes))
}

/// `GET /static/{path}`. In this build's folder, browsers may cache files forever. Elsewhere (from a page that an older server wrote),
/// browsers revalidate each time, and get 304 if the file is unchanged.
pub(crate) async fn asset(Path(path): Path<String>, headers: HeaderMap) -> Result<Response> {
    let versioned = path.strip_prefix("v-").and_then(|rest| rest.split_once('/'));
    let is_of_this_build = versioned.is_some_and(|(version, _)| folder().ends_with(version));
    let path = versioned.map_or(path.as_str(), |(_, file)| file);
    let content = content(path).ok_or_else(|| Error::NotFound("there is no such file".into()))?;
    let tag = format!("\"{}\"", hex::encode(&Sha256::digest(&content)[..12]));
    let is_unchanged = conditional::is_known(&headers, &tag);
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
    Ok((common, [(header::CONTENT_TYPE, kind)], content).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_modules_of_each_page_go_into_one_file() {
        for page in ["keys", "jobs", "job", "submit", "compare", "datasets", "machines", "queue"] {
            let text = content(&format!("all/{page}.js")).unwrap_or_else(|| panic!("{page}"));
            let text = std::str::from_utf8(&text).unwrap();
            let left = text.lines().find(|l| l.starts_with("import") || l.starts_with("export"));
            assert_eq!(left, None, "{page}: an import or export was not replaced");
        }
        assert!(content("all/nothing.js").is_none() && content("all/../job.js").is_none());
    }

    #[test]
    fn every_style_goes_into_one_file() {
        let text = content("app.css").expect("the styles of every page");
        let text = std::str::from_utf8(&text).unwrap();
        assert!(!text.contains("@import"), "a browser would ask for another file");
        let parts: Vec<_> = Assets::iter().filter(|path| path.starts_with("styles/")).collect();
        assert!(!parts.is_empty(), "the folder styles/ is empty");
        for path in parts {
            let part = Assets::get(&path).unwrap().data;
            assert!(text.contains(std::str::from_utf8(&part).unwrap()), "{path} is not included");
        }
    }
}
