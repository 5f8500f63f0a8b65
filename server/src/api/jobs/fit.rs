//! Checks whether a checkpoint fits a job before the job starts from the checkpoint. The header of the checkpoint's weights lists the
//! classes of its training, and the database has the dataset's classes. No dataset is opened.

use crate::api::prelude::*;
use crate::{checkpoints::Checkpoints, util::regular_files};
use lockstep_protocol::{
    Job, JobSpec, JobState,
    checkpoint_files::{self, MODEL},
    dataset::{Dataset, classes_differ},
    numbers::plural,
    spec::SpecError,
};
use std::{
    collections::HashMap,
    fs,
    io::{self, Read},
    path::Path,
};

/// Maximum size of a header, in bytes. Usual headers have a few kilobytes.
const HEADER_BYTES: u64 = 16 << 20;

/// Properties of the pictures that a checkpoint was trained on.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TrainingPictures {
    classes: Vec<String>,
    channels: u32,
    image_size: u32,
}

/// The beginning of a safetensors file (<https://github.com/huggingface/safetensors#format>).
#[derive(Deserialize)]
struct Header {
    #[serde(rename = "__metadata__", default)]
    metadata: HashMap<String, String>,
}

impl TrainingPictures {
    /// Reads the properties from a checkpoint's folder; `None` if they cannot be read. The ranks then check the checkpoint.
    pub(crate) async fn of(folder: &Path) -> Option<Self> {
        let folder = folder.to_owned();
        let metadata = tokio::task::spawn_blocking(move || checkpoint_metadata(&folder)).await.ok()?.ok()?;
        let number = |key: &str| metadata.get(key)?.parse().ok();
        Some(Self {
            classes: serde_json::from_str(metadata.get("classes")?).ok()?,
            channels: number("channels")?,
            image_size: number("image_size")?,
        })
    }
}

/// Returns the reason if a checkpoint cannot be evaluated on `dataset`, because classes or channels differ.
pub(crate) fn why_not_evaluable(trained: &TrainingPictures, dataset: &Dataset) -> Option<String> {
    let (name, info) = (&dataset.name, &dataset.info);
    if let Some(difference) = classes_differ(&trained.classes, &info.classes) {
        return Some(format!(
            "the model was trained on other classes than {name} has: {difference}. Give a dataset whose folder train/ has a folder for \
             each class of the model (other splits may lack classes), or evaluate by nearest neighbours, for which classes may differ \
             (`lockstep evaluate --knn 20`)"
        ));
    }
    (trained.channels != info.channels).then(|| {
        format!(
            "the model was trained on pictures of {}, but pictures of {name} have {}",
            plural(trained.channels.into(), "channel"),
            info.channels
        )
    })
}

/// Returns the mistakes if `spec` on `dataset` does not fit a checkpoint of a job with the specification `source`. If the properties of the
/// checkpoint are unknown (`trained` is `None`), only the specifications are compared.
pub(crate) fn mistakes(
    trained: Option<&TrainingPictures>,
    source: &JobSpec,
    spec: &JobSpec,
    dataset: &Dataset,
) -> Vec<SpecError> {
    let mut mistakes = Vec::new();
    let mut mistake = |pointer: &str, detail: String| {
        let advice = match pointer {
            "/model/arch" => "begin a new job for another network",
            _ => "a new job with model.pretrained uses the weights that fit",
        };
        let detail = format!("does not fit the checkpoint: {detail}; {advice}");
        mistakes.push(SpecError { pointer: pointer.into(), detail });
    };
    if spec.model.arch != source.model.arch {
        let (new, old) = (spec.model.arch.as_str(), source.model.arch.as_str());
        mistake("/model/arch", format!("the checkpoint's network is {old}, not {new}"));
    }
    let other_stem =
        |old: &str, new: &str| format!("the checkpoint's network has the {old} stem, not the {new} stem");
    let Some(trained) = trained else {
        if spec.model.stem != source.model.stem {
            mistake("/model/stem", other_stem(source.model.stem.as_str(), spec.model.stem.as_str()));
        }
        return mistakes;
    };
    let (name, info) = (&dataset.name, &dataset.info);
    if let Some(difference) = classes_differ(&trained.classes, &info.classes) {
        mistake(
            "/data/dataset",
            format!("{name} has other classes than the checkpoint was trained on ({difference})"),
        );
    }
    if trained.channels != info.channels {
        let (channels, new) = (plural(trained.channels.into(), "channel"), info.channels);
        let detail = format!(
            "the checkpoint was trained on pictures of {channels}, but pictures of {name} have {new}"
        );
        mistake("/data/dataset", detail);
    }
    let trained_size = trained.image_size;
    let size = spec.data.effective_validation_size().unwrap_or(info.height);
    let (trained_stem, stem) =
        (source.model.stem_for(trained_size as usize), spec.model.stem_for(size as usize));
    let (old, new) = (trained_stem.as_str(), stem.as_str());
    if trained_stem != stem && spec.model.stem == source.model.stem {
        let detail = format!(
            "model.stem = \"auto\" means {new:?} at {size} pixels, but {old:?} at {trained_size} pixels, the size at which the checkpoint \
             was trained: set model.stem, too"
        );
        mistake("/data/image_size", detail);
    } else if trained_stem != stem {
        mistake("/model/stem", other_stem(old, new));
    }
    mistakes
}

