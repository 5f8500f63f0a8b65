//! `lockstep launch`: agents for one job, started by a real sshd, Open MPI and Slurm and by a simulated Kubernetes API server on this machine.

mod batch;
mod followed_batch;
mod pods;
mod pods_ends;
mod pods_faults;

use crate::{
    cluster::{Sshd, command_lines},
    server::{Agents, Finished, LOCKSTEP, Process, Server, free_port, lockstep, signal},
    specs,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{fs, process::Command};

/// A server whose only agent inspects datasets but accepts no jobs.
async fn server() -> Server {
    let server = Server::start_training_with(Agents::Separate { cpu_slots: 1 }, 640, 64).await;
    let agents = server.get("/agents").await;
    let agent = agents["agents"][0]["id"].as_str().expect("an agent").to_owned();
    let drained = server.post(&format!("/agents/{agent}/drain"), &json!({})).await;
    assert!(drained.status.is_success(), "{}", drained.text);
    server
}

/// Stops a cluster, whose files are in the server's folder, and then the server.
async fn stop<C>(cluster: C, server: Server) {
    drop(cluster);
    server.stop().await;
}

/// Submits a job that only launched agents may run.
async fn submit(server: &Server, spec: &Value) -> String {
    server.create("/jobs?launched=true", spec).await
}

/// The live agents that were launched.
fn launched_agents(server: &Server) -> Vec<Process> {
    let is_launched = |p: &Process| p.command() == "agent" && p.option("--job").is_some();
    server.processes().into_iter().filter(is_launched).collect()
}

/// A job of 20 steps on two ranks.
fn short(name: &str) -> Value {
    specs::with(
        specs::short(name, "fashion", 2, 20),
        json!({"checkpoint": {"every_epochs": null, "every_steps": 10}}),
    )
}

/// A job that lasts until it is cancelled or paused.
fn endless(name: &str, ranks: u32) -> Value {
    specs::with(
        specs::short(name, "fashion", ranks, 1_000_000),
        json!({"checkpoint": {"every_epochs": null, "every_steps": 50, "keep": 2}}),
    )
}

/// Writes a job file with this number of ranks and these lines of `[train]`, and returns its path.
fn job_file(server: &Server, name: &str, ranks: u32, train: &str) -> String {
    let toml = format!(
        "name = \"{name}\"\n[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashion\"\nimage_size = 8\n[train]\n{train}\n\
         batch_size = 8\n[parallel]\nranks = {ranks}\ndevice = \"cpu\"\n"
    );
    server.folder().write("job.toml", toml).to_str().expect("UTF-8").to_owned()
}

/// `lockstep launch`, with the agents' folders in the test's folder.
fn launch(server: &Server, args: &[&str], options: &[String]) -> Command {
    launch_program(server, LOCKSTEP, args, options)
}

/// As [`launch`], with another program on the machines.
fn launch_program(server: &Server, program: &str, args: &[&str], options: &[String]) -> Command {
    let mut command = lockstep();
    command.current_dir(server.folder().path()).envs(server.client_variables());
    command.arg("launch").args(args).args(["--program", program, "--dir"]);
    command.arg(server.folder().path().join("launch")).arg("--").args(options);
    command
}

/// The line of `lockstep show` with the agents of a job's newest attempt.
fn agents_of(server: &Server, id: &str) -> String {
    let shown = server.cli(&["show", id]);
    shown.ok().lines().find(|line| line.starts_with("on ")).unwrap_or_default().to_owned()
}

async fn valid_agent_tokens(server: &Server) -> usize {
    let tokens = server.get("/tokens?limit=200").await;
    let tokens = tokens["tokens"].as_array().expect("tokens");
    tokens
        .iter()
        .filter(|t| t["scope"] == "agent" && t["revoked_at"].is_null() && !t["expires_at"].is_null())
        .count()
}

#[tokio::test]
async fn an_agent_started_by_ssh_runs_only_the_job_and_ends_with_it() {
    let server = server().await;
    let sshd = Sshd::start(server.folder().path());
    let id = submit(&server, &short("over-ssh")).await;
    let hosts = server.folder().write("hosts", "127.0.0.1 slots=2 env:LOCKSTEP_LOG=debug # this machine\n");
    let hosts = hosts.to_str().expect("a path");
    let done = Finished::of(&mut launch(
        &server,
        &[&id, "--with", "ssh", "--hostfile", hosts],
        &sshd.options(sshd.port),
    ));
    done.ok();
    assert!(done.stderr.contains("the agents' logs are in"), "{}", done.stderr);
    assert!(done.stdout.contains("ran on 127.0.0.1 (agent launch-"), "{}", done.stdout);
    let job = server.wait_for_success(&id).await;
    assert_eq!(job["attempt"], 1, "{job:#}");
    assert!(agents_of(&server, &id).contains("launch-"), "an agent of the launch ran it");
    assert!(launched_agents(&server).is_empty(), "the agent ends with its job");
    assert_eq!(valid_agent_tokens(&server).await, 0, "the agent's token is revoked");
    server.stop().await;
}

#[tokio::test]
async fn a_job_file_is_submitted_and_no_token_is_on_a_command_line() {
    let server = server().await;
    let sshd = Sshd::start(server.folder().path());
    let file = &*job_file(&server, "file", 2, "steps = 1000000");
    let args = [file, "--with", "ssh", "-H", "127.0.0.1", "--detach"];
    let done = Finished::of(&mut launch(&server, &args, &sshd.options(sshd.port)));
    let id = done.ok().split_whitespace().next().expect("an id").to_owned();
    server.wait_for_job(&id, "the job trains", |job| job["state"] == "running").await;
    let folder = server.folder().path().join("launch").join(&id);
    let agent = fs::read_dir(&folder).expect("a folder").filter_map(Result::ok).find(|e| e.path().is_dir());
    let token = fs::read_to_string(agent.expect("an agent").path().join("token")).expect("its token");
    assert!(token.len() > 20);
    let lines = command_lines();
    assert!(lines.iter().any(|line| line.contains("agent --server")), "{lines:#?}");
    assert!(lines.iter().all(|line| !line.contains(token.trim())), "a token on a command line");
    // Without a following launch, the agent ends by itself.
    server.cli(&["cancel", &id]).ok();
    server.until("the agent has ended", async |s: &Server| launched_agents(s).is_empty()).await;
    server.stop().await;
}

#[tokio::test]
async fn a_failed_launch_is_reported_and_the_job_cancelled() {
    let server = server().await;
    let sshd = Sshd::start(server.folder().path());
    let file = &*job_file(&server, "fails", 2, "steps = 9");
    let assert_fails = |args: &[&str], options: &[String], messages: &[&str]| {
        let done = Finished::of(&mut launch(&server, args, options));
        assert_ne!(done.status, 0, "{}", done.stdout);
        for words in messages {
            assert!(done.stderr.contains(words), "{args:?} does not say {words:?}: {}", done.stderr);
        }
        done.stdout.split_whitespace().next().unwrap_or_default().to_owned()
    };
    let ssh = [file, "--with", "ssh", "-H", "127.0.0.1:2"];
    let id = assert_fails(
        &ssh,
        &sshd.options(free_port()),
        &["127.0.0.1 cannot be reached by ssh", "refused", "is cancelled"],
    );
    assert_eq!(server.job(&id).await["state"], "cancelled");
    assert_eq!(valid_agent_tokens(&server).await, 0, "the agent's token is revoked");
    let mut command = launch_program(&server, "/nowhere/lockstep", &ssh, &sshd.options(sshd.port));
    Finished::of(&mut command).assert_fails(1, &["127.0.0.1 cannot run lockstep", "--program"]);
    // Errors that are found before the submission.
    let before = server.get("/jobs").await["jobs"].as_array().map(Vec::len);
    assert_fails(&[file, "--with", "ssh", "-H", "127.0.0.1:1"], &[], &["2 ranks", "1 slot:"]);
    assert_fails(
        &[file, "--with", "ssh", "-H", "10.9.8.7:2"],
        &[],
        &["10.9.8.7 cannot reach the server", "--agent-server"],
    );
    assert_fails(&[file, "--with", "ssh"], &[], &["no machines are named"]);
    let mut command = launch(&server, &[file, "--with", "slurm"], &[]);
    let done = Finished::of(command.env("PATH", server.folder().path()));
    assert!(done.stderr.contains("there is no sbatch on the PATH"), "{}", done.stderr);
    assert_eq!(server.get("/jobs").await["jobs"].as_array().map(Vec::len), before);
    server.stop().await;
}

#[test]
fn a_dry_run_shows_commands_and_starts_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = folder.path().join("job.toml");
    fs::write(&job, "[data]\ndataset = \"fashion\"\n[parallel]\nranks = 8\ndevice = \"cpu\"\n")
        .expect("a job");
    let table = folder.path().join("table.json");
    let device = |d: u32| json!({"device_id": d.to_string(), "rank_id": d.to_string()});
    let list = json!([{"server_id": "127.0.0.1", "device": (0..8).map(device).collect::<Vec<_>>()}]);
    fs::write(&table, json!({"server_list": list}).to_string()).expect("a table");
    let dry_run = |with: &str, more: &[&str]| {
        let mut command = lockstep();
        command
            .arg("launch")
            .arg(&job)
            .args(["--with", with, "--dry-run"])
            .args(more)
            .current_dir(folder.path());
        Finished::of(&mut command).ok().to_owned()
    };
    let shown = dry_run(
        "ssh",
        &["-H", "127.0.0.1:4,localhost:4", "--program", "/opt/lock step/lockstep", "--", "-p", "22"],
    );
    assert_eq!(shown.lines().count(), 2, "{shown}");
    assert!(shown.contains(r"-p 22 -- 127.0.0.1 ''\''/opt/lock step/lockstep'\'' launched -'"), "{shown}");
    let table = table.to_str().expect("a path");
    let shown = dry_run("mpirun", &["--rank-table", table]);
    assert!(
        shown.starts_with("mpirun -H 127.0.0.1:1 -np 1 ") && shown.contains("lockstep launched env"),
        "{shown}"
    );
    let shown = dry_run("slurm", &["--nodes", "2", "--", "--time=1:00:00"]);
    for line in [
        "sbatch --parsable --time=1:00:00",
        "#SBATCH --nodes=2",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --requeue",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "no {line}: {shown}");
    }
    // A shell can parse the script.
    let script = shown.split_once('\n').expect("a script").1;
    let path = folder.path().join("script");
    fs::write(&path, script).expect("a script");
    assert!(Command::new("bash").arg("-n").arg(&path).status().expect("bash").success(), "{script}");
}

