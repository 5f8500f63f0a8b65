//! Webhooks and their messages. A message is queued in the transaction that changes the job's state or stores the alert, so that a message
//! exists exactly if the transaction was committed.

use super::{Connection, DbRow, SqlStore, flag, multi_row, optional_time};
use crate::store::{
    Delivery, JobRow, Result, StoreError, Webhook, WebhookEvent, WebhookRow,
    unreadable::readable,
    values::{from_json, json, time},
};
use jiff::{SignedDuration, Timestamp};
use lockstep_protocol::{JobId, job::JobState, stream::EventBody};
use serde_json::json;
use sqlx::Row;

/// Maximum number of messages of a webhook that are kept after their last attempt.
const MAX_MESSAGES: i64 = 100;
/// Age from which on the start or the end of a run from elsewhere is no news: the run is imported, or its program had no connection.
const MAX_RUN_AGE: SignedDuration = SignedDuration::from_secs(600);

/// A change of a job's state or an alert, to be sent to webhooks.
pub(super) struct Notice {
    event: WebhookEvent,
    job: JobId,
    project: String,
    payload: String,
}

/// Creates the notice for an event, and updates the announced state. `row` is the job after the event. `None` if the event neither changes
/// the job's state nor is an alert, or if a run from elsewhere is imported or reports what happened long ago. Private jobs have no notices,
/// because other people can read the receiver's messages.
pub(super) fn create_notice(row: &mut JobRow, body: &EventBody, at: Timestamp) -> Option<Box<Notice>> {
    let (event, state, reason, cause, attempt) = match body {
        EventBody::State { state, reason, cause, attempt } => {
            let has_changed = std::mem::replace(&mut row.announced_state, *state) != *state;
            // A trial that its sweep has paused and resumed starts without a message.
            let is_resumed_trial = *state == JobState::Running && !row.progress.rungs.is_empty();
            let event = WebhookEvent::for_state(*state, cause.as_ref())
                .filter(|_| has_changed && !is_resumed_trial)?;
            (event, state, reason, cause, attempt)
        }
        EventBody::Alert { attempt, .. } => {
            (WebhookEvent::Alert, &row.job.state, &row.job.reason, &row.job.cause, attempt)
        }
        _ => return None,
    };
    let job = &row.job;
    let happened_at = job.finished_at.map_or(at, |ended| ended.min(at));
    let is_old = job
        .external
        .as_ref()
        .is_some_and(|run| run.imported || crate::now().duration_since(happened_at) > MAX_RUN_AGE);
    if is_old || job.spec.private {
        return None;
    }
    let mut payload = json!({
        "type": event,
        "timestamp": at,
        "data": {
            "id": job.id,
            "name": job.name,
            "project": job.project,
            "tags": job.tags,
            "owner": job.owner,
            "state": state,
            "reason": reason,
            "cause": cause,
            "attempt": attempt,
            "ranks": job.ranks,
            "step": job.step,
            "total_steps": job.total_steps,
            "epoch": job.epoch,
            "images_per_second": job.images_per_second,
            "best": job.best,
            "last": job.last,
            "created_at": job.created_at,
            "started_at": job.started_at,
            "finished_at": job.finished_at,
        },
    });
    if let EventBody::Alert { alert, .. } = body {
        payload["data"]["alert"] = json!(alert);
    }
    let (job, project) = (job.id.clone(), job.project.clone());
    Some(Box::new(Notice { event, job, project, payload: payload.to_string() }))
}

/// Queues a message for each webhook that is enabled for the notice's event and project.
pub(super) async fn enqueue(db: &mut Connection, notices: &[&Notice]) -> Result<()> {
    if notices.is_empty() {
        return Ok(());
    }
    let rows = sqlx::query("SELECT * FROM webhooks WHERE enabled <> 0").fetch_all(&mut *db).await?;
    let webhooks: Vec<Webhook> =
        readable(rows.iter().map(webhook)).into_iter().map(|row| row.webhook).collect();
    let wants = |webhook: &Webhook, notice: &Notice| {
        webhook.events.contains(&notice.event)
            && webhook.project.as_ref().is_none_or(|project| *project == notice.project)
    };
    let messages: Vec<(&Webhook, &Notice)> = notices
        .iter()
        .flat_map(|notice| webhooks.iter().map(move |webhook| (webhook, *notice)))
        .filter(|(webhook, notice)| wants(webhook, notice))
        .collect();
    // Messages get the current time, not the event's, because they are kept for a week after they are queued.
    let now = crate::now().as_millisecond();
    let text = "INSERT INTO webhook_deliveries (id, webhook_id, job_id, event, payload, created_at, next_at) VALUES {}";
    multi_row::execute(db, text, 7, &messages, |query, (webhook, notice)| {
        Ok(query
            .bind(Delivery::new_id())
            .bind(webhook.id.as_str())
            .bind(notice.job.as_str())
            .bind(notice.event.as_str())
            .bind(notice.payload.as_str())
            .bind(now)
            .bind(now))
    })
    .await
}

fn webhook(row: &DbRow) -> Result<WebhookRow> {
    let id: String = row.try_get("id")?;
    let form: String = row.try_get("form")?;
    let webhook = Webhook {
        form: form.parse().map_err(|error| StoreError::Corrupt(format!("webhook {id}: {error}")))?,
        url: row.try_get("url")?,
        project: row.try_get("project")?,
        events: from_json(row.try_get("events")?)?,
        enabled: flag(row, "enabled")?,
        created_at: time(row.try_get("created_at")?)?,
        id,
    };
    Ok(WebhookRow { webhook, secret: row.try_get("secret")? })
}

