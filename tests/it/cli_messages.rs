//! Messages and questions of the command line: the first job file, all errors together, Ctrl-C, the job of a
//! prediction, downloads, and mistyped commands.

use crate::{
    commands::run_on_terminal,
    pictures,
    server::{Agents, Finished, Folder, Server, free_port, lockstep, training_permit},
    specs,
};
use serde_json::{Value, json};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

/// Options that make the job file of `init` quick to train.
const QUICK: [&str; 6] =
    ["--set", "train.epochs=", "--set", "train.steps=3", "--set", "train.global_batch_size=4"];

#[tokio::test]
async fn init_writes_a_file_for_train_and_submit() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    let root = pictures::image_folder(server.folder().path(), 8);
    let root = root.to_str().expect("UTF-8");
    let created = server.cli(&["init", root]);
    created.assert_prints(&["lockstep.toml", "lockstep submit"]);
    let file = server.folder().path().join("lockstep.toml");
    let text = fs::read_to_string(&file).expect("a file");
    for words in [
        "# 2 classes: boot (8), trouser (8).",
        "image_size = 28",
        "validation = \"val\"",
        "arch = \"resnet20\"",
    ] {
        assert!(text.contains(words), "{words} in {text}");
    }
    assert!(text.lines().filter(|line| line.starts_with("# ")).count() >= 10, "{text}");
    let (_, estimate) = created.stdout.split_once("\nabout ").expect("an estimate");
    assert!(
        estimate.contains(" on this machine; `lockstep init --quick` suggests a run of about "),
        "{estimate}"
    );
    let quick = server.cli(&["init", root, "--quick", "-o", "quick.toml"]);
    assert!(quick.ok().contains("\nabout ") && !quick.stdout.contains("--quick"), "{}", quick.stdout);
    let quick = fs::read_to_string(server.folder().path().join("quick.toml")).expect("a file");
    assert!(text.contains("\nepochs = 60\n") && quick.contains("\nepochs = 20\n"), "{quick}");

    // An existing file is not overwritten.
    fs::write(&file, text.clone() + "# mine\n").expect("a file");
    server.cli(&["init", root]).assert_usage_error(&["lockstep.toml exists already", "--output"]);
    server.cli(&["init", "nowhere"]).assert_usage_error(&["nowhere does not exist"]);
    assert!(fs::read_to_string(&file).expect("a file").ends_with("# mine\n"));
    server.cli(&["init", root, "--output", "other.toml"]).ok();
    assert_eq!(fs::read_to_string(server.folder().path().join("other.toml")).expect("a file"), text);
    // A class without validation pictures is named.
    let lacking = pictures::image_folder(&server.folder().path().join("lacking"), 8);
    fs::remove_dir_all(lacking.join("val/trouser")).expect("removes");
    for file in fs::read_dir(lacking.join("train/trouser")).expect("a folder").skip(1) {
        fs::remove_file(file.expect("a file").path()).expect("removes");
    }
    let warned = server.cli(&["init", lacking.to_str().expect("UTF-8"), "-o", "lacking.toml"]);
    let warning = "warning: 1 class has no validation picture: \"trouser\".";
    assert!(warned.ok().contains("lacking.toml") && warned.stderr.contains(warning), "{}", warned.stderr);
    // The largest class has 8 times the pictures of the smallest.
    let balanced = "\n# [loss]\n# class_weights = \"balanced\"\n";
    let lacking = fs::read_to_string(server.folder().path().join("lacking.toml")).expect("a file");
    assert!(lacking.ends_with(balanced) && !text.contains(balanced), "{lacking}");
    // Without a validation split, the seed in the file holds out pictures of each class, however few there are.
    let few = pictures::image_folder(&server.folder().path().join("few"), 3);
    fs::remove_dir_all(few.join("val")).expect("removes");
    std::os::unix::fs::symlink(few, server.folder().path().join("photos")).expect("a link");
    server.cli(&["init", "photos", "-o", "few.toml"]).ok();
    let linked = fs::read_to_string(server.folder().path().join("few.toml")).expect("a file");
    assert!(linked.contains("\nname = \"photos\"\n"), "{linked}");
    let trained = server.cli(&[&["train", "few.toml", "--out", "few-run"][..], &QUICK].concat());
    trained.assert_prints(&["succeeded: validation accuracy "]);
    assert!(!(trained.stdout + &trained.stderr).contains("no validation picture"));
    // The smallest pictures, one of each class: the first steps succeed, and the classes without pictures are named.
    let tiny = server.folder().path().join("tiny");
    for (class, value) in [("dark", 50), ("light", 200)] {
        fs::create_dir_all(tiny.join(class)).expect("a folder");
        let picture = image::GrayImage::from_pixel(1, 1, image::Luma([value]));
        picture.save(tiny.join(class).join("1.png")).expect("a picture");
    }
    let warned = server.cli(&["init", tiny.to_str().expect("UTF-8"), "-o", "tiny.toml"]);
    assert!(warned.ok().contains("train with "), "{}", warned.stderr);
    for warning in ["1 class has no validation picture", "1 class has no training picture"] {
        assert!(warned.stderr.contains(warning), "{}", warned.stderr);
    }
    server
        .cli(&["init", root, "-o", "none/x.toml"])
        .assert_usage_error(&["none/x.toml: the folder none does not exist"]);
    let empty = server.folder().path().join("empty");
    fs::create_dir(&empty).expect("a folder");
    server.cli(&["init", empty.to_str().expect("UTF-8"), "-o", "x.toml"]).assert_usage_error(&["empty"]);
    assert!(!server.folder().path().join("x.toml").exists());
    // A file that cannot be written, as on a full disk, is not left behind empty.
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_lockstep")]);
    limited.args(["init", root, "-o", "x.toml"]).current_dir(server.folder().path());
    Finished::of(&mut limited).assert_usage_error(&["x.toml cannot be written: File too large"]);
    assert!(!server.folder().path().join("x.toml").exists());

    server.cli(&["validate", "lockstep.toml"]).ok();
    server
        .cli(&[&["train", "lockstep.toml"][..], &QUICK].concat())
        .assert_prints(&["succeeded: validation accuracy "]);
    // The first submission registers the dataset's path under a name.
    for round in 0..2 {
        let sent = server.cli(&[&["submit", "lockstep.toml", "--watch"][..], &QUICK].concat());
        sent.assert_prints(&["succeeded after "]);
        assert_eq!(sent.stderr.contains("registering"), round == 0, "{}", sent.stderr);
        for words in ["Ctrl-C ends this display and not the job", "lockstep cancel j"] {
            assert!(sent.stderr.contains(words), "{}", sent.stderr);
        }
    }
    assert!(server.cli(&["dataset", "list"]).ok().contains(root));
    server
        .cli(&["submit", "lockstep.toml", "--set", "data.dataset=empty"])
        .assert_usage_error(&["no dataset is called \"empty\"", "write ./empty"]);
    // On a terminal `submit` follows the job without --watch.
    let file = file.to_str().expect("UTF-8");
    let (status, shown) =
        run_on_terminal(&server.client_variables(), &[&["submit", file][..], &QUICK].concat(), "");
    assert!(
        status == 0 && shown.contains("Ctrl-C ends") && shown.contains("succeeded after "),
        "{status}: {shown}"
    );
    let (status, shown) =
        run_on_terminal(&server.client_variables(), &["dataset", "remove", "folder"], "n\n");
    assert!(
        status == 2 && shown.contains("Remove folder?") && shown.contains("dataset folder stays as it is"),
        "{shown}"
    );
    server.cli(&["dataset", "inspect", "folder"]).ok();

    let detached = server.cli(&[&["submit", "lockstep.toml", "--detach"][..], &QUICK].concat());
    assert!(detached.ok().lines().count() == 1 && detached.ok().starts_with('j'), "{}", detached.stdout);
    server
        .cli(&["submit", "lockstep.toml", "--detach", "--watch"])
        .assert_usage_error(&["--detach", "--watch"]);
    let id = detached.stdout.split_whitespace().next().expect("an id").to_owned();
    server.cli(&["watch", &id]).ok();
    let frames = server.cli(&["watch", &id, "--json"]);
    let parse = |line| serde_json::from_str::<Value>(line).expect("JSON");
    let frames_read: Vec<Value> = frames.ok().lines().map(parse).collect();
    assert_eq!(frames_read.last().expect("a line")["type"], "job", "{}", frames.stdout);

    // A prediction names its job and checkpoint. The job is the first argument.
    let picture = pictures::boot(Path::new(root));
    let picture = picture.to_str().expect("UTF-8");
    let name = server.job(&id).await["name"].as_str().expect("a name").to_owned();
    for job in [&id, &name] {
        let predicted = server.cli(&["predict", job, picture]);
        assert!(
            predicted.ok().contains("boot")
                && predicted
                    .stderr
                    .contains(&format!("({id}), checkpoint 1-3, the best: validation accuracy ")),
            "{}",
            predicted.stderr
        );
        let is_noted =
            predicted.stderr.contains(&format!("jobs are called {name}; the newest is taken: {id}"));
        assert_eq!(is_noted, *job == name, "{}", predicted.stderr);
    }
    let predicted = server.cli(&["predict", &id, "--json", picture]).json();
    assert_eq!((&predicted[0]["job_id"], &predicted[0]["checkpoint"]), (&json!(id), &json!("1-3")));
    let right_line = format!("`lockstep predict JOB {picture}`");
    for (args, words) in [
        (&["predict", picture][..], &["no job is given", &right_line][..]),
        (&["predict", picture, picture], &["it is a file, and the job comes first", &right_line]),
        (&["predict", picture, "runs"], &["no job is given", &right_line]),
        (&["predict", &id, "empty"], &["empty: has no pictures; give the folder"]),
        (&["predict", &id, "runs"], &["has no pictures directly in it", "`runs/*/*`"]),
        (&["predict", &id, "-"], &["to read a picture from standard input, give /dev/stdin"]),
        (&["predict", &id, "https://x.org/a.png"], &["pictures must be files: download the picture"]),
        (&["init", "empty"], &["the folder is empty"]),
        (&["predict", &id], &["no picture is given", "lockstep predict JOB shoe.png"]),
        (&["predict"], &["<JOB>"]),
        (&["predict", &id, picture, "--top", "0"], &["--top", "give a whole number of at least 1"]),
        (
            &["predict", "--model", "network.onnx", picture],
            &["does not read them", "onnxruntime", "model.safetensors", "models:/shoes@champion"],
        ),
        (
            &["predict", "--model", "runs", picture],
            &["runs is not the folder of a run; it contains the runs runs/lockstep"],
        ),
        (
            &["predict", "--model", "empty", picture],
            &["empty has no model: the folder of a checkpoint has model.safetensors"],
        ),
        (
            &["download", &id, "-o", "nodir/x.safetensors"],
            &["nodir/x.safetensors: the folder nodir does not exist"],
        ),
        (&["download", &id, "-o", "-"], &["-: this command does not write to standard output"]),
        (&["metrics", "lr", &id], &["no job is called lr"]),
    ] {
        server.cli(args).assert_usage_error(words);
    }
    assert!(server.cli(&["metrics", &id, "lr"]).ok().contains("lr"));
    server.stop().await;
}

