//! The audit log.

use crate::api::prelude::*;
use crate::{
    api::{
        html,
        list::{self, Elements, Fields, MAX_LIMIT, Pages},
    },
    auth::Auth,
    http::extract::{PageQuery, check_count},
};
use lockstep_protocol::{JobId, access::AuditEntry};
use lockstep_web::audit as views;

const DEFAULT_LIMIT: u32 = 100;
/// Pages of the audit log for cursors. The only order is newest first.
const PAGES: Pages = Pages::new("audit", "-id");

/// A page of the audit log.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AuditPage {
    /// Newest first.
    #[schema(value_type = Vec<AuditEntry>)]
    pub(crate) entries: Elements<AuditEntry>,
    /// Value of `cursor` for the next page; null on the last page.
    pub(crate) next_cursor: Option<String>,
}

/// Parameters of `GET /audit`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct AuditQuery {
    /// Page size, 1 to 1000 (default 100).
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
    /// Comma-separated names of the fields to return of each entry.
    fields: Option<String>,
    /// Only entries at this time or later (RFC 3339).
    #[param(format = DateTime)]
    created_after: Option<String>,
    /// Only entries before this time (RFC 3339).
    #[param(format = DateTime)]
    created_before: Option<String>,
    /// Only entries of this person (including the person's tokens) or token.
    who: Option<String>,
    /// Only entries with this text in `action` or `object`, ignoring case.
    q: Option<String>,
}

/// Read the audit log
///
/// The log has every request that may have changed something and every attempt to sign in, with the sender, the sender's address, the
/// action and the response's status. The newest 100 000 entries of the last year are kept.
#[utoipa::path(get, path = "/audit", tag = "access", params(AuditQuery), responses((status = 200, body = AuditPage)))]
pub(crate) async fn list(
    State(auth): State<Arc<Auth>>,
    Query(query): Query<AuditQuery>,
) -> Result<Json<AuditPage>> {
    Ok(Json(read_page(&auth, &query).await?))
}

pub(crate) async fn read_page(auth: &Auth, query: &AuditQuery) -> Result<AuditPage> {
    let limit = check_count("limit", query.limit, DEFAULT_LIMIT, MAX_LIMIT)?;
    let fields = Fields::parse::<AuditEntry>(query.fields.as_deref())?;
    let cursor: Option<String> = PAGES.decode(query.cursor.as_deref())?;
    let after = list::parse_time("created_after", query.created_after.as_deref())?;
    let before = list::parse_time("created_before", query.created_before.as_deref())?;
    // Ids begin with the entry's time in milliseconds, as twelve hexadecimal digits.
    let first_id_at_before = before.map(|before| format!("{:012x}", before.as_millisecond().max(0)));
    let before_id = match (cursor.as_deref(), first_id_at_before.as_deref()) {
        (Some(cursor), Some(first_id)) => Some(cursor.min(first_id)),
        (cursor, first_id) => cursor.or(first_id),
    };
    auth.audit.flush().await;
    let (who, text) = (query.who.as_deref().unwrap_or_default(), query.q.as_deref().unwrap_or_default());
    let mut entries = auth.store.audit_entries(before_id, who.trim(), text.trim(), limit + 1).await?;
    let mut has_more = entries.len() > limit as usize;
    entries.truncate(limit as usize);
    if let Some(after) = after {
        // The newest entries come first.
        let newer = entries.iter().take_while(|entry| entry.at >= after).count();
        has_more = has_more && newer == entries.len();
        entries.truncate(newer);
    }
    let next_cursor = entries.last().filter(|_| has_more).map(|entry| PAGES.encode(&entry.id)).transpose()?;
    let entries = Elements { items: entries, fields };
    Ok(AuditPage { entries, next_cursor })
}

/// `GET /audit`: the page Audit log.
pub(crate) async fn show(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    PageQuery(query): PageQuery<AuditQuery>,
) -> html::Page {
    let AuditPage { entries, next_cursor: next } = read_page(&auth, &query).await?;
    let mut lines = Vec::new();
    for entry in entries.items {
        let mut line = views::AuditLine { entry, job_name: String::new() };
        if let Some(id) = line.job_id().and_then(|id| id.parse::<JobId>().ok()) {
            line.job_name = auth.store.job(&id).await?.map(|row| row.job.name).unwrap_or_default();
        }
        lines.push(line);
    }
    html::html(views::AuditPage {
        lines,
        next,
        who: query.who.unwrap_or_default(),
        text: query.q.unwrap_or_default(),
        user: caller.current_user(),
    })
}
