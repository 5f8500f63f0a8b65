//! The documentation of this build: pages from the Markdown files in `docs/`, which are embedded in the binary.

use crate::api::prelude::*;
use crate::{
    api::html::{Page, html},
    http::{error::PageError, extract::PageQuery},
};
use lockstep_web::docs::{DocsEntry, DocsPage, DocsResult, Passage, passages, title};
use rust_embed::RustEmbed;
use std::cmp::Reverse;

#[derive(RustEmbed)]
#[folder = "../docs"]
#[include = "*.md"]
#[exclude = "decisions/*"]
struct Docs;

/// The Markdown of a page.
fn read_markdown(path: &str) -> Option<String> {
    Docs::get(&format!("{path}.md")).and_then(|file| String::from_utf8(file.data.into_owned()).ok())
}

/// The page `/docs`: tables with a line about each guide.
const START: &str = "README";

/// All pages but [`START`] by title, with "Getting started" first.
fn all_pages() -> Vec<DocsEntry> {
    let pages = Docs::iter().filter(|file| file.strip_suffix(".md") != Some(START)).filter_map(|file| {
        let path = file.strip_suffix(".md")?.to_owned();
        let title = title(&read_markdown(&path)?);
        Some(DocsEntry { path, title })
    });
    let mut pages: Vec<_> = pages.collect();
    let key = |page: &DocsEntry| (page.path != "getting-started", page.title.clone(), page.path.clone());
    pages.sort_by_cached_key(key);
    pages
}

/// Parameters of `GET /docs`.
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

/// How well a passage answers a query. A better passage has a greater score.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    is_definition: bool,
    is_below_heading: bool,
    is_key: bool,
    word_count: usize,
}

/// Returns the pages that contain all words of the query, ignoring case, the best page first (`rank`). Each page has an excerpt of its best
/// passage (`score`): a definition of the query's words, otherwise a passage below a heading with all words, a row of the reference with
/// the words, or the passage with the most words. A word also matches within a longer word. If no page has all words, searches for their
/// stems.
fn search(query: &str) -> Vec<DocsResult> {
    let typed = query.to_lowercase();
    let typed: Vec<_> =
        typed.split(|c: char| c.is_whitespace() || c == '?').filter(|word| !word.is_empty()).collect();
    let mut words = typed.clone();
    words.retain(|word| !COMMON_WORDS.contains(word));
    let words = if words.is_empty() { typed } else { words };
    let phrase = words.join(" ");
    let definition = format!("{phrase}:");
    let count_words = |text: &str| words.iter().filter(|word| text.contains(**word)).count();
    let score = |passage: &Passage, is_guide: bool| {
        let text = passage.text.to_lowercase();
        let word_count = count_words(&text);
        let is_below_heading = word_count > 0 && count_words(&passage.heading.to_lowercase()) == words.len();
        let is_key = passage.is_key && !is_guide && text.contains(&phrase);
        Score { is_definition: text.starts_with(&definition), is_below_heading, is_key, word_count }
    };
    let results = all_pages().into_iter().filter_map(|page| {
        let source = read_markdown(&page.path)?;
        let lower = source.to_lowercase();
        if count_words(&lower) < words.len() {
            return None;
        }
        let is_guide = !page.path.contains('/');
        // `min_by_key` returns the first of equally good passages.
        let best = passages(&source)
            .into_iter()
            .map(|passage| (score(&passage, is_guide), passage))
            .min_by_key(|(score, _)| Reverse(*score));
        let best = best.filter(|(score, _)| score.word_count > 0);
        let (score, mut passage) = best.unwrap_or_else(|| {
            // If no passage has any of the words, the words are in code or headings, which are not passages.
            let line = source.lines().find(|line| count_words(&line.to_lowercase()) > 0);
            let text = line.unwrap_or_default().trim_start_matches(['#', ' ']).to_owned();
            (Score::default(), Passage { text, ..Passage::default() })
        });
        passage.text = excerpt(&passage.text, &words);
        let uses: usize = words.iter().map(|word| lower.matches(*word).count()).sum();
        let uses_per_megabyte = uses * 1_000_000 / lower.len();
        // The titles of the reference have common words, such as "job".
        let min_words_in_title = if is_guide { 1 } else { words.len() };
        let is_in_title = count_words(&page.title.to_lowercase()) >= min_words_in_title;
        let rank = (
            is_in_title,
            score.is_definition && is_guide,
            score.is_below_heading && is_guide,
            score.is_definition,
            score.is_below_heading,
            score.is_key,
            is_guide,
            score.word_count,
            uses_per_megabyte,
        );
        Some((rank, DocsResult { page, passage }))
    });
    let mut results: Vec<_> = results.collect();
    let stems: Vec<_> = words.iter().map(|word| stem(word)).collect();
    if results.is_empty() && stems != words {
        return search(&stems.join(" "));
    }
    results.sort_by_key(|(rank, _)| Reverse(*rank));
    results.into_iter().map(|(_, result)| result).collect()
}

