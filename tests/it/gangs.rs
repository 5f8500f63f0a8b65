//! A job over several machines: real agents on this machine, each with its own name, folder and slots.

use crate::{
    pictures,
    server::{
        Agents, Finished, Folder, Process, Server, exit_status, lockstep, number, signal, training_permit,
    },
    specs,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::process::Child;

const STEPS: u64 = 30;

/// Agents of one server, by name.
struct Machines {
    server: Server,
    agents: Vec<(String, Child)>,
}

impl Machines {
    async fn start(agents: &[(&str, u32)]) -> Self {
        Self::start_with(agents, &[]).await
    }

    /// As [`Machines::start`], with environment variables of the agents.
    async fn start_with(agents: &[(&str, u32)], variables: &[(&str, &str)]) -> Self {
        let server = Server::start_with(Agents::None).await;
        let mut this = Self { server, agents: Vec::new() };
        for (name, slots) in agents {
            this.join(name, *slots, variables);
        }
        this.until_online(agents.iter().map(|(_, slots)| *slots as usize).sum()).await;
        let dataset = pictures::idx_dataset(this.server.folder().path(), 160, 16);
        this.server.register("fashion", &dataset).await;
        this
    }

    async fn until_online(&self, slots: usize) {
        self.server.until("all agents are online", async |s: &Server| s.slots().await == slots).await;
    }

    /// Starts an agent. A second agent with the same name uses the first one's folder.
    fn join(&mut self, name: &str, slots: u32, variables: &[(&str, &str)]) {
        let mut command = self.server.agent_command(lockstep(), &self.server.url, name, slots);
        command.envs(variables.iter().copied());
        self.agents.push((name.to_owned(), command.spawn().expect("an agent")));
    }

    fn pid(&self, name: &str) -> i32 {
        let agent = self.agents.iter().find(|agent| agent.0 == name);
        agent.expect("an agent of this name").1.id() as i32
    }

    /// Removes an agent from the list.
    fn take(&mut self, name: &str) -> Child {
        let index = self.agents.iter().position(|agent| agent.0 == name).expect("an agent of this name");
        self.agents.remove(index).1
    }

    /// Kills an agent, and its ranks of a job, as a power failure does.
    fn kill(&mut self, name: &str, with_ranks_of: Option<&str>) {
        let mut agent = self.take(name);
        let pid = agent.id() as i32;
        let ranks = with_ranks_of.map(|job| self.server.ranks(job)).unwrap_or_default();
        for (_, rank) in ranks.iter().filter(|(_, rank)| Process::parent_of(rank.pid) == Some(pid)) {
            signal(rank.pid, Signal::KILL);
        }
        agent.kill().expect("SIGKILL");
        agent.wait().expect("its status");
    }

    async fn end(&mut self, name: &str) {
        let mut agent = self.take(name);
        signal(agent.id() as i32, Signal::TERM);
        assert_eq!(exit_status(&mut agent).await.code(), Some(0));
    }

    async fn stop(mut self) {
        for name in self.agents.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.end(&name).await;
        }
        self.server.stop().await;
    }

    /// Waits until a job trains.
    async fn until_training(&self, id: &str) -> Value {
        self.server.wait_for_job(id, "the job trains", |job| number(&job["step"]) >= 3).await
    }
}

/// A job with a checkpoint every ten steps. Its weights depend only on its seed.
fn job(ranks: u32, steps: u64) -> Value {
    specs::with(
        specs::short("gang", "fashion", ranks, steps),
        json!({"checkpoint": {"every_epochs": null, "every_steps": 10}, "train": {"seed": 7}}),
    )
}

#[tokio::test]
async fn a_job_over_two_agents_has_the_weights_of_a_single_agent() {
    let _permit = training_permit().await;
    let mut machines = Machines::start(&[("whole", 4)]).await;
    let mut models = Vec::new();
    for ranks in [2, 4] {
        let id = machines.server.submit(&job(ranks, STEPS)).await;
        assert_eq!(machines.server.wait_for_success(&id).await["agents"], json!(["whole"]));
        models.push(machines.server.last_model(&id).await);
    }
    machines.end("whole").await;
    // First one rank per machine, then two per machine without shared memory.
    let no_shared_memory = [("LOCKSTEP_SHARED_MEMORY", "0")];
    for (case, slots, variables) in [(0, 1, &[][..]), (1, 2, &no_shared_memory[..])] {
        let (a, b) = (format!("a{case}"), format!("b{case}"));
        machines.join(&a, slots, variables);
        machines.join(&b, slots, variables);
        machines.until_online(2 * slots as usize).await;
        let id = machines.server.submit(&job(2 * slots, STEPS)).await;
        let job = machines.server.wait_for_success(&id).await;
        assert_eq!((&job["agents"], number(&job["attempt"])), (&json!([a, b]), 1), "{job:#}");
        let ranks: Vec<_> = machines.server.points(&id, "loss").await.iter().map(|p| p.rank).collect();
        let expected = (0..u64::from(2 * slots)).flat_map(|rank| vec![rank; STEPS as usize]);
        assert_eq!(ranks, expected.collect::<Vec<_>>(), "every rank of every machine reports every step");
        assert!(machines.server.last_model(&id).await == models[case], "{slots} + {slots}: the same weights");
        machines.end(&a).await;
        machines.end(&b).await;
    }
    machines.stop().await;
}

