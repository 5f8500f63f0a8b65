//! Sweeps: trials that are compared at rungs, and submissions over a network that loses responses.

use crate::{
    pictures,
    server::{Agents, Finished, Server, lockstep, number, training_permit},
};
use serde_json::{Value, json};
use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// The start of a request that submits a sweep.
const SUBMISSION: &[u8] = b"POST /api/v1/sweeps HTTP/1.1";

/// A proxy that loses the responses to some submissions of sweeps.
struct LossyProxy {
    url: String,
    /// Number of responses still to lose.
    left: Arc<AtomicUsize>,
}

impl LossyProxy {
    fn start(server: &Server, lost: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let server_address = server.url.trim_start_matches("http://").to_owned();
        let left = Arc::new(AtomicUsize::new(lost));
        let left_to_lose = left.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (server_address, left) = (server_address.clone(), left_to_lose.clone());
                thread::spawn(move || forward(client, &server_address, &left));
            }
        });
        Self { url, left }
    }
}

/// Forwards a connection. If the connection submits a sweep while `left` is above 0, its response is lost.
fn forward(mut client: TcpStream, server_address: &str, left: &AtomicUsize) -> io::Result<()> {
    let mut server = TcpStream::connect(server_address)?;
    let (mut from_server, mut to_client) = (server.try_clone()?, client.try_clone()?);
    let is_lost = Arc::new(AtomicBool::new(false));
    let is_lost_here = is_lost.clone();
    thread::spawn(move || -> io::Result<()> {
        let mut bytes = [0; 16384];
        loop {
            let count = from_server.read(&mut bytes)?;
            if count == 0 || is_lost_here.load(Ordering::Relaxed) {
                return to_client.shutdown(Shutdown::Both);
            }
            to_client.write_all(&bytes[..count])?;
        }
    });
    let mut bytes = [0; 16384];
    loop {
        let count = client.read(&mut bytes)?;
        if count == 0 {
            return server.shutdown(Shutdown::Both);
        }
        let one_less = |left: usize| left.checked_sub(1);
        if bytes[..count].starts_with(SUBMISSION)
            && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
        {
            is_lost.store(true, Ordering::Relaxed);
        }
        server.write_all(&bytes[..count])?;
    }
}