fn delivery(row: &DbRow) -> Result<Delivery> {
    Ok(Delivery {
        id: row.try_get("id")?,
        webhook: row.try_get("webhook_id")?,
        job: row.try_get("job_id")?,
        event: row.try_get("event")?,
        payload: row.try_get("payload")?,
        created_at: time(row.try_get("created_at")?)?,
        next_at: optional_time(row, "next_at")?,
        attempts: from_json(row.try_get("attempts")?)?,
    })
}

impl SqlStore {
    pub async fn webhooks(&self) -> Result<Vec<WebhookRow>> {
        self.list(sqlx::query("SELECT * FROM webhooks ORDER BY id"), webhook).await
    }

    pub async fn put_webhook(&self, row: &WebhookRow) -> Result<()> {
        let Webhook { id, url, form, project, events, enabled, created_at } = &row.webhook;
        let query = sqlx::query(
            "INSERT INTO webhooks (id, url, form, project, events, enabled, created_at, secret) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO UPDATE SET url = excluded.url, \
             form = excluded.form, project = excluded.project, events = excluded.events, \
             enabled = excluded.enabled",
        )
        .bind(id)
        .bind(url)
        .bind(form.as_str())
        .bind(project)
        .bind(json(events)?)
        .bind(i64::from(*enabled))
        .bind(created_at.as_millisecond())
        .bind(&row.secret);
        self.execute(query).await.map(drop)
    }

    pub async fn remove_webhook(&self, id: &str) -> Result<()> {
        let mut db = self.begin().await?;
        for text in
            ["DELETE FROM webhooks WHERE id = $1", "DELETE FROM webhook_deliveries WHERE webhook_id = $1"]
        {
            sqlx::query(text).bind(id).execute(&mut *db).await?;
        }
        Ok(db.commit().await?)
    }

    pub async fn deliveries(&self, webhook: &str, limit: u32) -> Result<Vec<Delivery>> {
        let text = "SELECT * FROM webhook_deliveries WHERE webhook_id = $1 ORDER BY id DESC LIMIT $2";
        self.list(sqlx::query(text).bind(webhook).bind(i64::from(limit)), delivery).await
    }

    pub async fn next_deliveries(&self) -> Result<Vec<(WebhookRow, Delivery)>> {
        let mut webhooks = self.webhooks().await?;
        webhooks.retain(|row| row.webhook.enabled);
        if webhooks.is_empty() {
            return Ok(Vec::new());
        }
        let query = sqlx::query(
            "SELECT d.* FROM webhooks w JOIN webhook_deliveries d ON d.id = (SELECT id FROM webhook_deliveries \
             WHERE webhook_id = w.id AND next_at IS NOT NULL ORDER BY next_at, id LIMIT 1) WHERE w.enabled <> 0",
        );
        let with_webhook = |delivery: Delivery| {
            let row = webhooks.iter().find(|row| row.webhook.id == delivery.webhook)?;
            Some((row.clone(), delivery))
        };
        Ok(self.list(query, delivery).await?.into_iter().filter_map(with_webhook).collect())
    }

    pub async fn add_delivery(&self, delivery: &Delivery) -> Result<()> {
        let query = sqlx::query(
            "INSERT INTO webhook_deliveries (id, webhook_id, event, payload, created_at, attempts) \
             VALUES ($1, $2, $3, $4, $5, $6)",
        )
        .bind(&delivery.id)
        .bind(&delivery.webhook)
        .bind(&delivery.event)
        .bind(&delivery.payload)
        .bind(delivery.created_at.as_millisecond())
        .bind(json(&delivery.attempts)?);
        self.execute(query).await.map(drop)
    }

    pub async fn note_delivery_attempt(&self, delivery: &Delivery, is_gone: bool) -> Result<()> {
        let mut db = self.begin().await?;
        sqlx::query("UPDATE webhook_deliveries SET attempts = $2, next_at = $3 WHERE id = $1")
            .bind(&delivery.id)
            .bind(json(&delivery.attempts)?)
            .bind(delivery.next_at.map(Timestamp::as_millisecond))
            .execute(&mut *db)
            .await?;
        if is_gone {
            let text = "UPDATE webhooks SET enabled = 0 WHERE id = $1";
            sqlx::query(text).bind(&delivery.webhook).execute(&mut *db).await?;
        }
        let text = "DELETE FROM webhook_deliveries WHERE webhook_id = $1 AND next_at IS NULL AND id NOT IN \
            (SELECT id FROM webhook_deliveries WHERE webhook_id = $1 AND next_at IS NULL ORDER BY id DESC LIMIT $2)";
        sqlx::query(text).bind(&delivery.webhook).bind(MAX_MESSAGES).execute(&mut *db).await?;
        Ok(db.commit().await?)
    }

    pub async fn purge_deliveries(&self, before: Timestamp) -> Result<()> {
        let query = sqlx::query("DELETE FROM webhook_deliveries WHERE created_at < $1");
        self.execute(query.bind(before.as_millisecond())).await.map(drop)
    }
}
