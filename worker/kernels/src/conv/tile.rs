//! Register tiles: the innermost loops (`kernels.rs`), which multiply packed pictures (see [`Pack`]) with weights or with other
//! packed pictures, and tables of tiles for each instruction set and number format. The order of summation is the same for all
//! tile sizes, so results do not depend on how work is divided.
//!
//! Packed pictures and weights consist of units of 32 bits: a float32, or two bfloat16 values, which are consecutive terms of the sum. In
//! a [`Product`] they are two channels, in an [`Outer`] the same channel of two pictures, so both formats have the same loops.
//!
//! A block has 16 output channels, one per lane.

#![expect(unsafe_op_in_unsafe_fn, reason = "the contract in `kernels.rs` covers every operation")]

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
mod kernels;
mod segments;

use super::vector::{Arithmetic, Vector};
use kernels::{outer, pack_channels, pack_pictures, pack_rows, product};

/// One term of an output position: the source at `position` times the weight at kernel offset `offset`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tap {
    /// Index of the position in the packed rows.
    pub(super) position: u32,
    /// Index of the tap's packed weights: `ky * kernel + kx`. With transformed rows, `ky * 6 + point`.
    pub(super) offset: u32,
}

/// One output position of a group of pictures, for one to four blocks of output channels.
pub(super) struct Product<'a> {
    /// Packed group of pictures: `[position][block of 16 units][picture][16]`, starting at the first unit that the tile reads.
    pub(super) x: *const f32,
    pub(super) taps: &'a [Tap],
    pub(super) pictures: usize,
    /// Number of units of input channels that the tile reads.
    pub(super) units: usize,
    /// Number of packed units of a position of one picture, over all groups of the convolution.
    pub(super) units_per_position: usize,
    /// Weights of the first block: `[tap][unit][lane]`.
    pub(super) w: *const f32,
    /// Units from one block of weights to the next.
    pub(super) w_block: usize,
    /// The output of the first picture.
    pub(super) y: *mut f32,
    /// Floats from one picture's output to the next picture's.
    pub(super) y_picture: usize,
    /// Memory that is written soon, with `prefetch_picture` floats from one picture to the next. It is probably not in the cache.
    pub(super) prefetch: *const f32,
    pub(super) prefetch_picture: usize,
    /// Output channels of the block: 16, or fewer for a single block that is not full.
    pub(super) lanes: usize,
    /// Null, or for every block of channels: 16 pivots, 16 sums of (output - pivot), and 16 sums of
    /// (output - pivot)^2. A pivot keeps the squares small if a channel's mean is far from zero.
    pub(super) sums: *mut f32,
    /// Whether to start the sums, with the first picture's outputs as pivots.
    pub(super) starts_sums: bool,
}

/// A run of pixels that are adjacent in the packed input and in the packed gradient of the output.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// Index of the first pixel of the input: a pixel is 16 units.
    pub(super) x: u32,
    /// Index of the first pixel of the output's gradient.
    pub(super) dy: u32,
    pub(super) len: u32,
}

/// Outer products of the input and the gradient of the output, summed over pixels. A tile has at most 16 input channels, and one, two or
/// four blocks of output channels.
pub(super) struct Outer<'a> {
    /// Packed input, `[pixel][16]`, starting at the first channel that the tile reads.
    pub(super) x: *const f32,
    /// Packed gradient, `[pixel][16]`.
    pub(super) dy: *const f32,
    /// Units from one block of channels of the gradient to the next.
    pub(super) dy_block: usize,
    pub(super) runs: &'a [Run],
    /// Gradient of the weights, `[channel][lane]`.
    pub(super) dw: *mut f32,
    /// Floats from one block of weights to the next.
    pub(super) dw_block: usize,
    /// Whether to add to `dw` instead of overwriting it.
    pub(super) accumulate: bool,
    /// Number of input channels to store.
    pub(super) channels: usize,
    /// Output channels of the block: 16, or fewer for a single block that is not full.
    pub(super) lanes: usize,
}

/// Channels of a row of pixels, to be packed.
pub(super) struct Pack {
    /// First channel of the first pixel; pixels are consecutive.
    pub(super) from: *const f32,
    /// If a unit has two pictures: as `from`, for the second picture.
    pub(super) second_picture: Option<*const f32>,
    pub(super) pixels: usize,
    pub(super) channels: usize,
    pub(super) to: *mut f32,
    /// Units from one packed pixel to the next.
    pub(super) to_pixel: usize,
    /// Units from one block of channels to the next.
    pub(super) to_block: usize,
}

