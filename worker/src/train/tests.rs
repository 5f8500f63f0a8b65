//! Tests of the training loop with simulated engines: runs whose float16 overflows, and stop requests during the switch to
//! bfloat16.

mod scripted;

use super::*;
use crate::checkpoint::{self, State};
use lockstep_comm::{
    ProcessGroup, SingleRank,
    rendezvous::{
        RendezvousConfig,
        loopback::{rendezvous_config, unused_port},
    },
    ring::Ring,
};
use lockstep_engine::{Distribution, EvalResult, plan::Plan, registry};
use lockstep_host::gpu::RankGpu;
use lockstep_protocol::spec::{Arch, Device, Precision};
use scripted::{Overflow, Scripted, zeros};
use std::{
    fs,
    sync::{Mutex, atomic::AtomicU32},
    time::Duration,
};

/// When a rank is asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StopIn {
    /// After the last vote of the validation pass that overflows.
    Validation,
    /// While the ranks connect for bfloat16.
    Fallback,
    Never,
}

/// Stores log lines.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl Observer for Log {
    fn metric(&self, _: &str, _: u64, _: f32) {}
    fn log(&self, line: &str) {
        self.0.lock().unwrap().push(line.into());
    }
    fn event(&self, _: &AttemptEvent) {}
}

/// Writes a dataset of IDX files: `count` training and 8 validation pictures of `side` x `side` pixels.
pub(crate) fn write_dataset(folder: &Path, count: u32, side: u32) {
    fs::create_dir(folder).unwrap();
    for (name, count) in [("train", count), ("t10k", 8)] {
        let header = |kind: u32, sizes: &[u32]| -> Vec<u8> {
            std::iter::once(&kind).chain(sizes).flat_map(|n| n.to_be_bytes()).collect()
        };
        let pixels = (0..count * side * side).map(|i| (i * 7 % 256) as u8);
        let pictures: Vec<u8> = header(0x0803, &[count, side, side]).into_iter().chain(pixels).collect();
        let labels: Vec<u8> =
            header(0x0801, &[count]).into_iter().chain((0..count).map(|i| (i % 2) as u8)).collect();
        fs::write(folder.join(format!("{name}-images-idx3-ubyte")), pictures).unwrap();
        fs::write(folder.join(format!("{name}-labels-idx1-ubyte")), labels).unwrap();
    }
}

/// A job of two epochs of 20 steps, in a separate folder.
struct TestJob {
    folder: tempfile::TempDir,
    ranks: u32,
    /// The rank that has other weights from the beginning.
    differing_rank: Option<u32>,
    /// As [`Training::pause_after`]. No epoch then ends with a checkpoint of its own.
    pause_after: Option<u32>,
    /// Changes the job.
    change: fn(&mut JobSpec),
}

/// The result of a run.
#[derive(Debug)]
struct RunResult {
    /// By rank.
    outcomes: Vec<Outcome>,
    /// The formats of rank 0's engines, in the order in which they were built.
    engines: Vec<Precision>,
    /// Number of batches that rank 0 evaluated in bfloat16.
    evaluated_in_bfloat16: u32,
    /// The log of rank 0.
    log: String,
    /// By rank: how many times weights were copied from the rank's engines.
    copy_counts: Vec<u32>,
}

impl TestJob {
    fn new(ranks: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_dataset(&folder.path().join("dataset"), 80, 4);
        fs::create_dir(folder.path().join("checkpoints")).unwrap();
        Self { folder, ranks, differing_rank: None, pause_after: None, change: |_| {} }
    }

    fn spec(&self) -> JobSpec {
        let mut spec = JobSpec::default();
        spec.model.arch = Arch::ResNet20;
        spec.data.validation = lockstep_protocol::spec::Validation::Split("test".into());
        spec.data.crop_padding = 0;
        spec.train.epochs = Some(2);
        spec.train.global_batch_size = Some(4);
        spec.train.precision = Precision::Auto;
        spec.parallel.ranks = self.ranks;
        spec.checkpoint.every_epochs = self.pause_after.map(|_| 0);
        (self.change)(&mut spec);
        spec
    }

