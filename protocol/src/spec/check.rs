//! Reads a specification and reports every mistake at once: first the shape of the document against
//! [`KEYS`], then the combinations that cannot work.

use super::{Arch, JobSpec};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt::Write as _;
use utoipa::ToSchema;

/// A mistake in a specification and where it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SpecError {
    /// JSON pointer (RFC 6901), such as `/train/batch_size`; empty for the whole document.
    pub pointer: String,
    /// What is wrong and what would be right.
    pub detail: String,
}

/// What a key may hold.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// Text of so many characters.
    Text {
        min: usize,
        max: usize,
    },
    /// One of these words.
    Word(&'static [&'static str]),
    Bool,
    /// A whole number, both ends included.
    Whole {
        min: i64,
        max: i64,
    },
    /// Any whole number from 0 that 64 bits hold.
    Seed,
    /// A number; the first end is left out when `above`, the last one when `below`.
    Number {
        min: f64,
        max: f64,
        above: bool,
        below: bool,
    },
    /// One to three numbers, one a channel.
    Channels {
        positive: bool,
    },
    /// Ascending epochs.
    Epochs,
    /// A split's name, or a fraction of the training split.
    Validation,
    /// `dynamic`, or a positive number.
    LossScale,
}

/// A table of keys.
#[derive(Debug)]
pub struct Section {
    /// Empty for the top of the document.
    pub name: &'static str,
    pub keys: &'static [(&'static str, Kind)],
}

const FINITE: f64 = f32::MAX as f64;
const MAX_STEPS: i64 = 1_000_000_000;

const fn whole(min: i64, max: i64) -> Kind {
    Kind::Whole { min, max }
}

const fn number(min: f64, max: f64) -> Kind {
    Kind::Number { min, max, above: false, below: false }
}

/// Every key with what it may hold, in the order of the documentation.
pub const KEYS: &[Section] = &[
    Section {
        name: "",
        keys: &[("name", Kind::Text { min: 1, max: 200 }), ("priority", whole(-1000, 1000))],
    },
    Section {
        name: "model",
        keys: &[
            ("arch", Kind::Word(&ARCHS)),
            ("stem", Kind::Word(&["auto", "imagenet", "cifar"])),
            ("zero_init_residual", Kind::Bool),
            ("pretrained", Kind::Text { min: 1, max: 4096 }),
        ],
    },
    Section {
        name: "data",
        keys: &[
            ("dataset", Kind::Text { min: 1, max: 4096 }),
            ("validation", Kind::Validation),
            ("image_size", whole(8, 4096)),
            ("crop_padding", whole(0, 512)),
            ("horizontal_flip", Kind::Bool),
            ("mean", Kind::Channels { positive: false }),
            ("std", Kind::Channels { positive: true }),
            ("drop_remainder", Kind::Bool),
            ("broken_files", Kind::Word(&["fail", "skip"])),
        ],
    },
    Section {
        name: "train",
        keys: &[
            ("epochs", whole(1, 100_000)),
            ("steps", whole(1, MAX_STEPS)),
            ("batch_size", whole(1, 65_536)),
            ("global_batch_size", whole(1, 1 << 24)),
            ("optimizer", Kind::Word(&["momentum", "nesterov", "lars"])),
            ("lr", Kind::Number { min: 0.0, max: 1e4, above: true, below: false }),
            ("momentum", Kind::Number { min: 0.0, max: 1.0, above: false, below: true }),
            ("weight_decay", number(0.0, 1.0)),
            ("schedule", Kind::Word(&["constant", "step", "cosine", "one_cycle"])),
            ("warmup_epochs", number(0.0, 100_000.0)),
            ("milestones", Kind::Epochs),
            ("gamma", Kind::Number { min: 0.0, max: 1.0, above: true, below: false }),
            ("rise", Kind::Number { min: 0.0, max: 1.0, above: false, below: true }),
            ("final_lr_share", number(0.0, 1.0)),
            ("label_smoothing", Kind::Number { min: 0.0, max: 1.0, above: false, below: true }),
            ("accumulate", whole(1, 4096)),
            ("precision", Kind::Word(&["auto", "fp32", "bf16", "fp16"])),
            ("loss_scale", Kind::LossScale),
            ("deterministic", Kind::Bool),
            ("seed", Kind::Seed),
        ],
    },
    Section {
        name: "parallel",
        keys: &[
            ("ranks", whole(1, 1024)),
            ("device", Kind::Word(&["auto", "cuda", "cpu"])),
            ("mode", Kind::Word(&["data"])),
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
        ],
    },
    Section {
        name: "recovery",
        keys: &[("max_restarts", whole(0, 1000)), ("stall_timeout_secs", whole(5, 86_400))],
    },
    Section { name: "evaluate", keys: &[("every_epochs", whole(0, 100_000))] },
    Section { name: "log", keys: &[("every_steps", whole(0, MAX_STEPS))] },
];

