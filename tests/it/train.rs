//! `lockstep train`: training without a server.

use crate::{pictures, server::turn};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

/// A folder with pictures and a job of 24 steps, 12 an epoch, on 2 ranks.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let dataset = pictures::idx_dataset(folder.path(), 400, 100);
        let job = format!(
            "name = \"bench\"\n[model]\narch = \"resnet20\"\n[data]\ndataset = {dataset:?}\nimage_size = 16\n\
             [train]\nepochs = 2\nglobal_batch_size = 32\nlr = 0.05\nschedule = \"cosine\"\nseed = 3\n\
             [parallel]\nranks = 2\n[checkpoint]\nevery_steps = 7\nkeep = 9\n[log]\nevery_steps = 1\n"
        );
        fs::write(folder.path().join("job.toml"), job).expect("the job");
        Self { folder }
    }

    fn train(&self, out: &str, more: &[&str]) -> Command {
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

    fn out(&self, out: &str) -> PathBuf {
        self.folder.path().join(out)
    }

    fn model(&self, out: &str, checkpoint: &str) -> Vec<u8> {
        let path = self.out(out).join("checkpoints").join(checkpoint).join("model.safetensors");
        fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }
}

fn succeeded(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Reads the ranks' loss lines until step `step` has one.
fn until_step(child: &mut Child, step: u32) {
    let lines = BufReader::new(child.stdout.as_mut().expect("a pipe")).lines();
    for line in lines {
        let line = line.expect("a line");
        if line.starts_with(&format!("epoch: 1 step: {step}, loss is ")) {
            return;
        }
    }
    panic!("step {step} never came");
}

fn pid_of(attempt: &Path, rank: u32) -> i32 {
    let text = fs::read(attempt.join(format!("rank.{rank}.pid"))).expect("a pid file");
    let mark: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    i32::try_from(mark["pid"].as_i64().expect("a pid")).expect("a pid")
}

fn signal(pid: i32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a pid");
    rustix::process::kill_process(pid, signal).expect("it is there");
}

fn is_gone(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X']))
}

#[tokio::test]
async fn twice_the_same_bytes_and_the_same_after_continuing_in_mid_epoch() {
    let _turn = turn().await;
    let bench = Bench::new();
    let said = succeeded(&bench.train("one", &[]).output().expect("it runs"));
    assert!(said.contains("epoch: 1 step: 1, loss is "), "{said}");
    assert!(said.lines().last().is_some_and(|l| l.starts_with("succeeded: validation accuracy ")), "{said}");
    succeeded(&bench.train("two", &[]).output().expect("it runs"));
    let last = bench.model("one", "2-24");
    assert!(last == bench.model("two", "2-24"), "the same job gives the same bytes");
    assert!(last != bench.model("one", "1-7"), "and it is steps that make them");

    assert!(said.contains("ranks share memory"), "{said}");
    let apart = bench.train("apart", &[]).env("LOCKSTEP_SHARED_MEMORY", "0").output().expect("it runs");
    let said = succeeded(&apart);
    assert!(said.contains("over TCP (rank 0: LOCKSTEP_SHARED_MEMORY is 0)"), "{said}");
    assert!(last == bench.model("apart", "2-24"), "whichever way gradients go");

    // Steps 7 and 14 are in the middle of epochs 1 and 2.
    for from in ["1-7", "2-14"] {
        let checkpoint = bench.out("one").join("checkpoints").join(from);
        let out = format!("from-{from}");
        let resume = checkpoint.to_str().expect("a path");
        let said = succeeded(&bench.train(&out, &["--resume", resume]).output().expect("it runs"));
        assert!(said.contains(&format!("continuing from checkpoint {from}")), "{said}");
        for later in ["2-21", "2-24"] {
            assert!(bench.model(&out, later) == bench.model("one", later), "{later} from {from}");
        }
    }

    let again = bench.train("one", &[]).output().expect("it runs");
    assert_eq!(again.status.code(), Some(2), "a finished run is not written over");
    assert!(String::from_utf8_lossy(&again.stderr).contains("--resume latest"));
}

#[test]
fn a_run_that_goes_on_normalises_as_it_began() {
    let bench = Bench::new();
    succeeded(&bench.train("before", &[]).output().expect("it runs"));
    // Half of the pixels become white, as if other pictures could be read, or were read otherwise.
    let images = bench.folder.path().join("fashion-400-100/train-images-idx3-ubyte");
    let mut bytes = fs::read(&images).expect("the pictures");
    let half = bytes.len() / 2;
    bytes[half..].fill(255);
    fs::write(&images, bytes).expect("the pictures");
    let checkpoint = bench.out("before/checkpoints/1-7");
    let resume = ["--resume", checkpoint.to_str().expect("a path")];
    succeeded(&bench.train("resumed", &resume).output().expect("it runs"));
    succeeded(&bench.train("anew", &[]).output().expect("it runs"));
    let mean = |out: &str| {
        let bytes = bench.model(out, "2-24");
        let text = String::from_utf8_lossy(&bytes[..4096]).into_owned();
        let (_, value) = text.split_once(r#""mean":"["#).expect("the mean in the header");
        value.split(']').next().expect("an end").parse::<f32>().expect("one number")
    };
    assert_eq!(mean("resumed"), mean("before"));
    assert!(mean("anew") > mean("before") + 0.1, "{} and {}", mean("anew"), mean("before"));
}

#[tokio::test]
async fn adamw_and_lamb_continue_to_the_same_bytes_and_another_optimizer_begins_anew() {
    let _turn = turn().await;
    let bench = Bench::new();
    let optimizer = |out: &str| {
        fs::read(bench.out(out).join("checkpoints/2-24/optimizer.safetensors")).expect("a checkpoint")
    };
    for kind in ["adamw", "lamb"] {
        let of_kind = format!("train.optimizer={kind}");
        let sets = [
            of_kind.as_str(),
            "train.lr=0.003",
            "train.weight_decay=0.05",
            "train.decay_norm_and_bias=false",
        ];
        let sets: Vec<_> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        succeeded(&bench.train(kind, &sets).output().expect("it runs"));
        let checkpoint = bench.out(kind).join("checkpoints/1-7");
        let resume = ["--resume", checkpoint.to_str().expect("a path")];
        let again = format!("{kind}-again");
        let said = succeeded(&bench.train(&again, &[&sets[..], &resume].concat()).output().expect("it runs"));
        assert!(said.contains("continuing from checkpoint 1-7") && !said.contains("begins anew"), "{said}");
        assert!(bench.model(&again, "2-24") == bench.model(kind, "2-24"), "{kind}");
        assert!(optimizer(&again) == optimizer(kind), "{kind}");

        let other = bench.train(&format!("{kind}-then-momentum"), &resume).output().expect("it runs");
        let said = succeeded(&other);
        let line = format!("train.optimizer is momentum and was {kind}, which kept other numbers");
        assert!(said.contains(&line), "{said}");
    }
}

#[tokio::test]
async fn the_average_of_the_weights_is_evaluated_kept_and_continued() {
    let _turn = turn().await;
    let bench = Bench::new();
    // Mixed pictures, too: they are the same after a continuation, and on one rank.
    let mixed = ["train.mixup=0.4", "train.cutmix=1.0"];
    let sets = [
        "train.ema_decay=0.8",
        "train.ema_steps=2",
        "checkpoint.every_steps=1",
        "checkpoint.keep=30",
        mixed[0],
        mixed[1],
    ];
    let sets: Vec<_> = sets.iter().flat_map(|set| ["--set", *set]).collect();
    let said = succeeded(&bench.train("one", &sets).output().expect("it runs"));
    assert!(
        said.contains("validation accuracy is ")
            && said.contains("validation accuracy of the averaged weights is "),
        "{said}"
    );
    let values = |out: &str, checkpoint: &str, file: &str| -> Vec<f32> {
        let bytes = fs::read(bench.out(out).join("checkpoints").join(checkpoint).join(file)).expect("a file");
        let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
        let names: std::collections::BTreeSet<_> = tensors.names().into_iter().collect();
        let floats = names.into_iter().filter(|name| !name.ends_with("num_batches_tracked"));
        floats.flat_map(|name| floats_of(tensors.tensor(name).expect("it is there").data())).collect()
    };
    assert!(!bench.out("one").join("checkpoints/1-1/ema.safetensors").exists(), "two steps are not done");
    let mut wanted = values("one", "1-2", "model.safetensors");
    for step in 2..=24u32 {
        let checkpoint = format!("{}-{step}", 1 + (step - 1) / 12);
        if step > 2 && step % 2 == 0 {
            let now = values("one", &checkpoint, "model.safetensors");
            wanted.iter_mut().zip(now).for_each(|(a, v)| *a = 0.8f32 * *a + (1.0f64 - 0.8) as f32 * v);
        }
        assert!(values("one", &checkpoint, "ema.safetensors") == wanted, "step {step}");
    }

    // Evaluating the average leaves no trace in the weights, and neither does going on.
    let plain = ["checkpoint.every_steps=1", "checkpoint.keep=30", mixed[0], mixed[1]];
    let plain: Vec<_> = plain.iter().flat_map(|set| ["--set", *set]).collect();
    succeeded(&bench.train("plain", &plain).output().expect("it runs"));
    assert!(values("plain", "2-24", "model.safetensors") == values("one", "2-24", "model.safetensors"));
    let from = bench.out("one").join("checkpoints/1-7");
    let more = [&sets[..], &["--resume", from.to_str().expect("a path")]].concat();
    succeeded(&bench.train("again", &more).output().expect("it runs"));
    assert!(values("again", "2-24", "ema.safetensors") == wanted);
    assert!(values("again", "2-24", "model.safetensors") == values("one", "2-24", "model.safetensors"));
    // On one rank, and where gradients travel, too.
    let alone = [&sets[..], &["--set", "parallel.ranks=1"]].concat();
    succeeded(&bench.train("alone", &alone).output().expect("it runs"));
    let apart = bench.train("apart", &sets).env("LOCKSTEP_SHARED_MEMORY", "0").output().expect("it runs");
    let said_apart = succeeded(&apart);
    let evaluations = |said: &str| -> Vec<String> {
        let lines =
            said.lines().filter_map(|l| l.split("validation accuracy of the averaged weights is ").nth(1));
        lines.map(|l| l.split(" pictures").next().unwrap_or_default().to_owned()).collect()
    };
    assert!(evaluations(&said).len() == 2 && evaluations(&said) == evaluations(&said_apart), "{said_apart}");
    for out in ["alone", "apart"] {
        assert!(values(out, "2-24", "ema.safetensors") == wanted, "{out}");
    }
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[tokio::test]
async fn a_stopped_run_goes_on_to_the_same_bytes() {
    let _turn = turn().await;
    let bench = Bench::new();
    succeeded(&bench.train("whole", &[]).output().expect("it runs"));
    let mut child = bench.train("parts", &[]).stdout(Stdio::piped()).spawn().expect("it starts");
    until_step(&mut child, 3);
    signal(child.id().cast_signed(), rustix::process::Signal::INT);
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(1));
    for rank in 0..2 {
        assert!(is_gone(pid_of(&bench.out("parts").join("attempts/1"), rank)), "rank {rank} has ended");
    }
    let said = succeeded(&bench.train("parts", &["--resume", "latest"]).output().expect("it runs"));
    assert!(said.contains("continuing from checkpoint 1-"), "{said}");
    assert!(bench.model("parts", "2-24") == bench.model("whole", "2-24"));
    assert!(bench.out("parts").join("attempts/2/rank.1.log").exists(), "an attempt of its own");
}

/// Ends the run by Ctrl-C and gives what it said.
fn interrupted(mut child: Child) -> (String, Duration) {
    let told = Instant::now();
    signal(child.id().cast_signed(), rustix::process::Signal::INT);
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1));
    (String::from_utf8_lossy(&output.stderr).into_owned(), told.elapsed())
}

