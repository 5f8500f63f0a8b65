//! A real server on a free port with a data directory of its own, gone with all its processes when
//! the test ends; its logs are shown when the test fails.

use lockstep_protocol::JobState;
use reqwest::{Method, StatusCode};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::sync::{Mutex, MutexGuard};

/// The program under test.
pub(crate) const LOCKSTEP: &str = env!("CARGO_BIN_EXE_lockstep");

/// Longest wait for anything that should take a moment. Generous: a busy machine is no bug.
pub(crate) const SOON: Duration = Duration::from_secs(30);
/// Longest wait for a job of these tests to end.
pub(crate) const JOB_END: Duration = Duration::from_secs(120);

static TURN: Mutex<()> = Mutex::const_new(());

/// Held by a test that trains: one at a time.
pub(crate) async fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().await
}

/// A port that nothing listens on, outside the range from which the system gives ports to clients.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 21_000 + (std::process::id() % 10_000) as u16;
    (0..10_000)
        .map(|_| 21_000 + (first - 21_000 + NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000)
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("one of 10 000 ports is free")
}

/// The program, on nobody's terminal, with no environment of the person who runs the tests.
pub(crate) fn lockstep() -> Command {
    let mut command = Command::new(LOCKSTEP);
    command.stdin(Stdio::null());
    for name in [
        "LOCKSTEP_DATABASE",
        "LOCKSTEP_SERVER",
        "LOCKSTEP_TOKEN",
        "LOCKSTEP_LOG",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
    ] {
        command.env_remove(name);
    }
    command
}

/// Who runs the jobs of a server.
#[derive(Clone, Copy)]
pub(crate) enum Agents {
    /// The machine's own agent, which `serve` starts.
    Local { cpu_slots: u32 },
    /// `serve --no-local-agent`, and an agent somebody else starts.
    Beside { cpu_slots: u32 },
    /// `serve --no-local-agent` and nobody.
    None,
}

/// A process of ours that is alive.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) args: Vec<String>,
}

impl Process {
    /// `serve`, `agent`, `rank`.
    pub(crate) fn command(&self) -> &str {
        self.args.get(1).map_or("", String::as_str)
    }

    /// The value after an option such as `--rank`.
    pub(crate) fn option(&self, name: &str) -> Option<&str> {
        self.args.iter().skip_while(|a| *a != name).nth(1).map(String::as_str)
    }
}

/// Sends a signal; a process that is gone already is fine.
pub(crate) fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

/// Processes with `folder` in their arguments. Everything that Lockstep starts names its data
/// directory or a file in it, so this finds agents and ranks in whatever process group.
pub(crate) fn processes_of(folder: &Path) -> Vec<Process> {
    let folder = folder.to_string_lossy();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| {
            let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let args: Vec<_> = line
                .split(|b| *b == 0)
                .filter(|a| !a.is_empty())
                .map(|a| String::from_utf8_lossy(a).into_owned())
                .collect();
            let ours = args.first().is_some_and(|a| a.ends_with("lockstep"))
                && args.iter().any(|a| a.contains(&*folder));
            ours.then_some(Process { pid, args })
        })
        .collect()
}

/// A folder of a test, with every process that names it killed when it goes.
pub(crate) struct Folder {
    /// Without symbolic links, as processes name it.
    path: PathBuf,
    _made: TempDir,
}

impl Folder {
    pub(crate) fn new() -> Self {
        let made = tempfile::Builder::new().prefix("lockstep-it-").tempdir().expect("a temporary folder");
        Self { path: made.path().canonicalize().expect("its path"), _made: made }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file and returns its path.
    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        fs::write(&path, content).expect("a file");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let until = Instant::now() + Duration::from_secs(10);
        // Again and again: an agent may be starting a rank just now.
        loop {
            let left = processes_of(self.path());
            left.iter().for_each(|p| signal(p.pid, Signal::KILL));
            if left.is_empty() || Instant::now() > until {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if std::thread::panicking() {
            show_logs(self.path(), self.path());
        }
    }
}

/// The last lines of every log below `folder`, on standard error.
fn show_logs(root: &Path, folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut paths: Vec<_> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            show_logs(root, &path);
        } else if path.extension().is_some_and(|e| e == "log" || e == "stderr") {
            let text = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
            let lines: Vec<_> = text.lines().collect();
            let tail = &lines[lines.len().saturating_sub(40)..];
            let name = path.strip_prefix(root).unwrap_or(&path).display();
            eprintln!("--- {name}\n{}", tail.join("\n"));
        }
    }
}

