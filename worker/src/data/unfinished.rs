//! A copy of a dataset that is not whole, as `prepare` leaves it when it is interrupted.

use std::path::Path;

/// What its folder holds until it is whole.
pub(super) const UNFINISHED: &str = "unfinished.json";

/// Whether a folder holds a copy that is not whole.
pub(super) fn is_unfinished(dir: &Path) -> bool {
    dir.join(UNFINISHED).is_file()
}
