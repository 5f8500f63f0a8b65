//! Killed processes: nothing is lost or reported twice, and no process is left.

use crate::{
    server::{Server, number, signal},
    socket::{Socket, assert_unbroken, is_end, is_metric, last_step, states, stored},
    specs,
};
use lockstep_protocol::JobState::{Queued, Restarting, Running, Starting, Succeeded};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{collections::BTreeSet, fs};

const STEPS: u64 = 160;
/// Steps from one checkpoint to the next.
const CHECKPOINT_STEPS: u64 = 20;

/// A job with checkpoints, long enough that a test can kill its processes.
fn spec(name: &str, max_restarts: u32) -> Value {
    specs::with(
        specs::short(name, "fashion", 2, STEPS),
        json!({
            "checkpoint": {"every_epochs": null, "every_steps": CHECKPOINT_STEPS},
            "recovery": {"max_restarts": max_restarts},
        }),
    )
}

/// A server whose jobs have 40 steps per epoch, so that restarts also happen within an epoch.
async fn server() -> Server {
    Server::start_training(640, 64).await
}

/// Returns a stream that has read `steps` steps of both ranks and a checkpoint.
async fn read_until_step(server: &Server, id: &str, steps: u64) -> Socket {
    let mut socket = Socket::of_job(server, id, 0).await;
    socket.until(|f| f["type"] == "checkpoint").await;
    for rank in 0..2 {
        let seen = |f: &Value| is_metric(f, "loss") && f["rank"] == rank && last_step(f) >= steps;
        if !socket.frames.iter().any(seen) {
            socket.until(seen).await;
        }
    }
    socket
}

/// Asserts that every rank has reported every step in some attempt, and no step twice in one attempt.
async fn assert_every_step(server: &Server, id: &str) {
    let points = server.points(id, "loss").await;
    let distinct: BTreeSet<_> = points.iter().map(|p| (p.attempt, p.rank, p.step)).collect();
    assert_eq!(distinct.len(), points.len(), "a step of a rank twice in one attempt");
    for rank in 0..2 {
        let steps: BTreeSet<_> = points.iter().filter(|p| p.rank == rank).map(|p| p.step).collect();
        assert_eq!(steps, (1..=STEPS).collect(), "steps of rank {rank}");
    }
}

