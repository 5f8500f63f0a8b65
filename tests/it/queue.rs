//! Scheduling: slots, gangs, priorities, and cancelled jobs.

use crate::{
    pictures,
    server::{Agents, Server, number, training_permit},
    socket::{states, stored, wait_for_step},
    specs,
};
use lockstep_protocol::JobState::{Pausing, Queued, Running, Starting, Succeeded};
use reqwest::Method;
use serde_json::{Value, json};

/// A job that runs until it is cancelled.
fn endless(name: &str, ranks: u32) -> Value {
    specs::short(name, "fashion", ranks, 1_000_000)
}

fn started_at(job: &Value) -> jiff::Timestamp {
    job["started_at"].as_str().expect("the start").parse().expect("a time")
}

#[tokio::test]
async fn gangs_wait_for_all_their_slots_and_higher_priorities_run_first() {
    let server = Server::start_training(160, 16).await;
    let holder = server.submit(&endless("holder", 1)).await;
    server.wait_for_job(&holder, "the job runs", |job| job["state"] == "running").await;

    // One slot is free; these jobs need two, so none of their ranks starts.
    let low = server.submit(&specs::short("low", "fashion", 2, 5)).await;
    let high = specs::with(specs::short("high", "fashion", 2, 5), json!({"priority": 5}));
    let high = server.submit(&high).await;
    let last = server.submit(&specs::short("last", "fashion", 2, 5)).await;
    // During twenty more steps of the holder, a faulty scheduler would start one of the jobs.
    let step = number(&server.job(&holder).await["step"]);
    server.wait_for_job(&holder, "the job continues", |job| number(&job["step"]) > step + 20).await;
    for id in [&low, &high, &last] {
        let names_slots = |job: &Value| job["reason"].as_str().is_some_and(|reason| reason.contains("slot"));
        let job = server.wait_for_job(id, "the reason names the slots", names_slots).await;
        assert_eq!((&job["state"], number(&job["attempt"])), (&json!("queued"), 0), "{job:#}");
        assert!(server.ranks(id).is_empty());
    }
    // The queue shows the order, and for which job the free slot is reserved.
    let queue = server.cli(&["queue", "--json"]).json();
    let names: Vec<_> = queue["jobs"].as_array().expect("jobs").iter().map(|job| &job["name"]).collect();
    assert_eq!(names, ["high", "low", "last"], "{queue:#}");
    let reason = &server.job(&high).await["reason"];
    assert_eq!(&queue["jobs"][0]["reason"]["words"], reason, "the same reason as the job's");
    let reservation = &queue["reservations"][0];
    assert_eq!(
        (&reservation["name"], &reservation["whole_machine"]),
        (&json!("high"), &json!(true)),
        "{queue:#}"
    );
    assert_eq!(
        (reservation["free"].as_array().map(Vec::len), &queue["jobs"][0]["kept_slots"]),
        (Some(1), &json!(1))
    );
    let printed = server.cli(&["queue", "--limit", "1"]);
    let lines: Vec<_> = printed.ok().lines().collect();
    assert!(lines[0].starts_with("PLACE") && lines[1].contains("high"), "{}", printed.stdout);
    assert!(lines[2].contains("every other slot that becomes free, kept for high"), "{}", printed.stdout);
    assert!(server.cli(&["queue", "--project", "none"]).ok().starts_with("no waiting job matches"));
    server.order(&holder, "cancel").await;
    let mut times = Vec::new();
    for id in [&high, &low, &last] {
        times.push(started_at(&server.wait_for_success(id).await));
    }
    assert!(times.is_sorted(), "high, low, last: {times:?}");
    server.stop().await;
}

/// Waits until the job's reason says that no agent accepts it.
async fn until_no_agent_accepts(server: &Server, id: &str) {
    let has_reason = |job: &Value| {
        let reason = job["reason"].as_str().unwrap_or_default();
        reason.starts_with("no online agent takes this job; drained")
    };
    let job = server.wait_for_job(id, "the reason says that no agent accepts it", has_reason).await;
    assert_eq!((&job["state"], number(&job["attempt"])), (&json!("queued"), 0), "{job:#}");
}

