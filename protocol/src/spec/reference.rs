//! The reference of the job file, generated from the code that reads it: names and limits from [`KEYS`], defaults from
//! [`JobSpec::default`], and meanings from the doc comments of the fields, through the OpenAPI schema.

use super::{
    CheckpointSpec, DataSpec, EvaluateSpec, JobSpec, KEYS, Kind, LogSpec, LossSpec, MAX_SIZES, ModelSpec,
    ParallelSpec, Recipe, RecoverySpec, StopSpec, TrainSpec,
    image_size::SIDES,
    keys::{MAX_JITTER, MAX_LISTED_EPOCHS, MAX_LOSS_SCALE, SWEEP, grouped},
    loss::{MAX_WEIGHTS, WEIGHT_RANGE},
    shard::MAX_SHARDS,
    sweep::{MIN_EPOCHS, REDUCTION, RUNGS, SweepSpec},
};
use crate::limits::{MAX_TAGS, NOTES_BYTES, PROJECT_CHARS, TAG_CHARS};
use serde_json::Value;
use utoipa::PartialSchema;

/// A table of the job file.
#[derive(Debug, Clone)]
pub struct SectionReference {
    /// Name of the table; empty for the top of the document.
    pub name: &'static str,
    pub meaning: String,
    pub keys: Vec<KeyReference>,
}

/// A key of the job file.
#[derive(Debug, Clone)]
pub struct KeyReference {
    pub name: &'static str,
    /// Type and limits, in words.
    pub values: String,
    /// The default in TOML; `None` if a job without the key has no value for it.
    pub default: Option<String>,
    pub meaning: String,
}

/// A recipe and its settings.
#[derive(Debug, Clone)]
pub struct RecipeReference {
    pub name: &'static str,
    /// `train.lr`, and the number of pictures in a step for which this rate is meant.
    pub lr: (f64, f64),
    /// Paths such as `train.epochs`, with their values in TOML.
    pub keys: Vec<(String, String)>,
}

/// Every table with every key, in the order of [`KEYS`].
pub fn reference() -> Vec<SectionReference> {
    let defaults = Value::Object(JobSpec::default().settings());
    let of_section = |section: &super::Section| {
        let schema = schema(section.name);
        let table = if section.name.is_empty() { &defaults } else { &defaults[section.name] };
        let keys = section.keys.iter().map(|(name, kind)| KeyReference {
            name,
            values: kind.in_words(),
            // The default of `dataset` is an empty text, which means that the key must be given.
            default: table.get(*name).filter(|default| *default != "").map(toml_value),
            meaning: description(&schema["properties"][*name]),
        });
        SectionReference { name: section.name, meaning: description(&schema), keys: keys.collect() }
    };
    KEYS.iter().map(of_section).collect()
}

/// The section `sweep`, which only job files have, not jobs.
pub fn sweep_reference() -> SectionReference {
    let schema = serde_json::to_value(SweepSpec::schema()).unwrap_or_default();
    let key = |name: &'static str, values: String| {
        let default = match name {
            "seed" => Some("0".to_owned()),
            "reduction" => Some(REDUCTION.to_string()),
            "min_epochs" => Some(MIN_EPOCHS.to_string()),
            "rungs" => Some(RUNGS.to_string()),
            _ => None,
        };
        KeyReference { name, values, default, meaning: description(&schema["properties"][name]) }
    };
    let mut keys: Vec<_> = SWEEP.keys.iter().map(|(name, kind)| key(name, kind.in_words())).collect();
    keys.push(key("metric", "table".into()));
    keys.push(key("parameters", "1 to 16 tables".into()));
    SectionReference { name: SWEEP.name, meaning: description(&schema), keys }
}

