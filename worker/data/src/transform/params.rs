//! The random decisions about a picture. They depend only on (seed, epoch, position).

use super::{
    Crop, Transform,
    crop::{random_erasing, random_resized_crop},
    op::Op,
};
use crate::{picture::Region, random::Random};

/// Purpose numbers of the random streams (see `shard.rs` for others). Each step has its own stream, so that disabling
/// one step does not change the others.
const CROP_AND_FLIP: u64 = 3;
const RESIZED_CROP: u64 = 4;
const VERTICAL_FLIP: u64 = 5;
const COLOR_JITTER: u64 = 6;
const AUTO_AUGMENT: u64 = 7;
const ERASING: u64 = 8;
const ALTERNATING_FLIP: u64 = 12;

/// torchvision's defaults of `RandomErasing`: fraction of the area, and height over width.
const ERASED_SCALE: [f64; 2] = [0.02, 0.33];
const ERASED_RATIO: [f64; 2] = [0.3, 3.3];

/// The augmentation of one picture in one epoch.
#[derive(Debug, Clone)]
pub(crate) struct AugmentParams {
    /// The first row of a padded crop in the padded picture.
    pub(super) top: usize,
    /// The first column of a padded crop in the padded picture.
    pub(super) left: usize,
    /// Whether the picture is mirrored left to right.
    pub(crate) flip: bool,
    /// Whether the picture is mirrored top to bottom.
    pub(super) vertical_flip: bool,
    /// The random stream of the resized crop, whose region also depends on the picture's size (see [`AugmentParams::region`]).
    resized_crop: Random,
    /// Colour jitter, then automatic augmentation.
    pub(super) ops: Vec<Op>,
    /// The rectangle of the network's input that is 0 after normalisation.
    pub(crate) erased: Option<Region>,
}

impl AugmentParams {
    /// Draws the augmentation of the picture at `position` in its split, in `epoch` (from 0).
    pub(crate) fn new(transform: &Transform, epoch: u32, position: u64) -> Self {
        let stream = |purpose: u64| Random::new(&[transform.seed, purpose, u64::from(epoch), position]);
        let mut random = stream(CROP_AND_FLIP);
        let padding = match transform.crop {
            Crop::Padded(padding) => padding as u64,
            Crop::RandomResized { .. } => 0,
        };
        let range = 2 * padding + 1;
        let (top, left) = (random.below(range) as usize, random.below(range) as usize);
        let mut flip = random.below(2) == 1;
        if transform.alternating_flip {
            // Drawn once for all epochs.
            let flips_first_epoch = Random::new(&[transform.seed, ALTERNATING_FLIP, position]).below(2) == 1;
            flip = flips_first_epoch != (epoch % 2 == 1);
        }
        flip &= transform.horizontal_flip;
        let vertical_flip = transform.vertical_flip && stream(VERTICAL_FLIP).below(2) == 1;
        let mut ops = draw_color_jitter(transform.color_jitter, &mut stream(COLOR_JITTER));
        if let Some(policy) = transform.augment {
            ops.extend(policy.draw(&mut stream(AUTO_AUGMENT), transform.side));
        }
        let mut random = stream(ERASING);
        let erased = (random.uniform(0.0, 1.0) < transform.random_erasing)
            .then(|| random_erasing(&mut random, transform.side as u32, ERASED_SCALE, ERASED_RATIO))
            .flatten();
        let resized_crop = stream(RESIZED_CROP);
        Self { top, left, flip, vertical_flip, resized_crop, ops, erased }
    }

    /// The region that `RandomResizedCrop` takes of a picture of `size` (width, height).
    pub(crate) fn region(&self, size: (u32, u32), scale: [f64; 2], ratio: [f64; 2]) -> Region {
        random_resized_crop(&mut self.resized_crop.clone(), size, scale, ratio)
    }

    /// The padded crop and the horizontal flip in 31 bits, for an engine that does both: 15 bits for the row, 15 for
    /// the column, 1 for the flip. The last bit belongs to [`crate::loader::View`].
    pub(crate) fn packed(&self) -> u32 {
        (self.top as u32 & 0x7fff) | (self.left as u32 & 0x7fff) << 15 | u32::from(self.flip) << 30
    }
}

/// torchvision's `ColorJitter`: up to four changes in random order. Factors are between 1 - `strength` (at least 0)
/// and 1 + `strength`; the hue changes by at most its strength.
fn draw_color_jitter(strengths: [f64; 4], random: &mut Random) -> Vec<Op> {
    let order = random.permutation(strengths.len());
    let mut ops = Vec::new();
    for which in order {
        let strength = strengths[which as usize];
        let factor = match which {
            3 => random.uniform(-strength, strength),
            _ => random.uniform((1.0 - strength).max(0.0), 1.0 + strength),
        };
        if strength > 0.0 {
            ops.push(match which {
                0 => Op::Brightness(factor),
                1 => Op::Contrast(factor),
                2 => Op::Saturation(factor),
                _ => Op::Hue(factor),
            });
        }
    }
    ops
}
