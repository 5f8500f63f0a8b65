//! Optimizer state that ranks divide among them (ZeRO-1): the same losses, weights and checkpoints as on one rank with the whole state.

use super::{
    hybrid::{data_rank, load_state, max_excess, plan},
    *,
};
use lockstep_protocol::spec::Split;

const STEPS: usize = 5;
/// Number of pictures in a step. Each rank has a multiple of eight pictures: an engine adds up gradients in float64 over
/// shares of eight pictures, so the sums equal those of one rank.
const GLOBAL: usize = 32;
const KINDS: [OptimizerKind; 5] = [
    OptimizerKind::Momentum,
    OptimizerKind::Nesterov,
    OptimizerKind::Lars,
    OptimizerKind::AdamW,
    OptimizerKind::Lamb,
];

fn sharded(plan: Plan) -> Plan {
    Plan { optimizer_sharding: true, ..plan }
}

/// More than two million weights, so gradients are summed in float32. Nearly all of them are one parameter.
fn wide() -> Arc<Network> {
    let mut network = Network::new("wide", SIDE, 3, 64_000);
    let input = network.input();
    let relu = conv_norm_relu(&mut network, "conv1", input, [32, 3, 1]);
    let average = network.global_average_pool(relu);
    network.linear("fc", average, 64_000);
    Arc::new(network)
}

fn config_of(kind: OptimizerKind, accumulate: usize) -> EngineConfig {
    EngineConfig { optimizer: optimizer(kind, 1e-3), accumulate, ..config(GLOBAL) }
}

/// Mean losses of the steps, and the state for a checkpoint after them. The ranks share no memory. Of three ranks, the first has half
/// of the pictures.
fn train_with_plan(network: &Arc<Network>, plan: &Plan, config: &EngineConfig) -> (Vec<f32>, StateDict) {
    let data_ranks = plan.mesh.ranks() / plan.mesh.height;
    let (has_shm, zero_init_residual) = (false, false);
    let (losses, state) = run_plan(has_shm, network, plan, config, zero_init_residual, |engine, rank| {
        let bounds = [rank, rank + 1].map(|index| match data_ranks {
            3 => [0, 16, 24, 32][index],
            _ => index * GLOBAL / data_ranks,
        });
        let step = |step| {
            let micro_batch = |micro| part_of(GLOBAL, pictures(2 * step + micro, bounds[0], bounds[1]));
            let batches: Vec<_> = (0..config.accumulate).map(micro_batch).collect();
            let result = engine.train_step(&batches, 0.002).unwrap();
            result.loss * result.samples as f32
        };
        (0..STEPS).map(step).collect::<Vec<f32>>()
    });
    let pictures = (GLOBAL * config.accumulate * plan.mesh.height) as f32;
    let mean = |step: usize| losses.iter().map(|losses| losses[step]).sum::<f32>() / pictures;
    ((0..STEPS).map(mean).collect(), state)
}

/// Describes how two runs differ. `None` if they differ at most by rounding.
fn difference(divided: &(Vec<f32>, StateDict), whole: &(Vec<f32>, StateDict)) -> Option<String> {
    let ((losses, state), (whole_losses, whole_state)) = (divided, whole);
    let loss = losses.iter().zip(whole_losses).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let [optimizer, whole_optimizer] = [state, whole_state].map(|state| state.optimizer.as_ref().unwrap());
    let weights = max_excess(&state.parameters, &whole_state.parameters);
    let slots = max_excess(&optimizer.slots, &whole_optimizer.slots);
    assert_eq!(optimizer.updates, whole_optimizer.updates);
    let is_near = loss < 1e-4 && weights.0 <= 0.0 && slots.0 <= 0.0;
    (!is_near).then(|| {
        format!("losses differ by {loss:e}; excess over 1e-6: weights {weights:?}, optimizer state {slots:?}")
    })
}

