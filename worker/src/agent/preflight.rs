//! The check before an attempt's ranks are started: a reason on the job is better than a job that hangs or fails an hour later.

use super::state_dir::StoredAttempt;
use crate::{
    data::fingerprint::{self, Fingerprint},
    engine::{SharedMemory, registry, slots},
    gpu::RankGpu,
    host::write_whole,
    inspect, net,
};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest},
    dataset::PicturesFingerprint,
    reason::ReasonCode,
    spec::JobSpec,
};
use serde::{Deserialize, Serialize};
use std::{
    fmt::Display,
    fs,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

/// Disk space for everything but checkpoints: records and logs.
const OTHER_BYTES: u64 = 16 << 20;

/// Why ranks are not started.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Refusal {
    pub(super) code: ReasonCode,
    /// For people: what is wrong, and what to change.
    pub(super) detail: String,
}

impl Refusal {
    /// A refusal without a code of its own.
    pub(super) fn other(detail: String) -> Self {
        Self { code: ReasonCode::NotStarted, detail }
    }
}

/// Checks the dataset (in a process of `program`), the disk and, for ranks on `devices`, shared memory. Files that cannot be
/// read are left to the ranks, which know whether the job can do without them (`data.broken_files`).
///
/// # Errors
/// What is wrong, and what to change.
pub(super) fn check(
    stored: &StoredAttempt,
    program: &Path,
    devices: &[String],
    cancelled: &AtomicBool,
) -> Result<(), Refusal> {
    let start = &stored.start;
    let refusal = |code: ReasonCode| move |detail: String| Refusal { code, detail };
    dataset(stored, program, Path::new(&start.dataset_path), cancelled)
        .map_err(refusal(ReasonCode::DatasetUnusable))?;
    disk(stored, &start.spec).map_err(refusal(ReasonCode::DiskFull))?;
    let given = (!devices.is_empty()).then(|| RankGpu { ordinal: 0, visible: devices.to_vec() });
    let backend = registry::device_of(given.as_ref(), start.spec.parallel.device).backend;
    let ranks = start.ranks.len();
    let SharedMemory { bytes, library } = backend.shared_memory(&start.spec, ranks);
    match free_bytes(Path::new("/dev/shm")) {
        Some(free) if free < bytes => Err(refusal(ReasonCode::SharedMemoryTooSmall)(format!(
            "/dev/shm has {} free, and {ranks} ranks of {library} need {}; in a container raise --shm-size",
            megabytes(free),
            megabytes(bytes)
        ))),
        _ => Ok(()),
    }
}

/// The dataset's fingerprint from the job's first start (`dataset.json`), in whichever form it was taken then.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum StoredFingerprint {
    /// A fingerprint of all files, computed by reading them.
    Files(Fingerprint),
    /// A fingerprint of the pictures, from their index.
    Pictures(PicturesFingerprint),
}

impl StoredFingerprint {
    fn files_and_bytes(&self) -> (u64, u64) {
        match self {
            StoredFingerprint::Files(found) => (found.files, found.bytes),
            StoredFingerprint::Pictures(found) => (found.pictures, found.picture_bytes),
        }
    }
}

