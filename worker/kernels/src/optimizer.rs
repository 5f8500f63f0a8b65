//! Optimizers: settings, and formulas over flat ranges. SGD with momentum exactly as in PyTorch, LARS, AdamW, LAMB and Muon.
//! The CUDA engine's kernels (`optimizer.cu`, `adam.cu`, `muon.cu`) use the same formulas.

use crate::{
    conv::{self, ConvShape},
    orthogonal,
    simd::with_simd,
};
use lockstep_protocol::spec::{OptimizerKind, TrainSpec};

/// Trust coefficient eta of LARS: the value of You, Gitman and Ginsburg (2017), section 5.
pub const LARS_TRUST: f32 = 0.001;

/// Maximum number of slots of an optimizer.
pub const MAX_SLOTS: usize = 2;

/// An optimizer's settings, which stay the same during a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Optimizer {
    pub kind: OptimizerKind,
    /// For SGD and LARS, and with Muon for all parameters except filters.
    pub momentum: f32,
    /// For Muon: the momentum of filters.
    pub filter_momentum: f32,
    /// For Muon: the learning rate of batch norms and of biases outside linear layers, as a multiple of the step's learning rate.
    pub bias_lr: f32,
    /// For Muon: the learning rate of linear layers, including their biases, as a multiple of the step's learning rate.
    pub head_lr: f32,
    pub weight_decay: f32,
    /// Whether batch norm's parameters and biases are treated as weights: with weight decay and, with LAMB, adapted rates. LARS ignores
    /// this setting.
    pub decay_norm_and_bias: bool,
    /// For AdamW and LAMB. In float64 as in PyTorch: 1 - 0.999 has a relative error of 1e-5 in float32.
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
}

/// The kinds of parameters that optimizers treat differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterKind {
    /// The weights of a convolution.
    Filters,
    LinearWeight,
    LinearBias,
    /// A batch norm's parameter, or another bias.
    Vector,
}

impl ParameterKind {
    /// Whether the parameter is the weight of a convolution or linear layer.
    pub fn is_weight(self) -> bool {
        matches!(self, ParameterKind::Filters | ParameterKind::LinearWeight)
    }
}

/// How one parameter is updated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParameterPolicy {
    /// Weight decay.
    pub decay: f32,
    /// The learning rate, as a multiple of the step's learning rate.
    pub rate: f32,
    /// Whether the update depends on the whole parameter: on the norms of the parameter and of its gradient or, with Muon, on the
    /// matrix of all filters.
    pub is_adapted: bool,
    /// Whether the parameter and its optimizer slots never change.
    pub is_frozen: bool,
}

impl ParameterPolicy {
    /// The policy of a parameter that never changes.
    pub const FROZEN: Self = Self { decay: 0.0, rate: 0.0, is_adapted: false, is_frozen: true };
}

impl Default for Optimizer {
    fn default() -> Self {
        Self::from(&TrainSpec::default())
    }
}

impl From<&TrainSpec> for Optimizer {
    fn from(spec: &TrainSpec) -> Self {
        Self {
            kind: spec.optimizer,
            momentum: spec.momentum,
            filter_momentum: spec.filter_momentum,
            bias_lr: spec.bias_lr,
            head_lr: spec.head_lr,
            weight_decay: spec.weight_decay,
            decay_norm_and_bias: spec.decay_norm_and_bias,
            beta1: spec.beta1,
            beta2: spec.beta2,
            epsilon: spec.epsilon,
        }
    }
}

