//! Pipeline stages that compute several micro-batches at once have the losses and weights of one rank with as many micro-batches.

use super::{
    hybrid::{data_ranks, grouped, max_excess, plan, staged},
    *,
};
use lockstep_protocol::{agent::AxisTimes, spec::Split};

const STEPS: usize = 5;
/// Number of pictures in a micro-batch over all ranks. Each of two ranks has eight pictures: an engine adds up gradients in float64 over
/// shares of eight pictures, so the sums equal those of one rank.
const MICRO_BATCH: usize = 16;
/// A low rate, because batch norms of few pictures amplify the rounding of sums over rows and channels.
const LR: f32 = 0.002;

/// The size of a training run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// Pictures of all ranks in a micro-batch.
    pub(super) micro_batch: usize,
    pub(super) accumulate: usize,
    pub(super) steps: usize,
    /// Whether residual blocks begin as identities, so that rounding errors grow slowly.
    pub(super) zero_init_residual: bool,
}

const RUN: Run = Run { micro_batch: MICRO_BATCH, accumulate: 1, steps: STEPS, zero_init_residual: false };

/// Each rank's results of the steps, and the state for a checkpoint after them.
pub(super) fn train_with_plan(
    network: &Arc<Network>,
    plan: &Plan,
    Run { micro_batch, accumulate, steps, zero_init_residual }: Run,
    batch: impl Fn(usize, usize, usize) -> Batch + Sync,
) -> (Vec<Vec<StepResult>>, StateDict) {
    let per_rank = micro_batch / data_ranks(plan);
    let config = EngineConfig { accumulate, ..config(per_rank) };
    let has_shm = true;
    run_plan(has_shm, network, plan, &config, zero_init_residual, |engine, rank| {
        let (from, to) = (rank * per_rank, (rank + 1) * per_rank);
        let step = |step| {
            let micro_batch_of = |number| part_of(micro_batch, batch(step * accumulate + number, from, to));
            let micro_batches: Vec<Batch> = (0..accumulate).map(micro_batch_of).collect();
            let result = engine.train_step(&micro_batches, LR).unwrap();
            engine.update_average(0.9).unwrap();
            result
        };
        (0..steps).map(step).collect()
    })
}

