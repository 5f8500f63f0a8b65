//! Embeddings of pictures, and evaluation by their nearest neighbours.

use crate::{pictures, server::Server, specs, tensors::floats};
use reqwest::Method;
use serde_json::{Value, json};
use std::fs;

#[tokio::test]
async fn embeddings_and_nearest_neighbours_are_computed_from_a_checkpoint() {
    let server = Server::start_training(64, 16).await;
    let folder = server.folder().path();
    let id = server.train(&specs::short("embedding", "fashion", 1, 4)).await;
    let files: Vec<_> = fs::read_dir(pictures::image_folder(folder, 2).join("train/boot"))
        .expect("a folder")
        .map(|entry| entry.expect("a picture").path())
        .collect();
    let [first, second] = [0, 1].map(|number: usize| files[number].to_str().expect("UTF-8"));

    let printed = server.cli(&["predict", &id, first, second, "--embed"]);
    let lines: Vec<Value> =
        printed.ok().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let embedding = |line: &Value| -> Vec<f32> {
        let values = line["embedding"].as_array().expect("an embedding").iter();
        values.map(|value| value.as_f64().expect("a number") as f32).collect()
    };
    assert_eq!((lines.len(), embedding(&lines[0]).len(), &lines[0]["classes"]), (2, 64, &json!([])));
    assert_eq!((lines[0]["name"].as_str(), lines[1]["name"].as_str()), (Some(first), Some(second)));

    // The checkpoint's folder gives the same embeddings, written to a file.
    let list = server.get(&format!("/jobs/{id}/checkpoints")).await;
    let checkpoint = &list["checkpoints"][0];
    let model = format!("{}-{}", checkpoint["epoch"], checkpoint["step"]);
    let model = server.job_dir(&id).join("checkpoints").join(model);
    let model = model.to_str().expect("UTF-8");
    let written =
        server.cli(&["predict", first, second, "--model", model, "--embed", "-o", "embeddings.safetensors"]);
    assert_eq!(written.ok(), "embeddings.safetensors: 2 embeddings of 64 values\n");
    let bytes = fs::read(folder.join("embeddings.safetensors")).expect("a file");
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).expect("a header");
    let names = header.metadata().as_ref().expect("metadata")["names"].clone();
    assert_eq!(serde_json::from_str::<Value>(&names).expect("JSON"), json!([first, second]));
    assert_eq!(header.info("embeddings").expect("embeddings").shape, [2, 64]);
    assert_eq!(floats(&bytes)["embeddings"], [embedding(&lines[0]), embedding(&lines[1])].concat());
    server.cli(&["predict", first, "-o", "classes"]).assert_usage_error(&["--embed"]);

    let found = server.cli(&["evaluate", &id, "--knn", "5", "--json"]).json();
    assert_eq!([&found["k"], &found["gallery"], &found["samples"]], [&json!(5), &json!(64), &json!(16)]);
    let shown = server.cli(&["evaluate", &id, "--knn", "5"]);
    let shown = shown.ok();
    let accuracy = found["weighted"].as_f64().expect("an accuracy");
    assert!(shown.contains(&format!("accuracy {:.2} %", accuracy * 100.0)), "{shown}");
    assert!(shown.contains("of 16 pictures by 5 nearest neighbours among 64 training pictures"), "{shown}");
    let path = format!("/jobs/{id}/evaluation/neighbours");
    server.request(Method::GET, &format!("{path}?k=0"), None).await.problem(400);
    server.request(Method::GET, &format!("{path}?knn=5"), None).await.problem(400);
    server.stop().await;
}
