//! Why a rendezvous failed.

use std::io;

/// Why ranks did not meet.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// Another program has the port: another attempt gets another port.
    #[error("port {port} of {addr} is taken by another program")]
    PortTaken {
        /// The address to listen on.
        addr: String,
        /// The port asked for.
        port: u16,
    },
    /// Listening failed otherwise: no such address here, no permission.
    #[error("rank 0 cannot listen on {addr}:{port}: {error}")]
    Listen {
        /// The address to listen on.
        addr: String,
        /// The port asked for.
        port: u16,
        /// What the system says.
        error: io::Error,
    },
    /// Rank 0 is not there.
    #[error("rank 0 does not answer at {addr}:{port} after {secs:.0} s: {detail}")]
    Unreachable {
        /// Its address.
        addr: String,
        /// Its port.
        port: u16,
        /// How long it was tried.
        secs: f64,
        /// The last failure.
        detail: String,
    },
    /// Some did not come.
    #[error("{} after {secs:.0} s ({what})", not_arrived(ranks))]
    Missing {
        /// The ranks that are missing.
        ranks: Vec<u32>,
        /// How long the others waited.
        secs: f64,
        /// What they waited for.
        what: String,
    },
    /// The connection to rank 0 broke.
    #[error("lost the connection to rank 0 at the rendezvous: {0}")]
    Lost(io::Error),
    /// This rank was asked to stop.
    #[error("asked to stop during the rendezvous")]
    Stopped,
    /// Not what is spoken here.
    #[error("rendezvous: {0}")]
    Protocol(String),
}

fn not_arrived(ranks: &[u32]) -> String {
    let names: Vec<_> = ranks.iter().map(u32::to_string).collect();
    match names.as_slice() {
        [one] => format!("rank {one} has not arrived"),
        [first @ .., last] => format!("ranks {} and {last} have not arrived", first.join(", ")),
        [] => "a rank has not arrived".into(),
    }
}
