//! Registered models: names for checkpoints. A version never changes; an alias moves from version to version.

use crate::{
    dataset::{DatasetNote, ValidationSet},
    job::JobId,
    labels::plain_name_mistake,
    numbers::accuracy_of,
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr};
use utoipa::ToSchema;

/// Prefix of the name of a version, as in MLflow.
pub const SCHEME: &str = "models:/";
/// Maximum length of a model's name and of an alias, in characters.
pub const NAME_CHARS: usize = 100;

/// A checkpoint under a model's name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelVersion {
    pub model: String,
    /// Number of the version, from 1. The number of a removed version is not used again.
    pub version: u32,
    /// Aliases of this version.
    pub aliases: Vec<String>,
    /// The checkpoint's id.
    pub checkpoint: String,
    /// The job that trained the checkpoint.
    #[schema(value_type = String)]
    pub job: JobId,
    pub job_name: String,
    pub project: String,
    pub val_accuracy: Option<f64>,
    pub val_loss: Option<f64>,
    /// The pictures on which the checkpoint was validated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationSet>,
    /// Whether the job has `checkpoint.sharded`, so that the weights may be in several files. `false` when absent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sharded: bool,
    /// The name of the job's dataset.
    pub dataset: String,
    /// The dataset's content at the job's first start; null if it is not known.
    #[schema(value_type = Option<Object>)]
    pub dataset_fingerprint: Option<DatasetNote>,
    /// Versions of the programs that wrote the checkpoint.
    pub programs: BTreeMap<String, String>,
    pub description: String,
    /// Name of the person or token that registered the version.
    pub registered_by: Option<String>,
    pub registered_at: Timestamp,
}

impl ModelVersion {
    /// The checkpoint's accuracy, with its number of pictures if known.
    pub fn accuracy_in_words(&self) -> Option<String> {
        Some(accuracy_of(self.val_accuracy?, self.validation.as_ref().map(|set| set.pictures)))
    }

    /// The checkpoint's name within its job, `<epoch>-<step>`.
    pub fn checkpoint_name(&self) -> &str {
        self.checkpoint.split_once('-').map_or(&self.checkpoint, |(_, name)| name)
    }
}

/// A model, with the versions that the caller may see.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Model {
    pub name: String,
    /// Numbers of versions, by alias.
    pub aliases: BTreeMap<String, u32>,
    pub version_count: u64,
    /// The version with the highest number.
    pub newest: ModelVersion,
}

impl Model {
    /// The model with these versions, in ascending order of their numbers. `None` without versions.
    pub fn of(mut versions: Vec<ModelVersion>) -> Option<Self> {
        let version_count = versions.len() as u64;
        let aliases_of = |version: &ModelVersion| {
            version.aliases.iter().map(|alias| (alias.clone(), version.version)).collect::<Vec<_>>()
        };
        let aliases = versions.iter().flat_map(aliases_of).collect();
        let newest = versions.pop()?;
        Some(Self { name: newest.model.clone(), aliases, version_count, newest })
    }
}

/// Identifies a version of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    Number(u32),
    Alias(String),
}

impl Selector {
    /// Whether this number or alias identifies `version`, which belongs to the same model.
    pub fn matches(&self, version: &ModelVersion) -> bool {
        match self {
            Selector::Number(number) => version.version == *number,
            Selector::Alias(alias) => version.aliases.contains(alias),
        }
    }
}

/// The name of a version: `models:/shoes/3`, `models:/shoes@3` or `models:/shoes@champion`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionName {
    pub model: String,
    pub selector: Selector,
}

impl FromStr for VersionName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || {
            format!(
                "{text:?} is not the name of a model's version, such as {SCHEME}shoes/3 or {SCHEME}shoes@champion"
            )
        };
        let path = text.strip_prefix(SCHEME).ok_or_else(invalid)?;
        let (model, version) = path.split_once(['/', '@']).ok_or_else(invalid)?;
        // A number may follow / or @, an alias only @.
        let selector = match version.parse() {
            Ok(number) => Selector::Number(number),
            Err(_) if path.contains('/') || alias_mistake(version).is_some() => return Err(invalid()),
            Err(_) => Selector::Alias(version.to_owned()),
        };
        if name_mistake(model).is_some() {
            return Err(invalid());
        }
        Ok(Self { model: model.to_owned(), selector })
    }
}

impl fmt::Display for VersionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.selector {
            Selector::Number(number) => write!(f, "{SCHEME}{}/{number}", self.model),
            Selector::Alias(alias) => write!(f, "{SCHEME}{}@{alias}", self.model),
        }
    }
}

/// Why a model cannot have this name; `None` if it can.
pub fn name_mistake(name: &str) -> Option<String> {
    plain_name_mistake(name, NAME_CHARS)
}

/// Why an alias cannot have this name; `None` if it can.
pub fn alias_mistake(alias: &str) -> Option<String> {
    if !alias.is_empty() && alias.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some("must not consist of digits only: a number identifies a version".into());
    }
    name_mistake(alias)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_named_by_its_number_or_an_alias() {
        let number = |n| Some(Selector::Number(n));
        for (text, selector) in [
            ("models:/shoes/3", number(3)),
            ("models:/shoes@3", number(3)),
            ("models:/shoes@champion", Some(Selector::Alias("champion".into()))),
            ("models:/shoes", None),
            ("models:/shoes/", None),
            ("models:/shoes@", None),
            ("models:/shoes/champion", None),
            ("models:/shoes/3/4", None),
            ("models:/shoes@a/b", None),
            ("models:/shoes@.a", None),
            ("models:/shoes@99999999999", None),
            ("models:/@champion", None),
            ("models:/a b@champion", None),
            ("models://shoes/3", None),
            ("shoes@champion", None),
        ] {
            let found = text.parse::<VersionName>();
            assert_eq!(
                found.as_ref().ok().map(|name| &name.selector),
                selector.as_ref(),
                "{text}: {found:?}"
            );
            let Ok(name) = found else { continue };
            assert_eq!(
                (name.model.as_str(), name.to_string().parse::<VersionName>()),
                ("shoes", Ok(name.clone()))
            );
        }
        assert!(alias_mistake("7").is_some_and(|why| why.contains("number")));
        assert_eq!(alias_mistake("v7"), None);
    }
}
