//! The fields of the form: every key of a specification, in groups.

use lockstep_protocol::spec::{
    Arch, Augment, BrokenFiles, Device, LossKind, OptimizerKind, Precision, Recipe,
};
use serde_json::{Value, json};

/// The type of a field, which determines how the field's text is converted to JSON.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Text,
    /// Text of several lines.
    Lines,
    /// A whole number.
    Integer,
    Number,
    /// A number or a word: `0.1` or `test`.
    NumberOrText,
    /// Numbers separated by commas.
    Numbers,
    /// Words separated by commas.
    Words,
    /// A word, numbers separated by commas, or a table: `balanced`, `1, 2.5` or `{"cat": 2.5}`.
    Weights,
    /// A number, or epochs with the sizes that start there: `1: 128, 14: 192`.
    Sizes,
    Switch,
    Choice(&'static [&'static str]),
    Dataset,
}

pub(super) struct Field {
    /// The field's path in the specification.
    pub(super) key: &'static str,
    pub(super) label: &'static str,
    pub(super) kind: Kind,
    /// Unit or meaning in a few words.
    pub(super) hint: &'static str,
    /// Whether the field is under "More settings".
    pub(super) is_in_more: bool,
}

impl Field {
    /// Returns the id of the field's element.
    pub(super) fn id(&self) -> String {
        format!("f-{}", self.key.replace(['.', '_'], "-"))
    }
}

const fn field(key: &'static str, label: &'static str, kind: Kind, hint: &'static str) -> Field {
    Field { key, label, kind, hint, is_in_more: false }
}

const fn more(key: &'static str, label: &'static str, kind: Kind, hint: &'static str) -> Field {
    Field { key, label, kind, hint, is_in_more: true }
}

/// The empty choice, and every recipe.
const RECIPES: [&str; Recipe::NAMES.len() + 1] = {
    let mut names = [""; Recipe::NAMES.len() + 1];
    let mut i = 0;
    while i < Recipe::NAMES.len() {
        names[i + 1] = Recipe::NAMES[i];
        i += 1;
    }
    names
};

