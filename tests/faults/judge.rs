//! Checks that must pass after every fault.

use crate::{
    pictures,
    server::{Agents, Server, number, signal},
    socket::stored,
    specs,
};
use lockstep_protocol::agent::AttemptEvent;
use lockstep_worker::report::{Tail, events_path};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::Path,
    time::{Duration, Instant},
};
use tokio::sync::Mutex;

/// Steps of a disturbed job, which has 40 steps in an epoch. With [`SLOW_STEPS`] the job lasts until it is disturbed.
pub(crate) const STEPS: u64 = 160;
/// Steps from one checkpoint to the next.
pub(crate) const CHECKPOINT_STEPS: u64 = 20;
/// A lease of 10 s: ranks end 8 s after the last message from the server.
pub(crate) const SHORT_LEASE: (&str, &str) = ("LOCKSTEP_LEASE", "10");
/// Ranks whose steps take at least 20 ms, so that a job of [`STEPS`] takes 3.2 s on the fastest machine.
pub(crate) const SLOW_STEPS: (&str, &str) = ("LOCKSTEP_FAULT", "step:slow");

/// Environment variables.
pub(crate) fn variables<const N: usize>(pairs: [(&str, &str); N]) -> Vec<(String, String)> {
    pairs.map(|(name, value)| (name.into(), value.into())).into()
}

/// A job of two ranks. Augmentation and a changing learning rate make a repeated or skipped step visible in the
/// weights.
pub(crate) fn spec(name: &str, steps: u64) -> Value {
    specs::with(
        specs::short(name, "fashion", 2, steps),
        json!({
            // The minimum, as the tests do not depend on the size.
            "data": {"image_size": 8, "crop_padding": 2, "horizontal_flip": true},
            "train": {"schedule": "cosine"},
            "checkpoint": {"every_epochs": null, "every_steps": CHECKPOINT_STEPS, "keep": 2},
            "recovery": {"max_restarts": 10, "stall_timeout_secs": 10},
        }),
    )
}

pub(crate) async fn register_pictures(server: Server) -> Server {
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 640, 64)).await;
    server
}

/// A server with the pictures, and a local agent of two slots.
pub(crate) async fn start(database: Option<String>, environment: Vec<(String, String)>) -> Server {
    register_pictures(Server::start_on(Agents::Local { cpu_slots: 2 }, database, environment).await).await
}

/// The weights of an undisturbed [`spec`] of this number of steps.
pub(crate) async fn undisturbed_weights(steps: u64) -> Vec<u8> {
    trained_weights(&spec("disturbed", steps)).await
}

/// The `model.safetensors` of an undisturbed job. Each specification is trained once for all tests, as the file depends
/// on nothing else.
pub(crate) async fn trained_weights(spec: &Value) -> Vec<u8> {
    static TRAINED: Mutex<BTreeMap<String, Vec<u8>>> = Mutex::const_new(BTreeMap::new());
    let mut trained = TRAINED.lock().await;
    if let Some(model) = trained.get(&spec.to_string()) {
        return model.clone();
    }
    let at_full_speed = variables([("LOCKSTEP_FAULT", "")]);
    let server = start(None, at_full_speed).await;
    let id = server.train(spec).await;
    let model = server.last_model(&id).await;
    server.stop().await;
    trained.insert(spec.to_string(), model.clone());
    model
}

/// What a rank has recorded: points, numbers of log lines, and steps of checkpoints.
#[derive(Debug, Default, PartialEq)]
struct Record {
    /// (name, step) and the value's bits.
    points: BTreeMap<(String, u64), u32>,
    lines: BTreeSet<u64>,
    checkpoints: BTreeSet<u64>,
}

impl Record {
    fn point(&mut self, name: &str, step: u64, value: f32) {
        let bits = if value.is_finite() { value.to_bits() } else { f32::NAN.to_bits() };
        assert!(self.points.insert((name.into(), step), bits).is_none(), "{name} of step {step} twice");
    }

    fn line(&mut self, number: u64) {
        assert!(self.lines.insert(number), "line {number} twice");
    }

    fn is_part_of(&self, whole: &Record) -> bool {
        self.points.iter().all(|(key, value)| whole.points.get(key) == Some(value))
            && self.lines.is_subset(&whole.lines)
            && self.checkpoints.is_subset(&whole.checkpoints)
    }
}

/// All events of a file of records.
fn read_records(path: &Path) -> Vec<AttemptEvent> {
    let mut tail = Tail::open(path, 0);
    let mut all = Vec::new();
    loop {
        let events = tail.poll().expect("a file of records");
        if events.is_empty() {
            return all;
        }
        all.extend(events);
    }
}

