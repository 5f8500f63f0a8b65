//! The rendezvous of an attempt's ranks: a key-value store, which rank 0 serves at `master_addr:master_port`.
//! Each connection starts with a [handshake](super::handshake).

pub mod loopback;
mod message;
mod server;
mod store;

pub use store::Store;

use std::{
    io,
    net::TcpListener,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

/// Maximum time for which the server delays a reply. Between replies, a waiting rank checks whether it should stop.
const MAX_SERVER_WAIT: Duration = Duration::from_millis(100);

/// The address of an attempt's rendezvous, and this process's rank.
#[derive(Debug, Clone)]
pub struct RendezvousConfig {
    /// The address or name at which rank 0 listens.
    pub addr: String,
    pub port: u16,
    /// The attempt's secret, which only the attempt's ranks know.
    pub secret: Vec<u8>,
    pub rank: u32,
    pub world_size: u32,
    /// Time limit for a wait for other ranks.
    pub timeout: Duration,
    /// A request to stop, set by any thread. Waiting calls then fail, unless [`Store::leave_stops_to_votes`] was
    /// called.
    pub stop: Arc<AtomicBool>,
}

/// Why ranks did not meet.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// For example, the port is taken, or some ranks did not arrive in time. The text is a phrase.
    #[error("{0}")]
    Failed(String),
    /// The connection to rank 0 broke.
    #[error("lost the connection to rank 0 at the rendezvous: {0}")]
    Lost(io::Error),
    /// This rank was asked to stop.
    #[error("asked to stop during the rendezvous")]
    Stopped,
}

impl RendezvousError {
    /// `ranks` did not arrive within `timeout`. `what` is the exchange for which they waited.
    pub(crate) fn missing(ranks: &[u32], timeout: Duration, what: &str) -> Self {
        let names: Vec<_> = ranks.iter().map(u32::to_string).collect();
        let missing = match names.as_slice() {
            [one] => format!("rank {one} has not arrived"),
            [first @ .., last] => format!("ranks {} and {last} have not arrived", first.join(", ")),
            [] => "a rank has not arrived".into(),
        };
        Self::Failed(format!("{missing} after {:.0} s ({what})", timeout.as_secs_f64()))
    }

    /// Another rank sent an unexpected message or reported a failure.
    pub(crate) fn protocol(detail: impl std::fmt::Display) -> Self {
        Self::Failed(format!("rendezvous: {detail}"))
    }
}

/// A port that is free now. If another program binds the port before rank 0 does, rank 0 fails with [`taken_port`], and the
/// next attempt gets another port.
///
/// # Errors
/// No port is free.
pub fn free_port(addr: &str) -> io::Result<u16> {
    Ok(bind(addr, 0)?.local_addr()?.port())
}

/// The error of rank 0 if another program has the port.
pub fn taken_port(addr: &str, port: u16) -> String {
    format!("port {port} of {addr} is taken by another program")
}

fn bind(addr: &str, port: u16) -> io::Result<TcpListener> {
    match TcpListener::bind((addr, port)) {
        // The address may belong to a router or service in front of this machine.
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => TcpListener::bind(("0.0.0.0", port)),
        other => other,
    }
}

#[cfg(test)]
mod tests;
