//! The list of registered models, and the page of a model with its versions.

use crate::{layout::CurrentUser, numbers::plural};
use askama::Template;
use lockstep_protocol::{
    inspect::trained_mark,
    job::JobId,
    models::{Model, ModelVersion},
};
use std::collections::HashMap;

/// Number of characters of a fingerprint that are shown.
const FINGERPRINT_CHARS: usize = 12;

/// `GET /models`.
#[derive(Debug, Clone, Template)]
#[template(path = "models.html")]
pub struct ModelsPage {
    /// All models, sorted by name.
    pub models: Vec<Model>,
    /// For jobs that were validated on training pictures of their initial weights: a sentence that says so.
    pub trained_validation: HashMap<JobId, String>,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

/// `GET /models/{name}`.
#[derive(Debug, Clone, Template)]
#[template(path = "model.html")]
pub struct ModelPage {
    /// The model's name.
    pub name: String,
    /// Newest first; never empty.
    pub versions: Vec<ModelVersion>,
    /// As in [`ModelsPage`].
    pub trained_validation: HashMap<JobId, String>,
    /// Whether the user may move aliases and remove versions.
    pub may_change: bool,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

impl ModelPage {
    fn version_count(&self) -> String {
        plural(self.versions.len() as u64, "version")
    }
}

/// Returns the validation accuracy, or a dash for a checkpoint without validation.
fn accuracy(version: &ModelVersion) -> String {
    version.accuracy_in_words().unwrap_or_else(|| "–".into())
}

/// Returns the beginning of the dataset's fingerprint, and the whole fingerprint.
fn fingerprint(version: &ModelVersion) -> Option<(String, String)> {
    let hash = &version.dataset_fingerprint.as_ref()?.fingerprint.sha256;
    Some((hash.chars().take(FINGERPRINT_CHARS).collect(), hash.clone()))
}

/// Returns the programs that wrote the checkpoint, with their versions: `lockstep 0.1.0`.
fn programs(version: &ModelVersion) -> String {
    version.programs.iter().map(|(name, version)| format!("{name} {version}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::dataset::{DatasetNote, PicturesFingerprint};

    #[test]
    fn texts_are_escaped_and_only_owners_see_buttons() {
        let version = ModelVersion {
            model: "shoes".into(),
            version: 2,
            aliases: vec!["champion".into()],
            checkpoint: "j1-3-90".into(),
            job: lockstep_protocol::JobId::generate(),
            job_name: "<i>job</i>".into(),
            project: "default".into(),
            val_accuracy: Some(0.5),
            val_loss: None,
            validation: None,
            sharded: false,
            dataset: "pets".into(),
            dataset_fingerprint: Some(DatasetNote {
                fingerprint: PicturesFingerprint { sha256: "0123456789abcdef".into(), ..Default::default() },
                machine: None,
            }),
            programs: [("lockstep".into(), "0.1.0".into())].into(),
            description: "<b>fine</b>".into(),
            registered_by: Some("ada".into()),
            registered_at: jiff::Timestamp::UNIX_EPOCH,
        };
        let models = Model::of(vec![version.clone()]).into_iter().collect();
        let sentence =
            "3 of the 8 validation pictures were training pictures of the run that the weights are from.";
        let trained_validation = HashMap::from([(version.job.clone(), sentence.to_owned())]);
        let list =
            ModelsPage { models, trained_validation: trained_validation.clone(), user: CurrentUser::NOBODY };
        let list = list.render().expect("renders");
        assert!(
            list.contains("href=\"/models/shoes\"")
                && list.contains("champion")
                && list.contains("50.0 %<br><span class=\"small\" title=\"3 of"),
            "{list}"
        );
        let page = |may_change, sharded| {
            let versions = vec![ModelVersion { sharded, ..version.clone() }];
            let trained_validation = trained_validation.clone();
            let page = ModelPage {
                name: "shoes".into(),
                versions,
                trained_validation,
                may_change,
                user: CurrentUser::NOBODY,
            };
            page.render().expect("renders")
        };
        let html = page(true, false);
        assert!(!html.contains("<b>fine") && !html.contains("<i>job"), "{html}");
        for part in [
            "models:/shoes/2",
            "title=\"3 of the 8 validation pictures were training pictures of the run that the weights are from.\">3 trained on</span>",
            "3-90",
            "0123456789ab<",
            "lockstep 0.1.0",
            "?tab=classify&amp;checkpoint=j1-3-90\"",
            "&amp;set=model.pretrained=models:/shoes/2\"",
            "href=\"/api/v1/checkpoints/j1-3-90/model.safetensors\" download",
            "href=\"/api/v1/checkpoints/j1-3-90/model.onnx\" download",
            "data-unset=\"champion\"",
            "id=\"alias\"",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        let html = page(false, true);
        for part in ["data-unset", "id=\"alias\"", "model.safetensors"] {
            assert!(!html.contains(part), "{part}: {html}");
        }
    }
}
