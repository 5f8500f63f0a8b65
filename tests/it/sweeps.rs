//! Sweeps of values that are paths, over a network that loses answers.

use crate::{
    pictures,
    server::{Agents, Finished, Server, lockstep, turn},
};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// What a request that submits a job begins with.
const SUBMITS: &[u8] = b"POST /api/v1/jobs HTTP/1.1";

/// Passes everything on to a server, but for the answers to some requests that submit a job: those are lost on the way.
struct Lossy {
    url: String,
    left: Arc<AtomicUsize>,
}

impl Lossy {
    fn start(server: &Server, lost: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let to = server.url.trim_start_matches("http://").to_owned();
        let left = Arc::new(AtomicUsize::new(lost));
        let counted = left.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (to, left) = (to.clone(), counted.clone());
                thread::spawn(move || pass_on(client, &to, &left));
            }
        });
        Self { url, left }
    }
}

fn pass_on(mut client: TcpStream, to: &str, left: &AtomicUsize) -> io::Result<()> {
    let mut server = TcpStream::connect(to)?;
    let (mut answers, mut back) = (server.try_clone()?, client.try_clone()?);
    let is_lost = Arc::new(AtomicUsize::new(0));
    let loses = is_lost.clone();
    thread::spawn(move || -> io::Result<()> {
        let mut bytes = [0; 16384];
        loop {
            let read = answers.read(&mut bytes)?;
            if read == 0 || loses.load(Ordering::Relaxed) > 0 {
                return back.shutdown(Shutdown::Both);
            }
            back.write_all(&bytes[..read])?;
        }
    });
    let mut bytes = [0; 16384];
    loop {
        let read = client.read(&mut bytes)?;
        if read == 0 {
            return server.shutdown(Shutdown::Both);
        }
        let one_less = |left: usize| left.checked_sub(1);
        if bytes[..read].starts_with(SUBMITS)
            && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
        {
            is_lost.store(1, Ordering::Relaxed);
        }
        server.write_all(&bytes[..read])?;
    }
}

#[tokio::test]
async fn swept_paths_are_registered_and_a_lost_answer_makes_no_second_job() {
    let _turn = turn().await;
    let server = Server::start_with(Agents::Local { cpu_slots: 1 }).await;
    for (name, pictures) in [("one", 64), ("two", 96)] {
        let path = pictures::idx_dataset(server.folder().path(), pictures, 32);
        std::fs::rename(path, server.folder().path().join(name)).expect("a folder");
    }
    let toml = "name = \"swept\"\n[model]\narch = \"resnet20\"\n[data]\nimage_size = 16\n[train]\nsteps = 2\nbatch_size = 8\n\
                [parallel]\nranks = 1\ndevice = \"cpu\"\n";
    server.folder().write("job.toml", toml);
    let network = Lossy::start(&server, 2);
    let mut command = lockstep();
    command
        .current_dir(server.folder().path())
        .envs(server.for_clients())
        .env("LOCKSTEP_SERVER", &network.url);
    // What cannot be a job has nothing registered.
    let sweep = |command: &mut std::process::Command, seeds: &str| {
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
    let mut mistaken = lockstep();
    mistaken.current_dir(server.folder().path()).envs(server.for_clients());
    sweep(&mut mistaken, "train.seed=1,-1");
    Finished::of(&mut mistaken).wrong(&["train.seed"]);
    assert_eq!(server.get("/datasets").await["datasets"].as_array().map(Vec::len), Some(0));
    sweep(&mut command, "train.seed=1,2");
    let said = Finished::of(&mut command).json();
    assert_eq!(network.left.load(Ordering::Relaxed), 0, "two answers were lost");
    let ids = |jobs: &Value| -> BTreeSet<String> {
        let jobs = jobs.as_array().expect("jobs").iter();
        jobs.map(|job| job["id"].as_str().expect("an id").to_owned()).collect()
    };
    let reported = ids(&said["jobs"]);
    let there = server.get("/jobs").await["jobs"].take();
    assert_eq!(ids(&there), reported, "each is there once");
    let mut datasets: Vec<_> =
        there.as_array().expect("jobs").iter().map(|job| job["spec"]["data"]["dataset"].clone()).collect();
    datasets.sort_by_key(Value::to_string);
    assert_eq!(datasets, ["one", "one", "two", "two"]);
    for id in reported {
        server.succeeded(&id).await;
    }

    // Folds are a sweep whose group has mean and standard deviation.
    let mut folds = lockstep();
    folds.current_dir(server.folder().path()).envs(server.for_clients());
    folds.args(["submit", "job.toml", "--json", "--set", "data.dataset=one", "--folds", "2"]);
    let said = Finished::of(&mut folds).json();
    let of = |job: &Value| ["folds", "fold"].map(|key| job["spec"]["data"][key].as_u64());
    let found: Vec<_> = said["jobs"].as_array().expect("jobs").iter().map(of).collect();
    assert_eq!(found, [[Some(2), Some(1)], [Some(2), Some(2)]]);
    for id in ids(&said["jobs"]) {
        server.succeeded(&id).await;
    }
    let tag = said["tag"].as_str().expect("a tag");
    let groups = server.cli(&["list", "--tag", tag, "--group-by", "tag"]);
    let has_spread = |line: &str| line.starts_with(tag) && line.contains('±');
    assert!(groups.ok().lines().any(has_spread), "{}", groups.stdout);
    server.stop().await;
}
