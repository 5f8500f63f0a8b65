//! Damaged files of checkpoints on the server's disk: changed bytes of the same length, and read errors.

use crate::{
    agent::{checkpoint, running, start_job},
    artifacts::{start_job_with_checkpoint, wait_until_stored},
    gangs::rank_killed,
    test_server::TestServer,
    uploads::{AttemptApi, manifest},
};
use lockstep_protocol::agent::{AttemptRef, Ending, Source};
use serde_json::json;
use std::{fs, os::unix::fs::symlink, path::Path};

#[tokio::test]
async fn damaged_and_unreadable_files_are_not_sent() {
    let server = TestServer::new().await;
    let (_agent, id, _, folder) = start_job_with_checkpoint(&server).await;
    let weights = format!("/api/v1/checkpoints/{id}-1-10/model.safetensors");
    assert_eq!(server.get_text(&weights).await, (200, "weights".into()));

    fs::write(folder.join("model.safetensors"), b"wEights").unwrap();
    let assert_refused = async |request: reqwest::RequestBuilder, why: &str| {
        let (status, problem) = server.send(request).await;
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert_eq!((status, &problem["code"]), (422, &json!("checkpoint_damaged")), "{problem}");
        assert!(detail.contains(&format!("{id}-1-10")) && detail.contains(why), "{detail}");
    };
    let get = || server.http.get(server.url(&weights));
    assert_refused(get(), "its model.safetensors").await;
    // A part of a damaged file is not sent either, because the part's bytes cannot be verified.
    assert_refused(get().header("range", "bytes=0-0"), "its model.safetensors").await;
    // Other files of the checkpoint are sent.
    assert_eq!(server.get(&format!("/checkpoints/{id}-1-10/state.json")).await, (200, json!({})));

    fs::write(folder.join("model.safetensors"), b"weights").unwrap();
    assert_eq!(server.get_text(&weights).await, (200, "weights".into()));
    make_unreadable(&folder.join("model.safetensors"));
    assert_refused(get(), "its model.safetensors cannot be read").await;
    // A folder that cannot be read was not removed. Root can read every folder, but cannot follow a loop of links.
    fs::remove_dir_all(&folder).unwrap();
    symlink(folder.file_name().unwrap(), &folder).unwrap();
    for path in ["", "/model.safetensors"] {
        let (status, problem) = server.get(&format!("/checkpoints/{id}-1-10{path}")).await;
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert!(
            status == 503 && detail.contains("the server cannot read this checkpoint's files"),
            "{problem}"
        );
    }
    server.stop().await;
}

#[tokio::test]
async fn files_damaged_on_disk_are_read_from_the_object_store_if_intact() {
    let (server, store) = TestServer::with_object_store().await;
    let (_agent, id, _, folder) = start_job_with_checkpoint(&server).await;
    wait_until_stored(&server, &id).await;

    let weights = format!("/api/v1/checkpoints/{id}-1-10/model.safetensors");
    let on_disk = folder.join("model.safetensors");
    make_unreadable(&on_disk);
    assert_eq!(server.get_text(&weights).await, (200, "weights".into()));
    fs::write(&on_disk, b"wEights").unwrap();
    assert_eq!(server.get_text(&weights).await, (200, "weights".into()));
    assert_eq!(fs::read(&on_disk).unwrap(), b"weights");
    let aside = folder.with_file_name("damaged-1-10");
    assert_eq!(fs::read(aside.join("model.safetensors")).unwrap(), b"wEights");

    // Then the copy in the store is damaged, too.
    let copy = store.path().join("jobs").join(&id).join("1-10");
    let object = crate::artifacts::files_below(&copy).into_iter().find(|o| o.ends_with("model.safetensors"));
    fs::write(object.unwrap(), b"weIghts").unwrap();
    fs::write(&on_disk, b"wEights").unwrap();
    let (status, problem) = server.send(server.http.get(server.url(&weights))).await;
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert_eq!((status, &problem["code"]), (422, &json!("checkpoint_damaged")), "{problem}");
    assert!(detail.contains(&format!("checkpoint {id}-1-10 is damaged")), "{detail}");
    assert!(detail.contains("model.safetensors") && detail.contains("also in the object store"), "{detail}");
    server.stop().await;
}

/// Replaces a file so that reads fail with EIO, as for a bad sector.
fn make_unreadable(path: &Path) {
    fs::remove_file(path).unwrap();
    symlink("/proc/self/mem", path).unwrap();
}

#[tokio::test]
async fn a_machine_with_its_own_disk_continues_from_the_previous_checkpoint() {
    let (server, mut agent, id, attempt) = start_job(|_| {}).await;
    let token = server.agent_token("a").await;
    let api = |attempt: &AttemptRef| AttemptApi::new(&server, &token, "id-a", attempt);
    api(&attempt).report_own_disk().await;
    let events = vec![running(100, 0), checkpoint(10), checkpoint(20)];
    agent.report(&attempt, Source::Rank(0), 0, events).await;
    for step in [10, 20] {
        assert_eq!(api(&attempt).upload(&format!("1-{step}"), manifest(1, step)).await.0, 204);
    }
    agent.end(&attempt, rank_killed(0)).await;

    // The machine has lost its disk, and the server's copies are damaged one after the other.
    let folder = server.job_dir(&id).join("checkpoints");
    for (step, status, code) in [(20, 422, "checkpoint_damaged"), (10, 409, "conflict")] {
        let start = agent.expect_start().await;
        assert_eq!(start.resume, Some(format!("1-{step}")));
        fs::write(folder.join(format!("1-{step}/model.safetensors")), b"wEights").unwrap();
        let file = format!("/checkpoints/{id}-1-{step}/model.safetensors");
        let (actual, problem) = api(&start.attempt).request("GET", &file, vec![]).await;
        assert_eq!((actual, &problem["code"]), (status, &json!(code)), "{problem}");
        let retriable = status == 422;
        agent.end(&start.attempt, Ending::Failed { reason: "damaged".to_owned().into(), retriable }).await;
    }
    assert!(folder.join("damaged-1-20").exists() && folder.join("1-10").exists());
    assert_eq!(server.checkpoint_steps(&id).await, [10]);
    let logs = server.get(&format!("/jobs/{id}/logs")).await.1.to_string();
    assert!(logs.contains("it is set aside and the job continues from the previous one"), "{logs}");
    server.stop().await;
}
