use super::{
    super::list::List,
    incoming::{ReceivedPart, write},
    *,
};
use bytes::BytesMut;
use lockstep_protocol::{agent::AttemptRef, job::JobId};
use sha2::{Digest, Sha256};
use std::io::Write;

/// A copy of these files, none of which has arrived.
fn copy(dir: &Path, files: &[(&str, u64)]) -> (Copies, DatasetCopy) {
    let copies = Copies::open(dir, u64::MAX, &[]).unwrap();
    let mut file = tempfile::NamedTempFile::new_in(copies.dir()).unwrap();
    writeln!(file, "{{\"begin\":\"\"}}").unwrap();
    for (name, size) in files {
        match name.strip_suffix('/') {
            Some(folder) => writeln!(file, "{{\"folder\":\"{folder}\"}}").unwrap(),
            None => writeln!(file, "{{\"file\":[\"{name}\",{size},7]}}").unwrap(),
        }
    }
    let bytes = files.iter().map(|(_, size)| size).sum();
    writeln!(file, "{{\"end\":[{},{bytes}]}}", files.iter().filter(|(name, _)| !name.ends_with('/')).count())
        .unwrap();
    let about = About {
        dataset: "x".into(),
        path: "/x".into(),
        within: String::new(),
        files: files.len() as u64,
        bytes,
    };
    let list = List { file, key: "x".into(), about };
    let attempt = AttemptRef { job: JobId::generate(), attempt: 1, fencing_token: 1.into() };
    let (copy, _) = copies.reserve(list, &attempt).unwrap();
    (copies, copy)
}

fn next_parts(batches: &mut PartBatches) -> Vec<(String, u64, u64)> {
    batches.next_batch().unwrap().into_iter().map(|part| (part.path, part.offset, part.length)).collect()
}

fn make_part(path: &str, offset: u64, bytes: &[u8]) -> ReceivedPart {
    let part =
        DatasetPart { path: path.into(), size_bytes: 0, changed_ns: 7, offset, length: bytes.len() as u64 };
    let sum = BytesMut::from(&Sha256::digest(bytes)[..]);
    ReceivedPart { part, bytes: BytesMut::from(bytes), sum }
}

#[test]
fn small_files_are_fetched_together_and_large_ones_in_parts() {
    let dir = tempfile::tempdir().unwrap();
    let large = DATASET_PARTS_BYTES + 5;
    let (_copies, copy) = copy(dir.path(), &[("a/", 0), ("a/1", 3), ("a/2", 0), ("b", large), ("c", 2)]);
    assert_eq!(begin(&copy).unwrap().unwrap().files, 5);
    let mut batches = PartBatches::new(&copy).unwrap();
    let first = next_parts(&mut batches);
    assert_eq!(first[..2], [("a/1".into(), 0, 3), ("b".into(), 0, DATASET_PART_BYTES)]);
    assert_eq!(first.iter().map(|(_, _, length)| length).sum::<u64>(), DATASET_PARTS_BYTES);
    assert_eq!(batches.complete_lines(), 4, "b is not done");
    let offset = DATASET_PARTS_BYTES - 3;
    assert_eq!(next_parts(&mut batches), [("b".into(), offset, 8), ("c".into(), 0, 2)]);
    assert!(next_parts(&mut batches).is_empty());
    assert!(copy.part_dir().join("a/2").is_file(), "an empty file is created");

    let many: Vec<_> = (0..=DATASET_PARTS).map(|n| format!("{n:05}")).collect();
    let many: Vec<_> = many.iter().map(|name| (name.as_str(), 1)).collect();
    let dir = tempfile::tempdir().unwrap();
    let (_copies, copy) = self::copy(dir.path(), &many);
    begin(&copy).unwrap();
    let mut batches = PartBatches::new(&copy).unwrap();
    assert_eq!(next_parts(&mut batches).len(), DATASET_PARTS);
    assert_eq!(next_parts(&mut batches).len(), 1);
}