#[tokio::test]
async fn a_submission_reports_all_errors_together() {
    let server = Server::start().await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 64, 16)).await;
    let wrong = specs::with(
        specs::short("wrong", "fashon", 999, 4),
        json!({"train": {"lr": -1, "optimiser": "momentum"}, "checkpoint": {"keep": 1}}),
    );
    let expected: [(&str, &[&str]); 5] = [
        ("/train/lr", &["above 0"]),
        ("/train/optimiser", &["optimizer"]),
        ("/checkpoint/keep", &["2"]),
        ("/data/dataset", &["did you mean \"fashion\"?"]),
        ("/parallel/ranks", &["999 ranks", "2 slots"]),
    ];
    for path in ["/jobs", "/jobs/validate"] {
        server.post(path, &wrong).await.assert_invalid(&expected);
    }
    let file = server.folder().write(
        "wrong.toml",
        "[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashon\"\n[train]\nlr = -1\noptimiser = \"momentum\"\n\
         [parallel]\nranks = 999\ndevice = \"cpu\"\n[checkpoint]\nkeep = 1\n",
    );
    let file = file.to_str().expect("UTF-8");
    for command in ["submit", "validate"] {
        let output = server.cli(&[command, file]);
        output.assert_usage_error(&[
            "5 mistakes",
            "train.lr",
            "optimizer",
            "checkpoint.keep",
            "data.dataset",
            "999 ranks",
        ]);
        assert_eq!(output.stderr.matches("train.lr:").count(), 1, "{}", output.stderr);
    }
    // A registered dataset without the given split.
    let wrong = specs::with(
        specs::short("wrong", "fashion", 1, 4),
        json!({"train": {"lr": -1}, "data": {"validation": "dev"}}),
    );
    server
        .post("/jobs", &wrong)
        .await
        .assert_invalid(&[("/train/lr", &["above 0"]), ("/data/validation", &["no split \"dev\"", "test"])]);
    // An invalid value causes no further errors: no batch size is reported as too large.
    let wrong = specs::with(specs::short("wrong", "fashion", 1, 4), json!({"train": {"batch_size": "all"}}));
    server.post("/jobs", &wrong).await.assert_invalid(&[("/train/batch_size", &["whole number"])]);
    assert_eq!(server.cli(&["list", "--json"]).json(), json!([]));

    // Without a server, only errors of the file are reported.
    let mut command = lockstep();
    command.args(["submit", file]).env("LOCKSTEP_SERVER", format!("http://127.0.0.1:{}", free_port()));
    Finished::of(&mut command).assert_usage_error(&["3 mistakes", "train.lr", "checkpoint.keep"]);
    server.stop().await;
}

