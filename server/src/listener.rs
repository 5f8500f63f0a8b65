//! Connections: taken in up to a limit, given up when they are idle, and ended in order.
//!
//! A connection costs a file descriptor, and whoever opens many and says nothing would leave none for others. So a
//! request's head must come within a time, an idle connection ends after the same time, and when there are as many
//! as there may be, the one that has been idle longest makes room for the next. What a client does not read is
//! given up by the system (`TCP_USER_TIMEOUT`), websockets by their own handlers.

use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, Request},
    response::Response,
};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;

/// More connections than this have no use, however many descriptors there are.
const MOST_CONNECTIONS: u64 = 4096;
const FEWEST_CONNECTIONS: u64 = 8;
/// Descriptors for the rest: the database's connections (three each), locks, the runtime, a file being written.
const RESERVED_DESCRIPTORS: u64 = 44;
/// The longest head of a request: address and headers together.
const HEAD_BYTES: usize = 64 << 10;
/// Until a client that takes nothing of what was sent is given up. Longer than any pause of a network that comes back.
const UNREAD: Duration = Duration::from_secs(120);
/// Before connections are taken in again when the system refuses one.
const BREATH: Duration = Duration::from_millis(50);

/// How many connections there may be at once: half of the descriptors that are left, as a request may open a file.
/// The process takes as many descriptors as it is allowed to first.
pub(crate) fn connection_limit() -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        // Without the right to, it has what it had.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
    limit_of(getrlimit(Resource::Nofile).current)
}

fn limit_of(descriptors: Option<u64>) -> usize {
    let free = descriptors.unwrap_or(u64::MAX).saturating_sub(RESERVED_DESCRIPTORS);
    (free / 2).clamp(FEWEST_CONNECTIONS, MOST_CONNECTIONS) as usize
}

/// What every connection knows.
struct Shared {
    router: Router,
    head_patience: Duration,
    open: Mutex<HashMap<u64, Arc<Connection>>>,
}

/// A connection that speaks HTTP. Websockets leave the list when they become some, and keep their permit.
struct Connection {
    state: Mutex<Use>,
    give_up: CancellationToken,
}

struct Use {
    /// Requests whose answer is not sent to its end.
    requests: usize,
    idle_since: Instant,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves until `stop` is cancelled and the requests under way then are answered.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    limit: usize,
    head_patience: Duration,
    stop: CancellationToken,
) {
    let shared = Arc::new(Shared { router, head_patience, open: Mutex::default() });
    let room = Arc::new(Semaphore::new(limit));
    let tasks = TaskTracker::new();
    let next = AtomicU64::new(0);
    'accepting: loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if is_the_client_s(&error) => continue,
            Err(error) => {
                // Most likely there is no descriptor left.
                tracing::warn!(%error, "a connection cannot be taken in");
                shared.make_room();
                tokio::time::sleep(BREATH).await;
                continue;
            }
        };
        let permit = loop {
            if let Ok(permit) = room.clone().try_acquire_owned() {
                break permit;
            }
            // Those that are busy now may be idle in a moment.
            shared.make_room();
            tokio::select! {
                permit = room.clone().acquire_owned() => match permit {
                    Ok(permit) => break permit,
                    Err(_) => break 'accepting,
                },
                () = tokio::time::sleep(BREATH) => {}
                () = stop.cancelled() => break 'accepting,
            }
        };
        let number = next.fetch_add(1, Ordering::Relaxed);
        tasks.spawn(shared.clone().speak(number, (stream, from), permit, stop.clone()));
    }
    tasks.close();
    tasks.wait().await;
}

/// It went away before it was taken in.
fn is_the_client_s(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionRefused | ConnectionAborted | ConnectionReset)
}

impl Shared {
    /// Ends the connection that has been idle longest. When all are in use, the next one waits for the first to end.
    fn make_room(&self) {
        let open = lock(&self.open);
        let idle = open.values().filter_map(|connection| {
            let state = lock(&connection.state);
            (state.requests == 0 && !connection.give_up.is_cancelled())
                .then_some((state.idle_since, connection))
        });
        if let Some((_, longest)) = idle.min_by_key(|(since, _)| *since) {
            longest.give_up.cancel();
        }
    }

    async fn speak(
        self: Arc<Self>,
        number: u64,
        (stream, from): (TcpStream, SocketAddr),
        permit: OwnedSemaphorePermit,
        stop: CancellationToken,
    ) {
        // A socket that is closed already says so when it is read.
        let _ = stream.set_nodelay(true);
        let _ = socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(UNREAD));
        let state = Mutex::new(Use { requests: 0, idle_since: Instant::now() });
        let connection = Arc::new(Connection { state, give_up: CancellationToken::new() });
        lock(&self.open).insert(number, connection.clone());
        let service = service_fn(|request: hyper::Request<Incoming>| {
            let router = self.router.clone();
            let answering = Answering::begin(&connection);
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(ConnectInfo(from));
            async move { answer(router, request, answering).await }
        });
        let io = TokioIo::new(Held { stream, _permit: permit });
        let serving = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.head_patience)
            .max_buf_size(HEAD_BYTES)
            .serve_connection(io, service)
            .with_upgrades();
        let mut serving = pin!(serving);
        let mut stopping = pin!(stop.cancelled());
        let mut told = false;
        loop {
            tokio::select! {
                // What goes wrong on a connection is its client's.
                _ = serving.as_mut() => break,
                () = connection.give_up.cancelled() => break,
                () = &mut stopping, if !told => {
                    told = true;
                    serving.as_mut().graceful_shutdown();
                }
            }
        }
        lock(&self.open).remove(&number);
    }
}

async fn answer(
    router: Router,
    request: Request,
    answering: Answering,
) -> Result<hyper::Response<Counted>, std::convert::Infallible> {
    let response: Response = router.oneshot(request).await?;
    Ok(response.map(|body| Counted { body, _answering: answering }))
}

/// Held from the head of a request to the end of its answer.
struct Answering(Arc<Connection>);

impl Answering {
    fn begin(connection: &Arc<Connection>) -> Self {
        lock(&connection.state).requests += 1;
        Self(connection.clone())
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.requests -= 1;
        state.idle_since = Instant::now();
    }
}

/// The body of an answer, which ends the answering when it is sent or given up.
struct Counted {
    body: Body,
    _answering: Answering,
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A socket and its place among those there may be, also after it has become a websocket.
struct Held {
    stream: TcpStream,
    _permit: OwnedSemaphorePermit,
}

impl AsyncRead for Held {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, to)
    }
}

impl AsyncWrite for Held {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_shared_with_the_rest_of_the_server() {
        for (descriptors, connections) in
            [(Some(0), 8), (Some(64), 10), (Some(1024), 490), (Some(1 << 20), 4096), (None, 4096)]
        {
            assert_eq!(limit_of(descriptors), connections, "{descriptors:?}");
        }
    }
}
