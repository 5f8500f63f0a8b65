//! The layout of parameters: one flat buffer of weights in the order in which backward produces
//! gradients, cut into buckets that are reduced as soon as they are complete.

use super::conv::{self, ConvShape};
use crate::{
    EngineError,
    fuse::{Conv, FusedOp, Norm},
    net::{Axes, Network, Parameter, Slice},
    optimizer::{is_weight, tensor_name},
};
use lockstep_host::tensors::{HostTensor, NamedTensors};
use std::{borrow::Cow, collections::BTreeMap, ops::Range};

/// Values at which a bucket is closed: an eighth of the network, so that most of it is under way
/// before backward ends, but not so few that calls cost more than bytes, nor more than fill a ring's
/// pipes.
fn bucket_len(parameters: usize) -> usize {
    (parameters / 8).clamp(1 << 16, 1 << 18)
}

/// One trained parameter.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub(super) name: String,
    /// torchvision's.
    pub(super) shape: Vec<usize>,
    /// Set for a convolution's weights, which are kept in the order of [`conv`].
    conv: Option<ConvShape>,
    /// In the flat buffer.
    pub(super) range: Range<usize>,
    pub(super) bucket: usize,
    /// In its bucket.
    pub(super) in_bucket: Range<usize>,
    /// Whether it is the weight of a convolution or linear layer, and no bias.
    pub(super) is_weight: bool,
    /// Of a batch norm that is frozen: its gradient is zero.
    pub(super) is_frozen: bool,
    /// The part of the parameter that this rank has, where ranks share the network.
    pub(super) slice: Option<Slice>,
}

impl Slot {
    /// From the engine's order to torchvision's.
    fn export(&self, flat: &[f32]) -> HostTensor {
        let ours = &flat[self.range.clone()];
        let mut values = vec![0.0; ours.len()];
        match &self.conv {
            Some(shape) => conv::weight_to_oihw(shape, ours, &mut values),
            None => values.copy_from_slice(ours),
        }
        spread(self.slice.as_ref(), HostTensor { shape: self.shape.clone(), values })
    }

    fn import(&self, tensor: &HostTensor, flat: &mut [f32]) {
        let ours = &mut flat[self.range.clone()];
        let values = cut(self.slice.as_ref(), &tensor.values);
        match &self.conv {
            Some(shape) => conv::weight_from_oihw(shape, &values, ours),
            None => ours.copy_from_slice(&values),
        }
    }
}

/// What a rank has of a parameter's values.
pub(super) fn cut<'a>(slice: Option<&Slice>, whole: &'a [f32]) -> Cow<'a, [f32]> {
    slice.map_or(Cow::Borrowed(whole), |slice| Cow::Owned(slice.cut(whole)))
}

/// A part of a parameter as the whole one, with 0 for what other ranks have.
pub(super) fn spread(slice: Option<&Slice>, part: HostTensor) -> HostTensor {
    match slice {
        None => part,
        Some(slice) => HostTensor { shape: slice.whole.clone(), values: slice.spread(&part.values) },
    }
}

/// All trained parameters of a network.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    /// In the order in which backward produces their gradients.
    pub(super) slots: Vec<Slot>,
    by_name: BTreeMap<String, usize>,
    /// Range of the flat buffer of each bucket.
    pub(super) buckets: Vec<Range<usize>>,
    /// Last slot of each bucket.
    pub(super) last_slots: Vec<usize>,
    /// The axes that each bucket is summed over.
    pub(super) axes: Vec<Axes>,
    /// Values of all parameters with the parts of all ranks.
    pub(super) whole_len: usize,
}

