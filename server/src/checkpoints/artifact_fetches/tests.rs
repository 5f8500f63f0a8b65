use super::*;

#[test]
fn only_incomplete_fetches_of_an_earlier_server_are_removed() {
    let jobs = tempfile::tempdir().unwrap();
    remove_unfinished(&jobs.path().join("none")).unwrap();
    for folder in ["a/fetched/1-10", "a/checkpoints/1-10", "b/checkpoints/1-20"] {
        fs::create_dir_all(jobs.path().join(folder)).unwrap();
    }
    fs::write(jobs.path().join("a/fetched/1-10/model.safetensors"), b"half").unwrap();
    fs::write(jobs.path().join("file"), b"").unwrap();
    remove_unfinished(jobs.path()).unwrap();
    let exists = |path| jobs.path().join(path).exists();
    assert!(!exists("a/fetched") && exists("a/checkpoints/1-10") && exists("b/checkpoints/1-20"));
}

#[tokio::test]
async fn all_checks_of_a_round_share_one_waiting_time() {
    let dir = tempfile::tempdir().unwrap();
    let storage =
        crate::checkpoints::object_storage::ObjectStorage::open(dir.path().to_str().unwrap()).unwrap();
    let artifacts = ArtifactStore::new(storage, false);
    let check = |id| artifacts.join_or_start_fetch(id);
    let ((first, first_sender), (second, second_sender)) = (check("a"), check("b"));
    let mut time_left = Duration::from_millis(20);
    assert_eq!(wait_for_check(first.clone(), &mut time_left).await, None);
    assert_eq!(time_left, Duration::ZERO, "no time is left for other checks");
    assert_eq!(wait_for_check(second, &mut time_left).await, None);
    // A check that has ended needs no time.
    artifacts.end_fetch("a", &first_sender.unwrap(), Ok(()));
    assert_eq!(wait_for_check(first, &mut time_left).await, Some(Ok(())));
    drop(second_sender);
}
