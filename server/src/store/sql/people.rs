//! People, and owners of jobs and datasets.

use super::{DbRow, SqlStore, flag, optional_time};
use crate::store::{
    Ownership, PersonRow, Result, StoreError,
    values::{strip_nul, time},
};
use jiff::Timestamp;
use lockstep_protocol::{
    job::JobId,
    people::{Identity, Person},
};
use sqlx::Row;

fn person(row: &DbRow) -> Result<PersonRow> {
    let name: String = row.try_get("name")?;
    let role: String = row.try_get("role")?;
    let issuer: Option<String> = row.try_get("issuer")?;
    let subject: Option<String> = row.try_get("subject")?;
    let person = Person {
        // A person with an unknown role, written by another version, cannot sign in.
        role: role.parse().map_err(|error| StoreError::Corrupt(format!("person {name:?}: {error}")))?,
        created_at: time(row.try_get("created_at")?)?,
        disabled_at: optional_time(row, "disabled_at")?,
        identity: issuer.zip(subject).map(|(issuer, subject)| Identity { issuer, subject }),
        name,
    };
    Ok(PersonRow { person, hash: row.try_get("hash")? })
}

/// The columns `owner` and `private` of a job, dataset or sweep.
pub(super) fn ownership(row: &DbRow) -> Result<Ownership> {
    Ok(Ownership { owner: row.try_get("owner")?, private: flag(row, "private")? })
}

impl SqlStore {
    pub async fn people(&self) -> Result<Vec<PersonRow>> {
        let query = "SELECT people.*, issuer, subject FROM people LEFT JOIN identities ON person = name ORDER BY name";
        self.list(sqlx::query(query), person).await
    }

    pub async fn refused_identities(&self) -> Result<Vec<Identity>> {
        let text = "SELECT issuer, subject FROM identities WHERE person IS NULL";
        let rows: Vec<(String, String)> = sqlx::query_as(text).fetch_all(&self.reader).await?;
        Ok(rows.into_iter().map(|(issuer, subject)| Identity { issuer, subject }).collect())
    }

    pub async fn put_person(&self, row: &PersonRow) -> Result<()> {
        let mut db = self.begin().await?;
        sqlx::query(
            "INSERT INTO people (name, hash, role, created_at, disabled_at) VALUES ($1, $2, $3, $4, $5) \
             ON CONFLICT (name) DO UPDATE SET hash = excluded.hash, role = excluded.role, \
             disabled_at = excluded.disabled_at",
        )
        .bind(&row.person.name)
        .bind(&row.hash)
        .bind(row.person.role.as_str())
        .bind(row.person.created_at.as_millisecond())
        .bind(row.person.disabled_at.map(Timestamp::as_millisecond))
        .execute(&mut *db)
        .await?;
        let text = "DELETE FROM identities WHERE person = $1";
        sqlx::query(text).bind(&row.person.name).execute(&mut *db).await?;
        if let Some(Identity { issuer, subject }) = &row.person.identity {
            let text = "INSERT INTO identities (issuer, subject, person) VALUES ($1, $2, $3) \
                ON CONFLICT (issuer, subject) DO UPDATE SET person = excluded.person";
            sqlx::query(text).bind(issuer).bind(subject).bind(&row.person.name).execute(&mut *db).await?;
        }
        // Ends all sessions of the person and of the person's tokens.
        let text = "DELETE FROM sessions WHERE token_id = $1 OR token_id IN (SELECT id FROM tokens WHERE owner = $2)";
        sqlx::query(text).bind(row.principal()).bind(&row.person.name).execute(&mut *db).await?;
        Ok(db.commit().await?)
    }

    pub async fn remove_person(&self, row: &PersonRow, at: Timestamp) -> Result<()> {
        let mut db = self.begin().await?;
        for query in
            ["DELETE FROM people WHERE name = $1", "UPDATE identities SET person = NULL WHERE person = $1"]
        {
            sqlx::query(query).bind(&row.person.name).execute(&mut *db).await?;
        }
        let text = "DELETE FROM sessions WHERE token_id = $1";
        sqlx::query(text).bind(row.principal()).execute(&mut *db).await?;
        let text = "UPDATE tokens SET revoked_at = $2 WHERE owner = $1 AND revoked_at IS NULL";
        sqlx::query(text).bind(&row.person.name).bind(at.as_millisecond()).execute(&mut *db).await?;
        Ok(db.commit().await?)
    }

    pub async fn job_ownership(&self, id: &JobId) -> Result<Option<Ownership>> {
        let query = sqlx::query("SELECT owner, private FROM jobs WHERE id = $1 AND deleted_at IS NULL");
        self.find(query.bind(id.as_str()), ownership).await
    }

    pub async fn jobs_hidden_from(&self, owner: &str) -> Result<Vec<JobId>> {
        let text = "SELECT id FROM jobs WHERE private <> 0 AND (owner IS NULL OR owner <> $1) AND deleted_at IS NULL";
        let ids: Vec<String> =
            sqlx::query_scalar(text).bind(strip_nul(owner)).fetch_all(&self.reader).await?;
        Ok(ids.iter().filter_map(|id| id.parse().ok()).collect())
    }

    pub async fn dataset_ownership(&self, name: &str) -> Result<Option<Ownership>> {
        let query = sqlx::query("SELECT owner, private FROM datasets WHERE name = $1");
        self.find(query.bind(strip_nul(name)), ownership).await
    }
}
