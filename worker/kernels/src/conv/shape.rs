//! The shape of a convolution.

/// A convolution with a square kernel over `batch` pictures, with the same stride for rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConvShape {
    pub batch: usize,
    /// Height of the input in pixels.
    pub in_h: usize,
    /// Width of the input in pixels.
    pub in_w: usize,
    /// Channels of the input.
    pub in_c: usize,
    /// Channels of the output.
    pub out_c: usize,
    /// Height and width of the kernel.
    pub kernel: usize,
    /// Distance, in input pixels, between the windows of neighbouring output pixels.
    pub stride: usize,
    /// Padding columns of zeros on either side of the input.
    pub padding: usize,
    /// Padding rows of zeros above and below the input: as `padding`, or 0 if the input already includes them.
    pub row_padding: usize,
    /// Number of groups, which divide the channels of input and output.
    pub groups: usize,
}

impl ConvShape {
    /// Height of the output in pixels.
    pub fn out_h(&self) -> usize {
        (self.in_h + 2 * self.row_padding - self.kernel) / self.stride + 1
    }

    /// Width of the output in pixels.
    pub fn out_w(&self) -> usize {
        (self.in_w + 2 * self.padding - self.kernel) / self.stride + 1
    }

    /// The input row that kernel row `kernel_row` covers at output row `row`. `None` if it is a row of padding.
    pub(super) fn input_row(&self, row: usize, kernel_row: usize) -> Option<usize> {
        (row * self.stride + kernel_row).checked_sub(self.row_padding).filter(|y| *y < self.in_h)
    }

    /// As [`ConvShape::input_row`], for columns.
    pub(super) fn input_column(&self, column: usize, kernel_column: usize) -> Option<usize> {
        (column * self.stride + kernel_column).checked_sub(self.padding).filter(|x| *x < self.in_w)
    }

    /// Number of weights.
    pub fn weight_len(&self) -> usize {
        self.out_c * self.kernel * self.kernel * self.group_in_c()
    }

    /// Input channels of a group.
    pub fn group_in_c(&self) -> usize {
        self.in_c / self.groups
    }

    /// Output channels of a group.
    pub fn group_out_c(&self) -> usize {
        self.out_c / self.groups
    }

    /// Number of input values, `batch * in_h * in_w * in_c`.
    pub fn input_len(&self) -> usize {
        self.batch * self.in_h * self.in_w * self.in_c
    }

    /// Number of output values, `batch * out_h * out_w * out_c`.
    pub fn output_len(&self) -> usize {
        self.batch * self.out_h() * self.out_w() * self.out_c
    }
}