/// A running server.
pub(crate) struct Server {
    /// `http://127.0.0.1:PORT`.
    pub(crate) url: String,
    pub(crate) http: reqwest::Client,
    port: u16,
    agents: Agents,
    /// `--database`, when it is not the data directory's own file.
    pub(crate) database: Option<String>,
    /// Variables of the server's environment, and so of its agent's and their ranks'.
    pub(crate) environment: Vec<(String, String)>,
    /// Program and arguments that `lockstep serve` is started by (`prlimit`), when it is not started directly.
    by: Vec<String>,
    serve: Option<Child>,
    agent: Option<Child>,
    starts: u32,
    // Last: dropped after the children above.
    folder: Folder,
}

impl Server {
    /// A server with the machine's own agent and two slots, whatever the number of cores.
    pub(crate) async fn start() -> Self {
        Self::start_with(Agents::Local { cpu_slots: 2 }).await
    }

    pub(crate) async fn start_with(agents: Agents) -> Self {
        let database = crate::postgres::wanted().then(crate::postgres::database);
        Self::start_on(agents, database, Vec::new()).await
    }

    pub(crate) async fn start_on(
        agents: Agents,
        database: Option<String>,
        environment: Vec<(String, String)>,
    ) -> Self {
        Self::start_by(agents, database, environment, &[], |_| {}).await
    }

    /// As [`Server::start_on`], through another program; `prepare` is given the data directory before it is used.
    pub(crate) async fn start_by(
        agents: Agents,
        database: Option<String>,
        environment: Vec<(String, String)>,
        by: &[&str],
        prepare: impl FnOnce(&Path),
    ) -> Self {
        let port = free_port();
        let mut server = Self {
            url: format!("http://127.0.0.1:{port}"),
            http: reqwest::Client::builder().timeout(SOON).build().expect("an HTTP client"),
            port,
            agents,
            database,
            environment,
            by: by.iter().map(ToString::to_string).collect(),
            serve: None,
            agent: None,
            starts: 0,
            folder: Folder::new(),
        };
        prepare(&server.data_dir());
        server.serve_again().await;
        if let Agents::Beside { cpu_slots } = agents {
            server.start_agent(cpu_slots).await;
        }
        if !matches!(agents, Agents::None) {
            server.until("an agent is online", async |s: &Server| s.slots().await > 0).await;
        }
        server
    }

