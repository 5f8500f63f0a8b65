//! The command line, as a person uses it in a shell.

use crate::{
    pictures,
    server::{
        Finished, Folder, Server, TIMEOUT, client_without_redirects, exit_status, lockstep, signal,
        training_permit,
    },
    tensors::tensors,
};
use rustix::process::Signal;
use std::{
    ffi::OsString,
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Stdio},
    time::Instant,
};

const JOB: &str = r#"
name = "from-a-shell"
[model]
arch = "resnet20"
[data]
dataset = "fashion"
image_size = 16
[train]
steps = 1000
batch_size = 8
[parallel]
ranks = 2
[checkpoint]
every_epochs = 0
[log]
every_steps = 1
"#;

#[tokio::test]
async fn a_job_is_run_from_a_shell_from_dataset_to_download() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let dataset = pictures::idx_dataset(server.folder().path(), 320, 40);
    assert!(server.cli(&["dataset", "list"]).ok().contains("dataset add"), "an empty list says what to do");
    let added = server.cli(&["dataset", "add", "fashion", dataset.to_str().expect("UTF-8")]);
    added.assert_prints(&["fashion", "idx", "28 x 28", "320", "40"]);
    assert!(server.cli(&["dataset", "list"]).ok().contains("320 train"));
    let mut info = server.cli(&["dataset", "inspect", "fashion", "--json"]).json();
    assert!(info.as_object_mut().expect("an object").remove("inspected_at").is_some());
    assert!(info["fingerprint"]["sha256"].is_string());
    assert_eq!(info["classes"].as_array().map(Vec::len), Some(10));
    assert_eq!(info, server.cli(&["dataset", "inspect", dataset.to_str().expect("UTF-8"), "--json"]).json());
    assert!(server.cli(&["list"]).ok().contains("submit"), "an empty list says what to do");

    let file = server.folder().write("job.toml", JOB);
    let file = file.to_str().expect("UTF-8");
    let watched =
        server.cli(&["submit", file, "--set", "train.steps=12", "--set", "name=watched", "--watch"]);
    let last = watched.ok().lines().last().expect("a last line");
    assert!(
        last.starts_with("succeeded after ")
            && last.contains(" s: validation accuracy ")
            && last.ends_with(" of 40 pictures (best checkpoint 1-12)"),
        "{last}"
    );
    assert!(watched.stderr.contains("\nnext: `lockstep predict j"), "{}", watched.stderr);

    let listed = server.cli(&["list"]);
    listed.assert_prints(&["watched", "succeeded"]);
    assert!(listed.stdout.lines().next().is_some_and(|header| header.ends_with("AGE")), "{}", listed.stdout);
    let age = listed.stdout.lines().nth(1).map(|row| row.split("  ").last().unwrap_or_default());
    assert!(age.is_some_and(|age| age.ends_with(" s") || age.ends_with(" min")), "{}", listed.stdout);
    let compared = server.cli(&["list", "--where", "lr > 0, val_accuracy >= 0", "--where", "best >= 0"]);
    let hint = "no job matches; give an accuracy as a number from 0 to 1, or as a percentage such as 80%";
    assert!(server.cli(&["list", "--where", "val_accuracy > 90"]).ok().starts_with(hint));
    let (header, row) = compared.ok().split_once('\n').expect("two lines");
    let columns: Vec<_> = header.split_whitespace().rev().take(3).collect();
    assert_eq!(columns, ["val_accuracy", "lr", "AGE"], "the compared values are shown");
    assert!(row.trim_end().ends_with(" %"), "{row}");
    let job = server.cli(&["show", "watched", "--json"]).json();
    assert_eq!((&job["state"], &job["step"]), (&"succeeded".into(), &12.into()));
    let id = job["id"].as_str().expect("an id");
    let mut expected = server.job(id).await;
    expected["attempts"] = server.attempts(id).await.into();
    assert_eq!(job, expected, "the same as over REST");
    assert!(server.cli(&["show", id]).ok().contains("succeeded"));

    for rank in ["0", "1"] {
        let printed = server.cli(&["logs", id, "--rank", rank]);
        let on_disk = fs::read_to_string(server.attempt_dir(id, 1).join(format!("rank.{rank}.log")));
        assert_eq!(printed.ok(), on_disk.expect("the rank's log"), "rank {rank}");
    }
    for (option, words) in
        [("--rank", "has no rank 2; its ranks are 0 to 1"), ("--attempt", "it has 1 attempt")]
    {
        server.cli(&["logs", id, option, "2"]).assert_usage_error(&[option, words]);
    }
    let followed = server.cli(&["logs", id, "-f"]);
    assert!(followed.ok().lines().any(|l| l.starts_with("[rank 1] epoch: 1 step: 12, loss is ")));

    // An evaluation gives the job's own accuracy, or differs by one picture whose two best classes have nearly equal scores. The
    // same pictures in a dataset of another name give the same result.
    server.cli(&["dataset", "add", "again", dataset.to_str().expect("UTF-8")]).ok();
    let evaluated = server.cli(&["evaluate", "watched"]);
    assert!(evaluated.ok().starts_with("checkpoint 1-12: accuracy "), "{}", evaluated.stdout);
    assert!(evaluated.stdout.contains(" of 40 pictures") && evaluated.stdout.contains("PRECISION"));
    let evaluation = server.cli(&["evaluate", id, "--checkpoint", "12", "--json"]).json();
    let evaluation_of_copy = server.cli(&["evaluate", id, "--dataset", "again", "--json"]).json();
    assert_eq!(
        (&evaluation["checkpoint"], &evaluation["job"], &evaluation["samples"]),
        (&"1-12".into(), &id.into(), &40.into())
    );
    for key in ["confusion", "loss"] {
        assert_eq!(evaluation[key], evaluation_of_copy[key], "{key}");
    }
    let difference = evaluation["accuracy"].as_f64().expect("a number")
        - job["last"]["val_accuracy"].as_f64().expect("one");
    assert!(difference.abs() < 1.5 / 40.0, "{evaluation:#}");
    // Three pictures leave at least seven of ten classes without a picture, and so without scores.
    let few = pictures::idx_dataset(server.folder().path(), 320, 3);
    server.cli(&["dataset", "add", "few", few.to_str().expect("UTF-8")]).ok();
    let evaluated = server.cli(&["evaluate", id, "--dataset", few.to_str().expect("UTF-8")]);
    let has_no_score = |line: &&str| line.trim_end().ends_with(" –") && !line.contains('%');
    assert!(evaluated.ok().lines().filter(has_no_score).count() >= 7, "{}", evaluated.stdout);
    server
        .cli(&["evaluate", id, "--dataset", "none&weights=ema"])
        .assert_usage_error(&["no dataset is called"]);
    server.cli(&["evaluate", id, "--checkpoint", "7"]).assert_usage_error(&["no checkpoint 7", "12"]);
    server.cli(&["evaluate", id, "--weights", "ema"]).assert_usage_error(&["averag"]);

    let model = server.folder().path().join("model.safetensors");
    for which in ["latest", "best", "12", "1-12"] {
        server.cli(&["download", id, "--checkpoint", which, "-o", model.to_str().expect("UTF-8")]).ok();
        assert!(fs::read(&model).expect("the model") == server.last_model(id).await, "{which}");
    }
    // An import of the job's metrics has the same name, but no checkpoints.
    server.cli(&["export", "parquet", id, "-o", "metrics.parquet"]).ok();
    let imported = server.cli(&["import", "parquet", "metrics.parquet", "--json"]).json();
    assert_eq!(imported[0]["name"], "watched");
    server.cli(&["download", "watched", "-o", model.to_str().expect("UTF-8")]).ok();
    server.cli(&["delete", "--yes", imported[0]["job"].as_str().expect("an id")]).ok();
    for which in ["11", "2-12"] {
        server
            .cli(&["download", id, "--checkpoint", which, "-o", "x"])
            .assert_usage_error(&[which, "it has 1-12"]);
    }
    server
        .cli(&["download", id, "--checkpoint", "newest", "-o", "x"])
        .assert_usage_error(&["best, latest", "such as 2-54"]);

    // A job that nobody watches is cancelled.
    let submitted =
        server.cli(&["submit", file, "--set", "name=unwatched", "--set", "train.steps=1000000", "--json"]);
    let unwatched = submitted.json()["id"].as_str().expect("an id").to_owned();
    server.wait_for_job(&unwatched, "the job trains", |job| job["step"].as_u64() > Some(3)).await;
    server.cli(&["delete", "--yes", &unwatched]).assert_usage_error(&["running"]);
    server.cli(&["delete", &unwatched]).assert_usage_error(&[&unwatched, "no terminal", "--yes"]);
    // An empty name (an unset variable of a script) matches no job, nor does a very short one.
    server.cli(&["delete", ""]).assert_usage_error(&["the name of the job is empty"]);
    server.cli(&["delete", &unwatched[..3]]).assert_usage_error(&["no job is called"]);
    assert!(server.cli(&["cancel", &unwatched]).ok().contains("cancelled"));
    server.cli(&["cancel", &unwatched]).assert_usage_error(&["cancelled"]);
    let watched = server.cli(&["watch", &unwatched]);
    watched.assert_fails(1, &[]);
    assert!(watched.stdout.starts_with("cancelled after "), "{}", watched.stdout);
    assert!(watched.stdout.trim_end().ends_with(" s: cancelled on request"), "{}", watched.stdout);
    // On a terminal the command asks, and an empty reply means no. A script passes --yes.
    for reply in ["\n", "no\n"] {
        let (code, shown) = run_on_terminal(&server.client_variables(), &["delete", &unwatched], reply);
        assert_eq!(code, 2, "{shown}");
        for words in ["Delete unwatched (", "[y/N]", "stays as it is"] {
            assert!(shown.contains(words), "{shown}");
        }
    }
    server.cli(&["show", &unwatched]).ok();
    let (code, shown) = run_on_terminal(&server.client_variables(), &["delete", &unwatched], "y\n");
    assert!(code == 0 && shown.contains(&format!("{unwatched} deleted")), "{code}: {shown}");
    server.cli(&["show", &unwatched]).assert_usage_error(&["job"]);
    let (code, shown) = run_on_terminal(&server.client_variables(), &["delete", "--yes", "watched"], "");
    assert!(code == 0 && !shown.contains("[y/N]"), "{code}: {shown}");
    let [again, other] = ["again", "other"].map(|name| {
        let name = format!("name={name}");
        let submitted = server.cli(&["submit", file, "--set", "priority=-9", "--set", &name, "--json"]);
        submitted.json()["id"].as_str().expect("an id").to_owned()
    });
    server.cli(&["cancel", &again, &other]).ok();
    server.cli(&["delete", "again", "--json"]).assert_usage_error(&["--yes"]);
    // A mistyped name deletes nothing.
    server.cli(&["delete", "again", "nobody", "--yes"]).assert_usage_error(&["no job is called nobody"]);
    server.cli(&["show", &again]).ok();
    let deleted = server.cli(&["delete", "again", "other", "--yes"]);
    assert_eq!(deleted.ok(), format!("{again} deleted\n{other} deleted\n"), "without a terminal");
    // The log has sentences, and no debug output of Rust structs.
    let logs = fs::read_dir(server.folder().path()).expect("a folder").flatten();
    let logs = logs.filter(|entry| entry.file_name().to_string_lossy().starts_with("serve."));
    let log: String = logs.map(|entry| fs::read_to_string(entry.path()).expect("a log")).collect();
    for words in ["an attempt has succeeded after step 12", "an attempt was stopped on the server's order"] {
        assert!(log.lines().any(|line| line.contains("INFO") && line.contains(words)), "{words:?} in {log}");
    }
    let structure =
        log.lines().find(|l| l.contains("INFO") && [" { ", "Some(", "None,"].iter().any(|s| l.contains(s)));
    assert_eq!(structure, None);
    server.stop().await;
}

