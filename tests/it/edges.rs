//! Extreme input and environments: long and deeply nested values, empty files, control characters, permissions of files, and few
//! file descriptors.

use crate::{
    commands::run_on_terminal,
    pictures,
    server::{Agents, Finished, Folder, Response, Server, client, lockstep},
    specs,
};
use reqwest::Method;
use serde_json::{Value, json};
use std::{fs, net::TcpStream, os::unix::fs::PermissionsExt};

#[test]
fn keys_on_the_command_line_have_a_maximum_depth() {
    let folder = Folder::new();
    let job = folder.write("job.toml", "[data]\ndataset = \"d\"\n");
    let job = job.to_str().expect("UTF-8");
    let set = |parts: usize| format!("{}=1", vec!["a"; parts].join("."));
    for command in [&["submit", job][..], &["train", job, "--out", "nowhere"], &["fork", "somebody"]] {
        for parts in [9, 20_000] {
            let mut lockstep = lockstep();
            lockstep.args(command).args(["--set", &set(parts)]).current_dir(folder.path());
            Finished::of(&mut lockstep).assert_usage_error(&["--set", "at most 8 parts"]);
        }
    }
    let mut lockstep = lockstep();
    Finished::of(lockstep.args(["submit", job, "--set", &set(8)])).assert_usage_error(&["no key is called"]);
}

/// Pads a PNG file to this size with a chunk that decoders ignore.
fn pad_png(picture: &[u8], bytes: usize) -> Vec<u8> {
    // Before the last chunk, IEND, of 12 bytes.
    let (head, end) = picture.split_at(picture.len() - 12);
    let length = bytes - picture.len() - 12;
    let mut chunk = b"paDd".to_vec();
    chunk.extend(std::iter::repeat_n(7, length));
    let mut crc = flate2::Crc::new();
    crc.update(&chunk);
    [head, &(length as u32).to_be_bytes(), &chunk, &crc.sum().to_be_bytes(), end].concat()
}

#[tokio::test]
async fn averaged_weights_are_evaluated_used_and_downloaded_by_name() {
    let server = Server::start_training(64, 16).await;
    let folder = server.folder().path();
    let averaged = json!({"train": {"lr": 0.02, "ema_decay": 0.5, "ema_steps": 1, "mixup": 0.2}});
    let id = server.train(&specs::with(specs::short("averaged", "fashion", 1, 4), averaged)).await;
    assert_eq!(server.points(&id, "val_ema_loss").await.len(), 1);
    let checkpoint = server.checkpoints(&id).await[0]["id"].as_str().expect("an id").to_owned();
    let file = async |name: &str| server.bytes(&format!("/checkpoints/{checkpoint}/{name}")).await;
    let (model, average) = (file("model.safetensors").await, file("ema.safetensors").await);
    assert!(model.len() == average.len() && model != average);
    let path = folder.join("average");
    let path = path.to_str().expect("UTF-8");
    server.cli(&["download", &id, "--weights", "ema", "-o", path]).ok();
    assert!(fs::read(path).expect("the average") == average);
    let only_average = folder.join("only");
    fs::create_dir(&only_average).expect("a folder");
    fs::write(only_average.join("ema.safetensors"), &average).expect("weights");
    server.cli(&["export", only_average.to_str().expect("UTF-8"), "-o", path]).ok();
    assert!(fs::read(path).expect("the average") == average, "exported from a folder without other weights");

    let loss = async |weights: &str| server.evaluation(&id, weights).await["loss"].as_f64().expect("a loss");
    let losses = [loss("").await, loss("?weights=model").await, loss("?weights=ema").await];
    assert!(losses[0] == losses[1] && losses[0] != losses[2], "{losses:?}");
    server.request(Method::GET, &format!("/jobs/{id}/evaluation?weights=both"), None).await.problem(400);
    let picture = pictures::boot(&pictures::image_folder(folder, 1));
    let predict = |weights: &str| {
        let picture = picture.to_str().expect("UTF-8");
        server.cli(&["predict", &id, picture, "--weights", weights, "--json"]).json()
    };
    assert!(predict("model")[0]["classes"] != predict("ema")[0]["classes"]);
}

