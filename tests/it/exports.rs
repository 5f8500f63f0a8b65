//! `lockstep export`: files for other programs.

use crate::{
    pages,
    pictures::{self, Pictures, SIDE},
    server::{Server, turn},
    specs,
};
use image::GrayImage;
use serde_json::{Value, json};
use std::{fs, path::Path, process::Command};

/// Python with the packages that `tests/run` has installed in this folder of `target`.
fn python(packages: &str) -> Command {
    let packages = Path::new(env!("CARGO_MANIFEST_DIR")).join("target").join(packages);
    assert!(packages.exists(), "{} is missing: tests/run makes it", packages.display());
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", packages).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

fn printed(mut command: Command) -> String {
    let output = command.output().expect("Python");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[tokio::test]
async fn onnxruntime_predicts_as_lockstep_does() {
    let _turn = turn().await;
    let server = Server::start().await;
    let folder = server.folder().path();
    server.register("fashion", &pictures::idx_dataset(folder, 320, 40)).await;
    let spec = specs::short("exported", "fashion", 1, 12);
    let id = server.submit(&specs::with(spec, json!({"data": {"image_size": SIDE}}))).await;
    server.succeeded(&id).await;

    // The same from the server, from the checkpoint's folder, and from the file with its weights.
    let written = server.cli(&["export", "onnx", "exported", "-o", "model.onnx", "--json"]).json();
    let network = fs::read(folder.join("model.onnx")).expect("a network");
    assert_eq!(written["size_bytes"], network.len());
    let checkpoint = server.job_dir(&id).join("checkpoints/1-12");
    for source in [checkpoint.clone(), checkpoint.join("model.safetensors")] {
        let source = source.to_str().expect("UTF-8");
        assert!(server.cli(&["export", "onnx", source, "-o", "own.onnx"]).ok().contains("sha256"));
        assert!(fs::read(folder.join("own.onnx")).expect("a network") == network, "{source}");
    }

    let shown = Pictures::bundled("t10k");
    let files: Vec<String> = (0..4).map(|index| format!("{index}.png")).collect();
    let mut pixels = Vec::new();
    for (index, file) in files.iter().enumerate() {
        let of_picture = shown.pixels_of(index).to_vec();
        pixels.extend(&of_picture);
        let picture = GrayImage::from_raw(SIDE as u32, SIDE as u32, of_picture).expect("a picture");
        picture.save(folder.join(file)).expect("a file");
    }
    fs::write(folder.join("pixels"), &pixels).expect("pixels");
    let mut arguments = vec!["predict", "--job", &id, "--json"];
    arguments.extend(files.iter().map(String::as_str));
    let predicted = server.cli(&arguments).json();
    let best =
        predicted.as_array().expect("predictions").iter().map(|one| one["classes"][0]["class"].clone());

    // The example of the page, with pictures that have the network's size.
    let example = pages::blocks("docs/exports.md", "python").remove(0);
    let pixels =
        format!("import numpy; pixels = numpy.fromfile('pixels', 'u1').reshape(-1, 1, {SIDE}, {SIDE})");
    let mut command = python("onnx");
    command.current_dir(folder).args(["-c", &format!("{pixels}\n{example}")]);
    let printed: Value = serde_json::from_str(&printed(command)).expect("JSON");
    assert_eq!(printed, Value::from_iter(best));

    let refused = |arguments: &[&str], words: &str| {
        server.cli(&[&["export", "onnx", "-o", "x"][..], arguments].concat()).wrong(&[words]);
    };
    refused(&[&id, "--weights", "ema"], "averag");
    refused(&[checkpoint.to_str().expect("UTF-8"), "--weights", "ema"], "ema.safetensors");
    refused(&["no/folder"], "no/folder: there is no such file or folder");
    refused(&["nobody"], "no job is called nobody");
    server.cli(&["export", "onnx", &id]).wrong(&["--output"]);
    server.cli(&["export"]).wrong(&["FOLDER"]);
    assert!(!folder.join("x").exists());
    server.stop().await;
}