impl Optimizer {
    /// Names of the slots kept for each parameter. Slots are float32, and initially zero.
    pub fn slots(&self) -> &'static [&'static str] {
        slots(self.kind)
    }

    /// Whether a parameter's update needs norms of the whole parameter.
    pub fn needs_norms(&self) -> bool {
        matches!(self.kind, OptimizerKind::Lars | OptimizerKind::Lamb)
    }

    /// Whether the update of filters is an orthogonalised matrix.
    pub fn is_muon(&self) -> bool {
        self.kind == OptimizerKind::Muon
    }

    /// The policy of a parameter of this kind.
    pub fn policy_of(&self, kind: ParameterKind) -> ParameterPolicy {
        let plain = self.policy(kind.is_weight());
        if !self.is_muon() {
            return plain;
        }
        let rate = match kind {
            ParameterKind::Filters => return ParameterPolicy { decay: 0.0, is_adapted: true, ..plain },
            ParameterKind::LinearWeight | ParameterKind::LinearBias => self.head_lr,
            ParameterKind::Vector => self.bias_lr,
        };
        // The parameter decays by the step's learning rate times the weight decay, whatever its own learning rate is.
        ParameterPolicy { rate, decay: plain.decay / rate, ..plain }
    }

    /// The policy of a parameter without Muon's special cases, which [`Optimizer::policy_of`] adds. `is_weight`: the parameter is the
    /// weight of a convolution or linear layer, not a bias or a parameter of a batch norm.
    pub fn policy(&self, is_weight: bool) -> ParameterPolicy {
        let decayed = match self.kind {
            OptimizerKind::Lars => is_weight,
            _ => is_weight || self.decay_norm_and_bias,
        };
        ParameterPolicy {
            decay: if decayed { self.weight_decay } else { 0.0 },
            rate: 1.0,
            is_adapted: decayed && self.needs_norms(),
            is_frozen: false,
        }
    }
}

/// [`Optimizer::slots`] of optimizers of `kind`. Optimizers with equal slots can continue from each other's state.
pub fn slots(kind: OptimizerKind) -> &'static [&'static str] {
    match kind {
        OptimizerKind::Momentum | OptimizerKind::Nesterov | OptimizerKind::Lars | OptimizerKind::Muon => {
            &["momentum"]
        }
        OptimizerKind::AdamW | OptimizerKind::Lamb => &["exp_avg", "exp_avg_sq"],
    }
}

/// A sum of squares in double precision, in an order that depends only on the number of values.
#[derive(Debug, Clone, Copy, Default)]
pub struct SquareSum {
    lanes: [f64; 16],
    rest: f64,
}

impl SquareSum {
    /// Adds the squares of `values`. The number of values must be a multiple of 16, except in the last call.
    pub fn add(&mut self, values: &[f32]) {
        with_simd(
            #[inline(always)]
            || self.add_inline(values),
        );
    }

    #[inline(always)]
    fn add_inline(&mut self, values: &[f32]) {
        let rows = values.chunks_exact(16);
        self.rest += rows.remainder().iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>();
        for row in rows {
            for (lane, &v) in self.lanes.iter_mut().zip(row) {
                *lane += f64::from(v) * f64::from(v);
            }
        }
    }

    pub fn sum(&self) -> f64 {
        self.lanes.iter().sum::<f64>() + self.rest
    }
}

/// One parameter's slots, in the order of [`Optimizer::slots`]; slots that the optimizer does not have are empty.
pub type Slots<'a> = [&'a mut [f32]; MAX_SLOTS];

/// One step's update.
///
/// An optimizer with layer-wise rates ([`Optimizer::needs_norms`]) needs two passes over a parameter: [`Update::prepare`] for the
/// whole parameter, then, with its norms, [`Update::apply`]. Muon needs [`Update::prepare`] and then [`Update::orthogonalise`] for filters.
/// Other optimizers, and Muon for other parameters, need only [`Update::apply`].
#[derive(Debug, Clone, Copy)]
pub struct Update {
    optimizer: Optimizer,
    lr: f32,
    adam: Adam,
}

/// Constants of Adam's formulas at step `t`, computed in float64 as in PyTorch.
#[derive(Debug, Clone, Copy)]
struct Adam {
    beta1: f32,
    beta2: f32,
    /// `1 - beta1`.
    rest1: f32,
    /// `1 - beta2`.
    rest2: f32,
    epsilon: f32,
    /// `1 - beta1^t`.
    correction1: f64,
    /// `sqrt(1 - beta2^t)`.
    root2: f32,
}