#[test]
fn stages_train_as_one_rank_with_as_many_micro_batches() {
    let (resnet, grouped) = (network(), grouped());
    let halves = [("layer2.*", Split::Out), ("fc", Split::Out)];
    let cases: &[(&Arc<Network>, Plan, usize)] = &[
        (&resnet, staged(2, Plan::data(1)), 1),
        (&resnet, staged(2, Plan::data(1)), 2),
        (&resnet, staged(2, Plan::data(1)), 5),
        (&resnet, staged(4, Plan::data(1)), 2),
        (&resnet, staged(4, Plan::data(1)), 5),
        (&resnet, staged(11, Plan::data(1)), 2),
        (&resnet, staged(2, Plan::data(2)), 2),
        (&resnet, staged(2, plan([1, 1, 2], &halves)), 2),
        (&resnet, staged(2, plan([1, 2, 1], &[])), 2),
        (&grouped, staged(3, Plan::data(1)), 5),
        (&grouped, staged(3, plan([1, 2, 2], &[("*", Split::Out), ("block.conv2", Split::Groups)])), 2),
    ];
    let (mut references, mut failures) = (Vec::new(), Vec::new());
    for (network, plan, accumulate) in cases {
        let is_same_run = |(known, count, ..): &(&Arc<Network>, usize, _, _)| {
            Arc::ptr_eq(known, network) && count == accumulate
        };
        if !references.iter().any(is_same_run) {
            let (results, state) = train_with_plan(
                network,
                &Plan::data(1),
                Run { accumulate: *accumulate, ..RUN },
                steady_pictures,
            );
            references.push((*network, *accumulate, results, state));
        }
        let (.., results, state) = references.iter().find(|run| is_same_run(run)).unwrap();
        let (pipelined, pipelined_state) =
            train_with_plan(network, plan, Run { accumulate: *accumulate, ..RUN }, steady_pictures);
        let case = format!("{} on {:?}, {accumulate} micro-batches", network.arch, plan.mesh);
        for (step, expected) in results[0].iter().enumerate() {
            let mean = |value: &dyn Fn(&StepResult) -> f32| {
                pipelined.iter().map(|results| value(&results[step])).sum::<f32>() / pipelined.len() as f32
            };
            let loss = mean(&|result| result.loss);
            let accuracy = mean(&|result| result.correct as f32 / result.samples as f32);
            // A stage may have nothing that is split over an axis, such as rows after the global pooling.
            let (mut axes, mesh) = (AxisTimes::default(), plan.mesh);
            for of_rank in pipelined.iter().map(|results| &results[step]) {
                let times = of_rank.axis_secs.unwrap();
                assert!((times.sum() - of_rank.all_reduce_secs).abs() < 1e-9, "{case}: {of_rank:?}");
                axes.add(times, 1.0);
            }
            for (size, secs) in [
                (mesh.stage, axes.pipeline),
                (mesh.data, axes.data),
                (mesh.height, axes.height),
                (mesh.model, axes.model),
            ] {
                assert!(size == 1 || secs > 0.0, "{case}: {axes:?}");
            }
            let norm =
                pipelined.iter().map(|results| (results[step].grad_norm / expected.grad_norm - 1.0).abs());
            let norm_difference = norm.fold(0.0, f32::max);
            let expected_accuracy = expected.correct as f32 / expected.samples as f32;
            if (loss - expected.loss).abs() >= 1e-4
                || (accuracy - expected_accuracy).abs() > 1e-6
                || norm_difference > 1e-4
            {
                failures.push(format!(
                    "{case}, step {step}: loss {loss} instead of {}, accuracy {accuracy} instead of {expected_accuracy}, \
                     gradient norms differ by {norm_difference:e}",
                    expected.loss
                ));
            }
        }
        let slots = |state: &StateDict| state.optimizer.as_ref().unwrap().slots.clone();
        for (kind, (pipelined, expected)) in [
            ("weights", (&pipelined_state.parameters, &state.parameters)),
            ("average", (pipelined_state.average.as_ref().unwrap(), state.average.as_ref().unwrap())),
        ] {
            let (excess, name) = max_excess(pipelined, expected);
            if excess > 0.0 {
                failures.push(format!("{case}: {name} ({kind}) differs by 1e-6 + {excess:e}"));
            }
        }
        let difference = max_difference(&slots(&pipelined_state), &slots(state));
        if difference > 1e-3 {
            failures.push(format!("{case}: momentum differs by {difference:e}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The activations do not fit into a connection's buffers, so two neighbours that both send first would deadlock.
#[test]
fn stages_with_long_messages_do_not_deadlock() {
    const LARGE: usize = 64;
    let mut network = Network::new("large", LARGE, 3, 10);
    let mut x = network.input();
    for layer in 1..=3 {
        x = network.conv(format!("conv{layer}"), x, 64, 1, 1);
    }
    let x = network.global_average_pool(x);
    network.linear("fc", x, 10);
    let network = Arc::new(network);
    let batch = |number: usize, from: usize, to: usize| Batch {
        images: values(&format!("pipeline.large.{number}"), to * LARGE * LARGE * 3)
            .split_off(from * LARGE * LARGE * 3),
        labels: labels("pipeline.large", to, 10).split_off(from),
        ..Batch::default()
    };
    let (single, _) =
        train_with_plan(&network, &Plan::data(1), Run { accumulate: 4, steps: 1, ..RUN }, batch);
    let (pipelined, _) =
        train_with_plan(&network, &staged(3, Plan::data(1)), Run { accumulate: 4, steps: 1, ..RUN }, batch);
    assert!(
        pipelined.iter().all(|of_rank| (of_rank[0].loss - single[0][0].loss).abs() < 1e-4),
        "{pipelined:?}"
    );
}
