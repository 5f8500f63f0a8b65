//! How the ranks of an attempt find each other: a key-value store that rank 0 keeps at
//! `master_addr:master_port`. Every connection proves that it knows the attempt's secret first.

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

/// A request waits at most this long on rank 0, so that a rank that is asked to stop stops soon.
const SLICE: Duration = Duration::from_millis(100);

/// Where and how the ranks of an attempt rendezvous.
#[derive(Debug, Clone)]
pub struct RendezvousConfig {
    /// Where rank 0 listens: an address or a name.
    pub addr: String,
    /// Its port.
    pub port: u16,
    /// Known to the ranks of this attempt alone.
    pub secret: Vec<u8>,
    /// This process.
    pub rank: u32,
    /// Ranks in all.
    pub world_size: u32,
    /// Longest wait for others.
    pub timeout: Duration,
    /// Set from any thread: waiting calls return an error, until [`Store::leave_stops_to_votes`].
    pub stop: Arc<AtomicBool>,
}

/// A port of this machine that is free now.
///
/// # Errors
/// None is, or `addr` is not of this machine.
pub fn free_port(addr: &str) -> io::Result<u16> {
    Ok(TcpListener::bind((addr, 0))?.local_addr()?.port())
}

#[cfg(test)]
mod tests;
