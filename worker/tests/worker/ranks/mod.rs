//! Ranks that train together over real rings on loopback. Results are equal at any number of ranks and threads, and in
//! every run.

mod class_weights;
mod frozen;
mod full;
mod gradients;
mod hybrid;
mod keep_gradients;
mod margin;
mod optimizers;
mod pipeline;
mod sampled;
mod sharded;

use crate::pytorch;
use lockstep_comm::{
    ProcessGroup, SingleRank, rendezvous::loopback::on_connected_ranks, shm::ShmProcessGroup,
};
use lockstep_data::loader::Batch;
use lockstep_engine::{
    Engine, EngineConfig, EngineError, LossConfig, Optimizer, OptimizerState, StateDict, StepResult, Writers,
    build_cpu, build_cpu_with,
    net::{Network, TensorId, init, resnet},
    plan::Plan,
    slots,
};
use lockstep_host::tensors::{HostTensor, NamedTensors};
use lockstep_kernels::synthetic::{labels, values};
use lockstep_protocol::spec::{Arch, ModelSpec, OptimizerKind};
use std::{sync::Arc, time::Duration};

/// The side of pictures in pixels.
const SIDE: usize = 8;
/// Number of values of a picture.
const PICTURE: usize = SIDE * SIDE * 3;
const TIMEOUT: Duration = Duration::from_secs(60);

fn network() -> Arc<Network> {
    let model = ModelSpec { arch: Arch::ResNet20, ..ModelSpec::default() };
    Arc::new(resnet::build(&model, SIDE, 3, 10).unwrap())
}

/// Appends the convolution `name`, its batch norm (named `bn` instead of `conv`) and a ReLU.
fn conv_norm_relu(
    network: &mut Network,
    name: &str,
    input: TensorId,
    [channels, kernel, stride]: [usize; 3],
) -> TensorId {
    let conv = network.conv(name, input, channels, kernel, stride);
    let norm = network.batch_norm(name.replace("conv", "bn"), conv);
    network.relu(norm)
}

fn config(batch_size: usize) -> EngineConfig {
    let loss = LossConfig { label_smoothing: 0.1, ..LossConfig::default() };
    EngineConfig { loss, threads: 1, ..pytorch::config(batch_size, pytorch::sgd(1e-4)) }
}

fn optimizer(kind: OptimizerKind, weight_decay: f32) -> Optimizer {
    // With a smaller epsilon, the sign of a gradient of almost 0 would decide the update.
    Optimizer { kind, weight_decay, epsilon: 1e-3, ..Optimizer::default() }
}

/// An engine with the weights of seed 1, which are equal on every rank.
fn engine(config: EngineConfig, comm: Arc<dyn ProcessGroup>) -> Box<dyn Engine> {
    let network = network();
    build_cpu(network.clone(), &init::initial_parameters(&network, false, 1), config, comm).unwrap()
}

/// Pictures `from..to` of a step's global batch. All pictures of a class have one pattern, with noise.
fn pictures(step: usize, from: usize, to: usize) -> Batch {
    let patterns = values("ranks.patterns", 10 * PICTURE);
    let labels = labels(&format!("ranks.labels.{step}"), to, 10).split_off(from);
    let images = values(&format!("ranks.images.{step}"), to * PICTURE)
        .chunks(PICTURE)
        .skip(from)
        .zip(&labels)
        .flat_map(|(noise, &label)| {
            let pattern = &patterns[label as usize * PICTURE..][..PICTURE];
            noise.iter().zip(pattern).map(|(n, p)| n * 0.5 + p).collect::<Vec<_>>()
        })
        .collect();
    Batch { images, labels, ..Batch::default() }
}

/// Pictures that give ResNet-20 no input of a ReLU so near 0 that rounding, which differs between plans, decides whether it passes.
fn steady_pictures(step: usize, from: usize, to: usize) -> Batch {
    pictures(50 + step, from, to)
}

/// `batch` as a part of a global micro-batch of `global_samples` pictures.
fn part_of(global_samples: usize, batch: Batch) -> Batch {
    Batch { global_samples, ..batch }
}

