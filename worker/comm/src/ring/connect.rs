//! Connects the ranks of a ring: each rank listens, the ranks exchange addresses, and each rank connects to the next
//! rank.

use super::{
    BLOCK_BYTES, End, Identity, Mesh, Ring, RingSockets,
    liveness::{self, Neighbour},
};
use crate::{
    handshake::HandshakeTerms,
    rendezvous::{RendezvousError, Store},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, OnceLock, atomic::AtomicU64},
    time::{Duration, Instant},
};

/// The addresses at which a rank listens: for its previous rank, and for messages.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Addresses {
    ring: SocketAddr,
    mesh: SocketAddr,
}

/// The listeners of [`Addresses`].
#[derive(Debug)]
pub(super) struct Listeners {
    ring: TcpListener,
    mesh: TcpListener,
}

impl Listeners {
    pub(super) fn bind(ip: IpAddr) -> io::Result<Self> {
        let bind = || TcpListener::bind((ip, 0));
        Ok(Self { ring: bind()?, mesh: bind()? })
    }

    pub(super) fn addresses(&self) -> io::Result<Addresses> {
        Ok(Addresses { ring: self.ring.local_addr()?, mesh: self.mesh.local_addr()? })
    }
}

/// A group that is about to connect.
pub(super) struct PendingRing<'a> {
    pub(super) identity: Identity,
    pub(super) rank: u32,
    pub(super) addresses: Vec<Addresses>,
    pub(super) connect_timeout: Duration,
    /// The time-out of the group's calls.
    pub(super) timeout: Duration,
    pub(super) should_stop_waiting: &'a (dyn Fn() -> bool + Sync),
}

impl Ring {
    /// Collective: connects the ranks that meet at `store` in a group, and in its concurrent group.
    ///
    /// # Errors
    /// A rank does not arrive, or does not respond within the store's time-out.
    pub fn connect(store: &Store, timeout: Duration) -> Result<Arc<Self>, RendezvousError> {
        let rendezvous = store.config();
        let listeners = Listeners::bind(store.local_ip()).map_err(protocol)?;
        let own = listeners.addresses().map_err(protocol)?;
        let all = store.all_gather("ring", &serde_json::to_vec(&own).unwrap_or_default())?;
        let addresses = (0..)
            .zip(&all)
            .map(|(rank, bytes): (u32, _)| {
                serde_json::from_slice(bytes)
                    .map_err(|_| RendezvousError::protocol(format_args!("rank {rank} sent no valid address")))
            })
            .collect::<Result<Vec<Addresses>, _>>()?;
        let pending = PendingRing {
            identity: Identity {
                name: "ring".into(),
                secret: rendezvous.secret.clone(),
                local_ip: store.local_ip(),
            },
            rank: rendezvous.rank,
            addresses,
            connect_timeout: rendezvous.timeout,
            timeout,
            should_stop_waiting: &|| store.should_stop_waiting(),
        };
        pending.connect(listeners)
    }
}