/// Runs a command with these environment variables on a terminal into which `typed` is typed. Returns the exit status and the
/// terminal's text.
pub(crate) fn run_on_terminal(variables: &[(&str, OsString)], args: &[&str], typed: &str) -> (i32, String) {
    // Types only after the question, as a person does.
    const TERMINAL: &str = "import os, pty, sys\n\
        typed, seen, pid_fd = sys.argv[1].encode(), b'', pty.fork()\n\
        if pid_fd[0] == 0: os.execv(sys.argv[2], sys.argv[2:])\n\
        while True:\n\
        \x20   try: part = os.read(pid_fd[1], 4096)\n\
        \x20   except OSError: break\n\
        \x20   if not part: break\n\
        \x20   seen += part\n\
        \x20   if typed and b'[y/N]' in seen: os.write(pid_fd[1], typed); typed = b''\n\
        sys.stdout.buffer.write(seen)\n\
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid_fd[0], 0)[1]))";
    let mut command = std::process::Command::new("python3");
    command.args(["-c", TERMINAL, typed, crate::server::LOCKSTEP]).args(args);
    let done = Finished::of(command.envs(variables.iter().cloned()).stdin(Stdio::null()));
    (done.status, done.stdout + &done.stderr)
}

#[tokio::test]
async fn commands_that_need_a_gpu_say_so_without_one() {
    let folder = Folder::new();
    let run_without_gpu = |args: &[&str]| {
        // A machine's GPUs are hidden.
        Finished::of(lockstep().args(args).env("CUDA_VISIBLE_DEVICES", "").current_dir(folder.path()))
    };
    run_without_gpu(&["agent", "--gpus", "0"]).assert_usage_error(&["--gpus 0", "there is no GPU"]);
    for command in ["agent", "serve"] {
        for count in ["0", "1025"] {
            run_without_gpu(&[command, "--cpu-slots", count])
                .assert_usage_error(&["--cpu-slots", "from 1 to 1024"]);
        }
    }
    run_without_gpu(&["agent", "--gpus", "0", "--cpu-slots", "1"])
        .assert_usage_error(&["--gpus", "--cpu-slots"]);
    run_without_gpu(&["bench", "--device", "cuda"]).assert_usage_error(&["no GPU"]);
    run_without_gpu(&["bench", "--device", "cpu", "--precision", "fp16"])
        .assert_usage_error(&["fp32 or bf16"]);
    run_without_gpu(&["bench", "--precision", "fp16"]).assert_usage_error(&["no GPU"]);
}

