//! Kernels that make the network's input from pictures on the GPU; `gather.cu`.

use super::{Arg, CONTROL, Geometry, Kernel, Operand, Ops, Region, kernel, plain};

pub(in crate::cuda) use lockstep_data::device::ScaleTable;

/// Which pictures a batch has, and whether they are augmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::cuda) enum GatherMode {
    /// The pictures with the control block's indices, augmented by its parameters: bits 0 to 14 are the top of the crop window, bits 15 to
    /// 29 the left (both from 0 to 2 x padding), bit 30 is the flip. The border mirrors the picture if `reflects` is set, else is black.
    Augmented { crop_padding: u32, reflects: bool },
    /// As `Augmented`, with mixed pictures; see `gather_mixed.cu`.
    Mixed { crop_padding: u32, reflects: bool },
    /// The pictures with the control block's indices, not augmented. Exception: pictures whose augmentation parameters have bit 31 are the
    /// views that an evaluation averages, and are shifted and flipped.
    Indexed,
    /// The first pictures in order, not augmented, for a batch that the host has made.
    InOrder,
}

/// The pictures of the dataset or of the batch.
const PICTURES: Operand = Operand::whole(Region::Pictures);

/// The network's input.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct BatchInput {
    /// Number of pictures of the batch, including padding, which becomes zeros.
    pub(in crate::cuda) pictures: u32,
    pub(in crate::cuda) side: u32,
    /// 1 or 3.
    pub(in crate::cuda) channels: u32,
    /// T `[pictures, side, side, padded]`, or [folded](Ops::fold_border).
    pub(in crate::cuda) output: Operand,
    /// Number of output channels, 4 or 8 (4 if folded). Channels past the first `channels` are zeros.
    pub(in crate::cuda) padded: u32,
    /// Whether the output is [folded](Ops::fold_border).
    pub(in crate::cuda) is_folded: bool,
}

fn scale_args(table: &ScaleTable, region: Region) -> [Arg; 3] {
    [Arg::In(Operand::whole(region)), Arg::U32(table.taps), Arg::U32(table.shift)]
}

/// A flag of `Source::mode` in `gather.cu`, which also documents the modes 0 to 2.
const REFLECTS: u32 = 4;
/// Maximum number of output rows of a block in kernels that scale.
const BAND: u32 = 32;
/// Bytes of dynamic shared memory that a block can use without opt-in: 48 KiB minus the normalisation table.
const SHARED_BYTES: u32 = 44 << 10;

impl Ops {
    /// Gathers a batch from pictures `uint8 [count, height, width, channels]`. `scaling` has the resampling tables from
    /// height and from width to side; `None` if height = width = side. Traffic: mixed pictures' bytes twice.
    ///
    /// Wide pictures, for which one output row reads more than 44 KiB, need more shared memory than the default limit. The launcher has to
    /// raise the kernel's limit to `shared_bytes`.
    pub(in crate::cuda) fn gather(
        &self,
        p: BatchInput,
        [height, width]: [u32; 2],
        mode: GatherMode,
        scaling: Option<[&ScaleTable; 2]>,
    ) -> Kernel {
        // A mixed picture has two sources.
        let (names, sources) = match mode {
            GatherMode::Mixed { .. } => (["gather_mixed", "gather_scaled_mixed"], 2),
            _ => (["gather", "gather_scaled"], 1),
        };
        let (mode, crop_padding) = match mode {
            GatherMode::Augmented { crop_padding, reflects }
            | GatherMode::Mixed { crop_padding, reflects } => {
                (if reflects { REFLECTS } else { 0 }, crop_padding)
            }
            GatherMode::Indexed => (1, 0),
            GatherMode::InOrder => (2, 0),
        };
        let mut args = vec![Arg::In(PICTURES)];
        args.extend([height, width, p.channels, p.side, crop_padding, mode].map(Arg::U32));
        args.extend([Arg::In(CONTROL), Arg::U32(p.pictures), Arg::In(Operand::whole(Region::Normalisation))]);
        args.extend([Arg::out(p.output, p.is_folded), Arg::U32(p.padded), Arg::U32(p.is_folded.into())]);
        let blocks = self.multiprocessors * 8;
        let pictures = p.pictures.max(1);
        let Some([rows, columns]) = scaling else {
            // Each block loads a table of 3 KB, so a thread computes several pixels if there are enough.
            let x = (p.side * p.side).div_ceil(256).min(blocks.div_ceil(pictures)).max(1);
            return kernel(names[0], plain([x, pictures, 1], [256, 1, 1]), args);
        };
        let shared_bytes = |band: u32| (rows.span(band) + sources * band) * width * 4;
        let mut band = BAND.min(p.side);
        while band > 1 && shared_bytes(band) > SHARED_BYTES {
            band /= 2;
        }
        while band > 4 && pictures * p.side.div_ceil(band) < self.multiprocessors * 2 {
            band /= 2;
        }
        args.extend(scale_args(rows, Region::ScaleRows));
        args.extend(scale_args(columns, Region::ScaleColumns));
        args.extend([Arg::U32(band), Arg::U32(rows.span(band))]);
        let without_memory = plain([p.side.div_ceil(band), pictures, 1], [256, 1, 1]);
        let geometry = Geometry { shared_bytes: shared_bytes(band), ..without_memory };
        kernel(names[1], geometry, args)
    }

