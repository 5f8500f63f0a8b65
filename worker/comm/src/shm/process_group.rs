//! The group of ranks on one machine.

use super::{
    SharedMemory, descriptor,
    layout::{Announcements, Head, SLOT_VALUES, group_bytes, slots_at},
    mapping::{Mapping, MemFile, SharedSlice, whole_pages},
    wait_queue::WaitQueue,
};
use crate::{
    CommError, ProcessGroup, SharedMemoryOrReason, Values, ValuesMut, any_rank,
    ring::{Call, Operation, Ring},
    values::check,
};
use lockstep_host::lock;
use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

/// The ranks of one machine that share memory. Their ring stays connected, for messages and to notice lost ranks.
#[derive(Debug)]
pub struct ShmProcessGroup {
    ring: Arc<Ring>,
    /// Whether a waiting rank may spin, because each rank has a core.
    spins: bool,
    pub(super) file: MemFile,
    head: SharedSlice<Head>,
    announcements: SharedSlice<Announcements>,
    /// Two slots of each rank, used alternately.
    slots: [SharedSlice<f64>; 2],
    state: Mutex<GroupState>,
}

/// A rank's state of the group. Between calls, the states of all ranks are equal.
#[derive(Debug)]
struct GroupState {
    /// The number of calls so far.
    calls: u64,
    /// The number of bytes of the file in use.
    used_bytes: usize,
}

impl ShmProcessGroup {
    /// Collective: makes the ranks of `ring` share memory, and returns their group. If one of the ranks cannot share
    /// memory, returns the ring itself.
    ///
    /// # Errors
    /// The errors of [every call](ProcessGroup).
    pub fn upgrade(ring: Arc<Ring>) -> Result<Arc<dyn ProcessGroup>, CommError> {
        Ok(match Self::connect(&ring)? {
            Ok(group) => Arc::new(group),
            Err(reason) => {
                let _ = ring.shm_unavailable_reason.set(reason);
                ring
            }
        })
    }

    /// Collective: makes the ranks of `ring` share memory. Returns their group, or the reason why they cannot share memory, which
    /// is the same on all ranks.
    pub(super) fn connect(ring: &Arc<Ring>) -> Result<Result<Arc<Self>, String>, CommError> {
        let size = ring.size() as usize;
        let allocated = (ring.rank() == 0).then(|| descriptor::make(size));
        let message = match &allocated {
            Some(allocated) => serde_json::to_vec(&allocated.as_ref().map(|(descriptor, _)| descriptor)),
            None => Ok(Vec::new()),
        };
        let message = message.unwrap_or_default();
        let messages = ring.all_gather_bytes(&message)?;
        let opened = match allocated {
            Some(allocated) => allocated.map(|(_, opened)| opened),
            None => serde_json::from_slice::<Result<descriptor::ShmDescriptor, String>>(&messages[0])
                .map_err(|e| e.to_string())
                .and_then(|described| described.map_err(|_| String::new()))
                .and_then(|descriptor| descriptor::open(&descriptor, size)),
        };
        // The first rank that has failed gives the reason. If that is rank 0, the reasons of other ranks are empty.
        let message = match &opened {
            Ok(_) => "joined",
            Err(reason) => reason,
        };
        let messages = ring.all_gather_bytes(message.as_bytes())?;
        Ok(match messages.iter().position(|message| message != b"joined") {
            Some(rank) => Err(format!("rank {rank}: {}", String::from_utf8_lossy(&messages[rank]))),
            None => opened.map(|(file, memory)| Arc::new(Self::new(ring.clone(), file, &memory))),
        })
    }

