//! Whether a registered dataset has changed since its inspection. Times of folders are compared, because adding, removing or replacing a
//! file changes its folder's time. No file is opened.

use super::files::changed_ns;
use lockstep_protocol::{dataset::Dataset, pattern::has_brace};
use std::{
    collections::HashSet,
    fs,
    io::ErrorKind::NotFound,
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

/// A dataset's folders on this machine, compared with the dataset's last inspection.
pub(crate) enum Comparison {
    /// Also the result for a pattern of files, and for a dataset that is only on other machines.
    Unchanged,
    Changed,
    /// The folder does not exist, but the folder that contained it exists.
    Missing,
}

/// Compares the dataset's folders on this machine with the dataset's last inspection.
pub(crate) async fn compare(dataset: &Dataset) -> Comparison {
    let inspected_at = dataset.info.inspected_at.unwrap_or(dataset.added_at);
    // A time in the future would be later than any inspection.
    let period = inspected_at.as_nanosecond()..=jiff::Timestamp::now().as_nanosecond();
    let path = PathBuf::from(&dataset.path);
    let classes: HashSet<String> = dataset.info.classes.iter().cloned().collect();
    let comparison = async {
        let permit = COMPARISONS.acquire().await.ok()?;
        let compare = move || {
            let _permit = permit;
            if has_changed_in(&period, &path, &classes, DEPTH) {
                Comparison::Changed
            } else if is_missing(&path) {
                Comparison::Missing
            } else {
                Comparison::Unchanged
            }
        };
        tokio::task::spawn_blocking(compare).await.ok()
    };
    tokio::time::timeout(TIME_LIMIT, comparison).await.ok().flatten().unwrap_or(Comparison::Unchanged)
}

/// Whether a dataset's folder was removed or moved. If the folder above does not exist either, or is the root, the dataset is probably on
/// another machine.
fn is_missing(path: &Path) -> bool {
    let parent = path.parent().filter(|parent| parent.parent().is_some());
    !has_brace(path.as_os_str())
        && fs::metadata(path).is_err_and(|e| e.kind() == NotFound)
        && parent.is_some_and(Path::is_dir)
}

/// Whether `path`, or a folder at most `depth` levels below it, changed in this period. Folders of `classes` are not listed, because they
/// may contain a million files.
fn has_changed_in(period: &RangeInclusive<i128>, path: &Path, classes: &HashSet<String>, depth: u32) -> bool {
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
        is_part && may_be_folder && has_changed_in(period, &entry.path(), classes, depth)
    })
}
