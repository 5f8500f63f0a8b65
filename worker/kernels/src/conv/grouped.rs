//! Grouped convolutions. Tiles compute whole blocks of [`LANES`](super::LANES) output channels from the same inputs, so narrower groups
//! are merged until they fill blocks: one wider group in which weights between merged groups are zero. The zeros do not change
//! sums, but a non-finite value affects the outputs of all groups that are merged with its own.
//!
//! ResNeXt-50 32x4d computes four times the necessary products in its first stage, and twice the necessary products in its second
//! stage. Most of its work is in 1x1 convolutions, which are not grouped.

use super::{ConvShape, memory::Buffer};

/// `s` with the largest number of groups that have whole blocks of channels on both sides, or with a single group. A block has `lanes`
/// channels: [`LANES`](super::LANES), or more where a lane has several channels.
pub(super) fn merged_shape(s: &ConvShape, lanes: usize) -> ConvShape {
    // The number of groups that must be merged to fill blocks. `lanes` is a power of two, so the numbers for both sides are powers of
    // two, and the larger number is a multiple of the smaller one.
    let to_fill = |channels: usize| lanes >> channels.trailing_zeros().min(lanes.trailing_zeros());
    let merged = to_fill(s.group_in_c()).max(to_fill(s.group_out_c()));
    let groups = if s.groups.is_multiple_of(merged) { s.groups / merged } else { 1 };
    ConvShape { groups, ..*s }
}

/// Converts the weights of `s` to those of `merged`.
pub(super) fn merge_weights<'a>(
    s: &ConvShape,
    merged: &ConvShape,
    w: &'a [f32],
    to: &'a mut Buffer,
) -> &'a [f32] {
    if merged.groups == s.groups {
        return w;
    }
    let to = to.get(merged.weight_len());
    to.fill(0.0);
    each_weight(s, merged, |own, wide| to[wide] = w[own]);
    to
}

/// Calls `f` with the index of every weight of `s` in the weights of `s` and in the weights of `merged`.
pub(super) fn each_weight(s: &ConvShape, merged: &ConvShape, mut f: impl FnMut(usize, usize)) {
    let (inputs, merged_inputs) = (s.group_in_c(), merged.group_in_c());
    for out in 0..s.out_c {
        let first = out / s.group_out_c() * inputs % merged_inputs;
        for ky in 0..s.kernel {
            for kx in 0..s.kernel {
                for input in 0..inputs {
                    let wide = merged.weight_index(out, ky, kx, first + input);
                    f(s.weight_index(out, ky, kx, input), wide);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::LANES, *};

    #[test]
    fn groups_are_merged_only_until_they_fill_blocks() {
        for (in_c, out_c, groups, expected) in [
            // ResNeXts: 4, 8, 16, 32 and 64 channels per group.
            (128, 128, 32, 8),
            (256, 256, 32, 16),
            (512, 512, 32, 32),
            (1024, 1024, 32, 32),
            (2048, 2048, 32, 32),
            // Both sides must have whole blocks: groups of 24 channels have them if pairs of groups are merged.
            (64, 128, 4, 4),
            (64, 32, 4, 2),
            (96, 96, 4, 2),
            (128, 16, 8, 1),
            // No number of groups gives whole blocks.
            (6, 9, 3, 1),
            (8, 8, 2, 1),
            (80, 80, 16, 1),
            (3, 64, 1, 1),
            (64, 64, 1, 1),
        ] {
            let s = ConvShape {
                batch: 1,
                in_h: 4,
                in_w: 4,
                in_c,
                out_c,
                kernel: 3,
                stride: 1,
                padding: 1,
                row_padding: 1,
                groups,
            };
            assert_eq!(merged_shape(&s, LANES).groups, expected, "{groups} groups of {in_c} -> {out_c}");
        }
    }
}
