//! Copies that were interrupted, continued or damaged.

use super::*;

#[test]
fn after_a_full_disk_a_copy_continues_to_the_same_bytes() {
    let from = folder(25);
    let (whole, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let prepared = run(from.path(), whole.path(), &small_shards()).unwrap();
    assert!(prepared.shards > 4, "{prepared:?}");
    // The disk is full while the third shard is written.
    let marker = to.path().join(".later");
    let fill_disk = |progress: Progress| {
        if progress.done > 12 && !marker.exists() {
            fs::write(&marker, "").unwrap();
            std::os::unix::fs::symlink("/dev/full", to.path().join("train-000002.tar.part")).unwrap();
        }
    };
    assert_contains(
        prepare(from.path(), to.path(), &small_shards(), fill_disk).unwrap_err(),
        &["train-000002.tar.part cannot be written: No space left"],
    );
    fs::remove_file(&marker).unwrap();
    let names: Vec<_> = files_of(to.path()).into_keys().collect();
    assert_eq!(names, ["classes.txt", "train-000000.tar", "train-000001.tar", "unfinished.json"]);
    // An incomplete copy is not used for training by mistake.
    assert_contains(open(to.path()).unwrap_err(), &["is an incomplete copy"]);
    let shard = |number: u32| to.path().join(format!("train-{number:06}.tar"));
    let metadata = fs::metadata(shard(0)).unwrap();
    // A finished shard has been truncated since.
    fs::write(shard(1), "").unwrap();
    let prepared = run(from.path(), to.path(), &small_shards()).unwrap();
    assert_eq!(prepared.kept_shards, 1);
    assert_eq!(
        fs::metadata(shard(0)).unwrap().modified().unwrap(),
        metadata.modified().unwrap(),
        "not written again"
    );
    let shards = |dir: &Path| -> BTreeMap<_, _> {
        files_of(dir).into_iter().filter(|(name, _)| !name.ends_with("json")).collect()
    };
    assert!(shards(to.path()) == shards(whole.path()), "the shards have other bytes");
    // Complete shards are not written again.
    let again = run(from.path(), to.path(), &small_shards()).unwrap();
    assert_eq!((again.kept_shards, again.splits), (again.shards, prepared.splits));
}

#[test]
fn finished_shards_are_checked_before_reuse() {
    let (from, to) = (folder(25), tempfile::tempdir().unwrap());
    let prepared = run(from.path(), to.path(), &small_shards()).unwrap();
    let whole = files_of(to.path());
    let shard = to.path().join("train-000001.tar");
    let content = whole["train-000001.tar"].clone();
    // The length is right, but the end was never written, or some bytes are different.
    let mut hollow = content.clone();
    let (half, all) = (hollow.len() / 2, hollow.len());
    hollow[half..].fill(0);
    let foreign = vec![b'x'; all];
    for damaged in [hollow, foreign, content[..half].to_vec()] {
        fs::write(&shard, &damaged).unwrap();
        let again = run(from.path(), to.path(), &small_shards()).unwrap();
        assert_eq!((again.kept_shards, again.shards), (prepared.shards - 1, prepared.shards));
        assert!(files_of(to.path()) == whole, "written again with the same bytes");
    }
}

#[test]
fn incomplete_copies_are_refused_for_training() {
    let (from, to) = (folder(25), tempfile::tempdir().unwrap());
    let prepared = run(from.path(), to.path(), &small_shards()).unwrap();
    let shard = to.path().join("train-000001.tar");
    let content = fs::read(&shard).unwrap();
    // At the end of a member, where a truncated tar file seems complete.
    fs::write(&shard, &content[..2048]).unwrap();
    let detail = format!("train-000001.tar has 2048 bytes and was written with {}", content.len());
    assert_contains(open(to.path()).unwrap_err(), &["is an incomplete copy", &detail]);
    fs::remove_file(&shard).unwrap();
    assert_contains(open(to.path()).unwrap_err(), &["train-000001.tar is missing", "prepare` again"]);
    // Opening a shard by its own name is allowed.
    assert!(open(&to.path().join("train-{000000,000002}.tar")).is_ok());
    assert_eq!(run(from.path(), to.path(), &small_shards()).unwrap().kept_shards, prepared.shards - 1);
    assert_eq!(open(to.path()).unwrap().splits[0].labels.len(), 50);
    // Without `prepared.json`, the copy counts as a smaller dataset.
    fs::remove_file(&shard).unwrap();
    fs::remove_file(to.path().join("prepared.json")).unwrap();
    assert!(open(to.path()).unwrap().splits[0].labels.len() < 50);
}

#[test]
fn other_settings_sources_or_files_are_refused_with_the_difference() {
    let (from, to) = (folder(3), tempfile::tempdir().unwrap());
    run(from.path(), to.path(), &settings(16)).unwrap();
    let before = files_of(to.path());
    let refusal = |settings: &PrepareSettings| prepare_error(from.path(), to.path(), settings);
    assert_contains(refusal(&settings(17)), &["contains a copy with a short side of 16, not 17"]);
    let other = PrepareSettings { quality: 80, ..settings(16) };
    assert_contains(refusal(&other), &["with a quality of 90, not 80"]);
    fs::write(from.path().join("train/cat/new.png"), encode(&picture(9, 9, 1), ImageFormat::Png)).unwrap();
    assert_contains(refusal(&settings(16)), &["contains a copy of another dataset"]);
    assert!(files_of(to.path()) == before, "no file is changed");
    fs::write(to.path().join("prepared.json"), r#"{"version": 2, "shards": []}"#).unwrap();
    for message in [refusal(&settings(16)), open(to.path()).unwrap_err().to_string()] {
        assert_contains(message, &["another version of lockstep"]);
    }
    let inside = from.path().join("copy");
    assert!(prepare_error(from.path(), &inside, &settings(16)).contains("is inside the dataset"));
    assert!(!inside.exists());
    let mine = tempfile::tempdir().unwrap();
    fs::write(mine.path().join("letter.txt"), "dear").unwrap();
    assert_contains(
        prepare_error(from.path(), mine.path(), &settings(16)),
        &["contains other files (letter.txt)"],
    );
    assert_eq!(files_of(mine.path()).len(), 1);
}

#[test]
fn a_folder_is_locked_while_a_copy_is_written() {
    let (from, to) = (folder(25), tempfile::tempdir().unwrap());
    let refused = RefCell::new(0);
    let write_again = |_: Progress| {
        assert_contains(
            prepare_error(from.path(), to.path(), &small_shards()),
            &["is being written by another"],
        );
        *refused.borrow_mut() += 1;
    };
    let prepared = prepare(from.path(), to.path(), &small_shards(), write_again).unwrap();
    assert!(*refused.borrow() >= prepared.shards);
    let again = run(from.path(), to.path(), &small_shards()).unwrap();
    assert_eq!(again.kept_shards, prepared.shards);
}
