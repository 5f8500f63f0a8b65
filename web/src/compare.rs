//! Comparison of jobs. The URL contains the jobs, and the script reads them, so the page itself contains no data.

use crate::layout::{Bar, Nav, Viewer};
use askama::Template;

/// `GET /compare`.
#[derive(Debug, Clone, Template)]
#[template(path = "compare.html")]
pub struct ComparePage {
    /// Rights of the person who looks at the page.
    pub viewer: Viewer,
}

impl ComparePage {
    /// Renders the page as HTML.
    ///
    /// # Errors
    /// See [`askama::Template::render`]; no data can cause an error.
    pub fn render(&self) -> Result<String, askama::Error> {
        Template::render(self)
    }

    fn nav(&self) -> Bar<'_> {
        Nav::Compare.seen_by(&self.viewer)
    }
}
