//! Accepts connections up to a limit, closes idle connections, and closes all connections gracefully when the server stops.
//!
//! A connection costs a file descriptor, and a client that opens many connections and sends nothing would leave none for others. So a
//! request's head must arrive within a time limit, and an idle connection is closed after the same time. When the number of connections
//! reaches its limit, the connection that has been idle longest is closed before the next is accepted. If a client does not read, the
//! kernel closes its connection (`TCP_USER_TIMEOUT`), or the handler of its websocket does. An address of another machine gets at most a
//! quarter of all connections. A connection in its TLS handshake counts as idle.
//!
//! hyper implements HTTP, and `tokio-util` joins the streams. The limits are implemented here: `axum::serve`, `axum-server` and hyper-util
//! close no connection to make room for another.

use crate::{
    config::addresses::client_key,
    http::{
        HttpState,
        access_log::AccessLog,
        peer::Transport,
        request_id,
        tls::{ClientCertificate, accept},
    },
    util::lock,
};
use axum::{Router, body::Body, extract::Request, response::Response};
use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{either::Either, io::InspectReader, sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;

/// Maximum number of connections, even if more descriptors are available.
const MAX_CONNECTIONS: u64 = 8192;
/// Minimum number of connections, even if fewer descriptors are available.
const MIN_CONNECTIONS: u64 = 8;
/// Descriptors for other purposes: the database's connections (three each), locks, the runtime, a file being written.
const RESERVED_DESCRIPTORS: u64 = 44;
/// Maximum size of a request's head: request line and headers.
const HEAD_BYTES: usize = 64 << 10;
/// Time for which a client may leave sent data unacknowledged. Longer than the interruptions from which a network recovers.
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(120);
/// Pause after the system has failed to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Returns the maximum number of concurrent connections: half of the remaining descriptors, because a request may open a file. Before that,
/// raises the process's limit of descriptors to the hard limit.
pub(crate) fn connection_limit() -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        // If that is not allowed, the current limit stays.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
    max_connections(getrlimit(Resource::Nofile).current)
}

fn max_connections(descriptors: Option<u64>) -> usize {
    let free = descriptors.unwrap_or(u64::MAX).saturating_sub(RESERVED_DESCRIPTORS);
    (free / 2).clamp(MIN_CONNECTIONS, MAX_CONNECTIONS) as usize
}

/// A listening socket. With an acceptor, its connections use TLS.
pub(crate) struct Listener {
    pub(crate) socket: TcpListener,
    pub(crate) tls: Option<TlsAcceptor>,
}

/// State that all connections share.
struct Shared {
    http: Arc<HttpState>,
    router: Router,
    access_log: Option<AccessLog>,
    max_per_address: usize,
    /// A permit for each connection that can still be opened.
    permits: Arc<Semaphore>,
    next_id: AtomicU64,
    /// The connections, by id.
    open: Mutex<HashMap<u64, Arc<Connection>>>,
}

struct Connection {
    /// The address, as in [`client_key`].
    address: IpAddr,
    state: Mutex<ConnectionUse>,
    /// Cancelled to close the connection while it is idle.
    close: CancellationToken,
}

struct ConnectionUse {
    /// Number of requests whose response is not completely sent. A websocket counts as such a request.
    requests: usize,
    idle_since: Instant,
}

/// Marks a connection as in use, from the head of a request to the end of its response.
struct InFlightRequest(Arc<Connection>);

impl InFlightRequest {
    fn begin(connection: &Arc<Connection>) -> Self {
        lock(&connection.state).requests += 1;
        Self(connection.clone())
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.requests -= 1;
        state.idle_since = Instant::now();
    }
}

