//! Datasets from a shell: prepared and registered in one command, changed, and removed.

use crate::{
    pictures,
    server::{Finished, Folder, Server, lockstep, training_permit},
    specs,
};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// Copies the Parquet files of a Hugging Face repository into a folder, as prepared copies are written next to them.
fn copy_hub(folder: &Path) -> String {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/parquet/hub/data");
    let to = folder.join("hub");
    fs::create_dir_all(to.join("data")).expect("a folder");
    for entry in fs::read_dir(from).expect("the files").flatten() {
        fs::copy(entry.path(), to.join("data").join(entry.file_name())).expect("copies");
    }
    to.to_str().expect("UTF-8").to_owned()
}

#[tokio::test]
async fn a_dataset_is_prepared_and_registered_by_one_command() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let hub = copy_hub(server.folder().path());
    let here = |name: &str| server.folder().path().canonicalize().expect("a folder").join(name);
    let paths = || {
        let listed = server.cli(&["dataset", "list", "--json"]).json();
        let path = |d: &Value| (d["name"].clone(), d["path"].clone());
        listed.as_array().expect("a list").iter().map(path).collect::<Vec<_>>()
    };
    let added = server.cli(&["dataset", "add", "pets", &hub, "--prepare", "16"]);
    added.assert_prints(&[
        "hub-16: 9 train, 3 validation pictures in 2 shards",
        "pets: webdataset, 3 classes",
    ]);
    assert_eq!(paths(), [(json!("pets"), json!(here("hub-16")))]);
    let add = ["dataset", "add", "other", &hub, "--prepare", "16", "--to", "elsewhere", "--json"];
    assert_eq!(server.cli(&add).json()["info"]["format"], "webdataset");
    assert_eq!(paths()[0], (json!("other"), json!(here("elsewhere"))));

    // An existing name is reported before the preparation, which may take hours.
    let refused = server.cli(&["dataset", "add", "pets", &hub, "--prepare", "17"]);
    refused.assert_usage_error(&["already called pets", "hub-16"]);
    assert!(!here("hub-17").exists());
    server.cli(&["dataset", "add", "x", &hub, "--prepare", "15"]).assert_usage_error(&[
        "--prepare",
        "15",
        "from 16 to 4096",
    ]);
    server.cli(&["dataset", "add", "x", &hub, "--to", "y"]).assert_usage_error(&["--prepare"]);
    let pattern = format!("{}/train-{{000000..000000}}.tar", here("hub-16").display());
    server.cli(&["dataset", "add", "x", &pattern, "--prepare", "16"]).assert_usage_error(&["--to DIR"]);
    server.stop().await;
}

#[tokio::test]
async fn training_without_a_server_uses_the_available_validation_split() {
    let _permit = training_permit().await;
    let folder = Folder::new();
    let hub = copy_hub(folder.path());
    // The dataset has the splits train and validation; the job names none.
    let job = format!(
        "[model]\narch = \"resnet20\"\n[data]\ndataset = {hub:?}\nimage_size = 16\n[train]\nsteps = 2\nbatch_size = 4\n\
         [parallel]\ndevice = \"cpu\"\n"
    );
    let file = folder.write("job.toml", job);
    let out = folder.path().join("out");
    let mut command = lockstep();
    command.arg("train").arg(file).arg("--out").arg(&out).current_dir(folder.path());
    Finished::of(&mut command).assert_prints(&["succeeded: validation accuracy "]);
    let spec = fs::read(out.join("spec.json")).expect("the job as it was trained");
    let spec: Value = serde_json::from_slice(&spec).expect("JSON");
    assert_eq!(spec["data"]["validation"], "validation");
}

#[tokio::test]
async fn jobs_are_checked_with_the_pictures_that_a_folder_has_now() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let folder = pictures::image_folder(server.folder().path(), 8);
    server.register("folder", &folder).await;
    let spec = specs::with(
        specs::short("more", "folder", 1, 2),
        json!({"data": {"validation": "val"}, "train": {"batch_size": 24}, "loss": {"class_weights": {"sandal": 2.0}}}),
    );
    let refused = server.post("/jobs", &spec).await;
    refused.problem(422);
    for words in ["sandal", "folder has 16 to train on"] {
        assert!(refused.text.contains(words), "{}", refused.text);
    }
    // More pictures of the known classes, and another class.
    pictures::image_folder(server.folder().path(), 12);
    for split in ["train", "val"] {
        let sandal = folder.join(split).join("sandal");
        fs::create_dir(&sandal).expect("a folder");
        for entry in fs::read_dir(folder.join(split).join("boot")).expect("pictures").flatten().take(4) {
            fs::copy(entry.path(), sandal.join(entry.file_name())).expect("a copy");
        }
    }
    let job = server.submit(&spec).await;
    server.cli(&["dataset", "list"]).assert_prints(&["28 train, 36 val"]);
    let dataset = server.get("/datasets/folder").await;
    assert_eq!(dataset["info"]["classes"], json!(["boot", "sandal", "trouser"]));
    server.wait_for_success(&job).await;
    server.stop().await;
}

#[tokio::test]
async fn a_dataset_is_removed_when_no_job_needs_it() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let hub = copy_hub(server.folder().path());
    server.cli(&["dataset", "add", "pets", &hub]).ok();
    let long = specs::with(
        specs::short("long", "pets", 1, 100_000),
        json!({"data": {"validation": "validation", "crop_padding": 2}, "train": {"batch_size": 4}}),
    );
    let id = server.submit(&long).await;
    server.until("the job trains", async |server| server.job(&id).await["state"] == "running").await;
    server.cli(&["dataset", "remove", "pets", "--yes"]).assert_usage_error(&[
        &id,
        "long",
        "running",
        "cancel the job first",
    ]);
    server.cli(&["cancel", &id]).ok();
    assert_eq!(server.wait_for_end(&id).await["state"], "cancelled");

    // An unregistered name is an error, even if it would have a meaning in a URL.
    for name in ["pet", "", "pets/", &format!("../jobs/{id}")] {
        server
            .cli(&["dataset", "remove", name])
            .assert_usage_error(&["no dataset is called", "dataset list"]);
    }
    server.cli(&["dataset", "inspect", "pet"]).assert_usage_error(&["did you mean \"pets\"?"]);
    server.cli(&["dataset", "remove", "pets"]).assert_usage_error(&["pets stays as it is", "--yes"]);
    let removed = server.cli(&["dataset", "remove", "pets", "--yes"]);
    assert!(removed.ok().contains("pets removed; its files at ") && removed.stdout.contains("hub"));
    assert!(Path::new(&hub).join("data").is_dir());
    assert!(server.cli(&["dataset", "list"]).ok().contains("no datasets"));

    // The job still shows its dataset, and continues once the name is registered again.
    assert!(server.cli(&["show", &id]).ok().contains("dataset = \"pets\""));
    server.cli(&["retry", &id]).assert_usage_error(&["\"pets\" is no longer registered"]);
    server.cli(&["dataset", "add", "pets", &hub]).ok();
    server.cli(&["retry", &id]).ok();
    server.cli(&["cancel", &id]).ok();
    server.wait_for_end(&id).await;
    let removed = server.cli(&["dataset", "remove", "pets", "-y", "--json"]).json();
    assert_eq!(removed["removed"], "pets");
    server.stop().await;
}
