//! `lockstep rank --spare`: a process that opens a GPU and later becomes a rank. Here there is no GPU, so the process executes
//! the program again, and must then train as any other rank.

use crate::{pictures, server::training_permit};
use lockstep_host::gpu::RankGpu;
use lockstep_protocol::{
    agent::StartAttempt,
    spec::{Arch, Device, JobSpec},
};
use lockstep_worker::{
    checkpoint,
    rank::{EXIT_FINISHED, RankConfig, STOP_WITHIN_SECS},
    supervisor::rank_file,
};
use std::{
    fs::{self, File},
    io::Write,
    os::unix::ffi::OsStrExt,
    process::{Child, Command, Stdio},
};

const STEPS: u64 = 2;

fn start_spare(gpu: &RankGpu) -> Child {
    Command::new(env!("CARGO_BIN_EXE_lockstep"))
        .args(["rank", "--spare", &serde_json::to_string(gpu).expect("JSON")])
        .env("CUDA_VISIBLE_DEVICES", gpu.visible.join(","))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts")
}

#[tokio::test]
async fn a_spare_becomes_the_requested_rank_and_ends_with_its_agent() {
    let _permit = training_permit().await;
    let folder = tempfile::tempdir().expect("a folder");
    let gpu = RankGpu { ordinal: 0, visible: vec!["GPU-none".into()] };
    let mut unused = start_spare(&gpu);
    drop(unused.stdin.take());
    assert_eq!(unused.wait().expect("its status").code(), Some(0));

    let mut spec = JobSpec::default();
    spec.model.arch = Arch::ResNet20;
    spec.train.epochs = None;
    spec.train.steps = Some(STEPS);
    spec.train.global_batch_size = Some(8);
    spec.parallel.device = Device::Cpu;
    let dataset = pictures::idx_dataset(folder.path(), 32, 8);
    let config = RankConfig {
        start: StartAttempt { master_port: 1, ..StartAttempt::local(spec, dataset.to_string_lossy(), 1) },
        rank: 0,
        slot: 0,
        local_ranks: 1,
        threads: 1,
        gpu: Some(gpu.clone()),
        lease: None,
        job_dir: folder.path().join("job"),
        stop_within_secs: STOP_WITHIN_SECS,
    };
    fs::create_dir_all(config.attempt_dir()).expect("a folder");
    fs::create_dir_all(config.checkpoints_dir()).expect("a folder");
    let file = |extension| rank_file(&config.attempt_dir(), 0, extension);
    fs::write(file("json"), serde_json::to_vec(&config).expect("JSON")).expect("the configuration");
    File::create(file("stderr")).expect("the output");
    let mut used = start_spare(&gpu);
    let path = file("json");
    used.stdin
        .take()
        .expect("a pipe")
        .write_all(path.as_os_str().as_bytes())
        .expect("the file's path is written");
    let status = used.wait().expect("its status");
    let printed = fs::read_to_string(file("stderr")).expect("its output");
    assert_eq!(status.code(), Some(EXIT_FINISHED), "{printed}");
    let checkpoints = checkpoint::list(&config.checkpoints_dir()).expect("checkpoints");
    assert_eq!(checkpoints.len(), 1, "{printed}");
}
