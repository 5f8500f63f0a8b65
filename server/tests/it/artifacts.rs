//! Checkpoints that agents upload to a server with an object store, here a directory. `/tests/it` at the top of the repository has the tests with a bucket.

use crate::{
    agent::{Agent, checkpoint, hello, running},
    gangs::rank_killed,
    starting::start_error,
    test_server::{TestServer, config, database_of, wait_until},
    uploads::{AttemptApi, FILES, manifest, sha256_hex},
};
use lockstep_protocol::agent::{AttemptEvent, AttemptRef, Ending, Source};
use lockstep_server::ServeConfig;
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};

pub(crate) fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.path() {
            path if path.is_dir() => files.extend(files_below(&path)),
            path => files.push(path),
        }
    }
    files.sort();
    files
}

/// Waits until the object store has all of a job's listed checkpoints.
pub(crate) async fn wait_until_stored(server: &TestServer, job: &str) {
    wait_until("the checkpoints are stored", async || {
        let states = stored_states(server, job).await;
        !states.is_empty() && states.iter().all(|state| state == "stored")
    })
    .await;
}

pub(crate) async fn stored_states(server: &TestServer, job: &str) -> Vec<Value> {
    let (_, listed) = server.get(&format!("/jobs/{job}/checkpoints")).await;
    listed["checkpoints"].as_array().unwrap().iter().map(|checkpoint| checkpoint["stored"].clone()).collect()
}

/// Writes a checkpoint into the job's folder, as a rank on the server's disk does.
pub(crate) fn write_checkpoint(job_dir: impl AsRef<Path>, step: u64) -> PathBuf {
    let folder = job_dir.as_ref().join("checkpoints").join(format!("1-{step}"));
    fs::create_dir_all(&folder).unwrap();
    for (name, bytes) in FILES {
        fs::write(folder.join(name), bytes).unwrap();
    }
    fs::write(folder.join("MANIFEST.json"), manifest(1, step)).unwrap();
    folder
}