#[tokio::test]
async fn a_drained_agent_finishes_its_jobs_and_starts_none() {
    let server = Server::start_training(160, 16).await;
    let agent = server.get("/agents").await["agents"][0].clone();
    let [id, name] = ["id", "name"].map(|key| agent[key].as_str().expect("a text").to_owned());
    let list = || server.cli(&["machine", "list"]);
    let assert_state = |state: &str, busy: u32| {
        let printed = list();
        let found = printed.ok().lines().any(|line| {
            line.starts_with(&format!("{name}  {id}  {state}")) && line.contains(&format!("{busy} of 2"))
        });
        assert!(found, "{}", printed.stdout);
    };
    let running = server.submit(&specs::short("running", "fashion", 1, 400)).await;
    server.wait_for_job(&running, "the job trains", |job| number(&job["step"]) >= 3).await;
    let drained = server.cli(&["machine", "drain", &name]);
    assert!(drained.ok().contains("takes no new work; the rank that runs there runs to its end"));
    assert_state("online, drained  ", 1);
    // A slot is free for this job.
    let first = server.submit(&specs::short("first", "fashion", 1, 5)).await;
    until_no_agent_accepts(&server, &first).await;
    assert_eq!(server.job(&running).await["state"], "running");
    let job = server.wait_for_success(&running).await;
    assert_eq!(
        (number(&job["attempt"]), number(&job["step"])),
        (1, 400),
        "the drain did not disturb the job: {job:#}"
    );
    // The scheduler considers this job when all slots are free.
    let second = server.submit(&specs::short("second", "fashion", 2, 5)).await;
    until_no_agent_accepts(&server, &second).await;
    until_no_agent_accepts(&server, &first).await;
    let nobody = server.cli(&["machine", "undrain", "nobody"]);
    assert!(nobody.status == 2 && nobody.stderr.contains("no machine is called nobody"), "{}", nobody.stderr);
    // The machine is idle, but its agent is online.
    let online = server.cli(&["machine", "remove", &name, "--yes"]);
    assert!(online.status == 2 && online.stderr.contains("is online"), "{}", online.stderr);
    let undrained = server.cli(&["machine", "undrain", &id, "--json"]).json();
    assert_eq!(undrained, json!({"id": id, "name": name, "draining": false}));
    for id in [&first, &second] {
        server.wait_for_success(id).await;
    }
    server.stop().await;
}

#[tokio::test]
async fn jobs_train_concurrently_and_the_priority_of_waiting_jobs_is_changed_by_command() {
    let server = Server::start_training(160, 16).await;
    let (a, b) = (server.submit(&endless("a", 1)).await, server.submit(&endless("b", 1)).await);
    for id in [&a, &b] {
        server.wait_for_job(id, "the job trains", |job| number(&job["step"]) >= 3).await;
    }
    for id in [&a, &b] {
        assert_eq!(server.job(id).await["state"], "running");
        assert_eq!(server.ranks(id).len(), 1);
    }
    for name in ["first", "second"] {
        server.submit(&specs::short(name, "fashion", 1, 5)).await;
    }
    let edited = server.cli(&["edit", "second", "--priority", "5", "--tag", "urgent", "--tag", "mine"]);
    assert!(
        edited.ok().ends_with(" second: priority 5, project default, tags mine, urgent\n"),
        "{}",
        edited.stdout
    );
    server.cli(&["edit", "first", "--priority", "-5", "--json"]).ok();
    let running = server.cli(&["edit", &a, "--priority", "0"]);
    assert!(
        running.ok().contains("priority 0 (takes effect when the job waits again)"),
        "{}",
        running.stdout
    );
    server
        .until("the queue has the new order", async |server: &Server| {
            let queue = server.get("/queue").await;
            let named = |place: usize, name: &str| queue["jobs"][place]["name"] == name;
            named(0, "second") && named(1, "first")
        })
        .await;
    for (args, words) in [
        (&["edit", "first"][..], "--priority"),
        (&["edit", "first", "--priority", "2000"], "must be from -1000 to 1000"),
        (&["edit", "nobody", "--priority", "1"], "no job is called nobody"),
    ] {
        server.cli(args).assert_usage_error(&[words]);
    }
    server.order(&a, "cancel").await;
    assert_eq!(server.wait_for_end(&a).await["state"], "cancelled");
    // The other job is not disturbed.
    let step = number(&server.job(&b).await["step"]);
    server.wait_for_job(&b, "the job continues", |job| number(&job["step"]) > step + 5).await;
    server.order(&b, "cancel").await;
    server.wait_for_end(&b).await;
    server.stop().await;
}

