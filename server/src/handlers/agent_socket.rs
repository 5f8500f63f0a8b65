//! An agent's connection: hello, heartbeats, reports in; welcome, work, acknowledgements out.

use crate::{
    app::App,
    dispatch,
    error::{Error, Problem, Result},
    ingest::Work,
    store::{AgentRow, Report},
};
use axum::{
    extract::{
        State, WebSocketUpgrade,
        ws::{CloseFrame, Message, WebSocket, rejection::WebSocketUpgradeRejection},
    },
    http::StatusCode,
    response::Response,
};
use futures_util::{SinkExt, StreamExt, stream::SplitSink};
use lockstep_protocol::{
    agent::{AttemptRef, FromAgent, PROTOCOL_VERSION, ToAgent},
    wire,
};
use std::{ops::ControlFlow, time::Duration};
use tokio::sync::mpsc;

/// A report holds about a mebibyte at most; a long tail of log lines may make it somewhat more.
const MESSAGE_BYTES: usize = 16 << 20;
/// Until `Hello` must have come, and for an answer to be taken.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest name of an agent, in bytes; its id alike.
const NAME_BYTES: usize = 100;
const SLOTS: usize = 1024;

/// For agents
///
/// A websocket of binary MessagePack frames; see `lockstep_protocol::agent`.
#[utoipa::path(get, path = "/agent/socket", tag = "agents", responses((status = 101), (status = 426, body = Problem)))]
pub(crate) async fn socket(
    State(app): State<App>,
    upgrade: std::result::Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response> {
    let upgrade = upgrade.map_err(|e| {
        Error::Refused(
            StatusCode::UPGRADE_REQUIRED,
            format!("this address is a websocket: {}", e.body_text()),
        )
    })?;
    let upgrade = upgrade.max_message_size(MESSAGE_BYTES).max_frame_size(MESSAGE_BYTES);
    Ok(upgrade.on_upgrade(move |socket| {
        let tasks = app.tasks.clone();
        tasks.track_future(serve(app, socket))
    }))
}

type Sink = SplitSink<WebSocket, Message>;

async fn send(to: &mut Sink, message: &ToAgent) -> std::result::Result<(), String> {
    let bytes = wire::encode(message).map_err(|e| e.to_string())?;
    match tokio::time::timeout(PATIENCE, to.send(Message::Binary(bytes.into()))).await {
        Ok(sent) => sent.map_err(|e| e.to_string()),
        Err(_) => Err("it takes nothing".into()),
    }
}

async fn close(to: &mut Sink, code: u16, reason: &str) {
    let frame = CloseFrame { code, reason: reason.into() };
    let _ = tokio::time::timeout(Duration::from_secs(1), to.send(Message::Close(Some(frame)))).await;
}

fn read(message: &Message) -> std::result::Result<Option<FromAgent>, String> {
    match message {
        Message::Binary(bytes) => {
            wire::decode(bytes).map(Some).map_err(|e| format!("it sent what cannot be read: {e}"))
        }
        Message::Text(_) => Err("it sent text".into()),
        Message::Ping(_) | Message::Pong(_) | Message::Close(_) => Ok(None),
    }
}

struct Hello {
    row: AgentRow,
    attempts: Vec<AttemptRef>,
    only_job: Option<lockstep_protocol::JobId>,
}

/// Checks an agent's first message. The error is for the agent's user.
fn introduction(message: FromAgent) -> std::result::Result<Hello, String> {
    let FromAgent::Hello { protocol, agent_id, name, machine, slots, attempts, only_job } = message else {
        return Err("the first message of a connection must be Hello".into());
    };
    if protocol != PROTOCOL_VERSION {
        return Err(format!(
            "this server speaks version {PROTOCOL_VERSION} of the protocol and the agent version {protocol}; \
             run the same version of lockstep on both"
        ));
    }
    let named =
        |text: &str| !text.trim().is_empty() && text.len() <= NAME_BYTES && !text.contains(char::is_control);
    if !named(&name) || !named(&agent_id) {
        return Err(format!(
            "an agent's name must have 1 to {NAME_BYTES} plain characters; give one with --name"
        ));
    }
    if slots.len() > SLOTS {
        return Err(format!("an agent may have at most {SLOTS} slots"));
    }
    let row = AgentRow { id: agent_id, name, machine, slots, last_seen_at: crate::now() };
    Ok(Hello { row, attempts, only_job })
}

async fn serve(app: App, socket: WebSocket) {
    let (mut to, mut from) = socket.split();
    let first = loop {
        match tokio::time::timeout(PATIENCE, from.next()).await {
            Ok(Some(Ok(message))) => match read(&message) {
                Ok(Some(message)) => break message,
                Ok(None) => {}
                Err(reason) => {
                    tracing::warn!(reason, "a connection that is no agent's");
                    return close(&mut to, 1008, "no agent").await;
                }
            },
            _ => return close(&mut to, 1008, "no Hello came").await,
        }
    };
    let (outgoing, mut outbox) = mpsc::unbounded_channel();
    let joined = introduction(first).and_then(|hello| {
        app.agents.join(hello.row.clone(), hello.only_job.clone(), outgoing).map(|c| (hello, c))
    });
    let (hello, connection) = match joined {
        Ok(joined) => joined,
        Err(reason) => {
            tracing::warn!(reason, "an agent was refused");
            let _ = send(&mut to, &ToAgent::Refused { reason }).await;
            return close(&mut to, 1008, "refused").await;
        }
    };
    let id = hello.row.id.clone();
    let name = hello.row.name.clone();
    let (cut, mut cut_off) = mpsc::channel(1);
    let mut agent =
        Connection { app: &app, id: id.clone(), name: name.clone(), number: connection, cut, leaving: None };
    let welcomed = agent.welcome(&mut to, hello).await;
    let why = match welcomed {
        Err(why) => why,
        Ok(()) => {
            tracing::info!(agent = name, "an agent is online");
            app.dispatch.poke();
            loop {
                tokio::select! {
                    message = tokio::time::timeout(app.config.lease, from.next()) => match message {
                        Ok(Some(Ok(message))) => match read(&message) {
                            Ok(Some(message)) => if let ControlFlow::Break(why) = agent.hear(message) { break why },
                            Ok(None) => {}
                            Err(why) => break why,
                        },
                        Ok(Some(Err(error))) => break error.to_string(),
                        Ok(None) => break "it closed the connection".to_owned(),
                        Err(_) => break "it was silent for the length of a lease".to_owned(),
                    },
                    message = outbox.recv() => match message {
                        Some(message) => if let Err(why) = send(&mut to, &message).await { break why },
                        None => break "it has connected anew".to_owned(),
                    },
                    _ = cut_off.recv() => break "records are missing; it is to begin again".to_owned(),
                    () = app.stopping.cancelled() => {
                        close(&mut to, 1001, "the server is stopping").await;
                        break "the server is stopping".to_owned();
                    }
                }
            }
        }
    };
    tracing::info!(agent = name, why, "an agent's connection ends");
    let leaving = agent.leaving.clone();
    if let Some(online) = app.agents.leave(&id, connection) {
        // When it was last seen, for a server that starts again.
        if let Err(error) = app.store.put_agent(&online.row).await {
            tracing::warn!(%error, "when an agent was last seen could not be stored");
        }
        if let Some(reason) = leaving
            && let Err(error) = dispatch::left(&app, &online, &reason).await
        {
            tracing::warn!(%error, "the jobs of an agent that left wait for their leases");
        }
    }
    app.dispatch.poke();
    close(&mut to, 1000, "").await;
}

struct Connection<'a> {
    app: &'a App,
    id: String,
    name: String,
    number: u64,
    cut: mpsc::Sender<()>,
    leaving: Option<String>,
}