/// Every key of a specification, in groups.
pub(super) const GROUPS: [(&str, &[Field]); 11] = [
    (
        "Job",
        &[
            field("name", "Name", Kind::Text, ""),
            field("project", "Project", Kind::Text, "the project of the job; empty: default"),
            field(
                "train.recipe",
                "Recipe",
                Kind::Choice(&RECIPES),
                "fills in settings that belong together; its learning rate is scaled to the batch size",
            ),
            field("model.arch", "Network", Kind::Choice(&Arch::NAMES), ""),
            field(
                "model.pretrained",
                "Pretrained weights",
                Kind::Text,
                "models:/name@alias, a checkpoint's id, a safetensors file, or resnet18 (after lockstep weights get resnet18); empty: \
                 random weights",
            ),
            field("data.dataset", "Dataset", Kind::Dataset, ""),
            field(
                "data.image_size",
                "Image size",
                Kind::Sizes,
                "pixels, or by epoch such as 1: 128, 14: 192; empty: the dataset's own",
            ),
            more("tags", "Tags", Kind::Words, "separated by commas"),
            more("priority", "Priority", Kind::Integer, "higher starts first, -1000 to 1000"),
            more(
                "preemptible",
                "Preemptible",
                Kind::Switch,
                "jobs of higher priority may take the slots; this job continues later",
            ),
            more("private", "Private", Kind::Switch, "only you and admins see the job"),
            more("notes", "Notes", Kind::Lines, "for people: what this run is about"),
        ],
    ),
    (
        "Network",
        &[
            more("model.stem", "Stem", Kind::Choice(&["auto", "imagenet", "cifar"]), "auto: by image size"),
            more("model.zero_init_residual", "Residual blocks start as identity", Kind::Switch, ""),
            more("model.freeze_norm", "Freeze batch norms", Kind::Switch, ""),
        ],
    ),
    (
        "Pictures",
        &[
            more(
                "data.validation",
                "Validation",
                Kind::NumberOrText,
                "a split, a share of the training pictures such as 0.1, or none",
            ),
            more("data.validation_seed", "Validation seed", Kind::Integer, "chooses the pictures of a share"),
            more("data.folds", "Folds", Kind::Integer, "cross-validation: parts of the training pictures"),
            more("data.fold", "Fold", Kind::Integer, "the part that validates this job, from 1"),
            more("data.validation_size", "Validation size", Kind::Integer, "pixels; empty: the image size"),
            more(
                "data.resize_size",
                "Validation resize",
                Kind::Integer,
                "pixels of the short side, then a centre crop",
            ),
            more("data.mean", "Mean", Kind::Numbers, "one per channel; empty: the dataset's"),
            more("data.std", "Standard deviation", Kind::Numbers, "one per channel; empty: the dataset's"),
            more("data.broken_files", "Broken files", Kind::Choice(&BrokenFiles::NAMES), ""),
            more("data.drop_remainder", "Leave out an epoch's last, smaller batch", Kind::Switch, ""),
        ],
    ),
    (
        "Augmentation",
        &[
            more("data.crop_padding", "Random crop padding", Kind::Integer, "pixels; 0: no crop"),
            more("data.reflect_border", "Padding mirrors the picture (off: black)", Kind::Switch, ""),
            more(
                "data.random_resized_crop",
                "Random resized crop",
                Kind::Switch,
                "in place of the padded crop",
            ),
            more("data.crop_scale", "Crop area", Kind::Numbers, "resized crop: smallest, largest share"),
            more(
                "data.crop_ratio",
                "Crop ratio",
                Kind::Numbers,
                "resized crop: smallest, largest width / height",
            ),
            more("data.horizontal_flip", "Random horizontal flip", Kind::Switch, ""),
            more("data.alternating_flip", "Flip in every other epoch", Kind::Switch, ""),
            more("data.vertical_flip", "Random vertical flip", Kind::Switch, ""),
            more(
                "data.color_jitter",
                "Color jitter",
                Kind::Numbers,
                "brightness, contrast, saturation, hue; 0: none",
            ),
            more("data.augment", "Automatic augmentation", Kind::Choice(&Augment::NAMES), ""),
            more("data.random_erasing", "Random erasing", Kind::Number, "probability, 0 to 1"),
            more("train.mixup", "Mixup", Kind::Number, "alpha, such as 0.2; 0: off"),
            more("train.cutmix", "Cutmix", Kind::Number, "alpha, such as 1; 0: off"),
        ],
    ),
    (
        "Training",
        &[
            field("train.epochs", "Epochs", Kind::Integer, "or give steps under More settings"),
            field(
                "train.batch_size",
                "Batch size per rank",
                Kind::Integer,
                "pictures; fill in this field or the next, not both",
            ),
            field(
                "train.global_batch_size",
                "Global batch size",
                Kind::Integer,
                "pictures of all ranks together",
            ),
            field("train.lr", "Learning rate", Kind::Number, "peak of the schedule"),
            field(
                "train.schedule",
                "Schedule",
                Kind::Choice(&["constant", "step", "cosine", "one_cycle"]),
                "",
            ),
            field("train.optimizer", "Optimizer", Kind::Choice(&OptimizerKind::NAMES), ""),
            more("train.steps", "Steps", Kind::Integer, "instead of epochs"),
            more("train.accumulate", "Accumulate", Kind::Integer, "micro-batches per step"),
            more("train.precision", "Precision", Kind::Choice(&Precision::NAMES), ""),
            more("train.loss_scale", "Loss scale", Kind::NumberOrText, "fp16: dynamic or a number"),
            more("train.seed", "Seed", Kind::Integer, ""),
            more("train.deterministic", "Same bits in every run (GPUs: a few % slower)", Kind::Switch, ""),
        ],
    ),
    (
        "Optimizer",
        &[
            more("train.momentum", "Momentum", Kind::Number, "momentum, nesterov, lars, muon"),
            more("train.filter_momentum", "Momentum of filters", Kind::Number, "muon"),
            more(
                "train.bias_lr",
                "Learning rate of biases",
                Kind::Number,
                "muon: multiple of the learning rate",
            ),
            more(
                "train.head_lr",
                "Learning rate of the head",
                Kind::Number,
                "muon: multiple of the learning rate",
            ),
            more("train.weight_decay", "Weight decay", Kind::Number, ""),
            more(
                "train.decay_norm_and_bias",
                "Weight decay also on batch norms and biases",
                Kind::Switch,
                "",
            ),
            more("train.beta1", "Beta 1", Kind::Number, "adamw, lamb"),
            more("train.beta2", "Beta 2", Kind::Number, "adamw, lamb"),
            more("train.epsilon", "Epsilon", Kind::Number, "adamw, lamb"),
            more("train.ema_decay", "EMA of the weights", Kind::Number, "decay, such as 0.999; 0: none"),
            more("train.ema_steps", "EMA updated every", Kind::Integer, "steps"),
        ],
    ),
    (
        "Learning rate",
        &[
            more("train.warmup_epochs", "Warm-up", Kind::Number, "epochs, from 0"),
            more(
                "train.milestones",
                "Milestones",
                Kind::Numbers,
                "step: epochs at which the learning rate falls",
            ),
            more("train.gamma", "Gamma", Kind::Number, "step: factor at a milestone"),
            more("train.pct_start", "Rising fraction", Kind::Number, "one_cycle: fraction of all steps"),
            more(
                "train.final_lr_fraction",
                "Final fraction",
                Kind::Number,
                "cosine, one_cycle: fraction of the learning rate",
            ),
        ],
    ),
    (
        "Loss",
        &[
            more(
                "loss.kind",
                "Loss",
                Kind::Choice(&LossKind::NAMES),
                "arcface, cosface: margins for embeddings",
            ),
            more("train.label_smoothing", "Label smoothing", Kind::Number, "0 to 1"),
            more("loss.scale", "Scale of cosines", Kind::Number, "arcface, cosface"),
            more("loss.margin", "Margin", Kind::Number, "empty: 0.5 for arcface, 0.4 for cosface"),
            more(
                "loss.sample_share",
                "Share of the classes in a step",
                Kind::Number,
                "Partial FC, for very many classes; 1: all",
            ),
            more(
                "loss.class_weights",
                "Class weights",
                Kind::Weights,
                r#"balanced, numbers such as 1, 2.5, or {"cat": 2.5}"#,
            ),
        ],
    ),
    (
        "Ranks",
        &[
            field("parallel.ranks", "Ranks", Kind::Integer, "processes that train together, one per slot"),
            field("parallel.device", "Device", Kind::Choice(&Device::NAMES), ""),
            more(
                "parallel.mode",
                "Mode",
                Kind::Choice(&["data", "hybrid", "auto"]),
                "hybrid: ranks share a network; auto: hybrid if it is faster",
            ),
            more("parallel.model", "Ranks per network", Kind::Integer, "hybrid: ranks that share one copy"),
            more("parallel.height", "Ranks per picture", Kind::Integer, "hybrid: ranks that share the rows"),
            more("parallel.pipeline", "Stages", Kind::Integer, "hybrid: consecutive parts of the network"),
            more(
                "parallel.shard",
                "Split operators",
                Kind::Words,
                r#"hybrid, such as [{"match": "layer4.*", "split": "out"}]; empty: the last layer"#,
            ),
            more("parallel.optimizer_sharding", "Divide optimizer state over ranks", Kind::Switch, ""),
            more("parallel.sync_batch_norm", "Batch norm over all ranks", Kind::Switch, ""),
            more("parallel.gradients_mean", "Average gradients (off: sum)", Kind::Switch, ""),
            more(
                "parallel.parameter_broadcast",
                "Send rank 0's weights to all at the start",
                Kind::Switch,
                "",
            ),
        ],
    ),
    (
        "Recovery",
        &[
            more("recovery.max_restarts", "Maximum restarts", Kind::Integer, ""),
            more("recovery.stall_timeout_secs", "Stall time-out", Kind::Integer, "seconds without progress"),
            more(
                "recovery.min_ranks",
                "Fewest ranks",
                Kind::Integer,
                "if machines are lost, continue with at least this number; empty: all",
            ),
            more(
                "recovery.wait_seconds",
                "Wait for lost ranks",
                Kind::Integer,
                "seconds, before continuing with fewer",
            ),
        ],
    ),
    (
        "Checkpoints and log",
        &[
            more(
                "checkpoint.every_epochs",
                "Epochs between checkpoints",
                Kind::Integer,
                "empty: 1; fill in this field or the next, not both",
            ),
            more("checkpoint.every_steps", "Steps between checkpoints", Kind::Integer, "in place of epochs"),
            more("checkpoint.keep", "Checkpoints kept", Kind::Integer, "the newest, 2 or more"),
            more(
                "checkpoint.keep_best",
                "Best checkpoint by",
                Kind::Choice(&["val_accuracy", "val_loss", "none"]),
                "kept in addition",
            ),
            more(
                "checkpoint.sharded",
                "Sharded checkpoints",
                Kind::Switch,
                "all ranks write, in parts with an index",
            ),
            more("evaluate.every_epochs", "Epochs between validations", Kind::Integer, "0: at the end"),
            more(
                "stop.patience",
                "Early stopping after",
                Kind::Integer,
                "validations without an improvement; empty: never",
            ),
            more(
                "stop.metric",
                "Early stopping by",
                Kind::Choice(&["", "val_accuracy", "val_loss", "val_ema_accuracy", "val_ema_loss"]),
                "empty: val_accuracy",
            ),
            more("stop.min_delta", "Smallest improvement", Kind::Number, "of accuracies: 0 to 1"),
            more(
                "stop.goal",
                "Better is",
                Kind::Choice(&["", "maximize", "minimize"]),
                "empty: by the metric",
            ),
            more("evaluate.views", "Views in validation", Kind::Integer, "2: also mirrored; 6: also shifted"),
            more("log.every_steps", "Steps between logged losses", Kind::Integer, "0: at most 10 a second"),
            more("log.histograms", "Steps between histograms", Kind::Integer, "at least 10; 0: none"),
        ],
    ),
];

