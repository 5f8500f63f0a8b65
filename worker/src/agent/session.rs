//! One connection to the server, from `Hello` until it is lost.

use super::{
    Agent, Signals,
    address::Address,
    attempt::{Gang, Order},
    findings, machine,
    outbox::Outbox,
    sampling,
    socket::{CONNECT_TIMEOUT, ConnectError, Socket, receive, send},
};
use crate::{inspect, tls};
use futures_util::SinkExt;
use lockstep_protocol::{
    agent::{Acknowledged, AgentRequest, AttemptRef, FromAgent, MachineSample, PROTOCOL_VERSION, ToAgent},
    wire::{self, PartialMessages},
};
use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    ops::ControlFlow,
    path::Path,
    time::{Duration, Instant},
};
use tokio::{net::TcpStream, sync::watch, task::JoinSet, time};
use tokio_tungstenite::tungstenite::{self, Message};

/// Interval between two reads of the ranks' files. While somebody watches the job, a point is sent at most this long after it was
/// written.
const PUMP_EVERY: Duration = Duration::from_millis(10);
/// Time limit for sending a message while the server does not read.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum silence after which a connection counts as lost. It is longer if three heartbeat intervals are longer.
const MIN_SILENCE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after a `Stop` for which the server may still acknowledge reports that crossed the `Stop` on the way.
const MAX_CROSSING: Duration = Duration::from_secs(5);

/// Why a session ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The agent must end.
    End,
    /// The server has refused this agent permanently.
    Refused(String),
    Lost {
        reason: String,
        was_welcomed: bool,
    },
}

impl Outcome {
    /// The loss of a connection after its `Welcome`.
    fn lost(reason: impl ToString) -> Self {
        Self::Lost { reason: reason.to_string(), was_welcomed: true }
    }
}

/// A connection before its `Hello`.
pub(super) struct Session {
    socket: Socket,
    local_ip: Option<IpAddr>,
}

impl Session {
    pub(super) async fn connect(address: &Address, stream: TcpStream) -> Result<Self, ConnectError> {
        let connector = Some(address.connector()?);
        let local_ip = stream.local_addr().ok().map(|address| address.ip());
        let request = address.request.clone();
        let connecting = tokio_tungstenite::client_async_tls_with_config(request, stream, None, connector);
        match time::timeout(CONNECT_TIMEOUT, connecting).await {
            Err(_) => Err("the server does not answer".to_owned().into()),
            Ok(Ok((socket, _))) => Ok(Self { socket, local_ip }),
            Ok(Err(tungstenite::Error::Http(answer))) => Err(ConnectError::from_response(&answer)),
            Ok(Err(error)) => {
                Err(tls::in_words(&error, &address.server).unwrap_or_else(|| error.to_string()).into())
            }
        }
    }

