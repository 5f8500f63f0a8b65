//! Machines without the server's disk and without the dataset copy the dataset from the server once, and keep copies up to a size limit.

use crate::{
    separate_disks::{Machine, log, server, spec, until_online, uploaded_weights},
    server::{Server, signal},
    specs,
};
use rustix::process::Signal;
use serde_json::json;
use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Log text of a copy.
const COPIES: &str = "copies the dataset fashion";
const FILLER_BYTES: u64 = 256 << 20;

const STEPS: u64 = 20;

/// The path of the dataset of [`server`].
fn dataset(server: &Server) -> PathBuf {
    server.folder().path().join("fashion-640-64")
}

/// Adds a file whose copy takes long enough to be interrupted.
fn add_filler(dataset: &Path) {
    let filler = fs::File::create(dataset.join("filler")).expect("a file");
    filler.set_len(FILLER_BYTES).expect("a sparse file");
}

fn size(folder: &Path) -> u64 {
    fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("a file").metadata().expect("its size").len())
        .sum()
}

/// The folders of a machine's copies.
fn copies(machine: &Machine, server: &Server) -> Vec<PathBuf> {
    let all = fs::read_dir(machine.dir(server).join("datasets")).into_iter().flatten().flatten();
    let all = all.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
    all.map(|entry| entry.path()).collect()
}

#[tokio::test]
async fn a_machine_without_the_files_copies_them_once_and_trains_to_the_same_weights() {
    let server = server().await;
    let data = dataset(&server);
    // An empty folder is part of a dataset, too.
    fs::create_dir(data.join("empty")).expect("a folder");
    let mut a = Machine::start_without(&server, "machine-a", 2, &[], &[]);
    until_online(&server, 3).await;
    let id = server.submit(&spec("shared disk", STEPS)).await;
    let expected = uploaded_weights(&server, &id, STEPS).await;
    assert!(!log(&server, &id).await.contains(COPIES), "the machine has the files");
    a.kill();
    until_online(&server, 1).await;

    let mut b = Machine::start_without(&server, "machine-b", 4, &[&data], &[]);
    until_online(&server, 5).await;
    // Two jobs need the dataset at the same time: only one copies it.
    let (first, second) =
        (server.submit(&spec("first", STEPS)).await, server.submit(&spec("second", STEPS)).await);
    assert_eq!(uploaded_weights(&server, &first, STEPS).await, expected, "the same weights");
    assert_eq!(uploaded_weights(&server, &second, STEPS).await, expected, "the same weights");
    let logs = [log(&server, &first).await, log(&server, &second).await];
    let copied = logs.iter().filter(|log| log.contains(&format!("machine-b {COPIES}"))).count();
    assert_eq!(copied, 1, "{logs:?}");
    let copy_folders = copies(&b, &server);
    let [copy] = copy_folders.as_slice() else { panic!("{copy_folders:?}") };
    assert!(copy.join("data/empty").is_dir());
    // A later job does not copy it again, even with a restarted agent.
    b.kill();
    until_online(&server, 1).await;
    b.start_agent(&server);
    until_online(&server, 5).await;
    let id = server.submit(&spec("later", STEPS)).await;
    assert_eq!(uploaded_weights(&server, &id, STEPS).await, expected, "the same weights");
    assert!(!log(&server, &id).await.contains(COPIES));
    // A missing file of the copy is copied again.
    let labels = copy.join("data/train-labels-idx1-ubyte");
    fs::remove_file(&labels).expect("a file of the copy");
    let id = server.submit(&spec("repaired", STEPS)).await;
    assert_eq!(uploaded_weights(&server, &id, STEPS).await, expected, "the same weights");
    assert!(log(&server, &id).await.contains("% of the dataset fashion") && labels.exists());
    // The dataset changes on the server: it is copied again, and the old copy is deleted.
    let labels = data.join("train-labels-idx1-ubyte");
    let mut changed = fs::read(&labels).expect("labels");
    let last = changed.len() - 1;
    changed[last] = (changed[last] + 1) % 10;
    fs::write(&labels, &changed).expect("other labels");
    let id = server.train(&spec("changed", STEPS)).await;
    assert!(log(&server, &id).await.contains(COPIES));
    let renewed = copies(&b, &server);
    assert!(renewed.len() == 1 && renewed != copy_folders, "{renewed:?}");
    assert_eq!(fs::read(renewed[0].join("data/train-labels-idx1-ubyte")).expect("labels"), changed);
}

#[tokio::test]
async fn a_copy_continues_after_its_agent_and_its_server_were_killed() {
    let mut server = server().await;
    let data = dataset(&server);
    add_filler(&data);
    let mut a = Machine::start_without(&server, "machine-a", 2, &[&data], &[]);
    until_online(&server, 3).await;
    // No restart is allowed: the end of an agent that has not started a rank does not count as one.
    let spec = specs::with(spec("interrupted", STEPS), json!({"recovery": {"max_restarts": 0}}));
    let id = server.submit(&spec).await;
    let begun = wait_for_filler(&a, &server, 0);
    // The suspended server sends nothing until the agent is killed.
    signal(server.serve_pid(), Signal::STOP);
    a.kill();
    let part = assert_unfinished(&begun);
    signal(server.serve_pid(), Signal::CONT);
    a.start_agent(&server);
    // Then the server is killed.
    let continued = wait_for_filler(&a, &server, part.len());
    signal(server.serve_pid(), Signal::STOP);
    server.kill_serve();
    let later = assert_unfinished(&continued);
    assert!(later.len() > part.len(), "{} and then {}", part.len(), later.len());
    server.start_serve().await;
    server.wait_for_success(&id).await;
    let copy_folders = copies(&a, &server);
    let [copy] = copy_folders.as_slice() else { panic!("{copy_folders:?}") };
    let whole = fs::metadata(copy.join("data/filler")).expect("the whole file");
    assert_eq!((whole.ino(), whole.len()), (part.ino(), FILLER_BYTES), "the same file, continued");
}

