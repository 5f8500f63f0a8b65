//! Checkpoints whose parts are written by all ranks (`checkpoint.sharded`).

use super::{Bench, MAX_PLAN_DIFFERENCE, assert_success, sets};
use crate::{
    pictures,
    server::lockstep,
    tensors::{max_difference, tensors},
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Output,
};

/// Settings of all runs.
const COMMON: [&str; 4] =
    ["train.epochs=1", "checkpoint.every_steps=4", "parallel.device=cpu", "train.lr=0.0001"];
const HYBRID: [&str; 5] = [
    "parallel.ranks=4",
    "parallel.mode=hybrid",
    "parallel.model=2",
    "train.ema_decay=0.5",
    "train.ema_steps=1",
];
const SHARDED: [&str; 2] = ["parallel.ranks=2", "checkpoint.sharded=true"];
/// The last checkpoint.
const LAST: &str = "1-12";

fn run(bench: &Bench, out: &str, changes: &[&str], more: &[&str]) -> Output {
    let sets = sets(&[&COMMON[..], changes].concat());
    bench.train(out, &[&sets[..], more].concat()).output().expect("it runs")
}

fn checkpoint_dir(bench: &Bench, out: &str, checkpoint: &str) -> PathBuf {
    bench.out(out).join("checkpoints").join(checkpoint)
}

/// Exports the weights of a checkpoint, sharded or not, with `lockstep export`.
fn export(bench: &Bench, out: &str, checkpoint: &str, weights: &str) -> Vec<u8> {
    let file = bench.folder.path().join("exported.safetensors");
    let mut command = lockstep();
    command
        .arg("export")
        .arg(checkpoint_dir(bench, out, checkpoint))
        .args(["--weights", weights, "-o"])
        .arg(&file);
    assert_success(&command.output().expect("it runs"));
    fs::read(file).expect("a file")
}

/// Exports a checkpoint's folder or file with `lockstep export onnx`.
fn export_onnx(bench: &Bench, source: &Path) -> Vec<u8> {
    let file = bench.folder.path().join("network.onnx");
    let mut command = lockstep();
    command.args(["export", "onnx"]).arg(source).arg("-o").arg(&file);
    assert_success(&command.output().expect("it runs"));
    fs::read(file).expect("a file")
}

/// Checks that an index is as Hugging Face's readers expect, and returns the bytes of tensors in each file.
fn check_index(folder: &Path, kind: &str, parts: usize) -> Vec<u64> {
    let index = fs::read(folder.join(format!("{kind}.safetensors.index.json"))).expect("an index");
    let index: Value = serde_json::from_slice(&index).expect("JSON");
    let weight_map = index["weight_map"].as_object().expect("a map");
    let files: BTreeSet<String> =
        (1..=parts).map(|part| format!("{kind}-{part:05}-of-{parts:05}.safetensors")).collect();
    let indexed: BTreeSet<String> =
        weight_map.values().map(|file| file.as_str().expect("a name").to_owned()).collect();
    assert_eq!(indexed, files);
    let (mut locations, mut total) = (BTreeMap::new(), 0);
    let mut sizes = Vec::new();
    for name in &files {
        let all = tensors(&fs::read(folder.join(name)).expect("a part"));
        total += all.values().map(|bytes| bytes.len() as u64).sum::<u64>();
        sizes.push(all.values().map(|bytes| bytes.len() as u64).sum());
        locations.extend(all.into_keys().map(|tensor| (tensor, Value::from(name.as_str()))));
    }
    assert!(
        locations.iter().eq(weight_map.iter().collect::<BTreeMap<_, _>>()),
        "each tensor is in the file that the index names"
    );
    assert_eq!(index["metadata"]["total_size"], total);
    sizes
}

