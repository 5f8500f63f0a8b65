//! A call under way: its header, and bytes that go out while others come in.

use super::{
    BLOCK, CommError, HEADER, Lane, MAGIC, Ring, SHORT,
    sink::{Add, Fill, Sink},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    io::{self, Write},
    ops::AddAssign,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum Operation {
    AllReduce = 1,
    AllReduceF64 = 2,
    Broadcast = 3,
    AllGather = 4,
    Barrier = 5,
    SharedMemory = 6,
}

impl Operation {
    pub(in crate::comm) fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::AllReduceF64 => "all_reduce_f64",
            Operation::Broadcast => "broadcast",
            Operation::AllGather => "all_gather",
            Operation::Barrier => "barrier",
            Operation::SharedMemory => "shared_memory",
        }
    }

    pub(in crate::comm) fn from_code(code: u32) -> Option<Self> {
        use Operation::{AllGather, AllReduce, AllReduceF64, Barrier, Broadcast, SharedMemory};
        [AllReduce, AllReduceF64, Broadcast, AllGather, Barrier, SharedMemory]
            .into_iter()
            .find(|o| *o as u32 == code)
    }
}

/// What the ranks must agree on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) operation: Operation,
    /// The root, or the reduction.
    pub(super) detail: u32,
    /// Values.
    pub(super) length: usize,
}

/// A call under way.
pub(super) struct Wire<'a> {
    pub(super) ring: &'a Ring,
    pub(super) lane: &'a mut Lane,
    pub(super) operation: &'static str,
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
    pub(super) fn open(&mut self, call: Call) -> Result<(), CommError> {
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
    pub(super) fn exchange(&mut self, out: &[u8], sink: &mut dyn Sink) -> Result<(), CommError> {
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
                        lane.sent_bytes += n as u64;
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
    pub(super) fn gather(&mut self, slots: &mut [u8]) -> Result<(), CommError> {
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

    /// Replaces `values` by their sum over all ranks.
    ///
    /// Up to [`SHORT`] bytes everybody gets everybody's and adds them in the order of ranks. Longer ones are cut into
    /// a part a rank: part `r` is added up from rank `r` on round the ring, and then goes round once more. `scale` is
    /// applied to a part when it is complete, by the one rank that has it.
    pub(super) fn reduce<T: Number>(
        &mut self,
        values: &mut [T],
        scale: impl Fn(&mut [T]),
    ) -> Result<(), CommError> {
        if size_of_val(values) > SHORT {
            return self.reduce_long(values, scale);
        }
        let n = self.ring.world_size as usize;
        let (length, at) = (values.len(), self.ring.rank as usize * values.len());
        let mut slots = vec![T::zeroed(); n * length];
        slots[at..at + length].copy_from_slice(values);
        self.gather(bytemuck::cast_slice_mut(&mut slots))?;
        for (i, value) in values.iter_mut().enumerate() {
            *value = slots[i];
            (1..n).for_each(|rank| *value += slots[rank * length + i]);
        }
        scale(values);
        Ok(())
    }

    fn reduce_long<T: Number>(
        &mut self,
        values: &mut [T],
        scale: impl Fn(&mut [T]),
    ) -> Result<(), CommError> {
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
            let block = bytemuck::cast_slice_mut(&mut block);
            let mut adding = Add { target, done: 0, block, held: 0 };
            self.exchange(bytemuck::cast_slice(out), &mut adding)?;
        }
        self.lane.block = block;
        scale(&mut values[chunk(rank + 1)]);
        for hop in 0..n - 1 {
            let (out, into) = two_of(values, chunk(rank + 1 + n - hop), chunk(rank + n - hop));
            self.exchange(bytemuck::cast_slice(out), &mut Fill::new(bytemuck::cast_slice_mut(into)))?;
        }
        Ok(())
    }
}

/// What sums are made of.
pub(super) trait Number: bytemuck::Pod + AddAssign {}
impl Number for f32 {}
impl Number for f64 {}

/// Two parts of a slice that do not overlap.
pub(super) fn two_of<T>(
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

pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