const ARCHS: [&str; Arch::ALL.len()] = {
    let mut names = [""; Arch::ALL.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = Arch::ALL[i].1;
        i += 1;
    }
    names
};

/// Reads a specification from JSON.
///
/// # Errors
/// Every mistake in it, in the order of [`KEYS`]: unknown keys (with the nearest right name), wrong
/// types, values out of range, combinations that cannot work.
pub fn from_json(document: &Value) -> Result<JobSpec, Vec<SpecError>> {
    let mut errors = Vec::new();
    let mut document = document.clone();
    check_shape(&mut document, &mut errors);
    // Keys with a mistake are gone by now, so the rest can be read and its combinations checked too.
    let spec = match serde_json::from_value::<JobSpec>(document.clone()) {
        Ok(spec) => spec,
        Err(e) => {
            if errors.is_empty() {
                errors.push(SpecError { pointer: String::new(), detail: e.to_string() });
            }
            return Err(errors);
        }
    };
    check_combinations(&spec, &mut errors);
    if errors.is_empty() { Ok(spec) } else { Err(errors) }
}

/// Reads a specification from TOML.
///
/// # Errors
/// As [`from_json`]; a syntax error names its line and column.
pub fn from_toml(text: &str) -> Result<JobSpec, Vec<SpecError>> {
    from_json(&toml_document(text).map_err(|e| vec![e])?)
}

/// A TOML document as JSON, not checked any further.
///
/// # Errors
/// A syntax error, with its line and column.
pub fn toml_document(text: &str) -> Result<Value, SpecError> {
    let failed = |detail: String| SpecError { pointer: String::new(), detail };
    let table: toml::Table = toml::from_str(text).map_err(|e| {
        let at = e.span().map_or_else(String::new, |span| {
            let before = &text[..span.start.min(text.len())];
            let line = before.matches('\n').count() + 1;
            let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
            format!("line {line}, column {column}: ")
        });
        failed(format!("{at}{}", e.message().replace('\n', " ")))
    })?;
    Ok(json_of(toml::Value::Table(table)))
}

/// JSON has no NaN, infinity or dates: they stay text, which no number's check accepts.
fn json_of(value: toml::Value) -> Value {
    match value {
        toml::Value::Table(table) => Value::Object(table.into_iter().map(|(k, v)| (k, json_of(v))).collect()),
        toml::Value::Array(list) => Value::Array(list.into_iter().map(json_of).collect()),
        toml::Value::String(text) => Value::String(text),
        toml::Value::Integer(n) => n.into(),
        toml::Value::Boolean(b) => b.into(),
        toml::Value::Float(n) => {
            serde_json::Number::from_f64(n).map_or_else(|| Value::String(n.to_string()), Value::Number)
        }
        toml::Value::Datetime(d) => Value::String(d.to_string()),
    }
}

