//! Ranks, agents and servers that die, hang, are stopped or are cut off.

use crate::{
    judge::{
        CHECKPOINT_STEPS, ReportRow, SHORT_LEASE, SLOW_STEPS, STEPS, assert_undisturbed_result, crash,
        log_bytes, register_pictures, spec, start, submit_and_train, undisturbed_weights, variables,
        wait_for_step,
    },
    server::{Agents, Server, number, signal, training_permit},
    socket::stored,
    specs,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{
    fs,
    time::{Duration, Instant},
};

/// A server whose ranks have slow steps, so that a job lasts until it is disturbed.
async fn server() -> Server {
    start(None, variables([SLOW_STEPS])).await
}

/// The step from which an attempt continued.
fn start_step(events: &[Value], attempt: u64) -> u64 {
    let plan = events.iter().rfind(|e| e["type"] == "plan" && e["attempt"] == attempt);
    number(&plan.expect("the attempt's plan")["start_step"])
}

#[tokio::test]
async fn killed_and_crashed_ranks_restart_with_the_same_weights() {
    let _permit = training_permit().await;
    let server = server().await;
    let model = undisturbed_weights(STEPS).await;
    // Two faults per job, as a third restart would wait for its backoff.
    let jobs: [[(&str, &[u32], Signal); 2]; 2] = [
        [("kill -9 of rank 0", &[0], Signal::KILL), ("kill -9 of the last rank", &[1], Signal::KILL)],
        [("SIGSEGV of a rank", &[1], Signal::SEGV), ("kill -9 of all ranks", &[0, 1], Signal::KILL)],
    ];
    for faults in jobs {
        let id = server.submit(&spec("disturbed", STEPS)).await;
        let mut fault_step = CHECKPOINT_STEPS + 10;
        let mut rows = Vec::new();
        for (attempt, (fault, hit_ranks, fault_signal)) in (1..).zip(faults) {
            wait_for_step(&server, &id, fault_step).await;
            let ranks = server.ranks(&id);
            let mut row = ReportRow::begin(fault);
            for (_, process) in ranks.iter().filter(|(rank, _)| hit_ranks.contains(rank)) {
                if fault_signal == Signal::SEGV {
                    crash(process.pid).await;
                } else {
                    signal(process.pid, fault_signal);
                }
            }
            row.wait_until_recovered(&server, &id, attempt).await;
            let recovered = row.recovery_time();
            assert!(recovered < Duration::from_secs(30), "{fault}: training again after {recovered:?}");
            fault_step = number(&server.job(&id).await["step"]) + 10;
            rows.push((row, fault_signal));
        }
        assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
        let events = stored(&server, &id).await;
        let restarting = events.iter().filter(|e| e["state"] == "restarting");
        let reasons = restarting.filter_map(|e| e["reason"].as_str());
        let mut reasons: Vec<_> = reasons.filter(|reason| reason.contains("was killed by signal")).collect();
        reasons.dedup();
        assert_eq!(reasons.len(), rows.len(), "{reasons:?}");
        for (index, (row, fault_signal)) in rows.into_iter().enumerate() {
            let (attempt, reason) = (index + 2, reasons[index]);
            let number = if fault_signal == Signal::KILL { 9 } else { 11 };
            assert!(reason.contains(&format!("was killed by signal {number} at step")), "{reason}");
            assert!(reason.contains(&format!("attempt {attempt} starts from step")), "{reason}");
            row.passed("same weights");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn a_rank_that_hangs_is_restarted() {
    let permit = training_permit().await;
    let server = server().await;
    let model = undisturbed_weights(STEPS).await;
    let id = server
        .submit(&specs::with(spec("disturbed", STEPS), json!({"recovery": {"stall_timeout_secs": 10}})))
        .await;
    wait_for_step(&server, &id, CHECKPOINT_STEPS + 10).await;
    let (_, rank) = server.ranks(&id).remove(1);
    let mut row = ReportRow::begin("SIGSTOP of a rank (stall_timeout_secs = 10)");
    signal(rank.pid, Signal::STOP);
    // While the job hangs, other tests may train.
    drop(permit);
    row.wait_until_recovered(&server, &id, 1).await;
    assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
    let events = stored(&server, &id).await;
    let reason = events.iter().find(|e| e["state"] == "restarting").expect("a restart")["reason"].to_string();
    assert!(
        reason.contains("rank 1 made no progress for 10 s at step") && reason.contains("suspended"),
        "{reason}"
    );
    row.passed("same weights");
    server.stop().await;
}

#[tokio::test]
async fn an_agent_restarted_within_its_lease_keeps_the_attempt() {
    let _permit = training_permit().await;
    let server = server().await;
    let model = undisturbed_weights(STEPS).await;
    let id = submit_and_train(&server, STEPS).await;
    let agent = server.processes().into_iter().find(|p| p.command() == "agent").expect("the agent");
    let mut row = ReportRow::begin("kill -9 of the agent, which returns within the lease");
    signal(agent.pid, Signal::KILL);
    let back = async |s: &Server| s.processes().iter().any(|p| p.command() == "agent" && p.pid != agent.pid);
    server.until("the agent is started again", back).await;
    row.recovered_now();
    let attempts = assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
    assert_eq!(attempts, 1, "the new agent took over the ranks");
    row.passed("same attempt");
    // The machine accepts the next job.
    server.train(&spec("afterwards", 5)).await;
    server.stop().await;
}

#[tokio::test]
async fn a_stopped_server_keeps_a_checkpoint_and_continues_from_it() {
    let _permit = training_permit().await;
    let mut server = server().await;
    let model = undisturbed_weights(STEPS).await;
    let id = server.submit(&spec("disturbed", STEPS)).await;
    let mut stops = Vec::new();
    for (attempt, fault_step, fault, fault_signal) in [
        (1, CHECKPOINT_STEPS + 10, "Ctrl-C of serve", Signal::INT),
        (2, 3 * CHECKPOINT_STEPS + 10, "SIGTERM of serve", Signal::TERM),
    ] {
        wait_for_step(&server, &id, fault_step).await;
        let mut row = ReportRow::begin(fault);
        assert_eq!(server.stop_serve(fault_signal).await.code(), Some(0));
        assert!(server.processes().is_empty(), "no process is left: {:?}", server.processes());
        // The checkpoint is of the step at which training stopped.
        let checkpoints =
            lockstep_worker::checkpoint::list(&server.job_dir(&id).join("checkpoints")).expect("checkpoints");
        let step = checkpoints.last().expect("a checkpoint").1;
        assert!(step >= fault_step, "{checkpoints:?}");
        server.start_serve().await;
        row.wait_until_recovered(&server, &id, attempt).await;
        stops.push((row, step));
    }
    assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
    let events = stored(&server, &id).await;
    let queued = events.iter().filter(|e| e["state"] == "queued").filter_map(|e| e["reason"].as_str());
    let mut reasons: Vec<_> = queued.filter(|reason| reason.contains("was shut down")).collect();
    reasons.dedup();
    assert_eq!(reasons.len(), stops.len(), "{reasons:?}");
    for (index, (row, step)) in stops.into_iter().enumerate() {
        let (attempt, reason) = (index as u64 + 2, reasons[index]);
        assert!(reason.contains(&format!("continues from step {step}")), "{reason}");
        assert_eq!(start_step(&events, attempt), step);
        row.passed("queued with a checkpoint of its last step");
    }
    assert!(!events.iter().any(|e| e["state"] == "restarting"), "a stop is not a restart");
    server.stop().await;
}

#[tokio::test]
async fn a_damaged_newest_checkpoint_is_replaced_by_the_previous_one() {
    let _permit = training_permit().await;
    let server = server().await;
    let model = undisturbed_weights(STEPS).await;
    let id = server.submit(&spec("disturbed", STEPS)).await;
    let mut fault_step = 2 * CHECKPOINT_STEPS + 10;
    let mut damaged = Vec::new();
    for (fault, damage) in [
        (
            "the newest checkpoint is truncated",
            (|bytes: &mut Vec<u8>| bytes.truncate(bytes.len() / 2)) as fn(&mut Vec<u8>),
        ),
        ("the newest checkpoint is corrupted", |bytes: &mut Vec<u8>| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }),
    ] {
        wait_for_step(&server, &id, fault_step).await;
        server.cli(&["pause", &id]).ok();
        let listed = server.checkpoints(&id).await;
        let (newest, previous) = (number(&listed[0]["step"]), number(&listed[1]["step"]));
        let name = format!("checkpoints/{}-{newest}/model.safetensors", number(&listed[0]["epoch"]));
        let file = server.job_dir(&id).join(name);
        let mut bytes = fs::read(&file).expect("the newest checkpoint");
        damage(&mut bytes);
        fs::remove_file(&file).and_then(|()| fs::write(&file, bytes)).expect("damage");
        damaged.push((ReportRow::begin(fault), newest, previous));
        server.cli(&["resume", &id]).ok();
        // The next damage waits for a checkpoint after the damaged one.
        fault_step = newest + CHECKPOINT_STEPS;
    }
    assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
    let events = stored(&server, &id).await;
    let logged = server.cli(&["logs", &id, "--rank", "0"]).ok().to_owned();
    for (attempt, (row, newest, previous)) in (2..).zip(damaged) {
        assert_eq!(start_step(&events, attempt), previous);
        let words = format!("-{newest} is damaged");
        let is_logged =
            logged.lines().any(|l| l.contains(&words) && l.contains("the previous checkpoint is used"));
        assert!(is_logged, "{words}: {logged}");
        row.passed("the previous checkpoint is used, the log says so");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_removed_or_changed_dataset_fails_the_job_with_a_reason() {
    let _permit = training_permit().await;
    let server = server().await;
    let model = undisturbed_weights(STEPS).await;
    let id = submit_and_train(&server, STEPS).await;
    server.cli(&["pause", &id]).ok();
    let path = server.get("/datasets/fashion").await["path"].as_str().expect("a path").to_owned();
    let aside = format!("{path}.aside");
    let row = ReportRow::begin("the dataset vanished");
    fs::rename(&path, &aside).expect("moved away");
    server.cli(&["resume", &id]).ok();
    let job = server.wait_for_end(&id).await;
    let reason = job["reason"].as_str().expect("a reason");
    assert!(
        job["state"] == "failed" && reason.contains("cannot be read") && reason.contains("retry"),
        "{reason}"
    );
    row.passed("failed, not restarted; retried when it was back");

    let row = ReportRow::begin("the dataset changed");
    fs::create_dir(&path).expect("another folder");
    for entry in fs::read_dir(&aside).expect("files").flatten() {
        let mut bytes = fs::read(entry.path()).expect("a file");
        if let Some(last) = bytes.last_mut() {
            *last ^= 1;
        }
        fs::write(std::path::Path::new(&path).join(entry.file_name()), bytes).expect("a file");
    }
    server.cli(&["retry", &id]).ok();
    let job = server.wait_for_end(&id).await;
    let reason = job["reason"].as_str().expect("a reason");
    assert!(
        job["state"] == "failed" && reason.contains("differs from the dataset with which the job began"),
        "{reason}"
    );
    fs::remove_dir_all(&path).and_then(|()| fs::rename(&aside, &path)).expect("the dataset is back");
    server.cli(&["retry", &id]).ok();
    assert_undisturbed_result(&server, &id, STEPS, &model, &[]).await;
    row.passed("failed with the reason; retried when it was back");
    server.stop().await;
}

#[tokio::test]
#[ignore = "slow: leases run out"]
async fn slow_an_agent_that_returns_after_its_lease_is_fenced() {
    let _permit = training_permit().await;
    let steps = 4 * STEPS;
    let environment = variables([SHORT_LEASE, SLOW_STEPS]);
    let server = Server::start_on(Agents::Separate { cpu_slots: 2 }, None, environment).await;
    let mut server = register_pictures(server).await;
    let model = undisturbed_weights(steps).await;

    // Killed: the ranks end by themselves before the server starts another attempt.
    let id = submit_and_train(&server, steps).await;
    let ranks = server.ranks(&id);
    assert_eq!(ranks.len(), 2);
    let mut row = ReportRow::begin("kill -9 of an agent that comes back after the lease");
    server.kill_agent();
    let before = number(&server.job(&id).await["step"]);
    server.until("the attempt has ended", async |s: &Server| s.job(&id).await["state"] != "running").await;
    assert!(server.ranks(&id).is_empty(), "the ranks ended within the lease");
    assert!(number(&server.job(&id).await["step"]) >= before);
    server.start_agent(2).await;
    row.wait_until_recovered(&server, &id, 1).await;
    assert_undisturbed_result(&server, &id, steps, &model, &[1]).await;
    row.passed("ranks ended themselves within the lease, attempt fenced");

    // Suspended, for less and for more than the lease.
    for (fault, secs, same_attempt) in [
        ("the agent is cut off (SIGSTOP) for 3 s", 3, true),
        ("the agent is cut off (SIGSTOP) for 16 s, then returns", 16, false),
    ] {
        let id = submit_and_train(&server, steps).await;
        let agent = server.agent_pid().expect("the agent");
        let mut row = ReportRow::begin(fault);
        signal(agent, Signal::STOP);
        tokio::time::sleep(Duration::from_secs(secs)).await;
        signal(agent, Signal::CONT);
        if same_attempt {
            row.recovered_now();
        } else {
            row.wait_until_recovered(&server, &id, 1).await;
        }
        let fenced: &[u64] = if same_attempt { &[] } else { &[1] };
        let attempts = assert_undisturbed_result(&server, &id, steps, &model, fenced).await;
        assert_eq!(attempts == 1, same_attempt);
        row.passed(if same_attempt { "same attempt" } else { "no stale write, no doubled attempt" });
    }
    server.stop().await;
}

#[tokio::test]
#[ignore = "slow: the server is down for 20 s"]
async fn slow_ranks_train_on_while_the_server_is_down_for_20_s() {
    let _permit = training_permit().await;
    let outage = Duration::from_secs(20);
    let steps = 8 * STEPS;
    let model = undisturbed_weights(steps).await;
    let mut server = server().await;
    let id = submit_and_train(&server, steps).await;
    let mut row = ReportRow::begin(&format!("kill -9 of the server, down for {} s", outage.as_secs()));
    server.kill_serve();
    let began = Instant::now();
    // Seconds in which the log has grown.
    let mut trained_secs = 0;
    let mut last = log_bytes(&server, &id);
    while began.elapsed() < outage {
        tokio::time::sleep(Duration::from_secs(1)).await;
        trained_secs += u64::from(log_bytes(&server, &id) > last);
        last = log_bytes(&server, &id);
    }
    server.start_serve().await;
    row.recovered_now();
    let attempts = assert_undisturbed_result(&server, &id, steps, &model, &[]).await;
    assert_eq!(attempts, 1, "the same ranks continued");
    row.passed(&format!("same attempt; ranks trained in {trained_secs} of {} s", outage.as_secs()));
    server.stop().await;
}
