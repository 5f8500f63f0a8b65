//! Register tiles: the innermost loops (`kernels.rs`), which multiply packed pictures (see `pack`) with weights or with other
//! packed pictures, and their table for each instruction set. Everything is summed in one fixed order whatever the tile's size, so
//! results do not depend on how the work is cut.

mod kernels;

use super::vector::Vector;
use kernels::{outer, pack, product};

/// A source position that meets a weight: kernel offset `tap` at source position `position`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tap {
    /// Index of the position in the packed rows.
    pub(super) position: u32,
    /// `ky * kernel + kx`.
    pub(super) tap: u32,
}

/// One output position of a group of pictures, for one to four blocks of output channels.
pub(super) struct Product<'a> {
    /// Packed group of pictures: `[position][channel block][picture][16]`, from the first wanted channel on.
    pub(super) x: *const f32,
    pub(super) taps: &'a [Tap],
    /// Input channels that are read, from the first of `x` on.
    pub(super) channels: usize,
    /// Packed channels of a position: those of all groups.
    pub(super) line: usize,
    /// Weights of the first block: `[tap][channel][lane]`.
    pub(super) w: *const f32,
    /// Floats from one block of weights to the next.
    pub(super) w_block: usize,
    /// The output of the first picture.
    pub(super) y: *mut f32,
    /// Floats from one picture's output to the next's.
    pub(super) y_picture: usize,
    /// Lanes of the block, when it is not a full one.
    pub(super) lanes: usize,
    /// Null, or for every block of channels 16 pivots, 16 sums of outputs less the pivots, and 16 sums of
    /// their squares. A pivot keeps the squares small when a channel's mean is far from zero.
    pub(super) sums: *mut f32,
    /// Start the sums, with the first picture's outputs as pivots.
    pub(super) first: bool,
}

/// Pixels that are neighbours in both packed pictures.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// Index of the first pixel of the input, in units of 16 floats.
    pub(super) x: u32,
    /// Index of the first pixel of the output's gradient, in units of 16 floats.
    pub(super) dy: u32,
    pub(super) len: u32,
}

/// Outer products of input and output gradient, summed over pixels: up to 16 input channels, one to four
/// blocks of output channels.
pub(super) struct Outer<'a> {
    /// Packed input, `[pixel][16]`, from the first wanted channel on.
    pub(super) x: *const f32,
    /// Packed gradient, `[pixel][16]`.
    pub(super) dy: *const f32,
    /// Floats from one block of channels of the gradient to the next.
    pub(super) dy_block: usize,
    pub(super) runs: &'a [Run],
    /// Gradient of the weights, `[channel][lane]`.
    pub(super) dw: *mut f32,
    /// Floats from one block of weights to the next.
    pub(super) dw_block: usize,
    /// Add to what is there, or overwrite it.
    pub(super) accumulate: bool,
    /// Input channels to store.
    pub(super) channels: usize,
    /// Lanes of the block: 16 unless it is a single one that is not full.
    pub(super) lanes: usize,
}

/// Copies channels of a row of pixels into packed lines.
pub(super) struct Pack {
    /// First channel of the first pixel; pixels follow each other.
    pub(super) from: *const f32,
    pub(super) pixels: usize,
    pub(super) channels: usize,
    pub(super) to: *mut f32,
    /// Floats from one packed pixel to the next.
    pub(super) to_pixel: usize,
    /// Floats from one block of channels to the next.
    pub(super) to_block: usize,
}

