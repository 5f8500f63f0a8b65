//! Progressive resizing: picture sizes change with epochs, after any interruption and with any number of ranks.

use crate::{
    pictures,
    server::{Finished, Folder, Server, lockstep, training_permit},
    tensors::tensors,
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::Path};

/// 12 steps per epoch. Pictures have 8 x 8 pixels in the first epoch and 12 x 12 in the second and third, and 16 x 16 in evaluations.
const JOB: &str = r#"
name = "larger and larger"
[model]
arch = "resnet20"
[data]
dataset = "DATASET"
image_size = [[1, 8], [2, 12]]
validation_size = 16
[train]
epochs = 3
global_batch_size = 32
lr = 0.05
schedule = "cosine"
seed = 3
[parallel]
ranks = 2
device = "cpu"
[checkpoint]
every_steps = 5
keep = 20
[evaluate]
every_epochs = 2
"#;

fn train(job: &Path, out: &Path, more: &[&str]) -> String {
    let run = Finished::of(lockstep().arg("train").arg(job).arg("--out").arg(out).args(more));
    run.ok().to_owned()
}

fn model(out: &Path, checkpoint: &str) -> Vec<u8> {
    let path = out.join("checkpoints").join(checkpoint).join("model.safetensors");
    fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn weights(out: &Path, checkpoint: &str) -> BTreeMap<String, Vec<u8>> {
    tensors(&model(out, checkpoint))
}

#[tokio::test]
async fn sizes_change_with_epochs_at_any_number_of_ranks_and_after_any_restart() {
    let _permit = training_permit().await;
    let folder = Folder::new();
    let dataset = pictures::idx_dataset(folder.path(), 400, 100);
    let job = folder.write("job.toml", JOB.replace("DATASET", dataset.to_str().expect("UTF-8")));
    let out = |name: &str| folder.path().join(name);
    let output = train(&job, &out("two"), &[]);
    assert!(
        output.contains("pictures are 8x8 from epoch 1, 12x12 from epoch 2; validation uses 16x16"),
        "{output}"
    );
    let last = model(&out("two"), "3-36");

    train(&job, &out("one"), &["--ranks", "1"]);
    assert!(weights(&out("one"), "3-36") == weights(&out("two"), "3-36"), "one rank");
    // Continue from the middle of the first, second and third epoch.
    for from in ["1-5", "2-20", "3-35"] {
        let resume = out("two").join("checkpoints").join(from);
        let continued = out(&format!("from {from}"));
        let output = train(&job, &continued, &["--resume", resume.to_str().expect("UTF-8")]);
        assert!(output.contains(&format!("continuing from checkpoint {from}")), "{output}");
        assert!(model(&continued, "3-36") == last, "from {from}");
    }

    // A fixed size gives other weights from the second epoch on.
    train(&job, &out("fixed"), &["--set", "data.image_size=8"]);
    assert!(weights(&out("fixed"), "1-10") == weights(&out("two"), "1-10"));
    assert!(weights(&out("fixed"), "2-15") != weights(&out("two"), "2-15"));

    let late = Finished::of(lockstep().arg("train").arg(&job).args(["--set", "train.epochs=1"]));
    late.assert_usage_error(&["data.image_size", "12 pixels begin in epoch 2", "ends with epoch 1"]);
}

#[tokio::test]
async fn a_model_of_several_sizes_is_used_at_its_evaluation_size() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let dataset = pictures::idx_dataset(server.folder().path(), 128, 64);
    server.register("fashion", &dataset).await;
    let job = json!({
        "name": "larger", "model": {"arch": "resnet20"},
        "data": {"dataset": "fashion", "validation_size": 16,
            "image_size": [[1, 8], [2, 12]]},
        "train": {"epochs": 2, "batch_size": 16}, "parallel": {"ranks": 2, "device": "cpu"},
    });
    let id = server.submit(&job).await;
    let done = server.wait_for_success(&id).await;
    assert_eq!(done["spec"]["data"]["image_size"], job["data"]["image_size"]);
    let shown = server.cli(&["show", &id]);
    shown.assert_prints(&["validation_size = 16"]);
    let (_, file) = shown.stdout.split_once("\n\n").expect("a blank line before the job");
    let copy = server.folder().write("copy.toml", file);
    let copy = server.cli(&["submit", copy.to_str().expect("UTF-8"), "--json"]).json();
    assert_eq!(copy["spec"], done["spec"]);

    // An evaluation of the checkpoint gives the result of training.
    let checkpoint = &server.checkpoints(&id).await[0];
    let name = checkpoint["id"].as_str().expect("an id").to_owned();
    let evaluated: Value = server.evaluation(&id, &format!("?checkpoint={name}")).await;
    let to_f64 = |value: &Value| value.as_f64().expect("a number");
    assert_eq!(to_f64(&evaluated["accuracy"]), to_f64(&checkpoint["val_accuracy"]), "{evaluated:#}");
    assert!((to_f64(&evaluated["loss"]) - to_f64(&checkpoint["val_loss"])).abs() < 1e-5, "{evaluated:#}");

    // A fork continues at a fixed size.
    let change = json!({"set": {"data.image_size": 12, "train.epochs": 3}});
    let fork = server.create(&format!("/jobs/{id}/fork"), &change).await;
    server.wait_for_success(&fork).await;
    server.stop().await;
}
