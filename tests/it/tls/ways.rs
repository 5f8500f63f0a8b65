//! TLS with certificate files and with nginx as a proxy, each with an agent and commands over TLS. `tls.rs` has the server's own CA.

use super::{
    nginx::Nginx,
    serve::{Serve, ca, client_config_for, listens},
};
use crate::{
    pictures,
    server::{Folder, TIMEOUT, free_port, lockstep, training_permit},
    specs,
};
use futures_util::StreamExt;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};
use tokio_tungstenite::{Connector, connect_async_tls_with_config, tungstenite::client::IntoClientRequest};

/// A server that clients reach at `url`.
struct TlsServer {
    serve: Serve,
    url: String,
    ca: PathBuf,
    _nginx: Option<Nginx>,
}

/// Creates a separate CA with a certificate for localhost, and returns the CA's certificate.
fn issue(folder: &Path) -> PathBuf {
    for args in [&["init"][..], &["issue", "localhost"]] {
        ca(folder, args).ok();
    }
    folder.join("lockstep-data/ca/ca.crt")
}

async fn with_certificate_files() -> TlsServer {
    let folder = Folder::new();
    let ca = issue(folder.path());
    let options = ["--no-local-agent", "--tls-cert", "localhost.crt", "--tls-key", "localhost.key"];
    let serve = Serve::start_in(folder, &options, listens).await;
    TlsServer { url: format!("https://localhost:{}", serve.port), ca, serve, _nginx: None }
}

async fn behind_nginx() -> TlsServer {
    let (folder, port) = (Folder::new(), free_port());
    let (ca, url) = (issue(folder.path()), format!("https://localhost:{port}"));
    let options = ["--no-local-agent", "--trusted-proxy", "127.0.0.1", "--public-url", &url];
    let serve = Serve::start_in(folder, &options, listens).await;
    let nginx = Nginx::start(serve.folder.path(), "localhost", port, serve.port, &[]).await;
    TlsServer { serve, url, ca, _nginx: Some(nginx) }
}

/// Asserts that an agent joins and trains a job, and that commands, pages, the REST interface and a stream work.
async fn assert_works(server: TlsServer) {
    let _permit = training_permit().await;
    let TlsServer { serve, url, ca, .. } = &server;
    let cli = |args: &[&str]| serve.cli(url, Some(ca), args);
    let token = cli(&["token", "create", "--scope", "agent", "--agent", "far"]);
    let token = serve.folder.write("far.token", token.ok());
    let log = fs::File::create(serve.folder.path().join("agent.log")).expect("a log");
    let mut command = lockstep();
    command.args(["agent", "--server", url, "--name", "far", "--cpu-slots", "1", "--ca-file"]).arg(ca);
    command.arg("--token-file").arg(&token).arg("--data-dir").arg(serve.folder.path().join("far"));
    let mut agent = command.stdout(Stdio::null()).stderr(log).spawn().expect("an agent");

    let http = serve.client(ca);
    let text = async |path: &str| {
        let response = http.get(format!("{url}{path}")).send().await.expect("a response");
        assert_eq!(response.status(), 200, "{path}");
        response.text().await.expect("a body")
    };
    let start = Instant::now();
    loop {
        let agents: Value = serde_json::from_str(&text("/api/v1/agents").await).expect("JSON");
        if agents["agents"][0]["online"] == true {
            assert_eq!(agents["agents"][0]["name"], "far");
            break;
        }
        assert!(start.elapsed() < TIMEOUT, "{agents}: {}", serve.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let dataset = pictures::idx_dataset(serve.folder.path(), 40, 20);
    cli(&["dataset", "add", "pictures", dataset.to_str().expect("UTF-8")]).ok();
    let spec = specs::short("far-away", "pictures", 1, 20);
    let submitted = http.post(format!("{url}/api/v1/jobs")).json(&spec).send().await.expect("a response");
    assert_eq!(submitted.status(), 201);
    let job: Value = submitted.json().await.expect("JSON");
    let id = job["id"].as_str().expect("an id");
    cli(&["watch", id]).assert_prints(&["succeeded"]);
    let listed = cli(&["list"]);
    let line = listed.ok().lines().find(|line| line.contains("far-away")).unwrap_or_default();
    assert!(line.contains("succeeded"), "{}", listed.stdout);
    assert!(text("/jobs").await.contains("far-away"), "the page");

    // The stream of the job's page, up to the frame `live`.
    let stream = url.replace("https", "wss") + &format!("/api/v1/jobs/{id}/stream?since=0");
    let mut request = stream.into_client_request().expect("a request");
    request.headers_mut().extend(serve.bearer());
    let connector = Some(Connector::Rustls(client_config_for(ca)));
    let (mut socket, _) =
        connect_async_tls_with_config(request, None, false, connector).await.expect("a stream");
    let mut losses = 0;
    loop {
        let frame = tokio::time::timeout(TIMEOUT, socket.next()).await.expect("in time");
        let frame = frame.expect("a frame").expect("a valid frame").into_text().expect("text");
        losses += usize::from(frame.contains("\"loss\""));
        if frame.contains("\"live\"") {
            break;
        }
    }
    assert!(losses > 0, "the stream has the agent's reports");
    crate::server::signal(agent.id() as i32, rustix::process::Signal::TERM);
    agent.wait().expect("its status");
}

#[tokio::test]
async fn agents_train_and_commands_watch_with_certificates_of_files() {
    assert_works(with_certificate_files().await).await;
}

#[tokio::test]
async fn agents_train_and_commands_watch_through_nginx() {
    assert_works(behind_nginx().await).await;
}
