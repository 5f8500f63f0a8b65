//! The moving average of the weights (EMA).

use super::{Bench, assert_success, sets};
use crate::tensors::floats;
use std::fs;

#[tokio::test]
async fn averaged_weights_are_evaluated_saved_and_continued() {
    let bench = Bench::new().await;
    // With mixup and cutmix, whose pictures must be the same after a continuation and on one rank.
    let plain =
        sets(&["checkpoint.every_steps=1", "checkpoint.keep=30", "train.mixup=0.4", "train.cutmix=1.0"]);
    let sets = [&plain[..], &sets(&["train.ema_decay=0.8", "train.ema_steps=2"])].concat();
    let output = bench.train_to_success("one", &sets);
    assert!(
        output.contains("validation accuracy is ")
            && output.contains("validation accuracy of the averaged weights is "),
        "{output}"
    );
    let values = |out: &str, checkpoint: &str, file: &str| -> Vec<f32> {
        let bytes = fs::read(format!("{}/{file}", bench.checkpoint(out, checkpoint))).expect("a file");
        floats(&bytes).into_values().flatten().collect()
    };
    assert!(!bench.out("one").join("checkpoints/1-1/ema.safetensors").exists(), "no average after one step");
    let mut expected = values("one", "1-2", "model.safetensors");
    for step in 2..=24u32 {
        let checkpoint = format!("{}-{step}", 1 + (step - 1) / 12);
        // Every second step changes the average; the arithmetic has the rounding of float32.
        if step > 2 && step % 2 == 0 {
            let weights = values("one", &checkpoint, "model.safetensors");
            let pairs = expected.iter_mut().zip(weights);
            pairs.for_each(|(average, weight)| *average += (1.0f64 - 0.8) as f32 * (weight - *average));
        }
        assert!(values("one", &checkpoint, "ema.safetensors") == expected, "step {step}");
    }

    // Neither the evaluation of the average nor a continuation changes the weights.
    bench.train_to_success("plain", &plain);
    assert!(values("plain", "2-24", "model.safetensors") == values("one", "2-24", "model.safetensors"));
    let from = bench.checkpoint("one", "1-7");
    bench.train_to_success("resumed", &[&sets[..], &["--resume", &from]].concat());
    assert!(values("resumed", "2-24", "ema.safetensors") == expected);
    assert!(values("resumed", "2-24", "model.safetensors") == values("one", "2-24", "model.safetensors"));
    // The average is the same on one rank, and with gradients over TCP.
    let alone = [&sets[..], &["--set", "parallel.ranks=1"]].concat();
    bench.train_to_success("alone", &alone);
    let over_tcp =
        bench.train("over-tcp", &sets).env("LOCKSTEP_SHARED_MEMORY", "0").output().expect("it runs");
    let tcp_output = assert_success(&over_tcp);
    let evaluations = |output: &str| -> Vec<String> {
        let lines =
            output.lines().filter_map(|l| l.split("validation accuracy of the averaged weights is ").nth(1));
        lines.map(|l| l.split(" pictures").next().unwrap_or_default().to_owned()).collect()
    };
    assert!(
        evaluations(&output).len() == 2 && evaluations(&output) == evaluations(&tcp_output),
        "{tcp_output}"
    );
    for out in ["alone", "over-tcp"] {
        assert!(values(out, "2-24", "ema.safetensors") == expected, "{out}");
    }
}
