//! Presets of the form.

use super::form::{DEFAULTS, Form};
use lockstep_protocol::dataset::{Dataset, DatasetInfo};

/// A preset of the form.
pub(super) struct Preset {
    pub(super) key: &'static str,
    pub(super) title: &'static str,
    pub(super) about: &'static str,
    /// Side in pixels, channels and number of classes. A dataset with another name is recognised by these properties of its pictures.
    pub(super) pictures: (u32, u32, usize),
    /// Maximum number of ranks. Fewer ranks are used if there are fewer slots.
    pub(super) ranks: u32,
    /// Values that differ from the defaults.
    pub(super) values: &'static [(&'static str, &'static str)],
}

pub(super) const PRESETS: [Preset; 3] = [
    Preset {
        key: "fashion-mnist",
        title: "Fashion-MNIST, quick start",
        about: "ResNet-20, 5 epochs, about a minute on two CPU cores",
        pictures: (28, 1, 10),
        ranks: 2,
        values: &[
            ("name", "fashion-resnet20"),
            ("model.arch", "resnet20"),
            ("data.dataset", "fashion-mnist"),
            ("train.epochs", "5"),
            ("data.crop_padding", "2"),
            ("train.global_batch_size", "64"),
            ("train.optimizer", "nesterov"),
            ("train.lr", "0.1"),
            ("train.weight_decay", "0.0005"),
            ("train.schedule", "one_cycle"),
        ],
    },
    Preset {
        key: "cifar10",
        title: "CIFAR-10, one cycle",
        about: "ResNet-18, 16 epochs, made for a GPU",
        pictures: (32, 3, 10),
        ranks: 4,
        values: &[
            ("name", "cifar-resnet18"),
            ("model.arch", "resnet18"),
            ("data.dataset", "cifar10"),
            ("train.epochs", "16"),
            ("train.global_batch_size", "512"),
            ("train.optimizer", "nesterov"),
            ("train.lr", "0.4"),
            ("train.weight_decay", "0.0005"),
            ("train.schedule", "one_cycle"),
            ("train.label_smoothing", "0.1"),
        ],
    },
    Preset {
        key: "tutorial",
        title: "The distributed tutorial",
        about: "ResNet-50 at 224 pixels on CIFAR-10, batch 32 per rank, 10 epochs",
        pictures: (32, 3, 10),
        ranks: 8,
        values: &[
            ("name", "tutorial-resnet50"),
            ("model.arch", "resnet50"),
            ("data.dataset", "cifar10"),
            ("data.image_size", "224"),
            ("train.epochs", "10"),
            ("train.batch_size", "32"),
            ("train.lr", "0.01"),
            ("train.momentum", "0.9"),
        ],
    },
];

impl Preset {
    /// Returns the registered dataset for the preset: by name, otherwise the first dataset with the preset's kind of pictures.
    pub(super) fn dataset<'a>(&self, datasets: &'a [Dataset]) -> Option<&'a str> {
        let has_name = |d: &&Dataset| self.values.contains(&("data.dataset", d.name.as_str()));
        let fits = |d: &&Dataset| {
            let DatasetInfo { height, width, channels, classes, .. } = &d.info;
            height == width && (*height, *channels, classes.len()) == self.pictures
        };
        let found = datasets.iter().find(has_name).or_else(|| datasets.iter().find(fits));
        found.map(|d| d.name.as_str())
    }
}

pub(super) fn preset_form(preset: &Preset, slots: u32, datasets: &[Dataset]) -> Form {
    let mut form = DEFAULTS.clone();
    form.set("parallel.ranks", preset.ranks.min(slots).max(1).to_string());
    for (key, value) in preset.values {
        form.set(key, *value);
    }
    if let Some(dataset) = preset.dataset(datasets) {
        form.set("data.dataset", dataset);
    }
    form
}