impl Layout {
    pub(super) fn new(network: &Network, ops: &[FusedOp]) -> Self {
        let parameters: BTreeMap<String, _> =
            network.parameters().into_iter().map(|p| (p.name.clone(), p)).collect();
        let trained = parameters.values().filter(|p| p.role.is_trained());
        let mut layout = Self {
            slots: Vec::new(),
            by_name: BTreeMap::new(),
            buckets: Vec::new(),
            last_slots: Vec::new(),
            axes: Vec::new(),
            whole_len: trained.map(Parameter::whole_len).sum(),
        };
        let bucket_len = bucket_len(layout.whole_len);
        let mut bucket = 0..0;
        let mut axes = Axes::default();
        for op in ops.iter().rev() {
            let (name, suffixes, conv): (_, &[&str], _) = match op {
                FusedOp::Conv(Conv { name, shape, .. }) => (name, &["weight"], Some(*shape)),
                FusedOp::Norm(Norm { name, .. }) | FusedOp::Linear { name, .. } => {
                    (name, &["weight", "bias"], None)
                }
                FusedOp::Relu { .. }
                | FusedOp::Add { .. }
                | FusedOp::MaxPool { .. }
                | FusedOp::GlobalAveragePool { .. }
                | FusedOp::Redistribute { .. }
                | FusedOp::Halo { .. }
                | FusedOp::MeanOfRows { .. } => continue,
            };
            // A bucket is summed over one group.
            let of_op = network.axes(op.output());
            if of_op != axes && !bucket.is_empty() {
                layout.close(&mut bucket, axes);
            }
            axes = of_op;
            let is_frozen = matches!(op, FusedOp::Norm(norm) if norm.is_frozen());
            for p in suffixes.iter().filter_map(|s| parameters.get(&format!("{name}.{s}"))) {
                let range = bucket.end..bucket.end + p.len();
                layout.by_name.insert(p.name.clone(), layout.slots.len());
                layout.slots.push(Slot {
                    name: p.name.clone(),
                    shape: p.shape.clone(),
                    conv,
                    bucket: layout.buckets.len(),
                    in_bucket: range.start - bucket.start..range.end - bucket.start,
                    is_weight: is_weight(p.role),
                    is_frozen,
                    slice: p.slice.clone(),
                    range: range.clone(),
                });
                bucket.end = range.end;
            }
            if bucket.len() >= bucket_len {
                layout.close(&mut bucket, axes);
            }
        }
        if !bucket.is_empty() {
            layout.close(&mut bucket, axes);
        }
        layout
    }

    /// Ends the bucket that the last slots are in.
    fn close(&mut self, bucket: &mut Range<usize>, axes: Axes) {
        self.last_slots.push(self.slots.len() - 1);
        self.axes.push(axes);
        self.buckets.push(bucket.clone());
        *bucket = bucket.end..bucket.end;
    }

    /// Values of all parameters.
    pub(super) fn len(&self) -> usize {
        self.buckets.last().map_or(0, |b| b.end)
    }

    /// Number of the parameter `name`.
    ///
    /// # Errors
    /// The network has none of that name.
    pub(super) fn slot(&self, name: &str) -> Result<usize, EngineError> {
        let slot = self.by_name.get(name).copied();
        slot.ok_or_else(|| EngineError::Parameters(format!("the network has no parameter {name}")))
    }

    /// Adds every parameter of the flat buffer to `tensors`, in torchvision's layout; of the optimizer's slot `kept`, if that
    /// is what the buffer holds.
    pub(super) fn export(&self, kept: Option<&str>, flat: &[f32], tensors: &mut NamedTensors) {
        tensors.extend(self.slots.iter().map(|slot| (tensor_name(&slot.name, kept), slot.export(flat))));
    }

    /// Fills the flat buffer from `tensors`, which have been checked.
    pub(super) fn import(&self, kept: Option<&str>, tensors: &NamedTensors, flat: &mut [f32]) {
        for slot in &self.slots {
            if let Some(tensor) = tensors.get(&tensor_name(&slot.name, kept)) {
                slot.import(tensor, flat);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fuse, net::resnet};
    use lockstep_protocol::spec::ModelSpec;

    #[test]
    fn a_parameter_that_is_not_there_is_an_error_and_not_the_first_one() {
        let network = resnet::build(&ModelSpec::default(), 8, 3, 10).unwrap();
        let layout = Layout::new(&network, &fuse::fuse(&network, &fuse::Capabilities::default()));
        for (number, slot) in layout.slots.iter().enumerate() {
            assert_eq!(layout.slot(&slot.name).unwrap(), number);
        }
        let error = layout.slot("conv1.weigth").unwrap_err().to_string();
        assert_eq!(error, "the network has no parameter conv1.weigth");
    }
}
