//! How pictures are mixed, in numbers; `mixing.rs` draws them.

use std::ops::Range;

/// How the pictures of one step are mixed.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// The share that a picture has of itself, from 0 to 1: with cutmix of its pixels.
    pub lambda: f32,
    /// cutmix: the rows and columns that are the other picture's. mixup has none.
    pub cut: Option<[Range<usize>; 2]>,
}

/// How an engine mixes the pictures of a batch that it has in its memory: each with the one before it in the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct MixParams {
    pub mix: Mix,
    /// The picture that the first one is mixed with: its position in its split, as in the batch's `indices`.
    pub before_index: u64,
    /// Its augmentation parameters, as in the batch's `augment_params`.
    pub before_params: u32,
}
