//! ArcFace (Deng et al. 2019) and CosFace (Wang et al. 2018): logits are scaled cosines between features and the weights of a class, and in
//! training the label's logit has a margin.

use crate::loss::Margin;
use lockstep_kernels::linear;
use std::ops::Range;

/// Minimum divisor of a row, as in PyTorch's `normalize`.
const MIN_LENGTH: f64 = 1e-12;

/// Rows divided by their lengths.
pub(super) struct UnitRows {
    pub(super) rows: Vec<f32>,
    lengths: Vec<f64>,
    width: usize,
}

impl UnitRows {
    /// Normalises the rows of `values`, each of `width` values.
    pub(super) fn new(values: &[f32], width: usize) -> Self {
        let length = |row: &[f32]| {
            row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt().max(MIN_LENGTH)
        };
        let lengths: Vec<f64> = values.chunks_exact(width).map(length).collect();
        let rows = values.chunks_exact(width).zip(&lengths);
        let rows =
            rows.flat_map(|(row, length)| row.iter().map(move |v| (f64::from(*v) / length) as f32)).collect();
        Self { rows, lengths, width }
    }

    pub(super) fn slice(&self, rows: Range<usize>) -> &[f32] {
        &self.rows[rows.start * self.width..rows.end * self.width]
    }

    /// Converts the gradient of the normalised rows to the gradient of the original rows: `(g - u (u . g)) / length`
    /// for a row `u` and its gradient `g`.
    pub(super) fn backward(&self, gradient: &mut [f32]) {
        let rows = self.rows.chunks_exact(self.width).zip(&self.lengths);
        for (gradient, (row, length)) in gradient.chunks_exact_mut(self.width).zip(rows) {
            let along: f64 = gradient.iter().zip(row).map(|(g, u)| f64::from(*g) * f64::from(*u)).sum();
            for (g, u) in gradient.iter_mut().zip(row) {
                *g = ((f64::from(*g) - f64::from(*u) * along) / length) as f32;
            }
        }
    }
}

impl Margin {
    /// Fills `logits` `[pictures, classes]` with the scaled cosines.
    pub(super) fn forward(&self, features: &UnitRows, weights: &UnitRows, logits: &mut [f32]) {
        linear::forward(&features.rows, &weights.rows, &vec![0.0; weights.lengths.len()], logits);
        self.multiply_by_scale(logits);
    }

    /// A head's weights with each row scaled to the length `scale`. Their products with unit features are the logits.
    pub(crate) fn scaled_unit_rows(&self, weights: &[f32], width: usize) -> Vec<f32> {
        let mut rows = UnitRows::new(weights, width).rows;
        self.multiply_by_scale(&mut rows);
        rows
    }

    pub(super) fn multiply_by_scale(&self, values: &mut [f32]) {
        values.iter_mut().for_each(|value| *value *= self.scale);
    }

    /// Applies the margin to the logit of each picture's label. Returns the index of each changed logit, and the derivative of the
    /// new logit by the old logit. `labels`: for each row of `width` logits, the label's position, if this rank has the label.
    pub(super) fn apply_margin(
        &self,
        logits: &mut [f32],
        width: usize,
        labels: impl Iterator<Item = Option<usize>>,
    ) -> Vec<(usize, f64)> {
        let apply = |(picture, label): (usize, Option<usize>)| {
            let index = picture * width + label?;
            let (logit, slope) = self.label_logit(logits[index]);
            logits[index] = logit;
            Some((index, slope))
        };
        labels.enumerate().filter_map(apply).collect()
    }

    /// The label's logit with the margin, and its derivative by the logit without it.
    fn label_logit(&self, logit: f32) -> (f32, f64) {
        let (scale, terms) = (f64::from(self.scale), self.terms());
        let cos = (f64::from(logit) / scale).clamp(-1.0, 1.0);
        let (with_margin, slope) = if cos > terms.limit {
            // Without this minimum, the derivative would be infinite at a cosine of 1.
            let sin = (1.0 - cos * cos).max(f64::from(f32::EPSILON)).sqrt();
            (cos * terms.cos - sin * terms.sin, terms.cos + terms.sin * cos / sin)
        } else {
            (cos - terms.shift, 1.0)
        };
        ((scale * with_margin) as f32, slope)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::spec::LossKind;
    use std::f64::consts::PI;

    #[test]
    fn the_margin_is_added_to_the_angle_or_taken_from_the_cosine() {
        let (arcface, cosface) = (
            Margin { kind: LossKind::ArcFace, scale: 64.0, margin: 0.5 },
            Margin { kind: LossKind::CosFace, scale: 30.0, margin: 0.4 },
        );
        for angle in [0.01, 0.3, 1.0, 1.57, 2.0, 2.6, 2.7, 3.0] {
            let cos = f64::cos(angle);
            let (logit, slope) = arcface.label_logit((64.0 * cos) as f32);
            let (target, expected_slope) = if angle + 0.5 < PI {
                ((angle + 0.5).cos(), (angle + 0.5).sin() / angle.sin())
            } else {
                (cos - 0.5 * 0.5f64.sin(), 1.0)
            };
            assert!((f64::from(logit) - 64.0 * target).abs() < 1e-2, "{angle}: {logit} {}", 64.0 * target);
            assert!((slope / expected_slope - 1.0).abs() < 1e-2, "{angle}: {slope} {expected_slope}");
            let (logit, slope) = cosface.label_logit((30.0 * cos) as f32);
            assert!((f64::from(logit) - 30.0 * (cos - 0.4)).abs() < 1e-5 && slope == 1.0, "{angle}: {logit}");
        }
        assert!(arcface.label_logit(64.0).1.is_finite() && arcface.label_logit(64.1).0.is_finite());
    }
}
