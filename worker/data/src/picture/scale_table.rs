//! Weights of bilinear resizing along one axis, for a GPU.

use std::ops::Range;

/// Weights of bilinear scaling along one axis: half-pixel centres, and a triangle that widens when the picture is
/// reduced. The weights are in 16-bit fixed point, exactly as in the host's resizer (crate `fast_image_resize`,
/// `ResizeAlg::Convolution(FilterType::Bilinear)` on bytes), so that both produce the same pictures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaleTable {
    /// For each output pixel: the index of the first input pixel, the number of input pixels, then `taps` weights (unused
    /// weights are 0). Uploaded to the GPU unchanged.
    pub entries: Vec<i32>,
    /// The largest number of input pixels of an output pixel.
    pub taps: u32,
    /// Number of fraction bits of a weight.
    pub shift: u32,
}

impl ScaleTable {
    /// The table for scaling `from` pixels to `to`; neither may be 0.
    pub fn new(from: u32, to: u32) -> Self {
        Self::window(from, 0.0, f64::from(from), to)
    }

    /// The table that scales the window [`first`, `first + length`) of a row of `from` pixels to `to` pixels. The filter
    /// also uses the pixels around this window.
    pub fn window(from: u32, first: f64, length: f64, to: u32) -> Self {
        // The same computation as in the host's resizer, for equal rounding.
        let scale = ((first + length) - first) / f64::from(to);
        let radius = scale.max(1.0);
        let inverse_radius = 1.0 / radius;
        let max_taps = radius.ceil() as usize * 2 + 1;
        // The first input pixel, the number of input pixels and the weights of each output pixel.
        let (mut starts, mut counts) = (Vec::with_capacity(to as usize), Vec::with_capacity(to as usize));
        let mut weights = Vec::with_capacity(to as usize * max_taps);
        for out in 0..to {
            let centre = first + (f64::from(out) + 0.5) * scale;
            let inputs = (centre - radius).floor().max(0.0) as u32
                ..(centre + radius).ceil().min(f64::from(from)) as u32;
            let middle = centre - 0.5;
            let first_weight = weights.len();
            let mut start = inputs.start;
            for x in inputs {
                let weight = (1.0 - ((f64::from(x) - middle) * inverse_radius).abs()).max(0.0);
                // Input pixels with weight 0 at both ends are left out.
                if weight == 0.0 && weights.len() == first_weight {
                    start = x + 1;
                } else {
                    weights.push(weight);
                }
            }
            while weights.len() > first_weight && weights.last() == Some(&0.0) {
                weights.pop();
            }
            let total: f64 = weights[first_weight..].iter().sum();
            weights[first_weight..].iter_mut().for_each(|w| *w /= total);
            starts.push(start as i32);
            counts.push(weights.len() - first_weight);
        }
        let largest = weights.iter().fold(0.0f64, |a, b| a.max(*b));
        // Use as many fraction bits as keep every weight below 2^15, and at most 21: the weighted sum of the input bytes
        // must fit in 32 bits.
        let shift = (0..21).find(|s| (largest * f64::from(1u32 << (s + 1))).round() >= 32768.0).unwrap_or(21);
        let taps = counts.iter().copied().max().unwrap_or(1);
        let mut entries = Vec::with_capacity(starts.len() * (2 + taps));
        let mut weights = weights.into_iter();
        for (start, count) in starts.into_iter().zip(counts) {
            entries.extend([start, count as i32]);
            let weights_of_output = weights.by_ref().take(count);
            entries.extend(weights_of_output.map(|w| (w * f64::from(1u32 << shift)).round() as i32));
            entries.resize(entries.len() + taps - count, 0);
        }
        Self { entries, taps: taps as u32, shift }
    }

    /// The maximum number of input pixels that `band` neighbouring output pixels (starting at a multiple of `band`) need.
    pub fn span(&self, band: u32) -> u32 {
        let outputs: Vec<&[i32]> = self.entries.chunks_exact(2 + self.taps as usize).collect();
        let spans = outputs.chunks(band.max(1) as usize).filter_map(|neighbours| {
            match (neighbours.first()?, neighbours.last()?) {
                ([first, ..], [last, count, ..]) => Some((last + count - first) as u32),
                _ => None,
            }
        });
        spans.max().unwrap_or(1)
    }

    /// The range of input pixels that any output pixel needs.
    pub fn inputs(&self) -> Range<u32> {
        let outputs = || self.entries.chunks_exact(2 + self.taps as usize);
        let first = outputs().map(|o| o[0]).min().unwrap_or(0);
        let end = outputs().map(|o| o[0] + o[1]).max().unwrap_or(0);
        first as u32..end as u32
    }
}
