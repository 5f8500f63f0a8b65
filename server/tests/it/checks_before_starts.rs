//! Checks of checkpoints on the server's disk before the attempts that continue from them (`serve --artifacts`).

use crate::{
    agent::{Agent, running},
    artifacts::{on_disk, states, until},
    gangs::killed,
    test_server::TestServer,
    uploads::checkpoint,
};
use lockstep_protocol::{JobId, agent::Source};
use serde_json::{Value, json};
use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// Bytes that nobody reads to their end here; the disk does not hold them.
const ENDLESS: u64 = 1 << 40;

/// Files that are endless for as long as the test runs: their readers end with it, also where it fails.
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

/// Those of these files that are open, and the others.
fn open(files: &[PathBuf]) -> (Vec<&PathBuf>, Vec<&PathBuf>) {
    let open: Vec<_> = fs::read_dir("/proc/self/fd").unwrap().flatten().collect();
    let open: HashSet<_> = open.iter().filter_map(|fd| fs::read_link(fd.path()).ok()).collect();
    files.iter().partition(|file| open.contains(*file))
}

/// Writes a checkpoint's weights and its manifest anew, so that whoever is reading them finds files of two moments.
fn write_anew(weights: &Path) {
    let manifest = weights.with_file_name("MANIFEST.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(manifest, text + "\n").unwrap();
    fs::write(weights, b"weights").unwrap();
}

/// What a job waits for.
async fn waits_for(server: &TestServer, id: &JobId, code: &str) -> bool {
    let queue = server.job(id.as_str()).await.queue;
    queue.and_then(|queue| queue.reason).is_some_and(|reason| reason.code() == code)
}

#[tokio::test]
async fn jobs_whose_checkpoints_are_checked_two_at_a_time_keep_their_slots() {
    let kept = tempfile::tempdir().unwrap();
    let directory = kept.path().to_str().unwrap().to_owned();
    let server = TestServer::with(|config| config.artifacts = Some(directory)).await;
    let mut agent = Agent::join_with_dataset(&server, 6).await;
    let (mut attempts, mut files) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let change = |spec: &mut Value| {
            spec["priority"] = json!(1);
            spec["recovery"] = json!({"max_restarts": 1});
        };
        let id = server.submit(change).await.id;
        let start = agent.expect_start().await;
        let folder = on_disk(Path::new(start.job_dir.as_deref().unwrap()), 10);
        agent.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
        until("it is stored", async || states(&server, id.as_str()).await == ["stored"]).await;
        files.push(folder.join("model.safetensors").canonicalize().unwrap());
        attempts.push(start.attempt);
    }
    let _endless = Endless::make(&files);
    for attempt in &attempts {
        agent.end(attempt, killed(0)).await;
    }
    for attempt in &attempts {
        until("its checkpoint is checked", async || {
            waits_for(&server, &attempt.job, "waiting_for_checkpoint").await
        })
        .await;
    }
    let low = server.submit(|_| {}).await.id;
    until("the slots are not its", async || waits_for(&server, &low, "waiting_for_slots").await).await;
    until("two are being read", async || open(&files).0.len() >= 2).await;
    let (read, waits) = open(&files);
    assert_eq!((read.len(), waits.len()), (2, 1), "the third waits for its turn");
    // First the one that nobody reads.
    waits.into_iter().chain(read).for_each(|weights| write_anew(weights));
    let mut started = HashSet::new();
    for _ in 0..3 {
        let start = agent.expect_start().await;
        assert_eq!((start.attempt.attempt, start.resume.as_deref()), (2, Some("1-10")));
        started.insert(start.attempt.job);
    }
    assert_eq!(started, attempts.into_iter().map(|attempt| attempt.job).collect());
    server.stop().await;
}
