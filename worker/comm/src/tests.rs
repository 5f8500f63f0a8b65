//! Tests of every kind of group. Ranks are threads, connected by real sockets.

mod errors;
mod split;

use super::*;
pub(super) use rendezvous::loopback::on_connected_ranks;
use ring::Ring;
use shm::ShmProcessGroup;

const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ring,
    Shm,
}

const KINDS: [Kind; 2] = [Kind::Ring, Kind::Shm];

/// Runs `body` on the ranks of a group, one thread each, and returns their results by rank.
fn on_ranks<T: Send>(
    kind: Kind,
    size: u32,
    timeout: Duration,
    body: impl Fn(Arc<dyn ProcessGroup>) -> T + Sync,
) -> Vec<T> {
    on_connected_ranks(size, timeout, |store, ring| {
        let group: Arc<dyn ProcessGroup> = match kind {
            Kind::Ring => ring,
            Kind::Shm => ShmProcessGroup::upgrade(ring).unwrap(),
        };
        store.barrier("met").unwrap();
        body(group)
    })
}

/// `length` values of a rank. Their sum is rounded, so that it depends on the order.
pub(super) fn values(rank: u32, length: usize) -> Vec<f32> {
    let seed = |i: usize| (i as u32).wrapping_mul(2_654_435_761).wrapping_add(rank * 40_503);
    (0..length).map(|i| (seed(i) % 10_007) as f32 * 1.37e-3 - 5.0).collect()
}

fn bytes(rank: u32, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i as u32 * 7 + rank * 31) as u8).collect()
}

#[test]
fn each_rank_gets_the_sum_of_its_part() {
    for (kind, size) in [(Kind::Ring, 1), (Kind::Ring, 2), (Kind::Ring, 5), (Kind::Shm, 3)] {
        on_ranks(kind, size, TIMEOUT, |group| {
            let n = size as usize;
            for part in [0, 1, 1023, 40_001] {
                let exact =
                    |i: usize| -> f64 { (0..size).map(|rank| f64::from(values(rank, n * part)[i])).sum() };
                let first = group.rank() as usize * part;
                let is_checked = |i: usize| part < 100 || i.is_multiple_of(997);
                let single = values(group.rank(), n * part);
                let mut of_single = vec![0.0f32; part];
                group.reduce_scatter((&single).into(), (&mut of_single).into()).unwrap();
                let double: Vec<f64> = single.iter().copied().map(f64::from).collect();
                let mut of_double = vec![0.0f64; part];
                group.reduce_scatter((&double).into(), (&mut of_double).into()).unwrap();
                for i in (0..part).filter(|i| is_checked(*i)) {
                    let wanted = exact(first + i);
                    let case = format!("{kind:?}, {size} ranks, parts of {part} values, value {i}");
                    assert!((f64::from(of_single[i]) - wanted).abs() < 1e-5, "{case}");
                    assert!((of_double[i] - wanted).abs() < 1e-12, "{case}");
                }
            }
        });
    }
}

#[test]
fn parts_are_scattered_and_gathered() {
    for (kind, size) in [(Kind::Ring, 1), (Kind::Ring, 2), (Kind::Ring, 5), (Kind::Shm, 3)] {
        on_ranks(kind, size, TIMEOUT, |group| {
            let (rank, n) = (group.rank(), size as usize);
            // The longest part is passed along the ring in several blocks.
            for part in [0, 1, 3, 300_001] {
                let own = bytes(rank, n * part);
                let mut got = vec![0u8; n * part];
                group.all_to_all((&own).into(), (&mut got).into()).unwrap();
                let at = rank as usize * part;
                let wanted: Vec<u8> =
                    (0..size).flat_map(|from| bytes(from, n * part)[at..at + part].to_vec()).collect();
                assert_eq!(got, wanted, "all_to_all, {kind:?}, {size} ranks, {part} bytes");

                let mut got = vec![0u8; n * part];
                group.all_gather((&own[..part]).into(), (&mut got).into()).unwrap();
                let wanted: Vec<u8> =
                    (0..size).flat_map(|from| bytes(from, n * part)[..part].to_vec()).collect();
                assert_eq!(got, wanted, "all_gather, {kind:?}, {size} ranks, {part} bytes");

                let mut got = bytes(rank, part);
                group.broadcast((&mut got).into()).unwrap();
                assert_eq!(got, bytes(0, part), "broadcast, {kind:?}, {size} ranks, {part} bytes");
            }
        });
    }
}

