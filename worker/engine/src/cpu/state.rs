//! The training state of a rank (weights, optimizer state and gradients), and the update at the end of a step.
//!
//! Ranks of one machine share memory with one copy of weights and optimizer state, and with the gradients of each rank. When every
//! rank has completed a bucket, any idle thread of any rank takes the bucket's next piece, sums the piece's gradients in rank order
//! and updates the weights. So no gradient is sent, each weight is updated once instead of once per rank, and a rank that waits for
//! another one does useful work. The result does not depend on which thread updates a piece.
//!
//! No thread reads a weight while another thread may write it. A rank completes a bucket after its last use of the bucket's weights
//! in a step. Pieces are updated only after all ranks have completed the bucket. The next step begins only after all pieces are
//! done. Without shared memory (a single rank, or ranks of several machines, whose gradients are all-reduced) this process updates
//! all pieces itself.

#![allow(unsafe_code)] // Ranks share memory and threads write pieces; the order above prevents data races.

mod bucket_sum;
mod kept_gradients;
mod sharding;

use super::{
    conv::ConvShape,
    groups::Group,
    layout::{Layout, ParameterPlace},
    pieces::{self, Passes, Piece, Task, Work},
    reduce::Bucket,
    sample::SampledRows,
};
use crate::sharding::Share;
use bucket_sum::{read_part, sum_over_ranks, write_part};
use lockstep_comm::{
    CommError, ProcessGroup,
    shm::{SharedMemory, SharedSlice},
};
use lockstep_kernels::optimizer::{Optimizer, ParameterPolicy, Slots, SquareSum, Update};
pub(super) use sharding::Sharding;
use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Number of values that are summed and updated at a time: they stay in the first-level cache.
const BLOCK: usize = 1024;
/// Alignment of arrays in shared memory, in bytes.
const ALIGN: usize = 4096;

/// Progress of one rank, on a separate cache line. Counts are never reset between steps.
#[repr(C, align(128))]
#[derive(Debug, Default)]
struct Counts {
    /// Tasks that any thread has taken; used only in rank 0's line.
    tasks_taken: AtomicU64,
    /// Tasks that are done; used only in rank 0's line.
    tasks_done: AtomicU64,
    completed_buckets: AtomicU64,
    own_tasks_taken: AtomicU64,
    own_tasks_done: AtomicU64,
}

/// The training state of a rank; see the module's documentation.
pub(super) struct State {
    pub(super) weights: SharedSlice<f32>,
    /// By optimizer slot: as many values as weights, or only this rank's part.
    pub(super) optimizer_slots: Vec<SharedSlice<f32>>,
    /// Number of updates since the optimizer's slots were zeros.
    pub(super) updates: u64,
    /// By rank, then by bucket. All ranks' gradients if they share memory, else only this rank's. A bucket of this rank is empty
    /// while the reducer has it.
    gradients: Vec<Vec<Bucket>>,
    /// This rank's index in `gradients` and `counts`.
    own: usize,
    /// By rank, like `gradients`.
    counts: SharedSlice<Counts>,
    /// By piece: the sum of squares of the gradient and, for optimizers with two passes (LARS, LAMB, Muon), of the weights and of the
    /// prepared update.
    squares: [SharedSlice<AtomicU64>; 3],
    /// The memory that all ranks map. `None` if they do not share memory.
    pub(super) memory: Option<SharedMemory>,
    /// Why several ranks do not share memory. `None` if they share it, and for a single rank.
    pub(super) shm_unavailable_reason: Option<String>,
    /// The reduced gradients of the last step that kept them, in the order of the weights.
    reduced: Option<SharedSlice<f32>>,
    /// Whether this step keeps its reduced gradients.
    keeps_gradients: bool,
    optimizer: Optimizer,
    /// The update of the current step.
    update: Update,
    /// The sampled rows, if the update of the last layer's parameters is limited to them.
    sampled: Option<SampledRows>,
    /// By parameter: how the optimizer treats it.
    policies: Vec<ParameterPolicy>,
    /// By parameter: the layout of its filters if Muon orthogonalises them.
    filters: Vec<Option<ConvShape>>,
    parameter_pieces: Vec<Range<usize>>,
    pieces: Vec<Piece>,
    tasks: Vec<Task>,
    /// Number of leading tasks that threads may take.
    open_tasks: usize,
    /// The ranks that have the other parts of split parameters.
    model_group: Option<Group>,
    split_parameters: Vec<usize>,
    /// Set if ranks divide the optimizer's state.
    sharding: Option<Sharding>,
    /// Number of finished steps.
    steps: u64,
}

