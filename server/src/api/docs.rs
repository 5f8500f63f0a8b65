//! The documentation of this build, embedded in the binary: what `docs/` has as Markdown, as pages.

use crate::{
    api::html::{Page, html, viewer},
    auth::access::Caller,
    http::{
        error::{Error, PageError},
        extract::Path,
    },
};
use axum::Extension;
use lockstep_web::docs::{DocsEntry, DocsPage, title};
use rust_embed::RustEmbed;

#[derive(RustEmbed)]
#[folder = "../docs"]
#[include = "*.md"]
// For readers of the source tree: `/docs` lists the pages itself.
#[exclude = "README.md"]
#[exclude = "decisions/*"]
struct Docs;

/// The Markdown of a page.
fn source(path: &str) -> Option<String> {
    Docs::get(&format!("{path}.md")).and_then(|file| String::from_utf8(file.data.into_owned()).ok())
}

/// All pages by title.
fn entries() -> Vec<DocsEntry> {
    let pages = Docs::iter().filter_map(|file| {
        let path = file.strip_suffix(".md")?.to_owned();
        let title = title(&source(&path)?);
        Some(DocsEntry { path, title })
    });
    let mut pages: Vec<_> = pages.collect();
    pages.sort_by(|a, b| (&a.title, &a.path).cmp(&(&b.title, &b.path)));
    pages
}

/// `GET /docs`
pub(crate) async fn index(Extension(caller): Extension<Caller>) -> Page {
    html(DocsPage::index(&entries(), viewer(&caller)).render())
}

/// `GET /docs/{path}`
pub(crate) async fn page(Extension(caller): Extension<Caller>, Path(path): Path<String>) -> Page {
    let path = path.strip_suffix(".md").unwrap_or(&path);
    let source = source(path).ok_or_else(|| {
        PageError(Error::NotFound("The documentation has no such page; /docs lists those there are.".into()))
    })?;
    html(DocsPage::new(path, &source, &entries(), viewer(&caller)).render())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_embedded_and_every_page_has_a_title() {
        let pages = entries();
        for path in ["team", "reference/job-file", "reference/command-line", "reference/rest"] {
            assert!(pages.iter().any(|page| page.path == path), "{path} in {pages:?}");
        }
        assert!(pages.iter().all(|page| !page.title.is_empty()), "{pages:?}");
        let is_for_the_tree = |path: &str| path == "README" || path.starts_with("decisions/");
        assert!(!pages.iter().any(|page| is_for_the_tree(&page.path)), "{pages:?}");
    }
}
