//! A backup of a running server is restored to another server.

use crate::{
    server::{Agents, Server, number},
    socket::stored,
    specs,
};
use serde_json::{Value, json};

/// The options that name a server's database.
fn database_options(server: &Server) -> Vec<String> {
    let mut options = vec!["--data-dir".to_owned(), server.data_dir().display().to_string()];
    if let Some(url) = &server.database {
        options.extend(["--database".to_owned(), url.clone()]);
    }
    options
}

#[tokio::test]
async fn a_backup_of_a_running_server_is_restored_to_another() {
    let server = Server::start_training(64, 16).await;
    let id = server.train(&specs::short("kept", "fashion", 2, 8)).await;
    let file = server.folder().path().join("backup");
    let file = file.to_str().expect("UTF-8");
    let data = server.data_dir();
    let options = database_options(&server);
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    server.cli(&[&["backup", "-o", file], &options[..]].concat()).assert_prints(&["backed up 1 job"]);
    // An existing backup is replaced only with --force.
    let repeat = |more: &[&str]| server.cli(&[&["backup", "-o", file], more, &options[..]].concat());
    let first_backup = std::fs::read(file).expect("a backup");
    repeat(&[]).assert_usage_error(&[file, "exists already", "--force"]);
    assert_eq!(std::fs::read(file).expect("a backup"), first_backup);
    repeat(&["--force"]).ok();
    if server.database.is_none() {
        std::os::unix::fs::symlink(data.join("lockstep.db"), server.folder().path().join("link"))
            .expect("a link");
        for path in
            [data.join("lockstep.db"), data.join("lockstep.db-journal"), server.folder().path().join("link")]
        {
            let path = path.to_str().expect("UTF-8");
            server
                .cli(&[&["backup", "-o", path], &options[..]].concat())
                .assert_usage_error(&["is the database", "name another file"]);
        }
    }
    server
        .cli(&[&["backup", "-o", "/dev/null"], &options[..]].concat())
        .assert_usage_error(&["/dev/null", "name another file"]);
    // While the server uses the database, commands that would change it are refused.
    server.cli(&[&["migrate"], &options[..]].concat()).assert_usage_error(&["in use"]);
    server.cli(&[&["restore", file], &options[..]].concat()).assert_usage_error(&["in use"]);

    let mut other = Server::start_with(Agents::None).await;
    assert_eq!(other.stop_serve(rustix::process::Signal::TERM).await.code(), Some(0));
    let elsewhere = other.data_dir().join("restored.db");
    let url = format!("sqlite://{}", elsewhere.display());
    let restored = other.cli(&["restore", file, "--database", &url, "--json"]);
    for words in ["has a machine `local`, it stays offline", "`datasets/uploads` to its old absolute path"] {
        assert!(restored.stderr.contains(words), "{words} in {}", restored.stderr);
    }
    let restored: Value = restored.json();
    assert!(restored["tables"].as_array().is_some_and(|t| t.iter().any(|t| t[0] == "events")), "{restored}");
    other.cli(&["restore", file, "--database", &url]).assert_usage_error(&["is not empty"]);
    other.cli(&["restore", "nofile", "--database", &url]).assert_usage_error(&["nofile does not exist"]);
    other.cli(&["migrate", "--database", &url]).ok();
    other
        .cli(&["backup", "-o", "x", "--database", "sqlite:///nowhere/x.db"])
        .assert_usage_error(&["/nowhere/x.db"]);
    std::fs::rename(data.join("jobs"), other.data_dir().join("jobs.new")).expect("the folders of jobs");
    std::fs::remove_dir_all(other.data_dir().join("jobs")).expect("the empty folder is deleted");
    std::fs::rename(other.data_dir().join("jobs.new"), other.data_dir().join("jobs"))
        .expect("the folders of jobs");
    other.database = Some(url);
    let events = stored(&server, &id).await;
    other.start_serve().await;
    assert_eq!(stored(&other, &id).await, events);
    assert_eq!(other.get("/jobs").await, server.get("/jobs").await);
    assert!(other.last_model(&id).await.len() > 1000, "the checkpoints are there");
    other.stop().await;
    server.stop().await;
}

/// A restored database reuses numbers of attempts whose folders, records and checkpoints still exist.
#[tokio::test]
async fn after_a_restore_an_attempt_with_a_reused_number_is_new() {
    let mut server = Server::start_slow_training(640, 64).await;
    let checkpoints = json!({"checkpoint": {"every_epochs": null, "every_steps": 20}});
    let id = server.submit(&specs::with(specs::short("again", "fashion", 2, 120), checkpoints)).await;
    server.wait_for_job(&id, "the job trains", |job| number(&job["step"]) > 20).await;
    server.cli(&["pause", &id]).ok();
    let options = database_options(&server);
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    server.cli(&[&["backup", "-o", "older"], &options[..]].concat()).ok();
    server.order(&id, "resume").await;
    server.wait_for_success(&id).await;
    let model = server.last_model(&id).await;

    assert_eq!(server.stop_serve(rustix::process::Signal::TERM).await.code(), Some(0));
    let url = format!("sqlite://{}", server.data_dir().join("restored.db").display());
    server.cli(&["restore", "older", "--database", &url]).ok();
    server.database = Some(url);
    server.start_serve().await;
    assert_eq!(server.job(&id).await["state"], "paused");
    server.order(&id, "resume").await;
    server.wait_for_success(&id).await;
    let attempts = server.attempts(&id).await;
    let states: Vec<_> = attempts.iter().map(|attempt| &attempt["state"]).collect();
    assert_eq!(states, ["paused", "succeeded"], "{attempts:#?}");
    let folders = std::fs::read_dir(server.job_dir(&id).join("attempts")).expect("a folder");
    assert_eq!(
        folders.count(),
        3,
        "attempt 2 from before the restore, and attempt 2 from after it, have separate folders"
    );
    assert!(server.last_model(&id).await == model, "the same weights");
    server.stop().await;
}