    fn new(ring: Arc<Ring>, file: MemFile, memory: &Arc<Mapping>) -> Self {
        let world = ring.size() as usize;
        let slots = |half| slots_at(world) + half * world * SLOT_VALUES * size_of::<f64>();
        // SAFETY: any bits are valid numbers, and `round` decides which rank uses which slot when.
        #[allow(unsafe_code)]
        let (announcements, slots) = unsafe {
            let slots = [0, 1].map(|half| memory.view(slots(half), world * SLOT_VALUES));
            (memory.view(size_of::<Head>(), world), slots)
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let state = Mutex::new(GroupState { calls: 0, used_bytes: group_bytes(world) });
        Self {
            ring,
            spins: world <= cores,
            file,
            head: descriptor::head(memory),
            announcements,
            slots,
            state,
        }
    }

    pub(super) fn queue(&self) -> &WaitQueue {
        &self.head[0].queue
    }

    /// See [`SharedMemory::wait`].
    pub(super) fn wait(
        &self,
        operation: &'static str,
        idle: &mut dyn FnMut() -> bool,
        is_ready: &dyn Fn() -> bool,
        awaited_rank: &dyn Fn() -> usize,
    ) -> Result<Duration, CommError> {
        let limit = self.ring.timeout();
        let check = |quiet: Duration| {
            self.ring.check(operation)?;
            if quiet > limit {
                let (peer, secs) = (awaited_rank() as u32, limit.as_secs_f64());
                return Err(CommError::TimedOut { operation, peer, secs });
            }
            Ok(())
        };
        match self.queue().wait(self.spins, idle, is_ready, check) {
            Err(_) if is_ready() => Ok(Duration::ZERO),
            // `End::fail_with` returns the reason if the ring already knows why a rank has exited.
            Err(error) => Err(self.ring.end.fail_with(error)),
            Ok(waited) => Ok(waited),
        }
    }

    /// Makes a call: publishes `own_values`, waits for all ranks, and passes to `read` the slots of all ranks, in rank order, and
    /// the time for which this rank waited without work.
    ///
    /// A rank writes its slot and then increments its counter. The other ranks read the slot before their own next
    /// call. The rank reuses the slot two calls later, after all other ranks have made the call in between.
    fn round<R>(
        &self,
        call: Call,
        own_values: &[f64],
        idle: &mut dyn FnMut() -> bool,
        read: impl FnOnce(&[f64], Duration) -> R,
    ) -> Result<R, CommError> {
        let name = call.operation.name();
        self.ring.end.check_not_ended(name)?;
        let mut state = lock(&self.state);
        state.calls += 1;
        let (number, half) = (state.calls, (state.calls % 2) as usize);
        let rank = self.ring.rank() as usize;
        // SAFETY: no rank reads this slot before this rank's counter is incremented.
        #[allow(unsafe_code)]
        unsafe { self.slots[half].part(rank * SLOT_VALUES..rank * SLOT_VALUES + own_values.len()) }
            .copy_from_slice(own_values);
        let packed = call.pack();
        let announced = &self.announcements[rank];
        announced.packed_calls[half]
            .iter()
            .zip(packed)
            .for_each(|(entry, word)| entry.store(word, Ordering::Relaxed));
        announced.calls.store(number, Ordering::Release);
        self.queue().notify_all();

        let late_rank = || {
            self.announcements.iter().position(|announced| announced.calls.load(Ordering::Acquire) < number)
        };
        let waited = self.wait(name, idle, &|| late_rank().is_none(), &|| late_rank().unwrap_or(rank))?;
        for (peer, announced) in (0..).zip(self.announcements.iter()) {
            let theirs = announced.packed_calls[half].each_ref().map(|word| word.load(Ordering::Relaxed));
            if theirs != packed {
                let detail = format!(
                    "is at call {number}: {}; this rank: {}",
                    Call::describe(theirs),
                    Call::describe(packed)
                );
                return Err(self.ring.end.fail_with(CommError::Mismatch { operation: name, peer, detail }));
            }
        }
        Ok(read(&self.slots[half], waited))
    }

    /// Announces a call that uses the ring. Ranks that make different calls then notice the difference, even if only some
    /// of these calls use the ring.
    fn announce(&self, call: Call) -> Result<(), CommError> {
        self.round(call, &[], &mut || false, |_, _| ())
    }

    /// See [`SharedMemory::all_reduce_f64`].
    pub(super) fn sum(
        &self,
        values: &mut [f64],
        idle: &mut dyn FnMut() -> bool,
    ) -> Result<Duration, CommError> {
        let call = Call::of(Operation::AllReduce, &(&*values).into());
        if values.len() > SLOT_VALUES {
            self.announce(call)?;
            return self.ring.all_reduce(values.into()).map(|()| Duration::ZERO);
        }
        let own_values = values.to_vec();
        self.round(call, &own_values, idle, |slots, waited| {
            // A sum that starts with -0.0 keeps the sign of zeros.
            values.fill(-0.0);
            for slot in slots.chunks_exact(SLOT_VALUES) {
                values.iter_mut().zip(slot).for_each(|(sum, value)| *sum += value);
            }
            waited
        })
    }
}

impl ProcessGroup for Arc<ShmProcessGroup> {
    fn rank(&self) -> u32 {
        self.ring.rank()
    }

