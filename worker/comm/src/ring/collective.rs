//! The collectives, hop by hop.

use super::{
    ActiveCall, BLOCK_BYTES, MAX_GATHERED_BYTES, Ring,
    header::{self, HEADER_BYTES},
    link::Link,
    sink::{self, Fill, HeaderSink, Sink},
};
use crate::CommError;
use std::ops::{Add, Range};

impl ActiveCall<'_> {
    /// Sends this rank's header and checks the previous rank's header. Does nothing if the call's first exchange has done so.
    pub(super) fn exchange_headers(&mut self) -> Result<(), CommError> {
        match self.pending_header {
            Some(_) => self.exchange(&[], &mut Fill::new(&mut [])),
            None => Ok(()),
        }
    }

    /// Sends `out` to the next rank while `sink` receives from the previous rank. The first exchange of a call
    /// includes the header, because a separate exchange would cost each call a hop.
    fn exchange(&mut self, out: &[u8], sink: &mut dyn Sink) -> Result<(), CommError> {
        let link = Link {
            next: &self.sockets.next,
            next_rank: self.ring.next_rank(),
            previous: &self.sockets.previous,
            previous_rank: self.ring.previous_rank(),
            timeout: self.ring.timeout,
            operation: self.operation,
        };
        let Some(call) = self.pending_header.take() else {
            link.exchange(&[], out, sink)?;
            self.sockets.sent_bytes += out.len() as u64;
            return Ok(());
        };
        let own_call = (call, self.sockets.sequence);
        let mut sink = HeaderSink::new(sink, |theirs| {
            header::compare(link.operation, link.previous_rank, theirs, own_call)
        });
        let done = link.exchange(&header::encode(call, self.sockets.sequence), out, &mut sink);
        if done.is_err() {
            // A neighbour that found a mismatch has closed the connection. The neighbour's header explains the failure
            // better than the closed connection does.
            sink.read_header(link.previous);
        }
        sink.result()?;
        done?;
        self.sockets.sent_bytes += (HEADER_BYTES + out.len()) as u64;
        Ok(())
    }

    /// All-gather. `slots` has one equal part per rank, of which this rank's part is already filled in.
    pub(super) fn gather(&mut self, slots: &mut [u8]) -> Result<(), CommError> {
        let n = self.ring.size as usize;
        let rank = self.ring.rank as usize;
        let size = slots.len() / n;
        if size == 0 {
            return Ok(());
        }
        for hop in 0..n - 1 {
            let [sent, received] = [rank + n - hop, rank + 2 * n - hop - 1].map(|slot| slot % n * size);
            let (out, into) = borrow_two(slots, sent..sent + size, received..received + size);
            self.exchange(out, &mut Fill::new(into))?;
        }
        Ok(())
    }

    /// Replaces `bytes` by the `bytes` of rank 0, which are passed along the ring.
    pub(super) fn broadcast(&mut self, bytes: &mut [u8]) -> Result<(), CommError> {
        let is_last = self.ring.next_rank() == 0;
        if self.ring.rank == 0 {
            let out = if is_last { &mut [] } else { bytes };
            return self.exchange(out, &mut Fill::new(&mut []));
        }
        // One block is received while the previous block is sent.
        let mut previous_block = 0..0;
        loop {
            let next_block = previous_block.end..bytes.len().min(previous_block.end + BLOCK_BYTES);
            if next_block.is_empty() && previous_block.is_empty() {
                return Ok(());
            }
            let (out, into) = borrow_two(bytes, previous_block, next_block.clone());
            let out = if is_last { &[] } else { out };
            self.exchange(out, &mut Fill::new(into))?;
            previous_block = next_block;
        }
    }

    /// `input` has one part per rank. Each part is passed along the ring to its rank, so a rank sends `(n - 1) / 2`
    /// times the length of its input.
    pub(super) fn all_to_all(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), CommError> {
        let n = self.ring.size as usize;
        let rank = self.ring.rank as usize;
        let size = input.len() / n;
        let part = |rank: usize| rank * size..(rank + 1) * size;
        output[part(rank)].copy_from_slice(&input[part(rank)]);
        if size == 0 {
            return Ok(());
        }
        // Parts are ordered by their number of remaining hops.
        let mut travelling: Vec<u8> =
            (1..n).flat_map(|ahead| &input[part((rank + ahead) % n)]).copied().collect();
        for hop in 1..n {
            let mut arriving = vec![0; travelling.len()];
            self.exchange(&travelling, &mut Fill::new(&mut arriving))?;
            output[part((rank + n - hop) % n)].copy_from_slice(&arriving[..size]);
            travelling = arriving.split_off(size);
        }
        Ok(())
    }

    /// `input` has one part per rank. `output` receives the sum of all ranks' parts for this rank. Part `r` is summed
    /// along the ring, starting with rank `r + 1`.
    pub(super) fn reduce_scatter<T: bytemuck::Pod + Add<Output = T>>(
        &mut self,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), CommError> {
        let n = self.ring.size as usize;
        let rank = self.ring.rank as usize;
        let size = output.len();
        let part = |rank: usize| &input[rank % n * size..][..size];
        // While a part is sent, the part that arrives is added to this rank's own part.
        let mut out = part(rank + n - 1).to_vec();
        for hop in 1..n {
            output.copy_from_slice(part(rank + 2 * n - 1 - hop));
            self.exchange_adding(&out, output)?;
            out.copy_from_slice(output);
        }
        if n == 1 {
            output.copy_from_slice(input);
        }
        Ok(())
    }

    /// Sends `out` while adding the values that arrive to `target`.
    fn exchange_adding<T: bytemuck::Pod + Add<Output = T>>(
        &mut self,
        out: &[T],
        target: &mut [T],
    ) -> Result<(), CommError> {
        let mut block = std::mem::take(&mut self.sockets.block);
        let mut sink =
            sink::Add { target, done: 0, block: bytemuck::cast_slice_mut(&mut block), incomplete_bytes: 0 };
        let done = self.exchange(bytemuck::cast_slice(out), &mut sink);
        self.sockets.block = block;
        done
    }

    /// Replaces `values` by their sum over all ranks. Up to [`MAX_GATHERED_BYTES`] bytes, every rank gathers all vectors
    /// and adds them in rank order. A longer vector is cut into one part per rank: part `r` is summed along the ring,
    /// starting with rank `r`, and the result is passed along the ring once more.
    pub(super) fn all_reduce<T: bytemuck::Pod + Add<Output = T>>(
        &mut self,
        values: &mut [T],
    ) -> Result<(), CommError> {
        if size_of_val(values) > MAX_GATHERED_BYTES {
            return self.all_reduce_long(values);
        }
        let n = self.ring.size as usize;
        let (length, at) = (values.len(), self.ring.rank as usize * values.len());
        let mut slots = vec![T::zeroed(); n * length];
        slots[at..at + length].copy_from_slice(values);
        self.gather(bytemuck::cast_slice_mut(&mut slots))?;
        for (i, value) in values.iter_mut().enumerate() {
            *value = (1..n).fold(slots[i], |sum, rank| sum + slots[rank * length + i]);
        }
        Ok(())
    }

    /// Reduce-scatter of the parts, then all-gather of their sums.
    fn all_reduce_long<T: bytemuck::Pod + Add<Output = T>>(
        &mut self,
        values: &mut [T],
    ) -> Result<(), CommError> {
        let n = self.ring.size as usize;
        let rank = self.ring.rank as usize;
        let length = values.len();
        let chunk = |index: usize| {
            let index = index % n;
            length * index / n..length * (index + 1) / n
        };
        for hop in 0..n - 1 {
            let (out, target) = borrow_two(values, chunk(rank + n - hop), chunk(rank + 2 * n - hop - 1));
            self.exchange_adding(out, target)?;
        }
        for hop in 0..n - 1 {
            let (out, into) = borrow_two(values, chunk(rank + 1 + n - hop), chunk(rank + n - hop));
            self.exchange(bytemuck::cast_slice(out), &mut Fill::new(bytemuck::cast_slice_mut(into)))?;
        }
        Ok(())
    }
}

impl Ring {
    /// The number of bytes sent to the next rank, including headers.
    #[cfg(test)]
    pub(super) fn sent_bytes(&self) -> u64 {
        self.sockets.lock().unwrap().sent_bytes
    }
}

/// Borrows two ranges of a slice, which must not overlap: one to read, one to write.
fn borrow_two<T>(values: &mut [T], read: Range<usize>, write: Range<usize>) -> (&[T], &mut [T]) {
    let [read, write] = values.get_disjoint_mut([read, write]).expect("the ranges do not overlap");
    (read, write)
}
