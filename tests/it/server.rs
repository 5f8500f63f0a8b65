//! A real server on a free port with its own data directory. At the end of the test, the directory is deleted and all processes
//! are killed. If the test fails, the logs are shown.

use crate::pictures::idx_dataset;
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

// Explicit paths, as `tests/faults` includes this file from another folder.
#[path = "server/processes.rs"]
mod processes;
#[path = "server/rest.rs"]
mod rest;
#[path = "server/results.rs"]
mod results;
#[path = "server/shutdown.rs"]
mod shutdown;

pub(crate) use processes::{Folder, Process, Terminated, processes_of, signal};
pub(crate) use results::{Finished, Response};

/// The program under test.
pub(crate) const LOCKSTEP: &str = env!("CARGO_BIN_EXE_lockstep");

/// Time limit for anything that should be quick; long enough for a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a job to end.
pub(crate) const JOB_TIMEOUT: Duration = Duration::from_secs(120);

/// The pause before the next poll of a test that has waited since `began`, at most `longest`. Pauses grow, as polling uses processor time
/// that the job under test needs.
pub(crate) fn poll_pause(began: Instant, longest: Duration) -> Duration {
    (began.elapsed() / 10).clamp(Duration::from_millis(10), longest)
}

/// Longest pause between two polls for a state that may be short.
const MAX_POLL_PAUSE: Duration = Duration::from_millis(50);

/// Maximum number of tests that train at the same time.
const MAX_TRAINING_TESTS: u32 = 3;

static TRAINING: Semaphore = Semaphore::const_new(MAX_TRAINING_TESTS as usize);

/// A test that trains holds this permit.
pub(crate) async fn training_permit() -> SemaphorePermit<'static> {
    TRAINING.acquire().await.expect("the semaphore is never closed")
}

/// A test that measures the time of training holds this permit: no other test trains meanwhile.
pub(crate) async fn exclusive_permit() -> SemaphorePermit<'static> {
    TRAINING.acquire_many(MAX_TRAINING_TESTS).await.expect("the semaphore is never closed")
}

/// A port on which no process listens, outside the system's range of ports for clients.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 21_000 + (std::process::id() % 10_000) as u16;
    (0..10_000)
        .map(|_| 21_000 + (first - 21_000 + NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000)
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("one of 10 000 ports is free")
}

/// Sets the default TLS provider for the tests' clients.
pub(crate) fn cryptography() {
    // Only the first call of a process has an effect.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// A client without CA certificates, as reading the system's certificates takes longer than a request.
fn plain_client() -> reqwest::ClientBuilder {
    reqwest::Client::builder().timeout(TIMEOUT).tls_certs_only(std::iter::empty())
}

/// A client without a token that follows no redirects.
pub(crate) fn client_without_redirects() -> reqwest::Client {
    cryptography();
    plain_client().redirect(reqwest::redirect::Policy::none()).build().expect("an HTTP client")
}

/// A client that sends a token. The client closes idle connections before the server does, which is after 30 s.
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

/// The program under test, without a terminal and without the variables of the person who runs the tests.
pub(crate) fn lockstep() -> Command {
    without_variables(Command::new(LOCKSTEP))
}

/// As [`lockstep`], but Ctrl-C is never ignored. A test run in the background ignores SIGINT, and child processes inherit that.
pub(crate) fn interruptible_lockstep() -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=INT", LOCKSTEP]);
    without_variables(command)
}

