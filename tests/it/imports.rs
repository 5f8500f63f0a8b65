//! `lockstep import`: runs of other programs. Every imported value is compared with the logged value.

use crate::{
    exports::{output_of, python},
    server::{Agents, Finished, Server, lockstep},
};
use crc::{CRC_32_ISO_HDLC, Crc};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Metric, step and value (the bits of a float32) of every point of a job.
fn points(server: &Server, id: &str) -> BTreeSet<(String, String, u32)> {
    let csv = server.cli(&["metrics", id, "--csv"]);
    let point = |line: &str| {
        let (rest, value) = line.rsplit_once(',').expect("a value");
        let (rest, step) = rest.rsplit_once(',').expect("a step");
        let name = rest.splitn(3, ',').last().expect("a name");
        (name.to_owned(), step.to_owned(), value.parse::<f32>().expect("a number").to_bits())
    };
    csv.ok().lines().skip(1).map(point).collect()
}

/// Imports twice, asserts that the second import adds nothing, and returns the report of the first.
fn import_twice(server: &Server, arguments: &[&str]) -> Vec<Value> {
    let import = || server.cli(&[&["import"], arguments, &["--json"]].concat()).json();
    let first = import();
    let first = first.as_array().expect("runs").clone();
    let second = import();
    for (first, second) in first.iter().zip(second.as_array().expect("runs")) {
        assert_eq!((&second["job"], &second["new_points"]), (&first["job"], &json!(0)));
    }
    first
}

fn text<'a>(run: &'a Value, key: &str) -> &'a str {
    run[key].as_str().unwrap_or_else(|| panic!("{run} has no {key}"))
}

