//! The table of keys: the values that each key accepts, and the error for any other value.

use super::{
    Arch, Augment, BrokenFiles, Device, LossKind, OptimizerKind, Precision, Recipe, ScheduleKind, Stem,
    SweepMethod,
    foreign::word_suggestion,
    image_size, loss,
    mistake::{describe_value, shortened},
    nearest::nearest,
    shard, stop,
};
use crate::{labels, numbers::count};
use serde_json::Value;

/// Values that a key accepts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Text of `min` to `max` characters.
    Text {
        min: usize,
        max: usize,
    },
    /// A project's name.
    Project,
    /// A list of tags.
    Tags,
    /// Free text that may have several lines.
    Notes,
    /// One of these words.
    Word(&'static [&'static str]),
    Bool,
    /// A whole number from `min` to `max`, both included.
    Whole {
        min: i64,
        max: i64,
    },
    /// A whole number from 0 to 2^64 - 1.
    Seed,
    /// A number from `min` to `max`.
    Number {
        min: f64,
        max: f64,
        excludes_min: bool,
        excludes_max: bool,
    },
    /// One or three numbers, one per channel.
    Channels {
        positive: bool,
    },
    /// A list of the lower and the upper limit of a range, ascending, both from `min` to `max`.
    Range {
        min: f64,
        max: f64,
    },
    /// Strengths of brightness, contrast, saturation and hue.
    ColorJitter,
    /// A whole number of pixels, or a list of sizes with the epochs in which they begin.
    ImageSize,
    /// Ascending epochs.
    Epochs,
    /// A split's name, or a fraction of the training split.
    Validation,
    /// `dynamic`, or a number above 0 and of at most 1e9.
    LossScale,
    /// Tables with a pattern of operator names and the way in which the matching operators are split.
    Shards,
    /// `balanced`, or numbers in the order of the classes or by name.
    ClassWeights,
}

/// A table of keys.
#[derive(Debug)]
pub struct Section {
    /// Name of the table; empty for the top of the document.
    pub name: &'static str,
    pub keys: &'static [(&'static str, Kind)],
}

const MAX_FLOAT32: f64 = f32::MAX as f64;
const MAX_STEPS: i64 = 1_000_000_000;
/// Maximum number of folds.
const MAX_FOLDS: i64 = 100;
/// The highest learning rate.
pub(super) const MAX_LR: f64 = 1e4;
/// The largest strength of brightness, contrast and saturation.
pub(super) const MAX_JITTER: f64 = 10.0;
/// The largest alpha of mixup and cutmix: beyond it, lambda is practically 1/2.
const MAX_ALPHA: f64 = 100.0;
/// The highest loss scale.
pub(super) const MAX_LOSS_SCALE: f64 = 1e9;
/// Maximum number of epochs in a list.
pub(super) const MAX_LISTED_EPOCHS: usize = 1000;

/// Maximum number of trials of a sweep.
pub(super) const MAX_TRIALS: i64 = 500;

const fn whole(min: i64, max: i64) -> Kind {
    Kind::Whole { min, max }
}

const fn number(min: f64, max: f64) -> Kind {
    Kind::Number { min, max, excludes_min: false, excludes_max: false }
}

/// A number above `min`, and at most `max`.
const fn above(min: f64, max: f64) -> Kind {
    Kind::Number { min, max, excludes_min: true, excludes_max: false }
}

/// A number of at least `min`, and below `max`.
const fn below(min: f64, max: f64) -> Kind {
    Kind::Number { min, max, excludes_min: false, excludes_max: true }
}

