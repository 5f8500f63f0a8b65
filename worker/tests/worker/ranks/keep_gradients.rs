//! `keep_gradients` keeps the sum of all ranks' gradients, over shared memory and over a ring.

use super::*;

#[test]
fn kept_gradients_are_the_sum_over_ranks_bit_for_bit() {
    for kind in [OptimizerKind::Momentum, OptimizerKind::Lamb] {
        let optimizer = Optimizer { kind, ..config(1).optimizer };
        let run = |ranks: u32, has_shm: bool| {
            run_ranks(ranks, has_shm, |comm| {
                let (rank, per_rank) = (comm.rank(), 32 / ranks as usize);
                let mut engine = engine(EngineConfig { optimizer, ..config(per_rank) }, comm);
                let mut kept = Vec::new();
                for step in 0..6 {
                    if step % 2 == 1 {
                        engine.keep_gradients().unwrap();
                    }
                    let batch = part_of_rank(step, 32, (rank, ranks));
                    engine.train_step(&[batch], 0.01).unwrap();
                    if step % 2 == 1 && rank == 0 {
                        kept.push((engine.gradients().unwrap(), engine.parameters().unwrap()));
                    }
                }
                kept
            })
            .swap_remove(0)
        };
        let single = run(1, true);
        let [(first, _), (second, _), _] = &single[..] else { panic!("three steps keep gradients") };
        assert!(first != second);
        for (ranks, has_shm) in [(2, true), (2, false), (4, true)] {
            assert!(run(ranks, has_shm) == single, "{kind:?}, {ranks} ranks, shared memory: {has_shm}");
        }
    }
}