#[tokio::test]
async fn a_rank_killed_on_the_second_agent_restarts_the_job_to_the_same_bits() {
    let _permit = training_permit().await;
    let slow_steps = [("LOCKSTEP_FAULT", "step:slow")];
    let machines = Machines::start_with(&[("a", 1), ("b", 1)], &slow_steps).await;
    let steps = 100;
    // With optimizer sharding, only the newest checkpoint has the killed rank's part of the state.
    for is_sharded in [false, true] {
        let spec = specs::with(job(2, steps), json!({"parallel": {"optimizer_sharding": is_sharded}}));
        let undisturbed = machines.server.train(&spec).await;
        let id = machines.server.submit(&spec).await;
        machines.server.wait_for_job(&id, "the job trains", |job| number(&job["step"]) >= 25).await;
        let ranks = machines.server.ranks(&id);
        let (_, second) = ranks.iter().find(|(rank, _)| *rank == 1).expect("rank 1");
        assert_eq!(
            Process::parent_of(second.pid),
            Some(machines.pid("b")),
            "rank 1 is on the second machine"
        );
        signal(second.pid, Signal::KILL);
        let job = machines.server.wait_for_success(&id).await;
        assert_eq!(number(&job["attempt"]), 2, "{job:#}");
        let attempts = machines.server.attempts(&id).await;
        let reason = attempts[0]["reason"]["words"].as_str().unwrap_or_default();
        assert!(reason.contains("rank 1 was killed by signal 9"), "{attempts:#?}");
        assert!(attempts.iter().all(|attempt| attempt["agents"] == json!(["a", "b"])), "{attempts:#?}");
        let checkpoint = attempts[1]["checkpoint"].as_str().unwrap_or_default();
        assert!(!is_sharded || checkpoint.ends_with('0'), "every tenth step has a checkpoint: {attempts:#?}");
        assert!(
            machines.server.last_model(&id).await == machines.server.last_model(&undisturbed).await,
            "the same weights"
        );
    }
    machines.stop().await;
}

#[tokio::test]
async fn after_an_agent_s_lease_expires_the_job_continues_there_or_on_a_spare() {
    let permit = training_permit().await;
    let mut machines = Machines::start(&[("a", 1), ("b", 1)]).await;
    let id = machines.server.submit(&job(2, 1_000_000)).await;
    machines.until_training(&id).await;
    // A machine hangs: its rank ends itself when the lease expires.
    signal(machines.pid("b"), Signal::STOP);
    // While the job waits for the lease, other tests may train.
    drop(permit);
    let lost =
        |attempt: u64| move |job: &Value| job["state"] == "restarting" && number(&job["attempt"]) == attempt;
    machines.server.wait_for_job(&id, "the lease expires", lost(1)).await;
    let reason = machines.server.attempts(&id).await[0]["reason"]["words"].clone();
    assert!(reason.as_str().is_some_and(|r| r.contains("agent \"b\" was silent")), "{reason}");
    assert!(machines.server.ranks(&id).is_empty(), "no rank is left before the next attempt");
    signal(machines.pid("b"), Signal::CONT);
    let is_second = |job: &Value| number(&job["attempt"]) == 2 && job["state"] == "running";
    machines.server.wait_for_job(&id, "the job continues there", is_second).await;
    // A machine is lost, and a spare joins.
    machines.kill("b", Some(&id));
    machines.join("spare", 1, &[]);
    let is_third = |job: &Value| number(&job["attempt"]) == 3 && job["state"] == "running";
    let job = machines.server.wait_for_job(&id, "the job continues on the spare", is_third).await;
    assert_eq!(job["agents"], json!(["a", "spare"]));
    let reason = machines.server.attempts(&id).await[1]["reason"]["words"].clone();
    assert!(reason.as_str().is_some_and(|r| r.contains("agent \"b\" was silent")), "{reason}");
    machines.server.order(&id, "cancel").await;
    assert_eq!(machines.server.wait_for_end(&id).await["state"], "cancelled");
    machines.stop().await;
}

