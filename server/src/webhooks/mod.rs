//! Webhooks: messages about jobs in the format of <https://www.standardwebhooks.com>, of chat services, or as e-mail.
//!
//! The store queues a message in the transaction that changes a job's state or stores an alert (`store/sql/webhooks.rs`). The task in this
//! module sends due messages: one at a time per webhook, so a slow receiver delays only its own webhook. A message is
//! sent at least once, with the same `webhook-id` in each attempt.

pub(crate) mod addresses;
mod forms;
pub(crate) mod mail;
mod sender;
mod signature;

pub(crate) use signature::new_secret;

use crate::{
    config::{ServeConfig, smtp::SmtpConfig},
    store::{Delivery, DeliveryAttempt, Result, Store, WebhookRow},
    util::failure_log::FailureLog,
};
use jiff::Timestamp;
use lockstep_protocol::backoff::Backoff;
use reqwest::{Client, StatusCode};
use serde_json::json;
use std::{
    collections::HashSet,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};
use tokio::{
    sync::{Mutex, Notify},
    task::JoinSet,
    time::{interval, sleep},
};

/// Time for which messages are kept in the database. The last attempt is made much earlier.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 3600);
/// Interval between two removals of old messages.
const PURGE_INTERVAL: Duration = Duration::from_secs(3600);
/// Pauses before a failed query is retried: the first and the longest.
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));

pub(crate) struct Webhooks {
    pub(crate) store: Arc<dyn Store>,
    /// Whether messages may be sent to addresses that are not public.
    pub(crate) allow_private: bool,
    /// The server's URL for links, if it is configured.
    server_url: Option<String>,
    /// The mail server, if one is configured.
    pub(crate) smtp: Option<SmtpConfig>,
    /// Created for the first message, because reading the system's CA certificates is slow.
    client: OnceLock<std::result::Result<Client, String>>,
    /// The pause after each attempt except the last.
    retry_pauses: Vec<Duration>,
    /// Notified when a message may be due.
    wake: Notify,
    /// Locked while a webhook is read, changed and stored.
    pub(crate) change_lock: Mutex<()>,
}

impl Webhooks {
    pub(crate) fn new(config: &ServeConfig, store: Arc<dyn Store>) -> Self {
        Self {
            store,
            allow_private: config.webhooks_allow_private,
            server_url: config.public_url.as_ref().map(ToString::to_string),
            smtp: config.smtp.clone(),
            client: OnceLock::new(),
            retry_pauses: config.webhook_retries.clone(),
            wake: Notify::new(),
            change_lock: Mutex::default(),
        }
    }

    /// Wakes the task, because a message may be due: a job has changed its state or has an alert, or a webhook was changed.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Sends messages that are due. Runs until dropped.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut sending = JoinSet::new();
        // Webhooks to which a message is being sent. A webhook whose task panics gets no messages until the server's next start.
        let mut busy = HashSet::new();
        let mut purge_tick = interval(PURGE_INTERVAL);
        let (mut failure_log, mut backoff) = (FailureLog::default(), RETRY);
        loop {
            let started = self.start_due(&mut sending, &mut busy).await;
            let failed = "the queue of webhooks cannot be read";
            failure_log.log(&started, failed, "the queue of webhooks can be read again");
            let pause = match started {
                Ok(pause) => {
                    backoff = RETRY;
                    pause
                }
                Err(_) => backoff.next_pause(),
            };
            tokio::select! {
                () = self.wake.notified() => {}
                Some(Ok(id)) = sending.join_next() => {
                    busy.remove(&id);
                }
                () = sleep(pause) => {}
                _ = purge_tick.tick() => {
                    if let Err(error) = self.store.purge_deliveries(crate::now() - RETENTION).await {
                        tracing::warn!(%error, "old messages of webhooks could not be removed");
                    }
                }
            }
        }
    }

    /// Starts to send due messages to webhooks that are not busy. Returns the pause until the next call.
    async fn start_due(
        self: &Arc<Self>,
        sending: &mut JoinSet<String>,
        busy: &mut HashSet<String>,
    ) -> Result<Duration> {
        let mut pause = PURGE_INTERVAL;
        for (row, delivery) in self.store.next_deliveries().await? {
            if busy.contains(&row.webhook.id) {
                continue;
            }
            let until =
                |at: Timestamp| Duration::try_from(at.duration_since(crate::now())).unwrap_or_default();
            let due_in = delivery.next_at.map_or(Duration::ZERO, until);
            if due_in.is_zero() {
                busy.insert(row.webhook.id.clone());
                sending.spawn(self.clone().deliver(row, delivery));
            } else {
                pause = pause.min(due_in);
            }
        }
        Ok(pause)
    }

    /// Sends a message of the queue and stores the attempt. Returns the webhook's id.
    async fn deliver(self: Arc<Self>, row: WebhookRow, mut delivery: Delivery) -> String {
        let pause = self.retry_pauses.get(delivery.attempts.len()).copied();
        let attempt = self.try_send(&row, &delivery).await;
        let is_gone = is_gone(&attempt);
        let pause = pause.filter(|_| attempt.error.is_some() && !is_gone);
        delivery.attempts.push(attempt);
        delivery.next_at = pause.map(|pause| crate::now() + pause);
        let mut backoff = RETRY;
        // Without a stored attempt, the message would be sent again at once.
        while let Err(error) = self.store.note_delivery_attempt(&delivery, is_gone).await {
            tracing::warn!(%error, delivery = delivery.id, "an attempt of a webhook could not be stored; trying again");
            sleep(backoff.next_pause()).await;
        }
        row.webhook.id
    }

    /// Sends a test message, even if the webhook is disabled, and stores it.
    ///
    /// # Errors
    /// A store error. A failed attempt is not an error.
    pub(crate) async fn send_test(&self, row: &WebhookRow) -> Result<Delivery> {
        let at = crate::now();
        let payload =
            json!({ "type": "webhook.test", "timestamp": at, "data": { "webhook": row.webhook.id } });
        let mut delivery = Delivery {
            id: Delivery::new_id(),
            webhook: row.webhook.id.clone(),
            job: None,
            event: "webhook.test".into(),
            payload: payload.to_string(),
            created_at: at,
            next_at: None,
            attempts: Vec::new(),
        };
        let attempt = self.try_send(row, &delivery).await;
        let is_gone = is_gone(&attempt);
        delivery.attempts.push(attempt);
        self.store.add_delivery(&delivery).await?;
        self.store.note_delivery_attempt(&delivery, is_gone).await?;
        Ok(delivery)
    }

    async fn try_send(&self, row: &WebhookRow, delivery: &Delivery) -> DeliveryAttempt {
        let (at, since) = (crate::now(), Instant::now());
        let sent = self.send(row, delivery, at).await;
        let secs = since.elapsed().as_millis() as f64 / 1000.0;
        let status = sent.as_ref().ok().map(StatusCode::as_u16);
        let error = match sent {
            Ok(status) if status.is_success() => None,
            Ok(StatusCode::GONE) => Some("the receiver answered 410 Gone: it wants no more messages".into()),
            Ok(status) if status.is_redirection() => {
                Some(format!("the receiver answered {status}, and redirects are not followed"))
            }
            Ok(status) => Some(format!("the receiver answered {status}")),
            Err(error) => Some(error),
        };
        DeliveryAttempt { at, status, error, secs }
    }
}

/// Whether the receiver wants no more messages.
fn is_gone(attempt: &DeliveryAttempt) -> bool {
    attempt.status == Some(StatusCode::GONE.as_u16())
}
