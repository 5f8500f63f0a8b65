//! Ranks that are threads of this process, for tests and benchmarks.

use super::{RendezvousConfig, RendezvousError, Store};
use crate::ring::Ring;
use std::{
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
    time::Duration,
};

/// The configuration of `rank` of `world_size` ranks that meet at `port`.
pub fn rendezvous_config(port: u16, rank: u32, world_size: u32) -> RendezvousConfig {
    RendezvousConfig {
        addr: "127.0.0.1".into(),
        port,
        secret: b"of these ranks".to_vec(),
        rank,
        world_size,
        timeout: Duration::from_secs(20),
        stop: Arc::default(),
    }
}

/// A port on which nothing listens. It is outside the range of client ports, of which other tests use many.
pub fn unused_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() % 10_000;
    let ports = (0..10_000u16).map(|_| {
        let next = u32::from(NEXT.fetch_add(1, Ordering::Relaxed));
        21_000 + ((first + next) % 10_000) as u16
    });
    let mut unused = ports.filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    unused.next().expect("one of 10,000 ports is free")
}

/// Runs `body` on ranks whose rings are connected, one thread each, and returns their results by rank. `timeout` is the time-out of the rings' calls.
pub fn on_connected_ranks<T: Send>(
    size: u32,
    timeout: Duration,
    body: impl Fn(&Arc<Store>, Arc<Ring>) -> T + Sync,
) -> Vec<T> {
    on_joined_ranks(size, timeout, |store| {
        let ring = Ring::connect(&store, timeout).unwrap();
        store.barrier("connected").unwrap();
        body(&store, ring)
    })
}

/// Runs `body` on ranks that have joined a store, one thread each, and returns their results by rank. Waits in the store end after
/// 20 s, or after a longer `timeout`.
pub fn on_joined_ranks<T: Send>(
    size: u32,
    timeout: Duration,
    body: impl Fn(Arc<Store>) -> T + Sync,
) -> Vec<T> {
    on_joining_ranks(size, timeout, |store| body(Arc::new(store.unwrap())))
}

/// As [`on_joined_ranks`], but `body` receives the error of a rank that could not join.
pub fn on_joining_ranks<T: Send>(
    size: u32,
    timeout: Duration,
    body: impl Fn(Result<Store, RendezvousError>) -> T + Sync,
) -> Vec<T> {
    let (port, secret) = (unused_port(), *uuid::Uuid::new_v4().as_bytes());
    let run = |rank: u32| {
        let config = rendezvous_config(port, rank, size);
        let timeout = timeout.max(config.timeout);
        body(Store::join(RendezvousConfig { timeout, secret: secret.to_vec(), ..config }))
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
