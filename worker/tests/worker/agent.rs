//! The agent with a simulated server: which messages it sends, in which order, and which messages it resends after a broken
//! connection. Shell scripts replace the ranks.

use futures_util::{SinkExt, StreamExt};
use lockstep_protocol::{
    agent::{
        Acknowledged, AgentRequest, AttemptEvent, AttemptRef, Ending, FromAgent, MARK, Source, StartAttempt,
        StartFiles, ToAgent,
    },
    spec::JobSpec,
};
use lockstep_worker::{
    agent::{self, AgentError, Options},
    report::{Observer, Reporter},
};
use std::{fs, path::Path, sync::Mutex, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::timeout,
};
use tokio_tungstenite::{WebSocketStream, accept_async, tungstenite::Message};
use tracing::instrument::WithSubscriber;

const PATIENCE: Duration = Duration::from_secs(30);

type AgentTask = JoinHandle<Result<(), AgentError>>;

/// The server's end of a connection, which acknowledges heartbeats.
struct Connection(WebSocketStream<TcpStream>);

impl Connection {
    async fn accept(listener: &TcpListener) -> Self {
        let (stream, _) = timeout(PATIENCE, listener.accept()).await.expect("no agent connected").unwrap();
        Self(accept_async(stream).await.unwrap())
    }

    async fn send(&mut self, message: &ToAgent) {
        let bytes = rmp_serde::to_vec_named(message).unwrap();
        self.0.send(Message::Binary(bytes.into())).await.unwrap();
    }

    /// Receives the next message, except samples and findings, which describe the machine.
    async fn receive_any(&mut self) -> FromAgent {
        loop {
            let message = timeout(PATIENCE, self.0.next()).await.expect("no message came").unwrap().unwrap();
            let bytes = match message {
                Message::Binary(bytes) => bytes,
                Message::Ping(_) | Message::Pong(_) => continue,
                other => panic!("{other:?}"),
            };
            match rmp_serde::from_slice(&bytes).unwrap() {
                FromAgent::Sample(_) | FromAgent::Findings { .. } => {}
                other => return other,
            }
        }
    }

    /// Receives the next message that is not a heartbeat, and acknowledges heartbeats.
    async fn receive(&mut self) -> FromAgent {
        loop {
            match self.receive_any().await {
                FromAgent::Heartbeat { .. } => self.send(&ToAgent::HeartbeatAck).await,
                other => return other,
            }
        }
    }

    /// Receives and acknowledges a heartbeat, and returns its attempts. Any other message fails the test.
    async fn receive_heartbeat(&mut self) -> Vec<AttemptRef> {
        let message = self.receive_any().await;
        let FromAgent::Heartbeat { attempts, .. } = message else { panic!("{message:?}") };
        self.send(&ToAgent::HeartbeatAck).await;
        attempts
    }

    /// Receives `Hello`, sends `Welcome`, and returns the attempts in `Hello`.
    async fn welcome(&mut self) -> Vec<AttemptRef> {
        self.welcome_with(vec![], vec![]).await
    }

    /// As [`Connection::welcome`], with these acknowledged records and revoked attempts.
    async fn welcome_with(
        &mut self,
        acknowledged: Vec<Acknowledged>,
        revoked: Vec<AttemptRef>,
    ) -> Vec<AttemptRef> {
        let FromAgent::Hello { attempts, slots, .. } = self.receive().await else { panic!("no Hello") };
        assert_eq!(slots.len(), 2);
        let (heartbeat_secs, lease_secs) = (0.1, 30.0);
        let welcome =
            ToAgent::Welcome { heartbeat_secs, lease_secs, acknowledged, revoked, server_lock: None };
        self.send(&welcome).await;
        attempts
    }

    async fn receive_report(&mut self) -> (Source, u64, Vec<AttemptEvent>) {
        match self.receive().await {
            FromAgent::Report { source, first, events, .. } => (source, first, events),
            other => panic!("{other:?}"),
        }
    }
}

/// The beginning of a script that replaces `lockstep`: `doctor` finds nothing, and `inspect` replies to a request for a fingerprint.
const REPLIES: &str = r#"[ "$1" = doctor ] && exit
[ "$1" = inspect ] && { read question; case $question in *fingerprint*)
    echo '{"Ok":{"type":"fingerprint","found":{"pictures":1,"picture_bytes":2,"sha256":"aa"}}}'; exit 0;; esac; }"#;

