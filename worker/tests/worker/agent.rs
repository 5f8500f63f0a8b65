//! The agent against a server that the test plays: what crosses the wire, in which order, and what
//! is sent again after a broken connection. Shell scripts stand in for ranks.

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
use std::{fs, path::Path, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::timeout,
};
use tokio_tungstenite::{WebSocketStream, accept_async, tungstenite::Message};

const PATIENCE: Duration = Duration::from_secs(30);

/// The server's end of one connection; heartbeats are answered on the way.
struct Line(WebSocketStream<TcpStream>);

impl Line {
    async fn accept(listener: &TcpListener) -> Self {
        let (stream, _) = timeout(PATIENCE, listener.accept()).await.expect("no agent came").unwrap();
        Self(accept_async(stream).await.unwrap())
    }

    async fn say(&mut self, message: &ToAgent) {
        let bytes = rmp_serde::to_vec_named(message).unwrap();
        self.0.send(Message::Binary(bytes.into())).await.unwrap();
    }

    async fn hear(&mut self) -> FromAgent {
        loop {
            let message =
                timeout(PATIENCE, self.0.next()).await.expect("the agent is silent").unwrap().unwrap();
            let Message::Binary(bytes) = message else { continue };
            match rmp_serde::from_slice(&bytes).unwrap() {
                FromAgent::Heartbeat { .. } => self.say(&ToAgent::HeartbeatAck).await,
                other => return other,
            }
        }
    }

    /// The attempts of the next heartbeat; anything else that the agent says is a failure.
    async fn heartbeat(&mut self) -> Vec<AttemptRef> {
        loop {
            let message =
                timeout(PATIENCE, self.0.next()).await.expect("the agent is silent").unwrap().unwrap();
            let bytes = match message {
                Message::Binary(bytes) => bytes,
                Message::Ping(_) | Message::Pong(_) => continue,
                other => panic!("{other:?}"),
            };
            let message: FromAgent = rmp_serde::from_slice(&bytes).unwrap();
            let FromAgent::Heartbeat { attempts, .. } = message else { panic!("{message:?}") };
            self.say(&ToAgent::HeartbeatAck).await;
            return attempts;
        }
    }

    /// Hears `Hello`, welcomes, and gives the attempts of the `Hello`.
    async fn welcome(
        &mut self,
        acknowledged: Vec<Acknowledged>,
        revoked: Vec<AttemptRef>,
    ) -> Vec<AttemptRef> {
        let FromAgent::Hello { attempts, slots, .. } = self.hear().await else { panic!("no Hello") };
        assert_eq!(slots.len(), 2);
        let (heartbeat_secs, lease_secs) = (0.1, 30.0);
        let welcome = ToAgent::Welcome {
            heartbeat_secs,
            lease_secs,
            acknowledged,
            revoked,
            server_lock: None,
            takes_samples: false,
        };
        self.say(&welcome).await;
        attempts
    }

    async fn report(&mut self) -> (Source, u64, Vec<AttemptEvent>) {
        match self.hear().await {
            FromAgent::Report { source, first, events, .. } => (source, first, events),
            other => panic!("{other:?}"),
        }
    }
}

/// The beginning of a script that replaces the program: the reply to a request for the dataset's fingerprint.
const INSPECTS: &str = r#"[ "$1" = inspect ] && { read question; case $question in *fingerprint*)
    echo '{"Ok":{"type":"fingerprint","found":{"pictures":1,"picture_bytes":2,"sha256":"aa"}}}'; exit 0;; esac; }"#;

