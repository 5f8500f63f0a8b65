//! Sends bytes to one rank while receiving from another.

use super::{BLOCK, sink::Sink};
use crate::comm::CommError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    io::{self, Write},
    net::TcpStream,
    time::Duration,
};

/// Where a rank sends to and receives from; both may be one connection.
pub(super) struct Link<'a> {
    pub(super) next: &'a TcpStream,
    pub(super) next_rank: u32,
    pub(super) previous: &'a TcpStream,
    pub(super) previous_rank: u32,
    pub(super) timeout: Duration,
    pub(super) operation: &'static str,
}

impl Link<'_> {
    /// Sends `out` to the next rank while receiving what `sink` wants from the one before.
    pub(super) fn exchange(&self, out: &[u8], sink: &mut dyn Sink) -> Result<(), CommError> {
        let (mut next, mut previous, operation) = (self.next, self.previous, self.operation);
        let lost = |peer, detail: String| CommError::Disconnected { operation, peer, detail };
        let mut sent = 0;
        while sent < out.len() || sink.wanted() > 0 {
            let mut moved = false;
            if sent < out.len() {
                match next.write(&out[sent..out.len().min(sent + BLOCK)]) {
                    Ok(n) => {
                        sent += n;
                        moved = true;
                    }
                    Err(e) if is_passing(&e) => {}
                    Err(e) => return Err(lost(self.next_rank, e.to_string())),
                }
            }
            if sink.wanted() > 0 {
                match sink.take(&mut previous) {
                    Ok(0) => return Err(lost(self.previous_rank, "it closed the connection".into())),
                    Ok(_) => moved = true,
                    Err(e) if is_passing(&e) => {}
                    Err(e) => return Err(lost(self.previous_rank, e.to_string())),
                }
            }
            if moved {
                continue;
            }
            let mut ready = [
                PollFd::new(next, if sent < out.len() { PollFlags::OUT } else { PollFlags::empty() }),
                PollFd::new(previous, if sink.wanted() > 0 { PollFlags::IN } else { PollFlags::empty() }),
            ];
            let timeout = Timespec::try_from(self.timeout).ok();
            match poll(&mut ready, timeout.as_ref()) {
                Ok(0) => {
                    let peer = if sink.wanted() > 0 { self.previous_rank } else { self.next_rank };
                    return Err(CommError::TimedOut { operation, peer, secs: self.timeout.as_secs_f64() });
                }
                Ok(_) => {
                    // While nothing is to be sent a lost connection to the next rank shows only here.
                    let gone = PollFlags::HUP | PollFlags::ERR;
                    if sent == out.len() && ready[0].revents().intersects(gone) {
                        return Err(lost(self.next_rank, "it closed the connection".into()));
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(lost(self.previous_rank, e.to_string())),
            }
        }
        Ok(())
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