#[test]
fn ranks_that_divide_optimizer_state_train_as_one_rank() {
    let mut failures = Vec::new();
    for (number, kind) in KINDS.into_iter().enumerate() {
        let config = config_of(kind, 1 + number % 2);
        // The wide network is trained with only two of the optimizers, because float32 sums are slow.
        let wide_ranks: &[u32] = [&[4][..], &[], &[], &[], &[3]][number];
        for (network, rank_counts) in [(network(), &[2, 3, 4][..]), (wide(), wide_ranks)] {
            if rank_counts.is_empty() {
                continue;
            }
            let single = train_with_plan(&network, &Plan::data(1), &config);
            for ranks in rank_counts {
                let divided = train_with_plan(&network, &sharded(Plan::data(*ranks)), &config);
                let case = format!("{}, {kind:?} on {ranks} ranks", network.arch);
                failures
                    .extend(difference(&divided, &single).map(|difference| format!("{case}: {difference}")));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The optimizer state of a part of a parameter is divided over the ranks that have this part.
#[test]
fn ranks_that_share_a_network_divide_the_state_of_their_parts() {
    let split = [("layer3.*.conv1", Split::Out), ("layer3.*.conv2", Split::In), ("fc", Split::Out)];
    let mut failures = Vec::new();
    for (kind, mesh, shards) in [
        (OptimizerKind::Momentum, [2, 1, 2], &split[..]),
        (OptimizerKind::Lamb, [2, 1, 2], &split[..]),
        (OptimizerKind::Lars, [1, 2, 2], &split[..]),
        (OptimizerKind::AdamW, [2, 2, 1], &[]),
    ] {
        let plan = plan(mesh, shards);
        let config = config_of(kind, 1);
        let whole = train_with_plan(&network(), &plan, &config);
        let divided = train_with_plan(&network(), &sharded(plan), &config);
        failures.extend(
            difference(&divided, &whole).map(|difference| format!("{kind:?}, {mesh:?}: {difference}")),
        );
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn divided_state_can_be_loaded_on_any_ranks_with_and_without_sharding() {
    let (network, config) = (network(), config_of(OptimizerKind::AdamW, 1));
    let (_, state) = train_with_plan(&network, &sharded(Plan::data(3)), &config);
    let load_and_train = |plan: &Plan| {
        let per_rank = GLOBAL / plan.mesh.ranks();
        let mut of_ranks = run_ranks(plan.mesh.ranks() as u32, false, |comm| {
            let from = data_rank(plan, &comm) * per_rank;
            let initial = init::initial_parameters(&network, false, 2);
            let mut engine =
                build_cpu_with(network.clone(), &initial, config.clone(), comm.clone(), plan).unwrap();
            load_state(&mut *engine, &network, plan, comm.as_ref(), &state);
            if let Some(loaded) = engine.state_dict(&Writers::default()).unwrap() {
                assert!(loaded == state, "the loaded state is saved unchanged");
            }
            engine.keep_gradients().unwrap();
            engine.train_step(&[part_of(GLOBAL, pictures(99, from, from + per_rank))], 0.002).unwrap();
            let undone = engine.undo_unfinished_steps();
            let divides_state = plan.optimizer_sharding && plan.mesh.ranks() > 1;
            assert!(!divides_state || undone.is_none(), "no rank has the whole state");
            (
                engine.state_dict(&Writers::default()).unwrap(),
                engine.parameters().unwrap(),
                engine.gradients().unwrap(),
            )
        });
        let are_equal = of_ranks.iter().all(|(_, parameters, gradients)| {
            plan.mesh.model > 1 || (*parameters == of_ranks[0].1 && *gradients == of_ranks[0].2)
        });
        assert!(are_equal, "{plan:?}: every rank has all weights and kept gradients");
        let (Some(state), _, gradients) = of_ranks.swap_remove(0) else { panic!("rank 0 has the state") };
        (state, gradients)
    };
    let (single, expected) = load_and_train(&Plan::data(1));
    for plan in [
        sharded(Plan::data(1)),
        sharded(Plan::data(2)),
        Plan::data(2),
        sharded(Plan::data(4)),
        sharded(plan([2, 1, 2], &[("layer3.*", Split::Out)])),
    ] {
        let (state, gradients) = load_and_train(&plan);
        let (excess, name) = max_excess(&state.parameters, &single.parameters);
        assert!(excess <= 0.0, "{plan:?}: {name} {excess:e}");
        if plan.is_data() {
            let (excess, name) = max_excess(&gradients, &expected);
            assert!(excess <= 0.0, "{plan:?}: the gradient of {name} {excess:e}");
        }
    }
}

#[test]
fn each_rank_keeps_its_share_of_the_optimizer_s_state() {
    let exchange = |plan: Plan, has_shm: bool| {
        let network = wide();
        run_ranks(plan.mesh.ranks() as u32, has_shm, |comm| {
            let initial = init::initial_parameters(&network, false, 1);
            let config = config_of(OptimizerKind::AdamW, 1);
            let engine = build_cpu_with(network.clone(), &initial, config, comm.clone(), &plan).unwrap();
            comm.barrier().unwrap();
            engine.exchange()
        })
    };
    // 2,112,928 parameters with two float32 slots each.
    let (keeps_share, shares_copy) = (
        "; a rank keeps 4.23 of 16.90 MB of optimizer state",
        "saves nothing here, because they also share one copy of the optimizer state, 16.90 MB",
    );
    for (plan, has_shm, expected) in [
        (Plan::data(4), false, keeps_share),
        (plan([2, 1, 2], &[]), false, keeps_share),
        (Plan::data(2), true, shares_copy),
    ] {
        for description in exchange(sharded(plan), has_shm) {
            assert!(description.ends_with(expected), "{description}");
        }
    }
    for description in exchange(Plan::data(2), false) {
        assert!(!description.contains("optimizer"), "{description}");
    }
}
