//! Statements with many rows. Each statement is a round trip to the database, during which the transaction occupies the writer. If a
//! hundred attempts end at once, the server executes a few statements, not hundreds.

use super::Query;
use crate::store::Result;
use sqlx::AssertSqlSafe;

/// Numbers of rows of a statement, the largest first. The driver caches one statement for each of these numbers, and any number of rows
/// needs few statements.
const SIZES: [usize; 7] = [64, 32, 16, 8, 4, 2, 1];

/// The statements that execute `text` for all rows, in order. `{}` in `text` becomes the parameters of rows with `columns` columns each,
/// which `bind` binds.
pub(super) fn statements<T>(
    text: &str,
    columns: usize,
    rows: &[T],
    bind: impl Fn(Query<'static>, &T) -> Result<Query<'static>>,
) -> Result<Vec<Query<'static>>> {
    let statement = |rows: &[T]| {
        let text = text.replacen("{}", &values(rows.len(), columns), 1);
        rows.iter().try_fold(sqlx::query(AssertSqlSafe(text)), &bind)
    };
    split(rows).map(statement).collect()
}

/// Splits rows into slices, one for each statement.
fn split<T>(rows: &[T]) -> impl Iterator<Item = &[T]> {
    let mut rest = rows;
    std::iter::from_fn(move || {
        let size = SIZES.into_iter().find(|size| *size <= rest.len())?;
        let (part, later) = rest.split_at(size);
        rest = later;
        Some(part)
    })
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
    fn every_row_is_in_one_statement_in_order() {
        let rows: Vec<_> = (0..205).collect();
        assert_eq!(split(&rows).map(<[_]>::len).collect::<Vec<_>>(), [64, 64, 64, 8, 4, 1]);
        assert_eq!(split(&rows).collect::<Vec<_>>().concat(), rows);
        assert_eq!(split::<u8>(&[]).count(), 0);
        assert_eq!(values(2, 3), "($1, $2, $3), ($4, $5, $6)");
    }
}