#[tokio::test]
async fn paths_of_a_sweep_are_registered_and_a_lost_response_makes_no_second_sweep() {
    let _permit = training_permit().await;
    let server = Server::start_with(Agents::Local { cpu_slots: 1 }).await;
    for (name, pictures) in [("one", 64), ("two", 96)] {
        let path = pictures::idx_dataset(server.folder().path(), pictures, 32);
        std::fs::rename(path, server.folder().path().join(name)).expect("a folder");
    }
    let toml = "name = \"swept\"\n[model]\narch = \"resnet20\"\n[data]\nimage_size = 16\n[train]\nsteps = 2\nbatch_size = 8\n\
                [parallel]\nranks = 1\ndevice = \"cpu\"\n";
    server.folder().write("job.toml", toml);
    let network = LossyProxy::start(&server, 2);
    let mut command = lockstep();
    command
        .current_dir(server.folder().path())
        .envs(server.client_variables())
        .env("LOCKSTEP_SERVER", &network.url);
    let add_arguments = |command: &mut std::process::Command, seeds: &str| {
        command.args([
            "submit",
            "job.toml",
            "--json",
            "--sweep",
            "data.dataset=./one,./two",
            "--sweep",
            seeds,
        ]);
    };
    // If a trial has an error, no dataset is registered.
    let mut mistaken = lockstep();
    mistaken.current_dir(server.folder().path()).envs(server.client_variables());
    add_arguments(&mut mistaken, "train.seed=1,-1");
    Finished::of(&mut mistaken).assert_usage_error(&["train.seed"]);
    assert_eq!(server.get("/datasets").await["datasets"].as_array().map(Vec::len), Some(0));
    add_arguments(&mut command, "train.seed=1,2");
    let submitted = Finished::of(&mut command).json();
    assert_eq!(network.left.load(Ordering::Relaxed), 0, "two responses were lost");
    assert_eq!(
        server.get("/sweeps").await["sweeps"].as_array().map(Vec::len),
        Some(1),
        "one sweep is stored"
    );
    let sweep = wait_for_sweep(&server, submitted["id"].as_str().expect("an id")).await;
    assert_eq!((&sweep["state"], trials(&sweep).len()), (&json!("finished"), 4), "{sweep:#}");
    assert!(trials(&sweep).iter().all(|trial| trial["state"] == "succeeded"), "{sweep:#}");
    let mut datasets: Vec<_> = trials(&sweep).iter().map(|trial| &trial["setting"]["data.dataset"]).collect();
    datasets.sort_by_key(|name| name.to_string());
    assert_eq!(datasets, ["one", "one", "two", "two"]);
    let jobs: Vec<_> = trials(&sweep).iter().filter_map(|trial| trial["job"].as_str()).collect();
    let compared = server.cli(&["compare", jobs[0], jobs[1]]);
    for words in [jobs[0], jobs[1], "swept dataset=one seed=2", "train.seed", "state", "loss"] {
        assert!(compared.ok().contains(words), "{words} in {}", compared.stdout);
    }
    let compared = server.cli(&["compare", jobs[0], jobs[1], "--json"]).json();
    assert_eq!(compared["settings"], json!({"train.seed": [1, 2]}));
    let different = server.cli(&["compare", jobs[0], jobs[2]]);
    let words = "These accuracies may not have been measured on the same validation pictures.";
    different.assert_prints(&[words]);
    // A run from elsewhere has none of the settings of a job file, so these are compared only among jobs.
    server
        .post("/runs", &json!({"id": "outside", "name": "outside", "config": {"lr": 0.5, "width": 8}}))
        .await;
    let compared = server.cli(&["compare", "outside", jobs[0], "--json"]).json();
    // The run's `config.lr` is compared with `train.lr`, and its other settings have separate rows.
    assert_eq!(compared["settings"]["train.lr"][0], 0.5, "{compared:#}");
    for (key, values) in
        [("config.lr", Value::Null), ("config.width", json!([8, null])), ("train.batch_size", Value::Null)]
    {
        assert_eq!(compared["settings"][key], values, "{key}");
    }
    // The number of the run's validation pictures is unknown.
    let records = json!({"first": 1, "records": [{"step": 1, "values": {"val_accuracy": 0.995}}]});
    server.post("/runs/outside/records", &records).await;
    let compared = server.cli(&["compare", "outside", jobs[0]]);
    compared
        .assert_prints(&["99.5 % at step 1", "so their differences to other jobs may be chance: outside."]);
    server.cli(&["compare", jobs[0]]).assert_usage_error(&["name at least two jobs"]);

    // --folds submits a sweep; its result is a mean with a standard deviation.
    let folds = ["submit", "job.toml", "--set", "data.dataset=one", "--folds", "2", "--watch"];
    let folds = server.cli(&folds);
    let id = folds.ok().split_whitespace().next().expect("an id").to_owned();
    for words in [
        "2 trials of swept",
        "mean and standard deviation: ",
        "trial 1 (data.fold=1): succeeded, best val_accuracy ",
        "trial 2 (data.fold=2): succeeded, best val_accuracy ",
        "is finished: 2 of 2 trials have ended",
        "(mean ± standard deviation of 2 of 2 folds)",
    ] {
        assert!(folds.stdout.contains(words), "{words} in {}", folds.stdout);
    }
    assert!(!folds.stdout.contains("best: trial "), "{}", folds.stdout);
    let validate =
        |seeds: &str| server.cli(&["validate", "job.toml", "--set", "data.dataset=one", "--sweep", seeds]);
    assert!(validate("train.seed=1,2").ok().contains("has no mistake: 2 trials, 64 training pictures"));
    validate("train.seed=1,-1").assert_usage_error(&["a mistake", "train.seed: must be"]);
    server.folder().write("sweep.toml", sweep_file(1, "[sweep.parameters]\ntrain.lr = { values = [0.1] }\n"));
    for options in [["--folds", "2"], ["--sweep", "train.seed=1,2"]] {
        server
            .cli(&[&["submit", "sweep.toml"], &options[..]].concat())
            .assert_usage_error(&["cannot be combined with"]);
    }
    let has_spread = |line: &str| line.starts_with(&*id) && line.contains('±');
    let groups = server.cli(&["list", "--tag", &id, "--group-by", "tag"]);
    assert!(groups.ok().lines().any(has_spread), "{}", groups.stdout);
    let shown = server.cli(&["sweep", "show", &id]);
    shown.assert_prints(&[
        "swept: grid, compared by val_accuracy\n",
        "(mean ± standard deviation of 2 of 2 folds)",
    ]);
    assert!(!shown.stdout.contains("succeeded, best"), "{}", shown.stdout);
    // The jobs of a deleted sweep are kept.
    server.cli(&["sweep", "delete", &id, "--yes"]).ok();
    server.cli(&["sweep", "show", &id]).assert_usage_error(&["no sweep has this id"]);
    let jobs = server.get(&format!("/jobs?tag={id}")).await;
    let trials: Vec<_> = jobs["jobs"].as_array().expect("jobs").iter().map(|job| &job["trial"]).collect();
    assert_eq!(trials, [&Value::Null, &Value::Null]);
    server.stop().await;
}

