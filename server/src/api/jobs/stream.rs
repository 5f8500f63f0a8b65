//! Websockets of the dashboard: the events of one job, each exactly once and in order, and the list of jobs.

use crate::api::prelude::*;
use crate::{
    api::{close_code_of, close_websocket, jobs},
    events::hub::{JobUpdate, LIST_INTERVAL, Subscription},
    http::extract::parse_job_id,
    scheduler::Scheduler,
    store::{EventRow, JobFilter, JobRow},
};
use axum::extract::{
    WebSocketUpgrade,
    ws::{CloseFrame, Message, WebSocket, close_code, rejection::WebSocketUpgradeRejection},
};
use futures_util::{SinkExt, StreamExt, stream::SplitSink};
use lockstep_protocol::{
    Job,
    stream::{CLOSE_SIGNED_OUT, CLOSE_TOO_SLOW, Frame, HEARTBEAT_SECS, Pace},
};
use std::{sync::atomic::Ordering, time::Duration};
use tokio::{sync::broadcast::error::RecvError, time::Instant};

/// Interval between two heartbeats. With each heartbeat, the server sends a ping, to notice a disconnected reader. The heartbeat is for the
/// reader's script, which does not see pings: if heartbeats stop, the connection is broken.
const HEARTBEAT: Duration = Duration::from_secs(HEARTBEAT_SECS);
/// Number of events in each query to the store.
const REPLAY_EVENTS: u32 = 500;
/// Number of jobs that are sent to a reader of the list that fell behind.
const RESENT_JOBS: u32 = 500;
/// Maximum size of a message from a browser, in bytes. Browsers send only pongs and a close frame.
const INCOMING_BYTES: usize = 4096;

/// Parameters of `GET /jobs/{id}/stream`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct SinceQuery {
    /// Number of the last event that the client has; 0 for all events. A number above the job's `last_seq` counts as `last_seq`.
    #[serde(default)]
    since: u64,
    /// Whether the stream stays open after the job's end, for changes of the job's tags and for the next attempt.
    #[serde(default)]
    keep_open: bool,
}

/// Stream a job's events
///
/// A websocket of JSON text frames: `hello`, every event after `since` in order, `live`, then new events. Between events come
/// `progress` with the job's speed and remaining time, `changed` when the job's tags, notes, priority or project change, and
/// `heartbeat` every 20 seconds. When the job has ended and all its events are sent, `end` (`{"type": "end", "state": "succeeded"}`) is the
/// last frame, and the server closes the connection with code 1000, unless `keep_open` is set.
/// Points of metrics are removed from the events some time after the job's end (`lockstep serve --keep-points`). `first_seq` in `hello` is
/// the number of the first remaining event, and `GET /jobs/{id}/metrics` returns earlier points.
/// If `since` is above `last_seq` in `hello`, an older database was restored. The stream then continues from `last_seq`, and the client
/// must discard the later events that it has.
#[utoipa::path(get, path = "/jobs/{id}/stream", tag = "streams", params(("id" = String, Path), SinceQuery),
    responses((status = 101, body = Frame), (status = 426, body = Problem)))]
