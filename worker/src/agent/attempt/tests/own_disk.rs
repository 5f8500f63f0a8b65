//! Attempts on a disk that the server does not share.

use super::*;
use crate::agent::{place, test_server};
use lockstep_protocol::agent::StartFiles;

#[tokio::test]
async fn the_disk_is_reported_before_the_dataset_is_copied() {
    let mut fixture = fixture(1, "exit 0");
    let (remote, requests) = test_server::server();
    let copies = Copies::open(&fixture.dir.path().join("copies"), 1000, &[]).unwrap();
    fixture.context.remote = Arc::new(remote);
    fixture.context.copies = Some(Arc::new(copies));
    let state_dir = crate::agent::state_dir::StateDir::open(&fixture.dir.path().join("agent")).unwrap();
    fixture.stored.start.files = StartFiles { mark: Some("word".into()), ..StartFiles::default() };
    let (stored, chosen) = place::choose_job_dir(&state_dir, fixture.stored.start.clone());
    chosen.unwrap();
    fixture.stored = stored;
    assert!(is_own_disk(&fixture.stored));
    let attempt = fixture.start();
    fixture.wait_for_end(&attempt).await;
    assert_eq!(requests.lock().unwrap()[..2], ["POST ", "GET dataset/files"]);
}