#[tokio::test]
async fn cancel_pause_and_shutdown_reach_all_machines() {
    let _permit = training_permit().await;
    let mut machines = Machines::start(&[("a", 1), ("b", 1)]).await;
    let id = machines.server.submit(&job(2, 1_000_000)).await;
    machines.until_training(&id).await;
    machines.server.order(&id, "pause").await;
    let paused = |job: &Value| job["state"] == "paused";
    let job = machines.server.wait_for_job(&id, "the job is paused", paused).await;
    assert!(machines.server.ranks(&id).is_empty(), "no rank is left");
    let step = number(&job["step"]);
    let newest = machines.server.checkpoints(&id).await.iter().filter_map(|c| c["step"].as_u64()).max();
    assert_eq!(newest, Some(step), "a checkpoint of the last step");
    machines.server.order(&id, "resume").await;
    machines.server.wait_for_job(&id, "the job continues", |job| number(&job["step"]) > step + 3).await;

    // One machine is shut down: the job loses no step, and this does not count as a restart.
    machines.end("b").await;
    let queued = |job: &Value| job["state"] == "queued";
    let job = machines.server.wait_for_job(&id, "the job is queued again", queued).await;
    let reason = job["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("agent \"b\" was shut down"), "{job:#}");
    let step = number(&job["step"]);
    assert!(reason.contains(&format!("continues from step {step}")), "{job:#}");
    machines.join("b", 1, &[]);
    machines.server.wait_for_job(&id, "the job continues", |job| number(&job["step"]) > step + 3).await;

    machines.server.order(&id, "cancel").await;
    assert_eq!(machines.server.wait_for_end(&id).await["state"], "cancelled");
    assert!(machines.server.ranks(&id).is_empty(), "no rank is left on any machine");
    machines.stop().await;
}

#[tokio::test]
async fn restarted_servers_and_agents_find_their_parts_of_a_job() {
    let _permit = training_permit().await;
    let mut machines = Machines::start(&[("a", 1), ("b", 1)]).await;
    let id = machines.server.submit(&job(2, 1_000_000)).await;
    let assert_continues = async |machines: &Machines| {
        let step = number(&machines.server.job(&id).await["step"]);
        let has_continued = |job: &Value| number(&job["step"]) > step + 20;
        let job = machines.server.wait_for_job(&id, "the job continues", has_continued).await;
        assert_eq!((&job["state"], number(&job["attempt"])), (&json!("running"), 1), "{job:#}");
    };
    machines.until_training(&id).await;
    machines.server.kill_serve();
    machines.server.start_serve().await;
    assert_continues(&machines).await;
    for name in ["b", "a"] {
        machines.kill(name, None);
        machines.join(name, 1, &[]);
        assert_continues(&machines).await;
    }
    machines.server.order(&id, "cancel").await;
    assert_eq!(machines.server.wait_for_end(&id).await["state"], "cancelled");
    machines.stop().await;
}

#[tokio::test]
async fn large_jobs_wait_for_all_slots_in_order_and_are_not_overtaken() {
    let _permit = training_permit().await;
    let machines = Machines::start(&[("a", 2), ("b", 2)]).await;
    let server = &machines.server;
    let too_large = "the 2 machines online that can share a job have 4 slots in all";
    server.post("/jobs", &job(5, 10)).await.assert_invalid(&[("/parallel/ranks", &[too_large])]);
    // Occupy both slots of one machine and one slot of the other.
    let mut holders = Vec::new();
    for _ in 0..3 {
        holders.push(server.submit(&specs::short("holder", "fashion", 1, 1_000_000)).await);
    }
    for holder in &holders {
        machines.until_training(holder).await;
    }
    let mut waiting = Vec::new();
    for (name, ranks) in [("first", 4), ("second", 3), ("small", 1)] {
        waiting.push(server.submit(&specs::short(name, "fashion", ranks, 5)).await);
    }
    for (job, words) in [
        (0, "waits for 4 slots: 1 of 4 on 2 machines free"),
        (1, "waits for 3 slots: 1 of 4 on 2 machines free"),
        (0, "; free on each machine: 1 of 2 on \""),
    ] {
        let says_so = |job: &Value| job["reason"].as_str().is_some_and(|reason| reason.contains(words));
        server.wait_for_job(&waiting[job], words, says_so).await;
    }
    for holder in &holders {
        machines.server.order(holder, "cancel").await;
        server.wait_for_end(holder).await;
    }
    let mut started = Vec::new();
    for id in &waiting {
        let job = server.wait_for_success(id).await;
        started.push(job["started_at"].as_str().expect("a time").parse::<jiff::Timestamp>().expect("a time"));
        let events = server.get(&format!("/jobs/{id}/events?type=state")).await;
        let waits = events["events"].as_array().expect("events").iter().filter(|e| e["state"] == "queued");
        assert!(waits.count() <= 2, "no event for each slot that becomes free: {events:#}");
    }
    // The small job may start before the second job, on a slot that the second does not need.
    assert!(started[0] <= started[1], "in the order of the queue: {started:?}");
    assert!(
        started[0] <= started[2],
        "the free slot is reserved for the first job, which needs all: {started:?}"
    );
    machines.stop().await;
}

#[test]
fn invalid_addresses_and_unknown_interfaces_are_refused() {
    for (options, words) in [
        (["--advertise", "10.0.0.7:9000/x"], "--advertise 10.0.0.7:9000/x: give an address or a name"),
        (
            ["--interface", "none-such"],
            "--interface none-such: no such interface has an address; there are lo",
        ),
    ] {
        let folder = Folder::new();
        let mut command = lockstep();
        command.arg("agent").args(options).arg("--data-dir").arg(folder.path().join("agent"));
        Finished::of(&mut command).assert_usage_error(&[words]);
    }
}