/// The pictures of rank `rank`, of `ranks` ranks, in a step's batch of `global` pictures.
fn part_of_rank(step: usize, global: usize, (rank, ranks): (u32, u32)) -> Batch {
    let per_rank = global / ranks as usize;
    let from = rank as usize * per_rank;
    part_of(global, pictures(step, from, from + per_rank))
}

/// Runs `body` on every rank, each in a thread, and returns the results. The ranks share memory.
fn on_ranks<T: Send>(ranks: u32, body: impl Fn(Arc<dyn ProcessGroup>) -> T + Sync) -> Vec<T> {
    run_ranks(ranks, true, body)
}

/// As [`on_ranks`], but if `has_shm` is false, the ranks have only a ring.
fn run_ranks<T: Send>(ranks: u32, has_shm: bool, body: impl Fn(Arc<dyn ProcessGroup>) -> T + Sync) -> Vec<T> {
    if ranks == 1 {
        return vec![body(Arc::new(SingleRank))];
    }
    on_connected_ranks(ranks, TIMEOUT, |_, ring| {
        body(if has_shm { ShmProcessGroup::upgrade(ring).unwrap() } else { ring })
    })
}

/// Runs `body` on every rank of a plan, with an engine and the rank's index among the ranks that read different pictures. Returns the
/// results by rank, and the state for a checkpoint afterwards. If `has_shm` is false, the ranks have only a ring.
fn run_plan<T: Send>(
    has_shm: bool,
    network: &Arc<Network>,
    plan: &Plan,
    config: &EngineConfig,
    zero_init_residual: bool,
    body: impl Fn(&mut dyn Engine, usize) -> T + Sync,
) -> (Vec<T>, StateDict) {
    let of_ranks = run_ranks(plan.mesh.ranks() as u32, has_shm, |comm| {
        let data_rank = hybrid::data_rank(plan, &comm);
        let initial = init::initial_parameters(network, zero_init_residual, 1);
        let mut engine = build_cpu_with(network.clone(), &initial, config.clone(), comm, plan).unwrap();
        let result = body(&mut *engine, data_rank);
        (result, engine.state_dict(&Writers::default()).unwrap())
    });
    let (results, states): (Vec<_>, Vec<_>) = of_ranks.into_iter().unzip();
    let Some(Some(state)) = states.into_iter().next() else { panic!("rank 0 has the state") };
    (results, state)
}

/// Each rank's losses of `steps` steps of `global` pictures over all ranks, and its parameters after them.
fn train(ranks: u32, global: usize, steps: usize, lr: f32) -> Vec<(Vec<f32>, NamedTensors)> {
    on_ranks(ranks, |comm| {
        let rank = comm.rank();
        let mut engine = engine(config(global / ranks as usize), comm);
        let losses = (0..steps)
            .map(|step| engine.train_step(&[part_of_rank(step, global, (rank, ranks))], lr).unwrap().loss)
            .collect();
        (losses, engine.parameters().unwrap())
    })
}

/// The largest difference of two values, relative to the largest value of their tensor.
fn max_difference(a: &NamedTensors, b: &NamedTensors) -> f32 {
    let mut worst = 0.0f32;
    for (name, a) in a {
        let b = &b[name].values;
        let largest = b.iter().fold(0.0f32, |m, v| m.max(v.abs())).max(1e-3);
        let difference = a.values.iter().zip(b).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        worst = worst.max(difference / largest);
    }
    worst
}

#[test]
fn a_global_batch_of_64_gives_equal_results_on_1_2_and_4_ranks() {
    // At this learning rate, one wrong last bit grows to 1e-3 of the loss by step 20.
    let all = [1, 2, 4].map(|ranks| train(ranks, 64, 50, 0.02));
    let (single, weights) = &all[0][0];
    assert!(single[49] < 0.8 * single[0], "training reduces the loss: {single:?}");
    for of_ranks in &all[1..] {
        let ranks = of_ranks.len();
        for (step, expected) in single.iter().enumerate() {
            let mean = of_ranks.iter().map(|(losses, _)| losses[step]).sum::<f32>() / ranks as f32;
            assert!(
                (mean - expected).abs() < 1e-6 * expected,
                "{ranks} ranks, step {step}: {mean}, not {expected}"
            );
        }
        for (rank, (_, parameters)) in of_ranks.iter().enumerate() {
            for (name, tensor) in weights {
                assert_eq!(tensor, &parameters[name], "{name} of rank {rank} of {ranks}");
            }
        }
    }
}

