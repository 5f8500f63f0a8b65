//! Collectives over TCP: each rank sends to the next rank of a ring and receives from the previous rank.
//!
//! A long vector is reduced by reduce-scatter and all-gather (Patarasuk and Yuan 2009): every rank sends `2 (n - 1) /
//! n` of the vector, for any number of ranks `n`. A short vector is gathered and summed by every rank, which needs half
//! the hops. In both cases the order of additions depends only on the length and the number of ranks, so the bits are
//! equal on every rank and in every run.
//!
//! Every call begins with a header, which the next rank checks. Ranks that make different calls therefore get an
//! error instead of wrong values. Messages between two ranks use separate connections ([`mesh`]).

mod collective;
mod connect;
mod end;
mod header;
mod link;
mod liveness;
mod mesh;
mod process_group;
mod sink;
mod split;
#[cfg(test)]
mod tests;

use super::CommError;
use end::End;
pub(crate) use header::{Call, Operation};
use lockstep_host::lock;
use mesh::Mesh;
use std::{
    net::{IpAddr, TcpStream},
    sync::{Arc, Mutex, OnceLock, atomic::AtomicU64},
    time::Duration,
};

/// Vectors of up to this many bytes are gathered whole and summed by every rank. For n ranks this needs n - 1 hops,
/// each of which sends the whole vector. Reduce-scatter and all-gather need twice the hops, and send less than two
/// vectors in total. On loopback a hop costs about as much as sending 100 KiB, so gathering is faster for short vectors
/// at any number of ranks.
const MAX_GATHERED_BYTES: usize = 32 << 10;
/// Number of received bytes that are added at a time. A block and its target fit in the second-level cache.
const BLOCK_BYTES: usize = 128 << 10;

/// A group of ranks in a ring. All-reduces run at about the speed of the slowest link.
#[derive(Debug)]
pub struct Ring {
    rank: u32,
    size: u32,
    timeout: Duration,
    identity: Identity,
    sockets: Mutex<RingSockets>,
    mesh: Arc<Mesh>,
    pub(crate) end: Arc<End>,
    /// The second ring of the same ranks ([`ProcessGroup::concurrent_group`](crate::ProcessGroup::concurrent_group)). `None` in the
    /// second ring itself.
    concurrent: Option<Arc<Ring>>,
    /// The number of groups split from this ring, which is the same on every rank.
    split_count: AtomicU64,
    /// Why the ranks do not share memory, as [`ProcessGroup::shared_memory`](crate::ProcessGroup::shared_memory) reports it.
    pub(crate) shm_unavailable_reason: OnceLock<String>,
}

/// The data that groups split from a ring need in order to connect.
#[derive(Debug, Clone)]
struct Identity {
    /// Unique within an attempt, so that a connection of one group is not accepted by another group.
    name: String,
    secret: Vec<u8>,
    local_ip: IpAddr,
}

/// The connections of a rank to its two neighbours.
#[derive(Debug)]
struct RingSockets {
    next: TcpStream,
    previous: TcpStream,
    /// The number of calls so far.
    sequence: u64,
    block: Vec<f64>,
    /// The number of bytes sent to the next rank, including headers.
    sent_bytes: u64,
}

/// A call in progress.
struct ActiveCall<'a> {
    ring: &'a Ring,
    sockets: &'a mut RingSockets,
    operation: &'static str,
    /// The call, until its header has been sent.
    pending_header: Option<Call>,
}

impl Ring {
    /// Runs one call: the header first, then `body`. A failure ends the group.
    fn call<T>(
        &self,
        call: Call,
        body: impl FnOnce(&mut ActiveCall<'_>) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let operation = call.operation.name();
        self.end.check_not_ended(operation)?;
        let mut sockets = lock(&self.sockets);
        sockets.sequence += 1;
        let mut active =
            ActiveCall { ring: self, sockets: &mut sockets, operation, pending_header: Some(call) };
        let result = body(&mut active).and_then(|done| active.exchange_headers().map(|()| done));
        result.map_err(|error| self.end.fail_with(error))
    }

    /// Collective: checks that all ranks make the same call, for calls that do not exchange their values over the
    /// ring.
    pub(super) fn announce(&self, call: Call) -> Result<(), CommError> {
        // An all-gather of one byte returns after every rank has checked the header.
        self.call(call, |active| active.gather(&mut vec![0; active.ring.size as usize]))
    }

    /// Whether the next rank is on another machine, according to the addresses of the connection.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn next_is_elsewhere(&self) -> std::io::Result<bool> {
        let sockets = lock(&self.sockets);
        let (own, peer) = (sockets.next.local_addr()?.ip(), sockets.next.peer_addr()?.ip());
        Ok(own != peer && !peer.is_loopback())
    }

    fn previous_rank(&self) -> u32 {
        (self.rank + self.size - 1) % self.size
    }

    fn next_rank(&self) -> u32 {
        (self.rank + 1) % self.size
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // `end`, which both rings share, has clones of the sockets, which would keep the connections open. The first ring closes them.
        if self.concurrent.is_some() {
            self.end.close("this rank has left the group".into());
        }
    }
}
