//! The page Webhooks, for admins.

use crate::layout::{Bar, Nav, Viewer};
use askama::Template;
use jiff::Timestamp;

/// A webhook.
#[derive(Debug, Clone)]
pub struct WebhookLine {
    pub id: String,
    pub url: String,
    /// `standard`, `slack`, ...
    pub form: &'static str,
    /// Empty for all projects.
    pub project: String,
    /// `succeeded, failed`.
    pub events: String,
    pub enabled: bool,
    /// The newest messages, newest first.
    pub deliveries: Vec<DeliveryLine>,
}

/// A message to a webhook.
#[derive(Debug, Clone)]
pub struct DeliveryLine {
    pub at: Timestamp,
    /// `job.failed`.
    pub event: String,
    /// The job's id; empty for a test.
    pub job: String,
    /// `waiting`, `delivered` or `failed`.
    pub state: &'static str,
    /// Number of attempts so far.
    pub attempts: usize,
    /// Why the last attempt failed; empty if it did not.
    pub error: String,
}

/// `GET /webhooks`.
#[derive(Debug, Clone, Template)]
#[template(path = "webhooks.html")]
pub struct WebhooksPage {
    /// The first made first.
    pub webhooks: Vec<WebhookLine>,
    /// The forms of messages to choose from.
    pub forms: Vec<&'static str>,
    /// The events to choose from, and whether each is chosen at first.
    pub events: Vec<(&'static str, bool)>,
    /// The address in the form.
    pub url: String,
    /// Why the last change was not made; empty if it was.
    pub error: String,
    /// The secret of a webhook that was just added, shown only once; empty for none.
    pub secret: String,
    /// Rights of the person who looks at the page.
    pub viewer: Viewer,
}

impl WebhooksPage {
    /// The page as HTML.
    ///
    /// # Errors
    /// See [`askama::Template::render`]; no data can cause an error.
    pub fn render(&self) -> Result<String, askama::Error> {
        Template::render(self)
    }

    fn nav(&self) -> Bar<'_> {
        Nav::Elsewhere.seen_by(&self.viewer)
    }
}