#[tokio::test]
async fn pictures_up_to_24_mib_are_classified_and_files_are_private() {
    const LIMIT: usize = 24 << 20;
    let server = Server::start_training(64, 16).await;
    let id = server.train(&specs::short("classifier", "fashion", 1, 4)).await;
    let list = server.get(&format!("/jobs/{id}/checkpoints")).await;
    let checkpoint = list["checkpoints"][0]["id"].as_str().expect("an id").to_owned();
    let images = pictures::image_folder(server.folder().path(), 1);
    let png = fs::read(pictures::boot(&images)).expect("a picture");
    let url = server.api(&format!("/checkpoints/{checkpoint}/predict"));
    let send = async |request: reqwest::RequestBuilder| {
        Response::read(request.send().await.expect("a response")).await
    };
    let send_png = async |bytes: usize| {
        send(server.http.post(&url).header("content-type", "image/png").body(pad_png(&png, bytes))).await
    };
    let count_valid = |response: &Value| {
        let predictions = response["predictions"].as_array().expect("predictions");
        let has_ten_classes = |p: &Value| p["classes"].as_array().is_some_and(|classes| classes.len() == 10);
        assert!(predictions.iter().all(has_ten_classes), "{response}");
        predictions.len()
    };
    // A picture passes from the client through server and agent to a process, and the result returns.
    let response = send_png(LIMIT).await;
    assert_eq!((response.status.as_u16(), count_valid(&response.json())), (200, 1), "{}", response.text);
    send_png(LIMIT + 1).await.problem(413);
    let form = |sizes: &[usize]| {
        let mut body = Vec::new();
        for size in sizes {
            body.extend(b"--B\r\ncontent-disposition: form-data; name=\"p\"; filename=\"x.png\"\r\n\r\n");
            body.extend(pad_png(&png, *size));
            body.extend(b"\r\n");
        }
        body.extend(b"--B--\r\n");
        server.http.post(&url).header("content-type", "multipart/form-data; boundary=B").body(body)
    };
    let response = send(form(&[LIMIT / 4; 4])).await;
    assert_eq!((response.status.as_u16(), count_valid(&response.json())), (200, 4), "{}", response.text);
    send(form(&[LIMIT / 4, LIMIT / 4, LIMIT / 4, LIMIT / 4 + 1])).await.problem(413);
    send(form(&[png.len() + 12; 101])).await.problem(400);
    // The agent stayed connected.
    let log = fs::read_to_string(server.folder().path().join("serve.1.log")).expect("a log");
    assert!(!log.contains("connection ends"), "{log}");

    // The result names the job and the checkpoint.
    let picture = server.folder().path().join("boot.png");
    fs::write(&picture, &png).expect("a picture");
    let output = server.cli(&["predict", &id, picture.to_str().expect("UTF-8"), "--json"]).json();
    let listed = &list["checkpoints"][0];
    let newest = format!("{}-{}", listed["epoch"], listed["step"]);
    assert_eq!(
        (output[0]["job"].as_str(), output[0]["checkpoint"].as_str()),
        (Some("classifier"), Some(&newest[..]))
    );
    // Pictures that cannot be read are reported, and the others are classified, also those in a folder.
    for (name, content) in
        [("shoes/a.png", &b""[..]), ("shoes/b.png", &png[..]), ("shoes/notes.txt", &b""[..])]
    {
        server.folder().write(name, content);
    }
    let model = server.job_dir(&id).join("checkpoints").join(&newest).display().to_string();
    for weights in [&[&id[..]][..], &["--model", &model]] {
        let output = server.cli(&[&["predict"][..], weights, &["none.png", "shoes", "boot.png"]].concat());
        output.assert_fails(1, &["none.png: cannot be read: No such file", "shoes/a.png: is empty"]);
        let names: Vec<_> = output.stdout.lines().filter_map(|line| line.split(':').next()).collect();
        assert_eq!(names, ["shoes/b.png", "boot.png"], "{}", output.stdout);
    }
    let problem = send(server.http.post(&url).header("content-type", "image/png")).await.problem(400);
    assert!(problem["detail"].as_str().is_some_and(|d| d.contains("empty")), "{problem}");
    let empty_file =
        "--B\r\ncontent-disposition: form-data; name=\"p\"; filename=\"x.png\"\r\n\r\n\r\n--B--\r\n";
    let request =
        server.http.post(&url).header("content-type", "multipart/form-data; boundary=B").body(empty_file);
    assert_eq!(send(request).await.json()["predictions"][0]["error"], "is empty");

    // The job has no averaged weights.
    for path in
        [format!("/checkpoints/{checkpoint}/ema.safetensors"), format!("/jobs/{id}/evaluation?weights=ema")]
    {
        let problem = server.request(Method::GET, &path, None).await.problem(404);
        assert!(problem["detail"].as_str().is_some_and(|d| d.contains("no averaged weights")), "{problem}");
    }
    server
        .cli(&["download", &id, "--weights", "ema", "-o", "nowhere"])
        .assert_usage_error(&["no averaged weights"]);

    // Database, logs, weights and the agent's files are private.
    let mut count = 0;
    let mut unvisited = vec![server.data_dir()];
    while let Some(path) = unvisited.pop() {
        let metadata = fs::symlink_metadata(&path).expect("metadata");
        let max_mode = if metadata.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(metadata.permissions().mode() & 0o777 & !max_mode, 0, "{}", path.display());
        if metadata.is_dir() {
            unvisited.extend(fs::read_dir(&path).expect("a folder").map(|e| e.expect("an entry").path()));
        }
        count += 1;
    }
    assert!(count > 15, "{count} files and folders");
    let weights = server.job_dir(&id).join("checkpoints");
    assert!(fs::read_dir(weights).expect("checkpoints").next().is_some());
    server.stop().await;
}

