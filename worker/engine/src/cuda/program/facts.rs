//! What emission knows: the plan of the step, the settings, and the few facts about the GPU and the ranks on which a command
//! depends. None of it needs a GPU.

use super::StepPlan;
use crate::{
    Optimizer,
    cuda::{
        command::{Operand, Region},
        convolution::Convolution,
        dtype::DType,
        layout::{Layout, Slot},
        ops::{self, NormSite, Ops, ScaleTable},
        running::Running,
        statistics::Statistics,
    },
    fuse::Norm,
    net::TensorId,
};

pub(in crate::cuda) struct Facts<'a> {
    pub(in crate::cuda) plan: &'a StepPlan,
    pub(in crate::cuda) layout: &'a Layout,
    /// By batch norm.
    pub(in crate::cuda) norms: &'a [NormSite],
    pub(in crate::cuda) ops: Ops,
    pub(in crate::cuda) optimizer: Optimizer,
    pub(in crate::cuda) label_smoothing: f32,
    /// Whether a step may have several micro-batches.
    pub(in crate::cuda) accumulates: bool,
    /// Whether the loss scale moves by itself.
    pub(in crate::cuda) dynamic_scale: bool,
    /// How ranks add statistics up; `None` for a single rank, which sends no gradients either.
    pub(in crate::cuda) ranks: Option<&'a Statistics>,
    /// Ranks that have the same part of the network as this one, and other pictures.
    pub(in crate::cuda) data_ranks: usize,
    /// Convolutions (with `sums` set) that take statistics along, as the tuner found it faster.
    pub(in crate::cuda) takes_sums: &'a dyn Fn(&Convolution) -> bool,
    /// From pictures of the dataset's size to the network's, by height and by width; `None` where they have it.
    pub(in crate::cuda) scaling: Option<[&'a ScaleTable; 2]>,
}

impl Facts<'_> {
    fn slot(&self, name: &str, suffix: &str) -> &Slot {
        self.layout.slot(name, suffix)
    }

    /// The weights of a convolution or linear layer in the type that is computed in.
    pub(super) fn matrix(&self, name: &str) -> Operand {
        let slot = self.slot(name, "weight");
        if self.plan.is_planar() && slot.slice.is_some() {
            let [nearest, _] = self.layout.planes(slot.padded());
            return nearest;
        }
        let region = if self.plan.dtype == DType::F32 { Region::Weights } else { Region::LowPrecision };
        self.matrix_in(region, name)
    }

    pub(super) fn matrix_gradient(&self, name: &str) -> Operand {
        self.matrix_in(Region::MatrixGradients, name)
    }

    fn matrix_in(&self, region: Region, name: &str) -> Operand {
        let (range, size) = (self.slot(name, "weight").padded(), self.plan.dtype.size());
        Operand::new(region, range.start * size, range.len() * size)
    }

    /// A bias, float32.
    pub(super) fn vector(&self, name: &str, suffix: &str) -> Operand {
        vector(self.layout, name, suffix)
    }

    pub(super) fn vector_gradient(&self, name: &str, suffix: &str) -> Operand {
        vector_gradient(self.layout, name, suffix)
    }

    /// See [`StepPlan::recomputes`].
    pub(super) fn recomputes(&self) -> bool {
        self.plan.recomputes(self.accumulates, self.data_ranks)
    }

    /// The gradients of all matrices: in the type that is computed in, or float32 sums over micro-batches.
    pub(super) fn gradients(&self) -> ops::Gradients {
        let (region, size) = match self.accumulates {
            true => (Region::Accumulated, 4),
            false => (Region::MatrixGradients, self.plan.dtype.size()),
        };
        let Layout { matrices, trained, .. } = *self.layout;
        ops::Gradients {
            first: Operand::new(region, 0, size * matrices),
            second: Operand::new(Region::VectorGradients, 0, 4 * (trained - matrices)),
            first_length: matrices as u64,
            length: trained as u64,
            in_float32: size == 4,
        }
    }

    /// Where running statistics are kept while a step is under way.
    pub(super) fn kept(&self) -> ops::Keep {
        let end = self.norms.iter().map(|site| site.running_var.end()).max().unwrap_or(0);
        let bytes = Running::padded(end);
        ops::Keep {
            running: Operand::new(Region::RunningStatistics, 0, bytes),
            kept: Operand::new(Region::KeptStatistics, 0, bytes),
            kept_of: Operand::whole(Region::KeptOf),
            finished: Operand::new(Region::ResultCounter, 0, 4),
        }
    }

    pub(super) fn optimizer_slot(&self, slot: usize) -> Operand {
        Operand::new(Region::OptimizerSlot(slot), 0, 4 * self.layout.trained)
    }

    /// Where a convolution leaves the sums of its output for the batch norm after it.
    pub(super) fn channel_sums(&self, tensor: TensorId) -> Operand {
        let by_nccl = matches!(self.ranks, Some(Statistics::ByNccl));
        let region = if by_nccl { Region::StatisticsSums } else { Region::ChannelSums };
        Operand::new(region, 0, 8 * self.plan.network.tensors[tensor].channels)
    }

    /// What becomes of a batch norm's sums.
    pub(super) fn reduction(&self, node: &Norm, backward: bool) -> ops::Reduce {
        let channels = self.plan.network.tensors[node.input].channels;
        self.ranks.map_or(ops::Reduce::Local, |ranks| ranks.reduction(node.norm, channels, backward))
    }
}

fn vector(layout: &Layout, name: &str, suffix: &str) -> Operand {
    let range = layout.slot(name, suffix).padded();
    Operand::new(Region::Weights, 4 * range.start, 4 * range.len())
}

/// None of what is frozen.
fn vector_gradient(layout: &Layout, name: &str, suffix: &str) -> Operand {
    let range = layout.slot(name, suffix).padded();
    if range.start >= layout.trained {
        return Operand::NONE;
    }
    Operand::new(Region::VectorGradients, 4 * (range.start - layout.matrices), 4 * range.len())
}

/// Values a channel that a batch norm has there: mean, 1/std, scale, bias, slope and offset.
const VALUES: usize = 6;

/// Where each batch norm has its memory, by its number; and the bytes of [`Region::NormValues`].
pub(super) fn norm_sites(plan: &StepPlan, layout: &Layout, running: &[Running]) -> (Vec<NormSite>, usize) {
    let mut at = 0;
    let mut sites: Vec<(usize, NormSite)> = plan
        .norms()
        .map(|node| {
            let bytes = 4 * plan.network.tensors[node.input].channels;
            let value = |number: usize| Operand::new(Region::NormValues, at + number * bytes, bytes);
            let [running_mean, running_var] = running[node.norm].operands();
            let site = NormSite {
                gamma: vector(layout, &node.name, "weight"),
                beta: vector(layout, &node.name, "bias"),
                running_mean,
                running_var,
                mean: value(0),
                inv_std: value(1),
                scale: value(2),
                bias: value(3),
                dgamma: vector_gradient(layout, &node.name, "weight"),
                dbeta: vector_gradient(layout, &node.name, "bias"),
                slope: value(4),
                offset: value(5),
            };
            at += VALUES * bytes;
            (node.norm, site)
        })
        .collect();
    sites.sort_by_key(|(number, _)| *number);
    (sites.into_iter().map(|(_, site)| site).collect(), at)
}