fn state(bench: &Bench, out: &str, checkpoint: &str) -> serde_json::Value {
    let path = bench.out(out).join("checkpoints").join(checkpoint).join("state.json");
    serde_json::from_slice(&fs::read(path).expect("a state")).expect("JSON")
}

#[tokio::test]
async fn a_stop_breaks_an_evaluation_off_and_the_next_run_makes_up_for_it() {
    let _turn = turn().await;
    let bench = Bench::new();
    // An evaluation that takes a while beside an epoch of 12 steps.
    let place = bench.folder.path().join("long");
    fs::create_dir(&place).expect("a folder");
    let dataset = format!("data.dataset={:?}", pictures::idx_dataset(&place, 8000, 100));
    let sets = ["--set", &dataset, "--set", "data.validation=0.95", "--set", "checkpoint.every_steps=12"];
    let whole = succeeded(&bench.train("whole", &sets).output().expect("it runs"));
    for ranks in ["2", "1"] {
        let out = &format!("parts of {ranks}");
        let sets = [&sets[..], &["--ranks", ranks]].concat();
        let child =
            bench.train(out, &sets).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let events = bench.out(out).join("attempts/1/rank.0.events");
        let began = Instant::now();
        let evaluates =
            || fs::read(&events).unwrap_or_default().windows(10).any(|bytes| bytes == b"evaluating");
        while !evaluates() {
            assert!(began.elapsed() < Duration::from_secs(60), "it never evaluates");
            std::thread::sleep(Duration::from_millis(2));
        }
        let (said, took) = interrupted(child);
        assert!(said.contains("stopped after step 12; --resume latest goes on from there"), "{said}");
        assert!(took < Duration::from_secs(10), "{took:?}");
        let log = fs::read_to_string(bench.out(out).join("attempts/1/rank.0.log")).expect("a log");
        assert!(log.contains("the evaluation after step 12 is broken off"), "{log}");
        assert!(!log.contains("validation accuracy"), "{log}");
        assert!(state(&bench, out, "1-12")["val_accuracy"].is_null());

        let resumed = [&sets[..], &["--resume", "latest"]].concat();
        let said = succeeded(&bench.train(out, &resumed).output().expect("it runs"));
        let accuracies = |said: &str| -> Vec<String> {
            let lines = said.lines().filter(|line| line.contains("validation accuracy is"));
            lines.map(|line| line.split(" (").next().unwrap_or_default().to_owned()).collect()
        };
        assert_eq!(accuracies(&said), accuracies(&whole), "both epochs are evaluated, with the same result");
        for checkpoint in ["1-12", "2-24"] {
            let (theirs, ours) = (state(&bench, "whole", checkpoint), state(&bench, out, checkpoint));
            for key in ["val_accuracy", "best"] {
                assert_eq!(theirs[key], ours[key], "{key} of {checkpoint}");
                assert!(!ours[key].is_null());
            }
        }
        if ranks == "2" {
            assert!(bench.model(out, "2-24") == bench.model("whole", "2-24"));
        }
    }
}