#[tokio::test]
async fn exported_jobs_are_imported_with_every_value() {
    let server = Server::start_with(Agents::None).await;
    let run =
        json!({"id": "first", "name": "a first run", "config": {"lr": 0.1, "net": "resnet18", "fast": true}});
    let id = server.post("/runs", &run).await.json()["id"].as_str().expect("an id").to_owned();
    let records: Vec<_> = (0..2000)
        .map(|n| json!({"step": 3 * n, "values": {"train/loss": 1.0 / f64::from(n + 1), "a, \"b\"": f64::from(n) * 0.37}}))
        .collect();
    assert!(
        server
            .post("/runs/first/records", &json!({"first": 1, "records": records}))
            .await
            .status
            .is_success()
    );
    let nan = json!({"first": 2001, "records": [{"step": 9000, "values": {"diverged": "NaN"}}]});
    assert!(server.post("/runs/first/records", &nan).await.status.is_success());
    let expected = points(&server, &id);
    assert_eq!(expected.len(), 4001);
    server
        .cli(&["show", &id])
        .assert_prints(&["ranks               1 (run from elsewhere)", "train/loss          5.00e-4"]);
    assert!(server.cli(&["list"]).ok().contains("elsewhere"));
    assert!(server.cli(&["metrics", &id, "train/loss"]).ok().contains("5.00e-4"));
    server.cli(&["metrics", &id, "nope"]).assert_usage_error(&["has no metric \"nope\"", "train/loss"]);

    server.cli(&["export", "tensorboard", &id, "-o", "runs"]).ok();
    server.cli(&["export", "parquet", &id, "-o", "metrics.parquet"]).ok();
    let csv = server.cli(&["metrics", &id, "--csv"]);
    server.folder().write("metrics.csv", csv.ok());
    for arguments in [["tensorboard", "runs"], ["parquet", "metrics.parquet"], ["csv", "metrics.csv"]] {
        let [kind, path] = arguments;
        let runs = import_twice(&server, &[kind, path, "--project", kind]);
        assert_eq!(runs.len(), 1, "{runs:?}");
        let job = text(&runs[0], "job");
        assert_eq!((&runs[0]["points"], &runs[0]["new_points"]), (&json!(4001), &json!(4001)), "{kind}");
        assert!(points(&server, job) == expected, "{kind}: other values");
        let about = server.job(job).await;
        assert_eq!((text(&about, "state"), text(&about, "project")), ("succeeded", kind));
        let config = &about["external"]["config"];
        assert_eq!(*config == run["config"], kind == "tensorboard", "{config}");
    }
    server.cli(&["import", "csv", "metrics.parquet"]).assert_fails(1, &["metrics.parquet: is not CSV"]);
    let moved = server.folder().path().join("elsewhere");
    std::fs::create_dir(&moved).expect("a folder");
    let before = server.get("/jobs?limit=100").await["jobs"].as_array().expect("jobs").len();
    std::fs::rename(server.folder().path().join("runs"), moved.join("runs")).expect("moved");
    server.cli(&["import", "tensorboard", "elsewhere"]).ok();
    let jobs = server.get("/jobs?limit=100").await;
    assert_eq!(jobs["jobs"].as_array().expect("jobs").len(), before, "the same run at another path");

    // A table's run is identified by its path or by --id.
    let import = |arguments: &[&str]| server.cli(&[&["import", "csv", "--json"], arguments].concat());
    let import_one = |arguments: &[&str]| {
        let runs = import(arguments).json();
        (text(&runs[0], "job").to_owned(), runs[0]["new_points"].as_u64())
    };
    let rows = "step,loss,time\n0,1.5,2023-11-14T22:13:20Z\n1,0.5,2023-11-14T22:13:21Z\n";
    server.folder().write("a/metrics.csv", rows);
    server.folder().write("b/metrics.csv", "step,loss\n0,1.5\n1,0.25\n2,0.125\n");
    let (a, new) = import_one(&["a/metrics.csv"]);
    assert_eq!(new, Some(2));
    assert!(text(&server.job(&a).await, "created_at").starts_with("2023-11-14T22:13:20"));
    let (b, new) = import_one(&["b/metrics.csv"]);
    assert!(a != b && new == Some(3), "another file with the same name and first row");
    server.cli(&["download", &a, "-o", "w"]).assert_usage_error(&["from elsewhere and has no checkpoints"]);
    server.folder().write("a/metrics.csv", format!("{rows}2,inf,\n"));
    assert_eq!(import_one(&["a/metrics.csv"]), (a.clone(), Some(1)), "a longer file");
    assert_eq!(import_one(&["a/metrics.csv"]), (a.clone(), Some(0)));
    server.folder().write("a/metrics.csv", "step,loss\n0,3\n1,2\n2,1\n3,0\n");
    import(&["a/metrics.csv"]).assert_fails(1, &["does not begin with the rows", &a, "--id"]);
    assert_eq!(points(&server, &a).len(), 3);
    let (second, new) = import_one(&["a/metrics.csv", "--id", "second"]);
    assert!(second != a && new == Some(4));
    assert_eq!(import_one(&["b/../a/metrics.csv", "--id", "second"]), (second, Some(0)));
    for (content, words) in [
        ("step,loss\n", "no rows below"),
        ("step;loss\n0;1,5\n", "no number was found below the columns [\"step;loss\"] in 1 row"),
        ("step,note\n0,fine\n", "no number was found"),
    ] {
        server.folder().write("nothing.csv", content);
        import(&["nothing.csv"]).assert_fails(1, &[words]);
    }

    server.cli(&["import", "tensorboard", "elsewhere/nothing"]).assert_usage_error(&["no such folder"]);
    server.cli(&["import", "wandb", "elsewhere"]).assert_usage_error(&["no runs of W&B"]);
    server.cli(&["import", "mlflow", "elsewhere"]).assert_usage_error(&["no runs of MLflow"]);
    server
        .cli(&["import", "csv", "metrics.csv", "--project", "a/b"])
        .assert_usage_error(&["--project has '/': use 1 to 100"]);
    server.stop().await;
}