/// Applies `key.path=value` to a document; the value is TOML, or else plain text. `key.path=` takes
/// the key away, back to its default.
///
/// # Errors
/// A sentence that says what the argument lacks.
pub fn apply_set(document: &mut Value, argument: &str) -> Result<(), String> {
    let (path, text) = argument
        .split_once('=')
        .ok_or_else(|| format!("{argument:?} has no '='; write it as train.lr=0.1"))?;
    let path: Vec<&str> = path.trim().split('.').collect();
    let (Some((last, parents)), false) = (path.split_last(), path.iter().any(|p| p.is_empty())) else {
        return Err(format!("{argument:?} names no key; write it as train.lr=0.1"));
    };
    let text = text.trim();
    let value = if text.is_empty() {
        Value::Null
    } else {
        toml::from_str::<toml::Table>(&format!("value = {text}"))
            .ok()
            .and_then(|mut t| t.remove("value"))
            .map(json_of)
            .unwrap_or_else(|| Value::String(text.to_owned()))
    };
    let mut table = document;
    for name in parents {
        if !table.is_object() {
            return Err(format!("{argument:?}: the part before {name:?} is no table"));
        }
        table = &mut table[*name];
        if table.is_null() {
            *table = Value::Object(Map::new());
        }
    }
    let Value::Object(table) = table else {
        return Err(format!("{argument:?}: the part before {last:?} is no table"));
    };
    table.insert((*last).to_owned(), value);
    Ok(())
}

/// Takes every key with a mistake out of `document`.
fn check_shape(document: &mut Value, errors: &mut Vec<SpecError>) {
    let Value::Object(top) = document else {
        return errors.push(SpecError {
            pointer: String::new(),
            detail: format!("a specification is a table of keys; this is {}", type_of(document)),
        });
    };
    let top_names = || KEYS[0].keys.iter().map(|(k, _)| *k).chain(KEYS[1..].iter().map(|s| s.name));
    check_section(top, &KEYS[0], "", &top_names().collect::<Vec<_>>(), errors);
    for section in &KEYS[1..] {
        match top.get_mut(section.name) {
            None => {}
            Some(Value::Object(table)) => {
                let names: Vec<_> = section.keys.iter().map(|(k, _)| *k).collect();
                check_section(table, section, section.name, &names, errors);
            }
            Some(other) => {
                let detail = format!("must be a table of keys, is {}", type_of(other));
                errors.push(SpecError { pointer: format!("/{}", section.name), detail });
                top.remove(section.name);
            }
        }
    }
}

fn check_section(
    table: &mut Map<String, Value>,
    section: &Section,
    prefix: &str,
    names: &[&str],
    errors: &mut Vec<SpecError>,
) {
    let pointer = |key: &str| {
        let key = key.replace('~', "~0").replace('/', "~1");
        if prefix.is_empty() { format!("/{key}") } else { format!("/{prefix}/{key}") }
    };
    for (key, kind) in section.keys {
        // JSON's null is an absent key.
        if table.get(*key).is_some_and(Value::is_null) {
            table.remove(*key);
        }
        if let Some(value) = table.get(*key)
            && let Err(detail) = kind.check(value)
        {
            errors.push(SpecError { pointer: pointer(key), detail });
            table.remove(*key);
        }
    }
    let unknown: Vec<String> = table.keys().filter(|k| !names.contains(&k.as_str())).cloned().collect();
    for key in unknown {
        errors.push(SpecError { pointer: pointer(&key), detail: unknown_key(&key, section.name, names) });
        table.remove(&key);
    }
}

fn unknown_key(key: &str, section: &str, names: &[&str]) -> String {
    let shown: String = key.chars().take(60).collect();
    let mut detail = format!("no key is called {shown:?} here");
    if let Some(near) = nearest(key, names.iter().copied()) {
        let _ = write!(detail, "; did you mean {near:?}?");
    } else if let Some(home) =
        KEYS.iter().find(|s| s.name != section && s.keys.iter().any(|(k, _)| *k == key))
    {
        let home =
            if home.name.is_empty() { "the top of the document".into() } else { format!("[{}]", home.name) };
        let _ = write!(detail, "; it belongs to {home}");
    } else {
        let _ = write!(detail, "; the keys are {}", names.join(", "));
    }
    detail
}