type ProductFn = unsafe fn(&Product<'_>);
type OuterFn = unsafe fn(&Outer<'_>);

/// The tiles for one kind of machine.
#[derive(Debug)]
pub(super) struct Tiles {
    /// Pictures in a group, at most.
    pub(super) group: usize,
    /// By pictures - 1: tiles of one, two and four blocks, and for one that is not full.
    product: &'static [[Option<ProductFn>; 4]],
    /// Rising numbers of input channels, each with its tiles of one, two and four output blocks.
    outer: &'static [(usize, [Option<OuterFn>; 3])],
    pack: unsafe fn(&Pack),
    transpose: unsafe fn(&[f32; 256], &mut [f32; 256]),
}

/// Instructions that the passes can be made of. Fused multiply-adds round once and plain ones twice, so
/// results differ in their last bits between machines with and without them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instructions {
    /// AVX-512F: 512-bit vectors, 32 registers.
    Avx512,
    /// AVX2 with FMA: 256-bit vectors, 16 registers.
    Avx2,
    /// What every machine of the architecture has.
    Plain,
}

impl Instructions {
    /// Fastest first.
    pub const ALL: [Instructions; 3] = [Instructions::Avx512, Instructions::Avx2, Instructions::Plain];
}

impl Tiles {
    /// The tiles for `instructions`, if this machine has them.
    pub(super) fn of(instructions: Instructions) -> Option<&'static Tiles> {
        match instructions {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => is_x86_feature_detected!("avx512f").then_some(&x86::AVX512),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => {
                (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(&x86::AVX2)
            }
            #[cfg(not(target_arch = "x86_64"))]
            Instructions::Avx512 | Instructions::Avx2 => None,
            Instructions::Plain => Some(&PLAIN),
        }
    }

    /// Blocks of output channels that a tile for `pictures` takes when `blocks` full ones are left.
    pub(super) fn product_blocks(&self, pictures: usize, blocks: usize) -> usize {
        let [_, two, four, _] = self.product[pictures - 1];
        match blocks {
            4.. if four.is_some() => 4,
            2.. if two.is_some() => 2,
            _ => 1,
        }
    }

    /// The tile for `pictures` and 1, 2 or 4 blocks.
    pub(super) fn product(&self, pictures: usize, blocks: usize) -> ProductFn {
        self.product[pictures - 1][blocks / 2].unwrap_or_else(|| unreachable!("asked for by product_blocks"))
    }

    /// The tile for a block that is not full.
    pub(super) fn product_part(&self, pictures: usize) -> ProductFn {
        self.product[pictures - 1][3].unwrap_or_else(|| unreachable!("every row has one"))
    }

    /// Blocks of output channels that an outer-product tile for `channels` input channels takes when
    /// `blocks` are left.
    pub(super) fn outer_blocks(&self, channels: usize, blocks: usize) -> usize {
        let has = |width: usize, at_least: usize| {
            self.outer.iter().any(|(height, tiles)| *height >= at_least && tiles[width].is_some())
        };
        match blocks {
            4.. if has(2, channels) => 4,
            2.. if has(1, channels.min(8)) => 2,
            _ => 1,
        }
    }

    /// The tile for the next of `channels` input channels (at most 16) on 1, 2 or 4 blocks of output
    /// channels, and how many channels it computes: more than there are only at the end.
    pub(super) fn outer(&self, channels: usize, blocks: usize) -> (usize, OuterFn) {
        let mut best = None;
        for (height, tiles) in self.outer {
            if let Some(tile) = tiles[blocks / 2] {
                best = Some((*height, tile));
                if *height >= channels {
                    break;
                }
            }
        }
        best.unwrap_or_else(|| unreachable!("every width has tiles"))
    }

    /// Transposes 16 rows of 16 floats.
    pub(super) fn transpose(&self, from: &[f32; 256], to: &mut [f32; 256]) {
        // SAFETY: `of` hands out tiles that this machine can run.
        unsafe { (self.transpose)(from, to) }
    }

    /// Copies a row of pixels.
    ///
    /// # Safety
    /// The pointers of `p` are valid for what it describes.
    pub(super) unsafe fn pack(&self, p: &Pack) {
        // SAFETY: the caller's promise; `of` hands out tiles that this machine can run.
        unsafe { (self.pack)(p) }
    }
}

/// `Some` of a tile that the table says yes to.
macro_rules! when {
    (yes $tile:expr) => {
        Some($tile)
    };
    (no $tile:expr) => {
        None
    };
}

/// Defines the tiles for one kind of vectors: functions that enable the instructions, and their table.
macro_rules! tiles {
    ($name:ident, $vector:ty, $(#[$feature:meta])?, group $group:literal,
     product [$($p:literal: $two:ident $four:ident),* $(,)?],
     outer [$($i:literal: $outer_1:ident $outer_2:ident $outer_4:ident),* $(,)?]) => {
        pub(super) static $name: super::Tiles = {
            use crate::conv::tile::{Outer, Pack, Product, Tiles, Vector, outer, pack, product};
            $(#[$feature])?
            unsafe fn product_at<const P: usize, const V: usize, const PART: bool>(t: &Product<'_>) {
                // SAFETY: the caller's promise; the function has the instructions of its vectors.
                unsafe { product::<$vector, P, V, PART>(t) }
            }
            $(#[$feature])?
            unsafe fn outer_at<const I: usize, const V: usize>(t: &Outer<'_>) {
                // SAFETY: the caller's promise; the function has the instructions of its vectors.
                unsafe { outer::<$vector, I, V>(t) }
            }
            $(#[$feature])?
            unsafe fn pack_rows(t: &Pack) {
                // SAFETY: the caller's promise; the function has the instructions of its vectors.
                unsafe { pack::<$vector>(t) }
            }
            $(#[$feature])?
            unsafe fn transpose_block(from: &[f32; 256], to: &mut [f32; 256]) {
                // SAFETY: the function has the instructions of its vectors; the arrays are whole.
                unsafe { <$vector>::transpose(from, to) }
            }
            Tiles {
                group: $group,
                product: &[$([
                    Some(product_at::<$p, 1, false>),
                    when!($two product_at::<$p, 2, false>),
                    when!($four product_at::<$p, 4, false>),
                    Some(product_at::<$p, 1, true>),
                ]),*],
                outer: &[$((
                    $i,
                    [
                        when!($outer_1 outer_at::<$i, 1>),
                        when!($outer_2 outer_at::<$i, 2>),
                        when!($outer_4 outer_at::<$i, 4>),
                    ],
                )),*],
                pack: pack_rows,
                transpose: transpose_block,
            }
        };
    };
}

use plain::PLAIN;
mod plain {
    use super::super::vector::Plain;

    tiles!(PLAIN, Plain, , group 4,
        product [1: no no, 2: no no, 3: no no, 4: no no],
        outer [1: yes no no, 3: yes no no, 4: yes no no]);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::vector::{Avx2, Avx512};

    // 16 registers of 8 floats: 6 x 2 sums, two weights, one broadcast.
    tiles!(AVX2, Avx2, #[target_feature(enable = "avx2,fma")], group 6,
        product [1: no no, 2: no no, 3: no no, 4: no no, 5: no no, 6: no no],
        outer [1: yes no no, 3: yes no no, 4: yes no no, 6: yes no no]);

    // 32 registers of 16 floats: at most 28 sums, two weights, one broadcast.
    tiles!(AVX512, Avx512, #[target_feature(enable = "avx512f")], group 14,
        product [1: yes yes, 2: yes yes, 3: yes yes, 4: yes yes, 5: yes yes, 6: yes yes, 7: yes no,
                 8: yes no, 9: yes no, 10: yes no, 11: yes no, 12: yes no, 13: yes no, 14: yes no],
        outer [1: yes yes yes, 3: yes yes yes, 4: yes yes yes, 8: yes yes no, 16: yes no no]);
}
