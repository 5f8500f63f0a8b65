//! Optimizers: SGD with momentum exactly as PyTorch's, and LARS.

use super::simd::wide;
use lockstep_protocol::spec::OptimizerKind;
use rayon::prelude::*;

/// Trust coefficient eta of LARS: the value of You, Gitman and Ginsburg (2017), section 5.
pub(in crate::engine) const LARS_TRUST: f32 = 0.001;

/// Values of a task.
const CHUNK: usize = 1 << 14;

/// What stays the same over a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sgd {
    pub(super) kind: OptimizerKind,
    pub(super) momentum: f32,
    pub(super) weight_decay: f32,
}

/// Sum of squares in double precision, in an order that depends on the length alone.
pub(super) fn square_sum(values: &[f32]) -> f64 {
    let partials: Vec<f64> = values
        .par_chunks(CHUNK)
        .map(|chunk| {
            wide(
                #[inline(always)]
                || {
                    let mut lanes = [0.0f64; 16];
                    let rows = chunk.chunks_exact(16);
                    let rest: f64 = rows.remainder().iter().map(|&v| f64::from(v) * f64::from(v)).sum();
                    for row in rows {
                        for (l, &v) in lanes.iter_mut().zip(row) {
                            *l += f64::from(v) * f64::from(v);
                        }
                    }
                    lanes.iter().sum::<f64>() + rest
                },
            )
        })
        .collect();
    partials.iter().sum()
}

impl Sgd {
    /// Updates the weights `w` of one parameter and its momentum buffer `v` by its gradient `g`.
    ///
    /// - momentum: `v = m v + (g + d w)`, `w -= lr v`
    /// - nesterov: the same `v`, `w -= lr (g + d w + m v)`
    /// - lars: `v = m v + lr local (g + d w)`, `w -= v` (algorithm 1 of the paper), where
    ///   `local = eta |w| / (|g| + d |w|)` for weights of convolutions and linear layers; parameters of
    ///   batch norms and biases (`adapted` false) have `local = 1` and no weight decay.
    pub(super) fn update(&self, lr: f32, adapted: bool, w: &mut [f32], v: &mut [f32], g: &[f32]) {
        let m = self.momentum;
        let (decay, rate) = match self.kind {
            OptimizerKind::Lars if adapted => (self.weight_decay, lr * self.local_rate(w, g)),
            OptimizerKind::Lars => (0.0, lr),
            OptimizerKind::Momentum | OptimizerKind::Nesterov => (self.weight_decay, lr),
        };
        let kind = self.kind;
        w.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK)).zip(g.par_chunks(CHUNK)).for_each(
            |((w, v), g)| {
                wide(
                    #[inline(always)]
                    || {
                        let values = w.iter_mut().zip(v.iter_mut()).zip(g);
                        match kind {
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
                    },
                );
            },
        );
    }

    fn local_rate(&self, w: &[f32], g: &[f32]) -> f32 {
        let (w, g) = (square_sum(w).sqrt(), square_sum(g).sqrt());
        let denominator = g + f64::from(self.weight_decay) * w;
        // A parameter that is all zeros could never leave zero at a rate of zero.
        if w > 0.0 && denominator > 0.0 { (f64::from(LARS_TRUST) * w / denominator) as f32 } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lars_moves_a_layer_by_its_own_norm_whatever_the_gradient_s_size() {
        let sgd = Sgd { kind: OptimizerKind::Lars, momentum: 0.0, weight_decay: 0.0 };
        for size in [1e-3f32, 1.0, 1e3] {
            let (mut w, mut v) = (vec![3.0, 4.0], vec![0.0; 2]);
            sgd.update(1.0, true, &mut w, &mut v, &[size, 0.0]);
            assert!((w[0] - (3.0 - 5.0 * LARS_TRUST)).abs() < 1e-6 && w[1] == 4.0, "{w:?}");
        }
        let (mut w, mut v) = (vec![3.0, 4.0], vec![0.0; 2]);
        Sgd { weight_decay: 0.1, ..sgd }.update(1.0, false, &mut w, &mut v, &[1.0, 0.0]);
        assert_eq!(w, [2.0, 4.0], "a bias is neither adapted nor decayed");
    }
}
