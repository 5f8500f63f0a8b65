//! Pages of rows that may be long.

use crate::store::{PAGE_BYTES, Result};
use futures_util::{Stream, TryStreamExt};

/// The rows of a query until they have [`PAGE_BYTES`], and whether more follow: a page has at least one row.
pub(super) async fn bounded<T>(
    mut rows: impl Stream<Item = sqlx::Result<T>> + Unpin,
    size: impl Fn(&T) -> usize,
) -> Result<(Vec<T>, bool)> {
    let (mut page, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.try_next().await? {
        if bytes >= PAGE_BYTES {
            return Ok((page, true));
        }
        bytes += size(&row);
        page.push(row);
    }
    Ok((page, false))
}
