//! Layout of parameters on the GPU.
//!
//! Weights and optimizer state are flat float32 buffers of two parts. *Matrices*: weights of convolutions and of linear
//! layers, in the order in which the backward pass produces their gradients; their low-precision copy and their gradients
//! are in the activations' format. *Vectors*: batch norm's parameters and linear layers' biases, with float32 gradients.

use super::{
    command::{Operand, Region},
    error::CudaError,
    program::{StepPlan, reads_pictures},
};
use crate::{
    EngineError,
    net::Role,
    optimizer::{ParameterKind, kind, tensor_name},
    sharding::Share,
};
use lockstep_host::tensors::{HostTensor, NamedTensors, TensorSource};
use rayon::prelude::*;
use std::{collections::BTreeMap, ops::Range};

/// Alignment of parameters, in values: 16 bytes in any type, and whole tiles of the optimizer.
const ALIGN: usize = 1024;

/// Minimum number of values of a bucket of matrices' gradients, except the last bucket (8 MB in 16 bits): large enough for NVLink's full
/// bandwidth, small enough that the last reduction ends soon after the backward pass.
const MIN_BUCKET_LEN: usize = 4 << 20;

/// Maximum number of values that are copied to the GPU at a time: 16 MB, which copies at full speed.
const MAX_PIECE_LEN: usize = 4 << 20;

/// Number of folded weights per output channel: a 4x4 window of cells with 2x2 pixels of 4 channels.
const FOLDED_LEN: usize = 4 * 4 * 16;

/// The order of a parameter's values on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// `[out][height][width][in]`; `in` counts the channels of one group, padded with zeros.
    Krsc { padded_in: usize },
    /// A 7x7 convolution with stride 2 as a 4x4 convolution over 2x2 pixels of 4 channels: `[out][4][4][2][2][4]`. The
    /// 7x7 window is an 8x8 window without the first row and column, whose weights are zero.
    Folded,
    /// `[out][in]`, `out` padded with zeros.
    Rows,
    /// Unchanged.
    Vector,
}

/// The position and order of one parameter, trained or fixed, in the flat buffers.
#[derive(Debug, Clone)]
pub(super) struct ParameterLayout {
    pub(super) name: String,
    /// torchvision's shape, or the shape of this rank's part.
    shape: Vec<usize>,
    order: Order,
    /// Range in the flat buffers, with the padding of `order`.
    pub(super) range: Range<usize>,
    /// Start of the next parameter's range.
    aligned_end: usize,
    pub(super) kind: ParameterKind,
    /// Whether the parameter is not trained. A fixed matrix has a gradient of zeros, and a fixed vector has no gradient.
    pub(super) is_fixed: bool,
    /// Whether a model group splits the parameter.
    pub(super) is_split: bool,
}

impl ParameterLayout {
    /// The parameter's range up to the next parameter, which begins at a multiple of [`ALIGN`].
    pub(super) fn aligned_range(&self) -> Range<usize> {
        self.range.start..self.aligned_end
    }

    fn unpadded_len(&self) -> usize {
        self.shape.iter().product()
    }

    /// For weights of a convolution: calls `visit` with two indices of every value: in torchvision's order, and on the GPU. The values
    /// of other parameters have the same order in both.
    fn for_each_index(&self, visit: impl FnMut(usize, usize)) {
        let Ok(sides @ [_, _, height, width]) = <[usize; 4]>::try_from(&self.shape[..]) else { return };
        match self.order {
            Order::Krsc { padded_in } => {
                let krsc = |[o, i, y, x]: [usize; 4]| ((o * height + y) * width + x) * padded_in + i;
                visit_indices(sides, krsc, visit);
            }
            Order::Folded => {
                let folded = |[o, i, y, x]: [usize; 4]| {
                    let block = y.div_ceil(2) * 4 + x.div_ceil(2);
                    let within = (y + 1) % 2 * 2 + (x + 1) % 2;
                    o * FOLDED_LEN + block * 16 + within * 4 + i
                };
                visit_indices(sides, folded, visit);
            }
            Order::Rows | Order::Vector => {}
        }
    }
}

