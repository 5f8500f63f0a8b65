//! A simulated Kubernetes API server and Job controller (`kubernetes/api.py`). Pods are processes in their own namespaces.

use super::program;
use crate::{
    pages,
    server::{Finished, Server, TIMEOUT, free_port, lockstep, signal},
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

const TOKEN: &str = "of-the-person-who-launches";
pub(crate) const NAMESPACE: &str = "vision";

pub(crate) struct Kubernetes {
    folder: PathBuf,
    port: u16,
    process: Child,
}

/// A pod template. The simulation ignores the image.
pub(crate) const POD: &str = "kind: Pod\nmetadata:\n  labels: {team: vision}\nspec:\n  terminationGracePeriodSeconds: 40\n  containers:\n  - {name: agent, image: 'lockstep:latest'}\n";

impl Kubernetes {
    /// Starts a cluster whose pods cannot see the server's data directory. Launches have the rights of `launch-role.yaml`.
    pub(crate) async fn start(server: &Server) -> Self {
        Self::start_with(server, &rules()).await
    }

    pub(crate) async fn start_with(server: &Server, rules: &Value) -> Self {
        let folder = server.folder().path().join("kubernetes");
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join("role.json"), rules.to_string()).expect("a role");
        let port = free_port();
        // The user signs in with a credential program, as on most clusters.
        let credential = json!({
            "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": TOKEN},
        });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "other",
            "clusters": [
                {"name": "test", "cluster": {"server": format!("http://127.0.0.1:{port}")}},
                {"name": "nowhere", "cluster": {"server": "http://127.0.0.1:1"}},
            ],
            "users": [{"name": "me", "user": {"exec": {
                "apiVersion": "client.authentication.k8s.io/v1", "command": "echo", "args": [credential.to_string()],
                "interactiveMode": "Never",
            }}}],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "me", "namespace": NAMESPACE}},
                {"name": "other", "context": {"cluster": "nowhere", "user": "me"}},
            ],
        });
        fs::write(folder.join("config"), config.to_string()).expect("a configuration");
        fs::write(folder.join("pod.yaml"), POD).expect("a template");
        let log = File::create(folder.join("api.log")).expect("a log");
        let api = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/cluster/kubernetes/api.py");
        let mut command = Command::new(program("python3", "python3"));
        command.arg("-B").arg(api).args([&port.to_string(), TOKEN]).arg(folder.join("role.json"));
        command.arg(server.data_dir()).arg(&folder).stdin(Stdio::null());
        let process = command.stdout(log.try_clone().expect("a log")).stderr(log).spawn().expect("python3");
        let cluster = Self { folder, port, process };
        let deadline = Instant::now() + TIMEOUT;
        while cluster.try_act("objects", &json!({})).await.is_none() {
            assert!(Instant::now() < deadline, "the API server does not respond");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        cluster
    }

    /// `lockstep launch JOB --with kubernetes`, with the template `pod.yaml` unless the arguments name another.
    pub(crate) fn launch(&self, server: &Server, job: &str, args: &[&str]) -> Command {
        let mut command = lockstep();
        command.current_dir(server.folder().path()).envs(server.client_variables());
        command.env("KUBECONFIG", self.folder.join("config"));
        command.args(["launch", job, "--with", "kubernetes", "--program"]);
        command.arg(crate::server::LOCKSTEP).args(args);
        if !args.contains(&"--context") {
            command.args(["--context", "test"]);
        }
        if !args.contains(&"--template") {
            command.arg("--template").arg(self.folder.join("pod.yaml"));
        }
        command
    }

    /// Runs a command line of a page in the repository's root, with a kubectl that is configured only for this cluster.
    pub(crate) fn run_line(&self, line: &str) -> Finished {
        let cluster =
            json!({"name": "test", "cluster": {"server": format!("http://127.0.0.1:{}", self.port)}});
        let context = json!({"name": "test", "context": {"cluster": "test", "user": ""}});
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "test", "clusters": [cluster], "contexts": [context]});
        let path = self.folder.join("admin-config");
        fs::write(&path, config.to_string()).expect("a configuration");
        let mut shell = pages::shell(line);
        Finished::of(shell.current_dir(pages::root()).env("KUBECONFIG", path).env("HOME", &self.folder))
    }

    async fn try_act(&self, action: &str, body: &Value) -> Option<Value> {
        let url = format!("http://127.0.0.1:{}/test/{action}", self.port);
        let response = crate::server::client("").post(url).json(body).send().await.ok()?;
        response.json().await.ok()
    }

    /// Runs a test action of the API server (`ACTIONS` in `api.py`).
    pub(crate) async fn act(&self, action: &str, body: Value) -> Value {
        let response = self.try_act(action, &body).await;
        response.unwrap_or_else(|| panic!("{action} does not work; see {}/api.log", self.folder.display()))
    }

    pub(crate) async fn objects(&self, kind: &str) -> Vec<Value> {
        let all = self.act("objects", json!({})).await;
        let all = all["items"].as_array().expect("objects").clone();
        all.into_iter().filter(|object| object["kind"] == kind).collect()
    }

    pub(crate) async fn until(&self, what: &str, is_so: impl Fn(&[Value]) -> bool) {
        let deadline = Instant::now() + 2 * TIMEOUT;
        loop {
            // The list is also empty if the API server is down, so it counts only if `what` says that objects are gone.
            let all = self.try_act("objects", &json!({})).await.unwrap_or_default();
            let all = all["items"].as_array().cloned().unwrap_or_default();
            if is_so(&all) && (!all.is_empty() || what.contains("gone")) {
                return;
            }
            assert!(Instant::now() < deadline, "not in time: {what}; {all:#?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// The rules of the role for launches.
pub(crate) fn rules() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kubernetes/launch-role.yaml");
    let text = fs::read_to_string(path).expect("a role");
    let all: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    all.into_iter().find(|object| object["kind"] == "Role").expect("a role")["rules"].take()
}

impl Drop for Kubernetes {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", fs::read_to_string(self.folder.join("api.log")).unwrap_or_default());
        }
        // The API server ends its pods.
        signal(self.process.id().cast_signed(), Signal::TERM);
        let _ = self.process.wait();
    }
}
