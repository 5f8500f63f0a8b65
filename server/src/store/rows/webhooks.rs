//! Webhooks, and the messages that are queued for them.

use jiff::Timestamp;
use lockstep_protocol::{
    job::JobState,
    reason::{Reason, ReasonKind},
    words,
};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

words! {
    /// An event of a job or a run that can be sent to a webhook.
    #[derive(PartialOrd, Ord, ToSchema)]
    pub enum WebhookEvent: "event" {
        /// The ranks of an attempt run.
        Started = "job.started",
        /// A job of higher priority has taken the slots; the job waits and continues by itself.
        Preempted = "job.preempted",
        /// The job is paused until it is resumed.
        Paused = "job.paused",
        /// An attempt has failed or was lost, and another attempt follows.
        Restarting = "job.restarting",
        Succeeded = "job.succeeded",
        Failed = "job.failed",
        Cancelled = "job.cancelled",
        /// The program of a run from elsewhere has raised an alert.
        Alert = "run.alert",
    }
}

impl WebhookEvent {
    /// The default events of a webhook: a job has ended, or a program has raised an alert.
    pub const DEFAULTS: [WebhookEvent; 4] =
        [WebhookEvent::Succeeded, WebhookEvent::Failed, WebhookEvent::Cancelled, WebhookEvent::Alert];

    /// The event for a job's change to this state; `None` if no messages are sent for it.
    pub(in crate::store) fn for_state(state: JobState, cause: Option<&Reason>) -> Option<Self> {
        match state {
            JobState::Running => Some(WebhookEvent::Started),
            JobState::Queued => cause
                .is_some_and(|cause| matches!(cause.kind(), ReasonKind::Preempted { .. }))
                .then_some(WebhookEvent::Preempted),
            // The sweep decides whether a trial continues or ends.
            JobState::Paused => cause
                .is_none_or(|cause| !matches!(cause.kind(), ReasonKind::PausedBySweep { .. }))
                .then_some(WebhookEvent::Paused),
            JobState::Restarting => Some(WebhookEvent::Restarting),
            JobState::Succeeded => Some(WebhookEvent::Succeeded),
            JobState::Failed => Some(WebhookEvent::Failed),
            JobState::Cancelled => cause
                .is_none_or(|cause| !matches!(cause.kind(), ReasonKind::EndedBySweep))
                .then_some(WebhookEvent::Cancelled),
            // After `Lost`, another state follows at once and has an event.
            JobState::Lost | JobState::Starting | JobState::Pausing => None,
        }
    }
}

words! {
    /// The format of messages, which depends on the receiver.
    #[derive(Default, ToSchema)]
    pub enum WebhookForm: "form" {
        /// Standard Webhooks: type, time and the job's fields, for programs.
        #[default]
        Standard = "standard",
        Slack = "slack",
        Discord = "discord",
        /// A workflow of Microsoft Teams.
        Teams = "teams",
        Ntfy = "ntfy",
        /// E-mail over the server's SMTP settings.
        Email = "email",
    }
}

/// A receiver of messages about jobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Webhook {
    /// Opaque. Ids sort by time.
    pub id: String,
    pub url: String,
    pub form: WebhookForm,
    /// Only jobs of this project; null for all projects.
    pub project: Option<String>,
    /// The events for which messages are sent.
    pub events: Vec<WebhookEvent>,
    /// Whether messages are queued and sent. A receiver that answers 410 disables its webhook.
    pub enabled: bool,
    pub created_at: Timestamp,
}

/// A webhook and the secret that signs its messages.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookRow {
    pub webhook: Webhook,
    /// `whsec_` and the key in base64.
    pub secret: String,
}

/// Does not show the secret, so that it does not appear in logs.
impl fmt::Debug for WebhookRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.webhook.fmt(f)
    }
}

/// An attempt to send a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeliveryAttempt {
    pub at: Timestamp,
    /// HTTP status of the response, or the reply code of the mail server that accepted the e-mail; null without a response.
    pub status: Option<u16>,
    /// Why the message was not delivered; null if it was delivered.
    pub error: Option<String>,
    /// Seconds until the response or the error.
    pub secs: f64,
}

/// A message to a webhook. The message was delivered if its last attempt has no error.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Delivery {
    /// Value of the header `webhook-id`, and part of an e-mail's `Message-ID`: the same in each attempt. Ids sort by time.
    pub id: String,
    #[serde(skip)]
    pub webhook: String,
    /// The job's id; null for a test.
    pub job: Option<String>,
    /// The message's type: an event of a webhook, or `webhook.test`.
    pub event: String,
    /// The body in the format `standard`.
    #[serde(skip)]
    pub payload: String,
    pub created_at: Timestamp,
    /// When the next attempt is due; null without a next attempt.
    pub next_at: Option<Timestamp>,
    /// The attempts, the oldest first.
    pub attempts: Vec<DeliveryAttempt>,
}

impl Delivery {
    /// Creates the id of a new message.
    pub(crate) fn new_id() -> String {
        format!("msg_{}", uuid::Uuid::now_v7().simple())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_preemption_is_an_event_of_a_queued_job() {
        let of =
            |state, kind: Option<ReasonKind>| WebhookEvent::for_state(state, kind.map(Reason::from).as_ref());
        let preempted = ReasonKind::Preempted { job: None, priority: 1, detail: None };
        assert_eq!(of(JobState::Queued, Some(preempted)), Some(WebhookEvent::Preempted));
        for kind in [None, Some(ReasonKind::RetriedByUser)] {
            assert_eq!(of(JobState::Queued, kind), None);
        }
    }
}
