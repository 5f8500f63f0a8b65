//! Ranks that split one network have the same losses and weights as one rank with the whole network.

use super::*;
use lockstep_engine::{Distribution, net::TensorShape, plan::Mesh};
use lockstep_host::tensors::fit::shapes;
use lockstep_protocol::spec::{ShardSpec, Split};

const STEPS: usize = 5;
/// Number of pictures in a step. An engine adds up gradients in float64 over blocks of eight pictures. Four ranks have one block each, so
/// their sums equal the sums of one rank.
const GLOBAL: usize = 32;
const LR: f32 = 0.01;

/// A plan with this mesh and these splits of layers.
pub(super) fn plan([data, height, model]: [usize; 3], shards: &[(&str, Split)]) -> Plan {
    let shard = |(pattern, split): &(&str, Split)| ShardSpec { pattern: (*pattern).into(), split: *split };
    let mesh = Mesh { stage: 1, data, height, model };
    Plan::on(mesh, shards.iter().map(shard).collect())
}

/// A plan with `stages` pipeline stages, each distributed as in `plan`.
pub(super) fn staged(stages: usize, plan: Plan) -> Plan {
    Plan { mesh: Mesh { stage: stages, ..plan.mesh }, ..plan }
}

/// Loads this rank's part of the whole network's `state`.
pub(super) fn load_state(
    engine: &mut dyn Engine,
    network: &Network,
    plan: &Plan,
    comm: &dyn ProcessGroup,
    state: &StateDict,
) {
    let distribution = Distribution::new(network, plan, comm).unwrap();
    let part = |whole: &NamedTensors| distribution.scatter(Some(whole.clone()), shapes(whole)).unwrap();
    let optimizer = state
        .optimizer
        .as_ref()
        .map(|whole| OptimizerState { slots: part(&whole.slots), updates: whole.updates });
    let own_state = StateDict { parameters: part(&state.parameters), optimizer, ..StateDict::default() };
    // Ranks of one machine share the weights.
    comm.barrier().unwrap();
    engine.load_state_dict(&own_state).unwrap();
    comm.barrier().unwrap();
}

/// The number of parts into which ranks divide a batch. Ranks that share rows or stages read the same part.
pub(super) fn data_ranks(plan: &Plan) -> usize {
    plan.mesh.readers()
}

/// A residual network with grouped convolutions, a max pooling and numbers of channels with few divisors.
pub(super) fn grouped() -> Arc<Network> {
    let mut network = Network::new("grouped", SIDE, 3, 10);
    let input = network.input();
    let relu = conv_norm_relu(&mut network, "conv1", input, [12, 3, 1]);
    let pooled = network.max_pool(relu, 3, 2);
    let relu = conv_norm_relu(&mut network, "block.conv1", pooled, [15, 1, 1]);
    let conv = network.padded_conv("block.conv2", relu, 20, (3, 1, 1), 5);
    let norm = network.batch_norm("block.bn2", conv);
    let relu = network.relu(norm);
    let conv = network.conv("block.conv3", relu, 12, 1, 1);
    let branch = network.batch_norm("block.bn3", conv);
    let sum = network.add(branch, pooled);
    let relu = network.relu(sum);
    let average = network.global_average_pool(relu);
    network.linear("fc", average, 10);
    Arc::new(network)
}

/// A network with strided windows of 7x7 and 5x5 pixels, which reach into the rows of several ranks.
fn large_windows() -> Arc<Network> {
    let mut network = Network::new("large-windows", SIDE, 3, 10);
    let input = network.input();
    let relu = conv_norm_relu(&mut network, "conv1", input, [8, 7, 1]);
    let pooled = network.max_pool(relu, 5, 2);
    let relu = conv_norm_relu(&mut network, "conv2", pooled, [8, 5, 2]);
    let conv = network.conv("conv3", relu, 8, 1, 2);
    let norm = network.batch_norm("bn3", conv);
    let average = network.global_average_pool(norm);
    network.linear("fc", average, 10);
    Arc::new(network)
}

/// The index of the part of a batch that this rank reads, less than [`data_ranks`].
pub(super) fn data_rank(plan: &Plan, comm: &Arc<dyn ProcessGroup>) -> usize {
    let (rank, mesh) = (comm.rank() as usize, plan.mesh);
    mesh.data_rank(rank) * mesh.model + mesh.model_rank(rank)
}