/// The record in the rank's own file, and checkpoints that the rank could not report, from the agent's file.
fn recorded(server: &Server, id: &str, attempt: u64, rank: u32) -> Record {
    let dir = server.attempt_dir(id, attempt);
    let mut record = Record::default();
    for event in read_records(&events_path(&dir, rank)) {
        match event {
            AttemptEvent::Metrics { columns, .. } => {
                for column in columns {
                    for (step, value) in column.steps.iter().zip(&column.values) {
                        record.point(&column.name, *step, *value);
                    }
                }
            }
            AttemptEvent::Log { lines, .. } => lines.iter().for_each(|line| record.line(line.number)),
            AttemptEvent::Checkpoint(info) => {
                record.checkpoints.insert(info.step);
            }
            _ => {}
        }
    }
    for event in read_records(&dir.join("agent.events")) {
        if let AttemptEvent::Checkpoint(info) = event
            && rank == 0
        {
            assert!(record.checkpoints.insert(info.step), "checkpoint {} reported twice", info.step);
        }
    }
    record
}

/// The records in the server's events, by attempt and rank. Lines that the agent has added have higher numbers than the rank's.
fn stored_records(events: &[Value]) -> BTreeMap<(u64, u32), Record> {
    let mut records: BTreeMap<(u64, u32), Record> = BTreeMap::new();
    for event in events {
        let rank = event["rank"].as_u64().unwrap_or(0) as u32;
        let key = (event["attempt"].as_u64().unwrap_or(0), rank);
        match event["type"].as_str() {
            Some("metrics") => {
                let name = event["name"].as_str().expect("a name");
                let values = event["values"].as_array().expect("values");
                for (step, value) in event["steps"].as_array().expect("steps").iter().zip(values) {
                    let value = value.as_f64().map_or(f32::NAN, |v| v as f32);
                    records.entry(key).or_default().point(name, number(step), value);
                }
            }
            Some("log") => {
                // The server writes line 0.
                for line in event["lines"].as_array().expect("lines").iter().filter(|l| l["number"] != 0) {
                    records.entry(key).or_default().line(number(&line["number"]));
                }
            }
            Some("checkpoint") => {
                records.entry(key).or_default().checkpoints.insert(number(&event["step"]));
            }
            _ => {}
        }
    }
    records
}

/// Asserts that the job has succeeded, that its events are numbered without a gap, every record of every rank is
/// stored exactly once (of attempts in `fenced`, whose leases had expired, records may be missing), every step was trained, and
/// the weights are bit for bit those of the undisturbed run. Returns the number of attempts.
pub(crate) async fn assert_undisturbed_result(
    server: &Server,
    id: &str,
    steps: u64,
    model: &[u8],
    fenced: &[u64],
) -> u64 {
    let job = server.wait_for_success(id).await;
    let events = stored(server, id).await;
    let attempts = number(&job["attempt"]);
    let stored_records = stored_records(&events);
    let empty = Record::default();
    for attempt in 1..=attempts {
        for rank in 0..2 {
            let written = recorded(server, id, attempt, rank);
            let stored = stored_records.get(&(attempt, rank)).unwrap_or(&empty);
            if fenced.contains(&attempt) {
                assert!(
                    stored.is_part_of(&written),
                    "attempt {attempt}, rank {rank}: a record that the rank has not written"
                );
                continue;
            }
            assert_eq!(stored.points, written.points, "points of attempt {attempt}, rank {rank}");
            assert_eq!(
                stored.checkpoints, written.checkpoints,
                "checkpoints of attempt {attempt}, rank {rank}"
            );
            // The agent may have added lines that the rank printed before it died.
            let added: Vec<_> = stored.lines.difference(&written.lines).collect();
            assert!(written.lines.is_subset(&stored.lines), "lines of attempt {attempt}, rank {rank}");
            assert!(added.iter().all(|n| written.lines.last().is_none_or(|last| *n > last)), "{added:?}");
        }
    }
    for rank in 0..2 {
        let losses = |record: &Record| -> BTreeSet<u64> {
            record.points.keys().filter(|(name, _)| name == "loss").map(|(_, step)| *step).collect()
        };
        let mut trained: BTreeSet<_> = stored_records
            .iter()
            .filter(|((_, r), _)| *r == rank)
            .flat_map(|(_, record)| losses(record))
            .collect();
        // Training may continue from a checkpoint that a fenced attempt could not report: its last steps are only in the weights.
        for attempt in fenced {
            let next = events.iter().find(|e| e["type"] == "plan" && e["attempt"] == attempt + 1);
            let from = next.map_or(0, |plan| number(&plan["start_step"]));
            trained.extend(
                losses(&recorded(server, id, *attempt, rank)).into_iter().filter(|step| *step <= from),
            );
        }
        assert_eq!(trained, (1..=steps).collect(), "steps of rank {rank}");
    }
    assert!(server.last_model(id).await == model, "the weights are not those of the undisturbed run");
    // Every listed checkpoint is valid.
    for checkpoint in server.checkpoints(id).await {
        let folder = format!("checkpoints/{}-{}", number(&checkpoint["epoch"]), number(&checkpoint["step"]));
        let folder = server.job_dir(id).join(folder);
        lockstep_worker::checkpoint::validate(&folder)
            .unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    }
    assert!(server.ranks(id).is_empty(), "no rank is left");
    attempts
}

