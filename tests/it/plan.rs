//! `lockstep plan`: the cost of a job's plans, from measurements of this machine or of another, without training.

use crate::{
    pages, pictures,
    server::{Finished, lockstep, training_permit},
    train::sets,
};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// Measurements of a fast machine with fast links.
fn machine() -> Value {
    let link = json!({"latency_us": 3.0, "bytes_per_second": 2e11});
    json!({
        "device": "CPU, 64 threads",
        "backend": "cpu",
        "ranks": 4,
        "memory_bytes": 100_000_000_000u64,
        "shared_memory": false,
        "rates": {
            "value_bytes": 4,
            "flops_per_second": {"conv1x1": 3e14, "conv3x3": 4e14, "conv7x7": 1e14, "linear": 4e14},
            "memory_bytes_per_second": 3.5e12,
        },
        "within": link,
        "between": link,
    })
}

/// Writes a job file of a ResNet-50 whose dataset does not exist, and the file of [`machine`].
fn write_job(folder: &Path, parallel: &str) {
    let job = format!(
        "[model]\narch = \"resnet50\"\n[data]\ndataset = \"faces\"\nimage_size = 224\n[train]\nbatch_size = 64\n[parallel]\n{parallel}\n"
    );
    fs::write(folder.join("job.toml"), job).expect("a job");
    fs::write(folder.join("machine.json"), machine().to_string()).expect("figures");
}

fn plan(folder: &Path, arguments: &[&str]) -> Finished {
    let job = folder.join("job.toml").display().to_string();
    let mut command = lockstep();
    command
        .current_dir(folder)
        .args(["plan", &job])
        .args(arguments)
        .env("LOCKSTEP_CACHE", folder.join("cache"));
    Finished::of(&mut command)
}

const AUTO: &str = "ranks = 4\ndevice = \"cpu\"\nmode = \"auto\"";

#[test]
fn the_chosen_plan_depends_on_classes_and_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    write_job(folder, AUTO);
    let plan_on_machine =
        |arguments: &[&str]| plan(folder, &[&["--machine", "machine.json", "--json"], arguments].concat());

    // An ordinary ResNet is trained data parallel.
    let report = plan_on_machine(&["--classes", "1000"]).json();
    let first_plan = |report: &Value| report["plans"][0]["plan"].clone();
    let ordinary = first_plan(&report);
    assert_eq!(ordinary["words"], "data parallel on 4 ranks");
    let why = ordinary["predicted"]["why"].as_str().expect("a reason");
    assert!(
        why.starts_with("no other plan is 2 % faster; the next best is ") && why.contains("ms per step"),
        "{why}"
    );
    let layers = report["plans"][0]["layers"].as_array().expect("layers");
    assert_eq!(layers[0]["plan"]["placement"], "own pictures");
    let ms: f64 = layers.iter().map(|layer| layer["plan"]["time_us"].as_f64().expect("a time") / 1e3).sum();
    let step = ordinary["predicted"]["step_ms"].as_f64().expect("a time");
    assert!(ms > 0.0 && ms <= step, "{ms} of {step}");

    // With eight million classes, the last layer has 16 billion weights: with the optimizer's state they need more memory than a rank has.
    let wide = first_plan(&plan_on_machine(&["--classes", "8000000"]).json());
    assert_eq!(
        (&wide["predicted"]["limited_by"], &wide["shard"]),
        (&json!("memory"), &json!([{"match": "fc", "split": "out"}]))
    );
    assert!(
        wide["predicted"]["why"].as_str().is_some_and(|why| why.starts_with("data parallel needs ")),
        "{wide}"
    );

    // --machine also accepts the output of --json.
    fs::write(folder.join("printed.json"), plan_on_machine(&["--classes", "1000"]).ok()).expect("figures");
    let several = plan(folder, &["--machine", "printed.json", "--classes", "8000000", "--ranks", "4,8"]);
    let table = several.ok();
    for words in ["RANKS", "MACHINES", "4      256", "8      512", "fc split by its outputs", "memory"] {
        assert!(table.contains(words), "{words}: {table}");
    }
    for (ranks, words) in [
        (
            "8",
            "8 ranks need 2 machines like the measured machine. The times are for 2 machines. If all ranks share one",
        ),
        ("2", "measured with 4 ranks on one machine. With fewer ranks,"),
    ] {
        plan(folder, &["--machine", "machine.json", "--classes", "1000", "--ranks", ranks])
            .assert_prints(&[words]);
    }
    let hybrid = ["--machine", "machine.json", "--classes", "1000", "--set", "parallel.mode=hybrid"];
    plan(folder, &[&hybrid[..], &["--set", "parallel.height=2"]].concat())
        .assert_prints(&["same pictures, up to 1/2 of the rows"]);
    let unpinned = plan(folder, &["--machine", "machine.json", "--classes", "1000"]);
    let text = unpinned.ok();
    for words in [
        "resnet50 of 25557032 parameters, 1000 classes, 224 x 224 pixels; CPU, 64 threads, 4 ranks a machine",
        "layer1.0.conv2 ",
        "120 others",
        "plan                data parallel on 4 ranks",
        "limited by          computing",
        "OTHER PLAN",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }

    // If the job requests another plan, the reason says so.
    let pinned = [&hybrid[..], &["--set", "parallel.model=2"]].concat();
    let printed = plan(folder, &pinned);
    let text = printed.ok();
    assert!(text.contains("x 2 (model) ranks, the last layer split by its outputs"), "{text}");
    assert!(
        !text.contains("2 (data) x 1 (height) x 2 (model) ranks, fc split by its outputs\n"),
        "the same plan: {text}"
    );
    let report = plan(folder, &[&pinned[..], &["--json"]].concat()).json();
    let why = first_plan(&report)["predicted"]["why"].clone();
    let better = "the job asks for it; parallel.mode = \"auto\" would choose data parallel on 4 ranks";
    assert!(why.as_str().is_some_and(|why| why.starts_with(better)), "{why}");
}