/// A job whose ranks are this shell script (`$8` is the rank), and the options of an agent that serves only this job.
fn fake_job(dir: &Path, script: &str) -> (StartAttempt, Options) {
    let program = dir.join("program");
    // Another process writes the file, because a file that is open for writing cannot be executed (ETXTBSY).
    let written = std::process::Command::new("sh")
        .args([
            "-c",
            "printf %s \"$0\" > \"$1\"; chmod +x \"$1\"",
            &format!("#!/bin/sh\n{REPLIES}\n{script}\n"),
        ])
        .arg(&program)
        .status();
    assert!(written.unwrap().success());
    let start = StartAttempt {
        secret: "00".into(),
        job_dir: Some(dir.join("job").to_string_lossy().into_owned()),
        files: StartFiles { mark: Some("here".into()), ..StartFiles::default() },
        ..StartAttempt::local(JobSpec::default(), program.to_string_lossy(), 1)
    };
    let options = Options {
        name: Some("test".into()),
        dir: dir.join("agent"),
        cpu_slots: Some(2),
        only_job: Some(start.attempt.job.clone()),
        program: Some(program),
        spool_bytes: 1 << 30,
        killed_after_secs: 30,
        ..Options::default()
    };
    fs::create_dir_all(dir.join("job")).unwrap();
    fs::write(dir.join("job").join(MARK), "here").unwrap();
    (start, options)
}

async fn start_agent(mut options: Options) -> (TcpListener, AgentTask) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    options.server = format!("http://{}", listener.local_addr().unwrap());
    let log = fs::File::create(options.dir.with_extension("log")).unwrap();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(Mutex::new(log)).finish();
    (listener, tokio::spawn(agent::run(options).with_subscriber(subscriber)))
}

/// Starts an agent and, on its first connection, the attempt of [`fake_job`].
async fn start_attempt(dir: &Path, script: &str) -> (StartAttempt, TcpListener, AgentTask, Connection) {
    let (start, options) = fake_job(dir, script);
    let (listener, agent) = start_agent(options).await;
    let mut connection = Connection::accept(&listener).await;
    assert_eq!(connection.welcome().await, []);
    connection.send(&ToAgent::Start(Box::new(start.clone()))).await;
    (start, listener, agent, connection)
}

async fn wait_for_end(agent: AgentTask) -> Result<(), AgentError> {
    timeout(PATIENCE, agent).await.expect("the agent does not end").unwrap()
}

