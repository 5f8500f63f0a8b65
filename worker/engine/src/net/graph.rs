//! The network as data: operations in forward order over numbered tensors.
//!
//! Activations are NHWC. The batch is not part of a shape: the same network runs any batch size.
//! Parameters have torchvision's names and layouts; engines may use other layouts internally.

use super::placement::{Axes, NetworkPart, Placement, Rows, Slice, TensorId};
use lockstep_kernels::TensorShape;
use std::{ops::Range, sync::Arc};

/// One operation. `name` is the module's name in torchvision; its parameters are `name.weight` and so on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Square convolution without bias. Parameter `weight`, OIHW. With several groups, each group reads an equal range of
    /// the input's channels and writes an equal range of the output's; I is the number of input channels of one group.
    Conv {
        name: String,
        input: TensorId,
        output: TensorId,
        kernel: usize,
        stride: usize,
        padding: usize,
        groups: usize,
    },
    /// Normalises each channel over batch, height and width (epsilon 1e-5; running momentum 0.1, for `cifarnet` 0.4).
    /// Parameters `weight` and `bias`, statistics `running_mean` and `running_var`, all `[channels]`.
    BatchNorm { name: String, input: TensorId, output: TensorId },
    /// max(x, 0).
    Relu { input: TensorId, output: TensorId },
    /// GELU of x. If `bias` is the name of a module, of x plus the module's parameter `bias`, `[channels]`.
    Gelu { bias: Option<String>, input: TensorId, output: TensorId },
    /// End of a residual block: `branch` is the output of the block's convolutions, `shortcut` bypasses them.
    Add { branch: TensorId, shortcut: TensorId, output: TensorId },
    /// Maximum over square windows. Padding is never the maximum.
    MaxPool { input: TensorId, output: TensorId, kernel: usize, stride: usize, padding: usize },
    /// Mean over height and width.
    GlobalAveragePool { input: TensorId, output: TensorId },
    /// y = W x + b. Parameters `weight` `[out, in]` and `bias` `[out]`.
    Linear { name: String, input: TensorId, output: TensorId },
    /// The same activation in another [`Placement`]: the ranks of a model group exchange the values that each needs.
    Redistribute { input: TensorId, output: TensorId },
    /// The rows of the input that this rank has, and the rows of other ranks that this rank's windows reach. Rows outside of the
    /// picture are 0, or minus infinity if `lowest` (before a maximum).
    Halo { input: TensorId, output: TensorId, lowest: bool },
    /// The mean over all rows, computed from each rank's mean over its own rows.
    MeanOfRows { input: TensorId, output: TensorId },
}

impl Op {
    /// The activations that this operation reads (two for an addition), and the activation that it produces.
    fn tensors(&self) -> (TensorId, Option<TensorId>, TensorId) {
        match *self {
            Op::Add { branch, shortcut, output } => (branch, Some(shortcut), output),
            Op::Conv { input, output, .. }
            | Op::BatchNorm { input, output, .. }
            | Op::Relu { input, output }
            | Op::Gelu { input, output, .. }
            | Op::MaxPool { input, output, .. }
            | Op::GlobalAveragePool { input, output }
            | Op::Linear { input, output, .. }
            | Op::Redistribute { input, output }
            | Op::Halo { input, output, .. }
            | Op::MeanOfRows { input, output } => (input, None, output),
        }
    }

    /// The activation that this operation produces.
    pub fn output(&self) -> TensorId {
        self.tensors().2
    }

    /// The activations that this operation reads.
    pub fn inputs(&self) -> Vec<TensorId> {
        let (input, second, _) = self.tensors();
        std::iter::once(input).chain(second).collect()
    }

    /// The same operation on other activations.
    #[must_use]
    pub fn on(&self, new_inputs: &[TensorId], new_output: TensorId) -> Self {
        let mut op = self.clone();
        match &mut op {
            Op::Add { branch, shortcut, output } => {
                (*branch, *shortcut, *output) = (new_inputs[0], new_inputs[1], new_output);
            }
            Op::Conv { input, output, .. }
            | Op::BatchNorm { input, output, .. }
            | Op::Relu { input, output }
            | Op::Gelu { input, output, .. }
            | Op::MaxPool { input, output, .. }
            | Op::GlobalAveragePool { input, output }
            | Op::Linear { input, output, .. }
            | Op::Redistribute { input, output }
            | Op::Halo { input, output, .. }
            | Op::MeanOfRows { input, output } => (*input, *output) = (new_inputs[0], new_output),
        }
        op
    }
}

/// The role of a parameter, which decides how it is initialised and updated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    ConvWeight,
    /// Batch norm's scale.
    Gamma {
        /// Whether this batch norm is the last one of a residual branch.
        ends_branch: bool,
    },
    /// Batch norm's offset, or a GELU's bias.
    Beta,
    RunningMean,
    RunningVar,
    LinearWeight,
    LinearBias,
}

