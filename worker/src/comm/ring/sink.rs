//! Where received bytes go.

use super::BLOCK;
use std::{
    io::{self, Read},
    net::TcpStream,
};

/// Takes bytes from a connection.
pub(super) trait Sink {
    /// Bytes still to come.
    fn wanted(&self) -> usize;
    fn take(&mut self, from: &mut &TcpStream) -> io::Result<usize>;
}

/// Into a buffer as they are.
pub(super) struct Fill<'a> {
    buffer: &'a mut [u8],
    filled: usize,
}

impl<'a> Fill<'a> {
    pub(super) fn new(buffer: &'a mut [u8]) -> Self {
        Self { buffer, filled: 0 }
    }
}

impl Sink for Fill<'_> {
    fn wanted(&self) -> usize {
        self.buffer.len() - self.filled
    }

    fn take(&mut self, from: &mut &TcpStream) -> io::Result<usize> {
        let end = self.buffer.len().min(self.filled + 8 * BLOCK);
        let taken = from.read(&mut self.buffer[self.filled..end])?;
        self.filled += taken;
        Ok(taken)
    }
}

/// Combined with `target` value by value, block by block.
pub(super) struct Combine<'a, T, F> {
    pub(super) target: &'a mut [T],
    /// What becomes of a target and what came in.
    pub(super) combine: F,
    /// Values combined.
    pub(super) done: usize,
    pub(super) block: &'a mut [T],
    /// Bytes of a value that is not whole yet, at the block's start.
    pub(super) held: usize,
}

impl<T: bytemuck::Pod, F: Fn(T, T) -> T> Sink for Combine<'_, T, F> {
    fn wanted(&self) -> usize {
        size_of_val(&self.target[self.done..]) - self.held
    }

    fn take(&mut self, from: &mut &TcpStream) -> io::Result<usize> {
        let wanted = self.wanted();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.block);
        let room = (bytes.len() - self.held).min(wanted);
        let taken = from.read(&mut bytes[self.held..self.held + room])?;
        let total = self.held + taken;
        let whole = total / size_of::<T>();
        for (target, value) in self.target[self.done..].iter_mut().zip(&self.block[..whole]) {
            *target = (self.combine)(*target, *value);
        }
        self.done += whole;
        self.held = total % size_of::<T>();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.block);
        bytes.copy_within(whole * size_of::<T>()..total, 0);
        Ok(taken)
    }
}
