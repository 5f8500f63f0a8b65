//! Optimizer updates over flat buffers; `optimizer.cu`.
//!
//! All flat buffers have the same order: matrices (the weights of convolutions and linear layers), then vectors (batch
//! norms' parameters and biases). Each parameter begins and ends at a multiple of 8 values.

use super::{
    Arg, CONTROL, FINISHED_STEPS, Geometry, Kernel, NORM_COUNTER, Operand, Ops, SCALER, kernel, plain,
};
use lockstep_kernels::optimizer::LARS_TRUST;
use std::ops::Range;

/// Number of blocks that compute the norm of one parameter.
pub(in crate::cuda) const NORM_PARTS: u32 = 16;

/// A step's gradients, multiplied by the loss scale.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Gradients {
    /// T, or float32 if `is_float32`.
    pub(in crate::cuda) matrices: Operand,
    /// float32.
    pub(in crate::cuda) vectors: Operand,
    /// Number of values of the matrices.
    pub(in crate::cuda) matrix_length: u64,
    /// Number of values of matrices and vectors.
    pub(in crate::cuda) length: u64,
    /// Whether the matrices' gradients are float32, as sums over micro-batches are.
    pub(in crate::cuda) is_float32: bool,
}

impl Gradients {
    /// The gradients of a range of the matrices and of a range of the vectors. Both ranges count from the first matrix.
    pub(in crate::cuda) fn part(self, matrices: Range<usize>, vectors: Range<usize>) -> Self {
        let matrix_length = self.matrix_length as usize;
        let size = self.matrices.bytes / matrix_length.max(1);
        Self {
            matrices: self.matrices.part(size * matrices.start, size * matrices.len()),
            vectors: self.vectors.part(4 * (vectors.start - matrix_length), 4 * vectors.len()),
            matrix_length: matrices.len() as u64,
            length: (matrices.len() + vectors.len()) as u64,
            ..self
        }
    }

    pub(super) fn args(self) -> [Arg; 5] {
        [
            Arg::In(self.matrices),
            Arg::In(self.vectors),
            Arg::U64(self.matrix_length),
            Arg::U64(self.length),
            Arg::U32(self.is_float32.into()),
        ]
    }
}

/// The operands of every optimizer's update: weights, gradients and weight decay.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct FlatParameters {
    /// float32, in the same order as the optimizer's slots. If `is_planar`, the plane of differences from the nearest bfloat16.
    pub(in crate::cuda) weights: Operand,
    /// The matrices as T; may be absent.
    pub(in crate::cuda) low_precision: Operand,
    /// Whether the weights are stored in two planes of 16 bits (`planes.rs`). SGD and AdamW support this with bfloat16.
    pub(in crate::cuda) is_planar: bool,
    pub(in crate::cuda) gradients: Gradients,
    /// Weight decay of the matrices, then of the vectors.
    pub(in crate::cuda) decay: [f32; 2],
}

impl FlatParameters {
    /// The weights and their low-precision copy. Both are `InOut`, because a step with non-finite gradients keeps their values.
    pub(super) fn weights_args(&self) -> [Arg; 2] {
        [Arg::InOut(self.weights), Arg::InOut(self.low_precision)]
    }
}

/// Learning rates by parameter.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Rates {
    /// `u64 offset, length; u32 adapted, 0` for each parameter, in order. `adapted` is 1 if LARS and LAMB scale the rate by norms.
    pub(in crate::cuda) segments: Operand,
    pub(in crate::cuda) count: u32,
    /// 8 bytes for each parameter: `f32 rate, decay` (LARS, LAMB), or `FilterNorms` of `muon.cu` for each filter.
    pub(in crate::cuda) per_parameter: Operand,
    /// `f64 [NORM_PARTS][2]` for each parameter: partial sums of squares for the norms. On a GPU that has all
    /// parameters, this is [`Ops::partials`].
    pub(in crate::cuda) squares: Operand,
}

impl Rates {
    /// The grid of kernels that compute the norms of all parameters.
    pub(super) fn norm_blocks(&self) -> [u32; 3] {
        [NORM_PARTS, self.count.max(1), 1]
    }
}