pub(super) fn fields() -> impl Iterator<Item = &'static Field> {
    GROUPS.iter().flat_map(|(_, fields)| fields.iter())
}

impl Kind {
    /// Converts a field's text to JSON. Text of the wrong type stays text, so that the check reports it.
    pub(super) fn json(self, text: &str) -> Value {
        let or_text = |parsed: Option<Value>| parsed.unwrap_or_else(|| text.into());
        // A float without a fraction becomes an integer, because people write 1e3 for 1000.
        let number = |text: &str| text.parse::<f64>().ok().filter(|v| v.is_finite()).map(Value::from);
        let integer =
            |text: &str| text.parse::<i64>().map(Value::from).or(text.parse::<u64>().map(Value::from)).ok();
        // Accepts the notations of TOML, JSON and error messages, too.
        let list = || serde_json::from_str::<Vec<Value>>(text).ok().map(Value::from);
        match self {
            Kind::Text | Kind::Choice(_) | Kind::Dataset => text.into(),
            // Browsers send line breaks as CR LF.
            Kind::Lines => text.replace("\r\n", "\n").into(),
            Kind::Sizes | Kind::Numbers | Kind::Words | Kind::Weights if text.starts_with('[') => {
                or_text(list())
            }
            Kind::Weights if text.starts_with('{') => or_text(serde_json::from_str(text).ok()),
            Kind::Words => text.split(',').map(str::trim).filter(|word| !word.is_empty()).collect(),
            Kind::Integer => or_text(integer(text).or_else(|| number(text))),
            Kind::Number | Kind::NumberOrText => or_text(number(text)),
            Kind::Switch => or_text(text.parse::<bool>().ok().map(Value::from)),
            Kind::Sizes => or_text(integer(text).or_else(|| number(text)).or_else(|| {
                let entry = |entry: &str| {
                    let (epoch, size) = entry.split_once(':')?;
                    Some(json!([integer(epoch.trim())?, integer(size.trim())?]))
                };
                text.split(',').map(entry).collect::<Option<Vec<_>>>().map(Value::from)
            })),
            Kind::Numbers | Kind::Weights => or_text(
                text.split([',', ' '])
                    .filter(|t| !t.is_empty())
                    .map(|t| integer(t).or_else(|| number(t)))
                    .collect::<Option<Vec<_>>>()
                    .map(Value::from),
            ),
        }
    }

    /// Returns the type's name for `static/submit.js`.
    pub(super) fn word(self) -> &'static str {
        match self {
            Kind::Text | Kind::Lines | Kind::Choice(_) | Kind::Dataset => "text",
            Kind::Integer | Kind::Number | Kind::NumberOrText => "number",
            Kind::Numbers | Kind::Weights => "numbers",
            Kind::Words => "words",
            Kind::Sizes => "sizes",
            Kind::Switch => "switch",
        }
    }
}
