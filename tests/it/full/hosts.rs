//! Several hosts on one machine ([`Network`]), joined over TLS with certificates. None of them has the server's disk.

use crate::{
    network::Network,
    pictures,
    server::{Finished, Folder, attempt_dir, lockstep, number, signal, training_permit},
    specs,
    tls::serve::Serve,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command},
    time::{Duration, Instant},
};

pub(crate) const STEPS: u64 = 120;
/// Time limit for a job of [`STEPS`] steps and one restart.
const TIMEOUT: Duration = Duration::from_secs(240);
/// An outage that the ranks' connections survive.
const SHORT_OUTAGE: Duration = Duration::from_millis(300);
/// An outage that connections do not survive, but shorter than a lease (15 s).
const LONG_OUTAGE: Duration = Duration::from_secs(4);
/// Maximum time from the loss of a host to the next step. The goal is 5 s; tests share their machine.
pub(crate) const MAX_RECOVERY: Duration = Duration::from_secs(40);

/// A server and its hosts.
pub(crate) struct Site {
    agents: Vec<(String, Child)>,
    pub(crate) serve: Serve,
    pub(crate) url: String,
    pub(crate) ca: PathBuf,
    http: reqwest::Client,
    pub(crate) network: Network,
}

impl Site {
    /// Starts a site with this number of hosts, which have not joined yet. Also returns the weights of a job on one host.
    pub(crate) async fn with_reference_weights(hosts: u32) -> (Self, Vec<u8>) {
        let mut site = Self::new().await;
        (1..=hosts).for_each(|host| site.network.add(host));
        site.join(1, "whole", 4);
        site.until_online(&["whole"]).await;
        site.register_pictures();
        let id = site.submit().await;
        let (job, model) = site.wait_for_success(&id).await;
        assert_eq!(job["agents"], json!(["whole"]));
        assert_eq!(site.count_in_log(&id, "are not encrypted"), 0, "no traffic leaves the machine");
        site.leave("whole");
        (site, model)
    }

    pub(crate) async fn new() -> Self {
        let network = Network::new();
        let address = network.address(254);
        let listens = {
            let address = address.clone();
            async move |port| tokio::net::TcpStream::connect((address.as_str(), port)).await.is_ok()
        };
        let options = ["--tls-own-ca", "--no-local-agent"];
        let serve = Serve::start_at(&address, Folder::new(), &options, listens).await;
        let url = format!("https://{address}:{}", serve.port);
        // Hosts can read this copy; the data directory is hidden from them.
        let ca = serve.folder.path().join("ca.crt");
        fs::copy(serve.ca(), &ca).expect("the CA");
        let http = serve.client(&ca);
        Self { agents: Vec::new(), serve, url, ca, http, network }
    }

    /// Starts an agent on a host, with its own certificate.
    pub(crate) fn join(&mut self, host: u32, name: &str, slots: u32) {
        self.join_with(host, name, slots, &[], &[]);
    }

    /// As [`Site::join`], with variables and further options.
    pub(crate) fn join_with(
        &mut self,
        host: u32,
        name: &str,
        slots: u32,
        variables: &[(&str, &str)],
        options: &[&str],
    ) {
        let folder = self.serve.folder.path();
        let issue = ["ca", "issue", name, "--agent", "--data-dir", "data"];
        assert!(lockstep().args(issue).current_dir(folder).output().expect("ca").status.success());
        let log = File::create(folder.join(format!("{name}.log"))).expect("a log");
        let mut command = Command::new("ip");
        // Each host also has its own mounts, and its own process ids, by which ranks share memory.
        command.args(["netns", "exec", &self.network.namespace(host), "sh", "-c"]);
        let isolate = "mount -t tmpfs none \"$0\" && exec unshare --pid --fork --mount-proc \"$@\"";
        command.arg(isolate).arg(folder.join("data"));
        command.arg(lockstep().get_program()).args(["agent", "--server", &self.url, "--name", name]);
        command.args(["--cpu-slots", &slots.to_string(), "--data-dir", name, "--ca-file"]).arg(&self.ca);
        command.args(["--cert-file", &format!("{name}.crt"), "--key-file", &format!("{name}.key")]);
        // Slow steps: a job lasts until its machines are lost, and leaves processor time to other tests.
        command.args(options).env("LOCKSTEP_FAULT", "step:slow").envs(variables.iter().copied());
        command.current_dir(folder).stdout(log.try_clone().expect("a log")).stderr(log);
        self.agents.push((name.to_owned(), command.spawn().expect("an agent")));
    }