pub(crate) async fn job_stream(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(query): Query<SinceQuery>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response> {
    let id = parse_job_id(&id)?;
    let upgrade = upgrade?.max_message_size(INCOMING_BYTES).max_frame_size(INCOMING_BYTES);
    // Subscribed before the job is read, so that no event in between is missed.
    let subscription = scheduler.events.hub.subscribe(&id);
    let row = jobs::find_row(&*scheduler.store, &id).await?;
    Ok(upgrade.on_upgrade(move |socket| {
        let tasks = scheduler.tasks.tracker.clone();
        tasks.track_future(async move {
            let reader = Reader::new(&scheduler, caller, socket);
            if let Err(Disconnected) = follow(&scheduler, reader, row, subscription, query).await {
                tracing::debug!("a reader of a stream disconnected");
            }
        })
    }))
}

/// Time limit for sending a close frame, which waits behind earlier messages. A reader that sleeps for longer, such as a laptop, gets no
/// close frame, and its connection is broken.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(60);

/// Close code and reason if the token or session of a reader has ended.
const SIGNED_OUT: (u16, &str) = (CLOSE_SIGNED_OUT, "the token or session is no longer valid");
/// Close code and reason if the server stops.
const STOPPING: (u16, &str) = (close_code::AWAY, "the server is stopping");
/// Close code and reason if the database cannot be read.
const UNAVAILABLE: (u16, &str) = (close_code::AGAIN, "the database is not available; reconnect later");

/// The connection has ended.
struct Disconnected;

/// The connection to a browser that reads a stream. The server writes to `sink`; a task reads the other half until the connection ends.
struct Reader<'a> {
    scheduler: &'a Scheduler,
    caller: Caller,
    sink: SplitSink<WebSocket, Message>,
    /// The task of the other half. Its result is the close code if the reader sent a message that is not allowed.
    closed: tokio::task::JoinHandle<Option<u16>>,
    /// Number of the last event that was written to the connection.
    last_sent: u64,
    /// Whether the reader was too slow and is no longer counted in `stream_clients`.
    is_given_up: bool,
}

impl<'a> Reader<'a> {
    fn new(scheduler: &'a Scheduler, caller: Caller, socket: WebSocket) -> Self {
        scheduler.events.stream_clients.fetch_add(1, Ordering::Relaxed);
        let (sink, mut incoming) = socket.split();
        let closed = tokio::spawn(async move {
            loop {
                match incoming.next().await {
                    Some(Ok(Message::Close(_))) | None => return None,
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Some(close_code_of(&error)),
                }
            }
        });
        Self { scheduler, caller, sink, closed, last_sent: 0, is_given_up: false }
    }

    /// Sends a message; `seq` is the number of the event in the message, if any. Closes the connection of a reader that does not read. The
    /// reader can reconnect with the number of the last event that it received.
    async fn send(&mut self, message: Message, seq: Option<u64>) -> Result<(), Disconnected> {
        let Self { scheduler, caller, sink, last_sent, .. } = self;
        let sending = async {
            sink.feed(message).await?;
            // The event counts as sent before it is flushed: the message is in the buffer, and a close frame follows it.
            *last_sent = seq.unwrap_or(*last_sent);
            sink.flush().await
        };
        let end = tokio::select! {
            result = sending => return result.map_err(|_| Disconnected),
            () = caller.wait_until_ended() => SIGNED_OUT,
            () = scheduler.tasks.stopping.cancelled() => STOPPING,
            () = tokio::time::sleep(scheduler.config.stream_timeout) => {
                // The reader is too slow. The reason is the number of the last event that was sent.
                self.is_given_up = true;
                self.scheduler.events.stream_clients.fetch_sub(1, Ordering::Relaxed);
                let reason = self.last_sent.to_string();
                self.close_when_read(CLOSE_TOO_SLOW, &reason).await;
                return Err(Disconnected);
            }
        };
        self.close(end).await
    }

    /// Closes the connection, and waits until the reader has read the close frame and all messages before it.
    async fn close_when_read(&mut self, code: u16, reason: &str) {
        let frame = CloseFrame { code, reason: reason.into() };
        let closing = async {
            self.sink.send(Message::Close(Some(frame))).await?;
            // Waits until the reader closes. If the server closed the socket with unread input, the operating system would drop output that
            // the reader has not received yet.
            let _ = (&mut self.closed).await;
            Ok::<_, axum::Error>(())
        };
        tokio::select! {
            _ = tokio::time::timeout(CLOSE_TIMEOUT, closing) => {}
            () = self.scheduler.tasks.stopping.cancelled() => {}
            () = self.caller.wait_until_ended() => {}
        }
    }

    async fn send_frame(&mut self, frame: &Frame) -> Result<(), Disconnected> {
        let text = serde_json::to_string(frame).map_err(|_| Disconnected)?;
        self.send(Message::Text(text.into()), None).await
    }

    async fn send_events(&mut self, row: &EventRow) -> Result<(), Disconnected> {
        for (seq, text) in row.frames(self.last_sent) {
            self.send(Message::Text(text.into()), Some(seq)).await?;
        }
        // An event that this version cannot read has no frames, but counts as sent.
        self.last_sent = self.last_sent.max(row.seq);
        Ok(())
    }