    /// Converts normalised float32 pictures `[pictures, side, side, channels]`, made by the host, to T.
    pub(in crate::cuda) fn pad_channels(&self, p: BatchInput) -> Kernel {
        let mut args = vec![Arg::In(PICTURES), Arg::out(p.output, p.is_folded), Arg::In(CONTROL)];
        args.extend([p.pictures, p.side, p.channels, p.padded, p.is_folded.into()].map(Arg::U32));
        let pixels = u64::from(p.pictures) * u64::from(p.side) * u64::from(p.side);
        kernel("pad_channels", self.per_item(pixels, 8), args)
    }

    /// Zeros the border of a folded input, T `[pictures, side / 2 + 3, side / 2 + 3, 16]`. [`Ops::gather`] or
    /// [`Ops::pad_channels`] writes the other pixels, each from 2x2 pixels of the picture, row by row, with 4 channels each.
    /// The border is two pixels wide at the top and left, and one at the bottom and right.
    pub(in crate::cuda) fn fold_border(&self, to: Operand, pictures: u32, side: u32) -> Kernel {
        let folded_side = side / 2 + 3;
        let args = [Arg::Out(to), Arg::U32(side)];
        let blocks = (folded_side * folded_side * 2).div_ceil(256).clamp(1, 8);
        kernel("fold_border", plain([blocks, pictures.max(1), 1], [256, 1, 1]), args)
    }

    /// Zeros the gradients of a folded convolution's weights, T `[out, 4, 4, 16]` with `values` values, that correspond to no
    /// weight of the 7x7 convolution.
    pub(in crate::cuda) fn fold_gradient(&self, gradient: Operand, values: u32) -> Kernel {
        let groups = values / 8;
        let args = [Arg::InOut(gradient), Arg::U32(groups)];
        kernel("fold_gradient", plain([groups.div_ceil(256), 1, 1], [256, 1, 1]), args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fast_image_resize::{
        FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer, images::Image, images::ImageRef,
    };

    /// Scales `lines` lines of `source` to `scaled_len` pixels each, as the kernel does. Lines begin `line_stride` values apart, and the
    /// pixels of a line are `pixel_stride` values apart.
    fn scaled(
        source: &[u8],
        table: &ScaleTable,
        lines: usize,
        line_stride: usize,
        pixel_stride: usize,
        scaled_len: usize,
    ) -> Vec<u8> {
        let mut out = vec![0; lines * scaled_len];
        for l in 0..lines {
            for (o, entry) in table.entries.chunks_exact(2 + table.taps as usize).enumerate() {
                let mut sum = 1 << (table.shift - 1);
                for (k, w) in entry[2..2 + entry[1] as usize].iter().enumerate() {
                    sum += i32::from(source[l * line_stride + (entry[0] as usize + k) * pixel_stride]) * w;
                }
                let at = if pixel_stride == 1 { l * scaled_len + o } else { o * lines + l };
                out[at] = (sum >> table.shift).min(255) as u8;
            }
        }
        out
    }

    #[test]
    fn the_gpu_s_scaling_equals_the_host_s() {
        for (height, width, side) in [(32usize, 32usize, 224usize), (28, 28, 96), (97, 61, 40), (5, 300, 64)]
        {
            let source: Vec<u8> = (0..height * width)
                .map(|i| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0])
                .collect();
            let (rows, columns) =
                (ScaleTable::new(height as u32, side as u32), ScaleTable::new(width as u32, side as u32));
            let vertical = scaled(&source, &rows, width, 1, width, side);
            let resized = scaled(&vertical, &columns, side, width, 1, side);
            let mut host = Image::new(side as u32, side as u32, PixelType::U8);
            let picture = ImageRef::new(width as u32, height as u32, &source, PixelType::U8).unwrap();
            let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
            Resizer::new().resize(&picture, &mut host, &options).unwrap();
            assert!(host.buffer() == resized, "{height} x {width} to {side}");
        }
    }
}
