//! Checkpoints in an object store (`serve --artifacts`): a directory, or a real S3 server. Checkpoints are uploaded
//! while training continues, and fetched if they are missing from the server's disk.

pub(crate) mod bucket;
mod restored;

use crate::{
    pictures, postgres,
    server::{
        Agents, Finished, Folder, Server, TIMEOUT, free_port, lockstep, number, signal, training_permit,
    },
    specs,
};
use bucket::{Bucket, S3Server, environment, files_below};
use rustix::process::Signal;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs;

/// Starts a server whose database is in `external`, outside the data directory that some tests delete.
async fn start(environment: Vec<(String, String)>, external: &Folder) -> Server {
    let database = match postgres::wanted() {
        true => postgres::database(),
        false => format!("sqlite://{}", external.path().join("kept.db").display()),
    };
    let server = Server::start_on(Agents::Local { cpu_slots: 2 }, Some(database), environment).await;
    server.register("fashion", &pictures::idx_dataset(external.path(), 64, 16)).await;
    server
}

/// Starts a server whose object store is a directory in `external`.
async fn start_with_directory(external: &Folder) -> Server {
    let directory = external.path().join("artifacts").display().to_string();
    start(vec![("LOCKSTEP_ARTIFACTS".into(), directory)], external).await
}

/// A job with a checkpoint every ten steps.
fn spec(name: &str, steps: u64) -> Value {
    specs::with(
        specs::short(name, "fashion", 2, steps),
        json!({"checkpoint": {"every_epochs": null, "every_steps": 10}}),
    )
}

/// Waits until all checkpoints of a job are in the object store.
async fn wait_until_stored(server: &Server, id: &str) {
    // The store is one Python process, to which two jobs may send 100 MB each.
    server
        .until_within(4 * TIMEOUT, "every checkpoint is in the object store", async |s: &Server| {
            let checkpoints = s.checkpoints(id).await;
            !checkpoints.is_empty() && checkpoints.iter().all(|checkpoint| checkpoint["stored"] == "stored")
        })
        .await;
}

fn newest(checkpoints: &[Value]) -> String {
    checkpoints[0]["id"].as_str().expect("an id").to_owned()
}

/// Kills all processes of the server's machine and deletes its data directory.
async fn lose_the_machine(server: &mut Server) {
    server.kill_serve();
    for process in server.processes() {
        signal(process.pid, Signal::KILL);
    }
    server.until("all processes have ended", async |s: &Server| s.processes().is_empty()).await;
    fs::remove_dir_all(server.data_dir()).expect("the data directory");
}

#[tokio::test]
async fn jobs_continue_on_a_new_machine_with_the_same_database_and_store() {
    let _permit = training_permit().await;
    let (external, bucket) = (Folder::new(), Bucket::new().await);
    let mut server = start(bucket.environment(), &external).await;
    let finished = server.train(&spec("finished", 20)).await;
    wait_until_stored(&server, &finished).await;
    let (checkpoints, model) = (server.checkpoints(&finished).await, server.last_model(&finished).await);
    let running = server.submit(&spec("running", 3000)).await;
    server
        .until("two of its checkpoints are stored", async |s: &Server| {
            let all = s.checkpoints(&running).await;
            all.iter().filter(|checkpoint| checkpoint["stored"] == "stored").count() >= 2
        })
        .await;
    let stored: Vec<_> = server.checkpoints(&running).await;
    let oldest = stored.iter().filter(|c| c["stored"] == "stored").map(|c| number(&c["step"])).min();
    lose_the_machine(&mut server).await;
    server.start_serve().await;

    // Every checkpoint of the finished job is listed and can be downloaded.
    assert_eq!(server.checkpoints(&finished).await, checkpoints);
    assert_eq!(server.last_model(&finished).await, model);
    for checkpoint in &checkpoints {
        let id = checkpoint["id"].as_str().expect("an id");
        server.bytes(&format!("/checkpoints/{id}/optimizer.safetensors")).await;
    }
    server.until("the agent of the new machine is online", async |s: &Server| s.slots().await == 2).await;

    // The running job continues from its stored checkpoint, not from the beginning.
    let job = server
        .wait_for_job(&running, "it runs again", |job| {
            number(&job["attempt"]) == 2 && job["state"] == "running"
        })
        .await;
    let attempts = server.attempts(&running).await;
    let from = attempts[1]["checkpoint"].as_str().unwrap_or_else(|| panic!("{attempts:#?}"));
    let step: u64 = from.rsplit('-').next().and_then(|step| step.parse().ok()).expect("a step");
    assert!(Some(step) >= oldest, "{from}, at least {oldest:?}: {job}");
    server.order(&running, "cancel").await;
    server.wait_for_end(&running).await;
    server.stop().await;
}

