//! Frozen batch norms compute no statistics, so they have equal results at any number of ranks, with or without `sync_batch_norm`.

use super::*;

#[test]
fn frozen_batch_norms_give_equal_bits_on_1_2_and_4_ranks() {
    let model = ModelSpec { arch: Arch::ResNet20, freeze_norm: true, ..ModelSpec::default() };
    let network = Arc::new(resnet::build(&model, SIDE, 3, 10).unwrap());
    let mut initial = init::initial_parameters(&network, false, 1);
    for (name, tensor) in &mut initial {
        let size = tensor.values.len();
        if name.ends_with("running_mean") {
            tensor.values = values(name, size).iter().map(|v| v / 4.0).collect();
        } else if name.ends_with("running_var") {
            tensor.values = values(name, size).iter().map(|v| 1.5 + v / 2.0).collect();
        }
    }
    let run = |ranks: u32, has_shm: bool, sync_batch_norm: bool| {
        run_ranks(ranks, has_shm, |comm| {
            let (rank, per_rank) = (comm.rank(), 32 / ranks as usize);
            let config = EngineConfig { sync_batch_norm, ..config(per_rank) };
            let mut engine = build_cpu(network.clone(), &initial, config, comm).unwrap();
            for step in 0..6 {
                let batch = part_of_rank(step, 32, (rank, ranks));
                engine.train_step(&[batch], 0.01).unwrap();
            }
            (engine.parameters().unwrap(), engine.optimizer_state().unwrap())
        })
    };
    let single = &run(1, true, true)[0];
    let (parameters, _) = single;
    for (name, tensor) in parameters {
        let is_frozen = name.contains("bn") || name.contains("running") || name.contains("downsample.1");
        assert_eq!(*tensor == initial[name], is_frozen, "{name}");
    }
    for (ranks, has_shm, sync_batch_norm) in
        [(2, true, true), (2, false, true), (4, true, false), (4, false, false)]
    {
        for (rank, result) in run(ranks, has_shm, sync_batch_norm).iter().enumerate() {
            assert!(
                result == single,
                "rank {rank} of {ranks}, shared memory: {has_shm}, synchronised: {sync_batch_norm}"
            );
        }
    }
}
