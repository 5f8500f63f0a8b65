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

/// Added to `target` as values, block by block.
pub(super) struct Add<'a> {
    pub(super) target: &'a mut [f32],
    /// Values added.
    pub(super) done: usize,
    pub(super) block: &'a mut [f32],
    /// Bytes of a value that is not whole yet, at the block's start.
    pub(super) held: usize,
}

impl Sink for Add<'_> {
    fn wanted(&self) -> usize {
        (self.target.len() - self.done) * 4 - self.held
    }

    fn take(&mut self, from: &mut &TcpStream) -> io::Result<usize> {
        let wanted = self.wanted();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.block);
        let room = (bytes.len() - self.held).min(wanted);
        let taken = from.read(&mut bytes[self.held..self.held + room])?;
        let total = self.held + taken;
        let whole = total / 4;
        for (target, value) in self.target[self.done..].iter_mut().zip(&self.block[..whole]) {
            *target += value;
        }
        self.done += whole;
        self.held = total % 4;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.block);
        bytes.copy_within(whole * 4..total, 0);
        Ok(taken)
    }
}