/// A job whose ranks are this shell script; `$8` is the rank.
fn job(dir: &Path, script: &str) -> (StartAttempt, Options) {
    let program = dir.join("program");
    // Written by another process: nobody here holds it open for writing when it is started.
    let made = std::process::Command::new("sh")
        .args([
            "-c",
            "printf %s \"$0\" > \"$1\"; chmod +x \"$1\"",
            &format!("#!/bin/sh\n{INSPECTS}\n{script}\n"),
        ])
        .arg(&program)
        .status();
    assert!(made.unwrap().success());
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

async fn run(mut options: Options) -> (TcpListener, JoinHandle<Result<(), AgentError>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    options.server = format!("http://{}", listener.local_addr().unwrap());
    (listener, tokio::spawn(agent::run(options)))
}

async fn end(agent: JoinHandle<Result<(), AgentError>>) -> Result<(), AgentError> {
    timeout(PATIENCE, agent).await.expect("the agent does not end").unwrap()
}

fn acknowledged(start: &StartAttempt, source: Source, records: u64) -> Acknowledged {
    Acknowledged { attempt: start.attempt.clone(), source, records, watched: false }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_broken_connection_nothing_is_lost_and_the_end_is_last() {
    let dir = tempfile::tempdir().unwrap();
    // The rank ends when the test says so.
    let (start, options) =
        job(dir.path(), &format!("while [ ! -e {}/go ]; do sleep 0.02; done", dir.path().display()));
    let attempt_dir = dir.path().join("job/attempts/1");
    fs::create_dir_all(&attempt_dir).unwrap();
    let reporter = Reporter::create(&attempt_dir, 0).unwrap();
    let removed = |step| AttemptEvent::CheckpointRemoved { epoch: 1, step };
    let (listener, agent) = run(options).await;

    let mut line = Line::accept(&listener).await;
    assert_eq!(line.welcome(vec![], vec![]).await, []);
    line.say(&ToAgent::Start(Box::new(start.clone()))).await;
    reporter.event(&removed(0));
    let (source, first, events) = line.report().await;
    assert_eq!((source, first, events), (Source::Rank(0), 0, vec![removed(0)]));
    line.say(&ToAgent::Ack(acknowledged(&start, source, 1))).await;
    reporter.event(&removed(1));
    // Read from the socket, but stored by nobody.
    assert_eq!(line.report().await.1, 1);
    drop(line);

    reporter.event(&removed(2));
    fs::write(dir.path().join("go"), "").unwrap();
    let mut line = Line::accept(&listener).await;
    let stored = vec![acknowledged(&start, Source::Rank(0), 1)];
    assert_eq!(line.welcome(stored, vec![]).await, std::slice::from_ref(&start.attempt));
    let mut of_rank = Vec::new();
    loop {
        let (source, first, events) = line.report().await;
        let records = first + events.len() as u64;
        if source == Source::Agent {
            assert_eq!(events, [AttemptEvent::Ended(Ending::Succeeded { step: 0 })]);
            line.say(&ToAgent::Ack(acknowledged(&start, source, records))).await;
            break;
        }
        assert_eq!(first, 1 + of_rank.len() as u64);
        of_rank.extend(events);
        line.say(&ToAgent::Ack(acknowledged(&start, source, records))).await;
    }
    assert_eq!(of_rank, [removed(1), removed(2)]);
    end(agent).await.unwrap();
    // Nothing is left to be reported.
    assert_eq!(fs::read_dir(dir.path().join("agent/attempts")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_agent_ends_its_ranks_and_reports_it() {
    let dir = tempfile::tempdir().unwrap();
    let (start, options) = job(dir.path(), "while :; do sleep 0.05; done");
    let (listener, agent) = run(options).await;
    let mut line = Line::accept(&listener).await;
    line.welcome(vec![], vec![]).await;
    line.say(&ToAgent::Start(Box::new(start.clone()))).await;
    let reason = "cancelled".to_owned();
    line.say(&ToAgent::Stop { attempt: start.attempt.clone(), reason, patient: false }).await;
    let (source, _, events) = line.report().await;
    assert_eq!((source, events), (Source::Agent, vec![AttemptEvent::Ended(Ending::Stopped)]));
    line.say(&ToAgent::Ack(acknowledged(&start, Source::Agent, 1))).await;
    end(agent).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_given_to_others_are_ended_without_reports() {
    let dir = tempfile::tempdir().unwrap();
    let (start, options) = job(dir.path(), "while :; do sleep 0.05; done");
    let (listener, agent) = run(options).await;
    let mut line = Line::accept(&listener).await;
    line.welcome(vec![], vec![]).await;
    line.say(&ToAgent::Start(Box::new(start.clone()))).await;
    let pid_file = dir.path().join("job/attempts/1/rank.0.pid");
    while !pid_file.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(line);
    let mut line = Line::accept(&listener).await;
    line.welcome(vec![], vec![start.attempt.clone()]).await;
    // Heartbeats and nothing else, until the ranks are gone.
    while !line.heartbeat().await.is_empty() {}
    let pid: serde_json::Value = serde_json::from_slice(&fs::read(pid_file).unwrap()).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", pid["pid"])).unwrap_or_default();
    assert!(status.is_empty() || status.contains("zombie"), "{status}");
    // It serves this job alone, and stays for another attempt of it until the job is over.
    assert_eq!(line.heartbeat().await, []);
    let over = AttemptRef { attempt: 0, ..start.attempt };
    line.say(&ToAgent::Stop { attempt: over, reason: "failed".into(), patient: false }).await;
    let result = end(agent).await;
    assert!(result.is_ok(), "{result:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_and_requests_are_handled() {
    let dir = tempfile::tempdir().unwrap();
    // Requests are handled by the same program, started as `inspect`.
    let script =
        r#"[ "$1" = inspect ] && { echo "{\"Err\":\"asked: $(echo $question | tr -d '\"')\"}"; }; exit 0"#;
    let (_, options) = job(dir.path(), script);
    let (listener, agent) = run(options).await;
    let mut line = Line::accept(&listener).await;
    line.welcome(vec![], vec![]).await;
    let path = dir.path().join("nothing").to_string_lossy().into_owned();
    line.say(&ToAgent::Request {
        id: 9,
        request: AgentRequest::InspectDataset { path: path.clone(), allowed: None },
    })
    .await;
    match line.hear().await {
        FromAgent::Reply { id: 9, reply: Err(why) } => assert!(why.contains(&path), "{why}"),
        other => panic!("{other:?}"),
    }
    drop(line);
    // Until it is refused for good it tries again, and is the same process each time.
    let mut processes = Vec::new();
    for may_pass in [true, true, false] {
        let mut line = Line::accept(&listener).await;
        let FromAgent::Hello { process, .. } = line.hear().await else { panic!("no Hello") };
        processes.push(process);
        line.say(&ToAgent::Refused { reason: "another version".into(), may_pass }).await;
    }
    assert!(!processes[0].is_empty() && processes.iter().all(|process| *process == processes[0]));
    let error = end(agent).await.unwrap_err();
    assert!(!error.is_wrong_request());
    assert!(error.to_string().contains("another version"), "{error}");
}
