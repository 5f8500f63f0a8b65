//! `lockstep export`: files for other programs.

use crate::{
    pages,
    pictures::{self, Pictures, SIDE},
    server::{Server, training_permit},
    specs,
};
use crc::{CRC_32_ISCSI, Crc};
use image::GrayImage;
use parquet::{
    file::reader::{FileReader, SerializedFileReader},
    record::RowAccessor,
};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

/// Python with the packages that `tests/run` has installed in this folder of `target`.
pub(crate) fn python(packages: &str) -> Command {
    let packages = Path::new(env!("CARGO_MANIFEST_DIR")).join("target").join(packages);
    assert!(packages.exists(), "{} is missing: tests/run installs it", packages.display());
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", packages).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Runs a command, which must succeed, and returns its output.
pub(crate) fn output_of(mut command: Command) -> String {
    let output = command.output().expect("Python");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[tokio::test]
async fn onnxruntime_s_predictions_match_lockstep_s() {
    let server = Server::start_training(320, 40).await;
    let folder = server.folder().path();
    let spec = specs::short("exported", "fashion", 1, 12);
    let id = server.train(&specs::with(spec, json!({"data": {"image_size": SIDE}}))).await;

    // The network is the same from the server, its download, the checkpoint's folder and the file of weights. A folder with the job's name does
    // not hide the job.
    fs::create_dir(folder.join("exported")).expect("a folder");
    let written = server.cli(&["export", "onnx", "exported", "-o", "model.onnx", "--json"]).json();
    let network = fs::read(folder.join("model.onnx")).expect("a network");
    assert_eq!(written["size_bytes"], network.len());
    let download = format!("/checkpoints/{id}-1-12/model.onnx");
    assert!(server.bytes(&download).await == network, "{download}");
    let checkpoint = server.job_dir(&id).join("checkpoints/1-12");
    for source in [checkpoint.clone(), checkpoint.join("model.safetensors")] {
        let source = source.to_str().expect("UTF-8");
        assert!(server.cli(&["export", "onnx", source, "-o", "own.onnx"]).ok().contains("sha256"));
        assert!(fs::read(folder.join("own.onnx")).expect("a network") == network, "{source}");
    }

    let test_pictures = Pictures::bundled("t10k");
    let files: Vec<String> = (0..4).map(|index| format!("{index}.png")).collect();
    let mut pixels = Vec::new();
    for (index, file) in files.iter().enumerate() {
        let picture_pixels = test_pictures.pixels_of(index).to_vec();
        pixels.extend(&picture_pixels);
        let picture = GrayImage::from_raw(SIDE as u32, SIDE as u32, picture_pixels).expect("a picture");
        picture.save(folder.join(file)).expect("a file");
    }
    fs::write(folder.join("pixels"), &pixels).expect("pixels");
    let mut arguments = vec!["predict", &id, "--json"];
    arguments.extend(files.iter().map(String::as_str));
    let predicted = server.cli(&arguments).json();
    let best_classes =
        predicted.as_array().expect("predictions").iter().map(|one| one["classes"][0]["class"].clone());

    // The page's example, with pictures of the network's size.
    let examples = pages::blocks("docs/exports.md", "python");
    let [example] = &examples[..] else { panic!("one example: {examples:?}") };
    let pixels =
        format!("import numpy; pixels = numpy.fromfile('pixels', 'u1').reshape(-1, 1, {SIDE}, {SIDE})");
    let mut command = python("onnx");
    command.current_dir(folder).args(["-c", &format!("{pixels}\n{example}")]);
    let printed: Value = serde_json::from_str(&output_of(command)).expect("JSON");
    assert_eq!(printed, Value::from_iter(best_classes));

    let assert_refused = |arguments: &[&str], words: &str| {
        server.cli(&[&["export", "onnx", "-o", "x"][..], arguments].concat()).assert_usage_error(&[words]);
    };
    assert_refused(&[&id, "--weights", "ema"], "averag");
    assert_refused(&[checkpoint.to_str().expect("UTF-8"), "--weights", "ema"], "ema.safetensors");
    assert_refused(&["no/folder"], "no/folder: there is no such file or folder");
    assert_refused(&["nobody"], "no job is called nobody");
    server.cli(&["export", "onnx", &id]).assert_usage_error(&["--output"]);
    for (arguments, words) in [
        (&["export"][..], "FORMAT JOB -o FILE"),
        (&["export", &id], "is neither a format nor a folder"),
        (&["export", "safetensors", &id, "-o", "x"], "safetensors is neither a format nor a folder"),
        (&["export", "exported"], "in the FOLDER of a checkpoint"),
    ] {
        let export = server.cli(arguments);
        export.assert_usage_error(&[
            words,
            "onnx, tensorboard or parquet",
            "`lockstep download JOB -o FILE`",
        ]);
    }
    server.cli(&["export", "data", "-o", "x"]).assert_usage_error(&["`lockstep download data -o x`"]);
    assert!(!folder.join("x").exists());
    server.stop().await;
}

/// Trains a job of two ranks and runs `export tensorboard` during and after training, to `live` and `runs`. Returns the job's id and the
/// folder of rank 0 in `runs`, which contains `rank-1`.
async fn export_to_tensorboard(server: &Server) -> (String, PathBuf) {
    let folder = server.folder().path();
    server.register("fashion", &pictures::idx_dataset(folder, 320, 40)).await;
    let id = server.submit(&specs::short("a/name of two ranks", "fashion", 2, 12)).await;
    let live = server.cli(&["export", "tensorboard", &id, "--follow", "-o", "live", "--json"]).json();
    server.wait_for_success(&id).await;
    let written = server.cli(&["export", "tensorboard", &id, "-o", "runs", "--json"]).json();
    let run = folder.join(written[0]["folder"].as_str().expect("a folder"));
    let name = run.strip_prefix(folder.join("runs")).expect("it is in the folder").to_str().expect("UTF-8");
    assert_eq!(name, format!("a-name-of-two-ranks-{}", &id[id.len() - 8..]));
    assert_eq!(written[0]["points"], points(server, &id).len());
    assert_eq!(written[0]["points"], live[0]["points"]);
    (id, run)
}

/// The lines of `lockstep metrics --csv`: rank, name, step and value.
fn points(server: &Server, id: &str) -> BTreeSet<String> {
    let csv = server.cli(&["metrics", id, "--csv"]);
    csv.ok().lines().skip(1).map(|line| line.strip_prefix("1,").expect("attempt 1").to_owned()).collect()
}

/// Checks the masked CRC-32C checksums of an event file (format TFRecord) and returns its messages.
fn records(file: &Path) -> Vec<Vec<u8>> {
    let crc = Crc::<u32>::new(&CRC_32_ISCSI);
    let masked = |bytes: &[u8]| {
        let checksum = crc.checksum(bytes);
        checksum.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
    };
    let bytes = fs::read(file).expect("an event file");
    let (mut rest, mut records) = (&bytes[..], Vec::new());
    while !rest.is_empty() {
        let (length, after) = rest.split_at(8);
        let (checksum, after) = after.split_at(4);
        assert_eq!(checksum, masked(length));
        let length = u64::from_le_bytes(length.try_into().expect("8 bytes")) as usize;
        let (data, after) = after.split_at(length);
        let (checksum, after) = after.split_at(4);
        assert_eq!(checksum, masked(data));
        records.push(data.to_vec());
        rest = after;
    }
    records
}

fn event_file(run: &Path) -> PathBuf {
    let entries = fs::read_dir(run).expect("a run").map(|entry| entry.expect("an entry").path());
    let files: Vec<_> = entries.filter(|path| path.is_file()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    assert!(files[0].to_string_lossy().contains("events.out.tfevents."), "{files:?}");
    files[0].clone()
}

#[tokio::test]
async fn event_files_and_parquet_contain_every_point_of_every_rank() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let (id, run) = export_to_tensorboard(&server).await;
    let points = points(&server, &id);
    for (rank, run) in [("0", run.clone()), ("1", run.join("rank-1"))] {
        let of_rank = points.iter().filter_map(|point| point.split_once(',').filter(|(of, _)| *of == rank));
        let steps: BTreeSet<_> = of_rank.filter_map(|(_, point)| point.split(',').nth(1)).collect();
        let records = records(&event_file(&run));
        // Further records are the file's version and, for rank 0, the settings and the end.
        assert_eq!(records.len(), steps.len() + if rank == "0" { 3 } else { 1 });
        assert!(records[0].windows(13).any(|part| part == b"brain.Event:2"));
        assert_eq!(records[1].windows(8).any(|part| part == b"train.lr"), rank == "0");
    }
    server.cli(&["export", "parquet", &id, "-o", "metrics.parquet"]).ok();
    let file = File::open(server.folder().path().join("metrics.parquet")).expect("a file");
    let reader = SerializedFileReader::new(file).expect("Parquet");
    let rows = reader.get_row_iter(None).expect("rows").map(|row| row.expect("a row")).map(|row| {
        let text = |column| row.get_string(column).expect("text").as_str();
        assert_eq!((text(0), text(1), row.get_int(2).ok()), (&id[..], "a/name of two ranks", Some(1)));
        let (rank, step) = (row.get_int(3).expect("a rank"), row.get_long(5).expect("a step"));
        format!("{rank},{},{step},{}", text(4), row.get_float(6).expect("a value"))
    });
    assert_eq!(rows.collect::<BTreeSet<_>>(), points);

    // A second export replaces the first.
    server.cli(&["export", "tensorboard", "a/name of two ranks", "-o", "runs"]).ok();
    event_file(&run);
    server.cli(&["export", "tensorboard", "-o", "runs"]).assert_usage_error(&["JOB"]);
    server.stop().await;
}

/// Only `tests/run full` runs this test, because it needs TensorBoard, which `tests/run full` installs in `target/tensorboard`.
mod full {
    use super::*;

    /// Prints each point as rank, name, step and value, and then two settings and the status.
    const SCRIPT: &str = r#"
import glob, sys
from tensorboard.backend.event_processing import event_accumulator, event_file_loader
from tensorboard.plugins.hparams import metadata
for rank, path in enumerate([sys.argv[1], sys.argv[1] + "/rank-1"]):
    run = event_accumulator.EventAccumulator(path, size_guidance={event_accumulator.SCALARS: 0})
    run.Reload()
    for tag in run.Tags()["scalars"]:
        for point in run.Scalars(tag):
            print(rank, tag, point.step, f"{point.value:.9g}", sep=",")
    [file] = glob.glob(path + "/events*")
    migrated = [value.tag for event in event_file_loader.EventFileLoader(file).Load() for value in event.summary.value]
    assert len(migrated) >= sum(len(run.Scalars(tag)) for tag in run.Tags()["scalars"])
    if rank == 0:
        about = run.PluginTagToContent("hparams")
start = metadata.parse_session_start_info_plugin_data(about["_hparams_/session_start_info"])
end = metadata.parse_session_end_info_plugin_data(about["_hparams_/session_end_info"])
print(start.hparams["train.steps"].number_value, start.hparams["model.arch"].string_value, end.status)
"#;

    #[tokio::test]
    async fn tensorboard_reads_every_point_and_the_settings() {
        let _permit = training_permit().await;
        let server = Server::start().await;
        let (id, run) = export_to_tensorboard(&server).await;
        let live = server.folder().path().join("live").join(run.file_name().expect("a name"));
        for folder in [run, live] {
            let mut command = python("tensorboard");
            command.args(["-c", SCRIPT]).arg(&folder);
            let printed = output_of(command);
            let mut lines: Vec<&str> = printed.lines().collect();
            assert_eq!(lines.pop(), Some("12.0 resnet20 1"));
            // Values are compared as numbers, as languages print them differently.
            let parse = |line: &str| {
                let (name, value) = line.rsplit_once(',').expect("a value");
                (name.to_owned(), value.parse::<f32>().expect("a number").to_bits())
            };
            let expected: BTreeSet<_> = points(&server, &id).iter().map(|line| parse(line)).collect();
            assert_eq!(lines.into_iter().map(parse).collect::<BTreeSet<_>>(), expected);
        }
        server.stop().await;
    }
}
