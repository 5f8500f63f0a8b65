//! The check before ranks are started.

use super::*;

#[tokio::test]
async fn missing_requirements_are_reported_before_the_start() {
    let mut fixture = fixture(2, "echo '{\"Err\":\"/none does not exist\"}'");
    fixture.context.check = crate::agent::preflight::check;
    let attempt = fixture.start();
    let reason = failure(fixture.wait_for_end(&attempt).await, false);
    assert!(reason.words().contains("the dataset cannot be read: /none does not exist"), "{reason:?}");
    assert!(matches!(reason.kind(), ReasonKind::DatasetUnusable { rank: None, .. }), "{reason:?}");
    assert!(!rank_file(&fixture.stored.attempt_dir(), 0, "pid").exists());
}

#[test]
fn a_killed_inspection_does_not_make_the_dataset_unusable() {
    use crate::agent::preflight::{Refusal, check};
    let run_check = |script: &str| {
        let mut fixture = fixture(1, script);
        let data = fixture.dir.path().join("data/train/cat");
        fs::create_dir_all(&data).unwrap();
        fs::write(data.join("a.png"), "no picture").unwrap();
        fixture.stored.start.dataset_path = fixture.dir.path().join("data").display().to_string();
        let cancelled = std::sync::atomic::AtomicBool::new(false);
        let result = check(&fixture.stored, &fixture.context.program, &[], &cancelled, "a");
        (result, fs::read_to_string(fixture.stored.job_dir.join("dataset.json")).ok())
    };
    let (result, note) = run_check("kill -9 $$");
    let Err(Refusal::DatasetUnusable(why)) = &result else { panic!("{result:?}") };
    assert!(why.contains("was not examined") && note.is_none(), "{why} {note:?}");
    // A folder that is not a dataset leaves no note either: the job can be retried with another folder.
    let (result, note) = run_check("echo '{\"Err\":\"holds nothing\"}'");
    let Err(Refusal::DatasetUnusable(why)) = &result else { panic!("{result:?}") };
    assert!(why.contains("holds nothing") && note.is_none(), "{why} {note:?}");
}

#[test]
fn files_are_checked_before_the_first_start_and_folders_before_later_ones() {
    use crate::agent::preflight::check;
    let mut fixture = fixture(1, &format!("cat >> \"${{0%/*}}/asked\"\necho '{}'", fingerprint_reply()));
    fs::create_dir_all(fixture.dir.path().join("data/train/cat")).unwrap();
    fixture.stored.start.dataset_path = fixture.dir.path().join("data").display().to_string();
    let has_begun = || {
        let cancelled = std::sync::atomic::AtomicBool::new(false);
        let result = check(&fixture.stored, &fixture.context.program, &[], &cancelled, "a");
        assert_eq!(result, Ok(()));
        let request = fs::read_to_string(fixture.dir.path().join("asked")).unwrap();
        fs::remove_file(fixture.dir.path().join("asked")).unwrap();
        request.contains("\"has_begun\":true")
    };
    assert_eq!([has_begun(), has_begun(), has_begun()], [false, true, true]);
}

#[tokio::test]
async fn jobs_can_be_stopped_while_a_file_system_hangs() {
    for order in [Order::Stop { patient: false }, Order::Stop { patient: true }, Order::Leave] {
        let mut fixture = fixture(2, "exit 0");
        // Never returns, even if it is cancelled, like stat(2) of a file on a dead network file system.
        fixture.context.check = |_, _, _, _, _| loop {
            std::thread::park();
        };
        let attempt = fixture.start();
        attempt.send_order(order);
        assert_eq!(fixture.wait_for_end(&attempt).await, Ending::Stopped);
        assert!(!rank_file(&fixture.stored.attempt_dir(), 0, "pid").exists());
    }
}

#[tokio::test]
async fn a_stop_cancels_a_running_inspection() {
    let mut fixture = fixture(1, "exit 0");
    fixture.context.check = |stored, _, _, cancelled, _| {
        let begun = stored.job_dir.join("begun");
        fs::write(begun, "").unwrap();
        while !cancelled.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        fs::write(stored.job_dir.join("given up"), "").unwrap();
        Ok(())
    };
    let attempt = fixture.start();
    let until = Instant::now() + Duration::from_secs(30);
    let reached = async |name: &str| {
        while !fixture.stored.job_dir.join(name).exists() {
            assert!(Instant::now() < until, "never {name}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    reached("begun").await;
    attempt.send_order(Order::Stop { patient: false });
    assert_eq!(fixture.wait_for_end(&attempt).await, Ending::Stopped);
    reached("given up").await;
    assert!(!rank_file(&fixture.stored.attempt_dir(), 0, "pid").exists());
}