/// A row of the fault matrix: a fault and the result of its test.
pub(crate) struct ReportRow {
    fault: String,
    began: Instant,
    /// Time from the fault until the server noticed it.
    noticed: Option<Duration>,
    /// Time from the fault until the job trained again.
    recovered: Option<Duration>,
}

impl ReportRow {
    /// Records the time of the fault.
    pub(crate) fn begin(fault: &str) -> Self {
        Self { fault: fault.into(), began: Instant::now(), noticed: None, recovered: None }
    }

    /// Waits until the server has noticed the fault, and then until the job trains again, in an attempt after `attempt`.
    pub(crate) async fn wait_until_recovered(&mut self, server: &Server, id: &str, attempt: u64) {
        let deadline = Instant::now() + Duration::from_secs(100);
        loop {
            if let Ok(response) = server.http.get(server.api(&format!("/jobs/{id}"))).send().await
                && let Ok(job) = response.json::<Value>().await
            {
                let current = job["attempt"].as_u64().unwrap_or(0);
                let state = job["state"].as_str().unwrap_or_default();
                if self.noticed.is_none() && (current > attempt || matches!(state, "restarting" | "lost")) {
                    self.noticed = Some(self.began.elapsed());
                }
                if current > attempt && matches!(state, "running" | "succeeded") {
                    self.recovered = Some(self.began.elapsed());
                    return;
                }
                assert_ne!(state, "succeeded", "{}: the job had ended before it was disturbed", self.fault);
            }
            assert!(Instant::now() < deadline, "{}: not recovered", self.fault);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn recovered_now(&mut self) {
        self.recovered = Some(self.began.elapsed());
    }

    pub(crate) fn recovery_time(&self) -> Duration {
        self.recovered.expect("the job has recovered")
    }

    /// Prints the row: all conditions hold.
    pub(crate) fn passed(self, note: &str) {
        let secs = |d: Option<Duration>| d.map(|d| (d.as_secs_f64() * 100.0).round() / 100.0);
        let (noticed, recovered) = (secs(self.noticed), secs(self.recovered));
        let line =
            json!({"fault": self.fault, "noticed_secs": noticed, "mended_secs": recovered, "note": note});
        #[allow(clippy::print_stdout)] // The table is the purpose of the run.
        {
            println!("{line}");
        }
        if let Ok(path) = std::env::var("LOCKSTEP_FAULTS_REPORT") {
            let file = fs::OpenOptions::new().append(true).create(true).open(path);
            let written = file.and_then(|mut file| writeln!(file, "{line}"));
            written.expect("LOCKSTEP_FAULTS_REPORT is a file that can be written");
        }
    }
}

/// Submits [`spec`], and waits for a step between the first and the second checkpoint. Returns the job's id.
pub(crate) async fn submit_and_train(server: &Server, steps: u64) -> String {
    let id = server.submit(&spec("disturbed", steps)).await;
    wait_for_step(server, &id, CHECKPOINT_STEPS + 10).await;
    id
}

/// The size of the last rank's log, which grows while the first attempt trains.
pub(crate) fn log_bytes(server: &Server, id: &str) -> u64 {
    fs::metadata(server.attempt_dir(id, 1).join("rank.1.log")).map_or(0, |m| m.len())
}

/// Ends a process by SIGSEGV. The first signal only removes Rust's handler, which expects a real fault to occur again.
pub(crate) async fn crash(pid: i32) {
    signal(pid, Signal::SEGV);
    tokio::time::sleep(Duration::from_millis(20)).await;
    signal(pid, Signal::SEGV);
}

/// Waits until the job has reached `step` and rank 0 has written to its log.
pub(crate) async fn wait_for_step(server: &Server, id: &str, step: u64) {
    let log = |rank: u32, attempt: u64| {
        let path = server.attempt_dir(id, attempt).join(format!("rank.{rank}.log"));
        fs::read_to_string(path).unwrap_or_default()
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let job = server.job(id).await;
        if number(&job["step"]) >= step && !log(0, number(&job["attempt"])).is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "the job does not reach step {step}: {job:#}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
