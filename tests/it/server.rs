//! A real server on a free port with a data directory of its own, gone with all its processes when
//! the test ends; its logs are shown when the test fails.

use lockstep_protocol::JobState;
use reqwest::StatusCode;
use serde_json::Value;
use std::{
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};
use tokio::sync::{Semaphore, SemaphorePermit};

// Named in full, as `tests/faults` takes this file from its own folder.
#[path = "server/answers.rs"]
mod answers;
#[path = "server/endings.rs"]
mod endings;
#[path = "server/processes.rs"]
mod processes;
#[path = "server/rest.rs"]
mod rest;

pub(crate) use answers::{Answer, Finished};
pub(crate) use processes::{Folder, Process, processes_of, signal};

/// The program under test.
pub(crate) const LOCKSTEP: &str = env!("CARGO_BIN_EXE_lockstep");

/// Longest wait for anything that should take a moment. Generous: a busy machine is no bug.
pub(crate) const SOON: Duration = Duration::from_secs(30);
/// Longest wait for a job of these tests to end.
pub(crate) const JOB_END: Duration = Duration::from_secs(120);

/// The pause before a test that has waited since `began` looks again, at most `longest`: a look costs the server and the test some of the
/// processor that the job under test needs.
pub(crate) fn poll_pause(began: Instant, longest: Duration) -> Duration {
    (began.elapsed() / 10).clamp(Duration::from_millis(10), longest)
}

/// The longest pause between two looks at what may pass.
const BRIEF: Duration = Duration::from_millis(50);

/// Tests that train at the same time.
const TURNS: u32 = 3;

static TURN: Semaphore = Semaphore::const_new(TURNS as usize);

/// Held by a test that trains.
pub(crate) async fn turn() -> SemaphorePermit<'static> {
    TURN.acquire().await.expect("turns are never closed")
}

/// Held by a test that trains and measures time: no other trains beside it.
pub(crate) async fn turn_alone() -> SemaphorePermit<'static> {
    TURN.acquire_many(TURNS).await.expect("turns are never closed")
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

/// Clients of the tests that are given no TLS settings take these.
pub(crate) fn cryptography() {
    // Only the first call of a process has an effect.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// A client without authorities of TLS: to read the system's takes longer than a request.
fn plain_client() -> reqwest::ClientBuilder {
    reqwest::Client::builder().timeout(SOON).tls_certs_only(std::iter::empty())
}

/// A client that shows a token. The server ends connections that are silent for half a minute: the client does so before.
pub(crate) fn client(token: &str) -> reqwest::Client {
    cryptography();
    let mut headers = reqwest::header::HeaderMap::new();
    headers.insert("authorization", format!("Bearer {token}").parse().expect("a header"));
    plain_client()
        .default_headers(headers)
        .pool_idle_timeout(Duration::from_secs(10))
        .build()
        .expect("an HTTP client")
}

/// The program, on nobody's terminal, with no environment of the person who runs the tests.
pub(crate) fn lockstep() -> Command {
    by_itself(Command::new(LOCKSTEP))
}

/// As [`lockstep`], as a shell at a terminal starts it: what runs in a background that ignores Ctrl-C passes that on to all it starts.
pub(crate) fn lockstep_that_can_be_interrupted() -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=INT", LOCKSTEP]);
    by_itself(command)
}

/// Without what the environment of the tests says.
fn by_itself(mut command: Command) -> Command {
    cryptography();
    command.stdin(Stdio::null());
    for name in [
        "LOCKSTEP_ARTIFACTS",
        "LOCKSTEP_DATABASE",
        "LOCKSTEP_LEASE",
        "LOCKSTEP_SMTP",
        "LOCKSTEP_SMTP_FROM",
        "LOCKSTEP_SERVER",
        "LOCKSTEP_CA_FILE",
        "LOCKSTEP_TOKEN",
        "LOCKSTEP_TOKEN_FILE",
        "LOCKSTEP_LOG",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
    ] {
        command.env_remove(name);
    }
    // A job that is to last until the test ends it, or while something happens beside it, does not take a processor all the while.
    command.env("LOCKSTEP_FAULT", "step:slow@100");
    command
}

/// Who runs the jobs of a server.
#[derive(Clone, Copy)]
pub(crate) enum Agents {
    /// The machine's own agent, which `serve` starts.
    Local { cpu_slots: u32 },
    /// `serve --no-local-agent`, and an agent somebody else starts.
    Separate { cpu_slots: u32 },
    /// `serve --no-local-agent` and nobody.
    None,
}

/// A running server.
pub(crate) struct Server {
    /// `http://127.0.0.1:PORT`.
    pub(crate) url: String,
    /// Shows the server's own token once the server has made one.
    pub(crate) http: reqwest::Client,
    port: u16,
    agents: Agents,
    /// `--database`, when it is not the data directory's own file.
    pub(crate) database: Option<String>,
    /// Variables of the server's environment, and of its agents' and their ranks'.
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

