//! Compares GPUs that share the rows of pictures with one CPU rank that has whole pictures. [`super::stages`] compares pipeline stages
//! within the same bounds.

use super::{split_head::on_gpus, *};
use crate::{StateDict, StepResult, Writers, plan::Mesh};
use lockstep_comm::ProcessGroup;

/// Number of pictures of each set of ranks that share the rows of these pictures.
const PER_SET: usize = 8;
const STEPS: usize = 6;
const LR: f32 = 0.001;
/// Number of pixels by which pictures of the evaluation are larger.
const LARGER: usize = 6;

/// A network and how it is trained.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) network: fn() -> Network,
    /// Numbers of ranks along the axes data, height and model.
    pub(super) mesh: [usize; 3],
    pub(super) stages: usize,
    pub(super) accumulate: usize,
    /// Whether the last micro-batch of every second step has fewer pictures.
    pub(super) ragged: bool,
    pub(super) precision: Precision,
    pub(super) optimizer_sharding: bool,
}

pub(super) const CASE: Case = Case {
    network: block,
    mesh: [1, 2, 1],
    stages: 1,
    accumulate: 1,
    ragged: false,
    precision: Precision::Fp32,
    optimizer_sharding: false,
};

/// A residual block whose activations have 18 and 9 rows. With the weights of [`initial`], values are far from zero.
fn block() -> Network {
    residual_block(18, 10)
}

/// Windows of 7, 3 and 5 pixels over activations with 26, 13, 7 and 4 rows.
pub(super) fn large_windows() -> Network {
    let mut net = Network::new("rows of large windows", 26, 3, 10);
    let x = net.conv("conv1", net.input(), 16, 7, 2);
    let x = net.batch_norm("bn1", x);
    let x = net.relu(x);
    let pooled = net.max_pool(x, 3, 2);
    let x = net.conv("conv2", pooled, 32, 5, 1);
    let x = net.batch_norm("bn2", x);
    let x = net.relu(x);
    let x = net.conv("conv3", x, 64, 3, 2);
    let branch = net.batch_norm("bn3", x);
    let x = net.conv("down.0", pooled, 64, 1, 2);
    let shortcut = net.batch_norm("down.1", x);
    let x = net.add(branch, shortcut);
    let x = net.relu(x);
    let x = net.global_average_pool(x);
    net.linear("fc", x, 10);
    net
}

impl Case {
    fn mesh(&self) -> Mesh {
        let [data, height, model] = self.mesh;
        Mesh { stage: self.stages, data, height, model }
    }

    /// Sets of ranks with different pictures.
    fn sets(&self) -> usize {
        self.mesh[0] * self.mesh[2]
    }

    fn set_of(&self, rank: usize) -> usize {
        self.mesh().data_rank(rank) * self.mesh[2] + self.mesh().model_rank(rank)
    }

    /// The pictures of a micro-batch: of the set `set` of ranks, or of all ranks.
    fn batch(&self, network: &Network, number: usize, is_ragged: bool, set: Option<usize>) -> Batch {
        let all = pictures(network, self.sets() * PER_SET, number);
        let count = |set: usize| {
            if is_ragged { [PER_SET / 2, 3].get(set).copied().unwrap_or(0) } else { PER_SET }
        };
        let size = network.tensors[0].len();
        let mut batch = Batch::default();
        for other in 0..self.sets() {
            batch.global_samples += count(other);
            if set.is_none_or(|set| set == other) {
                let range = other * PER_SET..other * PER_SET + count(other);
                batch.images.extend(&all.images[range.start * size..range.end * size]);
                batch.labels.extend(&all.labels[range.clone()]);
                batch.indices.extend(&all.indices[range]);
            }
        }
        batch
    }

    fn step(&self, network: &Network, number: usize, set: Option<usize>) -> Vec<Batch> {
        let micro_batch = |micro: usize| {
            let is_ragged = self.ragged && micro + 1 == self.accumulate && number % 2 == 1;
            self.batch(network, number * self.accumulate + micro, is_ragged, set)
        };
        (0..self.accumulate).map(micro_batch).collect()
    }

