//! The page Webhooks, for admins.

use crate::layout::CurrentUser;
use askama::Template;
use jiff::Timestamp;

/// A webhook.
#[derive(Debug, Clone)]
pub struct WebhookLine {
    pub id: String,
    pub url: String,
    /// Format of the messages: `standard`, `slack`, ...
    pub format: &'static str,
    /// Project of the jobs. Empty for all projects.
    pub project: String,
    /// Names of events, such as `succeeded, failed`.
    pub events: String,
    pub enabled: bool,
    /// The newest messages, newest first.
    pub deliveries: Vec<DeliveryLine>,
}

/// A message to a webhook.
#[derive(Debug, Clone)]
pub struct DeliveryLine {
    pub at: Timestamp,
    /// Name of the event, such as `job.failed`.
    pub event: String,
    /// The job's id; empty for a test message.
    pub job: String,
    /// The job's name at the time of the message.
    pub job_name: String,
    /// The message's state: `waiting`, `delivered` or `failed`.
    pub state: &'static str,
    /// Number of attempts so far.
    pub attempts: usize,
    /// Why the last attempt failed. Empty if the last attempt succeeded.
    pub error: String,
}

/// `GET /webhooks`.
#[derive(Debug, Clone, Default, Template)]
#[template(path = "webhooks.html")]
pub struct WebhooksPage {
    /// Webhooks, the oldest first.
    pub webhooks: Vec<WebhookLine>,
    /// The formats of messages to choose from, and whether each is chosen.
    pub formats: Vec<(&'static str, bool)>,
    /// The events to choose from, and whether each is chosen.
    pub events: Vec<(&'static str, bool)>,
    /// The text in the field URL.
    pub url: String,
    /// The text in the field Project.
    pub project: String,
    /// Name of the field with the error: `url`, `form`, `project` or `events`. Empty if the error is about no field.
    pub wrong: String,
    /// Why the last change failed. Empty if no change failed.
    pub error: String,
    /// Secret of a webhook that was just added, shown only once. Empty otherwise.
    pub secret: String,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}