/// Checks that a job can continue: its dataset is registered and, if it was registered again, still fits the newest checkpoint.
///
/// # Errors
/// The dataset is not registered or does not fit, or the store cannot be read.
pub(crate) async fn check_can_continue(checkpoints: &Checkpoints, caller: &Caller, job: &Job) -> Result<()> {
    // A run from elsewhere has no dataset here. `lifecycle` refuses to continue the run.
    if job.external.is_some() {
        return Ok(());
    }
    let name = &job.spec.data.dataset;
    // A private dataset may have been registered under this name since the job was submitted.
    let is_usable = |dataset: &Dataset| {
        !dataset.private || (job.spec.private && caller.sees(dataset.private, dataset.owner.as_deref()))
    };
    let Some(dataset) = checkpoints.store.dataset(name).await?.filter(is_usable) else {
        // `lifecycle` refuses to continue a job in any other state.
        let can_continue = matches!(job.state, JobState::Paused | JobState::Failed | JobState::Cancelled);
        let detail =
            format!("the dataset {name:?} is no longer registered; upload or add it again under this name");
        return if can_continue { Err(Error::invalid("/data/dataset", detail)) } else { Ok(()) };
    };
    let Some(newest) = checkpoints.store.checkpoints(&job.id).await?.into_iter().next() else {
        return Ok(());
    };
    let trained = TrainingPictures::of(&checkpoints.folder(&newest)).await;
    check_mistakes(mistakes(trained.as_ref(), &job.spec, &job.spec, &dataset))
}

/// Reads the metadata of a checkpoint's weights. Each part of sharded weights has all metadata, so any part is sufficient.
fn checkpoint_metadata(folder: &Path) -> io::Result<HashMap<String, String>> {
    match file_metadata(&folder.join(MODEL)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut names = fs::read_dir(folder)?.flatten().map(|entry| entry.file_name());
            let is_part = |name: &std::ffi::OsString| {
                name.to_str().is_some_and(|name| {
                    name.starts_with("model-") && checkpoint_files::kind_of(name) == Some(MODEL)
                })
            };
            file_metadata(&folder.join(names.find(is_part).ok_or(error)?))
        }
        read => read,
    }
}

fn file_metadata(path: &Path) -> io::Result<HashMap<String, String>> {
    let mut file = regular_files::open(path)?;
    let mut size = [0; 8];
    file.read_exact(&mut size)?;
    let size = u64::from_le_bytes(size);
    if size > HEADER_BYTES {
        return Err(io::Error::other("not a safetensors file"));
    }
    let mut header = Vec::new();
    file.take(size).read_to_end(&mut header)?;
    let header: Header = serde_json::from_slice(&header)?;
    Ok(header.metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_checkpoint_s_header_is_read_up_to_16_mib() {
        let dir = tempfile::tempdir().unwrap();
        let trained = async |bytes: u64| {
            let header = r#"{"__metadata__": {"classes": "[\"cat\"]", "channels": "3", "image_size": "32"}}"#;
            let mut file = bytes.to_le_bytes().to_vec();
            file.extend_from_slice(header.as_bytes());
            // Headers are padded with spaces.
            file.resize(8 + bytes as usize, b' ');
            std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
            TrainingPictures::of(dir.path()).await
        };
        let found = TrainingPictures { classes: vec!["cat".into()], channels: 3, image_size: 32 };
        assert_eq!(trained(HEADER_BYTES).await, Some(found));
        assert_eq!(trained(HEADER_BYTES + 1).await, None);
    }
}
