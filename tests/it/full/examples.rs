//! Runs the commands of README.md and docs/ as written: code blocks marked `sh`. Other tests run lines that need a cluster or weights
//! (`pages::line`). Servers get free ports (`serving.rs`), launches get `--dry-run`, and jobs are made small.

mod serving;

use crate::{
    pages, pictures,
    server::{Finished, Server, lockstep, training_permit},
    specs,
};
use serde_json::json;
use serving::Serving;
use std::{fs, path::Path, process::Command};

/// Starts of command lines that no test runs, and why. Each must occur on a page.
const EXCLUDED: &[(&str, &str)] = &[
    ("sudo apt-get ", "the machine has a compiler"),
    ("curl -sSf https://sh.rustup.rs", "the machine has Rust"),
    ("cargo ", "the program has been built to run this test"),
    ("bash tests/run", "it would run this test again"),
    ("pip install ./python", "python/tests imports the package from its folder"),
    ("python -m lockstep sync", "python/tests syncs folders of runs"),
    ("lockstep submit sweep.toml", "sweep.rs trains a sweep"),
    ("lockstep sweep show", "tests/it/sweeps.rs shows a sweep"),
    ("lockstep import mlflow", "tests/it/imports.rs has MLflow write the files"),
    ("lockstep import wandb", "tests/it/imports.rs has W&B write the files"),
];

/// A rank table with two ranks of this machine.
const RANK_TABLE: &str = r#"{"version": "1.0", "server_count": "1", "status": "completed", "server_list": [{"server_id": "127.0.0.1",
    "device": [{"device_id": "0", "rank_id": "0"}, {"device_id": "1", "rank_id": "1"}]}]}"#;

/// Writes the files that the examples need into a folder and its `home`.
fn write_files(folder: &Path) {
    for (name, text) in pages::all().iter().flat_map(|page| pages::files(page)) {
        fs::write(folder.join(name), text).expect("a job file");
    }
    pictures::write_cifar10(&folder.join("datasets/cifar10"), 60);
    let home = folder.join("home");
    let images = pictures::image_folder(folder, 4);
    fs::create_dir_all(&home).expect("a folder");
    let copied =
        Command::new("cp").arg("-r").arg(&images).arg(home.join("imagenet")).status().expect("cp runs");
    assert!(copied.success());
    let zip = folder.join("pets.zip");
    let zipped = Command::new("python3")
        .args(["-m", "zipfile", "-c"])
        .arg(&zip)
        .args(["train", "val"])
        .current_dir(&images)
        .status();
    assert!(zipped.expect("python3 runs").success());
    let shoe = pictures::boot(&images);
    for name in ["shoe.png", "bag.jpg"] {
        image::open(&shoe).expect("a picture").save(folder.join(name)).expect("a picture");
    }
}

/// Adds `--dry-run` to a launch, before the arguments after `--`, which are another program's.
fn add_dry_run(line: &str) -> String {
    let (command, comment) = line.split_once(" # ").unwrap_or((line, ""));
    match command.split_once(" -- ") {
        Some((launch, theirs)) => format!("{launch} --dry-run -- {theirs}"),
        None => format!("{} --dry-run # {comment}", command.trim_end()),
    }
}

/// Runs a submission on a terminal, where it follows the job to its end, with sizes for two cores.
fn shrink_and_watch(line: &str) -> String {
    let (command, comment) = line.split_once(" # ").unwrap_or((line, ""));
    let sizes = "--set train.epochs=1 --set data.image_size=16";
    format!("script --quiet --return --command '{} {sizes}' /dev/null # {comment}", command.trim_end())
}

/// Runs the lines of a block.
async fn run(server: &Server, serving: &mut Serving, folder: &Path, page: &str, block: &str) {
    let mut script = String::new();
    // The token of the server that an example has started, if lines use that server.
    let mut token = None;
    for line in block.lines() {
        if Serving::runs(line) {
            run_script(server, token.as_deref(), folder, page, &std::mem::take(&mut script));
            serving.run(line).await;
            continue;
        }
        // The next lines are an alternative to the previous lines, which are undone.
        if line.starts_with("# the same") {
            script += "lockstep dataset remove --yes imagenet\nrm -r ~/imagenet-256\n";
        }
        let line = match serving.localize(line).await {
            Some(line) => {
                token = Some(serving.token_file());
                line
            }
            None if line.starts_with("lockstep launch") => add_dry_run(line),
            None if line.starts_with("lockstep submit") => shrink_and_watch(line),
            None => line.to_owned(),
        };
        script += &line;
        script.push('\n');
    }
    run_script(server, token.as_deref(), folder, page, &script);
}