/// MLflow's own client writes the files.
const MLFLOW: &str = r#"
import mlflow
mlflow.set_tracking_uri("file:mlruns")
mlflow.set_experiment("my shoes")
with mlflow.start_run(run_name="sole"):
    mlflow.log_params({"lr": 0.1, "net/depth": 20})
    for step in range(300):
        mlflow.log_metric("train/loss", 1 / (step + 1), step=step)
        mlflow.log_metrics({"acc": step * 0.37, "odd": float("nan")}, step=step)
    mlflow.set_tag("colour", "blue")
    mlflow.log_text("text", "notes/a.txt")
try:
    with mlflow.start_run(run_name="broken"):
        1 / 0
except ZeroDivisionError:
    pass
"#;

#[tokio::test]
async fn mlflow_s_runs_are_imported() {
    let server = Server::start_with(Agents::None).await;
    let mut client = python("mlflow");
    client.current_dir(server.folder().path()).env("MLFLOW_ALLOW_FILE_STORE", "true").args(["-c", MLFLOW]);
    output_of(client);
    let mut runs = import_twice(&server, &["mlflow", "."]);
    runs.sort_by_key(|run| text(run, "name").to_owned());
    let [broken, sole] = &runs[..] else { panic!("{runs:?}") };
    assert_eq!(
        (&sole["points"], &sole["metrics"], &sole["left_out"]),
        (&json!(900), &json!(3), &json!({"artifacts": 1}))
    );
    let mut expected = BTreeSet::new();
    for step in 0..300u32 {
        let at = f64::from(step);
        let all = [("train/loss", 1.0 / (at + 1.0)), ("acc", at * 0.37), ("odd", f64::NAN)];
        expected
            .extend(all.map(|(name, value)| (name.to_owned(), step.to_string(), (value as f32).to_bits())));
    }
    assert!(points(&server, text(sole, "job")) == expected);
    let job = server.job(text(sole, "job")).await;
    assert_eq!(
        (text(&job, "state"), text(&job, "project"), text(&job, "name")),
        ("succeeded", "my-shoes", "sole")
    );
    assert_eq!(job["external"]["config"], json!({"lr": "0.1", "net/depth": "20"}));
    assert_eq!(job["external"]["summary"], json!({"colour": "blue"}));
    assert_eq!(text(&server.job(text(broken, "job")).await, "state"), "failed");

    // The same runs are imported over MLflow's REST interface, which this server has. It lists no metric without a finite value.
    let mut command = lockstep();
    command.args(["import", "mlflow", server.url.as_str(), "--project", "copies", "--json"]);
    command.envs(server.client_variables()).env("MLFLOW_TRACKING_TOKEN", server.token());
    let copies = Finished::of(&mut command).json();
    let copies = copies.as_array().expect("runs");
    assert_eq!(copies.len(), 2, "{copies:?}");
    let copy = copies.iter().find(|copy| copy["name"] == "sole").expect("the run");
    expected.retain(|(name, ..)| name != "odd");
    assert!(points(&server, text(copy, "job")) == expected);
    let copy = server.job(text(copy, "job")).await;
    assert_eq!(
        (text(&copy, "state"), &copy["external"]["config"]),
        ("succeeded", &job["external"]["config"])
    );
    server.stop().await;
}