/// A row of a picture, whose segments are transformed and packed, see [`winograd`](super::winograd).
pub(super) struct Segments {
    /// First channel of the row's first pixel; pixels are consecutive.
    pub(super) row: *const f32,
    /// Number of pixels.
    pub(super) width: usize,
    pub(super) channels: usize,
    pub(super) pictures: usize,
    /// Floats from one picture's row to the next picture's.
    pub(super) picture: usize,
    /// Where the first point of the first segment is stored.
    pub(super) to: *mut f32,
    pub(super) strides: Strides,
}

/// Floats from one row, segment, point and block of channels to the next in packed segments. The pictures of a group are adjacent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strides {
    pub(super) row: usize,
    pub(super) segment: usize,
    pub(super) point: usize,
    pub(super) block: usize,
}

/// The products of a segment, for the pictures and blocks of channels of a tile.
pub(super) struct SegmentOutputs {
    /// `[point][picture][block][16]`.
    pub(super) products: *const f32,
    pub(super) pictures: usize,
    pub(super) blocks: usize,
    /// As in [`Product`].
    pub(super) lanes: usize,
    /// Number of output columns, at most four.
    pub(super) columns: usize,
    /// The first column's output of the first picture.
    pub(super) y: *mut f32,
    /// As in [`Product`].
    pub(super) y_picture: usize,
    /// Floats from one column to the next.
    pub(super) y_column: usize,
    /// As in [`Product`].
    pub(super) sums: *mut f32,
    /// Whether to start the sums, with the first picture's outputs in the first column as pivots.
    pub(super) starts_sums: bool,
}

type ProductFn = unsafe fn(&Product<'_>);
type OuterFn = unsafe fn(&Outer<'_>);
pub(super) type TransformFn = unsafe fn(&Segments);

/// The tiles for one instruction set and number format.
#[derive(Debug)]
pub(super) struct Tiles {
    pub(super) format: Format,
    /// Number of values in a unit.
    pub(super) values_per_unit: usize,
    /// Maximum number of pictures in a group.
    pub(super) group: usize,
    /// Element `n - 1` is for `n` pictures: tiles of one, two and four blocks, and a tile of one block that is not full.
    product: &'static [[Option<ProductFn>; 4]],
    /// Numbers of input channels, ascending, each with its tiles of one, two and four output blocks.
    outer: &'static [(usize, [Option<OuterFn>; 3])],
    /// Packs a row of pixels for [`Product`]: a unit has consecutive channels.
    pub(super) pack_channels: unsafe fn(&Pack),
    /// Packs a row of pixels for [`Outer`]: a unit has the same channel of one or two pictures.
    pub(super) pack_pictures: unsafe fn(&Pack),
    /// Transforms a row of inputs, whose segments overlap.
    pub(super) transform_input: TransformFn,
    /// Transforms a row of the output's gradient.
    pub(super) transform_gradient: TransformFn,
    /// Computes the outputs of a segment.
    pub(super) segment_outputs: unsafe fn(&SegmentOutputs),
    pack_rows: unsafe fn(&[f32], usize, &mut [f32]),
    transpose: unsafe fn(&[f32; 256], &mut [f32; 256]),
}

/// Instruction sets. A fused multiply-add rounds once, a separate multiplication and addition round twice, so
/// the last bits of results differ between machines with and without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instructions {
    /// AMX: a matrix unit, only for bfloat16. Packs as [`Self::Avx512`] does.
    Amx,
    /// AVX-512F: 512-bit vectors, 32 registers.
    Avx512,
    /// AVX2 with FMA: 256-bit vectors, 16 registers.
    Avx2,
    /// Baseline instructions of the architecture.
    Plain,
}

impl Instructions {
    /// Fastest first.
    pub const ALL: [Instructions; 4] =
        [Instructions::Amx, Instructions::Avx512, Instructions::Avx2, Instructions::Plain];
}

/// The number format in which inputs are multiplied. Sums are float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Float32,
    /// Inputs are rounded to bfloat16, to nearest even.
    Bfloat16,
}

impl Format {
    pub const ALL: [Format; 2] = [Format::Float32, Format::Bfloat16];

    /// Whether this machine has instructions for the format: AVX512-BF16 for bfloat16. Without them, bfloat16 is many times slower than
    /// float32.
    pub fn is_fast(self) -> bool {
        self == Format::Float32 || Tiles::of(Instructions::Avx512, self).is_some()
    }
}