#[tokio::test]
async fn agents_end_if_their_launch_fails_for_another_machine() {
    let server = server().await;
    let sshd = Sshd::start(server.folder().path());
    let file = &*job_file(&server, "fails", 2, "steps = 9");
    let waits = submit(&server, &short("waits")).await;
    for (job, state) in [(file, "cancelled"), (&*waits, "queued")] {
        // No sshd listens at the second address.
        let args = [job, "--with", "ssh", "-H", "127.0.0.1:1,127.0.0.2:1"];
        let done = Finished::of(&mut launch(&server, &args, &sshd.options(sshd.port)));
        done.assert_fails(1, &["127.0.0.2 cannot be reached by ssh"]);
        let id = done.stdout.split_whitespace().next().expect("an id");
        assert_eq!(server.job(id).await["state"], state);
        assert_eq!(valid_agent_tokens(&server).await, 0);
        // The first machine's agent may still be starting, with the launch's token, which is revoked.
        let logs = server.folder().path().join("launch").join(id);
        let agent_logs = || {
            let files = fs::read_dir(&logs).expect("logs").filter_map(Result::ok);
            files.filter_map(|file| fs::read_to_string(file.path()).ok()).collect::<String>()
        };
        server
            .until("the agent ends", async |s: &Server| {
                (agent_logs().contains("refused this agent") || agent_logs().contains("the job is over"))
                    && launched_agents(s).is_empty()
            })
            .await;
    }
    server.stop().await;
}