/// A matrix that Muon orthogonalises, with a row for each output channel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Filter {
    /// Offset of the first value in the flat buffers.
    pub(super) offset: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Offset of the first value in the buffers of Gram matrices, which contain the smaller Gram matrix of each filter.
    pub(super) gram_offset: usize,
}

impl Filter {
    /// Number of rows of the smaller Gram matrix.
    pub(super) fn side(&self) -> usize {
        self.rows.min(self.columns)
    }
}

/// The layout of all parameters in the flat buffers.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub(super) parameters: Vec<ParameterLayout>,
    by_name: BTreeMap<String, usize>,
    /// Number of values of the matrices; the vectors follow.
    pub(super) matrix_len: usize,
    /// Number of values of split matrices, which come first.
    pub(super) split_matrix_len: usize,
    /// Number of values of split vectors, which are the first vectors.
    pub(super) split_vector_len: usize,
    /// Number of values with gradients, which the optimizer changes. Vectors that are not trained follow.
    pub(super) trained_len: usize,
    /// Total number of values.
    pub(super) len: usize,
    /// Ranges of the matrices whose gradients are reduced together over all ranks, in the order of the backward pass.
    pub(super) buckets: Vec<Range<usize>>,
}

impl Layout {
    /// Each range that is reduced together can be divided into `part_count` equal parts.
    pub(super) fn new(plan: &StepPlan, part_count: usize) -> Self {
        let (network, padded_classes) = (&plan.network, plan.padded_classes);
        let parameters: BTreeMap<String, _> =
            network.parameters().into_iter().map(|p| (p.name.clone(), p)).collect();
        let mut layout = Self {
            parameters: Vec::new(),
            by_name: BTreeMap::new(),
            matrix_len: 0,
            split_matrix_len: 0,
            split_vector_len: 0,
            trained_len: 0,
            len: 0,
            buckets: Vec::new(),
        };
        let (mut matrices, mut vectors, mut fixed_vectors) = (Vec::new(), Vec::new(), Vec::new());
        for op in plan.ops.iter().rev() {
            let Some((name, suffixes)) = op.parameters() else { continue };
            for p in suffixes.iter().filter_map(|s| parameters.get(&format!("{name}.{s}"))) {
                let (order, len) = match (p.role, &p.shape[..]) {
                    (Role::ConvWeight, [out, ..]) if plan.has_folded_input && reads_pictures(op) => {
                        (Order::Folded, out * FOLDED_LEN)
                    }
                    (Role::ConvWeight, [out, inputs, height, width]) => {
                        let padded_in = if reads_pictures(op) { plan.padded_input } else { *inputs };
                        (Order::Krsc { padded_in }, out * height * width * padded_in)
                    }
                    (Role::LinearWeight, [out, inputs]) => {
                        let has_logits = network.has_logits(op.output());
                        (Order::Rows, if has_logits { padded_classes } else { *out } * inputs)
                    }
                    // A split bias is padded to the same length on every rank.
                    (Role::LinearBias, _) if p.slice.is_some() => (Order::Vector, padded_classes),
                    _ => (Order::Vector, p.len()),
                };
                let parameter = ParameterLayout {
                    name: p.name.clone(),
                    shape: p.shape.clone(),
                    order,
                    range: 0..len,
                    aligned_end: len,
                    kind: kind(p.role),
                    is_fixed: !network.trains(p),
                    is_split: p.slice.is_some(),
                };
                match parameter.order {
                    Order::Vector if parameter.is_fixed => fixed_vectors.push(parameter),
                    Order::Vector => vectors.push(parameter),
                    // Split matrices come first, so their position is already known.
                    _ if parameter.is_split => layout.push(parameter),
                    _ => matrices.push(parameter),
                }
            }
        }
        layout.split_matrix_len = layout.len;
        let mut bucket_start = layout.len;
        for parameter in matrices {
            layout.push(parameter);
            if layout.len - bucket_start >= MIN_BUCKET_LEN {
                layout.pad(bucket_start, part_count);
                layout.buckets.push(bucket_start..layout.len);
                bucket_start = layout.len;
            }
        }
        layout.pad(bucket_start, part_count);
        layout.matrix_len = layout.len;
        if layout.matrix_len > bucket_start {
            layout.buckets.push(bucket_start..layout.matrix_len);
        }
        vectors.sort_by_key(|parameter: &ParameterLayout| !parameter.is_split);
        for parameter in vectors {
            let is_split = parameter.is_split;
            layout.push(parameter);
            if is_split {
                layout.split_vector_len = layout.len - layout.matrix_len;
            }
        }
        layout.pad(layout.matrix_len, part_count);
        layout.trained_len = layout.len;
        fixed_vectors.into_iter().for_each(|parameter| layout.push(parameter));
        layout
    }

