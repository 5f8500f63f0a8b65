//! Missing and broken datasets: errors name the file, both before and during training.

use crate::{
    pictures,
    server::{Server, training_permit},
    specs,
};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// Submits a job that must fail at its first attempt, because a restart cannot repair a file. Returns the reason.
async fn first_failure(server: &Server, spec: &Value) -> String {
    let job = server.wait_for_end(&server.submit(spec).await).await;
    assert_eq!((&job["state"], &job["attempt"]), (&json!("failed"), &json!(1)), "{job:#}");
    job["reason"].as_str().expect("a reason").to_owned()
}

#[tokio::test]
async fn folders_without_a_dataset_are_not_registered() {
    let server = Server::start().await;
    let folder = server.folder().path();
    let assert_refused = async |path: &Path, words: &[&str]| {
        let response = server.post("/datasets", &json!({"name": "broken", "path": path})).await;
        response.problem(422);
        for word in words {
            assert!(response.text.contains(word), "{} lacks {word:?}: {}", path.display(), response.text);
        }
        // The command reports the same error.
        let path = path.to_str().expect("UTF-8");
        server.cli(&["dataset", "add", "broken", path]).assert_usage_error(words);
        // So does the inspection, which needs no server.
        server.cli(&["dataset", "inspect", path]).assert_usage_error(words);
    };
    fs::create_dir(folder.join("empty")).expect("a folder");
    assert_refused(&folder.join("empty"), &["CIFAR", "IDX"]).await;
    let images = pictures::image_folder(folder, 4);
    fs::create_dir(images.join("train/sandal")).expect("a folder");
    assert_refused(&images, &["sandal"]).await;

    let idx = pictures::idx_dataset(folder, 40, 10);
    let file = idx.join("train-images-idx3-ubyte");
    let intact = fs::read(&file).expect("the file");
    fs::write(&file, &intact[..intact.len() - 100]).expect("the file");
    assert_refused(&idx, &["train-images-idx3-ubyte"]).await;
    fs::write(&file, b"not IDX at all").expect("the file");
    assert_refused(&idx, &["train-images-idx3-ubyte"]).await;
    fs::write(&file, &intact).expect("the file");

    assert_refused(&folder.join("nowhere"), &["nowhere"]).await;
    assert_eq!(server.get("/datasets").await["datasets"], json!([]), "nothing is registered");

    // The repaired folder is registered.
    server.register("repaired", &idx).await;
    server.post("/datasets", &json!({"name": "repaired", "path": &idx})).await.problem(409);
    server.stop().await;
}

#[tokio::test]
async fn a_truncated_cifar_file_is_named_and_fatal_or_skipped_as_configured() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let path = server.folder().path().join("cifar-10-batches-bin");
    pictures::write_cifar10(&path, 20);
    // The second file ends in the middle of a record. The dataset is registered with a warning about it.
    let truncated = fs::File::options().write(true).open(path.join("data_batch_2.bin")).expect("a file");
    truncated.set_len(19 * 3073 + 1000).expect("truncated");
    let path = path.to_str().expect("UTF-8");
    assert!(server.cli(&["dataset", "add", "cifar10", path]).ok().contains("1 unusable file"));
    for dataset in [path, "cifar10"] {
        let inspected = server.cli(&["dataset", "inspect", dataset]);
        let named = inspected.ok().lines().find(|l| l.contains("data_batch_2.bin")).expect("its name");
        assert!(named.contains("3073"), "{named}");
    }
    let job = "[model]\narch = \"resnet20\"\n[data]\ndataset = \"cifar10\"\nbroken_files = \"skip\"\n[train]\nbatch_size = 1\n";
    let job = server.folder().write("job.toml", job);
    let checked = server.cli(&["validate", job.to_str().expect("UTF-8")]);
    checked.assert_prints(&["has no mistake"]);
    assert!(checked.stderr.contains("note: 1 file of cifar10 cannot be used"), "{}", checked.stderr);
    let spec = |policy: &str| {
        let spec = specs::short(policy, "cifar10", 2, 3);
        specs::with(spec, json!({"data": {"broken_files": policy}}))
    };
    let reason = first_failure(&server, &spec("fail")).await;
    assert!(reason.contains("data_batch_2.bin"), "{reason}");
    server.train(&spec("skip")).await;
    server.stop().await;
}

