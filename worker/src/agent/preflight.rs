//! The check before the ranks of an attempt are started. A job that fails at once with a reason is better than a job
//! that hangs or fails an hour later.

pub(super) mod dataset;

use super::{
    size::{megabytes_down, megabytes_up},
    state_dir::StoredAttempt,
};
use lockstep_engine::{SharedMemory, net, registry, slots};
use lockstep_host::{gpu::RankGpu, usage::disk_free};
use lockstep_protocol::spec::JobSpec;
use std::{path::Path, sync::atomic::AtomicBool};

/// Disk space for everything but checkpoints: records and logs.
const OTHER_BYTES: u64 = 16 << 20;

/// Why ranks are not started, with the message for the user: what is wrong, and what to change.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Refusal {
    DatasetUnusable(String),
    DiskFull(String),
    SharedMemoryTooSmall(String),
    /// The next attempt continues from another checkpoint.
    CheckpointDamaged(String),
    NotStarted(String),
}

/// Checks the dataset (in a process of `program`), the disk and the space in shared memory. Unreadable files are left to the
/// ranks, which know whether the job can do without them (`data.broken_files`). `devices` are the ranks' devices, empty for
/// ranks on CPU cores. `machine` is the agent's name.
///
/// # Errors
/// What is wrong, and what to change.
pub(super) fn check(
    stored: &StoredAttempt,
    program: &Path,
    devices: &[String],
    cancelled: &AtomicBool,
    machine: &str,
) -> Result<(), Refusal> {
    let start = &stored.start;
    dataset::check(stored, program, cancelled, machine).map_err(Refusal::DatasetUnusable)?;
    check_disk(stored, &start.spec).map_err(Refusal::DiskFull)?;
    let gpu = (!devices.is_empty()).then(|| RankGpu { ordinal: 0, visible: devices.to_vec() });
    let backend = registry::device_of(gpu.as_ref(), start.spec.parallel.device).backend;
    let ranks = start.ranks.len();
    let SharedMemory { bytes, library } = backend.shared_memory(&start.spec, ranks);
    match disk_free(Path::new("/dev/shm")) {
        Ok(free) if free < bytes => Err(Refusal::SharedMemoryTooSmall(format!(
            "/dev/shm has {} free, and {ranks} ranks of {library} need {}; in a container raise --shm-size",
            megabytes_down(free),
            megabytes_up(bytes)
        ))),
        _ => Ok(()),
    }
}

/// Checks that the disk has space for the checkpoints that will be kept.
fn check_disk(stored: &StoredAttempt, spec: &JobSpec) -> Result<(), String> {
    let side = spec.data.effective_validation_size().unwrap_or(32) as usize;
    // An estimate: 32 x 32 pixels if the dataset determines the size, 3 channels and 1000 classes. Rank 0 reports errors in the model.
    let Ok(network) = net::build(&spec.model, side, 3, 1000) else { return Ok(()) };
    let values: usize = network.parameters().iter().map(net::Parameter::len).sum();
    // Weights, the slots of the optimizer, and possibly an average, in float32.
    let tensors = 1 + slots(spec.train.optimizer).len() + usize::from(spec.train.ema_decay > 0.0);
    let checkpoint_bytes = values as u64 * 4 * tensors as u64;
    let existing = crate::checkpoint::list(&stored.checkpoints_dir()).map_or(0, |all| all.len() as u64);
    // The checkpoints to keep, the best checkpoint, and the checkpoint that is being written.
    let missing = (u64::from(spec.checkpoint.keep.max(2)) + 2).saturating_sub(existing).max(2);
    let needed = checkpoint_bytes * missing + OTHER_BYTES;
    match disk_free(&stored.job_dir) {
        Ok(free) if free < needed => Err(format!(
            "the disk of {} has {} free, and the job needs {} ({missing} checkpoints of {}, and {} for records and logs); free some \
             space and retry the job, or submit it again with a lower checkpoint.keep (at least 2)",
            stored.job_dir.display(),
            megabytes_down(free),
            megabytes_up(needed),
            megabytes_up(checkpoint_bytes),
            megabytes_up(OTHER_BYTES)
        )),
        _ => Ok(()),
    }
}
