//! Webhooks, for admins: add, list, change, remove and test webhooks, list their messages, and the page.

use super::{
    html::{Page as HtmlPage, form_error, html},
    list::{List, ListParams, list_of},
};
use crate::api::prelude::*;
use crate::{
    http::{authorize::AuditSubject, extract::Body},
    store::{Delivery, Webhook, WebhookEvent, WebhookForm, WebhookRow},
    webhooks::{Webhooks, addresses, mail, new_secret},
};
use axum::{Form, response::Redirect};
use lockstep_protocol::labels::project_mistake;
use lockstep_web::webhooks as views;
use reqwest::Url;
use serde_json::Value;

/// Maximum number of webhooks.
const MAX_WEBHOOKS: usize = 50;
/// Maximum length of a webhook's URL, in bytes.
const MAX_URL_BYTES: usize = 2000;
/// Maximum number of messages of a webhook that are listed, the newest first.
const MAX_LISTED_MESSAGES: u32 = 1000;
/// Number of messages of each webhook on the page.
const MESSAGES_ON_PAGE: u32 = 5;

/// A webhook to add.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewWebhook {
    /// URL to which messages are posted, with `https://` or `http://`; for the form `email`, `mailto:` with comma-separated e-mail
    /// addresses. At most 2000 bytes.
    url: String,
    #[serde(default)]
    form: WebhookForm,
    /// Only events of jobs of this project (default: all projects).
    project: Option<String>,
    /// Events to send (default: `job.succeeded`, `job.failed`, `job.cancelled` and `run.alert`).
    events: Option<Vec<WebhookEvent>>,
    /// Whether messages are sent (default: true).
    enabled: Option<bool>,
}

/// Changes to a webhook. Absent fields stay unchanged.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WebhookChange {
    url: Option<String>,
    form: Option<WebhookForm>,
    /// Only events of jobs of this project; empty for all projects.
    project: Option<String>,
    events: Option<Vec<WebhookEvent>>,
    enabled: Option<bool>,
}

/// A new webhook.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MadeWebhook {
    /// The secret with which messages are signed. Only this response contains the secret.
    secret: String,
    /// Warnings about the webhook, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
    #[serde(flatten)]
    webhook: Webhook,
}

list_of! {
    /// A page of webhooks.
    WebhookList
    /// Oldest first, unless `sort` is given.
    webhooks: Webhook
}

list_of! {
    /// A page of messages of a webhook.
    DeliveryList
    /// Newest first, unless `sort` is given.
    deliveries: Delivery
}

const LIST: List<Webhook> = List {
    name: "webhooks",
    sorts: &[
        ("created", |webhook| webhook.created_at.into()),
        ("url", |webhook| webhook.url.as_str().into()),
    ],
    default_sort: "created",
    id: |webhook| &webhook.id,
    created: Some(|webhook| webhook.created_at),
};

const DELIVERIES: List<Delivery> = List {
    name: "deliveries",
    sorts: &[("created", |delivery| delivery.created_at.into())],
    default_sort: "-created",
    id: |delivery| &delivery.id,
    created: Some(|delivery| delivery.created_at),
};

async fn find(webhooks: &Webhooks, id: &str) -> Result<WebhookRow> {
    let found = webhooks.store.webhooks().await?.into_iter().find(|row| row.webhook.id == id);
    found.ok_or_else(|| {
        Error::NotFound("no webhook has this id; `lockstep webhook list` shows all webhooks".into())
    })
}

/// Parses the URL of a webhook whose messages have this form.
fn parse_url(webhooks: &Webhooks, form: WebhookForm, text: &str) -> Result<Url> {
    let is_email = form == WebhookForm::Email;
    if is_email && webhooks.smtp.is_none() {
        return Err(Error::invalid("/form", mail::NO_SMTP));
    }
    let is_usable = |url: &Url| {
        if is_email { mail::recipients(url).is_some() } else { ["https", "http"].contains(&url.scheme()) }
    };
    let url =
        Url::parse(text.trim()).ok().filter(|url| is_usable(url) && url.as_str().len() <= MAX_URL_BYTES);
    let Some(url) = url else {
        let example = if is_email { "mailto:ada@example.org" } else { "https://example.org/hook" };
        let hint = if !is_email && text.trim().starts_with("mailto:") {
            "; for e-mail, the form must be email (in the shell, add --form email)"
        } else {
            ""
        };
        let detail = format!("must be a URL such as {example}, of at most {MAX_URL_BYTES} bytes{hint}");
        return Err(Error::invalid("/url", detail));
    };
    if !webhooks.allow_private {
        addresses::check_literal(&url).map_err(|refusal| Error::invalid("/url", refusal))?;
    }
    Ok(url)
}

