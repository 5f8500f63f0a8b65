//! The parameters of mixing pictures. `mixing.rs` draws them.

use std::ops::Range;

/// How the pictures of one step are mixed.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// The weight of the picture itself, from 0 to 1. With cutmix, the fraction of its remaining pixels.
    pub lambda: f32,
    /// With cutmix, the rows and columns that come from the other picture. `None` with mixup.
    pub cut: Option<[Range<usize>; 2]>,
}

/// How an engine mixes the pictures of a batch in its memory: each picture with the previous picture of the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct MixParams {
    pub mix: Mix,
    /// The position in the split of the picture with which the first picture is mixed, as in `indices` of the batch.
    pub previous_index: u64,
    /// The augmentation parameters of this picture, as in `augment_params` of the batch.
    pub previous_params: u32,
}
