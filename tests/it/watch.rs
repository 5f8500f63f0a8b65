//! `lockstep watch` and `queue` on a terminal and in a pipe: waiting jobs, widths, and a server that is restarted.

use crate::{
    server::{Agents, Folder, LOCKSTEP, Server, Terminated, lockstep, wait_until},
    specs,
};
use reqwest::Method;
use serde_json::json;
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

/// Waits until a file has these texts in this order, and returns its content.
async fn wait_for_text(file: &Path, words: &[&str]) -> String {
    let text = || fs::read_to_string(file).unwrap_or_default();
    let has_words = || {
        let text = text();
        let mut rest = text.as_str();
        words.iter().all(|word| rest.split_once(word).map(|(_, after)| rest = after).is_some())
    };
    wait_until(&format!("{words:?}"), has_words, text).await;
    text()
}

#[tokio::test]
async fn a_waiting_job_shows_its_place_and_reason_and_their_changes() {
    let server = Server::start_training(160, 16).await;
    let holder = server.submit(&specs::short("holder", "fashion", 2, 1_000_000)).await;
    server.wait_for_job(&holder, "the job runs", |job| job["state"] == "running").await;
    let id = server.submit(&specs::short("waits", "fashion", 2, 5)).await;
    server.wait_for_job(&id, "the job has a place", |job| job["queue"]["place"] == 1).await;

    let folder = Folder::new();
    let watch = |name: &str, job: &str| {
        let out = folder.path().join(name);
        let mut command = lockstep();
        command.args(["watch", job]).envs(server.client_variables()).stderr(Stdio::null());
        command.stdout(fs::File::create(&out).expect("a file"));
        (out, Terminated(command.spawn().expect("lockstep")))
    };
    let (out, _watch) = watch("out", &id);
    let terminal = folder.path().join("terminal");
    // The same command on a terminal, where running jobs have a progress bar.
    let mut script = Command::new("script");
    script.args(["-qfec", &format!("{LOCKSTEP} watch {id}")]).arg(&terminal).envs(server.client_variables());
    script.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let _script = Terminated(script.spawn().expect("script runs"));
    let waits = "queued, place 1 in the queue: waits for 2 slots: 0 of 2 on";
    wait_for_text(&out, &[waits]).await;
    let shown = wait_for_text(&terminal, &[waits]).await;
    assert!(!shown.contains("0/0") && !shown.contains('\u{2588}'), "no bar without a total: {shown:?}");

    let urgent = specs::with(specs::short("urgent", "fashion", 2, 5), json!({"priority": 5}));
    let urgent = server.submit(&urgent).await;
    wait_for_text(&out, &[waits, "queued, place 2 in the queue: waits for 2 slots"]).await;
    server.order(&urgent, "cancel").await;
    wait_for_text(&out, &[waits, "place 2 in the queue", "queued, place 1 in the queue"]).await;
    server.order(&id, "pause").await;
    wait_for_text(&out, &["paused: paused on request"]).await;
    // A later `watch` shows the state at once, and prefers this job to a newer job of the same name that has ended.
    let namesake = server.submit(&specs::short("waits", "fashion", 2, 5)).await;
    server.order(&namesake, "cancel").await;
    let (late, _late_watch) = watch("late", "waits");
    wait_for_text(&late, &["paused: paused on request"]).await;
    server.order(&id, "cancel").await;
    let lines = wait_for_text(&out, &["paused on request", ": cancelled on request"]).await;
    let mut all: Vec<_> = lines.lines().collect();
    let count = all.len();
    all.dedup();
    assert_eq!(all.len(), count, "no line is repeated: {lines}");
    server.order(&holder, "cancel").await;
    server.wait_for_end(&holder).await;
    server.stop().await;
}

#[tokio::test]
async fn alerts_of_a_run_from_elsewhere_are_lines() {
    let server = Server::start_with(Agents::None).await;
    server.create("/runs", &json!({"id": "alerting", "name": "alerting"})).await;
    let folder = Folder::new();
    let (out, err) = (folder.path().join("out"), folder.path().join("err"));
    let mut watch = lockstep();
    watch.args(["watch", "alerting"]).envs(server.client_variables());
    watch.stdout(fs::File::create(&out).expect("a file")).stderr(fs::File::create(&err).expect("a file"));
    let _watch = Terminated(watch.spawn().expect("lockstep"));
    wait_for_text(&err, &["Ctrl-C ends this display"]).await;
    let alerts = json!([{"title": "loss", "text": "is\ninf", "level": "WARN"}, {"title": "half done"}]);
    for change in [json!({"summary": {"alerts": alerts}}), json!({"state": "succeeded"})] {
        let response = server.request(Method::PATCH, "/runs/alerting", Some(&change)).await;
        assert_eq!(response.status, 200, "{}", response.text);
    }
    wait_for_text(&out, &["warning: loss: is inf\n", "alert: half done\n", "succeeded"]).await;
    server.stop().await;
}