    /// The two 16-bit planes (`planes.rs`) of a range of values: the nearest bfloat16, and the difference from it. The range must be in
    /// split matrices.
    pub(super) fn planes(&self, values: Range<usize>) -> [Operand; 2] {
        let plane = |from: usize| Operand::new(Region::Weights, 2 * (from + values.start), 2 * values.len());
        [plane(0), plane(self.split_matrix_len)]
    }

    /// For the split parameters, then for the parameters that every rank has whole: the range of their matrices, and the range of their
    /// vectors.
    pub(super) fn split_and_whole(&self) -> [[Range<usize>; 2]; 2] {
        let vectors = self.matrix_len + self.split_vector_len;
        [
            [0..self.split_matrix_len, self.matrix_len..vectors],
            [self.split_matrix_len..self.matrix_len, vectors..self.len],
        ]
    }

    fn push(&mut self, mut parameter: ParameterLayout) {
        parameter.range = self.len..self.len + parameter.range.len();
        self.len = parameter.range.end.next_multiple_of(ALIGN);
        parameter.aligned_end = self.len;
        self.by_name.insert(parameter.name.clone(), self.parameters.len());
        self.parameters.push(parameter);
    }

    /// Pads the values from `from` on, so that they consist of `part_count` equal parts, each a multiple of [`ALIGN`].
    fn pad(&mut self, from: usize, part_count: usize) {
        self.len = from + (self.len - from).next_multiple_of(ALIGN * part_count);
        if let Some(last) = self.parameters.last_mut() {
            last.aligned_end = self.len;
        }
    }