impl State {
    /// State filled with zeros. `model_group`: the ranks that have other parts of split parameters. `sharding`: how ranks divide the
    /// optimizer's state if they do not share memory.
    pub(super) fn new(
        layout: &Layout,
        has_f64_gradients: bool,
        optimizer: Optimizer,
        comm: &dyn ProcessGroup,
        model_group: Option<Group>,
        sharding: Option<Sharding>,
    ) -> Result<Self, CommError> {
        let mut shares = vec![Share::WHOLE; layout.buckets.len()];
        let mut pieces = pieces::pieces(layout, &shares);
        let (world, len) = (comm.size() as usize, layout.len());

        // Offsets of the arrays in shared memory.
        let mut shared_bytes = 0;
        let mut allocate = |bytes: usize| {
            let offset = shared_bytes;
            shared_bytes = (offset + bytes).next_multiple_of(ALIGN);
            offset
        };
        let weights_at = allocate(4 * len);
        let slots_at: Vec<usize> = optimizer.slots().iter().map(|_| allocate(4 * len)).collect();
        let counts_at = allocate(world * size_of::<Counts>());
        let squares_at = [0; 3].map(|_| allocate(8 * pieces.len()));
        let value_bytes = if has_f64_gradients { 8 } else { 4 };
        let buckets_at: Vec<Vec<usize>> = (0..world)
            .map(|_| layout.buckets.iter().map(|bucket| allocate(value_bytes * bucket.len())).collect())
            .collect();
        let (memory, shm_unavailable_reason) = match world {
            1 => (None, None),
            _ => match comm.shared_memory(shared_bytes)? {
                Ok(memory) => (Some(memory), None),
                Err(why) => (None, Some(why)),
            },
        };
        // Shared memory holds only one copy of the state already.
        let sharding = sharding.filter(|_| memory.is_none());
        if let Some(sharding) = &sharding {
            shares.clone_from(&sharding.shares);
            pieces = pieces::pieces(layout, &shares);
        }
        let policies: Vec<ParameterPolicy> =
            layout.parameters.iter().map(|parameter| policy(&optimizer, parameter)).collect();
        let filters: Vec<_> = std::iter::zip(&layout.parameters, &policies)
            .map(|(parameter, policy)| parameter.conv.filter(|_| optimizer.is_muon() && policy.is_adapted))
            .collect();
        // Where ranks have parts of a parameter, they add the parts' squares between the two passes.
        let is_divided = model_group.is_some() || sharding.is_some();
        let passes = if !optimizer.needs_norms() && !optimizer.is_muon() {
            Passes::One
        } else if is_divided {
            Passes::TwoPerStep
        } else {
            Passes::TwoPerBucket
        };
        let tasks = pieces::tasks(&pieces, passes, |parameter| filters[parameter].is_some());
        let mut parameter_pieces = vec![0..0; layout.parameters.len()];
        for (index, piece) in pieces.iter().enumerate() {
            let range = &mut parameter_pieces[piece.parameter];
            *range = if range.start == range.end { index..index + 1 } else { range.start..index + 1 };
        }
        let (weights, optimizer_slots, gradients, counts, squares) = match &memory {
            // SAFETY: all bit patterns of numbers are valid; the order in the module's documentation prevents data races.
            Some(memory) => unsafe {
                let bucket = |(at, range): (&usize, &Range<usize>)| match value_bytes {
                    8 => Bucket::F64(memory.view(*at, range.len())),
                    _ => Bucket::F32(memory.view(*at, range.len())),
                };
                let of_rank = |at: &Vec<usize>| at.iter().zip(&layout.buckets).map(bucket).collect();
                (
                    memory.view(weights_at, len),
                    slots_at.iter().map(|at| memory.view(*at, len)).collect(),
                    buckets_at.iter().map(of_rank).collect(),
                    memory.view(counts_at, world),
                    squares_at.map(|at| memory.view(at, pieces.len())),
                )
            },
            None => {
                // Padded to parts of equal length.
                let bucket = |(range, share): (&Range<usize>, &Share)| {
                    let len = share.part_len(range.len()) * share.ranks;
                    match value_bytes {
                        8 => Bucket::F64(vec![0.0; len].into()),
                        _ => Bucket::F32(vec![0.0; len].into()),
                    }
                };
                let own_len = pieces.last().map_or(0, |piece| piece.in_slots.end);
                let zeros = || (0..pieces.len()).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
                (
                    vec![0.0; len].into(),
                    slots_at.iter().map(|_| vec![0.0; own_len].into()).collect(),
                    vec![layout.buckets.iter().zip(&shares).map(bucket).collect()],
                    vec![Counts::default()].into(),
                    [0; 3].map(|_| zeros().into()),
                )
            }
        };
        let own = if memory.is_some() { comm.rank() as usize } else { 0 };
        Ok(Self {
            weights,
            optimizer_slots,
            updates: 0,
            gradients,
            own,
            counts,
            squares,
            memory,
            shm_unavailable_reason,
            reduced: None,
            keeps_gradients: false,
            optimizer,
            update: Update::new(&optimizer, 0.0, 1),
            sampled: None,
            policies,
            filters,
            parameter_pieces,
            pieces,
            open_tasks: tasks.len(),
            tasks,
            model_group,
            split_parameters: (0..layout.parameters.len())
                .filter(|parameter| layout.parameters[*parameter].is_split)
                .collect(),
            sharding,
            steps: 0,
        })
    }

