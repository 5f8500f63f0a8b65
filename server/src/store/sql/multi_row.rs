//! Statements with many rows. Each statement is a round trip to the database, during which the transaction occupies the writer. If a
//! hundred attempts end at once, the server executes a few statements, not hundreds.

use super::{Connection, Db, DbRow, Query};
use crate::store::Result;
use sqlx::AssertSqlSafe;

/// Maximum number of rows of a statement.
const MAX_ROWS: usize = 64;

/// Executes `text` for all rows, in order. `{}` in `text` becomes the parameters of rows with `columns` columns each, which `bind` binds.
pub(super) async fn execute<T>(
    db: &mut Connection,
    text: &str,
    columns: usize,
    rows: &[T],
    bind: impl Fn(Query<'static>, &T) -> Result<Query<'static>>,
) -> Result<()> {
    for statement in statements(text, columns, rows, bind)? {
        statement.execute(&mut *db).await?;
    }
    Ok(())
}

/// Like [`execute`], for statements that return rows.
pub(super) async fn fetch_all<T>(
    db: &mut Connection,
    text: &str,
    columns: usize,
    rows: &[T],
    bind: impl Fn(Query<'static>, &T) -> Result<Query<'static>>,
) -> Result<Vec<DbRow>> {
    let mut found = Vec::with_capacity(rows.len());
    for statement in statements(text, columns, rows, bind)? {
        found.extend(statement.fetch_all(&mut *db).await?);
    }
    Ok(found)
}

fn statements<T>(
    text: &str,
    columns: usize,
    rows: &[T],
    bind: impl Fn(Query<'static>, &T) -> Result<Query<'static>>,
) -> Result<Vec<Query<'static>>> {
    let statement = |rows: &[T]| {
        let text = text.replacen("{}", &values(rows.len(), columns), 1);
        // The driver caches prepared statements. Only the two usual sizes are cached, so that the other sizes do not fill the cache.
        let is_cached = [1, MAX_ROWS].contains(&rows.len());
        rows.iter().try_fold(sqlx::query::<Db>(AssertSqlSafe(text)).persistent(is_cached), &bind)
    };
    rows.chunks(MAX_ROWS).map(statement).collect()
}

/// The parameters of rows for `VALUES`: `($1, $2), ($3, $4)`.
fn values(rows: usize, columns: usize) -> String {
    let row = |n: usize| {
        let columns: Vec<_> = (1..=columns).map(|c| format!("${}", n * columns + c)).collect();
        format!("({})", columns.join(", "))
    };
    (0..rows).map(row).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_has_its_own_parameters() {
        assert_eq!(values(2, 3), "($1, $2, $3), ($4, $5, $6)");
    }
}
