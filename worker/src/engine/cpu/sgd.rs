//! Optimizers: SGD with momentum exactly as PyTorch's, and LARS.

use lockstep_protocol::spec::OptimizerKind;

/// Trust coefficient eta of LARS: the value of You, Gitman and Ginsburg (2017), section 5.
pub(in crate::engine) const LARS_TRUST: f32 = 0.001;

/// What stays the same over a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sgd {
    pub(super) kind: OptimizerKind,
    pub(super) momentum: f32,
    pub(super) weight_decay: f32,
}

/// A sum of squares in double precision, in an order that depends on the number of values alone.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lanes {
    lanes: [f64; 16],
    rest: f64,
}

impl Lanes {
    /// Adds those of `values`: a multiple of 16, or the last ones.
    #[inline(always)]
    pub(super) fn add(&mut self, values: &[f32]) {
        let rows = values.chunks_exact(16);
        self.rest += rows.remainder().iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>();
        for row in rows {
            for (lane, &v) in self.lanes.iter_mut().zip(row) {
                *lane += f64::from(v) * f64::from(v);
            }
        }
    }

    pub(super) fn sum(&self) -> f64 {
        self.lanes.iter().sum::<f64>() + self.rest
    }
}

impl Sgd {
    /// Whether a parameter's update needs the norms of all of it.
    pub(super) fn needs_norms(&self) -> bool {
        self.kind == OptimizerKind::Lars
    }

    /// Learning rate and weight decay of a parameter. `norms` are those of its gradient and of its weights, asked for
    /// only where [`Sgd::needs_norms`].
    ///
    /// With lars, weights of convolutions and linear layers are `adapted`: their rate is `lr local` with
    /// `local = eta |w| / (|g| + d |w|)`. Parameters of batch norms and biases have `local = 1` and no weight decay.
    pub(super) fn rates(&self, lr: f32, adapted: bool, norms: impl FnOnce() -> [f64; 2]) -> (f32, f32) {
        match self.kind {
            OptimizerKind::Lars if adapted => (lr * self.local_rate(norms()), self.weight_decay),
            OptimizerKind::Lars => (lr, 0.0),
            OptimizerKind::Momentum | OptimizerKind::Nesterov => (lr, self.weight_decay),
        }
    }

    /// Updates weights `w` of one parameter and their momentum `v` by their gradient `g`, with what
    /// [`Sgd::rates`] gave.
    ///
    /// - momentum: `v = m v + (g + d w)`, `w -= lr v`
    /// - nesterov: the same `v`, `w -= lr (g + d w + m v)`
    /// - lars: `v = m v + lr (g + d w)`, `w -= v` (algorithm 1 of the paper)
    #[inline(always)]
    pub(super) fn update(&self, rate: f32, decay: f32, w: &mut [f32], v: &mut [f32], g: &[f32]) {
        let m = self.momentum;
        let values = w.iter_mut().zip(v.iter_mut()).zip(g);
        match self.kind {
            OptimizerKind::Momentum => values.for_each(|((w, v), g)| {
                *v = m * *v + (g + decay * *w);
                *w -= rate * *v;
            }),
            OptimizerKind::Nesterov => values.for_each(|((w, v), g)| {
                let d = g + decay * *w;
                *v = m * *v + d;
                *w -= rate * (d + m * *v);
            }),
            OptimizerKind::Lars => values.for_each(|((w, v), g)| {
                *v = m * *v + rate * (g + decay * *w);
                *w -= *v;
            }),
        }
    }

    fn local_rate(&self, [gradient, weights]: [f64; 2]) -> f32 {
        let denominator = gradient + f64::from(self.weight_decay) * weights;
        // A parameter that is all zeros could never leave zero at a rate of zero.
        if weights > 0.0 && denominator > 0.0 {
            (f64::from(LARS_TRUST) * weights / denominator) as f32
        } else {
            1.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As an engine does it to a whole parameter.
    fn step(sgd: &Sgd, adapted: bool, w: &mut [f32], g: &[f32]) {
        let norm = |values: &[f32]| {
            let mut lanes = Lanes::default();
            lanes.add(values);
            lanes.sum().sqrt()
        };
        let (rate, decay) = sgd.rates(1.0, adapted, || [norm(g), norm(w)]);
        sgd.update(rate, decay, w, &mut vec![0.0; g.len()], g);
    }

    #[test]
    fn lars_moves_a_layer_by_its_own_norm_whatever_the_gradient_s_size() {
        let sgd = Sgd { kind: OptimizerKind::Lars, momentum: 0.0, weight_decay: 0.0 };
        for size in [1e-3f32, 1.0, 1e3] {
            let mut w = vec![3.0, 4.0];
            step(&sgd, true, &mut w, &[size, 0.0]);
            assert!((w[0] - (3.0 - 5.0 * LARS_TRUST)).abs() < 1e-6 && w[1] == 4.0, "{w:?}");
        }
        let mut w = vec![3.0, 4.0];
        step(&Sgd { weight_decay: 0.1, ..sgd }, false, &mut w, &[1.0, 0.0]);
        assert_eq!(w, [2.0, 4.0], "a bias is neither adapted nor decayed");
    }
}
