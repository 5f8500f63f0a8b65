//! The batches of an epoch and of validation, in order, prepared ahead of the step that needs them.

use super::{
    DataSource,
    ahead::prepare_ahead,
    batch::{Batch, BatchBuilder},
    part::Part,
    replaced::Broken,
    workers::Workers,
};
use crate::{
    DataError,
    shard::{self, EpochPlan},
    transform::Transform,
};
use lockstep_host::lock;
use std::{ops::Range, sync::Arc};

/// Batches in the order of steps. The iterator ends after the first error.
pub type Batches = Box<dyn Iterator<Item = Result<Batch, DataError>> + Send>;

impl DataSource {
    /// The micro-batches of the plan's rank in one epoch, in order, prepared ahead.
    ///
    /// The epoch is a seeded permutation of the split. Optimizer step `s` uses the pictures `[s * n, (s + 1) * n)` of the
    /// permutation, where `n` is the number of pictures of a step on all ranks. Micro-batch `a` of rank `r` is a contiguous
    /// range of these pictures, in the order (a, r), so the union over ranks is the same for any number of ranks.
    /// Augmentation is seeded by (seed, epoch, position of the picture in its split), and mixing by (seed, epoch, step).
    ///
    /// Every rank knows the labels of all ranks, so ranks need not exchange the sum of their class weights. A picture that is
    /// replaced because it cannot be read counts in this sum with its own class.
    pub fn epoch(&self, plan: EpochPlan) -> Batches {
        let (part, transform) = (self.train.clone(), self.transform(Some(plan.epoch)).clone());
        let (samples, mixing, seed) = (part.chosen.len(), self.mixing, self.seed);
        let weights = self.shape.class_weights.clone().filter(|_| !mixing.is_on());
        let steps = shard::steps_per_epoch(samples, &plan).saturating_sub(plan.first_step);
        let order = shard::epoch_order(samples, seed, plan.epoch);
        let count = steps as usize * plan.accumulate;
        self.prepare(part, transform, count, plan.threads, move |builder, number| {
            let step = plan.first_step + (number / plan.accumulate) as u64;
            let micro = number % plan.accumulate;
            let positions = shard::rank_positions(samples, &plan, step, micro);
            let step_positions = shard::step_positions(samples, &plan, step);
            let Transform { side, channels, .. } = *builder.transform;
            let mix = mixing.draw(seed, plan.epoch, step_positions.start, side);
            // The picture with which the first picture is mixed comes last, and `Mix::apply` removes it from the batch.
            let previous = if positions.start > step_positions.start {
                positions.start - 1
            } else {
                step_positions.end - 1
            };
            let positions = positions.chain(mix.as_ref().map(|_| previous));
            let part = builder.part;
            let chosen = positions.map(|p| part.chosen[order[p % samples] as usize]).collect::<Vec<_>>();
            let make = |chosen: &[u32]| builder.make(chosen, Some(plan.epoch));
            let mut batch = part.with_replacements(&chosen, make)?;
            if let Some(mix) = mix {
                batch = mix.apply(batch, side, channels);
            }
            let global_positions = shard::global_positions(samples, &plan, step, micro);
            let global_samples = global_positions.len();
            let weight = |position: usize| {
                let label = part.split.labels[part.chosen[order[position % samples] as usize] as usize];
                weights.as_ref().map(|weights| f64::from(weights[label as usize]))
            };
            let global_weight = global_positions.map(weight).sum();
            Ok(Batch { global_samples, global_weight, ..batch })
        })
    }

    /// The batches of `rank`'s part of the validation split. Each sample is in the part of exactly one rank.
    pub fn validation(&self, rank: u32, world_size: u32, batch_size: usize, threads: usize) -> Batches {
        let share = shard::even_share(self.validation.chosen.len(), rank, world_size);
        self.prepare_unaugmented(self.validation.clone(), share, batch_size, threads)
    }

    /// The training pictures in their order, in batches, prepared as for validation.
    pub fn gallery(&self, batch_size: usize, threads: usize) -> Batches {
        let Part { split, chosen, broken, .. } = &*self.train;
        let (split, chosen, broken) = (split.clone(), chosen.clone(), Broken::new(broken.is_allowed));
        let part = Part { split, chosen, needs_whole: self.validation.needs_whole, broken };
        let all = 0..part.chosen.len();
        self.prepare_unaugmented(Arc::new(part), all, batch_size, threads)
    }

    /// The pictures of `part` at the positions `share`, in batches, prepared as for validation.
    fn prepare_unaugmented(
        &self,
        part: Arc<Part>,
        share: Range<usize>,
        batch_size: usize,
        threads: usize,
    ) -> Batches {
        let transform = self.evaluation.clone();
        let batch_size = batch_size.max(1);
        let count = share.len().div_ceil(batch_size);
        let batches = self.prepare(part, transform, count, threads, move |builder, number| {
            let first = share.start + number * batch_size;
            let chosen = &builder.part.chosen[first..(first + batch_size).min(share.end)];
            builder.part.without_broken(chosen, |chosen| builder.make(chosen, None))
        });
        // A batch is empty if all of its files are broken.
        Box::new(batches.filter(|batch| batch.as_ref().map_or(true, |batch| !batch.labels.is_empty())))
    }

    /// Prepares `make(builder, 0)`, `make(builder, 1)`, ... up to `count`. `builder` makes batches of the pictures of
    /// `part`.
    fn prepare(
        &self,
        part: Arc<Part>,
        transform: Arc<Transform>,
        count: usize,
        threads: usize,
        make: impl Fn(&BatchBuilder<'_>, usize) -> Result<Batch, DataError> + Send + Sync + 'static,
    ) -> Batches {
        let (format, device) = (self.format, self.device.clone());
        let (batch_threads, ahead, workers) = match self.preparation(threads) {
            Ok(preparation) => preparation,
            Err(error) => return Box::new(std::iter::once(Err(error))),
        };
        prepare_ahead(count, batch_threads, ahead, move |number| {
            let (part, transform, workers) = (part.as_ref(), transform.as_ref(), workers.as_ref());
            make(&BatchBuilder { part, transform, format, workers, device: device.as_deref() }, number)
        })
    }

    /// How `threads` threads prepare batches: the number of threads that put batches together, the number of finished
    /// batches of each such thread that may wait for the training step, and the threads that make the pictures.
    ///
    /// Simple pictures are made by the thread that puts the batch together. If there is more work, all threads work
    /// on the pictures of two batches: the second batch keeps them busy at the end of the first, and memory does not
    /// grow with the number of threads. With a decoding device there is a third batch, so that the device can
    /// continue without a pause.
    fn preparation(&self, threads: usize) -> Result<(usize, usize, Arc<Workers>), DataError> {
        if threads <= 1 || !self.is_prepared_each_step() {
            return Ok((threads, 2, Arc::new(Workers::default())));
        }
        let mut cached = lock(&self.workers);
        let has_device = self.device.is_some();
        let workers = match cached.as_ref().filter(|workers| workers.has_threads(threads, has_device)) {
            Some(workers) => workers.clone(),
            None => Arc::new(Workers::pool(threads, has_device)?),
        };
        *cached = Some(workers.clone());
        Ok((if has_device { 3 } else { 2 }, 1, workers))
    }
}