    /// This rank's gradients of a bucket.
    pub(super) fn gradient(&mut self, bucket: usize) -> &mut Bucket {
        &mut self.gradients[self.own][bucket]
    }

    /// Begins a step. The step updates all values of parameters, but only the sampled rows of the parameters in `sampled`.
    pub(super) fn begin(&mut self, lr: f32, sampled: Option<SampledRows>) {
        self.update = Update::new(&self.optimizer, lr, self.updates + 1);
        self.sampled = sampled;
    }

    /// The number of buckets that a rank has completed, in all steps, after it has completed `bucket` in this step.
    fn completed_buckets(&self, bucket: usize) -> u64 {
        self.steps * self.gradients[self.own].len() as u64 + bucket as u64 + 1
    }

    /// Marks this rank's gradients of a bucket as complete. The rank must not read the bucket's weights again in this step.
    pub(super) fn complete(&self, bucket: usize) {
        self.counts[self.own].completed_buckets.store(self.completed_buckets(bucket), Ordering::Release);
        if let Some(memory) = &self.memory {
            memory.notify_all();
        }
    }

    /// Runs all ready tasks, on all threads. Returns false if no task is ready.
    pub(super) fn advance(&self) -> bool {
        if self.next_task().is_none() {
            return false;
        }
        if rayon::current_num_threads() == 1 {
            while self.run_task() {}
        } else {
            rayon::broadcast(|_| while self.run_task() {});
        }
        true
    }

