//! `lockstep webhook`: webhooks, URLs to which the server posts messages about jobs.

use super::{
    api::{ServerArgs, text},
    block_on, output, usage_error,
};
use lockstep_server::store::{WebhookEvent, WebhookForm};
use serde_json::{Value, json};

#[derive(clap::Subcommand)]
pub(crate) enum Action {
    /// Add a webhook; the secret that signs its messages is printed only once
    Add {
        /// URL to which messages are posted; for e-mail, mailto: with addresses separated by commas
        url: String,
        /// Form of the messages: standard (for programs), slack, discord, teams, ntfy or email
        #[arg(long, value_name = "FORM", default_value = "standard")]
        form: WebhookForm,
        /// Only jobs of this project
        #[arg(long, value_name = "NAME")]
        project: Option<String>,
        /// Event, such as job.started (may be repeated) [default: job.succeeded, job.failed, job.cancelled and run.alert]
        #[arg(long, value_name = "EVENT")]
        event: Vec<WebhookEvent>,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// List webhooks, with the time and the result of each webhook's newest message
    List(ServerArgs),
    /// Send a test message to a webhook and print the outcome
    Test(WebhookArgs),
    /// Remove a webhook with all its messages, including waiting messages
    Remove(WebhookArgs),
}

#[derive(clap::Args)]
pub(crate) struct WebhookArgs {
    /// The webhook's id
    id: String,
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs the action.
///
/// # Errors
/// The server refuses the request, or the test message was not delivered.
pub(crate) fn run(action: Action) -> anyhow::Result<()> {
    block_on(async {
        match action {
            Action::Add { url, form, project, event, server } => {
                let events = Some(event).filter(|events| !events.is_empty());
                let body = json!({ "url": url, "form": form, "project": project, "events": events });
                let webhook: Value = server.api()?.post("/webhooks", &body).await?;
                let warnings: Option<Vec<String>> = serde_json::from_value(webhook["warnings"].clone())?;
                output::warn_each(&warnings.unwrap_or_default());
                if server.json {
                    return output::json(&webhook);
                }
                output::warn(format_args!("webhook {}; its secret is shown once", text(&webhook, "id")));
                output::line(text(&webhook, "secret"))
            }
            Action::List(server) => {
                let api = server.api()?;
                let webhooks = api.read_all("/webhooks").await?;
                if server.json {
                    return output::json(&webhooks);
                }
                if webhooks.is_empty() {
                    return output::line("no webhooks; add one with `lockstep webhook add URL`");
                }
                let mut rows = Vec::new();
                for webhook in &webhooks {
                    let deliveries = format!("{}/deliveries", path(text(webhook, "id"))?);
                    let newest = api.read_pages(&deliveries, &[], Some(1)).await?;
                    rows.push(row(webhook, newest.first()));
                }
                let header = ["WEBHOOK", "STATE", "FORM", "URL", "PROJECT", "EVENTS", "NEWEST MESSAGE"];
                output::table(header, rows)
            }
            Action::Test(WebhookArgs { id, server }) => {
                let sent: Value = server.api()?.post(&format!("{}/test", path(&id)?), &json!({})).await?;
                if server.json {
                    return output::json(&sent);
                }
                let attempt = &sent["attempts"][0];
                match attempt["error"].as_str() {
                    None => output::line(format_args!("delivered: {}", attempt["status"])),
                    Some(error) => Err(anyhow::anyhow!("the test was not delivered: {error}")),
                }
            }
            Action::Remove(WebhookArgs { id, server }) => {
                server.api()?.delete(&path(&id)?).await?;
                output::print(server.json, &json!({ "removed": id }), &id)
            }
        }
    })
}

fn row(webhook: &Value, newest: Option<&Value>) -> [String; 7] {
    let state = if webhook["enabled"] == true { "enabled" } else { "disabled" };
    let events = webhook["events"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let [id, form, url, project] = ["id", "form", "url", "project"].map(|key| text(webhook, key).to_owned());
    let events = events.collect::<Vec<_>>().join(", ");
    [id, state.into(), form, url, project, events, newest.map(describe_message).unwrap_or_default()]
}

/// Formats the time and the state of a message: `2026-01-02T03:04:05.678Z delivered`. Names the error of the last attempt.
fn describe_message(message: &Value) -> String {
    let at = text(message, "created_at");
    let newest = message["attempts"].as_array().and_then(|attempts| attempts.last());
    let is_waiting = !message["next_at"].is_null();
    match newest.and_then(|attempt| attempt["error"].as_str()) {
        None if is_waiting => format!("{at} waiting"),
        None => format!("{at} delivered"),
        Some(error) if is_waiting => format!("{at} waiting after a failed attempt: {error}"),
        Some(error) => format!("{at} failed: {error}"),
    }
}

/// Returns the URL path of a webhook. An invalid id must not lead to another path.
fn path(id: &str) -> anyhow::Result<String> {
    if !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        Ok(format!("/webhooks/{id}"))
    } else {
        Err(usage_error("no webhook has this id; `lockstep webhook list` shows all webhooks"))
    }
}
