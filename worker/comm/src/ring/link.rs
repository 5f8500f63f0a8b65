//! Sends bytes to one rank while receiving from another.

use super::{BLOCK_BYTES, sink::Sink};
use crate::CommError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    io::{self, IoSlice, Write},
    net::TcpStream,
    time::Duration,
};

/// The connections for sending and for receiving, which may be one connection.
pub(super) struct Link<'a> {
    pub(super) next: &'a TcpStream,
    pub(super) next_rank: u32,
    pub(super) previous: &'a TcpStream,
    pub(super) previous_rank: u32,
    pub(super) timeout: Duration,
    pub(super) operation: &'static str,
}

impl Link<'_> {
    /// Sends `header` and `out` to the next rank while `sink` receives from the previous rank.
    pub(super) fn exchange(&self, header: &[u8], out: &[u8], sink: &mut dyn Sink) -> Result<(), CommError> {
        let (mut next, mut previous, operation) = (self.next, self.previous, self.operation);
        let lost = |peer, detail| CommError::Disconnected { operation, peer, detail };
        let (mut sent, length) = (0, header.len() + out.len());
        while sent < length || sink.remaining() > 0 {
            let mut has_moved = false;
            if sent < length {
                let start = sent.saturating_sub(header.len());
                let block = &out[start..out.len().min(start + BLOCK_BYTES)];
                // The header and the first bytes share a packet if they fit.
                let written = match &header[sent.min(header.len())..] {
                    [] => next.write(block),
                    rest => next.write_vectored(&[IoSlice::new(rest), IoSlice::new(block)]),
                };
                match written {
                    Ok(n) => {
                        sent += n;
                        has_moved = true;
                    }
                    Err(e) if is_temporary(&e) => {}
                    Err(e) => return Err(lost(self.next_rank, Some(e.to_string()))),
                }
            }
            if sink.remaining() > 0 {
                match sink.receive(&mut previous) {
                    Ok(0) => return Err(lost(self.previous_rank, None)),
                    Ok(_) => has_moved = true,
                    Err(e) if is_temporary(&e) => {}
                    Err(e) => return Err(lost(self.previous_rank, Some(e.to_string()))),
                }
            }
            if has_moved {
                continue;
            }
            let mut ready = [
                PollFd::new(next, if sent < length { PollFlags::OUT } else { PollFlags::empty() }),
                PollFd::new(previous, if sink.remaining() > 0 { PollFlags::IN } else { PollFlags::empty() }),
            ];
            let timeout = Timespec::try_from(self.timeout).ok();
            match poll(&mut ready, timeout.as_ref()) {
                Ok(0) => {
                    let peer = if sink.remaining() > 0 { self.previous_rank } else { self.next_rank };
                    return Err(CommError::TimedOut { operation, peer, secs: self.timeout.as_secs_f64() });
                }
                Ok(_) => {
                    // After everything has been sent, only these events show that the connection to the next rank is
                    // lost.
                    let gone = PollFlags::HUP | PollFlags::ERR;
                    if sent == length && ready[0].revents().intersects(gone) {
                        return Err(lost(self.next_rank, None));
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(lost(self.previous_rank, Some(e.to_string()))),
            }
        }
        Ok(())
    }
}

/// Whether the call can be repeated when the connection is ready.
pub(super) fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