/// A sweep file: a small network for `epochs` of four steps, with this section.
fn sweep_file(epochs: u32, section: &str) -> String {
    format!(
        "name = \"swept\"\n[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashion\"\nimage_size = 8\n[train]\n\
         epochs = {epochs}\nbatch_size = 16\n[parallel]\nranks = 1\ndevice = \"cpu\"\n[sweep]\n\
         metric = {{ name = \"val_loss\" }}\n{section}"
    )
}

/// Submits a file with `lockstep submit` and returns the sweep's id.
pub(crate) fn submit_sweep(server: &Server, toml: &str) -> String {
    server.folder().write("sweep.toml", toml);
    let sweep = server.cli(&["submit", "sweep.toml", "--json"]).json();
    sweep["id"].as_str().expect("an id").to_owned()
}

/// Waits for the end of a sweep and returns the sweep.
pub(crate) async fn wait_for_sweep(server: &Server, id: &str) -> Value {
    let path = format!("/sweeps/{id}");
    let has_ended = async |server: &Server| !server.get(&path).await["finished_at"].is_null();
    server.until_within(Duration::from_secs(600), "the sweep has ended", has_ended).await;
    server.get(&path).await
}

fn trials(sweep: &Value) -> &Vec<Value> {
    sweep["trials"].as_array().expect("trials")
}

#[tokio::test]
async fn a_sweep_has_the_same_result_after_its_server_was_killed() {
    let mut server = Server::start_training(64, 64).await;
    let section = "method = \"asha\"\n[sweep.parameters]\n\
        train.lr = { values = [0.000001, 0.001, 0.05] }\ntrain.momentum = { values = [0.0, 0.9] }\n";
    let add = [
        "webhook",
        "add",
        "https://hooks.example/a",
        "--event",
        "job.started",
        "--event",
        "job.cancelled",
        "--json",
    ];
    let webhook = server.cli(&add).json()["id"].as_str().expect("an id").to_owned();
    let mut results = Vec::new();
    for is_killed in [false, true] {
        let id = submit_sweep(&server, &sweep_file(3, section));
        if is_killed {
            let path = format!("/sweeps/{id}");
            let has_reached_rung = async |server: &Server| {
                trials(&server.get(&path).await).iter().any(|trial| number(&trial["rung"]) > 0)
            };
            server.until("a trial has reached its rung", has_reached_rung).await;
            server.kill_serve();
            server.start_serve().await;
        }
        let sweep = wait_for_sweep(&server, &id).await;
        assert_eq!(sweep["state"], "finished", "{sweep:#}");
        assert_eq!(sweep["rungs"], json!([1, 3]));
        let facts = |trial: &Value| {
            let known =
                ["number", "setting", "state", "rung", "metric", "step"].map(|key| trial[key].clone());
            Value::from(known.to_vec())
        };
        results.push(trials(&sweep).iter().map(facts).collect::<Vec<_>>());
        // Four of six trials trained one epoch of three, and none was restarted.
        assert_eq!(number(&sweep["steps"]), 4 * 4 + 2 * 12, "{sweep:#}");
        let finished: Vec<_> = trials(&sweep).iter().filter(|trial| trial["state"] == "succeeded").collect();
        assert_eq!(finished.len(), 2, "{sweep:#}");
        if is_killed {
            continue;
        }
        // Each trial sends that it has started once, and nothing when the sweep pauses, resumes or ends it.
        let messages = server.get(&format!("/webhooks/{webhook}/deliveries")).await;
        let messages = messages["deliveries"].as_array().expect("messages");
        let started = messages.iter().filter(|message| message["event"] == "job.started");
        assert_eq!((started.count(), messages.len()), (6, 6), "{messages:#?}");
        // A trial that paused has the weights of a job that did not pause.
        let job = server.job(finished[0]["job"].as_str().expect("an id")).await;
        assert_eq!((number(&job["attempt"]), &job["trial"]["sweep"]), (2, &json!(id)));
        let mut undisturbed = job["spec"].clone();
        undisturbed["name"] = json!("undisturbed");
        let undisturbed = server.train(&undisturbed).await;
        assert!(
            server.last_model(&undisturbed).await
                == server.last_model(job["id"].as_str().expect("an id")).await,
            "the same weights, bit for bit"
        );
        let shown = server.cli(&["sweep", "show", &id]);
        shown.assert_prints(&["asha, compared by val_loss after epochs 1, 3\n", "6 of 6 trials have ended"]);
        let listed = server.cli(&["list", "--tag", &id]);
        for output in [shown.ok(), listed.ok()] {
            assert_eq!(output.matches("ended early").count(), 4, "{output}");
        }
        let ended = trials(&sweep).iter().find(|trial| trial["ended_early"] == true).expect("a trial");
        server
            .cli(&["show", ended["job"].as_str().expect("an id")])
            .assert_prints(&["ended early: ended by its sweep"]);
    }
    assert_eq!(results[0], results[1]);
    server.stop().await;
}