impl Adam {
    fn new(optimizer: &Optimizer, step: u64) -> Self {
        let Optimizer { beta1, beta2, epsilon, .. } = *optimizer;
        let correction = |beta: f64| 1.0 - libm::pow(beta, step as f64);
        Self {
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            rest1: (1.0 - beta1) as f32,
            rest2: (1.0 - beta2) as f32,
            epsilon: epsilon as f32,
            correction1: correction(beta1),
            root2: correction(beta2).sqrt() as f32,
        }
    }

    /// Updates the moments with a gradient and returns the first moment's divisor.
    #[inline(always)]
    fn update_moments(&self, m: &mut f32, v: &mut f32, g: f32) -> f32 {
        *m = self.beta1 * *m + self.rest1 * g;
        *v = self.beta2 * *v + self.rest2 * g * g;
        v.sqrt() / self.root2 + self.epsilon
    }
}

impl Update {
    /// The update of step `step` (from 1) at learning rate `lr`.
    pub fn new(optimizer: &Optimizer, lr: f32, step: u64) -> Self {
        Self { optimizer: *optimizer, lr, adam: Adam::new(optimizer, step) }
    }

    /// Learning rate and weight decay of a parameter. `norms` returns the norms of the result of [`Update::prepare`] and of the
    /// weights; it is called only for adapted parameters. `d` is the weight decay, `r` the result of [`Update::prepare`].
    ///
    /// - lars: the rate is `lr local` with `local = eta |w| / (|g| + d |w|)`
    /// - lamb: the rate is `lr |w| / |r|`
    pub fn rates(&self, policy: ParameterPolicy, norms: impl FnOnce() -> [f64; 2]) -> (f32, f32) {
        let ParameterPolicy { decay, rate, is_adapted, .. } = policy;
        if !is_adapted || self.optimizer.is_muon() {
            return (self.lr * rate, decay);
        }
        let [update_norm, weight_norm] = norms();
        let (trust, divisor) = match self.optimizer.kind {
            OptimizerKind::Lars => (f64::from(LARS_TRUST), update_norm + f64::from(decay) * weight_norm),
            _ => (1.0, update_norm),
        };
        // With a rate of 0, a parameter that is all zeros could never change.
        let is_defined = weight_norm > 0.0 && divisor > 0.0;
        let local = if is_defined { (trust * weight_norm / divisor) as f32 } else { 1.0 };
        (self.lr * local, decay)
    }

    /// The first of two passes: replaces the gradient `g` of the weights `w` by the unscaled update. `d` is the weight decay, and `m` the
    /// momentum or, with LAMB, the first moment.
    ///
    /// - lars: the gradient itself
    /// - lamb: moments as Adam's, `r = (m / (1 - beta1^t)) / (sqrt(v) / sqrt(1 - beta2^t) + epsilon) + d w`
    /// - muon: for filters `v = m v + g` and then `g + m v`; for other parameters the gradient itself
    pub fn prepare(&self, policy: ParameterPolicy, w: &[f32], slots: Slots<'_>, g: &mut [f32]) {
        with_simd(
            #[inline(always)]
            || self.prepare_inline(policy, w, slots, g),
        );
    }

    #[inline(always)]
    fn prepare_inline(&self, policy: ParameterPolicy, w: &[f32], [first, second]: Slots<'_>, g: &mut [f32]) {
        let ParameterPolicy { decay, is_adapted, .. } = policy;
        if self.optimizer.is_muon() && is_adapted {
            let momentum = self.optimizer.filter_momentum;
            for (g, v) in g.iter_mut().zip(first.iter_mut()) {
                *v = momentum * *v + *g;
                *g += momentum * *v;
            }
        }
        if self.optimizer.kind != OptimizerKind::Lamb {
            return;
        }
        let (adam, scale) = (self.adam, (1.0 / self.adam.correction1) as f32);
        for (((g, w), m), v) in g.iter_mut().zip(w).zip(first).zip(second) {
            let divisor = adam.update_moments(m, v, *g);
            *g = *m * scale / divisor + decay * w;
        }
    }

