//! The audit log.

use super::{DbRow, SqlStore, job_list::push_contains, jobs::like_pattern};
use crate::store::{
    Result,
    values::{strip_nul, time},
};
use jiff::Timestamp;
use lockstep_protocol::access::AuditEntry;
use sqlx::{QueryBuilder, Row};

/// Maximum number of entries that a statement of a purge removes, so that other writers hardly wait.
const PURGE_ROWS: i64 = 500;

pub(super) fn entry(row: &DbRow) -> Result<AuditEntry> {
    Ok(AuditEntry {
        id: row.try_get("id")?,
        at: time(row.try_get("at")?)?,
        who: row.try_get("who")?,
        token_id: row.try_get("token_id")?,
        address: row.try_get("address")?,
        action: row.try_get("action")?,
        object: row.try_get("object")?,
        status: u16::try_from(row.try_get::<i64, _>("status")?).unwrap_or(0),
        request_id: row.try_get("request_id")?,
    })
}

impl SqlStore {
    pub async fn add_audit_entries(&self, entries: &[AuditEntry]) -> Result<()> {
        let mut db = self.begin().await?;
        for entry in entries {
            sqlx::query(
                "INSERT INTO audit (id, at, who, token_id, address, action, object, status, request_id) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (id) DO NOTHING",
            )
            .bind(&entry.id)
            .bind(entry.at.as_millisecond())
            .bind(strip_nul(&entry.who))
            .bind(&entry.token_id)
            .bind(&entry.address)
            .bind(strip_nul(&entry.action))
            .bind(strip_nul(&entry.object))
            .bind(i64::from(entry.status))
            .bind(strip_nul(&entry.request_id))
            .execute(&mut *db)
            .await?;
        }
        Ok(db.commit().await?)
    }

    pub async fn audit_entries(
        &self,
        before: Option<&str>,
        who: &str,
        text: &str,
        limit: u32,
    ) -> Result<Vec<AuditEntry>> {
        let mut query = QueryBuilder::new("SELECT * FROM audit WHERE id < ");
        // `~` sorts after all ids, which are hexadecimal.
        query.push_bind(before.unwrap_or("~").to_owned());
        if !who.is_empty() {
            // The name of a person's token is recorded as `ada (laptop)`.
            query.push(" AND (who = ").push_bind(strip_nul(who).into_owned()).push(" OR who LIKE ");
            query
                .push_bind(like_pattern(&format!("{who} (")).trim_start_matches('%').to_owned())
                .push(" ESCAPE '!')");
        }
        if !text.is_empty() {
            query.push(" AND ");
            push_contains(&mut query, "action || ' ' || object", text);
        }
        query.push(" ORDER BY id DESC LIMIT ").push_bind(i64::from(limit));
        self.list(query.build(), entry).await
    }

    pub async fn has_audit_entry(&self, action: &str, object: &str) -> Result<bool> {
        let text = "SELECT status FROM audit WHERE action = $1 AND (object = $2 OR object LIKE $3) AND status < 400 LIMIT 1";
        // The object of a request with a query includes the query.
        let query = sqlx::query(text).bind(action).bind(object).bind(format!("{object}?%"));
        Ok(query.fetch_optional(&self.reader).await?.is_some())
    }

    pub async fn purge_audit_entries(&self, before: Timestamp, keep: u32) -> Result<bool> {
        let old = "DELETE FROM audit WHERE id IN (SELECT id FROM audit WHERE at < $1 ORDER BY at LIMIT $2)";
        let above_limit =
            "DELETE FROM audit WHERE id IN (SELECT id FROM audit ORDER BY id DESC LIMIT $2 OFFSET $1)";
        let mut removed = 0;
        for (query, parameter) in [(old, before.as_millisecond()), (above_limit, i64::from(keep))] {
            removed += self.execute(sqlx::query(query).bind(parameter).bind(PURGE_ROWS)).await?;
        }
        Ok(removed > 0)
    }
}