/// A cluster can restart an agent on another machine with the same folder.
#[tokio::test]
async fn an_agent_of_one_job_that_returns_after_its_lease_runs_the_next_attempt() {
    let server = server().await;
    let id = submit(&server, &endless("comes-back", 2)).await;
    let start = || {
        let mut command = server.agent_command(lockstep(), &server.url, "serves", 2);
        command.args(["--job", &id]).spawn().expect("lockstep agent starts")
    };
    let mut agent = start();
    batch::until_past_step(&server, &id, 1, 20).await;
    agent.kill().expect("SIGKILL");
    server.ranks(&id).iter().for_each(|(_, rank)| signal(rank.pid, Signal::KILL));
    server.wait_for_job(&id, "the lease has expired", |job| job["state"] == "restarting").await;
    let mut second = start();
    batch::until_past_step(&server, &id, 2, 20).await;
    server.cli(&["cancel", &id]).ok();
    server.until("the agent ends with its job", async |s: &Server| launched_agents(s).is_empty()).await;
    assert!(second.wait().expect("its status").success());
    agent.wait().expect("its status");
    server.stop().await;
}

#[tokio::test]
async fn a_job_that_allows_fewer_ranks_continues_on_the_reachable_machine() {
    let server = server().await;
    let sshd = Sshd::start(server.folder().path());
    let fewer = json!({"recovery": {"min_ranks": 1, "wait_seconds": 1}});
    let id = submit(&server, &specs::with(endless("fewer", 2), fewer)).await;
    let args = [id.as_str(), "--with", "ssh", "-H", "127.0.0.1:2"];
    let mut first = launch(&server, &args, &sshd.options(sshd.port)).spawn().expect("lockstep launch starts");
    batch::until_past_step(&server, &id, 1, 20).await;
    // The agent and the ranks end as in a power failure.
    launched_agents(&server).iter().for_each(|agent| signal(agent.pid, Signal::KILL));
    server.ranks(&id).iter().for_each(|(_, rank)| signal(rank.pid, Signal::KILL));
    first.wait().expect("it ends");
    server.wait_for_job(&id, "the lease has expired", |job| job["state"] == "restarting").await;
    // No sshd listens at the second address.
    let args = [id.as_str(), "--with", "ssh", "-H", "127.0.0.1:1,127.0.0.2:1"];
    let mut second = launch(&server, &args, &sshd.options(sshd.port));
    let second = tokio::task::spawn_blocking(move || Finished::of(&mut second));
    let job = batch::until_past_step(&server, &id, 2, 60).await;
    assert!(job["cause"]["code"] == "fewer_ranks" && job["cause"]["ranks"] == 1, "{job:#}");
    server.cli(&["cancel", &id]).ok();
    let Finished { stdout, stderr, .. } = second.await.expect("it ends");
    assert!(stderr.contains("127.0.0.2 cannot be reached by ssh"), "{stderr}");
    // The machines are also printed for a job without success.
    assert!(stdout.contains("ran on 127.0.0.1 (agent launch-"), "{stdout}");
    server.until("the agent ends", async |s: &Server| launched_agents(s).is_empty()).await;
    server.stop().await;
}