impl Connection<'_> {
    async fn welcome(&self, to: &mut Sink, hello: Hello) -> std::result::Result<(), String> {
        let app = self.app;
        let failed = |e: crate::store::StoreError| e.to_string();
        app.store.put_agent(&hello.row).await.map_err(failed)?;
        // What an earlier connection sent may still wait to be stored; its agent would send it again.
        app.ingest.drained().await;
        let revoked = app.dispatch.renew(&self.id, &hello.attempts);
        let mut acknowledged = Vec::new();
        for attempt in &hello.attempts {
            acknowledged.extend(app.store.acknowledged(attempt).await.map_err(failed)?);
        }
        let welcome = ToAgent::Welcome {
            heartbeat_secs: app.config.heartbeat.as_secs_f64(),
            lease_secs: app.config.lease.as_secs_f64(),
            acknowledged,
            revoked,
            server_lock: Some(crate::serve::lock_path(&app.config.data_dir).to_string_lossy().into_owned()),
        };
        send(to, &welcome).await?;
        // Somebody may have cancelled a job while its agent was away.
        for live in app.store.live_attempts().await.map_err(failed)? {
            let patient = live.stop.is_none();
            let wish = live.stop.or_else(|| live.pausing.then(|| "paused on request".to_owned()));
            if let Some(reason) = wish
                && hello.attempts.contains(&live.attempt)
            {
                send(to, &ToAgent::Stop { attempt: live.attempt, reason, patient }).await?;
            }
        }
        Ok(())
    }

    fn hear(&mut self, message: FromAgent) -> ControlFlow<String> {
        let app = self.app;
        match message {
            FromAgent::Heartbeat { attempts } => {
                app.agents.heard(&self.id, crate::now(), None);
                for attempt in app.dispatch.renew(&self.id, &attempts) {
                    let reason = "it is no longer this agent's to run".into();
                    app.agents.tell(&self.id, ToAgent::Stop { attempt, reason, patient: false });
                }
                app.agents.tell(&self.id, ToAgent::HeartbeatAck);
            }
            FromAgent::Report { attempt, source, first, events } => {
                let leaving = self.leaving.as_ref().map(|why| dispatch::leaving_reason(&self.name, why));
                let report = Report { attempt, source, first, events, at: crate::now(), leaving };
                let work = Work::Report { agent: self.id.clone(), connection: self.cut.clone(), report };
                if !app.ingest.put(work) {
                    return ControlFlow::Break("the database is behind; it is to come back".into());
                }
            }
            FromAgent::Answer { request, answer } => app.agents.answered(self.number, request, answer),
            FromAgent::Leaving { reason } => {
                let reason: String = reason.chars().take(200).collect();
                app.agents.heard(&self.id, crate::now(), Some(&reason));
                self.leaving = Some(reason);
            }
            FromAgent::Hello { .. } => return ControlFlow::Break("it said Hello twice".into()),
        }
        ControlFlow::Continue(())
    }
}
