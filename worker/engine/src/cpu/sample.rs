//! The sampled classes of a step ([`crate::loss`]), and their rows of the last layer's parameters.

use super::margin::UnitRows;
use crate::loss::Margin;
use lockstep_kernels::linear;
use std::{borrow::Cow, ops::Range, sync::Arc};

#[derive(Debug)]
pub(super) struct Sample {
    /// Indices of the sampled classes among this rank's classes, ascending.
    pub(super) rows: Vec<u32>,
}

impl Sample {
    /// Position of `row` in the sample, if the sample has the row.
    pub(super) fn position(&self, row: usize) -> Option<usize> {
        self.rows.binary_search(&(row as u32)).ok()
    }

    /// Copies the sample's rows of `all`, each of `width` values.
    pub(super) fn copy_rows(&self, all: &[f32], width: usize) -> Vec<f32> {
        let mut rows = Vec::with_capacity(self.rows.len() * width);
        for row in &self.rows {
            rows.extend_from_slice(&all[*row as usize * width..][..width]);
        }
        rows
    }

    /// Writes the rows that `compute` produces to the sample's rows of `all`, each of `width` values, and sets all
    /// other rows to 0.
    pub(super) fn fill_rows(&self, all: &mut [f32], width: usize, compute: impl FnOnce(&mut [f32])) {
        let mut rows = vec![0.0; self.rows.len() * width];
        compute(&mut rows);
        all.fill(0.0);
        for (row, values) in self.rows.iter().zip(rows.chunks_exact(width)) {
            all[*row as usize * width..][..width].copy_from_slice(values);
        }
    }
}

/// Logits `[batch, classes]` of `x` `[batch, in]`, for all classes, or for the classes of `sample`. With `margin`, logits are scaled
/// cosines.
pub(super) fn forward(
    (sample, margin): (Option<&Sample>, Option<&Margin>),
    x: &[f32],
    (weight, bias): (&[f32], &[f32]),
    logits: &mut [f32],
) {
    let inputs = weight.len() / bias.len();
    let rows_of =
        |all, width| sample.map_or(Cow::Borrowed(all), |sample| Cow::Owned(sample.copy_rows(all, width)));
    let (weight, bias) = (rows_of(weight, inputs), rows_of(bias, 1));
    let logits = &mut logits[..x.len() / inputs * bias.len()];
    match margin {
        None => linear::forward(x, &weight, &bias, logits),
        Some(margin) => margin.forward(&UnitRows::new(x, inputs), &UnitRows::new(&weight, inputs), logits),
    }
}

/// The parameters of which a step updates only the sampled rows.
#[derive(Debug)]
pub(super) struct SampledRows {
    pub(super) sample: Arc<Sample>,
    /// The weight and the bias of the last layer.
    pub(super) parameters: [HeadParameter; 2],
}

/// A parameter of the last layer, with a row for each class.
#[derive(Debug)]
pub(super) struct HeadParameter {
    /// The parameter's index in the layout.
    pub(super) index: usize,
    /// Offset in the flat buffer.
    pub(super) offset: usize,
    /// Number of values of a row.
    pub(super) width: usize,
}

impl SampledRows {
    /// Calls `update` with each part of `range` that the step updates, relative to the start of `range`. `range` is a range of
    /// the flat buffer, within the parameter whose index is `parameter`.
    pub(super) fn for_each_part(
        &self,
        parameter: usize,
        range: Range<usize>,
        mut update: impl FnMut(Range<usize>),
    ) {
        let Some(&HeadParameter { offset, width, .. }) =
            self.parameters.iter().find(|head| head.index == parameter)
        else {
            return update(0..range.len());
        };
        let (from, to) = (range.start - offset, range.end - offset);
        let begin = self.sample.rows.partition_point(|row| (*row as usize + 1) * width <= from);
        for row in &self.sample.rows[begin..] {
            let row = *row as usize * width;
            if row >= to {
                break;
            }
            update(row.max(from) - from..(row + width).min(to) - from);
        }
    }
}