/// The losses of the steps, and the state for a checkpoint after them.
fn train_with_plan(network: &Arc<Network>, plan: &Plan, config: &EngineConfig) -> (Vec<f32>, StateDict) {
    let per_rank = GLOBAL / data_ranks(plan);
    let config = EngineConfig { batch_size: per_rank, ..config.clone() };
    let (has_shm, zero_init_residual) = (true, false);
    let (losses, state) = run_plan(has_shm, network, plan, &config, zero_init_residual, |engine, rank| {
        let batch = |step| part_of(GLOBAL, steady_pictures(step, rank * per_rank, (rank + 1) * per_rank));
        let step = |step| engine.train_step(&[batch(step)], LR).unwrap().loss;
        (0..STEPS).map(step).collect::<Vec<f32>>()
    });
    let mean = |step: usize| losses.iter().map(|losses| losses[step]).sum::<f32>() / losses.len() as f32;
    ((0..STEPS).map(mean).collect(), state)
}

/// The largest excess of a difference over the tolerance of 1e-6 (absolute and relative), and its tensor's name. It is at most
/// 0 if all values are within the tolerance.
pub(super) fn max_excess(a: &NamedTensors, b: &NamedTensors) -> (f32, String) {
    assert!(a.keys().eq(b.keys()));
    let mut worst = (f32::MIN, String::new());
    for (name, a) in a {
        assert_eq!(a.shape, b[name].shape, "{name}");
        for (a, b) in a.values.iter().zip(&b[name].values) {
            let difference = (a - b).abs() - 1e-6 - 1e-6 * b.abs();
            if difference > worst.0 || difference.is_nan() {
                worst = (difference, name.clone());
            }
        }
    }
    worst
}

