//! A ring over TCP: each rank sends to the next and receives from the one before.
//!
//! Long vectors take reduce-scatter and all-gather (Patarasuk and Yuan 2009): every rank sends
//! `2 (n - 1) / n` of the vector whatever the number of ranks. Short ones are gathered and added up
//! by everybody: half the hops. Either way a sum is formed in an order that depends only on the
//! length and the number of ranks, so bits are equal on every rank and in every run.
//!
//! Every call begins with a header that the neighbour checks: ranks that make different calls get an error instead of mixed-up
//! numbers. Messages between two ranks use connections of their own ([`mesh`]).

mod collective;
mod connect;
mod element;
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
use mesh::Mesh;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
pub(crate) use split::Part;
use std::{
    net::{IpAddr, TcpStream},
    sync::{Arc, Mutex, OnceLock, PoisonError, atomic::AtomicU64},
    time::Duration,
};

/// Vectors of up to this many bytes are all-gathered whole and summed by every rank. For n ranks that takes n - 1 hops, each of
/// which sends the whole vector; reduce-scatter and all-gather take twice the hops and send less than two vectors in all. On
/// loopback a hop costs about as much as sending 100 KiB, so whole is faster for short vectors at any number of ranks.
const SHORT: usize = 32 << 10;
/// Bytes received before they are added: they fit the second-level cache together with their target.
const BLOCK: usize = 128 << 10;

/// One group of ranks in a ring. All-reduces run at about the speed of the slowest link.
#[derive(Debug)]
pub struct Ring {
    rank: u32,
    size: u32,
    timeout: Duration,
    identity: Identity,
    sockets: Mutex<RingSockets>,
    mesh: Arc<Mesh>,
    end: Arc<End>,
    concurrent: Option<Arc<Ring>>,
    /// Groups split from this one so far; the same on every rank.
    splits: AtomicU64,
    shm_unavailable_reason: OnceLock<String>,
}

/// What groups that are split from a ring connect with.
#[derive(Debug, Clone)]
struct Identity {
    /// Unique among the groups of an attempt, so that a connection of one is not taken for that of another.
    name: String,
    secret: Vec<u8>,
    local_ip: IpAddr,
}

/// The two connections of a rank.
#[derive(Debug)]
struct RingSockets {
    next: TcpStream,
    previous: TcpStream,
    /// Calls so far.
    sequence: u64,
    /// [`BLOCK`] bytes.
    block: Vec<f64>,
    /// To the next rank, headers included.
    sent_bytes: u64,
}

/// A call under way.
struct Wire<'a> {
    ring: &'a Ring,
    sockets: &'a mut RingSockets,
    operation: &'static str,
    /// The call, until its header has been sent.
    unopened: Option<Call>,
}

impl Ring {
    /// Runs one call: header first, then what `body` sends. Any failure ends the group.
    fn call<T>(
        &self,
        what: Call,
        body: impl FnOnce(&mut Wire<'_>) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let operation = what.operation.name();
        self.not_ended(operation)?;
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.sequence += 1;
        let mut wire = Wire { ring: self, sockets: &mut sockets, operation, unopened: Some(what) };
        let result = body(&mut wire).and_then(|done| wire.open().map(|()| done));
        result.map_err(|error| self.failed(error))
    }

    /// Collective: checks that all ranks make the same call, for calls that then do their work in another way than over the ring.
    pub(super) fn announce(&self, what: Call) -> Result<(), CommError> {
        // When an all-gather of one byte returns, every rank has checked the header.
        self.call(what, |wire| wire.gather(&mut vec![0; wire.ring.size as usize]))
    }

    /// Records why its ranks do not share memory; [`ProcessGroup::shared_memory`] returns it.
    pub(super) fn set_shm_unavailable(&self, reason: String) {
        let _ = self.shm_unavailable_reason.set(reason);
    }

    /// Whether the group was ended here.
    pub(super) fn not_ended(&self, operation: &'static str) -> Result<(), CommError> {
        self.end.not_ended(operation)
    }

    /// Checks that the neighbours' connections are open, for callers that wait for ranks in another way than by a call.
    ///
    /// # Errors
    /// A neighbour has closed its connection, or the group has ended.
    pub(super) fn neighbours_are_there(&self, operation: &'static str) -> Result<(), CommError> {
        self.not_ended(operation)?;
        // A call in progress notices a closed connection by itself.
        let Ok(sockets) = self.sockets.try_lock() else { return Ok(()) };
        for (stream, peer) in [(&sockets.next, self.next_rank()), (&sockets.previous, self.previous_rank())] {
            let mut ready = [PollFd::new(stream, PollFlags::RDHUP)];
            let polled = poll(&mut ready, Some(&Timespec::default()));
            let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
            if polled.is_ok() && ready[0].revents().intersects(gone) {
                let detail = "it closed the connection".into();
                return Err(CommError::Disconnected { operation, peer, detail });
            }
        }
        Ok(())
    }

    /// Ends the group because of `error`, so that the neighbours notice at once and not by their time-outs.
    pub(super) fn failed(&self, error: CommError) -> CommError {
        self.end.failed(error)
    }

    /// Whether the next rank is on another machine, as far as the addresses of the connection show.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn next_is_elsewhere(&self) -> std::io::Result<bool> {
        let sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
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
        // The clones in `end` would keep the connections open.
        if self.concurrent.is_some() {
            self.end.call("this rank has left the group".into());
        }
    }
}