    /// The ranges that are reduced together: the buckets of matrices, then all vectors.
    pub(super) fn reduced_ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.buckets.iter().cloned().chain(std::iter::once(self.matrix_len..self.trained_len))
    }

    /// The range of the flat buffers that belongs to a rank with `share`, for each range that is reduced together.
    pub(super) fn own_ranges(&self, share: Share) -> impl Iterator<Item = Range<usize>> {
        self.reduced_ranges().map(move |range| {
            let own = share.of(range.len());
            range.start + own.start..range.start + own.end
        })
    }

    /// For each parameter with a gradient: the range that belongs to a rank with `share`, relative to the rank's part of the reduced range.
    pub(super) fn own_segments(&self, share: Share) -> Vec<Range<usize>> {
        let own: Vec<_> = self.reduced_ranges().zip(self.own_ranges(share)).collect();
        let of_parameter = |parameter: &ParameterLayout| {
            let own = own.iter().find(|(range, _)| range.contains(&parameter.range.start));
            let own = own.map_or(0..0, |(_, own)| own.clone());
            [parameter.range.start, parameter.range.end].map(|at| at.clamp(own.start, own.end) - own.start)
        };
        self.parameters_with_gradients().iter().map(of_parameter).map(|[start, end]| start..end).collect()
    }

    /// The parameters with gradients, which come first: all matrices (also fixed matrices, whose gradients are zeros) and the trained
    /// vectors.
    pub(super) fn parameters_with_gradients(&self) -> &[ParameterLayout] {
        &self.parameters
            [..self.parameters.partition_point(|parameter| parameter.range.start < self.trained_len)]
    }

    /// The matrices that Muon orthogonalises.
    pub(super) fn filters(&self) -> Vec<Filter> {
        let mut gram_offset = 0;
        let is_trained_filter =
            |parameter: &&ParameterLayout| parameter.kind == ParameterKind::Filters && !parameter.is_fixed;
        let of_parameter = |parameter: &ParameterLayout| {
            let (offset, rows) = (parameter.range.start, parameter.shape[0]);
            let filter = Filter { offset, rows, columns: parameter.range.len() / rows, gram_offset };
            // Gram matrices in bfloat16 begin at multiples of 16 bytes.
            gram_offset += filter.side().pow(2).next_multiple_of(8);
            filter
        };
        self.parameters.iter().filter(is_trained_filter).map(of_parameter).collect()
    }

    /// The layout of the parameter `{name}.{suffix}`, which must exist.
    pub(super) fn parameter(&self, name: &str, suffix: &str) -> &ParameterLayout {
        &self.parameters[self.by_name[&format!("{name}.{suffix}")]]
    }

    /// A batch norm's parameter or a bias, float32.
    pub(super) fn vector(&self, name: &str, suffix: &str) -> Operand {
        let range = self.parameter(name, suffix).aligned_range();
        Operand::new(Region::Weights, 4 * range.start, 4 * range.len())
    }

    /// The gradient of a vector; absent if the vector is fixed.
    pub(super) fn vector_gradient(&self, name: &str, suffix: &str) -> Operand {
        let range = self.parameter(name, suffix).aligned_range();
        if range.start >= self.trained_len {
            return Operand::NONE;
        }
        Operand::new(Region::VectorGradients, 4 * (range.start - self.matrix_len), 4 * range.len())
    }

    /// Converts a flat buffer to torchvision's layout. `optimizer_slot` is the optimizer's state that the buffer contains (such as
    /// `exp_avg`); `None` if it contains the parameters.
    pub(super) fn export(&self, optimizer_slot: Option<&str>, flat: &[f32], into: &mut NamedTensors) {
        into.par_extend(self.parameters.par_iter().map(|parameter| {
            let gpu_values = &flat[parameter.range.clone()];
            // A convolution's weights are then put into torchvision's order.
            let mut values = gpu_values[..parameter.unpadded_len()].to_vec();
            parameter.for_each_index(|oihw, gpu| values[oihw] = gpu_values[gpu]);
            let name = tensor_name(&parameter.name, optimizer_slot);
            (name, HostTensor { shape: parameter.shape.clone(), values })
        }));
    }

    /// Number of values of a buffer for [`Layout::import`].
    pub(super) fn piece_len(&self) -> usize {
        self.parameters
            .iter()
            .map(|parameter| parameter.aligned_range().len())
            .max()
            .unwrap_or(0)
            .clamp(ALIGN, MAX_PIECE_LEN)
    }

    /// Converts `tensors`, which `check.rs` must have checked, to the order of the flat buffers, and calls `write` for each piece with the
    /// offset of its first value. `optimizer_slot` is as for [`Layout::export`]. `buffer` holds one piece at a time, so that the large
    /// matrix of a linear layer is never whole in host memory.
    pub(super) fn import(
        &self,
        optimizer_slot: Option<&str>,
        tensors: &dyn TensorSource,
        buffer: &mut [f32],
        mut write: impl FnMut(usize, &[f32]) -> Result<(), CudaError>,
    ) -> Result<(), EngineError> {
        let piece_len = buffer.len();
        for parameter in &self.parameters {
            let name = tensor_name(&parameter.name, optimizer_slot);
            let read = |from: usize, to: &mut [f32]| {
                if tensors.read(&name, from, to) {
                    return Ok(());
                }
                Err(EngineError::Parameters(format!("`{name}` is missing")))
            };
            let (len, padded) = (parameter.unpadded_len(), parameter.aligned_range());
            match parameter.order {
                Order::Krsc { .. } | Order::Folded => {
                    let (mut values, mut gpu_values) = (vec![0.0; len], vec![0.0; padded.len()]);
                    read(0, &mut values)?;
                    parameter.for_each_index(|oihw, gpu| gpu_values[gpu] = values[oihw]);
                    write(padded.start, &gpu_values)?;
                }
                Order::Rows | Order::Vector => {
                    for from in (0..padded.len()).step_by(piece_len) {
                        let count = piece_len.min(padded.len() - from);
                        let piece = &mut buffer[..count];
                        let (values, padding) = piece.split_at_mut(len.saturating_sub(from).min(count));
                        if !values.is_empty() {
                            read(from, values)?;
                        }
                        padding.fill(0.0);
                        write(padded.start + from, piece)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the flat buffer that [`Layout::import`] writes.
    pub(super) fn flatten(
        &self,
        optimizer_slot: Option<&str>,
        tensors: &dyn TensorSource,
    ) -> Result<Vec<f32>, EngineError> {
        let (mut flat, mut buffer) = (vec![0.0; self.len], vec![0.0; self.piece_len()]);
        self.import(optimizer_slot, tensors, &mut buffer, |at, piece| {
            flat[at..at + piece.len()].copy_from_slice(piece);
            Ok(())
        })?;
        Ok(flat)
    }
}

/// Calls `visit` with two indices of every value of `[out][in][height][width]`: in this order, and the result of `gpu_index`.
fn visit_indices(
    [out, inputs, height, width]: [usize; 4],
    gpu_index: impl Fn([usize; 4]) -> usize,
    mut visit: impl FnMut(usize, usize),
) {
    let mut oihw = 0;
    for o in 0..out {
        for i in 0..inputs {
            for y in 0..height {
                for x in 0..width {
                    visit(oihw, gpu_index([o, i, y, x]));
                    oihw += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::{dtype::DType, program::capabilities},
        net::{init, resnet},
    };
    use lockstep_protocol::spec::{Arch, ModelSpec, Stem};
    use std::sync::Arc;

    /// The weights of a grouped convolution are in cuDNN's order: `[out][height][width][in / groups]`.
    #[test]
    fn grouped_weights_convert_to_the_gpu_s_order_and_back() {
        let model = ModelSpec { arch: Arch::ResNeXt50_32x4d, stem: Stem::Imagenet, ..ModelSpec::default() };
        let network = Arc::new(resnet::build(&model, 64, 3, 10).unwrap());
        let plan = StepPlan::new(network.clone(), 8, DType::F16, capabilities(true)).unwrap();
        let layout = Layout::new(&plan, 1);
        let mut initial = init::initial_parameters(&network, false, 1);
        initial.retain(|name, _| !name.contains("running"));
        let flat = layout.flatten(None, &initial).unwrap();
        let mut back = NamedTensors::new();
        layout.export(None, &flat, &mut back);
        assert!(back == initial);

        let parameter = layout.parameter("layer1.0.conv2", "weight");
        let (krsc, oihw) = (&flat[parameter.range.clone()], &initial["layer1.0.conv2.weight"].values);
        assert_eq!(krsc.len(), 128 * 3 * 3 * 4);
        let (out, input, y, x) = (77, 2, 1, 2);
        assert_eq!(krsc[((out * 3 + y) * 3 + x) * 4 + input], oihw[((out * 4 + input) * 3 + y) * 3 + x]);
    }
}
