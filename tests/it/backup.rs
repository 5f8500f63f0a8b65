//! A backup of a running server, restored into another one that is equal.

use crate::{
    pictures,
    server::{Agents, Server, turn},
    socket::stored,
    specs,
};
use serde_json::Value;

#[tokio::test]
async fn a_backup_of_a_running_server_is_restored_for_another() {
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
    again(&[]).wrong(&[file, "is there already", "--force"]);
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