/// The update rule, with the formulas of the CPU engine (`worker/kernels/src/optimizer.rs`).
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) enum Update {
    Momentum,
    Nesterov,
    /// LARS, with the rates of [`Ops::lars_rates`].
    Lars(Rates),
}

impl Ops {
    /// Computes the norm of the gradients and the state that depends on it, in `Scaler`: `f32 scale; u32 good_steps; u32 finite; f32 norm;
    /// f32 inverse; u32 apply, updates, refused, updating, 0; u64 held`. The host initialises `scale` (1 without scaling), `updates` if a
    /// run continues, `held` (the address of a `u32` in host memory that stops further updates if set, or 0), and all other fields to 0. If
    /// `is_dynamic`, halves the scale if a gradient is not finite, and doubles the scale after 2,000 finite steps.
    pub(in crate::cuda) fn gradient_norm(&self, gradients: Gradients, is_dynamic: bool) -> Kernel {
        let mut args = gradients.args().to_vec();
        args.extend([Arg::InOut(SCALER), Arg::U32(is_dynamic.into())]);
        args.extend([Arg::Out(self.partials()), self.counter(NORM_COUNTER)]);
        kernel("gradient_norm", self.norm_geometry(gradients), args)
    }

    /// [`Ops::gradient_norm`] where ranks have parts of some parameters. `others` are `count` sums of squares (f64) of
    /// gradients that are not in `gradients`.
    pub(in crate::cuda) fn gradient_norm_of_parts(
        &self,
        gradients: Gradients,
        is_dynamic: bool,
        others: Operand,
        count: u32,
    ) -> Kernel {
        let Kernel { geometry, mut args, .. } = self.gradient_norm(gradients, is_dynamic);
        // After the arguments of the gradients.
        args.splice(5..5, [Arg::In(others), Arg::U32(count)]);
        kernel("gradient_norm_of_parts", geometry, args)
    }

    /// `to` (f64) = the sum of squares of the gradients.
    pub(in crate::cuda) fn gradient_squares(&self, gradients: Gradients, to: Operand) -> Kernel {
        let mut args = gradients.args().to_vec();
        args.extend([Arg::Out(to), Arg::Out(self.partials()), self.counter(NORM_COUNTER)]);
        kernel("gradient_squares", self.norm_geometry(gradients), args)
    }

    /// Geometry of kernels that read all gradients.
    fn norm_geometry(&self, gradients: Gradients) -> Geometry {
        let blocks = (gradients.length / 8).div_ceil(512).clamp(1, u64::from(self.multiprocessors) * 2);
        plain([blocks as u32, 1, 1], [512, 1, 1])
    }

    /// Sums the squares of each parameter's weights and gradients into `rates.squares`. Runs after [`Ops::gradient_norm`].
    pub(in crate::cuda) fn lars_norms(&self, flat: FlatParameters, rates: Rates) -> Kernel {
        let mut args = vec![Arg::In(flat.weights)];
        args.extend(flat.gradients.args());
        args.extend([Arg::In(rates.segments), Arg::Out(rates.squares)]);
        kernel("lars_norms", plain(rates.norm_blocks(), [256, 1, 1]), args)
    }

    /// Computes the rate of each parameter. Runs after [`Ops::lars_norms`]. `decay` is the weight decay of the parameters whose rate LARS
    /// scales by norms.
    pub(in crate::cuda) fn lars_rates(&self, rates: Rates, decay: f32) -> Kernel {
        let mut args = vec![Arg::In(rates.squares), Arg::In(rates.segments), Arg::U32(rates.count)];
        args.extend([Arg::In(SCALER), Arg::F32(LARS_TRUST), Arg::F32(decay), Arg::Out(rates.per_parameter)]);
        kernel("lars_rates", plain([rates.count.div_ceil(128), 1, 1], [128, 1, 1]), args)
    }