pub fn recipes() -> Vec<RecipeReference> {
    let of_recipe = |recipe: Recipe| {
        let settings = recipe.settings();
        let sections = settings.keys.as_object().into_iter().flatten();
        let keys = sections.flat_map(|(section, table)| {
            let table = table.as_object().into_iter().flatten();
            table.map(move |(key, value)| (format!("{section}.{key}"), toml_value(value)))
        });
        RecipeReference { name: recipe.as_str(), lr: settings.lr, keys: keys.collect() }
    };
    Recipe::ALL.into_iter().map(of_recipe).collect()
}

/// The OpenAPI schema of a section's type.
fn schema(section: &str) -> Value {
    let schema = match section {
        "" => JobSpec::schema(),
        "model" => ModelSpec::schema(),
        "data" => DataSpec::schema(),
        "train" => TrainSpec::schema(),
        "loss" => LossSpec::schema(),
        "parallel" => ParallelSpec::schema(),
        "checkpoint" => CheckpointSpec::schema(),
        "recovery" => RecoverySpec::schema(),
        "evaluate" => EvaluateSpec::schema(),
        "stop" => StopSpec::schema(),
        "log" => LogSpec::schema(),
        _ => return Value::Null,
    };
    serde_json::to_value(schema).unwrap_or_default()
}

