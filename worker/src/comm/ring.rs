//! A ring over TCP: each rank sends to the next and receives from the one before.
//!
//! Long vectors take reduce-scatter and all-gather (Patarasuk and Yuan 2009): every rank sends
//! `2 (n - 1) / n` of the vector whatever the number of ranks. Short ones are gathered and added up
//! by everybody: half the hops. Either way a sum is formed in an order that depends only on the
//! length and the number of ranks, so bits are equal on every rank and in every run.
//!
//! Every call opens with a header, checked by the neighbour: ranks that disagree about what they
//! are doing find out instead of mixing up numbers.

mod sink;
#[cfg(test)]
mod tests;
mod wire;

use super::{
    CommError, Communicator, Reduction, SharedMemoryOrReason,
    handshake::Terms,
    rendezvous::{RendezvousError, Store},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sink::Fill;
use std::{
    io,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};
pub(in crate::comm) use wire::Operation;
use wire::{Call, Wire, two_of};

/// Up to this many bytes a vector is gathered whole: on loopback a hop costs about as much as
/// sending 100 KiB. For n ranks that is n - 1 hops and as many times the vector to send; in parts it is twice the hops
/// and less than twice the vector, so whole is faster up to about a hop's worth of bytes, at any number of ranks.
const SHORT: usize = 32 << 10;
/// What is received before it is added: fits the second-level cache beside its target.
const BLOCK: usize = 128 << 10;
/// `lock` in the byte order of this machine: one of the other order is told apart.
const MAGIC: u32 = 0x6c6f_636b;
const HEADER: usize = 32;

/// One group of ranks in a ring. All-reduces run at about the speed of the slowest link.
#[derive(Debug)]
pub struct Ring {
    rank: u32,
    world_size: u32,
    timeout: Duration,
    lane: Mutex<Lane>,
    end: Arc<End>,
    beside: Option<Arc<Ring>>,
    apart: OnceLock<String>,
}

/// The two connections of a rank.
#[derive(Debug)]
struct Lane {
    next: TcpStream,
    previous: TcpStream,
    /// Calls so far.
    sequence: u64,
    /// [`BLOCK`] bytes.
    block: Vec<f64>,
    /// To the next rank, headers included.
    sent_bytes: u64,
}

/// How a group ends, for whoever is in a call of it, also in a group beside it.
#[derive(Debug, Default)]
struct End {
    reason: OnceLock<String>,
    streams: Mutex<Vec<TcpStream>>,
}

impl End {
    fn call(&self, reason: String) {
        let _ = self.reason.set(reason);
        for stream in self.streams.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Ring {
    /// Connects the ranks that meet at `store`, twice: the group itself (`gradients`) and the one
    /// [`Communicator::beside`] it (`statistics`).
    ///
    /// # Errors
    /// Ranks that do not come or do not answer in the store's time-out.
    pub fn connect(store: &Store, timeout: Duration) -> Result<Arc<Self>, RendezvousError> {
        let end = Arc::new(End::default());
        let beside = Self::connect_lane(store, "statistics", timeout, end.clone(), None)?;
        Ok(Arc::new(Self::connect_lane(store, "gradients", timeout, end, Some(Arc::new(beside)))?))
    }

    fn connect_lane(
        store: &Store,
        name: &str,
        timeout: Duration,
        end: Arc<End>,
        beside: Option<Arc<Ring>>,
    ) -> Result<Self, RendezvousError> {
        let meeting = store.meeting();
        let (rank, world_size) = (meeting.rank, meeting.world_size);
        let protocol = |e: io::Error| RendezvousError::Protocol(format!("ring {name}: {e}"));
        let listener = TcpListener::bind((store.local_ip(), 0)).map_err(protocol)?;
        let here = listener.local_addr().map_err(protocol)?;
        let purpose = format!("ring/{name}");
        let addresses = store.exchange(&purpose, here.to_string().as_bytes())?;
        let next_rank = (rank + 1) % world_size;
        let next: SocketAddr = std::str::from_utf8(&addresses[next_rank as usize])
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| RendezvousError::Protocol(format!("rank {next_rank} gave no address")))?;
        let terms = Terms { secret: &meeting.secret, purpose: &purpose };
        let previous_rank = (rank + world_size - 1) % world_size;
        // Both at once, or every rank would wait for the next one's answer.
        let (called, accepted) = std::thread::scope(|scope| {
            let accepting = scope.spawn(|| accept(&listener, &terms, previous_rank, store));
            let called = TcpStream::connect_timeout(&next, meeting.timeout)
                .and_then(|mut stream| terms.call(&mut stream, rank).map(|()| stream))
                .map_err(|e| RendezvousError::Protocol(format!("rank {next_rank} at {next}: {e}")));
            (called, accepting.join())
        });
        let next = called?;
        let previous =
            accepted.map_err(|_| RendezvousError::Protocol("the accepting thread died".into()))??;
        for stream in [&next, &previous] {
            stream.set_nonblocking(true).map_err(protocol)?;
            let clone = stream.try_clone().map_err(protocol)?;
            end.streams.lock().unwrap_or_else(PoisonError::into_inner).push(clone);
        }
        let lane = Lane { next, previous, sequence: 0, block: vec![0.0; BLOCK / 8], sent_bytes: 0 };
        let (lane, apart) = (Mutex::new(lane), OnceLock::new());
        Ok(Self { rank, world_size, timeout, lane, end, beside, apart })
    }

    /// Runs one call: header first, then `body`. Any failure ends the group.
    fn call<T>(
        &self,
        what: Call,
        body: impl FnOnce(&mut Wire<'_>) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let operation = what.operation.name();
        self.not_ended(operation)?;
        let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
        lane.sequence += 1;
        let mut wire = Wire { ring: self, lane: &mut lane, operation };
        let result = wire.open(what).and_then(|()| body(&mut wire));
        result.map_err(|error| self.failed(error))
    }

    /// Says why its ranks share no memory.
    pub(super) fn apart(&self, why: String) {
        let _ = self.apart.set(why);
    }

    /// Whether the group was ended here.
    pub(super) fn not_ended(&self, operation: &'static str) -> Result<(), CommError> {
        match self.end.reason.get() {
            Some(reason) => Err(CommError::Aborted { operation, reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Whether the neighbours are there, for those who wait for ranks in another way than by a call.
    pub(super) fn stands(&self, operation: &'static str) -> Result<(), CommError> {
        self.not_ended(operation)?;
        // A call that is under way sees it by itself.
        let Ok(lane) = self.lane.try_lock() else { return Ok(()) };
        for (stream, peer) in [(&lane.next, self.next_rank()), (&lane.previous, self.previous_rank())] {
            let mut ready = [PollFd::new(stream, PollFlags::RDHUP)];
            let looked = poll(&mut ready, Some(&Timespec::default()));
            let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
            if looked.is_ok() && ready[0].revents().intersects(gone) {
                let detail = "it closed the connection".into();
                return Err(CommError::Disconnected { operation, peer, detail });
            }
        }
        Ok(())
    }

    /// Ends the group because of `error`, so that the neighbours learn of it now and not by their
    /// time-outs.
    pub(super) fn failed(&self, error: CommError) -> CommError {
        if let Some(reason) = self.end.reason.get() {
            // A connection that an abort shut down looks lost.
            let operation = error.operation();
            return CommError::Aborted { operation, reason: reason.clone() };
        }
        self.end.call(error.to_string());
        error
    }

    fn previous_rank(&self) -> u32 {
        (self.rank + self.world_size - 1) % self.world_size
    }

    fn next_rank(&self) -> u32 {
        (self.rank + 1) % self.world_size
    }
}

fn accept(
    listener: &TcpListener,
    terms: &Terms<'_>,
    expected: u32,
    store: &Store,
) -> Result<TcpStream, RendezvousError> {
    let meeting = store.meeting();
    let began = Instant::now();
    let slice = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let protocol = |e: io::Error| RendezvousError::Protocol(e.to_string());
    listener.set_nonblocking(true).map_err(protocol)?;
    loop {
        match listener.accept() {
            Ok((mut stream, _)) => {
                stream.set_nonblocking(false).map_err(protocol)?;
                // A stranger, or somebody who hung up, does not keep the expected one out.
                if terms.answer(&mut stream).is_ok_and(|rank| rank == expected) {
                    return Ok(stream);
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&slice));
            }
            Err(e) => return Err(protocol(e)),
        }
        if store.gives_up() {
            return Err(RendezvousError::Stopped);
        }
        if began.elapsed() > meeting.timeout {
            let secs = meeting.timeout.as_secs_f64();
            return Err(RendezvousError::Missing { ranks: vec![expected], secs, what: terms.purpose.into() });
        }
    }
}

impl Communicator for Ring {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn all_reduce(&self, values: &mut [f32], reduction: Reduction) -> Result<(), CommError> {
        let detail = u32::from(reduction == Reduction::Mean);
        self.call(Call { operation: Operation::AllReduce, detail, length: values.len() }, |wire| {
            let n = wire.ring.world_size as f32;
            wire.reduce(values, |part| {
                if reduction == Reduction::Mean {
                    part.iter_mut().for_each(|value| *value /= n);
                }
            })
        })
    }

    fn all_reduce_f64(&self, values: &mut [f64]) -> Result<(), CommError> {
        self.call(Call { operation: Operation::AllReduceF64, detail: 0, length: values.len() }, |wire| {
            wire.reduce(values, |_| ())
        })
    }

    fn broadcast(&self, values: &mut [f32], root: u32) -> Result<(), CommError> {
        self.call(Call { operation: Operation::Broadcast, detail: root, length: values.len() }, |wire| {
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
            let (rank, next) = (wire.ring.rank, wire.ring.next_rank());
            if rank == root {
                let out = if next == root { &mut [] } else { bytes };
                return wire.exchange(out, &mut Fill::new(&mut []));
            }
            // One block comes in while the one before it goes out.
            let mut passed = 0..0;
            loop {
                let coming = passed.end..bytes.len().min(passed.end + BLOCK);
                if coming.is_empty() && passed.is_empty() {
                    return Ok(());
                }
                let (out, into) = two_of(bytes, passed, coming.clone());
                let out = if next == root { &[] } else { out };
                wire.exchange(out, &mut Fill::new(into))?;
                passed = coming;
            }
        })
    }

    fn all_gather(&self, values: &[f32]) -> Result<Vec<f32>, CommError> {
        self.call(Call { operation: Operation::AllGather, detail: 0, length: values.len() }, |wire| {
            let at = wire.ring.rank as usize * values.len();
            let mut slots = vec![0.0; wire.ring.world_size as usize * values.len()];
            slots[at..at + values.len()].copy_from_slice(values);
            wire.gather(bytemuck::cast_slice_mut(&mut slots))?;
            Ok(slots)
        })
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.call(Call { operation: Operation::Barrier, detail: 0, length: 0 }, |wire| {
            // A byte has been at every rank when it is back.
            wire.gather(&mut vec![0; wire.ring.world_size as usize])
        })
    }

    fn abort(&self, reason: &str) {
        self.end.call(reason.into());
    }

    fn check(&self, operation: &'static str) -> Result<(), CommError> {
        self.stands(operation)
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn beside(&self) -> Option<Arc<dyn Communicator>> {
        self.beside.clone().map(|ring| ring as Arc<dyn Communicator>)
    }

    fn shared_memory(&self, _: usize) -> Result<SharedMemoryOrReason, CommError> {
        let why = self.apart.get().map_or("the ranks are not known to be on one machine", String::as_str);
        Ok(Err(why.into()))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The clones in `end` would keep the connections open.
        if self.beside.is_some() {
            self.end.call("this rank has left the group".into());
        }
    }
}