/// Runs lines in a shell, where `curl` uses the test's server in place of 127.0.0.1:7070, and `$JOB` is the first job of `lockstep list`.
fn run_script(server: &Server, token: Option<&Path>, folder: &Path, page: &str, lines: &str) {
    let script = format!(
        "set -eu -o pipefail\ntrap 'echo \"this failed: $BASH_COMMAND\" >&2' ERR\n\
         curl() {{ command curl --fail-with-body --silent --show-error \"${{@//http:\\/\\/127.0.0.1:7070/$LOCKSTEP_SERVER}}\"; }}\n\
         JOB=$(lockstep list --json | grep -o -m 1 'j[0-9a-z]\\{{26\\}}' | head -n 1 || true)\n{lines}"
    );
    let mut command = pages::shell(&script);
    command.current_dir(folder).envs(server.client_variables());
    command.env("HOME", folder.join("home")).env("TOKEN", server.token());
    if let Some(token) = token {
        command.env("LOCKSTEP_TOKEN_FILE", token);
    }
    command.env("LOCKSTEP_CACHE", folder.join("cache"));
    let ended = Finished::of(&mut command);
    assert_eq!(
        ended.status, 0,
        "{page}: an example fails. Repair it, run it in another test with pages::line, or add the start of its line to \
         EXCLUDED with the reason why no test can run it.\n{lines}\nstdout:\n{}\nstderr:\n{}",
        ended.stdout, ended.stderr
    );
}

#[tokio::test]
async fn documented_commands_run_as_written() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let folder = server.folder().path().join("examples");
    fs::create_dir(&folder).expect("a folder");
    write_files(&folder);
    // The pages assume a trained job, its weights, other pictures for its evaluation, and a CA.
    let pictures = pictures::idx_dataset(server.folder().path(), 64, 16);
    server.register("clothes", &pictures).await;
    server.register("other-shoes", &pictures).await;
    let id = server
        .submit(&specs::with(
            specs::short("fashion", "clothes", 1, 4),
            json!({"evaluate": {"every_epochs": 1}}),
        ))
        .await;
    server.wait_for_success(&id).await;
    fs::write(folder.join("model.safetensors"), server.last_model(&id).await).expect("weights");
    let ca = Finished::of(lockstep().args(["ca", "init"]).current_dir(&folder));
    fs::write(folder.join("lockstep-ca.crt"), ca.ok()).expect("the CA certificate");
    fs::write(folder.join("table.json"), RANK_TABLE).expect("a table");
    std::os::unix::fs::symlink(pages::root().join("deploy"), folder.join("deploy"))
        .expect("the tree's manifests");
    let mut serving = Serving::new(&folder);

    let tested_elsewhere = pages::lines_run_by_tests();
    let is_skipped = |page: &str, line: &str| {
        EXCLUDED.iter().any(|(begins, _)| line.starts_with(begins))
            || tested_elsewhere.iter().any(|(of, begins)| of == page && line.starts_with(begins))
    };
    for page in pages::all() {
        for block in pages::blocks(&page, "sh") {
            let lines = block.lines().filter(|line| !is_skipped(&page, line));
            let block: String = lines.flat_map(|line| [line, "\n"]).collect();
            run(&server, &mut serving, &folder, &page, &block).await;
            // Jobs of a block are cancelled before the next block.
            for job in server.get("/jobs?limit=100").await["jobs"].as_array().expect("jobs") {
                if !crate::server::state_of(job).is_final() {
                    let id = job["id"].as_str().expect("an id");
                    server.cli(&["cancel", id]).ok();
                }
            }
        }
    }
    serving.stop();
    server.stop().await;
}

#[test]
fn commands_excluded_from_tests_are_in_a_page() {
    let all: Vec<_> = pages::all().iter().flat_map(|page| pages::blocks(page, "sh")).collect();
    for (begins, _) in EXCLUDED {
        let occurs = all.iter().any(|block| block.lines().any(|line| line.starts_with(begins)));
        assert!(occurs, "no page has {begins:?}: remove it from EXCLUDED");
    }
}

#[test]
fn commands_named_in_sentences_exist() {
    for page in pages::all() {
        let text = pages::text(&page);
        for named in text.split("`lockstep ").skip(1) {
            // Arguments after `--` are another program's.
            let own = named.split('`').next().expect("words").split(" -- ").next().expect("words");
            let words: Vec<&str> = own.split_whitespace().collect();
            let Some(word) =
                words.first().filter(|word| word.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
            else {
                continue;
            };
            let help = Finished::of(lockstep().args([word, "--help"]));
            assert!(help.status == 0, "{page}: lockstep {word}: {}", help.stderr);
            // The options must exist, too.
            for option in
                words.iter().filter_map(|word| word.split('=').next()).filter(|word| word.starts_with("--"))
            {
                let nested = words.get(1).filter(|word| word.chars().all(|c| c.is_ascii_lowercase()));
                let of_nested =
                    nested.map(|nested| Finished::of(lockstep().args([word, nested, "--help"])).stdout);
                let known =
                    help.stdout.contains(option) || of_nested.is_some_and(|help| help.contains(option));
                assert!(known, "{page}: lockstep {} has no {option}", words.join(" "));
            }
        }
    }
}
