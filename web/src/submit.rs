//! The form for a new job. It works without a script as a plain form; `static/submit.js` adds checking
//! while typing and the same specification as TOML.
//!
//! A field is named by its path in the specification (`train.lr`), so a mistake at `/train/lr` finds it.

use crate::{layout::Nav, numbers::count};
use askama::Template;
use lockstep_protocol::{
    JobSpec,
    dataset::Dataset,
    spec::{Arch, SpecError},
};
use serde_json::{Map, Value};
use std::{collections::BTreeMap, sync::LazyLock};

/// What a field holds, and so how its text becomes JSON.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Text,
    /// A whole number.
    Integer,
    Number,
    /// A number, or else a word: `0.1` or `test`.
    NumberOrText,
    /// Numbers with commas between them.
    Numbers,
    Switch,
    Choice(&'static [&'static str]),
    Dataset,
}

struct Field {
    /// Its path in the specification.
    key: &'static str,
    label: &'static str,
    kind: Kind,
    /// Unit or meaning, a few words.
    hint: &'static str,
    /// Behind `More settings`.
    more: bool,
}

const fn field(key: &'static str, label: &'static str, kind: Kind, hint: &'static str) -> Field {
    Field { key, label, kind, hint, more: false }
}

const fn more(key: &'static str, label: &'static str, kind: Kind, hint: &'static str) -> Field {
    Field { key, label, kind, hint, more: true }
}

const ARCHES: [&str; Arch::ALL.len()] = {
    let mut names = [""; Arch::ALL.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = Arch::ALL[i].1;
        i += 1;
    }
    names
};

/// Every key of a specification, grouped as shown.
const GROUPS: [(&str, &[Field]); 4] = [
    (
        "Job",
        &[
            field("name", "Name", Kind::Text, ""),
            more("priority", "Priority", Kind::Integer, "higher starts first, -1000 to 1000"),
            field("model.arch", "Network", Kind::Choice(&ARCHES), ""),
            field("data.dataset", "Dataset", Kind::Dataset, ""),
            field("data.image_size", "Image size", Kind::Integer, "pixels; empty: the dataset's own"),
            more("model.stem", "Stem", Kind::Choice(&["auto", "imagenet", "cifar"]), "auto: by image size"),
            more("model.zero_init_residual", "Residual blocks start as identity", Kind::Switch, ""),
            more("model.pretrained", "Start from", Kind::Text, "safetensors path or checkpoint id"),
            more(
                "data.validation",
                "Validation",
                Kind::NumberOrText,
                "a split, a share of train such as 0.1, or none",
            ),
            more("data.crop_padding", "Random crop padding", Kind::Integer, "pixels; 0: no crop"),
            more("data.mean", "Mean", Kind::Numbers, "a channel; empty: the dataset's"),
            more("data.std", "Deviation", Kind::Numbers, "a channel; empty: the dataset's"),
            more("data.broken_files", "Broken files", Kind::Choice(&["fail", "skip"]), ""),
            more("data.horizontal_flip", "Random horizontal flip", Kind::Switch, ""),
            more("data.drop_remainder", "Leave out an epoch's last, smaller batch", Kind::Switch, ""),
        ],
    ),
    (
        "Training",
        &[
            field("train.epochs", "Epochs", Kind::Integer, "or steps, under more"),
            field("train.batch_size", "Batch size a rank", Kind::Integer, "pictures"),
            field(
                "train.global_batch_size",
                "or of all ranks",
                Kind::Integer,
                "pictures; divided over ranks",
            ),
            field("train.lr", "Learning rate", Kind::Number, "the highest"),
            field(
                "train.schedule",
                "Schedule",
                Kind::Choice(&["constant", "step", "cosine", "one_cycle"]),
                "",
            ),
            field("train.optimizer", "Optimizer", Kind::Choice(&["momentum", "nesterov", "lars"]), ""),
            more("train.steps", "Steps", Kind::Integer, "instead of epochs"),
            more("train.momentum", "Momentum", Kind::Number, ""),
            more("train.weight_decay", "Weight decay", Kind::Number, ""),
            more("train.label_smoothing", "Label smoothing", Kind::Number, "0 to 1"),
            more("train.warmup_epochs", "Warm-up", Kind::Number, "epochs, from 0"),
            more("train.milestones", "Milestones", Kind::Numbers, "step: epochs at which it falls"),
            more("train.gamma", "Gamma", Kind::Number, "step: factor at a milestone"),
            more("train.rise", "Rise", Kind::Number, "one_cycle: share of steps going up"),
            more(
                "train.final_lr_share",
                "Final share",
                Kind::Number,
                "cosine, one_cycle: of the learning rate",
            ),
            more("train.accumulate", "Accumulate", Kind::Integer, "micro-batches a step"),
            more("train.precision", "Precision", Kind::Choice(&["auto", "fp32", "bf16", "fp16"]), ""),
            more("train.loss_scale", "Loss scale", Kind::NumberOrText, "fp16: dynamic or a number"),
            more("train.deterministic", "Same bits in every run (GPUs: a few % slower)", Kind::Switch, ""),
            more("train.seed", "Seed", Kind::Integer, ""),
        ],
    ),
    (
        "Ranks",
        &[
            field("parallel.ranks", "Ranks", Kind::Integer, "processes in lockstep, one a slot"),
            field("parallel.device", "Device", Kind::Choice(&["auto", "cpu", "cuda"]), ""),
            more("parallel.sync_batch_norm", "Batch norm over all ranks", Kind::Switch, ""),
            more("parallel.gradients_mean", "Average gradients (off: sum)", Kind::Switch, ""),
            more(
                "parallel.parameter_broadcast",
                "Send rank 0's weights to all at the start",
                Kind::Switch,
                "",
            ),
            more("recovery.max_restarts", "Restarts", Kind::Integer, "at most"),
            more("recovery.stall_timeout_secs", "Stall time-out", Kind::Integer, "seconds without progress"),
        ],
    ),
    (
        "Checkpoints and log",
        &[
            more("checkpoint.every_epochs", "Checkpoint every", Kind::Integer, "epochs; empty: 1"),
            more("checkpoint.every_steps", "or every", Kind::Integer, "steps"),
            more("checkpoint.keep", "Keep the newest", Kind::Integer, "2 or more"),
            more(
                "checkpoint.keep_best",
                "Keep the best by",
                Kind::Choice(&["val_accuracy", "val_loss", "none"]),
                "",
            ),
            more("evaluate.every_epochs", "Validate every", Kind::Integer, "epochs; 0: at the end"),
            more("log.every_steps", "Log the loss every", Kind::Integer, "steps; 0: at most 10 a second"),
        ],
    ),
];