#[test]
fn names_of_files_cannot_control_a_terminal() {
    let folder = Folder::new();
    let data = pictures::image_folder(folder.path(), 2);
    let evil = "boot\u{1b}]0;owned\u{7}\u{9b}31m\n   9  cat";
    for split in ["train", "val"] {
        fs::rename(data.join(split).join("boot"), data.join(split).join(evil)).expect("a name");
    }
    let data = data.to_str().expect("UTF-8");
    let inspect = ["dataset", "inspect", data];
    let (_, shown) = run_on_terminal(&[], &inspect, "");
    let escaped = "boot\\u001b]0;owned\\u0007\\u009b31m    9  cat";
    assert!(shown.contains(escaped), "{shown:?}");
    assert!(!shown.contains(|c: char| c.is_control() && c != '\n' && c != '\r'), "{shown:?}");
    // JSON output is unchanged.
    let (_, json) = run_on_terminal(&[], &[&inspect[..], &["--json"]].concat(), "");
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert!(json["classes"].as_array().expect("classes").iter().any(|class| class == evil), "{json}");
    // Output into a pipe is escaped, too, as it may end on a terminal.
    let piped = Finished::of(lockstep().args(inspect));
    assert!(piped.ok().contains(escaped));
}

#[tokio::test]
async fn the_server_responds_when_few_file_descriptors_are_left() {
    let wrapper = ["prlimit", "--nofile=64:64"];
    let server = Server::start_wrapped(Agents::None, None, Vec::new(), &wrapper, |_| {}).await;
    let address = server.url.trim_start_matches("http://").to_owned();
    let idle: Vec<TcpStream> = (0..80).map(|_| TcpStream::connect(&address).expect("a connection")).collect();
    // The server keeps enough of its 64 descriptors free, even for requests that open files.
    for path in ["/healthz", "/readyz", "/api/v1/jobs", "/metrics"] {
        let fresh = client(&server.token());
        let response = fresh.get(format!("{}{path}", server.url)).send().await.expect("a response");
        assert_eq!(response.status().as_u16(), 200, "{path}");
    }
    drop(idle);
    server.stop().await;
}