impl Role {
    /// Whether parameters of this role are trained: all except running statistics.
    pub fn is_trained(self) -> bool {
        !matches!(self, Role::RunningMean | Role::RunningVar)
    }
}

/// A named tensor of the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// torchvision's name, e.g. `layer1.0.bn1.running_mean`.
    pub name: String,
    /// torchvision's shape: OIHW, `[out, in]` or `[channels]`; the shape of this rank's part if the parameter is split over
    /// a model group.
    pub shape: Vec<usize>,
    pub role: Role,
    /// This rank's part of the parameter. `None` if every rank has the whole parameter.
    pub slice: Option<Slice>,
}

impl Parameter {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of values of the whole parameter.
    pub(crate) fn whole_len(&self) -> usize {
        self.slice.as_ref().map_or(self.len(), |slice| slice.whole.iter().product())
    }
}

/// A network: operations in forward order. Tensor 0 is the input picture, and the last tensor is the logits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// Name of the architecture, e.g. `resnet20`.
    pub arch: String,
    /// Height and width of an input picture, in pixels.
    pub image_size: usize,
    /// Channels of an input picture.
    pub channels: usize,
    pub classes: usize,
    /// Whether all batch norms are frozen (torchvision's `FrozenBatchNorm2d`): they normalise with running statistics
    /// during training, too, and none of their parameters is trained.
    pub frozen_norm: bool,
    /// Names of parameters that are not trained: weights that are computed from pictures, and the scales of batch norms
    /// without a trained scale.
    pub fixed: Vec<String>,
    /// Shape of every activation.
    pub tensors: Vec<TensorShape>,
    pub ops: Vec<Op>,
    /// This rank's part of a network that several ranks share. All shapes are then local to this rank. `None` if this rank has the
    /// whole network.
    pub part: Option<Arc<NetworkPart>>,
}

impl Network {
    /// A network without operations: tensor 0 is the input.
    pub fn new(arch: &str, image_size: usize, channels: usize, classes: usize) -> Self {
        let input = TensorShape { height: image_size, width: image_size, channels };
        Self {
            arch: arch.into(),
            image_size,
            channels,
            classes,
            frozen_norm: false,
            fixed: Vec::new(),
            tensors: vec![input],
            ops: Vec::new(),
            part: None,
        }
    }

    pub fn input(&self) -> TensorId {
        0
    }

    /// The output of the last operation: the logits, or the activation that the next stage reads.
    pub fn logits(&self) -> TensorId {
        self.tensors.len() - 1
    }

    /// Name of the layer that produces the logits, with one row per class; fine-tuning to other classes replaces this layer.
    /// Empty if the last operation is not a linear layer.
    pub fn head(&self) -> &str {
        match self.ops.last() {
            Some(Op::Linear { name, .. }) => name,
            _ => "",
        }
    }

    /// The network without the layer that produces the logits: its output is the embedding, the result of global pooling.
    #[must_use]
    pub fn without_head(mut self) -> Self {
        if !self.head().is_empty() {
            self.ops.pop();
            self.tensors.pop();
        }
        self
    }

    /// The placement of an activation on the ranks of a model group.
    pub fn placement(&self, tensor: TensorId) -> &Placement {
        self.part.as_ref().map_or(&Placement::Batch, |part| &part.placements[tensor])
    }

    /// For an activation with split channels: this rank's channels, and the number of channels of the whole activation.
    pub(crate) fn split_channels(&self, tensor: TensorId) -> Option<(Range<usize>, usize)> {
        self.part.as_ref()?.channels(tensor)
    }

    /// The axes over which the pictures of an activation are distributed, besides `data`.
    pub fn axes(&self, tensor: TensorId) -> Axes {
        Axes { model: *self.placement(tensor) == Placement::Batch, height: self.rows(tensor).is_some() }
    }

    /// The rows of an activation that each rank of a height group has. `None` if every rank has all rows.
    pub fn rows(&self, tensor: TensorId) -> Option<&Rows> {
        self.part.as_ref().and_then(|part| part.rows[tensor].as_ref())
    }

    /// Number of pixels of one picture's whole activation, of which a rank of a height group may have only some rows.
    pub(crate) fn whole_pixels(&self, tensor: TensorId) -> usize {
        let shape = self.tensors[tensor];
        self.rows(tensor).map_or(shape.height, |rows| rows.whole) * shape.width
    }

    /// The weight of this rank in the mean over all rows. `pooled` is this rank's mean, the output of the global pooling.
    pub fn share_of_rows(&self, pooled: TensorId) -> f32 {
        let pooling = self.ops.iter().find(|op| op.output() == pooled);
        let Some(Op::GlobalAveragePool { input, .. }) = pooling else { return 1.0 };
        self.tensors[*input].pixels() as f32 / self.whole_pixels(*input) as f32
    }

