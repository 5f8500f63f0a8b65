//! Suggests a job for a dataset, with a reason for each key. `lockstep init` writes it into a file, and the page for a
//! new job begins with it.

use crate::{
    dataset::{DatasetInfo, default_validation, held_out_share, too_few_classes},
    numbers::plural,
    spec::{JobSpec, OptimizerKind, SIDES, Validation, from_toml},
};

/// Keys of a job file, with a comment that explains them.
#[derive(Debug)]
pub struct CommentedKeys {
    pub comment: String,
    /// One or several lines of TOML.
    pub toml: String,
}

/// Keys of the tables `data`, `model` and `train` of a job file, and the amount of work of the job.
#[derive(Debug)]
pub struct Suggestion {
    pub data: Vec<CommentedKeys>,
    pub model: Vec<CommentedKeys>,
    pub train: Vec<CommentedKeys>,
    /// Height and width of the network's input.
    pub side: u32,
    /// Number of pictures in a step.
    pub batch: u64,
    /// Number of pictures in training, over all epochs.
    pub training_pictures: u64,
    /// Number of pictures in validation, over all epochs.
    pub validation_pictures: u64,
}

/// Pictures with a shorter side than this, in pixels, are small, such as CIFAR's and MNIST's.
const SMALL_SIDE: u32 = 64;
/// The usual input size of networks for photographs.
pub const USUAL_SIDE: u32 = 224;
/// If the longer side is at least this many times the shorter side, most of each picture is cut away.
const ELONGATED: u32 = 3;
/// From this many pictures on, a larger network is worthwhile.
const MANY_PICTURES: u64 = 100_000;

/// The amount of work of a suggested run.
struct Effort {
    /// The input size for photographs.
    side: u32,
    /// Number of pictures in training, over all epochs, unless `min_epochs` or `max_epochs` limits the epochs.
    training_pictures: u64,
    min_epochs: u64,
    max_epochs: u64,
}

const FULL_RUN: Effort =
    Effort { side: USUAL_SIDE, training_pictures: 1_000_000, min_epochs: 10, max_epochs: 60 };
const QUICK_RUN: Effort = Effort { side: 128, training_pictures: 200_000, min_epochs: 5, max_epochs: 20 };

impl Suggestion {
    /// The suggestion for a dataset.
    ///
    /// # Errors
    /// The dataset has no pictures to train on, or only one class.
    pub fn of(info: &DatasetInfo) -> Result<Self, String> {
        Self::for_effort(info, &FULL_RUN)
    }

    /// As [`Suggestion::of`], for a first impression: smaller pictures and fewer epochs.
    ///
    /// # Errors
    /// As [`Suggestion::of`].
    pub fn quick(info: &DatasetInfo) -> Result<Self, String> {
        Self::for_effort(info, &QUICK_RUN)
    }

    fn for_effort(info: &DatasetInfo, effort: &Effort) -> Result<Self, String> {
        let samples = info.train_samples();
        if let Some(mistake) = info.too_few_pictures() {
            return Err(mistake);
        }
        if let Some(mistake) = too_few_classes(&info.classes) {
            return Err(mistake);
        }
        // The network's input is no larger than usual pictures of the dataset. `None`: it has the effort's size.
        let side = Some(info.short_side())
            .filter(|side| (1..effort.side).contains(side))
            .map(|side| side.max(*SIDES.start()));
        let is_small = side.is_some_and(|side| side < SMALL_SIDE);
        let ValidationChoice {
            keys: validation,
            held_out,
            max_held_out,
            is_counted,
            samples: validation_samples,
        } = choose_validation(info);
        let train_samples = samples - held_out;
        let batch = batch_size(samples - max_held_out, is_small);
        let epochs = (effort.training_pictures / train_samples).clamp(effort.min_epochs, effort.max_epochs);
        let prefers_large_network = samples >= MANY_PICTURES && effort.side == USUAL_SIDE;
        Ok(Self {
            data: data(info, side, effort.side, validation),
            model: vec![network(prefers_large_network, side, is_small)],
            train: train(train_samples, !is_counted, batch, epochs, is_small),
            side: side.unwrap_or(effort.side),
            batch,
            training_pictures: train_samples * epochs,
            validation_pictures: validation_samples * epochs,
        })
    }

