//! Detects lost machines. The connections of calls do not reveal a lost machine, because a machine that loses power or its
//! network closes no connection, and a rank that computes is equally silent.
//!
//! Each rank keeps a separate connection to both neighbours and regularly sends a byte over it. A machine is alive if
//! its kernel acknowledges the byte, so a rank that is slow or suspended counts as alive. The connections of calls
//! are not suitable for this, because a rank that does not read lets its receive window close, and the kernel's time-out
//! counts a closed window as silence. A lost packet is retransmitted several times within the time-out.

use super::{CommError, End, link::is_temporary};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::SockRef;
use std::{
    io::{self, Read, Write},
    net::{IpAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

/// Interval between two bytes.
const BEAT_EVERY: Duration = Duration::from_millis(250);
/// The TCP user time-out: the time for which the kernel retransmits a byte. The first retransmission is about 0.2 s after the
/// byte was sent.
const USER_TIMEOUT: Duration = Duration::from_millis(1500);
/// Maximum time from the loss of one neighbour until the error is reported, because the error should name both neighbours if
/// both are lost. The wait ends early if the other neighbour has sent something recently.
const SECOND_LOSS_WAIT: Duration = Duration::from_millis(600);

#[derive(Debug)]
pub(super) struct Neighbour {
    pub(super) rank: u32,
    pub(super) ip: IpAddr,
    pub(super) stream: TcpStream,
    /// When the neighbour last sent something.
    pub(super) last_heard: Instant,
    /// Whether the neighbour's process has ended or its machine is lost. The connection is then no longer watched.
    pub(super) has_left: bool,
}

/// Ends the group as soon as the machine of a neighbour does not respond.
pub(super) fn watch(mut neighbours: [Neighbour; 2], end: Arc<End>) -> io::Result<()> {
    for neighbour in &neighbours {
        SockRef::from(&neighbour.stream).set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    }
    let watch = move || {
        let mut lost: Vec<(u32, String)> = Vec::new();
        let mut lost_at = None;
        while !end.has_ended() {
            for neighbour in neighbours.iter_mut().filter(|neighbour| !neighbour.has_left) {
                let Err(error) = neighbour.beat() else { continue };
                neighbour.has_left = true;
                if is_machine_lost(&error) {
                    let detail = format!(
                        "rank {}: the machine {} does not answer ({error})",
                        neighbour.rank, neighbour.ip
                    );
                    lost.push((neighbour.rank, detail));
                    lost_at.get_or_insert_with(Instant::now);
                }
            }
            let is_silent = |n: &Neighbour| !n.has_left && n.last_heard.elapsed() > 2 * BEAT_EVERY;
            if let Some(at) = lost_at
                && (at.elapsed() > SECOND_LOSS_WAIT || !neighbours.iter().any(is_silent))
            {
                // In a group of two ranks, both neighbours are the same rank.
                lost.dedup_by_key(|(rank, _)| *rank);
                let (peers, details): (Vec<_>, Vec<_>) = lost.into_iter().unzip();
                let detail = format!("lost the connection to {}", details.join(", and to "));
                return end.close_with(CommError::Unreachable { operation: "", peers, detail });
            }
            // An error on a connection ends the wait, although no events are requested.
            let watched = neighbours.iter().filter(|neighbour| !neighbour.has_left);
            let mut ready: Vec<_> = watched.map(|n| PollFd::new(&n.stream, PollFlags::empty())).collect();
            let wait = if lost_at.is_some() { BEAT_EVERY / 5 } else { BEAT_EVERY };
            let _ = poll(&mut ready, Timespec::try_from(wait).ok().as_ref());
        }
    };
    std::thread::Builder::new().name("liveness".into()).stack_size(128 << 10).spawn(watch)?;
    Ok(())
}

impl Neighbour {
    /// Sends a byte, and discards the received bytes.
    fn beat(&mut self) -> io::Result<()> {
        let mut stream = &self.stream;
        if let Err(error) = stream.write_all(&[0])
            && !is_temporary(&error)
        {
            return Err(error);
        }
        let mut dropped = [0; 64];
        match stream.read(&mut dropped) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if !is_temporary(&error) => Err(error),
            Err(_) => Ok(()),
            Ok(_) => {
                self.last_heard = Instant::now();
                Ok(())
            }
        }
    }
}

/// Whether the error means that the machine does not respond. Other errors mean that the process there has ended.
fn is_machine_lost(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable
    )
}
