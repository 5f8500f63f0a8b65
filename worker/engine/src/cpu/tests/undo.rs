//! Tests of [`Engine::undo_unfinished_steps`]: after a lost rank interrupted a step, training continues with the same bits.

use super::resnet20;
use crate::{Engine, EngineConfig, Optimizer, StateDict, build_cpu, fixtures};
use lockstep_comm::{ProcessGroup, rendezvous::loopback::on_connected_ranks, ring::Ring};
use lockstep_data::loader::Batch;
use lockstep_protocol::spec::OptimizerKind;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Number of tried moments. The last stands for no interruption; at the others, from its beginning to its end, a step is interrupted.
const MOMENTS: u32 = 8;
const KINDS: [OptimizerKind; 5] = [
    OptimizerKind::Momentum,
    OptimizerKind::Nesterov,
    OptimizerKind::Lars,
    OptimizerKind::AdamW,
    OptimizerKind::Lamb,
];

/// One of two ranks.
struct Rank {
    number: u32,
    ring: Arc<Ring>,
    engine: Box<dyn Engine>,
    /// Two micro-batches, which both change running statistics.
    batches: [Batch; 2],
}

impl Rank {
    /// Runs a step. Returns whether it has finished.
    fn step(&mut self) -> bool {
        let is_done = self.engine.train_step(&self.batches, 0.01).is_ok();
        // As in training, only rank 0 averages the weights.
        if is_done && self.number == 0 {
            self.engine.update_average(0.9).unwrap();
        }
        is_done
    }

    fn state(&self) -> StateDict {
        self.engine.own_state().unwrap()
    }
}

/// Runs `work` on two ranks and returns their results.
fn on_two_ranks<T: Send>(kind: OptimizerKind, work: impl Fn(&mut Rank) -> T + Sync) -> Vec<T> {
    on_connected_ranks(2, Duration::from_secs(60), |_, ring| {
        let network = resnet20(12);
        let config = EngineConfig {
            optimizer: Optimizer { kind, ..Optimizer::default() },
            accumulate: 2,
            ..fixtures::config(8)
        };
        let initial = fixtures::initial(&network);
        let batches = [8, 6]
            .map(|pictures| Batch { global_samples: 2 * pictures, ..fixtures::batch(&network, pictures) });
        let engine = build_cpu(network, &initial, config, ring.clone()).unwrap();
        work(&mut Rank { number: ring.rank(), ring, engine, batches })
    })
}

/// Each rank's state after each of four uninterrupted steps.
fn uninterrupted(kind: OptimizerKind) -> Vec<Vec<StateDict>> {
    on_two_ranks(kind, |rank| {
        let step = |_| {
            assert!(rank.step());
            rank.state()
        };
        (1..=4).map(step).collect()
    })
}

/// Each rank's state after the third step was interrupted at moment `moment`, and whether the interruption was in time.
fn interrupted(kind: OptimizerKind, moment: u32) -> Vec<(StateDict, bool)> {
    on_two_ranks(kind, |rank| {
        assert!(rank.step());
        let began = Instant::now();
        assert!(rank.step());
        let step_duration = began.elapsed();
        rank.ring.barrier().unwrap();
        let is_done = std::thread::scope(|scope| {
            if rank.number == 1 && moment < MOMENTS - 1 {
                let ring = rank.ring.clone();
                scope.spawn(move || {
                    std::thread::sleep(step_duration * moment / (MOMENTS - 2));
                    ring.abort("this rank dies");
                });
            }
            rank.step()
        });
        assert!(
            is_done || rank.engine.undo_unfinished_steps().is_some(),
            "ranks that share no memory can undo a step"
        );
        (rank.state(), !is_done)
    })
}

#[test]
fn a_step_interrupted_by_a_lost_rank_leaves_the_state_before_or_after_the_step() {
    for kind in KINDS {
        let whole = uninterrupted(kind);
        assert_ne!(whole[0][1], whole[0][2]);
        let mut interrupted_steps = 0;
        let mut rank_0_state = None;
        for moment in 0..MOMENTS {
            for (rank, (state, is_interrupted)) in interrupted(kind, moment).into_iter().enumerate() {
                let steps = if is_interrupted { 2 } else { 3 };
                assert!(state == whole[rank][steps - 1], "{kind:?}: rank {rank} after step {steps}");
                interrupted_steps += u32::from(is_interrupted);
                if is_interrupted && rank == 0 {
                    rank_0_state = Some(state);
                }
            }
        }
        assert!(
            interrupted_steps >= MOMENTS / 2,
            "{kind:?}: only {interrupted_steps} steps of a rank were interrupted"
        );
        // The next attempt: rank 0's state on every rank, except for the average.
        let rank_0_state = rank_0_state.expect("rank 0 was interrupted");
        let ends = on_two_ranks(kind, |rank| {
            let average = rank_0_state.average.clone().filter(|_| rank.number == 0);
            rank.engine.load_state_dict(&StateDict { average, ..rank_0_state.clone() }).unwrap();
            rank.ring.barrier().unwrap();
            assert!(rank.step() && rank.step());
            rank.state()
        });
        for (end, whole) in ends.iter().zip(&whole) {
            assert!(*end == whole[3], "{kind:?}: the same bits as without the interruption");
        }
    }
}
