//! The layout of parameters: one flat buffer of weights in the order in which backward produces
//! gradients, cut into buckets that are reduced as soon as they are complete.

use super::conv::{self, ConvShape};
use crate::{
    fuse::FusedOp,
    net::{Axes, Network, Parameter},
    optimizer::{ParameterKind, kind, tensor_name},
};
use lockstep_host::tensors::{HostTensor, NamedTensors, TensorSource};
use std::{collections::BTreeMap, ops::Range};

/// Number of values at which a bucket is closed: an eighth of the network, so that the reduction of most gradients starts
/// before backward ends. The minimum limits the number of calls. At the maximum, a ring's bandwidth is saturated.
fn bucket_len(parameters: usize) -> usize {
    (parameters / 8).clamp(1 << 16, 1 << 18)
}

/// The place of one parameter, trained or frozen, in the flat buffer.
#[derive(Debug, Clone)]
pub(super) struct ParameterPlace {
    pub(super) name: String,
    /// torchvision's shape, or the shape of this rank's part.
    pub(super) shape: Vec<usize>,
    /// The shape of the convolution, if the parameter is a convolution's weights. They are stored in the order of
    /// [`conv`].
    pub(super) conv: Option<ConvShape>,
    /// Range in the flat buffer.
    pub(super) range: Range<usize>,
    pub(super) bucket: usize,
    pub(super) in_bucket: Range<usize>,
    pub(super) kind: ParameterKind,
    pub(super) is_frozen: bool,
    /// Whether a model group splits the parameter.
    pub(super) is_split: bool,
}

impl ParameterPlace {
    /// The parameter's values in the flat buffer.
    pub(super) fn of<'a>(&self, flat: &'a [f32]) -> &'a [f32] {
        &flat[self.range.clone()]
    }

    /// Converts values from the engine's order to torchvision's.
    fn export(&self, flat: &[f32]) -> HostTensor {
        let stored = self.of(flat);
        let mut values = vec![0.0; stored.len()];
        match &self.conv {
            Some(shape) => conv::weight_to_oihw(shape, stored, &mut values),
            None => values.copy_from_slice(stored),
        }
        HostTensor { shape: self.shape.clone(), values }
    }

    /// Fills the parameter's range from the tensor `name`, if there is one.
    fn import(&self, name: &str, tensors: &dyn TensorSource, flat: &mut [f32]) {
        let stored = &mut flat[self.range.clone()];
        let Some(shape) = &self.conv else {
            tensors.read(name, 0, stored);
            return;
        };
        let mut values = vec![0.0; stored.len()];
        if tensors.read(name, 0, &mut values) {
            conv::weight_from_oihw(shape, &values, stored);
        }
    }
}

/// The places of all parameters of a network in the flat buffer.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    /// In the order in which backward produces gradients.
    pub(super) parameters: Vec<ParameterPlace>,
    by_name: BTreeMap<String, usize>,
    /// By bucket: its range in the flat buffer.
    pub(super) buckets: Vec<Range<usize>>,
    /// By bucket: its last parameter.
    pub(super) last_parameters: Vec<usize>,
    /// By bucket: the axes over which gradients are summed.
    pub(super) axes: Vec<Axes>,
    /// Number of values of all whole parameters.
    pub(super) whole_len: usize,
}

impl Layout {
    pub(super) fn new(network: &Network, ops: &[FusedOp]) -> Self {
        let parameters: BTreeMap<String, _> =
            network.parameters().into_iter().map(|p| (p.name.clone(), p)).collect();
        let trained = parameters.values().filter(|p| p.role.is_trained());
        let mut layout = Self {
            parameters: Vec::new(),
            by_name: BTreeMap::new(),
            buckets: Vec::new(),
            last_parameters: Vec::new(),
            axes: Vec::new(),
            whole_len: trained.map(Parameter::whole_len).sum(),
        };
        let bucket_len = bucket_len(layout.whole_len);
        let mut bucket = 0..0;
        let mut axes = Axes::default();
        for op in ops.iter().rev() {
            let Some((name, suffixes)) = op.parameters() else { continue };
            let conv = if let FusedOp::Conv(conv) = op { Some(conv.shape) } else { None };
            // All parameters of a bucket are summed over the same group.
            let op_axes = network.axes(op.output());
            if op_axes != axes && !bucket.is_empty() {
                layout.close_bucket(&mut bucket, axes);
            }
            axes = op_axes;
            for p in suffixes.iter().filter_map(|s| parameters.get(&format!("{name}.{s}"))) {
                let range = bucket.end..bucket.end + p.len();
                layout.by_name.insert(p.name.clone(), layout.parameters.len());
                layout.parameters.push(ParameterPlace {
                    name: p.name.clone(),
                    shape: p.shape.clone(),
                    conv,
                    bucket: layout.buckets.len(),
                    in_bucket: range.start - bucket.start..range.end - bucket.start,
                    kind: kind(p.role),
                    is_frozen: !network.trains(p),
                    is_split: p.slice.is_some(),
                    range: range.clone(),
                });
                bucket.end = range.end;
            }
            if bucket.len() >= bucket_len {
                layout.close_bucket(&mut bucket, axes);
            }
        }
        if !bucket.is_empty() {
            layout.close_bucket(&mut bucket, axes);
        }
        layout
    }

    /// Adds the range `bucket` as a bucket, and begins the next one at its end.
    fn close_bucket(&mut self, bucket: &mut Range<usize>, axes: Axes) {
        self.last_parameters.push(self.parameters.len() - 1);
        self.axes.push(axes);
        self.buckets.push(bucket.clone());
        *bucket = bucket.end..bucket.end;
    }

    /// Number of values of this rank's parameters.
    pub(super) fn len(&self) -> usize {
        self.buckets.last().map_or(0, |b| b.end)
    }

    /// Index of the parameter `name`, which must exist.
    pub(super) fn index_of(&self, name: &str) -> usize {
        self.by_name[name]
    }

    /// The place of the parameter `name`, which must exist.
    pub(super) fn parameter(&self, name: &str) -> &ParameterPlace {
        &self.parameters[self.index_of(name)]
    }

    /// Adds every parameter of the flat buffer to `tensors`, in torchvision's layout. With `optimizer_slot`, the buffer
    /// contains this state of the optimizer (such as `exp_avg`) instead of the parameters.
    pub(super) fn export(&self, optimizer_slot: Option<&str>, flat: &[f32], tensors: &mut NamedTensors) {
        tensors.extend(
            self.parameters
                .iter()
                .map(|parameter| (tensor_name(&parameter.name, optimizer_slot), parameter.export(flat))),
        );
    }

    /// Fills the flat buffer from `tensors`, which must have been checked.
    pub(super) fn import(&self, optimizer_slot: Option<&str>, tensors: &dyn TensorSource, flat: &mut [f32]) {
        for parameter in &self.parameters {
            parameter.import(&tensor_name(&parameter.name, optimizer_slot), tensors, flat);
        }
    }
}
