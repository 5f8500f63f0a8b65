//! What a job needs beside slots: its dataset and the checkpoint that it begins from.

use crate::{
    app::App,
    lifecycle,
    store::{JobRow, Result},
};
use lockstep_protocol::{
    agent::AllowedFolders,
    dataset::Dataset,
    job::{Job, JobId},
    reason::{Facts, Reason, ReasonCode},
    spec::JobSpec,
};
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// What a job needs is there.
pub(super) struct Needs {
    /// With the folder of its checkpoint in the place of that one's id.
    pub(super) spec: JobSpec,
    /// Where its dataset is.
    pub(super) dataset_path: String,
    /// The dataset's fingerprint when it was registered.
    pub(super) registered: Option<Value>,
    /// The checkpoint's id, where `model.pretrained` is one.
    pub(super) pretrained: Option<String>,
    /// Where the file may be that `model.pretrained` names.
    pub(super) weights_in: Option<AllowedFolders>,
    /// Where the dataset may be.
    pub(super) dataset_in: Option<AllowedFolders>,
}

/// The datasets of jobs, by name; each is looked for once.
pub(super) async fn datasets<'a>(
    app: &App,
    jobs: impl IntoIterator<Item = &'a Job>,
) -> Result<HashMap<String, Dataset>> {
    let mut found = HashMap::new();
    let names: HashSet<&str> = jobs.into_iter().map(|job| job.spec.data.dataset.as_str()).collect();
    for name in names {
        if let Some(dataset) = app.store.dataset(name).await? {
            found.insert(name.to_owned(), dataset);
        }
    }
    Ok(found)
}

/// Looks for what a job needs; why it cannot start, if something is gone.
pub(super) async fn needs(
    app: &App,
    job: &Job,
    datasets: &HashMap<String, Dataset>,
) -> Result<std::result::Result<Needs, Reason>> {
    let Some(dataset) = datasets.get(&job.spec.data.dataset) else {
        let facts = Facts { dataset: Some(job.spec.data.dataset.clone()), ..Facts::default() };
        return Ok(Err(Reason::new(ReasonCode::DatasetMissing, facts)));
    };
    let mut spec = job.spec.clone();
    let pretrained = spec.model.pretrained.clone().filter(|given| is_checkpoint_id(given));
    if let Some(given) = &pretrained {
        let Some(row) = app.store.checkpoint(given).await? else {
            let facts = Facts { checkpoint: Some(given.clone()), ..Facts::default() };
            return Ok(Err(Reason::new(ReasonCode::CheckpointMissing, facts)));
        };
        spec.model.pretrained = Some(app.checkpoint_dir(&row).to_string_lossy().into_owned());
    }
    let not_allowed = |detail: String| {
        let facts = Facts { detail: Some(detail), ..Facts::default() };
        Ok(Err(Reason::new(ReasonCode::PathNotAllowed, facts)))
    };
    if let Err(detail) = app.dataset_roots.check_registered(&dataset.path).await {
        return not_allowed(format!("data.dataset: {detail}"));
    }
    let mut weights_in = None;
    if let Some(path) = job.spec.model.pretrained.as_deref().filter(|_| pretrained.is_none()) {
        if let Err(detail) = app.dataset_roots.check_weights_again(path).await {
            return not_allowed(format!("model.pretrained: {detail}"));
        }
        weights_in = app.dataset_roots.allowed_weights(path);
    }
    Ok(Ok(Needs {
        spec,
        dataset_path: dataset.path.clone(),
        registered: dataset.info.fingerprint.clone(),
        pretrained,
        weights_in,
        dataset_in: app.dataset_roots.allowed(),
    }))
}

/// A job fails without a start.
pub(super) async fn fail(app: &App, job: &JobId, why: Reason) -> Result<()> {
    let fail = move |row: &mut JobRow| lifecycle::cannot_start(row, &why, crate::now());
    let changed = app.store.change_job(job, Box::new(fail)).await?;
    app.announce(&changed);
    Ok(())
}

/// Whether `model.pretrained` is a checkpoint's id, and no path.
pub(crate) fn is_checkpoint_id(given: &str) -> bool {
    given.get(..27).is_some_and(|id| id.parse::<JobId>().is_ok()) && given.as_bytes().get(27) == Some(&b'-')
}
