//! Attempts on a disk that the server does not share.

use super::*;
use crate::agent::{asked, place};
use lockstep_protocol::agent::StartFiles;

#[tokio::test]
async fn the_disk_is_reported_before_the_dataset_is_copied() {
    let mut here = place(1, "exit 0");
    let (remote, asked) = asked::server();
    let copies = Copies::open(&here.dir.path().join("copies"), 1000, &[]).unwrap();
    here.context.remote = Some(Arc::new(remote));
    here.context.copies = Some(Arc::new(copies));
    let state_dir = crate::agent::state_dir::StateDir::open(&here.dir.path().join("agent")).unwrap();
    here.stored.start.files = StartFiles { mark: Some("word".into()), ..StartFiles::default() };
    let (stored, made) = place::choose_job_dir(&state_dir, here.stored.start.clone());
    made.unwrap();
    here.stored = stored;
    assert!(is_own_disk(&here.stored));
    let attempt = Attempt::start(here.stored.clone(), None, here.context.clone());
    here.end_of(&attempt).await;
    assert_eq!(asked.lock().unwrap()[..2], ["POST ", "GET dataset/files"]);
}