/// Asserts that a copy is unfinished, by its folder's name and by the filler's length, and returns the filler's metadata.
fn assert_unfinished(filler: &Path) -> fs::Metadata {
    let copy = filler.parent().and_then(Path::parent).expect("a copy");
    assert!(filler.starts_with(copy.join("part")) && !copy.join("data").exists(), "the copy is unfinished");
    let metadata = fs::metadata(filler).expect("a part");
    assert!((1..FILLER_BYTES).contains(&metadata.len()), "{}", metadata.len());
    metadata
}

/// Waits until a machine's copy has more than `bytes` of the filler and returns the filler's path.
fn wait_for_filler(machine: &Machine, server: &Server, bytes: u64) -> PathBuf {
    let began = Instant::now();
    loop {
        for copy in copies(machine, server) {
            for folder in ["part", "data"] {
                let filler = copy.join(folder).join("filler");
                if fs::metadata(&filler).is_ok_and(|metadata| metadata.len() > bytes) {
                    return filler;
                }
            }
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the filler is not copied");
        thread::sleep(Duration::from_millis(1));
    }
}

#[tokio::test]
async fn datasets_are_copied_up_to_the_limit_and_only_from_their_folder() {
    let server = server().await;
    let data = dataset(&server);
    let (limit, less) = (size(&data).to_string(), (size(&data) - 1).to_string());
    let start = |name, limit: &str| {
        Machine::start_without(&server, name, 2, &[&data], &["--dataset-cache-limit", limit])
    };
    // A limit of one byte less than the dataset.
    let mut a = start("machine-a", &less);
    until_online(&server, 3).await;
    let why = server.wait_for_failure(&server.submit(&spec("too large", STEPS)).await).await;
    assert!(why.contains("machine-a") && why.contains("--dataset-cache-limit"), "{why}");
    assert!(copies(&a, &server).is_empty());
    a.kill();
    until_online(&server, 1).await;
    // With a limit of 0 nothing is copied.
    let mut b = start("machine-b", "0");
    until_online(&server, 3).await;
    let why = server.wait_for_failure(&server.submit(&spec("missing", STEPS)).await).await;
    assert!(why.contains("machine-b") && why.contains("--dataset NAME=PATH"), "{why}");
    b.kill();
    until_online(&server, 1).await;
    // A mapping to a missing path is an error; the dataset is not copied.
    let nowhere = format!("fashion={}", server.folder().path().join("nowhere").display());
    let mut c = Machine::start_without(&server, "machine-c", 2, &[&data], &["--dataset", &nowhere]);
    until_online(&server, 3).await;
    let why = server.wait_for_failure(&server.submit(&spec("mapped", STEPS)).await).await;
    assert!(why.contains("machine-c") && why.contains("nowhere"), "{why}");
    assert!(copies(&c, &server).is_empty());
    c.kill();
    until_online(&server, 1).await;
    // A limit of exactly the dataset's size; but first the dataset contains a link to a file outside.
    let d = start("machine-d", &limit);
    until_online(&server, 3).await;
    let secret = server.folder().write("secret", "not for others");
    symlink(secret, data.join("link")).expect("a link");
    let why = server.wait_for_failure(&server.submit(&spec("leads out", STEPS)).await).await;
    assert!(why.contains("link is a link that leads out of the dataset's folder"), "{why}");
    assert!(copies(&d, &server).is_empty());
    fs::remove_file(data.join("link")).expect("the link is removed");
    let id = server.train(&spec("fits", STEPS)).await;
    assert!(log(&server, &id).await.contains(&format!("machine-d {COPIES}")));
    assert_eq!(copies(&d, &server).len(), 1);
}

/// Only `tests/run full` runs this test, because it copies a large file twice.
mod full {
    use super::*;

    #[tokio::test]
    async fn a_dataset_that_changes_during_a_copy_is_copied_again_and_logged() {
        let server = server().await;
        let data = dataset(&server);
        add_filler(&data);
        // The first file that is copied. It changes afterwards, which only a check of the whole list detects.
        fs::write(data.join("a-note"), "before").expect("a note");
        let a = Machine::start_without(&server, "machine-a", 2, &[&data], &[]);
        until_online(&server, 3).await;
        let id = server.submit(&spec("changing", STEPS)).await;
        wait_for_filler(&a, &server, 0);
        fs::write(data.join("a-note"), "afterwards").expect("another note");
        server.wait_for_success(&id).await;
        let log = log(&server, &id).await;
        assert!(log.contains("the dataset fashion changed while machine-a copied it"), "{log}");
        let copy_folders = copies(&a, &server);
        let newest = copy_folders
            .iter()
            .find(|copy| fs::read(copy.join("data/a-note")).is_ok_and(|note| note == b"afterwards"));
        assert!(newest.is_some(), "{copy_folders:?}");
    }
}
