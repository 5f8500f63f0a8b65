//! Groups split from groups, and the effects of an abort or failure.

use super::*;
use std::sync::Barrier;

/// The sum of `value` over the ranks of `group`.
fn sum_of(group: &dyn ProcessGroup, value: u32) -> f64 {
    let mut sum = [f64::from(value)];
    group.all_reduce((&mut sum).into()).unwrap();
    sum[0]
}

#[test]
fn ranks_of_a_color_are_a_group_in_their_order() {
    for kind in KINDS {
        on_ranks(kind, 6, TIMEOUT, |all| {
            let rank = all.rank();
            let parity = rank as usize % 2;
            let part = all.split([10, 3][parity]).unwrap();
            assert_eq!((part.rank(), part.size()), (rank / 2, 3));
            assert_eq!(sum_of(part.as_ref(), rank), [6.0, 9.0][parity]);
            let mut members = [0.0f64; 3];
            part.all_gather((&[f64::from(rank)]).into(), (&mut members).into()).unwrap();
            assert_eq!(members, [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]][parity]);
            // The concurrent group and messages use the ranks of the new group.
            let concurrent = part.concurrent_group().unwrap();
            assert_eq!(sum_of(concurrent.as_ref(), 1), f64::from(part.size()));
            let next = (part.rank() + 1) % part.size();
            part.send((&[rank as u8]).into(), next).unwrap();
            let previous = (part.rank() + part.size() - 1) % part.size();
            let mut received = [0];
            part.recv((&mut received).into(), previous).unwrap();
            assert_eq!(f64::from(received[0]), members[previous as usize]);
            match (kind, part.shared_memory(100).unwrap()) {
                (Kind::Shm, Err(why)) => panic!("{why}"),
                (Kind::Ring, Ok(_)) => panic!("a ring has no memory to share"),
                _ => {}
            }
            // The parent group is unaffected.
            assert_eq!(sum_of(all.as_ref(), 1), 6.0);
        });
    }
}

#[test]
fn a_subgroup_can_be_split_again_down_to_one_rank() {
    for kind in KINDS {
        on_ranks(kind, 4, TIMEOUT, |all| {
            let half = all.split(all.rank() / 2).unwrap();
            let one = half.split(half.rank()).unwrap();
            assert_eq!((half.size(), one.size(), one.rank()), (2, 1, 0));
            assert_eq!(sum_of(one.as_ref(), all.rank()), f64::from(all.rank()));
            // A second split with the same colors makes new groups.
            let again = all.split(all.rank() / 2).unwrap();
            assert_eq!(sum_of(again.as_ref(), 1) + sum_of(half.as_ref(), 1), 4.0);
        });
    }
}

#[test]
fn aborting_a_subgroup_does_not_affect_other_groups() {
    for kind in KINDS {
        on_ranks(kind, 4, TIMEOUT, |all| {
            let part = all.split(all.rank() / 2).unwrap();
            if all.rank() < 2 {
                let error = match part.rank() {
                    0 => {
                        part.abort("enough");
                        part.barrier().unwrap_err()
                    }
                    _ => part.barrier().unwrap_err(),
                };
                let is_expected = matches!(
                    (&error, part.rank()),
                    (CommError::Aborted { .. }, 0) | (CommError::Disconnected { peer: 0, .. }, 1)
                );
                assert!(is_expected, "{error}");
                assert!(part.send((&[1u8]).into(), 1 - part.rank()).is_err());
            } else {
                assert_eq!(sum_of(part.as_ref(), 1), 2.0);
            }
            assert_eq!(sum_of(all.as_ref(), 1), 4.0);
            let new = all.split(0).unwrap();
            assert_eq!(sum_of(new.as_ref(), 1), 4.0);
            all.barrier().unwrap();
        });
    }
}

#[test]
fn aborting_a_group_aborts_all_its_subgroups() {
    for kind in KINDS {
        let done = Barrier::new(4);
        on_ranks(kind, 4, Duration::from_secs(600), |all| {
            let part = all.split(all.rank() / 2).unwrap();
            let inner = part.split(0).unwrap();
            all.barrier().unwrap();
            if all.rank() == 0 {
                // No other rank makes these calls.
                std::thread::scope(|scope| {
                    let waiting = scope.spawn(|| inner.barrier().unwrap_err());
                    all.abort("asked to stop");
                    assert_eq!(waiting.join().unwrap().to_string(), "barrier: aborted: asked to stop");
                });
                assert!(matches!(part.barrier(), Err(CommError::Aborted { .. })));
                assert!(matches!(all.split(0), Err(CommError::Aborted { .. })));
            }
            done.wait();
        });
    }
}

#[test]
fn a_failed_subgroup_does_not_end_the_group() {
    for kind in KINDS {
        on_ranks(kind, 2, Duration::from_secs(5), |all| {
            let part = all.split(0).unwrap();
            let length = 10 + all.rank() as usize;
            part.all_reduce((&mut vec![0.0f32; length]).into()).unwrap_err();
            assert_eq!(sum_of(all.as_ref(), 1), 2.0);
            all.barrier().unwrap();
        });
    }
}

#[test]
fn if_one_rank_cannot_join_a_split_all_fail_with_the_reason() {
    on_connected_ranks(3, TIMEOUT, |store, ring| {
        let build = |group: Arc<Ring>| -> Result<Arc<dyn ProcessGroup>, CommError> {
            match ring.rank() {
                1 => Err(CommError::Failed { operation: "NCCL start", detail: "no GPU 9".into() }),
                _ => Ok(group),
            }
        };
        let error = ring.split_with(u32::from(ring.rank() > 1), build).err().unwrap();
        assert_eq!(error.to_string(), "split: rank 1 could not join its group: NCCL start: no GPU 9");
        assert_eq!(sum_of(ring.as_ref(), 1), 3.0);
        store.barrier("done").unwrap();
    });
}

#[test]
fn subgroups_connect_over_their_parent_group() {
    on_connected_ranks(3, TIMEOUT, |store, ring| {
        let rank = ring.rank();
        assert!(matches!(Exchange::of(ring.as_ref(), Some(store)), Exchange::Store(..)));
        let part = ring.split(u32::from(rank > 0)).unwrap();
        if rank > 0 {
            let exchange = Exchange::of(part.as_ref(), Some(store));
            assert!(matches!(exchange, Exchange::Group(_)));
            let name = format!("rank {rank}");
            let all = exchange.all_gather_bytes("test", "names", name.as_bytes()).unwrap();
            assert_eq!(all, [b"rank 1", b"rank 2"]);
        }
        store.barrier("done").unwrap();
    });
}
