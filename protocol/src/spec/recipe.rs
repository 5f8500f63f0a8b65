//! Recipes: named groups of settings. A recipe replaces the defaults of some keys, and a job can override each key. The
//! resolved job is stored and shown, so a later change of a recipe does not change jobs that were submitted before.

use super::{JobSpec, named::words};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

words! {
    /// Named settings. No recipe sets the network, dataset, batch size or number of ranks.
    #[derive(ToSchema)]
    pub enum Recipe: "recipe" {
        /// torchvision's first recipe for ImageNet (the defaults of `references/classification`): 90 epochs; the learning rate is 0.1 for
        /// 256 pictures and falls to a tenth after every 30 epochs. As in later recipes, weight decay excludes batch norm and biases.
        Imagenet = "imagenet",
        /// torchvision's second recipe ("How to Train State-Of-The-Art Models Using TorchVision's Latest Primitives",
        /// 2021): 600 epochs of strong augmentation, trained at 176 pixels and evaluated at 224. Not included: repeated
        /// augmentation. The decay of the weights' moving average is for 1,024 pictures a step.
        Imagenet2021 = "imagenet-2021",
        /// FFCV's ResNet-50 of 16 epochs (`ffcv-imagenet`, `rn50_16_epochs.yaml`): 160 pixels for three quarters of the run, then
        /// 192, evaluated at 256. Not included: blurred convolutions (BlurPool) and test-time augmentation (horizontal flip).
        Fast = "fast",
        /// The CIFAR-10 recipe of He et al. 2015, section 4.2: 64,000 steps of 128 pictures, which are 164 epochs.
        Cifar = "cifar",
        /// CIFAR-10 to 94 % in eight epochs, after Jordan 2024 (arXiv 2404.00498), for `model.arch = "cifarnet"` and 2,000 pictures a step:
        /// Muon, alternating flips, and six views of each picture in evaluation. Difference: the bias of the first convolution trains
        /// during the whole run, not only for three epochs.
        Cifar94 = "cifar-94",
        /// An ordinary ResNet-18 (`model.stem = "cifar"`) on CIFAR-10 in eight epochs of 1,024 pictures a step: Muon and alternating flips.
        CifarFast = "cifar-fast",
        /// Fine-tunes trained weights (`model.pretrained`) on your own pictures: a small learning rate, a few epochs.
        Finetune = "finetune",
    }
}

/// The settings of a recipe.
#[derive(Debug)]
pub struct Settings {
    /// What the recipe is for, in a line.
    pub about: &'static str,
    /// The learning rate, and the pictures of a step to which it applies. A job's learning rate is scaled in proportion.
    pub lr: (f64, f64),
    /// All other keys, nested as in a specification.
    pub keys: Value,
}

/// Mean of ImageNet's pictures. Trained weights of torchvision and timm expect it.
const MEAN: [f64; 3] = [0.485, 0.456, 0.406];
/// Standard deviation of ImageNet's pictures, like [`MEAN`].
const STD: [f64; 3] = [0.229, 0.224, 0.225];

/// `(section, key, other keys)`: if a job gives `key`, the recipe's values of the other keys of the section are left out.
const OVERRIDES: [(&str, &str, &[&str]); 4] = [
    ("train", "steps", &["epochs"]),
    ("data", "image_size", &["validation_size", "resize_size"]),
    ("data", "validation_size", &["resize_size"]),
    ("checkpoint", "every_steps", &["every_epochs"]),
];