    /// Runs tasks until all ranks' updates are done. Returns the sum of squares of the reduced gradient, and the time spent
    /// waiting without work.
    pub(super) fn finish(&mut self) -> Result<(f64, Duration), CommError> {
        let all_tasks = (self.steps + 1) * self.tasks.len() as u64;
        let is_done = || self.counts[0].tasks_done.load(Ordering::Acquire) >= all_tasks;
        let waited = match &self.memory {
            Some(memory) => {
                memory.wait("update", &mut || self.advance(), &is_done, &|| self.awaited_rank())?
            }
            None => {
                // The update of a divided parameter needs the norms of the whole parameter first.
                let is_divided = self.model_group.is_some() || self.sharding.is_some();
                self.open_tasks = if is_divided { self.pieces.len() } else { self.tasks.len() };
                self.advance();
                self.reduce_squares()?;
                self.open_tasks = self.tasks.len();
                self.advance();
                let began = Instant::now();
                if let Some(sharding) = &self.sharding {
                    sharding.gather_parts(&mut self.weights)?;
                    if let Some(reduced) = self.reduced.as_mut().filter(|_| self.keeps_gradients) {
                        sharding.gather_parts(reduced)?;
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
        Ok((self.squares[0].iter().map(load_f64).sum(), waited))
    }

    /// The rank for which the others wait: a rank with an unfinished task, else the rank with the fewest completed buckets.
    fn awaited_rank(&self) -> usize {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let is_busy = |c: &Counts| read(&c.own_tasks_taken) != read(&c.own_tasks_done);
        let ranks = || self.counts.iter().enumerate();
        let busy = ranks().find(|(rank, c)| *rank != self.own && is_busy(c));
        busy.or_else(|| ranks().min_by_key(|(_, c)| read(&c.completed_buckets))).map_or(0, |(rank, _)| rank)
    }

    /// Index of the next task, if it is ready, and the number of tasks taken so far, in all steps.
    fn next_task(&self) -> Option<(usize, u64)> {
        let earlier_tasks = self.steps * self.tasks.len() as u64;
        let tasks_taken = self.counts[0].tasks_taken.load(Ordering::Acquire);
        let index = usize::try_from(tasks_taken.checked_sub(earlier_tasks)?).ok()?;
        let task = self.tasks[..self.open_tasks].get(index)?;
        let required_buckets = self.completed_buckets(self.pieces[task.piece].bucket);
        let is_ready =
            self.counts.iter().all(|c| c.completed_buckets.load(Ordering::Acquire) >= required_buckets)
                && (task.required_tasks == 0
                    || self.counts[0].tasks_done.load(Ordering::Acquire)
                        >= earlier_tasks + task.required_tasks as u64);
        is_ready.then_some((index, tasks_taken))
    }

    /// Takes and runs one task. Returns false if none is ready.
    fn run_task(&self) -> bool {
        let counts = &self.counts[0];
        let index = loop {
            let Some((index, tasks_taken)) = self.next_task() else { return false };
            let exchanged = counts.tasks_taken.compare_exchange_weak(
                tasks_taken,
                tasks_taken + 1,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            if exchanged.is_ok() {
                break index;
            }
        };
        let own = &self.counts[self.own];
        own.own_tasks_taken.fetch_add(1, Ordering::Relaxed);
        let Task { piece, work, .. } = self.tasks[index];
        // SAFETY: only this thread has taken the task, and no other thread uses the task's piece at this time.
        unsafe { self.run_piece(piece, work) };
        own.own_tasks_done.fetch_add(1, Ordering::Relaxed);
        counts.tasks_done.fetch_add(1, Ordering::AcqRel);
        if let Some(memory) = &self.memory {
            memory.notify_all();
        }
        true
    }

    /// Does `work` on the piece at `index`.
    ///
    /// # Safety
    /// No other thread uses this piece of weights, optimizer state and gradients during the call.
    unsafe fn run_piece(&self, index: usize, work: Work) {
        let piece = &self.pieces[index];
        if work == Work::Orthogonalise {
            // SAFETY: the caller's promise; no other task of this parameter runs, because all of its sums are done.
            return unsafe { self.orthogonalise(piece.parameter) };
        }
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
        let policy = self.policies[piece.parameter];
        let (rate, decay) = match work {
            Work::Sum => (0.0, policy.decay),
            _ => self.update.rates(policy, || self.norms(piece.parameter)),
        };
        let [mut squares, mut weight_squares, mut prepared_squares] = [SquareSum::default(); 3];
        let mut block = [0.0f32; BLOCK];
        for from in (0..weights.len()).step_by(BLOCK) {
            let to = weights.len().min(from + BLOCK);
            let in_bucket = piece.in_bucket.start + from..piece.in_bucket.start + to;
            let gradient = &mut block[..to - from];
            if work == Work::Update {
                read_part(&self.gradients[0][piece.bucket], in_bucket.clone(), gradient);
            } else {
                sum_over_ranks(&self.gradients, piece.bucket, in_bucket.clone(), gradient);
                if !policy.is_frozen {
                    squares.add(gradient);
                }
                if let Some(reduced) = reduced.get_mut(from..to) {
                    reduced.copy_from_slice(gradient);
                }
            }
            let weights = &mut weights[from..to];
            // Slots that the optimizer does not have are empty.
            let mut slots = slots.each_mut().map(|slot| slot.get_mut(from..to).unwrap_or_default());
            if policy.is_frozen {
                // The norm excludes gradients of parameters that are not trained.
            } else if work == Work::Sum {
                weight_squares.add(weights);
                self.update.prepare(policy, weights, slots, gradient);
                prepared_squares.add(gradient);
                // SAFETY: as above. The prepared gradient replaces rank 0's gradient.
                unsafe { write_part(&self.gradients[0][piece.bucket], in_bucket, gradient) };
            } else {
                let mut update = |part: Range<usize>| {
                    let slots = slots.each_mut().map(|slot| slot.get_mut(part.clone()).unwrap_or_default());
                    self.update.apply(rate, decay, &mut weights[part.clone()], slots, &gradient[part]);
                };
                match &self.sampled {
                    None => update(0..to - from),
                    Some(sampled) => {
                        let begin = piece.range.start;
                        sampled.for_each_part(piece.parameter, begin + from..begin + to, update);
                    }
                }
            }
        }
        if work != Work::Update {
            for (sums, squares) in self.squares.iter().zip([squares, weight_squares, prepared_squares]) {
                sums[index].store(squares.sum().to_bits(), Ordering::Relaxed);
            }
        }
    }

    /// Muon's update of all filters of one convolution.
    ///
    /// # Safety
    /// No other thread uses this parameter's weights, optimizer state and gradients during the call.
    unsafe fn orthogonalise(&self, parameter: usize) {
        let pieces = &self.pieces[self.parameter_pieces[parameter].clone()];
        let (Some(first), Some(last), Some(shape)) =
            (pieces.first(), pieces.last(), &self.filters[parameter])
        else {
            return;
        };
        // SAFETY: the caller's promise.
        let weights = unsafe { self.weights.part(first.range.start..last.range.end) };
        let mut prepared = vec![0.0; weights.len()];
        let in_bucket = first.in_bucket.start..last.in_bucket.end;
        read_part(&self.gradients[0][first.bucket], in_bucket, &mut prepared);
        self.update.orthogonalise(shape, weights, &prepared);
    }

    /// L2 norms of a parameter's prepared update and of its weights. All sums of its bucket must be done.
    fn norms(&self, parameter: usize) -> [f64; 2] {
        let pieces = self.parameter_pieces[parameter].clone();
        let [_, weights, prepared] = &self.squares;
        [prepared, weights].map(|squares| squares[pieces.clone()].iter().map(load_f64).sum::<f64>().sqrt())
    }
}

fn policy(optimizer: &Optimizer, parameter: &ParameterPlace) -> ParameterPolicy {
    if parameter.is_frozen { ParameterPolicy::FROZEN } else { optimizer.policy_of(parameter.kind) }
}

fn load_f64(bits: &AtomicU64) -> f64 {
    f64::from_bits(bits.load(Ordering::Relaxed))
}