fn fields() -> impl Iterator<Item = &'static Field> {
    GROUPS.iter().flat_map(|(_, fields)| fields.iter())
}

/// The default of every key, as the form writes it.
static DEFAULTS: LazyLock<Form> =
    LazyLock::new(|| Form::from_spec(&JobSpec { name: String::new(), ..JobSpec::default() }));

/// What stands in the form: the text of each field by its path in the specification.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Form {
    values: BTreeMap<String, String>,
}

impl Form {
    /// The fields of a posted form. Names that are no field are left out.
    pub fn from_pairs(pairs: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut values: BTreeMap<_, _> =
            fields().filter(|f| f.kind == Kind::Switch).map(|f| (f.key.to_owned(), "false".into())).collect();
        values.extend(pairs.into_iter().filter(|(key, _)| fields().any(|f| f.key == key)));
        Self { values }
    }

    /// The form that would make `spec`: to submit a job again with changes.
    pub fn from_spec(spec: &JobSpec) -> Self {
        // Through text, so that an f32 of 0.1 reads 0.1 and not its nearest f64.
        let document = serde_json::to_string(spec).ok().and_then(|text| serde_json::from_str(&text).ok());
        let mut form = Self::default();
        form.flatten("", &document.unwrap_or(Value::Null));
        form
    }

