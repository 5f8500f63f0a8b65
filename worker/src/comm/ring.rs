//! A ring over TCP: each rank sends to the next and receives from the one before.
//!
//! Long vectors take reduce-scatter and all-gather (Patarasuk and Yuan 2009): every rank sends
//! `2 (n - 1) / n` of the vector whatever the number of ranks. Short ones are gathered and added up
//! by everybody: half the hops. Either way a sum is formed in an order that depends only on the
//! length and the number of ranks, so bits are equal on every rank and in every run.
//!
//! Every call opens with a header, checked by the neighbour: ranks that disagree about what they
//! are doing find out instead of mixing up numbers.

use super::{CommError, Communicator, Reduction, handshake::Terms};
use crate::rendezvous::{RendezvousError, Store};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex, OnceLock, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

/// Up to this many bytes a vector is gathered whole: on loopback a hop costs about as much as
/// sending 100 KiB.
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
}

/// The two connections of a rank.
#[derive(Debug)]
struct Lane {
    next: TcpStream,
    previous: TcpStream,
    /// Calls so far.
    sequence: u64,
    /// [`BLOCK`] bytes.
    block: Vec<f32>,
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
        let lane = Lane { next, previous, sequence: 0, block: vec![0.0; BLOCK / 4] };
        Ok(Self { rank, world_size, timeout, lane: Mutex::new(lane), end, beside })
    }

    /// Runs one call: header first, then `body`. Any failure ends the group, so that the
    /// neighbours learn of it now and not by their time-outs.
    fn call<T>(
        &self,
        what: Call,
        body: impl FnOnce(&mut Wire<'_>) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let operation = what.operation.name();
        let aborted = |reason: &String| CommError::Aborted { operation, reason: reason.clone() };
        if let Some(reason) = self.end.reason.get() {
            return Err(aborted(reason));
        }
        let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
        lane.sequence += 1;
        let mut wire = Wire { ring: self, lane: &mut lane, operation };
        let result = wire.open(what).and_then(|()| body(&mut wire));
        result.map_err(|error| {
            // A connection that an abort shut down looks lost.
            if let Some(reason) = self.end.reason.get() {
                return aborted(reason);
            }
            self.end.call(error.to_string());
            error
        })
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
        if meeting.stop.load(Ordering::Relaxed) {
            return Err(RendezvousError::Stopped);
        }
        if began.elapsed() > meeting.timeout {
            let secs = meeting.timeout.as_secs_f64();
            return Err(RendezvousError::Missing { ranks: vec![expected], secs, what: terms.purpose.into() });
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    AllReduce = 1,
    AllReduceF64 = 2,
    Broadcast = 3,
    AllGather = 4,
    Barrier = 5,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::AllReduceF64 => "all_reduce_f64",
            Operation::Broadcast => "broadcast",
            Operation::AllGather => "all_gather",
            Operation::Barrier => "barrier",
        }
    }

    fn from_code(code: u32) -> Option<Self> {
        use Operation::{AllGather, AllReduce, AllReduceF64, Barrier, Broadcast};
        [AllReduce, AllReduceF64, Broadcast, AllGather, Barrier].into_iter().find(|o| *o as u32 == code)
    }
}

/// What the ranks must agree on.
#[derive(Debug, Clone, Copy)]
struct Call {
    operation: Operation,
    /// The root, or the reduction.
    detail: u32,
    /// Values.
    length: usize,
}

/// A call under way.
struct Wire<'a> {
    ring: &'a Ring,
    lane: &'a mut Lane,
    operation: &'static str,
}

