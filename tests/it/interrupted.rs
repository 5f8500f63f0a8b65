//! Ctrl-C while a job is shown.

use crate::{
    pictures,
    server::{SOON, Server, lockstep_that_can_be_interrupted, signal, turn},
};
use rustix::process::Signal;
use std::{
    fs::{self, File},
    os::unix::{fs::PermissionsExt, process::ExitStatusExt},
    path::Path,
    process::{Child, Command},
    time::Instant,
};

fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < SOON, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Starts a display and interrupts it once it shows the job's steps; the job's id and all that was said.
fn interrupted(command: &mut Command, folder: &Path) -> (Child, String) {
    let log = File::create(folder.join("shown.log")).expect("a log");
    command.stdout(log.try_clone().expect("a log")).stderr(log).current_dir(folder);
    let child = command.spawn().expect("a display");
    let said = || fs::read_to_string(folder.join("shown.log")).unwrap_or_default();
    until("steps are shown", || said().contains(", step "));
    signal(child.id() as i32, Signal::INT);
    (child, said())
}

#[tokio::test]
async fn ctrl_c_ends_only_the_display() {
    let _turn = turn().await;
    let server = Server::start().await;
    let folder = server.folder().path();
    let dataset = pictures::idx_dataset(folder, 64, 16);
    server.register("fashion", &dataset).await;
    let toml = "name = \"long\"\n[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashion\"\nimage_size = 16\n[train]\n\
                steps = 1000000\nbatch_size = 8\n[parallel]\nranks = 1\ndevice = \"cpu\"\n";
    server.folder().write("long.toml", toml);
    let mut submit = lockstep_that_can_be_interrupted();
    let (mut display, said) =
        interrupted(submit.args(["submit", "long.toml", "--watch"]).envs(server.for_clients()), folder);
    // As for every program that Ctrl-C ends, a shell shows 130 and scripts stop.
    let status = display.wait().expect("its status");
    assert_eq!((status.code(), status.signal()), (None, Some(2)), "{said}");
    let id = said.split_whitespace().find(|word| word.starts_with('j') && word.len() == 27);
    let id = id.expect("an id").to_owned();
    for words in [
        "Ctrl-C ends this display and not the job".to_owned(),
        format!("`lockstep watch {id}` shows it again"),
        format!("`lockstep cancel {id}` stops it"),
    ] {
        assert!(said.contains(&words), "{words}: {said}");
    }

    let step = async || server.job(&id).await["step"].as_u64().unwrap_or(0);
    let then = step().await;
    server.until("it trains on", async |_: &Server| step().await > then + 5).await;
    assert_eq!(server.job(&id).await["state"], "running");
    let mut watch = lockstep_that_can_be_interrupted();
    let (mut display, said) = interrupted(watch.args(["watch", &id]).envs(server.for_clients()), folder);
    assert_eq!(display.wait().expect("its status").signal(), Some(2), "{said}");
    assert_eq!(server.job(&id).await["state"], "running");
    server.cli(&["cancel", &id]).ok();
    let ended = server.ended(&id).await;
    assert_eq!(ended["state"], "cancelled");
    server.stop().await;
}

#[tokio::test]
async fn ctrl_c_cancels_a_sweep_that_slurm_has_not_taken() {
    let _turn = turn().await;
    let server = Server::start().await;
    let folder = server.folder().path();
    server.register("fashion", &pictures::idx_dataset(folder, 64, 16)).await;
    // The server's own agent has two slots, so only launched agents could run the jobs.
    let toml = "name = \"swept\"\n[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashion\"\nimage_size = 16\n[train]\n\
                steps = 2\nbatch_size = 8\n[parallel]\nranks = 3\ndevice = \"cpu\"\n";
    server.folder().write("job.toml", toml);
    // Slurm is slow, and does not take the sweep in the end.
    for name in ["sbatch", "squeue", "scancel"] {
        let program = server.folder().write(&format!("bin/{name}"), "#!/bin/sh\nsleep 0.5\nexit 1\n");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("a mode");
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let log = File::create(folder.join("launch.log")).expect("a log");
    let mut launch = lockstep_that_can_be_interrupted();
    launch
        .args(["launch", "job.toml", "--with", "slurm", "--sweep", "train.seed=1,2", "--dir"])
        .arg(folder.join("launch"))
        .envs(server.for_clients())
        .env("PATH", format!("{}:{path}", folder.join("bin").display()))
        .current_dir(folder)
        .stdout(log.try_clone().expect("a log"))
        .stderr(log);
    let mut launch = launch.spawn().expect("a launch");
    let said = || fs::read_to_string(folder.join("launch.log")).unwrap_or_default();
    until("the sweep is named", || said().contains("2 trials of swept"));
    signal(launch.id() as i32, Signal::INT);
    assert_eq!(launch.wait().expect("its status").code(), Some(1), "{}", said());
    assert!(said().contains("is cancelled, as its agents were not started"), "{}", said());
    assert_eq!(server.get("/sweeps").await["sweeps"][0]["state"], "cancelled");
    let are_cancelled = async |server: &Server| {
        let jobs = server.get("/jobs").await["jobs"].as_array().cloned().unwrap_or_default();
        jobs.iter().all(|job| job["state"] == "cancelled")
    };
    server.until("its jobs are cancelled", are_cancelled).await;
    server.stop().await;
}
