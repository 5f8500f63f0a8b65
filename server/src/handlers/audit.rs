//! The audit log.

use super::extract::Query;
use crate::{
    app::App,
    error::{Error, Result},
    store::AuditEntry,
};
use axum::{Json, extract::State};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Entries of one answer, at most.
const MAX_LIMIT: u32 = 1000;
const DEFAULT_LIMIT: u32 = 100;

/// A page of the audit log.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AuditPage {
    /// Newest first.
    pub(super) entries: Vec<AuditEntry>,
    /// Give it as `cursor` for the next page; null on the last.
    pub(super) next: Option<String>,
}

/// Which entries.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct AuditQuery {
    /// At most so many: 1 to 1000; 100 when absent.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next` of the page before.
    cursor: Option<String>,
}

/// Read the audit log
///
/// Every request that may have changed something, and every attempt to sign in: who, from where, what, and how it was answered.
/// The newest 100 000 of the last year are kept.
#[utoipa::path(get, path = "/audit", tag = "access", params(AuditQuery), responses((status = 200, body = AuditPage)))]
pub(crate) async fn list(State(app): State<App>, Query(query): Query<AuditQuery>) -> Result<Json<AuditPage>> {
    Ok(Json(page(&app, &query).await?))
}

/// # Errors
/// A limit or cursor that is none, or the store's.
pub(super) async fn page(app: &App, query: &AuditQuery) -> Result<AuditPage> {
    let limit = query.limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(Error::BadRequest(format!("limit must be 1 to {MAX_LIMIT}, is {limit}")));
    }
    let cursor = query.cursor.as_deref();
    if cursor.is_some_and(|id| uuid::Uuid::try_parse(id).is_err()) {
        return Err(Error::BadRequest("the cursor is none of this server's".into()));
    }
    app.audit.flush().await;
    let mut entries = app.store.audit(cursor, limit + 1).await?;
    let more = entries.len() > limit as usize;
    entries.truncate(limit as usize);
    let next = entries.last().filter(|_| more).map(|entry| entry.id.clone());
    Ok(AuditPage { entries, next })
}