impl Wire<'_> {
    fn header(&self, call: Call) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&MAGIC.to_ne_bytes());
        header[4..8].copy_from_slice(&(call.operation as u32).to_ne_bytes());
        header[8..12].copy_from_slice(&call.detail.to_ne_bytes());
        header[16..24].copy_from_slice(&self.lane.sequence.to_ne_bytes());
        header[24..].copy_from_slice(&(call.length as u64).to_ne_bytes());
        header
    }

    /// Sends the header and checks the one before's.
    fn open(&mut self, call: Call) -> Result<(), CommError> {
        let mine = self.header(call);
        let mut theirs = [0; HEADER];
        self.exchange(&mine, &mut Fill::new(&mut theirs))?;
        if mine == theirs {
            return Ok(());
        }
        let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|i| theirs[at + i]));
        let long = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| theirs[at + i]));
        let detail = if word(0) == MAGIC.swap_bytes() {
            "runs on a machine of another byte order".to_string()
        } else if word(0) != MAGIC {
            "sent something that is no call".to_string()
        } else {
            format!(
                "is at call {}: {} of {} values ({}); this rank at call {}: {} of {} values ({})",
                long(16),
                Operation::from_code(word(4)).map_or("an unknown operation", Operation::name),
                long(24),
                word(8),
                self.lane.sequence,
                self.operation,
                call.length,
                call.detail,
            )
        };
        Err(CommError::Mismatch { operation: self.operation, peer: self.ring.previous_rank(), detail })
    }

    /// Sends `out` to the next rank while receiving what `sink` wants from the one before.
    fn exchange(&mut self, out: &[u8], sink: &mut dyn Sink) -> Result<(), CommError> {
        let Self { ring, lane, operation } = self;
        let (mut next, mut previous) = (&lane.next, &lane.previous);
        let lost = |peer, detail: String| CommError::Disconnected { operation, peer, detail };
        let mut sent = 0;
        while sent < out.len() || sink.wanted() > 0 {
            let mut moved = false;
            if sent < out.len() {
                match next.write(&out[sent..out.len().min(sent + BLOCK)]) {
                    Ok(n) => {
                        sent += n;
                        moved = true;
                    }
                    Err(e) if is_passing(&e) => {}
                    Err(e) => return Err(lost(ring.next_rank(), e.to_string())),
                }
            }
            if sink.wanted() > 0 {
                match sink.take(&mut previous) {
                    Ok(0) => return Err(lost(ring.previous_rank(), "it closed the connection".into())),
                    Ok(_) => moved = true,
                    Err(e) if is_passing(&e) => {}
                    Err(e) => return Err(lost(ring.previous_rank(), e.to_string())),
                }
            }
            if moved {
                continue;
            }
            let mut ready = [
                PollFd::new(next, if sent < out.len() { PollFlags::OUT } else { PollFlags::empty() }),
                PollFd::new(previous, if sink.wanted() > 0 { PollFlags::IN } else { PollFlags::empty() }),
            ];
            let timeout = Timespec::try_from(ring.timeout).ok();
            match poll(&mut ready, timeout.as_ref()) {
                Ok(0) => {
                    let peer = if sink.wanted() > 0 { ring.previous_rank() } else { ring.next_rank() };
                    return Err(CommError::TimedOut { operation, peer, secs: ring.timeout.as_secs_f64() });
                }
                Ok(_) => {
                    // While nothing is to be sent a lost connection to the next rank shows only here.
                    let gone = PollFlags::HUP | PollFlags::ERR;
                    if sent == out.len() && ready[0].revents().intersects(gone) {
                        return Err(lost(ring.next_rank(), "it closed the connection".into()));
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(lost(ring.previous_rank(), e.to_string())),
            }
        }
        Ok(())
    }

    /// Fills `slots` (one equal part a rank, this rank's already there) from all ranks.
    fn gather(&mut self, slots: &mut [u8]) -> Result<(), CommError> {
        let n = self.ring.world_size as usize;
        let rank = self.ring.rank as usize;
        let size = slots.len() / n;
        if size == 0 {
            return Ok(());
        }
        for hop in 0..n - 1 {
            let (from, to) = ((rank + n - hop) % n, (rank + 2 * n - hop - 1) % n);
            let (out, into) = two_of(slots, from * size..(from + 1) * size, to * size..(to + 1) * size);
            self.exchange(out, &mut Fill::new(into))?;
        }
        Ok(())
    }

    fn reduce_long(&mut self, values: &mut [f32], reduction: Reduction) -> Result<(), CommError> {
        let n = self.ring.world_size as usize;
        let rank = self.ring.rank as usize;
        let length = values.len();
        let chunk = |index: usize| {
            let index = index % n;
            length * index / n..length * (index + 1) / n
        };
        let mut block = std::mem::take(&mut self.lane.block);
        for hop in 0..n - 1 {
            let (out, target) = two_of(values, chunk(rank + n - hop), chunk(rank + 2 * n - hop - 1));
            let mut adding = Add { target, done: 0, block: &mut block, held: 0 };
            self.exchange(bytemuck::cast_slice(out), &mut adding)?;
        }
        self.lane.block = block;
        if reduction == Reduction::Mean {
            values[chunk(rank + 1)].iter_mut().for_each(|v| *v /= n as f32);
        }
        for hop in 0..n - 1 {
            let (out, into) = two_of(values, chunk(rank + 1 + n - hop), chunk(rank + n - hop));
            self.exchange(bytemuck::cast_slice(out), &mut Fill::new(bytemuck::cast_slice_mut(into)))?;
        }
        Ok(())
    }
}

/// Two parts of a slice that do not overlap.
fn two_of<T>(
    values: &mut [T],
    read: std::ops::Range<usize>,
    write: std::ops::Range<usize>,
) -> (&[T], &mut [T]) {
    if read.end <= write.start {
        let (left, right) = values.split_at_mut(write.start);
        (&left[read], &mut right[..write.end - write.start])
    } else {
        let (left, right) = values.split_at_mut(read.start);
        (&right[..read.end - read.start], &mut left[write])
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Where received bytes go.
trait Sink {
    /// Bytes still to come.
    fn wanted(&self) -> usize;
    fn take(&mut self, from: &mut &TcpStream) -> io::Result<usize>;
}

/// Into a buffer as they are.
struct Fill<'a> {
    buffer: &'a mut [u8],
    filled: usize,
}

impl<'a> Fill<'a> {
    fn new(buffer: &'a mut [u8]) -> Self {
        Self { buffer, filled: 0 }
    }
}

impl Sink for Fill<'_> {
    fn wanted(&self) -> usize {
        self.buffer.len() - self.filled
    }

    fn take(&mut self, from: &mut &TcpStream) -> io::Result<usize> {
        let end = self.buffer.len().min(self.filled + 8 * BLOCK);
        let taken = from.read(&mut self.buffer[self.filled..end])?;
        self.filled += taken;
        Ok(taken)
    }
}

/// Added to `target` as values, block by block.
struct Add<'a> {
    target: &'a mut [f32],
    /// Values added.
    done: usize,
    block: &'a mut [f32],
    /// Bytes of a value that is not whole yet, at the block's start.
    held: usize,
}

