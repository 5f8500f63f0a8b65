use super::*;
use crate::testkit::wait_until;
use lockstep_protocol::job::JobId;
use std::{
    fs::Permissions,
    io::Write,
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

fn attempt() -> AttemptRef {
    AttemptRef { job: JobId::generate(), attempt: 1, fencing_token: 1.into() }
}

fn about(path: &str, bytes: u64) -> About {
    About {
        dataset: path.trim_start_matches('/').into(),
        path: path.into(),
        within: String::new(),
        files: 1,
        bytes,
    }
}

/// Reserves the copy of `key` and completes it. Returns the copy, or why there is no space.
fn add_copy(copies: &Copies, key: &str, about: &About, attempt: &AttemptRef) -> Result<DatasetCopy, String> {
    let mut file = tempfile::NamedTempFile::with_prefix_in(LIST_PREFIX, copies.dir()).unwrap();
    file.write_all(b"list").unwrap();
    match copies.reserve(List { file, key: key.into(), about: about.clone() }, attempt) {
        Ok((copy, removed)) => {
            remove(&removed).unwrap();
            assert_eq!(fs::read(copy.list()).unwrap(), b"list");
            fs::create_dir_all(copy.data()).unwrap();
            Ok(copy)
        }
        Err(CopyError::Unusable(why)) => Err(why),
        Err(other) => panic!("{other:?}"),
    }
}

fn names(dir: &Path) -> Vec<String> {
    let all = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut all: Vec<_> = all.filter(|name| !name.starts_with('.')).collect();
    all.sort();
    all
}

#[test]
fn the_least_recently_used_copy_without_a_job_is_removed_first() {
    let dir = tempfile::tempdir().unwrap();
    let copies = Copies::open(dir.path(), 100, &[]).unwrap();
    let [a, b, c, d] = [attempt(), attempt(), attempt(), attempt()];
    add_copy(&copies, "a", &about("/a", 40), &a).unwrap();
    add_copy(&copies, "b", &about("/b", 60), &b).unwrap();
    assert_eq!(names(dir.path()), ["a", "b"], "the limit is reached");
    // One byte past the limit, and both copies are in use.
    let why = add_copy(&copies, "c", &about("/c", 1), &c).unwrap_err();
    assert!(why.contains("running jobs use") && why.contains("--dataset-cache-limit"), "{why}");
    copies.release(&b);
    copies.release(&a);
    add_copy(&copies, "c", &about("/c", 1), &c).unwrap();
    assert_eq!(names(dir.path()), ["a", "c"], "b was released first");
    // Attempt `d` uses copy `a` and ends: now copy `c` is the oldest, but in use.
    add_copy(&copies, "a", &about("/a", 40), &d).unwrap();
    copies.release(&d);
    add_copy(&copies, "b", &about("/b", 99), &b).unwrap();
    assert_eq!(names(dir.path()), ["b", "c"]);
    // As large as the limit, and one byte larger.
    copies.release(&b);
    copies.release(&c);
    add_copy(&copies, "e", &about("/e", 100), &a).unwrap();
    assert_eq!(names(dir.path()), ["e"]);
    let why = add_copy(&copies, "f", &about("/f", 101), &b).unwrap_err();
    assert!(why.contains("the limit of all copies") && why.contains("--dataset-cache-limit"), "{why}");
    assert_eq!(names(dir.path()), ["e"], "no copy is removed for a copy that is too large");
}

#[test]
fn earlier_versions_of_a_dataset_are_removed_once_unused() {
    let dir = tempfile::tempdir().unwrap();
    let copies = Copies::open(dir.path(), 100, &[]).unwrap();
    let [a, b, c] = [attempt(), attempt(), attempt()];
    add_copy(&copies, "old", &about("/a", 10), &a).unwrap();
    add_copy(&copies, "other", &about("/b", 10), &b).unwrap();
    copies.release(&b);
    add_copy(&copies, "new", &about("/a", 10), &c).unwrap();
    assert_eq!(names(dir.path()), ["new", "old", "other"], "a job uses the old copy");
    copies.release(&a);
    add_copy(&copies, "new", &about("/a", 10), &b).unwrap();
    assert_eq!(names(dir.path()), ["new", "other"]);
    // A job whose dataset changes during the copy uses only the new copy.
    add_copy(&copies, "newest", &about("/a", 10), &b).unwrap();
    copies.release(&c);
    add_copy(&copies, "newest", &about("/a", 10), &b).unwrap();
    assert_eq!(names(dir.path()), ["newest", "other"]);
}

/// Opens a folder that was closed just now. A process forked by another test may still hold the folder's lock until the
/// process executes another program.
fn open_again(dir: &Path, max_bytes: u64, live: &[&AttemptRef]) -> Copies {
    let since = Instant::now();
    loop {
        match Copies::open(dir, max_bytes, live) {
            Err(error) if since.elapsed() < Duration::from_secs(10) => {
                assert!(error.contains("another agent"), "{error}");
                std::thread::sleep(Duration::from_millis(5));
            }
            opened => return opened.unwrap(),
        }
    }
}

#[test]
fn the_next_agent_finds_copies_and_their_users() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c] = [attempt(), attempt(), attempt()];
    let copies = Copies::open(dir.path(), 100, &[]).unwrap();
    add_copy(&copies, "a", &about("/a", 50), &a).unwrap();
    add_copy(&copies, "b", &about("/b", 50), &b).unwrap();
    let why = Copies::open(dir.path(), 100, &[]).unwrap_err();
    assert!(why.contains("another agent") && why.contains("--dataset-cache"), "{why}");
    drop(copies);
    // The ranks of one attempt outlived the agent.
    let copies = open_again(dir.path(), 100, &[&a]);
    add_copy(&copies, "c", &about("/c", 50), &c).unwrap();
    assert_eq!(names(dir.path()), ["a", "c"]);
    drop(copies);
    // A lower limit applies at once, but not to copies in use.
    let _copies = open_again(dir.path(), 49, &[&a]);
    assert_eq!(names(dir.path()), ["a"]);
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn copies_are_hidden_from_other_accounts() {
    let dir = tempfile::tempdir().unwrap();
    // A folder that is created together with its parents, and an existing folder, whose mode is kept.
    let (created, existing) = (dir.path().join("above/created"), dir.path().join("existing"));
    fs::create_dir(&existing).unwrap();
    fs::set_permissions(&existing, Permissions::from_mode(0o755)).unwrap();
    for (folder, expected) in [(&created, 0o700), (&existing, 0o755)] {
        let copies = Copies::open(folder, 100, &[]).unwrap();
        assert_eq!(mode(folder), expected, "{}", folder.display());
        let copy = add_copy(&copies, "a", &about("/a", 1), &attempt()).unwrap();
        assert_eq!(mode(copy.dir()), 0o700);
    }
}

#[test]
fn unrelated_files_in_the_folder_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(".profile"), "").unwrap();
    fs::create_dir(dir.path().join(".newer")).unwrap();
    let leftovers = [".new-1", ".gone-1", ".list-1"].map(|name| dir.path().join(name));
    leftovers.iter().for_each(|folder| fs::create_dir(folder).unwrap());
    let _copies = Copies::open(dir.path(), 100, &[]).unwrap();
    wait_until("leftovers stay", || !leftovers.iter().any(|folder| folder.exists()));
    assert!(dir.path().join(".profile").exists() && dir.path().join(".newer").exists());
}
