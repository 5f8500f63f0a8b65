//! Activations of micro-batches that are between their forward and backward passes.

use super::{batch_norm::Statistics, exchange::Pictures};

/// What a forward pass keeps for the same micro-batch's backward pass.
pub(super) struct Kept {
    pub(super) activations: Vec<Vec<f32>>,
    pub(super) argmax: Vec<Vec<u8>>,
    pub(super) statistics: Vec<Statistics>,
    pub(super) pictures: Pictures,
}

impl Kept {
    /// Empty buffers, for a network with this number of tensors and of batch norms.
    pub(super) fn new(tensors: usize, norms: usize) -> Self {
        Self {
            activations: vec![Vec::new(); tensors],
            argmax: vec![Vec::new(); tensors],
            statistics: vec![Statistics::default(); norms],
            pictures: Pictures::default(),
        }
    }
}