/// Checks that the dataset can be read and is the one that the job began with.
fn dataset(
    stored: &StoredAttempt,
    program: &Path,
    path: &Path,
    cancelled: &AtomicBool,
) -> Result<(), String> {
    let wrong = |e: &dyn Display| format!("the dataset {e}; bring it back and retry the job");
    let by_files = || Fingerprint::of(path, cancelled).map(StoredFingerprint::Files).map_err(|e| wrong(&e));
    // A process that died says nothing about the dataset, and the note is compared for the job's whole life.
    let not_examined =
        |e: String| format!("the dataset {} was not examined: {e}; retry the job", path.display());
    // A job's first start examines each file, so that ranks need not; later ones examine folders.
    let by_pictures = |known: bool| {
        let request = AgentRequest::Fingerprint { path: path.display().to_string(), known };
        match inspect::request_blocking(program, &request, cancelled).map_err(not_examined)? {
            Ok(AgentReply::Fingerprint { found }) => Ok(Ok(found.map(StoredFingerprint::Pictures))),
            Ok(_) => Err(not_examined("the inspecting process gave another kind of reply".into())),
            Err(detail) => Ok(Err(detail)),
        }
    };
    let note = stored.job_dir.join("dataset.json");
    let before =
        fs::read(&note).ok().and_then(|text| serde_json::from_slice::<StoredFingerprint>(&text).ok());
    let found = match &before {
        Some(StoredFingerprint::Files(_)) => by_files()?,
        Some(StoredFingerprint::Pictures(_)) => match by_pictures(true)? {
            Ok(found) => found.map_or_else(by_files, Ok)?,
            Err(detail) => return Err(wrong(&format!("{}: {detail}", path.display()))),
        },
        // A path that is no dataset is left to the ranks, which say why.
        None if fingerprint::has_pictures(path) => match by_pictures(false)? {
            Ok(Some(found)) => found,
            Ok(None) => by_files()?,
            // A pattern of shards is no file.
            Err(detail) => by_files().map_err(|_| wrong(&format!("{}: {detail}", path.display())))?,
        },
        None => by_files()?,
    };
    match before {
        Some(before) if before != found => Err(format!(
            "the dataset {} is not what the job began with: {} files of {} now, {} of {} then, or other content; \
             bring the old one back and retry the job, or submit a new one",
            path.display(),
            found.files_and_bytes().0,
            megabytes(found.files_and_bytes().1),
            before.files_and_bytes().0,
            megabytes(before.files_and_bytes().1)
        )),
        Some(_) => Ok(()),
        // Nobody waits for this check any more, and another may have begun.
        None if cancelled.load(Ordering::Relaxed) => Err("cancelled".into()),
        None => {
            let text = serde_json::to_vec(&found).map_err(|e| e.to_string())?;
            // Agents of one attempt may share the job's folder and be here at the same moment, with the same to say.
            let first = start_rank(stored);
            let own = stored.job_dir.join(format!("dataset.{first}.json"));
            write_whole(&own, &text).and_then(|()| fs::rename(&own, &note)).map_err(|e| e.to_string())
        }
    }
}

/// The first of the attempt's ranks here: no other agent has it.
fn start_rank(stored: &StoredAttempt) -> u32 {
    stored.start.ranks.iter().map(|(rank, _)| *rank).min().unwrap_or(0)
}

/// Whether the disk has space for the checkpoints that will be kept.
fn disk(stored: &StoredAttempt, spec: &JobSpec) -> Result<(), String> {
    let side = spec.data.evaluation_size().unwrap_or(32) as usize;
    // Rank 0 knows the dataset's classes and reports what is wrong with the model, if anything is.
    let Ok(network) = net::build(&spec.model, side, 3, 1000) else { return Ok(()) };
    let values: usize = network.parameters().iter().map(net::Parameter::len).sum();
    // Weights, the optimizer's slots, and perhaps an average, float32.
    let tensors = 1 + slots(spec.train.optimizer).len() + usize::from(spec.train.ema_decay > 0.0);
    let each = values as u64 * 4 * tensors as u64;
    let kept = crate::checkpoint::list(&stored.job_dir.join("checkpoints")).map_or(0, |all| all.len() as u64);
    // The kept ones, the best one, and the one that is being written.
    let missing = (u64::from(spec.checkpoint.keep.max(2)) + 2).saturating_sub(kept).max(2);
    let needed = each * missing + OTHER_BYTES;
    match free_bytes(&stored.job_dir) {
        Some(free) if free < needed => Err(format!(
            "the disk of {} has {} free, and the job needs {} ({missing} checkpoints of {}); free some space or lower \
             checkpoint.keep, and retry the job",
            stored.job_dir.display(),
            megabytes(free),
            megabytes(needed),
            megabytes(each)
        )),
        _ => Ok(()),
    }
}

fn free_bytes(path: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(path).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

fn megabytes(bytes: u64) -> String {
    format!("{:.0} MB", bytes as f64 / 1e6)
}