/// Serves until the server stops and the requests in progress are answered.
pub(crate) async fn serve(
    listeners: Vec<Listener>,
    http: Arc<HttpState>,
    router: Router,
    max_connections: usize,
    access_log: Option<AccessLog>,
) {
    let shared = Arc::new(Shared {
        http,
        router,
        access_log,
        max_per_address: (max_connections / 4).max(MIN_CONNECTIONS as usize),
        permits: Arc::new(Semaphore::new(max_connections)),
        next_id: AtomicU64::new(0),
        open: Mutex::default(),
    });
    let tasks = TaskTracker::new();
    let accepting = listeners.into_iter().map(|listener| shared.clone().accept(listener, &tasks));
    futures_util::future::join_all(accepting).await;
    tasks.close();
    tasks.wait().await;
}

/// Whether the client disconnected before its connection was accepted.
fn is_disconnect(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionRefused | ConnectionAborted | ConnectionReset)
}

impl Shared {
    async fn accept(self: Arc<Self>, listener: Listener, tasks: &TaskTracker) {
        let stop = self.http.tasks.stopping.clone();
        loop {
            let accepted = tokio::select! {
                accepted = listener.socket.accept() => accepted,
                () = stop.cancelled() => return,
            };
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) if is_disconnect(&error) => continue,
                Err(error) => {
                    // Most likely there is no descriptor left.
                    tracing::warn!(%error, "a connection cannot be accepted");
                    self.close_idle(None);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            if !self.has_room_for(from.ip()) {
                // The connection is closed, because the stream is dropped.
                continue;
            }
            let permit = loop {
                if let Ok(permit) = self.permits.clone().try_acquire_owned() {
                    break permit;
                }
                // Connections that are busy now may become idle soon.
                self.close_idle(None);
                tokio::select! {
                    permit = self.permits.clone().acquire_owned() => match permit {
                        Ok(permit) => break permit,
                        Err(_) => return,
                    },
                    () = tokio::time::sleep(ACCEPT_PAUSE) => {}
                    () = stop.cancelled() => return,
                }
            };
            let tls = listener.tls.clone();
            let entry = ListEntry::new(&self, client_key(from.ip()));
            tasks.spawn(self.clone().handle_connection(stream, from, tls, entry, permit));
        }
    }

    /// Whether an address may have another connection. At the limit, closes an idle connection of the address. This machine and proxies have
    /// no limit, because many clients share them.
    fn has_room_for(&self, address: IpAddr) -> bool {
        if address.to_canonical().is_loopback() || self.http.peer_policy.is_proxy(address) {
            return true;
        }
        let address = client_key(address);
        let count = lock(&self.open).values().filter(|connection| connection.address == address).count();
        count < self.max_per_address || self.close_idle(Some(address))
    }

    /// Closes the connection that has been idle longest, among all connections or the connections of an address. Returns false if all of
    /// them are in use.
    fn close_idle(&self, address: Option<IpAddr>) -> bool {
        let open = lock(&self.open);
        let idle = open.values().filter_map(|connection| {
            let state = lock(&connection.state);
            (state.requests == 0
                && !connection.close.is_cancelled()
                && address.is_none_or(|address| connection.address == address))
            .then_some((state.idle_since, connection))
        });
        let longest = idle.min_by_key(|(since, _)| *since);
        if let Some((_, longest)) = longest {
            longest.close.cancel();
        }
        longest.is_some()
    }

