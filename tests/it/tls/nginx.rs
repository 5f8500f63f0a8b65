//! nginx with the configuration of docs/team.md.

use super::serve::{Serve, ca, listens};
use crate::{
    pictures,
    server::{Folder, TIMEOUT, Terminated, free_port, lockstep, training_permit},
    specs,
};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Starts nginx at `port` as a proxy of the server's port, with the folder's `NAME.crt` and `NAME.key`. `changes`: texts of the page's
/// configuration and their replacements.
pub(super) async fn start_nginx(
    folder: &Path,
    name: &str,
    port: u16,
    server_port: u16,
    changes: &[(&str, &str)],
) -> Terminated {
    let path = folder.join("nginx.conf");
    fs::write(&path, config(folder, name, port, server_port, changes)).expect("a file");
    let log = fs::File::create(folder.join("nginx.log")).expect("a log");
    let mut command = Command::new("nginx");
    command.arg("-p").arg(folder).arg("-c").arg(&path).arg("-e").arg("stderr").stderr(log);
    let nginx = Terminated(command.spawn().expect("nginx, which tests/run installs"));
    let start = Instant::now();
    while !listens(port).await {
        let log = fs::read_to_string(folder.join("nginx.log")).unwrap_or_default();
        assert!(start.elapsed() < TIMEOUT, "{log}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    nginx
}

/// The page's configuration with this machine's values, and the settings that nginx needs without root. Each replaced text must occur
/// exactly once.
fn config(folder: &Path, name: &str, port: u16, server_port: u16, changes: &[(&str, &str)]) -> String {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/team.md"));
    let page = page.expect("the page");
    let (_, block) = page.split_once("```nginx\n").expect("a block for nginx");
    let mut block = block.split("```").next().expect("the end of the block").to_owned();
    let dir = folder.display();
    let values = [
        ("listen 443 ssl;", format!("listen 127.0.0.1:{port} ssl;")),
        ("server_name lockstep.example.org;", format!("server_name {name};")),
        ("/etc/letsencrypt/live/lockstep.example.org/fullchain.pem", format!("{dir}/{name}.crt")),
        ("/etc/letsencrypt/live/lockstep.example.org/privkey.pem", format!("{dir}/{name}.key")),
        ("http://127.0.0.1:7070", format!("http://127.0.0.1:{server_port}")),
    ];
    for (text, value) in values.iter().map(|(a, b)| (*a, b.as_str())).chain(changes.iter().copied()) {
        assert_eq!(block.matches(text).count(), 1, "docs/team.md must have exactly once: {text}");
        block = block.replace(text, value);
    }
    format!(
        "daemon off; master_process off; error_log stderr; pid {dir}/nginx.pid;
         events {{ worker_connections 256; }}
         http {{
           access_log off;
           client_body_temp_path {dir}; proxy_temp_path {dir}; fastcgi_temp_path {dir}; uwsgi_temp_path {dir};
           scgi_temp_path {dir};
           {block}
         }}"
    )
}

#[tokio::test]
async fn an_agent_trains_and_a_command_follows_its_job_through_nginx() {
    let _permit = training_permit().await;
    let (folder, port) = (Folder::new(), free_port());
    for args in [&["init"][..], &["issue", "localhost"]] {
        ca(folder.path(), args).ok();
    }
    let authority = folder.path().join("lockstep-data/ca/ca.crt");
    let url = format!("https://localhost:{port}");
    let options = ["--no-local-agent", "--trusted-proxy", "127.0.0.1", "--public-url", &url];
    let serve = Serve::start_in(folder, &options, listens).await;
    let _nginx = start_nginx(serve.folder.path(), "localhost", port, serve.port, &[]).await;
    let cli = |args: &[&str]| serve.cli(&url, Some(&authority), args);
    let token = cli(&["token", "create", "--scope", "agent", "--agent", "far"]);
    let token = serve.folder.write("far.token", token.ok());
    let log = fs::File::create(serve.folder.path().join("agent.log")).expect("a log");
    let mut agent = lockstep();
    agent.args(["agent", "--server", &url, "--name", "far", "--cpu-slots", "1", "--ca-file"]).arg(&authority);
    agent.arg("--token-file").arg(&token).arg("--data-dir").arg(serve.folder.path().join("far"));
    let _agent = Terminated(agent.stdout(Stdio::null()).stderr(log).spawn().expect("an agent"));
    let start = Instant::now();
    while !cli(&["machine", "list"]).ok().contains("online") {
        assert!(start.elapsed() < TIMEOUT, "{}", serve.log());
    }
    let dataset = pictures::idx_dataset(serve.folder.path(), 40, 20);
    cli(&["dataset", "add", "pictures", dataset.to_str().expect("UTF-8")]).ok();
    let spec = toml::to_string(&specs::short("far-away", "pictures", 1, 20)).expect("a job");
    serve.folder.write("job.toml", spec);
    // The command reads the job's stream.
    cli(&["submit", "job.toml", "--watch"]).assert_prints(&["succeeded"]);
}
