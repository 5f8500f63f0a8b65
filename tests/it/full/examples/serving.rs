//! Examples that start a server, or an agent that joins over TLS. They run as written except for the port, other machines' addresses and
//! disks that do not exist.

use crate::{
    artifacts::bucket::Bucket,
    server::{Finished, TIMEOUT, free_port, lockstep, signal},
    tls::serve::{client_config_for, listens},
};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// URLs of the team's server on the pages.
const SERVERS: [&str; 3] = ["https://machine:7070", "https://127.0.0.1:7070", "https://10.0.0.5:7070"];
const SERVE_COMMAND: &str = "lockstep serve --listen 0.0.0.0:7070 --tls-own-ca";

/// The last server that an example has started, with its data in `lockstep-data`.
pub(super) struct Serving {
    folder: PathBuf,
    process: Option<Child>,
    /// The bucket of an example that stores checkpoints in S3.
    bucket: Option<Bucket>,
    port: u16,
    has_own_ca: bool,
}

impl Serving {
    /// Writes the files that examples of `serve` need: a certificate with its key, and the secret of an OpenID provider.
    pub(super) fn new(folder: &Path) -> Self {
        let ca = |args: &[&str]| {
            let mut command = lockstep();
            Finished::of(command.arg("ca").args(args).args(["--data-dir", "elsewhere"]).current_dir(folder))
                .ok();
        };
        ca(&["init"]);
        ca(&["issue", "lockstep.example.org"]);
        for (from, to) in [("crt", "fullchain.pem"), ("key", "privkey.pem")] {
            let from = folder.join(format!("lockstep.example.org.{from}"));
            fs::rename(from, folder.join(to)).expect("a certificate and its key");
        }
        let secret = folder.join("oidc.secret");
        fs::write(&secret, "of the provider").expect("a file");
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).expect("a mode");
        Self { folder: folder.to_owned(), process: None, bucket: None, port: 0, has_own_ca: false }
    }

    /// Whether [`Serving::run`] runs a line, instead of a shell.
    pub(super) fn runs(line: &str) -> bool {
        line.starts_with("lockstep serve") || line.starts_with("lockstep agent --server https://")
    }

    pub(super) async fn run(&mut self, line: &str) {
        if line.starts_with("lockstep serve") {
            self.start(line).await;
        } else {
            self.join(line).await;
        }
    }

    /// Replaces the team's server in a line by the server that runs here. `None` if the line does not name that server.
    pub(super) async fn localize(&mut self, line: &str) -> Option<String> {
        let named = SERVERS.iter().find(|server| line.contains(**server))?;
        if !self.has_own_ca {
            self.start(SERVE_COMMAND).await;
        }
        // The page tells clients to save the CA certificate.
        fs::copy(self.ca(), self.folder.join("home/lockstep-ca.crt")).expect("the CA certificate");
        Some(line.replace(named, &format!("https://127.0.0.1:{}", self.port)))
    }

    pub(super) fn token_file(&self) -> PathBuf {
        self.folder.join("lockstep-data/token")
    }

    fn ca(&self) -> PathBuf {
        self.folder.join("lockstep-data/ca/ca.crt")
    }

    async fn start(&mut self, line: &str) {
        self.stop();
        self.port = free_port();
        self.has_own_ca = line.contains("--tls-own-ca");
        let port = format!(":{}", self.port);
        let typed = line.split(" # ").next().expect("a command").replace(":7070", &port);
        let typed = typed.replace("/etc/lockstep/oidc.secret", "oidc.secret");
        // Postgres and the bucket of the pages do not exist.
        let typed = typed.replace("--database postgres://lockstep@db/lockstep", "");
        let mut typed = typed.replace("/mnt/other-disk/artifacts", "artifacts");
        let mut environment = Vec::new();
        if typed.contains("s3://weights/lockstep") {
            environment = self.bucket.insert(Bucket::new().await).environment();
            let index =
                environment.iter().position(|(name, _)| name == "LOCKSTEP_ARTIFACTS").expect("an address");
            typed = typed.replace("s3://weights/lockstep", &environment.remove(index).1);
        }
        let mut words: Vec<_> = typed.split_whitespace().skip(1).collect();
        let listen = format!("127.0.0.1{port}");
        if !words.contains(&"--listen") {
            words.extend(["--listen", &listen]);
        }
        let path = self.folder.join("serving.log");
        let log = File::create(&path).expect("a log");
        let mut command = lockstep();
        command.args(&words).current_dir(&self.folder).envs(environment);
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        let process = self.process.insert(command.spawn().expect("lockstep serve"));
        let read_log = || fs::read_to_string(&path).unwrap_or_default();
        let start = Instant::now();
        while !(read_log().contains("sign in: ") && listens(self.port).await) {
            let ended = process.try_wait().expect("its status");
            assert!(ended.is_none() && start.elapsed() < TIMEOUT, "{line}: {ended:?}: {}", read_log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if let Some(index) = words.iter().position(|word| *word == "--public-url") {
            let link = format!("sign in: {}/login?code=", words[index + 1]);
            assert!(read_log().contains(&link), "{line}: no {link}: {}", read_log());
        }
        let scheme = if line.contains("--tls") { "https" } else { "http" };
        let url = format!("{scheme}://127.0.0.1:{}/readyz", self.port);
        let response = Command::new("curl").args(["-sSk", &url]).output().expect("curl");
        let text = String::from_utf8_lossy(&response.stdout).into_owned();
        assert!(text.starts_with("ready\n"), "{line}: {text}{}", String::from_utf8_lossy(&response.stderr));
    }

    /// Runs an agent as on another machine: in a folder with copies of the files that the line names.
    async fn join(&mut self, line: &str) {
        let typed = self.localize(line).await.expect("a server's address");
        let disk = format!("{}/", self.folder.join("nvme").display());
        let typed = typed.split(" # ").next().expect("a command").replace("/nvme/", &disk);
        self.issue(line);
        let words: Vec<_> = typed.split_whitespace().skip(1).collect();
        let name = if line.contains("node-1") { "node-1" } else { "node-a" };
        let machine = self.folder.join(format!("machine-of-{name}"));
        fs::create_dir_all(&machine).expect("a folder");
        for file in words.iter().filter(|word| self.folder.join(word).is_file()) {
            fs::copy(self.folder.join(file), machine.join(file)).expect("a copy");
        }
        let log = File::create(machine.join("agent.log")).expect("a log");
        let mut command = lockstep();
        command.args(&words).current_dir(&machine).stdout(Stdio::null()).stderr(log);
        let mut agent = command.spawn().expect("an agent");
        let start = Instant::now();
        while !self.has_joined().await {
            let log = fs::read_to_string(machine.join("agent.log")).unwrap_or_default();
            assert!(start.elapsed() < TIMEOUT, "{line}: the agent does not join: {log}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        signal(agent.id() as i32, Signal::TERM);
        agent.wait().expect("its status");
        while self.has_joined().await {
            assert!(start.elapsed() < 2 * TIMEOUT, "{line}: the agent stays online");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Creates the token or certificate of a line's agent. Earlier blocks created the token on another server, and revoked the certificate.
    fn issue(&self, line: &str) {
        if line.contains("node-a.token") {
            let args = ["token", "create", "--name", "node-a", "--scope", "agent", "--agent", "node-a"];
            let mut command = lockstep();
            command
                .args(args)
                .env("LOCKSTEP_TOKEN_FILE", self.token_file())
                .env("LOCKSTEP_CA_FILE", self.ca());
            command.env("LOCKSTEP_SERVER", format!("https://127.0.0.1:{}", self.port));
            fs::write(self.folder.join("node-a.token"), Finished::of(&mut command).ok()).expect("a token");
        }
        if line.contains("node-a.crt") {
            for file in ["node-a.crt", "node-a.key"] {
                let _ = fs::remove_file(self.folder.join(file));
            }
            let mut command = lockstep();
            Finished::of(command.args(["ca", "issue", "node-a", "--agent"]).current_dir(&self.folder)).ok();
        }
    }

    /// Whether an agent other than the server's own is online.
    async fn has_joined(&self) -> bool {
        let client =
            reqwest::Client::builder().tls_backend_preconfigured((*client_config_for(&self.ca())).clone());
        let token = fs::read_to_string(self.token_file()).expect("the server's token");
        let url = format!("https://127.0.0.1:{}/api/v1/agents", self.port);
        let request = client.build().expect("a client").get(url).bearer_auth(token.trim());
        let response: Value = request.send().await.expect("a response").json().await.expect("JSON");
        let agents = response["agents"].as_array().expect("agents");
        agents.iter().any(|agent| agent["online"] == true && agent["name"] != "local")
    }

    pub(super) fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            signal(process.id() as i32, Signal::TERM);
            let status = process.wait().expect("its status");
            assert!(status.success() || std::thread::panicking(), "serve ended with {status}");
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop();
    }
}
