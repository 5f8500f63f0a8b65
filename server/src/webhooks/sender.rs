//! Sends one message with a time limit: over HTTP, without redirects and proxies, and only to allowed addresses; or as e-mail.

use super::{
    Webhooks, addresses,
    forms::{self, Body, shorten},
    mail, signature,
};
use crate::{
    store::{Delivery, WebhookRow},
    util::http_client::{self, root_cause, system_authorities},
};
use jiff::Timestamp;
use reqwest::{Client, StatusCode, Url, header};
use serde_json::Value;
use std::time::Duration;
use tokio::time::timeout;

/// Time limit of an attempt.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum length of the text of an error, in bytes.
const MAX_ERROR_BYTES: usize = 300;

impl Webhooks {
    /// Sends a message. Returns the status of the receiver's response, or the mail server's reply code.
    pub(super) async fn send(
        &self,
        row: &WebhookRow,
        delivery: &Delivery,
        at: Timestamp,
    ) -> Result<StatusCode, String> {
        let mut url = Url::parse(&row.webhook.url).map_err(|error| error.to_string())?;
        let payload: Value = serde_json::from_str(&delivery.payload).map_err(|error| error.to_string())?;
        let body = match forms::body(row.webhook.form, self.with_link(payload), &mut url) {
            Body::Json(body) => body,
            Body::Mail { subject, text } => {
                let sent = timeout(
                    ATTEMPT_TIMEOUT,
                    mail::send(self.smtp.as_ref(), &delivery.id, &url, subject, text),
                );
                let sent = sent.await.unwrap_or_else(|_| Err(timeout_message()));
                return sent.map_err(|error| shorten(error, MAX_ERROR_BYTES));
            }
        };
        if !self.allow_private {
            addresses::check_literal(&url)?;
        }
        let client =
            self.client.get_or_init(|| new_client(self.allow_private)).as_ref().map_err(String::clone)?;
        let timestamp = at.as_second();
        let signature = signature::sign(&row.secret, &delivery.id, timestamp, &body)
            .ok_or("the webhook's secret cannot be read; remove the webhook and add it again")?;
        let request = client
            .post(url)
            .header(header::CONTENT_TYPE, "application/json")
            .header("webhook-id", &delivery.id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", signature)
            .body(body);
        Ok(request.send().await.map_err(in_words)?.status())
    }

    /// Adds the URL of the job's page.
    fn with_link(&self, mut payload: Value) -> Value {
        let job = payload["data"]["id"].as_str();
        if let Some(link) =
            self.server_url.as_ref().zip(job).map(|(server, job)| format!("{server}/jobs/{job}"))
        {
            payload["data"]["url"] = link.into();
        }
        payload
    }
}

fn new_client(allow_private: bool) -> Result<Client, String> {
    let builder = http_client::builder(system_authorities()).map_err(|error| error.to_string())?;
    let builder = builder
        .timeout(ATTEMPT_TIMEOUT)
        // A proxy would resolve names itself, and could reach addresses that are not allowed.
        .no_proxy()
        // Messages are rare, and each resolves the receiver's name again.
        .pool_max_idle_per_host(0);
    let builder = if allow_private { builder } else { builder.dns_resolver(addresses::PublicResolver) };
    builder.build().map_err(|error| error.to_string())
}

/// The reason why a request failed. The URL is left out, because it may contain a secret.
fn in_words(error: reqwest::Error) -> String {
    if error.is_timeout() {
        return timeout_message();
    }
    shorten(root_cause(&error.without_url()), MAX_ERROR_BYTES)
}

fn timeout_message() -> String {
    format!("the receiver did not answer within {} s", ATTEMPT_TIMEOUT.as_secs())
}