#[test]
fn an_interrupted_copy_continues_at_its_last_byte() {
    let dir = tempfile::tempdir().unwrap();
    let (_copies, copy) = copy(dir.path(), &[("a", 5), ("b", 4), ("c", 3)]);
    begin(&copy).unwrap();
    let mut batches = PartBatches::new(&copy).unwrap();
    assert_eq!(next_parts(&mut batches).len(), 3);
    let part_dir = copy.part_dir();
    write(&make_part("a", 0, b"aaaaa"), &part_dir).unwrap();
    write(&make_part("b", 0, b"bb"), &part_dir).unwrap();
    let mut wrong = make_part("c", 0, b"cc");
    wrong.bytes[0] ^= 1;
    assert!(
        matches!(write(&wrong, &part_dir), Err(CopyError::Damaged(why)) if why.contains("c was damaged in transit"))
    );
    // A file that is longer than it can be.
    fs::write(part_dir.join("c"), "cccc").unwrap();
    let missing = begin(&copy).unwrap().unwrap();
    assert_eq!((missing.files, missing.bytes, missing.disk_bytes), (2, 5, 2 * BLOCK_BYTES));
    assert!(matches!(finish(&copy), Err(CopyError::Damaged(why)) if why.starts_with("2 files")));
    let mut batches = PartBatches::new(&copy).unwrap();
    assert_eq!(next_parts(&mut batches), [("b".into(), 2, 2), ("c".into(), 0, 3)]);
    write(&make_part("b", 2, b"BB"), &part_dir).unwrap();
    write(&make_part("c", 0, b"ccc"), &part_dir).unwrap();
    finish(&copy).unwrap();
    assert_eq!(fs::read(copy.data().join("b")).unwrap(), b"bbBB");
    assert_eq!(begin(&copy).unwrap(), None);
    // If a file is removed, only this file is fetched again.
    fs::remove_file(copy.data().join("a")).unwrap();
    assert_eq!(begin(&copy).unwrap().unwrap().bytes, 5);
    let mut batches = PartBatches::new(&copy).unwrap();
    assert_eq!(next_parts(&mut batches), [("a".into(), 0, 5)]);
}

/// Completes a copy whose only file is `a`, with one byte.
fn complete(copy: &DatasetCopy) {
    begin(copy).unwrap();
    next_parts(&mut PartBatches::new(copy).unwrap());
    write(&make_part("a", 0, b"a"), &copy.part_dir()).unwrap();
    finish(copy).unwrap();
}

#[test]
fn a_damaged_copy_is_repaired_only_while_no_job_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    let (_copies, copy) = copy(dir.path(), &[("a", 1)]);
    complete(&copy);
    let reader = AttemptRef { job: JobId::generate(), attempt: 1, fencing_token: 1.into() };
    fs::write(copy.dir().join("uses/another-1"), "").unwrap();
    assert_eq!(copy.uses().len(), 2);
    fs::remove_file(copy.data().join("a")).unwrap();
    complete(&copy);
    copy.record_read(&reader).unwrap();
    assert_eq!(begin(&copy).unwrap(), None, "the copy is complete");
    fs::remove_file(copy.data().join("a")).unwrap();
    assert!(matches!(begin(&copy), Err(CopyError::Unusable(why)) if why.contains("other jobs use it")));
}

#[tokio::test]
async fn a_copy_abandoned_by_its_job_stays_locked_until_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (copies, copy) = copy(dir.path(), &[("a", 1)]);
    let copy_lock = copies.lock_copy(&copy).await;
    let (release, released) = std::sync::mpsc::channel::<()>();
    let mut work = Box::pin(async move {
        copy_lock
            .run_blocking(move || {
                let _ = released.recv();
                Ok(())
            })
            .await
    });
    // The work has begun, and nothing waits for its result.
    assert!(futures_util::poll!(work.as_mut()).is_pending());
    drop(work);
    let mut next = Box::pin(copies.lock_copy(&copy));
    assert!(tokio::time::timeout(std::time::Duration::from_millis(100), next.as_mut()).await.is_err());
    drop(release);
    let _copy_lock = next.await;
    complete(&copy);
    // No effect on a copy that another job has completed.
    finish(&copy).unwrap();
}