    fn flatten(&mut self, at: &str, value: &Value) {
        if let Value::Object(map) = value {
            for (key, value) in map {
                let path = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                self.flatten(&path, value);
            }
            return;
        }
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Array(items) => items.iter().map(Value::to_string).collect::<Vec<_>>().join(", "),
            Value::Null => String::new(),
            other => other.to_string(),
        };
        self.values.insert(at.to_owned(), text);
    }

    /// The specification as JSON, for `spec::from_json`. Empty fields are left out; text that is not
    /// what its field asks for stays text, so that the check names it.
    pub fn document(&self) -> Value {
        let mut document = Map::new();
        for field in fields() {
            let text = self.text(field.key).trim();
            if text.is_empty() {
                continue;
            }
            let value = field.kind.json(text);
            match field.key.split_once('.') {
                None => drop(document.insert(field.key.into(), value)),
                Some((table, key)) => {
                    let table = document.entry(table).or_insert_with(|| Value::Object(Map::new()));
                    if let Value::Object(table) = table {
                        table.insert(key.into(), value);
                    }
                }
            }
        }
        Value::Object(document)
    }

    fn text(&self, key: &str) -> &str {
        self.values.get(key).map_or("", String::as_str)
    }

    fn set(&mut self, key: &str, value: impl Into<String>) {
        self.values.insert(key.to_owned(), value.into());
    }
}

impl Kind {
    fn json(self, text: &str) -> Value {
        let or_text = |parsed: Option<Value>| parsed.unwrap_or_else(|| text.into());
        // A float that holds a whole number is written as one: 1e3 is 1000 to a person.
        let number = |text: &str| text.parse::<f64>().ok().filter(|v| v.is_finite()).map(Value::from);
        let integer =
            |text: &str| text.parse::<i64>().map(Value::from).or(text.parse::<u64>().map(Value::from)).ok();
        match self {
            Kind::Text | Kind::Choice(_) | Kind::Dataset => text.into(),
            Kind::Integer => or_text(integer(text).or_else(|| number(text))),
            Kind::Number | Kind::NumberOrText => or_text(number(text)),
            Kind::Switch => or_text(text.parse::<bool>().ok().map(Value::from)),
            Kind::Numbers => or_text(
                text.split([',', ' '])
                    .filter(|t| !t.is_empty())
                    .map(|t| integer(t).or_else(|| number(t)))
                    .collect::<Option<Vec<_>>>()
                    .map(Value::from),
            ),
        }
    }

    /// How `static/submit.js` reads the field.
    fn word(self) -> &'static str {
        match self {
            Kind::Text | Kind::Choice(_) | Kind::Dataset => "text",
            Kind::Integer => "integer",
            Kind::Number => "number",
            Kind::NumberOrText => "number-or-text",
            Kind::Numbers => "numbers",
            Kind::Switch => "switch",
        }
    }
}

/// A starting point for the form.
struct Preset {
    key: &'static str,
    title: &'static str,
    about: &'static str,
    /// Ranks at most; fewer when there are fewer slots.
    ranks: u32,
    /// What differs from the defaults.
    values: &'static [(&'static str, &'static str)],
}