#[tokio::test]
async fn checkpoints_only_in_the_store_can_be_forked_evaluated_and_used() {
    let _permit = training_permit().await;
    let external = Folder::new();
    let server = start_with_directory(&external).await;
    let id = server.train(&spec("finished", 20)).await;
    wait_until_stored(&server, &id).await;
    let (best, model) = (newest(&server.checkpoints(&id).await), server.last_model(&id).await);
    let delete_folder = || fs::remove_dir_all(server.job_dir(&id)).expect("the job's folder");
    delete_folder();
    assert_eq!(server.last_model(&id).await, model);
    delete_folder();
    let images = pictures::image_folder(external.path(), 1);
    let picture = fs::read(pictures::boot(&images)).expect("a picture");
    let response = server.http.post(server.api(&format!("/checkpoints/{best}/predict"))).body(picture);
    let response = response.send().await.expect("a response");
    assert!(response.status().is_success(), "{}", response.text().await.unwrap_or_default());
    delete_folder();
    let evaluation = server.evaluation(&id, &format!("?checkpoint={best}")).await;
    assert!(evaluation["accuracy"].is_number(), "{evaluation}");
    delete_folder();
    let fork = server.create(&format!("/jobs/{id}/fork"), &json!({"set": {"train.steps": 30}})).await;
    server.wait_for_success(&fork).await;
    wait_until_stored(&server, &fork).await;

    // The fork has its own objects, which stay when the original job's objects are deleted.
    let directory = external.path().join("artifacts/jobs");
    server.cli(&["delete", &id, "--yes"]).ok();
    server.until("the job's objects are deleted", async |_: &Server| !directory.join(&id).exists()).await;
    fs::remove_dir_all(server.job_dir(&fork)).expect("the fork's folder");
    assert!(server.last_model(&fork).await.len() > 1000);
    server.cli(&["delete", &fork, "--yes"]).ok();
    server.until("no object is left", async |_: &Server| files_below(&directory).is_empty()).await;
    server.stop().await;
}

/// A job whose weights and optimizer's state have 45 MB each: several parts of an upload.
fn large() -> Value {
    let changes = json!({"data": {"image_size": 16}, "model": {"arch": "resnet18"}});
    specs::with(specs::short("large", "fashion", 1, 2), changes)
}

/// Size of one part of an upload.
const PART_BYTES: u64 = 8 << 20;

#[tokio::test]
async fn an_upload_after_a_broken_connection_sends_only_the_missing_parts() {
    let _permit = training_permit().await;
    let (external, bucket) = (Folder::new(), Bucket::new().await);
    let server = start(bucket.environment(), &external).await;
    // The connection breaks in the third part of the first file.
    bucket.gate.pass_only(2 * PART_BYTES + PART_BYTES / 2);
    let id = server.train(&large()).await;
    server.until("the upload is in its third part", async |_: &Server| bucket.gate.is_waiting()).await;
    assert_eq!((bucket.objects().await, bucket.open_uploads().await), (Vec::new(), 1));
    bucket.gate.cut();
    wait_until_stored(&server, &id).await;
    let sent_bytes = bucket.gate.passed();
    let total_bytes = bucket.objects().await.iter().map(|object| object.size).sum::<u64>();
    assert!(total_bytes > 8 * PART_BYTES, "{total_bytes}");
    assert!(
        sent_bytes < total_bytes - PART_BYTES,
        "{sent_bytes} of {total_bytes} bytes were sent after the break, although two parts were stored"
    );
    assert_eq!(bucket.open_uploads().await, 0, "no unfinished upload is left");
    server.stop().await;
}

