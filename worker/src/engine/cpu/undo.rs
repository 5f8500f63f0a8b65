//! What is left of a step that another rank did not finish.

use super::super::{StateDict, build_cpu, unfused};
use crate::{
    comm::{
        ProcessGroup,
        rendezvous::{Store, free_port, tests::meeting},
        ring::Ring,
    },
    data::loader::Batch,
    net::resnet,
};
use lockstep_protocol::spec::{Arch, ModelSpec};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const TIMEOUT: Duration = Duration::from_secs(60);
/// The step is broken off at so many moments, from its begin to its end.
const MOMENTS: u32 = 12;

/// Of one of two ranks: the state after two steps, the same of the third, or what is left of it, and whether it was broken off.
fn rank(rank: u32, port: u16, moment: u32) -> (StateDict, StateDict, bool) {
    let store = Store::join(meeting(port, rank, 2)).unwrap();
    let ring = Ring::connect(&store, TIMEOUT).unwrap();
    let model = ModelSpec { arch: Arch::ResNet20, ..ModelSpec::default() };
    let network = Arc::new(resnet::build(&model, 12, 3, 10).unwrap());
    let initial = unfused::initial(&network);
    let mut engine = build_cpu(network.clone(), &initial, unfused::config(8), ring.clone()).unwrap();
    let step = [Batch { global_samples: 16, ..unfused::batch(&network, 8) }];
    engine.train_step(&step, 0.1).unwrap();
    let began = Instant::now();
    engine.train_step(&step, 0.1).unwrap();
    let took = began.elapsed();
    let before = engine.own_state().unwrap();
    ring.barrier().unwrap();
    let third = std::thread::scope(|scope| {
        if rank == 1 && moment < MOMENTS - 1 {
            scope.spawn(|| {
                std::thread::sleep(took * moment / (MOMENTS - 2));
                ring.abort("this rank dies");
            });
        }
        engine.train_step(&step, 0.1)
    });
    let is_broken = third.is_err();
    assert!(!is_broken || engine.undo_step(), "ranks that share no memory know what they have");
    (before, engine.own_state().unwrap(), is_broken)
}

#[test]
fn a_step_that_a_lost_rank_breaks_off_leaves_the_state_before_it_or_after_it() {
    let mut whole: Option<(StateDict, StateDict)> = None;
    let mut broken = 0;
    // The last moment is never: that is what a whole step comes to.
    for moment in (0..MOMENTS).rev() {
        let port = free_port("127.0.0.1").unwrap();
        let ranks = std::thread::scope(|scope| {
            let threads = [0, 1].map(|number| scope.spawn(move || rank(number, port, moment)));
            threads.map(|thread| thread.join().unwrap())
        });
        for (before, after, is_broken) in ranks {
            let (second, third) = whole.get_or_insert_with(|| (before.clone(), after.clone()));
            assert!(before == *second, "two steps give the same bits each time");
            assert_ne!(second, third);
            assert!(
                after == if is_broken { second.clone() } else { third.clone() },
                "broken off: {is_broken}"
            );
            broken += u32::from(is_broken);
        }
    }
    assert!(broken >= MOMENTS / 2, "only {broken} were broken off");
}
