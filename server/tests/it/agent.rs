//! An agent that speaks the protocol over a real websocket and trains nothing.

use crate::test_server::{TIMEOUT, TestServer, wait_until};
use futures_util::{SinkExt, StreamExt};
use lockstep_protocol::{
    agent::{
        Acknowledged, AgentReply, AgentRequest, AttemptEvent, AttemptRef, CheckpointInfo, Ending, FromAgent,
        LogLine, Machine, PROTOCOL_VERSION, Slot, Source, StartAttempt, ToAgent,
    },
    dataset::{DatasetInfo, SplitInfo},
    inspect::FitWeights,
    job::JobId,
    metric::MetricColumn,
    reason::Reason,
};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::timeout;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async, tungstenite::Message};

pub(crate) fn failed(reason: impl Into<Reason>, retriable: bool) -> Ending {
    Ending::Failed { reason: reason.into(), retriable }
}

pub struct Agent {
    socket: WebSocketStream<MaybeTlsStream<tokio::net::TcpStream>>,
    /// From the server's `Welcome`: acknowledged records and revoked attempts.
    pub welcome: (Vec<Acknowledged>, Vec<AttemptRef>),
    /// Number of heartbeats that the server has acknowledged.
    pub heartbeats: usize,
    /// The last `Stop`. The server may repeat a `Stop`, and agents ignore the repetition.
    stopped: Option<ToAgent>,
}

pub fn hello(name: &str, slots: u32, attempts: Vec<AttemptRef>) -> FromAgent {
    FromAgent::Hello {
        protocol: PROTOCOL_VERSION,
        agent_id: format!("id-{name}"),
        name: name.into(),
        machine: Machine {
            hostname: "testing".into(),
            cpu: "a CPU".into(),
            cores: slots,
            memory_bytes: 1 << 30,
            disk_free_bytes: 1 << 30,
            version: "0".into(),
            ..Machine::default()
        },
        slots: (0..slots)
            .map(|index| Slot {
                index,
                device: "cpu".into(),
                name: "a core".into(),
                memory_bytes: 0,
                uuid: None,
            })
            .collect(),
        attempts,
        only_job: None,
        no_work: None,
        process: String::new(),
    }
}

/// Same as [`hello`], from a machine with GPUs.
pub fn hello_gpus(name: &str, gpus: u32) -> FromAgent {
    let mut hello = hello(name, 0, Vec::new());
    if let FromAgent::Hello { slots, .. } = &mut hello {
        *slots = (0..gpus)
            .map(|index| Slot {
                index,
                device: "cuda".into(),
                name: "NVIDIA H200".into(),
                memory_bytes: 150_754_820_096,
                uuid: Some(format!("GPU-{index}932f937-d72c-4106-c12f-20bd9faed9f6")),
            })
            .collect();
    }
    hello
}

/// Creates a token for the agent that sends this `Hello`.
async fn make_token_for(server: &TestServer, hello: &FromAgent) -> String {
    let FromAgent::Hello { agent_id, name, .. } = hello else { return server.agent_token("a").await };
    let (_, known) = server.get("/agents").await;
    let is_known = known["agents"].as_array().unwrap().iter().any(|agent| agent["id"] == **agent_id);
    // The server refuses an invalid name or id before it compares the token's agent.
    let is_valid = |text: &str| !text.trim().is_empty() && text.len() <= 100 && text.is_ascii();
    match (is_known, is_valid(name) && is_valid(agent_id)) {
        (true, true) => server.agent_token(agent_id).await,
        (false, true) => server.agent_token(name).await,
        (_, false) => server.agent_token("a").await,
    }
}

impl Agent {
    /// Connects and sends `hello`. Returns the reason if the server refuses the agent.
    pub async fn connect(server: &TestServer, hello: FromAgent) -> Result<Self, String> {
        let token = make_token_for(server, &hello).await;
        Self::connect_with_token(server, &token, hello).await
    }

    /// Same as [`Agent::connect`], with this token.
    pub async fn connect_with_token(
        server: &TestServer,
        token: &str,
        hello: FromAgent,
    ) -> Result<Self, String> {
        let request = server.socket_request("/agent/socket", token);
        let (socket, _) = timeout(TIMEOUT, connect_async(request)).await.unwrap().unwrap();
        let mut agent = Self { socket, welcome: (Vec::new(), Vec::new()), heartbeats: 0, stopped: None };
        agent.send(hello).await;
        match agent.next().await {
            Some(ToAgent::Welcome { acknowledged, revoked, .. }) => {
                agent.welcome = (acknowledged, revoked);
                Ok(agent)
            }
            Some(ToAgent::Refused { reason, .. }) => Err(reason),
            other => panic!("{other:?}"),
        }
    }

