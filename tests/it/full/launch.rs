//! `lockstep launch`: agents for one job, by a real sshd, a real Open MPI, a real Slurm and an API server like Kubernetes' on this machine.

mod batch;
mod followed_batch;
mod pods;
mod pods_ends;
mod pods_faults;

use crate::{
    cluster::{Sshd, command_lines},
    pictures,
    server::{Agents, Finished, LOCKSTEP, Process, Server, free_port, lockstep, signal, turn},
    specs,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{fs, process::Command};

/// A server whose only agent looks at datasets and takes no job.
pub(crate) async fn server() -> Server {
    let server = Server::start_with(Agents::Separate { cpu_slots: 1 }).await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 640, 64)).await;
    let agents = server.get("/agents").await;
    let agent = agents["agents"][0]["id"].as_str().expect("an agent").to_owned();
    let drained = server.post(&format!("/agents/{agent}/drain"), &json!({})).await;
    assert!(drained.status.is_success(), "{}", drained.text);
    server
}

/// Submits a job for whose ranks only launched agents will have slots.
pub(crate) async fn submit(server: &Server, spec: &Value) -> String {
    let answer = server.post("/jobs?launched=true", spec).await;
    assert!(answer.status.is_success(), "{}", answer.text);
    answer.json()["id"].as_str().expect("an id").to_owned()
}

/// Launched agents that are alive.
fn launched(server: &Server) -> usize {
    let is_one = |p: &Process| p.command() == "agent" && p.option("--job").is_some();
    server.processes().iter().filter(|p| is_one(p)).count()
}

/// A job of 20 steps on two ranks.
fn short(name: &str) -> Value {
    specs::with(
        specs::short(name, "fashion", 2, 20),
        json!({"checkpoint": {"every_epochs": null, "every_steps": 10}}),
    )
}

/// `lockstep launch`, with its agents' folders in the test's.
pub(crate) fn launch(server: &Server, args: &[&str], options: &[String]) -> Command {
    launch_by(server, LOCKSTEP, args, options)
}

/// As [`launch`], with another program on the machines.
fn launch_by(server: &Server, program: &str, args: &[&str], options: &[String]) -> Command {
    let mut command = lockstep();
    command.current_dir(server.folder().path()).envs(server.for_clients());
    command.arg("launch").args(args).args(["--program", program, "--dir"]);
    command.arg(server.folder().path().join("launch")).arg("--").args(options);
    command
}

/// The line of `lockstep show` that names the agents of a job's newest attempt.
fn agents_of(server: &Server, id: &str) -> String {
    let shown = server.cli(&["show", id]);
    shown.ok().lines().find(|line| line.starts_with("on ")).unwrap_or_default().to_owned()
}

pub(crate) async fn valid_agent_tokens(server: &Server) -> usize {
    let tokens = server.get("/tokens?limit=200").await;
    let tokens = tokens["tokens"].as_array().expect("tokens");
    tokens
        .iter()
        .filter(|t| t["scope"] == "agent" && t["revoked_at"].is_null() && !t["expires_at"].is_null())
        .count()
}

#[tokio::test]
async fn an_agent_started_by_ssh_runs_only_the_job_and_ends_with_it() {
    let _turn = turn().await;
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
    assert!(done.stdout.contains("trained on 127.0.0.1 (agent launch-"), "{}", done.stdout);
    let job = server.succeeded(&id).await;
    assert_eq!(job["attempt"], 1, "{job:#}");
    assert!(agents_of(&server, &id).contains("launch-"), "an agent of the launch ran it");
    assert_eq!(launched(&server), 0, "the agent ends with its job");
    assert_eq!(valid_agent_tokens(&server).await, 0, "its token is revoked");
    server.stop().await;
}