#[tokio::test]
async fn the_queue_shortens_names_on_a_terminal_and_not_in_a_pipe() {
    let server = Server::start_training_with(Agents::Local { cpu_slots: 1 }, 160, 16).await;
    let holder = server.submit(&specs::short("holder", "fashion", 1, 1_000_000)).await;
    server.wait_for_job(&holder, "the job runs", |job| job["state"] == "running").await;
    let long = format!("resnet-{}-seed-7", "with-a-long-name-".repeat(8));
    for name in [long.as_str(), "short"] {
        let id = server.submit(&specs::short(name, "fashion", 1, 5)).await;
        server.wait_for_job(&id, "the job has a place", |job| job["queue"]["place"].is_u64()).await;
    }
    assert!(server.cli(&["queue"]).ok().contains(&long), "full names in a pipe");
    let folder = Folder::new();
    let shown = |columns: u32| {
        let mut script = Command::new("script");
        let typed = format!("stty cols {columns}; {LOCKSTEP} queue");
        script.args(["-qec", &typed]).arg(folder.path().join("typescript")).envs(server.client_variables());
        let done = script.stdin(Stdio::null()).output().expect("script runs");
        String::from_utf8(done.stdout).expect("UTF-8")
    };
    let row = |columns| {
        let shown = shown(columns);
        let row = shown.lines().find(|line| line.starts_with("1 ")).expect("the row").trim_end().to_owned();
        assert!(row.contains("…") && row.contains("seed-7") && !row.contains(&long), "{shown}");
        (row.chars().count(), shown)
    };
    // Names are shortened to the terminal's width. A reason that does not fit into the row is on the next line.
    let (wide, shown_wide) = row(150);
    assert!((140..=150).contains(&wide), "{wide} of 150 columns: {shown_wide}");
    let (narrower, shown_narrower) = row(120);
    assert!((110..=120).contains(&narrower), "{narrower} of 120 columns: {shown_narrower}");
    assert!(shown_narrower.lines().any(|line| line.starts_with("  waits for 1 slot")), "{shown_narrower}");
    assert!(row(20).0 < narrower, "the minimum width");
    assert!(shown(400).contains(&long), "the full name fits");
    server.order(&holder, "cancel").await;
    server.stop().await;
}

#[tokio::test]
async fn an_unreachable_server_and_its_return_are_reported_once() {
    let mut server = Server::start_training_with(Agents::Separate { cpu_slots: 1 }, 160, 16).await;
    let id = server.submit(&specs::short("long", "fashion", 1, 1_000_000)).await;
    server.wait_for_job(&id, "the job trains", |job| job["step"].as_u64() > Some(0)).await;
    let folder = Folder::new();
    let follow = |name: &str, args: &[&str]| {
        let err = folder.path().join(name);
        let mut command = lockstep();
        command.args(args).envs(server.client_variables());
        command.stdout(fs::File::create(folder.path().join(format!("{name}.out"))).expect("a file"));
        let child = command.stderr(fs::File::create(&err).expect("a file")).spawn().expect("lockstep");
        (err, folder.path().join(format!("{name}.out")), Terminated(child))
    };
    let followers = [follow("watch", &["watch", &id]), follow("logs", &["logs", "-f", &id])];
    for (_, out, _) in &followers {
        wait_for_text(out, &["loss"]).await;
    }
    server.kill_serve();
    for (err, ..) in &followers {
        wait_for_text(err, &["the server does not answer; trying again"]).await;
    }
    server.start_serve().await;
    for (err, ..) in &followers {
        let text = wait_for_text(err, &["trying again", "the server answers again"]).await;
        assert_eq!(text.matches("does not answer").count(), 1, "{text}");
    }
    server.order(&id, "cancel").await;
    server.wait_for_end(&id).await;
    server.stop().await;
}
