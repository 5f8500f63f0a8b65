//! A step that samples the classes (Partial FC) equals a step of a classifier with only these classes. The other classes stay unchanged.

use super::{
    hybrid::{data_rank, data_ranks, load_state, max_excess, plan, staged},
    *,
};
use lockstep_engine::Margin;
use lockstep_protocol::spec::{LossKind, LossSpec, Split};
use std::ops::Range;

const CLASSES: usize = 41;
/// The share of the classes that a step samples.
const SHARE: f64 = 0.25;
const STEPS: usize = 3;
/// Number of pictures in a step. Each of four ranks has eight pictures: an engine adds up gradients in float64 over shares of eight
/// pictures, so the sums equal those of one rank.
const GLOBAL: usize = 32;
const LR: f32 = 0.05;

fn wide(classes: usize) -> Arc<Network> {
    let mut network = Network::new("wide", SIDE, 3, classes);
    let input = network.input();
    let relu = conv_norm_relu(&mut network, "conv1", input, [8, 3, 1]);
    let relu = conv_norm_relu(&mut network, "conv2", relu, [16, 3, 2]);
    let average = network.global_average_pool(relu);
    network.linear("fc", average, classes);
    Arc::new(network)
}

/// The pictures `range` of a step. Only six classes have pictures.
fn part(number: usize, range: Range<usize>, global_samples: usize) -> Batch {
    let all = labels(&format!("sampled.labels.{number}"), GLOBAL, 6);
    let images = values(&format!("sampled.images.{number}"), GLOBAL * PICTURE);
    Batch {
        images: images[range.start * PICTURE..range.end * PICTURE].to_vec(),
        labels: all[range].iter().map(|label| 7 * label).collect(),
        global_samples,
        ..Batch::default()
    }
}

/// The pictures of rank `rank`, of `ranks` ranks, in each micro-batch of a step.
fn step(number: usize, (rank, ranks): (usize, usize), accumulate: usize) -> Vec<Batch> {
    let (all, per_rank) = (GLOBAL / accumulate, GLOBAL / accumulate / ranks);
    let from = |micro: usize| micro * all + rank * per_rank;
    (0..accumulate).map(|micro| part(number, from(micro)..from(micro) + per_rank, all)).collect()
}

struct Run {
    results: Vec<StepResult>,
    /// The states before the first step and after each step.
    states: Vec<StateDict>,
    /// The last state's logits for all pictures of step 0.
    logits: Vec<f32>,
}

/// Trains the steps `steps`, starting from `state` if it is given.
fn run(plan: &Plan, config: &EngineConfig, steps: Range<usize>, state: Option<&StateDict>) -> Run {
    let (network, ranks) = (wide(CLASSES), data_ranks(plan));
    let per_rank = GLOBAL / ranks;
    let of_ranks = on_ranks(plan.mesh.ranks() as u32, |comm| {
        let rank = data_rank(plan, &comm);
        let accumulate = config.accumulate;
        let config = EngineConfig { batch_size: per_rank / accumulate, ..config.clone() };
        let initial = init::initial_parameters(&network, false, 1);
        let mut engine = build_cpu_with(network.clone(), &initial, config, comm.clone(), plan).unwrap();
        if let Some(state) = state {
            load_state(&mut *engine, &network, plan, comm.as_ref(), state);
        }
        let mut of_steps = vec![(None, engine.state_dict(&Writers::default()).unwrap())];
        for number in steps.clone() {
            let result = engine.train_step(&step(number, (rank, ranks), accumulate), LR).unwrap();
            of_steps.push((Some(result), engine.state_dict(&Writers::default()).unwrap()));
        }
        let logits = engine.predict(&part(0, rank * per_rank..(rank + 1) * per_rank, GLOBAL)).unwrap();
        (of_steps, logits)
    });
    // Only the ranks of the last stage have results.
    let last_stage = plan.mesh.ranks() - plan.mesh.ranks_of_stage();
    let sum = |step: usize, value: &dyn Fn(&StepResult) -> f32| -> f32 {
        of_ranks[last_stage..].iter().filter_map(|(steps, _)| steps[step].0.as_ref()).map(value).sum()
    };
    let results = (1..=steps.len()).map(|step| StepResult {
        loss: sum(step, &|r| r.loss * r.samples as f32) / GLOBAL as f32,
        correct: sum(step, &|r| r.correct as f32) as u32,
        grad_norm: sum(step, &|r| r.grad_norm) / plan.mesh.ranks_of_stage() as f32,
        ..StepResult::default()
    });
    let (results, logits) =
        (results.collect(), of_ranks.iter().flat_map(|(_, logits)| logits.clone()).collect());
    let (of_rank_0, _) = of_ranks.into_iter().next().unwrap();
    let states = of_rank_0.into_iter().map(|(_, state)| state.expect("rank 0 has the state")).collect();
    Run { results, states, logits }
}

