//! Invalid calls, ranks that disagree, and ranks that do not arrive.

use super::*;
use std::{sync::Barrier, time::Instant};

#[test]
fn invalid_calls_are_refused_and_the_group_continues() {
    for kind in KINDS {
        on_ranks(kind, 2, TIMEOUT, |group| {
            let (mut two, mut three) = ([0.0f32; 2], [0.0f32; 3]);
            let refused = [
                (group.send((&[1.0f32]).into(), 2), "no rank 2 in a group of 2"),
                (group.send((&[1.0f32]).into(), group.rank()), "is this rank itself"),
                (group.recv((&mut two).into(), u32::MAX), "no rank 4294967295"),
                (group.recv((&mut two).into(), group.rank()), "is this rank itself"),
                (group.all_reduce(ValuesMut::U8(&mut [1])), "bytes cannot be reduced"),
                (group.reduce_scatter((&[1u8, 2]).into(), (&mut [0u8]).into()), "bytes cannot be reduced"),
                (
                    group.reduce_scatter((&[1.0f32, 2.0]).into(), (&mut two).into()),
                    "an input of 2 values requires an output of 1, not 2",
                ),
                (
                    group.all_gather((&[1.0f32, 2.0]).into(), (&mut three).into()),
                    "an input of 2 values requires an output of 4, not 3",
                ),
                (
                    group.all_to_all((&[1.0f32; 3]).into(), (&mut three).into()),
                    "an input of 3 values cannot be divided into 2 equal parts",
                ),
                (
                    group.all_gather((&[1.0f64]).into(), (&mut two).into()),
                    "the input is float64 and the output is float32",
                ),
            ];
            for (result, detail) in refused {
                let error = result.unwrap_err();
                assert!(matches!(error, CommError::Invalid { .. }), "{error}");
                assert!(error.to_string().contains(detail), "{error}");
            }
            group.all_reduce((&mut two).into()).unwrap();
            group.barrier().unwrap();
        });
    }
}

/// A call of one rank.
type Call = fn(&dyn ProcessGroup) -> Result<(), CommError>;

#[test]
fn errors_name_differing_calls_of_ranks() {
    let cases: [(Call, Call, &str, &str); 7] = [
        (
            |g| g.all_reduce((&mut [0.0f32; 10]).into()),
            |g| g.all_reduce((&mut [0.0f32; 11]).into()),
            "all_reduce of 10 float32 values",
            "all_reduce of 11 float32 values",
        ),
        (
            |g| g.all_reduce((&mut [0.0f32; 10]).into()),
            |g| g.all_reduce((&mut [0.0f64; 12]).into()),
            "all_reduce of 10 float32 values",
            "all_reduce of 12 float64 values",
        ),
        (
            |g| g.all_reduce((&mut [0.0f32; 10]).into()),
            |g| g.broadcast((&mut [0.0f32; 12]).into()),
            "all_reduce of 10 float32 values",
            "broadcast of 12 float32 values",
        ),
        (
            |g| g.reduce_scatter((&[0.0f32; 4]).into(), (&mut [0.0f32; 2]).into()),
            |g| g.reduce_scatter((&[0.0f32; 6]).into(), (&mut [0.0f32; 3]).into()),
            "reduce_scatter of 4 float32 values",
            "reduce_scatter of 6 float32 values",
        ),
        (
            |g| g.all_gather((&[0.0f32; 2]).into(), (&mut [0.0f32; 4]).into()),
            |g| g.all_to_all((&[0.0f32; 4]).into(), (&mut [0.0f32; 4]).into()),
            "all_gather of 2 float32 values",
            "all_to_all of 4 float32 values",
        ),
        (|g| g.barrier(), |g| g.split(0).map(drop), ": barrier", ": split"),
        (
            |g| g.all_reduce((&mut [0.0f64; 0]).into()),
            |g| g.barrier(),
            "all_reduce of 0 float64 values",
            ": barrier",
        ),
    ];
    for kind in KINDS {
        for (rank_0_call, rank_1_call, rank_0_text, rank_1_text) in &cases {
            let errors = on_ranks(kind, 2, TIMEOUT, |group| {
                let call = if group.rank() == 0 { rank_0_call } else { rank_1_call };
                let error = call(group.as_ref()).unwrap_err();
                assert!(group.barrier().is_err(), "the group has ended");
                error.to_string()
            });
            let names_both = |e: &String| e.contains(rank_0_text) && e.contains(rank_1_text);
            assert!(errors.iter().any(names_both), "{kind:?}: {errors:?}");
        }
    }
}