    /// The index of this pipeline stage, and the number of stages. The input of each stage except the first is the
    /// output of the preceding stage; the output of the last stage is the logits.
    pub fn stage(&self) -> (usize, usize) {
        self.part.as_ref().map_or((0, 1), |part| (part.stage, part.stages))
    }

    /// Whether this stage computes the logits.
    pub(crate) fn is_last_stage(&self) -> bool {
        let (stage, stages) = self.stage();
        stage + 1 == stages
    }

    /// Whether an activation is the logits, in their final placement or before their last redistribution.
    pub(crate) fn has_logits(&self, tensor: TensorId) -> bool {
        let is_redistributed =
            matches!(self.ops.last(), Some(Op::Redistribute { input, .. }) if *input == tensor);
        self.is_last_stage() && (tensor == self.logits() || is_redistributed)
    }

    /// Number of rows of padding that an operation on `tensor` adds: 0 if the tensor already includes the padding.
    pub fn row_padding(&self, tensor: TensorId, padding: usize) -> usize {
        let includes_padding = |op: &Op| matches!(op, Op::Halo { output, .. } if *output == tensor);
        if self.ops.iter().any(includes_padding) { 0 } else { padding }
    }

    /// Whether an activation is the input pictures, which have no gradient.
    pub(crate) fn is_pictures(&self, tensor: TensorId) -> bool {
        let moves_pictures = |op: &Op| match op {
            Op::Redistribute { input, output } | Op::Halo { input, output, .. } => {
                *output == tensor && self.is_pictures(*input)
            }
            _ => false,
        };
        (tensor == self.input() && self.stage().0 == 0) || self.ops.iter().any(moves_pictures)
    }

