//! From bytes to the network's input: random crop with padding and horizontal flip at the picture's
//! own size, then scaling, then normalisation. The same randomness on any rank.

use super::{picture::Scaler, random::Random};

/// What a random stream is for (see `shard.rs` for the others).
const AUGMENT: u64 = 3;

/// How a job's pictures become inputs.
#[derive(Debug, Clone)]
pub(super) struct Recipe {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
    /// Side of the network's input.
    pub(super) side: usize,
    /// Black pixels around a picture before a crop of its own size is taken; 0 for no crop.
    pub(super) crop_padding: usize,
    pub(super) horizontal_flip: bool,
    pub(super) seed: u64,
    /// Normalised value of each byte, by channel.
    pub(super) table: Vec<[f32; 256]>,
}

impl Recipe {
    pub(super) fn normalisation(mean: &[f32], std: &[f32]) -> Vec<[f32; 256]> {
        mean.iter().zip(std).map(|(m, s)| std::array::from_fn(|v| (v as f32 / 255.0 - m) / s)).collect()
    }

    /// Bytes to the network's input.
    pub(super) fn normalise(&self, bytes: &[u8], out: &mut [f32]) {
        match &self.table[..] {
            [grey] => out.iter_mut().zip(bytes).for_each(|(o, v)| *o = grey[usize::from(*v)]),
            tables => {
                for (o, v) in out.chunks_exact_mut(tables.len()).zip(bytes.chunks_exact(tables.len())) {
                    for ((o, v), table) in o.iter_mut().zip(v).zip(tables) {
                        *o = table[usize::from(*v)];
                    }
                }
            }
        }
    }
}

/// What chance decides about one picture in one epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Draw {
    /// First row of the window in the padded picture.
    pub(super) top: usize,
    /// First column of the window in the padded picture.
    pub(super) left: usize,
    /// Mirrored left to right.
    pub(super) flip: bool,
}

impl Draw {
    /// `picture` is its place in the split, `epoch` counts from 0.
    pub(super) fn new(recipe: &Recipe, epoch: u32, picture: u64) -> Self {
        let mut random = Random::new(&[recipe.seed, AUGMENT, u64::from(epoch), picture]);
        // Always drawn, so that one switch does not change what the other one does.
        let range = 2 * recipe.crop_padding as u64 + 1;
        let (top, left) = (random.below(range) as usize, random.below(range) as usize);
        Self { top, left, flip: random.below(2) == 1 && recipe.horizontal_flip }
    }

    /// In 31 bits: 15 of `top`, 15 of `left`, `flip`.
    pub(super) fn packed(self) -> u32 {
        (self.top as u32 & 0x7fff) | (self.left as u32 & 0x7fff) << 15 | u32::from(self.flip) << 30
    }
}

/// Makes inputs; one a thread, as it keeps its buffers.
pub(super) struct Augmenter<'a> {
    recipe: &'a Recipe,
    scaler: Option<Scaler>,
    cropped: Vec<u8>,
    scaled: Vec<u8>,
}

impl<'a> Augmenter<'a> {
    pub(super) fn new(recipe: &'a Recipe) -> Self {
        let same = recipe.height == recipe.side && recipe.width == recipe.side;
        Self {
            recipe,
            scaler: (!same).then(|| Scaler::new(recipe.side as u32, recipe.channels as u32)),
            cropped: vec![0; recipe.height * recipe.width * recipe.channels],
            scaled: vec![0; if same { 0 } else { recipe.side * recipe.side * recipe.channels }],
        }
    }

    /// For training: a window of the padded picture, flipped or not, then scaled.
    pub(super) fn cropped_and_scaled<'b>(&'b mut self, pixels: &'b [u8], draw: Draw) -> &'b [u8] {
        if self.recipe.crop_padding == 0 && !draw.flip {
            return self.scaled(pixels);
        }
        self.crop(pixels, draw);
        match &mut self.scaler {
            Some(scaler) => {
                let (width, height) = (self.recipe.width as u32, self.recipe.height as u32);
                scaler.scale(&self.cropped, width, height, None, &mut self.scaled);
                &self.scaled
            }
            None => &self.cropped,
        }
    }

    /// For evaluation: scaled only.
    pub(super) fn scaled<'b>(&'b mut self, pixels: &'b [u8]) -> &'b [u8] {
        match &mut self.scaler {
            Some(scaler) => {
                let (width, height) = (self.recipe.width as u32, self.recipe.height as u32);
                scaler.scale(pixels, width, height, None, &mut self.scaled);
                &self.scaled
            }
            None => pixels,
        }
    }

    /// The drawn window of the padded picture into `cropped`.
    fn crop(&mut self, pixels: &[u8], Draw { top, left, flip }: Draw) {
        let Recipe { height, width, channels, crop_padding, .. } = *self.recipe;
        self.cropped.fill(0);
        // Columns of the window that lie inside the picture: from `first` in the window, `count` of them.
        let first = crop_padding.saturating_sub(left);
        let source_first = left.saturating_sub(crop_padding);
        let count = width.saturating_sub(first.max(source_first));
        for row in 0..height {
            let Some(source_row) = (row + top).checked_sub(crop_padding).filter(|r| *r < height) else {
                continue;
            };
            let source = &pixels[(source_row * width + source_first) * channels..][..count * channels];
            let target = &mut self.cropped[row * width * channels..][..width * channels];
            if flip {
                let mirrored = width - first - count;
                let target = &mut target[mirrored * channels..][..count * channels];
                for (t, s) in target.chunks_exact_mut(channels).rev().zip(source.chunks_exact(channels)) {
                    t.copy_from_slice(s);
                }
            } else {
                target[first * channels..][..count * channels].copy_from_slice(source);
            }
        }
    }
}