#[test]
fn every_run_has_the_same_bits_with_any_number_of_threads() {
    assert_eq!(train(2, 16, 4, 0.1), train(2, 16, 4, 0.1));
    let train_with = |threads| {
        let mut engine = engine(EngineConfig { threads, ..config(16) }, Arc::new(SingleRank));
        let losses: Vec<_> =
            (0..4).map(|s| engine.train_step(&[pictures(s, 0, 16)], 0.1).unwrap().loss).collect();
        (losses, engine.parameters().unwrap(), engine.optimizer_state().unwrap())
    };
    let one = train_with(1);
    for threads in [2, 3, 4] {
        assert_eq!(train_with(threads), one, "{threads} threads");
    }
}

#[test]
fn ranks_with_unequal_micro_batches_count_every_picture_once() {
    // Each rank's pictures of two micro-batches. At the end of an epoch, the last ranks have fewer pictures, or none.
    let parts = [[(0, 5), (9, 11)], [(5, 9), (11, 11)], [(9, 9), (11, 11)]];
    let several = on_ranks(3, |comm| {
        let rank = comm.rank() as usize;
        let mut engine = engine(EngineConfig { accumulate: 2, ..config(6) }, comm);
        let [(a, b), (c, d)] = parts[rank];
        let batches = [part_of(9, pictures(0, a, b)), part_of(2, pictures(0, c, d))];
        let results: Vec<StepResult> = (0..2).map(|_| engine.train_step(&batches, 0.1).unwrap()).collect();
        (results, engine.parameters().unwrap())
    });
    let mut single = engine(EngineConfig { accumulate: 2, ..config(9) }, Arc::new(SingleRank));
    let mut result = StepResult::default();
    for _ in 0..2 {
        result = single.train_step(&[pictures(0, 0, 9), pictures(0, 9, 11)], 0.1).unwrap();
    }
    assert_eq!(several.iter().map(|(r, _)| r[1].samples).sum::<u32>(), 11);
    let (last_rank, _) = &several[2];
    assert_eq!(last_rank[1].samples, 0);
    let loss: f32 = several.iter().map(|(r, _)| r[1].loss * r[1].samples as f32).sum::<f32>() / 11.0;
    assert!((loss - result.loss).abs() < 1e-4 * loss, "{loss} instead of {}", result.loss);
    for (results, weights) in &several {
        assert!((results[1].grad_norm / result.grad_norm - 1.0).abs() < 1e-3);
        let difference = max_difference(weights, &single.parameters().unwrap());
        assert!(difference < 1e-3, "{difference}");
    }
}

#[test]
fn a_batch_with_more_pictures_than_all_ranks_have_is_refused() {
    let errors = on_ranks(2, |comm| {
        let mut engine = engine(config(8), comm);
        engine.train_step(&[part_of(7, pictures(0, 0, 8))], 0.1).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("8 pictures, but states 7 pictures on all 2 ranks"), "{error}");
    }
}

#[test]
fn summed_gradients_are_the_mean_times_the_number_of_ranks() {
    let norm = |gradients_mean| {
        on_ranks(2, move |comm| {
            let rank = comm.rank();
            let mut engine = engine(EngineConfig { gradients_mean, ..config(8) }, comm);
            engine.train_step(&[part_of_rank(0, 16, (rank, 2))], 0.1).unwrap().grad_norm
        })[0]
    };
    assert!((norm(false) / norm(true) - 2.0).abs() < 1e-5);
}

#[test]
fn without_synchronised_statistics_each_rank_normalises_its_own_pictures() {
    let ranks = on_ranks(2, |comm| {
        let rank = comm.rank();
        let mut engine = engine(EngineConfig { sync_batch_norm: false, ..config(8) }, comm);
        engine.train_step(&[part_of_rank(0, 16, (rank, 2))], 0.1).unwrap();
        let before = engine.parameters().unwrap();
        engine.broadcast_parameters().unwrap();
        (before, engine.parameters().unwrap())
    });
    let rank_1_alone = {
        let mut engine = engine(config(8), Arc::new(SingleRank));
        engine.train_step(&[pictures(0, 8, 16)], 0.1).unwrap();
        engine.parameters().unwrap()
    };
    let [(before_0, after_0), (before_1, after_1)] = &ranks[..] else { panic!("two ranks") };
    let mean = "bn1.running_mean";
    assert_eq!(before_1[mean], rank_1_alone[mean], "rank 1's own statistics");
    assert_ne!(before_0[mean], before_1[mean]);
    assert_eq!(before_0["fc.weight"], before_1["fc.weight"], "the weights are equal nevertheless");
    assert_eq!(after_0, after_1, "a broadcast makes the statistics equal");
    assert_eq!(before_0, after_1);
}

