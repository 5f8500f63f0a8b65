//! What a rank trains: weights, optimizer state and gradients, and the update that leads from one step to the next.
//!
//! Ranks of one machine share memory that holds weights and optimizer state once, and the gradients of each rank. When every rank
//! has completed a bucket, any idle thread of any rank takes the bucket's next piece, adds up its gradients in rank order and
//! updates its weights. So no gradient is sent, weights are updated once and not once per rank, and a rank that waits for another
//! works meanwhile. The result does not depend on who does a piece.
//!
//! No thread reads a weight while another may write it: a rank completes a bucket after its last use of the bucket's weights in a
//! step, pieces are updated only after all ranks have completed the bucket, and the next step begins only after all pieces are
//! done. Without shared memory (one rank, or ranks of several machines, whose gradients arrive summed) this process does all
//! pieces alone.

#![allow(unsafe_code)] // Memory that ranks share, and pieces that threads write; the order above keeps them apart.

mod bucket_sum;
mod kept;
mod sharding;

use super::{
    groups::Group,
    layout::{Layout, Slot},
    pieces::{self, Piece, Task, Work},
    reduce::Bucket,
    sample::SampledRows,
};
use crate::sharding::Share;
use bucket_sum::{first, keep, sum};
use lockstep_comm::{
    CommError, ProcessGroup,
    shm::{SharedMemory, SharedSlice},
};
use lockstep_kernels::optimizer::{Lanes, Optimizer, ParameterPolicy, Slots, Update};
pub(super) use sharding::Sharding;
use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Values added up and updated at a time: they stay in the first-level cache.
const BLOCK: usize = 1024;
/// Arrays in shared memory begin at multiples of this.
const ALIGN: usize = 4096;

/// The progress of the ranks, each on a cache line of its own. Counts continue over all steps.
#[repr(C, align(128))]
#[derive(Debug, Default)]
struct Counts {
    /// In line 0 only: tasks that a thread has taken.
    taken: AtomicU64,
    /// In line 0 only: tasks that are done.
    done: AtomicU64,
    /// Buckets that the rank of this line has completed.
    buckets: AtomicU64,
    /// Tasks that it took, and did.
    own_taken: AtomicU64,
    own_done: AtomicU64,
}

/// See the module.
pub(super) struct State {
    pub(super) weights: SharedSlice<f32>,
    /// By the optimizer's slot, each as long as the weights, or as what this rank has of them.
    pub(super) optimizer_slots: Vec<SharedSlice<f32>>,
    /// Updates done since those were zeros.
    pub(super) updates: u64,
    /// By rank, then by bucket: of all ranks where they share memory, else of this process alone. A bucket of this rank is empty
    /// while the reducer has it.
    gradients: Vec<Vec<Bucket>>,
    own: usize,
    counts: SharedSlice<Counts>,
    /// By piece: the sum of squares of the gradient and, for optimizers with two passes (LARS, LAMB), of the weights and of the
    /// prepared update.
    squares: [SharedSlice<AtomicU64>; 3],
    memory: Option<SharedMemory>,
    /// The reduced gradients of the last step that kept them, in the order of the weights.
    reduced: Option<SharedSlice<f32>>,
    /// Whether this step keeps its reduced gradients.
    keeps_gradients: bool,
    optimizer: Optimizer,
    /// The update of this step, and what it changes where that is not all.
    update: Update,
    sampled: Option<SampledRows>,
    /// For each parameter.
    policies: Vec<ParameterPolicy>,
    /// The pieces of each parameter.
    slot_pieces: Vec<Range<usize>>,
    pieces: Vec<Piece>,
    tasks: Vec<Task>,
    /// So many of them may be begun.
    open_tasks: usize,
    /// Has the other parts of the parameters of which this rank has a part.
    model_group: Option<Group>,
    /// Numbers of those parameters.
    split: Vec<usize>,
    /// Has the other parts of the optimizer's state where ranks divide it.
    sharding: Option<Sharding>,
    buckets: usize,
    steps: u64,
}

/// The buffers of a [`State`], in shared memory or in this process's.
struct SharedBuffers {
    weights: SharedSlice<f32>,
    optimizer_slots: Vec<SharedSlice<f32>>,
    gradients: Vec<Vec<Bucket>>,
    counts: SharedSlice<Counts>,
    squares: [SharedSlice<AtomicU64>; 3],
}

/// Assigns offsets in shared memory.
struct Map {
    next: usize,
}

impl Map {
    fn take(&mut self, bytes: usize) -> usize {
        let at = self.next;
        self.next = (at + bytes).next_multiple_of(ALIGN);
        at
    }
}

