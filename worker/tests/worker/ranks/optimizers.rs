//! Every optimizer gives the same bits on any number of ranks, and its state is saved and loaded unchanged.

use super::*;

/// Gradients are summed in float64, so weights and optimizer state have equal bits at any number of ranks, over shared memory and over a
/// ring, with or without weight decay on batch norms and biases.
#[test]
fn every_optimizer_gives_equal_bits_on_1_2_and_4_ranks() {
    for kind in OptimizerKind::ALL {
        for decay_norm_and_bias in [true, false] {
            let optimizer =
                Optimizer { kind, decay_norm_and_bias, weight_decay: 0.01, ..Optimizer::default() };
            let run = |ranks: u32, has_shm: bool| {
                run_ranks(ranks, has_shm, |comm| {
                    let (rank, per_rank) = (comm.rank(), 32 / ranks as usize);
                    let mut engine = engine(EngineConfig { optimizer, ..config(per_rank) }, comm);
                    let exchange = engine.exchange();
                    let is_shared = exchange.contains("share memory with one copy of the weights");
                    assert_eq!(is_shared, has_shm && ranks > 1, "{exchange}");
                    for step in 0..3 {
                        let batch = part_of_rank(step, 32, (rank, ranks));
                        engine.train_step(&[batch], 0.01).unwrap();
                    }
                    (engine.parameters().unwrap(), engine.optimizer_state().unwrap())
                })
            };
            let single = &run(1, true)[0];
            assert_eq!(single.1.updates, 3);
            for (ranks, has_shm) in [(2, true), (2, false), (4, true)] {
                for (rank, result) in run(ranks, has_shm).iter().enumerate() {
                    assert!(result == single, "{kind}: rank {rank} of {ranks}, shared memory: {has_shm}");
                }
            }
        }
    }
}

/// How a run of [`optimizers_give_equal_results_for_a_large_network_on_any_ranks`] is distributed.
#[derive(Clone, Copy)]
struct Setup {
    ranks: u32,
    /// Whether the ranks share memory. Otherwise they have only a ring.
    has_shm: bool,
    threads: usize,
    accumulate: usize,
    steps: usize,
}

/// ResNet-18 is too large for sums in float64, and its parameters have many pieces. Only LAMB needs each parameter's norm.
#[test]
fn optimizers_give_equal_results_for_a_large_network_on_any_ranks() {
    let model = ModelSpec { arch: Arch::ResNet18, ..ModelSpec::default() };
    let network = Arc::new(resnet::build(&model, SIDE, 3, 10).unwrap());
    let initial = init::initial_parameters(&network, false, 1);
    for (kind, lr, name) in [(OptimizerKind::Momentum, 0.01, "momentum"), (OptimizerKind::Lamb, 1e-4, "LAMB")]
    {
        let optimizer = Optimizer { kind, ..config(1).optimizer };
        let run = |Setup { ranks, has_shm, threads, accumulate, steps }: Setup| {
            run_ranks(ranks, has_shm, |comm| {
                let size = 8 / ranks as usize / accumulate;
                let first = comm.rank() as usize * accumulate;
                let config = EngineConfig { optimizer, threads, accumulate, ..config(size) };
                let mut engine = build_cpu(network.clone(), &initial, config, comm).unwrap();
                let mut norms = Vec::new();
                for step in 0..steps {
                    let all = size * ranks as usize;
                    let batch = |i| part_of(all, pictures(step, (first + i) * size, (first + i + 1) * size));
                    let batches: Vec<_> = (0..accumulate).map(batch).collect();
                    norms.push(engine.train_step(&batches, lr).unwrap().grad_norm);
                }
                (norms, engine.parameters().unwrap(), engine.optimizer_state().unwrap())
            })
        };
        let setup = Setup { ranks: 2, has_shm: true, threads: 1, accumulate: 2, steps: 2 };
        let results = run(setup);
        assert_eq!(results, run(Setup { threads: 2, ..setup }), "{name}: equal with any number of threads");
        assert_eq!(
            results,
            run(Setup { has_shm: false, ..setup }),
            "{name}: equal over shared memory and a ring"
        );
        assert_eq!(results[0], results[1]);
        // Only one step, because float32 sums are added in another order, and rounding errors grow in training.
        let one_step = Setup { accumulate: 1, steps: 1, ..setup };
        let (single_norms, single_weights, _) = &run(Setup { ranks: 1, ..one_step })[0];
        let (norms, weights, _) = &run(Setup { ranks: 4, ..one_step })[3];
        assert!((norms[0] / single_norms[0] - 1.0).abs() < 1e-3, "{name}: {norms:?}, not {single_norms:?}");
        let difference = max_difference(weights, single_weights);
        assert!(difference < 2e-3, "{name}: {difference}");
    }
}