#[tokio::test]
async fn a_killed_upload_continues() {
    let _permit = training_permit().await;
    let (external, bucket) = (Folder::new(), Bucket::new().await);
    let mut server = start(bucket.environment(), &external).await;
    bucket.gate.pass_only(70 << 20);
    let id = server.train(&large()).await;
    server.until("the upload is in its second file", async |_: &Server| bucket.gate.is_waiting()).await;
    let before = bucket.objects().await;
    assert_eq!(before.len(), 1, "{before:?}");
    assert_eq!(bucket.open_uploads().await, 1);
    assert_eq!(server.checkpoints(&id).await[0]["stored"], "uploading");
    server.kill_serve();
    bucket.gate.open();
    server.start_serve().await;
    wait_until_stored(&server, &id).await;

    let (after, checkpoint) = (bucket.objects().await, newest(&server.checkpoints(&id).await));
    assert!(after.contains(&before[0]), "a stored file is not uploaded again: {before:?} {after:?}");
    assert_eq!(bucket.open_uploads().await, 0, "no unfinished upload is left");
    let manifest = server.get(&format!("/checkpoints/{checkpoint}/MANIFEST.json")).await;
    let prefix =
        format!("team/runs/jobs/{id}/{}", checkpoint.strip_prefix(&format!("{id}-")).expect("its name"));
    let files = manifest["files"].as_object().expect("files");
    assert_eq!(after.len(), files.len() + 1, "{after:?}");
    for (name, file) in files {
        let sum = file["sha256"].as_str().expect("a sum");
        let bytes = bucket.read(&format!("{prefix}/{sum}/{name}")).await;
        assert_eq!(hex::encode(Sha256::digest(&bytes)), sum, "{name}");
    }
    server.stop().await;
}

#[tokio::test]
async fn jobs_run_while_the_store_is_unreachable() {
    let _permit = training_permit().await;
    let (external, bucket) = (Folder::new(), Bucket::new().await);
    let mut server = start(bucket.environment(), &external).await;
    let before = server.train(&spec("before", 10)).await;
    wait_until_stored(&server, &before).await;
    bucket.gate.close();
    // While the store is unreachable, a server starts and jobs run.
    server.kill_serve();
    server.start_serve().await;
    let id = server.train(&spec("while", 30)).await;
    let all = server.checkpoints(&id).await;
    assert!(all.iter().all(|checkpoint| checkpoint["stored"] == "uploading"), "{all:?}");
    // Checkpoints that are only in the store are reported as unavailable.
    let checkpoint = newest(&server.checkpoints(&before).await);
    fs::remove_dir_all(server.job_dir(&before)).expect("the job's folder");
    let path = format!("/checkpoints/{checkpoint}/model.safetensors");
    let problem = server.request(reqwest::Method::GET, &path, None).await.problem(503);
    assert!(problem["detail"].as_str().is_some_and(|d| d.contains("object store")), "{problem}");
    // A job is deleted while the store is unreachable, and then the server is killed.
    server.cli(&["delete", &before, "--yes"]).ok();
    let log = || fs::read_to_string(server.folder().path().join("serve.2.log")).expect("a log");
    server
        .until("the log says that the store is unreachable", async |_: &Server| {
            log().contains("object store cannot be used")
        })
        .await;
    assert_eq!(log().matches("object store cannot be used").count(), 1, "logged once");
    server.kill_serve();
    bucket.gate.open();
    server.start_serve().await;
    wait_until_stored(&server, &id).await;
    server
        .until("the objects of the deleted job are deleted", async |_: &Server| {
            bucket.objects().await.iter().all(|object| object.key.contains(&id))
        })
        .await;
    server.cli(&["delete", &id, "--yes"]).ok();
    server.until("no object is left", async |_: &Server| bucket.objects().await.is_empty()).await;
    server.stop().await;
}