/// The name that a person who typed `word` most likely meant.
pub fn nearest<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    names
        .map(|n| (strsim::jaro_winkler(&word.to_lowercase(), &n.to_lowercase()), n))
        .filter(|(score, _)| *score > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, n)| n)
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(n) if n.is_f64() => "a number with a fraction",
        Value::Number(_) => "a whole number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a table",
    }
}

impl Kind {
    /// # Errors
    /// What the value must be and what it is.
    fn check(self, value: &Value) -> Result<(), String> {
        let is = |what: &str| Err(format!("must be {what}, is {}", shown(value)));
        match self {
            Kind::Text { min, max } => match value.as_str() {
                None => is("text"),
                Some(t) if t.chars().any(char::is_control) => Err("must not hold control characters".into()),
                Some(t) if !(min..=max).contains(&t.trim().chars().count()) => {
                    Err(format!("must have {min} to {max} characters, has {}", t.trim().chars().count()))
                }
                Some(_) => Ok(()),
            },
            Kind::Word(words) => match value.as_str() {
                Some(word) if words.contains(&word) => Ok(()),
                Some(word) => {
                    let near = nearest(word, words.iter().copied())
                        .map_or_else(String::new, |n| format!("; did you mean {n:?}?"));
                    Err(format!("must be {}, is {}{near}", one_of(words), shown(value)))
                }
                None => is(&one_of(words)),
            },
            Kind::Bool => {
                if value.is_boolean() {
                    Ok(())
                } else {
                    is("true or false")
                }
            }
            Kind::Whole { min, max } => match value.as_i64() {
                Some(n) if (min..=max).contains(&n) => Ok(()),
                _ => is(&format!("a whole number from {} to {}", grouped(min), grouped(max))),
            },
            Kind::Seed => {
                if value.as_u64().is_some() {
                    Ok(())
                } else {
                    is("a whole number from 0 to 2^64 - 1")
                }
            }
            Kind::Number { min, max, above, below } => match value.as_f64() {
                Some(n)
                    if n.abs() <= FINITE
                        && (if above { n > min } else { n >= min })
                        && (if below { n < max } else { n <= max }) =>
                {
                    Ok(())
                }
                _ => is(&format!(
                    "a number {} {min} and {} {max}",
                    if above { "above" } else { "of at least" },
                    if below { "below" } else { "of at most" }
                )),
            },
            Kind::Channels { positive } => {
                let fits =
                    |v: &Value| v.as_f64().is_some_and(|n| n.abs() <= 1000.0 && (!positive || n > 0.0));
                match value.as_array() {
                    Some(list) if [1, 3].contains(&list.len()) && list.iter().all(fits) => Ok(()),
                    _ => is(if positive {
                        "a list of 1 or 3 positive numbers, one a channel"
                    } else {
                        "a list of 1 or 3 numbers, one a channel"
                    }),
                }
            }
            Kind::Epochs => {
                let epochs: Option<Vec<u64>> =
                    value.as_array().and_then(|l| l.iter().map(Value::as_u64).collect());
                match epochs {
                    Some(list)
                        if list.len() <= 1000
                            && list.iter().all(|e| (1..=100_000).contains(e))
                            && list.is_sorted_by(|a, b| a < b) =>
                    {
                        Ok(())
                    }
                    _ => is("a list of ascending epochs, such as [30, 60, 80]"),
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
                _ => is("a split such as \"test\", \"none\", or a fraction above 0 and below 1"),
            },
            Kind::LossScale => match value {
                Value::String(word) if word == "dynamic" => Ok(()),
                Value::Number(n) if n.as_f64().is_some_and(|f| f > 0.0 && f <= 1e9) => Ok(()),
                _ => is("\"dynamic\" or a positive number such as 1024"),
            },
        }
    }
}

fn one_of(words: &[&str]) -> String {
    match words {
        [word] => format!("{word:?}"),
        _ => format!("one of {}", words.join(", ")),
    }
}

fn shown(value: &Value) -> String {
    let text = value.to_string();
    match value {
        Value::Array(_) | Value::Object(_) | Value::Null => type_of(value).into(),
        _ if text.chars().count() > 60 => format!("{}...", text.chars().take(60).collect::<String>()),
        _ => text,
    }
}

/// `1,000,000`.
fn grouped(n: i64) -> String {
    let digits = n.unsigned_abs().to_string();
    let mut out = String::from(if n < 0 { "-" } else { "" });
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn check_combinations(spec: &JobSpec, errors: &mut Vec<SpecError>) {
    let flawed = |pointer: &str, errors: &[SpecError]| errors.iter().any(|e| e.pointer == pointer);
    let mut mistake = |pointer: &str, detail: String| {
        if !flawed(pointer, errors) {
            errors.push(SpecError { pointer: pointer.into(), detail });
        }
    };
    if spec.data.dataset.trim().is_empty() {
        mistake(
            "/data/dataset",
            "is missing: give a registered dataset's name (`lockstep dataset list`)".into(),
        );
    }
    if spec.train.epochs.is_some() && spec.train.steps.is_some() {
        mistake("/train/steps", "give either epochs or steps, not both".into());
    }
    match (spec.train.batch_size, spec.train.global_batch_size) {
        (Some(_), Some(_)) => mistake(
            "/train/global_batch_size",
            "give either batch_size (a rank) or global_batch_size, not both".into(),
        ),
        (None, Some(global)) => {
            let parts = spec.parallel.ranks.saturating_mul(spec.train.accumulate).max(1);
            if !global.is_multiple_of(parts) {
                let below = global / parts * parts;
                let near =
                    if below == 0 { parts.to_string() } else { format!("{below} or {}", below + parts) };
                mistake(
                    "/train/global_batch_size",
                    format!(
                        "{global} cannot be divided over {} ranks x {} micro-batches; {near} can",
                        spec.parallel.ranks, spec.train.accumulate
                    ),
                );
            }
        }
        _ => {}
    }
    if spec.checkpoint.every_epochs.is_some() && spec.checkpoint.every_steps.is_some() {
        mistake("/checkpoint/every_steps", "give either every_epochs or every_steps, not both".into());
    }
    if spec.train.schedule == super::ScheduleKind::Step && spec.train.milestones.is_empty() {
        mistake(
            "/train/milestones",
            "schedule \"step\" needs the epochs at which the learning rate falls, such as [30, 60, 80]"
                .into(),
        );
    }
    if let (Some(mean), Some(std)) = (&spec.data.mean, &spec.data.std)
        && mean.len() != std.len()
    {
        mistake("/data/std", format!("has {} values, but mean has {}", std.len(), mean.len()));
    }
    let half = matches!(spec.train.precision, super::Precision::Bf16 | super::Precision::Fp16);
    if half && spec.parallel.device == super::Device::Cpu {
        mistake("/train/precision", "the CPU engine computes in fp32: use \"fp32\" or \"auto\"".into());
    }
    if spec.data.validation == super::Validation::Split("train".into()) {
        mistake(
            "/data/validation",
            "validating on the training split measures nothing: give another split, a fraction, or \"none\""
                .into(),
        );
    }
    let no_validation = spec.data.validation == super::Validation::Split("none".into());
    if let (Some(size), false) = (spec.data.image_size, spec.model.arch.is_cifar_family())
        && size < 16
    {
        mistake(
            "/data/image_size",
            format!(
                "{size} is too small for {}: its last stage would have nothing left; give 16 or more",
                spec.model.arch.name()
            ),
        );
    }
    // The default keeps the best by val_accuracy, which is harmless without validation.
    if no_validation && spec.checkpoint.keep_best == "val_loss" {
        mistake(
            "/checkpoint/keep_best",
            "there is no val_loss without validation: set data.validation, or \"none\" here".into(),
        );
    }
}
