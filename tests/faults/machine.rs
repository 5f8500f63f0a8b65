//! Faults of a machine: no memory, a full disk, a changed clock, a process that does not end.
//!
//! Tests whose names begin with `root` need root: a full disk is a small tmpfs, a process that cannot be killed is in a
//! frozen control group, and a control group's limit starts the kernel's OOM killer.
//!
//! ```sh
//! cargo test --workspace --test faults -- --ignored root
//! ```

use crate::{
    judge::{
        CHECKPOINT_STEPS, ReportRow, SLOW_STEPS, STEPS, assert_undisturbed_result, register_pictures, spec,
        start, submit_and_train, undisturbed_weights, variables, wait_for_step,
    },
    server::{Agents, Process, Server, faketime, number, training_permit},
    socket::stored,
    specs,
};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

const LOCAL: Agents = Agents::Local { cpu_slots: 2 };

/// A job that needs some gigabytes.
fn large() -> Value {
    specs::with(
        spec("large", STEPS),
        json!({"model": {"arch": "resnet50"}, "data": {"image_size": 96}, "train": {"batch_size": 320}}),
    )
}

async fn assert_failed_for_memory(server: &Server, id: &str) {
    let job = server.wait_for_end(id).await;
    let reason = job["reason"].as_str().expect("a reason");
    assert!(
        job["state"] == "failed" && reason.contains("out of memory") && reason.contains("batch_size"),
        "{job:#}"
    );
    assert_eq!(number(&job["attempt"]), 1, "a restart would not help: {reason}");
    assert!(server.ranks(id).is_empty(), "no rank is left");
}

#[tokio::test]
async fn a_rank_without_enough_memory_fails_with_that_reason() {
    let _permit = training_permit().await;
    // Address space for a server, its agent and small jobs.
    let limit = ["prlimit", "--as=3221225472"];
    let server =
        register_pictures(Server::start_wrapped(LOCAL, None, Vec::new(), &limit, |_| {}).await).await;
    let row = ReportRow::begin("no more memory for a rank (RLIMIT_AS)");
    let id = server.submit(&large()).await;
    assert_failed_for_memory(&server, &id).await;
    // The next job has enough memory.
    server.train(&spec("small", 5)).await;
    row.passed("failed as out of memory, not restarted; the next job runs");
    server.stop().await;
}

/// A control group, which is removed when it is dropped.
struct Group(PathBuf);

impl Group {
    /// A group of a cgroup v1 controller, which is mounted below /sys/fs/cgroup.
    fn new(controller: &str) -> Self {
        let path =
            PathBuf::from(format!("/sys/fs/cgroup/{controller}/lockstep-faults-{}", std::process::id()));
        fs::create_dir(&path).unwrap_or_else(|e| panic!("{}: {e} (root, and cgroup v1)", path.display()));
        Self(path)
    }

