//! The job files in `examples/`: all are valid, and the job for eight GPUs trains on eight CPU ranks with a smaller network. Jobs for CPU
//! ranks train unchanged.

use crate::{
    pictures::{Pictures, SIDE, idx_dataset},
    server::{Finished, lockstep, training_permit},
    tensors,
};
use std::{
    fs,
    path::{Path, PathBuf},
};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")
}

/// Writes the bundled pictures in CIFAR-10's binary format: grey as three channels, in the middle of 32x32 pixels.
fn write_cifar10(folder: &Path, pictures_per_file: usize) {
    fs::create_dir(folder).expect("a folder");
    let names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];
    fs::write(folder.join("batches.meta.txt"), names.join("\n")).expect("names");
    let (training, test) = (Pictures::bundled("train"), Pictures::bundled("t10k"));
    let record = |pictures: &Pictures, index: usize| {
        let mut plane = vec![0; 32 * 32];
        for (y, row) in pictures.pixels_of(index).chunks(SIDE).enumerate() {
            plane[(y + 2) * 32 + 2..][..SIDE].copy_from_slice(row);
        }
        [vec![pictures.label_of(index)], plane.repeat(3)].concat()
    };
    let write = |name: &str, pictures: &Pictures, first: usize| {
        let records: Vec<u8> = (first..first + pictures_per_file).flat_map(|i| record(pictures, i)).collect();
        fs::write(folder.join(name), records).expect("a batch");
    };
    for file in 0..5 {
        write(&format!("data_batch_{}.bin", file + 1), training, file * pictures_per_file);
    }
    write("test_batch.bin", test, 0);
}

#[test]
fn each_example_is_a_valid_job() {
    let files: Vec<_> = fs::read_dir(examples()).expect("examples/").flatten().map(|e| e.path()).collect();
    assert!(!files.is_empty());
    for file in files {
        Finished::of(lockstep().arg("validate").arg(file)).ok();
    }
}

#[tokio::test]
async fn the_job_for_eight_gpus_trains_on_eight_cpu_ranks() {
    let _permit = training_permit().await;
    let folder = tempfile::tempdir().expect("a folder");
    let dataset = folder.path().join("cifar10");
    write_cifar10(&dataset, 410);
    let job = examples().join("cifar10-resnet50.toml").display().to_string();
    let out = folder.path().join("out");
    let dataset = format!("data.dataset={}", dataset.display());
    let trained = Finished::of(lockstep().args([
        "train",
        &job,
        "--out",
        &out.display().to_string(),
        "--set",
        &dataset,
        "--set",
        "model.arch=resnet20",
        "--set",
        "data.image_size=32",
        "--set",
        "train.epochs=2",
        "--set",
        "log.every_steps=1",
    ]));
    let printed = trained.ok();
    for text in ["8 ranks (CPU", "x batch 32 x accumulate 1 = 256 pictures per step"] {
        assert!(printed.contains(text), "{text}: {printed}");
    }
    // 2,050 pictures give eight full steps per epoch. In each, every rank has reported the loss of its own 32 pictures.
    for rank in 0..8 {
        let log = fs::read_to_string(out.join(format!("attempts/1/rank.{rank}.log"))).expect("its log");
        let steps: Vec<_> = log.lines().filter(|line| line.contains("step: ")).collect();
        assert_eq!(steps.len(), 16, "rank {rank}: {log}");
        let loss = |line: &str| -> f64 {
            line.rsplit(' ').next().and_then(|number| number.parse().ok()).expect("a loss at the end")
        };
        let mean = |lines: &[&str]| lines.iter().map(|line| loss(line)).sum::<f64>() / lines.len() as f64;
        let (first, last) = (mean(&steps[..8]), mean(&steps[8..]));
        assert!(last < first, "rank {rank} learns: {first} in the first epoch, {last} in the second");
    }
}

/// The last example also continues on two ranks from a checkpoint of four.
#[tokio::test]
async fn the_examples_for_cpu_ranks_train() {
    let _permit = training_permit().await;
    let folder = tempfile::tempdir().expect("a folder");
    let dataset = format!("data.dataset={}", idx_dataset(folder.path(), 256, 64).display());
    let run = |example: &str, out: &str, more: &[&str]| {
        let (job, out) = (examples().join(format!("{example}.toml")), folder.path().join(out));
        let (job, out) = (job.display().to_string(), out.display().to_string());
        let arguments = ["train", &job, "--out", &out, "--set", &dataset];
        let mut command = lockstep();
        command.args(arguments).args(more).env("LOCKSTEP_CACHE", folder.path().join("cache"));
        Finished::of(&mut command).ok().to_owned()
    };
    for (example, words) in [
        ("matrix-product", "2 (data) x 1 (height) x 2 (model)"),
        ("rows", "2 (data) x 2 (height) x 1 (model)"),
        ("accumulate", "2 ranks (CPU, "),
        ("hybrid-classes", "1 (data) x 1 (height) x 4 (model)"),
        ("hybrid-channels", "2 (data) x 1 (height) x 2 (model)"),
        ("pipeline", "2 (pipeline) x 2 (data) x 1 (height) x 1 (model)"),
        ("auto", "plan: "),
        ("sharded", "4 of 4 ranks write a part of each checkpoint"),
    ] {
        let output = run(example, example, &["--set", "train.epochs=2"]);
        for words in [words, "(CPU, ", "= 128 pictures per step", "validation accuracy is "] {
            assert!(output.contains(words), "{example}: {words} in {output}");
        }
    }
    let middle = folder.path().join("sharded/checkpoints/1-2").display().to_string();
    let more = ["--resume", &middle, "--ranks", "2", "--set", "train.epochs=2"];
    let output = run("sharded", "continued", &more);
    assert!(output.contains("continuing from checkpoint 1-2 at step 2"), "{output}");
    let tensors = |out: &str| {
        let path = folder.path().join(out).join("last.safetensors").display().to_string();
        let checkpoint = folder.path().join(out).join("checkpoints/2-4").display().to_string();
        Finished::of(lockstep().args(["export", &checkpoint, "-o", &path])).ok();
        tensors::tensors(&fs::read(path).expect("weights"))
    };
    assert!(tensors("continued") == tensors("sharded"), "the same tensors as without an interruption");
}
