//! Combinations of all kinds of parallelism on eight ranks have the same losses and weights as one rank. `tests/run` skips
//! this test, except `tests/run full`.

use super::{
    hybrid::{max_excess, plan, staged},
    pipeline::{Run, train_with_plan},
    *,
};
use lockstep_protocol::spec::Split;

/// Number of pictures in a micro-batch. Each of eight ranks has eight pictures: an engine adds up gradients in float64 over shares of
/// eight pictures, so the sums equal those of one rank.
const MICRO_BATCH: usize = 64;

#[test]
fn eight_ranks_with_any_plan_train_as_one_rank() {
    let layers = [
        ("layer2.*", Split::Out),
        ("layer3.*.conv1", Split::Out),
        ("layer3.*.conv2", Split::In),
        ("fc", Split::Out),
    ];
    let network = network();
    let sharded = |plan: Plan| Plan { optimizer_sharding: true, ..plan };
    let plans = [
        Plan::data(8),
        sharded(Plan::data(8)),
        plan([1, 1, 8], &[]),
        plan([1, 8, 1], &[]),
        sharded(plan([2, 4, 1], &[])),
        sharded(plan([4, 1, 2], &layers)),
        plan([2, 2, 2], &layers),
        sharded(staged(2, plan([2, 1, 2], &layers))),
        staged(2, plan([1, 2, 2], &layers)),
        sharded(staged(4, Plan::data(2))),
        staged(8, Plan::data(1)),
    ];
    // Weights are compared after few steps, losses after many.
    let runs =
        [5, 25].map(|steps| Run { micro_batch: MICRO_BATCH, accumulate: 2, steps, zero_init_residual: true });
    let [(_, single_state), (single_results, _)] =
        runs.map(|run| train_with_plan(&network, &Plan::data(1), run, pictures));
    let mut failures = Vec::new();
    for plan in plans {
        let [(_, state), (results, _)] = runs.map(|run| train_with_plan(&network, &plan, run, pictures));
        let (excess, name) = max_excess(&state.parameters, &single_state.parameters);
        let loss_difference = |step: usize| {
            let sum: f32 = results.iter().map(|of_rank| of_rank[step].loss).sum();
            (sum / results.len() as f32 - single_results[0][step].loss).abs()
        };
        let loss_difference = (0..25).map(loss_difference).fold(0.0, f32::max);
        if excess > 0.0 || loss_difference.is_nan() || loss_difference >= 1e-4 {
            failures
                .push(format!("{plan}: losses differ by {loss_difference:e}, {name} by 1e-6 + {excess:e}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
