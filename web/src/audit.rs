//! The audit log: who did what.

use crate::layout::{Bar, Nav, Viewer};
use askama::Template;
use jiff::Timestamp;

/// A line of the log.
#[derive(Debug, Clone)]
pub struct AuditLine {
    /// When.
    pub at: Timestamp,
    /// Name of the token; empty for nobody.
    pub who: String,
    /// Where the request came from.
    pub address: String,
    /// Method and route, or `sign in`.
    pub action: String,
    /// The address that was asked for; behind `: ` what was created or concerned, where the address does not say it.
    pub object: String,
    /// HTTP status of the answer.
    pub status: u16,
    /// As in the server's log.
    pub request_id: String,
}

/// `GET /audit`.
#[derive(Debug, Clone, Template)]
#[template(path = "audit.html")]
pub struct AuditPage {
    /// Newest first.
    pub lines: Vec<AuditLine>,
    /// Where older ones are.
    pub next: Option<String>,
    /// Who looks.
    pub viewer: Viewer,
}

impl AuditPage {
    /// The page as HTML.
    ///
    /// # Errors
    /// As [`askama::Template::render`]; none that data can cause.
    pub fn render(&self) -> Result<String, askama::Error> {
        Template::render(self)
    }

    fn nav(&self) -> Bar {
        Nav::Audit.seen_by(self.viewer)
    }
}
