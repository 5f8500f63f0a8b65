//! The requirements of a job in addition to slots: its dataset, and the checkpoint or weights from which it begins.

use crate::{
    lifecycle,
    scheduler::Scheduler,
    store::{JobRow, Result},
};
use lockstep_protocol::{
    agent::StartFiles,
    dataset::Dataset,
    job::{Job, JobId},
    reason::{Reason, ReasonKind},
    spec::{JobSpec, KNOWN_WEIGHTS},
};
use std::collections::{HashMap, HashSet};

/// The requirements of a job.
pub(super) struct Needs {
    /// The job's specification, with the folder of a pretrained checkpoint instead of its id.
    pub(super) spec: JobSpec,
    /// The dataset's path.
    pub(super) dataset_path: String,
    /// The files of the order to start, without the fields about the job's folder.
    pub(super) files: StartFiles,
}

/// The datasets of jobs, by name. Each dataset is read once.
pub(super) async fn read_datasets<'a>(
    scheduler: &Scheduler,
    jobs: impl IntoIterator<Item = &'a Job>,
) -> Result<HashMap<String, Dataset>> {
    let mut found = HashMap::new();
    let names: HashSet<&str> = jobs.into_iter().map(|job| job.spec.data.dataset.as_str()).collect();
    for name in names {
        if let Some(dataset) = scheduler.store.dataset(name).await? {
            found.insert(name.to_owned(), dataset);
        }
    }
    Ok(found)
}

/// Finds a job's requirements, or the reason why it cannot start.
pub(super) async fn find_needs(
    scheduler: &Scheduler,
    job: &Job,
    datasets: &HashMap<String, Dataset>,
) -> Result<std::result::Result<Needs, Reason>> {
    let Some(dataset) = datasets.get(&job.spec.data.dataset) else {
        let dataset = job.spec.data.dataset.as_str().into();
        return Ok(Err(ReasonKind::DatasetMissing { dataset }.into()));
    };
    let mut spec = job.spec.clone();
    let pretrained = spec.model.pretrained.clone().filter(|given| is_checkpoint_id(given));
    if let Some(given) = &pretrained {
        let Some(row) = scheduler.store.checkpoint(given).await? else {
            let checkpoint = given.as_str().into();
            return Ok(Err(ReasonKind::CheckpointMissing { checkpoint }.into()));
        };
        spec.model.pretrained = Some(scheduler.checkpoints.folder(&row).to_string_lossy().into_owned());
    }
    let not_allowed = |detail: String| Ok(Err(ReasonKind::PathNotAllowed { detail: detail.into() }.into()));
    if let Err(detail) = scheduler.datasets.roots.check_registered(&dataset.path).await {
        return not_allowed(format!("data.dataset: {detail}"));
    }
    let mut weights_in = None;
    let is_path = |given: &&str| pretrained.is_none() && !KNOWN_WEIGHTS.contains(given);
    if let Some(path) = job.spec.model.pretrained.as_deref().filter(is_path) {
        if let Err(detail) = scheduler.datasets.roots.check_weights_again(path).await {
            return not_allowed(format!("model.pretrained: {detail}"));
        }
        weights_in = scheduler.datasets.roots.allowed_weights_folders(path);
    }
    Ok(Ok(Needs {
        spec,
        dataset_path: dataset.path.clone(),
        files: StartFiles {
            registered: dataset.info.fingerprint.clone(),
            pretrained,
            weights_in,
            dataset_in: scheduler.datasets.roots.allowed_folders(),
            ..StartFiles::default()
        },
    }))
}

/// Fails a job that cannot start.
pub(super) async fn fail(scheduler: &Scheduler, job: &JobId, why: Reason) -> Result<()> {
    let fail = move |row: &mut JobRow| lifecycle::fail_to_start(row, &why, crate::now());
    scheduler.events.change_job(job, Box::new(fail)).await.map(drop)
}

/// Whether `model.pretrained` is a checkpoint's id, not a path.
pub(crate) fn is_checkpoint_id(given: &str) -> bool {
    given.get(..27).is_some_and(|id| id.parse::<JobId>().is_ok()) && given.as_bytes().get(27) == Some(&b'-')
}