/// The classes whose weights, biases or optimizer state differ.
fn changed_classes(before: &StateDict, after: &StateDict) -> Vec<usize> {
    let all = |state: &StateDict| {
        let slots = state.optimizer.clone().unwrap().slots;
        let of_head =
            state.parameters.clone().into_iter().chain(slots).filter(|(name, _)| name.starts_with("fc."));
        of_head.map(|(_, tensor)| tensor).collect::<Vec<_>>()
    };
    let row = |tensor: &HostTensor, class: usize| {
        let width = tensor.values.len() / CLASSES;
        tensor.values[class * width..][..width].iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    };
    let (before, after) = (all(before), all(after));
    let differs = |class: &usize| before.iter().zip(&after).any(|(b, a)| row(b, *class) != row(a, *class));
    (0..CLASSES).filter(differs).collect()
}

/// The state of a classifier that has only `classes`.
fn select_classes(state: &StateDict, classes: &[usize]) -> StateDict {
    let mut state = state.clone();
    let slots = state.optimizer.iter_mut().map(|optimizer| &mut optimizer.slots);
    for tensors in std::iter::once(&mut state.parameters).chain(slots) {
        for (_, tensor) in tensors.iter_mut().filter(|(name, _)| name.starts_with("fc.")) {
            let width = tensor.values.len() / CLASSES;
            let rows = classes.iter().flat_map(|class| &tensor.values[class * width..][..width]);
            tensor.values = rows.copied().collect();
            tensor.shape[0] = classes.len();
        }
    }
    state
}

fn config_with_sample(kind: OptimizerKind, accumulate: usize) -> EngineConfig {
    let loss = LossConfig { sample_share: SHARE, seed: 3, ..LossConfig::default() };
    EngineConfig { loss, optimizer: optimizer(kind, 1e-2), accumulate, ..config(0) }
}

