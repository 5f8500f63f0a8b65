//! Jobs whose ranks each write a part of a checkpoint (`checkpoint.sharded`).

use crate::{
    pictures,
    separate_disks::{Machine, until_online, uploaded_step},
    server::{Agents, Folder, Server, number, training_permit},
    socket::wait_for_step,
    specs,
};
use serde_json::{Value, json};
use std::{collections::BTreeSet, fs};

const STEPS: u64 = 100;

fn spec(name: &str, ranks: u32, is_sharded: bool) -> Value {
    specs::with(
        specs::short(name, "fashion", ranks, STEPS),
        json!({"checkpoint": {"every_epochs": null, "every_steps": 25, "keep": 10, "sharded": is_sharded}}),
    )
}

/// Downloads a job's last weights with `lockstep download`, without the file's header, which has the job's specification.
async fn download(server: &Server, id: &str) -> Vec<u8> {
    let file = server.folder().path().join("downloaded.safetensors");
    let file = file.to_str().expect("a path");
    server.cli(&["download", id, "--checkpoint", "latest", "-o", file]).ok();
    let bytes = fs::read(file).expect("the weights");
    bytes[8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize..].to_vec()
}

async fn files(server: &Server, checkpoint: &Value) -> BTreeSet<String> {
    let id = checkpoint["id"].as_str().expect("an id");
    let detail = server.get(&format!("/checkpoints/{id}")).await;
    detail["files"].as_object().expect("files").keys().cloned().collect()
}

#[tokio::test]
async fn a_sharded_job_is_paused_continued_forked_and_evaluated_like_others() {
    let server = Server::start_slow_training(640, 64).await;
    let whole = server.train(&spec("whole", 2, false)).await;
    let expected = download(&server, &whole).await;

    let id = server.submit(&spec("sharded", 2, true)).await;
    wait_for_step(&server, &id, 30).await;
    server.cli(&["pause", &id]).ok();
    let step = number(&server.job(&id).await["step"]);
    let newest = &server.checkpoints(&id).await[0];
    assert_eq!(number(&newest["step"]), step);
    let parts = ["model", "optimizer"]
        .map(|kind| [1, 2].map(|part| format!("{kind}-0000{part}-of-00002.safetensors")).to_vec());
    let indexes = ["model", "optimizer"].map(|kind| format!("{kind}.safetensors.index.json"));
    let names = parts.into_iter().flatten().chain(indexes).chain(["state.json".into()]);
    assert_eq!(files(&server, newest).await, names.collect());
    server.cli(&["resume", &id]).ok();
    assert_eq!(number(&server.wait_for_success(&id).await["attempt"]), 2);
    assert!(
        download(&server, &id).await == expected,
        "the weights of a job that was never paused and writes single files"
    );
    let network = |source: &str| {
        server.cli(&["export", "onnx", source, "--checkpoint", "latest", "-o", "network.onnx"]).ok();
        fs::read(server.folder().path().join("network.onnx")).expect("a network")
    };
    assert!(
        network(&id) == network("downloaded.safetensors"),
        "the same network from parts and from one file"
    );

    // Files are downloaded by their names in the manifest.
    let last = server.checkpoints(&id).await[0]["id"].as_str().expect("an id").to_owned();
    let get =
        async |file: &str| server.http.get(server.api(&format!("/checkpoints/{last}/{file}"))).send().await;
    let missing = get("model.safetensors").await.expect("a response");
    assert_eq!(missing.status().as_u16(), 404);
    assert!(missing.text().await.expect("a problem").contains("`lockstep download` makes one file"));
    let part = get("model-00002-of-00002.safetensors").await.expect("a response");
    assert!(part.status().is_success() && part.headers().contains_key("x-checksum-sha256"));

    let set = json!({"checkpoint": 75, "set": {"parallel.ranks": 1, "train.batch_size": 16, "checkpoint.sharded": false}});
    let fork = server.create(&format!("/jobs/{id}/fork"), &set).await;
    server.wait_for_success(&fork).await;
    assert!(download(&server, &fork).await == expected);
    let of_fork = &server.checkpoints(&fork).await[0];
    assert!(files(&server, of_fork).await.contains("model.safetensors"));

    let accuracy = async |id: &str| server.evaluation(id, "?checkpoint=latest").await["accuracy"].clone();
    assert_eq!(accuracy(&id).await, accuracy(&whole).await);
    let tuned = specs::short("tuned", "fashion", 1, 5);
    server.train(&specs::with(tuned, json!({"model": {"pretrained": last}}))).await;
    server.cli(&["delete", &id, "--yes"]).ok();
    server.until("the job's files are deleted", async |s: &Server| !s.job_dir(&id).exists()).await;
    server.stop().await;
}

#[tokio::test]
async fn sharded_checkpoints_of_another_machine_reach_the_server_and_the_store() {
    let _permit = training_permit().await;
    let folder = Folder::new();
    let store = vec![("LOCKSTEP_ARTIFACTS".into(), folder.path().join("artifacts").display().to_string())];
    let server = Server::start_on(Agents::None, None, store).await;
    let _machines = ["machine-a", "machine-b"].map(|name| Machine::start_without(&server, name, 2, &[], &[]));
    until_online(&server, 4).await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 640, 64)).await;
    let uploaded_weights = async |id: &str| {
        server.wait_for_success(id).await;
        server.until("the upload is done", async |s: &Server| uploaded_step(s, id).await == STEPS).await;
        download(&server, id).await
    };
    let whole = server.submit(&spec("whole", 4, false)).await;
    let expected = uploaded_weights(&whole).await;
    let id = server.submit(&spec("sharded", 4, true)).await;
    assert!(uploaded_weights(&id).await == expected);
    // Two of the four ranks are on rank 0's machine, and write the two parts.
    let newest = server.checkpoints(&id).await[0].clone();
    assert!(files(&server, &newest).await.contains("model-00002-of-00002.safetensors"));
    let is_stored = async |s: &Server| s.checkpoints(&id).await[0]["stored"] == "stored";
    server.until("the checkpoint is in the object store", is_stored).await;
    // The server may still write a file into the folder.
    let is_removed = async |s: &Server| fs::remove_dir_all(s.job_dir(&id)).is_ok();
    server.until("the job's folder is removed", is_removed).await;
    assert!(download(&server, &id).await == expected, "from the object store");
    // A fork on fewer ranks, on a machine that fetches the checkpoint.
    let set = json!({"set": {"parallel.ranks": 2, "train.batch_size": 16, "train.steps": STEPS + 5}});
    let fork = server.create(&format!("/jobs/{id}/fork"), &set).await;
    server.wait_for_success(&fork).await;
}
