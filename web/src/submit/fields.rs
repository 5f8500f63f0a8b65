//! The fields of the form: every key of a specification, in groups. [`KEYS`] says which values a field accepts.

use lockstep_protocol::spec::{KEYS, Kind};
use serde_json::{Value, json};
use std::sync::LazyLock;

/// A key's path in the specification, the field's label, and a hint: unit or meaning in a few words.
type Entry = (&'static str, &'static str, &'static str);

/// The title of each group, its fields that are always shown, and its fields under "More settings".
const GROUPS: [(&str, &[Entry], &[Entry]); 11] = [
    (
        "Job",
        &[
            ("name", "Name", ""),
            ("project", "Project", "the project of the job; empty: default"),
            (
                "train.recipe",
                "Recipe",
                "fills in settings that belong together; its learning rate is scaled to the batch size",
            ),
            ("model.arch", "Network", ""),
            (
                "model.pretrained",
                "Pretrained weights",
                "a model or a checkpoint of this server (the field lists them), a safetensors file, or a name such as resnet18 that \
             lockstep weights get has downloaded on the machine that trains; empty: random weights",
            ),
            ("data.dataset", "Dataset", ""),
            (
                "data.image_size",
                "Image size",
                "pixels, or by epoch such as 1: 128, 14: 192; empty: the dataset's own",
            ),
        ],
        &[
            ("tags", "Tags", "separated by commas"),
            ("priority", "Priority", "higher starts first, -1000 to 1000"),
            (
                "preemptible",
                "Preemptible",
                "jobs of higher priority may take the slots; this job continues later",
            ),
            ("private", "Private", "only you and admins see the job"),
            ("notes", "Notes", "for people: what this run is about"),
        ],
    ),
    (
        "Network",
        &[],
        &[
            ("model.stem", "Stem", "auto: by image size"),
            ("model.zero_init_residual", "Residual blocks start as identity", ""),
            ("model.freeze_norm", "Freeze batch norms", ""),
        ],
    ),
    (
        "Pictures",
        &[],
        &[
            (
                "data.validation",
                "Validation",
                "a split, a share of the training pictures such as 0.1, or none",
            ),
            ("data.validation_seed", "Validation seed", "chooses the pictures of a share or of the folds"),
            ("data.folds", "Folds", "cross-validation: parts of the training pictures"),
            ("data.fold", "Fold", "the part that validates this job, from 1"),
            ("data.validation_size", "Validation size", "pixels; empty: the image size"),
            ("data.resize_size", "Validation resize", "pixels of the short side, then a centre crop"),
            ("data.mean", "Mean", "one per channel; empty: the dataset's"),
            ("data.std", "Standard deviation", "one per channel; empty: the dataset's"),
            ("data.broken_files", "Broken files", ""),
            ("data.drop_remainder", "Leave out an epoch's last, smaller batch", ""),
        ],
    ),
    (
        "Augmentation",
        &[],
        &[
            ("data.crop_padding", "Random crop padding", "pixels; 0: no crop"),
            ("data.reflect_border", "Padding mirrors the picture (off: black)", ""),
            ("data.random_resized_crop", "Random resized crop", "in place of the padded crop"),
            ("data.crop_scale", "Crop area", "resized crop: smallest, largest share"),
            ("data.crop_ratio", "Crop ratio", "resized crop: smallest, largest width / height"),
            ("data.horizontal_flip", "Random horizontal flip", ""),
            ("data.alternating_flip", "Flip in every other epoch", ""),
            ("data.vertical_flip", "Random vertical flip", ""),
            ("data.color_jitter", "Color jitter", "brightness, contrast, saturation, hue; 0: none"),
            ("data.augment", "Automatic augmentation", ""),
            ("data.random_erasing", "Random erasing", "probability, 0 to 1"),
            ("train.mixup", "Mixup", "alpha, such as 0.2; 0: off"),
            ("train.cutmix", "Cutmix", "alpha, such as 1; 0: off"),
        ],
    ),
    (
        "Training",
        &[
            ("train.epochs", "Epochs", "or give steps under More settings"),
            ("train.batch_size", "Batch size per rank", "pictures; fill in this field or the next, not both"),
            ("train.global_batch_size", "Global batch size", "pictures of all ranks together"),
            ("train.lr", "Learning rate", "peak of the schedule"),
            ("train.schedule", "Schedule", ""),
            ("train.optimizer", "Optimizer", ""),
        ],
        &[
            ("train.steps", "Steps", "instead of epochs"),
            ("train.accumulate", "Accumulate", "micro-batches per step"),
            ("train.precision", "Precision", ""),
            ("train.loss_scale", "Loss scale", "fp16: dynamic or a number"),
            ("train.seed", "Seed", ""),
            ("train.deterministic", "Same bits in every run (GPUs: a few % slower)", ""),
        ],
    ),
    (
        "Optimizer",
        &[],
        &[
            ("train.momentum", "Momentum", "momentum, nesterov, lars, muon"),
            ("train.filter_momentum", "Momentum of filters", "muon"),
            ("train.bias_lr", "Learning rate of biases", "muon: multiple of the learning rate"),
            ("train.head_lr", "Learning rate of the head", "muon: multiple of the learning rate"),
            ("train.weight_decay", "Weight decay", ""),
            ("train.decay_norm_and_bias", "Weight decay also on batch norms and biases", ""),
            ("train.beta1", "Beta 1", "adamw, lamb"),
            ("train.beta2", "Beta 2", "adamw, lamb"),
            ("train.epsilon", "Epsilon", "adamw, lamb"),
            ("train.ema_decay", "EMA of the weights", "decay, such as 0.999; 0: none"),
            ("train.ema_steps", "EMA updated every", "steps"),
        ],
    ),
    (
        "Learning rate",
        &[],
        &[
            ("train.warmup_epochs", "Warm-up", "epochs, from 0"),
            ("train.milestones", "Milestones", "step: epochs at which the learning rate falls"),
            ("train.gamma", "Gamma", "step: factor at a milestone"),
            ("train.pct_start", "Rising fraction", "one_cycle: fraction of all steps"),
            ("train.final_lr_fraction", "Final fraction", "cosine, one_cycle: fraction of the learning rate"),
        ],
    ),
    (
        "Loss",
        &[],
        &[
            ("loss.kind", "Loss", "arcface, cosface: margins for embeddings"),
            ("train.label_smoothing", "Label smoothing", "0 to 1"),
            ("loss.scale", "Scale of cosines", "arcface, cosface"),
            ("loss.margin", "Margin", "empty: 0.5 for arcface, 0.4 for cosface"),
            (
                "loss.sample_share",
                "Share of the classes in a step",
                "Partial FC, for very many classes; 1: all",
            ),
            ("loss.class_weights", "Class weights", r#"balanced, numbers such as 1, 2.5, or {"cat": 2.5}"#),
        ],
    ),
    (
        "Ranks",
        &[
            ("parallel.ranks", "Ranks", "processes that train together, one per slot"),
            ("parallel.device", "Device", ""),
        ],
        &[
            ("parallel.mode", "Mode", "hybrid: ranks share a network; auto: hybrid if it is faster"),
            ("parallel.model", "Ranks per network", "hybrid: ranks that share one copy"),
            ("parallel.height", "Ranks per picture", "hybrid: ranks that share the rows"),
            ("parallel.pipeline", "Stages", "hybrid: consecutive parts of the network"),
            (
                "parallel.shard",
                "Split operators",
                r#"hybrid, such as [{"match": "layer4.*", "split": "out"}]; empty: the last layer"#,
            ),
            ("parallel.optimizer_sharding", "Divide optimizer state over ranks", ""),
            ("parallel.sync_batch_norm", "Batch norm over all ranks", ""),
            ("parallel.gradients_mean", "Average gradients (off: sum)", ""),
            ("parallel.parameter_broadcast", "Send rank 0's weights to all at the start", ""),
        ],
    ),
    (
        "Recovery",
        &[],
        &[
            ("recovery.max_restarts", "Maximum restarts", ""),
            ("recovery.stall_timeout_secs", "Stall time-out", "seconds without progress"),
            (
                "recovery.min_ranks",
                "Fewest ranks",
                "if machines are lost, continue with at least this number; empty: all",
            ),
            ("recovery.wait_seconds", "Wait for lost ranks", "seconds, before continuing with fewer"),
        ],
    ),
    (
        "Checkpoints and log",
        &[],
        &[
            (
                "checkpoint.every_epochs",
                "Epochs between checkpoints",
                "empty: 1; fill in this field or the next, not both",
            ),
            ("checkpoint.every_steps", "Steps between checkpoints", "in place of epochs"),
            ("checkpoint.keep", "Checkpoints kept", "the newest, 2 or more"),
            ("checkpoint.keep_best", "Best checkpoint by", "kept in addition"),
            ("checkpoint.sharded", "Sharded checkpoints", "all ranks write, in parts with an index"),
            ("evaluate.every_epochs", "Epochs between validations", "0: at the end"),
            ("stop.patience", "Early stopping after", "validations without an improvement; empty: never"),
            ("stop.metric", "Early stopping by", "empty: val_accuracy"),
            ("stop.min_delta", "Smallest improvement", "of accuracies: 0 to 1"),
            ("stop.goal", "Better is", "empty: by the metric"),
            ("evaluate.views", "Views in validation", "2: also mirrored; 6: also shifted"),
            ("log.every_steps", "Steps between logged losses", "0: at most 10 a second"),
            ("log.histograms", "Steps between histograms", "at least 10; 0: none"),
        ],
    ),
];

pub(super) struct Field {
    pub(super) group: &'static str,
    /// The field's path in the specification.
    pub(super) key: &'static str,
    pub(super) label: &'static str,
    /// Unit or meaning in a few words.
    pub(super) hint: &'static str,
    /// The values that the key accepts.
    pub(super) kind: Kind,
    /// Whether the field is under "More settings".
    pub(super) is_in_more: bool,
}

/// Every field, in the order of the page.
pub(super) static FIELDS: LazyLock<Vec<Field>> = LazyLock::new(|| {
    let entries = GROUPS.iter().flat_map(|&(group, shown, more)| {
        let with_group = move |entries: &'static [Entry], is_in_more| {
            entries.iter().map(move |entry| (group, entry, is_in_more))
        };
        with_group(shown, false).chain(with_group(more, true))
    });
    entries
        .filter_map(|(group, &(key, label, hint), is_in_more)| {
            let (_, kind) = keys().find(|(path, _)| path == key)?;
            Some(Field { group, key, label, hint, kind, is_in_more })
        })
        .collect()
});

/// The path of every key of a specification, such as `train.lr`, with the values that the key accepts.
pub(super) fn keys() -> impl Iterator<Item = (String, Kind)> {
    KEYS.iter().flat_map(|section| {
        let path = move |key: &str| format!("{}.{key}", section.name).trim_start_matches('.').to_owned();
        section.keys.iter().map(move |&(key, kind)| (path(key), kind))
    })
}

impl Field {
    /// Returns the id of the field's element.
    pub(super) fn id(&self) -> String {
        format!("f-{}", self.key.replace(['.', '_'], "-"))
    }

    /// Converts the field's text to JSON. Text of the wrong type stays text, so that the check reports it.
    pub(super) fn json(&self, text: &str) -> Value {
        let or_text = |parsed: Option<Value>| parsed.unwrap_or_else(|| text.into());
        let number = |text: &str| text.parse::<f64>().ok().filter(|v| v.is_finite()).map(Value::from);
        let integer =
            |text: &str| text.parse::<i64>().map(Value::from).or(text.parse::<u64>().map(Value::from)).ok();
        match self.kind {
            Kind::Text { .. } | Kind::Project | Kind::Word(_) => text.into(),
            // Browsers send line breaks as CR LF.
            Kind::Notes => text.replace("\r\n", "\n").into(),
            Kind::Bool => or_text(text.parse::<bool>().ok().map(Value::from)),
            // A number that is not an integer stays a number, so that the check reports it as a number. `validation` and `loss_scale` are
            // a number or a word: `0.1` or `test`.
            Kind::Whole { .. } | Kind::Seed | Kind::Number { .. } | Kind::Validation | Kind::LossScale => {
                or_text(integer(text).or_else(|| number(text)))
            }
            // A list as in TOML, JSON and error messages: `[1, 2]`.
            _ if text.starts_with('[') => {
                or_text(serde_json::from_str::<Vec<Value>>(text).ok().map(Value::from))
            }
            Kind::ClassWeights if text.starts_with('{') => or_text(serde_json::from_str(text).ok()),
            Kind::Tags | Kind::Shards => {
                text.split(',').map(str::trim).filter(|word| !word.is_empty()).collect()
            }
            // A number, or epochs with the sizes that start there: `1: 128, 14: 192`.
            Kind::ImageSize => or_text(integer(text).or_else(|| number(text)).or_else(|| {
                let entry = |entry: &str| {
                    let (epoch, size) = entry.split_once(':')?;
                    Some(json!([integer(epoch.trim())?, integer(size.trim())?]))
                };
                text.split(',').map(entry).collect::<Option<Vec<_>>>().map(Value::from)
            })),
            // Numbers separated by commas or spaces.
            Kind::Channels { .. }
            | Kind::Range { .. }
            | Kind::ColorJitter
            | Kind::Epochs
            | Kind::ClassWeights => or_text(
                text.split([',', ' '])
                    .filter(|t| !t.is_empty())
                    .map(|t| integer(t).or_else(|| number(t)))
                    .collect::<Option<Vec<_>>>()
                    .map(Value::from),
            ),
        }
    }
}