    /// Connects as the agent `a`.
    pub async fn join(server: &TestServer, slots: u32) -> Self {
        Self::connect(server, hello("a", slots, Vec::new())).await.unwrap()
    }

    /// Joins, and registers the dataset that [`crate::test_server::spec`] names.
    pub async fn join_with_dataset(server: &TestServer, slots: u32) -> Self {
        let mut agent = Self::join(server, slots).await;
        agent.register(server).await;
        agent
    }

    /// Registers the dataset that [`crate::test_server::spec`] names.
    pub async fn register(&mut self, server: &TestServer) {
        self.register_as(server, "pictures", dataset_info()).await;
    }

    /// Registers a dataset with this name.
    pub async fn register_as(&mut self, server: &TestServer, name: &str, info: DatasetInfo) {
        let new = json!({"name": name, "path": format!("/some/{name}")});
        self.register_dataset(server, &new, info).await;
    }

    /// Registers a dataset, and returns the server's response.
    pub async fn register_dataset(&mut self, server: &TestServer, new: &Value, info: DatasetInfo) -> Value {
        let add = server.post("/datasets", new);
        let ((status, body), ()) = tokio::join!(add, self.answer_inspection(Ok(info)));
        assert_eq!(status, 201, "{body}");
        body
    }

    /// Answers the next request, which must be to inspect a dataset.
    pub async fn answer_inspection(&mut self, info: Result<DatasetInfo, String>) {
        let (id, request) = self.expect_request().await;
        let AgentRequest::InspectDataset { path, .. } = request else { panic!("{request:?}") };
        self.reply(id, info.map(|info| AgentReply::Dataset { path, info })).await;
    }

    /// Answers the next request, which must be `FitWeights`, and returns the request.
    pub async fn answer_fit_weights(&mut self, reply: AgentReply) -> FitWeights {
        let (id, request) = self.expect_request().await;
        let AgentRequest::FitWeights(request) = request else { panic!("{request:?}") };
        self.reply(id, Ok(reply)).await;
        request
    }

    pub async fn reply(&mut self, id: u64, reply: Result<AgentReply, String>) {
        self.send(FromAgent::Reply { id, reply }).await;
    }

    pub async fn send(&mut self, message: impl serde::Serialize) {
        let bytes = rmp_serde::to_vec_named(&message).unwrap();
        self.socket.send(Message::Binary(bytes.into())).await.unwrap();
    }

    /// Returns the next message except acknowledged heartbeats and repeated `Stop`s; `None` if the server has closed the connection.
    pub async fn next(&mut self) -> Option<ToAgent> {
        loop {
            match timeout(TIMEOUT, self.socket.next()).await.expect("a message of the server") {
                Some(Ok(Message::Binary(bytes))) => match rmp_serde::from_slice(&bytes).unwrap() {
                    ToAgent::HeartbeatAck => self.heartbeats += 1,
                    stop @ ToAgent::Stop { .. } if self.stopped.as_ref() == Some(&stop) => {}
                    message => {
                        if matches!(message, ToAgent::Stop { .. }) {
                            self.stopped = Some(message.clone());
                        }
                        return Some(message);
                    }
                },
                None | Some(Ok(Message::Close(_)) | Err(_)) => return None,
                Some(Ok(_)) => {}
            }
        }
    }

    /// Submits [`crate::test_server::spec`] with these changes, and waits for the job's start. Returns the job's id and its attempt.
    pub async fn start_job(
        &mut self,
        server: &TestServer,
        change: impl FnOnce(&mut Value),
    ) -> (String, AttemptRef) {
        let id = server.submit(change).await.id.to_string();
        (id, self.expect_start().await.attempt)
    }

    /// Waits for the next message, which must be `Start`.
    pub async fn expect_start(&mut self) -> StartAttempt {
        match self.next().await {
            Some(ToAgent::Start(start)) => *start,
            other => panic!("{other:?}"),
        }
    }

    /// Waits for the next message, which must be `Stop`. Returns whether the ranks should write a checkpoint first.
    pub async fn expect_stop(&mut self) -> bool {
        match self.next().await {
            Some(ToAgent::Stop { patient, .. }) => patient,
            other => panic!("{other:?}"),
        }
    }

    /// Asserts that no message arrives within `ms` milliseconds. The server dispatches jobs twice a second.
    pub async fn expect_silence(&mut self, ms: u64) {
        let message = timeout(Duration::from_millis(ms), self.next()).await;
        assert!(message.is_err(), "{message:?}");
    }

    /// Waits for the next message, which must be a request. Returns the request's id and the request.
    pub async fn expect_request(&mut self) -> (u64, AgentRequest) {
        match self.next().await {
            Some(ToAgent::Request { id, request }) => (id, request),
            other => panic!("{other:?}"),
        }
    }