/// The first description in a schema, as one paragraph. An optional field has its description one level deeper.
fn description(schema: &Value) -> String {
    let own = schema.get("description").and_then(Value::as_str);
    let deeper = || {
        let choices = schema.get("oneOf").and_then(Value::as_array)?;
        choices.iter().find_map(|choice| choice.get("description")?.as_str())
    };
    own.or_else(deeper).unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A value in TOML. For all values that a job file has, TOML and JSON look the same.
fn toml_value(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("[{}]", list.iter().map(toml_value).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

/// Formats a number. A whole number gets no `.0`.
fn plain(n: f64) -> String {
    if n.fract() == 0.0 && n.abs() < 1e15 { grouped(n as i64) } else { format!("{n:?}") }
}

impl Kind {
    /// Type and limits, in words.
    pub fn in_words(self) -> String {
        match self {
            Kind::Text { min, max } => format!("text of {min} to {} characters", grouped(max as i64)),
            Kind::Project => {
                format!("text of 1 to {PROJECT_CHARS} letters, digits, -, _ and ., the first not a dot")
            }
            Kind::Tags => {
                format!("list of at most {MAX_TAGS} texts of at most {TAG_CHARS} characters, without commas")
            }
            Kind::Notes => {
                format!("text of at most {} bytes, also over several lines", grouped(NOTES_BYTES as i64))
            }
            Kind::Word(words) => {
                let quoted: Vec<_> = words.iter().map(|word| format!("{word:?}")).collect();
                quoted.join(", ")
            }
            Kind::Bool => "true or false".into(),
            Kind::Whole { min, max } => format!("whole number, {} to {}", grouped(min), grouped(max)),
            Kind::Seed => "whole number, 0 to 2^64 - 1".into(),
            Kind::Number { min, max, excludes_min, excludes_max } => format!(
                "number, {} {} and {} {}",
                if excludes_min { "above" } else { "at least" },
                plain(min),
                if excludes_max { "below" } else { "at most" },
                plain(max)
            ),
            Kind::Channels { positive } => {
                let positive = if positive { "positive " } else { "" };
                format!("list of 1 or 3 {positive}numbers, one per channel")
            }
            Kind::Range { min, max } => {
                format!("list of two ascending numbers, {} to {}", plain(min), plain(max))
            }
            Kind::ColorJitter => format!(
                "list of four numbers: brightness, contrast and saturation 0 to {}, hue 0 to 0.5",
                plain(MAX_JITTER)
            ),
            Kind::ImageSize => format!(
                "whole number, {} to {}, or a list of up to {MAX_SIZES} [epoch, pixels], both ascending",
                SIDES.start(),
                grouped(i64::from(*SIDES.end()))
            ),
            Kind::Epochs => format!(
                "list of at most {} ascending whole numbers, 1 to 100,000",
                grouped(MAX_LISTED_EPOCHS as i64)
            ),
            Kind::Validation => {
                "a split's name, \"none\", or a number above 0 and below 1 (a fraction of the training split)"
                    .into()
            }
            Kind::LossScale => {
                format!("\"dynamic\", or a number above 0 and at most {}", plain(MAX_LOSS_SCALE))
            }
            Kind::Shards => format!("at most {MAX_SHARDS} tables `[[parallel.shard]]`"),
            Kind::ClassWeights => format!(
                "\"balanced\", a list of numbers, or a table of numbers by class name; at most {} numbers, {:?} to {}",
                grouped(MAX_WEIGHTS as i64),
                WEIGHT_RANGE.start(),
                plain(*WEIGHT_RANGE.end())
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A key that only the type has could never be set; a key that only the table has would always be refused.
    #[test]
    fn the_table_has_every_key_of_the_types_and_no_other() {
        for section in reference() {
            let schema = schema(section.name);
            let of_type: BTreeSet<&str> =
                schema["properties"].as_object().unwrap().keys().map(String::as_str).collect();
            let mut of_table: BTreeSet<&str> = section.keys.iter().map(|key| key.name).collect();
            if section.name.is_empty() {
                of_table.extend(KEYS[1..].iter().map(|section| section.name));
            }
            assert_eq!(of_table, of_type, "[{}]", section.name);
        }
    }

    #[test]
    fn every_key_has_a_description() {
        for section in reference().into_iter().chain([sweep_reference()]) {
            assert!(section.meaning.ends_with('.'), "[{}]: {:?}", section.name, section.meaning);
            for key in section.keys {
                let meaning = key.meaning;
                assert!(
                    meaning.ends_with('.'),
                    "{}.{}: write a doc comment on its field: {meaning:?}",
                    section.name,
                    key.name
                );
            }
        }
    }

    /// The default in the reference is the default that is used.
    #[test]
    fn defaults_in_the_reference_give_the_default_job() {
        let mut text = String::new();
        for section in reference() {
            if !section.name.is_empty() {
                text += &format!("[{}]\n", section.name);
            }
            for key in section.keys {
                let default = if key.name == "dataset" { Some("\"x\"".into()) } else { key.default };
                if let Some(default) = default {
                    text += &format!("{} = {default}\n", key.name);
                }
            }
        }
        let spec = super::super::from_toml(&text).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
        let mut default = JobSpec::default();
        default.data.dataset = "x".into();
        assert_eq!(spec, default);
    }

    /// Numbers at the limits in the reference are accepted, and numbers beyond them are refused.
    #[test]
    fn limits_in_the_reference_are_enforced() {
        for section in KEYS {
            for (key, kind) in section.keys {
                let is_accepted = |value: Value| kind.check(&value).is_ok();
                match *kind {
                    Kind::Whole { min, max } => {
                        assert_eq!(
                            kind.in_words(),
                            format!("whole number, {} to {}", grouped(min), grouped(max))
                        );
                        assert!(is_accepted(min.into()) && is_accepted(max.into()), "{key}");
                        assert!(!is_accepted((min - 1).into()) && !is_accepted((max + 1).into()), "{key}");
                    }
                    Kind::Number { min, max, excludes_min, excludes_max } => {
                        assert_eq!(
                            (is_accepted(min.into()), is_accepted(max.into())),
                            (!excludes_min, !excludes_max),
                            "{key}"
                        );
                        assert!(
                            !is_accepted((min - 1.0).into()) && !is_accepted((max + 1.0).into()),
                            "{key}"
                        );
                    }
                    Kind::LossScale => {
                        assert!(
                            is_accepted(MAX_LOSS_SCALE.into()) && !is_accepted((MAX_LOSS_SCALE * 1.1).into()),
                            "{key}"
                        );
                    }
                    _ => {}
                }
            }
        }
    }
}
