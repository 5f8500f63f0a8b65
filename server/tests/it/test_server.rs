//! A server on a free port with a new data directory, and a client.

use crate::postgres;
use futures_util::StreamExt;
use lockstep_protocol::job::{Job, JobState};
use lockstep_server::{ServeConfig, ServeError, serve};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection};
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Mutex,
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, timeout},
};
use tokio_tungstenite::{
    connect_async,
    tungstenite::{self, Message, client::IntoClientRequest, handshake::client::Request},
};

/// Time limit of each wait. Only a server that hangs reaches it.
pub const TIMEOUT: Duration = Duration::from_secs(20);

pub struct TestServer {
    pub dir: TempDir,
    pub address: SocketAddr,
    pub http: reqwest::Client,
    /// The admin's token, which [`TestServer::http`] sends.
    pub token: String,
    /// URL of the database.
    pub database: String,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
}

/// The request that opens a websocket with this token; without a token if `token` is empty.
pub fn socket_request(address: SocketAddr, path: &str, token: &str) -> Request {
    let mut request = format!("ws://{address}/api/v1{path}").into_client_request().unwrap();
    if !token.is_empty() {
        request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    request
}

/// A client that sends this token.
pub fn client(token: &str) -> reqwest::Client {
    client_builder(token).build().unwrap()
}

/// Same as [`client`], but returns redirects and does not follow them.
pub fn client_without_redirects(token: &str) -> reqwest::Client {
    client_builder(token).redirect(reqwest::redirect::Policy::none()).build().unwrap()
}

/// A client without a token that connects from this address of the machine, and returns redirects.
pub fn client_from(address: [u8; 4]) -> reqwest::Client {
    let client = client_builder("").local_address(IpAddr::from(address));
    client.redirect(reqwest::redirect::Policy::none()).build().unwrap()
}

/// Adds the fields of an HTML form to a request.
pub fn with_form(
    request: reqwest::RequestBuilder,
    fields: impl Into<reqwest::Body>,
) -> reqwest::RequestBuilder {
    request.header("content-type", "application/x-www-form-urlencoded").body(fields)
}

/// The status with which the server refuses to open a websocket.
pub async fn refused_status(request: Request) -> u16 {
    match connect_async(request).await {
        Err(tungstenite::Error::Http(response)) => response.status().as_u16(),
        other => panic!("{other:?}"),
    }
}

/// The value of this key in each element of a list.
pub fn column(list: &Value, key: &str) -> Vec<Value> {
    list.as_array().unwrap().iter().map(|element| element[key].clone()).collect()
}

/// The builder of [`client`], for tests that set more than a token. The client trusts no CA certificates, because reading the system's
/// CA certificates takes longer than a request.
pub fn client_builder(token: &str) -> reqwest::ClientBuilder {
    let mut headers = reqwest::header::HeaderMap::new();
    if !token.is_empty() {
        headers.insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    reqwest::Client::builder().default_headers(headers).tls_certs_only(std::iter::empty())
}

pub fn config(dir: &TempDir) -> ServeConfig {
    let mut config = ServeConfig::new(dir.path());
    config.listen.set_port(0);
    // Agents of tests send no heartbeats unless a test calls `Agent::heartbeat`, so leases are long.
    config.lease = Duration::from_secs(600);
    config
}

/// The URL of the Postgres database that belongs to a data directory; `None` if tests use SQLite. The first call creates the database.
/// The URL is remembered in memory and not in a file of the directory, because tests compare the directory's content.
pub fn database_of(dir: &TempDir) -> Option<String> {
    static CREATED: Mutex<BTreeMap<PathBuf, String>> = Mutex::new(BTreeMap::new());
    postgres::wanted().then(|| {
        let mut created = CREATED.lock().unwrap();
        created.entry(dir.path().to_owned()).or_insert_with(postgres::database).clone()
    })
}

/// Waits until the condition is true, for [`TIMEOUT`] at most.
pub async fn wait_until(what: &str, condition: impl AsyncFnMut() -> bool) {
    wait_until_within(TIMEOUT, what, condition).await;
}

pub async fn wait_until_within(limit: Duration, what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition().await {
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Asserts that the server has refused a request with this status, and that the error's detail contains `text`.
#[track_caller]
pub fn assert_refused((status, problem): (u16, Value), expected: u16, text: &str) {
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(status == expected && detail.contains(text), "{text:?}: {status} {problem}");
}

/// Asserts that the server has refused the value at `pointer`, and that the error's detail contains `text`.
#[track_caller]
pub fn assert_mistake((status, problem): (u16, Value), pointer: &str, text: &str) {
    let error = &problem["errors"][0];
    let is_expected =
        error["pointer"] == pointer && error["detail"].as_str().unwrap_or_default().contains(text);
    assert!(status == 422 && is_expected, "{pointer} {text:?}: {status} {problem}");
}

/// Two tests that call a function with a new server: one with the usual database, and one with Postgres.
macro_rules! on_two_databases {
    ($usual:ident, $postgres:ident, $test:ident) => {
        #[tokio::test]
        async fn $usual() {
            $test($crate::test_server::TestServer::new().await).await;
        }

        #[tokio::test]
        async fn $postgres() {
            let url = $crate::postgres::database();
            $test($crate::test_server::TestServer::with(|c| c.database = Some(url)).await).await;
        }
    };
}
pub(crate) use on_two_databases;

impl TestServer {
    pub async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut ServeConfig)) -> Self {
        Self::open(tempfile::tempdir().unwrap(), change).await
    }

    /// Starts a server with this lease, which expects a heartbeat every 100 ms.
    pub async fn with_lease(lease: Duration) -> Self {
        Self::with(|c| (c.lease, c.heartbeat) = (lease, Duration::from_millis(100))).await
    }

    /// Starts a server with an object store, which is the returned directory.
    pub async fn with_object_store() -> (Self, TempDir) {
        let store = tempfile::tempdir().unwrap();
        let directory = store.path().to_str().unwrap().to_owned();
        (Self::with(|config| config.artifacts = Some(directory)).await, store)
    }

    pub async fn open(dir: TempDir, change: impl FnOnce(&mut ServeConfig)) -> Self {
        // The default crypto provider of rustls, for clients that set none.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut config = config(&dir);
        config.database = database_of(&dir);
        change(&mut config);
        let sqlite_url = || format!("sqlite://{}", dir.path().join("lockstep.db").display());
        let database = config.database.clone().unwrap_or_else(sqlite_url);
        let (ready, address) = oneshot::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(serve(
            config,
            move |running| {
                let _ = ready.send(running.address());
            },
            async {
                let _ = stopped.await;
            },
        ));
        let Ok(address) = timeout(TIMEOUT, address).await.unwrap() else {
            panic!("the server does not start: {:?}", task.await);
        };
        let token = std::fs::read_to_string(dir.path().join("token")).map(|text| text.trim().to_owned());
        let token = token.unwrap_or_default();
        Self { dir, address, http: client(&token), token, database, stop, task }
    }

    /// The request that opens a websocket of this server with this token.
    pub fn socket_request(&self, path: &str, token: &str) -> Request {
        socket_request(self.address, path, token)
    }

    /// Creates a token and returns its id and secret.
    pub async fn make_token(&self, body: &Value) -> (String, String) {
        let token = self.create("/tokens", body).await;
        (token["id"].as_str().unwrap().to_owned(), token["secret"].as_str().unwrap().to_owned())
    }

    /// A client with a new token that has the scope `submit`.
    pub async fn submitter(&self, name: &str) -> reqwest::Client {
        client(&self.make_token(&json!({"name": name, "scope": "submit"})).await.1)
    }

    /// Creates a token for the agent with this name or id.
    pub async fn agent_token(&self, agent: &str) -> String {
        self.make_token(&json!({"name": agent, "scope": "agent", "agent": agent})).await.1
    }

    /// Stops the server gracefully, and returns its directory.
    pub async fn stop(self) -> TempDir {
        let _ = self.stop.send(());
        timeout(TIMEOUT, self.task).await.expect("stops in time").unwrap().unwrap();
        // A child process that another test has just forked holds copies of all open files until its `exec`, including the lock.
        if let Ok(lock) = std::fs::File::open(self.dir.path().join("lockstep.db.lock")) {
            wait_until("the lock of the database is released", async || lock.try_lock().is_ok()).await;
        }
        self.dir
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        self.send(self.http.get(self.url(&format!("/api/v1{path}")))).await
    }

    /// As [`TestServer::get`], but the request must succeed.
    pub async fn get_ok(&self, path: &str) -> Value {
        let (status, body) = self.get(path).await;
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.send(self.http.post(self.url(&format!("/api/v1{path}"))).json(body)).await
    }

    /// Sends a request that must create an object, and returns the response.
    pub async fn create(&self, path: &str, body: &Value) -> Value {
        let (status, created) = self.post(path, body).await;
        assert_eq!(status, 201, "{path}: {created}");
        created
    }

    pub async fn patch(&self, path: &str, body: &Value) -> (u16, Value) {
        self.send(self.http.patch(self.url(&format!("/api/v1{path}"))).json(body)).await
    }

    pub async fn put(&self, path: &str, body: &Value) -> (u16, Value) {
        self.send(self.http.put(self.url(&format!("/api/v1{path}"))).json(body)).await
    }

    pub async fn delete(&self, path: &str) -> (u16, Value) {
        self.send(self.http.delete(self.url(&format!("/api/v1{path}")))).await
    }

    pub async fn send(&self, request: reqwest::RequestBuilder) -> (u16, Value) {
        let response = timeout(TIMEOUT, request.send()).await.unwrap().unwrap();
        let status = response.status().as_u16();
        let content_type = response.headers().get("content-type").map(|v| v.to_str().unwrap().to_owned());
        let text = response.text().await.unwrap();
        if status >= 400 {
            assert_eq!(content_type.as_deref(), Some("application/problem+json"), "{status} {text}");
        }
        (status, serde_json::from_str(&text).unwrap_or(Value::Null))
    }

    /// Returns all pages of a list. The path must have a query, because cursors are appended to it.
    pub async fn read_pages(&self, path: &str) -> Vec<Value> {
        let (mut pages, mut cursor) = (Vec::new(), Some(String::new()));
        while let Some(after) = cursor {
            let page = self.get_ok(&format!("{path}{after}")).await;
            cursor = page["next_cursor"].as_str().map(|next| format!("&cursor={next}"));
            pages.push(page);
        }
        pages
    }

    pub async fn get_text(&self, path: &str) -> (u16, String) {
        let response = self.http.get(self.url(path)).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    /// Submits [`spec`] with these changes. The server must accept the job.
    pub async fn submit(&self, change: impl FnOnce(&mut Value)) -> Job {
        let mut spec = spec();
        change(&mut spec);
        serde_json::from_value(self.create("/jobs", &spec).await).unwrap()
    }

    pub async fn job(&self, id: &str) -> Job {
        serde_json::from_value(self.get_ok(&format!("/jobs/{id}")).await).unwrap()
    }

    /// Requests an action (`cancel`, `pause`, `resume` or `retry`) on a job. The server must accept the request.
    pub async fn order(&self, id: &str, action: &str) {
        let (status, body) = self.post(&format!("/jobs/{id}/{action}"), &Value::Null).await;
        assert_eq!(status, 202, "{action}: {body}");
    }

    pub fn job_dir(&self, id: &str) -> PathBuf {
        self.dir.path().join("jobs").join(id)
    }

    /// The steps of the job's listed checkpoints, newest first.
    pub async fn checkpoint_steps(&self, id: &str) -> Vec<u64> {
        let (_, listed) = self.get(&format!("/jobs/{id}/checkpoints")).await;
        let checkpoints = listed["checkpoints"].as_array().unwrap();
        checkpoints.iter().map(|checkpoint| checkpoint["step"].as_u64().unwrap()).collect()
    }

    /// Waits on the job's stream until the job has this state.
    pub async fn wait_for_state(&self, id: &str, state: JobState) -> Job {
        let mut stream = self.stream(id, 0).await;
        let expected = json!(state);
        stream.until(|frame| frame["type"] == "state" && frame["state"] == expected).await;
        self.job(id).await
    }

    /// Waits on the job's stream until the job's reason contains `text`, and returns the reason.
    pub async fn wait_for_reason(&self, id: &str, text: &str) -> String {
        let has_text = |frame: &Value| frame["reason"].as_str().is_some_and(|reason| reason.contains(text));
        let frames = self.stream(id, 0).await.until(has_text).await;
        frames.last().unwrap()["reason"].as_str().unwrap().to_owned()
    }

    /// Opens the stream of the list of jobs with this token.
    pub async fn stream_list(&self, token: &str) -> Stream {
        Stream::open_list(self.socket_request("/stream", token)).await
    }

    pub async fn stream(&self, id: &str, since: u64) -> Stream {
        Stream::open(self.socket_request(&format!("/jobs/{id}/stream?since={since}"), &self.token)).await
    }

    /// Changes the database without the server, and returns the number of changed rows.
    pub async fn execute(&self, query: &str) -> u64 {
        if self.database.starts_with("postgres") {
            let mut db = sqlx::PgConnection::connect(&self.database).await.unwrap();
            sqlx::query(AssertSqlSafe(query)).execute(&mut db).await.unwrap().rows_affected()
        } else {
            let mut db = sqlx::SqliteConnection::connect(&self.database).await.unwrap();
            sqlx::query(AssertSqlSafe(query)).execute(&mut db).await.unwrap().rows_affected()
        }
    }

    /// Returns the number that a query selects.
    pub async fn query_number(&self, query: &str) -> i64 {
        if self.database.starts_with("postgres") {
            let mut db = sqlx::PgConnection::connect(&self.database).await.unwrap();
            sqlx::query_scalar(AssertSqlSafe(query)).fetch_one(&mut db).await.unwrap()
        } else {
            let mut db = sqlx::SqliteConnection::connect(&self.database).await.unwrap();
            sqlx::query_scalar(AssertSqlSafe(query)).fetch_one(&mut db).await.unwrap()
        }
    }

    /// Returns the stored events of a job, as frames of its stream.
    pub async fn stored_events(&self, id: &str) -> Vec<Value> {
        let mut stream = self.stream(id, 0).await;
        let mut events = stream.until(|frame| frame["type"] == "live").await;
        events.retain(|frame| frame.get("at").is_some());
        events
    }
}

pub fn spec() -> Value {
    json!({
        "name": "test",
        "model": {"arch": "resnet20"},
        "data": {"dataset": "pictures"},
        "train": {"epochs": 2, "batch_size": 10},
        "parallel": {"ranks": 2},
    })
}

pub struct Stream(
    pub tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>>,
);

impl Stream {
    pub async fn open(request: Request) -> Self {
        Self(timeout(TIMEOUT, connect_async(request)).await.unwrap().unwrap().0)
    }

    /// Opens the stream of the list of jobs, and waits until it is live.
    pub async fn open_list(request: Request) -> Self {
        let mut list = Self::open(request).await;
        assert_eq!(list.next().await.unwrap()["type"], "live");
        list
    }

    /// Returns the next frame except `progress`, which is not stored; `Err` with code and reason if the server closes the stream.
    pub async fn next(&mut self) -> Result<Value, (u16, String)> {
        loop {
            let frame = self.frame().await?;
            if frame["type"] != "progress" {
                return Ok(frame);
            }
        }
    }

    /// Returns the next frame of any type.
    pub async fn frame(&mut self) -> Result<Value, (u16, String)> {
        loop {
            match timeout(TIMEOUT, self.0.next()).await.expect("the stream continues") {
                Some(Ok(Message::Text(text))) => return Ok(serde_json::from_str(&text).unwrap()),
                Some(Ok(Message::Close(Some(frame)))) => {
                    return Err((frame.code.into(), frame.reason.to_string()));
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Returns all frames up to and including the first frame for which `is_expected` is true.
    pub async fn until(&mut self, is_expected: impl Fn(&Value) -> bool) -> Vec<Value> {
        let mut frames = Vec::new();
        let start = Instant::now();
        loop {
            let frame = self.next().await.unwrap();
            let last = is_expected(&frame);
            frames.push(frame);
            if last {
                return frames;
            }
            assert!(start.elapsed() < TIMEOUT, "none of {} frames is the expected one", frames.len());
        }
    }
}
