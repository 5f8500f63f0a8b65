//! The body of a message in each form. Names and reasons are untrusted text. They are escaped, so that they contain no links, mentions or
//! markup.

use crate::store::WebhookForm;
use lockstep_protocol::numbers::percent;
use reqwest::Url;
use serde_json::{Value, json};

/// Maximum length of a title and of a detail, in bytes. A message has at most 2000 characters on Discord and 4096 bytes on ntfy.
const MAX_TEXT_BYTES: usize = 800;

/// The content of a message.
pub(super) enum Body {
    Json(String),
    Mail { subject: String, text: String },
}

/// A message for people.
struct Text {
    /// `shoes has failed`.
    title: String,
    /// The reason, the best accuracy, or the text of an alert. May be empty.
    detail: String,
    /// The job's page.
    link: Option<String>,
    is_bad: bool,
}

/// The body of a message. ntfy also changes `url`, to which the message is sent.
pub(super) fn body(form: WebhookForm, payload: Value, url: &mut Url) -> Body {
    let text = Text::from_payload(&payload);
    let body = match form {
        WebhookForm::Standard => payload,
        WebhookForm::Slack => slack(&text),
        WebhookForm::Discord => discord(&text),
        WebhookForm::Teams => teams(&text),
        WebhookForm::Ntfy => ntfy(&text, url),
        WebhookForm::Email => return email(text),
    };
    Body::Json(body.to_string())
}

impl Text {
    fn from_payload(payload: &Value) -> Self {
        let data = &payload["data"];
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let event = payload["type"].as_str().unwrap_or_default();
        let status = match event {
            "job.started" => "is running",
            "job.preempted" => "gives way to a job of higher priority",
            "job.paused" => "is paused",
            "job.restarting" => "is restarting",
            "job.succeeded" => "has succeeded",
            "job.failed" => "has failed",
            "job.cancelled" => "was cancelled",
            _ => "",
        };
        let alert = &data["alert"];
        let title = match (text(&data["name"]), text(&alert["title"])) {
            (Some(name), Some(alert)) => format!("{name}: {alert}"),
            (Some(name), None) => format!("{name} {status}"),
            (None, _) => "Lockstep: a test of this webhook".to_owned(),
        };
        let best = data["best"]["value"].as_f64().filter(|_| event == "job.succeeded");
        let best = best.map(|best| format!("best validation accuracy {}", percent(best)));
        Self {
            title: shorten(title, MAX_TEXT_BYTES),
            detail: shorten(
                text(&alert["text"]).or_else(|| text(&data["reason"])).or(best).unwrap_or_default(),
                MAX_TEXT_BYTES,
            ),
            link: text(&data["url"]),
            is_bad: event == "job.failed" || alert["level"] == "ERROR",
        }
    }
}

/// Cuts a text to at most `bytes` bytes.
pub(super) fn shorten(mut text: String, bytes: usize) -> String {
    text.truncate(text.floor_char_boundary(bytes));
    text
}

/// <https://docs.slack.dev/messaging/formatting-message-text>: only `&`, `<` and `>` are escaped. `plain_text` has no markup.
fn slack(text: &Text) -> Value {
    let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let mut blocks = vec![json!({ "type": "section", "text": { "type": "plain_text", "text": text.title } })];
    if !text.detail.is_empty() {
        blocks.push(json!({ "type": "section", "text": { "type": "plain_text", "text": text.detail } }));
    }
    if let Some(link) = &text.link {
        let link = format!("<{}|Open the job>", escape(link));
        blocks.push(json!({ "type": "section", "text": { "type": "mrkdwn", "text": link } }));
    }
    // `text` is shown in notifications, which do not show blocks.
    json!({ "text": escape(&text.title), "blocks": blocks })
}

/// <https://docs.discord.com/developers/resources/webhook#execute-webhook>.
fn discord(text: &Text) -> Value {
    let escape = |text: &str| {
        text.chars().fold(String::new(), |mut text, c| {
            if c.is_ascii_punctuation() {
                text.push('\\');
            }
            text.push(c);
            text
        })
    };
    let mut content = format!("**{}**", escape(&text.title));
    if !text.detail.is_empty() {
        content.push('\n');
        content.push_str(&escape(&text.detail));
    }
    // Discord's limit of 2000 characters also counts the escape characters. The link needs the rest.
    content = shorten(content, 1500);
    if let Some(link) = &text.link {
        content.push('\n');
        content.push_str(link);
    }
    json!({ "content": content, "allowed_mentions": { "parse": [] } })
}

/// An adaptive card for the workflow "When a Teams webhook request is received". The text of a `TextRun` is not parsed as Markdown.
fn teams(text: &Text) -> Value {
    let block = |text: &str, weight: &str| json!({ "type": "RichTextBlock", "inlines": [{ "type": "TextRun", "text": text, "weight": weight }] });
    let mut blocks = vec![block(&text.title, "bolder")];
    if !text.detail.is_empty() {
        blocks.push(block(&text.detail, "default"));
    }
    let actions =
        text.link.iter().map(|url| json!({ "type": "Action.OpenUrl", "title": "Open the job", "url": url }));
    json!({
        "type": "message",
        "attachments": [{
            "contentType": "application/vnd.microsoft.card.adaptive",
            "content": {
                "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
                "type": "AdaptiveCard",
                "version": "1.4",
                "body": blocks,
                "actions": actions.collect::<Vec<_>>(),
            },
        }],
    })
}