#[test]
fn messages_between_any_two_ranks_keep_their_order_among_collectives() {
    for kind in KINDS {
        on_ranks(kind, 4, TIMEOUT, |group| {
            let (rank, size) = (group.rank(), group.size());
            for round in 0..3 {
                for to in (0..size).filter(|to| *to != rank) {
                    group.send((&[f64::from(rank), f64::from(round)]).into(), to).unwrap();
                    group.send(Values::U8(&[]), to).unwrap();
                    group.send((&[rank as u8, 7]).into(), to).unwrap();
                }
                group.barrier().unwrap();
                for from in (0..size).rev().filter(|from| *from != rank) {
                    let mut first = [0.0f64; 2];
                    group.recv((&mut first).into(), from).unwrap();
                    assert_eq!(first, [f64::from(from), f64::from(round)]);
                    group.recv(ValuesMut::U8(&mut []), from).unwrap();
                    let mut last = [0u8; 2];
                    group.recv((&mut last).into(), from).unwrap();
                    assert_eq!(last, [from as u8, 7]);
                }
            }
            // The message is longer than the socket buffers, so only ranks 0 and 1 send first.
            let long = values(rank, 2_000_000);
            let (to, from) = ((rank + 2) % size, (rank + size - 2) % size);
            let mut got = vec![0.0f32; long.len()];
            if rank < 2 {
                group.send((&long).into(), to).unwrap();
                group.recv((&mut got).into(), from).unwrap();
            } else {
                group.recv((&mut got).into(), from).unwrap();
                group.send((&long).into(), to).unwrap();
            }
            assert!(got == values(from, got.len()));
        });
    }
}

#[test]
fn gathered_bytes_may_have_any_length_up_to_the_limit() {
    for kind in KINDS {
        on_ranks(kind, 3, TIMEOUT, |group| {
            let gather = |lengths: [usize; 3]| {
                let all = group.all_gather_bytes(&bytes(group.rank(), lengths[group.rank() as usize]));
                all.map(|all| {
                    let wanted: Vec<_> =
                        (0..3).zip(lengths).map(|(rank, length)| bytes(rank, length)).collect();
                    assert_eq!(all, wanted);
                })
            };
            gather([0, 0, 0]).unwrap();
            gather([5, 0, 300]).unwrap();
            gather([1, LONGEST_MESSAGE, 2]).unwrap();
            let error = gather([1, LONGEST_MESSAGE + 1, 2]).unwrap_err();
            assert!(matches!(error, CommError::Invalid { .. }), "{error}");
            assert!(error.to_string().contains("rank 1 passed 1048577 bytes"), "{error}");
            gather([1, 2, 3]).unwrap();
        });
    }
}

#[test]
fn a_group_of_one_returns_its_own_values() {
    let group = SingleRank;
    let mut sum = [3.0f32];
    group.all_reduce((&mut sum).into()).unwrap();
    assert_eq!(sum, [3.0]);
    let mut output = [0.0f64; 2];
    group.reduce_scatter((&[1.0, 2.0]).into(), (&mut output).into()).unwrap();
    assert_eq!(output, [1.0, 2.0]);
    group.all_gather((&[3.0, 4.0]).into(), (&mut output).into()).unwrap();
    assert_eq!(output, [3.0, 4.0]);
    group.all_to_all((&[5.0, 6.0]).into(), (&mut output).into()).unwrap();
    assert_eq!(output, [5.0, 6.0]);
    assert_eq!(group.all_gather_bytes(b"word").unwrap(), [b"word"]);
    group.broadcast((&mut output).into()).unwrap();
    group.barrier().unwrap();
    assert_eq!(group.split(7).unwrap().size(), 1);
    for error in [
        group.send((&[1u8]).into(), 0),
        group.recv((&mut [0u8]).into(), 1),
        group.all_reduce(ValuesMut::U8(&mut [1])),
        group.all_gather((&[1.0f64]).into(), (&mut output).into()),
    ] {
        assert!(matches!(error, Err(CommError::Invalid { .. })), "{error:?}");
    }
}
