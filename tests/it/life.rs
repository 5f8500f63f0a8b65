//! A job from its submission to its files, over REST.

use crate::{
    pages, pictures,
    server::{Finished, Server, number, training_permit},
    socket::{Socket, states, stored},
    specs,
};
use lockstep_protocol::JobState;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs;

const RANKS: u64 = 2;
const STEPS_PER_EPOCH: u64 = 16;
const STEPS: u64 = 32;
/// Number of validation pictures.
const VALIDATED: u64 = 100;

#[tokio::test]
async fn a_job_trains_and_leaves_all_documented_results() {
    // 260 pictures: 16 steps of 16 per epoch; `drop_remainder` skips 4.
    let server = Server::start_training(260, VALIDATED as usize).await;

    let spec = specs::with(
        specs::short("whole-life", "fashion", RANKS as u32, STEPS),
        json!({
            "train": {"steps": null, "epochs": 2},
            "checkpoint": {"every_epochs": 1},
            "evaluate": {"every_epochs": 1},
        }),
    );
    let response = server.post("/jobs", &spec).await;
    assert_eq!(response.status, StatusCode::CREATED, "{}", response.text);
    let submitted = response.json();
    let id = submitted["id"].as_str().expect("an id").to_owned();
    assert_eq!(response.header("location"), format!("/api/v1/jobs/{id}"));
    assert_eq!(submitted["spec"]["train"]["lr"], 0.01, "defaults are filled in");
    let listed = server.get("/jobs").await;
    assert!(listed["jobs"].as_array().expect("jobs").iter().any(|j| j["id"] == *id), "{listed:#}");

    let mut socket = Socket::of_job(&server, &id, 0).await;
    socket.read_to_end().await;
    let job = server.wait_for_success(&id).await;
    let events = stored(&server, &id).await;

    assert_valid_states(&events);
    assert_complete(&job);
    assert_every_point(&server, &id).await;
    let evaluations = evaluations(&events);
    let best = evaluations.iter().map(|e| e.1).fold(0.0, f64::max);
    assert_eq!(job["best"]["value"].as_f64(), Some(best), "{job:#}");
    assert_eq!(job["last"]["val_accuracy"].as_f64(), Some(evaluations[1].1), "{job:#}");
    assert_checkpoints(&server, &id, &evaluations).await;
    assert_logs(&server, &id).await;
    let spec_on_disk: Value =
        serde_json::from_slice(&fs::read(server.job_dir(&id).join("spec.json")).expect("spec.json"))
            .expect("JSON");
    assert_eq!(spec_on_disk, job["spec"]);

    // The job is deleted with all its files.
    let deleted = server.request(Method::DELETE, &format!("/jobs/{id}"), None).await;
    assert!(deleted.status.is_success(), "{}", deleted.text);
    server.request(Method::GET, &format!("/jobs/{id}"), None).await.problem(404);
    server.until("the job's folder is deleted", async |s: &Server| !s.job_dir(&id).exists()).await;
    server.stop().await;
}

/// The example of docs/api.md, as written.
#[tokio::test]
async fn the_python_example_submits_waits_evaluates_and_downloads() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    server.register("fashion-mnist", &pictures::idx_dataset(server.folder().path(), 640, 64)).await;
    let examples = pages::blocks("docs/api.md", "python");
    let [example] = &examples[..] else { panic!("one example: {examples:?}") };
    let mut python = std::process::Command::new("python3");
    python.arg("-c").arg(example).current_dir(server.folder().path());
    python.env("LOCKSTEP_SERVER", &server.url).env("TOKEN", server.token());
    let done = tokio::task::spawn_blocking(move || Finished::of(&mut python)).await.expect("it runs");
    let output = done.ok();
    assert!(output.contains("succeeded step 10 of 10\naccuracy 0."), "{output}");
    let model = fs::read(server.folder().path().join("model.safetensors")).expect("a model");
    safetensors::SafeTensors::deserialize(&model).expect("tensors");
    server.stop().await;
}

fn assert_valid_states(events: &[Value]) {
    let states = states(events);
    use JobState::*;
    assert_eq!(states, [Queued, Starting, Running, Succeeded]);
}

fn assert_complete(job: &Value) {
    for (key, value) in [("step", STEPS), ("total_steps", STEPS), ("steps_per_epoch", STEPS_PER_EPOCH)] {
        assert_eq!(number(&job[key]), value, "{key} of {job:#}");
    }
    assert_eq!((number(&job["epoch"]), number(&job["attempt"]), number(&job["ranks"])), (2, 1, RANKS));
    assert_eq!(job["reason"], Value::Null);
    let time = |key: &str| -> jiff::Timestamp { job[key].as_str().expect(key).parse().expect(key) };
    assert!(time("created_at") <= time("started_at") && time("started_at") < time("finished_at"), "{job:#}");
}