    /// One step of all weights by SGD or LARS. `velocity` has the momentum buffers. Runs after [`Ops::gradient_norm`]. Traffic: 20 bytes
    /// per value in the 16-bit formats.
    pub(in crate::cuda) fn sgd(
        &self,
        update: Update,
        flat: FlatParameters,
        velocity: Operand,
        momentum: f32,
    ) -> Kernel {
        let none =
            Rates { segments: Operand::NONE, count: 0, per_parameter: Operand::NONE, squares: Operand::NONE };
        let (name, Rates { segments, count, per_parameter, .. }) = match (update, flat.is_planar) {
            (Update::Momentum, false) => ("sgd_momentum", none),
            (Update::Momentum, true) => ("sgd_momentum_planes", none),
            (Update::Nesterov, false) => ("sgd_nesterov", none),
            (Update::Nesterov, true) => ("sgd_nesterov_planes", none),
            (Update::Lars(rates), _) => ("sgd_lars", rates),
        };
        let [weights, low_precision] = flat.weights_args();
        let mut args = vec![weights, Arg::InOut(velocity), low_precision];
        args.extend(flat.gradients.args());
        args.extend([Arg::In(CONTROL), Arg::In(SCALER), Arg::F32(momentum)]);
        args.extend(flat.decay.map(Arg::F32));
        args.extend([Arg::In(segments), Arg::In(per_parameter), Arg::U32(count)]);
        kernel(name, self.per_item(flat.gradients.length / 8, 6), args)
    }

    /// sum (float32) += gradient (T) or, with `overwrite`, sum = gradient; `length` values, a multiple of 8.
    pub(in crate::cuda) fn accumulate_gradients(
        &self,
        sum: Operand,
        gradient: Operand,
        length: u64,
        overwrite: bool,
    ) -> Kernel {
        let sum = Arg::out(sum, !overwrite);
        let args = [sum, Arg::In(gradient), Arg::U64(length), Arg::U32(overwrite.into())];
        kernel("accumulate_gradients", self.per_item(length / 8, 8), args)
    }

    /// average = decay average + (1 - decay) values; `length` float32 values. Does nothing if the number of finished steps is not `steps`.
    pub(in crate::cuda) fn average(
        &self,
        average: Operand,
        values: Operand,
        length: u64,
        decay: f64,
        steps: u32,
    ) -> Kernel {
        let args = [
            Arg::InOut(average),
            Arg::In(values),
            Arg::U64(length),
            Arg::F32((1.0 - decay) as f32),
            Arg::In(FINISHED_STEPS),
            Arg::U32(steps),
        ];
        kernel("average_values", self.per_item(length, 8), args)
    }

    /// [`Ops::average`] for weights in two planes (`planes.rs`); `length` is a multiple of 8.
    pub(in crate::cuda) fn average_planes(
        &self,
        average: Operand,
        [differences, nearest]: [Operand; 2],
        length: u64,
        decay: f64,
        steps: u32,
    ) -> Kernel {
        let Kernel { mut args, .. } = self.average(average, differences, length, decay, steps);
        args.insert(2, Arg::In(nearest));
        kernel("average_planes", self.per_item(length / 8, 8), args)
    }

    /// [`Ops::find_not_finite`] for `length` bfloat16 values.
    pub(in crate::cuda) fn find_not_finite_nearest(
        &self,
        values: Operand,
        length: u64,
        found: Operand,
    ) -> Kernel {
        let Kernel { geometry, args, .. } = self.find_not_finite(values, length, found);
        kernel("find_not_finite_nearest", geometry, args)
    }

    /// Sets `found` (`u32`) to 1 if any of `length` float32 values is not finite.
    pub(in crate::cuda) fn find_not_finite(&self, values: Operand, length: u64, found: Operand) -> Kernel {
        let args = [Arg::In(values), Arg::U64(length), Arg::InOut(found)];
        kernel("find_not_finite", self.per_item(length, 8), args)
    }

    /// Adds a checksum of `length` values of 4 bytes to `sum` (`u64`).
    pub(in crate::cuda) fn add_checksum(&self, values: Operand, length: u64, sum: Operand) -> Kernel {
        let args = [Arg::In(values), Arg::U64(length), Arg::InOut(sum)];
        kernel("add_checksum", self.per_item(length, 4), args)
    }
}