    /// Sends a report, whose first record has the number `first` (from 0).
    pub async fn send_report(
        &mut self,
        attempt: &AttemptRef,
        source: Source,
        first: u64,
        events: Vec<AttemptEvent>,
    ) {
        self.send(FromAgent::Report { attempt: attempt.clone(), source, first, events }).await;
    }

    /// Sends a report, and waits until the server has stored it. Returns the number of acknowledged records.
    pub async fn report(
        &mut self,
        attempt: &AttemptRef,
        source: Source,
        first: u64,
        events: Vec<AttemptEvent>,
    ) -> u64 {
        self.send_report(attempt, source, first, events).await;
        match self.next().await {
            Some(ToAgent::Ack(ack)) if ack.source == source => ack.records,
            other => panic!("{other:?}"),
        }
    }

    pub async fn end(&mut self, attempt: &AttemptRef, ending: Ending) {
        assert_eq!(self.report(attempt, Source::Agent, 0, vec![AttemptEvent::Ended(ending)]).await, 1);
    }

    /// Drops the connection without a close frame.
    pub fn disconnect(self) {}

    pub async fn heartbeat(&mut self, attempts: &[AttemptRef]) {
        self.send(FromAgent::Heartbeat { attempts: attempts.to_vec(), no_work: None }).await;
    }
}

/// Starts a server, and an agent of this number of slots that has the dataset of [`crate::test_server::spec`].
pub async fn server_with_agent(slots: u32) -> (TestServer, Agent) {
    let server = TestServer::new().await;
    let agent = Agent::join_with_dataset(&server, slots).await;
    (server, agent)
}

/// Same as [`server_with_agent`] with two slots, but the agent is drained, so that no job starts.
pub async fn server_with_drained_agent() -> (TestServer, Agent) {
    let (server, agent) = server_with_agent(2).await;
    assert_eq!(server.post("/agents/id-a/drain", &json!({})).await.0, 204);
    (server, agent)
}

/// Starts a server, the agent `a` with two slots, and a job as [`Agent::start_job`] does.
pub async fn start_job(change: impl FnOnce(&mut Value)) -> (TestServer, Agent, String, AttemptRef) {
    let (server, mut agent) = server_with_agent(2).await;
    let (id, attempt) = agent.start_job(&server, change).await;
    (server, agent, id, attempt)
}

/// Waits until the server has noticed that the agent that it lists first has disconnected.
pub async fn wait_until_offline(server: &TestServer) {
    let is_online = async || server.get("/agents").await.1["agents"][0]["online"] == true;
    wait_until("the agent is offline", async || !is_online().await).await;
}

/// A dataset of two classes with 1000 training pictures and 200 test pictures.
pub fn dataset_info() -> DatasetInfo {
    let split = |name: &str, samples: u64| SplitInfo {
        name: name.into(),
        samples,
        per_class: vec![samples / 2, samples - samples / 2],
    };
    DatasetInfo {
        format: "idx".into(),
        classes: vec!["cat".into(), "dog".into()],
        splits: vec![split("train", 1000), split("test", 200)],
        height: 28,
        width: 28,
        channels: 1,
        mean: vec![0.5],
        std: vec![0.5],
        ..DatasetInfo::default()
    }
}

pub fn running(total_steps: u64, start_step: u64) -> AttemptEvent {
    AttemptEvent::Running { total_steps, steps_per_epoch: total_steps / 2, start_step, train_samples: 0 }
}

/// A checkpoint of the first epoch without a validation.
pub fn checkpoint(step: u64) -> AttemptEvent {
    AttemptEvent::Checkpoint(CheckpointInfo { epoch: 1, step, size_bytes: 1, ..CheckpointInfo::default() })
}

/// A checkpoint with this accuracy. Its agent reports it as the best of the job.
pub fn best_checkpoint(epoch: u32, step: u64, accuracy: f64) -> AttemptEvent {
    let (val_accuracy, val_loss) = (Some(accuracy), Some(1.0));
    let info =
        CheckpointInfo { epoch, step, val_accuracy, val_loss, validation: None, best: true, size_bytes: 1 };
    AttemptEvent::Checkpoint(info)
}

pub fn losses(rank: u32, steps: std::ops::RangeInclusive<u64>) -> AttemptEvent {
    let values = steps.clone().map(|s| 1.0 / s as f32).collect();
    AttemptEvent::Metrics {
        rank,
        columns: vec![MetricColumn { name: "loss".into(), steps: steps.collect(), values }],
    }
}

pub fn line(rank: u32, number: u64, text: &str) -> AttemptEvent {
    let at = "2026-01-02T03:04:05Z".parse().unwrap();
    AttemptEvent::Log { rank, lines: vec![LogLine { number, at, text: text.into() }] }
}

/// An attempt that the server does not know.
pub fn unknown_attempt() -> AttemptRef {
    AttemptRef { job: JobId::generate(), attempt: 1, fencing_token: 1.into() }
}
