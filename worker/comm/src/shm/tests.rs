//! Shared memory of ranks that are threads, each of which maps the memory.

use super::*;
use crate::{ProcessGroup, tests::on_connected_ranks};
use std::sync::atomic::{AtomicU64, Ordering};

const TIMEOUT: Duration = Duration::from_secs(30);

fn on_ranks<T: Send>(
    world: u32,
    timeout: Duration,
    body: impl Fn(Arc<ShmProcessGroup>) -> T + Sync,
) -> Vec<T> {
    on_connected_ranks(world, timeout, |_, ring| body(ShmProcessGroup::connect(&ring).unwrap().unwrap()))
}

#[test]
fn sums_of_any_length_are_equal_on_every_rank_in_every_call() {
    for world in [1, 2, 3, 5] {
        let results = on_ranks(world, TIMEOUT, |group| {
            let mut all = Vec::new();
            for call in 0..200 {
                let length = [0, 1, 128, 8192, 8193][call % 5];
                let value = |i: usize| (i as f64 + 0.1) * f64::from(group.rank() + 1) / (call as f64 + 3.0);
                let mut values: Vec<f64> = (0..length).map(value).collect();
                group.all_reduce((&mut values).into()).unwrap();
                for (i, sum) in values.iter().enumerate() {
                    let ranks = f64::from(world * (world + 1) / 2);
                    let exact = (i as f64 + 0.1) * ranks / (call as f64 + 3.0);
                    assert!((sum - exact).abs() < 1e-12 * exact, "{world} ranks, call {call}: {sum} {exact}");
                }
                all.push(values);
            }
            all
        });
        assert!(results.iter().all(|r| *r == results[0]), "{world} ranks");
    }
}

#[test]
fn ring_calls_keep_their_order_among_shared_memory_calls() {
    on_ranks(3, TIMEOUT, |group| {
        for _ in 0..3 {
            let mut values = vec![group.rank() as f32; 100_000];
            group.all_reduce((&mut values).into()).unwrap();
            assert!(values.iter().all(|v| *v == 3.0));
            let mut count = [1.0f64];
            group.all_reduce((&mut count).into()).unwrap();
            assert_eq!(count, [3.0]);
            group.broadcast((&mut values).into()).unwrap();
            let mut all = [0.0f32; 3];
            group.all_gather((&[group.rank() as f32]).into(), (&mut all).into()).unwrap();
            assert_eq!(all, [0.0, 1.0, 2.0]);
            group.barrier().unwrap();
        }
    });
}

#[test]
fn ranks_see_each_other_s_writes_and_work_while_waiting() {
    on_ranks(3, TIMEOUT, |group| {
        let memory = group.shared_memory(3 << 20).unwrap().unwrap();
        let second = group.shared_memory(100).unwrap().unwrap();
        // SAFETY: the values are atomic.
        #[allow(unsafe_code)]
        let (numbers, of_second): (SharedSlice<AtomicU64>, SharedSlice<AtomicU64>) =
            unsafe { (memory.view(0, 3), second.view(8, 2)) };
        assert!(of_second.iter().all(|n| n.load(Ordering::Acquire) == 0), "separate memory, zeroed");
        let rank = group.rank() as usize;
        group.barrier().unwrap();
        if rank == 0 {
            // Long enough for the other ranks to fall asleep.
            std::thread::sleep(Duration::from_millis(300));
        }
        numbers[rank].store(7 + rank as u64, Ordering::Release);
        memory.notify_all();
        // Work that a waiting rank does meanwhile.
        let mut tasks = 5;
        let mut idle = || {
            tasks -= i32::from(tasks > 0);
            tasks > 0
        };
        let is_ready = || numbers.iter().all(|n| n.load(Ordering::Acquire) > 0);
        let waited = memory.wait("numbers", &mut idle, &is_ready, &|| 0).unwrap();
        if rank != 0 {
            assert!(tasks == 0 && waited > Duration::from_millis(10), "{tasks} tasks left after {waited:?}");
        }
        assert_eq!(numbers.iter().map(|n| n.load(Ordering::Acquire)).sum::<u64>(), 7 + 8 + 9);
        group.barrier().unwrap();
    });
}

#[test]
fn abort_ends_a_wait_from_another_thread() {
    let errors = on_ranks(2, Duration::from_secs(600), |group| {
        if group.rank() == 1 {
            return group.barrier().and_then(|()| group.barrier()).unwrap_err();
        }
        group.barrier().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let memory =
                    SharedMemory { mapping: group.file.map(0, 1 << 16).unwrap(), group: group.clone() };
                memory.wait("update", &mut || false, &|| false, &|| 1).unwrap_err()
            });
            group.abort("asked to stop");
            waiting.join().unwrap()
        })
    });
    assert_eq!(errors[0].to_string(), "update: aborted: asked to stop");
    assert!(matches!(errors[1], CommError::Disconnected { peer: 0, .. }), "{:?}", errors[1]);
}

#[test]
fn if_one_rank_cannot_open_the_memory_none_share_it() {
    let why = "runs on another machine than rank 0";
    on_connected_ranks(3, TIMEOUT, |store, ring| {
        if ring.rank() == 2 {
            ring.all_gather_bytes(b"").unwrap();
            ring.all_gather_bytes(why.as_bytes()).unwrap();
        } else {
            let comm = ShmProcessGroup::upgrade(ring).unwrap();
            let reported = comm.shared_memory(1000).unwrap().unwrap_err();
            assert_eq!(reported, format!("rank 2: {why}"));
        }
        store.barrier("reported").unwrap();
    });
}
