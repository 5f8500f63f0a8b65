//! Compares ranks on two GPUs that divide the optimizer's state with ranks that each have the whole state, and with the CPU engine.

use super::{split_head::on_ranks, *};
use crate::{AverageOn, StateDict, Writers, cuda::steps::split_batch};
use lockstep_comm::{ProcessGroup, rendezvous::Store};
use lockstep_protocol::spec::OptimizerKind;

const BATCH: usize = 32;
const STEPS: usize = 8;

/// Pictures of rank `rank` of `ranks` in a step, in micro-batches.
fn step(network: &Network, number: usize, accumulate: usize, rank: usize, ranks: usize) -> Vec<Batch> {
    let micro_batch = |micro: usize| {
        let all = pictures(network, BATCH, number * accumulate + micro);
        let own = split_batch(&all, BATCH / ranks, network)[rank].clone();
        Batch { global_samples: BATCH, ..own }
    };
    (0..accumulate).map(micro_batch).collect()
}

/// Mean losses of the steps, and the state after them. Training continues from `checkpoint` if it is given.
fn trained(
    network: &Arc<Network>,
    config: &EngineConfig,
    gpu: &DeviceConfig,
    lr: f32,
    checkpoint: Option<&StateDict>,
) -> (Vec<f32>, StateDict) {
    let work = |comm: Arc<dyn ProcessGroup>, store: Arc<Store>| {
        let rank = comm.rank();
        let gpu = DeviceConfig { ordinal: rank.cast_signed(), store: Some(store), ..gpu.clone() };
        let config = EngineConfig { batch_size: BATCH / 2, ..config.clone() };
        let initial = initial(network);
        let mut engine = crate::cuda::build(network.clone(), &initial, config.clone(), comm, &gpu).unwrap();
        if let Some(checkpoint) = checkpoint {
            engine.load_state_dict(checkpoint).unwrap();
        }
        let mut losses = Vec::new();
        for number in 0..STEPS {
            let batches = step(network, number, config.accumulate, rank as usize, 2);
            losses.push(engine.train_step(&batches, lr).unwrap().loss);
        }
        let description = engine.exchange();
        assert_eq!(description.contains("of optimizer state"), gpu.plan.optimizer_sharding, "{description}");
        // The state as rank 0 writes it alone, and as both ranks write parts of it.
        let divided = Writers::divide(network, config.optimizer.slots(), AverageOn::NoRank, &[0, 1]);
        let states = [Writers::default(), divided].map(|writers| engine.state_dict(&writers).unwrap());
        let checksum = engine.checksum().unwrap();
        (losses, checksum, states)
    };
    let mut results = on_ranks(2, work).into_iter();
    let (losses, checksum, states) = results.next().unwrap();
    let (other_losses, other_checksum, other_states) = results.next().unwrap();
    assert_eq!(checksum, other_checksum, "both ranks have the same weights");
    let [Some(state), Some(mut part)] = states else { panic!("rank 0 has the state") };
    let [None, Some(other_part)] = other_states else { panic!("rank 1 has a part") };
    part.parameters.extend(other_part.parameters);
    let other_slots = other_part.optimizer.unwrap().slots;
    part.optimizer.as_mut().unwrap().slots.extend(other_slots);
    let missing = state.parameters.iter().filter(|(name, all)| part.parameters.get(*name) != Some(*all));
    let missing: Vec<_> = missing.map(|(name, _)| name).collect();
    assert!(
        part == state,
        "the ranks' parts together are not the whole state; missing or different: {missing:?}"
    );
    (losses.iter().zip(other_losses).map(|(a, b)| (a + b) / 2.0).collect(), state)
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_with_divided_optimizer_state_train_as_with_whole_state() {
    let kinds = OptimizerKind::ALL.into_iter().filter(|kind| *kind != OptimizerKind::Muon);
    for (number, kind) in kinds.enumerate() {
        for precision in [Precision::Fp32, Precision::Fp16] {
            let network = small_network(10);
            let optimizer = Optimizer { kind, weight_decay: 0.01, epsilon: 1e-3, ..config(1).optimizer };
            let lr = match kind {
                OptimizerKind::Momentum | OptimizerKind::Nesterov => 0.001,
                OptimizerKind::Lars => 0.1,
                OptimizerKind::AdamW | OptimizerKind::Lamb => 0.0003,
                OptimizerKind::Muon => unreachable!("needs whole matrices"),
            };
            let config = EngineConfig { optimizer, accumulate: 1 + number % 2, ..config(BATCH) };
            let whole = DeviceConfig { precision, plan: Plan::data(2), ..deterministic() };
            let divided = Plan { optimizer_sharding: true, ..Plan::data(2) };
            let divided = DeviceConfig { plan: divided, ..whole.clone() };
            let (expected, expected_state) = trained(&network, &config, &whole, lr, None);
            let (actual, state) = trained(&network, &config, &divided, lr, None);
            let start = initial(&network);
            let distance = relative_distance(&state.parameters, &expected_state.parameters, &start);
            let loss = actual.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let [slots, expected_slots] =
                [&state, &expected_state].map(|state| &state.optimizer.as_ref().unwrap().slots);
            let slot = worst_difference(slots, expected_slots);
            eprintln!(
                "{kind}, {precision:?}: losses differ by {loss:.1e}, weights by {distance:.1e} of their change in training, \
                 optimizer state by {slot:?}"
            );
            let bound = if precision == Precision::Fp32 { 1e-3 } else { 5e-2 };
            assert!(distance < bound && f64::from(loss) < bound, "{kind}, {precision:?}: {loss} {distance}");
            assert!(slots.keys().eq(expected_slots.keys()));

            // Both can continue from a checkpoint of divided state.
            let (expected, _) = trained(&network, &config, &whole, lr, Some(&state));
            let (actual, _) = trained(&network, &config, &divided, lr, Some(&state));
            let loss = actual.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(f64::from(loss) < bound, "{kind}, {precision:?}: continued, losses differ by {loss}");
            if precision == Precision::Fp32 {
                let mut cpu = cpu_from(&start, &network, &config);
                for number in 0..STEPS {
                    cpu.train_step(&step(&network, number, config.accumulate, 0, 1), lr).unwrap();
                }
                let distance = relative_distance(&state.parameters, &cpu.parameters().unwrap(), &start);
                eprintln!(
                    "{kind}: the weights differ from the CPU engine's by {distance:.1e} of their change in training"
                );
                assert!(distance < 2e-2, "{kind}: {distance}");
            }
        }
    }
}
