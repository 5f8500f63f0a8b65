//! How the ranks of an attempt find each other: a key-value store that rank 0 keeps at
//! `master_addr:master_port`. Every connection proves that it knows the attempt's secret first.
//!
//! Past 400 lines because both ends of the protocol stand together.

use super::handshake::Terms;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{IpAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// A request waits this long at most on rank 0, so that a told-to-stop rank stops soon.
const SLICE: Duration = Duration::from_millis(100);
/// Between two tries to reach rank 0, whose process may still be starting.
const RETRY: Duration = Duration::from_millis(10);
/// Longest message; values are addresses and the like.
const LONGEST_MESSAGE: u32 = 1 << 20;

/// Why ranks did not meet.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// Another program has the port: another attempt gets another port.
    #[error("port {port} of {addr} is taken by another program")]
    PortTaken {
        /// The address to listen on.
        addr: String,
        /// The port asked for.
        port: u16,
    },
    /// Listening failed otherwise: no such address here, no permission.
    #[error("rank 0 cannot listen on {addr}:{port}: {error}")]
    Listen {
        /// The address to listen on.
        addr: String,
        /// The port asked for.
        port: u16,
        /// What the system says.
        error: io::Error,
    },
    /// Rank 0 is not there.
    #[error("rank 0 does not answer at {addr}:{port} after {secs:.0} s: {detail}")]
    Unreachable {
        /// Its address.
        addr: String,
        /// Its port.
        port: u16,
        /// How long it was tried.
        secs: f64,
        /// The last failure.
        detail: String,
    },
    /// Some did not come.
    #[error("{} after {secs:.0} s ({what})", not_arrived(ranks))]
    Missing {
        /// Who is missing.
        ranks: Vec<u32>,
        /// How long the others waited.
        secs: f64,
        /// What they waited for.
        what: String,
    },
    /// The connection to rank 0 broke.
    #[error("lost the connection to rank 0 at the rendezvous: {0}")]
    Lost(io::Error),
    /// This rank was told to stop.
    #[error("told to stop during the rendezvous")]
    Stopped,
    /// Not what is spoken here.
    #[error("rendezvous: {0}")]
    Protocol(String),
}

fn not_arrived(ranks: &[u32]) -> String {
    let names: Vec<_> = ranks.iter().map(u32::to_string).collect();
    match names.as_slice() {
        [one] => format!("rank {one} has not arrived"),
        [first @ .., last] => format!("ranks {} and {last} have not arrived", first.join(", ")),
        [] => "a rank has not arrived".into(),
    }
}

/// Where and how an attempt meets.
#[derive(Debug, Clone)]
pub struct Meeting {
    /// Where rank 0 listens: an address or a name.
    pub addr: String,
    /// Its port.
    pub port: u16,
    /// Known to the ranks of this attempt alone.
    pub secret: Vec<u8>,
    /// This process.
    pub rank: u32,
    /// Ranks in all.
    pub world_size: u32,
    /// Longest wait for others.
    pub timeout: Duration,
    /// Set from any thread: whoever waits gives up, until [`Store::leave_stops_to_votes`].
    pub stop: Arc<AtomicBool>,
}

#[derive(Debug, Serialize, Deserialize)]
enum Request {
    Set {
        key: String,
        value: Vec<u8>,
    },
    /// Waits until all keys are there, or the time is over.
    Get {
        keys: Vec<String>,
        wait_ms: u64,
    },
    Add {
        key: String,
        amount: i64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    Done,
    Values(Vec<Option<Vec<u8>>>),
    Count(i64),
}

#[derive(Debug, Default)]
struct Shelf {
    values: Mutex<Shelved>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Shelved {
    values: BTreeMap<String, Vec<u8>>,
    counters: BTreeMap<String, i64>,
}

/// A rank's connection to the store; on rank 0 it also keeps the store.
#[derive(Debug)]
pub struct Store {
    meeting: Meeting,
    stream: Mutex<TcpStream>,
    local_ip: IpAddr,
    listener: Option<Listener>,
    stops_are_voted_on: AtomicBool,
}

impl Store {
    /// Rank 0 opens the store; every rank connects to it.
    ///
    /// # Errors
    /// The port is taken, rank 0 does not answer in time, the secrets differ.
    pub fn join(meeting: Meeting) -> Result<Self, RendezvousError> {
        let listener = if meeting.rank == 0 { Some(Listener::open(&meeting)?) } else { None };
        let began = Instant::now();
        let terms = Terms { secret: &meeting.secret, purpose: "store" };
        let stream = loop {
            if meeting.stop.load(Ordering::Relaxed) {
                return Err(RendezvousError::Stopped);
            }
            let left = meeting.timeout.saturating_sub(began.elapsed());
            let attempt = connect(&meeting.addr, meeting.port, left).and_then(|mut stream| {
                terms.call(&mut stream, meeting.rank)?;
                Ok(stream)
            });
            match attempt {
                Ok(stream) => break stream,
                Err(e) if left.is_zero() || e.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(RendezvousError::Unreachable {
                        addr: meeting.addr.clone(),
                        port: meeting.port,
                        secs: began.elapsed().as_secs_f64(),
                        detail: e.to_string(),
                    });
                }
                Err(_) => std::thread::sleep(RETRY.min(left)),
            }
        };
        let local_ip = stream.local_addr().map_err(RendezvousError::Lost)?.ip();
        let (stream, stops_are_voted_on) = (Mutex::new(stream), AtomicBool::new(false));
        Ok(Self { meeting, stream, local_ip, listener, stops_are_voted_on })
    }