    fn gpu(&self, comm: &Arc<dyn ProcessGroup>) -> DeviceConfig {
        DeviceConfig {
            plan: Plan { optimizer_sharding: self.optimizer_sharding, ..Plan::on(self.mesh(), Vec::new()) },
            ordinal: comm.rank().cast_signed(),
            precision: self.precision,
            ..deterministic()
        }
    }
}

/// One rank's results of a run.
struct Run {
    steps: Vec<StepResult>,
    checksum: [u64; 2],
    logits: Vec<f32>,
    /// The loss of pictures of the network's size, and of larger pictures.
    evaluated: [f64; 2],
    state: Option<StateDict>,
}

fn run(engine: &mut dyn Engine, case: &Case, network: &Network, set: Option<usize>) -> Run {
    let larger = network.resized(network.image_size + LARGER);
    engine.add_image_sizes(&[], &[larger.image_size]).unwrap();
    let mut step = |number| engine.train_step(&case.step(network, number, set), LR).unwrap();
    let steps = (0..STEPS).map(&mut step).collect();
    let evaluated = [network, &larger].map(|network| {
        engine.set_image_size(network.image_size).unwrap();
        engine.eval_step(&case.batch(network, 99, true, set)).unwrap().loss_sum
    });
    engine.set_image_size(network.image_size).unwrap();
    let logits = engine.predict(&case.batch(network, 99, false, set)).unwrap();
    let state = engine.state_dict(&Writers::default()).unwrap();
    Run { steps, checksum: engine.checksum().unwrap(), logits, evaluated, state }
}