#[tokio::test]
async fn a_job_file_is_submitted_and_no_token_is_on_a_command_line() {
    let _turn = turn().await;
    let server = server().await;
    let sshd = Sshd::start(server.folder().path());
    let toml = "name = \"file\"\n[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashion\"\nimage_size = 8\n[train]\n\
                steps = 1000000\nbatch_size = 8\n[parallel]\nranks = 2\ndevice = \"cpu\"\n";
    let file = server.folder().write("job.toml", toml);
    let file = file.to_str().expect("a path");
    let args = [file, "--with", "ssh", "-H", "127.0.0.1", "--detach"];
    let done = Finished::of(&mut launch(&server, &args, &sshd.options(sshd.port)));
    let id = done.ok().split_whitespace().next().expect("an id").to_owned();
    server.job_when(&id, "it trains", |job| job["state"] == "running").await;
    let folder = server.folder().path().join("launch").join(&id);
    let agent = fs::read_dir(&folder).expect("a folder").filter_map(Result::ok).find(|e| e.path().is_dir());
    let token = fs::read_to_string(agent.expect("an agent").path().join("token")).expect("its token");
    assert!(token.len() > 20);
    let lines = command_lines();
    assert!(lines.iter().any(|line| line.contains("agent --server")), "{lines:#?}");
    assert!(lines.iter().all(|line| !line.contains(token.trim())), "a token on a command line");
    // Nobody follows any more: the agent ends by itself.
    server.cli(&["cancel", &id]).ok();
    server.until("the agent has ended", async |s: &Server| launched(s) == 0).await;
    server.stop().await;
}

#[tokio::test]
async fn a_failed_launch_is_reported_and_the_job_cancelled() {
    let _turn = turn().await;
    let server = server().await;
    let sshd = Sshd::start(server.folder().path());
    let file = server.folder().write(
        "job.toml",
        "[data]\ndataset = \"fashion\"\nimage_size = 8\n[model]\narch = \"resnet20\"\n[train]\nsteps = 9\n[parallel]\nranks = 2\ndevice = \"cpu\"\n",
    );
    let file = file.to_str().expect("a path");
    let fails = |args: &[&str], options: &[String], said: &[&str]| {
        let done = Finished::of(&mut launch(&server, args, options));
        assert_ne!(done.status, 0, "{}", done.stdout);
        for words in said {
            assert!(done.stderr.contains(words), "{args:?} does not say {words:?}: {}", done.stderr);
        }
        done.stdout.split_whitespace().next().unwrap_or_default().to_owned()
    };
    let ssh = [file, "--with", "ssh", "-H", "127.0.0.1:2"];
    let id = fails(
        &ssh,
        &sshd.options(free_port()),
        &["127.0.0.1 cannot be reached by ssh", "refused", "is cancelled"],
    );
    assert_eq!(server.job(&id).await["state"], "cancelled");
    assert_eq!(valid_agent_tokens(&server).await, 0, "its token is revoked");
    let missing = [&ssh[..], &["--program", "/nowhere/lockstep"]].concat();
    let mut command = lockstep();
    command.current_dir(server.folder().path()).envs(server.for_clients()).arg("launch").args(&missing);
    command.arg("--dir").arg(server.folder().path().join("launch")).arg("--").args(sshd.options(sshd.port));
    let done = Finished::of(&mut command);
    assert!(
        done.stderr.contains("127.0.0.1 cannot run lockstep") && done.stderr.contains("--program"),
        "{}",
        done.stderr
    );
    // Known before anything is submitted.
    let before = server.get("/jobs").await["jobs"].as_array().map(Vec::len);
    fails(&[file, "--with", "ssh", "-H", "127.0.0.1:1"], &[], &["2 ranks", "1 slot:"]);
    fails(
        &[file, "--with", "ssh", "-H", "10.9.8.7:2"],
        &[],
        &["10.9.8.7 cannot reach the server", "--agent-server"],
    );
    fails(&[file, "--with", "ssh"], &[], &["no machines are named"]);
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
    let dry = |with: &str, more: &[&str]| {
        let mut command = lockstep();
        command
            .arg("launch")
            .arg(&job)
            .args(["--with", with, "--dry-run"])
            .args(more)
            .current_dir(folder.path());
        Finished::of(&mut command).ok().to_owned()
    };
    let said = dry(
        "ssh",
        &["-H", "127.0.0.1:4,localhost:4", "--program", "/opt/lock step/lockstep", "--", "-p", "22"],
    );
    assert_eq!(said.lines().count(), 2, "{said}");
    assert!(said.contains(r"-p 22 -- 127.0.0.1 ''\''/opt/lock step/lockstep'\'' launched -'"), "{said}");
    let table = table.to_str().expect("a path");
    let said = dry("mpirun", &["--rank-table", table]);
    assert!(
        said.starts_with("mpirun -H 127.0.0.1:1 -np 1 ") && said.contains("lockstep launched env"),
        "{said}"
    );
    let said = dry("slurm", &["--nodes", "2", "--", "--time=1:00:00"]);
    for line in [
        "sbatch --parsable --time=1:00:00",
        "#SBATCH --nodes=2",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --requeue",
    ] {
        assert!(said.lines().any(|said| said == line), "no {line}: {said}");
    }
    // The script is one that a shell can read.
    let script = said.split_once('\n').expect("a script").1;
    let path = folder.path().join("script");
    fs::write(&path, script).expect("a script");
    assert!(Command::new("bash").arg("-n").arg(&path).status().expect("bash").success(), "{script}");
}

