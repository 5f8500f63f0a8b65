//! Whether a registered dataset has changed since its inspection. Times of folders are compared, because adding, removing or replacing a
//! file changes its folder's time. No file is opened.

use super::files::changed_ns;
use lockstep_protocol::dataset::Dataset;
use std::{
    collections::HashSet,
    fs,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::sync::Semaphore;

/// Depth of the folders whose times are compared: splits, and the classes of splits.
const DEPTH: u32 = 2;
/// Time limit of a comparison. After it, the dataset counts as unchanged, so that jobs do not wait for a file system that does not respond.
const TIME_LIMIT: Duration = Duration::from_secs(3);
/// Limit of concurrent comparisons. On a file system that hangs, each comparison blocks its thread forever.
static COMPARISONS: Semaphore = Semaphore::const_new(8);

/// Whether folders of the dataset on this machine have changed since the dataset's last inspection, or the dataset was moved away. A
/// pattern of files, and a dataset of another machine, count as unchanged.
pub(crate) async fn has_changed(dataset: &Dataset) -> bool {
    let inspected_at = dataset.info.inspected_at.unwrap_or(dataset.added_at);
    // A time in the future would be later than any inspection.
    let period = inspected_at.as_nanosecond()..=jiff::Timestamp::now().as_nanosecond();
    let path = PathBuf::from(&dataset.path);
    let classes: HashSet<String> = dataset.info.classes.iter().cloned().collect();
    let comparison = async {
        let permit = COMPARISONS.acquire().await.ok()?;
        let compare = move || {
            let _permit = permit;
            is_gone(&path) || changed_in(&period, &path, &classes, DEPTH)
        };
        tokio::task::spawn_blocking(compare).await.ok()
    };
    matches!(tokio::time::timeout(TIME_LIMIT, comparison).await, Ok(Some(true)))
}

/// Whether a dataset was probably moved away: this machine has no such path, but has the folder in which it was. Every machine has `/`.
fn is_gone(path: &Path) -> bool {
    let is_pattern = path.to_string_lossy().contains('{');
    let folder = path.parent().filter(|folder| folder.parent().is_some());
    !is_pattern && !path.exists() && folder.is_some_and(Path::exists)
}

/// Whether `path`, or a folder at most `depth` levels below it, changed in this period. Folders of `classes` are not listed, because they
/// may contain a million files.
fn changed_in(period: &RangeInclusive<i128>, path: &Path, classes: &HashSet<String>, depth: u32) -> bool {
    let Ok(metadata) = fs::metadata(path) else { return false };
    if period.contains(&i128::from(changed_ns(&metadata))) {
        return true;
    }
    if depth == 0 || !metadata.is_dir() {
        return false;
    }
    fs::read_dir(path).into_iter().flatten().flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        // Hidden folders, and the folders that Lockstep makes, are not part of the dataset.
        let is_part = !name.starts_with('.') && !name.starts_with("lockstep-");
        let may_be_folder = entry.file_type().is_ok_and(|kind| !kind.is_file());
        let depth = if classes.contains(&*name) { 0 } else { depth - 1 };
        is_part && may_be_folder && changed_in(period, &entry.path(), classes, depth)
    })
}