/// Starts a server that responds to every request with these bytes. Returns its URL.
fn mirror(body: &'static [u8]) -> String {
    use std::io::{Read as _, Write as _};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = connection.expect("a connection");
            let (mut request, mut byte) = (Vec::new(), [0]);
            while !request.ends_with(b"\r\n\r\n") && connection.read(&mut byte).expect("bytes") == 1 {
                request.push(byte[0]);
            }
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            let _ = connection.write_all(head.as_bytes());
            let _ = connection.write_all(body);
        }
    });
    format!("http://{address}/")
}

#[tokio::test]
async fn an_unavailable_public_dataset_is_explained() {
    let folder = Folder::new();
    let get = |args: &[&str]| {
        let mut command = lockstep();
        command.args(["dataset", "get"]).args(args).current_dir(folder.path()).stdin(Stdio::null());
        Finished::of(command.env("no_proxy", "*"))
    };
    let unused_url = format!("http://127.0.0.1:{}/", free_port());
    get(&["cifar10", "--from", &unused_url]).assert_fails(
        1,
        &[
            &format!("{unused_url}cifar-10-binary.tar.gz"),
            "datasets/cifar10.part",
            "Without a network",
            "--from URL",
        ],
    );
    get(&["fashion-mnist", "--from", &mirror(b"another file"), "--to", "f"]).assert_usage_error(&[
        "has 12 bytes, but train-images-idx3-ubyte.gz has 26421880",
        "f was not written",
    ]);
    assert!(!folder.path().join("f").exists() && !folder.path().join("datasets/cifar10").exists());
    get(&["mnist"]).assert_usage_error(&["mnist", "fashion-mnist"]);
    get(&["cifar10", "--from", "nowhere"]).assert_usage_error(&["nowhere"]);
}

