//! Checks of checkpoints on the server's disk before the attempts that continue from them (`serve --artifacts`).

use crate::{
    agent::{Agent, checkpoint, running},
    artifacts::{wait_until_stored, write_checkpoint},
    gangs::rank_killed,
    test_server::{TestServer, wait_until},
};
use lockstep_protocol::{JobId, agent::Source};
use serde_json::{Value, json};
use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// Length of a sparse file that no reader finishes during the test.
const ENDLESS: u64 = 1 << 40;

/// Files that are extended to [`ENDLESS`] bytes. Dropping the value truncates the files, so their readers end even if the test fails.
struct Endless(Vec<PathBuf>);

impl Endless {
    fn make(files: &[PathBuf]) -> Self {
        let this = Self(files.to_owned());
        this.set_len(ENDLESS).unwrap();
        this
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.0.iter().try_for_each(|file| File::options().write(true).open(file)?.set_len(bytes))
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        let _ = self.set_len(0);
    }
}

/// Divides the files into files that this process has open, and other files.
fn partition_open(files: &[PathBuf]) -> (Vec<&PathBuf>, Vec<&PathBuf>) {
    let open: Vec<_> = fs::read_dir("/proc/self/fd").unwrap().flatten().collect();
    let open: HashSet<_> = open.iter().filter_map(|fd| fs::read_link(fd.path()).ok()).collect();
    files.iter().partition(|file| open.contains(*file))
}

/// Replaces a checkpoint's weights and manifest, so that a concurrent reader sees that the files have changed.
fn rewrite(weights: &Path) {
    let manifest = weights.with_file_name("MANIFEST.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(manifest, text + "\n").unwrap();
    fs::write(weights, b"weights").unwrap();
}

/// Whether a job waits for this reason.
async fn waits_for(server: &TestServer, id: &JobId, code: &str) -> bool {
    let queue = server.job(id.as_str()).await.queue;
    queue.and_then(|queue| queue.reason).is_some_and(|reason| reason.code() == code)
}

#[tokio::test]
async fn two_checkpoints_are_checked_at_a_time_and_the_jobs_keep_their_slots() {
    let (server, _store) = TestServer::with_object_store().await;
    let mut agent = Agent::join_with_dataset(&server, 6).await;
    let (mut attempts, mut files) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let change = |spec: &mut Value| {
            spec["priority"] = json!(1);
            spec["recovery"] = json!({"max_restarts": 1});
        };
        let id = server.submit(change).await.id;
        let start = agent.expect_start().await;
        let folder = write_checkpoint(Path::new(start.job_dir.as_deref().unwrap()), 10);
        agent.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
        wait_until_stored(&server, id.as_str()).await;
        files.push(folder.join("model.safetensors").canonicalize().unwrap());
        attempts.push(start.attempt);
    }
    let _endless = Endless::make(&files);
    for attempt in &attempts {
        agent.end(attempt, rank_killed(0)).await;
    }
    for attempt in &attempts {
        wait_until("the checkpoint is checked", async || {
            waits_for(&server, &attempt.job, "waiting_for_checkpoint").await
        })
        .await;
    }
    let low = server.submit(|_| {}).await.id;
    wait_until("the job of low priority gets no slots", async || {
        waits_for(&server, &low, "waiting_for_slots").await
    })
    .await;
    wait_until("two checkpoints are being read", async || partition_open(&files).0.len() >= 2).await;
    let (reading, waiting) = partition_open(&files);
    assert_eq!((reading.len(), waiting.len()), (2, 1), "the third check waits");
    // Begins with the waiting checkpoint, so that its check reads the new files.
    waiting.into_iter().chain(reading).for_each(|weights| rewrite(weights));
    let mut started = HashSet::new();
    for _ in 0..3 {
        let start = agent.expect_start().await;
        assert_eq!((start.attempt.attempt, start.resume.as_deref()), (2, Some("1-10")));
        started.insert(start.attempt.job);
    }
    assert_eq!(started, attempts.into_iter().map(|attempt| attempt.job).collect());
    server.stop().await;
}