impl Sink for Add<'_> {
    fn wanted(&self) -> usize {
        (self.target.len() - self.done) * 4 - self.held
    }

    fn take(&mut self, from: &mut &TcpStream) -> io::Result<usize> {
        let wanted = self.wanted();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.block);
        let room = (bytes.len() - self.held).min(wanted);
        let taken = from.read(&mut bytes[self.held..self.held + room])?;
        let total = self.held + taken;
        let whole = total / 4;
        for (target, value) in self.target[self.done..].iter_mut().zip(&self.block[..whole]) {
            *target += value;
        }
        self.done += whole;
        self.held = total % 4;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.block);
        bytes.copy_within(whole * 4..total, 0);
        Ok(taken)
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
            if size_of_val(values) > SHORT {
                return wire.reduce_long(values, reduction);
            }
            let n = wire.ring.world_size as usize;
            let (length, at) = (values.len(), wire.ring.rank as usize * values.len());
            let mut slots = vec![0.0f32; n * length];
            slots[at..at + length].copy_from_slice(values);
            wire.gather(bytemuck::cast_slice_mut(&mut slots))?;
            for (i, value) in values.iter_mut().enumerate() {
                *value = (0..n).map(|rank| slots[rank * length + i]).fold(-0.0, |a, b| a + b);
                if reduction == Reduction::Mean {
                    *value /= n as f32;
                }
            }
            Ok(())
        })
    }

    fn all_reduce_f64(&self, values: &mut [f64]) -> Result<(), CommError> {
        self.call(Call { operation: Operation::AllReduceF64, detail: 0, length: values.len() }, |wire| {
            let n = wire.ring.world_size as usize;
            let (length, at) = (values.len(), wire.ring.rank as usize * values.len());
            let mut slots = vec![0.0f64; n * length];
            slots[at..at + length].copy_from_slice(values);
            wire.gather(bytemuck::cast_slice_mut(&mut slots))?;
            for (i, value) in values.iter_mut().enumerate() {
                *value = (0..n).map(|rank| slots[rank * length + i]).fold(-0.0, |a, b| a + b);
            }
            Ok(())
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

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn beside(&self) -> Option<Arc<dyn Communicator>> {
        self.beside.clone().map(|ring| ring as Arc<dyn Communicator>)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::{Meeting, free_port, tests::meeting};

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Runs `body` on `world` ranks, in a thread each, and gives what each returned.
    fn on_ranks<T: Send>(world: u32, timeout: Duration, body: impl Fn(Arc<Ring>) -> T + Sync) -> Vec<T> {
        let port = free_port("127.0.0.1").unwrap();
        std::thread::scope(|scope| {
            let body = &body;
            let rank = |rank| {
                scope.spawn(move || {
                    let store = Store::join(meeting(port, rank, world)).unwrap();
                    let ring = Ring::connect(&store, timeout).unwrap();
                    store.barrier("connected").unwrap();
                    body(ring)
                })
            };
            let ranks: Vec<_> = (0..world).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Values of a rank that do not add up exactly, so that order shows.
    fn values(rank: u32, length: usize) -> Vec<f32> {
        let seed = |i: usize| (i as u32).wrapping_mul(2_654_435_761).wrapping_add(rank * 40_503);
        (0..length).map(|i| (seed(i) % 10_007) as f32 * 1.37e-3 - 5.0).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn sums_are_right_and_bit_equal_at_any_size() {
        for world in 1..=5 {
            for length in [0, 1, 7, 1023, 8192, 8193, 1_000_003] {
                let run = || {
                    on_ranks(world, TIMEOUT, |ring| {
                        let mut sum = values(ring.rank(), length);
                        ring.all_reduce(&mut sum, Reduction::Sum).unwrap();
                        let mut mean = values(ring.rank(), length);
                        ring.all_reduce(&mut mean, Reduction::Mean).unwrap();
                        (sum, mean)
                    })
                };
                let results = run();
                let inputs: Vec<_> = (0..world).map(|rank| values(rank, length)).collect();
                for i in 0..length {
                    let exact: f64 = inputs.iter().map(|v| f64::from(v[i])).sum();
                    let (sum, mean) = (f64::from(results[0].0[i]), f64::from(results[0].1[i]));
                    assert!((sum - exact).abs() < 1e-5, "{world} ranks, {length} values, {i}: {sum} {exact}");
                    assert!((mean - exact / f64::from(world)).abs() < 1e-5);
                }
                for (sum, mean) in results.iter().chain(&run()) {
                    assert_eq!(bits(sum), bits(&results[0].0), "{world} ranks, {length} values");
                    assert_eq!(bits(mean), bits(&results[0].1));
                }
            }
        }
    }

    #[test]
    fn broadcast_gather_f64_and_barrier() {
        for world in 1..=5 {
            on_ranks(world, TIMEOUT, |ring| {
                for length in [0, 1, 1000, 200_001] {
                    for root in 0..world {
                        let mut got = values(ring.rank(), length);
                        ring.broadcast(&mut got, root).unwrap();
                        assert_eq!(got, values(root, length));
                    }
                    let all: Vec<f32> = (0..world).flat_map(|rank| values(rank, length)).collect();
                    assert_eq!(ring.all_gather(&values(ring.rank(), length)).unwrap(), all);
                }
                let mut counts = [1.0, f64::from(ring.rank()), 1e-17];
                ring.all_reduce_f64(&mut counts).unwrap();
                let n = f64::from(world);
                assert_eq!(counts[..2], [n, n * (n - 1.0) / 2.0]);
                ring.barrier().unwrap();
            });
        }
    }

    #[test]
    fn the_group_beside_runs_at_the_same_time_in_its_own_order() {
        on_ranks(3, TIMEOUT, |ring| {
            let beside = ring.beside().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let mut big = vec![1.0; 300_000];
                        ring.all_reduce(&mut big, Reduction::Sum).unwrap();
                        assert!(big.iter().all(|v| *v == 3.0));
                    }
                });
                for _ in 0..200 {
                    let mut small = [1.0; 64];
                    beside.all_reduce_f64(&mut small).unwrap();
                    assert_eq!(small, [3.0; 64]);
                }
            });
        });
    }

    #[test]
    fn ranks_that_disagree_are_told() {
        let results = on_ranks(2, TIMEOUT, |ring| {
            if ring.rank() == 0 {
                ring.all_reduce(&mut [0.0; 10], Reduction::Sum).unwrap_err().to_string()
            } else {
                ring.broadcast(&mut [0.0; 12], 0).unwrap_err().to_string()
            }
        });
        let told = results
            .iter()
            .any(|e| e.contains("broadcast of 12 values") && e.contains("all_reduce of 10 values"));
        assert!(told, "{results:?}");
    }

    #[test]
    fn a_silent_rank_times_out_and_a_dead_one_does_not_take_that_long() {
        let timeout = Duration::from_millis(300);
        let over = std::sync::Barrier::new(3);
        let results = on_ranks(3, timeout, |ring| {
            if ring.rank() == 1 {
                over.wait();
                return None;
            }
            let error = ring.all_reduce(&mut [0.0; 10], Reduction::Sum).unwrap_err();
            over.wait();
            Some(error)
        });
        let timed_out = |e: &CommError| matches!(e, CommError::TimedOut { secs, .. } if *secs == 0.3);
        assert!(results.iter().flatten().any(timed_out), "{results:?}");

        let results = on_ranks(3, Duration::from_secs(600), |ring| {
            let rank = ring.rank();
            if rank == 1 {
                drop(ring);
                return None;
            }
            let mut values = vec![0.0; 100_000];
            Some(ring.all_reduce(&mut values, Reduction::Sum).unwrap_err())
        });
        for error in results.iter().flatten() {
            assert!(matches!(error, CommError::Disconnected { .. }), "{error}");
        }
    }

    #[test]
    fn abort_ends_a_call_from_another_thread() {
        let results = on_ranks(2, Duration::from_secs(600), |ring| {
            if ring.rank() == 1 {
                return ring.barrier().unwrap_err();
            }
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| ring.all_reduce(&mut [0.0], Reduction::Sum).unwrap_err());
                ring.abort("told to stop");
                waiting.join().unwrap()
            })
        });
        assert_eq!(results[0].to_string(), "all_reduce: aborted: told to stop");
        // Rank 1 finds out by the header that came first, or by the connection that went.
        let found_out = matches!(results[1], CommError::Disconnected { .. } | CommError::Mismatch { .. });
        assert!(found_out, "{:?}", results[1]);
    }

    /// `cargo test --release -p lockstep-worker ring::tests::speed -- --ignored --nocapture`
    #[test]
    #[ignore = "a measurement"]
    fn speed() {
        for world in [2, 4] {
            for length in [64, 1024, 250_000, 2_500_000] {
                let secs = on_ranks(world, TIMEOUT, |ring| {
                    let mut values = vec![1.0; length];
                    let rounds = if length > 10_000 { 20 } else { 2000 };
                    (0..rounds).fold(f64::MAX, |best, _| {
                        let began = Instant::now();
                        ring.all_reduce(&mut values, Reduction::Mean).unwrap();
                        best.min(began.elapsed().as_secs_f64())
                    })
                });
                eprintln!("{world} ranks, {length} values: {:.1} us", secs[0] * 1e6);
            }
        }
    }

    #[test]
    fn a_rank_with_another_secret_is_kept_out_of_the_ring() {
        let port = free_port("127.0.0.1").unwrap();
        let rank_0 = Store::join(meeting(port, 0, 2)).unwrap();
        let stranger = Meeting { secret: b"guessed".to_vec(), ..meeting(port, 1, 2) };
        assert!(Store::join(stranger).is_err());
        let short = Meeting { timeout: Duration::from_millis(50), ..rank_0.meeting().clone() };
        drop(rank_0);
        let short = Store::join(Meeting { port: free_port("127.0.0.1").unwrap(), ..short }).unwrap();
        let error = Ring::connect(&short, TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("rank 1 has not arrived"), "{error}");
    }
}