fn apply(webhooks: &Webhooks, webhook: &mut Webhook, change: WebhookChange) -> Result<()> {
    let form = change.form.unwrap_or(webhook.form);
    // The form of messages decides which URLs are valid.
    if change.url.is_some() || form != webhook.form {
        webhook.form = form;
        webhook.url = parse_url(webhooks, form, change.url.as_deref().unwrap_or(&webhook.url))?.into();
    }
    if let Some(project) = change.project {
        webhook.project = Some(project).filter(|project| !project.is_empty());
        check_field("/project", webhook.project.as_deref().and_then(project_mistake))?;
    }
    if let Some(mut events) = change.events {
        events.sort_unstable();
        events.dedup();
        if events.is_empty() {
            let detail = "must name an event; to send nothing, disable the webhook";
            return Err(Error::invalid("/events", detail));
        }
        webhook.events = events;
    }
    webhook.enabled = change.enabled.unwrap_or(webhook.enabled);
    Ok(())
}

async fn add(webhooks: &Webhooks, new: NewWebhook) -> Result<WebhookRow> {
    let NewWebhook { url, form, project, events, enabled } = new;
    let mut webhook = Webhook {
        id: uuid::Uuid::now_v7().simple().to_string(),
        url: String::new(),
        form,
        project: None,
        events: WebhookEvent::DEFAULTS.to_vec(),
        enabled: true,
        created_at: crate::now(),
    };
    let settings = WebhookChange { url: Some(url), form: None, project, events, enabled };
    apply(webhooks, &mut webhook, settings)?;
    let _one_at_a_time = webhooks.change_lock.lock().await;
    if webhooks.store.webhooks().await?.len() >= MAX_WEBHOOKS {
        let detail = format!(
            "there are already {MAX_WEBHOOKS} webhooks, the maximum; remove webhooks that nobody needs"
        );
        return Err(Error::Conflict(detail));
    }
    let row = WebhookRow { webhook, secret: new_secret()? };
    webhooks.store.put_webhook(&row).await?;
    Ok(row)
}

/// Warns about a project that no job has, because its name may be mistyped.
async fn project_warning(webhooks: &Webhooks, project: Option<&str>) -> Result<Option<String>> {
    let Some(project) = project.filter(|project| !project.is_empty()) else { return Ok(None) };
    let is_known = webhooks.store.projects(None).await?.iter().any(|known| known.name == project);
    Ok((!is_known).then(|| format!("no job has the project {project:?} yet")))
}

async fn edit(webhooks: &Webhooks, id: &str, change: WebhookChange) -> Result<Webhook> {
    let _one_at_a_time = webhooks.change_lock.lock().await;
    let mut row = find(webhooks, id).await?;
    apply(webhooks, &mut row.webhook, change)?;
    webhooks.store.put_webhook(&row).await?;
    // If the webhook was enabled again, its queued messages are sent now.
    webhooks.wake();
    Ok(row.webhook)
}

async fn remove(webhooks: &Webhooks, id: &str) -> Result<()> {
    let _one_at_a_time = webhooks.change_lock.lock().await;
    find(webhooks, id).await?;
    Ok(webhooks.store.remove_webhook(id).await?)
}

/// List webhooks
///
/// `sort`: `created`, `url`.
#[utoipa::path(get, path = "/webhooks", tag = "webhooks", params(ListParams), responses((status = 200, body = WebhookList)))]
pub(crate) async fn list(
    State(webhooks): State<Arc<Webhooks>>,
    Query(params): Query<ListParams>,
) -> Result<Json<WebhookList>> {
    let all = webhooks.store.webhooks().await?.into_iter().map(|row| row.webhook);
    Ok(Json(LIST.page(None, all.collect(), &params)?.into()))
}

/// Add a webhook
///
/// The server posts a message to the webhook's URL for each event of a job that is not private. Messages are signed as specified by
/// Standard Webhooks. With the form `email`, the server sends e-mail instead, which is not signed. E-mail needs `lockstep serve --smtp`.
#[utoipa::path(post, path = "/webhooks", tag = "webhooks", request_body = NewWebhook,
    responses((status = 201, body = MadeWebhook), (status = 409, body = Problem, description = "There are 50 webhooks")))]