    /// Sends a ping, which the reader's browser answers, and a heartbeat, which the reader's script sees.
    async fn heartbeat(&mut self) -> Result<(), Disconnected> {
        self.send(Message::Ping(bytes::Bytes::new()), None).await?;
        self.send_frame(&Frame::Heartbeat { at: crate::now() }).await
    }

    /// Waits until the connection must end. Returns close code and reason; `None` if the reader has ended the connection.
    async fn wait_for_end(&mut self) -> Option<(u16, &'static str)> {
        tokio::select! {
            closed = &mut self.closed => {
                let code = closed.ok().flatten()?;
                Some((code, "a reader of a stream may send only pongs"))
            }
            () = self.caller.wait_until_ended() => Some(SIGNED_OUT),
            () = self.scheduler.tasks.stopping.cancelled() => Some(STOPPING),
        }
    }

    /// Closes the connection. Returns an error, because the connection has then ended.
    async fn close(&mut self, (code, reason): (u16, &str)) -> Result<(), Disconnected> {
        close_websocket(&mut self.sink, code, reason).await;
        Err(Disconnected)
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.closed.abort();
        if !self.is_given_up {
            self.scheduler.events.stream_clients.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Sends all events of a job after `since`, and then new events, until the job or the connection ends.
async fn follow(
    scheduler: &Scheduler,
    mut reader: Reader<'_>,
    row: JobRow,
    mut subscription: Subscription,
    SinceQuery { since, keep_open }: SinceQuery,
) -> Result<(), Disconnected> {
    let (id, last_seq) = (row.job.id.clone(), row.job.last_seq);
    let Ok(first_seq) = scheduler.store.first_seq(&id).await else {
        return reader.close(UNAVAILABLE).await;
    };
    // Events before `first_seq` were removed; their points can be read only with `GET /jobs/{id}/metrics`.
    // A `since` above the last event means that an older database was restored. Waiting for event `since` would withhold all events
    // before it.
    reader.last_sent = since.min(last_seq).max(first_seq - 1);
    let first_seq = first_seq.min(last_seq);
    // The job's state after event `max(reader.last_sent, last_seq)`.
    let mut state = row.job.state;
    let pace = Pace::from(&row.job);
    let Ok(job) = jobs::job_for(scheduler, &reader.caller, row).await else {
        return reader.close(UNAVAILABLE).await;
    };
    let job = Box::new(Job { notes: None, queue: None, ..job });
    reader.send_frame(&Frame::Hello { job, first_seq, last_seq }).await?;
    let mut is_live = false;
    let (mut sent_pace, mut next_progress) = (Some(pace), Instant::now());
    let mut heartbeat = Instant::now() + HEARTBEAT;
    loop {
        let events = match subscription.rows_after(reader.last_sent) {
            Some(events) => events,
            None => match scheduler.store.events(&id, reader.last_sent, REPLAY_EVENTS).await {
                Ok(events) => events.into_iter().map(Arc::new).collect(),
                Err(error) => {
                    tracing::warn!(%error, "the events of a stream cannot be read");
                    return reader.close(UNAVAILABLE).await;
                }
            },
        };
        for event in &events {
            if event.first_seq() > reader.last_sent + 1 {
                let Ok(first_seq) = scheduler.store.first_seq(&id).await else {
                    return reader.close(UNAVAILABLE).await;
                };
                if first_seq > reader.last_sent + 1 {
                    // The next events were removed; their points can be read only with `GET /jobs/{id}/metrics`. `hello` of a new
                    // connection tells where the stream continues.
                    let reason = reader.last_sent.to_string();
                    return reader.close((CLOSE_TOO_SLOW, &reason)).await;
                }
            }
            reader.send_events(event).await?;
            state = event.state().filter(|_| event.seq > last_seq).unwrap_or(state);
        }
        if events.len() == REPLAY_EVENTS as usize {
            continue;
        }
        if !is_live && reader.last_sent >= last_seq {
            is_live = true;
            let seq = reader.last_sent;
            reader.send_frame(&Frame::Live { seq }).await?;
        }
        if is_live && state.is_final() && !keep_open {
            reader.send_frame(&Frame::End { state }).await?;
            reader.close_when_read(close_code::NORMAL, "the job is over").await;
            return Ok(());
        }
        loop {
            let last_sent = reader.last_sent;
            let new_pace = subscription.pace().filter(|pace| is_live && sent_pace != Some(*pace));
            if let Some(pace) = new_pace
                && Instant::now() >= next_progress
            {
                reader.send_frame(&Frame::Progress(pace)).await?;
                (sent_pace, next_progress) = (Some(pace), Instant::now() + LIST_INTERVAL);
                continue;
            }
            tokio::select! {
                update = subscription.wait(last_sent) => match update {
                    JobUpdate::Events => break,
                    JobUpdate::Labels(labels) => reader.send_frame(&Frame::Changed(labels)).await?,
                    JobUpdate::Deleted => return reader.close((close_code::NORMAL, "the job was deleted")).await,
                },
                end = reader.wait_for_end() => match end {
                    Some(end) => return reader.close(end).await,
                    None => return Ok(()),
                },
                () = tokio::time::sleep_until(next_progress), if new_pace.is_some() => {}
                () = tokio::time::sleep_until(heartbeat) => {
                    reader.heartbeat().await?;
                    heartbeat = Instant::now() + HEARTBEAT;
                }
            }
        }
    }
}

/// Stream changes of all jobs
///
/// A websocket of JSON text frames: `live` when changes begin to be sent, then `job` with a job's newest state
/// (at most four times a second for each job) and `job_deleted`, and `heartbeat` every 20 seconds. A client that reads the list of jobs
/// after `live` misses no change.
#[utoipa::path(get, path = "/stream", tag = "streams", responses((status = 101, body = Frame), (status = 426, body = Problem)))]
pub(crate) async fn list_stream(
    State(scheduler): State<Arc<Scheduler>>,
    Extension(caller): Extension<Caller>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response> {
    let upgrade = upgrade?.max_message_size(INCOMING_BYTES).max_frame_size(INCOMING_BYTES);
    Ok(upgrade.on_upgrade(move |socket| {
        let tasks = scheduler.tasks.tracker.clone();
        tasks.track_future(async move {
            let reader = Reader::new(&scheduler, caller, socket);
            if let Err(Disconnected) = follow_list(&scheduler, reader).await {
                tracing::debug!("a reader of the list disconnected");
            }
        })
    }))
}

/// Sends changes of all jobs that the reader may see, until the connection ends.
async fn follow_list(scheduler: &Scheduler, mut reader: Reader<'_>) -> Result<(), Disconnected> {
    let mut list = scheduler.events.hub.subscribe_to_list();
    reader.send_frame(&Frame::Live { seq: 0 }).await?;
    let mut heartbeat = Instant::now() + HEARTBEAT;
    loop {
        tokio::select! {
            frame = list.recv() => match frame {
                Ok(listed) if !reader.caller.sees(listed.private, listed.owner.as_deref()) => {}
                Ok(listed) => {
                    reader.send(Message::Text(Arc::<str>::as_ref(&listed.text).into()), None).await?;
                }
                Err(RecvError::Closed) => return Ok(()),
                // The reader fell behind. Each frame has a job's current state, so the newest list replaces all missed frames.
                Err(RecvError::Lagged(_)) => {
                    list = list.resubscribe();
                    let filter = JobFilter { limit: RESENT_JOBS, seen_by: reader.caller.viewer_name(), ..JobFilter::default() };
                    let page = scheduler.store.jobs(&filter).await.map_err(|_| Disconnected)?;
                    for job in page.jobs {
                        reader.send_frame(&Frame::Job { job: Box::new(job) }).await?;
                    }
                }
            },
            end = reader.wait_for_end() => match end {
                Some(end) => return reader.close(end).await,
                None => return Ok(()),
            },
            () = tokio::time::sleep_until(heartbeat) => {
                reader.heartbeat().await?;
                heartbeat = Instant::now() + HEARTBEAT;
            }
        }
    }
}
