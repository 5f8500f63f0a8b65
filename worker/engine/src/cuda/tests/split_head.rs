//! Compares GPUs that split the head's classes or other operators with one rank that has the whole network.

use super::*;
use crate::{Distribution, Margin, StateDict, StepResult, Writers, build_cpu_with, plan::Mesh};
use lockstep_comm::{
    ProcessGroup,
    rendezvous::{Store, loopback::on_connected_ranks},
};
use lockstep_protocol::spec::{ShardSpec, Split};
use std::time::Duration;

/// Pictures per rank.
const PER_RANK: usize = 16;
const STEPS: usize = 6;
const LR: f32 = 0.001;

/// Runs `work` on `size` ranks with a GPU each, and returns the results. With fewer GPUs, prints a message and returns `None`.
pub(super) fn on_gpus<T: Send>(
    size: u32,
    work: impl Fn(Arc<dyn ProcessGroup>) -> T + Sync,
) -> Option<Vec<T>> {
    if (0..size.cast_signed()).any(|ordinal| crate::cuda::device::Device::open(ordinal).is_err()) {
        eprintln!("skipped: fewer than {size} GPUs");
        return None;
    }
    Some(on_ranks(size, |comm, _| work(comm)))
}

/// Runs `work` on each of `size` ranks, with their group and their rendezvous store, and returns the results.
pub(super) fn on_ranks<T: Send>(
    size: u32,
    work: impl Fn(Arc<dyn ProcessGroup>, Arc<Store>) -> T + Sync,
) -> Vec<T> {
    on_connected_ranks(size, Duration::from_secs(120), |store, ring| {
        let result = work(ring, store.clone());
        store.barrier("done").unwrap();
        result
    })
}

/// A network and how it is trained.
#[derive(Debug, Clone, Copy)]
struct Case {
    network: fn(usize) -> Arc<Network>,
    /// The number of copies of the network, and the number of ranks of each copy.
    mesh: [usize; 2],
    /// Strategies. If empty, the last layer is split over its classes.
    shards: &'static [(&'static str, Split)],
    classes: usize,
    accumulate: usize,
    /// Weight of a picture's own label, if pictures are mixed.
    lambda: Option<f32>,
    /// Whether the last micro-batch of every second step has fewer pictures, and only on ranks 0 and 1.
    ragged: bool,
    precision: Precision,
    sample_share: f64,
    /// With a margin, logits are scaled cosines.
    margin: Option<LossKind>,
}

const CASE: Case = Case {
    network: small_network,
    mesh: [1, 2],
    shards: &[],
    classes: 10,
    accumulate: 1,
    lambda: None,
    ragged: false,
    precision: Precision::Fp32,
    sample_share: 1.0,
    margin: None,
};

impl Case {
    fn ranks(&self) -> usize {
        self.mesh[0] * self.mesh[1]
    }

    fn plan(&self) -> Plan {
        let [data, model] = self.mesh;
        let shard =
            |(pattern, split): &(&str, Split)| ShardSpec { pattern: (*pattern).into(), split: *split };
        Plan::on(Mesh { stage: 1, data, height: 1, model }, self.shards.iter().map(shard).collect())
    }

    fn network(&self) -> Arc<Network> {
        (self.network)(self.classes)
    }

    /// The micro-batches of a step, with the pictures of `rank` or, if it is `None`, of all ranks.
    fn step(&self, number: usize, rank: Option<usize>) -> Vec<Batch> {
        let of_micro_batch = |micro: usize| {
            let network = self.network();
            let all = pictures(&network, self.ranks() * PER_RANK, number * self.accumulate + micro);
            let is_last = micro + 1 == self.accumulate;
            // In a ragged micro-batch, rank 0 has half of its pictures, rank 1 has three, and the other ranks have none.
            let count = |rank: usize| match (self.ragged && is_last && number % 2 == 1, rank) {
                (false, _) => PER_RANK,
                (true, rank) => [PER_RANK / 2, 3].get(rank).copied().unwrap_or(0),
            };
            let size = network.tensors[0].len();
            let mut batch = Batch { lambda: self.lambda.unwrap_or(0.0), ..Batch::default() };
            for other in 0..self.ranks() {
                batch.global_samples += count(other);
                if rank.is_some_and(|rank| rank != other) {
                    continue;
                }
                let range = other * PER_RANK..other * PER_RANK + count(other);
                batch.images.extend(&all.images[range.start * size..range.end * size]);
                batch.labels.extend(&all.labels[range.clone()]);
                if self.lambda.is_some() {
                    let mixed = |label: &u32| (label * 7 + 3) % self.classes as u32;
                    batch.mixed_labels.extend(all.labels[range.clone()].iter().map(mixed));
                }
                batch.indices.extend(&all.indices[range]);
            }
            batch
        };
        (0..self.accumulate).map(of_micro_batch).collect()
    }

