use super::{
    loopback::{rendezvous_config, unused_port},
    *,
};
use crate::Exchange;
use std::{sync::atomic::Ordering, time::Instant};

fn store_of_rank_0(world_size: u32, timeout: Duration) -> Store {
    let config = rendezvous_config(unused_port(), 0, world_size);
    Store::join(RendezvousConfig { timeout, ..config }).unwrap()
}

#[test]
fn errors_name_missing_ranks() {
    let store = store_of_rank_0(4, Duration::from_millis(50));
    store.set("ring/2", b"").unwrap();
    let error = store.all_gather("ring", b"").unwrap_err();
    assert_eq!(error.to_string(), "ranks 1 and 3 have not arrived after 0 s (ring)");
}

/// A rank may compile kernels before it arrives.
#[test]
fn an_exchange_may_wait_longer_than_the_rendezvous_time_out() {
    const SHORT: Duration = Duration::from_millis(50);
    let port = unused_port();
    let config = move |rank| RendezvousConfig { timeout: SHORT, ..rendezvous_config(port, rank, 2) };
    let store = Store::join(config(0)).unwrap();
    let late = std::thread::spawn(move || {
        std::thread::sleep(4 * SHORT);
        Store::join(config(1)).unwrap().set("handles/1", b"rank 1").unwrap();
    });
    let values =
        Exchange::Store(&store, Duration::from_secs(20)).all_gather_bytes("test", "handles", b"rank 0");
    assert_eq!(values.unwrap(), [b"rank 0", b"rank 1"]);
    late.join().unwrap();
}

#[test]
fn another_secret_is_refused_at_once() {
    let port = unused_port();
    let _store = Store::join(rendezvous_config(port, 0, 2)).unwrap();
    let began = Instant::now();
    let error =
        Store::join(RendezvousConfig { secret: b"guessed".to_vec(), ..rendezvous_config(port, 1, 2) })
            .unwrap_err();
    assert!(error.to_string().contains("wrong secret"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_port_in_use_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let error = Store::join(rendezvous_config(port, 0, 1)).unwrap_err();
    assert_eq!(error.to_string(), format!("port {port} of 127.0.0.1 is taken by another program"));
}

#[test]
fn a_waiting_rank_stops_on_request() {
    let store = store_of_rank_0(2, Duration::from_secs(600));
    store.config().stop.store(true, Ordering::Relaxed);
    assert!(matches!(store.all_gather("ring", b""), Err(RendezvousError::Stopped)));
}

#[test]
fn with_voted_stops_a_stopped_rank_waits_for_the_others() {
    let store = store_of_rank_0(2, Duration::from_millis(300));
    store.leave_stops_to_votes();
    store.config().stop.store(true, Ordering::Relaxed);
    let missing = store.all_gather("alone", b"").unwrap_err();
    assert_eq!(missing.to_string(), "rank 1 has not arrived after 0 s (alone)");
    store.set("met/1", b"rank 1").unwrap();
    assert_eq!(store.all_gather("met", b"rank 0").unwrap(), [b"rank 0", b"rank 1"]);
}