#[tokio::test]
async fn a_job_can_be_cancelled_in_any_state() {
    let server = Server::start_training(160, 16).await;
    let running = server.submit(&endless("running", 2)).await;
    server.wait_for_job(&running, "the job trains", |job| number(&job["step"]) >= 5).await;
    // A request that a job's state forbids gets a 409 that names the state, and changes nothing.
    let assert_refused = async |method: Method, path: &str, state: &str| {
        let problem = server.request(method, &format!("/jobs/{running}{path}"), None).await.problem(409);
        assert_eq!(problem["state"], state, "{problem}");
        assert!(problem["detail"].as_str().is_some_and(|d| d.contains(state)), "{problem}");
    };
    assert_refused(Method::DELETE, "", "running").await;
    assert!(!server.ranks(&running).is_empty(), "the ranks still run");
    let queued = server.submit(&specs::short("queued", "fashion", 2, 5)).await;
    server.order(&queued, "cancel").await;
    let job = server.wait_for_end(&queued).await;
    assert_eq!((&job["state"], number(&job["attempt"])), (&json!("cancelled"), 0), "{job:#}");
    assert!(!server.job_dir(&queued).join("attempts").exists(), "the job has never started");

    server.order(&running, "cancel").await;
    let job = server.wait_for_end(&running).await;
    assert_eq!(job["state"], "cancelled", "{job:#}");
    server.until("the job's ranks have ended", async |s: &Server| s.ranks(&running).is_empty()).await;
    let events = stored(&server, &running).await;
    let ends: Vec<_> = events.iter().filter(|e| e["state"] == "cancelled").collect();
    assert_eq!(ends.len(), 1, "{ends:?}");
    assert_refused(Method::POST, "/cancel", "cancelled").await;

    // The slots are free again. A job that is cancelled while its ranks start also ends.
    let early = server.submit(&endless("early", 2)).await;
    server.wait_for_job(&early, "the job starts", |job| job["state"] != "queued").await;
    server.order(&early, "cancel").await;
    assert_eq!(server.wait_for_end(&early).await["state"], "cancelled");
    server.until("the job's ranks have ended", async |s: &Server| s.ranks(&early).is_empty()).await;
    let finished = server.train(&specs::short("next", "fashion", 2, 5)).await;

    // Several jobs in one command: with an unknown name nothing is cancelled; a job that has ended does not prevent the others.
    let long = server.submit(&endless("long", 2)).await;
    let behind = server.submit(&specs::short("behind", "fashion", 2, 5)).await;
    let refused = server.cli(&["cancel", &long, "no-such-job"]);
    assert!(refused.status == 2 && refused.stderr.contains("no-such-job"), "{refused:?}");
    assert_ne!(server.job(&long).await["state"], "cancelled");
    let output = server.cli(&["cancel", &long, &finished, &behind, &long]);
    assert_eq!(output.status, 2, "{output:?}");
    assert_eq!(output.stdout, format!("{long} cancelled\n{behind} cancelled\n"), "{output:?}");
    assert!(output.stderr.contains("succeeded"), "{output:?}");
    server.stop().await;
}

#[tokio::test]
async fn a_preempted_job_has_the_weights_of_an_undisturbed_job() {
    let _permit = training_permit().await;
    let server = Server::start_slow(Agents::Local { cpu_slots: 2 }).await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 640, 64)).await;
    // Enough steps that seconds of training remain when the other job is submitted.
    let total_steps = 160;
    // 40 steps per epoch, and no regular checkpoint before the end: only the checkpoint of the preemption.
    let low = specs::with(
        specs::short("low", "fashion", 2, total_steps),
        json!({
            "priority": -1,
            "preemptible": true,
            "data": {"crop_padding": 2, "horizontal_flip": true},
            "train": {"schedule": "cosine"},
            "recovery": {"max_restarts": 0},
        }),
    );
    let undisturbed = server.train(&low).await;

    let id = server.submit(&low).await;
    wait_for_step(&server, &id, 30).await;
    let high = specs::with(specs::short("high", "fashion", 2, 5), json!({"priority": 5}));
    let high = server.submit(&high).await;
    let done = server.wait_for_success(&high).await;
    assert_eq!(number(&done["attempt"]), 1, "{done:#}");
    let job = server.wait_for_success(&id).await;
    assert_eq!(number(&job["attempt"]), 2, "one preemption: {job:#}");
    let states = states(&stored(&server, &id).await);
    assert_eq!(states, [Queued, Starting, Running, Pausing, Queued, Starting, Running, Succeeded]);
    assert!(started_at(&done) < job["finished_at"].as_str().expect("the end").parse().expect("a time"));
    let points = server.points(&id, "loss").await;
    let of_rank_0 = points.iter().filter(|point| point.rank == 0);
    let (attempts, steps): (Vec<_>, Vec<_>) = of_rank_0.map(|point| (point.attempt, point.step)).unzip();
    assert_eq!(steps, (1..=total_steps).collect::<Vec<_>>(), "no step is missing or repeated");
    assert!(attempts.contains(&2), "the second attempt reports its own points");
    assert!(
        server.last_model(&id).await == server.last_model(&undisturbed).await,
        "a preemption does not change a bit of the weights"
    );
    server.stop().await;
}