    /// Every parameter and running statistic, in the order of torchvision's `state_dict`.
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut parameters = Vec::new();
        for op in &self.ops {
            let output = op.output();
            // Split outputs shorten a weight's first dimension. Split inputs, which make the output a partial sum, shorten the second.
            let split = match self.placement(output) {
                Placement::Channels(_) => Some((0, output)),
                Placement::Partial => Some((1, op.inputs()[0])),
                Placement::Batch | Placement::Whole => None,
            };
            let own_part = split.and_then(|(dimension, tensor)| {
                let (range, whole_channels) = self.split_channels(tensor)?;
                Some((dimension, range, whole_channels))
            });
            let mut push = |name: &str, suffix: &str, shape: Vec<usize>, role: Role| {
                let own_part = own_part.clone().filter(|(dimension, ..)| *dimension < shape.len());
                let slice = own_part.map(|(dimension, range, whole_channels)| {
                    let mut whole = shape.clone();
                    whole[dimension] = whole_channels;
                    Slice { dimension, range, whole }
                });
                parameters.push(Parameter { name: format!("{name}.{suffix}"), shape, role, slice });
            };
            let channels = |tensor: &TensorId| self.tensors[*tensor].channels;
            match op {
                Op::Conv { name, input, output, kernel, groups, .. } => {
                    let shape = vec![channels(output), channels(input) / groups, *kernel, *kernel];
                    push(name, "weight", shape, Role::ConvWeight);
                }
                Op::BatchNorm { name, output, .. } => {
                    let channels = vec![channels(output)];
                    let ends_branch =
                        self.ops.iter().any(|o| matches!(o, Op::Add { branch, .. } if branch == output));
                    push(name, "weight", channels.clone(), Role::Gamma { ends_branch });
                    push(name, "bias", channels.clone(), Role::Beta);
                    push(name, "running_mean", channels.clone(), Role::RunningMean);
                    push(name, "running_var", channels, Role::RunningVar);
                }
                Op::Linear { name, input, output } => {
                    let [inputs, outputs] = [input, output].map(|tensor| self.tensors[*tensor].len());
                    push(name, "weight", vec![outputs, inputs], Role::LinearWeight);
                    push(name, "bias", vec![outputs], Role::LinearBias);
                }
                Op::Gelu { bias: Some(name), output, .. } => {
                    push(name, "bias", vec![channels(output)], Role::Beta);
                }
                _ => {}
            }
        }
        parameters
    }

    /// Whether the optimizer changes `parameter` of this network.
    pub fn trains(&self, parameter: &Parameter) -> bool {
        let is_of_norm = matches!(parameter.role, Role::Gamma { .. } | Role::Beta);
        let is_fixed = self.frozen_norm && is_of_norm || self.fixed.contains(&parameter.name);
        parameter.role.is_trained() && !is_fixed
    }

    /// Number of values of weights and biases, without running statistics.
    pub fn parameter_count(&self) -> usize {
        self.parameters().iter().filter(|p| p.role.is_trained()).map(Parameter::len).sum()
    }

    /// The same whole network for pictures of another size: the parameters are equal, the shapes of activations are not.
    #[must_use]
    pub fn resized(&self, image_size: usize) -> Self {
        let mut tensors = self.tensors.clone();
        tensors[self.input()] =
            TensorShape { height: image_size, width: image_size, channels: self.channels };
        for op in &self.ops {
            let (from, to) = (tensors[op.inputs()[0]], &mut tensors[op.output()]);
            (to.height, to.width) = match *op {
                Op::Conv { kernel, stride, padding, .. } | Op::MaxPool { kernel, stride, padding, .. } => {
                    let shape = Self::windows(from, [kernel, stride, padding], to.channels);
                    (shape.height, shape.width)
                }
                Op::GlobalAveragePool { .. } | Op::Linear { .. } => (1, 1),
                _ => (from.height, from.width),
            };
        }
        Self { image_size, tensors, ..self.clone() }
    }

    fn push(&mut self, shape: TensorShape, op: impl FnOnce(TensorId) -> Op) -> TensorId {
        let output = self.tensors.len();
        self.tensors.push(shape);
        self.ops.push(op(output));
        output
    }

    /// Shape of the output of square windows of `kernel` pixels that move by `stride` over an activation with padding.
    fn windows(input: TensorShape, [kernel, stride, padding]: [usize; 3], channels: usize) -> TensorShape {
        let side = |side: usize| (side + 2 * padding).saturating_sub(kernel) / stride + 1;
        TensorShape { height: side(input.height), width: side(input.width), channels }
    }

    /// Appends a convolution with "same" padding, `kernel / 2`.
    pub fn conv(
        &mut self,
        name: impl Into<String>,
        input: TensorId,
        channels: usize,
        kernel: usize,
        stride: usize,
    ) -> TensorId {
        self.padded_conv(name, input, channels, (kernel, stride, kernel / 2), 1)
    }

    /// Appends a convolution with any padding, in `groups` groups of channels. `groups` must divide the channels of input and output.
    pub fn padded_conv(
        &mut self,
        name: impl Into<String>,
        input: TensorId,
        channels: usize,
        (kernel, stride, padding): (usize, usize, usize),
        groups: usize,
    ) -> TensorId {
        let (input_shape, name) = (self.tensors[input], name.into());
        assert!(
            groups > 0 && input_shape.channels.is_multiple_of(groups) && channels.is_multiple_of(groups),
            "{name}: {groups} groups of {} -> {channels} channels",
            input_shape.channels
        );
        let shape = Self::windows(input_shape, [kernel, stride, padding], channels);
        self.push(shape, |output| Op::Conv { name, input, output, kernel, stride, padding, groups })
    }

    pub fn batch_norm(&mut self, name: impl Into<String>, input: TensorId) -> TensorId {
        let name = name.into();
        self.push(self.tensors[input], |output| Op::BatchNorm { name, input, output })
    }

    pub fn relu(&mut self, input: TensorId) -> TensorId {
        self.push(self.tensors[input], |output| Op::Relu { input, output })
    }

    /// Appends a GELU of `input`, or of `input` plus the parameter `<bias>.bias`.
    pub fn gelu(&mut self, bias: Option<&str>, input: TensorId) -> TensorId {
        let bias = bias.map(str::to_owned);
        self.push(self.tensors[input], |output| Op::Gelu { bias, input, output })
    }

    /// Appends the end of a residual block.
    pub fn add(&mut self, branch: TensorId, shortcut: TensorId) -> TensorId {
        self.push(self.tensors[branch], |output| Op::Add { branch, shortcut, output })
    }

    /// Appends a max pooling with padding `kernel / 2`.
    pub fn max_pool(&mut self, input: TensorId, kernel: usize, stride: usize) -> TensorId {
        self.padded_max_pool(input, kernel, stride, kernel / 2)
    }

    /// Appends a max pooling with any padding.
    pub(super) fn padded_max_pool(
        &mut self,
        input: TensorId,
        kernel: usize,
        stride: usize,
        padding: usize,
    ) -> TensorId {
        let input_shape = self.tensors[input];
        let shape = Self::windows(input_shape, [kernel, stride, padding], input_shape.channels);
        self.push(shape, |output| Op::MaxPool { input, output, kernel, stride, padding })
    }

    pub fn global_average_pool(&mut self, input: TensorId) -> TensorId {
        let shape = TensorShape { height: 1, width: 1, channels: self.tensors[input].channels };
        self.push(shape, |output| Op::GlobalAveragePool { input, output })
    }

    pub fn linear(&mut self, name: impl Into<String>, input: TensorId, outputs: usize) -> TensorId {
        let (name, shape) = (name.into(), TensorShape { height: 1, width: 1, channels: outputs });
        self.push(shape, |output| Op::Linear { name, input, output })
    }
}