#[test]
fn weights_and_optimizer_state_are_read_back_unchanged() {
    for kind in OptimizerKind::ALL {
        let config = || {
            let optimizer = Optimizer { kind, weight_decay: 0.01, ..Optimizer::default() };
            EngineConfig { optimizer, ..config(8) }
        };
        let mut trained = engine(config(), Arc::new(SingleRank));
        for step in 0..3 {
            trained.train_step(&[pictures(step, 0, 8)], 0.01).unwrap();
        }
        let mut loaded = engine(config(), Arc::new(SingleRank));
        loaded.set_parameters(&trained.parameters().unwrap()).unwrap();
        let state = trained.optimizer_state().unwrap();
        assert_eq!(state.updates, 3);
        for slot in slots(kind) {
            let tensor = &state.slots[&format!("layer1.0.conv1.weight.{slot}")];
            assert!(tensor.shape == [16, 16, 3, 3] && tensor.values.iter().any(|v| *v != 0.0), "{slot}");
        }
        loaded.set_optimizer_state(&state).unwrap();
        assert!(loaded.optimizer_state().unwrap() == state);
        for engine in [&mut trained, &mut loaded] {
            engine.train_step(&[pictures(3, 0, 5)], 0.01).unwrap();
        }
        assert!(trained.parameters().unwrap() == loaded.parameters().unwrap(), "{kind}: continuing is exact");
        assert!(trained.optimizer_state().unwrap() == loaded.optimizer_state().unwrap(), "{kind}");
        // If the number of updates were lost, the bias correction would start again.
        if slots(kind).len() == 2 {
            let mut restarted = engine(config(), Arc::new(SingleRank));
            let state = loaded.optimizer_state().unwrap();
            restarted.set_optimizer_state(&OptimizerState { updates: 0, ..state }).unwrap();
            restarted.set_parameters(&loaded.parameters().unwrap()).unwrap();
            for engine in [&mut restarted, &mut loaded] {
                engine.train_step(&[pictures(4, 0, 5)], 0.01).unwrap();
            }
            assert!(restarted.parameters().unwrap() != loaded.parameters().unwrap());
        }
    }
}

#[test]
fn errors_name_foreign_and_non_finite_optimizer_state() {
    let adamw = Optimizer { kind: OptimizerKind::AdamW, ..Optimizer::default() };
    let mut engine = engine(EngineConfig { optimizer: adamw, ..config(8) }, Arc::new(SingleRank));
    let mut state = engine.optimizer_state().unwrap();
    let moment = state.slots.remove("fc.bias.exp_avg_sq").unwrap();
    state.slots.insert("fc.bias.momentum".into(), moment);
    let error = engine.set_optimizer_state(&state).unwrap_err().to_string();
    for part in ["fc.bias.exp_avg_sq is missing", "has no fc.bias.momentum"] {
        assert!(error.contains(part), "{error}");
    }
    let mut state = engine.optimizer_state().unwrap();
    assert_eq!(engine.first_invalid().unwrap(), None);
    let infinite = HostTensor { shape: vec![10], values: vec![f32::INFINITY; 10] };
    state.slots.insert("fc.bias.exp_avg_sq".into(), infinite);
    engine.set_optimizer_state(&state).unwrap();
    let found = engine.first_invalid().unwrap().unwrap();
    assert!(found.starts_with("fc.bias.exp_avg_sq contains inf"), "{found}");
}

#[test]
fn averages_follow_weights_and_statistics_and_are_read_back_unchanged() {
    let mut engine = engine(config(8), Arc::new(SingleRank));
    assert!(!engine.has_average() && engine.averaged().unwrap().is_none());
    let mut expected: Option<NamedTensors> = None;
    for step in 0..4 {
        engine.train_step(&[pictures(step, 0, 8)], 0.1).unwrap();
        engine.update_average(0.75).unwrap();
        let now = engine.parameters().unwrap();
        let expected = expected.get_or_insert_with(|| now.clone());
        for (name, average) in expected.iter_mut() {
            let values = average.values.iter_mut().zip(&now[name].values);
            values.for_each(|(a, v)| *a += 0.25 * (v - *a));
        }
        assert!(engine.averaged().unwrap().as_ref() == Some(expected), "step {step}");
    }
    let expected = expected.unwrap();
    let name = "layer3.2.bn2.running_var";
    assert!(expected[name] != engine.parameters().unwrap()[name], "statistics are averaged, too");
    let mut loaded = self::engine(config(8), Arc::new(SingleRank));
    loaded.set_averaged(&expected).unwrap();
    assert!(loaded.averaged().unwrap() == Some(expected));
    assert!(loaded.parameters().unwrap() != engine.parameters().unwrap());
    for engine in [&mut loaded, &mut engine] {
        engine.update_average(0.0).unwrap();
        assert!(engine.averaged().unwrap() == Some(engine.parameters().unwrap()), "a decay of 0 is a copy");
    }
}
