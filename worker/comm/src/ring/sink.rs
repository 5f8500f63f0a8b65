//! Destinations of received bytes.

use super::{BLOCK_BYTES, header::HEADER_BYTES};
use crate::CommError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    io::{self, Read},
    net::TcpStream,
    ops,
};

/// Time limit for reading a neighbour's header after the connection has failed. The neighbour may have sent the header
/// before it closed the connection.
const LAST_HEADER_WAIT_NS: i64 = 200_000_000;

/// Receives bytes from a connection.
pub(super) trait Sink {
    /// The number of bytes still expected.
    fn remaining(&self) -> usize;
    /// Reads the bytes that are available, up to [`Sink::remaining`], and returns their number.
    fn receive(&mut self, from: &mut &TcpStream) -> io::Result<usize>;
}

/// Copies bytes into a buffer.
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
    fn remaining(&self) -> usize {
        self.buffer.len() - self.filled
    }

    fn receive(&mut self, from: &mut &TcpStream) -> io::Result<usize> {
        // One read is limited to 1 MiB, so that `Link::exchange` also continues to send.
        let end = self.buffer.len().min(self.filled + 8 * BLOCK_BYTES);
        let received = from.read(&mut self.buffer[self.filled..end])?;
        self.filled += received;
        Ok(received)
    }
}

/// Adds the values that arrive to the values of `target`, block by block.
pub(super) struct Add<'a, T> {
    pub(super) target: &'a mut [T],
    /// The number of values already added.
    pub(super) done: usize,
    /// Scratch memory for one read: received values before they are added.
    pub(super) block: &'a mut [T],
    /// The number of bytes at the block's start that belong to an incomplete value.
    pub(super) incomplete_bytes: usize,
}

impl<T: bytemuck::Pod + ops::Add<Output = T>> Sink for Add<'_, T> {
    fn remaining(&self) -> usize {
        size_of_val(&self.target[self.done..]) - self.incomplete_bytes
    }

    fn receive(&mut self, from: &mut &TcpStream) -> io::Result<usize> {
        let remaining = self.remaining();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.block);
        let limit = (bytes.len() - self.incomplete_bytes).min(remaining);
        let received = from.read(&mut bytes[self.incomplete_bytes..self.incomplete_bytes + limit])?;
        let total = self.incomplete_bytes + received;
        let complete = total / size_of::<T>();
        for (target, value) in self.target[self.done..].iter_mut().zip(&self.block[..complete]) {
            *target = *target + *value;
        }
        self.done += complete;
        self.incomplete_bytes = total % size_of::<T>();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(self.block);
        bytes.copy_within(complete * size_of::<T>()..total, 0);
        Ok(received)
    }
}

/// Reads the header of a call and checks it before `inner` receives any bytes.
pub(super) struct HeaderSink<'a, C> {
    inner: &'a mut dyn Sink,
    check: C,
    header: [u8; HEADER_BYTES],
    filled: usize,
    result: Result<(), CommError>,
}

impl<'a, C: Fn(&[u8; HEADER_BYTES]) -> Result<(), CommError>> HeaderSink<'a, C> {
    pub(super) fn new(inner: &'a mut dyn Sink, check: C) -> Self {
        Self { inner, check, header: [0; HEADER_BYTES], filled: 0, result: Ok(()) }
    }

    /// The result of the check. `Ok` if the header is not complete.
    pub(super) fn result(self) -> Result<(), CommError> {
        self.result
    }

    /// Reads the rest of the header and checks it, after the connection has failed. The header may explain the
    /// failure.
    pub(super) fn read_header(&mut self, mut from: &TcpStream) {
        while self.filled < HEADER_BYTES {
            let wait = Timespec { tv_sec: 0, tv_nsec: LAST_HEADER_WAIT_NS };
            let ready = poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&wait));
            if !matches!(ready, Ok(1)) || !self.receive(&mut from).is_ok_and(|received| received > 0) {
                return;
            }
        }
    }
}

impl<C: Fn(&[u8; HEADER_BYTES]) -> Result<(), CommError>> Sink for HeaderSink<'_, C> {
    fn remaining(&self) -> usize {
        HEADER_BYTES - self.filled + self.inner.remaining()
    }

    fn receive(&mut self, from: &mut &TcpStream) -> io::Result<usize> {
        if self.filled == HEADER_BYTES {
            return self.inner.receive(from);
        }
        let received = from.read(&mut self.header[self.filled..])?;
        self.filled += received;
        if self.filled == HEADER_BYTES {
            self.result = (self.check)(&self.header);
            if self.result.is_err() {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        Ok(received)
    }
}
