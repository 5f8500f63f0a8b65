//! Rings whose ranks are threads, connected over loopback.

use super::header::HEADER_BYTES;
use super::*;
use crate::{
    ProcessGroup, ValuesMut,
    tests::{on_connected_ranks, values},
};
use std::time::Instant;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Checks the sum of all ranks' values, and that its bits are the same on every rank and in two runs.
fn check_sums<T: Copy + Into<f64> + 'static>(world: u32, length: usize, value: fn(f32) -> T, tolerance: f64)
where
    for<'a> ValuesMut<'a>: From<&'a mut Vec<T>>,
{
    let input = |rank| values(rank, length).into_iter().map(value).collect::<Vec<T>>();
    let run = || {
        on_connected_ranks(world, TIMEOUT, |_, ring| {
            let mut sum = input(ring.rank());
            ring.all_reduce((&mut sum).into()).unwrap();
            sum.into_iter().map(Into::into).collect::<Vec<f64>>()
        })
    };
    let bits = |sum: &[f64]| sum.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let results = run();
    let inputs: Vec<_> = (0..world).map(input).collect();
    for (i, sum) in results[0].iter().enumerate() {
        let exact: f64 = inputs.iter().map(|of_rank| -> f64 { of_rank[i].into() }).sum();
        assert!((sum - exact).abs() < tolerance, "{world} ranks, {length} values, {i}: {sum} {exact}");
    }
    for sum in results.iter().chain(&run()) {
        assert_eq!(bits(sum), bits(&results[0]), "{world} ranks, {length} values");
    }
}

#[test]
fn sums_are_correct_and_bit_equal_at_any_size() {
    // For float64: the longest vector that is gathered whole, one value more, and a length with uneven parts.
    let max_gathered = MAX_GATHERED_BYTES / 8;
    for world in 1..=5 {
        for length in [0, 1, 7, 1023, 8192, 8193, 1_000_003] {
            check_sums::<f32>(world, length, |value| value, 1e-5);
        }
        for length in [0, 1, 7, max_gathered, max_gathered + 1, 100_003] {
            check_sums::<f64>(world, length, |value| f64::from(value) / 3.0, 1e-13);
        }
    }
}

#[test]
fn sums_of_float32_gradients_in_double_precision_do_not_depend_on_their_order() {
    // Integer multiples of a small power of two, as float32 gradients of similar size are. Their sum is exact.
    let length = 50_001;
    let input = |rank| values(rank, length).into_iter().map(f64::from).collect::<Vec<f64>>();
    let of_ranks = on_connected_ranks(4, TIMEOUT, |_, ring| {
        let mut sum = input(ring.rank());
        ring.all_reduce((&mut sum).into()).unwrap();
        sum
    });
    let inputs = [0, 1, 2, 3].map(input);
    for i in 0..length {
        let in_order: f64 = inputs.iter().map(|of_rank| of_rank[i]).sum();
        assert!(of_ranks.iter().all(|sum| sum[i].to_bits() == in_order.to_bits()), "{i}");
    }
}

#[test]
fn a_long_sum_sends_less_than_twice_the_vector_on_any_number_of_ranks() {
    let length = 40_000;
    for world in [2, 3, 5, 8] {
        let sent = on_connected_ranks(world, TIMEOUT, |_, ring| {
            let sent_by = |reduce: &dyn Fn()| {
                let bytes = || ring.sent_bytes();
                let before = bytes();
                reduce();
                bytes() - before
            };
            let double = sent_by(&|| ring.all_reduce((&mut vec![1.0f64; length]).into()).unwrap());
            let single = sent_by(&|| ring.all_reduce((&mut vec![1.0f32; length]).into()).unwrap());
            (double, single)
        });
        let n = u64::from(world);
        for (double, single) in sent {
            for (bytes, vector) in [(double, 8 * length as u64), (single, 4 * length as u64)] {
                // The lengths of parts differ by at most one value.
                let max_bytes = 2 * (n - 1) * (vector / n + 8) + HEADER_BYTES as u64;
                assert!(bytes <= max_bytes && bytes < 2 * vector, "{world} ranks: {bytes} for {vector}");
            }
        }
    }
}

#[test]
fn the_concurrent_group_runs_at_the_same_time_in_its_own_order() {
    on_connected_ranks(3, TIMEOUT, |_, ring| {
        let concurrent = ring.concurrent_group().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20 {
                    let mut big = vec![1.0f32; 300_000];
                    ring.all_reduce((&mut big).into()).unwrap();
                    assert!(big.iter().all(|v| *v == 3.0));
                }
            });
            for _ in 0..200 {
                let mut small = [1.0f64; 64];
                concurrent.all_reduce((&mut small).into()).unwrap();
                assert_eq!(small, [3.0; 64]);
            }
        });
    });
}

#[test]
fn waiting_ranks_detect_lost_neighbours_immediately() {
    let waiting = std::sync::Barrier::new(3);
    on_connected_ranks(3, Duration::from_secs(600), |_, ring| {
        ring.check("a step").unwrap();
        waiting.wait();
        if ring.rank() == 1 {
            return;
        }
        let began = Instant::now();
        let error = loop {
            if let Err(error) = ring.check("a step") {
                break error;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "no rank noticed the loss");
            std::thread::yield_now();
        };
        assert!(matches!(error, CommError::Disconnected { operation: "a step", .. }), "{error}");
    });
}

#[test]
fn abort_ends_a_call_from_another_thread() {
    // Rank 1 is silent until the abort, so rank 0 sees no other reason to end.
    let done = std::sync::Barrier::new(2);
    let results = on_connected_ranks(2, Duration::from_secs(600), |_, ring| {
        if ring.rank() == 1 {
            done.wait();
            return ring.barrier().unwrap_err();
        }
        let error = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ring.all_reduce((&mut [0.0f32]).into()).unwrap_err());
            ring.abort("asked to stop");
            waiting.join().unwrap()
        });
        done.wait();
        error
    });
    assert_eq!(results[0].to_string(), "all_reduce: aborted: asked to stop");
    // Rank 1 notices by the header that arrived, or by the closed connection.
    let noticed = matches!(results[1], CommError::Disconnected { .. } | CommError::Mismatch { .. });
    assert!(noticed, "{:?}", results[1]);
}

#[test]
fn on_loopback_every_neighbour_is_on_this_machine() {
    assert_eq!(on_connected_ranks(3, TIMEOUT, |_, ring| ring.next_is_elsewhere().unwrap()), [false; 3]);
}