/// Every key with the values that it accepts, in the order of the documentation.
pub const KEYS: &[Section] = &[
    Section {
        name: "",
        keys: &[
            ("name", Kind::Text { min: 1, max: 200 }),
            ("priority", whole(-1000, 1000)),
            ("preemptible", Kind::Bool),
            ("project", Kind::Project),
            ("tags", Kind::Tags),
            ("notes", Kind::Notes),
            ("private", Kind::Bool),
        ],
    },
    Section {
        name: "model",
        keys: &[
            ("arch", Kind::Word(&Arch::NAMES)),
            ("stem", Kind::Word(&Stem::NAMES)),
            ("zero_init_residual", Kind::Bool),
            ("pretrained", Kind::Text { min: 1, max: 4096 }),
            ("freeze_norm", Kind::Bool),
        ],
    },
    Section {
        name: "data",
        keys: &[
            ("dataset", Kind::Text { min: 1, max: 4096 }),
            ("validation", Kind::Validation),
            ("validation_seed", Kind::Seed),
            ("folds", whole(2, MAX_FOLDS)),
            ("fold", whole(1, MAX_FOLDS)),
            ("image_size", Kind::ImageSize),
            ("validation_size", whole(8, 4096)),
            ("crop_padding", whole(0, 512)),
            ("reflect_border", Kind::Bool),
            ("random_resized_crop", Kind::Bool),
            ("crop_scale", Kind::Range { min: 0.001, max: 1.0 }),
            ("crop_ratio", Kind::Range { min: 0.0625, max: 16.0 }),
            ("resize_size", whole(8, 8192)),
            ("horizontal_flip", Kind::Bool),
            ("alternating_flip", Kind::Bool),
            ("vertical_flip", Kind::Bool),
            ("color_jitter", Kind::ColorJitter),
            ("augment", Kind::Word(&Augment::NAMES)),
            ("random_erasing", number(0.0, 1.0)),
            ("mean", Kind::Channels { positive: false }),
            ("std", Kind::Channels { positive: true }),
            ("drop_remainder", Kind::Bool),
            ("broken_files", Kind::Word(&BrokenFiles::NAMES)),
        ],
    },
    Section {
        name: "train",
        keys: &[
            ("recipe", Kind::Word(&Recipe::NAMES)),
            ("epochs", whole(1, 100_000)),
            ("steps", whole(1, MAX_STEPS)),
            ("batch_size", whole(1, 65_536)),
            ("global_batch_size", whole(1, 1 << 24)),
            ("optimizer", Kind::Word(&OptimizerKind::NAMES)),
            ("lr", above(0.0, MAX_LR)),
            ("momentum", below(0.0, 1.0)),
            ("filter_momentum", below(0.0, 1.0)),
            ("bias_lr", above(0.0, MAX_LR)),
            ("head_lr", above(0.0, MAX_LR)),
            ("weight_decay", number(0.0, 1.0)),
            ("decay_norm_and_bias", Kind::Bool),
            ("beta1", below(0.0, 1.0)),
            ("beta2", below(0.0, 1.0)),
            // With 0, a weight without a gradient would become 0 / 0; much smaller values do not exist in a GPU's float32.
            ("epsilon", number(1e-16, 1.0)),
            ("schedule", Kind::Word(&ScheduleKind::NAMES)),
            ("warmup_epochs", number(0.0, 100_000.0)),
            ("milestones", Kind::Epochs),
            ("gamma", above(0.0, 1.0)),
            ("pct_start", below(0.0, 1.0)),
            ("final_lr_fraction", number(0.0, 1.0)),
            ("label_smoothing", below(0.0, 1.0)),
            ("mixup", number(0.0, MAX_ALPHA)),
            ("cutmix", number(0.0, MAX_ALPHA)),
            ("ema_decay", below(0.0, 1.0)),
            ("ema_steps", whole(1, MAX_STEPS)),
            ("accumulate", whole(1, 4096)),
            ("precision", Kind::Word(&Precision::NAMES)),
            ("loss_scale", Kind::LossScale),
            ("deterministic", Kind::Bool),
            ("seed", Kind::Seed),
        ],
    },
    Section {
        name: "loss",
        keys: &[
            ("sample_share", above(0.0, 1.0)),
            ("kind", Kind::Word(&LossKind::NAMES)),
            ("scale", above(0.0, 1000.0)),
            ("margin", number(0.0, 1.5)),
            ("class_weights", Kind::ClassWeights),
        ],
    },
    Section {
        name: "parallel",
        keys: &[
            ("ranks", whole(1, 1024)),
            ("device", Kind::Word(&Device::NAMES)),
            ("mode", Kind::Word(&shard::MODES)),
            ("model", whole(1, 1024)),
            ("height", whole(1, 1024)),
            ("pipeline", whole(1, 1024)),
            ("shard", Kind::Shards),
            ("optimizer_sharding", Kind::Bool),
            ("sync_batch_norm", Kind::Bool),
            ("gradients_mean", Kind::Bool),
            ("parameter_broadcast", Kind::Bool),
        ],
    },
    Section {
        name: "checkpoint",
        keys: &[
            ("every_epochs", whole(0, 100_000)),
            ("every_steps", whole(1, MAX_STEPS)),
            ("keep", whole(2, 10_000)),
            ("keep_best", Kind::Word(&["val_accuracy", "val_loss", "none"])),
            ("sharded", Kind::Bool),
        ],
    },
    Section {
        name: "recovery",
        keys: &[
            ("max_restarts", whole(0, 1000)),
            ("stall_timeout_secs", whole(5, 86_400)),
            ("min_ranks", whole(1, 1024)),
            ("wait_seconds", whole(0, 86_400)),
        ],
    },
    Section { name: "evaluate", keys: &[("every_epochs", whole(0, 100_000)), ("views", whole(1, 6))] },
    Section {
        name: "stop",
        keys: &[
            ("patience", whole(1, 100_000)),
            ("metric", Kind::Word(&stop::METRICS)),
            ("min_delta", number(0.0, 1e6)),
            ("goal", Kind::Word(&stop::GOALS)),
        ],
    },
    Section {
        name: "log",
        keys: &[("every_steps", whole(0, MAX_STEPS)), ("histograms", whole(0, MAX_STEPS))],
    },
];

