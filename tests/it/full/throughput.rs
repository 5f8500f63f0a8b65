//! The times that ranks report are their training time, and the speed of a job is pictures per training time.
//! `tests/browser/full/throughput.spec.mjs` checks that all interfaces show this speed, whatever attempts a job has had.

use crate::{
    pictures,
    server::{Server, exclusive_permit, number},
    socket::wait_for_step,
    specs,
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, time::Duration};

/// 19 steps per epoch: 18 with 16 pictures and the last with 12.
const PICTURES: u64 = 300;
const STEPS_PER_EPOCH: u64 = 19;
const STEPS: u64 = 3 * STEPS_PER_EPOCH;

fn spec(name: &str, ranks: u32) -> Value {
    specs::with(
        specs::short(name, "fashion", ranks, STEPS),
        json!({
            "data": {"drop_remainder": false},
            "train": {"batch_size": 16 / ranks},
            // Evaluations and checkpoints between epochs are not training time.
            "evaluate": {"every_epochs": 1},
            "checkpoint": {"every_epochs": 1, "keep": 10},
        }),
    )
}

/// Pictures per second of an attempt, from the points of rank 0.
async fn expected_speed(server: &Server, id: &str, attempt: u64) -> f64 {
    let points = server.points(id, "step_ms").await;
    let of_rank_0: Vec<_> = points.iter().filter(|p| p.attempt == attempt && p.rank == 0).collect();
    assert!(of_rank_0.len() >= 10, "attempt {attempt} of {id} has {} steps", of_rank_0.len());
    let last_batch = PICTURES - (STEPS_PER_EPOCH - 1) * 16;
    let pictures: u64 =
        of_rank_0.iter().map(|p| if p.step.is_multiple_of(STEPS_PER_EPOCH) { last_batch } else { 16 }).sum();
    pictures as f64 / of_rank_0.iter().map(|p| p.value / 1e3).sum::<f64>()
}

/// The step and the time of a log line with a loss; `None` for other lines.
fn loss_line(line: &Value) -> Option<(u64, jiff::Timestamp)> {
    let (_, rest) = line["text"].as_str().expect("text").split_once(" step: ")?;
    let (step, _) = rest.split_once(", loss")?;
    Some((step.parse().ok()?, line["at"].as_str().expect("a time").parse().expect("a time")))
}

/// Returns an attempt's training time in seconds, twice: from the times of log lines, and as the sum of `step_ms`. In each epoch, the time
/// from the first to the last line with a loss is counted.
async fn training_secs(server: &Server, id: &str, attempt: u64) -> (f64, f64) {
    let response = server.get(&format!("/jobs/{id}/logs?rank=0&attempt={attempt}&limit=10000")).await;
    let mut epochs: BTreeMap<u64, Vec<(u64, jiff::Timestamp)>> = BTreeMap::new();
    for (step, at) in response["lines"].as_array().expect("lines").iter().filter_map(loss_line) {
        epochs.entry((step - 1) / STEPS_PER_EPOCH).or_default().push((step, at));
    }
    let points = server.points(id, "step_ms").await;
    let (mut clock, mut steps) = (0.0, 0.0);
    for lines in epochs.values() {
        let (Some((first, from)), Some((last, to))) = (lines.first(), lines.last()) else { continue };
        clock += to.duration_since(*from).as_secs_f64();
        let of_rank_0 = points.iter().filter(|p| p.attempt == attempt && p.rank == 0);
        let between = of_rank_0.filter(|p| p.step > *first && p.step <= *last);
        steps += between.map(|p| p.value / 1e3).sum::<f64>();
    }
    (clock, steps)
}

/// Asserts that the time of an epoch's first step excludes the evaluation before it.
async fn assert_evaluations_excluded(server: &Server, id: &str) {
    let response = server.get(&format!("/jobs/{id}/logs?rank=0&limit=10000")).await;
    let lines: Vec<(u64, jiff::Timestamp)> =
        response["lines"].as_array().expect("lines").iter().filter_map(loss_line).collect();
    let points = server.points(id, "step_ms").await;
    let mut checked = 0;
    for pair in lines.windows(2) {
        let [(before, from), (step, to)] = *pair else { continue };
        if before % STEPS_PER_EPOCH != 0 || step != before + 1 {
            continue;
        }
        checked += 1;
        let between = to.duration_since(from).as_secs_f64() * 1e3;
        let took = points.iter().find(|p| p.rank == 0 && p.step == step).expect("its time").value;
        assert!(
            took < between / 2.0,
            "step {step} took {took} ms of the {between} ms since the previous step"
        );
    }
    assert!(checked > 0, "no epoch's first step: {lines:?}");
}

#[tokio::test]
async fn the_speed_of_a_job_excludes_evaluations_and_pauses() {
    let _permit = exclusive_permit().await;
    let server = Server::start().await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), PICTURES as usize, 400)).await;

    let plain = server.train(&spec("plain", 1)).await;
    assert_evaluations_excluded(&server, &plain).await;

    let paused = server.submit(&spec("paused", 2)).await;
    wait_for_step(&server, &paused, 20).await;
    server.cli(&["pause", &paused]).ok();
    let resting = server.job(&paused).await;
    assert!(
        resting["images_per_second"].as_f64().is_some_and(|v| v > 0.0),
        "a paused job keeps its speed: {resting:#}"
    );
    assert_eq!(resting["eta_secs"], Value::Null);
    // A pause that would halve the speed if it counted.
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.cli(&["resume", &paused]).ok();
    server.wait_for_success(&paused).await;

    for (name, id, attempt) in [("plain", &plain, 1), ("paused", &paused, 2)] {
        let job = server.job(id).await;
        assert_eq!(number(&job["attempt"]), attempt, "{name}");
        let speed = job["images_per_second"].as_f64().unwrap_or_else(|| panic!("{name}: {job:#}"));
        let expected = expected_speed(&server, id, attempt).await;
        assert!(
            (speed / expected - 1.0).abs() < 0.01,
            "{name}: {speed} images/s, and {expected} by its steps"
        );
        let (clock, steps) = training_secs(&server, id, attempt).await;
        // A continued attempt may have only a few steps left.
        let slack = 0.05 * clock + 0.02;
        assert!((steps - clock).abs() < slack, "{name}: {steps} s of steps in {clock} s of training");
    }
    server.stop().await;
}