    fn config(&self, batch_size: usize) -> EngineConfig {
        let config = EngineConfig { accumulate: self.accumulate, ..config(batch_size) };
        let sample_share = self.sample_share;
        let margin =
            self.margin.and_then(|kind| Margin::of(&LossSpec { kind, scale: 8.0, ..LossSpec::default() }));
        // A sample and a margin need labels of one class.
        match sample_share < 1.0 || margin.is_some() {
            true => {
                let loss = LossConfig { sample_share, seed: 5, margin, ..LossConfig::default() };
                EngineConfig { loss, ..config }
            }
            false => config,
        }
    }

    /// Runs the case on one CPU rank or, if classes are sampled, on as many CPU ranks.
    fn run_on_cpu(&self) -> Vec<Run> {
        let network = self.network();
        if self.sample_share == 1.0 {
            let mut engine = cpu_from(&initial(&network), &network, &self.config(self.ranks() * PER_RANK));
            return vec![run(engine.as_mut(), self, None)];
        }
        on_ranks(self.ranks() as u32, |comm, _| {
            let (rank, initial) = (comm.rank() as usize, initial(&network));
            let engine = build_cpu_with(network.clone(), &initial, self.config(PER_RANK), comm, &self.plan());
            run(engine.unwrap().as_mut(), self, Some(rank))
        })
    }

    fn engine(&self, comm: Arc<dyn ProcessGroup>) -> Box<dyn Engine> {
        let network = self.network();
        let gpu = DeviceConfig {
            plan: self.plan(),
            ordinal: comm.rank().cast_signed(),
            precision: self.precision,
            ..deterministic()
        };
        let config = self.config(PER_RANK);
        Box::new(crate::cuda::build(network.clone(), &initial(&network), config, comm, &gpu).unwrap())
    }
}

/// One rank's results of a run.
struct Run {
    steps: Vec<StepResult>,
    checksum: [u64; 2],
    logits: Vec<f32>,
    /// Sum of losses, and number of correct predictions.
    evaluated: [f64; 2],
    state: Option<StateDict>,
}

fn run(engine: &mut dyn Engine, case: &Case, rank: Option<usize>) -> Run {
    let steps =
        (0..STEPS).map(|step| engine.train_step(&case.step(step, rank), LR).unwrap()).collect::<Vec<_>>();
    let batch = case.step(1, rank).pop().unwrap();
    let batch = Batch { mixed_labels: Vec::new(), ..batch };
    let logits = engine.predict(&batch).unwrap();
    let evaluated = engine.eval_step(&batch).unwrap();
    let state = engine.state_dict(&Writers::default()).unwrap();
    let evaluated = [evaluated.loss_sum, evaluated.correct as f64];
    Run { steps, checksum: engine.checksum().unwrap(), logits, evaluated, state }
}

/// The mean loss of all pictures of a step, and the number of correct predictions.
fn step_totals(runs: &[Run], step: usize) -> (f32, u32) {
    let sum = |f: &dyn Fn(&StepResult) -> f32| runs.iter().map(|run| f(&run.steps[step])).sum::<f32>();
    let samples = sum(&|s| s.samples as f32);
    (sum(&|s| s.loss * s.samples as f32) / samples, runs.iter().map(|run| run.steps[step].correct).sum())
}