/// The section `sweep`, without the keys that are tables. Not among [`KEYS`]: a job has no such key.
pub(super) const SWEEP: Section = Section {
    name: "sweep",
    keys: &[
        ("method", Kind::Word(&SweepMethod::NAMES)),
        ("seed", Kind::Seed),
        ("max_trials", whole(1, MAX_TRIALS)),
        ("max_concurrent", whole(1, MAX_TRIALS)),
        ("reduction", whole(2, 16)),
        ("min_epochs", whole(1, 100_000)),
        ("rungs", whole(2, 10)),
    ],
};

impl Kind {
    /// The kind of the key at a path such as `train.lr`; `None` for an unknown key.
    pub(super) fn of_path(path: &str) -> Option<Self> {
        let (table, name) = path.rsplit_once('.').unwrap_or(("", path));
        let section = KEYS.iter().find(|section| section.name == table)?;
        section.keys.iter().find(|(key, _)| *key == name).map(|(_, kind)| *kind)
    }

    /// Whether the value is one number.
    pub fn is_number(self) -> bool {
        matches!(self, Kind::Whole { .. } | Kind::Seed | Kind::Number { .. })
    }

    /// Checks that a key of this kind accepts `value`.
    ///
    /// # Errors
    /// What the value must be and what it is.
    pub(super) fn check(self, value: &Value) -> Result<(), String> {
        let must_be = |what: &str| Err(format!("must be {what}, is {}", describe_value(value)));
        match self {
            Kind::Text { min, max } => match value.as_str() {
                None => must_be("text"),
                Some(t) if t.chars().any(char::is_control) => {
                    Err("must not contain control characters".into())
                }
                Some(t) if !(min..=max).contains(&t.trim().chars().count()) => {
                    Err(format!("must have {min} to {max} characters, has {}", t.trim().chars().count()))
                }
                Some(_) => Ok(()),
            },
            Kind::Project => match value.as_str() {
                Some(name) => labels::project_mistake(name)
                    .map_or(Ok(()), |mistake| Err(format!("{mistake}; is {}", describe_value(value)))),
                None => must_be("text"),
            },
            Kind::Tags => {
                const WHAT: &str = "a list of texts, such as [\"baseline\", \"sweep\"]";
                let Some(list) = value.as_array() else { return must_be(WHAT) };
                if let Some((index, other)) = list.iter().enumerate().find(|(_, tag)| !tag.is_string()) {
                    return Err(format!(
                        "must be {WHAT}, but element {} is {}, which is not text",
                        index + 1,
                        describe_value(other)
                    ));
                }
                let tags: Vec<&str> = list.iter().filter_map(Value::as_str).collect();
                labels::tags_mistake(&tags).map_or(Ok(()), Err)
            }
            Kind::Notes => match value.as_str() {
                Some(notes) => labels::notes_mistake(notes).map_or(Ok(()), Err),
                None => must_be("text"),
            },
            Kind::Word(words) => match value.as_str() {
                Some(word) if words.contains(&word) => Ok(()),
                Some(word) => {
                    let (meant, given) = (suggest_word(words, word), describe_value(value));
                    Err(format!("must be {}, is {given}{meant}", one_of(words)))
                }
                None => must_be(&one_of(words)),
            },
            Kind::Bool if value.is_boolean() => Ok(()),
            Kind::Bool => must_be("true or false"),
            Kind::Whole { min, max } => match value.as_i64() {
                Some(n) if (min..=max).contains(&n) => Ok(()),
                _ => must_be(&format!("a whole number from {} to {}", grouped(min), grouped(max))),
            },
            Kind::Seed if value.is_u64() => Ok(()),
            Kind::Seed => must_be("a whole number from 0 to 2^64 - 1"),
            Kind::Number { min, max, excludes_min, excludes_max } => match value.as_f64() {
                Some(n)
                    if n.abs() <= MAX_FLOAT32
                        && (if excludes_min { n > min } else { n >= min })
                        && (if excludes_max { n < max } else { n <= max }) =>
                {
                    Ok(())
                }
                _ => {
                    let decimal = value.as_str().map(|text| text.replace(',', "."));
                    let decimal = decimal.filter(|text| text.parse().is_ok_and(f64::is_finite));
                    Err(format!(
                        "must be a number {} {min} and {} {max}, is {}{}",
                        if excludes_min { "above" } else { "of at least" },
                        if excludes_max { "below" } else { "of at most" },
                        describe_value(value),
                        decimal.map(|number| format!("; write {number}")).unwrap_or_default()
                    ))
                }
            },
            Kind::Channels { positive } => {
                let fits =
                    |v: &Value| v.as_f64().is_some_and(|n| n.abs() <= 1000.0 && (!positive || n > 0.0));
                match value.as_array() {
                    Some(list) if [1, 3].contains(&list.len()) && list.iter().all(fits) => Ok(()),
                    _ => must_be(if positive {
                        "a list of 1 or 3 positive numbers, one per channel"
                    } else {
                        "a list of 1 or 3 numbers, one per channel"
                    }),
                }
            }
            Kind::Range { min, max } => match numbers(value).as_deref() {
                Some(&[low, high]) if min <= low && low <= high && high <= max => Ok(()),
                _ => Err(format!(
                    "must be two numbers from {min} to {max}, the smallest and the largest, is {}; write them as a list, such as {}",
                    numbers_shown(value),
                    if max > 1.0 { "[0.75, 1.3333]" } else { "[0.08, 1.0]" }
                )),
            },
            Kind::ColorJitter => match numbers(value).as_deref() {
                Some(&[brightness, contrast, saturation, hue])
                    if [brightness, contrast, saturation].iter().all(|v| (0.0..=MAX_JITTER).contains(v))
                        && (0.0..=0.5).contains(&hue) =>
                {
                    Ok(())
                }
                _ => Err(format!(
                    "must be a list of four numbers, such as [0.4, 0.4, 0.4, 0.1]: the strengths of brightness, contrast and \
                     saturation (0 to {MAX_JITTER}) and of hue (0 to 0.5); is {}",
                    numbers_shown(value)
                )),
            },
            Kind::ImageSize => image_size::check(value),
            Kind::Epochs => {
                let epochs: Option<Vec<u64>> =
                    value.as_array().and_then(|l| l.iter().map(Value::as_u64).collect());
                match epochs {
                    Some(list)
                        if list.len() <= MAX_LISTED_EPOCHS
                            && list.iter().all(|e| (1..=100_000).contains(e))
                            && list.is_sorted_by(|a, b| a < b) =>
                    {
                        Ok(())
                    }
                    _ => must_be(&format!(
                        "a list of at most {} ascending epochs, 1 to 100,000, such as [30, 60, 80]",
                        grouped(MAX_LISTED_EPOCHS as i64)
                    )),
                }
            }
            Kind::Validation => match value {
                Value::String(name)
                    if (1..=100).contains(&name.len())
                        && !name.contains(['/', '\\'])
                        && !name.starts_with('.') =>
                {
                    Ok(())
                }
                Value::Number(n) if n.as_f64().is_some_and(|f| f > 0.0 && f < 1.0) => Ok(()),
                _ => must_be("a split such as \"test\", \"none\", or a fraction above 0 and below 1"),
            },
            Kind::LossScale => match value {
                Value::String(word) if word == "dynamic" => Ok(()),
                Value::Number(n) if n.as_f64().is_some_and(|f| f > 0.0 && f <= MAX_LOSS_SCALE) => Ok(()),
                _ => must_be(&format!(
                    "\"dynamic\", or a number above 0 and of at most {}, such as 1024",
                    grouped(MAX_LOSS_SCALE as i64)
                )),
            },
            Kind::Shards => shard::check(value),
            Kind::ClassWeights => loss::check_weights(value),
        }
    }
}

/// The end of the error for an unknown word: the valid word that its writer most likely meant. Empty if no valid word is similar.
pub(super) fn suggest_word(words: &[&str], word: &str) -> String {
    match (word_suggestion(words, word), nearest(word, words.iter().copied())) {
        (Some(suggestion), _) => format!("; {suggestion}"),
        (None, Some(near)) => format!("; did you mean {near:?}?"),
        (None, None) => String::new(),
    }
}

fn numbers(value: &Value) -> Option<Vec<f64>> {
    value.as_array()?.iter().map(Value::as_f64).collect()
}

/// A list of numbers in full, so that its writer sees which number is wrong; any other value as [`describe_value`].
fn numbers_shown(value: &Value) -> String {
    match numbers(value) {
        Some(list) if list.len() <= 6 => shortened(&value.to_string()),
        _ => describe_value(value),
    }
}

fn one_of(words: &[&str]) -> String {
    match words {
        [word] => format!("{word:?}"),
        _ => format!("one of {}", words.join(", ")),
    }
}

/// With separators of thousands: `1,000,000`.
pub(super) fn grouped(n: i64) -> String {
    format!("{}{}", if n < 0 { "-" } else { "" }, count(n.unsigned_abs()))
}
