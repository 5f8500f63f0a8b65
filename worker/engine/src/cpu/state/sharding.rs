//! Communication between ranks that divide the optimizer's state ([`crate::sharding`]).

use super::{State, load_f64};
use crate::{
    cpu::{
        groups::{ByAxes, Group},
        layout::Layout,
    },
    net::Axes,
    sharding::{Share, saving_in_words},
};
use lockstep_comm::CommError;
use std::{ops::Range, sync::atomic::Ordering};

/// The ranks that divide each bucket.
pub(in crate::cpu) struct Sharding {
    groups: ByAxes,
    /// Per bucket: the axes along which ranks divide the bucket.
    axes: Vec<Axes>,
    pub(super) shares: Vec<Share>,
    /// Per bucket: the range in the flat buffer.
    buckets: Vec<Range<usize>>,
    /// Per group: the group's axes, and the parameters of the group's buckets in the order in which all ranks sum norms.
    parameters: Vec<(Axes, Vec<usize>)>,
}

impl Sharding {
    /// `groups`: the ranks that reduce gradients, and so divide the state.
    pub(in crate::cpu) fn new(layout: &Layout, groups: ByAxes) -> Self {
        let share = |axes: &Axes| {
            let group = groups.group(*axes);
            Share { rank: group.rank() as usize, ranks: group.size() as usize }
        };
        let mut parameters: Vec<(Axes, Vec<usize>)> = Vec::new();
        for (index, parameter) in layout.parameters.iter().enumerate() {
            let axes = layout.axes[parameter.bucket];
            match parameters.iter_mut().find(|(group_axes, _)| *group_axes == axes) {
                Some((_, parameters)) => parameters.push(index),
                None => parameters.push((axes, vec![index])),
            }
        }
        Self {
            shares: layout.axes.iter().map(share).collect(),
            axes: layout.axes.clone(),
            buckets: layout.buckets.clone(),
            parameters,
            groups,
        }
    }

    /// Collective among the ranks of a bucket: gathers each rank's `own` part into `all`, which may be longer than the bucket.
    fn gather_bucket(&self, bucket: usize, own: &[f32], all: &mut Vec<f32>) -> Result<(), CommError> {
        let (share, len) = (self.shares[bucket], self.buckets[bucket].len());
        let mut own = own.to_vec();
        own.resize(share.part_len(len), 0.0);
        all.resize(own.len() * share.ranks, 0.0);
        self.groups.group(self.axes[bucket]).all_gather((&own).into(), all.into())
    }

    /// Collective: gathers all parts of `flat`, in which each rank has only its own parts before the call.
    pub(super) fn gather_parts(&self, flat: &mut [f32]) -> Result<(), CommError> {
        let mut all = Vec::new();
        for (bucket, range) in self.buckets.iter().enumerate() {
            let flat = &mut flat[range.clone()];
            self.gather_bucket(bucket, &flat[self.shares[bucket].of(flat.len())], &mut all)?;
            flat.copy_from_slice(&all[..flat.len()]);
        }
        Ok(())
    }
}

impl State {
    /// Sums the pieces' squares over the ranks that have parts of the same parameters. Collective if such ranks exist.
    pub(super) fn reduce_squares(&self) -> Result<(), CommError> {
        if let Some(sharding) = &self.sharding {
            for (axes, parameters) in &sharding.parameters {
                self.reduce_squares_of(parameters, sharding.groups.group(*axes))?;
            }
        }
        match &self.model_group {
            Some(group) => self.reduce_squares_of(&self.split_parameters, group),
            None => Ok(()),
        }
    }

    /// Sums the squares of parameters over the ranks that have their parts.
    fn reduce_squares_of(&self, parameters: &[usize], group: &Group) -> Result<(), CommError> {
        let of_parameter = |parameter: &usize| {
            let pieces = self.parameter_pieces[*parameter].clone();
            self.squares.iter().map(move |squares| &squares[pieces.clone()])
        };
        let of_parameters = || parameters.iter().flat_map(of_parameter);
        let mut sums: Vec<f64> = of_parameters().map(|pieces| pieces.iter().map(load_f64).sum()).collect();
        group.all_reduce((&mut sums).into())?;
        for (pieces, sum) in of_parameters().zip(sums) {
            // Only the sum over the pieces is used, so the first piece holds the total.
            pieces.iter().for_each(|piece| piece.store(0, Ordering::Relaxed));
            if let Some(first) = pieces.first() {
                first.store(sum.to_bits(), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Whether other ranks have parts of the optimizer's state.
    pub(in crate::cpu) fn is_sharded(&self) -> bool {
        self.sharding.is_some()
    }

    /// This rank's part of the optimizer slot `slot`, in the order of the weights, with zeros for other ranks' parts.
    pub(in crate::cpu) fn optimizer_slot(&self, slot: usize) -> Vec<f32> {
        let mut flat = vec![0.0; self.weights.len()];
        for piece in &self.pieces {
            flat[piece.range.clone()].copy_from_slice(&self.optimizer_slots[slot][piece.in_slots.clone()]);
        }
        flat
    }

    /// Collective: gathers optimizer slot `slot` from all ranks that divide it. `None` unless this rank `keeps` it.
    pub(in crate::cpu) fn gather_slot(
        &self,
        slot: usize,
        keeps: bool,
    ) -> Result<Option<Vec<f32>>, CommError> {
        let Some(sharding) = &self.sharding else { return Ok(keeps.then(|| self.optimizer_slot(slot))) };
        let (mut rest, mut all) = (&self.optimizer_slots[slot][..], Vec::new());
        let mut flat = Vec::new();
        for (bucket, range) in sharding.buckets.iter().enumerate() {
            let (own, later) = rest.split_at(sharding.shares[bucket].of(range.len()).len());
            sharding.gather_bucket(bucket, own, &mut all)?;
            if keeps {
                flat.extend_from_slice(&all[..range.len()]);
            }
            rest = later;
        }
        Ok(keeps.then_some(flat))
    }

    /// Replaces the optimizer slot `slot` by this rank's part of `flat`, which is in the order of the weights.
    pub(in crate::cpu) fn set_optimizer_slot(&mut self, slot: usize, flat: &[f32]) {
        for piece in &self.pieces {
            self.optimizer_slots[slot][piece.in_slots.clone()].copy_from_slice(&flat[piece.range.clone()]);
        }
    }

    /// The memory that sharding saves, as text, for optimizer state of `whole_len` values per slot.
    pub(in crate::cpu) fn memory_saving_text(&self, whole_len: usize) -> String {
        let own: usize = self.optimizer_slots.iter().map(|slot| slot.len()).sum();
        saving_in_words(4 * own, 4 * self.optimizer_slots.len() * whole_len)
    }
}
