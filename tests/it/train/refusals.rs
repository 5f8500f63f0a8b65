//! Impossible jobs, and weights and checkpoints that do not fit, are refused with advice.

use super::{
    Bench, assert_success, sets,
    stops::{has_ended, pid_of, signal, until_step},
};
use crate::{
    pictures,
    server::{Finished, lockstep},
    tensors::floats,
};
use rustix::process::Signal;
use std::{
    fs,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

#[tokio::test]
async fn impossible_training_is_refused_with_advice() {
    let bench = Bench::new().await;
    let refusal = |sets: &[&str]| {
        let out = format!("out-{}", sets.join("-").replace(['/', '.'], "_"));
        let mut command = bench.train(&out, &super::sets(sets));
        Finished::of(command.env("LOCKSTEP_CACHE", bench.out("cache")))
    };
    refusal(&["train.global_batch_size=4096"])
        .assert_fails(1, &["400 training pictures are fewer than one step uses (4096"]);
    // More memory than any machine has is refused before it is allocated.
    refusal(&["data.image_size=4096", "train.global_batch_size=400"])
        .assert_fails(1, &["pictures of 4096 x 4096 pixels take at least ", "this machine has"]);
    refusal(&["parallel.device=cuda"]).assert_fails(2, &["there is no GPU on this machine", "\"cpu\""]);
    refusal(&["train.lr=10000", "train.weight_decay=1"])
        .assert_fails(1, &["the loss is not finite on ", "training has diverged at step ", "lower train.lr"]);
    refusal(&["model.arch=resnet18", "data.image_size=16", "model.pretrained=resnet18"])
        .assert_fails(1, &["model.pretrained: the weights of resnet18 have not been downloaded"]);
    refusal(&["model.pretrained=/none.safetensors"])
        .assert_fails(1, &["model.pretrained: /none.safetensors"]);
    // Pickle files are recognised by their content.
    for name in ["resnet20.pth", "pytorch_model.bin"] {
        let pickled = bench.folder.path().join(name);
        fs::write(&pickled, b"PK\x03\x04").expect("a file");
        refusal(&[&format!("model.pretrained={}", pickled.display())])
            .assert_fails(1, &[&format!("{name}: is a PyTorch pickle"), "save_file(torch.load("]);
    }
    let folder = pictures::image_folder(bench.folder.path(), 2);
    for split in ["train", "val"] {
        fs::remove_dir_all(folder.join(split).join("trouser")).expect("a class");
    }
    refusal(&[&format!("data.dataset={}", folder.display())])
        .assert_fails(1, &["has one class, \"boot\": there is nothing to tell apart"]);
    for (sets, words) in [
        (&["data.dataset=/none", "train.lrr=1"][..], "lrr"),
        (&["data.dataset="], "data.dataset: is missing: give a registered dataset's name"),
        (&["sweep.method=grid"], "is a sweep, which needs a server: `lockstep submit "),
    ] {
        refusal(sets).assert_fails(2, &[words]);
    }
}

#[tokio::test]
async fn impossible_stages_are_refused() {
    let bench = Bench::new().await;
    let stages =
        ["parallel.mode=hybrid", "parallel.ranks=12", "parallel.pipeline=12", "train.global_batch_size=8"];
    for (sets, words) in [
        (
            &["parallel.device=cpu"][..],
            &["resnet20 can be cut into at most 11 stages", "parallel.pipeline = 12"][..],
        ),
        (
            &["parallel.device=cpu", "train.accumulate=0"],
            &["train.accumulate", "from 1 to 4,096", "at most 11 stages"],
        ),
        (
            &["parallel.device=cpu", "parallel.ranks=16"],
            &["parallel.pipeline", "give a pipeline such as 8, or 24 ranks"],
        ),
    ] {
        let out = format!("out-{}", words[0]);
        let sets = super::sets(&[&stages[..], sets].concat());
        Finished::of(&mut bench.train(&out, &sets)).assert_fails(2, words);
    }
}

/// The last checkpoint is retried every second.
#[tokio::test]
async fn a_full_disk_is_logged_only_once_with_a_count() {
    let bench = Bench::new().await;
    let only_last = sets(&["train.epochs=1", "checkpoint.every_steps=", "checkpoint.every_epochs=0"]);
    // Each fault fails one attempt.
    let faults = ["checkpoint.model:error"; 3].join(",");
    let output = bench.train("out", &only_last).env("LOCKSTEP_FAULT", faults).output().expect("it runs");
    let error = assert_success(&output);
    assert_eq!(error.matches("could not be written").count(), 1, "{error}");
    assert_eq!(error.matches("still cannot be written").count(), 1, "{error}");
    assert!(error.contains("this checkpoint took 3 more attempts"), "{error}");
    assert!(!bench.model("out", "1-12").is_empty());
}

/// If a variable were ignored, each process would train alone, as rank 0 of 1.
#[tokio::test]
async fn inconsistent_variables_of_a_rank_table_are_refused() {
    let bench = Bench::new().await;
    let device = |rank: u32| serde_json::json!({"device_id": rank.to_string(), "rank_id": rank.to_string()});
    let servers: Vec<_> = (0..2)
        .map(|s| serde_json::json!({"server_id": format!("10.0.0.{s}"), "device": [device(2 * s), device(2 * s + 1)]}))
        .collect();
    let path = bench.folder.path().join("table.json");
    fs::write(&path, serde_json::json!({"status": "completed", "server_list": servers}).to_string())
        .expect("a table");
    let table = ("RANK_TABLE_FILE", path.to_str().expect("a path"));
    let torchrun = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")];
    for (variables, more, message) in [
        (&[table][..], &[][..], "the rank table has 2 machines: name this machine with --node"),
        (&[table, ("RANK_ID", "4")], &[], "the rank table has no rank 4"),
        (&[table], &["--node", "2"], "the rank table has 2 machines"),
        (&[table, ("RANK_ID", "0")], &["--ranks", "2"], "the rank table has started 4 ranks"),
        (
            &[("RANK_TABLE_FILE", "/none.json"), ("RANK_ID", "0")],
            &[],
            "RANK_TABLE_FILE: the rank table /none.json",
        ),
        (&[&torchrun[..], &[table]].concat(), &[], "RANK_TABLE_FILE is set and torchrun has started"),
        (&[("RANK_ID", "0")], &[], "RANK_ID is set, but the number of ranks is unknown"),
        (&[], &["--node", "0"], "--node: needs --rank-table, or RANK_TABLE_FILE"),
        (&torchrun, &["--node", "0"], "--node: a launcher says"),
    ] {
        let mut command = bench.train("out", more);
        Finished::of(command.envs(variables.iter().copied())).assert_fails(2, &[message]);
    }
}

#[tokio::test]
async fn a_folder_in_use_is_refused_even_if_only_ranks_are_left() {
    let bench = Bench::new().await;
    // A job that outlasts the test.
    let long = ["--set", "train.epochs=1000"];
    let mut child = bench.train("out", &long).stdout(Stdio::piped()).spawn().expect("it starts");
    until_step(&mut child, 1);
    let attempt = bench.out("out").join("attempts/1");
    let ranks = [0, 1].map(|rank| pid_of(&attempt, rank));
    ranks.iter().for_each(|pid| signal(*pid, Signal::STOP));
    let assert_refused = || {
        let lock = bench.out("out").canonicalize().expect("a folder").join("train.lock");
        let [zero, one] = ranks.map(|pid| pid.to_string());
        let words = [lock.to_str().expect("UTF-8"), "another --out", &zero, &one];
        Finished::of(&mut bench.train("out", &["--resume", "latest"])).assert_fails(2, &words);
    };
    assert_refused();
    child.kill().expect("SIGKILL");
    child.wait().expect("it ends");
    assert_refused();
    ranks.iter().for_each(|pid| signal(*pid, Signal::KILL));
    let deadline = Instant::now() + Duration::from_secs(20);
    while !ranks.iter().all(|pid| has_ended(*pid)) {
        assert!(Instant::now() < deadline, "the ranks have not ended");
        std::thread::sleep(Duration::from_millis(10));
    }
    // No process uses the folder any more.
    fs::remove_dir_all(bench.out("out").join("checkpoints")).ok();
    bench.train_to_success("out", &[]);
}

#[tokio::test]
async fn a_resume_is_refused_if_the_folder_has_later_or_other_checkpoints() {
    let bench = Bench::new().await;
    let steps = |number: &'static str, seed: &'static str| {
        sets(&["train.epochs=", "checkpoint.every_steps=2", number, seed])
    };
    for (out, seed) in [("out", "train.seed=1"), ("other", "train.seed=2")] {
        bench.train_to_success(out, &steps("train.steps=4", seed));
    }
    let resume = |from: &str, step: u64| {
        let from = bench.checkpoint(from, &format!("1-{step}"));
        let mut arguments = vec!["--resume", &from];
        arguments.extend(steps("train.steps=6", "train.seed=1"));
        Finished::of(&mut bench.train("out", &arguments))
    };
    resume("out", 2).assert_fails(2, &["has a later checkpoint, 1-4", "another --out"]);
    resume("other", 4).assert_fails(2, &["has another checkpoint 1-4"]);
    resume("out", 3).assert_fails(2, &["does not exist; its folder has the checkpoints 1-2, 1-4"]);
    fs::write(bench.out("out").join("checkpoints/1-4/model.safetensors"), "").expect("damage");
    resume("out", 4).assert_fails(
        2,
        &["is damaged", "has the checkpoints 1-2; --resume latest with the run's own --out"],
    );
    // A refused run leaves no folder behind.
    let output = bench.train("new", &["--resume", "/no/where"]).output().expect("it runs");
    assert_eq!((output.status.code(), bench.out("new").exists()), (Some(2), false));
}

/// At this learning rate the weights of a ResNet-18 overflow float32. Batch norm and ReLU must not turn non-finite values
/// into zeros, which would hide this.
#[tokio::test]
async fn a_run_that_overflows_float32_fails_as_diverged_without_a_bad_checkpoint() {
    let bench = Bench::new().await;
    for ranks in ["1", "2"] {
        let out = format!("out-{ranks}");
        let ranks_set = format!("parallel.ranks={ranks}");
        let sets = sets(&[
            "model.arch=resnet18",
            "data.image_size=16",
            "train.epochs=",
            "train.steps=40",
            "train.global_batch_size=8",
            "train.lr=100",
            "train.momentum=0.95",
            "train.schedule=constant",
            "checkpoint.every_steps=5",
            &ranks_set,
        ]);
        Finished::of(&mut bench.train(&out, &sets))
            .assert_fails(1, &["training has diverged at step ", "lower train.lr"]);
        let mut models = 0;
        for folder in fs::read_dir(bench.out(&out).join("checkpoints")).expect("checkpoints").flatten() {
            let model = fs::read(folder.path().join("model.safetensors")).expect("a model");
            models += 1;
            for (name, values) in floats(&model) {
                assert!(values.iter().all(|v| v.is_finite()), "{name} of {}", folder.path().display());
            }
        }
        assert!(models > 0, "checkpoints with finite weights are kept");
    }
}

#[tokio::test]
async fn the_head_of_pretrained_weights_is_replaced_for_other_classes() {
    let bench = Bench::new().await;
    let folder = pictures::image_folder(bench.folder.path(), 40);
    let dataset = format!("data.dataset={}", folder.display());
    let two_classes = ["--set", &dataset, "--set", "data.validation=val"];
    bench.train_to_success("two", &two_classes);
    for split in ["train", "val"] {
        let third = folder.join(split).join("wellington");
        fs::create_dir(&third).expect("a folder");
        for picture in fs::read_dir(folder.join(split).join("boot")).expect("a folder").flatten() {
            fs::copy(picture.path(), third.join(picture.file_name())).expect("a copy");
        }
    }
    // 80 pictures give 2 steps per epoch, 120 give 3.
    let weights = format!("model.pretrained={}", bench.checkpoint("two", "2-4"));
    let three_classes = [&two_classes[..], &["--set", &weights]].concat();
    let output = bench.train_to_success("three", &three_classes);
    assert!(output.contains("its fc.weight is [2, 64], this job's is [3, 64]"), "{output}");
    assert!(output.contains("the last layer (fc) keeps its initial values"), "{output}");
    assert!(!bench.model("three", "2-6").is_empty());

    let deeper = [&three_classes[..], &["--set", "model.arch=resnet32"]].concat();
    Finished::of(&mut bench.train("other", &deeper))
        .assert_fails(1, &["does not fit a resnet32", "are missing"]);
}

/// Overwrites the first value of a tensor in a file.
fn set_first_value(model: &Path, tensor: &str, value: f32) {
    let mut bytes = fs::read(model).expect("a model");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let data = file.tensor(tensor).expect("the tensor").data();
    let offset = data.as_ptr().addr() - bytes.as_ptr().addr();
    bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    fs::write(model, bytes).expect("a model");
}

#[tokio::test]
async fn diverged_weights_are_refused_with_file_and_tensor() {
    let bench = Bench::new().await;
    bench.train_to_success("out", &[]);
    for (tensor, value, message) in [
        ("layer1.0.conv1.weight", f32::NAN, "layer1.0.conv1.weight contains NaN at index 0"),
        ("layer2.0.bn2.running_var", -1.0, "layer2.0.bn2.running_var contains -1 at index 0"),
        ("fc.bias", f32::INFINITY, "fc.bias contains inf at index 0"),
    ] {
        let file = bench.folder.path().join(format!("{tensor}.safetensors"));
        fs::write(&file, bench.model("out", "2-24")).expect("a copy");
        set_first_value(&file, tensor, value);
        let weights = format!("model.pretrained={}", file.display());
        let named = format!("{}: {message}", file.display());
        Finished::of(&mut bench.train(tensor, &["--set", &weights])).assert_fails(1, &[&named]);
        // `predict` refuses the weights, too.
        let picture = bench.folder.path().join("picture.png");
        image::GrayImage::from_pixel(28, 28, image::Luma([99])).save(&picture).expect("a picture");
        let predicted = Finished::of(lockstep().args(["predict", "--model"]).args([&file, &picture]));
        predicted.assert_fails(2, &[message]);
        assert_eq!(predicted.stdout, "");
    }
}

#[tokio::test]
async fn a_checkpoint_of_another_network_or_other_classes_is_not_called_damaged() {
    let bench = Bench::new().await;
    bench.train_to_success("out", &[]);
    let checkpoint = bench.checkpoint("out", "1-7");
    let class_names = bench.folder.path().join("fashion-400-100/classes.txt");
    let resume = |out: &str, sets: &[&str]| {
        let more = [&["--resume", &checkpoint][..], &super::sets(sets)].concat();
        let refused = Finished::of(&mut bench.train(out, &more));
        refused.assert_fails(1, &["checkpoints/1-7 does not fit this job"]);
        assert!(!refused.stderr.contains("damaged"), "{}", refused.stderr);
        refused.stderr
    };
    // A checkpoint beyond the last step is refused, too: otherwise the run would succeed without training.
    let more = ["--resume", &bench.checkpoint("out", "2-21"), "--set", "train.epochs=1"];
    Finished::of(&mut bench.train("past", &more))
        .assert_fails(1, &["2-21 is of step 21 and the training ends at step 12"]);
    let error = resume("deeper", &["model.arch=resnet32"]);
    assert!(error.contains("layer1.3.bn1.bias, ") && error.contains("57 more are missing"), "{error}");
    let stem = ["model.arch=resnet20", "model.stem=imagenet", "data.image_size=16"];
    let error = resume("stem", &stem);
    assert!(error.contains("conv1.weight is [16, 1, 3, 3], wanted [16, 1, 7, 7]"), "{error}");
    let classes: String = (0..10).map(|c| format!("{}\n", 9 - c)).collect();
    fs::write(&class_names, classes).expect("names");
    let error = resume("turned", &[]);
    assert!(error.contains("class 0 is \"0\" for the model and \"9\" in the dataset"), "{error}");
}