#[test]
fn an_engine_uses_only_its_own_group_of_ranks() {
    let weights = |comm: Arc<dyn ProcessGroup>, first: usize| {
        let rank = comm.rank();
        let mut engine = engine(config(8), comm);
        for step in 0..3 {
            engine.train_step(&[part_of_rank(first + step, 16, (rank, 2))], 0.05).unwrap();
        }
        engine.parameters().unwrap()
    };
    for has_shm in [true, false] {
        let separate = [0, 100].map(|first| run_ranks(2, has_shm, |comm| weights(comm, first)).remove(0));
        let of_ranks = run_ranks(4, has_shm, |comm| {
            // Ranks 0 and 2 read other pictures than ranks 1 and 3.
            let color = comm.rank() % 2;
            let group = comm.split(color).unwrap();
            let weights = weights(group, 100 * color as usize);
            // Ranks wait for each other before they release the shared memory.
            comm.barrier().unwrap();
            weights
        });
        for (rank, weights) in of_ranks.iter().enumerate() {
            assert!(*weights == separate[rank % 2], "rank {rank}, shared memory: {has_shm}");
        }
        assert!(separate[0] != separate[1]);
    }
}

#[test]
fn a_stopped_rank_ends_its_step_with_the_reason() {
    let ranks = on_ranks(2, |comm| {
        let mut engine = engine(config(8), comm.clone());
        engine.train_step(&[part_of(16, pictures(0, 0, 8))], 0.1).unwrap();
        if comm.rank() == 1 {
            comm.abort("rank 1 had enough");
        }
        engine.train_step(&[part_of(16, pictures(1, 0, 8))], 0.1).unwrap_err().to_string()
    });
    assert!(ranks[1].contains("rank 1 had enough"), "{}", ranks[1]);
    assert!(ranks[0].contains("rank 1"), "{}", ranks[0]);
}

#[test]
fn evaluation_and_prediction_do_not_change_parameters() {
    let mut trained = engine(config(8), Arc::new(SingleRank));
    trained.train_step(&[pictures(0, 0, 8)], 0.1).unwrap();
    // 20 pictures are more than a batch.
    let before = trained.parameters().unwrap();
    let result = trained.eval_step(&pictures(2, 0, 20)).unwrap();
    let logits = trained.predict(&pictures(2, 0, 20)).unwrap();
    assert_eq!((result.samples, logits.len()), (20, 200));
    assert!(result.loss_sum.is_finite() && result.correct <= 20);
    assert_eq!(trained.parameters().unwrap(), before);
}

#[test]
fn tensors_with_wrong_names_or_shapes_are_refused_by_name() {
    let mut engine = engine(config(8), Arc::new(SingleRank));
    let mut weights = engine.parameters().unwrap();
    let fc = weights.remove("fc.bias").unwrap();
    weights.insert("fc.bia".into(), fc);
    weights.get_mut("conv1.weight").unwrap().shape = vec![16, 3, 9];
    let error = engine.set_parameters(&weights).unwrap_err().to_string();
    for part in ["fc.bias is missing", "has no fc.bia", "conv1.weight has shape [16, 3, 9]"] {
        assert!(error.contains(part), "{error}");
    }
    let mut batch = pictures(0, 0, 2);
    batch.labels[1] = 10;
    let error = engine.train_step(&[batch], 0.1).unwrap_err();
    assert!(matches!(&error, EngineError::Parameters(e) if e.contains("label 10")), "{error}");
    let mut batch = pictures(0, 0, 2);
    batch.images.pop();
    assert!(engine.predict(&batch).is_err());
    assert!(engine.train_step(&[pictures(0, 0, 2), pictures(0, 0, 2)], 0.1).is_err());
}