    /// Trains on all ranks. Only the last rank is asked to stop. The result has the engines and the log of rank 0.
    fn train(&self, overflow: Overflow, stop_in: StopIn, resume: Option<&str>) -> RunResult {
        let ranks = self.train_ranks(overflow, stop_in, resume).into_iter().enumerate();
        let mut ranks = ranks.map(|(rank, ended)| ended.unwrap_or_else(|e| panic!("rank {rank}: {e}")));
        let mut first = ranks.next().unwrap();
        for rank in ranks {
            first.outcomes.extend(rank.outcomes);
            first.copy_counts.extend(rank.copy_counts);
        }
        first
    }

    fn train_ranks(
        &self,
        overflow: Overflow,
        stop_in: StopIn,
        resume: Option<&str>,
    ) -> Vec<Result<RunResult, TrainError>> {
        let port = unused_port();
        std::thread::scope(|scope| {
            let rank = |rank| scope.spawn(move || self.train_rank(rank, port, overflow, stop_in, resume));
            let threads: Vec<_> = (0..self.ranks).map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn train_rank(
        &self,
        rank: u32,
        port: u16,
        overflow: Overflow,
        stop_in: StopIn,
        resume: Option<&str>,
    ) -> Result<RunResult, TrainError> {
        let stop: Arc<AtomicBool> = Arc::default();
        let is_asked_to_stop = rank + 1 == self.ranks;
        let timeout = Duration::from_secs(60);
        let store = (self.ranks > 1).then(|| {
            let config = rendezvous_config(port, rank, self.ranks);
            let config = RendezvousConfig { timeout, stop: stop.clone(), ..config };
            Arc::new(Store::join(config).unwrap())
        });
        let group: Arc<dyn ProcessGroup> = match &store {
            Some(store) => Ring::connect(store, timeout).unwrap(),
            None => Arc::new(SingleRank),
        };
        let (engines, evaluated) = (Mutex::new(Vec::new()), Arc::new(AtomicU32::new(0)));
        let copies = Arc::new(AtomicU32::new(0));
        let build = |training: &Training<'_>, plan: &RunPlan, generation: u32| {
            let precision = if plan.precision == Precision::Auto { Precision::Fp16 } else { plan.precision };
            engines.lock().unwrap().push(precision);
            if generation == 1 {
                if is_asked_to_stop && stop_in == StopIn::Fallback {
                    training.stop.store(true, Ordering::Relaxed);
                }
                // Engines on GPUs have this barrier, too.
                if let Some(store) = &training.store {
                    store.barrier("gradients/1").map_err(std::io::Error::other)?;
                }
            }
            let (evaluated, stop) = (evaluated.clone(), stop.clone());
            let stops = is_asked_to_stop && stop_in == StopIn::Validation;
            let mut batches = 0;
            let distribution = Distribution::new(&plan.network, &Plan::data(1), &SingleRank)?;
            let mut weights = zeros(distribution.shapes());
            weights.get_mut("fc.bias").unwrap().values[0] = f32::from(self.differing_rank == Some(rank));
            let engine = Scripted {
                precision,
                overflow,
                weights,
                momentum: zeros(distribution.slot_shapes(&plan.config.optimizer)),
                updates: 0,
                replica: plan.replica,
                copies: copies.clone(),
                evaluated: EvalResult::default(),
                on_evaluation: Box::new(move || {
                    batches += 1;
                    match precision {
                        Precision::Bf16 => _ = evaluated.fetch_add(1, Ordering::Relaxed),
                        // Ranks have voted after the first batch. The next vote would be 256 batches later.
                        _ if batches == 2 && stops => stop.store(true, Ordering::Relaxed),
                        _ => {}
                    }
                }),
            };
            Ok(Box::new(engine) as Box<dyn Engine>)
        };
        let gpu = RankGpu { ordinal: 0, visible: vec!["GPU-a".into()] };
        let (spec, log) = (self.spec(), Log::default());
        let checkpoints = self.folder.path().join("checkpoints");
        let resume = resume.map(|name| checkpoints.join(name));
        let (progress, checkpointed_step) = (AtomicU64::new(0), AtomicU64::new(0));
        let training = Training {
            spec: &spec,
            dataset: &self.folder.path().join("dataset"),
            pretrained_folders: None,
            changes: ChangeDetection::Files,
            checkpoints: &checkpoints,
            resume: resume.as_deref(),
            pause_after: self.pause_after,
            // A device whose engines may compute in 16 bits.
            device: registry::device_of(Some(&gpu), Device::Auto),
            local_ranks: 1,
            threads: 1,
            group,
            store,
            watchdog: None,
            observer: &log,
            stop: &stop,
            progress: &progress,
            checkpointed_step: &checkpointed_step,
            stop_within: Duration::from_secs(20),
        };
        let outcome = train_with(&training, &build)?;
        Ok(RunResult {
            outcomes: vec![outcome],
            engines: engines.into_inner().unwrap(),
            evaluated_in_bfloat16: evaluated.load(Ordering::Relaxed),
            log: log.0.into_inner().unwrap().join("\n"),
            copy_counts: vec![copies.load(Ordering::Relaxed)],
        })
    }

    fn state(&self, name: &str) -> State {
        let file = self.folder.path().join("checkpoints").join(name).join(checkpoint::STATE);
        serde_json::from_slice(&fs::read(&file).unwrap()).unwrap()
    }

    /// The weight in a checkpoint: the number of steps that were not skipped.
    fn weight(&self, name: &str) -> f32 {
        let file = self.folder.path().join("checkpoints").join(name).join(checkpoint::MODEL);
        checkpoint::read_tensors(&file).unwrap()["fc.bias"].values[0]
    }
}

const FP16_THEN_BF16: [Precision; 2] = [Precision::Fp16, Precision::Bf16];

#[test]
fn a_stop_during_a_switch_to_bfloat16_in_an_epoch_writes_a_checkpoint() {
    for ranks in [1, 2] {
        let job = TestJob::new(ranks);
        let ended = job.train(Overflow::Gradients, StopIn::Fallback, None);
        // Five consecutive skipped steps are too many.
        assert_eq!(ended.outcomes, vec![Outcome::Stopped { step: 5 }; ranks as usize], "{}", ended.log);
        assert_eq!(ended.engines, FP16_THEN_BF16);
        assert!(ended.log.contains("asked to stop: stopped after step 5"), "{}", ended.log);
        let state = job.state("1-5");
        assert_eq!((state.step, state.precision), (5, Precision::Bf16));
        assert_eq!((state.skipped_steps.total, job.weight("1-5")), (5, 0.0));

        let ended = job.train(Overflow::Gradients, StopIn::Never, Some("1-5"));
        assert_eq!(ended.outcomes, vec![Outcome::Finished { step: 40 }; ranks as usize], "{}", ended.log);
        assert_eq!(ended.engines, [Precision::Bf16], "float16 is not used again");
        assert_eq!(job.weight("2-40"), 35.0, "each of the other steps is done once");
    }
}

#[test]
fn a_stop_before_a_switch_to_bfloat16_does_not_reconnect_ranks() {
    for ranks in [1, 2] {
        let job = TestJob::new(ranks);
        let ended = job.train(Overflow::Validation, StopIn::Validation, None);
        assert_eq!(ended.outcomes, vec![Outcome::Stopped { step: 20 }; ranks as usize], "{}", ended.log);
        assert_eq!(ended.engines, [Precision::Fp16], "only the continued run switches to bfloat16");
        assert!(ended.log.contains("the evaluation after step 20 is interrupted"), "{}", ended.log);
        let state = job.state("1-20");
        assert_eq!((state.precision, state.val_loss), (Precision::Fp16, None));

        let ended = job.train(Overflow::Validation, StopIn::Never, Some("1-20"));
        assert_eq!(ended.outcomes, vec![Outcome::Finished { step: 40 }; ranks as usize], "{}", ended.log);
        assert_eq!(ended.engines, FP16_THEN_BF16);
        assert!(job.state("1-20").val_loss.is_some(), "the evaluation is done later");
    }
}

#[test]
fn a_pause_after_a_pending_evaluation_keeps_its_values() {
    let job = TestJob { pause_after: Some(1), ..TestJob::new(1) };
    job.train(Overflow::Validation, StopIn::Validation, None);
    assert_eq!(job.state("1-20").val_loss, None);
    let ended = job.train(Overflow::Validation, StopIn::Never, Some("1-20"));
    assert_eq!(ended.outcomes, [Outcome::Paused { step: 20 }], "{}", ended.log);
    assert!(job.state("1-20").val_loss.is_some());
}

#[test]
fn a_stop_during_a_switch_to_bfloat16_in_an_evaluation_ends_all_ranks() {
    for ranks in [1, 2] {
        let job = TestJob::new(ranks);
        let ended = job.train(Overflow::Validation, StopIn::Fallback, None);
        assert_eq!(ended.outcomes, vec![Outcome::Stopped { step: 20 }; ranks as usize], "{}", ended.log);
        assert_eq!((&ended.engines[..], ended.evaluated_in_bfloat16), (&FP16_THEN_BF16[..], 0));
        let state = job.state("1-20");
        assert_eq!((state.precision, state.val_loss), (Precision::Bf16, None));
    }
}

#[test]
fn differing_weights_end_the_run_before_a_checkpoint() {
    let without_evaluations: fn(&mut JobSpec) = |spec| spec.evaluate.every_epochs = 0;
    let unchanged: fn(&mut JobSpec) = |_| {};
    for (ranks, differing_rank, named, change) in [
        (2, 1, "ranks 0 and 1", unchanged),
        (3, 0, "rank 0", unchanged),
        (3, 2, "rank 2", unchanged),
        // The checkpoint itself compares the weights.
        (2, 1, "ranks 0 and 1", without_evaluations),
    ] {
        let job = TestJob { differing_rank: Some(differing_rank), change, ..TestJob::new(ranks) };
        for ended in job.train_ranks(Overflow::Nothing, StopIn::Never, None) {
            let error = ended.unwrap_err();
            let expected = format!("the weights of {named} differ from ");
            assert!(error.to_string().starts_with(&expected), "{error}");
            assert!(error.to_string().contains("No checkpoint of these weights is written"), "{error}");
            assert!(error.is_retriable() && !error.is_secondary());
        }
        assert_eq!(fs::read_dir(job.folder.path().join("checkpoints")).unwrap().count(), 0);
    }
}

#[test]
fn differing_weights_end_a_run_within_a_long_epoch() {
    let change = |spec: &mut JobSpec| {
        spec.train.epochs = Some(60);
        // Of 1,200 steps only the last is followed by an evaluation and a checkpoint.
        spec.evaluate.every_epochs = 0;
        spec.checkpoint.every_epochs = Some(0);
    };
    let job = TestJob { differing_rank: Some(1), change, ..TestJob::new(2) };
    for ended in job.train_ranks(Overflow::Nothing, StopIn::Never, None) {
        let error = ended.unwrap_err();
        assert!(
            matches!(error, TrainError::ReplicasDiffer { step, .. } if (1..1200).contains(&step)),
            "{error}"
        );
    }
}

#[test]
fn only_rank_0_of_the_replicas_copies_weights_for_checkpoints() {
    let count_copies = |ranks| {
        let job = TestJob::new(ranks);
        let ended = job.train(Overflow::Nothing, StopIn::Never, None);
        assert_eq!(ended.outcomes, vec![Outcome::Finished { step: 40 }; ranks as usize], "{}", ended.log);
        assert_eq!((job.weight("1-20"), job.weight("2-40")), (20.0, 40.0));
        ended.copy_counts
    };
    let single = count_copies(1);
    // Two checkpoints.
    assert_eq!(single, [2]);
    assert_eq!(count_copies(2), [single[0], 0]);
}
