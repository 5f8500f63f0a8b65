//! Losses with a margin (ArcFace, CosFace): gradients match finite differences, and ranks that share the classes train as one rank.

use super::{
    hybrid::{data_ranks, max_excess, plan},
    *,
};
use lockstep_engine::Margin;
use lockstep_protocol::spec::{LossKind, LossSpec};

const CLASSES: usize = 9;
/// Number of pictures in a step.
const GLOBAL: usize = 16;
const STEPS: usize = 3;

/// A network without batch norms, so that a step's loss depends only on the weights.
fn plain_network() -> Arc<Network> {
    let mut network = Network::new("plain", SIDE, 3, CLASSES);
    let conv = network.conv("conv1", network.input(), 8, 3, 2);
    let relu = network.relu(conv);
    let average = network.global_average_pool(relu);
    network.linear("fc", average, CLASSES);
    Arc::new(network)
}

fn batch(from: usize, to: usize) -> Batch {
    Batch {
        images: values("margin.images", GLOBAL * PICTURE)[from * PICTURE..to * PICTURE].to_vec(),
        labels: labels("margin.labels", GLOBAL, CLASSES)[from..to].to_vec(),
        global_samples: GLOBAL,
        ..Batch::default()
    }
}

fn with_margin(kind: LossKind) -> EngineConfig {
    let margin = Margin::of(&LossSpec { kind, scale: 8.0, ..LossSpec::default() });
    let loss = LossConfig { margin, ..LossConfig::default() };
    let optimizer = Optimizer { momentum: 0.9, weight_decay: 0.0, ..Optimizer::default() };
    EngineConfig { loss, optimizer, ..config(GLOBAL) }
}

/// The result of a step from `weights`, and the gradient.
fn train_one_step(kind: LossKind, weights: &NamedTensors) -> (StepResult, NamedTensors) {
    let mut engine = build_cpu(plain_network(), weights, with_margin(kind), Arc::new(SingleRank)).unwrap();
    let result = engine.train_step(&[batch(0, GLOBAL)], 1e-3).unwrap();
    // After the first step, momentum is the gradient.
    (result, engine.optimizer_state().unwrap().slots)
}

#[test]
fn gradients_with_a_margin_match_finite_differences() {
    const H: f32 = 4e-3;
    for kind in [LossKind::ArcFace, LossKind::CosFace] {
        let initial = init::initial_parameters(&plain_network(), false, 1);
        let (_, gradients) = train_one_step(kind, &initial);
        for name in ["fc.weight", "conv1.weight"] {
            let gradient = &gradients[&format!("{name}.momentum")].values;
            let length = gradient.iter().map(|v| v * v).sum::<f32>().sqrt();
            // Along the gradient, and along a random direction.
            let along: Vec<f32> = gradient.iter().map(|v| v / length).collect();
            let random = values(&format!("margin.{name}"), gradient.len());
            for direction in [along, random] {
                let loss = |distance: f32| {
                    let mut moved = initial.clone();
                    let weights = &mut moved.get_mut(name).unwrap().values;
                    weights.iter_mut().zip(&direction).for_each(|(w, d)| *w += distance * d);
                    train_one_step(kind, &moved).0.loss
                };
                let measured = (loss(H) - loss(-H)) / (2.0 * H);
                let expected: f32 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
                assert!(
                    (measured - expected).abs() < 0.01 * length,
                    "{kind:?} {name}: the slope is {measured}, but the gradient (of length {length}) gives {expected}"
                );
            }
        }
        assert!(gradients["fc.bias.momentum"].values.iter().all(|v| *v == 0.0));
    }
}

/// A run's results over all ranks, and its final state.
struct Run {
    /// Mean loss and number of correct predictions of each step.
    steps: Vec<(f32, u32)>,
    /// Sum of losses and number of correct predictions of an evaluation.
    evaluated: (f64, u64),
    state: StateDict,
}

fn train_with_plan(kind: LossKind, plan: &Plan) -> Run {
    let (network, per_rank) = (plain_network(), GLOBAL / data_ranks(plan));
    let config = EngineConfig { batch_size: per_rank, ..with_margin(kind) };
    let (has_shm, zero_init_residual) = (true, false);
    let (of_ranks, state) =
        run_plan(has_shm, &network, plan, &config, zero_init_residual, |engine, data_rank| {
            let batch = batch(data_rank * per_rank, (data_rank + 1) * per_rank);
            let step = |_| engine.train_step(std::slice::from_ref(&batch), 0.02).unwrap();
            let steps: Vec<StepResult> = (0..STEPS).map(step).collect();
            (steps, engine.eval_step(&batch).unwrap())
        });
    let of_step = |step: usize| {
        let all = || of_ranks.iter().map(|(steps, _)| &steps[step]);
        let loss = all().map(|result| result.loss * result.samples as f32).sum::<f32>() / GLOBAL as f32;
        (loss, all().map(|result| result.correct).sum())
    };
    let steps = (0..STEPS).map(of_step).collect();
    let evaluated = of_ranks
        .iter()
        .fold((0.0, 0), |(loss, correct), (_, result)| (loss + result.loss_sum, correct + result.correct));
    Run { steps, evaluated, state }
}

#[test]
fn ranks_that_share_the_classes_train_as_one_rank() {
    for kind in [LossKind::ArcFace, LossKind::CosFace] {
        let expected = train_with_plan(kind, &Plan::data(1));
        let last_loss_sum = f64::from(expected.steps[STEPS - 1].0) * GLOBAL as f64;
        assert!(
            last_loss_sum > expected.evaluated.0 + 1.0,
            "an evaluation has no margin, so its loss {} is lower than the last step's, {last_loss_sum}",
            expected.evaluated.0
        );
        // A mesh is [data, height, model]. The ranks of a model group share the classes.
        for plan in [Plan::data(2), plan([1, 1, 2], &[]), plan([2, 1, 2], &[])] {
            let Run { steps, evaluated, state } = train_with_plan(kind, &plan);
            for ((loss, correct), (expected, expected_correct)) in steps.iter().zip(&expected.steps) {
                assert!((loss - expected).abs() < 1e-5 * expected, "{kind:?} {plan:?}: {loss} {expected}");
                assert_eq!(correct, expected_correct, "{kind:?} {plan:?}");
            }
            let (excess, name) = max_excess(&state.parameters, &expected.state.parameters);
            assert!(excess <= 1e-6, "{kind:?} {plan:?}: {name} exceeds the tolerance by {excess:e}");
            let (loss, correct) = expected.evaluated;
            assert!(
                (evaluated.0 - loss).abs() < 1e-4 * loss && evaluated.1 == correct,
                "{kind:?} {plan:?}: {evaluated:?}"
            );
        }
    }
}
