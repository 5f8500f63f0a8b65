//! What is kept of micro-batches that are between their passes.

use super::{batch_norm::Statistics, exchange::Pictures};

/// What a forward pass leaves for the backward pass of its micro-batch.
pub(super) struct Kept {
    pub(super) activations: Vec<Vec<f32>>,
    pub(super) argmax: Vec<Vec<u8>>,
    pub(super) statistics: Vec<Statistics>,
    pub(super) pictures: Pictures,
}

impl Kept {
    /// Without values, for a network of so many tensors and batch norms.
    pub(super) fn new(tensors: usize, norms: usize) -> Self {
        Self {
            activations: vec![Vec::new(); tensors],
            argmax: vec![Vec::new(); tensors],
            statistics: vec![Statistics::default(); norms],
            pictures: Pictures::default(),
        }
    }
}