    /// Introduces the agent, and serves until the connection is lost or the agent must end.
    pub(super) async fn run(mut self, agent: &mut Agent, signals: &mut Signals) -> Outcome {
        agent.check_folder();
        let mut machine = machine::describe(agent.state_dir.dir());
        agent.network.describe(&mut machine, self.local_ip);
        machine.nvlink_groups.clone_from(&agent.nvlink_groups);
        let hello = FromAgent::Hello {
            protocol: PROTOCOL_VERSION,
            agent_id: agent.context.remote.agent_id.clone(),
            process: agent.process.clone(),
            name: agent.context.remote.name.clone(),
            machine,
            slots: agent.slots.clone(),
            attempts: agent.attempt_refs(),
            only_job: agent.options.only_job.clone(),
            no_work: agent.no_work.clone(),
        };
        let sent = Instant::now();
        let answer = async {
            send(&mut self.socket, &hello).await?;
            receive(&mut self.socket, &mut PartialMessages::default()).await
        };
        let welcome = time::timeout(CONNECT_TIMEOUT, answer).await;
        let reason = match welcome.unwrap_or_else(|_| Err("the server does not answer".into())) {
            Ok(Some(ToAgent::Welcome { heartbeat_secs, lease_secs, acknowledged, revoked, server_lock })) => {
                agent.state_dir.record_server(server_lock.as_deref().map(Path::new));
                agent.context.lease.set_length(seconds(lease_secs));
                agent.context.lease.renew(sent);
                if let Some(wait) = &mut agent.next_attempt_wait {
                    wait.restart();
                }
                tracing::info!(name = agent.context.remote.name, slots = agent.slots.len(), "connected");
                let connected = Connected {
                    socket: self.socket,
                    attempts: HashMap::new(),
                    acknowledged,
                    has_announced_leaving: false,
                    heartbeat: seconds(heartbeat_secs).max(Duration::from_millis(50)),
                    heartbeat_sent: None,
                    last_heard: Instant::now(),
                    answers: JoinSet::new(),
                    samples: agent.samples.clone(),
                    partial: PartialMessages::default(),
                    split_message_count: 0,
                    parts: VecDeque::new(),
                };
                return connected.serve(agent, signals, revoked).await;
            }
            Ok(Some(ToAgent::Refused { reason, is_temporary: true })) => reason,
            Ok(Some(ToAgent::Refused { reason, .. })) => return Outcome::Refused(reason),
            Ok(Some(_)) => "the first message of the server is not Welcome".into(),
            Ok(None) => "the server sent an unknown message".into(),
            Err(reason) => reason,
        };
        Outcome::Lost { reason, was_welcomed: false }
    }
}

/// The state of an attempt on this connection.
#[derive(Default)]
struct AttemptState {
    /// `None` before the first report.
    outbox: Option<Outbox>,
    /// Whether the server has given the attempt to other agents. Its ranks are ended, and its records are not reported.
    is_revoked: bool,
    /// When a `Stop` arrived after the attempt had already ended here. Either the `Stop` crossed the last report, or the server
    /// accepts no more reports of the attempt.
    stopped_late: Option<Instant>,
    /// Whether this agent has reported that it is ready for the start on several machines.
    has_reported_ready: bool,
}

/// A connection after its `Welcome`.
struct Connected {
    socket: Socket,
    attempts: HashMap<AttemptRef, AttemptState>,
    /// The records that the server had at the time of `Welcome`.
    acknowledged: Vec<Acknowledged>,
    /// Whether the agent has announced on this connection that it is ending. On a new connection the server assumes
    /// that the agent continues.
    has_announced_leaving: bool,
    heartbeat: Duration,
    heartbeat_sent: Option<Instant>,
    last_heard: Instant,
    /// Tasks that answer requests of the server.
    answers: JoinSet<FromAgent>,
    samples: watch::Receiver<Option<MachineSample>>,
    partial: PartialMessages,
    split_message_count: u64,
    /// Parts of long replies that are still to be sent. Heartbeats and reports are sent in between.
    parts: VecDeque<Vec<u8>>,
}

