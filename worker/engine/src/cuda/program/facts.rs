//! The facts that determine a step's commands: the plan of the step, the settings, and those properties of the GPU and of the ranks
//! on which commands depend. Emission itself needs no GPU.

use super::StepPlan;
use crate::{
    Optimizer,
    cuda::{
        command::{Operand, Region},
        convolution::Convolution,
        dtype::DType,
        layout::{Layout, ParameterLayout},
        ops::{self, NormSite, Ops, ScaleTable},
        running_statistics::RunningLayout,
        statistics::{NormPass, Statistics},
    },
    fuse::Norm,
    net::{Placement, TensorId},
    sharding::Share,
};
use lockstep_kernels::optimizer::ParameterPolicy;

/// A range of parameters that the optimizer updates at once, with their gradients, optimizer state and rates.
#[derive(Debug, Clone, Copy)]
pub(super) struct UpdatedRange {
    pub(super) flat: ops::FlatParameters,
    /// The optimizer's slots for the range.
    pub(super) optimizer_slots: [Operand; 2],
    pub(super) rates: ops::Rates,
}

pub(in crate::cuda) struct Facts<'a> {
    pub(in crate::cuda) plan: &'a StepPlan,
    pub(in crate::cuda) layout: &'a Layout,
    /// Memory of each batch norm, by its index.
    pub(in crate::cuda) norms: &'a [NormSite],
    pub(in crate::cuda) ops: Ops,
    pub(in crate::cuda) optimizer: Optimizer,
    pub(in crate::cuda) label_smoothing: f32,
    /// Whether the training loss weights the classes (`loss.class_weights`).
    pub(in crate::cuda) has_class_weights: bool,
    /// Whether a step may have several micro-batches.
    pub(in crate::cuda) accumulates: bool,
    pub(in crate::cuda) has_dynamic_scale: bool,
    /// How ranks reduce statistics; `None` for a single rank, which does not exchange gradients either.
    pub(in crate::cuda) statistics: Option<&'a Statistics>,
    /// Number of ranks that have the same part of the network but different pictures, including this rank.
    pub(in crate::cuda) data_ranks: usize,
    /// This rank among the ranks that divide the optimizer's state; `None` if each rank has the whole state.
    pub(in crate::cuda) share: Option<Share>,
    /// Whether a convolution, described with [`Convolution::sums`] set, should compute the sums for the following batch norm, because the
    /// tuner found that to be faster.
    pub(in crate::cuda) computes_sums: Box<dyn Fn(&Convolution) -> bool + 'a>,
    /// Resampling tables, by height and by width, from the dataset's size to the network's; `None` if both are equal.
    pub(in crate::cuda) scaling: Option<[&'a ScaleTable; 2]>,
}