#[tokio::test]
async fn agents_end_if_their_launch_fails_for_another_machine() {
    let _turn = turn().await;
    let server = server().await;
    let sshd = Sshd::start(server.folder().path());
    let toml = "[data]\ndataset = \"fashion\"\nimage_size = 8\n[model]\narch = \"resnet20\"\n[train]\nsteps = 9\n\
                [parallel]\nranks = 2\ndevice = \"cpu\"\n";
    let file = server.folder().write("job.toml", toml);
    let waits = submit(&server, &short("waits")).await;
    for (job, state) in [(file.to_str().expect("a path"), "cancelled"), (&waits, "queued")] {
        // Nobody listens at the second address.
        let args = [job, "--with", "ssh", "-H", "127.0.0.1:1,127.0.0.2:1"];
        let done = Finished::of(&mut launch(&server, &args, &sshd.options(sshd.port)));
        done.fails(1, &["127.0.0.2 cannot be reached by ssh"]);
        let id = done.stdout.split_whitespace().next().expect("an id");
        assert_eq!(server.job(id).await["state"], state);
        assert_eq!(valid_agent_tokens(&server).await, 0);
        // That of the first has the token of its launch, which is revoked by now, and may be starting.
        let logs = server.folder().path().join("launch").join(id);
        let said = || {
            let files = fs::read_dir(&logs).expect("logs").filter_map(Result::ok);
            files.filter_map(|file| fs::read_to_string(file.path()).ok()).collect::<String>()
        };
        server
            .until("it ends", async |s: &Server| {
                (said().contains("refused this agent") || said().contains("the job is over"))
                    && launched(s) == 0
            })
            .await;
    }
    server.stop().await;
}

/// As where a cluster starts the agent again on another machine, with the folder of the first.
#[tokio::test]
async fn an_agent_of_one_job_that_returns_after_its_lease_runs_the_next_attempt() {
    let _turn = turn().await;
    let server = server().await;
    let id = submit(&server, &batch::endless("comes-back")).await;
    let token = server.cli(&["token", "create", "--scope", "agent", "--agent", "serves"]);
    let token = server.folder().write("serves.token", token.ok());
    let start = || {
        let mut command = lockstep();
        command.args([
            "agent",
            "--server",
            &server.url,
            "--name",
            "serves",
            "--job",
            &id,
            "--cpu-slots",
            "2",
        ]);
        command.arg("--token-file").arg(&token).arg("--data-dir").arg(server.folder().path().join("serves"));
        command.current_dir(server.folder().path()).spawn().expect("lockstep agent starts")
    };
    let mut agent = start();
    batch::trains_past(&server, &id, 1, 20).await;
    agent.kill().expect("it is there");
    server.ranks(&id).iter().for_each(|(_, rank)| signal(rank.pid, Signal::KILL));
    server.job_when(&id, "its lease has run out", |job| job["state"] == "restarting").await;
    let mut again = start();
    batch::trains_past(&server, &id, 2, 20).await;
    server.cli(&["cancel", &id]).ok();
    server.until("it ends with its job", async |s: &Server| launched(s) == 0).await;
    assert!(again.wait().expect("it has ended").success());
    agent.wait().expect("it was killed");
    server.stop().await;
}

