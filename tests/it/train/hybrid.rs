//! Ranks that together compute one copy of a network (`parallel.mode = "hybrid"`).

use super::{
    Bench, MAX_PLAN_DIFFERENCE, assert_success,
    stops::{pid_of, signal, start_until_step, state},
};
use crate::tensors::max_difference;
use rustix::process::Signal;

#[tokio::test]
async fn ranks_that_share_a_network_match_one_rank() {
    let bench = Bench::new().await;
    let run = |out: &str, sets: &[&str], more: &[&str]| {
        // A small learning rate, as training amplifies rounding differences of sums. With 400 pictures and a batch of 32, the last step
        // of an epoch has fewer pictures.
        let always = [
            "train.epochs=1",
            "data.drop_remainder=false",
            "checkpoint.every_steps=4",
            "parallel.device=cpu",
            "train.lr=0.0001",
        ];
        let sets = super::sets(&[&always[..], sets].concat());
        bench.train(out, &[&sets[..], more].concat()).output().expect("it runs")
    };
    let validation = |output: &str| -> String {
        let line = output
            .lines()
            .find_map(|line| line.split("validation accuracy is ").nth(1))
            .expect("an evaluation");
        line.split(", loss").next().expect("an accuracy").into()
    };
    let alone = assert_success(&run("one", &["parallel.ranks=1"], &[]));
    let hybrid = [
        "parallel.ranks=4",
        "parallel.mode=hybrid",
        "parallel.model=2",
        "train.ema_decay=0.5",
        "train.ema_steps=1",
    ];
    let output = assert_success(&run("four", &hybrid, &[]));
    assert!(output.contains("a mesh of 2 (data) x 1 (height) x 2 (model) ranks"), "{output}");
    assert_eq!(validation(&output), validation(&alone));
    let last = bench.model("one", "1-13");
    for step in ["1-4", "1-13"] {
        let difference = max_difference(&bench.model("four", step), &bench.model("one", step));
        assert!(difference < MAX_PLAN_DIFFERENCE, "{step}: {difference}");
    }
    assert!(output.contains("validation accuracy of the averaged weights is "), "{output}");
    assert_eq!(state(&bench, "four", "1-13")["world_size"], 4);

    let from = ["--resume", &bench.checkpoint("four", "1-4")];
    let split = r#"parallel.shard=[{match="layer3.*", split="out"}, {match="layer3.*.conv2", split="in"}]"#;
    let split_layers = ["parallel.ranks=2", "parallel.mode=hybrid", "parallel.model=2", split];
    let rows = ["parallel.ranks=4", "parallel.mode=hybrid", "parallel.model=2", "parallel.height=2"];
    // One rank that continues with the average of the weights (`train.ema_decay`).
    let averaged = [&hybrid[3..], &["parallel.ranks=1"]].concat();
    let continued = [
        ("two", &split_layers[..]),
        ("one-resumed", &["parallel.ranks=1"][..]),
        ("averaged", &averaged[..]),
        ("rows", &rows[..]),
    ];
    for (out, sets) in continued {
        let output = assert_success(&run(out, sets, &from));
        assert!(output.contains("continuing from checkpoint 1-4 at step 4"), "{output}");
        assert_eq!(validation(&output), validation(&alone), "{out}");
        let difference = max_difference(&bench.model(out, "1-13"), &last);
        assert!(difference < MAX_PLAN_DIFFERENCE, "{out}: {difference}");
    }

    // With pretrained weights, of which each rank loads its part.
    let pretrained = format!("model.pretrained={}", bench.checkpoint("four", "1-13"));
    for (out, sets) in [("tuned", &hybrid[..3]), ("tuned-alone", &["parallel.ranks=1"][..])] {
        assert_success(&run(out, &[sets, &[pretrained.as_str()]].concat(), &[]));
    }
    let difference = max_difference(&bench.model("tuned", "1-4"), &bench.model("tuned-alone", "1-4"));
    assert!(difference < MAX_PLAN_DIFFERENCE, "{difference}");

    // Three ranks have 4, 3 and 3 of ten classes. They read 33, 33 and 34 of 100 validation pictures, so the last rank has one more batch.
    let uneven =
        ["train.global_batch_size=33", "parallel.ranks=3", "parallel.mode=hybrid", "parallel.model=3"];
    let output = assert_success(&run("uneven", &uneven, &[]));
    let alone = assert_success(&run("alone", &[uneven[0], "parallel.ranks=1"], &[]));
    assert_eq!(validation(&output), validation(&alone));

    let wrong = r#"parallel.shard=[{match="layer9.*", split="out"}, {match="fc", split="groups"}]"#;
    let refused = run("wrong", &[&split_layers[..3], &[wrong]].concat(), &[]);
    let output =
        String::from_utf8_lossy(&refused.stdout).into_owned() + &String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && !output.contains("step: 1,"), "{output}");
    for words in
        ["resnet20 has no operator named \"layer9.*\"", "fc cannot be split by \"groups\" over 2 ranks"]
    {
        assert!(output.contains(words), "{output}");
    }
    let many =
        ["train.global_batch_size=33", "parallel.ranks=11", "parallel.mode=hybrid", "parallel.model=11"];
    let refused = run("many", &many, &[]);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && !bench.out("many").exists(), "{error}");
    assert!(error.contains("parallel.model: 10 classes cannot be divided over 11 ranks"), "{error}");
}