impl Recipe {
    pub fn settings(self) -> Settings {
        match self {
            Recipe::Imagenet => Settings {
                about: "torchvision's first recipe for ImageNet: 90 epochs at 224 pixels",
                lr: (0.1, 256.0),
                keys: json!({
                    "data": {
                        "validation": "val", "image_size": 224, "random_resized_crop": true, "horizontal_flip": true,
                        "mean": MEAN, "std": STD,
                    },
                    "train": {
                        "epochs": 90, "optimizer": "momentum", "momentum": 0.9, "weight_decay": 1e-4,
                        "decay_norm_and_bias": false, "schedule": "step", "milestones": [30, 60], "gamma": 0.1,
                    },
                }),
            },
            Recipe::Imagenet2021 => Settings {
                about: "torchvision's second recipe for ImageNet: 600 epochs, strong augmentation",
                lr: (0.5, 1024.0),
                keys: json!({
                    "data": {
                        "validation": "val", "image_size": 176, "validation_size": 224, "resize_size": 232,
                        "random_resized_crop": true, "horizontal_flip": true, "augment": "trivial",
                        "random_erasing": 0.1, "mean": MEAN, "std": STD,
                    },
                    "train": {
                        "epochs": 600, "optimizer": "momentum", "momentum": 0.9, "weight_decay": 2e-5,
                        "decay_norm_and_bias": false, "schedule": "cosine", "warmup_epochs": 5, "label_smoothing": 0.1,
                        "mixup": 0.2, "cutmix": 1.0,
                        // torchvision's 0.99998, adjusted as in its script: 1 - 2e-5 x 1024 pictures x 32 steps / 600 epochs.
                        "ema_decay": 0.9989, "ema_steps": 32,
                    },
                }),
            },
            Recipe::Fast => Settings {
                about: "ImageNet in 16 epochs, as FFCV trains ResNet-50",
                // 512 pictures on each of 8 GPUs.
                lr: (1.7, 4096.0),
                keys: json!({
                    "data": {
                        "validation": "val",
                        "image_size": [[1, 160], [13, 192]],
                        // The crop is 224 / 256 of the short side.
                        "validation_size": 256, "resize_size": 292, "random_resized_crop": true, "horizontal_flip": true,
                        "mean": MEAN, "std": STD,
                    },
                    "train": {
                        "epochs": 16, "optimizer": "momentum", "momentum": 0.9, "weight_decay": 1e-4,
                        // The learning rate rises for 2 of 16 epochs, then falls to 0.
                        "decay_norm_and_bias": false, "schedule": "one_cycle", "pct_start": 0.125, "final_lr_fraction": 0,
                        "label_smoothing": 0.1,
                    },
                }),
            },
            Recipe::Cifar => Settings {
                about: "CIFAR-10 as in He et al. 2015: 164 epochs",
                lr: (0.1, 128.0),
                keys: json!({
                    "data": {"crop_padding": 4, "horizontal_flip": true},
                    "train": {
                        "epochs": 164, "optimizer": "momentum", "momentum": 0.9, "weight_decay": 1e-4,
                        "schedule": "step", "milestones": [82, 123], "gamma": 0.1,
                    },
                }),
            },
            Recipe::Cifar94 => Settings {
                about: "CIFAR-10 to 94 % in eight epochs, with the network cifarnet",
                lr: (0.24, 2000.0),
                keys: json!({
                    "data": {
                        "crop_padding": 2, "reflect_border": true, "horizontal_flip": true, "alternating_flip": true,
                    },
                    "train": {
                        "epochs": 8, "optimizer": "muon", "filter_momentum": 0.6, "momentum": 0.85,
                        // Multiples of lr = 0.24. The publication sums 2,000 losses, with the rates 0.053 (biases) and 0.67 (head, whose
                        // logits it divides by 256). Here losses are averaged (x 2000), and the head's weights contain the 1 / 256 (rate
                        // / 256^2): 0.053 x 2000 / 0.24 and 0.67 x 2000 / 256^2 / 0.24.
                        "bias_lr": 441.7, "head_lr": 0.0852,
                        // The publication decays weights by 2e-6 x 2000 per step, which is lr x weight_decay = 0.24 x 0.01667.
                        "weight_decay": 0.01667, "schedule": "one_cycle", "pct_start": 0, "final_lr_fraction": 0,
                        "label_smoothing": 0.2,
                    },
                    "evaluate": {"every_epochs": 0, "views": 6},
                }),
            },
            Recipe::CifarFast => Settings {
                about: "CIFAR-10 with ResNet-18 in eight epochs",
                lr: (0.1, 1024.0),
                keys: json!({
                    "data": {
                        "crop_padding": 2, "reflect_border": true, "horizontal_flip": true, "alternating_flip": true,
                    },
                    "train": {
                        "epochs": 8, "optimizer": "muon", "filter_momentum": 0.8, "momentum": 0.85, "head_lr": 0.1,
                        "weight_decay": 0.01, "schedule": "one_cycle", "pct_start": 0.1, "final_lr_fraction": 0,
                        "label_smoothing": 0.1,
                    },
                }),
            },
            Recipe::Finetune => Settings {
                about: "your own pictures from trained weights: 10 epochs at 224 pixels",
                lr: (0.01, 256.0),
                keys: json!({
                    "data": {
                        "image_size": 224, "random_resized_crop": true, "horizontal_flip": true, "mean": MEAN, "std": STD,
                        "broken_files": "skip",
                    },
                    "train": {
                        "epochs": 10, "optimizer": "momentum", "momentum": 0.9, "weight_decay": 1e-4,
                        "decay_norm_and_bias": false, "schedule": "cosine", "warmup_epochs": 1,
                    },
                }),
            },
        }
    }

