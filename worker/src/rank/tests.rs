//! Runs a rank from its configuration to its checkpoint, also on a test backend in the registry.

use super::*;
use crate::{checkpoint, supervisor::configs, toy, train::tests::write_dataset};
use lockstep_comm::rendezvous::loopback::on_joined_ranks;
use lockstep_host::{gpu::RankGpu, tensors::NamedTensors};
use lockstep_protocol::{
    agent::{AllowedFolders, StartAttempt},
    spec::{Arch, JobSpec, Validation},
};
use std::{fs, os::unix::fs::symlink, path::PathBuf};

const STEPS: u64 = 3;

/// Runs a rank in `folder` with the GPU `gpu`. `change` modifies the order to start the rank.
fn run(
    folder: &Path,
    gpu: Option<RankGpu>,
    change: impl FnOnce(&mut StartAttempt),
) -> Result<Outcome, RankError> {
    let data = folder.join("dataset");
    if !data.exists() {
        write_dataset(&data, 32, 8);
    }
    let mut spec = JobSpec::default();
    spec.model.arch = Arch::ResNet20;
    spec.data.validation = Validation::Split("test".into());
    spec.data.crop_padding = 0;
    spec.train.epochs = None;
    spec.train.steps = Some(STEPS);
    spec.train.global_batch_size = Some(8);
    let mut start = StartAttempt { master_port: 1, ..StartAttempt::local(spec, data.to_string_lossy(), 1) };
    change(&mut start);
    let config = RankConfig { gpu, threads: 1, ..configs(&start, &[], None, folder).remove(0) };
    fs::create_dir_all(config.attempt_dir()).unwrap();
    fs::create_dir_all(config.checkpoints_dir()).unwrap();
    let reporter = Arc::new(Reporter::create(&config.attempt_dir(), 0).unwrap());
    run_attempt(&config, &Arc::default(), &reporter)
}

/// The weights of the last checkpoint of the rank in `folder`.
fn last_weights(folder: &Path) -> PathBuf {
    folder.join("checkpoints").join(checkpoint::folder_name(1, STEPS)).join(checkpoint::MODEL)
}

/// Trains with the GPU `gpu`, and returns the weights of the last checkpoint.
fn train_with(gpu: Option<RankGpu>) -> NamedTensors {
    let folder = tempfile::tempdir().unwrap();
    let outcome = run(folder.path(), gpu, |_| {}).unwrap();
    assert_eq!(outcome, Outcome::Finished { step: STEPS });
    checkpoint::read_tensors(&last_weights(folder.path())).unwrap()
}

#[test]
fn links_to_files_outside_the_allowed_folders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().canonicalize().unwrap().join(name);
    for folder in ["private", "first", "second", "third", "root"] {
        fs::create_dir(path(folder)).unwrap();
    }
    run(&path("private"), None, |_| {}).unwrap();
    let allowed = AllowedFolders { below: vec![path("root").display().to_string()], except: Vec::new() };
    let (weights, data) = (path("root/w.safetensors"), path("root/dataset"));
    let start_job = |job: &str| {
        run(&path(job), None, |start| {
            start.spec.model.pretrained = Some(weights.display().to_string());
            start.dataset_path = data.display().to_string();
            start.files.weights_in = Some(allowed.clone());
            start.files.dataset_in = Some(allowed.clone());
        })
    };
    write_dataset(&data, 32, 8);
    symlink(last_weights(&path("private")), &weights).unwrap();
    let why = start_job("first").unwrap_err().to_string();
    assert!(why.contains("model.pretrained: ") && why.contains("--dataset-root"), "{why}");
    assert!(!last_weights(&path("first")).exists());

    fs::remove_file(&weights).unwrap();
    fs::copy(last_weights(&path("private")), &weights).unwrap();
    fs::remove_dir_all(&data).unwrap();
    symlink(path("private/dataset"), &data).unwrap();
    let why = start_job("second").unwrap_err().to_string();
    assert!(why.contains("root/dataset, or where its links lead,"), "{why}");

    fs::remove_file(&data).unwrap();
    write_dataset(&path("root/elsewhere"), 32, 8);
    symlink("elsewhere", &data).unwrap();
    // The link stays below the root.
    assert_eq!(start_job("third").unwrap(), Outcome::Finished { step: STEPS });
}

#[test]
fn a_third_backend_trains_a_rank_on_its_own_device() {
    let gpu = RankGpu { ordinal: 1, visible: vec!["GPU-a".into(), toy::device("b")] };
    let weights = train_with(Some(gpu));
    let calls = || toy::CALLS.lock().unwrap().clone();
    assert_eq!(calls(), ["preflight for 1 ranks", "warm-up of device 1 for 1 ranks", "engine on device 1"]);
    // The test backend computes as the CPU engine does, so the weights must have the same bits.
    assert!(weights == train_with(None), "other weights than on the CPU");
    assert_eq!(calls().len(), 3, "a rank on the CPU calls no other backend");
}

#[test]
fn unencrypted_traffic_is_reported_with_advice() {
    for is_on_cores in [true, false] {
        let message = unencrypted_warning(is_on_cores);
        assert!(message.contains("are not encrypted") && message.contains("private network"), "{message}");
        assert_eq!(message.contains("nor does NCCL authenticate them"), !is_on_cores, "{message}");
        assert_eq!(message.lines().count(), 1);
    }
}

#[test]
fn ranks_of_different_backends_are_refused_with_the_rank() {
    let errors = on_joined_ranks(3, Duration::ZERO, |store| {
        let backend = ["cuda", "cuda", "cpu"][store.config().rank as usize];
        let refused = check_backends(&store, backend).unwrap_err();
        // The store closes when rank 0 drops it.
        store.barrier("done").unwrap();
        assert!(!refused.is_retriable());
        refused.to_string()
    });
    assert!(errors[0].starts_with("rank 2 computes with cpu and rank 0 with cuda"), "{}", errors[0]);
    assert!(errors.iter().all(|error| *error == errors[0]));
}
