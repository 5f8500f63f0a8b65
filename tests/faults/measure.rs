//! The time from `kill -9` of ranks until the job trains again, as the REST interface shows it, and the cost of checkpoints:
//! default settings, the bundled pictures, several runs.

use crate::{
    judge::ReportRow,
    pictures,
    server::{Agents, Server, number, signal, training_permit},
    socket::stored,
};
use jiff::Timestamp;
use rustix::process::Signal;
use serde_json::json;
use std::time::{Duration, Instant};

const KILLS: usize = 5;
/// Maximum time until the job trains again, on a machine that is not overloaded.
const MAX_RECOVERY: Duration = Duration::from_secs(5);

/// Kills these ranks and returns the seconds until the job's state showed it, until the next attempt ran, and until its
/// first step was stored.
async fn measure_recovery(server: &Server, killed_ranks: &[u32]) -> [f64; 3] {
    let spec = json!({
        "name": "measured",
        "model": {"arch": "resnet20"},
        "data": {"dataset": "fashion"},
        "train": {"epochs": 50},
        "parallel": {"ranks": 2, "device": "cpu"},
    });
    let id = server.submit(&spec).await;
    let trains = |job: &serde_json::Value| number(&job["step"]) > number(&job["steps_per_epoch"]) + 20;
    server
        .wait_for_job(&id, "the job is in its second epoch", |job| {
            number(&job["attempt"]) == 1 && trains(job)
        })
        .await;
    let checkpoints = server.checkpoints(&id).await;
    let from = checkpoints.iter().map(|c| number(&c["step"])).max().expect("a checkpoint of the first epoch");
    let killed = Instant::now();
    for (_, process) in server.ranks(&id).iter().filter(|(rank, _)| killed_ranks.contains(rank)) {
        signal(process.pid, Signal::KILL);
    }
    let mut times = [None; 3];
    while times[2].is_none() {
        let job = server.job(&id).await;
        let restarted = number(&job["attempt"]) == 2;
        let reached = [
            restarted || job["state"] == "restarting",
            restarted && job["state"] == "running",
            restarted && job["state"] == "running" && number(&job["step"]) > from,
        ];
        for (time, reached) in times.iter_mut().zip(reached) {
            if reached {
                time.get_or_insert(killed.elapsed().as_secs_f64());
            }
        }
        assert!(killed.elapsed() < Duration::from_secs(60), "the job does not train again: {job:#}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    server.cli(&["cancel", &id]).ok();
    server.wait_for_end(&id).await;
    times.map(|secs| secs.expect("a time"))
}

#[tokio::test]
#[ignore = "takes minutes"]
async fn measure_from_a_kill_to_training_again() {
    let _permit = training_permit().await;
    let server = Server::start_on(Agents::Local { cpu_slots: 2 }, None, Vec::new()).await;
    server.register("fashion", &pictures::bundled_folder()).await;
    for (what, killed_ranks) in [("rank 0", &[0][..]), ("the last rank", &[1]), ("all ranks", &[0, 1])] {
        let row = ReportRow::begin(&format!("kill -9 of {what}, default settings, n = {KILLS}"));
        let mut times = Vec::new();
        for _ in 0..KILLS {
            times.push(measure_recovery(&server, killed_ranks).await);
        }
        let median = |column: usize| {
            let mut sorted: Vec<f64> = times.iter().map(|t| t[column]).collect();
            sorted.sort_by(f64::total_cmp);
            format!("{:.2} (to {:.2})", sorted[KILLS / 2], sorted[KILLS - 1])
        };
        let longest = times.iter().map(|t| t[2]).fold(0.0, f64::max);
        assert!(longest < MAX_RECOVERY.as_secs_f64(), "training again after {longest:.2} s");
        let (noticed, running, step) = (median(0), median(1), median(2));
        row.passed(&format!(
            "median (longest), s: noticed {noticed}, next attempt {running}, first step {step}"
        ));
    }
    server.stop().await;
}

/// Steps from one checkpoint to the next.
const CHECKPOINT_STEPS: u64 = 10;
/// Steps of a job.
const STEPS: u64 = 60;
const ROUNDS: usize = 3;

/// Milliseconds from the first to the last step of a ResNet-18 (90 MB per checkpoint) on all cores. `every`: the steps from one checkpoint
/// to the next; `None`: there is only the last checkpoint.
async fn measure_steps(server: &Server, every: Option<u64>) -> f64 {
    let spec = json!({
        "name": "measured",
        "model": {"arch": "resnet18"},
        "data": {"dataset": "fashion", "image_size": 32},
        "train": {"steps": STEPS, "batch_size": 32},
        "parallel": {"ranks": 1, "device": "cpu"},
        "checkpoint": {"every_epochs": every.is_none().then_some(0), "every_steps": every},
        "evaluate": {"every_epochs": 0},
    });
    let id = server.train(&spec).await;
    let events = stored(server, &id).await;
    let stored_at = |step: u64| {
        let has_step = |e: &&serde_json::Value| {
            let steps = e["steps"].as_array();
            e["name"] == "loss" && steps.is_some_and(|s| s.iter().any(|s| number(s) == step))
        };
        let at = events.iter().find(has_step).and_then(|e| e["at"].as_str()?.parse::<Timestamp>().ok());
        at.expect("the step's loss").as_millisecond()
    };
    (stored_at(STEPS) - stored_at(1)) as f64
}

#[tokio::test]
#[ignore = "takes minutes, and needs an idle machine"]
async fn measure_the_cost_of_checkpoints() {
    let _permit = training_permit().await;
    let server = Server::start_on(Agents::Local { cpu_slots: 1 }, None, Vec::new()).await;
    server.register("fashion", &pictures::bundled_folder()).await;
    let mut without_checkpoints = Vec::new();
    let mut with_checkpoints = Vec::new();
    // Alternately, so that other load of the machine affects both.
    for _ in 0..ROUNDS {
        without_checkpoints.push(measure_steps(&server, None).await);
        with_checkpoints.push(measure_steps(&server, Some(CHECKPOINT_STEPS)).await);
    }
    without_checkpoints.sort_by(f64::total_cmp);
    with_checkpoints.sort_by(f64::total_cmp);
    let (without_checkpoints, with_checkpoints) =
        (without_checkpoints[ROUNDS / 2], with_checkpoints[ROUNDS / 2]);
    let checkpoints_written = ((STEPS - 1) / CHECKPOINT_STEPS) as f64;
    let row =
        ReportRow::begin(&format!("a checkpoint of ResNet-18 every {CHECKPOINT_STEPS} steps, n = {ROUNDS}"));
    row.passed(&format!(
        "medians: a step {:.1} ms without and {:.1} ms with ({:+.1} %); {:.1} ms a checkpoint",
        without_checkpoints / (STEPS - 1) as f64,
        with_checkpoints / (STEPS - 1) as f64,
        (with_checkpoints / without_checkpoints - 1.0) * 100.0,
        (with_checkpoints - without_checkpoints) / checkpoints_written
    ));
    assert!(
        with_checkpoints / without_checkpoints < 1.05,
        "checkpoints cost {:.1} %",
        (with_checkpoints / without_checkpoints - 1.0) * 100.0
    );
    server.stop().await;
}