/// Asserts that the query and the CSV file have every step of every rank, with equal values.
async fn assert_every_point(server: &Server, id: &str) {
    let csv = server.bytes(&format!("/jobs/{id}/metrics.csv")).await;
    let csv = String::from_utf8(csv).expect("UTF-8");
    let header: Vec<_> = csv.lines().next().expect("a header").split(',').collect();
    let column = |name: &str| header.iter().position(|h| *h == name).unwrap_or_else(|| panic!("{header:?}"));
    let (name_at, rank_at, attempt_at) = (column("name"), column("rank"), column("attempt"));
    let (step_at, value_at) = (column("step"), column("value"));
    let rows: Vec<Vec<&str>> = csv.lines().skip(1).map(|l| l.split(',').collect()).collect();

    for (name, ranks) in [
        ("loss", RANKS),
        ("accuracy", RANKS),
        ("step_ms", RANKS),
        ("data_ms", RANKS),
        ("all_reduce_ms", RANKS),
        ("lr", 1),
        ("grad_norm", 1),
        ("images_per_second", 1),
    ] {
        let points = server.points(id, name).await;
        let keys: Vec<_> = points.iter().map(|p| (p.attempt, p.rank, p.step)).collect();
        let expected: Vec<_> = (0..ranks).flat_map(|r| (1..=STEPS).map(move |s| (1, r, s))).collect();
        assert_eq!(keys, expected, "(attempt, rank, step) of {name}");
        // The CSV may have fewer digits than the JSON, but the float32 is the same.
        let mut in_csv: Vec<(u64, u64, u64, u32)> = rows
            .iter()
            .filter(|row| row[name_at] == name)
            .map(|row| {
                let int = |column: usize| row[column].parse::<u64>().expect("a whole number");
                let value = row[value_at].parse::<f64>().expect("a number") as f32;
                (int(attempt_at), int(rank_at), int(step_at), value.to_bits())
            })
            .collect();
        in_csv.sort_unstable();
        let stored = points.iter().map(|p| (p.attempt, p.rank, p.step, (p.value as f32).to_bits()));
        assert_eq!(in_csv, stored.collect::<Vec<_>>(), "{name}");
    }
    assert!(server.points(id, "lr").await.iter().all(|p| (p.value - 0.01).abs() < 1e-9), "a constant rate");
}

/// (step, accuracy) of each evaluation.
fn evaluations(events: &[Value]) -> Vec<(u64, f64)> {
    let reports: Vec<_> = events.iter().filter(|e| e["type"] == "evaluation").collect();
    for evaluation in &reports {
        assert_eq!(number(&evaluation["samples"]), VALIDATED, "every picture once: {evaluation}");
        assert!(evaluation["loss"].as_f64().is_some_and(|l| l > 0.0), "{evaluation}");
    }
    let results: Vec<_> =
        reports.iter().map(|e| (number(&e["step"]), e["accuracy"].as_f64().expect("accuracy"))).collect();
    assert_eq!(results.iter().map(|e| e.0).collect::<Vec<_>>(), [STEPS_PER_EPOCH, STEPS]);
    for (_, accuracy) in &results {
        let correct = accuracy * VALIDATED as f64;
        assert!((correct - correct.round()).abs() < 1e-6 && (0.0..=1.0).contains(accuracy), "{accuracy}");
    }
    results
}