#[tokio::test]
async fn every_plan_continues_from_checkpoints_of_every_plan() {
    let bench = Bench::new().await;
    let sharded = "checkpoint.sharded=true";
    let data = ["parallel.ranks=4"];
    for (out, sets) in [("data", &data[..]), ("hybrid", &HYBRID[..])] {
        let output = assert_success(&run(&bench, out, sets, &[]));
        assert!(!output.contains("write a part"), "{output}");
        let parts = format!("{out}-parts");
        let output = assert_success(&run(&bench, &parts, &[sets, &[sharded]].concat(), &[]));
        assert!(output.contains("4 of 4 ranks write a part of each checkpoint"), "{output}");
        // The weights are the same in one file or in parts.
        for checkpoint in ["1-4", LAST] {
            let path = checkpoint_dir(&bench, &parts, checkpoint);
            for kind in ["model", "optimizer"] {
                assert!(!path.join(format!("{kind}.safetensors")).exists());
                let sizes = check_index(&path, kind, 4);
                let (min, max) = (sizes.iter().min().expect("sizes"), sizes.iter().max().expect("sizes"));
                assert!(max * 4 < min * 5, "{out}: all ranks write similar amounts: {sizes:?}");
            }
            let joined = export(&bench, &parts, checkpoint, "model");
            assert!(tensors(&joined) == tensors(&bench.model(out, checkpoint)), "{out} {checkpoint}");
            let file = bench.folder.path().join("exported.safetensors");
            assert!(export_onnx(&bench, &path) == export_onnx(&bench, &file), "{out} {checkpoint}");
            assert!(
                export(&bench, out, checkpoint, "model") == bench.model(out, checkpoint),
                "a checkpoint in one file"
            );
        }
        assert!(
            fs::read_dir(bench.out(&parts).join("checkpoints"))
                .expect("a folder")
                .flatten()
                .all(|entry| { !entry.file_name().to_string_lossy().starts_with('.') })
        );
    }
    let average =
        fs::read(checkpoint_dir(&bench, "hybrid", LAST).join("ema.safetensors")).expect("an average");
    check_index(&checkpoint_dir(&bench, "hybrid-parts", LAST), "ema", 4);
    assert!(tensors(&export(&bench, "hybrid-parts", LAST, "ema")) == tensors(&average));

    let mut number = 0;
    for (from, sets) in [
        ("data", &["parallel.ranks=1"][..]),
        ("data", &["parallel.ranks=2", sharded]),
        ("hybrid", &["parallel.ranks=1", HYBRID[3], HYBRID[4]]),
        ("hybrid", &["parallel.ranks=2", HYBRID[1], HYBRID[2], HYBRID[3], HYBRID[4], sharded]),
        ("hybrid", &[&HYBRID[..], &[sharded]].concat()[..]),
    ] {
        number += 1;
        let out = format!("resumed-{number}");
        let parts = checkpoint_dir(&bench, &format!("{from}-parts"), "1-4");
        let output = assert_success(&run(&bench, &out, sets, &["--resume", parts.to_str().expect("a path")]));
        assert!(output.contains("continuing from checkpoint 1-4 at step 4"), "{output}");
        assert_eq!(
            checkpoint_dir(&bench, &out, LAST).join("model.safetensors").exists(),
            !sets.contains(&sharded)
        );
        let (last, expected) = (export(&bench, &out, LAST, "model"), bench.model(from, LAST));
        if from == "data" {
            assert!(
                tensors(&last) == tensors(&expected),
                "{sets:?}: the same bits as without an interruption"
            );
        } else {
            assert!(max_difference(&last, &expected) < MAX_PLAN_DIFFERENCE, "{sets:?}");
            assert!(
                max_difference(&export(&bench, &out, LAST, "ema"), &average) < MAX_PLAN_DIFFERENCE,
                "{sets:?}"
            );
        }
    }

    // `predict` and `model.pretrained` accept a sharded checkpoint.
    let parts = checkpoint_dir(&bench, "hybrid-parts", LAST);
    let picture = pictures::boot(&pictures::image_folder(bench.folder.path(), 1));
    let predicted = |model: &Path| {
        assert_success(
            &lockstep().arg("predict").arg(&picture).arg("--model").arg(model).output().expect("it runs"),
        )
    };
    assert_eq!(predicted(&parts), predicted(&checkpoint_dir(&bench, "hybrid", LAST)));
    let average = |out: &str| checkpoint_dir(&bench, out, LAST).join("ema.safetensors");
    assert_eq!(predicted(&average("hybrid-parts")), predicted(&average("hybrid")));
    let tuned = |out: &str, from: &str| {
        let pretrained = format!("model.pretrained={}", checkpoint_dir(&bench, from, LAST).display());
        assert_success(&run(&bench, out, &[&data[..], &[&pretrained]].concat(), &[]));
        bench.model(out, "1-4")
    };
    assert!(tensors(&tuned("tuned", "data-parts")) == tensors(&tuned("tuned-whole", "data")));

    // A damaged part is reported.
    let part = parts.join("model-00003-of-00004.safetensors");
    let mut bytes = fs::read(&part).expect("a part");
    *bytes.last_mut().expect("a byte") ^= 1;
    fs::write(&part, bytes).expect("a part");
    let mut command = lockstep();
    command.arg("export").arg(&parts).arg("-o").arg(bench.folder.path().join("damaged.safetensors"));
    let refused = command.output().expect("it runs");
    let output = String::from_utf8_lossy(&refused.stderr).into_owned();
    let words = "checkpoint 1-12 is damaged: model-00003-of-00004.safetensors: its checksum does not match";
    assert!(refused.status.code() == Some(2) && output.contains(words), "{output}");
}