impl State {
    /// Zeros for everything; and why the ranks do not share memory, if there are several and they do not. `model_group`: the ranks that
    /// have other parts of parameters. `sharding`: ranks that share no memory divide the optimizer's state so.
    ///
    /// # Errors
    /// Another rank is gone.
    pub(super) fn new(
        layout: &Layout,
        f64_gradients: bool,
        optimizer: Optimizer,
        comm: &dyn ProcessGroup,
        model_group: Option<Group>,
        sharding: Option<Sharding>,
    ) -> Result<(Self, Option<String>), CommError> {
        let mut shares = vec![Share::WHOLE; layout.buckets.len()];
        let mut pieces = pieces::pieces(layout, &shares);
        let (world, len) = (comm.size() as usize, layout.len());

        let mut map = Map { next: 0 };
        let weights = map.take(4 * len);
        let optimizer_slots: Vec<usize> = optimizer.slots().iter().map(|_| map.take(4 * len)).collect();
        let counts = map.take(world * size_of::<Counts>());
        let squares = [0; 3].map(|_| map.take(8 * pieces.len()));
        let width = if f64_gradients { 8 } else { 4 };
        let places: Vec<Vec<usize>> = (0..world)
            .map(|_| layout.buckets.iter().map(|bucket| map.take(width * bucket.len())).collect())
            .collect();
        let (memory, shm_unavailable_reason) = match world {
            1 => (None, None),
            _ => match comm.shared_memory(map.next)? {
                Ok(memory) => (Some(memory), None),
                Err(why) => (None, Some(why)),
            },
        };
        // What ranks share is there once.
        let sharding = sharding.filter(|_| memory.is_none());
        if let Some(sharding) = &sharding {
            shares.clone_from(&sharding.shares);
            pieces = pieces::pieces(layout, &shares);
        }
        let in_two_passes = model_group.is_some() || sharding.is_some();
        let tasks = pieces::tasks(&pieces, optimizer.needs_norms(), in_two_passes);
        let mut slot_pieces = vec![0..0; layout.slots.len()];
        for (index, piece) in pieces.iter().enumerate() {
            let range = &mut slot_pieces[piece.slot];
            *range = if range.start == range.end { index..index + 1 } else { range.start..index + 1 };
        }
        let kept = match &memory {
            // SAFETY: numbers, of which all bits are valid; the module says who uses which when.
            Some(memory) => unsafe {
                let bucket = |(at, range): (&usize, &Range<usize>)| match f64_gradients {
                    true => Bucket::F64(memory.view(*at, range.len())),
                    false => Bucket::F32(memory.view(*at, range.len())),
                };
                let of_rank = |at: &Vec<usize>| at.iter().zip(&layout.buckets).map(bucket).collect();
                SharedBuffers {
                    weights: memory.view(weights, len),
                    optimizer_slots: optimizer_slots.iter().map(|at| memory.view(*at, len)).collect(),
                    gradients: places.iter().map(of_rank).collect(),
                    counts: memory.view(counts, world),
                    squares: squares.map(|at| memory.view(at, pieces.len())),
                }
            },
            None => {
                // Of equally long parts.
                let bucket = |(range, share): (&Range<usize>, &Share)| {
                    let len = share.part_len(range.len()) * share.ranks;
                    match f64_gradients {
                        true => Bucket::F64(vec![0.0; len].into()),
                        false => Bucket::F32(vec![0.0; len].into()),
                    }
                };
                let own_len = pieces.last().map_or(0, |piece| piece.in_slots.end);
                let zeros = || (0..pieces.len()).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
                SharedBuffers {
                    weights: vec![0.0; len].into(),
                    optimizer_slots: optimizer_slots.iter().map(|_| vec![0.0; own_len].into()).collect(),
                    gradients: vec![layout.buckets.iter().zip(&shares).map(bucket).collect()],
                    counts: vec![Counts::default()].into(),
                    squares: [0; 3].map(|_| zeros().into()),
                }
            }
        };
        let SharedBuffers { weights, optimizer_slots, gradients, counts, squares } = kept;
        let own = if memory.is_some() { comm.rank() as usize } else { 0 };
        let policy = |slot: &Slot| match slot.is_frozen {
            true => ParameterPolicy::FROZEN,
            false => optimizer.policy(slot.is_weight),
        };
        let policies = layout.slots.iter().map(policy).collect();
        let (buckets, steps, updates) = (layout.buckets.len(), 0, 0);
        let state = Self {
            weights,
            optimizer_slots,
            updates,
            gradients,
            own,
            counts,
            squares,
            memory,
            reduced: None,
            keeps_gradients: false,
            optimizer,
            update: Update::new(&optimizer, 0.0, 1),
            sampled: None,
            policies,
            slot_pieces,
            pieces,
            open_tasks: tasks.len(),
            tasks,
            model_group,
            split: (0..layout.slots.len()).filter(|slot| layout.slots[*slot].slice.is_some()).collect(),
            sharding,
            buckets,
            steps,
        };
        Ok((state, shm_unavailable_reason))
    }