#[tokio::test]
async fn after_a_damaged_object_the_job_continues_from_the_previous_checkpoint() {
    let _permit = training_permit().await;
    let (external, bucket) = (Folder::new(), Bucket::new().await);
    let server = start(bucket.environment(), &external).await;
    let id = server.submit(&spec("damaged", 3000)).await;
    server.until("the job has two checkpoints", async |s: &Server| s.checkpoints(&id).await.len() >= 2).await;
    server.cli(&["pause", &id]).ok();
    wait_until_stored(&server, &id).await;
    let all = server.checkpoints(&id).await;
    let (last, previous) = (newest(&all), all[1]["id"].as_str().expect("an id").to_owned());
    let part_of_key = format!("/{}/", last.strip_prefix(&format!("{id}-")).expect("its name"));
    let objects = bucket.objects().await;
    let weights =
        objects.iter().find(|o| o.key.contains(&part_of_key) && o.key.ends_with("/model.safetensors"));
    let key = &weights.expect("weights").key;
    let mut bytes = bucket.read(key).await;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    bucket.write(key, bytes).await;

    fs::remove_dir_all(server.job_dir(&id)).expect("the job's folder");
    let path = format!("/checkpoints/{last}/model.safetensors");
    let problem = server.request(reqwest::Method::GET, &path, None).await.problem(422);
    assert!(problem["detail"].as_str().is_some_and(|d| d.contains("its model.safetensors")), "{problem}");
    assert!(!server.job_dir(&id).join("checkpoints").exists(), "no file of the damaged checkpoint stays");
    let fork = json!({"checkpoint": last, "set": {"train.steps": 4000}});
    server.post(&format!("/jobs/{id}/fork"), &fork).await.problem(422);

    server.order(&id, "resume").await;
    server.wait_for_job(&id, "it runs again", |job| job["state"] == "running").await;
    let attempts = server.attempts(&id).await;
    assert_eq!(attempts[1]["checkpoint"], previous, "{attempts:#?}");
    server.cli(&["logs", &id]).assert_prints(&["is damaged there (the bytes of its model.safetensors"]);
    server
        .until("the damaged checkpoint's objects are deleted", async |_: &Server| {
            bucket.objects().await.iter().all(|object| !object.key.contains(&part_of_key))
        })
        .await;
    server.order(&id, "cancel").await;
    server.wait_for_end(&id).await;
    server.stop().await;
}

#[tokio::test]
async fn an_unusable_store_prevents_the_server_s_start() {
    let folder = Folder::new();
    let (s3, key, secret) = S3Server::strict("weights");
    let file = folder.write("file", "");
    let serve = |variables: Vec<(String, String)>, removed: &[&str]| {
        let mut command = lockstep();
        command.args(["serve", "--listen", &format!("127.0.0.1:{}", free_port()), "--data-dir"]);
        command.arg(folder.path().join("data")).envs(variables);
        removed.iter().for_each(|name| {
            command.env_remove(name);
        });
        Finished::of(&mut command)
    };
    let url_in_bucket = "s3://weights/a";
    let url = s3.url();
    serve(environment(url_in_bucket, &url, "AKIANOBODY", &secret), &[]).assert_usage_error(&[
        "--artifacts s3://weights/a",
        "does not know these credentials (InvalidAccessKeyId)",
        "AWS_ACCESS_KEY_ID",
    ]);
    serve(environment(url_in_bucket, &url, &key, "wrong"), &[])
        .assert_usage_error(&["SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"]);
    serve(environment("s3://none/a", &url, &key, &secret), &[]).assert_usage_error(&["no such bucket"]);
    serve(environment(url_in_bucket, &url, &key, &secret), &["AWS_ALLOW_HTTP"])
        .assert_usage_error(&["AWS_ALLOW_HTTP=true"]);
    serve(environment(url_in_bucket, &url, &key, &secret), &["AWS_SECRET_ACCESS_KEY"])
        .assert_usage_error(&["AWS_SECRET_ACCESS_KEY is not"]);
    serve(environment(url_in_bucket, "nowhere", &key, &secret), &[])
        .assert_usage_error(&["AWS_ENDPOINT_URL is nowhere", "https://"]);
    let directory = |path: String| vec![("LOCKSTEP_ARTIFACTS".to_owned(), path)];
    serve(directory("gs://weights/a".into()), &[]).assert_usage_error(&["gs://", "s3://BUCKET/PREFIX"]);
    serve(directory(file.join("x").display().to_string()), &[])
        .assert_usage_error(&["cannot be made", "choose another"]);
    let inside = folder.path().join("data/artifacts");
    serve(directory(inside.display().to_string()), &[]).assert_usage_error(&["it is in the data directory"]);
    // A data directory inside the store's directory is refused, too, even before it exists.
    fs::remove_dir_all(folder.path().join("data")).expect("the data directory is deleted");
    let above = folder.path().join("link");
    std::os::unix::fs::symlink(folder.path(), &above).expect("a link");
    serve(directory(above.display().to_string()), &[])
        .assert_usage_error(&["the data directory is in it", "choose"]);
    assert!(!folder.path().join("data").exists(), "no data directory is created");
}