/// <https://docs.ntfy.sh/publish/#publish-as-json>: JSON is sent to the topic's URL without its last segment, the name of the topic.
fn ntfy(text: &Text, url: &mut Url) -> Value {
    let topic = url.path_segments().and_then(|mut parts| parts.next_back()).unwrap_or_default().to_owned();
    if let Ok(mut parts) = url.path_segments_mut() {
        parts.pop();
    }
    let message = if text.detail.is_empty() { &text.title } else { &text.detail };
    // Priority 3 is ntfy's default, 4 is high. A tag is the name of an emoji.
    let mut body = json!({
        "topic": topic,
        "title": text.title,
        "message": message,
        "priority": if text.is_bad { 4 } else { 3 },
        "tags": [if text.is_bad { "x" } else { "bell" }],
    });
    if let Some(link) = &text.link {
        body["click"] = link.as_str().into();
    }
    body
}

/// Plain text. The header of the subject is encoded, so that a name cannot add headers.
fn email(text: Text) -> Body {
    let parts = [Some(text.title.clone()), Some(text.detail).filter(|detail| !detail.is_empty()), text.link];
    Body::Mail { subject: text.title, text: parts.into_iter().flatten().collect::<Vec<_>>().join("\n\n") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(form: WebhookForm, name: &str, reason: Value, url: &str) -> (Value, String) {
        let payload = json!({"type": "job.failed", "data": {"name": name, "reason": reason, "url": "https://l.example/jobs/j1"}});
        let mut url = Url::parse(url).unwrap();
        let body: Value = match body(form, payload, &mut url) {
            Body::Json(body) => serde_json::from_str(&body).unwrap(),
            Body::Mail { subject, text } => json!({"subject": subject, "text": text}),
        };
        (body, url.into())
    }

    #[test]
    fn names_are_escaped_in_all_formats() {
        let name = "<!everyone> [a](http://evil.example) *b* @everyone";
        let body_of = |form| message(form, name, json!("rank 1 was killed"), "https://chat.example/hook").0;
        let slack = body_of(WebhookForm::Slack);
        assert_eq!(slack["text"], format!("{} has failed", name.replace('<', "&lt;").replace('>', "&gt;")));
        assert_eq!(
            slack["blocks"][0]["text"],
            json!({"type": "plain_text", "text": format!("{name} has failed")})
        );
        assert_eq!(slack["blocks"][2]["text"]["text"], "<https://l.example/jobs/j1|Open the job>");
        let discord = body_of(WebhookForm::Discord);
        let content = discord["content"].as_str().unwrap();
        assert!(content.starts_with("**\\<\\!everyone\\> \\[a\\]\\(http\\:"), "{content}");
        assert!(content.ends_with("was killed\nhttps://l.example/jobs/j1"), "{content}");
        assert_eq!(discord["allowed_mentions"], json!({"parse": []}));
        let email = body_of(WebhookForm::Email);
        assert_eq!(email["subject"], format!("{name} has failed"));
        assert!(
            email["text"].as_str().unwrap().ends_with("\n\nrank 1 was killed\n\nhttps://l.example/jobs/j1")
        );
        let card = &body_of(WebhookForm::Teams)["attachments"][0]["content"];
        assert_eq!(card["body"][0]["inlines"][0]["text"], format!("{name} has failed"));
        assert_eq!(card["actions"][0]["url"], "https://l.example/jobs/j1");
    }

    #[test]
    fn ntfy_s_topic_is_the_last_part_of_the_address() {
        let (body, url) =
            message(WebhookForm::Ntfy, "shoes", json!("diverged"), "https://ntfy.example/sub/topic?auth=x");
        assert_eq!(url, "https://ntfy.example/sub?auth=x");
        assert_eq!((&body["topic"], &body["title"]), (&json!("topic"), &json!("shoes has failed")));
        assert_eq!(
            (&body["message"], &body["click"]),
            (&json!("diverged"), &json!("https://l.example/jobs/j1"))
        );
        let (body, url) = message(WebhookForm::Ntfy, "shoes", Value::Null, "https://ntfy.sh/topic");
        assert_eq!((url.as_str(), &body["message"]), ("https://ntfy.sh/", &json!("shoes has failed")));
    }

    #[test]
    fn texts_are_shortened_to_the_limits_of_services() {
        for form in WebhookForm::ALL {
            let (body, _) =
                message(form, &"*".repeat(10_000), json!("ü".repeat(10_000)), "https://a.example/b");
            if form == WebhookForm::Discord {
                assert!(body["content"].as_str().unwrap().chars().count() < 2000);
            } else if form != WebhookForm::Standard {
                assert!(body.to_string().len() < 4096, "{form:?}");
            }
        }
    }
}