#[tokio::test]
async fn a_text_file_named_jpg_is_fatal_or_skipped_as_configured() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let images = pictures::image_folder(server.folder().path(), 20);
    fs::write(images.join("train/boot/readme.jpg"), "this is text\n").expect("a file");
    server.register("folder", &images).await;
    let listed = server.get("/datasets").await;
    let dataset = listed["datasets"].as_array().and_then(|d| d.first()).expect("a dataset");
    assert_eq!(dataset["info"]["format"], "image_folder");
    assert_eq!(dataset["info"]["classes"], json!(["boot", "trouser"]));

    let spec = |policy: &str| {
        specs::with(
            specs::short(policy, "folder", 2, 6),
            json!({
                "data": {"validation": "val", "broken_files": policy},
                // Two epochs, in which every file is read.
                "train": {"steps": null, "epochs": 2, "batch_size": 4},
            }),
        )
    };
    let reason = first_failure(&server, &spec("fail")).await;
    assert!(reason.contains("readme.jpg"), "{reason}");

    let skipping = server.train(&spec("skip")).await;
    let logs = server.get(&format!("/jobs/{skipping}/logs")).await;
    let named = |l: &Value| l["text"].as_str().is_some_and(|t| t.contains("readme.jpg"));
    assert!(logs["lines"].as_array().expect("lines").iter().any(named), "{logs:#}");
    server.stop().await;
}

#[tokio::test]
async fn unreadable_files_are_named_at_registration_and_fatal_or_skipped_as_configured() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let images = pictures::image_folder(server.folder().path(), 20);
    let boot = images.join("train/boot");
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, boot.join("pipe.jpg"), rustix::fs::FileType::Fifo, mode, 0)
        .expect("a pipe");
    std::os::unix::fs::symlink("looping.png", boot.join("looping.png")).expect("a link");
    std::os::unix::fs::symlink("nowhere.png", boot.join("dangling.png")).expect("a link");
    std::os::unix::fs::symlink("..", boot.join("up")).expect("a link");
    // A regular file that even root cannot read.
    std::os::unix::fs::symlink("/proc/self/mem", boot.join("unreadable.png")).expect("a link");
    let broken = [
        ("pipe.jpg", "named pipe"),
        ("looping.png", "leads back to itself"),
        ("dangling.png", "nowhere.png, which does not exist"),
        ("boot/up", "a folder that contains the link"),
        ("unreadable.png", "cannot be read"),
    ];
    let path = images.to_str().expect("UTF-8");
    let added = server.cli(&["dataset", "add", "folder", path]);
    added.assert_prints(&["40 train, 40 val, 5 unusable files"]);
    let inspected = server.cli(&["dataset", "inspect", "folder"]);
    for (name, why) in broken {
        for output in [added.ok(), inspected.ok()] {
            assert!(output.lines().any(|l| l.contains(name) && l.contains(why)), "{name} {why}: {output}");
        }
    }
    let spec = |policy: &str| {
        specs::with(
            specs::short(policy, "folder", 2, 6),
            json!({"data": {"validation": "val", "broken_files": policy}}),
        )
    };
    let reason = first_failure(&server, &spec("fail")).await;
    assert!(reason.contains("5 broken files"), "{reason}");
    for (name, why) in broken {
        assert!(reason.contains(name) && reason.contains(why), "{name} {why}: {reason}");
    }
    server.train(&spec("skip")).await;
    // Files with the same reason share a line, which names three of them.
    for name in ["a.png", "b.png", "c.png", "d.png"] {
        fs::write(boot.join(name), "").expect("an empty file");
    }
    server.cli(&["dataset", "inspect", path]).assert_prints(&[" and 1 more: is empty\n"]);
    server.stop().await;
}

