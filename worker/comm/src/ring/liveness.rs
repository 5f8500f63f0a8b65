//! Whether the machines of the two neighbours are there, which the connections of calls do not tell: a machine that loses power or
//! its cable hangs up on nobody, and a rank that computes is as silent.
//!
//! Each rank keeps a connection of its own to both neighbours and sends a byte over it now and then. What counts is that the
//! other machine's kernel acknowledges it: a rank that is slow, or suspended, is there. On the connections of calls this
//! could not be asked, because a rank that does not read lets its window close, and the kernel's time-out counts that as
//! silence. A lost packet is sent again several times within the time-out.

use super::End;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::SockRef;
use std::{
    io::{self, Read, Write},
    net::{IpAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

/// Between two bytes.
const EVERY: Duration = Duration::from_millis(250);
/// How long the kernel sends a byte again before it gives up, from the first time that it does, some 0.2 s after the byte.
const GIVE_UP: Duration = Duration::from_millis(1500);
/// When one neighbour's machine does not answer, the other one's may be about to be given up, too, and both are to be named: it is
/// waited for so long, if nothing has come from it either.
const BOTH: Duration = Duration::from_millis(600);

/// A connection to a neighbour.
#[derive(Debug)]
pub(super) struct Neighbour {
    pub(super) rank: u32,
    pub(super) ip: IpAddr,
    pub(super) stream: TcpStream,
    /// When something last came from it.
    pub(super) heard: Instant,
    /// Its process has ended, as the connections of calls tell: nothing more is to be learnt here.
    pub(super) has_left: bool,
}

/// Ends the group as soon as the machine of a neighbour does not answer.
///
/// # Errors
/// No thread can be had.
pub(super) fn watch(mut neighbours: [Neighbour; 2], end: Arc<End>) -> io::Result<()> {
    for neighbour in &neighbours {
        SockRef::from(&neighbour.stream).set_tcp_user_timeout(Some(GIVE_UP))?;
    }
    let watch = move || {
        let mut lost: Vec<(u32, String)> = Vec::new();
        let mut lost_at = None;
        while !end.has_come() {
            for neighbour in neighbours.iter_mut().filter(|neighbour| !neighbour.has_left) {
                let Err(error) = neighbour.beat() else { continue };
                neighbour.has_left = true;
                if is_silence(&error) {
                    let detail = format!(
                        "rank {}: its machine, {}, does not answer ({error})",
                        neighbour.rank, neighbour.ip
                    );
                    lost.push((neighbour.rank, detail));
                    lost_at.get_or_insert_with(Instant::now);
                }
            }
            let is_silent = |n: &Neighbour| !n.has_left && n.heard.elapsed() > 2 * EVERY;
            if let Some(at) = lost_at
                && (at.elapsed() > BOTH || !neighbours.iter().any(is_silent))
            {
                // Of two ranks each is both neighbours of the other.
                lost.dedup_by_key(|(rank, _)| *rank);
                let (peers, details): (Vec<_>, Vec<_>) = lost.into_iter().unzip();
                return end.lose(peers, format!("lost the connection to {}", details.join(", and to ")));
            }
            // An error ends the wait, whatever is waited for.
            let here = neighbours.iter().filter(|neighbour| !neighbour.has_left);
            let mut ready: Vec<_> = here.map(|n| PollFd::new(&n.stream, PollFlags::empty())).collect();
            let wait = if lost_at.is_some() { EVERY / 5 } else { EVERY };
            let _ = poll(&mut ready, Timespec::try_from(wait).ok().as_ref());
        }
    };
    std::thread::Builder::new().name("liveness".into()).stack_size(128 << 10).spawn(watch)?;
    Ok(())
}

impl Neighbour {
    /// Sends a byte, and drops what has come.
    fn beat(&mut self) -> io::Result<()> {
        let mut stream = &self.stream;
        let passing =
            |e: &io::Error| matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
        if let Err(error) = stream.write_all(&[0])
            && !passing(&error)
        {
            return Err(error);
        }
        let mut dropped = [0; 64];
        let read = stream.read(&mut dropped);
        match read {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if !passing(&error) => Err(error),
            Err(_) => Ok(()),
            Ok(_) => {
                self.heard = Instant::now();
                Ok(())
            }
        }
    }
}

/// Whether an error is the kernel's word that nobody answers; others say that the process there has ended.
fn is_silence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable
    )
}