/// Trains a case on GPUs and on CPU ranks, and compares. Losses may differ by `loss` (relative), and weights by `bound` relative to the
/// weights' change in training.
fn compare(case: Case, loss: f64, bound: f64) {
    let network = case.network();
    let config = case.config(case.ranks() * PER_RANK);
    let expected_runs = case.run_on_cpu();
    let Some(runs) = on_gpus(case.ranks() as u32, |comm| {
        let rank = comm.rank() as usize;
        run(case.engine(comm).as_mut(), &case, Some(rank))
    }) else {
        return;
    };
    for step in 0..STEPS {
        let (actual, correct) = step_totals(&runs, step);
        let (expected, expected_correct) = step_totals(&expected_runs, step);
        let expected_norm = expected_runs[0].steps[step].grad_norm;
        let norms = runs.iter().map(|run| run.steps[step].grad_norm).collect::<Vec<_>>();
        eprintln!("{case:?}, step {step}: loss {actual} / {expected}, gradient {norms:?} / {expected_norm}");
        assert_near(actual, expected, loss, format_args!("{case:?}, step {step}"));
        assert!(norms.iter().all(|norm| *norm == norms[0]), "{norms:?}");
        assert_near(norms[0], expected_norm, 100.0 * loss, format_args!("{case:?}, gradient of step {step}"));
        if case.precision == Precision::Fp32 {
            assert_eq!(correct, expected_correct, "{case:?}, step {step}");
        }
    }
    let sums: Vec<u64> = runs.iter().map(|run| run.checksum[0]).collect();
    assert!(sums.iter().all(|sum| *sum == sums[0]), "{case:?}: {sums:x?}");
    for (rank, run) in runs.iter().enumerate() {
        let replica = &runs[rank % case.mesh[1]];
        assert_eq!(
            run.checksum[1], replica.checksum[1],
            "{case:?}: rank {rank} has another part than its replica"
        );
    }
    let logits: Vec<f32> = runs.iter().flat_map(|run| run.logits.iter().copied()).collect();
    let expected_logits: Vec<f32> = expected_runs.iter().flat_map(|run| run.logits.iter().copied()).collect();
    assert_eq!(logits.len(), expected_logits.len(), "{case:?}");
    let logits_distance = (difference(&logits, &expected_logits) / square(&expected_logits)).sqrt();
    let [evaluated, expected_evaluated] = [&runs, &expected_runs]
        .map(|runs| [0, 1].map(|value| runs.iter().map(|run| run.evaluated[value]).sum::<f64>()));
    let state = runs.into_iter().next().and_then(|run| run.state).unwrap();
    let expected_state = expected_runs.into_iter().next().and_then(|run| run.state).unwrap();
    let weights = relative_distance(&state.parameters, &expected_state.parameters, &initial(&network));
    eprintln!(
        "{case:?}: logits {logits_distance:.1e}, weights {weights:.1e} of their change apart; \
         evaluated {evaluated:?} / {expected_evaluated:?}"
    );
    assert!(weights < bound && logits_distance < bound, "{case:?}");
    let running = |state: &StateDict| -> NamedTensors {
        let all = state.parameters.clone().into_iter();
        all.filter(|(name, _)| name.contains("running")).collect()
    };
    let (statistics, name) = super::worst_difference(&running(&state), &running(&expected_state));
    assert!(statistics < bound, "{case:?}: {name} differs by {statistics}");
    assert_near(evaluated[0], expected_evaluated[0], bound, format_args!("{case:?}, evaluation"));
    let shapes = |state: &StateDict| {
        let slots = &state.optimizer.as_ref().unwrap().slots;
        slots.iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone())).collect::<Vec<_>>()
    };
    assert_eq!(shapes(&state), shapes(&expected_state));
    // The checkpoint has the whole state, so a single rank can continue from it.
    let mut single = cpu_from(&initial(&network), &network, &config);
    single.load_state_dict(&state).unwrap();
    assert!(single.train_step(&case.step(0, None), LR).unwrap().loss.is_finite());
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_wide_head_trains_as_on_cpu_ranks() {
    let wide = Case { mesh: [1, 1], classes: 5003, ..CASE };
    compare(wide, 1e-5, 1e-3);
    compare(Case { accumulate: 2, ragged: true, lambda: Some(0.7), ..wide }, 1e-5, 1e-3);
    compare(Case { margin: Some(LossKind::ArcFace), ..wide }, 1e-5, 1e-3);
    for precision in [Precision::Bf16, Precision::Fp16] {
        compare(Case { precision, ..wide }, 2e-2, 0.5);
    }
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_a_split_head_trains_as_one_rank() {
    compare(CASE, 1e-5, 1e-3);
    // Uneven parts in several chunks; then micro-batches and ranks with fewer pictures.
    compare(Case { classes: 1003, ..CASE }, 1e-5, 1e-3);
    compare(Case { classes: 1003, accumulate: 2, ragged: true, ..CASE }, 1e-5, 1e-3);
    for lambda in [0.7, 0.2] {
        compare(Case { lambda: Some(lambda), ..CASE }, 1e-5, 1e-3);
    }
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_a_split_head_in_16_bits_is_near_one_rank() {
    for precision in [Precision::Bf16, Precision::Fp16] {
        compare(Case { precision, classes: 1003, ..CASE }, 2e-2, 0.5);
    }
}

/// A network with a grouped convolution, and convolutions that no batch norm follows.
fn grouped_network(classes: usize) -> Arc<Network> {
    let mut net = Network::new("a grouped network", 16, 3, classes);
    let x = net.conv("conv1", net.input(), 32, 3, 1);
    let x = net.batch_norm("bn1", x);
    let shortcut = net.relu(x);
    let x = net.conv("conv2", shortcut, 48, 3, 2);
    let x = net.batch_norm("bn2", x);
    let x = net.relu(x);
    let x = net.padded_conv("conv3", x, 48, (3, 1, 1), 3);
    let x = net.conv("conv4", x, 48, 1, 1);
    let x = net.conv("conv5", x, 48, 1, 1);
    let branch = net.batch_norm("bn5", x);
    let x = net.conv("down.0", shortcut, 48, 1, 2);
    let shortcut = net.batch_norm("down.1", x);
    let x = net.add(branch, shortcut);
    let x = net.relu(x);
    let x = net.global_average_pool(x);
    net.linear("fc", x, classes);
    Arc::new(net)
}

const BLOCK: &[(&str, Split)] = &[("conv2", Split::Out), ("conv3", Split::In)];

/// Strategies: convolutions over their outputs, inputs and groups, and the last layer over its inputs or classes.
#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_that_split_operators_train_as_one_rank() {
    use Split::{Groups, In, Out};
    let everything: &[_] = &[("conv1", Out), ("conv2", Out), ("conv3", Out), ("down.0", Out), ("fc", Out)];
    for shards in [BLOCK, &[("fc", In)], &[("conv3", Out)], everything, &[("conv2", In), ("down.0", In)]] {
        compare(Case { shards, ..CASE }, 1e-5, 1e-3);
    }
    let sums: &[_] = &[("conv4", In), ("conv5", Out), ("fc", Out)];
    for shards in [sums, &[("conv2", Out), ("conv3", Groups)], &[("conv4", In), ("conv5", In)]] {
        compare(Case { shards, network: grouped_network, ..CASE }, 1e-5, 1e-3);
    }
    for shards in [BLOCK, everything, &[("fc", In)]] {
        compare(Case { shards, accumulate: 2, ragged: true, ..CASE }, 1e-5, 1e-3);
    }
    compare(Case { shards: BLOCK, lambda: Some(0.7), ..CASE }, 1e-5, 1e-3);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_that_split_operators_in_16_bits_are_near_one_rank() {
    for precision in [Precision::Bf16, Precision::Fp16] {
        for shards in [BLOCK, &[("conv3", Split::Out), ("fc", Split::Out)]] {
            compare(Case { precision, shards, classes: 1003, ..CASE }, 2e-2, 0.5);
        }
    }
}

#[test]
#[ignore = "needs 4 GPUs"]
fn gpus_in_a_mesh_that_split_operators_train_as_one_rank() {
    for shards in [BLOCK, &[("conv3", Split::Out), ("fc", Split::In)]] {
        compare(Case { mesh: [2, 2], shards, ragged: true, ..CASE }, 1e-5, 1e-3);
    }
}

#[test]
#[ignore = "needs 2 GPUs, or 4"]
fn gpus_two_copies_of_a_split_head_train_as_one_rank() {
    compare(Case { mesh: [2, 2], classes: 11, ..CASE }, 1e-5, 1e-3);
    compare(Case { mesh: [1, 4], classes: 11, ragged: true, ..CASE }, 1e-5, 1e-3);
    compare(Case { mesh: [2, 2], classes: 1003, accumulate: 2, ..CASE }, 1e-5, 1e-3);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_a_split_head_samples_as_cpu_ranks_do() {
    for sample_share in [0.1, 0.9] {
        let case = Case { classes: 1003, sample_share, ..CASE };
        compare(case, 1e-5, 1e-3);
        compare(Case { ragged: true, lambda: Some(0.7), ..case }, 1e-5, 1e-3);
        for precision in [Precision::Bf16, Precision::Fp16] {
            compare(Case { precision, ..case }, 2e-2, 0.5);
        }
    }
    compare(Case { classes: 11, sample_share: 0.3, ..CASE }, 1e-5, 1e-3);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_a_head_with_a_margin_trains_as_one_rank() {
    for kind in [LossKind::ArcFace, LossKind::CosFace] {
        let case = Case { classes: 1003, margin: Some(kind), ..CASE };
        compare(case, 1e-5, 1e-3);
        compare(Case { classes: 10, ..case }, 1e-5, 1e-3);
        // Every GPU has the whole head.
        compare(Case { mesh: [2, 1], accumulate: 2, ragged: true, ..case }, 1e-5, 1e-3);
        compare(Case { accumulate: 2, ragged: true, ..case }, 1e-5, 1e-3);
        compare(Case { sample_share: 0.1, ..case }, 1e-5, 1e-3);
        for precision in [Precision::Bf16, Precision::Fp16] {
            compare(Case { precision, ..case }, 2e-2, 0.5);
            compare(Case { precision, sample_share: 0.1, ..case }, 2e-2, 0.5);
        }
    }
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_a_split_head_continues_from_its_checkpoint() {
    for sample_share in [1.0, 0.2] {
        check_continuation(Case { classes: 1003, precision: Precision::Bf16, sample_share, ..CASE });
    }
    check_continuation(Case { shards: BLOCK, precision: Precision::Bf16, ..CASE });
}

fn check_continuation(case: Case) {
    on_gpus(2, |comm| {
        let rank = comm.rank() as usize;
        let mut engine = case.engine(comm.clone());
        engine.train_step(&case.step(0, Some(rank)), LR).unwrap();
        let (parameters, slots) = match engine.state_dict(&Writers::default()).unwrap() {
            Some(state) => (Some(state.parameters), state.optimizer.map(|optimizer| optimizer.slots)),
            None => (None, None),
        };
        // Rank 0 sends the parameters and slots of rank 1 to rank 1.
        let (network, mut own) = (case.network(), engine.own_state().unwrap());
        let distribution = Distribution::new(&network, &case.plan(), comm.as_ref()).unwrap();
        let saved = own.clone();
        own.parameters = distribution.scatter(parameters, distribution.shapes()).unwrap();
        let shapes = distribution.slot_shapes(&case.config(PER_RANK).optimizer);
        own.optimizer.as_mut().unwrap().slots = distribution.scatter(slots, shapes).unwrap();
        assert!(own == saved, "the loaded state differs from the saved state");
        let next = case.step(1, Some(rank));
        let continued = engine.train_step(&next, LR).unwrap();
        let checksum = engine.checksum().unwrap();
        engine.load_state_dict(&own).unwrap();
        let again = engine.train_step(&next, LR).unwrap();
        assert_eq!((again.loss, again.grad_norm), (continued.loss, continued.grad_norm));
        assert_eq!(engine.checksum().unwrap(), checksum);
        engine.broadcast_parameters().unwrap();
        assert_eq!(engine.checksum().unwrap(), checksum);
        assert_eq!(engine.first_invalid().unwrap(), None);
        // The first average is a copy of the parameters.
        engine.update_average(0.9).unwrap();
        assert!(engine.averaged().unwrap().unwrap() == engine.parameters().unwrap());
    });
}
