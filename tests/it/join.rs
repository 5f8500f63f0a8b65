//! The commands of the page Machines, run as written: on the server's machine, and in another folder that contains only the
//! files that the page names.

use crate::{
    pages,
    server::{Folder, TIMEOUT, Terminated, free_port, lockstep, wait_until},
};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// A shell that has `lockstep` on its path and no variables of another server.
fn shell(line: &str, folder: &Path) -> Command {
    let mut command = Command::new("sh");
    // The shell becomes the program, which gets the test's signal.
    command.args(["-c", &format!("exec {line}")]).current_dir(folder).env("PATH", pages::path());
    for name in ["LOCKSTEP_SERVER", "LOCKSTEP_TOKEN", "LOCKSTEP_TOKEN_FILE", "LOCKSTEP_CA_FILE"] {
        command.env_remove(name);
    }
    command
}

/// The commands that the page offers to copy.
fn commands(page: &str) -> Vec<String> {
    let parts = page.split("data-copy=\"").skip(1).filter_map(|rest| rest.split_once('"'));
    parts.map(|(text, _)| text.replace("&#62;", ">").replace("&#39;", "'").replace("&#38;", "&")).collect()
}

async fn text(client: &reqwest::Client, url: &str) -> String {
    let result = client.get(url).header("accept", "text/html").send().await;
    match result {
        Ok(response) => response.text().await.unwrap_or_default(),
        Err(_) => String::new(),
    }
}

#[tokio::test]
async fn the_page_s_commands_add_a_machine_over_tls_with_a_token() {
    let (here, there, port) = (Folder::new(), Folder::new(), free_port());
    let mut serve = lockstep();
    let listen = format!("0.0.0.0:{port}");
    serve.args(["serve", "--listen", &listen, "--data-dir", "the data", "--tls-own-ca", "--no-local-agent"]);
    serve.current_dir(here.path()).stdout(Stdio::null()).stderr(Stdio::null());
    let _serve = Terminated(serve.spawn().expect("lockstep serve"));
    let (ca, token) = (here.path().join("the data/ca/ca.crt"), here.path().join("the data/token"));
    wait_until("the server starts", || ca.exists() && token.exists(), String::new).await;
    let tls = lockstep_worker::tls::client_config(Some(&ca)).expect("the CA certificate");
    let bearer = format!("Bearer {}", fs::read_to_string(&token).expect("its token").trim());
    let headers = [("authorization".parse().expect("a name"), bearer.parse().expect("a value"))];
    let client = reqwest::Client::builder().tls_backend_preconfigured((*tls).clone());
    let client = client.default_headers(headers.into_iter().collect()).build().expect("a client");
    let url = format!("https://127.0.0.1:{port}/machines");
    let start = Instant::now();
    let page = loop {
        let page = text(&client, &url).await;
        if page.contains("Join a machine") {
            break page;
        }
        assert!(start.elapsed() < TIMEOUT, "the page is not ready: {page}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let lines = commands(&page);
    assert_eq!(lines.len(), 3, "commands for CA, token and agent: {lines:?}");
    assert!(!lines[2].contains("127.0.0.1"), "not a loopback address: {lines:?}");
    for line in &lines[..2] {
        let done = shell(line, here.path()).output().expect("a shell");
        assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
    }
    for file in ["lockstep-ca.crt", "node-1.token"] {
        assert!(page.contains(file), "the page names {file}");
        fs::copy(here.path().join(file), there.path().join(file)).expect("a copy");
    }
    let log = fs::File::create(there.path().join("agent.log")).expect("a log");
    let agent = shell(&lines[2], there.path()).stdout(Stdio::null()).stderr(log).spawn();
    let _agent = Terminated(agent.expect("an agent"));
    loop {
        let page = text(&client, &url).await;
        if page.contains("<h2>node-1</h2>") && page.contains("online") {
            break;
        }
        let log = fs::read_to_string(there.path().join("agent.log")).unwrap_or_default();
        assert!(start.elapsed() < 2 * TIMEOUT, "{}: {log}", lines[2]);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
