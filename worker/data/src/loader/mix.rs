//! The parameters of mixing pictures. `mixing.rs` draws them.

use std::ops::Range;

/// How the pictures of one step are mixed.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// The weight of a picture itself, from 0 to 1. With cutmix it is the fraction of its pixels.
    pub lambda: f32,
    /// With cutmix, the rows and columns that come from the other picture. `None` with mixup.
    pub cut: Option<[Range<usize>; 2]>,
}

/// How an engine mixes the pictures of a batch that it has in its memory: each picture with the previous one of the
/// batch.
#[derive(Debug, Clone, PartialEq)]
pub struct MixParams {
    pub mix: Mix,
    /// The picture with which the first one is mixed: its position in the split, as in `indices` of the batch.
    pub before_index: u64,
    /// Its augmentation parameters, as in `augment_params` of the batch.
    pub before_params: u32,
}
