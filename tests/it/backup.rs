//! A backup of a running server is restored to another server.

use crate::{
    pictures,
    server::{Agents, Server, number, turn},
    socket::stored,
    specs,
};
use serde_json::{Value, json};

#[tokio::test]
async fn a_backup_of_a_running_server_is_restored_to_another() {
    let _turn = turn().await;
    let server = Server::start().await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 64, 16)).await;
    let id = server.submit(&specs::short("kept", "fashion", 2, 8)).await;
    server.succeeded(&id).await;
    let file = server.folder().path().join("backup");
    let file = file.to_str().expect("UTF-8");
    let data = server.data_dir();
    let mut which = vec!["--data-dir", data.to_str().expect("UTF-8")];
    if let Some(url) = &server.database {
        which.extend(["--database", url]);
    }
    let response = server.cli(&[&["backup", "-o", file], &which[..]].concat());
    assert!(response.ok().contains("backed up 1 job"), "{}", response.stdout);
    // An older backup is replaced by whoever says so.
    let again = |more: &[&str]| server.cli(&[&["backup", "-o", file], more, &which[..]].concat());
    let kept = std::fs::read(file).expect("a backup");
    again(&[]).wrong(&[file, "exists already", "--force"]);
    assert_eq!(std::fs::read(file).expect("a backup"), kept);
    again(&["--force"]).ok();
    if server.database.is_none() {
        std::os::unix::fs::symlink(data.join("lockstep.db"), server.folder().path().join("link"))
            .expect("a link");
        for place in
            [data.join("lockstep.db"), data.join("lockstep.db-journal"), server.folder().path().join("link")]
        {
            let place = place.to_str().expect("UTF-8");
            server
                .cli(&[&["backup", "-o", place], &which[..]].concat())
                .wrong(&["is the database", "name another file"]);
        }
    }
    server
        .cli(&[&["backup", "-o", "/dev/null"], &which[..]].concat())
        .wrong(&["/dev/null", "name another file"]);
    // The server has the database: commands that would change it are refused.
    server.cli(&[&["migrate"], &which[..]].concat()).wrong(&["in use"]);
    server.cli(&[&["restore", file], &which[..]].concat()).wrong(&["in use"]);

    let mut other = Server::start_with(Agents::None).await;
    assert_eq!(other.end_serve(rustix::process::Signal::TERM).await.code(), Some(0));
    let elsewhere = other.data_dir().join("restored.db");
    let url = format!("sqlite://{}", elsewhere.display());
    let response: Value = other.cli(&["restore", file, "--database", &url, "--json"]).json();
    assert!(response["tables"].as_array().is_some_and(|t| t.iter().any(|t| t[0] == "events")), "{response}");
    other.cli(&["restore", file, "--database", &url]).wrong(&["is not empty"]);
    other.cli(&["migrate", "--database", &url]).ok();
    other.cli(&["backup", "-o", "x", "--database", "sqlite:///nowhere/x.db"]).wrong(&["/nowhere/x.db"]);
    std::fs::rename(data.join("jobs"), other.data_dir().join("jobs.new")).expect("the folders of jobs");
    std::fs::remove_dir_all(other.data_dir().join("jobs")).expect("none");
    std::fs::rename(other.data_dir().join("jobs.new"), other.data_dir().join("jobs")).expect("restored");
    other.database = Some(url);
    let events = stored(&server, &id).await;
    other.serve_again().await;
    assert_eq!(stored(&other, &id).await, events);
    assert_eq!(other.get("/jobs").await, server.get("/jobs").await);
    assert!(other.last_model(&id).await.len() > 1000, "with its checkpoints");
    other.stop().await;
    server.stop().await;
}

/// An older database gives numbers of attempts out again whose folders, records and checkpoints are still there.
#[tokio::test]
async fn after_a_restore_an_attempt_with_a_reused_number_is_new() {
    let _turn = turn().await;
    let mut server = Server::start().await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 640, 64)).await;
    let checkpoints = json!({"checkpoint": {"every_epochs": null, "every_steps": 20}});
    let id = server.submit(&specs::with(specs::short("again", "fashion", 2, 120), checkpoints)).await;
    server.job_when(&id, "it trains", |job| number(&job["step"]) > 20).await;
    assert_eq!(server.post(&format!("/jobs/{id}/pause"), &Value::Null).await.status, 202);
    server.job_when(&id, "it is paused", |job| job["state"] == "paused").await;
    let data = server.data_dir();
    let mut which = vec!["--data-dir", data.to_str().expect("UTF-8")];
    if let Some(url) = &server.database {
        which.extend(["--database", url]);
    }
    server.cli(&[&["backup", "-o", "older"], &which[..]].concat()).ok();
    assert_eq!(server.post(&format!("/jobs/{id}/resume"), &Value::Null).await.status, 202);
    server.succeeded(&id).await;
    let model = server.last_model(&id).await;

    assert_eq!(server.end_serve(rustix::process::Signal::TERM).await.code(), Some(0));
    let url = format!("sqlite://{}", data.join("restored.db").display());
    server.cli(&["restore", "older", "--database", &url]).ok();
    server.database = Some(url);
    server.serve_again().await;
    assert_eq!(server.job(&id).await["state"], "paused");
    assert_eq!(server.post(&format!("/jobs/{id}/resume"), &Value::Null).await.status, 202);
    server.succeeded(&id).await;
    let attempts = server.get(&format!("/jobs/{id}/attempts")).await;
    let states: Vec<_> =
        attempts["attempts"].as_array().expect("attempts").iter().map(|a| &a["state"]).collect();
    assert_eq!(states, ["paused", "succeeded"], "{attempts:#}");
    let folders = std::fs::read_dir(server.job_dir(&id).join("attempts")).expect("a folder");
    assert_eq!(folders.count(), 3, "each attempt has a folder of its own");
    assert!(server.last_model(&id).await == model, "the same weights");
    server.stop().await;
}
