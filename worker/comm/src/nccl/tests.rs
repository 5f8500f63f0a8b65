use super::*;
use crate::{ProcessGroup, Reduction, ValuesMut, ring::Ring};
use crate::{
    gather::gather,
    rendezvous::{
        Store,
        loopback::{rendezvous_config, unused_port},
    },
};

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_group_of_one_gathers_and_is_aborted() {
    let store = Store::join(rendezvous_config(unused_port(), 0, 1)).unwrap();
    let found = gather(&store, 0).unwrap();
    assert_eq!(found.values, [0.0]);
    let patience = Duration::from_secs(60);
    let nccl = Nccl::connect(Exchange::Store(&store, patience), "another", 0, patience).unwrap();
    nccl.async_error().unwrap();
    let began = Instant::now();
    nccl.abort("enough");
    assert!(matches!(nccl.async_error(), Err(CommError::Aborted { reason, .. }) if reason == "enough"));
    drop(nccl);
    assert!(wait_for_aborts(Duration::from_secs(10)));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_an_abort_is_safe_while_other_threads_ask_for_errors() {
    for round in 0..5 {
        let store = Store::join(rendezvous_config(unused_port(), 0, 1)).unwrap();
        let patience = Duration::from_secs(60);
        let nccl = Nccl::connect(Exchange::Store(&store, patience), "asked", 0, patience).unwrap();
        std::thread::scope(|scope| {
            let asking: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        loop {
                            if let Err(error) = nccl.async_error() {
                                return error;
                            }
                        }
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(10 * round));
            nccl.abort("enough");
            for thread in asking {
                let error = thread.join().unwrap();
                assert!(matches!(&error, CommError::Aborted { reason, .. } if reason == "enough"), "{error}");
            }
        });
        assert!(wait_for_aborts(Duration::from_secs(10)), "round {round}");
    }
}

#[test]
fn a_missing_nccl_is_an_error() {
    if libraries::ready(&[Library::Driver, Library::Nccl]).is_ok() {
        return;
    }
    let store = Store::join(rendezvous_config(unused_port(), 0, 1)).unwrap();
    let patience = Duration::from_secs(5);
    let error =
        Nccl::connect(Exchange::Store(&store, patience), "none", 0, patience).unwrap_err().to_string();
    assert!(error.contains("not found") || error.contains("cannot be loaded"), "{error}");
}

/// Runs `body` on `size` ranks with one GPU each.
fn on_gpus(size: u32, body: impl Fn(Arc<NcclProcessGroup>) + Sync) {
    let port = unused_port();
    std::thread::scope(|scope| {
        let body = &body;
        for rank in 0..size {
            scope.spawn(move || {
                let store = Store::join(rendezvous_config(port, rank, size)).unwrap();
                let ring = Ring::connect(&store, Duration::from_secs(60)).unwrap();
                body(NcclProcessGroup::connect(ring, "test", rank.cast_signed()).unwrap());
                store.barrier("done").unwrap();
            });
        }
    });
    // NCCL crashes if the process ends while an abort is in progress.
    assert!(wait_for_aborts(Duration::from_secs(10)));
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_every_call_matches_the_ring() {
    on_gpus(2, |group| {
        let rank = group.rank();
        let own = [1.0 + rank as f32, 2.0, 3.0, 4.0 * rank as f32];
        let mut sum = own;
        group.all_reduce((&mut sum).into(), Reduction::Sum).unwrap();
        assert_eq!(sum, [3.0, 4.0, 6.0, 4.0]);
        let mut mean = own.map(f64::from);
        group.all_reduce((&mut mean).into(), Reduction::Mean).unwrap();
        assert_eq!(mean, [1.5, 2.0, 3.0, 2.0]);
        let mut half = own.map(|v| half::f16::from_f32(v).to_bits());
        group.all_reduce(ValuesMut::F16(&mut half), Reduction::Max).unwrap();
        assert_eq!(half.map(|v| half::f16::from_bits(v).to_f32()), [2.0, 2.0, 3.0, 4.0]);
        let mut part = [0.0f32; 2];
        group.reduce_scatter((&own).into(), (&mut part).into(), Reduction::Sum).unwrap();
        assert_eq!(part, [[3.0, 4.0], [6.0, 4.0]][rank as usize]);
        let mut exchanged = [0.0f32; 4];
        group.all_to_all((&own).into(), (&mut exchanged).into()).unwrap();
        assert_eq!(exchanged, [[1.0, 2.0, 2.0, 2.0], [3.0, 0.0, 3.0, 4.0]][rank as usize]);
        let mut all = [0; 6];
        group.all_gather((&[rank as u8, 7, 9]).into(), (&mut all).into()).unwrap();
        assert_eq!(all, [0, 7, 9, 1, 7, 9]);
        let mut bytes = [rank as u8; 3];
        group.broadcast((&mut bytes).into(), 1).unwrap();
        assert_eq!(bytes, [1; 3]);
        group.all_reduce(ValuesMut::F32(&mut []), Reduction::Sum).unwrap();
        group.barrier().unwrap();
        let mut got = [0.0f64; 3];
        if rank == 0 {
            group.send((&[1.0f64, 2.0, 3.0]).into(), 1).unwrap();
            group.recv((&mut got).into(), 1).unwrap();
        } else {
            group.recv((&mut got).into(), 0).unwrap();
            group.send((&[1.0f64, 2.0, 3.0]).into(), 0).unwrap();
        }
        assert_eq!(got, [1.0, 2.0, 3.0]);
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_a_subgroup_is_aborted_alone_and_disagreeing_ranks_get_an_error() {
    on_gpus(2, |group| {
        let part = group.split(Some(0), -(group.rank().cast_signed())).unwrap().unwrap();
        assert_eq!((part.rank(), part.size()), (1 - group.rank(), 2));
        let count = |group: &dyn ProcessGroup| {
            let mut count = [1.0f32];
            group.all_reduce((&mut count).into(), Reduction::Sum).map(|()| count[0])
        };
        assert_eq!(count(part.as_ref()).unwrap(), 2.0);
        assert_eq!(group.split(Some(group.rank()), 0).unwrap().unwrap().size(), 1);
        part.abort("enough");
        assert!(count(part.as_ref()).is_err());
        assert_eq!(count(&group).unwrap(), 2.0);
        let began = Instant::now();
        let error = match group.rank() {
            0 => group.barrier().unwrap_err(),
            _ => count(&group).unwrap_err(),
        };
        assert!(matches!(error, CommError::Mismatch { .. } | CommError::Disconnected { .. }), "{error}");
        assert!(began.elapsed() < Duration::from_secs(20), "NCCL itself would wait forever");
    });
}