pub(crate) async fn create(
    State(webhooks): State<Arc<Webhooks>>,
    Body(new, _): Body<NewWebhook>,
) -> Result<(StatusCode, Extension<AuditSubject>, Json<MadeWebhook>)> {
    // Before the webhook is added, because the secret must be returned afterwards.
    let warnings = project_warning(&webhooks, new.project.as_deref()).await?.into_iter().collect();
    let WebhookRow { webhook, secret } = add(&webhooks, new).await?;
    let subject = AuditSubject(webhook.id.clone());
    Ok((StatusCode::CREATED, Extension(subject), Json(MadeWebhook { secret, warnings, webhook })))
}

/// Change a webhook
///
/// A webhook that is enabled again receives the messages that are still queued.
#[utoipa::path(patch, path = "/webhooks/{id}", tag = "webhooks", request_body = WebhookChange, responses((status = 200, body = Webhook)))]
pub(crate) async fn change(
    State(webhooks): State<Arc<Webhooks>>,
    Path(id): Path<String>,
    Body(change, _): Body<WebhookChange>,
) -> Result<Json<Webhook>> {
    Ok(Json(edit(&webhooks, &id, change).await?))
}

/// Remove a webhook
///
/// The webhook's messages are removed, too, including queued messages.
#[utoipa::path(delete, path = "/webhooks/{id}", tag = "webhooks", responses((status = 204)))]
pub(crate) async fn delete(
    State(webhooks): State<Arc<Webhooks>>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    remove(&webhooks, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Send a test message to a webhook
///
/// The message is sent at once and only once, even if the webhook is disabled. The response contains the result.
#[utoipa::path(post, path = "/webhooks/{id}/test", tag = "webhooks", responses((status = 200, body = Delivery)))]
pub(crate) async fn test(
    State(webhooks): State<Arc<Webhooks>>,
    Path(id): Path<String>,
) -> Result<Json<Delivery>> {
    let row = find(&webhooks, &id).await?;
    Ok(Json(webhooks.send_test(&row).await?))
}

/// List messages of a webhook, with each attempt to send them
///
/// Messages are kept for a week. Of the messages that were delivered or have failed, only the newest 100 are kept. `sort`: `created`.
#[utoipa::path(get, path = "/webhooks/{id}/deliveries", tag = "webhooks", params(("id" = String, Path), ListParams),
    responses((status = 200, body = DeliveryList)))]
pub(crate) async fn deliveries(
    State(webhooks): State<Arc<Webhooks>>,
    Path(id): Path<String>,
    Query(params): Query<ListParams>,
) -> Result<Json<DeliveryList>> {
    find(&webhooks, &id).await?;
    let deliveries = webhooks.store.deliveries(&id, MAX_LISTED_MESSAGES).await?;
    Ok(Json(DELIVERIES.page(None, deliveries, &params)?.into()))
}

/// `GET /webhooks`
pub(crate) async fn show(
    State(webhooks): State<Arc<Webhooks>>,
    Extension(caller): Extension<Caller>,
) -> HtmlPage {
    html(page(&webhooks, &caller, &[]).await?)
}

/// Returns the page without an error or a secret. The form to add a webhook has the values `fields`; empty for the default values.
async fn page(
    webhooks: &Webhooks,
    caller: &Caller,
    fields: &[(String, String)],
) -> Result<views::WebhooksPage> {
    let mut lines = Vec::new();
    for WebhookRow { webhook, .. } in webhooks.store.webhooks().await? {
        let deliveries = webhooks.store.deliveries(&webhook.id, MESSAGES_ON_PAGE).await?;
        let events =
            webhook.events.iter().map(|event| event.as_str().trim_start_matches("job.").replace('.', " "));
        lines.push(views::WebhookLine {
            events: events.collect::<Vec<_>>().join(", "),
            deliveries: deliveries.into_iter().map(delivery_line).collect(),
            format: webhook.form.as_str(),
            project: webhook.project.unwrap_or_default(),
            enabled: webhook.enabled,
            id: webhook.id,
            url: webhook.url,
        });
    }
    let has = |name: &str, value: &str| fields.iter().any(|(key, chosen)| key == name && chosen == value);
    let is_chosen = |event: WebhookEvent| {
        if fields.is_empty() { WebhookEvent::DEFAULTS.contains(&event) } else { has("event", event.as_str()) }
    };
    Ok(views::WebhooksPage {
        webhooks: lines,
        formats: WebhookForm::ALL.map(|form| (form.as_str(), has("form", form.as_str()))).into(),
        events: WebhookEvent::ALL.map(|event| (event.as_str(), is_chosen(event))).into(),
        url: field(fields, "url"),
        project: field(fields, "project"),
        user: caller.current_user(),
        ..views::WebhooksPage::default()
    })
}