    /// Starts `serve` on the same port and data directory, and waits until it is ready.
    pub(crate) async fn serve_again(&mut self) {
        self.starts += 1;
        let log = File::create(self.folder.path().join(format!("serve.{}.log", self.starts))).expect("a log");
        let mut command = lockstep();
        if let [program, arguments @ ..] = &self.by[..] {
            let direct = std::mem::replace(&mut command, Command::new(program));
            command.args(arguments).arg(direct.get_program()).stdin(Stdio::null());
            for (name, value) in direct.get_envs() {
                match value {
                    Some(value) => command.env(name, value),
                    None => command.env_remove(name),
                };
            }
        }
        command.args(["serve", "--listen", &format!("127.0.0.1:{}", self.port), "--data-dir"]);
        command.arg(self.data_dir()).current_dir(self.folder.path());
        command.envs(self.environment.iter().cloned());
        if let Some(url) = &self.database {
            command.args(["--database", url]);
        }
        match self.agents {
            Agents::Local { cpu_slots } => command.args(["--cpu-slots", &cpu_slots.to_string()]),
            Agents::Beside { .. } | Agents::None => command.arg("--no-local-agent"),
        };
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        self.serve = Some(command.spawn().expect("lockstep serve starts"));
        let deadline = Instant::now() + SOON;
        loop {
            if let Ok(answer) = self.http.get(format!("{}/readyz", self.url)).send().await
                && answer.status() == StatusCode::OK
            {
                return;
            }
            let ended = self.serve.as_mut().and_then(|c| c.try_wait().ok().flatten());
            assert!(ended.is_none(), "serve ended before it was ready: {ended:?}");
            assert!(Instant::now() < deadline, "/readyz did not answer 200 within {SOON:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Starts an agent beside the server, with its own folder.
    pub(crate) async fn start_agent(&mut self, cpu_slots: u32) {
        let url = self.url.clone();
        self.start_agent_at(&url, cpu_slots, &[]);
    }

    /// As [`Server::start_agent`], by another address of the server and with more options.
    pub(crate) fn start_agent_at(&mut self, url: &str, cpu_slots: u32, options: &[&str]) {
        self.starts += 1;
        let log = File::create(self.folder.path().join(format!("agent.{}.log", self.starts))).expect("a log");
        let mut command = lockstep();
        command.args(["agent", "--server", url, "--name", "beside"]).args(options).arg("--cpu-slots");
        command.arg(cpu_slots.to_string()).arg("--data-dir").arg(self.folder.path().join("agent-beside"));
        command.current_dir(self.folder.path());
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        self.agent = Some(command.spawn().expect("lockstep agent starts"));
    }

    /// A folder for files of the test, above the data directory.
    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    pub(crate) fn job_dir(&self, id: &str) -> PathBuf {
        self.data_dir().join("jobs").join(id)
    }

    /// Slots of all machines that are online.
    pub(crate) async fn slots(&self) -> usize {
        let answer = self.get("/agents").await;
        let agents = answer["agents"].as_array().expect("agents");
        agents
            .iter()
            .filter(|a| a["online"].as_bool().unwrap_or(true))
            .map(|a| a["slots"].as_array().map_or(0, Vec::len))
            .sum()
    }

    /// Waits for a condition, looking often.
    pub(crate) async fn until(&self, what: &str, condition: impl AsyncFn(&Server) -> bool) {
        let deadline = Instant::now() + SOON;
        while !condition(self).await {
            assert!(Instant::now() < deadline, "not within {SOON:?}: {what}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    // REST

    /// The whole address of a path under `/api/v1`.
    pub(crate) fn api(&self, path: &str) -> String {
        format!("{}/api/v1{path}", self.url)
    }

    pub(crate) async fn request(&self, method: Method, path: &str, body: Option<&Value>) -> Answer {
        let mut request = self.http.request(method, self.api(path));
        if let Some(body) = body {
            request = request.json(body);
        }
        Answer::read(request.send().await.expect("an answer")).await
    }

    /// What a GET of a path that exists answers.
    pub(crate) async fn get(&self, path: &str) -> Value {
        let answer = self.request(Method::GET, path, None).await;
        assert_eq!(answer.status, StatusCode::OK, "GET {path}: {}", answer.text);
        answer.json()
    }

    /// The bytes of a file.
    pub(crate) async fn bytes(&self, path: &str) -> Vec<u8> {
        let answer = self.http.get(self.api(path)).send().await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::OK, "GET {path}");
        answer.bytes().await.expect("a body").to_vec()
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.request(Method::POST, path, Some(body)).await
    }

    /// Registers a dataset under a name.
    pub(crate) async fn register(&self, name: &str, path: &Path) {
        let answer = self.post("/datasets", &json!({"name": name, "path": path})).await;
        assert_eq!(answer.status, StatusCode::CREATED, "registering {name}: {}", answer.text);
    }

    /// Submits a job that must be accepted; its id.
    pub(crate) async fn submit(&self, spec: &Value) -> String {
        let answer = self.post("/jobs", spec).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.text);
        answer.json()["id"].as_str().expect("an id").to_owned()
    }

    pub(crate) async fn job(&self, id: &str) -> Value {
        self.get(&format!("/jobs/{id}")).await
    }

    /// The job as soon as `condition` holds; panics when it ends without, or takes too long.
    pub(crate) async fn job_when(&self, id: &str, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + JOB_END;
        loop {
            let job = self.job(id).await;
            if condition(&job) {
                return job;
            }
            assert!(!state_of(&job).is_final(), "{id} ended and never: {what}; it is {job:#}");
            assert!(Instant::now() < deadline, "not within {JOB_END:?}: {what}; the job is {job:#}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The job once it is over.
    pub(crate) async fn ended(&self, id: &str) -> Value {
        self.job_when(id, "the job is over", |job| state_of(job).is_final()).await
    }

    /// The job, which must succeed.
    pub(crate) async fn succeeded(&self, id: &str) -> Value {
        let job = self.ended(id).await;
        assert_eq!(job["state"], "succeeded", "{job:#}");
        job
    }

    /// Checkpoints of a job as listed.
    pub(crate) async fn checkpoints(&self, id: &str) -> Vec<Value> {
        let answer = self.get(&format!("/jobs/{id}/checkpoints")).await;
        answer["checkpoints"].as_array().expect("checkpoints").clone()
    }

    /// `model.safetensors` of the checkpoint of the last step.
    pub(crate) async fn last_model(&self, id: &str) -> Vec<u8> {
        let checkpoints = self.checkpoints(id).await;
        let last = checkpoints.iter().max_by_key(|c| c["step"].as_u64()).expect("a checkpoint");
        let checkpoint = last["id"].as_str().expect("an id");
        self.bytes(&format!("/checkpoints/{checkpoint}/model.safetensors")).await
    }

    /// Every point of one metric: (attempt, rank, step, value), sorted.
    pub(crate) async fn points(&self, id: &str, name: &str) -> Vec<(u64, u64, u64, f64)> {
        let answer = self.get(&format!("/jobs/{id}/metrics?name={name}&points=10000")).await;
        assert_eq!(answer["exact"], true, "{name} of {id} fits in 10000 points");
        let mut points = Vec::new();
        for series in answer["series"].as_array().expect("series") {
            assert_eq!(series["name"], name);
            let list =
                |key: &str| series[key].as_array().unwrap_or_else(|| panic!("{key} of {series}")).clone();
            let (attempt, rank) = (number(&series["attempt"]), number(&series["rank"]));
            assert_eq!(list("min"), list("mean"));
            assert_eq!(list("max"), list("mean"));
            assert_eq!(list("steps").len(), list("mean").len());
            for (step, value) in list("steps").iter().zip(list("mean")) {
                points.push((attempt, rank, number(step), value.as_f64().expect("a finite value")));
            }
        }
        points.sort_by_key(|p| (p.0, p.1, p.2));
        points
    }

    // The command line

    /// Runs a client command against this server, to its end.
    pub(crate) fn cli(&self, args: &[&str]) -> Finished {
        let mut command = lockstep();
        command.args(args).env("LOCKSTEP_SERVER", &self.url).current_dir(self.folder.path());
        Finished::of(&mut command)
    }

    // Processes

    /// Every living process of this server: itself, agents, ranks.
    pub(crate) fn processes(&self) -> Vec<Process> {
        processes_of(self.folder.path())
    }

    /// Rank processes of a job, as (rank, process).
    pub(crate) fn ranks(&self, id: &str) -> Vec<(u32, Process)> {
        let mut ranks: Vec<_> = self
            .processes()
            .into_iter()
            .filter(|p| p.command() == "rank" && p.option("--job") == Some(id))
            .map(|p| (p.option("--rank").and_then(|r| r.parse().ok()).expect("a rank"), p))
            .collect();
        ranks.sort_by_key(|(rank, _)| *rank);
        ranks
    }

    /// As a power cut would, but for the agents and ranks.
    pub(crate) fn kill_serve(&mut self) {
        let mut serve = self.serve.take().expect("a server");
        serve.kill().expect("SIGKILL");
        serve.wait().expect("its status");
    }

    /// Waits until the server has died by itself; false when it does not within `patience`.
    pub(crate) async fn serve_died(&mut self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            if self.serve.as_mut().is_none_or(|serve| serve.try_wait().is_ok_and(|status| status.is_some())) {
                self.serve = None;
                return true;
            }
            if Instant::now() > deadline {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Ctrl-C or SIGTERM, as a person or a service manager gives it; the exit status.
    pub(crate) async fn end_serve(&mut self, with: Signal) -> ExitStatus {
        let mut serve = self.serve.take().expect("a server");
        signal(serve.id() as i32, with);
        ended(&mut serve).await
    }

    /// The agent that was started beside the server.
    pub(crate) fn agent_beside(&self) -> Option<i32> {
        self.agent.as_ref().map(|child| child.id() as i32)
    }

    /// As `kill -9` of the agent that was started beside the server.
    pub(crate) fn kill_agent(&mut self) {
        let mut agent = self.agent.take().expect("an agent");
        agent.kill().expect("SIGKILL");
        agent.wait().expect("its status");
    }

    /// Stops everything in order (SIGTERM to the server) and asserts that no process is left.
    pub(crate) async fn stop(self) {
        drop(self.stop_and_keep().await);
    }

    /// As [`Server::stop`]; the files stay as long as the value.
    pub(crate) async fn stop_and_keep(mut self) -> Self {
        for mut child in [self.agent.take(), self.serve.take()].into_iter().flatten() {
            signal(child.id() as i32, Signal::TERM);
            let status = ended(&mut child).await;
            assert_eq!(status.code(), Some(0), "an orderly stop ends with exit status 0, not {status}");
        }
        self.until("no process is left after an orderly stop", async |s: &Server| s.processes().is_empty())
            .await;
        self
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for child in [&mut self.serve, &mut self.agent].into_iter().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The exit status of a child that ends soon.
pub(crate) async fn ended(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(status) = child.try_wait().expect("a status") {
            return status;
        }
        assert!(Instant::now() < deadline, "process {} did not end within {SOON:?}", child.id());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The state that a job or a state event names.
pub(crate) fn state_of(value: &Value) -> JobState {
    value["state"].as_str().and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("no state in {value:#}"))
}

/// A whole number in JSON.
pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no whole number: {value}"))
}

/// An answer over HTTP, read to its end.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: reqwest::header::HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) async fn read(answer: reqwest::Response) -> Self {
        let (status, headers) = (answer.status(), answer.headers().clone());
        Self { status, headers, text: answer.text().await.expect("a body") }
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or("")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("no JSON ({e}): {}", self.text))
    }

    /// Asserts an RFC 9457 problem of this status; returns it.
    pub(crate) fn problem(&self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        assert!(
            self.header("content-type").starts_with("application/problem+json"),
            "{status} as {:?}: {}",
            self.header("content-type"),
            self.text
        );
        let problem = self.json();
        assert_eq!(problem["status"], status, "{problem:#}");
        assert!(problem["title"].as_str().is_some_and(|t| !t.is_empty()), "{problem:#}");
        problem
    }

    /// Asserts a 422 whose `errors` hold exactly one for each of these (JSON pointer, words in its
    /// detail), in any order.
    pub(crate) fn mistakes(&self, expected: &[(&str, &[&str])]) {
        let problem = self.problem(422);
        let errors = problem["errors"].as_array().unwrap_or_else(|| panic!("no errors in {problem:#}"));
        for (pointer, words) in expected {
            let found = errors.iter().find(|e| {
                e["pointer"] == *pointer
                    && words.iter().all(|w| e["detail"].as_str().is_some_and(|d| d.contains(w)))
            });
            assert!(found.is_some(), "no mistake at {pointer} that says {words:?} in {problem:#}");
        }
        assert_eq!(errors.len(), expected.len(), "{problem:#}");
    }
}

/// A command that has ended.
pub(crate) struct Finished {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Finished {
    pub(crate) fn of(command: &mut Command) -> Self {
        let Output { status, stdout, stderr } = command.output().expect("lockstep runs");
        Self {
            status: status.code().unwrap_or(-1),
            stdout: String::from_utf8(stdout).expect("UTF-8"),
            stderr: String::from_utf8(stderr).expect("UTF-8"),
        }
    }

    /// Asserts exit status 0; its standard output.
    pub(crate) fn ok(&self) -> &str {
        assert_eq!(self.status, 0, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        &self.stdout
    }

    /// Its standard output as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(self.ok()).unwrap_or_else(|e| panic!("no JSON ({e}): {}", self.stdout))
    }

    /// Asserts exit status 2 and these words on standard error, with no Rust panic in it.
    pub(crate) fn wrong(&self, words: &[&str]) {
        self.fails(2, words);
    }

    /// Asserts an exit status and words on standard error.
    pub(crate) fn fails(&self, status: i32, words: &[&str]) {
        assert_eq!(self.status, status, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "standard error lacks {word:?}:\n{}", self.stderr);
        }
    }
}