#[tokio::test]
async fn shards_are_registered_shown_trained_on_and_identified() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/shards/numbers");
    let folder = server.folder().path().join("shards");
    fs::create_dir(&folder).expect("a folder");
    for entry in fs::read_dir(&fixtures).expect("the fixtures").flatten() {
        fs::copy(entry.path(), folder.join(entry.file_name())).expect("copies");
    }
    let pattern = folder.join("{train,val}-00000{0..1}.tar");
    for (name, path) in [("folder", folder.as_path()), ("pattern", &pattern)] {
        server
            .cli(&["dataset", "add", name, path.to_str().expect("UTF-8")])
            .assert_prints(&["webdataset, 3 classes, pictures of 12 x 8 pixels"]);
        server
            .cli(&["dataset", "inspect", path.to_str().expect("UTF-8")])
            .assert_prints(&["10 train, 4 val"]);
    }
    assert!(server.cli(&["dataset", "inspect", "pattern"]).ok().contains("val-000001.tar: cannot be read"));
    let shown = server.get("/datasets/folder/samples?split=val&limit=9").await;
    assert_eq!(shown["total"], 4, "{shown:#}");
    let file = shown["samples"][0]["file"].as_str().expect("a name");
    assert!(file.ends_with("val-000000.tar/000010.png"), "{file}");
    let spec = |dataset: &str, policy: &str| {
        specs::with(
            specs::short(policy, dataset, 2, 3),
            json!({
                "data": {"validation": "val", "broken_files": policy, "crop_padding": 2},
                "train": {"batch_size": 4},
                "evaluate": {"every_epochs": 1},
            }),
        )
    };
    let job = server.train(&spec("folder", "fail")).await;
    let seen = server.get(&format!("/jobs/{job}/samples?indices=0")).await;
    assert_eq!(seen["samples"][0]["file"], file, "{seen:#}");
    // A missing shard is a broken file.
    let job = server.wait_for_end(&server.submit(&spec("pattern", "fail")).await).await;
    assert!(job["reason"].as_str().is_some_and(|r| r.contains("val-000001.tar")), "{job:#}");
    server.train(&spec("pattern", "skip")).await;
    // Other pictures in the same files are another dataset.
    let long = specs::with(spec("folder", "fail"), json!({"train": {"steps": 100_000}}));
    let id = server.submit(&long).await;
    server.until("the job trains", async |server| server.job(&id).await["state"] == "running").await;
    // The command waits until the job is paused.
    server.cli(&["pause", &id]).ok();
    fs::copy(folder.join("train-000001.tar"), folder.join("train-000000.tar")).expect("copies");
    server.cli(&["resume", &id]).ok();
    let job = server.wait_for_end(&id).await;
    let reason = job["reason"].as_str().expect("a reason");
    assert!(
        job["state"] == "failed" && reason.contains("differs from the dataset with which the job began"),
        "{reason}"
    );
    server.stop().await;
}

#[tokio::test]
async fn parquet_files_and_a_prepared_copy_of_them_are_registered_and_trained_on() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let hub = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/parquet/hub");
    let copy = server.folder().path().join("copy");
    let (hub, copy) = (hub.to_str().expect("UTF-8"), copy.to_str().expect("UTF-8"));
    let prepare = ["dataset", "prepare", hub, "--to", copy, "--quality", "95"];
    server.cli(&prepare).assert_prints(&["9 train, 3 validation pictures in 2 shards"]);
    server.cli(&prepare).assert_prints(&["2 of them from an earlier run"]);
    server
        .cli(&["dataset", "prepare", hub, "--to", copy, "--quality", "90"])
        .assert_usage_error(&["contains a copy with a quality of 95, not 90"]);
    server.cli(&["dataset", "prepare", hub, "--to", copy, "--short-side", "15"]).assert_usage_error(&["15"]);
    for (name, path, format) in [("hub", hub, "parquet"), ("copy", copy, "webdataset")] {
        let added = server.cli(&["dataset", "add", name, path]);
        let sentence = format!("{format}, 3 classes, pictures of 12 x 8 pixels");
        added.assert_prints(&[&sentence]);
        let inspected = server.cli(&["dataset", "inspect", path]);
        inspected.assert_prints(&["9 train, 3 validation"]);
        assert!(["cat", "dog", "fox"].iter().all(|class| inspected.stdout.contains(class)));
        let data = json!({"validation": "validation", "crop_padding": 2});
        let spec = specs::with(
            specs::short(name, name, 2, 3),
            json!({"data": data, "train": {"batch_size": 4}, "evaluate": {"every_epochs": 1}}),
        );
        server.train(&spec).await;
    }
    server.stop().await;
}