    /// Registers the dataset of the jobs, which an agent inspects.
    pub(crate) fn register_pictures(&self) {
        let dataset = pictures::idx_dataset(self.serve.folder.path(), 160, 16);
        self.cli(&["dataset", "add", "pictures", dataset.to_str().expect("UTF-8")]).ok();
    }

    pub(crate) fn cli(&self, args: &[&str]) -> Finished {
        self.serve.cli(&self.url, Some(&self.ca), args)
    }

    pub(crate) fn leave(&mut self, name: &str) {
        let index = self.agents.iter().position(|agent| agent.0 == name).expect("an agent of this name");
        let (_, mut agent) = self.agents.remove(index);
        let unshare = agent.id();
        let agents =
            fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).unwrap_or_default();
        agents.split_whitespace().for_each(|pid| signal(pid.parse().expect("a number"), Signal::TERM));
        agent.wait().expect("its status");
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        let response = self.http.get(format!("{}/api/v1{path}", self.url)).send().await.expect("a response");
        assert!(response.status().is_success(), "{path}: {}", response.status());
        response.json().await.expect("JSON")
    }

    pub(crate) fn logs(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.serve.folder.path().join(name)).unwrap_or_default();
        let section = |(name, _): &(String, Child)| format!("--- {name}\n{}", read(&format!("{name}.log")));
        self.agents.iter().map(section).chain([format!("--- serve\n{}", self.serve.log())]).collect()
    }

    pub(crate) async fn until(&self, what: &str, is_so: impl AsyncFn() -> bool) {
        let start = Instant::now();
        while !is_so().await {
            assert!(start.elapsed() < TIMEOUT, "{what}: {}", self.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn until_online(&self, names: &[&str]) {
        self.until("agents are online", async || {
            let agents = self.get("/agents").await;
            let mut online: Vec<_> = agents["agents"]
                .as_array()
                .expect("agents")
                .iter()
                .filter(|agent| agent["online"] == true)
                .filter_map(|agent| agent["name"].as_str().map(str::to_owned))
                .collect();
            online.sort();
            online == names
        })
        .await;
    }

    /// Submits a job of four ranks, whose weights depend only on its seed.
    pub(crate) async fn submit(&self) -> String {
        self.submit_ranks(4, STEPS).await
    }

    /// As [`Site::submit`], with these numbers of ranks and steps.
    pub(crate) async fn submit_ranks(&self, ranks: u32, steps: u64) -> String {
        self.submit_with(ranks, steps, json!({})).await
    }

    /// As [`Site::submit_ranks`], with changes.
    pub(crate) async fn submit_with(&self, ranks: u32, steps: u64, changes: Value) -> String {
        let base = json!({"checkpoint": {"every_epochs": null, "every_steps": 20}, "train": {"seed": 7}});
        let spec = specs::with(specs::short("hosts", "pictures", ranks, steps), base);
        let spec = specs::with(spec, changes);
        // With `launched=true`, the server accepts a job before its agents have joined.
        let jobs = format!("{}/api/v1/jobs?launched=true", self.url);
        let response = self.http.post(jobs).json(&spec).send().await;
        let job: Value = response.expect("a response").json().await.expect("JSON");
        job["id"].as_str().unwrap_or_else(|| panic!("{job:#}")).to_owned()
    }

    pub(crate) async fn until_step(&self, id: &str, step: u64) {
        self.until("the job trains", async || {
            number(&self.get(&format!("/jobs/{id}")).await["step"]) >= step
        })
        .await;
    }

    /// Waits for the first step of an attempt. Returns the time, and the step from which the attempt started.
    pub(crate) async fn next_step(&self, id: &str, attempt: u64) -> (Instant, u64) {
        let mut from = 0;
        let plans = format!("/jobs/{id}/events?type=plan");
        self.until("the attempt starts", async || {
            let plans = self.get(&plans).await;
            plans["events"].as_array().expect("events").iter().any(|plan| plan["attempt"] == attempt)
        })
        .await;
        for plan in self.get(&plans).await["events"].as_array().expect("events") {
            from = number(&plan["start_step"]);
        }
        self.until("the attempt trains a step", async || {
            number(&self.get(&format!("/jobs/{id}")).await["step"]) > from
        })
        .await;
        (Instant::now(), from)
    }

    /// The last step that any rank of an attempt has reported.
    pub(crate) async fn last_step(&self, id: &str, attempt: u64) -> u64 {
        let response = self.get(&format!("/jobs/{id}/metrics?name=loss&points=10000")).await;
        let series = response["series"].as_array().expect("series").clone();
        let of_attempt = series.iter().filter(|curve| curve["attempt"] == attempt);
        let last = of_attempt.filter_map(|curve| curve["steps"].as_array()?.last().map(number));
        last.max().expect("a step")
    }

    /// Number of ranks on a host.
    fn ranks_on(&self, host: u32) -> usize {
        let line = |pid: &i32| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let is_rank = |pid: &i32| line(pid).split(|byte| *byte == 0).any(|word| word == b"rank");
        self.network.processes(host).iter().filter(|pid| is_rank(pid)).count()
    }

    /// Number of times that a job's log has these words.
    pub(crate) fn count_in_log(&self, id: &str, words: &str) -> usize {
        let logs = self.cli(&["logs", id]);
        logs.ok().matches(words).count()
    }

    /// Waits for the job to succeed. Returns the job and the bytes of its last model.
    pub(crate) async fn wait_for_success(&self, id: &str) -> (Value, Vec<u8>) {
        let path = format!("/jobs/{id}");
        self.until("the job has succeeded", async || {
            let state = self.get(&path).await["state"].as_str().unwrap_or_default().to_owned();
            assert!(!matches!(state.as_str(), "failed" | "cancelled"), "{state}: {}", self.logs());
            state == "succeeded"
        })
        .await;
        let last = async || {
            let response = self.get(&format!("{path}/checkpoints")).await;
            let checkpoints = response["checkpoints"].as_array().expect("checkpoints").clone();
            checkpoints.into_iter().max_by_key(|one| number(&one["step"])).expect("a checkpoint")
        };
        self.until("the last checkpoint is uploaded", async || last().await["uploading_from"].is_null())
            .await;
        let id = last().await["id"].as_str().expect("an id").to_owned();
        let model = format!("{}/api/v1/checkpoints/{id}/model.safetensors", self.url);
        let response = self.http.get(model).send().await.expect("a response");
        assert!(response.status().is_success(), "{}", response.status());
        (self.get(&path).await, response.bytes().await.expect("the model").to_vec())
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        while let Some((name, _)) = self.agents.first() {
            let name = name.clone();
            self.leave(&name);
        }
    }
}

#[tokio::test]
async fn a_job_over_four_hosts_has_one_host_s_weights_even_after_outages() {
    let _permit = training_permit().await;
    let (mut site, reference_weights) = Site::with_reference_weights(5).await;
    for host in 1..=4 {
        site.join(host, &format!("h{host}"), 1);
    }
    site.until_online(&["h1", "h2", "h3", "h4"]).await;
    // A short outage: the ranks' connections survive, and no step is repeated.
    let id = site.submit().await;
    site.until_step(&id, 25).await;
    site.network.set_connected(3, false);
    tokio::time::sleep(SHORT_OUTAGE).await;
    site.network.set_connected(3, true);
    let (job, weights) = site.wait_for_success(&id).await;
    assert_eq!((&job["agents"], &job["attempt"]), (&json!(["h1", "h2", "h3", "h4"]), &json!(1)));
    assert!(weights == reference_weights, "the same weights over four hosts");
    assert_eq!(
        site.count_in_log(
            &id,
            "their connections are not encrypted: keep these machines in a private network"
        ),
        1
    );

    // A longer outage within the lease: the job continues on the same machines, as there is no other.
    let id = site.submit().await;
    site.until_step(&id, 25).await;
    site.network.set_connected(3, false);
    tokio::time::sleep(LONG_OUTAGE).await;
    site.network.set_connected(3, true);
    let (_, from) = site.next_step(&id, 2).await;
    assert!(site.last_step(&id, 1).await <= from + 1, "at most one step is repeated");
    let (job, weights) = site.wait_for_success(&id).await;
    assert_eq!((&job["agents"], &job["attempt"]), (&json!(["h1", "h2", "h3", "h4"]), &json!(2)));
    assert!(weights == reference_weights, "the same weights after an outage");

    // The machine of rank 2 is lost for good, and a spare machine replaces it. In the second round, the machine of rank 0 is lost, and the
    // machine that was lost before is the spare.
    site.join(5, "h5", 1);
    site.until_online(&["h1", "h2", "h3", "h4", "h5"]).await;
    let host = |name: &str| name.trim_start_matches('h').parse::<u32>().expect("a number");
    for rank in [2, 0] {
        let id = site.submit().await;
        site.until_step(&id, 45).await;
        let job = site.get(&format!("/jobs/{id}")).await;
        let victim = job["agents"][rank].as_str().expect("an agent").to_owned();
        let cut = Instant::now();
        site.network.set_connected(host(&victim), false);
        let (stepped, from) = site.next_step(&id, 2).await;
        let recovery = stepped - cut;
        eprintln!(
            "rank {rank}'s machine is lost: the next step is stored {recovery:.2?} later, from step {from}"
        );
        assert!(recovery < MAX_RECOVERY, "{recovery:?}: {}", site.logs());
        assert!(from >= 45 && site.last_step(&id, 1).await <= from + 1, "at most one step is repeated");
        site.until("the lost machine's rank ends by itself", async || site.ranks_on(host(&victim)) == 0)
            .await;
        let job_dir = site.serve.folder.path().join(format!("{victim}/jobs/{id}"));
        let log = attempt_dir(&job_dir, 1).join(format!("rank.{rank}.log"));
        let log = fs::read_to_string(log).expect("its log");
        assert!(log.contains("lost the connection") && !log.contains("lease"), "{log}");
        let (job, weights) = site.wait_for_success(&id).await;
        assert!(weights == reference_weights, "the same weights after a host was lost");
        let agents = job["agents"].as_array().expect("agents");
        assert!(agents.len() == 4 && !agents.contains(&json!(victim)), "{agents:?} without {victim}");
        let attempts = site.get(&format!("/jobs/{id}/attempts")).await;
        let attempts = attempts["attempts"].as_array().expect("attempts").clone();
        assert_eq!(attempts.len(), 2, "{attempts:#?}");
        let first = attempts.iter().find(|attempt| attempt["attempt"] == 1).expect("attempt 1");
        let reason = first["reason"].to_string();
        assert!(reason.contains(&victim), "{first:#}");
        assert!(
            reason.contains("the ranks of other machines have lost contact with its ranks"),
            "not by its lease: {first:#}"
        );
        site.network.set_connected(host(&victim), true);
        site.until_online(&["h1", "h2", "h3", "h4", "h5"]).await;
    }
}
