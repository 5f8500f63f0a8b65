//! `lockstep train`, which needs no server. In this file: the same job gives the same bytes, however its ranks are started.

mod auto;
mod average;
mod early_stop;
mod hybrid;
mod layers;
mod refusals;
mod sampled;
mod sharded;
mod stops;

use crate::{
    pages, pictures,
    server::{free_port, training_permit},
};
use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
};
use tokio::sync::SemaphorePermit;

/// Maximum difference of weights and statistics between plans after 13 steps with the learning rate 0.0001. Plans round differently, which
/// training amplifies to at most 1e-3. Twice the learning rate makes a difference of 8e-3.
const MAX_PLAN_DIFFERENCE: f32 = 2e-3;

/// A folder with pictures and a job of 24 steps, 12 per epoch, on 2 ranks.
pub(crate) struct Bench {
    pub(crate) folder: tempfile::TempDir,
    /// See [`training_permit`].
    pub(crate) permit: Option<SemaphorePermit<'static>>,
}

impl Bench {
    /// A bench that holds a permit to train until it is dropped.
    pub(crate) async fn new() -> Self {
        Self { permit: Some(training_permit().await), ..Self::without_permit() }
    }

    /// A bench for a test that has another bench with a permit.
    pub(crate) fn without_permit() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let dataset = pictures::idx_dataset(folder.path(), 400, 100);
        let job = format!(
            "name = \"bench\"\n[model]\narch = \"resnet20\"\n[data]\ndataset = {dataset:?}\nimage_size = 8\n\
             [train]\nepochs = 2\nglobal_batch_size = 32\nlr = 0.05\nschedule = \"cosine\"\nseed = 3\n\
             [parallel]\nranks = 2\n[checkpoint]\nevery_steps = 7\nkeep = 9\n[log]\nevery_steps = 1\n"
        );
        fs::write(folder.path().join("job.toml"), job).expect("the job");
        Self { folder, permit: None }
    }

    pub(crate) fn train(&self, out: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
        command
            .arg("train")
            .arg(self.folder.path().join("job.toml"))
            .arg("--out")
            .arg(self.out(out))
            .args(more)
            .stdin(Stdio::null());
        command
    }

    /// As [`Bench::train`], to the end, which must be success. Returns the standard output.
    pub(crate) fn train_to_success(&self, out: &str, more: &[&str]) -> String {
        assert_success(&self.train(out, more).output().expect("it runs"))
    }

    /// A command line of docs/launchers.md, run in the job's folder, with the test's output folder.
    pub(crate) fn line(&self, line: &str, out: &str) -> Command {
        assert!(line.contains(" job.toml ") && line.contains(" --out /shared/run"), "{line}");
        let out = self.out(out).display().to_string();
        let mut command = pages::shell(&line.replace("/shared/run", &out));
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }

    pub(crate) fn out(&self, out: &str) -> PathBuf {
        self.folder.path().join(out)
    }

    /// The path of a checkpoint's folder.
    pub(crate) fn checkpoint(&self, out: &str, checkpoint: &str) -> String {
        self.out(out).join("checkpoints").join(checkpoint).display().to_string()
    }

    pub(crate) fn model(&self, out: &str, checkpoint: &str) -> Vec<u8> {
        let path = format!("{}/model.safetensors", self.checkpoint(out, checkpoint));
        fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
    }
}

/// The arguments `--set KEY=VALUE` for each of these.
pub(crate) fn sets<'a>(all: &[&'a str]) -> Vec<&'a str> {
    all.iter().flat_map(|set| ["--set", *set]).collect()
}