    /// Muon's update of all filters `w` of one convolution of shape `shape`: `w = sqrt(rows) w / |w| - lr u`, where `u` is the
    /// [orthogonalised](orthogonal::orthogonalise) result of [`Update::prepare`], `prepared`.
    pub fn orthogonalise(&self, shape: &ConvShape, w: &mut [f32], prepared: &[f32]) {
        let (mut matrix, mut u) = (vec![0.0; w.len()], vec![0.0; w.len()]);
        conv::weight_to_oihw(shape, prepared, &mut matrix);
        orthogonal::orthogonalise(shape.out_c, &mut matrix);
        conv::weight_from_oihw(shape, &matrix, &mut u);
        let norm = orthogonal::norm(w);
        let scale = if norm > 0.0 { ((shape.out_c as f64).sqrt() / norm) as f32 } else { 1.0 };
        for (w, u) in w.iter_mut().zip(&u) {
            *w = scale * *w - self.lr * u;
        }
    }

    /// Updates weights `w` of one parameter, and its slots, from the gradient `g` (or the result `r` of [`Update::prepare`])
    /// and the rates of [`Update::rates`]. `d` is the weight decay, and `m` the momentum or, with AdamW, the first moment.
    ///
    /// - momentum: `v = m v + (g + d w)`, `w -= lr v`
    /// - nesterov, and muon except for filters: the same `v`, `w -= lr (g + d w + m v)`
    /// - lars: `v = m v + lr (g + d w)`, `w -= v` (algorithm 1 of the paper)
    /// - adamw: `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`, `w = (1 - lr d) w`,
    ///   `w -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)`
    /// - lamb: `w -= lr r`
    pub fn apply(&self, rate: f32, decay: f32, w: &mut [f32], slots: Slots<'_>, g: &[f32]) {
        with_simd(
            #[inline(always)]
            || self.apply_inline(rate, decay, w, slots, g),
        );
    }