impl Tiles {
    /// The tiles for `instructions` and `format`, if this machine supports them.
    pub(super) fn of(instructions: Instructions, format: Format) -> Option<&'static Tiles> {
        match (instructions, format) {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            (Instructions::Amx, Format::Bfloat16) => Self::of(Instructions::Avx512, format)
                .filter(|_| amx::is_available())
                .and(Some(&x86::AMX_BF16)),
            #[cfg(target_arch = "x86_64")]
            (Instructions::Avx512, Format::Float32) => {
                is_x86_feature_detected!("avx512f").then_some(&x86::AVX512)
            }
            #[cfg(target_arch = "x86_64")]
            (Instructions::Avx512, Format::Bfloat16) => (is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512bf16"))
            .then_some(&x86::AVX512_BF16),
            #[cfg(target_arch = "x86_64")]
            (Instructions::Avx2, Format::Float32) => {
                (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(&x86::AVX2)
            }
            (Instructions::Plain, Format::Float32) => Some(&PLAIN),
            (Instructions::Plain, Format::Bfloat16) => Some(&PLAIN_BF16),
            _ => None,
        }
    }

    /// Number of blocks of output channels that the next tile for `pictures` computes, if `blocks` full blocks remain.
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
        self.product[pictures - 1][blocks / 2]
            .unwrap_or_else(|| unreachable!("`blocks` must come from product_blocks"))
    }

    /// The tile for one block that is not full.
    pub(super) fn product_part(&self, pictures: usize) -> ProductFn {
        self.product[pictures - 1][3].unwrap_or_else(|| unreachable!("every row has one"))
    }

    /// Number of blocks of output channels that the next outer-product tile for `channels` input channels computes, if `blocks`
    /// remain. Four if a tile of four blocks covers all channels. Otherwise two, if a tile of two blocks covers all channels or at least
    /// eight of them.
    pub(super) fn outer_blocks(&self, channels: usize, blocks: usize) -> usize {
        let has_tile = |blocks: usize, min_channels: usize| {
            self.outer
                .iter()
                .any(|(channels, tiles)| *channels >= min_channels && tiles[blocks / 2].is_some())
        };
        match blocks {
            4.. if has_tile(4, channels) => 4,
            2.. if has_tile(2, channels.min(8)) => 2,
            _ => 1,
        }
    }

    /// The number of input channels of the next tile, and the tile, for 1, 2 or 4 blocks of output channels, if `channels` input channels
    /// remain: the narrowest tile that covers them, or else the widest.
    pub(super) fn outer(&self, channels: usize, blocks: usize) -> (usize, OuterFn) {
        let mut best = None;
        for (tile_channels, tiles) in self.outer {
            if let Some(tile) = tiles[blocks / 2] {
                best = Some((*tile_channels, tile));
                if *tile_channels >= channels {
                    break;
                }
            }
        }
        best.unwrap_or_else(|| unreachable!("`blocks` must come from outer_blocks"))
    }

    /// Transposes 16 rows of 16 floats.
    pub(super) fn transpose(&self, from: &[f32; 256], to: &mut [f32; 256]) {
        // SAFETY: `of` hands out tiles that this machine can run.
        unsafe { (self.transpose)(from, to) }
    }

    /// Packs rows of weights, `[row][lane]`, of at most 16 lanes.
    pub(super) fn pack_rows(&self, from: &[f32], lanes: usize, to: &mut [f32]) {
        assert!(lanes <= 16 && to.len() >= (from.len() / lanes).div_ceil(self.values_per_unit) * lanes);
        // SAFETY: `to` is large enough; `of` hands out tiles that this machine can run.
        unsafe { (self.pack_rows)(from, lanes, to) }
    }
}

/// `Some(tile)` for `yes` in the table, else `None`.
macro_rules! when {
    (yes $tile:expr) => {
        Some($tile)
    };
    (no $tile:expr) => {
        None
    };
}