/// The job augments and mixes pictures (mixup): the later stages need the mixed labels.
#[tokio::test]
async fn stages_match_one_rank_and_continue_after_a_killed_rank() {
    let bench = Bench::new().await;
    let always = [
        "train.epochs=1",
        "train.accumulate=2",
        "train.lr=0.0001",
        "train.mixup=0.2",
        "train.ema_decay=0.5",
        "train.ema_steps=1",
        "data.drop_remainder=false",
        "data.crop_padding=2",
        "data.horizontal_flip=true",
        "checkpoint.every_steps=4",
        "parallel.device=cpu",
    ];
    let stages = ["parallel.ranks=4", "parallel.mode=hybrid", "parallel.pipeline=2"];
    let sets = |more: &[&'static str]| super::sets(&[&always[..], more].concat());
    let run =
        |out: &str, sets: &[&'static str], more: &[&str]| bench.train_to_success(out, &[sets, more].concat());
    let accuracies = |output: &str| -> Vec<String> {
        let lines = output.lines().filter(|line| line.contains("validation accuracy "));
        lines.map(|line| line.split(", loss").next().unwrap_or_default().to_owned()).collect()
    };
    let one = sets(&["parallel.ranks=1"]);
    let alone = run("one", &one, &[]);
    let output = run("stages", &sets(&stages), &[]);
    for words in [
        "a mesh of 2 (pipeline) x 2 (data) x 1 (height) x 1 (model) ranks",
        "later stages begin at layer2.",
        "2 stages x 2 micro-batches: each stage waits for 33 % of a step (the bubble)",
        "2 sets of 2 ranks with the same pictures",
    ] {
        assert!(output.contains(words), "{words}: {output}");
    }
    assert_eq!(accuracies(&output)[..2], accuracies(&alone)[..2]);
    let (last, of_stages) = (bench.model("one", "1-13"), bench.model("stages", "1-13"));
    assert!(max_difference(&of_stages, &last) < MAX_PLAN_DIFFERENCE, "{}", max_difference(&of_stages, &last));

    // One rank continues from a checkpoint of stages, and stages from a checkpoint of one rank.
    for (out, from, sets) in [("back", "stages", one), ("forth", "one", sets(&stages))] {
        run(out, &sets, &["--resume", &bench.checkpoint(from, "1-4")]);
        let difference = max_difference(&bench.model(out, "1-13"), &last);
        assert!(difference < MAX_PLAN_DIFFERENCE, "{out}: {difference}");
    }

    // Rank 2, which is killed, has the second stage.
    let long = [&sets(&stages)[..], &["--set", "train.epochs=2"]].concat();
    run("undisturbed", &long, &[]);
    let mut child = start_until_step(bench.train("killed", &long), 6);
    signal(pid_of(&bench.out("killed").join("attempts/1"), 2), Signal::KILL);
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    for words in [
        "rank 2 was killed by signal 9 at step ",
        "memory was exhausted",
        "; --resume latest continues from step ",
    ] {
        assert!(error.contains(words), "{words}: {error}");
    }
    run("killed", &long, &["--resume", "latest"]);
    assert!(bench.model("killed", "2-26") == bench.model("undisturbed", "2-26"), "the same bytes");
}