    /// The memory that all ranks map, if they share the state.
    pub(super) fn memory(&self) -> Option<&SharedMemory> {
        self.memory.as_ref()
    }

    /// This rank's gradients of a bucket.
    pub(super) fn gradient(&mut self, bucket: usize) -> &mut Bucket {
        &mut self.gradients[self.own][bucket]
    }

    /// Begins a step, which updates all values, or those of `sampled` rows and all other parameters.
    pub(super) fn begin(&mut self, lr: f32, sampled: Option<SampledRows>) {
        self.update = Update::new(&self.optimizer, lr, self.updates + 1);
        self.sampled = sampled;
    }

    /// Says that this rank's gradients of a bucket are complete, and that it will not read the bucket's weights again in this step.
    pub(super) fn complete(&self, bucket: usize) {
        let complete = self.steps * self.buckets as u64 + bucket as u64 + 1;
        self.counts[self.own].buckets.store(complete, Ordering::Release);
        if let Some(memory) = &self.memory {
            memory.notify_all();
        }
    }

    /// Does all tasks that are ready, on all threads. False when none is.
    pub(super) fn advance(&self) -> bool {
        if self.next_task().is_none() {
            return false;
        }
        if rayon::current_num_threads() == 1 {
            while self.do_one() {}
        } else {
            rayon::broadcast(|_| while self.do_one() {});
        }
        true
    }

    /// Waits until the update is done everywhere, and works on it meanwhile. Gives the sum of squares of the reduced
    /// gradient, and the time without work.
    ///
    /// # Errors
    /// Another rank is gone.
    pub(super) fn finish(&mut self) -> Result<(f64, Duration), CommError> {
        let all = (self.steps + 1) * self.tasks.len() as u64;
        let done = || self.counts[0].done.load(Ordering::Acquire) >= all;
        let waited = match &self.memory {
            Some(memory) => memory.wait("update", &mut || self.advance(), &done, &|| self.behind())?,
            None => {
                // The norms of a parameter of which other ranks have parts are needed before its update.
                let is_divided = self.model_group.is_some() || self.sharding.is_some();
                self.open_tasks = if is_divided { self.pieces.len() } else { self.tasks.len() };
                self.advance();
                self.add_up_squares()?;
                self.open_tasks = self.tasks.len();
                self.advance();
                let began = Instant::now();
                if let Some(sharding) = &self.sharding {
                    sharding.complete(&mut self.weights)?;
                    if let Some(reduced) = self.reduced.as_mut().filter(|_| self.keeps_gradients) {
                        sharding.complete(reduced)?;
                    }
                    began.elapsed()
                } else {
                    Duration::ZERO
                }
            }
        };
        self.steps += 1;
        self.updates += 1;
        self.keeps_gradients = false;
        Ok((self.squares[0].iter().map(number).sum(), waited))
    }

    /// The rank that the others wait for: one that has taken a task and not finished it, else the one that has completed the fewest
    /// buckets.
    fn behind(&self) -> usize {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let busy = |c: &Counts| read(&c.own_taken) != read(&c.own_done);
        let ranks = || self.counts.iter().enumerate();
        let stuck = ranks().find(|(rank, c)| *rank != self.own && busy(c));
        stuck.or_else(|| ranks().min_by_key(|(_, c)| read(&c.buckets))).map_or(0, |(rank, _)| rank)
    }

    /// Number of the next task if it can be begun, and how many were taken before it.
    fn next_task(&self) -> Option<(usize, u64)> {
        let begun = self.steps * self.tasks.len() as u64;
        let taken = self.counts[0].taken.load(Ordering::Acquire);
        let index = usize::try_from(taken.checked_sub(begun)?).ok()?;
        let task = self.tasks[..self.open_tasks].get(index)?;
        let complete = self.steps * self.buckets as u64 + self.pieces[task.piece].bucket as u64 + 1;
        let ready = self.counts.iter().all(|c| c.buckets.load(Ordering::Acquire) >= complete)
            && (task.after == 0 || self.counts[0].done.load(Ordering::Acquire) >= begun + task.after as u64);
        ready.then_some((index, taken))
    }

