use super::*;

#[test]
fn a_checkpoint_is_fetched_where_it_and_the_spare_have_room() {
    assert_eq!(check_room(1000, SPARE_BYTES + 1000), Ok(()));
    let Err(NotFetched::Disk(why)) = check_room(1_000_000, SPARE_BYTES + 999_999) else {
        panic!("it has no room");
    };
    assert_eq!(why, "it has 1 MB, and 270 MB are free on the disk, of which 269 MB must stay free");
    assert!(check_room(u64::MAX, u64::MAX - 1).is_err());
}

#[test]
fn what_an_earlier_server_has_not_fetched_to_its_end_is_removed_and_nothing_else() {
    let jobs = tempfile::tempdir().unwrap();
    sweep(&jobs.path().join("none")).unwrap();
    for folder in ["a/fetched/1-10", "a/checkpoints/1-10", "b/checkpoints/1-20"] {
        fs::create_dir_all(jobs.path().join(folder)).unwrap();
    }
    fs::write(jobs.path().join("a/fetched/1-10/model.safetensors"), b"half").unwrap();
    fs::write(jobs.path().join("file"), b"").unwrap();
    sweep(jobs.path()).unwrap();
    let is_there = |path| jobs.path().join(path).exists();
    assert!(!is_there("a/fetched") && is_there("a/checkpoints/1-10") && is_there("b/checkpoints/1-20"));
}

#[tokio::test]
async fn the_checks_of_a_round_are_waited_for_as_long_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let storage =
        crate::checkpoints::object_storage::ObjectStorage::open(dir.path().to_str().unwrap()).unwrap();
    let store = ArtifactStore::new(storage, false);
    let check = |id| store.fetch(id);
    let ((first, first_runs), (second, second_runs)) = (check("a"), check("b"));
    let mut patience = CheckWait(Duration::from_millis(20));
    assert_eq!(patience.wait(first.clone()).await, None);
    assert_eq!(patience.0, Duration::ZERO, "nothing is left for others");
    assert_eq!(patience.wait(second).await, None);
    // One that has ended needs no time.
    store.end_fetch("a", &first_runs.unwrap(), Ok(()));
    assert_eq!(patience.wait(first).await, Some(Ok(())));
    drop(second_runs);
}