const PRESETS: [Preset; 3] = [
    Preset {
        key: "fashion-mnist",
        title: "Fashion-MNIST, quick look",
        about: "ResNet-20, 5 epochs, a minute or so on two CPU cores",
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
        about: "ResNet-50 at 224 pixels on CIFAR-10, batch 32 a rank, 10 epochs",
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

/// `GET /jobs/new`; also the answer to a `POST /jobs/new` with mistakes in it.
#[derive(Debug, Clone)]
pub struct SubmitPage {
    /// What stands in the fields.
    pub form: Form,
    /// What is wrong with `form`, each beside its field.
    pub mistakes: Vec<SpecError>,
    /// To choose from.
    pub datasets: Vec<Dataset>,
    /// Slots of the machines that are online, busy or not.
    pub slots: u32,
    /// This server's address as the browser sees it, for commands to copy.
    pub server_url: String,
}

impl SubmitPage {
    /// An unsent form: of the preset named (`?preset=cifar10`), or else of the first one whose dataset
    /// is registered; on `dataset` if one is named (`?dataset=flowers`). To submit a job again
    /// (`?from={id}`), build the page with [`Form::from_spec`] instead.
    pub fn fresh(
        preset: Option<&str>,
        dataset: Option<&str>,
        datasets: Vec<Dataset>,
        slots: u32,
        server_url: String,
    ) -> Self {
        let wants = |p: &Preset, name: &str| p.values.contains(&("data.dataset", name));
        let named = PRESETS.iter().find(|p| Some(p.key) == preset);
        let fitting = || match dataset {
            Some(name) => PRESETS.iter().find(|p| wants(p, name)),
            None => PRESETS.iter().find(|p| datasets.iter().any(|d| wants(p, &d.name))),
        };
        let mut form = match named.or_else(fitting) {
            Some(preset) => preset_form(preset, slots),
            None => {
                let mut form = DEFAULTS.clone();
                form.set("name", "my-first-job");
                form.set("data.dataset", datasets.first().map_or("", |d| &d.name));
                form
            }
        };
        if let Some(dataset) = dataset {
            form.set("data.dataset", dataset);
        }
        Self { form, mistakes: Vec::new(), datasets, slots, server_url }
    }

    /// The page as HTML.
    ///
    /// # Errors
    /// As [`askama::Template::render`]; none that data can cause.
    pub fn render(&self) -> Result<String, askama::Error> {
        let view = |f: &'static Field| FieldView {
            field: f,
            id: format!("f-{}", f.key.replace(['.', '_'], "-")),
            pointer: format!("/{}", f.key.replace('.', "/")),
            value: self.form.text(f.key).to_owned(),
            default: DEFAULTS.text(f.key).to_owned(),
            errors: self.mistakes.iter().filter(|m| belongs(m, f)).map(|m| m.detail.clone()).collect(),
        };
        let group = |more: bool| {
            GROUPS
                .iter()
                .map(|(title, fields)| {
                    (*title, fields.iter().filter(|f| f.more == more).map(view).collect::<Vec<_>>())
                })
                .filter(|(_, fields)| !fields.is_empty())
                .collect::<Vec<_>>()
        };
        SubmitTemplate { page: self, groups: group(false), more: group(true) }.render()
    }
}

/// Whether a mistake is shown at a field: it is at the field's path, or inside its list.
fn belongs(mistake: &SpecError, field: &Field) -> bool {
    let path = mistake.pointer.trim_start_matches('/').replace('/', ".");
    path == field.key || path.strip_prefix(field.key).is_some_and(|rest| rest.starts_with('.'))
}

fn preset_form(preset: &Preset, slots: u32) -> Form {
    let mut form = DEFAULTS.clone();
    form.set("parallel.ranks", preset.ranks.min(slots).max(1).to_string());
    for (key, value) in preset.values {
        form.set(key, *value);
    }
    form
}

#[derive(Template)]
#[template(path = "submit.html")]
struct SubmitTemplate<'a> {
    page: &'a SubmitPage,
    groups: Vec<(&'static str, Vec<FieldView>)>,
    more: Vec<(&'static str, Vec<FieldView>)>,
}

struct FieldView {
    field: &'static Field,
    id: String,
    pointer: String,
    value: String,
    default: String,
    errors: Vec<String>,
}

impl FieldView {
    /// Each choice and whether it is made.
    fn options(&self) -> Vec<(&'static str, bool)> {
        let options: &[&str] = if let Kind::Choice(options) = self.field.kind { options } else { &[] };
        options.iter().map(|o| (*o, *o == self.value)).collect()
    }

    fn is_switch(&self) -> bool {
        self.field.kind == Kind::Switch
    }

    fn is_dataset(&self) -> bool {
        self.field.kind == Kind::Dataset
    }

    fn input_mode(&self) -> &'static str {
        match self.field.kind {
            Kind::Integer => "numeric",
            Kind::Number => "decimal",
            _ => "text",
        }
    }

    fn described_by(&self) -> String {
        format!("{0}-hint {0}-error", self.id)
    }
}

impl SubmitTemplate<'_> {
    fn nav(&self) -> Nav {
        Nav::Jobs
    }

    /// Mistakes that belong to no field, such as a combination that cannot work.
    fn general(&self) -> Vec<&SpecError> {
        self.page.mistakes.iter().filter(|m| !fields().any(|f| belongs(m, f))).collect()
    }

    fn more_has_mistakes(&self) -> bool {
        self.more.iter().any(|(_, fields)| fields.iter().any(|f| !f.errors.is_empty()))
    }

    /// Key, title, words about it, and the fields it sets as JSON for the script.
    fn presets(&self) -> Vec<(&'static str, &'static str, &'static str, String)> {
        let values = |p| serde_json::to_string(&preset_form(p, self.page.slots).values).unwrap_or_default();
        PRESETS.iter().map(|p| (p.key, p.title, p.about, values(p))).collect()
    }

    /// Name, what it holds and whether it is chosen, of each dataset; also the one that stands in the
    /// form, known or not.
    fn datasets(&self) -> Vec<(String, String, bool)> {
        let chosen = self.page.form.text("data.dataset");
        let mut options: Vec<_> = self
            .page
            .datasets
            .iter()
            .map(|d| {
                let train = d.info.splits.iter().find(|s| s.name == "train").or(d.info.splits.first());
                let pictures = train.map_or(0, |s| s.samples);
                let about =
                    format!("{}, {} pictures, {} classes", d.name, count(pictures), d.info.classes.len());
                (d.name.clone(), about, d.name == chosen)
            })
            .collect();
        if !chosen.is_empty() && !options.iter().any(|(_, _, chosen)| *chosen) {
            options.push((chosen.to_owned(), format!("{chosen}, not registered"), true));
        }
        options
    }

    fn slots(&self) -> String {
        match self.page.slots {
            0 => "no machine is online: the job will wait".into(),
            1 => "1 slot online".into(),
            n => format!("{} slots online", count(n.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(mistakes: Vec<SpecError>) -> SubmitPage {
        SubmitPage {
            mistakes,
            ..SubmitPage::fresh(Some("fashion-mnist"), None, vec![], 2, "http://127.0.0.1:7070".into())
        }
    }

    #[test]
    fn the_form_has_a_field_for_every_key_of_a_specification() {
        // With every optional key present.
        let mut spec = JobSpec::default();
        spec.model.pretrained = Some("x".into());
        spec.data.image_size = Some(1);
        spec.data.mean = Some(vec![0.5]);
        spec.data.std = Some(vec![0.5]);
        spec.train.epochs = Some(1);
        spec.train.steps = Some(1);
        spec.train.batch_size = Some(1);
        spec.train.global_batch_size = Some(1);
        spec.checkpoint.every_epochs = Some(1);
        spec.checkpoint.every_steps = Some(1);
        let form = Form::from_spec(&spec);
        // `data` is the only mode, so there is nothing to choose.
        let missing: Vec<_> =
            form.values.keys().filter(|k| *k != "parallel.mode" && !fields().any(|f| f.key == *k)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn a_form_becomes_the_specification_it_came_from() {
        let mut spec = JobSpec { name: "x".into(), ..JobSpec::default() };
        spec.data.dataset = "cifar10".into();
        spec.data.mean = Some(vec![0.4914, 0.4822, 0.4465]);
        spec.train.lr = 0.1;
        spec.train.milestones = vec![3, 6];
        let document = Form::from_spec(&spec).document();
        assert_eq!(document["train"]["lr"].to_string(), "0.1");
        let back: JobSpec = serde_json::from_value(document).expect("of the right types");
        assert_eq!(back, spec);
    }

    #[test]
    fn a_posted_form_turns_unticked_boxes_off_and_keeps_wrong_text_for_the_check() {
        let pairs = [("train.lr", "fast"), ("name", "x"), ("data.horizontal_flip", "true"), ("evil", "1")];
        let form = Form::from_pairs(pairs.map(|(k, v)| (k.to_owned(), v.to_owned())));
        let document = form.document();
        assert_eq!(document["train"]["lr"], "fast");
        assert_eq!(document["data"]["horizontal_flip"], true);
        assert_eq!(document["data"]["drop_remainder"], false);
        assert!(document.get("evil").is_none());
    }

    #[test]
    fn a_mistake_stands_beside_its_field() {
        let html = page(vec![SpecError { pointer: "/train/lr".into(), detail: "must be above 0".into() }])
            .render()
            .expect("renders");
        let at = html.find("id=\"f-train-lr-error\"").expect("the place for its mistakes");
        let place: String = html[at..].chars().take(120).collect();
        assert!(place.contains("must be above 0"), "{place}");
    }

    #[test]
    fn a_mistake_behind_more_settings_opens_them_and_one_of_no_field_is_shown_above() {
        let html = page(vec![
            SpecError { pointer: "/train/seed".into(), detail: "must be a whole number".into() },
            SpecError { pointer: "/train".into(), detail: "give epochs or steps, not both".into() },
        ])
        .render()
        .expect("renders");
        assert!(html.contains("<details class=\"more\" open>"), "{html}");
        assert!(html.contains("give epochs or steps, not both"));
    }

    #[test]
    fn presets_are_specifications() {
        for preset in &PRESETS {
            let document = preset_form(preset, 8).document();
            let spec: Result<JobSpec, _> = serde_json::from_value(document);
            assert!(spec.is_ok(), "{}: {spec:?}", preset.key);
        }
    }
}
