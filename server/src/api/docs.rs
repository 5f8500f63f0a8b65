//! The documentation of this build: pages from the Markdown files in `docs/`, which are embedded in the binary.

use crate::{
    api::html::{Page, html},
    auth::access::Caller,
    http::{
        error::{Error, PageError},
        extract::{PageQuery, Path},
    },
};
use axum::Extension;
use lockstep_web::{
    Template as _,
    docs::{DocsEntry, DocsPage, title},
};
use rust_embed::RustEmbed;
use serde::Deserialize;

#[derive(RustEmbed)]
#[folder = "../docs"]
#[include = "*.md"]
// A list of pages for readers of the source tree, which `/docs` does not need.
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
#[derive(Debug, Default, Deserialize)]
pub(crate) struct DocsQuery {
    /// Words to search for; empty for the list of all pages.
    #[serde(default)]
    q: String,
}

/// Returns the pages that contain all words of the query, ignoring case, each with its first line that contains a word. Pages with a word in
/// the title come first.
fn search(query: &str) -> Vec<(DocsEntry, String)> {
    let words: Vec<_> = query.split_whitespace().map(str::to_lowercase).collect();
    let has_one = |text: &str| {
        let text = text.to_lowercase();
        words.iter().any(|word| text.contains(word.as_str()))
    };
    let found = entries().into_iter().filter_map(|entry| {
        let source = source(&entry.path)?;
        let lower = source.to_lowercase();
        if !words.iter().all(|word| lower.contains(word.as_str())) {
            return None;
        }
        let line = source.lines().find(|line| has_one(line)).unwrap_or_default().to_owned();
        Some((entry, line))
    });
    let mut found: Vec<_> = found.collect();
    found.sort_by_key(|(entry, _)| !has_one(&entry.title));
    found
}

/// `GET /docs`
pub(crate) async fn index(
    Extension(caller): Extension<Caller>,
    PageQuery(DocsQuery { q }): PageQuery<DocsQuery>,
) -> Page {
    let (pages, user) = (entries(), caller.current_user());
    let page = match q.trim() {
        "" => DocsPage::index(&pages, user),
        query => DocsPage::search_results(query, &search(query), &pages, user),
    };
    html(page.render())
}

/// `GET /docs/{path}`
pub(crate) async fn page(Extension(caller): Extension<Caller>, Path(path): Path<String>) -> Page {
    let path = path.strip_suffix(".md").unwrap_or(&path);
    let source = source(path).ok_or_else(|| {
        PageError(Error::NotFound("The documentation has no such page; /docs lists all pages.".into()))
    })?;
    html(DocsPage::new(path, &source, &entries(), caller.current_user()).render())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_with_all_words_are_found() {
        let paths =
            |query: &str| -> Vec<_> { search(query).into_iter().map(|(entry, _)| entry.path).collect() };
        assert_eq!(paths("DistributedSampler mindinsight"), ["coming-from"]);
        assert_eq!(paths("datasets").first().map(String::as_str), Some("datasets"), "in the title");
        assert!(paths("no-page-has-this-word").is_empty());
    }

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
