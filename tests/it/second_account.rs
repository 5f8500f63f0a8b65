//! Another account of the same machine, as on a shared login node, cannot read data, act as an agent, or fill the disk.

use crate::{
    artifacts::bucket::files_below,
    pictures,
    server::{Agents, Finished, Server, lockstep, number, training_permit},
    specs,
};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    process::{Command, Output},
};
use tokio_tungstenite::tungstenite;

/// The user id of `nobody`, which shares no group with this account.
const OTHER_UID: &str = "65534";

/// Runs a shell command as another account: as root by `setpriv`, otherwise by `sudo`.
fn run_as_other(script: &str) -> Output {
    let mut command = if rustix::process::getuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", OTHER_UID, "--regid", OTHER_UID, "--clear-groups", "sh", "-c", script]);
        command
    } else {
        let mut command = Command::new("sudo");
        command.args(["-n", "-u", &format!("#{OTHER_UID}"), "sh", "-c", script]);
        command
    };
    let output =
        command.current_dir("/").env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    let output = output.output().expect("another account, which needs root or sudo without a password");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!error.contains("sudo:"), "another account needs root or sudo without a password: {error}");
    output
}

fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// Collects files and folders below `path` that other accounts have any permission for.
fn find_open(path: &Path, open: &mut Vec<String>) {
    // Ranks rename and delete files meanwhile.
    let Ok(metadata) = fs::symlink_metadata(path) else { return };
    if metadata.mode() & 0o077 != 0 && !metadata.is_symlink() {
        open.push(format!("{} {:o}", path.display(), metadata.mode() & 0o7777));
    }
    if metadata.is_dir() {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            find_open(&entry.path(), open);
        }
    }
}

