//! Invalid commands: exit status 2 and a message that says what to change.

use crate::{
    pictures,
    server::{Agents, Finished, Folder, Server, free_port, lockstep, number, training_permit},
    specs,
};
use sqlx::{Connection, SqliteConnection};
use std::{fs, net::TcpListener, path::Path};

fn serve(listen: &str, data_dir: &Path) -> Finished {
    Finished::of(lockstep().args(["serve", "--listen", listen, "--data-dir"]).arg(data_dir))
}

#[test]
fn a_server_that_cannot_start_says_why_and_leaves_no_files() {
    let folder = Folder::new();
    let data = folder.path().join("data");

    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address").to_string();
    serve(&address, &data).assert_usage_error(&[&address, "taken", "--listen"]);

    for address in ["0.0.0.0:7070", "[::]:7070", "192.0.2.1:7070"] {
        serve(address, &data).assert_usage_error(&[
            "refus",
            "without TLS",
            "--tls-own-ca",
            "--insecure-http",
        ]);
        for tls in ["--tls-own-ca", "--insecure-http"] {
            let mut command = lockstep();
            command.args(["serve", "--no-auth", tls, "--listen", address, "--data-dir"]).arg(&data);
            Finished::of(&mut command).assert_usage_error(&["refus", "--no-auth", "127.0.0.1"]);
        }
    }
    serve("nonsense", &data).assert_usage_error(&["nonsense", "127.0.0.1:7070"]);
    assert!(!data.exists(), "no data directory is created");

    // Root ignores permissions, so the test puts a file where the folder would be.
    let file = folder.write("file", "");
    serve(&format!("127.0.0.1:{}", free_port()), &file).assert_usage_error(&["it is a file; give a folder"]);
    for data in [&file, &file.join("data")] {
        serve(&format!("127.0.0.1:{}", free_port()), data).assert_usage_error(&["file", "--data-dir"]);
    }
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_neither_changed_nor_backed_up() {
    let server = Server::start_on(Agents::None, None, Vec::new()).await;
    let second = serve(&format!("127.0.0.1:{}", free_port()), &server.data_dir());
    second.assert_usage_error(&["in use", "--data-dir"]);

    let server = server.stop_and_keep().await;
    let data = server.data_dir();
    let mut command = lockstep();
    command.args(["list", "--data-dir"]).arg(&data);
    Finished::of(command.env_remove("LOCKSTEP_SERVER"))
        .assert_fails(1, &["the data directory is stopped", "`lockstep serve --data-dir /"]);
    let file = server.folder().path().join("backup");
    let backup = || {
        let mut command = lockstep();
        Finished::of(command.args(["backup", "-o"]).arg(&file).arg("--data-dir").arg(&data))
    };
    backup().ok();
    fs::remove_file(&file).expect("a backup");
    let url = format!("sqlite://{}", data.join("lockstep.db").display());
    let mut connection = SqliteConnection::connect(&url).await.expect("the database");
    sqlx::query(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (99990101000000, 'of the future', TRUE, x'00', 0)",
    )
    .execute(&mut connection)
    .await
    .expect("a migration");
    connection.close().await.expect("closed");
    let mut missing = lockstep();
    Finished::of(missing.args(["backup", "-o", "backup", "--data-dir", "nope"]))
        .assert_usage_error(&["nope/lockstep.db does not exist"]);
    let with_postgres = tempfile::tempdir().expect("a folder");
    fs::write(with_postgres.path().join("server.lock"), "").expect("the lock");
    Finished::of(lockstep().args(["backup", "-o", "backup", "--data-dir"]).arg(with_postgres.path()))
        .assert_usage_error(&["such as Postgres", "LOCKSTEP_DATABASE"]);
    let before = fs::read(data.join("lockstep.db")).expect("the database");
    serve(&format!("127.0.0.1:{}", free_port()), &data)
        .assert_usage_error(&["newer version", "99990101000000"]);
    backup().assert_usage_error(&["newer version", "99990101000000"]);
    assert!(!file.exists(), "no backup is written");
    assert!(before == fs::read(data.join("lockstep.db")).expect("the database"), "the database is unchanged");
}

#[tokio::test]
async fn a_job_file_is_checked_without_submission_with_and_without_a_server() {
    let server = Server::start().await;
    let pictures = pictures::idx_dataset(server.folder().path(), 64, 16);
    server.register("fashion", &pictures).await;
    let again = server.cli(&["dataset", "add", "fashion", pictures.to_str().expect("UTF-8")]);
    again.assert_usage_error(&["\"fashion\" is already registered at this path"]);
    let good =
        "[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashion\"\n[train]\nepochs = 3\nbatch_size = 8\n";
    let path = server.folder().write("job.toml", good).display().to_string();
    let moved = server.folder().path().join("moved");
    fs::rename(&pictures, &moved).expect("moves");
    let output = server.cli(&["validate", &path]);
    output.ok();
    assert!(output.stderr.contains("no longer exists on the server's machine"), "{}", output.stderr);
    // The name gets the new path only if the pictures are the same.
    let others = pictures::idx_dataset(&server.folder().path().join("others"), 32, 16);
    let add =
        |path: &Path| server.cli(&["dataset", "add", "fashion", path.to_str().expect("UTF-8"), "--json"]);
    add(&others).assert_usage_error(&["differ from its pictures"]);
    let canonical = moved.canonicalize().expect("exists");
    assert_eq!(add(&moved).json()["path"], serde_json::json!(canonical));
    fs::rename(&moved, &pictures).expect("moves");
    add(&pictures).ok();
    let output = server.cli(&["validate", &path]);
    assert!(
        output.ok().ends_with(
            "job.toml has no mistake: 64 training pictures, 8 a step, 8 steps an epoch, 24 steps\n"
        ),
        "{}",
        output.stdout
    );
    assert_eq!(server.cli(&["validate", &path, "--json"]).json()["total_steps"], 24);
    assert_eq!(server.cli(&["list", "--json"]).json(), serde_json::json!([]), "nothing is stored");

    // A named server must respond. Without a server, only the file is checked, and a note says so.
    let unused_url = format!("http://127.0.0.1:{}", free_port());
    server
        .cli(&["validate", &path, "--server", &unused_url])
        .assert_fails(1, &["no server answers", "(--data-dir or LOCKSTEP_DATA_DIR)"]);
    server
        .cli(&["validate", &path, "--server", "htp://x:1"])
        .assert_usage_error(&["write http://x:1 or https://x:1"]);
    let weights = server.folder().write("broken.safetensors", "not any");
    let pretrained = format!("model.pretrained={}", weights.display());
    let dataset = pictures.display().to_string();
    let validate_offline = |sets: &[&str]| {
        let mut command = lockstep();
        command.arg("validate").arg(&path).env_remove("LOCKSTEP_SERVER");
        command.args(["--set", &format!("data.dataset={dataset}")]);
        Finished::of(command.args(crate::train::sets(sets)))
    };
    let output = validate_offline(&[]);
    output.assert_prints(&["has no mistake"]);
    assert!(output.stderr.contains("no server answers"), "{}", output.stderr);
    validate_offline(&["train.lrr=1", "model.arch=resnet21"]).assert_usage_error(&[
        "2 mistakes",
        "train.lrr",
        "model.arch",
    ]);
    validate_offline(&[&pretrained])
        .assert_usage_error(&["model.pretrained", "broken.safetensors: not a whole safetensors file"]);
    validate_offline(&["data.validation=tst"]).assert_usage_error(&["data.validation", "no split \"tst\""]);
    validate_offline(&["train.batch_size=65"])
        .assert_usage_error(&["train.batch_size", "64 training pictures are fewer than one step uses (65)"]);
    validate_offline(&["data.dataset=/no/where"]).assert_usage_error(&["data.dataset", "/no/where"]);
    server.stop().await;
}

#[tokio::test]
async fn commands_report_all_errors_and_store_nothing() {
    let server = Server::start().await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 64, 16)).await;
    let file = |text: &str| server.folder().write("job.toml", text).to_str().expect("UTF-8").to_owned();

    let broken = file("[train]\nlr = 0.1\nbatch_size = = 3\n");
    server.cli(&["submit", &broken]).assert_usage_error(&["job.toml", "line 3"]);
    let mistaken = file("nam = \"x\"\n[train]\nlr = \"fast\"\n[data]\ndataset = \"fashion\"\n");
    server.cli(&["submit", &mistaken]).assert_usage_error(&["nam", "name", "train.lr", "number"]);
    let good = file("[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashion\"\n[train]\nsteps = 3\n");
    server.cli(&["submit", &good, "--set", "train.lr"]).assert_usage_error(&["train.lr"]);
    server.cli(&["submit", &good, "--set", "train.sedd=3"]).assert_usage_error(&["train.sedd", "seed"]);
    server.cli(&["submit", &good, "--set", "data.dataset=/no/where"]).assert_usage_error(&[
        "data.dataset: /no/where does not exist; the server has no dataset at this path either",
    ]);
    // A dataset that is not registered hides no other mistake, and a refused job leaves it unregistered.
    let photos = pictures::image_folder(server.folder().path(), 2);
    let dataset = format!("data.dataset={photos:?}");
    let unregistered = ["--set", dataset.as_str(), "--set", "parallel.ranks=100"];
    let mistakes = ["--set", "train.lr=-1", "--set", "model.pretrained=1-3", "--set", "a/b=1"];
    for command in ["validate", "submit"] {
        server.cli(&[&[command, &good][..], &unregistered, &mistakes].concat()).assert_usage_error(&[
            "4 mistakes",
            "train.lr: ",
            "parallel.ranks: 100 ranks",
            "model.pretrained: \"1-3\" lacks the job's id",
            "a/b: no key is called \"a/b\" here",
        ]);
    }
    let refused = server.cli(&[&["submit", &good][..], &unregistered].concat());
    refused.assert_usage_error(&["registering ", "is removed again", "parallel.ranks: 100 ranks"]);
    let datasets = server.cli(&["dataset", "list"]);
    assert!(!datasets.ok().contains(photos.to_str().expect("UTF-8")), "{}", datasets.stdout);
    // Another folder with the name of a registered dataset cannot be registered.
    let other = server.folder().path().join("other/fashion");
    fs::create_dir_all(&other).expect("a folder");
    let dataset = format!("data.dataset={}", other.display());
    for command in ["validate", "submit"] {
        server
            .cli(&[command, &good, "--set", &dataset])
            .assert_usage_error(&["a dataset is already called fashion (", "lockstep dataset add OTHER"]);
    }
    server
        .cli(&["submit", "/dev/zero"])
        .assert_usage_error(&["/dev/zero", "is a device, not a regular file"]);
    server.cli(&["submit", "/dev"]).assert_usage_error(&["/dev", "is a folder"]);
    server.cli(&["submit", "nowhere.toml"]).assert_usage_error(&["nowhere.toml"]);
    assert_eq!(server.cli(&["list", "--json"]).json(), serde_json::json!([]));

    for command in ["show", "watch", "logs", "cancel", "delete"] {
        server.cli(&[command, "nobody"]).assert_usage_error(&["nobody"]);
        server.cli(&[command, "j00000000000000000000000000"]).assert_usage_error(&["job"]);
    }
    server.cli(&["download", "nobody", "-o", "model.safetensors"]).assert_usage_error(&["nobody"]);
    server.cli(&["dataset", "add", "x", "nowhere"]).assert_usage_error(&["nowhere"]);
    server.cli(&["dataset", "inspect", "nobody"]).assert_usage_error(&["nobody"]);
    server.cli(&["sumbit", &good]).assert_usage_error(&["submit"]);
    server.cli(&["submit", &good, "--wach"]).assert_usage_error(&["--watch"]);

    // No server responds: not a usage error.
    let mut command = lockstep();
    command.args(["list"]).env("LOCKSTEP_SERVER", format!("http://127.0.0.1:{}", free_port()));
    Finished::of(&mut command).assert_fails(1, &["lockstep serve", "LOCKSTEP_SERVER"]);
    server.stop().await;
}