/// Trains a case on GPUs and on one CPU rank, and compares. Losses may differ by `loss` (relative), and weights by `bound` relative to the
/// weights' change in training.
pub(super) fn compare(case: Case, loss: f64, bound: f64) {
    let network = Arc::new((case.network)());
    let config_of = |batch_size: usize| EngineConfig { accumulate: case.accumulate, ..config(batch_size) };
    let start = initial(&network);
    let Some(runs) = on_gpus(case.mesh().ranks() as u32, |comm| {
        let (gpu, set) = (case.gpu(&comm), case.set_of(comm.rank() as usize));
        let mut engine = crate::cuda::build(network.clone(), &start, config_of(PER_SET), comm, &gpu).unwrap();
        run(&mut engine, &case, &network, Some(set))
    }) else {
        return;
    };
    let mut single = cpu_from(&start, &network, &config_of(case.sets() * PER_SET));
    let expected = run(single.as_mut(), &case, &network, None);
    // Ranks that share rows have the same results, and the last stage has the logits.
    let mesh = case.mesh();
    let is_of_set = |rank: &usize| mesh.height_rank(*rank) == 0 && mesh.stage_rank(*rank) + 1 == mesh.stage;
    let sets: Vec<&Run> = (0..runs.len()).filter(is_of_set).map(|rank| &runs[rank]).collect();
    for (step, expected_step) in expected.steps.iter().enumerate() {
        let samples: u32 = sets.iter().map(|run| run.steps[step].samples).sum();
        let sum: f32 = sets.iter().map(|run| run.steps[step].loss * run.steps[step].samples as f32).sum();
        let actual_loss = sum / samples as f32;
        let norms: Vec<f32> = runs.iter().map(|run| run.steps[step].grad_norm).collect();
        eprintln!(
            "{case:?}, step {step}: loss {actual_loss} / {}, gradient {norms:?} / {}",
            expected_step.loss, expected_step.grad_norm
        );
        assert_eq!(samples, expected_step.samples, "{case:?}");
        assert_near(actual_loss, expected_step.loss, loss, format_args!("{case:?}"));
        assert!(norms.iter().all(|norm| *norm == norms[0]), "{norms:?}");
        assert_near(norms[0], expected_step.grad_norm, 100.0 * loss, format_args!("{case:?}: gradient"));
        for (rank, run) in runs.iter().enumerate() {
            let set_loss = sets[case.set_of(rank)].steps[step].loss;
            let loss_difference = f64::from(run.steps[step].loss - set_loss).abs();
            assert!(loss_difference <= loss * f64::from(set_loss), "{case:?}, rank {rank}");
        }
    }
    for (rank, run) in runs.iter().enumerate() {
        let first = mesh.stage_rank(rank) * mesh.ranks_of_stage();
        let expected = [runs[first].checksum[0], runs[first + rank % case.mesh[2]].checksum[1]];
        assert_eq!(run.checksum, expected, "{case:?}: rank {rank}");
    }
    let logits: Vec<f32> = sets.iter().flat_map(|run| run.logits.iter().copied()).collect();
    assert_eq!(logits.len(), expected.logits.len(), "{case:?}");
    let logits_distance = (difference(&logits, &expected.logits) / square(&expected.logits)).sqrt();
    let evaluated = [0, 1].map(|size| sets.iter().map(|run| run.evaluated[size]).sum::<f64>());
    let state = runs[0].state.as_ref().unwrap();
    let weights = relative_distance(&state.parameters, &expected.state.unwrap().parameters, &start);
    eprintln!(
        "{case:?}: logits {logits_distance:.1e}, weights {weights:.1e} of their change apart; losses of evaluations {evaluated:?} / {:?}",
        expected.evaluated
    );
    assert!(weights < bound && logits_distance < bound, "{case:?}");
    for (actual, expected) in evaluated.iter().zip(expected.evaluated) {
        assert_near(*actual, expected, bound, format_args!("{case:?}"));
    }
    // A single rank can continue from the checkpoint.
    single.load_state_dict(state).unwrap();
    assert!(single.train_step(&case.step(&network, 0, None), LR).unwrap().loss.is_finite());
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_that_share_rows_train_as_one_rank() {
    compare(CASE, 1e-5, 1e-3);
    compare(Case { accumulate: 2, ragged: true, ..CASE }, 1e-5, 1e-3);
    compare(Case { network: large_windows, ..CASE }, 1e-5, 1e-3);
    compare(Case { optimizer_sharding: true, ..CASE }, 1e-5, 1e-3);
}

#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_that_share_rows_in_16_bits_are_near_one_rank() {
    for precision in [Precision::Bf16, Precision::Fp16] {
        for network in [block, large_windows] {
            compare(Case { precision, network, ..CASE }, 2e-2, 0.5);
        }
    }
}

/// More copies of the network, a split head, and windows that reach beyond a neighbour.
#[test]
#[ignore = "needs 4 GPUs"]
fn gpus_in_a_mesh_with_rows_train_as_one_rank() {
    compare(Case { mesh: [2, 2, 1], ragged: true, ..CASE }, 1e-5, 1e-3);
    compare(Case { mesh: [1, 2, 2], network: large_windows, ..CASE }, 1e-5, 1e-3);
    compare(Case { mesh: [1, 4, 1], network: large_windows, ..CASE }, 1e-5, 1e-3);
}

/// Each rank has the statistics of its own rows, as on CPU ranks.
#[test]
#[ignore = "needs 2 GPUs"]
fn gpus_that_share_rows_may_have_separate_statistics() {
    let network = Arc::new(block());
    let (start, config) = (initial(&network), EngineConfig { sync_batch_norm: false, ..config(PER_SET) });
    on_gpus(2, |comm| {
        let gpu = CASE.gpu(&comm);
        let (network, config) = (network.clone(), config.clone());
        let mut cpu =
            crate::build_cpu_with(network.clone(), &start, config.clone(), comm.clone(), &gpu.plan).unwrap();
        let mut engine = crate::cuda::build(network.clone(), &start, config, comm, &gpu).unwrap();
        for number in 0..STEPS {
            let step = CASE.step(&network, number, Some(0));
            let [expected, actual] =
                [cpu.train_step(&step, LR), engine.train_step(&step, LR)].map(|result| result.unwrap().loss);
            assert_near(actual, expected, 1e-5, format_args!("step {number}"));
        }
    });
}