    #[inline(always)]
    fn apply_inline(&self, rate: f32, decay: f32, w: &mut [f32], [first, second]: Slots<'_>, g: &[f32]) {
        let m = self.optimizer.momentum;
        let values = w.iter_mut().zip(first.iter_mut()).zip(g);
        match self.optimizer.kind {
            OptimizerKind::Momentum => values.for_each(|((w, v), g)| {
                *v = m * *v + (g + decay * *w);
                *w -= rate * *v;
            }),
            OptimizerKind::Nesterov | OptimizerKind::Muon => values.for_each(|((w, v), g)| {
                let d = g + decay * *w;
                *v = m * *v + d;
                *w -= rate * (d + m * *v);
            }),
            OptimizerKind::Lars => values.for_each(|((w, v), g)| {
                *v = m * *v + rate * (g + decay * *w);
                *w -= *v;
            }),
            OptimizerKind::AdamW => {
                let adam = self.adam;
                let decay_factor = (1.0 - f64::from(rate) * f64::from(decay)) as f32;
                let step_size = (f64::from(rate) / adam.correction1) as f32;
                values.zip(second.iter_mut()).for_each(|(((w, m), g), v)| {
                    let divisor = adam.update_moments(m, v, *g);
                    *w = *w * decay_factor - step_size * (*m / divisor);
                });
            }
            OptimizerKind::Lamb => values.for_each(|((w, _), r)| *w -= rate * r),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_decides_whether_norms_and_biases_are_decayed_and_adapted() {
        let treat = |kind, decay_norm_and_bias, is_weight| {
            let optimizer =
                Optimizer { kind, weight_decay: 0.1, decay_norm_and_bias, ..Optimizer::default() };
            let ParameterPolicy { decay, is_adapted, .. } = optimizer.policy(is_weight);
            (decay, is_adapted)
        };
        for kind in OptimizerKind::ALL {
            let is_layer_wise = matches!(kind, OptimizerKind::Lars | OptimizerKind::Lamb);
            for decay_norm_and_bias in [true, false] {
                assert_eq!(treat(kind, decay_norm_and_bias, true), (0.1, is_layer_wise), "{kind:?}");
            }
            assert_eq!(treat(kind, false, false), (0.0, false), "{kind:?}");
            let expected = if kind == OptimizerKind::Lars { (0.0, false) } else { (0.1, is_layer_wise) };
            assert_eq!(treat(kind, true, false), expected, "{kind:?}");
        }
    }

    /// Updates a whole parameter as an engine does, at learning rate 1 and with slots of zeros.
    fn step(optimizer: Optimizer, is_weight: bool, w: &mut [f32], g: &[f32]) {
        let norm = |values: &[f32]| {
            let mut squares = SquareSum::default();
            squares.add(values);
            squares.sum().sqrt()
        };
        let (update, policy) = (Update::new(&optimizer, 1.0, 1), optimizer.policy(is_weight));
        let [mut a, mut b] = [(); 2].map(|()| vec![0.0; g.len()]);
        let mut g = g.to_vec();
        if optimizer.needs_norms() {
            update.prepare(policy, w, [&mut a, &mut b], &mut g);
        }
        let (rate, decay) = update.rates(policy, || [norm(&g), norm(w)]);
        update.apply(rate, decay, w, [&mut a, &mut b], &g);
    }

    #[test]
    fn a_lars_step_is_proportional_to_the_weights_norm_for_any_gradient() {
        let lars =
            Optimizer { kind: OptimizerKind::Lars, momentum: 0.0, weight_decay: 0.0, ..Optimizer::default() };
        for size in [1e-3f32, 1.0, 1e3] {
            let mut w = vec![3.0, 4.0];
            step(lars, true, &mut w, &[size, 0.0]);
            assert!((w[0] - (3.0 - 5.0 * LARS_TRUST)).abs() < 1e-6 && w[1] == 4.0, "{w:?}");
        }
        let mut w = vec![3.0, 4.0];
        step(Optimizer { weight_decay: 0.1, ..lars }, false, &mut w, &[1.0, 0.0]);
        assert_eq!(w, [2.0, 4.0], "a bias is neither adapted nor decayed");
    }

    #[test]
    fn lamb_s_first_step_is_as_long_as_the_weights_for_any_gradient() {
        let lamb =
            Optimizer { kind: OptimizerKind::Lamb, decay_norm_and_bias: false, ..Optimizer::default() };
        for size in [1e-3f32, 1.0, 1e3] {
            let mut w = vec![3.0, 4.0];
            step(lamb, true, &mut w, &[size, 0.0]);
            assert!((w[0] + 2.0).abs() < 1e-4 && w[1] == 4.0, "{w:?}");
        }
        let mut w = vec![0.0, 0.0];
        step(lamb, true, &mut w, &[7.0, -7.0]);
        assert!(w[0] < -0.999 && w[1] > 0.999, "weights that are all zeros leave zero: {w:?}");
        let mut w = vec![3.0, 4.0];
        step(Optimizer { weight_decay: 0.1, ..lamb }, false, &mut w, &[7.0, 0.0]);
        assert!((w[0] - 2.0).abs() < 1e-6 && w[1] == 4.0, "a bias is neither adapted nor decayed: {w:?}");
    }

    #[test]
    fn adamw_decays_weights_without_gradients() {
        let adamw = Optimizer { kind: OptimizerKind::AdamW, weight_decay: 0.25, ..Optimizer::default() };
        let mut w = vec![4.0, 4.0];
        step(adamw, true, &mut w, &[0.0, 1e-3]);
        assert!(
            w[0] == 3.0 && (w[1] - 2.0).abs() < 1e-4,
            "a weight with a gradient also moves by the learning rate: {w:?}"
        );
    }
}