fn acknowledged(start: &StartAttempt, source: Source, records: u64) -> Acknowledged {
    Acknowledged { attempt: start.attempt.clone(), source, records, watched: false }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_survive_a_broken_connection_and_the_end_is_last() {
    let dir = tempfile::tempdir().unwrap();
    // The rank ends when the test creates the file `go`.
    let script = format!("while [ ! -e {}/go ]; do sleep 0.02; done", dir.path().display());
    let attempt_dir = dir.path().join("job/attempts/1");
    fs::create_dir_all(&attempt_dir).unwrap();
    let reporter = Reporter::create(&attempt_dir, 0).unwrap();
    let removed = |step| AttemptEvent::CheckpointRemoved { epoch: 1, step };
    let (start, listener, agent, mut connection) = start_attempt(dir.path(), &script).await;
    reporter.event(&removed(0));
    let (source, first, events) = connection.receive_report().await;
    assert_eq!((source, first, events), (Source::Rank(0), 0, vec![removed(0)]));
    connection.send(&ToAgent::Ack(acknowledged(&start, source, 1))).await;
    reporter.event(&removed(1));
    // Received, but not acknowledged.
    let (_, first, _) = connection.receive_report().await;
    assert_eq!(first, 1);
    drop(connection);

    reporter.event(&removed(2));
    fs::write(dir.path().join("go"), "").unwrap();
    let mut connection = Connection::accept(&listener).await;
    let stored = vec![acknowledged(&start, Source::Rank(0), 1)];
    assert_eq!(connection.welcome_with(stored, vec![]).await, std::slice::from_ref(&start.attempt));
    let mut rank_events = Vec::new();
    loop {
        let (source, first, events) = connection.receive_report().await;
        let records = first + events.len() as u64;
        if source == Source::Agent {
            assert_eq!(events, [AttemptEvent::Ended(Ending::Succeeded { step: 0 })]);
            connection.send(&ToAgent::Ack(acknowledged(&start, source, records))).await;
            break;
        }
        assert_eq!(first, 1 + rank_events.len() as u64);
        rank_events.extend(events);
        connection.send(&ToAgent::Ack(acknowledged(&start, source, records))).await;
    }
    assert_eq!(rank_events, [removed(1), removed(2)]);
    wait_for_end(agent).await.unwrap();
    // No report is left.
    assert_eq!(fs::read_dir(dir.path().join("agent/attempts")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_attempt_s_ranks_end_and_its_end_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (start, _listener, agent, mut connection) =
        start_attempt(dir.path(), "while :; do sleep 0.05; done").await;
    let reason = "cancelled".to_owned();
    connection.send(&ToAgent::Stop { attempt: start.attempt.clone(), reason, patient: false }).await;
    let (source, _, events) = connection.receive_report().await;
    assert_eq!((source, events), (Source::Agent, vec![AttemptEvent::Ended(Ending::Stopped)]));
    connection.send(&ToAgent::Ack(acknowledged(&start, Source::Agent, 1))).await;
    wait_for_end(agent).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revoked_attempts_are_ended_without_reports() {
    let dir = tempfile::tempdir().unwrap();
    let (start, listener, agent, connection) =
        start_attempt(dir.path(), "while :; do sleep 0.05; done").await;
    let pid_file = dir.path().join("job/attempts/1/rank.0.pid");
    while !pid_file.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(connection);
    let mut connection = Connection::accept(&listener).await;
    connection.welcome_with(vec![], vec![start.attempt.clone()]).await;
    // The agent sends only heartbeats until the ranks have ended.
    while !connection.receive_heartbeat().await.is_empty() {}
    let process: serde_json::Value = serde_json::from_slice(&fs::read(pid_file).unwrap()).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", process["pid"])).unwrap_or_default();
    assert!(status.is_empty() || status.contains("zombie"), "{status}");
    // The agent serves only this job, so it waits for another attempt until attempt 0 is stopped, which stands for the job.
    assert_eq!(connection.receive_heartbeat().await, []);
    let ended = AttemptRef { attempt: 0, ..start.attempt };
    connection.send(&ToAgent::Stop { attempt: ended, reason: "failed".into(), patient: false }).await;
    let result = wait_for_end(agent).await;
    assert!(result.is_ok(), "{result:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_and_requests_are_handled() {
    let dir = tempfile::tempdir().unwrap();
    // For a request, the agent starts the program as `inspect`. Here it replies with an error that quotes the request.
    let script =
        r#"[ "$1" = inspect ] && { echo "{\"Err\":\"asked: $(echo $question | tr -d '\"')\"}"; }; exit 0"#;
    let (_, options) = fake_job(dir.path(), script);
    let (listener, agent) = start_agent(options).await;
    let mut connection = Connection::accept(&listener).await;
    connection.welcome().await;
    let path = dir.path().join("nothing").to_string_lossy().into_owned();
    connection
        .send(&ToAgent::Request {
            id: 9,
            request: AgentRequest::InspectDataset { path: path.clone(), allowed: None },
        })
        .await;
    match connection.receive().await {
        FromAgent::Reply { id: 9, reply: Err(why) } => assert!(why.contains(&path), "{why}"),
        other => panic!("{other:?}"),
    }
    drop(connection);
    // The agent reconnects until a refusal is permanent. Each `Hello` names the same process.
    let mut processes = Vec::new();
    for (reason, is_temporary) in
        [("still connected", true), ("still connected", true), ("another version", false)]
    {
        let mut connection = Connection::accept(&listener).await;
        let FromAgent::Hello { process, .. } = connection.receive().await else { panic!("no Hello") };
        processes.push(process);
        connection.send(&ToAgent::Refused { reason: reason.into(), is_temporary }).await;
    }
    assert!(!processes[0].is_empty() && processes.iter().all(|process| *process == processes[0]));
    let error = wait_for_end(agent).await.unwrap_err();
    assert!(!matches!(error, AgentError::InvalidOptions(_)));
    assert!(error.to_string().contains("another version"), "{error}");
    let log = fs::read_to_string(dir.path().join("agent.log")).unwrap();
    assert_eq!(log.matches("still connected").count(), 1, "a repeated refusal is logged once: {log}");
}
