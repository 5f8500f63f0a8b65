//! Runs that are stopped or whose ranks die: what is saved and reported, and how the runs continue.

use super::{Bench, sets};
use crate::pictures;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// Reads loss lines until the line of `step`.
pub(super) fn until_step(child: &mut Child, step: u32) {
    let lines = BufReader::new(child.stdout.as_mut().expect("a pipe")).lines();
    for line in lines {
        let line = line.expect("a line");
        if line.starts_with(&format!("epoch: 1 step: {step}, loss is ")) {
            return;
        }
    }
    panic!("no line of step {step}");
}

/// Starts a run and reads its loss lines until the line of `step`.
pub(super) fn start_until_step(mut command: Command, step: u32) -> Child {
    let spawned = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = spawned.expect("it starts");
    until_step(&mut child, step);
    child
}

pub(super) fn pid_of(attempt: &Path, rank: u32) -> i32 {
    let text = fs::read(attempt.join(format!("rank.{rank}.pid"))).expect("a pid file");
    let mark: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    i32::try_from(mark["pid"].as_i64().expect("a pid")).expect("a pid")
}

pub(super) fn signal(pid: i32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a pid");
    rustix::process::kill_process(pid, signal).expect("a live process");
}

/// Whether a process has ended, perhaps as a zombie.
pub(super) fn has_ended(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X']))
}

#[tokio::test]
async fn a_stopped_run_continues_to_the_same_bytes() {
    let bench = Bench::new().await;
    let long = ["--set", "train.epochs=6"];
    bench.train_to_success("whole", &long);
    // Slow steps, so that the run is stopped before its end.
    let mut parts = bench.train("parts", &long);
    parts.env("LOCKSTEP_FAULT", "step:slow").stdout(Stdio::piped());
    let mut child = parts.spawn().expect("it starts");
    until_step(&mut child, 3);
    signal(child.id().cast_signed(), rustix::process::Signal::INT);
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(130));
    for rank in 0..2 {
        assert!(has_ended(pid_of(&bench.out("parts").join("attempts/1"), rank)), "rank {rank} has ended");
    }
    let output = bench.train_to_success("parts", &[&long[..], &["--resume", "latest"]].concat());
    assert!(output.contains("continuing from checkpoint "), "{output}");
    assert!(bench.model("parts", "6-72") == bench.model("whole", "6-72"));
    assert!(
        bench.out("parts").join("attempts/2/rank.1.log").exists(),
        "the continued run is a second attempt"
    );
}

/// Stops a run with SIGINT. Returns its standard error and the time until its end.
fn interrupt(mut child: Child) -> (String, Duration) {
    let signalled = Instant::now();
    signal(child.id().cast_signed(), rustix::process::Signal::INT);
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130));
    (String::from_utf8_lossy(&output.stderr).into_owned(), signalled.elapsed())
}

/// `state.json` of a checkpoint.
pub(super) fn state(bench: &Bench, out: &str, checkpoint: &str) -> serde_json::Value {
    let state = fs::read(format!("{}/state.json", bench.checkpoint(out, checkpoint))).expect("a state");
    serde_json::from_slice(&state).expect("JSON")
}

#[tokio::test]
async fn an_evaluation_interrupted_by_a_stop_is_repeated_by_the_next_run() {
    let bench = Bench::new().await;
    // An evaluation that takes a while compared with an epoch of 12 steps.
    let folder = bench.folder.path().join("long");
    fs::create_dir(&folder).expect("a folder");
    let dataset = format!("data.dataset={:?}", pictures::idx_dataset(&folder, 8000, 100));
    let sets = sets(&[&dataset, "data.image_size=12", "data.validation=0.95", "checkpoint.every_steps=12"]);
    let whole = bench.train_to_success("whole", &sets);
    for ranks in ["2", "1"] {
        let out = &format!("parts of {ranks}");
        let sets = [&sets[..], &["--ranks", ranks]].concat();
        let child =
            bench.train(out, &sets).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let events = bench.out(out).join("attempts/1/rank.0.events");
        let began = Instant::now();
        let is_evaluating =
            || fs::read(&events).unwrap_or_default().windows(10).any(|bytes| bytes == b"evaluating");
        while !is_evaluating() {
            assert!(began.elapsed() < Duration::from_secs(60), "the evaluation does not begin");
            std::thread::sleep(Duration::from_millis(10));
        }
        let (output, took) = interrupt(child);
        let end = "; --resume latest continues from this step; give --out, --set, --ranks again\n";
        assert!(output.ends_with(end) && !output.contains("error: "), "{output}");
        let words = "stopped after step 12; its checkpoint is in ";
        assert!(output.contains(words) && output.contains("/checkpoints; "), "{output}");
        assert!(took < Duration::from_secs(30), "{took:?}");
        let log = fs::read_to_string(bench.out(out).join("attempts/1/rank.0.log")).expect("a log");
        assert!(log.contains("the evaluation after step 12 is interrupted"), "{log}");
        assert!(!log.contains("validation accuracy"), "{log}");
        assert!(state(&bench, out, "1-12")["val_accuracy"].is_null());

        let resumed = [&sets[..], &["--resume", "latest"]].concat();
        let output = bench.train_to_success(out, &resumed);
        let accuracies = |output: &str| -> Vec<String> {
            let lines = output.lines().filter(|line| line.contains("validation accuracy is"));
            lines.map(|line| line.split(" (").next().unwrap_or_default().to_owned()).collect()
        };
        assert_eq!(
            accuracies(&output),
            accuracies(&whole),
            "both epochs are evaluated, with the same result"
        );
        for checkpoint in ["1-12", "2-24"] {
            let (expected, actual) = (state(&bench, "whole", checkpoint), state(&bench, out, checkpoint));
            for key in ["/val_accuracy", "/best/step", "/best/value"] {
                assert!(actual.pointer(key).is_some_and(|value| !value.is_null()), "{key} of {checkpoint}");
                assert_eq!(expected.pointer(key), actual.pointer(key), "{key} of {checkpoint}");
            }
        }
        if ranks == "2" {
            assert!(bench.model(out, "2-24") == bench.model("whole", "2-24"));
        }
    }
}

