//! The ranks of a test: threads of this process that a ring connects.

use lockstep_comm::{
    rendezvous::{
        RendezvousConfig, Store,
        loopback::{rendezvous_config, unused_port},
    },
    ring::Ring,
};
use std::{sync::Arc, time::Duration};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `work` on each of `ranks` ranks and returns their results in the order of ranks.
pub(crate) fn on_ranks<T: Send>(ranks: u32, work: impl Fn(Arc<Ring>) -> T + Sync) -> Vec<T> {
    let port = unused_port();
    let run = |rank| {
        let config = RendezvousConfig { timeout: TIMEOUT, ..rendezvous_config(port, rank, ranks) };
        let store = Store::join(config).unwrap();
        let ring = Ring::connect(&store, TIMEOUT).unwrap();
        store.barrier("connected").unwrap();
        work(ring)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
