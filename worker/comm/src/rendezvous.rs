//! The rendezvous of an attempt's ranks: a key-value store, which rank 0 serves at `master_addr:master_port`.
//! Each connection starts with a [handshake](super::handshake).

mod error;
pub mod loopback;
mod message;
mod server;
mod store;

pub use error::RendezvousError;
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

/// A port that is free now. If another program binds the port before rank 0 does, rank 0 fails, and the next attempt gets
/// another port.
///
/// # Errors
/// No port is free.
pub fn free_port(addr: &str) -> io::Result<u16> {
    Ok(bind(addr, 0)?.local_addr()?.port())
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