#[tokio::test]
async fn downloaded_weights_can_be_named_in_a_job() {
    let folder = Folder::new();
    let data = pictures::image_folder(folder.path(), 1);
    let job = format!(
        "[model]\narch = \"resnet18\"\npretrained = \"resnet18\"\n[data]\ndataset = {data:?}\nimage_size = 96\n\
         validation = \"val\"\n[train]\nepochs = 1\nbatch_size = 2\n"
    );
    folder.write("job.toml", &job);
    let run = |args: &[&str]| {
        let mut command = lockstep();
        command.args(args).current_dir(folder.path()).env("LOCKSTEP_CACHE", folder.path().join("cache"));
        Finished::of(command.env_remove("HF_ENDPOINT").env("no_proxy", "*"))
    };
    // Without a server, the weights may be on the machine that trains.
    run(&["validate", "job.toml"]).ok();
    // Without a network, the message names the path where the file belongs, and jobs find the file there.
    let unused_url = format!("http://127.0.0.1:{}", free_port());
    let path = folder.path().join("cache/weights/resnet18.safetensors");
    let put_here = format!("put it here as {}", path.display());
    run(&["weights", "get", "resnet18", "--from", &unused_url])
        .assert_fails(1, &["timm/resnet18.a1_in1k", &put_here]);
    run(&["weights", "get", "resnet18", "--from", &mirror(b"a page")])
        .assert_usage_error(&["is not a Git LFS pointer", &put_here]);
    run(&["weights", "get", "vgg16"]).assert_usage_error(&["vgg16", "resnet18"]);
    let header = r#"{"fc.bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes().chain([0; 4]));
    fs::write(&path, file).expect("a file");
    run(&["weights", "get", "resnet18", "--from", &unused_url])
        .assert_prints(&["jobs use it with model.pretrained = \"resnet18\""]);
    run(&["validate", "job.toml"]).ok();
    fs::write(&path, "a page").expect("a file");
    run(&["validate", "job.toml"])
        .assert_usage_error(&["model.pretrained: ", "resnet18.safetensors: not a whole safetensors file"]);
}

