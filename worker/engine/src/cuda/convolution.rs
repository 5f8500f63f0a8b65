//! Descriptions of convolutions, independent of the library that computes the convolutions.

use super::dtype::DType;

/// The direction of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Direction {
    /// y from x and w.
    Forward,
    /// dx from dy and w.
    Input,
    /// dw from x and dy.
    Weight,
}

/// A convolution: shapes, type and direction. The `Debug` text is the key in the cache of plans.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Convolution {
    pub(super) direction: Direction,
    pub(super) dtype: DType,
    /// Number of pictures.
    pub(super) batch: usize,
    pub(super) in_h: usize,
    pub(super) in_w: usize,
    pub(super) in_c: usize,
    pub(super) out_h: usize,
    pub(super) out_w: usize,
    pub(super) out_c: usize,
    pub(super) kernel: usize,
    pub(super) stride: usize,
    /// Number of padding columns on either side.
    pub(super) padding: usize,
    /// Number of padding rows on either side; 0 if the input includes the padding rows.
    pub(super) row_padding: usize,
    /// Number of groups, which must divide the numbers of channels of input and output. Each group computes an equal range of
    /// output channels from an equal range of input channels.
    pub(super) groups: usize,
    /// Whether a forward convolution also computes the sums of y and of y * y per channel, for the following batch norm.
    /// cuDNN supports this only for float16.
    pub(super) sums: bool,
}

impl Convolution {
    /// Sizes of x, w and y in bytes.
    pub(super) fn bytes(&self) -> [usize; 3] {
        let size = self.dtype.size();
        [
            self.batch * self.in_h * self.in_w * self.in_c * size,
            self.out_c * self.kernel * self.kernel * self.group_in_c() * size,
            self.batch * self.out_h * self.out_w * self.out_c * size,
        ]
    }

    /// Number of input channels of one group.
    pub(super) fn group_in_c(&self) -> usize {
        self.in_c / self.groups
    }
}

impl std::fmt::Display for Convolution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { in_h, in_w, in_c, out_c, kernel, stride, groups, .. } = self;
        let what = match self.direction {
            Direction::Forward => "convolution",
            Direction::Input => "convolution, gradient of input,",
            Direction::Weight => "convolution, gradient of weight,",
        };
        let grouped = if *groups == 1 { String::new() } else { format!(" in {groups} groups") };
        let sums = if self.sums { " with sums" } else { "" };
        write!(f, "{what} {in_h}x{in_w}x{in_c} -> {out_c}, {kernel}x{kernel}/{stride}{grouped}{sums}")
    }
}

/// A convolution's tensors, NHWC and KRSC (w has the input channels of one group): operands of a command, or addresses. In a backward
/// direction, `y` is dy, and `x` or `w` is the gradient that the convolution computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tensors<P> {
    pub(super) x: P,
    pub(super) w: P,
    pub(super) y: P,
    /// Output if [`Convolution::sums`] is set, float32 `[2, out_c]`.
    pub(super) channel_sums: P,
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Convolution = Convolution {
        direction: Direction::Forward,
        dtype: DType::F16,
        batch: 32,
        in_h: 56,
        in_w: 56,
        in_c: 128,
        out_h: 28,
        out_w: 28,
        out_c: 256,
        kernel: 3,
        stride: 2,
        padding: 1,
        row_padding: 1,
        groups: 1,
        sums: false,
    };

    #[test]
    fn grouped_weights_have_the_input_channels_of_one_group() {
        let grouped = Convolution { groups: 32, ..PLAIN };
        let ([x, w, y], plain) = (grouped.bytes(), PLAIN.bytes());
        assert_eq!((x, 32 * w, y), (plain[0], plain[1], plain[2]));
        assert_eq!(w, 256 * 9 * 4 * 2);
        assert_eq!(grouped.to_string(), "convolution 56x56x128 -> 256, 3x3/2 in 32 groups");
    }
}