    fn size(&self) -> u32 {
        self.ring.size()
    }

    fn all_reduce(&self, values: ValuesMut<'_>) -> Result<(), CommError> {
        check::reducible("all_reduce", values.data_type())?;
        match values {
            ValuesMut::F64(values) => self.sum(values, &mut || false).map(drop),
            values => {
                self.announce(Call::of(Operation::AllReduce, &values.as_values()))?;
                self.ring.all_reduce(values)
            }
        }
    }

    fn reduce_scatter(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError> {
        check::reducible("reduce_scatter", input.data_type())?;
        check::parts("reduce_scatter", (&input, self.size()), (&output, 1))?;
        self.announce(Call::of(Operation::ReduceScatter, &input))?;
        self.ring.reduce_scatter(input, output)
    }

    fn all_gather(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError> {
        check::parts("all_gather", (&input, 1), (&output, self.size()))?;
        self.announce(Call::of(Operation::AllGather, &input))?;
        self.ring.all_gather(input, output)
    }

    fn all_to_all(&self, input: Values<'_>, output: ValuesMut<'_>) -> Result<(), CommError> {
        check::parts("all_to_all", (&input, self.size()), (&output, self.size()))?;
        self.announce(Call::of(Operation::AllToAll, &input))?;
        self.ring.all_to_all(input, output)
    }

    fn broadcast(&self, values: ValuesMut<'_>) -> Result<(), CommError> {
        self.announce(Call::of(Operation::Broadcast, &values.as_values()))?;
        self.ring.broadcast(values)
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.announce(Call::empty(Operation::Barrier))
    }

    fn send(&self, values: Values<'_>, to: u32) -> Result<(), CommError> {
        self.ring.send(values, to)
    }

    fn recv(&self, values: ValuesMut<'_>, from: u32) -> Result<(), CommError> {
        self.ring.recv(values, from)
    }

    /// The ranks of each new group share separate memory, if they can.
    fn split(&self, color: u32) -> Result<Arc<dyn ProcessGroup>, CommError> {
        self.announce(Call::empty(Operation::Split))?;
        self.ring.split_with(color, ShmProcessGroup::upgrade)
    }

    fn abort(&self, reason: &str) {
        self.ring.abort(reason);
        self.queue().notify_all();
    }

    fn check(&self, operation: &'static str) -> Result<(), CommError> {
        self.ring.check(operation)
    }

    fn timeout(&self) -> Duration {
        self.ring.timeout()
    }

    fn concurrent_group(&self) -> Option<Arc<dyn ProcessGroup>> {
        self.ring.concurrent_group()
    }

    fn shared_memory(&self, bytes: usize) -> Result<SharedMemoryOrReason, CommError> {
        let bytes = whole_pages(bytes.max(1));
        let offset = lock(&self.state).used_bytes;
        let call = Call { length: bytes, ..Call::empty(Operation::SharedMemory) };
        self.announce(call)?;
        let grown = if self.ring.rank() == 0 { self.file.grow(offset, bytes) } else { Ok(()) };
        // The other ranks map the file only after rank 0 has extended it.
        self.announce(call)?;
        let mapped = grown.and_then(|()| self.file.map(offset, bytes));
        let failed = any_rank(self, mapped.is_err())?;
        lock(&self.state).used_bytes = offset + bytes;
        let mib = bytes >> 20;
        Ok(match mapped {
            Ok(mapping) if !failed => Ok(SharedMemory { mapping, group: self.clone() }),
            Ok(_) => Err(format!("another rank cannot allocate {mib} MiB of shared memory")),
            Err(why) => Err(format!("cannot allocate {mib} MiB of shared memory: {why}")),
        })
    }
}
