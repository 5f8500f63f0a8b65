//! Operators that the ranks of a model group split: the exchanges with which an activation, or its gradient, changes its placement.
//!
//! If an activation is not placed by pictures, each rank has the pictures of the whole group: `batch` pictures of each rank, in the order
//! of ranks. Padding pictures are zeros and do not change sums, so the group's control block counts all pictures as real.

use super::{split_head::CONTROLS, *};
use crate::{cuda::ops::ChannelRows, net::Placement};

impl GraphEmitter<'_> {
    /// If operators are split: gathers the control blocks of the group's ranks, and computes the group's control block.
    pub(super) fn gather_group_control_if_split(&mut self) {
        if self.plan.splits_operators {
            self.gather_controls();
            let pictures = (self.plan.model_ranks * self.plan.batch) as u32;
            let to = self.group_control();
            self.push(self.facts.ops.group_control(CONTROL, to, pictures));
        }
    }

    /// The control block of the pictures that this rank has of `tensor`.
    pub(super) fn control_of(&self, tensor: TensorId) -> Operand {
        match self.plan.network.placement(tensor) {
            Placement::Batch => CONTROL,
            _ => self.group_control(),
        }
    }

    /// The group's control block, which follows the control blocks of the ranks.
    fn group_control(&self) -> Operand {
        let bytes = 4 * self.control_words() as usize;
        Operand::new(Region::GroupControls, self.plan.model_ranks * bytes, bytes)
    }

    /// If this rank has the whole group's pictures of `tensor`: zeros the padding of the activation, or of the activation's gradient.
    pub(super) fn clear_padding(&mut self, tensor: TensorId, at: Option<Operand>) {
        let (plan, network) = (self.plan, &self.plan.network);
        let is_of_group = *network.placement(tensor) != Placement::Batch && !network.is_pictures(tensor);
        if plan.splits_operators
            && is_of_group
            && let Some(at) = at
        {
            let pictures = [plan.model_ranks, plan.batch].map(|count| count as u32);
            let control_words = self.control_words();
            let values = plan.values_per_picture(tensor);
            self.push(self.facts.ops.clear_padding(at, CONTROLS, control_words, pictures, values));
        }
    }

    /// All-reduces a batch norm's sums over the ranks that have other pictures of the same channels.
    pub(super) fn reduce_statistics(&mut self, sums: Operand, node: &Norm) {
        let group = match self.plan.network.placement(node.input) {
            Placement::Batch => Group::World,
            _ => Group::Data,
        };
        self.commands.push(Command::all_reduce(StreamId::Main, group, sums, DType::F32));
    }

    /// Converts an activation to another placement.
    pub(super) fn redistribute_forward(&mut self, input: TensorId, output: TensorId) -> Result {
        let (x, y) = (self.activation(input)?, self.alloc_activation(output));
        let placements = [input, output].map(|tensor| self.plan.network.placement(tensor).clone());
        self.redistribute([input, output], placements, [x, y]);
        Ok(())
    }

    /// Computes the gradient of `input` from the gradient of `output`.
    pub(super) fn redistribute_backward(&mut self, input: TensorId, output: TensorId) -> Result {
        let (dy, dx) = (self.gradient(output)?, self.alloc_gradient(input));
        let placements = [output, input].map(|tensor| self.plan.network.placement(tensor).of_gradient());
        self.redistribute([output, input], placements, [dy, dx]);
        self.free(dy);
        Ok(())
    }

    /// Computes `y`, in the second placement, from `x`, in the first placement.
    fn redistribute(
        &mut self,
        [before, after]: [TensorId; 2],
        placements: [Placement; 2],
        [x, y]: [Operand; 2],
    ) {
        use Placement::{Batch, Channels, Partial, Whole};
        let (plan, dtype) = (self.plan, self.plan.dtype);
        let rows = plan.batch * plan.network.tensors[before].pixels();
        let all_rows = plan.model_ranks * rows;
        let values = plan.batch * plan.values_per_picture(after);
        match &placements {
            [Batch, Whole] => self.collective(Collective::AllGather, x, y, values, dtype),
            [Partial, Batch] => {
                self.collective(Collective::ReduceScatter, x, y, values, dtype);
            }
            [Partial, Whole] => self.reduce_in_group(x, y, plan.model_ranks * values),
            [Partial, Channels(bounds)] => {
                let sum = self.alloc_bytes(x.bytes, Content::Channels);
                self.reduce_in_group(x, sum, all_rows * all_channels(bounds));
                self.copy_own_channels(bounds, all_rows, [sum, y]);
                self.free_now(sum);
            }
            [Batch, Channels(bounds)] => self.send_channels(bounds, rows, [x, y]),
            [Channels(bounds), Batch] => self.join_channels(bounds, rows, &Batch, [x, y]),
            [Channels(bounds), Whole] => self.join_channels(bounds, all_rows, &Whole, [x, y]),
            [Channels(bounds), Channels(new_bounds)] => {
                let bytes = all_rows * all_channels(bounds) * dtype.size();
                let all = self.alloc_bytes(bytes, Content::Channels);
                self.join_channels(bounds, all_rows, &Whole, [x, all]);
                self.copy_own_channels(new_bounds, all_rows, [all, y]);
                self.free_now(all);
            }
            // No plan has these pairs of placements.
            [Batch, Batch | Partial] | [Whole, _] | [Partial | Channels(_), Partial] => {}
        }
    }

    /// Sums `values` values of `x` over the group into `y`.
    fn reduce_in_group(&mut self, x: Operand, y: Operand, values: usize) {
        let dtype = self.plan.dtype;
        // A copy: the factor is 1.
        self.push(self.facts.ops.scale_values([x, y], values as u64, 1.0));
        let at = y.part(0, values * dtype.size());
        self.commands.push(Command::all_reduce(StreamId::Main, Group::Model, at, dtype));
    }

    /// Copies this rank's channels of `x` to `y`, which then has no other values.
    fn copy_own_channels(&mut self, bounds: &[usize], rows: usize, [x, y]: [Operand; 2]) {
        let keeps_others = false;
        let (own, first) = (channels_of(bounds, self.plan.model_rank), bounds[self.plan.model_rank]);
        let from = ChannelRows { memory: x, channels: all_channels(bounds), first };
        let to = ChannelRows { memory: y, channels: own, first: 0 };
        self.push(self.facts.ops.copy_channels(from, to, [rows, own], keeps_others));
    }

    /// From batch to channels: each rank sends to every other rank the receiver's channels of the sender's pictures (`rows` rows).
    fn send_channels(&mut self, bounds: &[usize], rows: usize, [x, y]: [Operand; 2]) {
        let (rank, size) = (self.plan.model_rank, self.plan.dtype.size());
        let (own, keeps_others) = (rows * channels_of(bounds, rank), false);
        let (mut sends, mut receives, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for peer in 0..self.plan.model_ranks {
            let channels = channels_of(bounds, peer);
            let (memory, first) = if peer == rank {
                (y, rank * own)
            } else {
                let bytes = rows * channels * size;
                let part = self.alloc_bytes(bytes, Content::Channels);
                sends.push((peer as u32, part.part(0, bytes)));
                receives.push((peer as u32, y.part(peer * own * size, own * size)));
                parts.push(part);
                (part, 0)
            };
            let to = ChannelRows { memory, channels, first };
            let from = ChannelRows { memory: x, channels: all_channels(bounds), first: bounds[peer] };
            self.push(self.facts.ops.copy_channels(from, to, [rows, channels], keeps_others));
        }
        self.exchange(Group::Model, sends, receives, self.plan.dtype);
        parts.into_iter().for_each(|part| self.free_now(part));
    }

    /// From channels to the placement `after`, batch or whole: each rank sends to every other rank the sender's channels of the receiver's
    /// pictures (batch) or of all pictures (whole). `rows` is the number of rows of these pictures.
    fn join_channels(&mut self, bounds: &[usize], rows: usize, after: &Placement, [x, y]: [Operand; 2]) {
        let (rank, size) = (self.plan.model_rank, self.plan.dtype.size());
        let own = rows * channels_of(bounds, rank);
        // Index of the first value that is sent to a rank.
        let first = |peer: usize| if *after == Placement::Batch { peer * own } else { 0 };
        let (mut sends, mut receives, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for peer in (0..self.plan.model_ranks).filter(|peer| *peer != rank) {
            let bytes = rows * channels_of(bounds, peer) * size;
            let part = self.alloc_bytes(bytes, Content::Channels);
            sends.push((peer as u32, x.part(first(peer) * size, own * size)));
            receives.push((peer as u32, part.part(0, bytes)));
            parts.push(part);
        }
        let of_rank = |rank: usize, memory: Operand, first: usize| {
            let channels = channels_of(bounds, rank);
            (rank, ChannelRows { memory, channels, first })
        };
        let others = receives.iter().map(|(peer, part)| of_rank(*peer as usize, *part, 0));
        let all: Vec<_> = std::iter::once(of_rank(rank, x, first(rank))).chain(others).collect();
        self.exchange(Group::Model, sends, receives, self.plan.dtype);
        for (index, (rank, from)) in all.into_iter().enumerate() {
            let to = ChannelRows { memory: y, channels: all_channels(bounds), first: bounds[rank] };
            let keeps_others = index > 0;
            self.push(self.facts.ops.copy_channels(from, to, [rows, from.channels], keeps_others));
        }
        parts.into_iter().for_each(|part| self.free_now(part));
    }
}

fn channels_of(bounds: &[usize], rank: usize) -> usize {
    bounds[rank + 1] - bounds[rank]
}

fn all_channels(bounds: &[usize]) -> usize {
    bounds[bounds.len() - 1]
}
