//! The group of ranks on one machine.

use super::{
    SharedMemory,
    bell::Bell,
    layout::{Head, Line, SLOT, beginning, slots_at},
    mapping::{Anonymous, Held, Mapping, whole_pages},
    offer,
};
use crate::comm::{
    CommError, Communicator, Reduction,
    rendezvous::{RendezvousError, Store},
    ring::{Operation, Ring},
};
use std::{
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

/// Ranks of one machine that share memory, over the ring that they are in anyway.
#[derive(Debug)]
pub struct Host {
    ring: Arc<Ring>,
    /// Whether a rank that waits may keep its core busy.
    spins: bool,
    file: Anonymous,
    head: Held<Head>,
    lines: Held<Line>,
    slots: [Held<f64>; 2],
    own: Mutex<Own>,
}

/// Where this rank is; the same on every rank between calls.
#[derive(Debug)]
struct Own {
    calls: u64,
    /// Bytes of the file that are in use.
    used: usize,
}

impl Host {
    /// Lets the ranks of `ring`, which met at `store`, share memory if all of them can; else they have the ring.
    ///
    /// # Errors
    /// Ranks that do not answer in the store's time-out.
    pub fn meet(store: &Store, ring: Arc<Ring>) -> Result<Arc<dyn Communicator>, RendezvousError> {
        match Self::among(store, &ring)? {
            Ok(host) => Ok(Arc::new(host)),
            Err(why) => {
                ring.apart(why);
                Ok(ring)
            }
        }
    }

    /// The group, or why there is none: all ranks are told the same.
    pub(super) fn among(
        store: &Store,
        ring: &Arc<Ring>,
    ) -> Result<Result<Arc<Self>, String>, RendezvousError> {
        let world = ring.world_size() as usize;
        let made = (ring.rank() == 0).then(|| offer::make(world));
        let word = match &made {
            Some(Ok((offer, _))) => serde_json::to_vec(&Ok::<_, String>(offer))
                .map_err(|e| RendezvousError::Protocol(e.to_string()))?,
            Some(Err(why)) => serde_json::to_vec(&Err::<(), _>(why)).unwrap_or_default(),
            None => Vec::new(),
        };
        let words = store.exchange("shared/offer", &word)?;
        let opened = match made {
            Some(made) => made.map(|(_, opened)| opened),
            None => serde_json::from_slice::<Result<offer::Offer, String>>(&words[0])
                .map_err(|e| e.to_string())
                .and_then(|offered| offered.map_err(|_| String::new()))
                .and_then(|offer| offer::open(&offer, world)),
        };
        // Of those who cannot the first one says why; that rank 0 offers nothing is its own matter.
        let word = match &opened {
            Ok(_) => "joined",
            Err(why) => why,
        };
        let words = store.exchange("shared/joined", word.as_bytes())?;
        let refused = (0..).zip(&words).find(|(_, word)| word.as_slice() != b"joined");
        match (refused, opened) {
            (None, Ok((file, memory))) => Ok(Ok(Arc::new(Self::new(ring.clone(), file, &memory)))),
            (Some((rank, why)), _) => Ok(Err(format!("rank {rank}: {}", String::from_utf8_lossy(why)))),
            (None, Err(why)) => Ok(Err(why)),
        }
    }

    fn new(ring: Arc<Ring>, file: Anonymous, memory: &Arc<Mapping>) -> Self {
        let world = ring.world_size() as usize;
        let slots = |turn| slots_at(world) + turn * world * SLOT * size_of::<f64>();
        // SAFETY: numbers, most of them atomic; `round` says who uses which slot when.
        #[allow(unsafe_code)]
        let (lines, slots) = unsafe {
            let slots = [0, 1].map(|turn| memory.view(slots(turn), world * SLOT));
            (memory.view(size_of::<Head>(), world), slots)
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let own = Mutex::new(Own { calls: 0, used: beginning(world) });
        Self { ring, spins: world <= cores, file, head: offer::head(memory), lines, slots, own }
    }

    #[cfg(test)]
    pub(super) fn file(&self) -> &Anonymous {
        &self.file
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.head[0].bell
    }

    /// See [`SharedMemory::wait`].
    pub(super) fn wait(
        &self,
        operation: &'static str,
        idle: &mut dyn FnMut() -> bool,
        ready: &dyn Fn() -> bool,
        behind: &dyn Fn() -> usize,
    ) -> Result<Duration, CommError> {
        let limit = self.ring.timeout();
        let watch = |quiet: Duration| {
            self.ring.stands(operation)?;
            if quiet > limit {
                let (peer, secs) = (behind() as u32, limit.as_secs_f64());
                return Err(CommError::TimedOut { operation, peer, secs });
            }
            Ok(())
        };
        match self.bell().wait(self.spins, idle, ready, watch) {
            // Whoever is gone may have said it before.
            Err(_) if ready() => Ok(Duration::ZERO),
            Err(error) => Err(self.ring.failed(error)),
            Ok(waited) => Ok(waited),
        }
    }

    /// One call: `mine` is there for the others, and `read` gets what every rank has there, in their order.
    ///
    /// A rank writes its slot before it counts its call. Others read it from then until their own next call. The
    /// rank writes it again two calls later, so after all have made the one between.
    fn round<R>(
        &self,
        (operation, detail): (Operation, u32),
        length: usize,
        mine: &[f64],
        idle: &mut dyn FnMut() -> bool,
        read: impl FnOnce(&[f64], Duration) -> R,
    ) -> Result<R, CommError> {
        let name = operation.name();
        self.ring.not_ended(name)?;
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        own.calls += 1;
        let (call, turn) = (own.calls, (own.calls % 2) as usize);
        let rank = self.ring.rank() as usize;
        // SAFETY: nobody reads this rank's slot before its call is counted.
        #[allow(unsafe_code)]
        unsafe { self.slots[turn].part(rank * SLOT..rank * SLOT + mine.len()) }.copy_from_slice(mine);
        let said = ((operation as u64) << 32 | u64::from(detail), length as u64);
        let line = &self.lines[rank];
        line.what[turn].store(said.0, Ordering::Relaxed);
        line.length[turn].store(said.1, Ordering::Relaxed);
        line.calls.store(call, Ordering::Release);
        self.bell().ring();

        let late = || self.lines.iter().position(|line| line.calls.load(Ordering::Acquire) < call);
        let waited = self.wait(name, idle, &|| late().is_none(), &|| late().unwrap_or(rank))?;
        for (peer, line) in (0..).zip(self.lines.iter()) {
            let theirs = (line.what[turn].load(Ordering::Relaxed), line.length[turn].load(Ordering::Relaxed));
            if theirs != said {
                let of = Operation::from_code((theirs.0 >> 32) as u32);
                let detail = format!(
                    "is at call {call}: {} of {} values ({}); this rank: {name} of {length} values ({detail})",
                    of.map_or("an unknown operation", Operation::name),
                    theirs.1,
                    theirs.0 as u32,
                );
                return Err(self.ring.failed(CommError::Mismatch { operation: name, peer, detail }));
            }
        }
        Ok(read(&self.slots[turn], waited))
    }

    /// What goes over the ring is said here first: ranks that disagree find out, whichever way each one takes.
    fn say(&self, operation: Operation, detail: u32, length: usize) -> Result<(), CommError> {
        self.round((operation, detail), length, &[], &mut || false, |_, _| ())
    }

    /// See [`SharedMemory::all_reduce_f64`].
    pub(super) fn sum(
        &self,
        values: &mut [f64],
        idle: &mut dyn FnMut() -> bool,
    ) -> Result<Duration, CommError> {
        if values.len() > SLOT {
            self.say(Operation::AllReduceF64, 0, values.len())?;
            return self.ring.all_reduce_f64(values).map(|()| Duration::ZERO);
        }
        let mine = values.to_vec();
        self.round((Operation::AllReduceF64, 0), mine.len(), &mine, idle, |slots, waited| {
            values.fill(-0.0);
            for slot in slots.chunks_exact(SLOT) {
                values.iter_mut().zip(slot).for_each(|(sum, value)| *sum += value);
            }
            waited
        })
    }

    /// See [`Communicator::shared_memory`].
    fn share(self: &Arc<Self>, bytes: usize) -> Result<Result<SharedMemory, String>, CommError> {
        let bytes = whole_pages(bytes.max(1));
        let offset = self.own.lock().unwrap_or_else(PoisonError::into_inner).used;
        self.say(Operation::SharedMemory, 0, bytes)?;
        let grown = if self.ring.rank() == 0 { self.file.grow(offset, bytes) } else { Ok(()) };
        self.say(Operation::SharedMemory, 1, bytes)?;
        let mapped = grown.and_then(|()| self.file.map(offset, bytes));
        let mut without = [f64::from(u8::from(mapped.is_err()))];
        self.sum(&mut without, &mut || false)?;
        self.own.lock().unwrap_or_else(PoisonError::into_inner).used = offset + bytes;
        let mib = bytes >> 20;
        Ok(match mapped {
            Ok(mapping) if without[0] == 0.0 => Ok(SharedMemory { mapping, host: self.clone() }),
            Ok(_) => Err(format!("another rank has no room for {mib} MiB of memory to share")),
            Err(why) => Err(format!("no room for {mib} MiB of memory to share: {why}")),
        })
    }
}

impl Communicator for Arc<Host> {
    fn rank(&self) -> u32 {
        self.ring.rank()
    }

    fn world_size(&self) -> u32 {
        self.ring.world_size()
    }

    fn all_reduce(&self, values: &mut [f32], reduction: Reduction) -> Result<(), CommError> {
        self.say(Operation::AllReduce, u32::from(reduction == Reduction::Mean), values.len())?;
        self.ring.all_reduce(values, reduction)
    }

    fn all_reduce_f64(&self, values: &mut [f64]) -> Result<(), CommError> {
        self.sum(values, &mut || false).map(drop)
    }

    fn broadcast(&self, values: &mut [f32], root: u32) -> Result<(), CommError> {
        self.say(Operation::Broadcast, root, values.len())?;
        self.ring.broadcast(values, root)
    }

    fn all_gather(&self, values: &[f32]) -> Result<Vec<f32>, CommError> {
        self.say(Operation::AllGather, 0, values.len())?;
        self.ring.all_gather(values)
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.say(Operation::Barrier, 0, 0)
    }

    fn abort(&self, reason: &str) {
        self.ring.abort(reason);
        self.bell().ring();
    }

    fn check(&self, operation: &'static str) -> Result<(), CommError> {
        self.ring.stands(operation)
    }

    fn timeout(&self) -> Duration {
        self.ring.timeout()
    }

    fn beside(&self) -> Option<Arc<dyn Communicator>> {
        self.ring.beside()
    }

    fn shared_memory(&self, bytes: usize) -> Result<Result<SharedMemory, String>, CommError> {
        self.share(bytes)
    }
}