#[tokio::test]
async fn an_available_public_dataset_is_registered() {
    let server = Server::start_with(Agents::Local { cpu_slots: 1 }).await;
    // The bundled files, a subset of the publisher's, are copied to the download folder.
    let folder = server.folder().path().join("datasets/fashion-mnist");
    fs::create_dir_all(&folder).expect("a folder");
    for file in fs::read_dir(pictures::bundled_folder()).expect("files").flatten() {
        fs::copy(file.path(), folder.join(file.file_name())).expect("a copy");
    }
    server.cli(&["dataset", "get", "fashion-mnist"]).assert_prints(&["fashion-mnist: idx, 10 classes"]);
    server.cli(&["dataset", "get", "fashion-mnist"]).ok();
    assert_eq!(server.cli(&["dataset", "list", "--json"]).json().as_array().map(Vec::len), Some(1));
    server
        .cli(&["dataset", "get", "fashion-mnist", "--no-register"])
        .assert_prints(&["lockstep dataset add fashion-mnist "]);
    server.stop().await;
}

#[test]
fn commands_of_other_tools_suggest_the_right_command() {
    let run = |args: &[&str]| {
        let mut command = lockstep();
        command.args(args).env("LOCKSTEP_SERVER", "http://127.0.0.1:1").env("LOCKSTEP_TOKEN_FILE", "token");
        Finished::of(&mut command)
    };
    for (typed, meant) in [("stop", "cancel"), ("status", "list"), ("ps", "list"), ("log", "logs")] {
        run(&[typed, "x"]).assert_usage_error(&[&format!("'{typed}'"), &format!("'{meant}'")]);
        run(&["help", typed]).assert_usage_error(&[&format!("'{meant}'")]);
    }
    for (args, words) in [
        (&["token", "create", "ci"][..], "`lockstep token create --name ci`"),
        (&["fork", "x", "--name", "y"], "--set name=NAME"),
        (&["evaluate", "--model", "x"], "models:/shoes@champion"),
        (&["metrics", "x", "--metric", "loss"], "`lockstep metrics JOB loss`"),
        (&["submit", "x.toml", "--ranks", "2"], "`--set parallel.ranks=2`"),
        (&["fork", "x", "--ranks", "2"], "`--set parallel.ranks=2`"),
        (&["logs", "x", "--tail", "3"], "`lockstep logs JOB | tail`"),
        (&["edit", "x", "--priority", "high"], "give a whole number"),
        (&["edit", "x"], "--priority <N>|--project <PROJECT>"),
    ] {
        run(args).assert_usage_error(&[words]);
    }
    run(&["lst"]).assert_usage_error(&["'list'"]);
    run(&["wacht"]).assert_usage_error(&["'launch', 'watch'"]);
    run(&["watch"]).assert_usage_error(&["<JOB>", "Usage: lockstep watch [OPTIONS] <JOB>"]);
    run(&["dataset", "inspect"]).assert_usage_error(&["Usage: lockstep dataset inspect [OPTIONS] "]);
}
