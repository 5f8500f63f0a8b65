use super::*;

/// An object store in a directory that is removed at once, because these tests use only the state in memory.
fn store() -> ObjectStoreState {
    let dir = tempfile::tempdir().unwrap();
    ObjectStoreState::new(ObjectStorage::open(dir.path().to_str().unwrap()).unwrap(), false)
}

#[test]
fn the_newest_checkpoint_is_uploaded_first_and_by_one_worker() {
    let store = store();
    for id in ["old", "new", "old", "newest"] {
        store.queue(id);
    }
    assert_eq!(store.take_next().as_deref(), Some("newest"));
    // A checkpoint that is written again during its upload is uploaded again afterwards.
    store.queue("newest");
    assert_eq!(store.take_next().as_deref(), Some("old"));
    assert_eq!(store.take_next().as_deref(), Some("new"));
    assert_eq!(store.take_next(), None);
    store.finish("newest");
    assert_eq!(store.take_next().as_deref(), Some("newest"));
    assert_eq!(store.take_next(), None);
    // A checkpoint that failed does not delay others.
    store.queue("other");
    store.requeue("newest");
    store.finish("newest");
    assert_eq!(store.take_next().as_deref(), Some("other"));
    assert_eq!(store.take_next().as_deref(), Some("newest"));
}

#[test]
fn waiting_and_uploading_checkpoints_count_as_uploading() {
    let store = store();
    assert!(!store.is_uploading("a"));
    store.queue("a");
    assert!(store.is_uploading("a"));
    assert_eq!(store.take_next().as_deref(), Some("a"));
    assert!(store.is_uploading("a"));
    store.finish("a");
    assert!(!store.is_uploading("a"));
}

#[test]
fn a_running_fetch_is_shared() {
    let store = store();
    let (_, sender) = store.join_or_start_fetch("a");
    let sender = sender.expect("the first caller fetches");
    let (joined, no_sender) = store.join_or_start_fetch("a");
    assert!(no_sender.is_none() && joined.outcome.borrow().is_none());
    store.end_fetch("a", &sender, Err(FetchError::Missing));
    assert_eq!(*joined.outcome.borrow(), Some(Err(FetchError::Missing)));
    drop(sender);
    let (again, no_sender) = store.join_or_start_fetch("a");
    assert!(no_sender.is_none() && again.outcome.borrow().is_some(), "a failure is not tried again at once");
    // A fetch that was interrupted can be started again.
    let (_, sender) = store.join_or_start_fetch("b");
    drop(sender);
    assert!(store.join_or_start_fetch("b").1.is_some());
}

#[test]
fn the_pause_after_a_failed_fetch_doubles_up_to_a_minute() {
    let seconds = |failures| FETCH_RETRY.pause_after(failures).as_secs();
    assert_eq!([1, 2, 3, 4, 5, 6].map(seconds), [3, 6, 12, 24, 48, 60]);
    assert_eq!(seconds(u32::MAX), 60);
    let store = store();
    let (_, sender) = store.join_or_start_fetch("a");
    store.end_fetch("a", &sender.unwrap(), Err(FetchError::Missing));
    assert_eq!(store.join_or_start_fetch("a").0.failures, 1);
    lock(&store.fetches).get_mut("a").unwrap().changed_at -= FETCH_RETRY.first;
    let (_, sender) = store.join_or_start_fetch("a");
    store.end_fetch("a", &sender.expect("it can be fetched again"), Err(FetchError::Missing));
    lock(&store.fetches).get_mut("a").unwrap().changed_at -= FETCH_RETRY.first;
    let (failed, no_sender) = store.join_or_start_fetch("a");
    assert!(no_sender.is_none() && failed.failures == 2, "the pause is longer now");
}

#[test]
fn a_failing_store_is_reported_once_until_it_works_again() {
    let store = store();
    let begins = |kind| store.note_failure(kind, "the disk is full");
    let ends = |kind| store.note_success(kind);
    assert!(!ends(RequestKind::Write), "there was no failure yet");
    assert!(begins(RequestKind::Write) && !begins(RequestKind::Write));
    // Reading works the whole time.
    assert!(!ends(RequestKind::Other) && !begins(RequestKind::Write));
    assert!(!begins(RequestKind::Other) && !ends(RequestKind::Other), "reading fails for a while");
    assert!(ends(RequestKind::Write) && !ends(RequestKind::Write), "the end is reported once");
    // If reading failed, any success ends the failure.
    assert!(begins(RequestKind::Other) && ends(RequestKind::Other));
    assert!(begins(RequestKind::Other) && ends(RequestKind::Write));
}