    /// Takes a task and does it, if there is one.
    fn do_one(&self) -> bool {
        let counts = &self.counts[0];
        let index = loop {
            let Some((index, taken)) = self.next_task() else { return false };
            let mine =
                counts.taken.compare_exchange_weak(taken, taken + 1, Ordering::AcqRel, Ordering::Relaxed);
            if mine.is_ok() {
                break index;
            }
        };
        let own = &self.counts[self.own];
        own.own_taken.fetch_add(1, Ordering::Relaxed);
        let Task { piece, work, .. } = self.tasks[index];
        // SAFETY: the task is this thread's alone, and its piece no other's at this time.
        unsafe { self.piece(piece, work) };
        own.own_done.fetch_add(1, Ordering::Relaxed);
        counts.done.fetch_add(1, Ordering::AcqRel);
        if let Some(memory) = &self.memory {
            memory.notify_all();
        }
        true
    }

    /// # Safety
    /// Nobody else uses this piece of weights, optimizer state and gradients meanwhile.
    unsafe fn piece(&self, index: usize, work: Work) {
        let piece = &self.pieces[index];
        // SAFETY: the caller's promise.
        let weights = unsafe { self.weights.part(piece.range.clone()) };
        let mut slots: Slots<'_> = Default::default();
        for (slot, values) in slots.iter_mut().zip(&self.optimizer_slots) {
            // SAFETY: as above.
            *slot = unsafe { values.part(piece.in_slots.clone()) };
        }
        let reduced: &mut [f32] = match &self.reduced {
            // SAFETY: as above.
            Some(reduced) if self.keeps_gradients => unsafe { reduced.part(piece.range.clone()) },
            _ => &mut [],
        };
        let policy = self.policies[piece.slot];
        let (rate, decay) = match work {
            Work::Sum => (0.0, policy.decay),
            _ => self.update.rates(policy, || self.norms(piece.slot)),
        };
        let [mut squares, mut of_weights, mut of_prepared] = [Lanes::default(); 3];
        let mut block = [0.0f32; BLOCK];
        for from in (0..weights.len()).step_by(BLOCK) {
            let to = weights.len().min(from + BLOCK);
            let place = piece.in_bucket.start + from..piece.in_bucket.start + to;
            let gradient = &mut block[..to - from];
            if work == Work::Update {
                first(&self.gradients[0][piece.bucket], place.clone(), gradient);
            } else {
                sum(&self.gradients, piece.bucket, place.clone(), gradient);
                squares.add(gradient);
                if let Some(reduced) = reduced.get_mut(from..to) {
                    reduced.copy_from_slice(gradient);
                }
            }
            let weights = &mut weights[from..to];
            // Those that the optimizer does not have are empty.
            let mut slots = slots.each_mut().map(|slot| slot.get_mut(from..to).unwrap_or_default());
            if policy.frozen {
                // Its gradient is summed with its bucket's, and is zero.
            } else if work == Work::Sum {
                of_weights.add(weights);
                self.update.prepare(decay, weights, slots, gradient);
                of_prepared.add(gradient);
                // SAFETY: it takes the place of rank 0's own part of the sum.
                unsafe { keep(&self.gradients[0][piece.bucket], place, gradient) };
            } else {
                let mut update = |part: Range<usize>| {
                    let slots = slots.each_mut().map(|slot| slot.get_mut(part.clone()).unwrap_or_default());
                    self.update.apply(rate, decay, &mut weights[part.clone()], slots, &gradient[part]);
                };
                match &self.sampled {
                    None => update(0..to - from),
                    Some(sampled) => {
                        let begin = piece.range.start;
                        sampled.each_part(piece.slot, begin + from..begin + to, update);
                    }
                }
            }
        }
        if work != Work::Update {
            for (kept, lanes) in self.squares.iter().zip([squares, of_weights, of_prepared]) {
                kept[index].store(lanes.sum().to_bits(), Ordering::Relaxed);
            }
        }
    }

    /// L2 norms of what is prepared of a parameter and of its weights, when all sums of its bucket are done.
    fn norms(&self, slot: usize) -> [f64; 2] {
        let pieces = self.slot_pieces[slot].clone();
        let [_, weights, prepared] = &self.squares;
        [prepared, weights].map(|of| of[pieces.clone()].iter().map(number).sum::<f64>().sqrt())
    }
}

fn number(bits: &AtomicU64) -> f64 {
    f64::from_bits(bits.load(Ordering::Relaxed))
}