    /// The suggested job, on a registered dataset.
    pub fn spec(&self, dataset: &str) -> Option<JobSpec> {
        let table =
            |keys: &[CommentedKeys]| keys.iter().map(|keys| format!("{}\n", keys.toml)).collect::<String>();
        let name = serde_json::Value::from(dataset);
        let [data, model, train] = [&self.data, &self.model, &self.train].map(|keys| table(keys));
        from_toml(&format!("name = {name}\n[data]\ndataset = {name}\n{data}[model]\n{model}[train]\n{train}"))
            .ok()
    }
}

/// `side`: the size of the network's input, if it is as large as the dataset's usual pictures; otherwise the size is `input`.
fn data(info: &DatasetInfo, side: Option<u32>, input: u32, validation: CommentedKeys) -> Vec<CommentedKeys> {
    let mut data = vec![validation];
    let (short, long) = (info.height.min(info.width), info.height.max(info.width));
    let cut = if short > 0 && long / short >= ELONGATED {
        " The crop is square, so most of each picture is cut away. If the whole picture matters, pad the pictures to squares; no key \
         does this."
    } else {
        ""
    };
    let why = match input {
        USUAL_SIDE => "the usual size for photographs".to_owned(),
        _ => format!("fewer than the usual {USUAL_SIDE}, which is faster"),
    };
    let size = match (side, info.height, info.width) {
        (Some(side), height, width) if height == side && width == side => {
            format!("All pictures have {side} x {side} pixels; the network sees them unchanged.")
        }
        (Some(side), ..) => {
            format!(
                "The network sees {side} x {side} pixels of each picture, the median of their shorter sides."
            )
        }
        (None, 0, _) => {
            format!("Pictures have several sizes: the network sees {input} x {input} pixels of each, {why}.")
        }
        (None, height, width) => {
            format!(
                "All pictures have {width} x {height} pixels; the network sees {input} x {input} pixels of each, {why}."
            )
        }
    };
    data.push(CommentedKeys { comment: size + cut, toml: format!("image_size = {}", side.unwrap_or(input)) });
    data.push(match side {
        Some(side) if side < SMALL_SIDE => {
            // About an eighth of a side. CIFAR's usual padding is 4.
            let padding = ((info.short_side() + 4) / 8).min(4);
            let shifted = if padding == 0 { "Pictures are too small to be shifted" } else { "Pictures are shifted a little" };
            CommentedKeys {
                comment: format!(
                    "{shifted}, and half of them are mirrored. Set horizontal_flip = false if left and right differ, as in digits and \
                     letters."
                ),
                toml: format!("crop_padding = {padding}\nhorizontal_flip = true"),
            }
        }
        _ => CommentedKeys {
            comment: "A random part of each picture is resized, and half of the pictures are mirrored: usual for photographs.".into(),
            toml: "random_resized_crop = true\nhorizontal_flip = true".into(),
        },
    });
    if info.broken_count > 0 {
        let first =
            info.broken.first().map(|broken| format!(", the first {}", broken.file)).unwrap_or_default();
        data.push(CommentedKeys {
            comment: format!(
                "{} could not be used{first}, and {} left out. With \"fail\" the job would end.",
                plural(info.broken_count, "file"),
                if info.broken_count == 1 { "is" } else { "are" }
            ),
            toml: "broken_files = \"skip\"".into(),
        });
    }
    data
}

/// The suggested validation split or fraction.
struct ValidationChoice {
    keys: CommentedKeys,
    /// Number of training pictures that are held out.
    held_out: u64,
    /// Upper bound of `held_out`: a step takes at most the other pictures.
    max_held_out: u64,
    /// Whether `held_out` is a counted number; otherwise it is the expected number.
    is_counted: bool,
    /// Number of validation pictures.
    samples: u64,
}