#[tokio::test]
async fn a_killed_rank_restarts_its_job_from_the_newest_checkpoint_or_fails_it() {
    let server = server().await;
    let undisturbed = server.train(&spec("disturbed", 3)).await;

    let id = server.submit(&spec("disturbed", 3)).await;
    let mut socket = read_until_step(&server, &id, 70).await;
    let (_, rank) = server.ranks(&id).into_iter().find(|(rank, _)| *rank == 1).expect("rank 1 is alive");
    signal(rank.pid, Signal::KILL);
    socket.read_to_end().await;
    let job = server.wait_for_success(&id).await;
    assert_eq!(number(&job["attempt"]), 2);

    let events = stored(&server, &id).await;
    let states = states(&events);
    let (first, rest) = states.split_at(4);
    assert_eq!(first, [Queued, Starting, Running, Restarting]);
    assert_eq!(rest.last(), Some(&Succeeded), "{states:?}");
    let restarting = events.iter().find(|e| e["state"] == "restarting").expect("a restart");
    let reason = restarting["reason"].as_str().expect("a reason");
    for words in ["rank 1 was killed by signal 9 at step", "attempt 2 starts from step"] {
        assert!(reason.contains(words), "{reason}");
    }
    let plan = events.iter().rfind(|e| e["type"] == "plan").expect("the second attempt's plan");
    let start_step = number(&plan["start_step"]);
    assert!((CHECKPOINT_STEPS..STEPS).contains(&start_step), "{plan}");
    assert!(start_step.is_multiple_of(CHECKPOINT_STEPS), "{plan}");
    assert!(reason.contains(&format!("starts from step {start_step}")), "{reason}; {plan}");
    let points = server.points(&id, "loss").await;
    let steps_of_second: Vec<_> =
        points.iter().filter(|p| (p.attempt, p.rank) == (2, 0)).map(|p| p.step).collect();
    assert_eq!(steps_of_second, (start_step + 1..=STEPS).collect::<Vec<_>>());
    assert_every_step(&server, &id).await;
    assert!(
        server.last_model(&id).await == server.last_model(&undisturbed).await,
        "a restart from a checkpoint does not change a bit of the weights"
    );
    // The reason why the first attempt ended is kept after the second has succeeded.
    let attempts = server.attempts(&id).await;
    let [first, second] = &attempts[..] else { panic!("{attempts:#?}") };
    assert_eq!((&first["state"], &second["state"]), (&json!("failed"), &json!("succeeded")));
    let why = &first["reason"];
    assert_eq!((&why["code"], &why["rank"], &why["signal"]), (&json!("rank_killed"), &json!(1), &json!(9)));
    assert!(number(&why["step"]) >= start_step, "{why}");
    assert!(
        second["checkpoint"].as_str().is_some_and(|c| c.ends_with(&format!("-{start_step}"))),
        "{second}"
    );
    let shown = server.cli(&["show", &id]).ok().to_owned();
    assert!(shown.contains("rank 1 was killed by signal 9") && shown.contains("attempt 2"), "{shown}");
    let log = server.cli(&["logs", &id]).ok().to_owned();
    assert_eq!(
        log.matches("\nattempt 2 begins; attempt 1 ended: rank 1 was killed by signal 9").count(),
        1,
        "{log}"
    );
    let shown = server.cli(&["show", &id, "--json"]).json();
    assert_eq!((&shown["state"], &shown["attempts"]), (&json!("succeeded"), &json!(attempts)));
    // Both attempts' logs are kept.
    for attempt in [1, 2] {
        let is_kept = fs::read_dir(server.job_dir(&id).join("attempts")).expect("a folder").any(|folder| {
            let folder = folder.expect("a folder").path();
            let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(&format!("{attempt}-")) && folder.join("rank.0.log").exists()
        });
        assert!(is_kept, "log of attempt {attempt}");
    }

    // Without restarts the job fails.
    let id = server.submit(&spec("no-second-chance", 0)).await;
    read_until_step(&server, &id, 45).await;
    let ranks = server.ranks(&id);
    assert_eq!(ranks.len(), 2, "{ranks:?}");
    signal(ranks[0].1.pid, Signal::KILL);
    let reason = server.wait_for_failure(&id).await;
    assert!(reason.contains("rank 0 was killed by signal 9 at step"), "{reason}");
    assert!(reason.contains("max_restarts"), "{reason}");
    server.until("the other rank has ended, too", async |s: &Server| s.ranks(&id).is_empty()).await;
    assert!(!server.checkpoints(&id).await.is_empty(), "the checkpoints are kept");
    server.stop().await;
}

#[tokio::test]
async fn a_job_continues_while_its_server_restarts() {
    let mut server = server().await;
    let id = server.submit(&spec("orphaned", 3)).await;
    let seen = read_until_step(&server, &id, 60).await.drop_connection();
    let ranks = server.ranks(&id);
    server.kill_serve();

    // The ranks continue without the server: their logs grow.
    let log = server.attempt_dir(&id, 1).join("rank.1.log");
    let length = || std::fs::metadata(&log).map_or(0, |m| m.len());
    let length_at_kill = length();
    server.until("a rank trains without a server", async |_: &Server| length() > length_at_kill).await;
    server.start_serve().await;

    let since = seen.last().map_or(0, |e| number(&e["seq"]));
    let mut socket = Socket::of_job(&server, &id, since).await;
    socket.read_to_end().await;
    let job = server.wait_for_success(&id).await;
    assert_eq!(number(&job["attempt"]), 1, "the same attempt, taken over: {job:#}");
    assert!(ranks.len() == 2, "{ranks:?}");

    // All events that the stream sent before and after the restart are stored, without gaps.
    let all = stored(&server, &id).await;
    assert_unbroken(&all, 0);
    let mut received = seen;
    received.extend(socket.events());
    let end = all.iter().position(is_end).expect("an end") + 1;
    assert_eq!(received, all[..end]);
    assert_every_step(&server, &id).await;
    server.stop().await;
}
