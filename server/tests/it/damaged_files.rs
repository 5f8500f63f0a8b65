//! Downloads of checkpoints' files that have as many bytes as were written, and not the same ones.

use crate::{
    agent::{Agent, running},
    artifacts::{on_disk, states, until},
    test_server::TestServer,
    uploads::checkpoint,
};
use lockstep_protocol::agent::Source;
use serde_json::json;
use std::{fs, path::PathBuf};

#[tokio::test]
async fn damaged_bytes_are_not_sent() {
    let server = TestServer::new().await;
    let mut agent = Agent::with_pictures(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let start = agent.started().await;
    let folder = on_disk(start.job_dir.as_deref().unwrap(), 10);
    agent.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    let weights = format!("/api/v1/checkpoints/{id}-1-10/model.safetensors");
    assert_eq!(server.text(&weights).await, (200, "weights".into()));

    fs::write(folder.join("model.safetensors"), b"wEights").unwrap();
    let refused = async |request: reqwest::RequestBuilder| {
        let (status, problem) = server.send(request).await;
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert_eq!((status, &problem["code"]), (422, &json!("checkpoint_damaged")), "{problem}");
        assert!(
            detail.contains(&format!("{id}-1-10")) && detail.contains("its model.safetensors"),
            "{detail}"
        );
    };
    let get = || server.http.get(server.url(&weights));
    refused(get()).await;
    // A part of it may be as it was, and is not known to be.
    refused(get().header("range", "bytes=0-0")).await;
    // The other files are what they were.
    assert_eq!(server.get(&format!("/checkpoints/{id}-1-10/state.json")).await, (200, json!({})));

    fs::write(folder.join("model.safetensors"), b"weights").unwrap();
    assert_eq!(server.text(&weights).await, (200, "weights".into()));
    server.stop().await;
}

#[tokio::test]
async fn the_object_store_has_the_bytes_that_the_disk_has_lost_unless_it_is_damaged_too() {
    let kept = tempfile::tempdir().unwrap();
    let directory = kept.path().to_str().unwrap().to_owned();
    let server = TestServer::with(|config| config.artifacts = Some(directory)).await;
    let mut agent = Agent::with_pictures(&server, 2).await;
    let id = server.submit(|_| {}).await.id.to_string();
    let start = agent.started().await;
    let job_dir = PathBuf::from(start.job_dir.as_deref().unwrap());
    let folder = on_disk(&job_dir, 10);
    agent.report(&start.attempt, Source::Rank(0), 0, vec![running(100, 0), checkpoint(10)]).await;
    until("it is stored", async || states(&server, &id).await == ["stored"]).await;

    let weights = format!("/api/v1/checkpoints/{id}-1-10/model.safetensors");
    fs::write(folder.join("model.safetensors"), b"wEights").unwrap();
    assert_eq!(server.text(&weights).await, (200, "weights".into()));
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"weights");
    assert_eq!(fs::read(job_dir.join("checkpoints/damaged-1-10/model.safetensors")).unwrap(), b"wEights");

    // In the store, too.
    let place = kept.path().join("jobs").join(&id).join("1-10");
    let object = crate::artifacts::files_below(&place).into_iter().find(|o| o.ends_with("model.safetensors"));
    fs::write(object.unwrap(), b"weIghts").unwrap();
    fs::write(folder.join("model.safetensors"), b"wEights").unwrap();
    let (status, problem) = server.send(server.http.get(server.url(&weights))).await;
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert_eq!((status, &problem["code"]), (422, &json!("checkpoint_damaged")), "{problem}");
    assert!(detail.contains(&format!("checkpoint {id}-1-10 is damaged")), "{detail}");
    assert!(
        detail.contains("model.safetensors") && detail.contains("as the object store has it"),
        "{detail}"
    );
    server.stop().await;
}