impl Facts<'_> {
    /// The weights of the convolution or linear layer `name`, in the activations' format.
    pub(super) fn matrix(&self, name: &str) -> Operand {
        let weight = self.layout.parameter(name, "weight");
        if self.plan.is_planar() && weight.is_split {
            let [nearest, _] = self.layout.planes(weight.aligned_range());
            return nearest;
        }
        let region = if self.plan.dtype == DType::F32 { Region::Weights } else { Region::LowPrecision };
        self.matrix_in(region, name)
    }

    pub(super) fn matrix_gradient(&self, name: &str) -> Operand {
        self.matrix_in(Region::MatrixGradients, name)
    }

    fn matrix_in(&self, region: Region, name: &str) -> Operand {
        let (range, size) = (self.layout.parameter(name, "weight").aligned_range(), self.plan.dtype.size());
        Operand::new(region, range.start * size, range.len() * size)
    }

    /// The last layer's bias. With a margin, logits are cosines and have no bias.
    pub(super) fn head_bias(&self) -> Operand {
        match self.plan.margin {
            None => self.layout.vector(self.plan.last_layer(), "bias"),
            Some(_) => Operand::NONE,
        }
    }

    /// See [`StepPlan::recomputes_head_gradient`].
    pub(super) fn recomputes_head_gradient(&self) -> bool {
        self.plan.recomputes_head_gradient(self.accumulates, self.data_ranks)
    }

    /// The gradients of all parameters. Those of matrices are in the activations' format, or float32 sums over micro-batches.
    pub(super) fn gradients(&self) -> ops::Gradients {
        let (region, size) = if self.accumulates {
            (Region::Accumulated, 4)
        } else {
            (Region::MatrixGradients, self.plan.dtype.size())
        };
        let Layout { matrix_len, trained_len, .. } = *self.layout;
        ops::Gradients {
            matrices: Operand::new(region, 0, size * matrix_len),
            vectors: Operand::new(Region::VectorGradients, 0, 4 * (trained_len - matrix_len)),
            matrix_length: matrix_len as u64,
            length: trained_len as u64,
            is_float32: size == 4,
        }
    }

    /// The parameters that this rank updates, except its parts of split matrices. If ranks divide the optimizer's state: this rank's part
    /// of each bucket of matrices and of the vectors. Otherwise one range, or two with sampled classes.
    pub(super) fn updated_ranges(&self) -> Vec<UpdatedRange> {
        let (layout, gradients, rates) = (self.layout, self.gradients(), self.all_rates());
        let (split, matrix_end) = (layout.split_matrix_len, layout.matrix_len);
        // An empty range between the matrices and the vectors.
        let none = matrix_end..matrix_end;
        let Some(share) = self.share else {
            if self.plan.sampled_classes().is_some() {
                // The biases of a sampled head lie between both ranges and are updated with the sampled rows.
                let vectors = matrix_end + layout.split_vector_len;
                return vec![
                    self.updated_range(gradients.part(split..matrix_end, none.clone()), split, split),
                    self.updated_range(gradients.part(none, vectors..layout.trained_len), vectors, vectors),
                ];
            }
            let gradients = gradients.part(split..matrix_end, matrix_end..layout.trained_len);
            return vec![self.updated_range(gradients, split, split)];
        };
        let (mut first_parameter, mut slot_offset, mut updated) = (0, 0, Vec::new());
        for (range, own) in
            layout.reduced_ranges().zip(layout.own_ranges(share)).filter(|(_, own)| !own.is_empty())
        {
            let gradients = if own.start < matrix_end {
                gradients.part(own.clone(), none.clone())
            } else {
                gradients.part(none.clone(), own.clone())
            };
            let is_in_range = |parameter: &&ParameterLayout| range.contains(&parameter.range.start);
            let count = layout.parameters_with_gradients().iter().filter(is_in_range).count();
            let of_parameters = |all: Operand, size: usize| all.part(first_parameter * size, count * size);
            let rates = ops::Rates {
                segments: of_parameters(self.own_segments(), SEGMENT_BYTES),
                count: count as u32,
                per_parameter: of_parameters(rates.per_parameter, RATE_BYTES),
                squares: of_parameters(rates.squares, SQUARES_BYTES),
            };
            updated.push(UpdatedRange { rates, ..self.updated_range(gradients, own.start, slot_offset) });
            (first_parameter, slot_offset) = (first_parameter + count, slot_offset + own.len());
        }
        updated
    }

    /// The parameters of `gradients`, which begin at value `from` of the flat layout, and at value `slot_offset` of the optimizer's slots.
    pub(super) fn updated_range(
        &self,
        gradients: ops::Gradients,
        from: usize,
        slot_offset: usize,
    ) -> UpdatedRange {
        let (length, bytes) = (gradients.length as usize, 4 * gradients.length as usize);
        let is_planar = self.plan.is_planar() && from < self.layout.split_matrix_len;
        let float32_weights = Operand::new(Region::Weights, 4 * from, bytes);
        let [low_precision, weights] = match self.plan.dtype {
            _ if is_planar => self.layout.planes(from..from + length),
            DType::F32 => [Operand::NONE, float32_weights],
            // Vectors have no low-precision copy.
            _ if gradients.matrix_length == 0 => [Operand::NONE, float32_weights],
            dtype => {
                let copied = dtype.size() * gradients.matrix_length as usize;
                [Operand::new(Region::LowPrecision, dtype.size() * from, copied), float32_weights]
            }
        };
        let flat = ops::FlatParameters {
            weights,
            low_precision,
            is_planar,
            gradients,
            // Matrices are exactly the weights of convolutions and linear layers.
            decay: [true, false].map(|is_matrix| self.optimizer.policy(is_matrix).decay),
        };
        let optimizer_slots =
            [0, 1].map(|slot| Operand::new(Region::OptimizerSlot(slot), 4 * slot_offset, bytes));
        UpdatedRange { flat, optimizer_slots, rates: self.all_rates() }
    }

    pub(super) fn all_rates(&self) -> ops::Rates {
        let count = self.layout.parameters_with_gradients().len();
        let (segments, per_parameter, squares) = match self.share {
            None => {
                let [segments, per_parameter] = [Region::Segments, Region::Rates].map(Operand::whole);
                (segments, per_parameter, self.ops.partials())
            }
            Some(_) => (
                Operand::new(Region::Segments, 0, SEGMENT_BYTES * count),
                Operand::new(Region::Rates, 0, RATE_BYTES * count),
                Operand::new(Region::SegmentSquares, 0, SQUARES_BYTES * count),
            ),
        };
        ops::Rates { segments, count: count as u32, per_parameter, squares }
    }

    /// The two parts of [`Region::Policies`]: the entries of the filters, and the policies of all parameters with gradients.
    pub(super) fn muon_tables(&self, filter_count: usize) -> [Operand; 2] {
        let (first, second) =
            (FILTER_BYTES * filter_count, POLICY_BYTES * self.layout.parameters_with_gradients().len());
        [Operand::new(Region::Policies, 0, first), Operand::new(Region::Policies, first, second)]
    }

    /// The segments of this rank's parts of parameters. They follow the segments of whole parameters.
    fn own_segments(&self) -> Operand {
        let bytes = SEGMENT_BYTES * self.layout.parameters_with_gradients().len();
        Operand::new(Region::Segments, bytes, bytes)
    }

    /// Size in bytes of the running statistics of all batch norms.
    pub(super) fn running_bytes(&self) -> usize {
        let end = self.norms.iter().map(|site| site.running_var.end()).max().unwrap_or(0);
        RunningLayout::padded_bytes(end)
    }

    /// The memory in which a convolution leaves the sums of its output for the following batch norm.
    pub(super) fn channel_sums(&self, tensor: TensorId) -> Operand {
        let by_nccl = matches!(self.statistics, Some(Statistics::Nccl));
        let region = if by_nccl { Region::StatisticsSums } else { Region::ChannelSums };
        Operand::new(region, 0, 8 * self.plan.network.tensors[tensor].channels)
    }

    pub(super) fn reduction(&self, node: &Norm, pass: NormPass) -> ops::Reduce {
        let channels = self.plan.network.tensors[node.input].channels;
        if *self.plan.network.placement(node.input) != Placement::Batch && self.data_ranks == 1 {
            // This rank has all pictures of its channels.
            return ops::Reduce::Local;
        }
        self.statistics
            .map_or(ops::Reduce::Local, |statistics| statistics.reduction(node.norm, channels, pass))
    }
}