#[tokio::test]
async fn a_failed_launch_names_the_agent_that_still_runs_the_job() {
    let server = Server::start_training(640, 64).await;
    let file = &*job_file(&server, "taken", 2, "steps = 1000000");
    // The connection breaks once the server's own agent trains the job.
    let trains = server.folder().path().join("trains");
    let proxy = format!("ProxyCommand=sh -c 'until [ -e {} ]; do sleep 0.1; done; exit 1'", trains.display());
    let args = [file, "--with", "ssh", "-H", "127.0.0.1:2"];
    let mut command = launch(&server, &args, &["-o".into(), proxy]);
    let done = tokio::task::spawn_blocking(move || Finished::of(&mut command));
    server
        .until("the job trains", async |s: &Server| {
            s.get("/jobs").await["jobs"][0]["step"].as_u64() > Some(0)
        })
        .await;
    fs::write(&trains, "").expect("a file");
    let done = done.await.expect("it ends");
    let job = server.get("/jobs").await["jobs"][0].clone();
    let id = job["id"].as_str().expect("an id");
    done.assert_fails(
        1,
        &[
            "127.0.0.1 cannot be reached by ssh",
            &format!("job {id} nevertheless runs on local"),
            "repeating this command would train the job twice",
        ],
    );
    assert!(!done.stderr.contains("starts agents for it again"), "{}", done.stderr);
    assert_eq!(job["state"], "running", "the job continues");
    assert_eq!(valid_agent_tokens(&server).await, 0, "the launch's tokens are revoked");
    server.cli(&["cancel", id]).ok();
    server.wait_for_end(id).await;
    server.stop().await;
}