#[tokio::test]
async fn train_needs_no_server() {
    let _permit = training_permit().await;
    let folder = Folder::new();
    let dataset = pictures::idx_dataset(folder.path(), 320, 40);
    let text = JOB.replace("\"fashion\"", &format!("{:?}", dataset.to_str().expect("UTF-8")));
    let train = |name: &str, steps: u64, more: &[&str]| {
        let file = folder.write(&format!("{name}.toml"), text.replace("1000", &steps.to_string()));
        let out = folder.path().join("out").join(name);
        let mut command = lockstep();
        command.arg("train").arg(file).arg("--out").arg(&out).args(more).current_dir(folder.path());
        (Finished::of(&mut command), out)
    };
    let (finished, out) = train("whole", 12, &[]);
    finished.assert_prints(&["epoch: 1 step: 12, loss is "]);
    // The job's loss is the mean over its ranks.
    let loss = |output: &str| -> f32 {
        let line = output.lines().find_map(|line| line.strip_prefix("epoch: 1 step: 12, loss is "));
        line.and_then(|loss| loss.parse().ok()).unwrap_or_else(|| panic!("{output}"))
    };
    let loss_of_rank = |rank: u32| {
        let log = fs::read_to_string(out.join(format!("attempts/1/rank.{rank}.log"))).expect("a log");
        loss(&log)
    };
    assert!(loss_of_rank(0) != loss_of_rank(1));
    let mean = (loss_of_rank(0) + loss_of_rank(1)) / 2.0;
    assert!((loss(finished.ok()) - mean).abs() < 1e-6, "{mean}: {}", finished.stdout);
    assert!(finished.stdout.contains("; the best is 1-12 with "), "{}", finished.stdout);
    let model = fs::read(out.join("checkpoints/1-12/model.safetensors")).expect("a model");
    // The next command is printed. Like `export`, it uses the best checkpoint of the run's folder.
    assert!(finished.stderr.contains("next: `lockstep predict --model "), "{}", finished.stderr);
    let picture = pictures::boot(&pictures::image_folder(folder.path(), 1));
    let predict =
        |model: &Path| Finished::of(lockstep().arg("predict").arg(&picture).arg("--model").arg(model));
    let of_run = predict(&out);
    assert_eq!(of_run.ok(), predict(&out.join("checkpoints/1-12")).ok());
    assert!(of_run.stderr.contains("checkpoint 1-12, the best: validation accuracy "), "{}", of_run.stderr);
    let export = |format: &[&str], file: &str| {
        let file = folder.path().join(file);
        Finished::of(lockstep().arg("export").args(format).arg(&out).arg("-o").arg(&file)).ok();
        fs::read(file).expect("a file")
    };
    assert!(tensors(&export(&[], "exported.safetensors")) == tensors(&model));
    export(&["onnx"], "exported.onnx");
    // Not every processor has the instructions for bf16.
    let (finished, out) =
        train("bf16", 2, &["--set", "train.precision=bf16", "--set", "parallel.device=cpu"]);
    if fs::read_to_string("/proc/cpuinfo").is_ok_and(|processor| processor.contains("avx512_bf16")) {
        finished.ok();
        let state = fs::read_to_string(out.join("checkpoints/1-2/state.json")).expect("a state");
        assert!(state.contains("\"bf16\""), "{state}");
    } else {
        assert!(finished.status != 0, "{finished:?}");
        assert!(format!("{finished:?}").contains("has no AVX512-BF16 instructions"), "{finished:?}");
    }

    let bad = folder.write("bad.toml", "[train]\nlr = -1\n");
    Finished::of(lockstep().arg("train").arg(bad).current_dir(folder.path()))
        .assert_usage_error(&["train.lr", "data.dataset"]);
}