fn choose_validation(info: &DatasetInfo) -> ValidationChoice {
    let others = info.splits.iter().filter(|split| split.name != "train" && split.samples > 0);
    let others: Vec<&str> = others.map(|split| split.name.as_str()).collect();
    if let Some(split) = default_validation("test", others.iter().copied()) {
        let samples = info.split(split).map_or(0, |split| split.samples);
        let keys = CommentedKeys {
            comment: format!("The pictures of {split} validate the network."),
            toml: format!("validation = {}", serde_json::Value::from(split)),
        };
        return ValidationChoice { keys, held_out: 0, max_held_out: 0, is_counted: true, samples };
    }
    let samples = info.train_samples();
    let fraction = held_out_share(samples);
    let expected = ((samples as f64 * fraction).round() as u64).clamp(1, samples);
    // The inspection chose the seed for the share of all files, including broken ones.
    let is_same_share = held_out_share(samples + info.broken_count) == fraction;
    let seed = info.held_out.as_ref().filter(|_| is_same_share).map(|held_out| held_out.validation_seed);
    let counted = seed.and_then(|seed| info.count_held_out(&Validation::Fraction(fraction), seed));
    // A job needs a picture for training.
    let held_out = counted.map_or(expected, |counted| counted.min(samples - 1));
    let [_, max_held_out] = info.held_out_bounds(fraction, seed.unwrap_or_default());
    let max_held_out = (max_held_out.ceil() as u64).min(samples - 1);
    let about = if counted.is_some() { "" } else { "about " };
    let why = match seed {
        Some(_) if info.uncovered_classes().is_none() => {
            " Of the seeds 0 to 99, this one covers the classes most evenly."
        }
        _ => "",
    };
    let seed = seed.map(|seed| format!("\nvalidation_seed = {seed}")).unwrap_or_default();
    let because = match others.first() {
        None => "There is no other split, so ".to_owned(),
        Some(other) => format!(
            "The split {other} is not used; to validate the network on it, set validation = {} here. Instead, ",
            serde_json::Value::from(*other)
        ),
    };
    let keys = CommentedKeys {
        comment: format!(
            "{because}{about}{held_out} of the {samples} training pictures, chosen at random, validate the network.{why}"
        ),
        toml: format!("validation = {fraction}{seed}"),
    };
    ValidationChoice { keys, held_out, max_held_out, is_counted: counted.is_some(), samples: held_out }
}

fn network(prefers_large_network: bool, side: Option<u32>, is_small: bool) -> CommentedKeys {
    // Networks outside the CIFAR family need at least 16 pixels.
    let suits_cifar_family = side.is_some_and(|side| side < 16 || (side <= 32 && !prefers_large_network));
    let (why, arch) = if suits_cifar_family {
        (
            "The CIFAR family is made for pictures of this size and trains in minutes, even on CPU cores. resnet18 is more accurate and \
             takes ten times as long.",
            "resnet20",
        )
    } else if is_small {
        (
            "This network has a stem for small pictures (model.stem): a 3x3 convolution and no pooling.",
            "resnet18",
        )
    } else if prefers_large_network {
        ("There are enough pictures for this network. resnet18 is twice as fast.", "resnet50")
    } else {
        (
            "A small network for photographs, which suits this number of pictures. With trained weights, a few hundred pictures suffice: \
             1. Run `lockstep weights get resnet18`. 2. Write pretrained = \"resnet18\" here. 3. Write recipe = \"finetune\" under \
             [train]. 4. Delete the lines epochs, schedule, lr, momentum and weight_decay there, which would replace the recipe's values.",
            "resnet18",
        )
    };
    CommentedKeys { comment: why.into(), toml: format!("arch = {arch:?}") }
}

/// The smallest suggested batch: two ranks with 8 pictures each give the same bits as one rank with 16.
const MIN_BATCH: u64 = 16;

/// Number of pictures in a step: a power of two, about a twentieth of the training pictures, from [`MIN_BATCH`] to 256 (128 for
/// photographs), but never more than the training pictures. `samples`: the smallest possible number of training pictures.
fn batch_size(samples: u64, is_small: bool) -> u64 {
    let max_batch = if is_small { 256 } else { 128 };
    let upper_bound = (samples / 20).clamp(MIN_BATCH, max_batch).min(samples);
    1 << upper_bound.ilog2()
}

/// The learning rate for SGD with momentum: 0.2 for 256 pictures is usual for ResNets on CIFAR with one cycle, and half of it for
/// photographs.
fn momentum_lr(batch: u64, is_small: bool) -> f64 {
    let for_256_pictures = if is_small { 0.2 } else { 0.1 };
    for_256_pictures * batch as f64 / 256.0
}

