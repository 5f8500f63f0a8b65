//! The registered datasets and the form that registers one.

use crate::{
    layout::CurrentUser,
    numbers::{count, plural},
};
use askama::Template;
use lockstep_protocol::dataset::Dataset;
use std::collections::HashSet;

/// The content of the form and its mistakes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DatasetForm {
    pub name: String,
    pub path: String,
    /// Mistake in the name.
    pub name_error: Option<String>,
    /// Mistake in the path.
    pub path_error: Option<String>,
}

/// `GET /datasets`, and the response to a `POST /datasets` with mistakes.
#[derive(Debug, Clone, Template)]
#[template(path = "datasets.html")]
pub struct DatasetsPage {
    /// All datasets, sorted by name.
    pub datasets: Vec<Dataset>,
    /// Names of datasets that the user may remove.
    pub changeable: HashSet<String>,
    /// Whether the user may register folders.
    pub may_add: bool,
    /// Content of the form. Empty unless it has a mistake.
    pub form: DatasetForm,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

impl DatasetsPage {
    fn cards(&self) -> Vec<DatasetCard<'_>> {
        self.datasets.iter().map(DatasetCard::new).collect()
    }
}

struct DatasetCard<'a> {
    dataset: &'a Dataset,
    format: &'static str,
    /// Size and colours of the pictures: `28 × 28, grey`.
    pictures: String,
    class_count: String,
    normalisation: String,
    /// For each class, its name and its number of samples in each split.
    classes: Vec<(&'a str, Vec<String>)>,
    /// Number of the classes that are not listed.
    unlisted_count: usize,
}

impl<'a> DatasetCard<'a> {
    /// Maximum number of classes that are listed (ImageNet has a thousand). Further classes are only counted.
    const CLASSES_SHOWN: usize = 100;
    /// Maximum number of classes for which the list of classes is open at first.
    const FEW_CLASSES: usize = 12;

    fn new(dataset: &'a Dataset) -> Self {
        let info = &dataset.info;
        let numbers = |v: &[f32]| v.iter().map(|x| format!("{x:.4}")).collect::<Vec<_>>().join(", ");
        let classes = info.classes.iter().enumerate().take(Self::CLASSES_SHOWN);
        Self {
            dataset,
            format: match info.format.as_str() {
                "cifar10" => "CIFAR-10 binary",
                "cifar100" => "CIFAR-100 binary",
                "idx" => "IDX",
                "image_folder" => "image folders",
                "webdataset" => "WebDataset shards",
                "parquet" => "Parquet files",
                _ => "unknown format",
            },
            pictures: match (info.width, info.height) {
                (0, _) | (_, 0) => "pictures of different sizes".into(),
                (w, h) => format!("{w} × {h}, {}", if info.channels == 1 { "grey" } else { "colour" }),
            },
            class_count: plural(info.classes.len() as u64, "class"),
            normalisation: format!("mean {} · std {}", numbers(&info.mean), numbers(&info.std)),
            classes: classes
                .map(|(i, name)| {
                    let samples = |s: &lockstep_protocol::dataset::SplitInfo| {
                        s.per_class.get(i).map(|n| count(*n)).unwrap_or_default()
                    };
                    (name.as_str(), info.splits.iter().map(samples).collect())
                })
                .collect(),
            unlisted_count: info.classes.len().saturating_sub(Self::CLASSES_SHOWN),
        }
    }

    /// Returns the path of a file within the dataset's folder, or the whole path if the file is elsewhere, such as in an agent's copy.
    fn path_within<'f>(&self, file: &'f str) -> &'f str {
        let inner = file.strip_prefix(self.dataset.path.as_str()).and_then(|rest| rest.strip_prefix('/'));
        inner.unwrap_or(file)
    }

    fn has_few_classes(&self) -> bool {
        self.dataset.info.classes.len() <= Self::FEW_CLASSES
    }

    fn splits(&self) -> Vec<(&'a str, String)> {
        self.dataset.info.splits.iter().map(|s| (s.name.as_str(), count(s.samples))).collect()
    }
}
