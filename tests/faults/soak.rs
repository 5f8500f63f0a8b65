//! Many jobs and a random fault every few seconds.

use crate::{
    judge::{ReportRow, assert_undisturbed_result, crash, register_pictures, spec, trained_weights},
    server::{Agents, Server, number, signal, state_of, training_permit},
    socket::stored,
    specs,
};
use rustix::process::Signal;
use serde_json::json;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

const JOBS: usize = 200;
/// Minimum number of unfinished jobs, so that there is always a job to disturb.
const MIN_UNFINISHED: usize = 20;
const STEPS: u64 = 80;
const SECS: u64 = 600;

/// Xorshift random numbers: the same seed gives the same faults.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

#[tokio::test]
#[ignore = "takes ten minutes and more"]
async fn soak_200_jobs_with_a_random_fault_every_few_seconds() {
    let _permit = training_permit().await;
    let seed = std::env::var("LOCKSTEP_SOAK_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(20_260_721);
    let mut random = Random(seed);
    // A shorter soak with fewer jobs, to test this test.
    let secs = std::env::var("LOCKSTEP_SOAK_SECS").ok().and_then(|s| s.parse().ok()).unwrap_or(SECS);
    let duration = Duration::from_secs(secs);
    let jobs = JOBS * secs as usize / SECS as usize;
    let mut server = register_pictures(Server::start_with(Agents::Local { cpu_slots: 4 }).await).await;
    let mut row = ReportRow::begin(&format!(
        "soak: {jobs} jobs and more, a random fault every 2 to 5 s for {} s",
        secs
    ));
    let soak_spec = |name: &str| {
        specs::with(
            spec(name, STEPS),
            json!({
                "checkpoint": {"every_steps": 20},
                "recovery": {"max_restarts": 1000, "stall_timeout_secs": 10},
            }),
        )
    };
    let model = trained_weights(&soak_spec("disturbed")).await;
    let mut ids = Vec::new();
    for _ in 0..jobs {
        // All jobs are the same, so that their weights are comparable.
        ids.push(server.submit(&soak_spec("disturbed")).await);
    }
    let began = Instant::now();
    let mut faults: BTreeMap<&str, u32> = BTreeMap::new();
    loop {
        let list = server.get("/jobs?limit=1000").await;
        let mut unfinished =
            list["jobs"].as_array().expect("jobs").iter().filter(|j| !state_of(j).is_final()).count();
        if unfinished == 0 && began.elapsed() > duration {
            break;
        }
        // A fast machine gets more jobs, so that each fault has a target.
        while unfinished < MIN_UNFINISHED && began.elapsed() < duration {
            ids.push(server.submit(&soak_spec("disturbed")).await);
            unfinished += 1;
        }
        assert!(
            began.elapsed() < duration * 3,
            "{unfinished} jobs are unfinished after {:?}; {faults:?}",
            began.elapsed()
        );
        tokio::time::sleep(Duration::from_millis(2000 + random.below(3000))).await;
        if began.elapsed() > duration {
            continue;
        }
        let processes = server.processes();
        let ranks: Vec<_> = processes.iter().filter(|p| p.command() == "rank").collect();
        let fault = match random.below(10) {
            0..=3 if !ranks.is_empty() => {
                signal(ranks[random.below(ranks.len() as u64) as usize].pid, Signal::KILL);
                "kill -9 of a rank"
            }
            4 if !ranks.is_empty() => {
                crash(ranks[random.below(ranks.len() as u64) as usize].pid).await;
                "SIGSEGV of a rank"
            }
            5 if !ranks.is_empty() => {
                signal(ranks[random.below(ranks.len() as u64) as usize].pid, Signal::STOP);
                "SIGSTOP of a rank"
            }
            6 | 7 => {
                let Some(agent) = processes.iter().find(|p| p.command() == "agent") else { continue };
                signal(agent.pid, Signal::KILL);
                "kill -9 of the agent"
            }
            8 => {
                server.kill_serve();
                server.start_serve().await;
                "kill -9 of the server"
            }
            9 => {
                assert_eq!(server.stop_serve(Signal::INT).await.code(), Some(0));
                server.start_serve().await;
                "Ctrl-C of the server"
            }
            _ => continue,
        };
        *faults.entry(fault).or_default() += 1;
    }
    row.recovered_now();
    let mut attempts = 0;
    let mut fenced = 0;
    for id in &ids {
        server.wait_for_success(id).await;
        // An agent that is killed again during its start may be absent for longer than the lease.
        let events = stored(&server, id).await;
        let lost: Vec<_> =
            events.iter().filter(|e| e["state"] == "lost").map(|e| number(&e["attempt"])).collect();
        fenced += lost.len();
        attempts += assert_undisturbed_result(&server, id, STEPS, &model, &lost).await;
    }
    let total: u32 = faults.values().sum();
    row.passed(&format!(
        "seed {seed}: {total} faults {faults:?}, {} jobs in {attempts} attempts ({fenced} fenced)",
        ids.len()
    ));
    server.stop().await;
}