/// Starts `lockstep demo --exit-when-done` with its data in this folder.
fn start_demo(folder: &Folder) -> Child {
    lockstep()
        .args(["demo", "--exit-when-done", "--data-dir"])
        .arg(folder.path().join("lockstep-demo"))
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(fs::File::create(folder.path().join("demo.log")).expect("a log"))
        .spawn()
        .expect("the demo starts")
}

#[tokio::test]
async fn the_demo_prints_a_link_that_signs_in_once() {
    let _permit = training_permit().await;
    let folder = Folder::new();
    let began = Instant::now();
    let mut child = start_demo(&folder);
    let mut lines = BufReader::new(child.stdout.take().expect("standard output")).lines();
    let first = lines.next().expect("a first line").expect("UTF-8");
    assert!(began.elapsed() < TIMEOUT, "the link is printed in time");
    let address = first.strip_prefix("dashboard: ").unwrap_or_else(|| panic!("{first}")).to_owned();
    // The link signs in once and redirects to a page that needs the cookie.
    let browser = client_without_redirects();
    let signed_in = browser.get(&address).send().await.expect("a response");
    let cookie = signed_in.headers()["set-cookie"].to_str().expect("a cookie");
    let cookie = cookie.split(';').next().expect("name and value");
    let page = signed_in.headers()["location"].to_str().expect("a page");
    assert!(page.starts_with("/jobs/j"), "the link leads to the job: {page}");
    let second = browser.get(&address).send().await.expect("a response");
    assert!(second.headers().get("set-cookie").is_none() && second.status() == 401, "the link works once");
    let server = address.split("/login").next().expect("an address");
    let page = browser.get(format!("{server}/jobs")).header("cookie", cookie);
    let page = page.send().await.expect("the dashboard");
    assert_eq!(page.status(), reqwest::StatusCode::OK);
    assert!(page.text().await.expect("HTML").contains("<html"), "a page");
    // While the demo runs, commands find its URL and token in its data directory.
    let list = |more: &[&str]| {
        let mut command = lockstep();
        command.arg("list").args(more).current_dir(folder.path());
        Finished::of(&mut command)
    };
    assert!(list(&[]).ok().contains("demo"));
    assert!(list(&["--data-dir", "lockstep-demo"]).ok().contains("demo"));
    assert_eq!(list(&["--server", "http://127.0.0.1:9"]).status, 1, "--server takes precedence");
    assert!(folder.path().join("lockstep-demo/address").exists());
    signal(child.id() as i32, Signal::INT);
    exit_status(&mut child).await;
    assert!(!folder.path().join("lockstep-demo/address").exists());
    let left = crate::server::processes_of(folder.path());
    assert!(left.is_empty(), "{left:?}");
}