#[test]
fn a_sampled_step_equals_a_step_with_only_the_sampled_classes() {
    let margin = LossSpec { kind: LossKind::ArcFace, scale: 8.0, ..LossSpec::default() };
    let (none, margin) = (None, Margin::of(&margin));
    for (plan, kind, accumulate, margin) in [
        (Plan::data(1), OptimizerKind::Momentum, 1, none),
        (Plan::data(1), OptimizerKind::Momentum, 1, margin),
        (plan([1, 1, 2], &[]), OptimizerKind::Momentum, 1, margin),
        (Plan::data(1), OptimizerKind::AdamW, 2, none),
        (Plan::data(2), OptimizerKind::Nesterov, 1, none),
        (Plan { optimizer_sharding: true, ..plan([2, 1, 2], &[]) }, OptimizerKind::AdamW, 1, none),
        (plan([1, 1, 2], &[]), OptimizerKind::Momentum, 2, none),
        (plan([1, 1, 4], &[("fc", Split::Out)]), OptimizerKind::AdamW, 1, none),
        (staged(2, plan([1, 1, 2], &[])), OptimizerKind::Momentum, 2, none),
    ] {
        let mut config = config_with_sample(kind, accumulate);
        config.loss.margin = margin;
        let trained = run(&plan, &config, 0..STEPS, None);
        let loss = LossConfig { sample_share: 1.0, ..config.loss.clone() };
        let unsampled = EngineConfig { batch_size: GLOBAL / accumulate, loss, ..config.clone() };
        let ranks = plan.mesh.model;
        let drawn = ranks * (SHARE * (CLASSES / ranks) as f64).round() as usize;
        let mut samples = Vec::new();
        for (number, states) in trained.states.windows(2).enumerate() {
            let case = format!("{plan:?}, {kind:?}, step {number}");
            let classes = changed_classes(&states[0], &states[1]);
            let mut batches = step(number, (0, 1), accumulate);
            for label in batches.iter_mut().flat_map(|batch| &mut batch.labels) {
                *label = classes.iter().position(|class| *class == *label as usize).expect("a label's class")
                    as u32;
            }
            assert!(
                (drawn..=drawn + 6).contains(&classes.len()),
                "{case}: {drawn} random classes, and those of labels: {classes:?}"
            );

            let (before, after) =
                (select_classes(&states[0], &classes), select_classes(&states[1], &classes));
            let network = wide(classes.len());
            let mut small =
                build_cpu(network, &before.parameters, unsampled.clone(), Arc::new(SingleRank)).unwrap();
            small.load_state_dict(&before).unwrap();
            let (expected, result) = (small.train_step(&batches, LR).unwrap(), trained.results[number]);
            let near = |a: f32, b: f32| (a - b).abs() < 1e-5 * b;
            assert!(
                near(result.loss, expected.loss) && near(result.grad_norm, expected.grad_norm),
                "{case}: {result:?} instead of {expected:?}"
            );
            assert_eq!(result.correct, expected.correct, "{case}");
            let expected = small.own_state().unwrap();
            assert_eq!(
                after.optimizer.as_ref().unwrap().updates,
                expected.optimizer.as_ref().unwrap().updates
            );
            if plan.mesh.ranks() == 1 {
                assert!(after == expected, "{case}: other bits");
            } else {
                let (excess, name) = max_excess(&after.parameters, &expected.parameters);
                assert!(excess <= 0.0, "{case}: {name} differs by 1e-6 + {excess:e}");
            }
            samples.push(classes);
        }
        assert!(samples[0] != samples[1] && samples[1] != samples[2], "{samples:?}");

        // All classes take part in a prediction.
        let last = trained.states.last().unwrap();
        let mut whole = build_cpu(wide(CLASSES), &last.parameters, unsampled, Arc::new(SingleRank)).unwrap();
        let expected = whole.predict(&part(0, 0..GLOBAL, GLOBAL)).unwrap();
        assert_eq!(trained.logits.len(), expected.len());
        let difference = trained.logits.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(difference < 1e-4, "{plan:?}: logits differ by {difference}");
    }
}

#[test]
fn a_sample_is_the_same_after_a_resume() {
    for plan in [Plan::data(1), plan([1, 1, 2], &[])] {
        let config = config_with_sample(OptimizerKind::AdamW, 1);
        let whole = run(&plan, &config, 0..3, None);
        let resumed = run(&plan, &config, 2..3, Some(&whole.states[2]));
        assert!(resumed.states[1] == whole.states[3], "{plan:?}");
        let loss = LossConfig { seed: 4, ..config.loss.clone() };
        let other = run(&plan, &EngineConfig { loss, ..config }, 2..3, Some(&whole.states[2]));
        assert!(other.states[1] != whole.states[3], "another seed draws another sample");
    }
}

#[test]
fn a_head_that_is_split_over_its_inputs_is_refused() {
    let sample = config_with_sample(OptimizerKind::Momentum, 1);
    let margin = Margin::of(&LossSpec { kind: LossKind::CosFace, ..LossSpec::default() });
    let with_margin = EngineConfig { loss: LossConfig { margin, ..LossConfig::default() }, ..sample.clone() };
    for (config, key) in [(sample, "loss.sample_share"), (with_margin, "loss.kind")] {
        let errors = on_ranks(2, |comm| {
            let (network, plan) = (wide(CLASSES), plan([1, 1, 2], &[("fc", Split::In)]));
            let initial = init::initial_parameters(&network, false, 1);
            build_cpu_with(network, &initial, config.clone(), comm, &plan).err().unwrap().to_string()
        });
        assert!(errors[0].contains(key) && errors[0].contains("split = \"out\""), "{errors:?}");
    }
}
