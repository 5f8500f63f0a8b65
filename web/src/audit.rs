//! The audit log of requests.

use crate::layout::{Bar, Nav, Viewer};
use askama::Template;
use jiff::Timestamp;

/// A line of the log.
#[derive(Debug, Clone)]
pub struct AuditLine {
    pub at: Timestamp,
    /// Name of the token or person; empty without one.
    pub who: String,
    /// Network address of the client.
    pub address: String,
    /// Method and route, or `sign in`.
    pub action: String,
    /// The URL that was requested. If it does not name the object that was created or changed, that follows after `: `.
    pub object: String,
    /// HTTP status of the answer.
    pub status: u16,
    /// The request's id, as in the server's log.
    pub request_id: String,
}

/// `GET /audit`.
#[derive(Debug, Clone, Template)]
#[template(path = "audit.html")]
pub struct AuditPage {
    /// Newest first.
    pub lines: Vec<AuditLine>,
    /// The cursor of the next page with older lines.
    pub next: Option<String>,
    /// Rights of the person who looks at the page.
    pub viewer: Viewer,
}

impl AuditPage {
    /// The page as HTML.
    ///
    /// # Errors
    /// See [`askama::Template::render`]; no data can cause an error.
    pub fn render(&self) -> Result<String, askama::Error> {
        Template::render(self)
    }

    fn nav(&self) -> Bar {
        Nav::Audit.seen_by(self.viewer)
    }
}
