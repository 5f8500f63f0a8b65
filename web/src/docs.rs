//! The documentation: Markdown from the source tree, as pages.

mod markdown;

pub use markdown::{Passage, passages, title};

use crate::layout::CurrentUser;
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
    pages: Vec<DocsEntry>,
    html: String,
    /// The text in the search field.
    query: String,
    /// The results of a search, the best page first.
    results: Option<Vec<DocsResult>>,
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
            pages: pages.to_vec(),
            html,
            query: String::new(),
            results: None,
            user,
        }
    }

    /// Creates a page with search results: a link to the section of each passage, and the passage's text.
    pub fn search_results(
        query: &str,
        results: Vec<DocsResult>,
        pages: &[DocsEntry],
        user: CurrentUser,
    ) -> Self {
        let results = Some(results);
        Self { query: query.into(), results, ..Self::new("", "# Documentation\n", pages, user) }
    }

    /// Returns the pages in two groups: Guides, which are in the top folder, and Reference.
    fn folders(&self) -> [(&'static str, Vec<&DocsEntry>); 2] {
        let (inner, top) = self.pages.iter().partition(|page| page.path.contains('/'));
        [("Guides", top), ("Reference", inner)]
    }
}

impl DocsResult {
    /// Returns the heading above the passage, if it is not the page's title.
    fn section(&self) -> Option<&str> {
        let Passage { heading, .. } = &self.passage;
        Some(heading.as_str()).filter(|heading| !heading.is_empty() && *heading != self.page.title)
    }
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
        let found = vec![DocsResult { page: pages[1].clone(), passage }];
        let html = DocsPage::search_results("\"key\"", found, &pages, CurrentUser::NOBODY)
            .render()
            .expect("renders");
        let link =
            r##"<a href="/docs/reference/rest#train">REST: [train]</a>: | `&#60;b&#62;key` | [x](y) |"##;
        assert!(html.contains(link), "{html}");
        assert!(html.contains("Found on 1 page."), "{html}");
        assert!(html.contains(r#"value="&#34;key&#34;""#), "{html}");
    }
}