impl Connected {
    async fn serve(mut self, agent: &mut Agent, signals: &mut Signals, revoked: Vec<AttemptRef>) -> Outcome {
        for attempt in revoked {
            tracing::warn!(job = %attempt.job, attempt = attempt.attempt, "the server has ended this attempt: ending its ranks. `lockstep show` says why, and `lockstep retry` continues a job that failed");
            if let Some(found) = agent.find_attempt(&attempt) {
                found.send_order(Order::Stop { patient: false });
            }
            self.attempts.entry(attempt).or_default().is_revoked = true;
        }
        self.check_machine(agent);
        let mut heartbeat = time::interval(self.heartbeat);
        heartbeat.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        let mut pump = time::interval(PUMP_EVERY);
        pump.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        loop {
            let outcome = tokio::select! {
                message = receive(&mut self.socket, &mut self.partial) => match message {
                    Ok(message) => {
                        self.last_heard = Instant::now();
                        message.map_or(Ok(()), |message| self.handle(agent, message))
                    }
                    Err(reason) => Err(Outcome::lost(reason)),
                },
                _ = heartbeat.tick() => self.beat(agent).await,
                _ = pump.tick(), if !agent.attempts.is_empty() || !agent.declined.is_empty() || agent.leaving.is_some() => self.pump(agent).await,
                sample = sampling::next_sample(&mut self.samples) => self.send(&FromAgent::Sample(Box::new(sample))).await,
                Some(Ok(answer)) = self.answers.join_next() => self.frames(&answer).map(|frames| self.parts.extend(frames)),
                // Sent in the body and not in this branch's future, because `select!` could cancel the future after
                // half a message.
                () = std::future::ready(()), if !self.parts.is_empty() => match self.parts.pop_front() {
                    Some(part) => self.send_bytes(part).await,
                    None => Ok(()),
                },
                signal = signals.next() => match agent.handle_signal(signal) {
                    ControlFlow::Break(()) => Err(Outcome::End),
                    // `pump` announces the shutdown to the server.
                    ControlFlow::Continue(()) => Ok(()),
                },
            };
            if let Err(outcome) = outcome {
                if matches!(outcome, Outcome::End) {
                    // Closing the connection shows the server that this agent has ended, before the lease expires.
                    let _ = time::timeout(Duration::from_secs(1), self.socket.close(None)).await;
                }
                return outcome;
            }
        }
    }

    /// Ends the session if the server is silent, and sends a heartbeat if none is in flight.
    async fn beat(&mut self, agent: &mut Agent) -> Result<(), Outcome> {
        let is_connected = true;
        if agent.check_end(is_connected).is_break() {
            return Err(Outcome::End);
        }
        let limit = MIN_SILENCE_TIMEOUT.max(self.heartbeat * 3);
        if self.last_heard.elapsed() > limit {
            return Err(Outcome::lost(format!("the server was silent for {} s", limit.as_secs())));
        }
        // Only one heartbeat is in flight, so that a response can be attributed to its heartbeat.
        if self.heartbeat_sent.is_none() {
            self.heartbeat_sent = Some(Instant::now());
            if agent.no_work.is_some() {
                agent.check_folder();
            }
            let (attempts, no_work) = (agent.attempt_refs(), agent.no_work.clone());
            self.send(&FromAgent::Heartbeat { attempts, no_work }).await?;
        }
        Ok(())
    }

    /// Sends new records of the ranks, and drops attempts whose end the server has acknowledged.
    async fn pump(&mut self, agent: &mut Agent) -> Result<(), Outcome> {
        if let Some(leaving) = &mut agent.leaving
            && !self.has_announced_leaving
        {
            self.send(&FromAgent::Leaving { reason: leaving.reason.clone() }).await?;
            (self.has_announced_leaving, leaving.is_announced) = (true, true);
        }
        for (attempt, reason) in std::mem::take(&mut agent.declined) {
            self.send(&FromAgent::Declined { attempt, reason }).await?;
        }
        let (mut reports, mut done) = (Vec::new(), Vec::new());
        for attempt in agent.attempts.values() {
            let attempt_ref = attempt.attempt();
            // Checked before the files are read, so that all records from before the end are read.
            let is_over = attempt.is_over();
            let state = self.attempts.entry(attempt_ref.clone()).or_default();
            if !is_over
                && !state.has_reported_ready
                && let Some(port) = attempt.gang.as_ref().and_then(Gang::ready_port)
            {
                state.has_reported_ready = true;
                reports.push(FromAgent::Ready { attempt: attempt_ref.clone(), port });
            }
            if state.is_revoked {
                if is_over {
                    let is_refused = true;
                    done.push((attempt_ref.clone(), is_refused));
                }
                continue;
            }
            let outbox = state.outbox.get_or_insert_with(|| Outbox::new(&attempt.stored, &self.acknowledged));
            outbox.fill(&attempt.stored, is_over, Instant::now(), &mut reports);
            let is_delivered = outbox.is_delivered();
            let is_refused =
                !is_delivered && state.stopped_late.is_some_and(|at| at.elapsed() > MAX_CROSSING);
            if is_over && (is_delivered || is_refused) {
                done.push((attempt_ref.clone(), is_refused));
            }
        }
        for report in reports {
            self.send(&report).await?;
        }
        for (attempt, is_refused) in done {
            self.attempts.remove(&attempt);
            agent.forget(&attempt, is_refused);
        }
        let is_connected = true;
        if agent.check_end(is_connected).is_break() { Err(Outcome::End) } else { Ok(()) }
    }

