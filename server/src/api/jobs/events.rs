//! The stored events of a job as a list, for clients that do not need a stream.

use crate::api::prelude::*;
use crate::{
    api::{
        jobs, large,
        list::{self, Elements, Fields, MAX_LIMIT, Pages},
    },
    http::extract::check_count,
    scheduler::Scheduler,
    store::{PAGE_BYTES, RowContent},
};
use lockstep_protocol::stream::Event;
use serde_json::Value;

const DEFAULT_LIMIT: u32 = 100;
/// The only sort key, for cursors.
const ORDER: &str = "seq";
/// Number of rows in each query. A row has one or more events.
const QUERY_ROWS: u32 = 250;
/// Maximum number of rows that a request examines. In a long run, nearly all rows are points of metrics.
const MAX_EXAMINED_ROWS: usize = 20_000;

/// Types of events.
const TYPES: &[&str] = &[
    "state",
    "plan",
    "metrics",
    "log",
    "checkpoint",
    "checkpoint_removed",
    "evaluation",
    "rank",
    "histograms",
    "network",
    "alert",
];

/// A page of events.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EventList {
    /// Oldest first.
    #[schema(value_type = Vec<Event>)]
    events: Elements<Value>,
    /// Value of `cursor` for the next page; null if there is no later event yet.
    next_cursor: Option<String>,
}

/// Parameters of `GET /jobs/{id}/events`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventsQuery {
    /// Comma-separated types of events to return: `state`, `plan`, `metrics`, `log`, `checkpoint`, `checkpoint_removed`,
    /// `evaluation`, `rank`, `histograms`, `network`, `alert`.
    #[serde(rename = "type")]
    types: Option<String>,
    /// Page size, 1 to 1000 (default 100).
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
    /// Comma-separated names of the fields to return of each event.
    fields: Option<String>,
}

/// List a job's events
///
/// Events have the same format and order as in the job's stream. A page may have fewer events than `limit`, or none, and still have a
/// `next_cursor`: if events of the given types are rare in a long run, or if the page reached 4 MiB.
#[utoipa::path(get, path = "/jobs/{id}/events", tag = "jobs", params(("id" = String, Path), EventsQuery),
    responses((status = 200, body = EventList)))]
pub(crate) async fn list(
    State(scheduler): State<Arc<Scheduler>>,
    Path(id): Path<String>,
    Query(query): Query<EventsQuery>,
) -> Result<Response> {
    let job = jobs::find(&scheduler, &id).await?;
    let limit = check_count("limit", query.limit, DEFAULT_LIMIT, MAX_LIMIT)?;
    let fields = Fields::parse::<Event>(query.fields.as_deref())?;
    let types =
        list::split_list(query.types.as_deref()).map(|name| list::find_known_name("type", name, TYPES));
    let types = types.collect::<Result<Vec<_>>>()?;
    let has_metrics = types.is_empty() || types.contains(&"metrics");
    let pages = Pages::new("events", ORDER).owned_by("job", job.id.as_str());
    let mut after: u64 = pages.decode(query.cursor.as_deref())?.unwrap_or(0);
    let (mut items, mut bytes, mut examined_rows) = (Vec::new(), 0, 0);
    let _permit = large::acquire_permit(limit).await?;
    let limit = limit as usize;
    let next_cursor = 'pages: loop {
        let rows = scheduler.store.events(&job.id, after, QUERY_ROWS).await?;
        examined_rows += rows.len();
        let is_end = rows.len() < QUERY_ROWS as usize;
        // Lets other requests run between two queries.
        tokio::task::yield_now().await;
        for row in rows {
            // Nearly all rows of a long run are points, which take the longest to serialize.
            if !has_metrics && matches!(row.content, RowContent::Points { .. }) {
                after = after.max(row.seq);
                continue;
            }
            // Events may be long, so other requests may run between two rows.
            tokio::task::yield_now().await;
            for (seq, frame) in row.frames(after) {
                if items.len() == limit || bytes >= PAGE_BYTES {
                    break 'pages Some(pages.encode(&after)?);
                }
                let event: Value = serde_json::from_str(&frame)
                    .map_err(|e| Error::Internal(format!("event {seq} cannot be read: {e}")))?;
                after = seq;
                let event_type = event.get("type").and_then(Value::as_str).unwrap_or_default();
                if types.is_empty() || types.contains(&event_type) {
                    bytes += frame.len();
                    items.push(event);
                }
            }
            after = after.max(row.seq);
        }
        if is_end {
            break None;
        }
        if examined_rows >= MAX_EXAMINED_ROWS {
            break Some(pages.encode(&after)?);
        }
    };
    large::json_response(EventList { events: Elements { items, fields }, next_cursor }).await
}