/// A protobuf message of length-delimited fields: their numbers and contents.
fn message(fields: &[(u32, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (tag, content) in fields {
        prost::encoding::encode_varint(u64::from((tag << 3) | 2), &mut out);
        prost::encoding::encode_varint(content.len() as u64, &mut out);
        out.extend_from_slice(content);
    }
    out
}

/// An item of W&B's settings, results or history: its key and its value as JSON.
fn item(name: &str, value: &str) -> Vec<u8> {
    message(&[(2, name.as_bytes()), (16, value.as_bytes())])
}

/// A W&B log (LevelDB's log format) with these records, each shorter than a block. A part of a record has a header of 7 bytes with
/// its kind: 1 (whole record), 2 (first part) or 4 (last part). Zeros fill a block that has no space for a header.
fn wandb_log(records: &[Vec<u8>]) -> Vec<u8> {
    const BLOCK: usize = 32 << 10;
    let crc = Crc::<u32>::new(&CRC_32_ISO_HDLC);
    let mut log = b":W&B\xe1\xbe\0".to_vec();
    for record in records {
        let left = BLOCK - log.len() % BLOCK;
        let (first, rest) = record.split_at(record.len().min(left.saturating_sub(7)));
        let parts = if left < 7 {
            log.extend(vec![0; left]);
            vec![(1, &record[..])]
        } else if rest.is_empty() {
            vec![(1, first)]
        } else {
            vec![(2, first), (4, rest)]
        };
        for (kind, part) in parts {
            let checksum = crc.checksum(&[&[kind], part].concat());
            log.extend(checksum.to_le_bytes());
            log.extend((part.len() as u16).to_le_bytes());
            log.push(kind);
            log.extend(part);
        }
    }
    log
}

#[tokio::test]
async fn w_and_b_s_runs_are_imported_up_to_the_last_complete_record() {
    let server = Server::start_with(Agents::None).await;
    // A protobuf `Timestamp` of 1,700,000,000 s.
    let start = [8_u8, 0x80, 0xe2, 0xcf, 0xaa, 6];
    let config = message(&[
        (1, &item("lr", "0.1")),
        (1, &item("_wandb", "{}")),
        (1, &item("net", r#"{"depth": 20}"#)),
    ]);
    let run = message(&[
        (1, b"abc123"),
        (3, b"my shoes"),
        (4, &config),
        (6, b"a group"),
        (8, b"sole-1"),
        (9, b"why"),
        (10, b"tag"),
        (17, &start),
    ]);
    let mut records = vec![message(&[(17, &run)]), message(&[(13, &message(&[(3, b"a line")]))])];
    for step in 0..2000u32 {
        let loss = (1.0 / f64::from(step + 1)).to_string();
        let (number, at) = (step.to_string(), (1_700_000_000.5 + f64::from(step)).to_string());
        let mut items = vec![item("_step", &number), item("_timestamp", &at), item("train/loss", &loss)];
        match step {
            7 => items.extend([item("odd", "NaN"), item("picture", r#"{"_type": "image-file"}"#)]),
            8 => items.push(item("val", r#"{"acc": 0.5, "deep": {"x": 2}}"#)),
            _ => {}
        }
        let items: Vec<(u32, &[u8])> = items.iter().map(|item| (1, &item[..])).collect();
        records.push(message(&[(2, &message(&items))]));
    }
    let summary = message(&[(1, &item("best", "0.25")), (1, &item("_runtime", "3"))]);
    records.push(message(&[(3, &summary)]));
    let unfinished = wandb_log(&records);
    let exit = message(&[(18, &[][..])]);
    records.push(exit);
    let whole = wandb_log(&records);
    let path = "wandb/offline-run-20231114_221320-abc123/run-abc123.wandb";

    // While the program runs, the last record may be incomplete.
    server.folder().write(path, &unfinished[..unfinished.len() - 3]);
    let runs = server.cli(&["import", "wandb", "wandb", "--json"]).json();
    let [part] = runs.as_array().expect("runs").as_slice() else { panic!("{runs}") };
    let job = server.job(text(part, "job")).await;
    assert_eq!((text(&job, "state"), &part["points"]), ("failed", &json!(2002)), "all complete records");
    assert!(text(&job, "reason").contains("no recorded end"), "{job}");

    server.folder().write(path, &whole);
    let runs = import_twice(&server, &["wandb", "."]);
    let [run] = &runs[..] else { panic!("{runs:?}") };
    assert_eq!((&run["job"], &run["new_points"]), (&part["job"], &json!(1)), "the same run");
    assert_eq!(run["left_out"], json!({"lines of output": 1, "logged values that are not numbers": 1}));
    let mut expected: BTreeSet<_> = (0..2000u32)
        .map(|step| {
            ("train/loss".to_owned(), step.to_string(), ((1.0 / f64::from(step + 1)) as f32).to_bits())
        })
        .collect();
    for (name, step, value) in [("odd", "7", f32::NAN), ("val.acc", "8", 0.5), ("val.deep.x", "8", 2.0)] {
        expected.insert((name.into(), step.into(), value.to_bits()));
    }
    assert!(points(&server, text(run, "job")) == expected);
    let job = server.job(text(run, "job")).await;
    assert_eq!(
        (text(&job, "state"), text(&job, "name"), text(&job, "project")),
        ("succeeded", "sole-1", "my-shoes")
    );
    assert_eq!((text(&job, "notes"), &job["tags"]), ("why", &json!(["a group", "tag"])));
    assert_eq!(job["external"]["config"], json!({"lr": 0.1, "net": {"depth": 20}}));
    assert_eq!(job["external"]["summary"], json!({"best": 0.25}));
    assert!(text(&job, "created_at").starts_with("2023-11-14T22:13:20"), "{job}");
    server.stop().await;
}

/// Only `tests/run full` runs this test, because it needs TensorBoard and W&B, which `tests/run full` installs in `target/`.
mod full {
    use super::*;

    const TENSORBOARD: &str = r#"
from tensorboard.summary import Writer
writer = Writer("logs/first")
for step in range(200):
    writer.add_scalar("train/loss", 1 / (step + 1), step)
    writer.add_scalar("acc", step * 0.37, step)
writer.close()
"#;
    const WANDB: &str = r#"
import wandb
run = wandb.init(project="shoes", name="first", config={"lr": 0.1, "net": {"depth": 20}}, tags=["a"], mode="offline")
for step in range(200):
    run.log({"train/loss": 1 / (step + 1), "acc": step * 0.37})
run.summary["best"] = 0.25
run.finish()
"#;

    fn run_script(server: &Server, package: &str, script: &str) {
        let mut client = python(package);
        client.current_dir(server.folder().path()).args(["-c", script]);
        output_of(client);
    }

    fn assert_values(server: &Server, job: &str) {
        let point =
            |name: &str, step: u32, value: f64| (name.to_owned(), step.to_string(), (value as f32).to_bits());
        let expected: BTreeSet<_> = (0..200u32)
            .flat_map(|step| {
                let at = f64::from(step);
                [point("train/loss", step, 1.0 / (at + 1.0)), point("acc", step, at * 0.37)]
            })
            .collect();
        assert!(points(server, job) == expected, "{job}");
    }

    #[tokio::test]
    async fn files_written_by_tensorboard_and_w_and_b_are_imported() {
        let server = Server::start_with(Agents::None).await;
        run_script(&server, "tensorboard", TENSORBOARD);
        let runs = import_twice(&server, &["tensorboard", "logs"]);
        assert_eq!((runs.len(), text(&runs[0], "name")), (1, "first"));
        assert_values(&server, text(&runs[0], "job"));
        run_script(&server, "wandb", WANDB);
        assert!(server.folder().path().join("wandb").is_dir());
        let runs = import_twice(&server, &["wandb", "wandb"]);
        assert_eq!(runs.len(), 1, "{runs:?}");
        assert_values(&server, text(&runs[0], "job"));
        let job = server.job(text(&runs[0], "job")).await;
        assert_eq!(
            (text(&job, "state"), text(&job, "name"), text(&job, "project")),
            ("succeeded", "first", "shoes")
        );
        assert_eq!(job["external"]["config"], json!({"lr": 0.1, "net": {"depth": 20}}));
        assert_eq!(job["external"]["summary"]["best"], 0.25);
        server.stop().await;
    }
}