#[tokio::test]
async fn a_signal_to_one_rank_stops_all_with_a_checkpoint() {
    let bench = Bench::new().await;
    let mut child = start_until_step(bench.train("out", &["--set", "train.epochs=1000"]), 2);
    // Slurm and kill(1) can send a signal to a single rank.
    signal(pid_of(&bench.out("out").join("attempts/1"), 1), rustix::process::Signal::TERM);
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert!(text.contains("stopped after step ") && text.contains("continues from this step"), "{text}");
}

#[tokio::test]
async fn a_stop_without_a_checkpoint_reports_the_lost_steps() {
    let mut bench = Bench::new().await;
    let sets = ["--set", "train.epochs=1000", "--set", "checkpoint.every_steps=100000"];
    let mut child = start_until_step(bench.train("out", &sets), 3);
    let attempt = bench.out("out").join("attempts/1");
    // A suspended rank: the others wait for it forever.
    signal(pid_of(&attempt, 1), rustix::process::Signal::STOP);
    // While the run hangs, other tests may train.
    bench.permit = None;
    let pid = child.id().cast_signed();
    let signalled = Instant::now();
    signal(pid, rustix::process::Signal::INT);
    drop(child.stdout.take());
    let log = || fs::read_to_string(attempt.join("rank.0.log")).expect("a log");
    while !log().contains("There is no checkpoint yet: steps 1 to ") {
        assert!(signalled.elapsed() < Duration::from_secs(40), "rank 0 says nothing: {}", log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(
        signalled.elapsed() > Duration::from_secs(15),
        "the step gets time to end: {:?}",
        signalled.elapsed()
    );
    // A second Ctrl-C ends the run without waiting for the suspended rank.
    signal(pid, rustix::process::Signal::INT);
    let output = child.wait_with_output().expect("it ends");
    assert!(signalled.elapsed() < Duration::from_secs(60), "{:?}", signalled.elapsed());
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert!(text.contains("without a checkpoint: steps 1 to ") && text.contains("are lost"), "{text}");
    assert!(has_ended(pid_of(&attempt, 0)) && has_ended(pid_of(&attempt, 1)));
}

#[tokio::test]
async fn a_killed_rank_ends_the_others_and_is_named() {
    let bench = Bench::new().await;
    let mut child = start_until_step(bench.train("out", &["--set", "train.epochs=1000"]), 2);
    let attempt = bench.out("out").join("attempts/1");
    let killed = Instant::now();
    signal(pid_of(&attempt, 1), rustix::process::Signal::KILL);
    // The output is closed, which must neither stop the run nor hide the reason of its end.
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    assert_eq!(output.status.code(), Some(1));
    let output = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.contains("rank 1 was killed by signal 9 at step "), "{output}");
    assert!(has_ended(pid_of(&attempt, 0)));
    let log = fs::read_to_string(attempt.join("rank.0.log")).expect("a log");
    assert!(log.contains("lost the connection to rank 1"), "{log}");
}

/// Only `tests/run full` runs this test, because it has more ranks than most machines have cores.
mod full {
    use super::*;

    #[tokio::test]
    async fn a_run_of_more_than_16_ranks_stops_before_its_end() {
        let bench = Bench::new().await;
        // Slow steps, so that the run of 80 steps is stopped before its end.
        let sets = ["--ranks", "18", "--set", "train.global_batch_size=144", "--set", "train.epochs=40"];
        let mut command = bench.train("out", &sets);
        command.env("LOCKSTEP_FAULT", "step:slow");
        let (output, _) = interrupt(start_until_step(command, 1));
        assert!(
            output.contains("stopped after step ") && output.contains("continues from this step"),
            "{output}"
        );
        assert!(!output.contains("stopped after step 80;"), "{output}");
    }
}