#[tokio::test]
async fn a_rank_killed_while_writing_loses_only_that_checkpoint() {
    let bench = Bench::new().await;
    let arguments = sets(&[&COMMON[..], &SHARDED].concat());
    assert_success(&run(&bench, "undisturbed", &SHARDED, &[]));
    for point in ["checkpoint.model", "checkpoint.optimizer", "checkpoint.manifest", "checkpoint.synced"] {
        let mark = bench.folder.path().join(format!("{point}.mark"));
        let mut command = bench.train(point, &arguments);
        // The first rank that reaches the point in its second checkpoint is killed; only rank 0 reaches the last two points.
        command.env("LOCKSTEP_FAULT", format!("{point}:kill@2:{}", mark.display()));
        let output = String::from_utf8_lossy(&command.output().expect("it runs").stdout).into_owned();
        assert!(mark.exists(), "{point} was reached: {output}");
        let checkpoints = || -> Vec<String> {
            let entries = fs::read_dir(bench.out(point).join("checkpoints")).expect("a folder").flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        let listed: Vec<_> = checkpoints().into_iter().filter(|name| !name.starts_with('.')).collect();
        assert_eq!(listed, ["1-4"], "{point}: {output}");
        let output = assert_success(&run(&bench, point, &SHARDED, &["--resume", "latest"]));
        assert!(output.contains("continuing from checkpoint 1-4 at step 4"), "{point}: {output}");
        assert!(checkpoints().iter().all(|name| !name.starts_with(".tmp")), "{point}: {:?}", checkpoints());
        let [last, expected] = [point, "undisturbed"].map(|out| export(&bench, out, LAST, "model"));
        assert!(tensors(&last) == tensors(&expected), "{point}");
    }
}

#[tokio::test]
async fn a_rank_s_full_disk_fails_a_checkpoint_and_delays_the_last() {
    let bench = Bench::new().await;
    // One rank cannot write its part of 1-8. One rank cannot write its part of the last checkpoint, which is retried.
    let marks = [2, 3].map(|time| bench.folder.path().join(format!("{time}")));
    let faults = [(2, &marks[0]), (3, &marks[1])]
        .map(|(time, mark)| format!("checkpoint.model:error@{time}:{}", mark.display()));
    let mut command = bench.train("full", &sets(&[&COMMON[..], &SHARDED].concat()));
    command.env("LOCKSTEP_FAULT", faults.join(","));
    let output = assert_success(&command.output().expect("it runs"));
    assert!(marks.iter().all(|mark| mark.exists()), "{output}");
    for words in [
        "checkpoint 1-8 could not be written: ",
        "no space left on device",
        "this checkpoint took 1 more attempts",
    ] {
        assert!(output.contains(words), "{words}: {output}");
    }
    let exists = |name: &str| checkpoint_dir(&bench, "full", name).exists();
    assert_eq!([exists("1-4"), exists("1-8"), exists(LAST)], [true, false, true]);
}
