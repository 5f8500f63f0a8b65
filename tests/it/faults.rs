//! A killed rank: its job restarts from the newest checkpoint, or fails if no restart is allowed, and every interface names the reason.
//! `tests/faults` checks that restarts lose nothing and change no weights.

use crate::{
    server::{Server, number, signal},
    socket::{Socket, is_metric, last_step, states, stored},
    specs,
};
use lockstep_protocol::JobState::{Queued, Restarting, Running, Starting, Succeeded};
use rustix::process::Signal;
use serde_json::{Value, json};

const STEPS: u64 = 160;
/// Steps from one checkpoint to the next.
const CHECKPOINT_STEPS: u64 = 20;

/// A job of 40 steps per epoch with checkpoints, long enough that a test can kill its ranks.
fn spec(name: &str, max_restarts: u32) -> Value {
    specs::with(
        specs::short(name, "fashion", 2, STEPS),
        json!({
            "checkpoint": {"every_epochs": null, "every_steps": CHECKPOINT_STEPS},
            "recovery": {"max_restarts": max_restarts},
        }),
    )
}

/// Kills a rank after a checkpoint and this step. Returns the job's stream.
async fn kill_rank(server: &Server, id: &str, rank: u32, step: u64) -> Socket {
    let mut socket = Socket::of_job(server, id, 0).await;
    socket.until(|f| f["type"] == "checkpoint").await;
    socket.until(|f| is_metric(f, "loss") && last_step(f) >= step).await;
    let ranks = server.ranks(id);
    assert_eq!(ranks.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [0, 1]);
    signal(ranks[rank as usize].1.pid, Signal::KILL);
    socket
}

#[tokio::test]
async fn a_killed_rank_restarts_its_job_from_the_newest_checkpoint_or_fails_it() {
    let server = Server::start_training(640, 64).await;
    let id = server.submit(&spec("disturbed", 3)).await;
    kill_rank(&server, &id, 1, 70).await.read_to_end().await;
    let job = server.wait_for_success(&id).await;
    assert_eq!(number(&job["attempt"]), 2);

    let events = stored(&server, &id).await;
    let states = states(&events);
    let (first, rest) = states.split_at(4);
    assert_eq!(first, [Queued, Starting, Running, Restarting]);
    assert_eq!(rest.last(), Some(&Succeeded), "{states:?}");
    let plan = events.iter().rfind(|e| e["type"] == "plan").expect("the second attempt's plan");
    let start_step = number(&plan["start_step"]);
    assert!((CHECKPOINT_STEPS..STEPS).contains(&start_step), "{plan}");
    assert!(start_step.is_multiple_of(CHECKPOINT_STEPS), "{plan}");
    let restarting = events.iter().find(|e| e["state"] == "restarting").expect("a restart");
    let reason = restarting["reason"].as_str().expect("a reason");
    assert!(reason.contains("rank 1 was killed by signal 9 at step"), "{reason}");
    let (_, expected_start) = reason.rsplit_once("; attempt 2 starts from step ").expect(reason);
    // A checkpoint that was being written when the rank was killed may be reported later.
    assert!(expected_start.parse::<u64>().expect(reason) <= start_step, "{reason}, not from {start_step}");
    // The reason why the first attempt ended is kept after the second has succeeded.
    let attempts = server.attempts(&id).await;
    let [first, second] = &attempts[..] else { panic!("{attempts:#?}") };
    assert_eq!((&first["state"], &second["state"]), (&json!("failed"), &json!("succeeded")));
    let why = &first["reason"];
    assert_eq!((&why["code"], &why["rank"], &why["signal"]), (&json!("rank_killed"), &json!(1), &json!(9)));
    assert!(number(&why["step"]) >= start_step, "{why}");
    let checkpoint = second["checkpoint"].as_str().unwrap_or_default();
    assert!(checkpoint.ends_with(&format!("-{start_step}")), "{second}");
    server.cli(&["show", &id]).assert_prints(&["rank 1 was killed by signal 9", "attempt 2"]);
    let log = server.cli(&["logs", &id]).ok().to_owned();
    let line = "\nattempt 2 begins; attempt 1 ended: rank 1 was killed by signal 9";
    assert_eq!(log.matches(line).count(), 1, "{log}");
    let shown = server.cli(&["show", &id, "--json"]).json();
    assert_eq!((&shown["state"], &shown["attempts"]), (&json!("succeeded"), &json!(attempts)));
    for attempt in [1, 2] {
        assert!(server.attempt_dir(&id, attempt).join("rank.0.log").exists(), "log of attempt {attempt}");
    }

    // Without restarts the job fails.
    let id = server.submit(&spec("no-second-chance", 0)).await;
    kill_rank(&server, &id, 0, 45).await;
    let reason = server.wait_for_failure(&id).await;
    assert!(reason.contains("rank 0 was killed by signal 9 at step"), "{reason}");
    assert!(reason.contains("max_restarts"), "{reason}");
    server.until("the other rank has ended, too", async |s: &Server| s.ranks(&id).is_empty()).await;
    assert!(!server.checkpoints(&id).await.is_empty(), "the checkpoints are kept");
    server.stop().await;
}