#[tokio::test]
async fn a_job_that_allows_fewer_ranks_continues_on_the_reachable_machine() {
    let _turn = turn().await;
    let server = server().await;
    let sshd = Sshd::start(server.folder().path());
    let fewer = json!({"recovery": {"min_ranks": 1, "wait_seconds": 1}});
    let id = submit(&server, &specs::with(batch::endless("fewer"), fewer)).await;
    let hosts = [id.as_str(), "--with", "ssh", "-H", "127.0.0.1:2"];
    let mut first =
        launch(&server, &hosts, &sshd.options(sshd.port)).spawn().expect("lockstep launch starts");
    batch::trains_past(&server, &id, 1, 20).await;
    // As a power cut.
    for process in server.processes().iter().filter(|p| p.command() == "agent" && p.option("--job").is_some())
    {
        signal(process.pid, Signal::KILL);
    }
    server.ranks(&id).iter().for_each(|(_, rank)| signal(rank.pid, Signal::KILL));
    first.wait().expect("it ends");
    server.job_when(&id, "its lease has run out", |job| job["state"] == "restarting").await;
    // Nobody listens at the second address.
    let hosts = [id.as_str(), "--with", "ssh", "-H", "127.0.0.1:1,127.0.0.2:1"];
    let mut second = launch(&server, &hosts, &sshd.options(sshd.port));
    let second = tokio::task::spawn_blocking(move || Finished::of(&mut second));
    let job = batch::trains_past(&server, &id, 2, 60).await;
    assert!(job["cause"]["code"] == "fewer_ranks" && job["cause"]["ranks"] == 1, "{job:#}");
    server.cli(&["cancel", &id]).ok();
    let said = second.await.expect("it ends").stderr;
    assert!(said.contains("127.0.0.2 cannot be reached by ssh"), "{said}");
    server.until("its agent ends", async |s: &Server| launched(s) == 0).await;
    server.stop().await;
}

#[tokio::test]
async fn a_failed_launch_names_the_agent_that_still_runs_the_job() {
    let _turn = turn().await;
    let server = Server::start_with(Agents::Local { cpu_slots: 2 }).await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 640, 64)).await;
    let toml = "name = \"taken\"\n[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashion\"\nimage_size = 8\n[train]\n\
                steps = 1000000\nbatch_size = 8\n[parallel]\nranks = 2\ndevice = \"cpu\"\n";
    let file = server.folder().write("job.toml", toml);
    // The connection breaks off once the server's own agent trains.
    let trains = server.folder().path().join("trains");
    let proxy = format!("ProxyCommand=sh -c 'until [ -e {} ]; do sleep 0.1; done; exit 1'", trains.display());
    let args = [file.to_str().expect("a path"), "--with", "ssh", "-H", "127.0.0.1:2"];
    let mut command = launch(&server, &args, &["-o".into(), proxy]);
    let done = tokio::task::spawn_blocking(move || Finished::of(&mut command));
    server
        .until("it trains", async |s: &Server| s.get("/jobs").await["jobs"][0]["step"].as_u64() > Some(0))
        .await;
    fs::write(&trains, "").expect("a file");
    let done = done.await.expect("it ends");
    let job = server.get("/jobs").await["jobs"][0].clone();
    let id = job["id"].as_str().expect("an id");
    done.fails(
        1,
        &[
            "127.0.0.1 cannot be reached by ssh",
            &format!("job {id} nevertheless runs on local"),
            "repeating this command would train the job twice",
        ],
    );
    assert!(!done.stderr.contains("starts agents for it again"), "{}", done.stderr);
    assert_eq!(job["state"], "running", "it is left alone");
    assert_eq!(valid_agent_tokens(&server).await, 0, "its tokens are revoked");
    server.cli(&["cancel", id]).ok();
    server.ended(id).await;
    server.stop().await;
}