/// Words of [`Region::Policies`]: `u64 offset; u32 rows, columns; u64 gram` for each filter, then `f32 rate, decay; u32 filter, 0` for each
/// parameter with a gradient (`Filter` and `Policy` in `muon.cu`).
pub(super) fn policies(layout: &Layout, optimizer: &Optimizer) -> Vec<u64> {
    let filters = layout.filters();
    let pack = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let mut words: Vec<u64> = filters
        .iter()
        .flat_map(|filter| {
            [filter.offset as u64, pack(filter.rows as u32, filter.columns as u32), filter.gram_offset as u64]
        })
        .collect();
    words.extend(layout.parameters_with_gradients().iter().flat_map(|parameter| {
        let filter = filters.iter().position(|filter| filter.offset == parameter.range.start);
        let policy =
            if parameter.is_fixed { ParameterPolicy::FROZEN } else { optimizer.policy_of(parameter.kind) };
        let filter = filter.map_or(u32::MAX, |index| index as u32);
        [pack(policy.rate.to_bits(), policy.decay.to_bits()), pack(filter, 0)]
    }));
    words
}

/// Bytes of a filter in [`Region::Policies`].
const FILTER_BYTES: usize = 24;
/// Bytes of a parameter's policy in [`Region::Policies`].
const POLICY_BYTES: usize = 16;

/// Bytes of a parameter's segment in [`Region::Segments`].
const SEGMENT_BYTES: usize = 24;
/// Bytes of a parameter's rate in [`Region::Rates`].
const RATE_BYTES: usize = 8;
/// Bytes of the sums of squares from which a parameter's rate is computed.
pub(super) const SQUARES_BYTES: usize = ops::NORM_PARTS as usize * 2 * size_of::<f64>();

/// Values per channel in [`Region::NormValues`]: mean, 1/std, scale, bias, slope and offset.
const VALUES_PER_CHANNEL: usize = 6;

/// The memory of each batch norm, by index, and the size in bytes of [`Region::NormValues`].
pub(super) fn norm_sites(
    plan: &StepPlan,
    layout: &Layout,
    running: &[RunningLayout],
) -> (Vec<NormSite>, usize) {
    let mut at = 0;
    let mut sites: Vec<(usize, NormSite)> = plan
        .norms()
        .map(|node| {
            let bytes = 4 * plan.network.tensors[node.input].channels;
            let value = |index: usize| Operand::new(Region::NormValues, at + index * bytes, bytes);
            let [running_mean, running_var] = running[node.norm].operands();
            let site = NormSite {
                gamma: layout.vector(&node.name, "weight"),
                beta: layout.vector(&node.name, "bias"),
                running_mean,
                running_var,
                running_momentum: plan.network.running_momentum(),
                mean: value(0),
                inv_std: value(1),
                scale: value(2),
                bias: value(3),
                dgamma: layout.vector_gradient(&node.name, "weight"),
                dbeta: layout.vector_gradient(&node.name, "bias"),
                slope: value(4),
                offset: value(5),
            };
            at += VALUES_PER_CHANNEL * bytes;
            (node.norm, site)
        })
        .collect();
    sites.sort_by_key(|(number, _)| *number);
    (sites.into_iter().map(|(_, site)| site).collect(), at)
}