/// Defines the tiles for one vector type and number format: functions that enable the instructions, and a table of them. `product
/// [1: yes no]` are the tiles for 1 picture: the words say whether tiles of two and of four blocks exist (a tile of one block always
/// exists). `outer [8: yes yes no]` are the tiles for 8 input channels, of one, two and four blocks.
macro_rules! tiles {
    ($name:ident, $vector:ty, $format:ident, $(#[$feature:meta])?, group $group:literal,
     product [$($p:literal: $two:ident $four:ident),* $(,)?],
     outer [$($i:literal: $outer_1:ident $outer_2:ident $outer_4:ident),* $(,)?]) => {
        pub(super) static $name: super::Tiles = {
            use crate::conv::tile::{
                Arithmetic, Format, Outer, Pack, Product, SegmentOutputs, Segments, Tiles, Vector, outer,
                pack_channels, pack_pictures, pack_rows, product, segments,
            };
            $(#[$feature])?
            unsafe fn product_at<const P: usize, const V: usize, const PART: bool>(t: &Product<'_>) {
                product::<$vector, $format, P, V, PART>(t)
            }
            $(#[$feature])?
            unsafe fn outer_at<const I: usize, const V: usize>(t: &Outer<'_>) {
                outer::<$vector, $format, I, V>(t)
            }
            $(#[$feature])?
            unsafe fn pack_channels_of(t: &Pack) {
                pack_channels::<$vector, $format>(t)
            }
            $(#[$feature])?
            unsafe fn pack_pictures_of(t: &Pack) {
                pack_pictures::<$vector, $format>(t)
            }
            $(#[$feature])?
            unsafe fn transform_input_of(t: &Segments) {
                segments::transform::<$vector, true>(t)
            }
            $(#[$feature])?
            unsafe fn transform_gradient_of(t: &Segments) {
                segments::transform::<$vector, false>(t)
            }
            $(#[$feature])?
            unsafe fn segment_outputs_of(t: &SegmentOutputs) {
                segments::outputs::<$vector>(t)
            }
            $(#[$feature])?
            unsafe fn pack_rows_of(from: &[f32], lanes: usize, to: &mut [f32]) {
                pack_rows::<$vector, $format>(from, lanes, to)
            }
            $(#[$feature])?
            unsafe fn transpose_block(from: &[f32; 256], to: &mut [f32; 256]) {
                <$vector>::transpose(from, to)
            }
            Tiles {
                format: Format::$format,
                values_per_unit: <$format as Arithmetic<$vector>>::VALUES,
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
                pack_channels: pack_channels_of,
                pack_pictures: pack_pictures_of,
                transform_input: transform_input_of,
                transform_gradient: transform_gradient_of,
                segment_outputs: segment_outputs_of,
                pack_rows: pack_rows_of,
                transpose: transpose_block,
            }
        };
    };
}

use plain::{PLAIN, PLAIN_BF16};
mod plain {
    use super::super::vector::{Bfloat16, Float32, Plain};

    tiles!(PLAIN, Plain, Float32, , group 4,
        product [1: no no, 2: no no, 3: no no, 4: no no],
        outer [1: yes no no, 3: yes no no, 4: yes no no]);
    tiles!(PLAIN_BF16, Plain, Bfloat16, , group 4,
        product [1: no no, 2: no no, 3: no no, 4: no no],
        outer [1: yes no no, 3: yes no no, 4: yes no no]);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::vector::{Avx2, Avx512, Bfloat16, Float32};

    // 16 registers of 8 floats; a block is two registers. Six pictures need 6 x 2 registers for sums, two for weights, and one for the
    // broadcast input.
    tiles!(AVX2, Avx2, Float32, #[target_feature(enable = "avx2,fma")], group 6,
        product [1: no no, 2: no no, 3: no no, 4: no no, 5: no no, 6: no no],
        outer [1: yes no no, 3: yes no no, 4: yes no no, 6: yes no no]);

    // 32 registers of 16 floats: at most 28 sums, two weights, one broadcast.
    macro_rules! avx512 {
        ($name:ident, $format:ident, $features:literal) => {
            tiles!($name, Avx512, $format, #[target_feature(enable = $features)], group 14,
                product [1: yes yes, 2: yes yes, 3: yes yes, 4: yes yes, 5: yes yes, 6: yes yes, 7: yes no,
                         8: yes no, 9: yes no, 10: yes no, 11: yes no, 12: yes no, 13: yes no, 14: yes no],
                outer [1: yes yes yes, 3: yes yes yes, 4: yes yes yes, 8: yes yes no, 16: yes no no]);
        };
    }
    avx512!(AVX512, Float32, "avx512f");
    avx512!(AVX512_BF16, Bfloat16, "avx512f,avx512bw,avx512bf16");

    #[cfg(target_os = "linux")]
    pub(super) static AMX_BF16: super::Tiles = {
        use super::amx::{outer, product};
        const PRODUCT: [Option<super::ProductFn>; 4] =
            [Some(product::<1>), Some(product::<2>), Some(product::<4>), Some(product::<1>)];
        super::Tiles {
            group: 16,
            product: &[PRODUCT; 16],
            outer: &[(16, [Some(outer::<1>), Some(outer::<2>), Some(outer::<4>)])],
            ..AVX512_BF16
        }
    };
}