    /// As [`Server::start_with`], with ranks whose steps take at least 20 ms from the first on: a job of few steps lasts until the test
    /// disturbs it.
    pub(crate) async fn start_slow(agents: Agents) -> Self {
        let database = crate::postgres::wanted().then(crate::postgres::database);
        Self::start_on(agents, database, vec![("LOCKSTEP_FAULT".into(), "step:slow".into())]).await
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
        cryptography();
        let port = free_port();
        let mut server = Self {
            url: format!("http://127.0.0.1:{port}"),
            http: plain_client().build().expect("an HTTP client"),
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
        if let Agents::Separate { cpu_slots } = agents {
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
            Agents::Separate { .. } | Agents::None => command.arg("--no-local-agent"),
        };
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        self.serve = Some(command.spawn().expect("lockstep serve starts"));
        let deadline = Instant::now() + SOON;
        loop {
            if let Ok(answer) = self.http.get(format!("{}/readyz", self.url)).send().await
                && answer.status() == StatusCode::OK
            {
                self.http = client(&self.token());
                return;
            }
            let ended = self.serve.as_mut().and_then(|c| c.try_wait().ok().flatten());
            assert!(ended.is_none(), "serve ended before it was ready: {ended:?}");
            assert!(Instant::now() < deadline, "/readyz did not answer 200 within {SOON:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The admin's token, of the file that the server has made.
    pub(crate) fn token(&self) -> String {
        let text = std::fs::read_to_string(self.token_file()).expect("the server's token");
        text.trim().to_owned()
    }

    pub(crate) fn token_file(&self) -> PathBuf {
        self.data_dir().join("token")
    }

    /// A file with a token for the agent next to the server, made the first time.
    fn agent_token_file(&self) -> PathBuf {
        let path = self.folder.path().join("agent-beside.token");
        if !path.exists() {
            let made = self.cli(&["token", "create", "--scope", "agent", "--agent", "beside"]);
            std::fs::write(&path, made.ok()).expect("a token");
        }
        path
    }

    /// Starts an agent next to the server, with its own folder.
    pub(crate) async fn start_agent(&mut self, cpu_slots: u32) {
        let url = self.url.clone();
        self.start_agent_at(&url, cpu_slots, &[]);
    }

    /// As [`Server::start_agent`], by another address of the server and with more options.
    pub(crate) fn start_agent_at(&mut self, url: &str, cpu_slots: u32, options: &[&str]) {
        self.starts += 1;
        let log = File::create(self.folder.path().join(format!("agent.{}.log", self.starts))).expect("a log");
        let mut command = lockstep();
        command.args(["agent", "--server", url, "--name", "beside", "--token-file"]);
        command.arg(self.agent_token_file()).args(options).arg("--cpu-slots");
        command.arg(cpu_slots.to_string()).arg("--data-dir").arg(self.folder.path().join("agent-beside"));
        command.current_dir(self.folder.path()).envs(self.environment.iter().cloned());
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

    /// The folder of an attempt in a job's folder: its name begins with the attempt's number.
    pub(crate) fn attempt_dir(&self, id: &str, attempt: u64) -> PathBuf {
        attempt_dir(&self.job_dir(id), attempt)
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

    /// Waits for a condition, polling often.
    pub(crate) async fn until(&self, what: &str, condition: impl AsyncFn(&Server) -> bool) {
        self.until_within(SOON, what, condition).await;
    }

    pub(crate) async fn until_within(
        &self,
        limit: Duration,
        what: &str,
        condition: impl AsyncFn(&Server) -> bool,
    ) {
        let began = Instant::now();
        while !condition(self).await {
            assert!(began.elapsed() < limit, "not within {limit:?}: {what}");
            tokio::time::sleep(poll_pause(began, BRIEF)).await;
        }
    }

    // The command line

    /// Runs a client command against this server, to its end.
    pub(crate) fn cli(&self, args: &[&str]) -> Finished {
        let mut command = lockstep();
        command.args(args).current_dir(self.folder.path()).envs(self.for_clients());
        Finished::of(&mut command)
    }

    /// Variables that lead a client command to this server.
    pub(crate) fn for_clients(&self) -> [(&'static str, std::ffi::OsString); 2] {
        [("LOCKSTEP_SERVER", self.url.clone().into()), ("LOCKSTEP_TOKEN_FILE", self.token_file().into())]
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
}

impl Drop for Server {
    fn drop(&mut self) {
        for child in [&mut self.serve, &mut self.agent].into_iter().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The folder of an attempt; one that does not exist before the attempt begins.
pub(crate) fn attempt_dir(job_dir: &Path, attempt: u64) -> PathBuf {
    let entries = std::fs::read_dir(job_dir.join("attempts")).into_iter().flatten().flatten();
    let is_its = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with(&format!("{attempt}-"))
    };
    let found = entries.map(|entry| entry.path()).find(is_its);
    found.unwrap_or_else(|| job_dir.join("attempts").join(format!("{attempt}-")))
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
