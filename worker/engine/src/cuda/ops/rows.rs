//! Rows of pictures that ranks share; `rows.cu`.

use super::{Arg, Kernel, Operand, Ops, kernel, plain};

/// Copies a range of rows of each picture; the range may extend beyond the picture.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct TakeRows {
    /// T `[pictures, from_rows, length]`.
    pub(in crate::cuda) from: Operand,
    /// T `[pictures, to_rows, length]`.
    pub(in crate::cuda) to: Operand,
    pub(in crate::cuda) pictures: usize,
    /// Number of values of a row, a multiple of 4.
    pub(in crate::cuda) length: usize,
    pub(in crate::cuda) from_rows: usize,
    pub(in crate::cuda) to_rows: usize,
    /// Index of the row of `from` that becomes the first row of `to`. It may be negative.
    pub(in crate::cuda) offset: isize,
    /// Value of the rows that `from` does not have.
    pub(in crate::cuda) fill: f32,
}

/// Adds `part` to a range of rows of each picture of `to`.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct AddRows {
    /// T `[pictures, rows, length]`.
    pub(in crate::cuda) part: Operand,
    /// T `[pictures, to_rows, length]`.
    pub(in crate::cuda) to: Operand,
    pub(in crate::cuda) pictures: usize,
    /// Number of values of a row, a multiple of 4.
    pub(in crate::cuda) length: usize,
    pub(in crate::cuda) rows: usize,
    pub(in crate::cuda) to_rows: usize,
    /// Index of the row of `to` to which the first row of `part` is added.
    pub(in crate::cuda) first: usize,
}

impl Ops {
    pub(in crate::cuda) fn take_rows(&self, p: TakeRows) -> Kernel {
        let mut args = vec![Arg::In(p.from), Arg::Out(p.to)];
        args.extend([p.pictures, p.length / 4, p.from_rows, p.to_rows].map(|number| Arg::U32(number as u32)));
        args.extend([Arg::U32((p.offset as i32).cast_unsigned()), Arg::F32(p.fill)]);
        self.lines("take_rows", p.pictures * p.to_rows, args)
    }

    pub(in crate::cuda) fn add_rows(&self, p: AddRows) -> Kernel {
        let mut args = vec![Arg::In(p.part), Arg::InOut(p.to)];
        let numbers = [p.pictures, p.length / 4, p.rows, p.to_rows, p.first];
        args.extend(numbers.map(|number| Arg::U32(number as u32)));
        self.lines("add_rows", p.pictures * p.rows, args)
    }

    /// A kernel whose blocks divide `lines` among themselves.
    fn lines(&self, name: &'static str, lines: usize, args: Vec<Arg>) -> Kernel {
        let blocks = (lines as u32).clamp(1, self.multiprocessors * 8);
        kernel(name, plain([blocks, 1, 1], [256, 1, 1]), args)
    }
}