/// Asserts success and returns the standard output.
pub(crate) fn assert_success(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[tokio::test]
async fn repeated_and_continued_runs_have_the_same_bytes() {
    let bench = Bench::new().await;
    let text = bench.train_to_success("one", &[]);
    assert!(text.contains("epoch: 1 step: 1, loss is "), "{text}");
    assert!(text.lines().last().is_some_and(|l| l.starts_with("succeeded: validation accuracy ")), "{text}");
    bench.train_to_success("two", &[]);
    let last = bench.model("one", "2-24");
    assert!(last == bench.model("two", "2-24"), "the same job gives the same bytes");
    assert!(last != bench.model("one", "1-7"), "other steps give other bytes");

    assert!(text.contains("ranks share memory"), "{text}");
    let over_tcp = bench.train("over-tcp", &[]).env("LOCKSTEP_SHARED_MEMORY", "0").output().expect("it runs");
    let text = assert_success(&over_tcp);
    assert!(text.contains("over TCP (rank 0: LOCKSTEP_SHARED_MEMORY is 0)"), "{text}");
    assert!(last == bench.model("over-tcp", "2-24"), "with TCP as with shared memory");

    // Steps 7 and 14 are in the middle of epochs 1 and 2.
    for from in ["1-7", "2-14"] {
        let out = format!("from-{from}");
        let text = bench.train_to_success(&out, &["--resume", &bench.checkpoint("one", from)]);
        assert!(text.contains(&format!("continuing from checkpoint {from}")), "{text}");
        for later in ["2-21", "2-24"] {
            assert!(bench.model(&out, later) == bench.model("one", later), "{later} from {from}");
        }
    }

    let second = bench.train("one", &[]).output().expect("it runs");
    assert_eq!(second.status.code(), Some(2), "a finished run is not overwritten");
    assert!(String::from_utf8_lossy(&second.stderr).contains("--resume latest"));
    let nowhere = bench.train("nowhere", &["--resume", "latest"]).output().expect("it runs");
    assert_eq!((nowhere.status.code(), bench.out("nowhere").exists()), (Some(2), false), "{nowhere:?}");
}

#[tokio::test]
async fn a_continued_run_reports_changes_of_the_dataset() {
    let bench = Bench::new().await;
    let held_out = ["--set", "data.validation=0.2", "--set", "train.schedule=\"one_cycle\""];
    bench.train_to_success("held-out", &held_out);
    let longer = ["--resume", "latest", "--set", "train.epochs=3"];
    let text = bench.train_to_success("held-out", &[&held_out[..], &longer].concat());
    assert!(text.contains("the learning rate changes where the run continues: from 0 at step"), "{text}");
    assert!(!text.contains("is validated with other pictures") && !text.contains("counts as"), "{text}");
    let other = ["--resume", "latest", "--set", "train.epochs=4", "--set", "data.validation_seed=1"];
    let text = bench.train_to_success("held-out", &[&held_out[..], &other].concat());
    for words in
        ["this run is validated with other pictures than the checkpoint", "were training pictures of the run"]
    {
        assert!(text.contains(words), "{words} in {text}");
    }

    // The dataset grows by a quarter.
    bench.train_to_success("grows", &[]);
    let grown = format!("data.dataset={:?}", pictures::idx_dataset(bench.folder.path(), 500, 100));
    let longer = ["--resume", "latest", "--set", "train.epochs=3", "--set", &grown];
    let text = bench.train_to_success("grows", &longer);
    let words = "an epoch has 15 steps now and had 12: step 24 counts as 30, the same position in epoch 2";
    assert!(text.contains(words) && !text.contains("a step uses"), "{text}");
    // The test split is the same.
    assert!(!text.contains("is validated with other pictures"), "{text}");
}

#[tokio::test]
async fn a_continued_run_keeps_its_normalisation() {
    let bench = Bench::new().await;
    bench.train_to_success("before", &[]);
    // Half of the pixels become white, which changes the dataset's mean.
    let images = bench.folder.path().join("fashion-400-100/train-images-idx3-ubyte");
    let mut bytes = fs::read(&images).expect("the pictures");
    let half = bytes.len() / 2;
    bytes[half..].fill(255);
    fs::write(&images, bytes).expect("the pictures");
    bench.train_to_success("resumed", &["--resume", &bench.checkpoint("before", "1-7")]);
    bench.train_to_success("new", &[]);
    let mean = |out: &str| {
        let bytes = bench.model(out, "2-24");
        let text = String::from_utf8_lossy(&bytes[..4096]).into_owned();
        let (_, value) = text.split_once(r#""mean":"["#).expect("the mean in the header");
        value.split(']').next().expect("an end").parse::<f32>().expect("one number")
    };
    assert_eq!(mean("resumed"), mean("before"));
    assert!(mean("new") > mean("before") + 0.1, "{} and {}", mean("new"), mean("before"));
}

#[tokio::test]
async fn adamw_and_lamb_continue_to_the_same_bytes_and_another_optimizer_starts_without_state() {
    let bench = Bench::new().await;
    let optimizer = |out: &str| {
        fs::read(bench.out(out).join("checkpoints/2-24/optimizer.safetensors")).expect("a checkpoint")
    };
    for kind in ["adamw", "lamb"] {
        let kind_set = format!("train.optimizer={kind}");
        let sets = sets(&[
            &kind_set,
            "train.lr=0.003",
            "train.weight_decay=0.05",
            "train.decay_norm_and_bias=false",
        ]);
        bench.train_to_success(kind, &sets);
        let resume = ["--resume", &bench.checkpoint(kind, "1-7")];
        let resumed = format!("{kind}-resumed");
        let text = bench.train_to_success(&resumed, &[&sets[..], &resume].concat());
        assert!(
            text.contains("continuing from checkpoint 1-7") && !text.contains("starts again at zero"),
            "{text}"
        );
        assert!(bench.model(&resumed, "2-24") == bench.model(kind, "2-24"), "{kind}");
        assert!(optimizer(&resumed) == optimizer(kind), "{kind}");

        let other = bench.train(&format!("{kind}-then-momentum"), &resume).output().expect("it runs");
        let text = assert_success(&other);
        let line = format!("train.optimizer is momentum and was {kind}, whose state is different");
        assert!(text.contains(&line), "{text}");
    }
}

/// Two processes with the variables that torchrun sets.
#[tokio::test]
async fn under_torchrun_each_process_is_a_rank() {
    let bench = Bench::new().await;
    let port = free_port();
    let start = |rank: &str| {
        bench
            .train("out", &[])
            .env("RANK", rank)
            .env("LOCAL_RANK", rank)
            .envs([("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
            .env("MASTER_PORT", port.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts")
    };
    let (zero, one) = (start("0"), start("1"));
    let (zero, one) = (zero.wait_with_output().expect("it ends"), one.wait_with_output().expect("it ends"));
    assert!(assert_success(&zero).contains("succeeded: validation accuracy"));
    assert_eq!(assert_success(&one), "", "only rank 0 reports");
    bench.train_to_success("alone", &[]);
    assert!(bench.model("out", "2-24") == bench.model("alone", "2-24"), "the same bytes as without torchrun");
}

#[test]
fn doctor_gathers_the_values_of_two_or_three_processes() {
    let doctor = |more: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_lockstep")).arg("doctor").args(more).output().expect("it runs")
    };
    let text = assert_success(&doctor(&["--ranks", "3"]));
    assert!(text.contains("[[0.], [1.], [2.]]"), "{text}");
    let report: serde_json::Value =
        serde_json::from_str(&assert_success(&doctor(&["--json"]))).expect("JSON");
    assert_eq!(report["all_gather"]["values"], serde_json::json!([0.0, 1.0]));
    assert!(report["findings"].as_array().is_some_and(|f| f.iter().any(|f| f["what"] == "GPUs")));
}