fn delivery_line(delivery: Delivery) -> views::DeliveryLine {
    let error = delivery.attempts.last().and_then(|attempt| attempt.error.clone());
    let payload: Value = serde_json::from_str(&delivery.payload).unwrap_or_default();
    views::DeliveryLine {
        at: delivery.created_at,
        event: delivery.event,
        job: delivery.job.unwrap_or_default(),
        job_name: payload["data"]["name"].as_str().unwrap_or("job").into(),
        attempts: delivery.attempts.len(),
        state: match (&error, delivery.next_at) {
            (_, Some(_)) => "waiting",
            (None, None) => "delivered",
            (Some(_), None) => "failed",
        },
        error: error.unwrap_or_default(),
    }
}

/// Returns the value of a form's field without surrounding spaces. Empty if the field is missing.
fn field(fields: &[(String, String)], name: &str) -> String {
    let found = fields.iter().find(|(key, _)| key == name);
    found.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
}

/// `POST /webhooks`: handles the forms of the page.
pub(crate) async fn submit(
    State(webhooks): State<Arc<Webhooks>>,
    Extension(caller): Extension<Caller>,
    Form(fields): Form<Vec<(String, String)>>,
) -> HtmlPage {
    let (action, id) = (field(&fields, "action"), field(&fields, "id"));
    let enable = |enabled| WebhookChange { enabled: Some(enabled), ..Default::default() };
    let work = async {
        match action.as_str() {
            "add" => return add(&webhooks, read_form(&fields)?).await.map(Some),
            "test" => drop(webhooks.send_test(&find(&webhooks, &id).await?).await?),
            "enable" => drop(edit(&webhooks, &id, enable(true)).await?),
            "disable" => drop(edit(&webhooks, &id, enable(false)).await?),
            "remove" => remove(&webhooks, &id).await?,
            _ => return Err(Error::NotFound(format!("this page has no action {action:?}"))),
        }
        Ok(None)
    };
    let subject = |id: &str| {
        let id = if id.is_empty() { String::new() } else { format!(" {id:?}") };
        Extension(AuditSubject(format!("{action}{id}")))
    };
    match work.await {
        Ok(Some(WebhookRow { webhook, secret })) => {
            // E-mail is not signed.
            let secret = if webhook.form == WebhookForm::Email { String::new() } else { secret };
            let page = views::WebhooksPage { secret, ..page(&webhooks, &caller, &[]).await? };
            Ok((subject(&webhook.id), html(page)?).into_response())
        }
        Ok(None) => Ok((subject(&id), Redirect::to("/webhooks")).into_response()),
        Err(error) => {
            let subject = subject(&id);
            let mistake = match &error {
                Error::Invalid(mistakes) => mistakes.first().cloned(),
                _ => None,
            };
            let (status, error) = form_error(error)?;
            let kept_fields = if action == "add" { &fields[..] } else { &[] };
            let mut page = page(&webhooks, &caller, kept_fields).await?;
            page.error = error;
            if let Some(mistake) = mistake {
                page.wrong = mistake.pointer.trim_start_matches('/').to_owned();
                page.error = mistake.detail;
            }
            Ok((status, subject, html(page)?).into_response())
        }
    }
}

/// Reads a new webhook from the fields of the page.
fn read_form(fields: &[(String, String)]) -> Result<NewWebhook> {
    let unknown = |pointer: &str| Error::invalid(pointer, "is not a choice of this page");
    let chosen = fields.iter().filter(|(key, _)| key == "event");
    let events = chosen.map(|(_, value)| value.parse::<WebhookEvent>().map_err(|_| unknown("/events")));
    Ok(NewWebhook {
        url: field(fields, "url"),
        form: field(fields, "form").parse().map_err(|_| unknown("/form"))?,
        project: Some(field(fields, "project")),
        events: Some(events.collect::<Result<_>>()?),
        enabled: None,
    })
}