#[test]
fn unsynced_files_are_fetched_again_after_a_power_failure() {
    let dir = tempfile::tempdir().unwrap();
    let (_copies, copy) = copy(dir.path(), &[("a", 1), ("b", 1)]);
    begin(&copy).unwrap();
    let mut batches = PartBatches::new(&copy).unwrap();
    next_parts(&mut batches);
    write(&make_part("a", 0, b"a"), &copy.part_dir()).unwrap();
    write(&make_part("b", 0, b"b"), &copy.part_dir()).unwrap();
    // File `a` is on the second line of the list, after `begin`.
    Synced { boot_id: "an earlier one".into(), lines: 2 }.store(&copy).unwrap();
    assert_eq!(begin(&copy).unwrap().unwrap().bytes, 1);
    assert!(copy.part_dir().join("a").exists() && !copy.part_dir().join("b").exists());
    assert_eq!(Synced::of(&copy), Synced::in_this_boot(2));
    Synced { boot_id: "none was synced".into(), lines: 0 }.store(&copy).unwrap();
    assert_eq!(begin(&copy).unwrap().unwrap().bytes, 2);
}

#[tokio::test]
async fn a_full_disk_is_reported_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let (copies, copy) = copy(dir.path(), &[("a", 1)]);
    let about = About { dataset: "x".into(), path: "/x".into(), within: String::new(), files: 1, bytes: 1 };
    let missing = Missing { files: 1, bytes: 1, disk_bytes: 1 << 60 };
    let checked = check_disk(&copy, &about, &missing, &copies).await;
    assert!(matches!(checked, Err(CopyError::NoSpace(why)) if why.contains("--dataset-cache")));
    assert!(copy.list().exists(), "a copy in use is kept");
}

#[test]
fn a_too_small_disk_is_reported_with_sizes_and_advice() {
    let missing = Missing { files: 2, bytes: 899_999_999, disk_bytes: 900_001_792 };
    assert_eq!(
        describe_lack_of_space(Path::new("/cache"), "birds", &missing, 300_049_999),
        "the copy of the dataset birds needs 900.1 MB more on the disk of /cache, where 67.2 MB must stay free, but only 300.0 MB are \
         free: free 667.1 MB there, or give the agent a folder on another disk with --dataset-cache, and retry the job"
    );
    // A space that is one byte too small is never called sufficient.
    let free = missing.disk_bytes + MIN_FREE_BYTES - 1;
    let message = describe_lack_of_space(Path::new("/cache"), "birds", &missing, free);
    assert!(message.contains(": free 0.1 MB there"), "{message}");
}

#[tokio::test]
async fn a_too_large_copy_is_refused_and_existing_copies_stay() {
    let dir = tempfile::tempdir().unwrap();
    let (copies, existing) = copy(dir.path(), &[("a", 5)]);
    fs::remove_dir_all(existing.dir().join("uses")).unwrap();
    fs::create_dir(existing.dir().join("uses")).unwrap();
    let about =
        About { dataset: "large".into(), path: "/l".into(), within: String::new(), files: 1, bytes: 1 << 60 };
    let missing = Missing { files: 1, bytes: 1 << 60, disk_bytes: 1 << 60 };
    let checked = check_disk(&existing, &about, &missing, &copies).await;
    assert!(matches!(checked, Err(CopyError::NoSpace(why)) if why.contains("1152921504606.9 MB more")));
    assert!(existing.dir().exists(), "an unused copy was removed, though that was not enough");
}
