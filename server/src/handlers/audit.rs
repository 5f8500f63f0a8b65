//! The audit log.

use super::{
    extract::{Query, count},
    list::{self, Elements, Fields, MAX_LIMIT, Pages},
};
use crate::{app::App, error::Result, store::AuditEntry};
use axum::{Json, extract::State};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

const DEFAULT_LIMIT: u32 = 100;
/// The only order.
const PAGES: Pages = Pages::new("audit", "-id");

/// A page of the audit log.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AuditPage {
    /// Newest first.
    #[schema(value_type = Vec<AuditEntry>)]
    pub(super) entries: Elements<AuditEntry>,
    /// Give it as `cursor` for the next page; null on the last.
    pub(super) next_cursor: Option<String>,
}

/// Which entries.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct AuditQuery {
    /// At most so many: 1 to 1000; 100 when absent.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Only these fields of each entry, with commas between.
    #[param(min_length = 1)]
    fields: Option<String>,
    /// Only what was done at this time or later (RFC 3339).
    #[param(format = DateTime)]
    created_after: Option<String>,
    /// Only what was done before this time (RFC 3339).
    #[param(format = DateTime)]
    created_before: Option<String>,
}

const FIELDS: &[&str] =
    &["id", "at", "who", "token_id", "address", "action", "object", "status", "request_id"];

/// Read the audit log
///
/// Every request that may have changed something, and every attempt to sign in: who, from where, what, and how it was answered.
/// The newest 100 000 of the last year are kept.
#[utoipa::path(get, path = "/audit", tag = "access", params(AuditQuery), responses((status = 200, body = AuditPage), (status = 400, body = crate::error::Problem)))]
pub(crate) async fn list(State(app): State<App>, Query(query): Query<AuditQuery>) -> Result<Json<AuditPage>> {
    Ok(Json(page(&app, &query).await?))
}

/// # Errors
/// A limit, field or cursor that is none, or the store's.
pub(super) async fn page(app: &App, query: &AuditQuery) -> Result<AuditPage> {
    let limit = count("limit", query.limit, DEFAULT_LIMIT, MAX_LIMIT)?;
    let fields = Fields::parse(query.fields.as_deref(), FIELDS)?;
    let cursor: Option<String> = PAGES.read(query.cursor.as_deref())?;
    let after = list::time("created_after", query.created_after.as_deref())?;
    let before = list::time("created_before", query.created_before.as_deref())?;
    // Ids begin with their time in milliseconds, as twelve hexadecimal digits.
    let first_id = before.map(|before| format!("{:012x}", before.as_millisecond().max(0)));
    let behind = match (cursor.as_deref(), first_id.as_deref()) {
        (Some(cursor), Some(first)) => Some(cursor.min(first)),
        (cursor, first) => cursor.or(first),
    };
    app.audit.flush().await;
    let mut entries = app.store.audit(behind, limit + 1).await?;
    let mut more = entries.len() > limit as usize;
    entries.truncate(limit as usize);
    if let Some(after) = after {
        let newer = entries.iter().take_while(|entry| entry.at >= after).count();
        more = more && newer == entries.len();
        entries.truncate(newer);
    }
    let next_cursor = entries.last().filter(|_| more).map(|entry| PAGES.cursor(&entry.id)).transpose()?;
    let entries = Elements { items: entries, fields };
    Ok(AuditPage { entries, next_cursor })
}