#[tokio::test]
async fn other_accounts_cannot_read_data_or_act_as_an_agent() {
    let _permit = training_permit().await;
    let server = Server::start().await;
    // The folder above the data directory is open, so that only the data directory's permissions protect it.
    fs::set_permissions(server.folder().path(), PermissionsExt::from_mode(0o755)).expect("open to all");
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 640, 64)).await;
    let spec = specs::with(
        specs::short("private work", "fashion", 2, 100_000),
        json!({"checkpoint": {"every_epochs": null, "every_steps": 20}}),
    );
    let id = server.submit(&spec).await;
    server.until("a checkpoint exists", async |s: &Server| !s.checkpoints(&id).await.is_empty()).await;

    // Files, including locks, spools and unfinished files of a running job.
    let mut open = Vec::new();
    find_open(&server.data_dir(), &mut open);
    assert!(open.is_empty(), "{open:?}");
    let data = server.data_dir().display().to_string();
    for script in [
        format!("ls {data}"),
        format!("cat {data}/token"),
        format!("cat {data}/agent/token"),
        format!("cat {data}/lockstep.db"),
        format!("ls {data}/jobs/{id}"),
        format!("echo x > {data}/x"),
        format!("cat {}", server.attempt_dir(&id, 1).join("rank.0.log").display()),
    ] {
        let tried = run_as_other(&script);
        assert!(
            !tried.status.success() && text_of(&tried).contains("ermission denied"),
            "{script}: {tried:?}"
        );
    }
    // Shared memory of the ranks.
    for entry in fs::read_dir("/dev/shm").expect("a folder").flatten() {
        let Ok(metadata) = entry.metadata() else { continue };
        let is_ours = entry.file_name().to_string_lossy().contains("lockstep");
        assert!(!is_ours || metadata.mode() & 0o077 == 0, "{} {:o}", entry.path().display(), metadata.mode());
    }

    // Processes: every account can read arguments, but not environments and memory.
    let secrets = secrets(&server);
    for process in server.processes() {
        let seen = text_of(&run_as_other(&format!("cat /proc/{}/cmdline", process.pid)));
        assert!(seen.contains(process.command()), "{seen}");
        assert!(!secrets.iter().any(|secret| seen.contains(secret)), "{seen}");
        for action in ["head -c 1 environ", "head -c 1 mem", "head -c 1 maps", "ls cwd/", "ls fd/"] {
            let tried = run_as_other(&format!("cd /proc/{} && {action}", process.pid));
            assert!(!tried.status.success(), "{}: {action}: {tried:?}", process.command());
        }
        let killed = run_as_other(&format!("kill -9 {}", process.pid));
        assert!(!killed.status.success());
    }

    // The REST interface: every account can connect, but gets no data.
    let api = server.api("");
    for (method, path) in [
        ("GET", "/jobs"),
        ("GET", "/agents"),
        ("GET", "/datasets"),
        ("GET", "/tokens"),
        ("GET", "/audit"),
        ("POST", "/jobs"),
        ("DELETE", "/datasets/fashion"),
    ] {
        let reported =
            run_as_other(&format!("curl -s -o /dev/null -w '%{{http_code}}' -X {method} {api}{path}"));
        assert_eq!(text_of(&reported), "401", "{method} {path}");
    }
    let reported = text_of(&run_as_other(&format!("curl -s {api}/jobs/{id}")));
    assert!(!reported.contains("private work") && !reported.contains("fashion"), "{reported}");

    // An agent's id is no secret: knowing it does not allow a connection as this agent.
    let agents = server.get("/agents").await;
    let agent = agents["agents"][0]["id"].as_str().expect("an id").to_owned();
    for token in [None, Some("lockstep_guessed"), Some(agent.as_str())] {
        let url = format!("{}/api/v1/agent/socket", server.url.replace("http", "ws"));
        let mut request =
            tungstenite::client::IntoClientRequest::into_client_request(url).expect("a request");
        if let Some(token) = token {
            let value = format!("Bearer {token}").parse().expect("a header");
            request.headers_mut().insert("authorization", value);
        }
        match tokio_tungstenite::connect_async(request).await {
            Err(tungstenite::Error::Http(response)) => {
                assert_eq!(response.status(), StatusCode::UNAUTHORIZED)
            }
            other => panic!("{token:?}: {other:?}"),
        }
    }
    let others_folder = tempfile::Builder::new().prefix("lockstep-other-").tempdir().expect("a folder");
    fs::set_permissions(others_folder.path(), PermissionsExt::from_mode(0o777)).expect("open to all");
    let program = others_folder.path().join("lockstep");
    fs::copy(env!("CARGO_BIN_EXE_lockstep"), &program).expect("a copy of the program");
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("its permissions");
    let joined = run_as_other(&format!(
        "HOME={0} timeout 5 {1} agent --server {2} --name local --cpu-slots 1 --data-dir {0}/agent",
        others_folder.path().display(),
        program.display(),
        server.url
    ));
    assert!(text_of(&joined).contains("token"), "{}", text_of(&joined));
    // A class folder that this account cannot read is an error, not a class without pictures.
    let images = pictures::image_folder(others_folder.path(), 4);
    let class = images.join("train/boot");
    fs::set_permissions(&class, PermissionsExt::from_mode(0o700)).expect("its permissions");
    let inspected = run_as_other(&format!(
        "HOME={} {} dataset inspect {}",
        others_folder.path().display(),
        program.display(),
        images.display()
    ));
    let refusal = format!("{} cannot be read: Permission denied", class.display());
    assert!(text_of(&inspected).contains(&refusal) && !inspected.status.success(), "{inspected:?}");
    let agents = server.get("/agents").await;
    assert_eq!(agents["agents"].as_array().expect("agents").len(), 1, "{agents}");
    assert_eq!(agents["agents"][0]["online"], true);

    // The job is undisturbed, and no log contains a secret.
    let job = server.job(&id).await;
    assert_eq!((job["state"].as_str(), number(&job["attempt"])), (Some("running"), 1), "{job}");
    server.order(&id, "cancel").await;
    server.wait_for_end(&id).await;
    let mut logs = files_below(server.folder().path());
    logs.retain(|file| file.extension().is_some_and(|e| e == "log" || e == "stderr"));
    assert!(logs.len() >= 3, "{logs:?}");
    for log in logs {
        let text = fs::read_to_string(&log).expect("a log");
        // Sign-in links are not checked: they are printed for the person at the terminal, work once and expire soon.
        assert!(!secrets.iter().any(|secret| text.contains(secret)), "{}", log.display());
    }
    server.stop().await;
}