    async fn handle_connection(
        self: Arc<Self>,
        stream: TcpStream,
        from: SocketAddr,
        tls: Option<TlsAcceptor>,
        entry: ListEntry,
        permit: OwnedSemaphorePermit,
    ) {
        let stop = self.http.tasks.stopping.clone();
        // These calls fail only if the socket is already closed. Reading from it then fails, too.
        let _ = stream.set_nodelay(true);
        let _ = socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(UNACKNOWLEDGED_TIMEOUT));
        let transport = Transport::new(from, stream.local_addr().ok(), tls.is_some());
        let connection = entry.connection.clone();
        let stream = match tls {
            None => Either::Left(stream),
            Some(acceptor) => {
                let timeout = self.http.config.handshake_timeout;
                tokio::select! {
                    tls = Box::pin(accept(&acceptor, stream, timeout)) => match tls {
                        Ok(stream) => Either::Right(Box::new(stream)),
                        Err(refused) => {
                            if let Some(refused) = refused {
                                self.http.agents.refusals.note(transport.from, &refused.who, &refused.why);
                            }
                            return;
                        }
                    },
                    () = connection.close.cancelled() => return,
                    () = stop.cancelled() => return,
                }
            }
        };
        let certificate = match &stream {
            Either::Right(stream) => stream.get_ref().1.peer_certificates().and_then(ClientCertificate::of),
            Either::Left(_) => None,
        };
        let certificate = certificate.map(Arc::new);
        let service = service_fn(|request: hyper::Request<Incoming>| {
            let in_flight = InFlightRequest::begin(&connection);
            self.respond(request.map(Body::new), transport, certificate.clone(), in_flight)
        });
        // The stream owns the permit and the entry, so a connection keeps both after it has become a websocket.
        let io = TokioIo::new(InspectReader::new(stream, move |_: &[u8]| {
            let _ = (&permit, &entry);
        }));
        let serving = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.http.config.head_timeout)
            .max_buf_size(HEAD_BYTES)
            .serve_connection(io, service)
            .with_upgrades();
        let mut serving = pin!(serving);
        let mut stopping = pin!(stop.cancelled());
        let mut is_ending = false;
        loop {
            tokio::select! {
                // Errors of a connection are caused by its client and not logged.
                _ = serving.as_mut() => break,
                () = connection.close.cancelled() => break,
                () = &mut stopping, if !is_ending => {
                    is_ending = true;
                    serving.as_mut().graceful_shutdown();
                }
            }
        }
        // Only the stream of a websocket outlives this function. A websocket is never idle.
        lock(&connection.state).requests += 1;
    }

    fn respond(
        &self,
        mut request: Request,
        transport: Transport,
        certificate: Option<Arc<ClientCertificate>>,
        in_flight: InFlightRequest,
    ) -> impl Future<Output = Result<Response, std::convert::Infallible>> + use<> {
        let mut peer = self.http.peer_policy.peer(transport, request.headers());
        // A proxy's certificate does not identify its clients.
        peer.certificate = certificate.filter(|_| !peer.is_by_proxy);
        let begin = |log: &AccessLog| Box::new(log.begin(peer.address, request.method(), request.uri()));
        let mut line = self.access_log.as_ref().map(begin);
        request.extensions_mut().insert(peer);
        let router = self.router.clone();
        async move {
            let response: Response = router.oneshot(request).await?;
            if let Some(line) = &mut line {
                line.status = response.status();
                let id = response.headers().get(request_id::HEADER).and_then(|id| id.to_str().ok());
                line.request_id = id.map(str::to_owned);
            }
            // The line is written, and the connection is idle, when the body is sent or dropped.
            let count_bytes = move |frame: &Frame<Bytes>| {
                let _ = &in_flight;
                if let Some(line) = &mut line {
                    line.bytes += frame.data_ref().map_or(0, Bytes::len) as u64;
                }
            };
            Ok(response.map(|body| Body::new(body.inspect_frame(count_bytes))))
        }
    }
}

/// Removes a connection from the list when dropped.
struct ListEntry {
    shared: Arc<Shared>,
    id: u64,
    connection: Arc<Connection>,
}

impl ListEntry {
    /// Adds a connection of this address to the list.
    fn new(shared: &Arc<Shared>, address: IpAddr) -> Self {
        let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
        let state = Mutex::new(ConnectionUse { requests: 0, idle_since: Instant::now() });
        let connection = Arc::new(Connection { address, state, close: CancellationToken::new() });
        lock(&shared.open).insert(id, connection.clone());
        Self { shared: shared.clone(), id, connection }
    }
}

impl Drop for ListEntry {
    fn drop(&mut self) {
        lock(&self.shared.open).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_use_only_a_part_of_the_descriptors() {
        for (descriptors, connections) in
            [(Some(0), 8), (Some(64), 10), (Some(1024), 490), (Some(1 << 20), 8192), (None, 8192)]
        {
            assert_eq!(max_connections(descriptors), connections, "{descriptors:?}");
        }
    }
}