#[test]
fn receivers_refuse_messages_of_another_length_or_type() {
    for kind in KINDS {
        for wrong in [Values::F32(&[0.0; 3]), Values::F64(&[0.0; 2]), Values::U8(&[])] {
            let done = Barrier::new(2);
            on_ranks(kind, 2, TIMEOUT, |group| {
                if group.rank() == 0 {
                    group.send(wrong, 1).unwrap();
                    done.wait();
                    return;
                }
                let error = group.recv((&mut [0.0f32; 2]).into(), 0).unwrap_err();
                let message = error.to_string();
                assert!(matches!(error, CommError::Mismatch { peer: 0, .. }), "{error}");
                let sent = format!("send of {} {} values", wrong.len(), wrong.data_type().name());
                assert!(message.contains(&sent) && message.contains("send of 2 float32 values"), "{message}");
                done.wait();
            });
        }
    }
}

#[test]
fn a_silent_rank_times_out_and_a_dead_rank_is_detected_sooner() {
    for kind in KINDS {
        let done = Barrier::new(3);
        let errors = on_ranks(kind, 3, Duration::from_millis(300), |group| {
            if group.rank() == 1 {
                done.wait();
                return None;
            }
            let error = group.all_reduce((&mut [0.0f64; 10]).into()).unwrap_err();
            done.wait();
            Some(error)
        });
        // In a ring, rank 0 waits for rank 2, which waits for rank 1.
        let timed_out = errors.iter().flatten().any(|error| {
            let CommError::TimedOut { peer, secs, .. } = error else { return false };
            *secs == 0.3 && (kind == Kind::Ring || *peer == 1)
        });
        assert!(timed_out, "{kind:?}: {errors:?}");

        let errors = on_ranks(kind, 3, Duration::from_secs(600), |group| {
            if group.rank() == 1 {
                return None;
            }
            let began = Instant::now();
            let error = group.all_reduce((&mut vec![0.0f64; 20_000]).into()).unwrap_err();
            assert!(began.elapsed() < Duration::from_secs(60));
            assert!(group.barrier().is_err(), "the group has ended");
            Some(error)
        });
        for error in errors.iter().flatten() {
            assert!(matches!(error, CommError::Disconnected { .. }), "{kind:?}: {error}");
        }
    }
}

#[test]
fn recv_times_out_and_names_the_sender() {
    for kind in KINDS {
        let done = Barrier::new(4);
        on_ranks(kind, 4, Duration::from_millis(300), |group| {
            if group.rank() == 0 {
                // Rank 2 is not a neighbour, and never sends.
                let error = group.recv((&mut [0u8]).into(), 2).unwrap_err();
                assert!(matches!(error, CommError::TimedOut { operation: "recv", peer: 2, .. }), "{error}");
            }
            done.wait();
        });
        // An exited rank is detected sooner.
        on_ranks(kind, 2, Duration::from_secs(600), |group| {
            if group.rank() == 1 {
                return;
            }
            let error = group.recv((&mut [0u8]).into(), 1).unwrap_err();
            assert!(matches!(error, CommError::Disconnected { peer: 1, .. }), "{error}");
        });
        on_ranks(kind, 2, Duration::from_secs(600), |group| {
            if group.rank() == 1 {
                return;
            }
            // Sending to a closed connection does not fail at once.
            let error = loop {
                if let Err(error) = group.send((&vec![0u8; 1 << 20]).into(), 1) {
                    break error;
                }
            };
            assert!(matches!(error, CommError::Disconnected { peer: 1, .. }), "{error}");
        });
    }
}

#[test]
fn an_abort_ends_the_wait_for_a_message() {
    for kind in KINDS {
        // Without and with an earlier message from the sender, which connects the two ranks.
        for is_connected in [false, true] {
            let done = Barrier::new(2);
            on_ranks(kind, 2, Duration::from_secs(600), |group| {
                if group.rank() == 1 {
                    if is_connected {
                        group.send((&[1u8]).into(), 0).unwrap();
                    }
                    done.wait();
                    return;
                }
                if is_connected {
                    group.recv((&mut [0u8]).into(), 1).unwrap();
                }
                std::thread::scope(|scope| {
                    let waiting = scope.spawn(|| group.recv((&mut [0u8]).into(), 1).unwrap_err());
                    group.abort("enough");
                    assert_eq!(waiting.join().unwrap().to_string(), "recv: aborted: enough");
                });
                done.wait();
            });
        }
    }
}