/// The tokens of the server and of the agent, and the secrets of attempts.
fn secrets(server: &Server) -> Vec<String> {
    let agent = fs::read_to_string(server.data_dir().join("agent/token")).expect("the agent's token");
    let mut secrets = vec![server.token(), agent.trim().to_owned()];
    for file in files_below(&server.data_dir()) {
        if file.extension().is_none_or(|e| e != "json") {
            continue;
        }
        // Ranks rename and delete files meanwhile.
        let Ok(text) = fs::read_to_string(&file) else { continue };
        let Ok(value) = serde_json::from_str::<Value>(&text) else { continue };
        let mut values = vec![&value];
        while let Some(value) = values.pop() {
            match value {
                Value::Object(map) => {
                    for (key, inner) in map {
                        match inner.as_str() {
                            Some(secret) if key == "secret" => secrets.push(secret.to_owned()),
                            Some(fencing) if key == "fencing_token" => {
                                let (_, secret) = fencing.split_once('.').expect("a number and a secret");
                                secrets.push(secret.to_owned());
                            }
                            _ => values.push(inner),
                        }
                    }
                }
                Value::Array(inner) => values.extend(inner),
                _ => {}
            }
        }
    }
    assert!(secrets.len() > 2 && secrets.iter().all(|secret| secret.len() >= 16), "{}", secrets.len());
    secrets
}

/// Accepts connections on a port for twenty seconds and prints the received bytes.
const LISTEN: &str = r#"
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1]))); end = time.time() + 20
while time.time() < end:
    server.settimeout(max(0.01, end - time.time()))
    try: peer, _ = server.accept()
    except TimeoutError: break
    peer.settimeout(0.5)
    try: print(peer.recv(65536), flush=True)
    except OSError: pass
    peer.close()
"#;

#[tokio::test]
async fn no_token_is_sent_to_another_account_on_the_server_s_port() {
    let mut server = Server::start_with(Agents::Separate { cpu_slots: 1 }).await;
    let port: u16 = server.url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
    server.kill_serve();
    let listening = std::thread::spawn(move || run_as_other(&format!("python3 -c '{LISTEN}' {port}")));
    let other: u32 = OTHER_UID.parse().expect("a number");
    let other_listens = || {
        let owners = lockstep_host::listener_owners([127, 0, 0, 1].into(), port);
        owners == [other]
    };
    server.until("the other account listens", async |_: &Server| other_listens()).await;
    let mut command = lockstep();
    command.args(["list", "--data-dir", "data"]).current_dir(server.folder().path());
    Finished::of(command.env("LOCKSTEP_SERVER", &server.url)).assert_usage_error(&[
        "another account",
        &format!("user id {OTHER_UID}"),
        "--token-file",
    ]);
    // The running agent tries to connect to its server again.
    let log = server.folder().path().join("beside.log");
    let reported = async |_: &Server| {
        let log = fs::read_to_string(&log).expect("a log");
        log.contains("another account") && log.contains(OTHER_UID)
    };
    server.until("the agent logs the reason", reported).await;
    let received = text_of(&listening.join().expect("it listened"));
    assert!(!received.contains("lockstep_") && !received.to_lowercase().contains("bearer"), "{received}");
    // The server returns, and the agent connects.
    server.start_serve().await;
    server.until("the agent is online again", async |s: &Server| s.slots().await > 0).await;
    server.stop().await;
}

#[tokio::test]
async fn other_accounts_cannot_fill_the_disk() {
    let server = Server::start_with(Agents::None).await;
    let size = |server: &Server| -> u64 {
        let files = files_below(&server.data_dir());
        files.iter().filter_map(|file| Some(fs::metadata(file).ok()?.len())).sum()
    };
    let before = size(&server);
    let api = server.api("");
    // Requests of 64 MiB without a length, and then many small requests.
    for path in ["/jobs", "/jobs/j01/predict", "/datasets", "/tokens", "/session"] {
        let script = format!(
            "head -c 67108864 /dev/zero | curl -s -o /dev/null -w '%{{http_code}}' -T - -X POST {api}{path}"
        );
        let reported = text_of(&run_as_other(&script));
        assert!(["401", "404", "405", "413"].contains(&reported.as_str()), "{path}: {reported}");
    }
    let many = format!(
        "for i in $(seq 40); do curl -s -o /dev/null -X POST -H 'content-type: application/json' -d '{{}}' \
         {api}/jobs {api}/datasets {api}/tokens {api}/agents {api}/jobs/$i/fork; done"
    );
    assert!(run_as_other(&many).status.success());
    server.until("the server still responds", async |s: &Server| s.get("/jobs").await.is_object()).await;
    let grown = size(&server).saturating_sub(before);
    assert!(grown < 1 << 20, "{grown} bytes");
    let audit = server.get("/audit").await.to_string();
    assert!(audit.len() < 100_000, "{} bytes of audit log", audit.len());
    server.stop().await;
}
