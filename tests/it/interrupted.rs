//! Ctrl-C during `submit --watch` and `watch`.

use crate::{
    server::{Server, interruptible_lockstep, signal, wait_until},
    specs,
};
use rustix::process::Signal;
use std::{
    fs::{self, File},
    os::unix::{fs::PermissionsExt, process::ExitStatusExt},
    path::Path,
    process::{Child, Command},
};

/// Starts a command and interrupts it once it shows the job's steps. Returns the process and what it has shown so far.
async fn interrupt(command: &mut Command, folder: &Path) -> (Child, String) {
    let log = File::create(folder.join("shown.log")).expect("a log");
    command.stdout(log.try_clone().expect("a log")).stderr(log).current_dir(folder);
    let child = command.spawn().expect("a display");
    let shown = || fs::read_to_string(folder.join("shown.log")).unwrap_or_default();
    wait_until("steps are shown", || shown().contains(", step "), shown).await;
    signal(child.id() as i32, Signal::INT);
    (child, shown())
}

#[tokio::test]
async fn ctrl_c_ends_only_the_display() {
    let server = Server::start_training(64, 16).await;
    let folder = server.folder().path();
    let long = specs::short("long", "fashion", 1, 1_000_000);
    server.folder().write("long.toml", toml::to_string(&long).expect("a job"));
    let mut submit = interruptible_lockstep();
    submit.args(["submit", "long.toml", "--watch"]).envs(server.client_variables());
    let (mut display, shown) = interrupt(&mut submit, folder).await;
    // The process ends by the signal, so that a shell reports 130 and scripts stop.
    let status = display.wait().expect("its status");
    assert_eq!((status.code(), status.signal()), (None, Some(2)), "{shown}");
    let id = shown.split_whitespace().find(|word| word.starts_with('j') && word.len() == 27);
    let id = id.expect("an id").to_owned();
    for words in [
        "Ctrl-C ends this display and not the job".to_owned(),
        format!("`lockstep watch {id}` shows the job again"),
        format!("`lockstep cancel {id}` stops the job"),
    ] {
        assert!(shown.contains(&words), "{words}: {shown}");
    }

    let step = async || server.job(&id).await["step"].as_u64().unwrap_or(0);
    let before = step().await;
    server.until("the job continues", async |_: &Server| step().await > before + 5).await;
    assert_eq!(server.job(&id).await["state"], "running");
    let mut watch = interruptible_lockstep();
    watch.args(["watch", &id]).envs(server.client_variables());
    let (mut display, shown) = interrupt(&mut watch, folder).await;
    assert_eq!(display.wait().expect("its status").signal(), Some(2), "{shown}");
    assert_eq!(server.job(&id).await["state"], "running");
    server.cli(&["cancel", &id]).ok();
    let ended = server.wait_for_end(&id).await;
    assert_eq!(ended["state"], "cancelled");
    server.stop().await;
}

#[tokio::test]
async fn ctrl_c_cancels_a_sweep_that_slurm_has_not_accepted() {
    let server = Server::start_training(64, 16).await;
    let folder = server.folder().path();
    // The jobs need three slots and the server's own agent has two, so only launched agents could run them.
    let swept = specs::short("swept", "fashion", 3, 2);
    server.folder().write("job.toml", toml::to_string(&swept).expect("a job"));
    // Slurm's commands fail after half a second.
    for name in ["sbatch", "squeue", "scancel"] {
        let program = server.folder().write(&format!("bin/{name}"), "#!/bin/sh\nsleep 0.5\nexit 1\n");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("a mode");
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let log = File::create(folder.join("launch.log")).expect("a log");
    let mut launch = interruptible_lockstep();
    launch
        .args(["launch", "job.toml", "--with", "slurm", "--sweep", "train.seed=1,2", "--dir"])
        .arg(folder.join("launch"))
        .envs(server.client_variables())
        .env("PATH", format!("{}:{path}", folder.join("bin").display()))
        .current_dir(folder)
        .stdout(log.try_clone().expect("a log"))
        .stderr(log);
    let mut launch = launch.spawn().expect("a launch");
    let output = || fs::read_to_string(folder.join("launch.log")).unwrap_or_default();
    wait_until("the sweep is named", || output().contains("2 trials of swept"), output).await;
    signal(launch.id() as i32, Signal::INT);
    assert_eq!(launch.wait().expect("its status").code(), Some(1), "{}", output());
    assert!(output().contains("is cancelled, as its agents were not started"), "{}", output());
    assert_eq!(server.get("/sweeps").await["sweeps"][0]["state"], "cancelled");
    let are_cancelled = async |server: &Server| {
        let jobs = server.get("/jobs").await["jobs"].as_array().cloned().unwrap_or_default();
        jobs.iter().all(|job| job["state"] == "cancelled")
    };
    server.until("its jobs are cancelled", are_cancelled).await;
    server.stop().await;
}