    /// How the ranks meet.
    pub fn meeting(&self) -> &Meeting {
        &self.meeting
    }

    /// From now on a stop ends no waiting here. For ranks that are training: they vote on a stop and end after the same
    /// step, so one that is told to stop must not leave the others in an exchange that they make in between.
    pub fn leave_stops_to_votes(&self) {
        self.stops_are_voted_on.store(true, Ordering::Relaxed);
    }

    /// Whether this rank is told to stop and should give up waiting for the others.
    pub fn gives_up(&self) -> bool {
        self.meeting.stop.load(Ordering::Relaxed) && !self.stops_are_voted_on.load(Ordering::Relaxed)
    }

    /// This machine's address as rank 0's machine sees it.
    pub fn local_ip(&self) -> IpAddr {
        self.local_ip
    }

    /// Sets a value, for all ranks to see.
    ///
    /// # Errors
    /// Rank 0 is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        match self.ask(&Request::Set { key: key.into(), value: value.into() })? {
            Reply::Done => Ok(()),
            other => Err(RendezvousError::Protocol(format!("unexpected {other:?}"))),
        }
    }

    /// A value, as soon as some rank has set it; `None` when none has within the time-out.
    ///
    /// # Errors
    /// Rank 0 is gone, or this rank was told to stop.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>, RendezvousError> {
        Ok(self.wait_for(vec![key.into()])?.pop().flatten())
    }

    /// The values that are there now, without waiting for the rest.
    ///
    /// # Errors
    /// Rank 0 is gone.
    pub fn peek(&self, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>, RendezvousError> {
        match self.ask(&Request::Get { keys: keys.to_vec(), wait_ms: 0 })? {
            Reply::Values(values) => Ok(values),
            other => Err(RendezvousError::Protocol(format!("unexpected {other:?}"))),
        }
    }

    /// Adds to a counter (0 at first) and gives its new value.
    ///
    /// # Errors
    /// Rank 0 is gone.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, RendezvousError> {
        match self.ask(&Request::Add { key: key.into(), amount })? {
            Reply::Count(count) => Ok(count),
            other => Err(RendezvousError::Protocol(format!("unexpected {other:?}"))),
        }
    }

    /// Gives every rank the values of all, in rank order; returns when all have called it. `what`
    /// names the exchange and may be used once.
    ///
    /// # Errors
    /// [`RendezvousError::Missing`] names those who did not come in time.
    pub fn exchange(&self, what: &str, value: &[u8]) -> Result<Vec<Vec<u8>>, RendezvousError> {
        let key = |rank: u32| format!("{what}/{rank}");
        self.set(&key(self.meeting.rank), value)?;
        let values = self.wait_for((0..self.meeting.world_size).map(key).collect())?;
        let missing: Vec<u32> =
            (0..).zip(&values).filter(|(_, value)| value.is_none()).map(|(rank, _)| rank).collect();
        if missing.is_empty() {
            return Ok(values.into_iter().flatten().collect());
        }
        Err(RendezvousError::Missing {
            ranks: missing,
            secs: self.meeting.timeout.as_secs_f64(),
            what: what.into(),
        })
    }

    /// Returns when every rank has called it; `what` may be used once.
    ///
    /// # Errors
    /// As [`Store::exchange`].
    pub fn barrier(&self, what: &str) -> Result<(), RendezvousError> {
        self.exchange(&format!("barrier/{what}"), &[]).map(drop)
    }

    fn wait_for(&self, keys: Vec<String>) -> Result<Vec<Option<Vec<u8>>>, RendezvousError> {
        let began = Instant::now();
        loop {
            let left = self.meeting.timeout.saturating_sub(began.elapsed());
            let wait_ms = left.min(SLICE).as_millis() as u64;
            match self.ask(&Request::Get { keys: keys.clone(), wait_ms })? {
                Reply::Values(values) if left.is_zero() || values.iter().all(Option::is_some) => {
                    return Ok(values);
                }
                Reply::Values(_) => {}
                other => return Err(RendezvousError::Protocol(format!("unexpected {other:?}"))),
            }
            if self.gives_up() {
                return Err(RendezvousError::Stopped);
            }
        }
    }

    fn ask(&self, request: &Request) -> Result<Reply, RendezvousError> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        send(&mut stream, request).map_err(RendezvousError::Lost)?;
        receive(&mut stream).map_err(RendezvousError::Lost)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Others may still be asking: the store goes with the process, but not its port.
        if let Some(listener) = self.listener.take() {
            listener.close();
        }
    }
}

