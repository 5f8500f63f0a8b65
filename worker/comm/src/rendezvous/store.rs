//! The client of the key-value store, one per rank.

use super::{
    MAX_SERVER_WAIT, RendezvousConfig, RendezvousError,
    message::{Reply, Request, receive, send},
    server::listen,
};
use crate::handshake::HandshakeTerms;
use lockstep_host::lock;
use socket2::SockRef;
use std::{
    io,
    net::{IpAddr, Shutdown, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Interval between two attempts to connect to rank 0, whose process may still be starting.
const RETRY: Duration = Duration::from_millis(10);

/// A rank's connection to the store.
#[derive(Debug)]
pub struct Store {
    config: RendezvousConfig,
    stream: Mutex<TcpStream>,
    local_ip: IpAddr,
    /// Rank 0's socket, on which the store is served.
    listener: Option<TcpListener>,
    stops_are_voted_on: AtomicBool,
}

impl Store {
    /// Connects to the store. Rank 0 starts the server first.
    ///
    /// # Errors
    /// The port is taken, rank 0 does not respond in time, or the secrets differ.
    pub fn join(config: RendezvousConfig) -> Result<Self, RendezvousError> {
        let listener = if config.rank == 0 { Some(listen(&config)?) } else { None };
        let began = Instant::now();
        let terms = HandshakeTerms { secret: &config.secret, purpose: "store" };
        let stream = loop {
            if config.stop.load(Ordering::Relaxed) {
                return Err(RendezvousError::Stopped);
            }
            let remaining = config.timeout.saturating_sub(began.elapsed());
            let connected = connect(&config.addr, config.port, remaining).and_then(|mut stream| {
                terms.initiate(&mut stream, config.rank)?;
                Ok(stream)
            });
            match connected {
                Ok(stream) => break stream,
                Err(e) if remaining.is_zero() || e.kind() == io::ErrorKind::PermissionDenied => {
                    let (addr, port, secs) = (&config.addr, config.port, began.elapsed().as_secs_f64());
                    let text = format!("rank 0 does not answer at {addr}:{port} after {secs:.0} s: {e}");
                    return Err(RendezvousError::Failed(text));
                }
                Err(_) => std::thread::sleep(RETRY.min(remaining)),
            }
        };
        let local_ip = stream.local_addr().map_err(RendezvousError::Lost)?.ip();
        let (stream, stops_are_voted_on) = (Mutex::new(stream), AtomicBool::new(false));
        Ok(Self { config, stream, local_ip, listener, stops_are_voted_on })
    }

    pub fn config(&self) -> &RendezvousConfig {
        &self.config
    }

    /// From now on, a request to stop does not end a wait in this store. Ranks call this before training. They vote on a stop
    /// and end after the same step, so a rank that is asked to stop must take part in collectives until the vote.
    pub fn leave_stops_to_votes(&self) {
        self.stops_are_voted_on.store(true, Ordering::Relaxed);
    }

    /// Whether this rank is asked to stop and should stop waiting for other ranks.
    pub(crate) fn should_stop_waiting(&self) -> bool {
        self.config.stop.load(Ordering::Relaxed) && !self.stops_are_voted_on.load(Ordering::Relaxed)
    }

    /// Makes `ip` this rank's address for other ranks, if `ip` is an address of this machine. A machine may have several
    /// addresses.
    pub fn prefer_local_ip(&mut self, ip: IpAddr) {
        if TcpListener::bind((ip, 0)).is_ok() {
            self.local_ip = ip;
        }
    }

    /// The address of this machine for other ranks. Unless set by [`Store::prefer_local_ip`], it is the local address of
    /// the connection to rank 0.
    pub(crate) fn local_ip(&self) -> IpAddr {
        self.local_ip
    }

    /// Sets a value that all ranks can read.
    ///
    /// # Errors
    /// The connection to rank 0 is lost.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        self.request_reply(&Request::Set { key: key.into(), value: value.into() }).map(drop)
    }

    /// Collective: returns the values of all ranks, in rank order. `name` must be unique within an attempt.
    ///
    /// # Errors
    /// Ranks did not arrive in time. The error names them.
    pub fn all_gather(&self, name: &str, value: &[u8]) -> Result<Vec<Vec<u8>>, RendezvousError> {
        self.all_gather_within(name, value, self.config.timeout)
    }

    /// As [`Store::all_gather`], with another time-out.
    pub(crate) fn all_gather_within(
        &self,
        name: &str,
        value: &[u8],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, RendezvousError> {
        let key = |rank: u32| format!("{name}/{rank}");
        self.set(&key(self.config.rank), value)?;
        let keys: Vec<String> = (0..self.config.world_size).map(key).collect();
        let began = Instant::now();
        let values = loop {
            let remaining = timeout.saturating_sub(began.elapsed());
            let values = self.get(&keys, remaining.min(MAX_SERVER_WAIT))?;
            if remaining.is_zero() || values.iter().all(Option::is_some) {
                break values;
            }
            if self.should_stop_waiting() {
                return Err(RendezvousError::Stopped);
            }
        };
        let missing: Vec<u32> =
            (0..).zip(&values).filter(|(_, value)| value.is_none()).map(|(rank, _)| rank).collect();
        if missing.is_empty() {
            return Ok(values.into_iter().flatten().collect());
        }
        Err(RendezvousError::missing(&missing, timeout, name))
    }

    /// Collective: returns when every rank has called it. `name` must be unique within an attempt.
    ///
    /// # Errors
    /// As [`Store::all_gather`].
    pub fn barrier(&self, name: &str) -> Result<(), RendezvousError> {
        self.all_gather(&format!("barrier/{name}"), &[]).map(drop)
    }

    /// Returns the values when all of them are set, or after `wait`.
    pub(crate) fn get(
        &self,
        keys: &[String],
        wait: Duration,
    ) -> Result<Vec<Option<Vec<u8>>>, RendezvousError> {
        let wait_ms = wait.as_millis() as u64;
        self.request_reply(&Request::Get { keys: keys.to_vec(), wait_ms })
    }

    fn request_reply(&self, request: &Request) -> Result<Reply, RendezvousError> {
        let mut stream = lock(&self.stream);
        send(&mut stream, request).map_err(RendezvousError::Lost)?;
        receive(&mut stream).map_err(RendezvousError::Lost)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Other ranks may still send requests, so only the port is closed now. Connections stay open until the process
        // ends.
        if let Some(listener) = &self.listener {
            let _ = SockRef::from(listener).shutdown(Shutdown::Both);
        }
    }
}

fn connect(addr: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let mut last_error = io::Error::new(io::ErrorKind::NotFound, format!("{addr} has no address"));
    for address in (addr, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout.max(RETRY)) {
            Ok(stream) => return Ok(stream),
            Err(e) => last_error = e,
        }
    }
    Err(last_error)
}