#[test]
fn ranks_that_share_a_network_train_as_one_rank() {
    use Split::{Groups, In, Out};
    let (resnet, grouped, large) = (network(), grouped(), large_windows());
    let sgd = config(0);
    let cases: &[(&Arc<Network>, [usize; 3], &[(&str, Split)])] = &[
        (&resnet, [1, 1, 2], &[]),
        (&resnet, [2, 1, 2], &[]),
        (&resnet, [1, 1, 4], &[("fc", Out)]),
        (&resnet, [1, 1, 2], &[("fc", In)]),
        (&resnet, [2, 1, 2], &[("layer3.*", Out), ("fc", Out)]),
        (&resnet, [1, 1, 4], &[("layer3.*.conv1", Out), ("layer3.*.conv2", In), ("fc", Out)]),
        (&resnet, [2, 1, 2], &[("*", Out)]),
        (&resnet, [1, 1, 2], &[("*", In)]),
        (&grouped, [2, 1, 2], &[("block.conv2", Groups)]),
        (&grouped, [1, 1, 4], &[("*", Out), ("block.conv2", Groups), ("block.conv3", In)]),
        (&grouped, [1, 1, 2], &[("conv1", In), ("block.conv2", Groups), ("fc", Out)]),
        (&resnet, [1, 2, 1], &[]),
        // The three ranks have 3, 3 and 2 rows of the pictures, and 1, 1 and 0 rows in the network's last layers.
        (&resnet, [1, 3, 1], &[]),
        (&resnet, [2, 2, 1], &[]),
        (&resnet, [1, 2, 2], &[("layer3.*", Out), ("fc", Out)]),
        (&grouped, [1, 3, 1], &[]),
        (&grouped, [2, 2, 1], &[]),
        (&grouped, [1, 2, 2], &[("*", Out), ("block.conv2", Groups)]),
        (&large, [1, 2, 1], &[]),
        (&large, [1, 3, 1], &[]),
    ];
    let (mut references, mut failures) = (Vec::new(), Vec::new());
    for (network, mesh, shards) in cases {
        if !references.iter().any(|(known, _): &(&Arc<Network>, _)| Arc::ptr_eq(known, network)) {
            references.push((*network, train_with_plan(network, &Plan::data(1), &sgd)));
        }
        let (_, (losses, state)) = references.iter().find(|(known, _)| Arc::ptr_eq(known, network)).unwrap();
        let (actual, actual_state) = train_with_plan(network, &plan(*mesh, shards), &sgd);
        let case = format!("{} on {mesh:?}, {shards:?}", network.arch);
        let loss = losses.iter().zip(&actual).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let (excess, name) = max_excess(&actual_state.parameters, &state.parameters);
        if loss >= 1e-4 || excess > 0.0 {
            failures.push(format!("{case}: losses differ by {loss:e}, {name} by 1e-6 + {excess:e}"));
        }
        let [expected, actual] = [state, &actual_state].map(|state| state.optimizer.as_ref().unwrap());
        assert_eq!(actual.updates, expected.updates);
        assert!(actual.slots.keys().eq(expected.slots.keys()));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// LARS and LAMB need the norms of whole parameters. Labels are mixed, micro-batches differ in size, and one rank has no pictures.
#[test]
fn norms_and_mixed_labels_are_exact_with_unequal_micro_batches() {
    let network = network();
    // For each step: where the four ranks' pictures begin and end, in the first micro-batch (entries 0 to 4) and in the second (4 to 8).
    let parts = [[0, 3, 8, 9, 12, 14, 14, 15, 16], [0, 0, 1, 5, 5, 5, 6, 6, 8]];
    let batch = |step: usize, from: usize, to: usize, all: usize| Batch {
        mixed_labels: labels("hybrid.mixed", 16, 10)[from..to].to_vec(),
        lambda: 0.3,
        ..part_of(all, pictures(step, from, to))
    };
    for kind in [OptimizerKind::Lars, OptimizerKind::Lamb, OptimizerKind::AdamW] {
        let config = EngineConfig { optimizer: optimizer(kind, 1e-3), accumulate: 2, ..config(5) };
        let run = |plan: &Plan| {
            let per_rank = 4 / data_ranks(plan);
            let (has_shm, zero_init_residual) = (true, false);
            run_plan(has_shm, &network, plan, &config, zero_init_residual, |engine, rank| {
                let mut results = Vec::new();
                for (step, parts) in parts.iter().enumerate() {
                    let micro_batches = [0, 1].map(|micro| {
                        let bounds = &parts[4 * micro..4 * micro + 5];
                        let all = bounds[4] - bounds[0];
                        batch(step, bounds[rank * per_rank], bounds[(rank + 1) * per_rank], all)
                    });
                    results.push(engine.train_step(&micro_batches, 0.002).unwrap());
                }
                results
            })
        };
        let (single, single_state) = run(&Plan::data(1));
        for plan in [
            plan([2, 1, 2], &[("layer3.*", Split::Out), ("fc", Split::Out)]),
            plan([1, 1, 4], &[]),
            staged(2, plan([2, 1, 2], &[])),
            staged(4, plan([1, 1, 1], &[])),
        ] {
            let (several, state) = run(&plan);
            let of_stage = &several[..plan.mesh.ranks_of_stage()];
            for (step, expected) in single[0].iter().enumerate() {
                let sum = |value: &dyn Fn(&StepResult) -> f32| -> f32 {
                    of_stage.iter().map(|results| value(&results[step])).sum()
                };
                let samples = sum(&|r| r.samples as f32);
                let loss = sum(&|r| r.loss * r.samples as f32) / samples;
                assert!((loss - expected.loss).abs() < 1e-4, "{kind:?} {plan:?}: {loss} {}", expected.loss);
                assert_eq!(
                    (samples, sum(&|r| r.correct as f32)),
                    (expected.samples as f32, expected.correct as f32)
                );
                for results in &several {
                    let ratio = results[step].grad_norm / expected.grad_norm;
                    // Sums are added in another order, and batch norms of few pictures amplify the rounding.
                    let tolerance = if step == 0 { 1e-5 } else { 5e-3 };
                    assert!((ratio - 1.0).abs() < tolerance, "{kind:?} {plan:?}, step {step}: {ratio}");
                }
            }
            let difference = max_difference(&state.parameters, &single_state.parameters);
            assert!(difference < 1e-3, "{kind:?} {plan:?}: {difference}");
        }
    }
}

#[test]
fn the_state_of_one_plan_can_be_loaded_under_any_other() {
    let network = network();
    let adam = EngineConfig {
        optimizer: Optimizer { kind: OptimizerKind::AdamW, epsilon: 1e-3, ..Optimizer::default() },
        ..config(0)
    };
    let (_, state) =
        train_with_plan(&network, &plan([2, 1, 2], &[("layer3.*", Split::Out), ("fc", Split::Out)]), &adam);
    let load_and_train = |plan: &Plan| {
        let per_rank = GLOBAL / data_ranks(plan);
        let of_ranks = on_ranks(plan.mesh.ranks() as u32, |comm| {
            let from = data_rank(plan, &comm) * per_rank;
            let is_counted = plan.mesh.height_rank(comm.rank() as usize) == 0;
            let config = EngineConfig { batch_size: per_rank, ..adam.clone() };
            let initial = init::initial_parameters(&network, false, 2);
            let mut engine = build_cpu_with(network.clone(), &initial, config, comm.clone(), plan).unwrap();
            load_state(&mut *engine, &network, plan, comm.as_ref(), &state);
            if let Some(saved) = engine.state_dict(&Writers::default()).unwrap() {
                assert!(saved == state, "the loaded state is saved unchanged");
            }
            let batch = pictures(99, from, from + per_rank);
            let evaluated = engine.eval_step(&batch).unwrap();
            let predicted = engine.predict(&batch).unwrap();
            engine.train_step(&[part_of(GLOBAL, batch)], 0.002).unwrap();
            let state = engine.state_dict(&Writers::default()).unwrap();
            is_counted.then_some((evaluated, predicted, state))
        });
        // Ranks that split the same pictures by rows have equal results, so only one of them is counted. Only the last pipeline
        // stage has results.
        let mut of_ranks: Vec<_> = of_ranks.into_iter().flatten().collect();
        let correct: u64 = of_ranks.iter().map(|(evaluated, ..)| evaluated.correct).sum();
        let loss: f64 = of_ranks.iter().map(|(evaluated, ..)| evaluated.loss_sum).sum();
        let logits: Vec<f32> = of_ranks.iter().flat_map(|(_, predicted, _)| predicted.clone()).collect();
        let (_, _, Some(state)) = of_ranks.swap_remove(0) else { panic!("rank 0 has the state") };
        (correct, loss, logits, state)
    };
    let (correct, loss, logits, after) = load_and_train(&Plan::data(1));
    for plan in [
        plan([2, 1, 2], &[("layer3.*", Split::Out), ("fc", Split::Out)]),
        plan([1, 1, 2], &[("layer3.*.conv2", Split::In)]),
        plan([1, 1, 4], &[]),
        plan([1, 3, 1], &[]),
        plan([1, 2, 2], &[("fc", Split::In)]),
        staged(2, plan([1, 2, 2], &[("layer3.*", Split::Out)])),
        staged(3, Plan::data(2)),
        Plan::data(2),
    ] {
        let (actual_correct, actual_loss, actual_logits, actual) = load_and_train(&plan);
        assert_eq!(actual_correct, correct, "{plan:?}");
        assert!((actual_loss - loss).abs() < 1e-4, "{plan:?}: loss {actual_loss} instead of {loss}");
        assert!(logits.iter().zip(&actual_logits).all(|(a, b)| (a - b).abs() < 1e-4), "{plan:?}");
        let difference = max_difference(&actual.parameters, &after.parameters);
        assert!(difference < 1e-3, "{plan:?}: {difference}");
    }
}

/// Local batch norm statistics, summed gradients, and frozen batch norms give the same results in hybrid plans as in data parallelism.
#[test]
fn other_settings_work_as_in_data_parallelism() {
    let frozen = Arc::new(Network { frozen_norm: true, ..(*network()).clone() });
    let [local, summed] = [(false, true), (true, false)].map(|(sync_batch_norm, gradients_mean)| {
        EngineConfig { sync_batch_norm, gradients_mean, ..config(0) }
    });
    let split = [("layer3.*.conv1", Split::Out), ("layer3.*.conv2", Split::In), ("fc", Split::Out)];
    for (network, config, shards) in [
        (network(), local, &[][..]),
        (network(), summed, &split[..]),
        (frozen.clone(), config(0), &split[..]),
    ] {
        let (losses, state) = train_with_plan(&network, &Plan::data(4), &config);
        for plan in [plan([2, 1, 2], shards), staged(2, Plan::data(4))] {
            let (actual, actual_state) = train_with_plan(&network, &plan, &config);
            let relative = |(a, b): (&f32, &f32)| (a - b).abs() / a.max(1.0);
            let loss = losses.iter().zip(&actual).map(relative).fold(0.0, f32::max);
            let difference = max_difference(&actual_state.parameters, &state.parameters);
            let is_frozen = network.frozen_norm;
            assert!(
                loss < 1e-4 && difference < 1e-2,
                "{config:?}, {plan:?}, frozen: {is_frozen}: losses differ by {loss:e}, weights by {difference:e}"
            );
        }
    }
    let (losses, _) = train_with_plan(&frozen, &Plan::data(1), &config(0));
    let (actual, _) = train_with_plan(&frozen, &plan([1, 3, 1], &[]), &config(0));
    assert!(
        losses.iter().zip(&actual).all(|(a, b)| (a - b).abs() < 1e-4 * a.max(1.0)),
        "losses {actual:?} instead of {losses:?}"
    );
}

/// Progressive resizing, and evaluation at another size.
#[test]
fn a_shared_network_supports_other_image_sizes() {
    let network = network();
    let run = |plan: &Plan| {
        let count = 16 / data_ranks(plan);
        let of_ranks = on_ranks(plan.mesh.ranks() as u32, |comm| {
            let from = data_rank(plan, &comm) * count;
            let (rank, mesh) = (comm.rank() as usize, plan.mesh);
            let is_counted = mesh.height_rank(rank) == 0 && mesh.stage_rank(rank) + 1 == mesh.stage;
            let initial = init::initial_parameters(&network, false, 1);
            let mut engine = build_cpu_with(network.clone(), &initial, config(count), comm, plan).unwrap();
            engine.add_image_sizes(&[13], &[11]).unwrap();
            let batch_of = |side: usize| {
                let len = side * side * 3;
                let images =
                    values(&format!("hybrid.sizes.{side}"), 16 * len)[from * len..][..count * len].to_vec();
                let labels = labels("hybrid.sizes", 16, 10)[from..from + count].to_vec();
                part_of(16, Batch { images, labels, ..Batch::default() })
            };
            let mut losses = Vec::new();
            for side in [8, 13, 8] {
                engine.set_image_size(side).unwrap();
                losses.push(f64::from(engine.train_step(&[batch_of(side)], LR).unwrap().loss) * count as f64);
            }
            engine.set_image_size(11).unwrap();
            losses.push(engine.eval_step(&batch_of(11)).unwrap().loss_sum);
            is_counted.then_some(losses)
        });
        let sum = |index: usize| of_ranks.iter().flatten().map(|losses| losses[index]).sum::<f64>() / 16.0;
        (0..4).map(sum).collect::<Vec<_>>()
    };
    let single = run(&Plan::data(1));
    for plan in [
        plan([1, 2, 2], &[("layer3.*", Split::Out)]),
        plan([1, 3, 1], &[]),
        plan([2, 1, 2], &[]),
        staged(3, plan([1, 2, 1], &[])),
    ] {
        let several = run(&plan);
        assert!(
            single.iter().zip(&several).all(|(a, b)| (a - b).abs() < 1e-4),
            "{plan:?}: losses {several:?} instead of {single:?}"
        );
    }
}

/// Each group numbers its ranks from 0, but errors must have the job's rank numbers.
#[test]
fn lost_ranks_are_named_by_their_numbers_in_the_job() {
    let network = network();
    for plan in [plan([2, 1, 2], &[]), staged(2, Plan::data(2))] {
        let errors = on_ranks(4, |comm| {
            let initial = init::initial_parameters(&network, false, 1);
            let mut engine =
                build_cpu_with(network.clone(), &initial, config(4), comm.clone(), &plan).unwrap();
            if comm.rank() == 3 {
                comm.abort("rank 3 had enough");
            }
            let error = engine.train_step(&[part_of(16, pictures(0, 0, 4))], LR).unwrap_err().to_string();
            assert!(engine.undo_unfinished_steps().is_none(), "no rank has the whole network");
            error
        });
        assert!(errors[2].contains("rank 3"), "{errors:?}");
        assert!(errors[3].contains("rank 3 had enough"), "{errors:?}");
    }
}

#[test]
fn errors_for_impossible_splits_list_the_possible_splits() {
    use Split::{Groups, In, Out};
    for (plan, parts) in [
        (
            plan([1, 1, 2], &[("layer9.*", Out)]),
            &["\"layer9.*\"", "its operators are conv1, block.conv1"][..],
        ),
        (plan([1, 1, 2], &[("fc", Groups)]), &["a linear layer of 12 -> 10 values", "\"out\" or \"in\""]),
        (plan([1, 1, 2], &[("block.conv2", Out)]), &["a convolution of 5 groups", "split by \"groups\""]),
        (
            plan([1, 1, 12], &[("fc", Out)]),
            &["over 12 ranks (parallel.model may be at most 10)", "split by \"in\""],
        ),
        (
            plan([1, 1, 4], &[("conv1", In), ("*.conv1", Groups)]),
            &["conv1 cannot be split by \"in\"", "block.conv1"],
        ),
        (plan([1, 9, 1], &[]), &["9 ranks cannot share the 8 rows"]),
        (
            staged(4, plan([1, 1, 1], &[])),
            &["grouped can be cut into at most 3 stages", "parallel.pipeline = 4"],
        ),
    ] {
        let error = lockstep_engine::plan::lower(&grouped(), &plan, 0).unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    assert_eq!(grouped().tensors[0], TensorShape { height: SIDE, width: SIDE, channels: 3 });
}

/// Random windows, strides, channels, groups and splits.
#[test]
fn random_networks_under_random_plans_train_as_one_rank() {
    for seed in 0..12_u64 {
        // Knuth's linear congruential generator (MMIX).
        let mut state = seed + 1;
        let mut draw = |count: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % count
        };
        let mut network = Network::new("random", SIDE, 3, 10);
        let mut shards = Vec::new();
        // Splits a layer by `splits[drawn]`. The layer stays whole if `drawn` is not an index of `splits`.
        let mut pick = |name: &str, splits: &[Split], drawn: usize| {
            shards.extend(splits.get(drawn).map(|split| (name.to_owned(), *split)));
        };
        let mut x = network.input();
        for layer in 0..3 {
            let name = format!("conv{layer}");
            let groups = if layer > 0 { [1, 3, 6][draw(3)] } else { 1 };
            let (channels, kernel, stride) = (6 + 6 * draw(3), [1, 3, 5][draw(3)], 1 + draw(2));
            x = network.padded_conv(&name, x, channels, (kernel, stride, kernel / 2), groups);
            let splits: &[Split] = if groups == 1 { &[Split::Out, Split::In] } else { &[Split::Groups] };
            pick(&name, if groups == 3 { &[] } else { splits }, draw(3));
            x = network.batch_norm(format!("bn{layer}"), x);
            x = network.relu(x);
            if draw(3) == 0 {
                x = network.max_pool(x, 3, 1 + draw(2));
            }
        }
        let average = network.global_average_pool(x);
        network.linear("fc", average, 10);
        pick("fc", &[Split::Out, Split::In], draw(3));
        let meshes = [[1, 1, 2], [2, 1, 2], [1, 2, 1], [1, 3, 1], [1, 2, 2]];
        let mesh = meshes[draw(meshes.len())];
        let shards: Vec<_> = shards.iter().map(|(name, split)| (name.as_str(), *split)).collect();
        let (network, config) = (Arc::new(network), config(0));
        let (losses, state) = train_with_plan(&network, &Plan::data(1), &config);
        let (actual, actual_state) = train_with_plan(&network, &plan(mesh, &shards), &config);
        let case = format!("seed {seed}, {mesh:?}, {shards:?}, {:?}", network.ops);
        assert!(
            losses.iter().zip(&actual).all(|(a, b)| (a - b).abs() < 1e-4),
            "{case}: losses {actual:?} instead of {losses:?}"
        );
        let difference = max_difference(&actual_state.parameters, &state.parameters);
        assert!(difference < 1e-2, "{case}: {difference}");
    }
}
