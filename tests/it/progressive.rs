//! Progressive resizing: picture sizes change with epochs, after any interruption and with any number of ranks.

use crate::{
    server::{Finished, Server},
    tensors::tensors,
    train::{Bench, sets},
};
use serde_json::{Value, json};

/// 12 steps per epoch. Pictures have 8 x 8 pixels in the first epoch and 12 x 12 in the second and third, and 16 x 16 in evaluations.
const SIZES: [&str; 6] = [
    "data.image_size=[[1, 8], [2, 12]]",
    "data.validation_size=16",
    "train.epochs=3",
    "checkpoint.every_steps=5",
    "checkpoint.keep=20",
    "evaluate.every_epochs=2",
];

#[tokio::test]
async fn sizes_change_with_epochs_at_any_number_of_ranks_and_after_any_restart() {
    let bench = Bench::new().await;
    let train = |out: &str, more: &[&str]| bench.train_to_success(out, &[&sets(&SIZES)[..], more].concat());
    let weights = |out: &str, checkpoint: &str| tensors(&bench.model(out, checkpoint));
    let output = train("two", &[]);
    assert!(
        output.contains("pictures are 8x8 from epoch 1, 12x12 from epoch 2; validation uses 16x16"),
        "{output}"
    );
    train("one", &["--ranks", "1"]);
    assert!(weights("one", "3-36") == weights("two", "3-36"), "one rank");
    // Continue from the middle of the first, second and third epoch.
    for from in ["1-5", "2-20", "3-35"] {
        let resume = bench.checkpoint("two", from);
        let continued = format!("from {from}");
        let output = train(&continued, &["--resume", &resume]);
        assert!(output.contains(&format!("continuing from checkpoint {from}")), "{output}");
        assert!(bench.model(&continued, "3-36") == bench.model("two", "3-36"), "from {from}");
    }

    // A fixed size gives other weights from the second epoch on.
    train("fixed", &["--set", "data.image_size=8"]);
    assert!(weights("fixed", "1-10") == weights("two", "1-10"));
    assert!(weights("fixed", "2-15") != weights("two", "2-15"));

    let late = [&sets(&SIZES)[..], &["--set", "train.epochs=1"]].concat();
    let late = Finished::of(&mut bench.train("late", &late));
    late.assert_usage_error(&["data.image_size", "12 pixels begin in epoch 2", "ends with epoch 1"]);
}

#[tokio::test]
async fn a_model_of_several_sizes_is_used_at_its_evaluation_size() {
    let server = Server::start_training(128, 64).await;
    let job = json!({
        "name": "larger", "model": {"arch": "resnet20"},
        "data": {"dataset": "fashion", "validation_size": 16, "image_size": [[1, 8], [2, 12]]},
        "train": {"epochs": 2, "batch_size": 16}, "parallel": {"ranks": 2, "device": "cpu"},
    });
    let id = server.submit(&job).await;
    let done = server.wait_for_success(&id).await;
    assert_eq!(done["spec"]["data"]["image_size"], job["data"]["image_size"]);
    server.cli(&["show", &id]).assert_prints(&["image_size = [[1, 8], [2, 12]]", "validation_size = 16"]);

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
