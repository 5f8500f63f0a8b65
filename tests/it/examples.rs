//! The commands that README.md and docs/ show, run as they stand there: blocks of code that are marked `sh`. What cannot run on the
//! machine of a test is listed with the reason. Servers get free ports (`serving.rs`), and a launch is shown (`--dry-run`).

mod serving;

use crate::{
    pictures,
    server::{Finished, LOCKSTEP, Server, lockstep, turn},
    specs,
};
use serde_json::json;
use serving::Serving;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Beginnings of commands that do not run here, and why. One that no page has any more fails the test.
const NOT_HERE: &[(&str, &str)] = &[
    ("cargo ", "the program has been built to run this test"),
    ("bash tests/run", "it would run this test again"),
    (
        "lockstep download cifar-resnet18",
        "needs the ten epochs of a ResNet-18, minutes on two cores; commands.rs downloads",
    ),
    (
        "lockstep agent ...",
        "stands for the command of the lines before; elsewhere.rs has agents with options like these",
    ),
    (
        "kubectl ",
        "there is no cluster here; tests/deploy/check.py holds the file against Kubernetes' schemas",
    ),
    ("torchrun ", "there are no machines of these names; train/launchers.rs has the variables that it sets"),
    ("mpirun ", "as above; launch.rs starts it"),
    ("srun ", "as above; launch.rs starts it"),
    ("msrun ", "as above; train/launchers.rs has the variables that it sets"),
    (
        "lockstep train job.toml --rank-table",
        "trains the ten epochs of a ResNet-18; train/launchers.rs trains smaller jobs by a table",
    ),
    ("RANK_ID=3 lockstep train", "as above"),
    (
        "lockstep submit finetune.toml",
        "needs torchvision's weights; finetune.rs runs the same three commands with small ones",
    ),
];

/// Two ranks of this machine, as the README's job has.
const RANK_TABLE: &str = r#"{"version": "1.0", "server_count": "1", "status": "completed", "server_list": [{"server_id": "127.0.0.1",
    "device": [{"device_id": "0", "rank_id": "0"}, {"device_id": "1", "rank_id": "1"}]}]}"#;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// README.md and the pages that people have written.
fn pages() -> Vec<PathBuf> {
    let docs = fs::read_dir(root().join("docs")).expect("docs").flatten().map(|entry| entry.path());
    let mut pages: Vec<_> = docs.filter(|path| path.extension().is_some_and(|e| e == "md")).collect();
    pages.sort();
    pages.insert(0, root().join("README.md"));
    pages
}

/// The blocks of a page in a language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let begin = format!("```{language}\n");
    let parts = page.split(&begin).skip(1);
    parts.map(|rest| rest.split("```").next().expect("the end of a block").to_owned()).collect()
}

/// Files that the examples name, in a folder and in its `home`.
fn stage(folder: &Path, readme: &str) {
    for block in blocks(readme, "toml") {
        if let Some((name, _)) = block.strip_prefix("# ").and_then(|block| block.split_once(".toml\n")) {
            fs::write(folder.join(format!("{name}.toml")), &block).expect("a job file");
        }
    }
    let cifar = folder.join("datasets/cifar10");
    fs::create_dir_all(&cifar).expect("a folder");
    let names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];
    fs::write(cifar.join("batches.meta.txt"), names.join("\n")).expect("names");
    let files = (1..=5).map(|i| format!("data_batch_{i}.bin")).chain(["test_batch.bin".into()]);
    for (file, name) in files.enumerate() {
        let record = |i: usize| {
            std::iter::once((i % 10) as u8)
                .chain((0..3072).map(move |p| ((p * 31 + i * 17 + file) % 251) as u8))
        };
        fs::write(cifar.join(name), (0..60).flat_map(record).collect::<Vec<_>>()).expect("a batch");
    }
    let home = folder.join("home");
    let made = pictures::image_folder(folder, 4);
    for place in ["pictures/flowers", "imagenet"] {
        let place = home.join(place);
        fs::create_dir_all(place.parent().expect("a parent")).expect("a folder");
        let copied = Command::new("cp").arg("-r").arg(&made).arg(&place).status().expect("cp runs");
        assert!(copied.success());
    }
    let shoe = fs::read_dir(made.join("val/boot")).expect("pictures").flatten().next().expect("one").path();
    for name in ["shoe.png", "bag.jpg", "new.jpg"] {
        image::open(&shoe).expect("a picture").save(folder.join(name)).expect("a picture");
    }
}

/// A launch that shows what it would start; its words after `--` are another program's.
fn shown(line: &str) -> String {
    let (command, comment) = line.split_once(" # ").unwrap_or((line, ""));
    match command.split_once(" -- ") {
        Some((own, theirs)) => format!("{own} --dry-run -- {theirs}"),
        None => format!("{} --dry-run # {comment}", command.trim_end()),
    }
}

/// Runs what a block has, but for what is not to run here.
async fn run(
    (server, serving): (&Server, &mut Serving),
    folder: &Path,
    page: &str,
    block: &str,
    passed_over: &mut [bool],
) {
    let mut script = String::new();
    // Of the server that an example has started, if lines are for that one.
    let mut token = None;
    for line in block.lines() {
        if let Some(found) = NOT_HERE.iter().position(|(begin, _)| line.starts_with(begin)) {
            passed_over[found] = true;
            continue;
        }
        if Serving::runs(line) {
            run_script(server, token.as_deref(), folder, page, &std::mem::take(&mut script));
            serving.run(line).await;
            continue;
        }
        // The other way to do what the lines before have done.
        if line.starts_with("# the same") {
            script += "lockstep dataset remove --yes imagenet\nrm -r ~/imagenet-256\n";
        }
        let line = match serving.here(line).await {
            Some(line) => {
                token = Some(serving.token_file());
                line
            }
            None if line.starts_with("lockstep launch") => shown(line),
            None => line.to_owned(),
        };
        script += &line;
        script.push('\n');
    }
    run_script(server, token.as_deref(), folder, page, &script);
}