    /// Sets each key that `document` does not give to the recipe's value. The document's keys must have the right
    /// types. The learning rate is left out, because it follows from the job's batch size ([`Recipe::lr_for`]).
    ///
    /// If the job gives another number of epochs, the milestones, the epochs in which sizes begin and the warm-up keep their
    /// shares of the run, but the warm-up is never longer than the recipe's.
    pub(super) fn fill(self, document: &mut Map<String, Value>) {
        let mut keys = self.settings().keys;
        let given = |section: &str, key: &str| document.get(section).is_some_and(|s| s.get(key).is_some());
        if let Some(epochs) = document.get("train").and_then(|train| train["epochs"].as_u64()) {
            let recipe_epochs = keys["train"]["epochs"].as_u64().unwrap_or(epochs);
            if let Some(warmup) = keys["train"]["warmup_epochs"].as_f64() {
                let share = warmup * epochs as f64 / recipe_epochs.max(1) as f64;
                keys["train"]["warmup_epochs"] = warmup.min(share).into();
            }
            if let Some(milestones) = keys["train"]["milestones"].as_array() {
                keys["train"]["milestones"] = scale_epochs(milestones, epochs, recipe_epochs).into();
            }
            if let Some(sizes) = keys["data"]["image_size"].as_array() {
                keys["data"]["image_size"] = scale_sizes(sizes, epochs, recipe_epochs);
            }
        }
        for (section, key, others) in OVERRIDES {
            if given(section, key)
                && let Some(table) = keys[section].as_object_mut()
            {
                others.iter().for_each(|other| drop(table.remove(*other)));
            }
        }
        let Value::Object(sections) = keys else { return };
        for (section, table) in sections {
            let (Value::Object(table), Some(target)) =
                (table, document.entry(section).or_insert_with(|| Value::Object(Map::new())).as_object_mut())
            else {
                continue;
            };
            for (key, value) in table {
                target.entry(key).or_insert(value);
            }
        }
    }

    /// The recipe's learning rate, scaled to the number of pictures in a step of the job.
    pub fn lr_for(self, spec: &JobSpec) -> f64 {
        let (lr, pictures) = self.settings().lr;
        lr * spec.global_batch_size() as f64 / pictures
    }
}

/// Scales milestones from a run of `recipe_epochs` epochs to a run of `epochs` epochs. The results are at least 1, without duplicates.
fn scale_epochs(milestones: &[Value], epochs: u64, recipe_epochs: u64) -> Vec<u64> {
    let old = milestones.iter().filter_map(Value::as_u64);
    let mut scaled: Vec<u64> = old.map(|epoch| (epoch * epochs / recipe_epochs.max(1)).max(1)).collect();
    scaled.dedup();
    scaled
}

/// As [`scale_epochs`], for a schedule of sizes. The first size begins in epoch 1. If two sizes would begin in the
/// same epoch, only the later size is kept.
fn scale_sizes(sizes: &[Value], epochs: u64, recipe_epochs: u64) -> Value {
    let mut scaled: Vec<Value> = Vec::new();
    for (index, entry) in sizes.iter().enumerate() {
        let epochs_before = entry[0].as_u64().unwrap_or(1).saturating_sub(1) * epochs / recipe_epochs.max(1);
        let epoch = if index == 0 { 1 } else { epochs_before + 1 };
        scaled.retain(|earlier| earlier[0] != epoch);
        scaled.push(json!([epoch, entry[1]]));
    }
    match &scaled[..] {
        [only] => only[1].clone(),
        _ => scaled.into(),
    }
}
