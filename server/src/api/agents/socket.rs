//! An agent's connection. The agent sends a hello, heartbeats and reports; the server sends a welcome, work and acknowledgements.

mod identity;
mod introduction;
mod messages;

use crate::api::prelude::*;
use crate::{
    agents::{
        JoinError,
        inbox::{QueueItem, RESERVE_TIMEOUT, ReportConnection},
        machines,
    },
    api::{agents, close_code_of, close_websocket},
    auth::Auth,
    http::peer::{Peer, PeerPolicy},
    lifecycle,
    scheduler::{
        Scheduler,
        dispatch::{self, StopMode},
    },
    store::{AgentRow, Report, Store},
};
use axum::extract::{
    WebSocketUpgrade,
    ws::{Message, WebSocket, close_code, rejection::WebSocketUpgradeRejection},
};
use futures_util::{SinkExt, StreamExt, stream::SplitSink};
use introduction::{MAX_ATTEMPTS, TOO_MANY_ATTEMPTS, check_hello, truncate_text};
use lockstep_protocol::{
    agent::{AttemptRef, FencingToken, FromAgent, Slot, Source, ToAgent},
    job::JobId,
    stream::CLOSE_SIGNED_OUT,
    wire::{self, PartialMessages},
};
use messages::{HELLO_BYTES, MESSAGE_BYTES, read, read_first};
use std::{
    collections::VecDeque,
    ops::ControlFlow,
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// Maximum number of attempts that the server orders an agent to stop after a heartbeat.
const MAX_STOPS: usize = 64;
/// Time limit for the arrival of `Hello`, and for sending a message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Connect an agent
///
/// A websocket of binary MessagePack frames; see `lockstep_protocol::agent`. The request's token or the connection's certificate is bound
/// to an agent; an agent with another id is refused.
#[utoipa::path(get, path = "/agent/socket", tag = "agents", responses((status = 101), (status = 426, body = Problem)))]
pub(crate) async fn socket(
    State(scheduler): State<Arc<Scheduler>>,
    State(auth): State<Arc<Auth>>,
    State(peer_policy): State<Arc<PeerPolicy>>,
    Extension(caller): Extension<Caller>,
    Extension(peer): Extension<Peer>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response> {
    let upgrade = upgrade?.max_message_size(MESSAGE_BYTES).max_frame_size(MESSAGE_BYTES);
    Ok(upgrade.on_upgrade(move |socket| {
        let tasks = scheduler.tasks.tracker.clone();
        tasks.track_future(serve(scheduler, auth, peer_policy, caller, peer, socket))
    }))
}

type Sink = SplitSink<WebSocket, Message>;

async fn send(sink: &mut Sink, message: &ToAgent) -> Result<(), String> {
    send_bytes(sink, wire::encode(message).map_err(|e| e.to_string())?).await
}

async fn send_bytes(sink: &mut Sink, bytes: Vec<u8>) -> Result<(), String> {
    match tokio::time::timeout(MESSAGE_TIMEOUT, sink.send(Message::Binary(bytes.into()))).await {
        Ok(sent) => sent.map_err(|e| e.to_string()),
        Err(_) => Err("the agent does not read messages".into()),
    }
}

/// Why a connection ends: for the log, and for the agent in the close frame.
struct End {
    why: String,
    code: u16,
}

impl End {
    /// A violation of the protocol.
    fn protocol(why: impl Into<String>) -> Self {
        Self { why: why.into(), code: close_code::PROTOCOL }
    }
}

/// Any other reason, which is not the agent's fault.
impl From<String> for End {
    fn from(why: String) -> Self {
        Self { why, code: close_code::NORMAL }
    }
}

impl From<axum::Error> for End {
    fn from(error: axum::Error) -> Self {
        Self { code: close_code_of(&error), why: error.to_string() }
    }
}

async fn serve(
    scheduler: Arc<Scheduler>,
    auth: Arc<Auth>,
    peer_policy: Arc<PeerPolicy>,
    caller: Caller,
    peer: Peer,
    socket: WebSocket,
) {
    let (mut sink, mut stream) = socket.split();
    let mut partial = PartialMessages::with_limit(HELLO_BYTES);
    let hello_deadline = tokio::time::Instant::now() + MESSAGE_TIMEOUT;
    let hello = loop {
        let message = match tokio::time::timeout_at(hello_deadline, stream.next()).await {
            Ok(Some(message)) => message,
            Ok(None) | Err(_) => {
                return close_websocket(&mut sink, close_code::POLICY, "no Hello arrived").await;
            }
        };
        match read_first(message, &mut partial).await {
            Ok(Some(message)) => break message,
            Ok(None) => {}
            Err(End { why, code }) => {
                tracing::warn!(reason = why, "a connection did not begin with an agent's Hello");
                return close_websocket(&mut sink, code, &why).await;
            }
        }
    };

    let (outgoing, mut outbox) = mpsc::unbounded_channel();
    // The limit is lower than the limit of messages to agents, which may contain pictures.
    let mut partial = PartialMessages::with_limit(MESSAGE_BYTES);
    let joined = async {
        let (joining, attempts) = check_hello(hello, peer.address)?;
        identity::check(&auth, &caller, &joining.row).await?;
        let (row, only_job) = (joining.row.clone(), joining.only_job.clone());
        // A restarted agent replaces its old connection if that was silent for half a lease. The other half is left to renew the leases.
        let max_silence = scheduler.config.lease / 2;
        let number = scheduler.agents.join(joining, max_silence, outgoing)?;
        Ok::<_, JoinError>((row, attempts, only_job, number))
    };
    let (row, attempts, only_job, number) = match joined.await {
        Ok(joined) => joined,
        Err(JoinError { why: reason, is_temporary }) => {
            let who = caller.token().map_or_else(|| "(unknown)".into(), |token| token.name.clone());
            scheduler.agents.refusals.note(peer.address, &who, &reason);
            let _ = send(&mut sink, &ToAgent::Refused { reason, is_temporary }).await;
            return close_websocket(&mut sink, close_code::POLICY, "refused").await;
        }
    };

    let (id, name) = (row.id.clone(), row.name.clone());
    let certificate = identity::record_join(&peer_policy, &caller, &peer, &row);
    let (reports, mut records_missing) = ReportConnection::new();
    let mut connection = Connection {
        scheduler: &scheduler,
        id: id.clone(),
        name: name.clone(),
        number,
        slots: row.slots.clone(),
        reports,
        only_job,
        leave_reason: None,
        waited: Duration::ZERO,
    };
    let welcomed = connection.welcome(&mut sink, row, &attempts).await;
    // One future for the whole connection, because each new future verifies the certificate's signatures.
    let mut certificate_refused = std::pin::pin!(async {
        match &certificate {
            Some((trust, certificate)) => trust.wait_until_refused(certificate).await,
            None => std::future::pending().await,
        }
    });
    // Long messages are sent in parts. Other messages are sent between the parts.
    let (mut unsent_parts, mut split_message_count) = (VecDeque::new(), 0);
    let End { why, code } = match welcomed {
        Err(why) => why.into(),
        Ok(()) => {
            tracing::info!(agent = name, "an agent is online");
            scheduler.agents.leases.wake_dispatch();
            loop {
                tokio::select! {
                    message = tokio::time::timeout(scheduler.config.lease, stream.next()) => match message {
                        Ok(Some(message)) => match read(message, &mut partial).await {
                            Ok(Some((message, bytes))) => {
                                if let ControlFlow::Break(end) = connection.handle(message, bytes).await {
                                    break end;
                                }
                            }
                            Ok(None) => {}
                            Err(end) => break end,
                        },
                        Ok(None) => break "the agent closed the connection".to_owned().into(),
                        Err(_) => break "the agent was silent for the length of a lease".to_owned().into(),
                    },
                    message = outbox.recv() => match message {
                        Some(message) => match wire::frames(&message, &mut split_message_count, ToAgent::Part) {
                            Ok(frames) if frames.len() > 1 => unsent_parts.extend(frames),
                            Ok(frames) => {
                                let mut frames = frames.into_iter();
                                if let Some(frame) = frames.next()
                                    && let Err(why) = send_bytes(&mut sink, frame).await
                                {
                                    break why.into();
                                }
                            }
                            Err(error) => tracing::error!(%error, "a message for an agent cannot be written"),
                        },
                        None => break "the agent has connected again".to_owned().into(),
                    },
                    // Sent in this arm's body, because `select!` would drop an unfinished send.
                    () = std::future::ready(()), if !unsent_parts.is_empty() => {
                        if let Some(part) = unsent_parts.pop_front()
                            && let Err(why) = send_bytes(&mut sink, part).await
                        {
                            break why.into();
                        }
                    }
                    () = caller.wait_until_ended() => {
                        break End { why: "the agent's token is no longer valid".into(), code: CLOSE_SIGNED_OUT };
                    }
                    why = &mut certificate_refused => {
                        scheduler.agents.refusals.note(peer.address, &name, &why);
                        break End { why, code: CLOSE_SIGNED_OUT };
                    }
                    _ = records_missing.recv() => {
                        break End { why: "records are missing; the agent must reconnect".into(), code: close_code::AGAIN };
                    }
                    () = scheduler.tasks.stopping.cancelled() => {
                        break End { why: "the server is stopping".into(), code: close_code::AWAY };
                    }
                }
            }
        }
    };

    tracing::info!(agent = name, why, "an agent's connection ends");
    let (leave_reason, only_job) = (connection.leave_reason.clone(), connection.only_job.clone());
    if let Some(online) = scheduler.agents.disconnect(&id, number) {
        // Stores the time at which the agent was last seen, for a restarted server.
        if let Err(error) = scheduler.agents.rows.put(&*scheduler.store, AgentRow::clone(&online.row)).await {
            tracing::warn!(%error, "the time at which an agent was last seen could not be stored");
        }
        if let Some(reason) = leave_reason {
            // With this code, the server has closed the connection before it has read all reports.
            let has_unread_reports = code == close_code::AGAIN;
            dispatch::requeue_after_leave(&scheduler, online, reason, has_unread_reports).await;
        }
        // Removes an agent that served a single job and ended with that job. Otherwise the agent would stay on the list forever. An agent
        // that will reconnect stays on the list, and so does a drained agent.
        if let Some(job) = only_job
            && !matches!(code, close_code::AGAIN | close_code::AWAY)
            && !scheduler.agents.is_draining(&id)
            && scheduler.agents.leases.attempts_on(&id).is_empty()
            && is_over(&*scheduler.store, &job).await
            && !scheduler.agents.is_connected(&id)
            && let Err(error) = agents::forget(&scheduler, &id).await
        {
            tracing::warn!(%error, "an agent that has ended with its only job could not be removed from the list of machines");
        }
    }
    scheduler.agents.leases.wake_dispatch();
    close_websocket(&mut sink, code, &why).await;
}

/// The connection of the agent with this id and name.
struct Connection<'a> {
    scheduler: &'a Arc<Scheduler>,
    id: String,
    name: String,
    /// Number of the connection, which differs for each connection of the agent.
    number: u64,
    slots: Vec<Slot>,
    reports: ReportConnection,
    /// The only job that the agent serves, if any.
    only_job: Option<JobId>,
    /// Why the agent leaves; `None` until the agent announces this.
    leave_reason: Option<String>,
    /// Total time for which reports have waited for space in the inbox since the last heartbeat.
    waited: Duration,
}

impl Connection<'_> {
    /// Stores the agent, renews its leases, and sends `Welcome` and the orders that the agent has missed.
    async fn welcome(&self, sink: &mut Sink, row: AgentRow, attempts: &[AttemptRef]) -> Result<(), String> {
        let scheduler = self.scheduler;
        let failed = |e: crate::store::StoreError| e.to_string();
        scheduler.agents.rows.put(&*scheduler.store, row).await.map_err(failed)?;
        scheduler.agents.note_message(&self.id);
        // Stores the pending reports of an earlier connection. Otherwise the agent would send them again.
        scheduler.agents.inbox.flush().await;
        let revoked = scheduler.agents.leases.renew_at_connect(&self.id, attempts);
        let mut acknowledged = Vec::new();
        for attempt in attempts {
            acknowledged
                .extend(scheduler.store.acknowledged_records(attempt, &self.id).await.map_err(failed)?);
        }
        let welcome = ToAgent::Welcome {
            heartbeat_secs: scheduler.config.heartbeat.as_secs_f64(),
            lease_secs: scheduler.config.lease.as_secs_f64(),
            acknowledged,
            revoked,
            server_lock: Some(
                crate::util::private_files::server_lock_path(&scheduler.config.data_dir)
                    .to_string_lossy()
                    .into_owned(),
            ),
        };
        scheduler.agents.machines.note_connected(&self.id);
        send(sink, &welcome).await?;
        // While the agent was not connected, a job may have been cancelled, or another agent's ranks of an attempt may have ended.
        for attempt in attempts {
            let row = match scheduler.store.job(&attempt.job).await {
                Err(error) if error.is_temporary() => return Err(error.to_string()),
                // An agent is welcome even if its job cannot be read.
                row => row.ok().flatten().filter(|row| row.live_attempt().as_ref() == Some(attempt)),
            };
            let Some(row) = row else { continue };
            let is_ending = lifecycle::is_ending(&row) && scheduler.agents.leases.agent_count(attempt) > 1;
            let reason = "its ranks on another machine have ended".to_owned();
            let stop_of_remaining = is_ending.then_some((reason, StopMode::AtOnce));
            for (reason, mode) in dispatch::stop_reason(&row).into_iter().chain(stop_of_remaining) {
                let patient = mode == StopMode::AfterCheckpoint;
                send(sink, &ToAgent::Stop { attempt: attempt.clone(), reason, patient }).await?;
            }
        }
        Ok(())
    }

    /// Handles a message of `bytes` bytes. Returns the reason if the connection must end.
    async fn handle(&mut self, message: FromAgent, bytes: usize) -> ControlFlow<End> {
        let scheduler = self.scheduler;
        scheduler.agents.note_message(&self.id);
        match message {
            FromAgent::Heartbeat { attempts, no_work } => {
                self.waited = Duration::ZERO;
                if attempts.len() > MAX_ATTEMPTS {
                    return ControlFlow::Break(End::protocol(TOO_MANY_ATTEMPTS));
                }
                scheduler.agents.note_heartbeat(&self.id, crate::now(), None);
                if scheduler.agents.set_no_work(&self.id, no_work.map(truncate_text)) {
                    scheduler.agents.leases.wake_dispatch();
                }
                // If more than `MAX_STOPS` attempts must stop, the next heartbeat names the others again.
                for attempt in scheduler.agents.leases.renew(&self.id, &attempts).into_iter().take(MAX_STOPS)
                {
                    let reason = "it no longer belongs to this agent".into();
                    scheduler.agents.send(&self.id, ToAgent::Stop { attempt, reason, patient: false });
                }
                scheduler.agents.send(&self.id, ToAgent::HeartbeatAck);
                self.stop_after_only_job().await;
            }
            FromAgent::Report { attempt, source, first, events } => {
                if let Source::Rank(rank) = source
                    && scheduler.agents.leases.is_elsewhere(&self.id, &attempt, rank)
                {
                    return ControlFlow::Break(End::protocol(
                        "these records belong to another machine's rank",
                    ));
                }
                let leaving = self.leave_reason.as_ref().map(|why| dispatch::leaving_reason(&self.name, why));
                let began = Instant::now();
                let reservation =
                    scheduler.agents.inbox.reserve(bytes, RESERVE_TIMEOUT.saturating_sub(self.waited)).await;
                self.waited += began.elapsed();
                // The agent's attempts continue after the end of the connection, because `welcome` renews their leases when it reconnects.
                let Some(reservation) = reservation else {
                    let why = "the database is behind; reconnect later".into();
                    return ControlFlow::Break(End { why, code: close_code::AGAIN });
                };
                let agent_id = self.id.clone();
                let report = Report { agent_id, attempt, source, first, events, at: crate::now(), leaving };
                let (report, agent, connection) = (Box::new(report), self.id.clone(), self.reports.clone());
                scheduler.agents.inbox.put(QueueItem::Report { agent, connection, report, reservation });
            }
            FromAgent::Reply { id, reply } => scheduler.agents.deliver_reply(self.number, id, reply),
            FromAgent::Sample(sample) => {
                scheduler.agents.machines.add(&self.id, *sample, &self.slots, crate::now())
            }
            FromAgent::Findings { findings } => {
                scheduler.agents.set_findings(&self.id, machines::limit_findings(findings));
            }
            FromAgent::Leaving { reason } => {
                let reason: String = reason.chars().take(200).collect();
                scheduler.agents.note_heartbeat(&self.id, crate::now(), Some(&reason));
                dispatch::stop_other_agents(scheduler, &self.id, &self.name);
                self.leave_reason = Some(reason);
            }
            FromAgent::Declined { attempt, reason } => {
                let reason = truncate_text(reason);
                scheduler.agents.set_no_work(&self.id, Some(reason.clone()));
                dispatch::requeue_declined(scheduler, &self.id, &attempt, reason).await;
            }
            FromAgent::Ready { attempt, port } => dispatch::note_ready(scheduler, attempt, &self.id, port),
            FromAgent::Hello { .. } => {
                return ControlFlow::Break(End::protocol("the agent sent Hello twice"));
            }
            // Parts are joined before this function is called.
            FromAgent::Part(_) => {}
        }
        ControlFlow::Continue(())
    }

    /// Stops an agent that serves a single job if that job is over. An agent that never started a rank of the job does not learn of the end
    /// otherwise.
    async fn stop_after_only_job(&self) {
        let Some(job) = &self.only_job else { return };
        if is_over(&*self.scheduler.store, job).await {
            // Attempt 0 is no attempt: the order is about the job.
            let attempt = AttemptRef { job: job.clone(), attempt: 0, fencing_token: FencingToken::NONE };
            let reason = "its job is over".into();
            self.scheduler.agents.send(&self.id, ToAgent::Stop { attempt, reason, patient: false });
        }
    }
}

/// Whether a job is over or deleted; false if the database cannot be read.
async fn is_over(store: &dyn Store, job: &JobId) -> bool {
    let found = store.job(job).await;
    found.is_ok_and(|found| found.is_none_or(|row| row.job.state.is_final()))
}