fn run_script(server: &Server, token: Option<&Path>, folder: &Path, page: &str, lines: &str) {
    let script = format!(
        "set -eu -o pipefail\ntrap 'echo \"this failed: $BASH_COMMAND\" >&2' ERR\n\
         curl() {{ command curl --fail-with-body --silent --show-error \"${{@//http:\\/\\/127.0.0.1:7070/$LOCKSTEP_SERVER}}\"; }}\n\
         JOB=$(lockstep list --json | grep -o -m 1 'j[0-9a-z]\\{{26\\}}' | head -n 1 || true)\n{lines}"
    );
    let bin = Path::new(LOCKSTEP).parent().expect("a folder").display().to_string();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("bash");
    command.args(["--norc", "-c", &script]).current_dir(folder).envs(server.for_clients());
    command
        .env("PATH", format!("{bin}:{path}"))
        .env("HOME", folder.join("home"))
        .env("TOKEN", server.token());
    if let Some(token) = token {
        command.env("LOCKSTEP_TOKEN_FILE", token);
    }
    command.env("LOCKSTEP_CACHE", folder.join("cache")).stdin(std::process::Stdio::null());
    let ended = Finished::of(&mut command);
    assert_eq!(
        ended.status, 0,
        "{page}: an example does not do what it says. Mend it, or list its first words in tests/it/examples.rs with the reason why it \
         cannot run here.\n{lines}\nstdout:\n{}\nstderr:\n{}",
        ended.stdout, ended.stderr
    );
}

#[tokio::test]
async fn examples_run_as_they_are_written() {
    let _turn = turn().await;
    let server = Server::start().await;
    let folder = server.folder().path().join("examples");
    fs::create_dir(&folder).expect("a folder");
    let readme = fs::read_to_string(root().join("README.md")).expect("the README");
    stage(&folder, &readme);
    // What the pages take for granted: a trained job, its weights, other pictures to measure it with, and a CA.
    let pictures = pictures::idx_dataset(server.folder().path(), 64, 16);
    server.register("clothes", &pictures).await;
    server.register("other-shoes", &pictures).await;
    let id = server
        .submit(&specs::with(
            specs::short("fashion", "clothes", 1, 4),
            json!({"evaluate": {"every_epochs": 1}}),
        ))
        .await;
    server.succeeded(&id).await;
    fs::write(folder.join("model.safetensors"), server.last_model(&id).await).expect("weights");
    let ca = Finished::of(lockstep().args(["ca", "init"]).current_dir(&folder));
    fs::write(folder.join("lockstep-ca.crt"), ca.ok()).expect("the authority");
    fs::write(folder.join("table.json"), RANK_TABLE).expect("a table");
    std::os::unix::fs::symlink(root().join("deploy"), folder.join("deploy")).expect("the tree's manifests");
    let mut serving = Serving::new(&folder);

    let mut passed_over = vec![false; NOT_HERE.len()];
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        let page = page.strip_prefix(root()).expect("below the root").display().to_string();
        for block in blocks(&text, "sh") {
            run((&server, &mut serving), &folder, &page, &block, &mut passed_over).await;
            // Nothing that a block has left runs while the next one does.
            for job in server.get("/jobs?limit=100").await["jobs"].as_array().expect("jobs") {
                if !crate::server::state_of(job).is_final() {
                    let id = job["id"].as_str().expect("an id");
                    server.cli(&["cancel", id]).ok();
                }
            }
        }
    }
    serving.stop();
    let stale: Vec<_> =
        NOT_HERE.iter().zip(&passed_over).filter(|(_, used)| !**used).map(|(entry, _)| entry.0).collect();
    assert_eq!(stale, [] as [&str; 0], "no page has these any more: take them off the list");
    server.stop().await;
}

/// A command that is named in a sentence is one that there is.
#[test]
fn commands_in_sentences_exist() {
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for named in text.split("`lockstep ").skip(1) {
            // What follows `--` is for another program.
            let own = named.split('`').next().expect("words").split(" -- ").next().expect("words");
            let words: Vec<&str> = own.split_whitespace().collect();
            let Some(word) =
                words.first().filter(|word| word.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
            else {
                continue;
            };
            let help = Finished::of(lockstep().args([word, "--help"]));
            assert!(help.status == 0, "{}: lockstep {word}: {}", page.display(), help.stderr);
            // Its options, too.
            for option in
                words.iter().filter_map(|word| word.split('=').next()).filter(|word| word.starts_with("--"))
            {
                let nested = words.get(1).filter(|word| word.chars().all(|c| c.is_ascii_lowercase()));
                let of_nested =
                    nested.map(|nested| Finished::of(lockstep().args([word, nested, "--help"])).stdout);
                let known =
                    help.stdout.contains(option) || of_nested.is_some_and(|help| help.contains(option));
                assert!(known, "{}: lockstep {} has no {option}", page.display(), words.join(" "));
            }
        }
    }
}