/// Returns a word without the ending of a plural or a participle, if four letters remain: `resum` for `resuming`.
fn stem(word: &str) -> &str {
    let mut stems = ["ing", "ed", "es", "s"].into_iter().filter_map(|ending| word.strip_suffix(ending));
    stems.find(|stem| stem.chars().count() >= 4).unwrap_or(word)
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
    let (pages, user) = (all_pages(), caller.current_user());
    let page = match q.trim() {
        "" => DocsPage::new("", &read_markdown(START).unwrap_or_default(), &pages, user),
        query => DocsPage::search_results(query, search(query), &pages, user),
    };
    html(page)
}

/// `GET /docs/{path}`
pub(crate) async fn page(Extension(caller): Extension<Caller>, Path(path): Path<String>) -> Page {
    let path = path.strip_suffix(".md").unwrap_or(&path);
    let source = read_markdown(path).ok_or_else(|| {
        PageError(Error::NotFound("The documentation has no such page; /docs lists all pages.".into()))
    })?;
    html(DocsPage::new(path, &source, &all_pages(), caller.current_user()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_with_all_words_are_found() {
        let paths =
            |query: &str| -> Vec<_> { search(query).into_iter().map(|found| found.page.path).collect() };
        assert_eq!(paths("DistributedSampler mindinsight"), ["coming-from"]);
        assert_eq!(paths("datasets").first().map(String::as_str), Some("datasets"), "in the title");
        let found = search("what is a rank?");
        let DocsResult { page, passage } = found.first().expect("a page");
        assert_eq!(page.path, "terms");
        let excerpt = &passage.text;
        assert!(excerpt.starts_with("rank: one of the processes that train a job together"), "{excerpt}");
        let is_from_the_body = |DocsResult { page, passage: Passage { text, .. } }: &DocsResult| {
            *text != page.title && !text.contains("](") && !text.contains("<!--")
        };
        assert!(found.iter().all(is_from_the_body), "{found:?}");
        assert!(paths("no-page-has-this-word").is_empty());
        assert!(!paths("resuming jobs").is_empty(), "pages with resume and job");
        for (word, heading) in
            [("predict", "in-the-browser-from-pictures-to-a-prediction"), ("overfit", "your-own-pictures")]
        {
            let found = search(word);
            let guide = found.iter().take(2).find(|found| found.page.path == "getting-started");
            assert_eq!(guide.map(|found| &*found.passage.anchor), Some(heading), "{word}: {found:?}");
        }
        let found = search("learning rate");
        let first: Vec<_> =
            found.iter().take(2).map(|found| (&*found.page.path, &*found.passage.anchor)).collect();
        assert_eq!(first, [("terms", "terms"), ("reference/job-file", "train")], "a definition, then a key");
        assert!(found[1].passage.text.starts_with("lr: "), "{:?}", found[1]);
        for word in ["safetensors", "webhook", "dataset-root"] {
            for DocsResult { page, passage: Passage { text, .. } } in search(word) {
                assert!(text.to_lowercase().contains(word), "{word} on {}: {text}", page.path);
            }
        }
    }

    #[test]
    fn the_reference_is_embedded_and_every_page_has_a_title() {
        let pages = all_pages();
        for path in ["team", "reference/job-file", "reference/command-line", "reference/rest"] {
            assert!(pages.iter().any(|page| page.path == path), "{path} in {pages:?}");
        }
        assert!(pages.iter().all(|page| !page.title.is_empty()), "{pages:?}");
        assert_eq!(pages.first().map(|page| page.path.as_str()), Some("getting-started"));
        let is_for_the_tree = |path: &str| path == "README" || path.starts_with("decisions/");
        assert!(!pages.iter().any(|page| is_for_the_tree(&page.path)), "{pages:?}");
    }
}
