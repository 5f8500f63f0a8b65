//! Pages of rows of unbounded length.

use crate::store::{PAGE_BYTES, Result};
use futures_util::{Stream, TryStreamExt};

/// Reads rows of a query until their total size reaches [`PAGE_BYTES`]. Returns the rows, at least one if there are any, and whether more
/// rows follow.
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