/// The usual learning rate of a job: its recipe's, or the rate for its optimizer and batch. `None` for an optimizer without a usual rate.
pub fn usual_lr(spec: &JobSpec) -> Option<f64> {
    if let Some(recipe) = spec.train.recipe {
        return Some(recipe.lr_for(spec));
    }
    match spec.train.optimizer {
        OptimizerKind::Momentum | OptimizerKind::Nesterov => {
            let is_small = spec.data.image_size.as_ref().is_none_or(|size| size.last() < SMALL_SIDE);
            Some(momentum_lr(spec.global_batch_size(), is_small))
        }
        // PyTorch's default.
        OptimizerKind::AdamW => Some(0.001),
        OptimizerKind::Lars | OptimizerKind::Lamb | OptimizerKind::Muon => None,
    }
}

/// `is_expected`: whether `samples` is an expected number, because the job holds out each training picture independently.
fn train(samples: u64, is_expected: bool, batch: u64, epochs: u64, is_small: bool) -> Vec<CommentedKeys> {
    let about = if is_expected { "about " } else { "" };
    let steps = (samples / batch).max(1);
    let lr = momentum_lr(batch, is_small);
    vec![
        CommentedKeys {
            comment: format!(
                "{}{}: {about}{} an epoch, {about}{} in all.",
                if is_expected { "About " } else { "" },
                plural(samples, "picture"),
                plural(steps, "step"),
                steps * epochs
            ),
            toml: format!("epochs = {epochs}"),
        },
        CommentedKeys {
            comment: "Pictures per step over all ranks; each rank keeps the activations of its part in memory. Halve this and lr if memory \
                      does not suffice."
                .into(),
            toml: format!("global_batch_size = {batch}"),
        },
        CommentedKeys {
            comment: "The rate rises to lr and falls to 0 in one cycle, which needs few epochs. lr is in proportion to the batch.".into(),
            toml: format!("schedule = \"one_cycle\"\nlr = {lr}\nmomentum = 0.9\nweight_decay = 0.0005"),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::{BrokenFile, HeldOut, SplitInfo};

    fn info(side: u32, splits: &[(&str, u64)]) -> DatasetInfo {
        let split = |(name, samples): &(&str, u64)| SplitInfo {
            name: (*name).into(),
            samples: *samples,
            per_class: vec![samples / 2, samples - samples / 2],
        };
        DatasetInfo {
            format: "image_folder".into(),
            classes: vec!["a\nb".into(), "\"c\"".into()],
            splits: splits.iter().map(split).collect(),
            height: side,
            width: side,
            channels: 3,
            mean: vec![0.5; 3],
            std: vec![0.2; 3],
            ..DatasetInfo::default()
        }
    }

    /// From two pictures to more than ImageNet: the file has no mistake, and an epoch has at least one step.
    #[test]
    fn suggested_jobs_are_valid_for_datasets_of_every_size() {
        for side in [0, 1, 8, 28, 32, 48, 64, 100, 224, 512] {
            for samples in [2, 9, 20, 100, 5_000, 60_000, 2_000_000] {
                for splits in [&[("train", samples)][..], &[("train", samples), ("test", 10)]] {
                    let info = info(side, splits);
                    let suggestion =
                        Suggestion::of(&info).unwrap_or_else(|e| panic!("{side} {samples}: {e}"));
                    let text = format!("{suggestion:?}");
                    let spec =
                        suggestion.spec("a \"b\" \\ c").unwrap_or_else(|| panic!("{side} {samples}: {text}"));
                    assert_eq!(spec.data.dataset, "a \"b\" \\ c");
                    let share = held_out_share(samples);
                    let held_out =
                        if splits.len() == 1 { ((samples as f64 * share).round() as u64).max(1) } else { 0 };
                    assert!(spec.global_batch_size() <= samples - held_out, "{side} {samples}: {text}");
                    assert!(side == 0 || spec.data.crop_padding < side, "{side} {samples}: {text}");
                    let input = spec.data.image_size.as_ref().map(crate::spec::ImageSize::last);
                    assert_eq!(input, Some(suggestion.side), "{side} {samples}: {text}");
                    let quick = Suggestion::quick(&info).expect("the full run has a suggestion");
                    assert!(quick.spec("x").is_some(), "{quick:?}");
                    assert!(
                        quick.training_pictures < suggestion.training_pictures
                            && quick.side <= suggestion.side,
                        "{quick:?}"
                    );
                    let has_two_ranks = spec.global_batch_size().is_multiple_of(16);
                    assert!(has_two_ranks || samples - held_out < 16, "{side} {samples}: {text}");
                }
            }
        }
    }

    #[test]
    fn the_input_is_no_larger_than_the_median_picture() {
        for (height, width, median_side, image_size) in
            [(0, 0, 32, 32), (0, 0, 300, 224), (80, 90, 80, 80), (20, 100, 20, 20), (0, 0, 0, 224)]
        {
            let info = DatasetInfo { height, width, median_side, ..info(0, &[("train", 100)]) };
            let suggestion = Suggestion::of(&info).unwrap();
            assert_eq!(suggestion.data[1].toml, format!("image_size = {image_size}"));
            let comment = &suggestion.data[1].comment;
            assert!(
                !comment.contains("unchanged") && comment.contains("cut away") == (width == 100),
                "{comment}"
            );
        }
    }

    #[test]
    fn datasets_without_pictures_or_classes_are_refused() {
        assert!(Suggestion::of(&info(28, &[("train", 1)])).unwrap_err().contains("1 picture to"));
        assert!(Suggestion::of(&info(28, &[("test", 100)])).unwrap_err().contains("0 pictures"));
        let mut unusable = info(0, &[]);
        unusable.broken = vec![BrokenFile { file: "a/1.heic".into(), detail: "is a heic file".into() }];
        unusable.broken_count = 2;
        let message = Suggestion::of(&unusable).unwrap_err();
        assert!(message.ends_with("2 files cannot be used, the first: a/1.heic is a heic file"), "{message}");
        let mut one = info(28, &[("train", 100)]);
        one.classes.truncate(1);
        assert!(Suggestion::of(&one).unwrap_err().contains("one class"));
    }

    #[test]
    fn an_existing_split_is_used_for_validation() {
        for (splits, expected, amount) in [
            (&[("train", 100), ("val", 10)][..], "validation = \"val\"", "100 pictures: 6 steps an epoch"),
            (&[("train", 100), ("val", 10), ("test", 10)], "validation = \"test\"", "100 pictures: "),
            (&[("train", 100), ("test", 0)], "validation = 0.2", "About 80 pictures: "),
            (&[("train", 100), ("holdout", 10)], "validation = 0.2", "About 80 pictures: "),
            (&[("train", 100)], "validation = 0.2", "About 80 pictures: about 5 steps an epoch"),
        ] {
            let suggestion = Suggestion::of(&info(28, splits)).unwrap();
            assert_eq!(suggestion.data[0].toml, expected);
            assert!(suggestion.train[0].comment.starts_with(amount), "{}", suggestion.train[0].comment);
        }
        let unused = Suggestion::of(&info(28, &[("train", 100), ("holdout", 10)])).unwrap();
        assert!(unused.data[0].comment.contains("set validation = \"holdout\" here"), "{unused:?}");
        let held_out =
            |per_class: [u64; 2]| Some(HeldOut { validation_seed: 7, per_class: per_class.to_vec() });
        // A step takes no more pictures than remain if the broken file is not held out.
        let few = DatasetInfo { held_out: held_out([1, 2]), broken_count: 1, ..info(28, &[("train", 11)]) };
        assert_eq!(Suggestion::of(&few).unwrap().batch, 4);
        let one_each = DatasetInfo { held_out: held_out([1, 0]), ..info(28, &[("train", 2)]) };
        let suggestion = Suggestion::of(&one_each).unwrap();
        assert!(!suggestion.data[0].comment.contains("evenly"), "{suggestion:?}");
        let counted = DatasetInfo { held_out: held_out([6, 5]), ..info(28, &[("train", 100)]) };
        let suggestion = Suggestion::of(&counted).unwrap();
        assert_eq!(suggestion.data[0].toml, "validation = 0.2\nvalidation_seed = 7");
        assert!(suggestion.data[0].comment.contains("so 11 of the 100 training pictures"), "{suggestion:?}");
        assert!(suggestion.train[0].comment.starts_with("89 pictures: 5 steps an epoch"), "{suggestion:?}");
        // Without its broken files, the dataset has another share.
        let damaged = DatasetInfo { splits: info(28, &[("train", 49)]).splits, broken_count: 1, ..counted };
        assert_eq!(Suggestion::of(&damaged).unwrap().data[0].toml, "validation = 0.3");
    }
}