#[test]
fn jobs_that_cannot_be_planned_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let wrong = "[[parallel.shard]]\nmatch = \"layer9.*\"\nsplit = \"out\"";
    write_job(folder, &format!("{AUTO}\n{wrong}"));
    let refusal = |arguments: &[&str]| {
        let ended = plan(folder, arguments);
        assert_eq!(ended.status, 2, "{}", ended.stderr);
        ended.stderr
    };
    let message = refusal(&["--classes", "1000"]);
    assert_eq!(message.matches("layer1.0.conv1").count(), 1, "{message}");
    assert!(message.contains("and 44 more (lockstep plan lists them)"), "{message}");
    write_job(folder, AUTO);
    let message = refusal(&[]);
    assert!(
        message.contains("faces does not exist on this machine: give the dataset's folder")
            && message.contains("or --classes N and data.image_size"),
        "{message}"
    );
    let message = refusal(&["--classes", "9", "--set", "data.image_size="]);
    assert!(message.contains("--set data.image_size=SIDE, such as 32 or 224"), "{message}");
    // A job that needs more memory than this machine has is refused before the measurement, with the error of training.
    let message = refusal(&["--classes", "9", "--ranks", "1024", "--set", "data.image_size=4096"]);
    assert!(
        message.contains("pictures of 4096 x 4096 pixels take at least ")
            && message.contains("lower data.image_size"),
        "{message}"
    );
    // The rows of the dataset's pictures are checked before the measurement, too.
    let dataset = format!("data.dataset={}", pictures::idx_dataset(folder, 64, 16).display());
    let message = refusal(&sets(&[
        &dataset,
        "data.image_size=",
        "parallel.ranks=32",
        "parallel.mode=hybrid",
        "parallel.height=32",
    ]));
    assert!(
        message.contains("32 ranks cannot share the 28 rows") && !message.contains("measuring"),
        "{message}"
    );
    let mut incomplete = machine();
    incomplete.as_object_mut().expect("a table").remove("within");
    fs::write(folder.join("machine.json"), incomplete.to_string()).expect("figures");
    let message = refusal(&["--classes", "9", "--machine", "machine.json"]);
    assert!(message.contains("the links of 4 ranks are not known"), "{message}");
    incomplete["rates"]["memory_bytes_per_second"] = json!(0);
    fs::write(folder.join("machine.json"), incomplete.to_string()).expect("figures");
    let message = refusal(&["--classes", "9", "--machine", "machine.json"]);
    assert!(message.contains("memory_bytes_per_second is 0 and must be a number above 0"), "{message}");
}

/// Only `tests/run full` runs this test, because it measures this machine.
mod full {
    use super::*;

    /// The commands of docs/parallel.md. This machine is measured once, and the file is then used with --machine.
    #[tokio::test]
    async fn the_machine_is_measured_once_and_its_figures_are_reused() {
        let _permit = training_permit().await;
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in pages::files("docs/parallel.md") {
            fs::write(folder.path().join(name), text).expect("a job file");
        }
        let run = |line: &str| {
            let mut command = pages::shell(line);
            Finished::of(
                command.current_dir(folder.path()).env("LOCKSTEP_CACHE", folder.path().join("cache")),
            )
        };
        let command_line = pages::line("docs/parallel.md", "lockstep plan auto.toml --classes 100000 --json");
        let measured = run(&command_line);
        assert!(measured.stderr.contains("measuring this machine with "), "{}", measured.stderr);
        measured.ok();
        let figures = || -> Value {
            let text = fs::read_to_string(folder.path().join("machine.json")).expect("figures");
            serde_json::from_str(&text).expect("JSON")
        };
        let stored = figures();
        assert!(stored["machine"]["device"].as_str().is_some_and(|device| device.starts_with("CPU, ")));
        assert!(stored["machine"]["within"]["bytes_per_second"].as_f64() > Some(0.0), "{stored}");
        // A second run uses the stored measurements.
        let again = run(&command_line);
        assert!(again.stderr.contains(" ago; `--measure` measures it again"), "{}", again.stderr);
        assert_eq!(figures(), stored);
        let others =
            run(&pages::line("docs/parallel.md", "lockstep plan auto.toml --classes 100000 --machine"));
        let others = others.ok();
        assert!(others.contains("RANKS") && others.contains("\n64 "), "{others}");

        // The number of classes and the size of the pictures are read from a dataset.
        let dataset = pictures::idx_dataset(folder.path(), 64, 16);
        let set = format!("data.dataset={}", dataset.display());
        let mut command = lockstep();
        command.current_dir(folder.path()).args(["plan", "auto.toml", "--machine", "machine.json"]);
        Finished::of(command.args(["--set", &set])).assert_prints(&["10 classes, 32 x 32 pixels"]);
    }
}
