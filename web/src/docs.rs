//! The documentation: Markdown from the source tree, as pages.

mod markdown;

pub use markdown::{Passage, passages, title};

use crate::{layout::CurrentUser, numbers::plural};
use askama::Template;

/// An entry of the list of pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocsEntry {
    /// Path below `/docs/`, without `.md`: `reference/job-file`.
    pub path: String,
    /// The page's first heading.
    pub title: String,
}

/// A page that contains the words of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocsResult {
    pub page: DocsEntry,
    /// The passage that fits best. Its text is cut to an excerpt.
    pub passage: Passage,
}

/// `GET /docs/{path}`.
#[derive(Debug, Clone, Template)]
#[template(path = "docs.html")]
pub struct DocsPage {
    title: String,
    path: String,
    folders: Vec<(String, Vec<DocsEntry>)>,
    html: String,
    /// The text in the search field.
    query: String,
    user: CurrentUser,
}

impl DocsPage {
    /// Creates the page at `path` from its Markdown. Links to files that are not in `pages`, the list of all pages, become plain text.
    pub fn new(path: &str, source: &str, pages: &[DocsEntry], user: CurrentUser) -> Self {
        let is_page = |path: &str| pages.iter().any(|entry| entry.path == path);
        let html = markdown::html(source, path, &is_page);
        Self {
            title: title(source),
            path: path.into(),
            folders: folders(pages),
            html,
            query: String::new(),
            user,
        }
    }

    /// Creates a page with search results: a link to the section of each passage, and the passage's text.
    pub fn search_results(query: &str, found: &[DocsResult], pages: &[DocsEntry], user: CurrentUser) -> Self {
        // Excerpts and headings are plain text, so characters of Markdown are left out.
        let is_text = |c: &char| c.is_alphanumeric() || " .,:;()'\"/-=+%_".contains(*c);
        let plain = |text: &str| text.chars().filter(is_text).collect::<String>().trim().to_owned();
        let mut source = String::from("# Documentation\n\n");
        source += &match found.len() {
            0 => "No page contains all of these words.\n".to_owned(),
            count => format!("Found on {}.\n\n", plural(count as u64, "page")),
        };
        for DocsResult { page, passage } in found {
            let DocsEntry { path, title } = page;
            let Passage { heading, anchor, text, .. } = passage;
            let link = if heading.is_empty() || heading == title {
                format!("[{title}]({path}.md)")
            } else {
                format!("[{title}: {}]({path}.md#{anchor})", plain(heading))
            };
            source += &format!("- {link}: {}\n", plain(text));
        }
        Self { query: query.into(), ..Self::new("", &source, pages, user) }
    }
}

/// Returns the pages in two groups: Guides, which are in the top folder, and Reference. Empty groups are left out.
fn folders(pages: &[DocsEntry]) -> Vec<(String, Vec<DocsEntry>)> {
    let (inner, top): (Vec<_>, Vec<_>) = pages.iter().cloned().partition(|page| page.path.contains('/'));
    let groups = [("Guides", top), ("Reference", inner)];
    groups
        .into_iter()
        .filter(|(_, pages)| !pages.is_empty())
        .map(|(name, pages)| (name.into(), pages))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_listed_and_their_text_is_escaped() {
        let entry = |path: &str, title: &str| DocsEntry { path: path.into(), title: title.into() };
        let pages = [entry("team", "A team & its server"), entry("reference/rest", "REST")];
        let html = DocsPage::new(
            "team",
            "# A team & its server\n\n<script>x</script>\n",
            &pages,
            CurrentUser::NOBODY,
        );
        let html = html.render().expect("renders");
        assert!(!html.contains("<script>x") && html.contains("&lt;script&gt;x"), "{html}");
        assert!(html.contains("<title>A team &#38; its server"), "{html}");
        assert!(html.contains(r#"<a href="/docs/team" aria-current="page">"#), "{html}");
        assert!(html.contains(r#"<li><a href="/docs/reference/rest">REST</a></li>"#), "{html}");
        let passage = Passage {
            heading: "[train]".into(),
            anchor: "train".into(),
            text: "| `<b>key` | [x](y) |".into(),
            is_key: true,
        };
        let found = [DocsResult { page: pages[1].clone(), passage }];
        let html = DocsPage::search_results("\"key\"", &found, &pages, CurrentUser::NOBODY)
            .render()
            .expect("renders");
        assert!(
            html.contains(r#"<a href="/docs/reference/rest#train">REST: train</a>: bkey  x(y)"#),
            "{html}"
        );
        assert!(html.contains("Found on 1 page."), "{html}");
        assert!(html.contains(r#"value="&#34;key&#34;""#), "{html}");
    }
}
