//! Descriptions of convolutions, independent of the library that computes the convolutions.

use super::dtype::DType;

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
    /// A small convolution, for tests and to make cuDNN load its engines.
    pub(super) const EXAMPLE: Self = Self {
        direction: Direction::Forward,
        dtype: DType::F16,
        batch: 32,
        in_h: 32,
        in_w: 32,
        in_c: 64,
        out_h: 32,
        out_w: 32,
        out_c: 64,
        kernel: 3,
        stride: 1,
        padding: 1,
        row_padding: 1,
        groups: 1,
        sums: false,
    };

    /// Sizes of x, w and y in bytes.
    pub(super) fn bytes(&self) -> [usize; 3] {
        let size = self.dtype.size();
        [
            self.batch * self.in_h * self.in_w * self.in_c * size,
            self.out_c * self.kernel * self.kernel * self.group_in_c() * size,
            self.batch * self.out_h * self.out_w * self.out_c * size,
        ]
    }

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

    #[test]
    fn grouped_weights_have_the_input_channels_of_one_group() {
        let grouped = Convolution { groups: 32, ..Convolution::EXAMPLE };
        let ([x, w, y], plain) = (grouped.bytes(), Convolution::EXAMPLE.bytes());
        assert_eq!([x, 32 * w, y], plain);
        assert_eq!(w, 64 * 9 * 2 * 2);
        assert_eq!(grouped.to_string(), "convolution 32x32x64 -> 64, 3x3/1 in 32 groups");
    }
}