#[tokio::test]
async fn pausing_and_cancelling_a_sweep_applies_to_its_trials() {
    let server = Server::start_training_with(Agents::Local { cpu_slots: 1 }, 64, 64).await;
    let agent = server.get("/agents").await["agents"][0]["id"].as_str().expect("an id").to_owned();
    // The agent is drained, so that trials wait.
    assert_eq!(server.post(&format!("/agents/{agent}/drain"), &json!({})).await.status.as_u16(), 204);
    let section =
        "method = \"grid\"\nmax_concurrent = 2\n[sweep.parameters]\ntrain.seed = { values = [1, 2, 3] }\n";
    let id = submit_sweep(&server, &sweep_file(1, section));
    let path = format!("/sweeps/{id}");
    let count_jobs = async |server: &Server| {
        let jobs = server.get(&format!("/jobs?tag={id}")).await;
        jobs["jobs"].as_array().expect("jobs").len()
    };
    server.until("two trials wait", async |server: &Server| count_jobs(server).await == 2).await;
    assert!(server.cli(&["sweep", "pause", &id]).ok().contains("is paused: 0 of 3"));
    server.cli(&["sweep", "pause", &id]).assert_usage_error(&["the sweep is paused"]);
    let first = trials(&server.get(&path).await)[0]["job"].as_str().expect("an id").to_owned();
    // The queued trials wait for the sweep, although a slot is free.
    assert_eq!(server.post(&format!("/agents/{agent}/undrain"), &json!({})).await.status.as_u16(), 204);
    let waits_for_sweep =
        async |server: &Server| server.job(&first).await["cause"]["code"] == "waiting_for_sweep";
    server.until("the trial waits for its sweep", waits_for_sweep).await;
    server.cli(&["cancel", &first]).ok();
    server.cli(&["delete", &first, "--yes"]).assert_usage_error(&["the job is trial 1 of sweep-"]);
    server.cli(&["sweep", "delete", &id, "--yes"]).assert_usage_error(&["the sweep has not ended"]);
    server
        .cli(&["show", "swept"])
        .assert_usage_error(&["no job is called swept", "`lockstep sweep show swept`"]);
    server.cli(&["cancel", "swept"]).assert_usage_error(&["`lockstep sweep cancel swept`"]);
    server.cli(&["sweep", "cancel", "swept"]).ok();
    let sweep = wait_for_sweep(&server, &id).await;
    assert_eq!((&sweep["state"], &sweep["ended"]), (&json!("cancelled"), &json!(2)), "{sweep:#}");
    assert!(trials(&sweep)[2]["job"].is_null());
    server.cli(&["delete", &first, "--yes"]).ok();
    let after = server.get(&path).await;
    assert_eq!((&after["ended"], &trials(&after)[0]["deleted"]), (&json!(2), &json!(true)), "{after:#}");
    server.cli(&["sweep", "delete", &id, "--jobs", "--yes"]).ok();
    assert_eq!(count_jobs(&server).await, 0, "the second trial's job is deleted with the sweep");
    // The dataset's folder was moved: the first trial fails, and the sweep starts no other.
    let data = server.get("/datasets/fashion").await["path"].as_str().expect("a path").to_owned();
    let moved = format!("{data}-moved");
    std::fs::rename(&data, &moved).expect("moves");
    let section =
        "method = \"grid\"\nmax_concurrent = 1\n[sweep.parameters]\ntrain.seed = { values = [1, 2] }\n";
    let id = submit_sweep(&server, &sweep_file(1, section));
    let path = format!("/sweeps/{id}");
    let is_paused = async |server: &Server| server.get(&path).await["state"] == "paused";
    server.until("the sweep is paused", is_paused).await;
    let sweep = server.get(&path).await;
    assert!(sweep["reason"].as_str().is_some_and(|why| why.contains("does not exist")), "{sweep:#}");
    assert!(trials(&sweep)[1]["job"].is_null(), "{sweep:#}");
    std::fs::rename(&moved, &data).expect("moves");
    server.cli(&["retry", trials(&sweep)[0]["job"].as_str().expect("an id")]).ok();
    server.cli(&["sweep", "resume", &id]).ok();
    let sweep = wait_for_sweep(&server, &id).await;
    assert!(trials(&sweep).iter().all(|trial| trial["state"] == "succeeded"), "{sweep:#}");
    server.folder().write("wrong.toml", sweep_file(1, "method = \"asha\"\nrun_cap = 2\n"));
    server.cli(&["submit", "wrong.toml"]).assert_usage_error(&["sweep.run_cap: no key is called"]);
    server.stop().await;
}
