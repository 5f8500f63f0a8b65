//! The errors of a rendezvous.

use std::io;

/// Why ranks did not meet.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// Another program listens on the port. The next attempt gets another port.
    #[error("port {port} of {addr} is taken by another program")]
    PortTaken { addr: String, port: u16 },
    /// Listening failed for another reason, such as a wrong address or a missing permission.
    #[error("rank 0 cannot listen on {addr}:{port}: {error}")]
    Listen { addr: String, port: u16, error: io::Error },
    /// Rank 0 does not respond, or rejects the handshake.
    #[error("rank 0 does not answer at {addr}:{port} after {secs:.0} s: {detail}")]
    Unreachable { addr: String, port: u16, secs: f64, detail: String },
    /// Some ranks did not arrive in time.
    #[error("{} after {secs:.0} s ({what})", describe_missing(ranks))]
    Missing {
        ranks: Vec<u32>,
        secs: f64,
        /// The exchange for which they waited.
        what: String,
    },
    /// The connection to rank 0 broke.
    #[error("lost the connection to rank 0 at the rendezvous: {0}")]
    Lost(io::Error),
    /// This rank was asked to stop.
    #[error("asked to stop during the rendezvous")]
    Stopped,
    /// Another rank sent an unexpected message or reported a failure.
    #[error("rendezvous: {0}")]
    Protocol(String),
}

fn describe_missing(ranks: &[u32]) -> String {
    let names: Vec<_> = ranks.iter().map(u32::to_string).collect();
    match names.as_slice() {
        [one] => format!("rank {one} has not arrived"),
        [first @ .., last] => format!("ranks {} and {last} have not arrived", first.join(", ")),
        [] => "a rank has not arrived".into(),
    }
}