#[tokio::test]
async fn an_agent_with_a_full_folder_takes_no_jobs_and_keeps_its_ranks() {
    let _permit = training_permit().await;
    let server = Server::start_with(Agents::None).await;
    let folder = server.folder().path().join("full");
    let start = || {
        let mut command = server.agent_command(lockstep(), &server.url, "full", 2);
        command.spawn().expect("lockstep agent starts")
    };
    let mut first = start();
    server.until("the agent is online", async |s: &Server| s.slots().await == 2).await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 64, 16)).await;
    // A job that lasts until the test cancels it.
    let healthy = server.submit(&specs::short("healthy", "fashion", 1, 100_000)).await;
    server.wait_for_job(&healthy, "the job trains", |job| number(&job["step"]) > 0).await;
    // Root ignores permissions, so the test puts a file in place of the folder.
    let (attempts, moved) = (folder.join("attempts"), folder.join("attempts.moved"));
    fs::rename(&attempts, &moved).expect("a folder");
    fs::write(&attempts, "").expect("a file");

    let id = server.submit(&specs::short("declined", "fashion", 1, 20)).await;
    let events = format!("/jobs/{id}/events?type=state");
    let is_declined =
        async |s: &Server| s.get(&events).await.to_string().contains("did not start the job: its folder");
    server.until("the job is declined", is_declined).await;
    let job = server.job(&id).await;
    assert_eq!(
        (&job["state"], &job["attempt"]),
        (&"queued".into(), &1.into()),
        "one declined attempt: {job}"
    );
    let warns = async |s: &Server| {
        let shown = s.get("/agents").await;
        let warning = shown["agents"][0]["warnings"][0]["text"].as_str().unwrap_or_default();
        warning.contains("Takes no new jobs") && warning.contains(folder.to_str().expect("UTF-8"))
    };
    server.until("the machine has a warning that names its folder", warns).await;
    let trained = number(&server.job(&healthy).await["step"]);
    server.wait_for_job(&healthy, "the job continues", |job| number(&job["step"]) > trained + 5).await;

    // A new agent with the same folder takes over the running job, but accepts no jobs before it can write there.
    let jobs = folder.join("jobs");
    fs::remove_dir(&jobs).expect("no jobs");
    fs::write(&jobs, "").expect("a file");
    fs::remove_file(&attempts).expect("the file");
    fs::rename(&moved, &attempts).expect("a folder");
    first.kill().expect("SIGKILL");
    first.wait().expect("its status");
    let mut second = start();
    let agent_log = || fs::read_to_string(server.folder().path().join("full.log")).expect("the agent's log");
    server
        .until("the second agent also accepts no jobs", async |_: &Server| {
            agent_log().matches("accepts no jobs").count() == 2
        })
        .await;
    let trained = number(&server.job(&healthy).await["step"]);
    let job =
        server.wait_for_job(&healthy, "the job continues", |job| number(&job["step"]) > trained + 5).await;
    assert_eq!(job["attempt"], 1, "{job}");
    assert_eq!(server.job(&id).await["state"], "queued");

    fs::remove_file(&jobs).expect("the file");
    let done = server.wait_for_end(&id).await;
    assert_eq!((&done["state"], &done["attempt"]), (&"succeeded".into(), &2.into()), "{done}");
    assert!(agent_log().contains("accepts jobs"), "{}", agent_log());
    assert_eq!(server.job(&healthy).await["attempt"], 1);
    server.cli(&["cancel", &healthy]).ok();
    server.wait_for_end(&healthy).await;
    second.kill().expect("SIGKILL");
    second.wait().expect("its status");
    server.stop().await;
}