#[tokio::test]
async fn a_signal_to_one_rank_stops_all_with_a_checkpoint() {
    let _turn = turn().await;
    let bench = Bench::new();
    let mut child = bench
        .train("out", &["--set", "train.epochs=1000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    until_step(&mut child, 2);
    // As Slurm does, or somebody with kill(1).
    signal(pid_of(&bench.out("out").join("attempts/1"), 1), rustix::process::Signal::TERM);
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("stopped after step ") && said.contains("goes on from there"), "{said}");
}

#[tokio::test]
async fn seventeen_ranks_and_more_stop_before_their_run_is_over() {
    let _turn = turn().await;
    let bench = Bench::new();
    // Large pictures, so that its 14 steps take a while.
    let sets = ["--ranks", "18", "--set", "train.global_batch_size=144", "--set", "train.epochs=7", "--set"];
    let sets = [&sets[..], &["data.image_size=32"]].concat();
    let mut child =
        bench.train("out", &sets).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    until_step(&mut child, 1);
    let (said, _) = interrupted(child);
    assert!(said.contains("stopped after step ") && said.contains("goes on from there"), "{said}");
    assert!(!said.contains("stopped after step 14;"), "{said}");
}

#[tokio::test]
async fn a_stop_that_cannot_end_its_step_says_what_is_lost() {
    let _turn = turn().await;
    let bench = Bench::new();
    let mut child = bench
        .train("out", &["--set", "train.epochs=1000", "--set", "checkpoint.every_steps=100000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    until_step(&mut child, 3);
    let attempt = bench.out("out").join("attempts/1");
    // It holds up the others for good.
    signal(pid_of(&attempt, 1), rustix::process::Signal::STOP);
    let pid = child.id().cast_signed();
    let told = Instant::now();
    signal(pid, rustix::process::Signal::INT);
    drop(child.stdout.take());
    let log = || fs::read_to_string(attempt.join("rank.0.log")).expect("a log");
    while !log().contains("There is no checkpoint yet: steps 1 to ") {
        assert!(told.elapsed() < Duration::from_secs(40), "rank 0 says nothing: {}", log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(told.elapsed() > Duration::from_secs(15), "the step had its time: {:?}", told.elapsed());
    // Ctrl-C again: the one that hangs is not waited for.
    signal(pid, rustix::process::Signal::INT);
    let output = child.wait_with_output().expect("it ends");
    assert!(told.elapsed() < Duration::from_secs(60), "{:?}", told.elapsed());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("without a checkpoint: steps 1 to ") && said.contains("are lost"), "{said}");
    assert!(is_gone(pid_of(&attempt, 0)) && is_gone(pid_of(&attempt, 1)));
}

#[tokio::test]
async fn a_killed_rank_ends_the_others_and_is_named() {
    let _turn = turn().await;
    let bench = Bench::new();
    let mut child = bench
        .train("out", &["--set", "train.epochs=1000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    until_step(&mut child, 2);
    let attempt = bench.out("out").join("attempts/1");
    let killed = Instant::now();
    signal(pid_of(&attempt, 1), rustix::process::Signal::KILL);
    // Nobody reads on: no reason to stop, and none to forget how it ended.
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("rank 1 was killed by signal 9 at step "), "{said}");
    assert!(is_gone(pid_of(&attempt, 0)));
    let log = fs::read_to_string(attempt.join("rank.0.log")).expect("a log");
    assert!(log.contains("lost the connection to rank 1"), "{log}");
}

#[tokio::test]
async fn what_cannot_be_trained_is_said_with_what_to_change() {
    let _turn = turn().await;
    let bench = Bench::new();
    let fails = |sets: &[&str]| {
        let out = format!("out-{}", sets.join("-").replace(['/', '.'], "_"));
        let more: Vec<_> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        let output = bench.train(&out, &more).output().expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, said) = fails(&["train.global_batch_size=4096"]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("400 training pictures are fewer than one step takes (4096"), "{said}");
    let (status, said) = fails(&["parallel.device=cuda"]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("there is no GPU on this machine") && said.contains("\"cpu\""), "{said}");
    let (status, said) = fails(&["train.lr=10000", "train.weight_decay=1"]);
    assert_eq!(status, Some(1), "{said}");
    assert!(
        said.contains("the loss is not finite on ")
            && said.contains("training has diverged at step ")
            && said.contains("lower lr"),
        "{said}"
    );
    let (status, said) = fails(&["model.pretrained=/none.safetensors"]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("model.pretrained: /none.safetensors"), "{said}");
    let pickled = bench.folder.path().join("resnet20.pth");
    fs::write(&pickled, b"PK\x03\x04").expect("a file");
    let (status, said) = fails(&[&format!("model.pretrained={}", pickled.display())]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("resnet20.pth: is a pickle") && said.contains("save_file(torch.load("), "{said}");
    let (status, said) = fails(&["data.dataset=/none", "train.lrr=1"]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("lrr"), "{said}");
}

/// A learning rate at which the weights of a ResNet-18 leave float32 while its loss goes on: batch norm and ReLU must
/// not turn what is not finite into zeros.
#[tokio::test]
async fn a_run_whose_numbers_leave_float32_fails_as_diverged_and_leaves_no_such_checkpoint() {
    let _turn = turn().await;
    let bench = Bench::new();
    for ranks in ["1", "2"] {
        let out = format!("out-{ranks}");
        let ranks_set = format!("parallel.ranks={ranks}");
        let sets = [
            "model.arch=resnet18",
            "train.epochs=",
            "train.steps=40",
            "train.global_batch_size=8",
            "train.lr=100",
        ];
        let more = ["train.momentum=0.95", "train.schedule=constant", "checkpoint.every_steps=5", &ranks_set];
        let sets: Vec<_> = sets.iter().chain(&more).flat_map(|set| ["--set", *set]).collect();
        let output = bench.train(&out, &sets).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("training has diverged at step ") && said.contains("lower lr"), "{said}");
        let mut models = 0;
        for folder in fs::read_dir(bench.out(&out).join("checkpoints")).expect("checkpoints").flatten() {
            let model = fs::read(folder.path().join("model.safetensors")).expect("a model");
            let tensors = safetensors::SafeTensors::deserialize(&model).expect("tensors");
            models += 1;
            for (name, tensor) in tensors.iter().filter(|(_, t)| t.dtype() == safetensors::Dtype::F32) {
                let mut values =
                    tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
                assert!(values.all(f32::is_finite), "{name} of {}", folder.path().display());
            }
        }
        assert!(models > 0, "steps before the first that was not finite were kept");
    }
}

#[tokio::test]
async fn the_head_of_pretrained_weights_is_made_anew_when_classes_differ() {
    let _turn = turn().await;
    let bench = Bench::new();
    let folder = pictures::image_folder(bench.folder.path(), 40);
    let dataset = format!("data.dataset={}", folder.display());
    let two = ["--set", &dataset, "--set", "data.validation=val"];
    succeeded(&bench.train("two", &two).output().expect("it runs"));
    for split in ["train", "val"] {
        let third = folder.join(split).join("wellington");
        fs::create_dir(&third).expect("a folder");
        for picture in fs::read_dir(folder.join(split).join("boot")).expect("a folder").flatten() {
            fs::copy(picture.path(), third.join(picture.file_name())).expect("a copy");
        }
    }
    // 80 pictures were 2 steps an epoch; 120 are 3.
    let weights = format!("model.pretrained={}", bench.out("two").join("checkpoints/2-4").display());
    let three = [&two[..], &["--set", &weights]].concat();
    let said = succeeded(&bench.train("three", &three).output().expect("it runs"));
    assert!(said.contains("fc.weight of ") && said.contains("[2, 64], this job's is [3, 64]"), "{said}");
    assert!(said.contains("the last layer (fc) keeps its initial values"), "{said}");
    assert!(!bench.model("three", "2-6").is_empty());

    let other = [&three[..], &["--set", "model.arch=resnet32"]].concat();
    let output = bench.train("other", &other).output().expect("it runs");
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("does not hold a resnet32") && said.contains("is missing"), "{said}");
}

/// Puts `value` in place of a tensor's first one.
fn spoil(model: &Path, tensor: &str, value: f32) {
    let mut bytes = fs::read(model).expect("a model");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let data = file.tensor(tensor).expect("the tensor").data();
    let offset = data.as_ptr().addr() - bytes.as_ptr().addr();
    bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    fs::write(model, bytes).expect("a model");
}

#[tokio::test]
async fn weights_that_diverged_are_refused_by_file_and_tensor() {
    let _turn = turn().await;
    let bench = Bench::new();
    succeeded(&bench.train("out", &[]).output().expect("it runs"));
    for (tensor, value, said) in [
        ("layer1.0.conv1.weight", f32::NAN, "layer1.0.conv1.weight holds NaN at place 0"),
        ("layer2.0.bn2.running_var", -1.0, "layer2.0.bn2.running_var holds -1 at place 0"),
        ("fc.bias", f32::INFINITY, "fc.bias holds inf at place 0"),
    ] {
        let file = bench.folder.path().join(format!("{tensor}.safetensors"));
        fs::write(&file, bench.model("out", "2-24")).expect("a copy");
        spoil(&file, tensor, value);
        let weights = format!("model.pretrained={}", file.display());
        let output = bench.train(tensor, &["--set", &weights]).output().expect("it runs");
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert!(words.contains(&format!("{}: {said}", file.display())), "{words}");
        // And it is asked nothing.
        let picture = bench.folder.path().join("picture.png");
        image::GrayImage::from_pixel(28, 28, image::Luma([99])).save(&picture).expect("a picture");
        let ask = Command::new(env!("CARGO_BIN_EXE_lockstep"))
            .args(["predict", "--model"])
            .args([&file, &picture])
            .output()
            .expect("it runs");
        let words = String::from_utf8_lossy(&ask.stderr).into_owned();
        assert_eq!((ask.status.code(), ask.stdout.len()), (Some(2), 0), "{words}");
        assert!(words.contains(said), "{words}");
    }
}

#[tokio::test]
async fn a_checkpoint_of_another_network_or_other_classes_does_not_fit_and_is_not_called_damaged() {
    let _turn = turn().await;
    let bench = Bench::new();
    succeeded(&bench.train("out", &[]).output().expect("it runs"));
    let checkpoint = bench.out("out").join("checkpoints/1-7");
    let names = bench.folder.path().join("fashion-400-100/classes.txt");
    let resume = |out: &str, sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", *set]);
        let more: Vec<_> =
            ["--resume", checkpoint.to_str().expect("a path")].into_iter().chain(sets).collect();
        let output = bench.train(out, &more).output().expect("it runs");
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert!(
            words.contains("checkpoints/1-7 does not fit this job") && !words.contains("damaged"),
            "{words}"
        );
        words
    };
    // Nor does one from beyond the end: nothing would be trained, and the run called a success.
    let later = bench.out("out").join("checkpoints/2-21");
    let more = ["--resume", later.to_str().expect("a path"), "--set", "train.epochs=1"];
    let past = bench.train("past", &more).output().expect("it runs");
    let words = String::from_utf8_lossy(&past.stderr);
    assert_eq!(past.status.code(), Some(1), "{words}");
    assert!(words.contains("2-21 is of step 21 and the training ends at step 12"), "{words}");
    let words = resume("deeper", &["model.arch=resnet32"]);
    assert!(words.contains("layer1.3.bn1.bias is missing"), "{words}");
    let words = resume("stem", &["model.arch=resnet20", "model.stem=imagenet"]);
    assert!(words.contains("conv1.weight is [16, 1, 3, 3], wanted [16, 1, 7, 7]"), "{words}");
    let classes: String = (0..10).map(|c| format!("{}\n", 9 - c)).collect();
    fs::write(&names, classes).expect("names");
    let words = resume("turned", &[]);
    assert!(words.contains("class 0 is \"0\" for the model and \"9\" in the dataset"), "{words}");
}

/// Two processes with torchrun's variables, as torchrun starts them.
#[tokio::test]
async fn under_torchrun_each_process_is_a_rank() {
    let _turn = turn().await;
    let bench = Bench::new();
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
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
    assert!(succeeded(&zero).contains("succeeded: validation accuracy"));
    assert_eq!(succeeded(&one), "", "rank 0 speaks for all");
    succeeded(&bench.train("alone", &[]).output().expect("it runs"));
    assert!(bench.model("out", "2-24") == bench.model("alone", "2-24"), "whoever starts the ranks");
}

#[test]
fn doctor_gathers_over_real_processes() {
    let doctor = |more: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_lockstep")).arg("doctor").args(more).output().expect("it runs")
    };
    let said = succeeded(&doctor(&["--ranks", "3"]));
    assert!(said.contains("[[0.], [1.], [2.]]"), "{said}");
    let report: serde_json::Value = serde_json::from_str(&succeeded(&doctor(&["--json"]))).expect("JSON");
    assert_eq!(report["all_gather"]["values"], serde_json::json!([0.0, 1.0]));
    assert!(report["findings"].as_array().is_some_and(|f| f.iter().any(|f| f["what"] == "GPUs")));
}
