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
    docs::{DocsEntry, DocsPage, paragraphs, title},
};
use rust_embed::RustEmbed;
use serde::Deserialize;
use std::cmp::Reverse;

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

/// Words that nearly every page contains. They are ignored if the query has other words.
const COMMON_WORDS: [&str; 14] =
    ["a", "an", "and", "are", "do", "does", "how", "i", "in", "is", "of", "the", "to", "what"];
/// Maximum length of an excerpt, in characters.
const MAX_EXCERPT_CHARS: usize = 240;
/// Number of characters that an excerpt shows before the first word of the query, unless the excerpt starts where its paragraph starts.
const CONTEXT_CHARS: usize = 60;

/// Returns the pages that contain all words of the query, ignoring case, each with an excerpt: the paragraph or row of a table that defines
/// the query's words, otherwise the paragraph with most of the words. Pages are ordered by: a word in the title, a definition, guide or
/// reference, number of uses of the words.
fn search(query: &str) -> Vec<(DocsEntry, String)> {
    let typed = query.to_lowercase();
    let typed: Vec<_> =
        typed.split(|c: char| c.is_whitespace() || c == '?').filter(|word| !word.is_empty()).collect();
    let mut words = typed.clone();
    words.retain(|word| !COMMON_WORDS.contains(word));
    let words = if words.is_empty() { typed } else { words };
    let definition = format!("{}:", words.join(" "));
    let score = |text: &str| {
        let text = text.to_lowercase();
        let is_definition = text.starts_with(&definition);
        let word_count = words.iter().filter(|word| text.contains(**word)).count();
        (is_definition, word_count)
    };
    let found = entries().into_iter().filter_map(|entry| {
        let source = source(&entry.path)?;
        let lower = source.to_lowercase();
        if !words.iter().all(|word| lower.contains(*word)) {
            return None;
        }
        // `min_by_key` returns the first of equally good paragraphs.
        let best = paragraphs(&source)
            .into_iter()
            .map(|text| (score(&text), text))
            .min_by_key(|(score, _)| Reverse(*score));
        let ((is_definition, word_count), text) = best.unwrap_or_default();
        // If no paragraph has any of the words, they are in code or headings.
        let line_with_word = || source.lines().find(|line| score(line).1 > 0).unwrap_or_default();
        let text = excerpt(if word_count > 0 { text.as_str() } else { line_with_word() }, &words);
        let is_guide = !entry.path.contains('/');
        let uses: usize = words.iter().map(|word| lower.matches(*word).count()).sum();
        let is_in_title = score(&entry.title).1 > 0;
        Some(((is_in_title, is_definition, is_guide, word_count, uses), (entry, text)))
    });
    let mut found: Vec<_> = found.collect();
    found.sort_by_key(|(rank, _)| Reverse(*rank));
    found.into_iter().map(|(_, page)| page).collect()
}

/// Cuts the text to an excerpt that contains the first of the words.
fn excerpt(text: &str, words: &[&str]) -> String {
    let chars: Vec<char> = text.chars().collect();
    let lower = text.to_lowercase();
    let chars_before = |byte: usize| lower[..byte].chars().count();
    let (mut first_word, mut last_word_end) = (chars.len(), 0);
    for word in words {
        if let Some(at) = lower.find(*word) {
            first_word = first_word.min(chars_before(at));
            last_word_end = last_word_end.max(chars_before(at + word.len()));
        }
    }
    let mut start = 0;
    if last_word_end > MAX_EXCERPT_CHARS && first_word > CONTEXT_CHARS {
        start = first_word - CONTEXT_CHARS;
        start += chars[start..first_word].iter().position(|c| *c == ' ').map_or(0, |space| space + 1);
    }
    let shown: String = chars[start..].iter().take(MAX_EXCERPT_CHARS).collect();
    let before = if start > 0 { "... " } else { "" };
    let after = if chars.len() - start > MAX_EXCERPT_CHARS { " ..." } else { "" };
    format!("{before}{shown}{after}")
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
        let found = search("what is a rank?");
        let (first, excerpt) = found.first().expect("a page");
        assert_eq!(first.path, "terms");
        assert!(excerpt.starts_with("rank: one of the processes that train a job together"), "{excerpt}");
        let is_from_the_body = |(page, excerpt): &(DocsEntry, String)| {
            *excerpt != page.title && !excerpt.contains("](") && !excerpt.contains("<!--")
        };
        assert!(found.iter().all(is_from_the_body), "{found:?}");
        assert!(paths("no-page-has-this-word").is_empty());
        for word in ["safetensors", "webhook", "dataset-root"] {
            for (page, excerpt) in search(word) {
                assert!(excerpt.to_lowercase().contains(word), "{word} on {}: {excerpt}", page.path);
            }
        }
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
