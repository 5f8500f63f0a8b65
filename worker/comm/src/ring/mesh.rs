//! Messages between any two ranks of a group. Each direction has a connection, made when the first message is sent.
//!
//! Every rank listens as long as its group lives. A thread accepts connections and checks that the peer belongs to
//! the group.

use super::{
    Identity,
    end::End,
    header::{self, Call, HEADER_BYTES, Operation},
    link::Link,
    sink::Fill,
};
use crate::{
    CommError,
    handshake::HandshakeTerms,
    values::{Values, ValuesMut},
};
use lockstep_host::lock;
use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How often a rank that waits for another rank's connection checks that the group still exists.
const CHECK_EVERY: Duration = Duration::from_millis(100);
/// Time limit for connecting. A live machine responds sooner. The limit is short because an abort cannot interrupt this
/// wait.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A rank's connections for messages.
#[derive(Debug)]
pub(super) struct Mesh {
    rank: u32,
    secret: Vec<u8>,
    /// The purpose of the connections, see [`HandshakeTerms`].
    purpose: String,
    timeout: Duration,
    /// The addresses at which the ranks listen, by rank.
    addresses: Vec<SocketAddr>,
    /// The connections over which this rank sends messages, by the rank that receives them.
    outgoing: Vec<Mutex<Option<Connection>>>,
    /// The connections that other ranks have made, by rank.
    incoming: Mutex<BTreeMap<u32, Arc<Mutex<Connection>>>>,
    incoming_changed: Condvar,
    end: Arc<End>,
}

/// A connection for messages in one direction.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    message_count: u64,
}

impl Mesh {
    /// Accepts connections on `listener` until `end`. `addresses` are the addresses of all ranks.
    pub(super) fn start(
        identity: &Identity,
        rank: u32,
        listener: TcpListener,
        addresses: Vec<SocketAddr>,
        timeout: Duration,
        end: Arc<End>,
    ) -> io::Result<Arc<Self>> {
        end.add(&listener)?;
        let mesh = Arc::new(Self {
            rank,
            secret: identity.secret.clone(),
            purpose: format!("{}/mesh", identity.name),
            timeout,
            outgoing: addresses.iter().map(|_| Mutex::default()).collect(),
            addresses,
            incoming: Mutex::default(),
            incoming_changed: Condvar::new(),
            end,
        });
        let accepting = mesh.clone();
        let accept = move || accepting.accept(&listener);
        std::thread::Builder::new().name("messages".into()).stack_size(128 << 10).spawn(accept)?;
        Ok(mesh)
    }

    fn terms(&self) -> HandshakeTerms<'_> {
        HandshakeTerms { secret: &self.secret, purpose: &self.purpose }
    }

    /// See [`ProcessGroup::send`](crate::ProcessGroup::send). `to` must be another rank of the group.
    pub(super) fn send(&self, values: Values<'_>, to: u32) -> Result<(), CommError> {
        const OPERATION: &str = "send";
        self.end.check_not_ended(OPERATION)?;
        let mut slot = lock(&self.outgoing[to as usize]);
        let connection = match slot.take() {
            Some(connection) => Ok(connection),
            None => self.connect(to).map_err(|error| {
                let detail = Some(error.to_string());
                CommError::Disconnected { operation: OPERATION, peer: to, detail }
            }),
        };
        let sent = connection.and_then(|mut connection| {
            connection.message_count += 1;
            let header = header::encode(Call::of(Operation::Message, &values), connection.message_count);
            let link = self.link(&connection.stream, to, OPERATION);
            link.exchange(&header, values.bytes(), &mut Fill::new(&mut []))?;
            Ok(connection)
        });
        *slot = Some(sent.map_err(|error| self.end.fail_with(error))?);
        Ok(())
    }

    /// See [`ProcessGroup::recv`](crate::ProcessGroup::recv). `from` must be another rank of the group. `check` is called
    /// while this rank waits for `from` to connect, and its error ends the wait.
    pub(super) fn recv(
        &self,
        mut values: ValuesMut<'_>,
        from: u32,
        check: impl Fn() -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        const OPERATION: &str = "recv";
        self.end.check_not_ended(OPERATION)?;
        let received = self.connection_from(from, OPERATION, check).and_then(|connection| {
            let mut connection = lock(&connection);
            connection.message_count += 1;
            let call = Call::of(Operation::Message, &values.as_values());
            let link = self.link(&connection.stream, from, OPERATION);
            let mut theirs = [0; HEADER_BYTES];
            link.exchange(&[], &[], &mut Fill::new(&mut theirs))?;
            header::compare(OPERATION, from, &theirs, (call, connection.message_count))?;
            link.exchange(&[], &[], &mut Fill::new(values.bytes_mut()))
        });
        received.map_err(|error| self.end.fail_with(error))
    }

    fn link<'a>(&self, stream: &'a TcpStream, peer: u32, operation: &'static str) -> Link<'a> {
        let timeout = self.timeout;
        Link { next: stream, next_rank: peer, previous: stream, previous_rank: peer, timeout, operation }
    }

    fn connect(&self, to: u32) -> io::Result<Connection> {
        let timeout = self.timeout.min(CONNECT_TIMEOUT);
        let mut stream = TcpStream::connect_timeout(&self.addresses[to as usize], timeout)?;
        self.end.add(&stream)?;
        self.terms().initiate(&mut stream, self.rank)?;
        stream.set_nonblocking(true)?;
        Ok(Connection { stream, message_count: 0 })
    }

    /// The connection from rank `from`. Waits until that rank has connected.
    fn connection_from(
        &self,
        from: u32,
        operation: &'static str,
        check: impl Fn() -> Result<(), CommError>,
    ) -> Result<Arc<Mutex<Connection>>, CommError> {
        let began = Instant::now();
        let mut connections = lock(&self.incoming);
        loop {
            if let Some(connection) = connections.get(&from) {
                return Ok(connection.clone());
            }
            if began.elapsed() >= self.timeout {
                let secs = self.timeout.as_secs_f64();
                return Err(CommError::TimedOut { operation, peer: from, secs });
            }
            let remaining = self.timeout.saturating_sub(began.elapsed());
            connections = self
                .incoming_changed
                .wait_timeout(connections, remaining.min(CHECK_EVERY))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            // If the rank connected, sent its message and then exited, the message can still be read.
            if !connections.contains_key(&from) {
                check()?;
            }
        }
    }

    /// Accepts connections until the group has ended.
    fn accept(&self, listener: &TcpListener) {
        while !self.end.has_ended() {
            match listener.accept() {
                // Connections are accepted one at a time. An unknown peer that sends nothing delays the others by at most the
                // handshake's time limit.
                Ok((stream, _)) => {
                    let _ = self.admit(stream);
                }
                // The group has ended, or no file descriptor is available at the moment.
                Err(_) if self.end.has_ended() => return,
                Err(_) => std::thread::sleep(CHECK_EVERY),
            }
        }
    }

    /// Registers a connection whose peer belongs to the group.
    fn admit(&self, mut stream: TcpStream) -> io::Result<()> {
        let rank = self.terms().answer(&mut stream)?;
        if rank as usize >= self.addresses.len() {
            return Ok(());
        }
        stream.set_nonblocking(true)?;
        self.end.add(&stream)?;
        let mut connections = lock(&self.incoming);
        // A rank connects only once.
        connections
            .entry(rank)
            .or_insert_with(|| Arc::new(Mutex::new(Connection { stream, message_count: 0 })));
        drop(connections);
        self.incoming_changed.notify_all();
        Ok(())
    }
}