impl PendingRing<'_> {
    pub(super) fn connect(self, listeners: Listeners) -> Result<Arc<Ring>, RendezvousError> {
        let end = Arc::new(End::default());
        let connected = self.connect_all(listeners, &end);
        if connected.is_err() {
            // Ends the thread that accepts connections for messages.
            end.close("the ranks did not connect".into());
        }
        connected
    }

    /// Starts the mesh, and connects both rings and the liveness connections.
    fn connect_all(self, listeners: Listeners, end: &Arc<End>) -> Result<Arc<Ring>, RendezvousError> {
        let Listeners { ring, mesh } = listeners;
        let addresses = self.addresses.iter().map(|a| a.mesh).collect();
        let mesh = Mesh::start(&self.identity, self.rank, mesh, addresses, self.timeout, end.clone());
        let mesh = mesh.map_err(protocol)?;
        let neighbours = self.connect_neighbours("concurrent", &ring, end)?;
        let identity =
            Identity { name: format!("{}/concurrent", self.identity.name), ..self.identity.clone() };
        let concurrent = Arc::new(self.build_ring(identity, neighbours, mesh.clone(), end, None));
        let neighbours = self.connect_neighbours("main", &ring, end)?;
        let is_elsewhere = |a: &Addresses| a.ring.ip() != self.addresses[0].ring.ip();
        if self.addresses.iter().any(is_elsewhere) {
            self.watch_neighbours(&ring, end)?;
        }
        Ok(Arc::new(self.build_ring(self.identity.clone(), neighbours, mesh, end, Some(concurrent))))
    }

    fn build_ring(
        &self,
        identity: Identity,
        (next, previous): (TcpStream, TcpStream),
        mesh: Arc<Mesh>,
        end: &Arc<End>,
        concurrent: Option<Arc<Ring>>,
    ) -> Ring {
        let block = vec![0.0; BLOCK_BYTES / 8];
        Ring {
            rank: self.rank,
            size: self.addresses.len() as u32,
            timeout: self.timeout,
            identity,
            sockets: Mutex::new(RingSockets { next, previous, sequence: 0, block, sent_bytes: 0 }),
            mesh,
            end: end.clone(),
            concurrent,
            split_count: AtomicU64::new(0),
            shm_unavailable_reason: OnceLock::new(),
        }
    }

    /// Watches for neighbours' machines that do not respond. Used only if the ranks run on several machines.
    fn watch_neighbours(&self, listener: &TcpListener, end: &Arc<End>) -> Result<(), RendezvousError> {
        let (next, previous) = self.connect_neighbours("liveness", listener, end)?;
        let size = self.addresses.len() as u32;
        let neighbour = |rank: u32, stream| Neighbour {
            rank,
            ip: self.addresses[rank as usize].ring.ip(),
            stream,
            last_heard: Instant::now(),
            has_left: false,
        };
        let ranks = [(self.rank + 1) % size, (self.rank + size - 1) % size];
        let both = [neighbour(ranks[0], next), neighbour(ranks[1], previous)];
        liveness::watch(both, end.clone()).map_err(protocol)
    }

    /// Connects to the next rank, and accepts the connection of the previous rank. The previous rank makes its connections one
    /// after the other, so they arrive in the order of the calls.
    fn connect_neighbours(
        &self,
        name: &str,
        listener: &TcpListener,
        end: &End,
    ) -> Result<(TcpStream, TcpStream), RendezvousError> {
        let (rank, size) = (self.rank, self.addresses.len() as u32);
        let purpose = format!("{}/{name}", self.identity.name);
        let next_rank = (rank + 1) % size;
        let next = self.addresses[next_rank as usize].ring;
        let terms = HandshakeTerms { secret: &self.identity.secret, purpose: &purpose };
        let previous_rank = (rank + size - 1) % size;
        // Calls and accepts concurrently, because otherwise every rank would wait for the next rank's response.
        let (called, accepted) = std::thread::scope(|scope| {
            let accepting = scope.spawn(|| self.accept(listener, &terms, previous_rank));
            let called = TcpStream::connect_timeout(&next, self.connect_timeout)
                .and_then(|mut stream| terms.initiate(&mut stream, rank).map(|()| stream))
                .map_err(|e| RendezvousError::protocol(format_args!("rank {next_rank} at {next}: {e}")));
            (called, accepting.join())
        });
        let next = called?;
        let previous = accepted.map_err(|_| RendezvousError::protocol("the accepting thread died"))??;
        for stream in [&next, &previous] {
            stream.set_nonblocking(true).map_err(protocol)?;
            end.add(stream).map_err(protocol)?;
        }
        Ok((next, previous))
    }

    /// Accepts connections until rank `expected` has connected for the purpose in `terms`.
    fn accept(
        &self,
        listener: &TcpListener,
        terms: &HandshakeTerms<'_>,
        expected: u32,
    ) -> Result<TcpStream, RendezvousError> {
        let began = Instant::now();
        let poll_time = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        listener.set_nonblocking(true).map_err(protocol)?;
        loop {
            match listener.accept() {
                Ok((mut stream, _)) => {
                    stream.set_nonblocking(false).map_err(protocol)?;
                    // A peer that is unknown or has closed its connection must not block the expected peer.
                    if terms.answer(&mut stream).is_ok_and(|rank| rank == expected) {
                        return Ok(stream);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&poll_time));
                }
                Err(e) => return Err(protocol(e)),
            }
            if (self.should_stop_waiting)() {
                return Err(RendezvousError::Stopped);
            }
            if began.elapsed() > self.connect_timeout {
                return Err(RendezvousError::missing(&[expected], self.connect_timeout, terms.purpose));
            }
        }
    }
}

fn protocol(error: io::Error) -> RendezvousError {
    RendezvousError::protocol(format_args!("ring: {error}"))
}
