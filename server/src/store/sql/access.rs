//! Tokens and sessions. The server reads these rows at its start and keeps them in memory.

use super::{DbRow, SqlStore, optional_time};
use crate::store::{
    Result, SessionRow, StoreError, TokenRow,
    values::{strip_nul, time},
};
use jiff::Timestamp;
use lockstep_protocol::access::Token;
use sqlx::Row;

/// Maximum number of rows of each table that a purge removes at a time.
const PURGE_ROWS: i64 = 1000;

fn token(row: &DbRow) -> Result<TokenRow> {
    let id: String = row.try_get("id")?;
    let scope: String = row.try_get("scope")?;
    let token = Token {
        name: row.try_get("name")?,
        // A token with an unknown scope, written by another version, is not accepted.
        scope: scope.parse().map_err(|error| StoreError::Corrupt(format!("token {id:?}: {error}")))?,
        agent: row.try_get("agent")?,
        agent_id: row.try_get("agent_id")?,
        owner: row.try_get("owner")?,
        made_with: row.try_get("made_with")?,
        created_at: time(row.try_get("created_at")?)?,
        expires_at: optional_time(row, "expires_at")?,
        revoked_at: optional_time(row, "revoked_at")?,
        last_used_at: optional_time(row, "last_used_at")?,
        id,
    };
    Ok(TokenRow { token, hash: row.try_get("hash")? })
}

fn session(row: &DbRow) -> Result<SessionRow> {
    Ok(SessionRow {
        hash: row.try_get("hash")?,
        token_id: row.try_get("token_id")?,
        created_at: time(row.try_get("created_at")?)?,
        expires_at: time(row.try_get("expires_at")?)?,
    })
}

impl SqlStore {
    pub async fn tokens(&self) -> Result<Vec<TokenRow>> {
        self.list(sqlx::query("SELECT * FROM tokens ORDER BY created_at, id"), token).await
    }

    pub async fn put_token(&self, row: &TokenRow) -> Result<()> {
        let TokenRow { token, hash } = row;
        let milliseconds = |at: Option<Timestamp>| at.map(Timestamp::as_millisecond);
        let query = sqlx::query(
            "INSERT INTO tokens (id, name, hash, scope, agent, agent_id, created_at, expires_at, revoked_at, last_used_at, owner, \
             made_with) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) ON CONFLICT (id) DO UPDATE SET name = excluded.name, \
             hash = excluded.hash, scope = excluded.scope, agent = excluded.agent, agent_id = excluded.agent_id, \
             created_at = excluded.created_at, expires_at = excluded.expires_at, revoked_at = excluded.revoked_at",
        )
        .bind(&token.id)
        .bind(strip_nul(&token.name))
        .bind(hash)
        .bind(token.scope.as_str())
        .bind(token.agent.as_deref().map(strip_nul))
        .bind(token.agent_id.as_deref().map(strip_nul))
        .bind(token.created_at.as_millisecond())
        .bind(milliseconds(token.expires_at))
        .bind(milliseconds(token.revoked_at))
        .bind(milliseconds(token.last_used_at))
        .bind(token.owner.as_deref())
        .bind(token.made_with.as_deref());
        self.execute(query).await.map(drop)
    }

    pub async fn note_token_use(&self, used: &[(String, Timestamp)]) -> Result<()> {
        let mut db = self.begin().await?;
        for (id, at) in used {
            let text = "UPDATE tokens SET last_used_at = $2 WHERE id = $1";
            sqlx::query(text).bind(id).bind(at.as_millisecond()).execute(&mut *db).await?;
        }
        Ok(db.commit().await?)
    }

    pub async fn sessions(&self, now: Timestamp) -> Result<Vec<SessionRow>> {
        let query = sqlx::query("SELECT * FROM sessions WHERE expires_at > $1 ORDER BY created_at, hash");
        self.list(query.bind(now.as_millisecond()), session).await
    }

    pub async fn add_session(&self, session: &SessionRow) -> Result<()> {
        let text = "INSERT INTO sessions (hash, token_id, created_at, expires_at) VALUES ($1, $2, $3, $4)";
        let query = sqlx::query(text)
            .bind(&session.hash)
            .bind(&session.token_id)
            .bind(session.created_at.as_millisecond())
            .bind(session.expires_at.as_millisecond());
        self.execute(query).await.map(drop)
    }

    pub async fn remove_session(&self, hash: &str) -> Result<()> {
        let query = sqlx::query("DELETE FROM sessions WHERE hash = $1").bind(hash);
        self.execute(query).await.map(drop)
    }

    pub async fn purge_sessions_and_tokens(&self, now: Timestamp, tokens_before: Timestamp) -> Result<()> {
        for (query, at) in [
            (
                "DELETE FROM sessions WHERE hash IN (SELECT hash FROM sessions WHERE expires_at <= $1 LIMIT $2)",
                now,
            ),
            // The rows of agents' certificates are kept, because a revoked certificate must stay revoked.
            (
                "DELETE FROM tokens WHERE id IN \
                 (SELECT id FROM tokens WHERE (expires_at <= $1 OR revoked_at <= $1) AND id NOT LIKE 'certificate-%' LIMIT $2)",
                tokens_before,
            ),
        ] {
            self.execute(sqlx::query(query).bind(at.as_millisecond()).bind(PURGE_ROWS)).await?;
        }
        Ok(())
    }
}