async fn assert_checkpoints(server: &Server, id: &str, evaluations: &[(u64, f64)]) {
    let mut checkpoints = server.checkpoints(id).await;
    checkpoints.sort_by_key(|c| number(&c["step"]));
    let steps: Vec<_> = checkpoints.iter().map(|c| number(&c["step"])).collect();
    assert_eq!(steps, [STEPS_PER_EPOCH, STEPS]);
    let best = evaluations.iter().map(|e| e.1).fold(0.0, f64::max);
    let marked: Vec<_> = checkpoints.iter().filter(|c| c["best"] == true).collect();
    assert_eq!(marked.len(), 1, "{checkpoints:#?}");
    assert_eq!(marked[0]["val_accuracy"].as_f64(), Some(best));

    for (checkpoint, (_, accuracy)) in checkpoints.iter().zip(evaluations) {
        assert_eq!(checkpoint["val_accuracy"].as_f64(), Some(*accuracy));
        let (epoch, step) = (number(&checkpoint["epoch"]), number(&checkpoint["step"]));
        let folder = server.job_dir(id).join(format!("checkpoints/{epoch}-{step}"));
        let from = format!("/checkpoints/{}", checkpoint["id"].as_str().expect("an id"));
        let manifest: Value =
            serde_json::from_slice(&server.bytes(&format!("{from}/MANIFEST.json")).await).expect("JSON");
        let mut size = fs::metadata(folder.join("MANIFEST.json")).expect("MANIFEST.json").len();
        for file in ["model.safetensors", "optimizer.safetensors", "state.json"] {
            let downloaded = server.bytes(&format!("{from}/{file}")).await;
            assert_eq!(downloaded, fs::read(folder.join(file)).expect(file), "{file}");
            let entry = &manifest["files"][file];
            assert_eq!(number(&entry["size_bytes"]), downloaded.len() as u64, "{file} in {manifest:#}");
            assert_eq!(entry["sha256"], sha256(&downloaded), "{file}");
            size += downloaded.len() as u64;
        }
        assert_eq!(number(&checkpoint["size_bytes"]), size);
        let state: Value =
            serde_json::from_slice(&fs::read(folder.join("state.json")).expect("state.json")).expect("JSON");
        assert_eq!((number(&state["epoch"]), number(&state["step"])), (epoch, step), "{state:#}");
        assert_eq!(number(&state["world_size"]), RANKS, "{state:#}");
        assert_torchvision_format(&server.bytes(&format!("{from}/model.safetensors")).await);
    }
    let folders = fs::read_dir(server.job_dir(id).join("checkpoints")).expect("checkpoints");
    assert_eq!(folders.count(), 2, "no temporary folder is left behind");
}

fn assert_torchvision_format(bytes: &[u8]) {
    let tensors = safetensors::SafeTensors::deserialize(bytes).expect("safetensors");
    for (name, shape) in [
        ("conv1.weight", vec![16, 1, 3, 3]),
        ("bn1.running_mean", vec![16]),
        ("layer1.0.conv1.weight", vec![16, 16, 3, 3]),
        ("layer3.2.bn2.weight", vec![64]),
        ("fc.weight", vec![10, 64]),
        ("fc.bias", vec![10]),
    ] {
        let tensor = tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(tensor.shape(), shape, "{name}");
        assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
        let finite = tensor.data().as_chunks::<4>().0.iter().all(|b| f32::from_le_bytes(*b).is_finite());
        assert!(finite, "{name} has values that are not finite");
    }
}

async fn assert_logs(server: &Server, id: &str) {
    for rank in 0..RANKS {
        let file = server.attempt_dir(id, 1).join(format!("rank.{rank}.log"));
        let on_disk = fs::read_to_string(&file).expect("the rank's log");
        let raw = server
            .http
            .get(server.api(&format!("/jobs/{id}/logs?rank={rank}&attempt=1")))
            .header("accept", "text/plain")
            .send()
            .await
            .expect("a response");
        assert_eq!(raw.text().await.expect("text"), on_disk, "the raw file of rank {rank}");

        let losses: Vec<_> = on_disk.lines().filter_map(loss_line).collect();
        let keys: Vec<_> = losses.iter().map(|l| (l.0, l.1)).collect();
        let expected: Vec<_> = (1..=STEPS).map(|step| ((step - 1) / STEPS_PER_EPOCH + 1, step)).collect();
        assert_eq!(keys, expected, "loss lines of rank {rank}:\n{on_disk}");
        let points = server.points(id, "loss").await;
        for (loss, point) in losses.iter().zip(points.iter().filter(|p| p.rank == rank)) {
            assert!((loss.2 - point.value).abs() < 1e-5, "{loss:?} in the log, {point:?} in the store");
        }

        let response = server.get(&format!("/jobs/{id}/logs?rank={rank}")).await;
        let lines = response["lines"].as_array().unwrap_or_else(|| panic!("{response:#}"));
        let texts: Vec<_> = lines.iter().map(|l| l["text"].as_str().expect("text")).collect();
        assert_eq!(texts, on_disk.lines().collect::<Vec<_>>(), "stored lines of rank {rank}");
        let numbers: Vec<_> = lines.iter().map(|l| number(&l["number"])).collect();
        assert_eq!(numbers, (1..=lines.len() as u64).collect::<Vec<_>>());
    }
}

/// (epoch, step, loss) of `epoch: 1 step: 1, loss is 2.3025854`.
fn loss_line(line: &str) -> Option<(u64, u64, f64)> {
    let (epoch, rest) = line.strip_prefix("epoch: ")?.split_once(" step: ")?;
    let (step, loss) = rest.split_once(", loss is ")?;
    Some((epoch.parse().ok()?, step.parse().ok()?, loss.parse().ok()?))
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}
