//! The linear layer: y = x W^T + b, with PyTorch's `[out, in]` weights.

#![allow(unsafe_code)] // The `gemm` crate takes pointers; `multiply` checks the slices against them.

/// A matrix in a slice. `row_step` and `column_step` are strides in values.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_step: usize,
    column_step: usize,
}

impl<'a> Matrix<'a> {
    pub(crate) fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        Self { values, rows, columns, row_step: columns, column_step: 1 }
    }

    pub(crate) fn transposed(self) -> Self {
        let Self { values, rows, columns, row_step, column_step } = self;
        Self { values, rows: columns, columns: rows, row_step: column_step, column_step: row_step }
    }

    fn fits(&self) -> bool {
        self.rows == 0
            || self.columns == 0
            || (self.rows - 1) * self.row_step + (self.columns - 1) * self.column_step < self.values.len()
    }
}

/// `out = a b`, row-major, on this thread.
pub(crate) fn multiply(a: Matrix<'_>, b: Matrix<'_>, out: &mut [f32]) {
    assert!(a.fits() && b.fits() && a.columns == b.rows && out.len() == a.rows * b.columns);
    if a.columns == 0 || out.is_empty() {
        out.fill(0.0);
        return;
    }
    // SAFETY: the assertion above keeps every index that the strides reach in bounds. `out` is borrowed
    // mutably, so it does not overlap with `a` or `b`.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            out.as_mut_ptr(),
            1,
            b.columns as isize,
            false, // Does not read `out`.
            a.values.as_ptr(),
            a.column_step as isize,
            a.row_step as isize,
            b.values.as_ptr(),
            b.column_step as isize,
            b.row_step as isize,
            0.0f32, // The factor of the previous `out`.
            1.0f32, // The factor of the product.
            false,  // No conjugates, which only complex numbers have.
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Number of rows multiplied at a time. It is fixed, so the bits of a picture's result do not depend on the batch size.
const ROWS: usize = 8;

/// `y` `[batch, out]` from `x` `[batch, in]`.
pub fn forward(x: &[f32], weight: &[f32], bias: &[f32], y: &mut [f32]) {
    let outputs = bias.len();
    let inputs = weight.len() / outputs;
    let weight = Matrix::new(weight, outputs, inputs).transposed();
    for (x, y) in x.chunks(ROWS * inputs).zip(y.chunks_mut(ROWS * outputs)) {
        multiply(Matrix::new(x, x.len() / inputs, inputs), weight, y);
    }
    for row in y.chunks_exact_mut(outputs) {
        for (y, b) in row.iter_mut().zip(bias) {
            *y += b;
        }
    }
}

/// Overwrites `dx` `[batch, in]` with the gradient of the input.
pub fn backward_input(dy: &[f32], weight: &[f32], outputs: usize, dx: &mut [f32]) {
    let inputs = weight.len() / outputs;
    let weight = Matrix::new(weight, outputs, inputs);
    for (dy, dx) in dy.chunks(ROWS * outputs).zip(dx.chunks_mut(ROWS * inputs)) {
        multiply(Matrix::new(dy, dy.len() / outputs, outputs), weight, dx);
    }
}

/// Overwrites `dweight` `[out, in]` with the gradient of the weights.
pub fn backward_weight(x: &[f32], dy: &[f32], outputs: usize, dweight: &mut [f32]) {
    let batch = dy.len() / outputs;
    let inputs = dweight.len() / outputs;
    multiply(Matrix::new(dy, batch, outputs).transposed(), Matrix::new(x, batch, inputs), dweight);
}

/// Overwrites `dbias` `[out]` with the gradient of the bias.
pub fn backward_bias(dy: &[f32], dbias: &mut [f32]) {
    dbias.fill(0.0);
    for row in dy.chunks_exact(dbias.len()) {
        for (b, dy) in dbias.iter_mut().zip(row) {
            *b += dy;
        }
    }
}