/// Starts a job with one restart, and writes its checkpoint of step 10 on the server's disk. Returns the checkpoint's folder, too.
pub(crate) async fn start_job_with_checkpoint(server: &TestServer) -> (Agent, String, AttemptRef, PathBuf) {
    let mut agent = Agent::join_with_dataset(server, 2).await;
    let (id, attempt) = agent.start_job(server, |spec| spec["recovery"] = json!({"max_restarts": 1})).await;
    let folder = write_checkpoint(server.job_dir(&id), 10);
    agent.report(&attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    (agent, id, attempt, folder)
}

/// A job on an agent with its own disk, which has uploaded the checkpoint of step 10.
async fn start_uploaded_job(server: &TestServer) -> (Agent, String, AttemptApi<'_>) {
    let mut agent = Agent::join_with_dataset(server, 2).await;
    let (id, attempt) = agent.start_job(server, |spec| spec["checkpoint"] = json!({"keep": 2})).await;
    let api = AttemptApi::new(server, &server.agent_token("a").await, "id-a", &attempt);
    agent.report(&api.attempt, Source::Rank(0), 0, vec![running(100, 0)]).await;
    api.report_own_disk().await;
    agent.report(&api.attempt, Source::Rank(0), 1, vec![checkpoint(10)]).await;
    assert_eq!(api.upload("1-10", manifest(1, 10)).await.0, 204);
    (agent, id, api)
}

/// Uploads the checkpoints of steps 20, 30 and 40, and waits until the job has only the two newest, both in the object store.
async fn upload_three_more(server: &TestServer, agent: &mut Agent, id: &str, api: &AttemptApi<'_>) {
    for (first, step) in (2..).zip([20, 30, 40]) {
        agent.report(&api.attempt, Source::Rank(0), first, vec![checkpoint(step)]).await;
        assert_eq!(api.upload(&format!("1-{step}"), manifest(1, step)).await.0, 204);
    }
    wait_until("the two newest checkpoints are stored", async || {
        stored_states(server, id).await == ["stored", "stored"]
    })
    .await;
}

#[tokio::test]
async fn uploads_are_stored_replaced_and_deleted_with_their_job() {
    let (server, store) = TestServer::with_object_store().await;
    let (mut agent, id, api) = start_uploaded_job(&server).await;
    wait_until_stored(&server, &id).await;
    let folder = store.path().join("jobs").join(&id).join("1-10");
    let mut expected: Vec<_> =
        FILES.iter().map(|(name, bytes)| folder.join(sha256_hex(bytes)).join(name)).collect();
    expected.push(folder.join("MANIFEST.json"));
    expected.push(store.path().join("LOCKSTEP.json"));
    expected.sort();
    // The store has only these files, and no file that is left of the check at the server's start.
    assert_eq!(files_below(store.path()), expected);

    // A later evaluation changes `state.json`. The unchanged weights are not written again.
    let modified_at = |path: &Path| path.metadata().unwrap().modified().unwrap();
    let weights = folder.join(sha256_hex(b"weights")).join("model.safetensors");
    let weights_written_at = modified_at(&weights);
    let state = br#"{"evaluated":true}"#.to_vec();
    let mut new_manifest: Value = serde_json::from_slice(&manifest(1, 10)).unwrap();
    new_manifest["files"]["state.json"] = json!({"size_bytes": state.len(), "sha256": sha256_hex(&state)});
    let new_manifest = serde_json::to_vec(&new_manifest).unwrap();
    assert_eq!(api.request("PUT", "/uploads/1-10/MANIFEST.json", new_manifest.clone()).await.0, 204);
    for (file, bytes) in FILES {
        let bytes = if file == "state.json" { state.clone() } else { bytes.to_vec() };
        assert_eq!(api.request("PUT", &format!("/uploads/1-10/{file}?offset=0"), bytes).await.0, 204);
    }
    assert_eq!(api.request("POST", "/uploads/1-10", vec![]).await.0, 204);
    wait_until("the new state is stored", async || {
        fs::read(folder.join("MANIFEST.json")).ok().as_ref() == Some(&new_manifest)
            && stored_states(&server, &id).await == ["stored"]
    })
    .await;
    assert!(!folder.join(sha256_hex(b"{}")).join("state.json").exists(), "the replaced state is deleted");
    assert_eq!(modified_at(&weights), weights_written_at);

    // Without the files on disk, the checkpoint is not shown as being uploaded, and its files are read from the store.
    fs::remove_dir_all(server.job_dir(&id).join("checkpoints")).unwrap();
    let (_, listed) = server.get(&format!("/jobs/{id}/checkpoints")).await;
    assert_eq!(listed["checkpoints"][0].get("uploading_from"), None, "{listed}");
    let file = format!("/checkpoints/{id}-1-10/state.json");
    assert_eq!(server.get(&file).await, (200, json!({"evaluated": true})));

    // Checkpoints that the job does not keep are also deleted in the store.
    upload_three_more(&server, &mut agent, &id, &api).await;
    wait_until("the objects of older checkpoints are deleted", async || {
        let folders = fs::read_dir(store.path().join("jobs").join(&id)).unwrap();
        let mut names: Vec<_> =
            folders.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names == ["1-30", "1-40"]
    })
    .await;
    agent.end(&api.attempt, Ending::Succeeded { step: 100 }).await;
    wait_until("the job is over", async || server.delete(&format!("/jobs/{id}")).await.0 == 204).await;
    let marker = [store.path().join("LOCKSTEP.json")];
    wait_until("only the marker of the store is left", async || files_below(store.path()) == marker).await;
    server.stop().await;
}

#[tokio::test]
async fn the_next_server_completes_the_object_store() {
    let store = tempfile::tempdir().unwrap();
    // The first server has no store.
    let server = TestServer::new().await;
    let (mut agent, id, api) = start_uploaded_job(&server).await;
    assert_eq!(stored_states(&server, &id).await, [Value::Null], "without a store, no state is shown");
    agent.end(&api.attempt, Ending::Succeeded { step: 100 }).await;
    drop(agent);
    let dir = server.stop().await;
    let url = store.path().to_str().unwrap().to_owned();
    let server = TestServer::open(dir, |config| config.artifacts = Some(url)).await;
    wait_until_stored(&server, &id).await;
    assert!(store.path().join("jobs").join(&id).join("1-10/MANIFEST.json").exists());
    server.stop().await;
}

#[tokio::test]
async fn a_checkpoint_damaged_on_disk_is_not_uploaded_and_is_logged() {
    let (server, store) = TestServer::with_object_store().await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let start = agent.expect_start().await;
    let folder = |step: u64| write_checkpoint(start.job_dir.as_deref().unwrap(), step);
    for step in [10, 20] {
        fs::write(folder(step).join("state.json"), b"[]").unwrap();
    }
    let events = vec![running(100, 0), checkpoint(10), checkpoint(20)];
    agent.report(&start.attempt, Source::Rank(0), 0, events).await;
    wait_until("neither checkpoint waits for its upload", async || {
        stored_states(&server, &id).await == [Value::Null, Value::Null]
    })
    .await;
    let logs = async || server.get(&format!("/jobs/{id}/logs")).await.1.to_string();
    wait_until("the log reports both checkpoints", async || {
        let logs = logs().await;
        [10, 20].iter().all(|step| {
            logs.matches(&format!("checkpoint 1-{step} on the server's disk is damaged")).count() == 1
        })
    })
    .await;
    // The second checkpoint is written again.
    write_checkpoint(start.job_dir.as_deref().unwrap(), 20);
    agent.report(&start.attempt, Source::Rank(0), 3, vec![checkpoint(20)]).await;
    let expected = [json!("stored"), Value::Null];
    wait_until("the checkpoint is stored", async || stored_states(&server, &id).await == expected).await;
    // The next server remembers the damaged checkpoint, and does not log it again.
    drop(agent);
    let dir = server.stop().await;
    let url = store.path().to_str().unwrap().to_owned();
    let server = TestServer::open(dir, |config| config.artifacts = Some(url)).await;
    wait_until("the damaged checkpoint does not wait for its upload", async || {
        stored_states(&server, &id).await == expected
    })
    .await;
    let logs = server.get(&format!("/jobs/{id}/logs")).await.1.to_string();
    assert_eq!(logs.matches("checkpoint 1-10 on the server's disk is damaged").count(), 1, "{logs}");
    server.stop().await;
}

#[tokio::test]
async fn a_damaged_copy_on_disk_is_replaced_from_the_store() {
    let (server, store) = TestServer::with_object_store().await;
    let (mut agent, id, attempt, folder) = start_job_with_checkpoint(&server).await;
    wait_until_stored(&server, &id).await;
    let file = |name: &str| fs::read(folder.join(name)).unwrap_or_default();

    // A download restores a missing file.
    fs::remove_file(folder.join("state.json")).unwrap();
    assert_eq!(server.get(&format!("/checkpoints/{id}-1-10/state.json")).await, (200, json!({})));
    assert_eq!(file("state.json"), b"{}");
    // A fork gets the undamaged file.
    fs::write(folder.join("model.safetensors"), b"WEIGHTS").unwrap();
    let fork = server.create(&format!("/jobs/{id}/fork"), &json!({"set": {"priority": -1}})).await;
    let fork_folder = server.job_dir(fork["id"].as_str().unwrap()).join("checkpoints/1-10");
    assert_eq!(fs::read(fork_folder.join("model.safetensors")).unwrap(), b"weights");
    server.order(fork["id"].as_str().unwrap(), "cancel").await;

    // A rank sets a damaged checkpoint aside. The copy in the store stays.
    fs::rename(&folder, folder.with_file_name("aside")).unwrap();
    let removed = AttemptEvent::CheckpointRemoved { epoch: 1, step: 10 };
    agent.report(&attempt, Source::Rank(0), 2, vec![removed]).await;
    assert_eq!(stored_states(&server, &id).await, ["stored"]);
    assert!(store.path().join("jobs").join(&id).join("1-10/MANIFEST.json").exists());
    fs::rename(folder.with_file_name("aside"), &folder).unwrap();

    // The next attempt gets the undamaged file.
    fs::write(folder.join("model.safetensors"), b"WEIGHTS").unwrap();
    agent.end(&attempt, rank_killed(0)).await;
    agent.expect_start().await;
    assert_eq!(file("model.safetensors"), b"weights");
    let aside = folder.with_file_name("damaged-1-10");
    assert_eq!(fs::read(aside.join("model.safetensors")).unwrap(), b"WEIGHTS");
    let logs = server.get(&format!("/jobs/{id}/logs")).await.1.to_string();
    assert!(logs.contains("it is set aside and fetched from the object store"), "{logs}");
    server.stop().await;
}

#[tokio::test]
async fn a_job_without_any_of_its_checkpoints_fails_instead_of_restarting() {
    let (server, store) = TestServer::with_object_store().await;
    let mut agent = Agent::join_with_dataset(&server, 2).await;
    let id = server.submit(|spec| spec["recovery"] = json!({"max_restarts": 1})).await.id.to_string();
    let start = agent.expect_start().await;
    let job_dir = PathBuf::from(start.job_dir.as_deref().unwrap());
    let folders = [write_checkpoint(&job_dir, 10), write_checkpoint(&job_dir, 20)];
    let events = vec![running(100, 0), checkpoint(10), checkpoint(20)];
    agent.report(&start.attempt, Source::Rank(0), 0, events).await;
    wait_until_stored(&server, &id).await;
    // Deletes both copies: on the disk and in the store.
    for folder in folders {
        fs::remove_dir_all(folder).unwrap();
    }
    fs::remove_dir_all(store.path().join("jobs").join(&id)).unwrap();
    agent.end(&start.attempt, rank_killed(0)).await;
    let job = server.wait_for_state(&id, lockstep_protocol::JobState::Failed).await;
    let reason = job.reason.unwrap_or_default();
    assert!(reason.contains("no valid checkpoint is left to continue from"), "{reason}");
    assert_eq!(job.attempt, 1, "no second attempt was started");
    let listed = server.get_ok(&format!("/jobs/{id}/checkpoints")).await;
    assert_eq!(listed["checkpoints"][0]["missing"], true, "{listed}");
    server.stop().await;
}

#[tokio::test]
async fn an_undeletable_object_does_not_delay_others() {
    let (server, store) = TestServer::with_object_store().await;
    let (mut agent, id, api) = start_uploaded_job(&server).await;
    wait_until_stored(&server, &id).await;
    // A file replaces the folder of checkpoint 1-10, so that its objects cannot be deleted.
    let folder = store.path().join("jobs").join(&id);
    fs::remove_dir_all(folder.join("1-10")).unwrap();
    fs::write(folder.join("1-10"), "in the way").unwrap();
    upload_three_more(&server, &mut agent, &id, &api).await;
    wait_until("checkpoint 1-20 is deleted", async || !folder.join("1-20").exists()).await;
    assert!(folder.join("1-10").exists());
    // The deletion succeeds once the file is removed.
    fs::remove_file(folder.join("1-10")).unwrap();
    wait_until("nothing is left to delete", async || {
        server.query_number("SELECT count(*) FROM checkpoint_copies WHERE location NOT LIKE 'agent:%'").await
            == 2
    })
    .await;
    server.stop().await;
}

#[tokio::test]
async fn an_empty_folder_is_not_mistaken_for_the_store() {
    let mount = tempfile::tempdir().unwrap();
    let (directory, elsewhere) = (mount.path().join("artifacts"), mount.path().join("elsewhere"));
    let set_store =
        |config: &mut ServeConfig| config.artifacts = Some(directory.to_str().unwrap().to_owned());
    let server = TestServer::with(set_store).await;
    let (mut agent, id, api) = start_uploaded_job(&server).await;
    wait_until_stored(&server, &id).await;
    agent.end(&api.attempt, Ending::Succeeded { step: 100 }).await;

    // The store's disk is unmounted while the server runs. The checkpoints are not lost.
    fs::rename(&directory, &elsewhere).unwrap();
    fs::create_dir(&directory).unwrap();
    fs::remove_dir_all(server.job_dir(&id).join("checkpoints")).unwrap();
    let file = format!("/checkpoints/{id}-1-10/state.json");
    let (status, problem) = server.get(&file).await;
    assert_eq!(status, 503, "{problem}");
    assert_eq!(stored_states(&server, &id).await, ["stored"]);
    let database = server.database.clone();
    let dir = server.stop().await;

    // A server does not start with the empty folder.
    let mut config = config(&dir);
    config.database = Some(database);
    set_store(&mut config);
    let message = start_error(config).await.to_string();
    assert!(
        message.contains("LOCKSTEP.json is missing") && message.contains("is the disk mounted?"),
        "{message}"
    );

    // The server recognises the same store at another path.
    let moved = elsewhere.to_str().unwrap().to_owned();
    let server = TestServer::open(dir, |config| config.artifacts = Some(moved)).await;
    assert_eq!(server.get(&file).await, (200, json!({})));
    server.stop().await;
}

#[tokio::test]
async fn a_store_of_another_server_is_adopted_only_on_request() {
    let store = tempfile::tempdir().unwrap();
    let url = store.path().to_str().unwrap().to_owned();
    let dir = TestServer::with(|config| config.artifacts = Some(url.clone())).await.stop().await;
    let marker = || fs::read_to_string(store.path().join("LOCKSTEP.json")).unwrap();
    let before = marker();
    let start_error_in = |dir: &tempfile::TempDir| {
        let mut config = config(dir);
        config.database = database_of(dir);
        config.artifacts = Some(url.clone());
        start_error(config)
    };
    let other_dir = tempfile::tempdir().unwrap();
    let error = start_error_in(&other_dir).await.to_string();
    assert!(error.contains("belongs to another server") && error.contains("--artifacts-adopt"), "{error}");
    assert_eq!(marker(), before, "a refused start changes nothing");
    let adopt = |config: &mut ServeConfig| {
        config.artifacts = Some(url.clone());
        config.artifacts_adopt = true;
    };
    let other_dir = TestServer::open(other_dir, adopt).await.stop().await;
    TestServer::open(other_dir, |config| config.artifacts = Some(url.clone())).await.stop().await;
    let error = start_error_in(&dir).await.to_string();
    assert!(error.contains("is not the store that has this database's checkpoints"), "{error}");
    assert!(error.contains("--artifacts-adopt"), "{error}");
    let after = marker();
    TestServer::open(dir, adopt).await.stop().await;
    // With the option, a server takes over a store that another server has adopted.
    assert_ne!(marker(), after);
}

/// The database was restored from a backup that is older than the job's newest checkpoint.
#[tokio::test]
async fn an_adopted_store_s_newer_checkpoints_are_used() {
    let (server, store) = TestServer::with_object_store().await;
    let (mut agent, id, attempt, _) = start_job_with_checkpoint(&server).await;
    write_checkpoint(server.job_dir(&id), 20);
    agent.report(&attempt, Source::Rank(0), 2, vec![checkpoint(20)]).await;
    let stored = ["stored", "stored"];
    wait_until("both checkpoints are stored", async || stored_states(&server, &id).await == stored).await;
    drop(agent);
    let url = store.path().to_str().unwrap().to_owned();
    // The backup was made while a file of the first checkpoint was uploaded.
    let damaged = format!(
        "INSERT INTO checkpoint_copies (checkpoint_id, location, state) VALUES ('{id}-1-10', 'server', 'damaged')"
    );
    for change in [
        "DELETE FROM checkpoint_copies WHERE checkpoint_id LIKE '%-20' OR location LIKE 'agent:%'",
        "UPDATE checkpoint_copies SET state = 'copying', manifest = NULL, parts = 'a b'",
        &damaged,
        "DELETE FROM checkpoints WHERE step = 20",
        "UPDATE artifact_stores SET marker = 'restored ' || marker",
    ] {
        server.execute(change).await;
    }
    fs::remove_dir_all(server.job_dir(&id)).unwrap();
    let dir = server.stop().await;
    let adopt = |config: &mut ServeConfig| (config.artifacts, config.artifacts_adopt) = (Some(url), true);
    let server = TestServer::open(dir, adopt).await;
    assert_eq!(server.checkpoint_steps(&id).await, [20, 10]);
    assert_eq!(stored_states(&server, &id).await, stored);
    for kept in ["state = 'damaged' AND location = 'server'", "state = 'complete' AND parts = 'a b'"] {
        let query = format!("UPDATE checkpoint_copies SET parts = parts WHERE {kept}");
        assert_eq!(server.execute(&query).await, 1, "{kept}");
    }
    let mut agent = Agent::connect(&server, hello("a", 2, vec![attempt.clone()])).await.unwrap();
    agent.end(&attempt, rank_killed(0)).await;
    assert_eq!(agent.expect_start().await.resume.as_deref(), Some("1-20"));
    server.stop().await;
}