    fn set(&self, file: &str, value: impl ToString) {
        let path = self.0.join(file);
        fs::write(&path, value.to_string()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }

    fn add(&self, process: &Process) {
        self.set("cgroup.procs", process.pid);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while fs::remove_dir(&self.0).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[tokio::test]
#[ignore = "needs root and cgroup v1"]
async fn root_a_rank_killed_for_memory_fails_its_job() {
    let _permit = training_permit().await;
    let server = start(None, Vec::new()).await;
    let group = Group::new("memory");
    group.set("memory.limit_in_bytes", 1u64 << 30);
    // The agent's ranks inherit the group.
    group.add(server.processes().iter().find(|p| p.command() == "agent").expect("the agent"));
    let row = ReportRow::begin("the kernel's OOM killer ends a rank (memory cgroup of 1 GiB)");
    let id = server.submit(&large()).await;
    assert_failed_for_memory(&server, &id).await;
    row.passed("killed: out of memory; not restarted");
    server.stop().await;
}

/// Cancels a job whose rank cannot be killed, and returns the reason, which names the rank's process.
async fn cancel_unkillable(server: &Server, id: &str, rank: &Process) -> String {
    server.cli(&["cancel", id]).ok();
    let job = server.wait_for_job(id, "the job is cancelled", |job| job["state"] == "cancelled").await;
    let reason = job["reason"].as_str().expect("a reason").to_owned();
    let named = format!("(process {}, state", rank.pid);
    assert!(reason.contains(&named) && reason.contains("has not ended after SIGKILL"), "{reason}");
    // The page names the process, too.
    let page = server.http.get(format!("{}/jobs/{id}", server.url)).send().await.expect("a page");
    let page = page.text().await.expect("its text");
    assert!(page.contains(&format!("process {}", rank.pid)), "the page names the process");
    reason
}

#[tokio::test]
#[ignore = "slow: the agent waits half a minute"]
async fn slow_a_rank_that_cannot_be_killed_is_named() {
    let _permit = training_permit().await;
    // No signal reaches a rank.
    let environment = vec![("LOCKSTEP_FAULT".into(), "rank.signal:error*".into())];
    let server = start(None, environment).await;
    let id = server.submit(&spec("immortal", 100_000)).await;
    wait_for_step(&server, &id, CHECKPOINT_STEPS).await;
    let (_, rank) = server.ranks(&id).remove(0);
    let mut row = ReportRow::begin("a rank survives every SIGKILL");
    cancel_unkillable(&server, &id, &rank).await;
    row.recovered_now();
    row.passed("cancelled; process, state and machine named on the page");
    for (_, rank) in server.ranks(&id) {
        crate::server::signal(rank.pid, rustix::process::Signal::KILL);
    }
    server.stop().await;
}

#[tokio::test]
#[ignore = "needs root and cgroup v1"]
async fn root_a_rank_frozen_by_the_kernel_is_named() {
    let _permit = training_permit().await;
    let server = start(None, Vec::new()).await;
    let group = Group::new("freezer");
    let id = server.submit(&spec("immortal", 100_000)).await;
    wait_for_step(&server, &id, CHECKPOINT_STEPS).await;
    let (_, rank) = server.ranks(&id).remove(0);
    group.add(&rank);
    let mut row = ReportRow::begin("a rank in state D (a frozen control group)");
    group.set("freezer.state", "FROZEN");
    let reason = cancel_unkillable(&server, &id, &rank).await;
    group.set("freezer.state", "THAWED");
    assert!(reason.contains("state D, blocked in the kernel"), "{reason}");
    row.recovered_now();
    row.passed("cancelled; the process is named as blocked in the kernel");
    server.stop().await;
}

#[tokio::test]
async fn an_attempt_survives_a_clock_set_forward_and_back() {
    let _permit = training_permit().await;
    let steps = 2 * STEPS;
    let expected_weights = undisturbed_weights(steps).await;
    let folder = tempfile::tempdir().expect("a folder");
    let clock = folder.path().join("clock");
    let set = |offset: &str| {
        let new = folder.path().join("new");
        fs::write(&new, offset).and_then(|()| fs::rename(&new, &clock)).expect("the clock's file");
    };
    set("+0");
    let clock_variables = [
        ("LD_PRELOAD", faketime()),
        ("FAKETIME_TIMESTAMP_FILE", clock.clone()),
        ("FAKETIME_NO_CACHE", "1".into()),
        // Only the time of day changes, as when somebody sets the clock.
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ("DONT_FAKE_MONOTONIC", "1".into()),
    ];
    let clock_variables = clock_variables.map(|(name, value)| (name.into(), value.display().to_string()));
    let environment = [variables([SLOW_STEPS]), clock_variables.into()].concat();
    let server = start(None, environment).await;
    let mut row = ReportRow::begin("the clock is set an hour forward, then two hours back");
    let id = server.submit(&spec("disturbed", steps)).await;
    wait_for_step(&server, &id, CHECKPOINT_STEPS).await;
    set("+3600");
    until_events_leap(&server, &id, 3000).await;
    set("-3600");
    until_events_leap(&server, &id, -6000).await;
    row.recovered_now();
    let attempts = assert_undisturbed_result(&server, &id, steps, &expected_weights, &[]).await;
    assert_eq!(attempts, 1, "no lease ended");
    row.passed("same attempt, nothing lost");
    server.stop().await;
}

/// Waits until the times of two consecutive stored events differ by at least `seconds` (backwards if negative): the
/// server has used the changed clock.
async fn until_events_leap(server: &Server, id: &str, seconds: i64) {
    let time_of =
        |event: &Value| event["at"].as_str().and_then(|at| at.parse::<Timestamp>().ok()).expect("a time");
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let times: Vec<_> = stored(server, id).await.iter().map(time_of).collect();
        let leap =
            |t: &[Timestamp]| (t[1].as_second() - t[0].as_second()) * seconds.signum() >= seconds.abs();
        if times.windows(2).any(leap) {
            return;
        }
        let state = server.job(id).await["state"].clone();
        assert!(
            state == "running" && Instant::now() < deadline,
            "{state}: the clock never jumped by {seconds} s"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A small file system, which is unmounted when it is dropped.
struct Disk(PathBuf);

impl Disk {
    fn mount(folder: &Path, mebibytes: u32) -> Self {
        fs::create_dir_all(folder).expect("a folder");
        let options = format!("size={mebibytes}m");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(folder).status();
        assert!(mounted.is_ok_and(|s| s.success()), "a tmpfs cannot be mounted: this needs root");
        Self(folder.into())
    }

    /// Fills the disk with one file, and returns the file's path.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = fs::File::create(&path).expect("a file");
        let mut block = vec![1; 1 << 20];
        while !block.is_empty() {
            if file.write_all(&block).is_err() {
                block.truncate(block.len() / 2);
            }
        }
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test]
#[ignore = "needs root"]
async fn root_training_continues_after_a_full_disk() {
    let _permit = training_permit().await;
    // The job lasts longer than the disk is full.
    let steps = 6 * STEPS;
    let expected_weights = undisturbed_weights(steps).await;
    let mut disk = None;
    let prepare = |data: &Path| disk = Some(Disk::mount(data, 64));
    let server = register_pictures(Server::start_wrapped(LOCAL, None, Vec::new(), &[], prepare).await).await;
    let disk = disk.expect("a disk");
    let id = submit_and_train(&server, steps).await;
    let mut row = ReportRow::begin("the disk of database, logs and checkpoints is full for 5 s");
    let filler = disk.fill();
    // The server still responds.
    let refused = server.post("/jobs", &spec("meanwhile", 5)).await;
    let detail = refused.problem(503)["detail"].to_string();
    assert!(detail.contains("No space left") || detail.contains("database"), "{detail}");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(server.ranks(&id).len(), 2, "the ranks are alive");
    fs::remove_file(filler).expect("free space");
    row.recovered_now();
    let attempts = assert_undisturbed_result(&server, &id, steps, &expected_weights, &[]).await;
    assert_eq!(attempts, 1);
    row.passed("503 with a reason, same attempt, nothing lost");
    server.stop().await;
    drop(disk);
}