fn connect(addr: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{addr} has no address"));
    for address in (addr, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout.max(RETRY)) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

#[derive(Debug)]
struct Listener {
    closed: Arc<AtomicBool>,
    wake: std::net::SocketAddr,
}

impl Listener {
    fn open(meeting: &Meeting) -> Result<Self, RendezvousError> {
        let (addr, port) = (meeting.addr.clone(), meeting.port);
        let listen = |error: io::Error| {
            if error.kind() == io::ErrorKind::AddrInUse {
                RendezvousError::PortTaken { addr: addr.clone(), port }
            } else {
                RendezvousError::Listen { addr: addr.clone(), port, error }
            }
        };
        let socket = match TcpListener::bind((meeting.addr.as_str(), port)) {
            // The name may be that of a router or a service in front of this machine.
            Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => TcpListener::bind(("0.0.0.0", port)),
            other => other,
        }
        .map_err(&listen)?;
        let wake = socket.local_addr().map_err(&listen)?;
        let closed = Arc::new(AtomicBool::new(false));
        let shelf = Arc::new(Shelf::default());
        let secret: Arc<[u8]> = meeting.secret.as_slice().into();
        let serving = closed.clone();
        let serve = move || {
            for stream in socket.incoming().flatten() {
                if serving.load(Ordering::Relaxed) {
                    return;
                }
                let (shelf, secret) = (shelf.clone(), secret.clone());
                // A thread a rank. Without one the caller is hung up on
                // and tries again.
                let _ = std::thread::Builder::new()
                    .name("rendezvous".into())
                    .stack_size(128 << 10)
                    .spawn(move || serve_rank(stream, &secret, &shelf));
            }
        };
        std::thread::Builder::new().name("rendezvous".into()).spawn(serve).map_err(&listen)?;
        Ok(Self { closed, wake })
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect_timeout(&self.wake, Duration::from_millis(200));
    }
}

fn serve_rank(mut stream: TcpStream, secret: &[u8], shelf: &Shelf) {
    let terms = Terms { secret, purpose: "store" };
    if terms.answer(&mut stream).is_err() {
        return;
    }
    // Ends when the rank hangs up.
    while let Ok(request) = receive::<Request>(&mut stream) {
        let reply = shelf.answer(request);
        if send(&mut stream, &reply).is_err() {
            return;
        }
    }
}

impl Shelf {
    fn answer(&self, request: Request) -> Reply {
        let mut shelved = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        match request {
            Request::Set { key, value } => {
                shelved.values.insert(key, value);
                self.changed.notify_all();
                Reply::Done
            }
            Request::Add { key, amount } => {
                let count = shelved.counters.entry(key).or_default();
                *count += amount;
                Reply::Count(*count)
            }
            Request::Get { keys, wait_ms } => {
                let wait = Duration::from_millis(wait_ms.min(SLICE.as_millis() as u64));
                let lacking = |s: &mut Shelved| keys.iter().any(|key| !s.values.contains_key(key));
                let (shelved, _) = self
                    .changed
                    .wait_timeout_while(shelved, wait, lacking)
                    .unwrap_or_else(PoisonError::into_inner);
                Reply::Values(keys.iter().map(|key| shelved.values.get(key).cloned()).collect())
            }
        }
    }
}

fn send(stream: &mut TcpStream, message: &impl Serialize) -> io::Result<()> {
    let body = lockstep_protocol::wire::encode(message).map_err(io::Error::other)?;
    let mut bytes = Vec::from((body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&body);
    stream.write_all(&bytes)
}

fn receive<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > LONGEST_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body)?;
    lockstep_protocol::wire::decode(&body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// A port of this machine that is free now.
///
/// # Errors
/// None is, or `addr` is not of this machine.
pub fn free_port(addr: &str) -> io::Result<u16> {
    Ok(TcpListener::bind((addr, 0))?.local_addr()?.port())
}

#[cfg(test)]
pub(crate) mod tests;