    fn handle(&mut self, agent: &mut Agent, message: ToAgent) -> Result<(), Outcome> {
        match message {
            ToAgent::Ack(acknowledged) => {
                let state = self.attempts.get_mut(&acknowledged.attempt);
                if let Some(outbox) = state.and_then(|state| state.outbox.as_mut()) {
                    outbox.acknowledge(&acknowledged);
                }
            }
            ToAgent::HeartbeatAck => {
                if let Some(sent) = self.heartbeat_sent.take() {
                    agent.context.lease.renew(sent);
                }
            }
            ToAgent::Start(start) => agent.start(*start),
            ToAgent::Launch { attempt, master_port } => {
                if let Some(gang) = agent.find_attempt(&attempt).and_then(|attempt| attempt.gang.as_ref()) {
                    gang.launch(master_port);
                }
            }
            // Attempts are numbered from 1, so this message is about the job.
            ToAgent::Stop { attempt, .. } if attempt.attempt == 0 => agent.record_final_job(&attempt.job),
            ToAgent::Stop { attempt, reason, patient } => {
                tracing::info!(job = %attempt.job, attempt = attempt.attempt, reason, "asked to stop");
                if let Some(found) = agent.find_attempt(&attempt) {
                    found.send_order(Order::Stop { patient });
                    if found.is_over() {
                        let state = self.attempts.entry(attempt).or_default();
                        state.stopped_late.get_or_insert_with(Instant::now);
                    }
                }
            }
            ToAgent::Request { id, request } => self.handle_request(agent, id, request),
            ToAgent::Refused { reason, .. } => return Err(Outcome::Refused(reason)),
            // A `Welcome` is only the first message, and `receive` has joined all parts.
            ToAgent::Welcome { .. } | ToAgent::Part(_) => {}
        }
        Ok(())
    }

    /// Runs `doctor`'s quick checks once in the agent's life, and reports the findings on each connection.
    fn check_machine(&mut self, agent: &Agent) {
        let (cell, program) = (agent.findings.clone(), agent.context.program.clone());
        let (dir, is_idle) = (agent.state_dir.dir().to_owned(), agent.attempts.is_empty());
        self.answers.spawn(async move {
            let findings = cell.get_or_init(|| findings::find(&program, &dir, is_idle)).await.clone();
            FromAgent::Findings { findings }
        });
    }

    /// Handles a request concurrently in a separate process, because it takes time and memory.
    fn handle_request(&mut self, agent: &Agent, id: u64, request: AgentRequest) {
        let program = agent.context.program.clone();
        self.answers
            .spawn(async move { FromAgent::Reply { id, reply: inspect::request(&program, &request).await } });
    }

    fn frames(&mut self, message: &FromAgent) -> Result<Vec<Vec<u8>>, Outcome> {
        wire::frames(message, &mut self.split_message_count, FromAgent::Part).map_err(Outcome::lost)
    }

    /// Sends all frames of a message at once, because reports must arrive in order.
    async fn send(&mut self, message: &FromAgent) -> Result<(), Outcome> {
        for frame in self.frames(message)? {
            self.send_bytes(frame).await?;
        }
        Ok(())
    }

    async fn send_bytes(&mut self, bytes: Vec<u8>) -> Result<(), Outcome> {
        match time::timeout(SEND_TIMEOUT, self.socket.send(Message::Binary(bytes.into()))).await {
            Ok(sent) => sent.map_err(Outcome::lost),
            Err(_) => Err(Outcome::lost("the server does not read")),
        }
    }
}

fn seconds(secs: f64) -> Duration {
    Duration::try_from_secs_f64(secs).unwrap_or(Duration::from_secs(1))
}