/// Removes variables that would change the program's behaviour.
fn without_variables(mut command: Command) -> Command {
    cryptography();
    command.stdin(Stdio::null());
    for name in [
        "LOCKSTEP_ARTIFACTS",
        "LOCKSTEP_DATABASE",
        "LOCKSTEP_DATA_DIR",
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
    // Slows the steps of long jobs, so that they leave the processor to other tests.
    command.env("LOCKSTEP_FAULT", "step:slow@100");
    command
}

/// Which agents run a server's jobs.
#[derive(Clone, Copy)]
pub(crate) enum Agents {
    /// The local agent, which `serve` starts.
    Local { cpu_slots: u32 },
    /// `serve --no-local-agent`, and an agent that the test starts.
    Separate { cpu_slots: u32 },
    /// `serve --no-local-agent` without any agent.
    None,
}

/// A running server.
pub(crate) struct Server {
    /// `http://127.0.0.1:PORT`.
    pub(crate) url: String,
    /// Sends the server's admin token once the server has created it.
    pub(crate) http: reqwest::Client,
    port: u16,
    agents: Agents,
    /// `--database`; `None`: the file in the data directory.
    pub(crate) database: Option<String>,
    /// Environment variables of the server, its agents and their ranks.
    pub(crate) environment: Vec<(String, String)>,
    /// Program and arguments that start `lockstep serve`, such as `prlimit`; empty: it is started directly.
    wrapper: Vec<String>,
    serve: Option<Child>,
    agent: Option<Child>,
    starts: u32,
    // Dropped after the child processes.
    folder: Folder,
    /// See [`training_permit`].
    pub(crate) permit: Option<SemaphorePermit<'static>>,
}

impl Server {
    /// A server with a local agent of two slots, for any number of cores.
    pub(crate) async fn start() -> Self {
        Self::start_with(Agents::Local { cpu_slots: 2 }).await
    }

    pub(crate) async fn start_with(agents: Agents) -> Self {
        Self::start_in(agents, Vec::new()).await
    }

    /// As [`Server::start_with`], in this environment.
    pub(crate) async fn start_in(agents: Agents, environment: Vec<(String, String)>) -> Self {
        let database = crate::postgres::wanted().then(crate::postgres::database);
        Self::start_on(agents, database, environment).await
    }

    /// As [`Server::start_training_with`], with the agent of [`Server::start`].
    pub(crate) async fn start_training(training: usize, test: usize) -> Self {
        Self::start_training_with(Agents::Local { cpu_slots: 2 }, training, test).await
    }

    /// As [`Server::start_with`]. The server holds a permit to train until it is dropped, and has the dataset `fashion` with these numbers
    /// of training and test pictures.
    pub(crate) async fn start_training_with(agents: Agents, training: usize, test: usize) -> Self {
        let permit = training_permit().await;
        let mut server = Self::start_with(agents).await;
        server.permit = Some(permit);
        server.register("fashion", &idx_dataset(server.folder().path(), training, test)).await;
        server
    }

    /// As [`Server::start_with`], but each step takes at least 20 ms, so that a short job lasts until the test disturbs it.
    pub(crate) async fn start_slow(agents: Agents) -> Self {
        Self::start_in(agents, vec![("LOCKSTEP_FAULT".into(), "step:slow".into())]).await
    }

    /// As [`Server::start_training`], with steps as slow as those of [`Server::start_slow`].
    pub(crate) async fn start_slow_training(training: usize, test: usize) -> Self {
        let permit = training_permit().await;
        let mut server = Self::start_slow(Agents::Local { cpu_slots: 2 }).await;
        server.permit = Some(permit);
        server.register("fashion", &idx_dataset(server.folder().path(), training, test)).await;
        server
    }

    pub(crate) async fn start_on(
        agents: Agents,
        database: Option<String>,
        environment: Vec<(String, String)>,
    ) -> Self {
        Self::start_wrapped(agents, database, environment, &[], |_| {}).await
    }

    /// As [`Server::start_on`], but the program `wrapper` starts `serve`. `prepare` receives the data directory before its first use.
    pub(crate) async fn start_wrapped(
        agents: Agents,
        database: Option<String>,
        environment: Vec<(String, String)>,
        wrapper: &[&str],
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
            wrapper: wrapper.iter().map(ToString::to_string).collect(),
            serve: None,
            agent: None,
            starts: 0,
            folder: Folder::new(),
            permit: None,
        };
        prepare(&server.data_dir());
        server.start_serve().await;
        if let Agents::Separate { cpu_slots } = agents {
            server.start_agent(cpu_slots).await;
        }
        if !matches!(agents, Agents::None) {
            server.until("an agent is online", async |s: &Server| s.slots().await > 0).await;
        }
        server
    }

    /// Starts `serve` on the same port and data directory, and waits until it is ready.
    pub(crate) async fn start_serve(&mut self) {
        self.starts += 1;
        let log = File::create(self.folder.path().join(format!("serve.{}.log", self.starts))).expect("a log");
        let mut command = lockstep();
        if let [program, arguments @ ..] = &self.wrapper[..] {
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
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Ok(response) = self.http.get(format!("{}/readyz", self.url)).send().await
                && response.status() == StatusCode::OK
            {
                self.http = client(&self.token());
                return;
            }
            let ended = self.serve.as_mut().and_then(|c| c.try_wait().ok().flatten());
            assert!(ended.is_none(), "serve ended before it was ready: {ended:?}");
            assert!(Instant::now() < deadline, "/readyz did not answer 200 within {TIMEOUT:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The admin token, from the file that the server has written.
    pub(crate) fn token(&self) -> String {
        let text = std::fs::read_to_string(self.token_file()).expect("the server's token");
        text.trim().to_owned()
    }

    pub(crate) fn token_file(&self) -> PathBuf {
        self.data_dir().join("token")
    }

    /// Adds the arguments of `lockstep agent`, with its own folder, token and log (`NAME.log`), which are reused when it starts again.
    pub(crate) fn agent_command(
        &self,
        mut program: Command,
        url: &str,
        name: &str,
        cpu_slots: u32,
    ) -> Command {
        let folder = self.folder.path();
        let token = folder.join(format!("{name}.token"));
        if !token.exists() {
            let created = self.cli(&["token", "create", "--scope", "agent", "--agent", name]);
            std::fs::write(&token, created.ok()).expect("a token");
        }
        let log = File::options().create(true).append(true).open(folder.join(format!("{name}.log")));
        let log = log.expect("a log");
        program.args(["agent", "--server", url, "--name", name, "--cpu-slots", &cpu_slots.to_string()]);
        program.arg("--token-file").arg(token).arg("--data-dir").arg(folder.join(name)).current_dir(folder);
        program.stdout(log.try_clone().expect("a log")).stderr(log);
        program
    }

    /// Starts an agent on the server's machine, with its own folder.
    pub(crate) async fn start_agent(&mut self, cpu_slots: u32) {
        let url = self.url.clone();
        self.start_agent_with(&url, cpu_slots, &[]);
    }

    /// As [`Server::start_agent`], with another URL of the server and more options.
    pub(crate) fn start_agent_with(&mut self, url: &str, cpu_slots: u32, options: &[&str]) {
        let mut command = self.agent_command(lockstep(), url, "beside", cpu_slots);
        command.args(options).envs(self.environment.iter().cloned());
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

    /// The folder of an attempt in a job's folder; the name begins with the attempt's number.
    pub(crate) fn attempt_dir(&self, id: &str, attempt: u64) -> PathBuf {
        attempt_dir(&self.job_dir(id), attempt)
    }

    /// Slots of all machines that are online.
    pub(crate) async fn slots(&self) -> usize {
        let response = self.get("/agents").await;
        let agents = response["agents"].as_array().expect("agents");
        agents
            .iter()
            .filter(|a| a["online"].as_bool().unwrap_or(true))
            .map(|a| a["slots"].as_array().map_or(0, Vec::len))
            .sum()
    }

    /// Waits for a condition, polling often.
    pub(crate) async fn until(&self, what: &str, condition: impl AsyncFn(&Server) -> bool) {
        self.until_within(TIMEOUT, what, condition).await;
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
            tokio::time::sleep(poll_pause(began, MAX_POLL_PAUSE)).await;
        }
    }

    // The command line

    /// Runs a client command against this server, to its end.
    pub(crate) fn cli(&self, args: &[&str]) -> Finished {
        let mut command = lockstep();
        command.args(args).current_dir(self.folder.path()).envs(self.client_variables());
        Finished::of(&mut command)
    }

    /// Environment variables by which a client command finds this server.
    pub(crate) fn client_variables(&self) -> [(&'static str, std::ffi::OsString); 2] {
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

/// The folder of an attempt. Before the attempt begins, the folder does not exist.
pub(crate) fn attempt_dir(job_dir: &Path, attempt: u64) -> PathBuf {
    let entries = std::fs::read_dir(job_dir.join("attempts")).into_iter().flatten().flatten();
    let is_attempt = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with(&format!("{attempt}-"))
    };
    let found = entries.map(|entry| entry.path()).find(is_attempt);
    found.unwrap_or_else(|| job_dir.join("attempts").join(format!("{attempt}-")))
}

/// Where Debian's package installs libfaketime, which changes a program's clock.
pub(crate) fn faketime() -> PathBuf {
    let libraries = std::fs::read_dir("/usr/lib").expect("/usr/lib").flatten();
    let mut libraries = libraries.map(|entry| entry.path().join("faketime/libfaketime.so.1"));
    libraries
        .find(|path| path.exists())
        .expect("this test needs libfaketime: `apt-get install libfaketime` (tests/run does)")
}

/// Waits for a child process to end and returns its exit status.
pub(crate) async fn exit_status(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(status) = child.try_wait().expect("a status") {
            return status;
        }
        assert!(Instant::now() < deadline, "process {} did not end within {TIMEOUT:?}", child.id());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits for a condition. `otherwise`: what the failure shows.
pub(crate) async fn wait_until(what: &str, holds: impl Fn() -> bool, otherwise: impl Fn() -> String) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < TIMEOUT, "{what}: {}", otherwise());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The state of a job or a state event.
pub(crate) fn state_of(value: &Value) -> JobState {
    value["state"].as_str().and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("no state in {value:#}"))
}

/// A whole number in JSON.
pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no whole number: {value}"))
}
