//! Converts the form's texts to a specification, and a specification to the form's texts.

use super::fields::FIELDS;
use crate::numbers::setting;
use lockstep_protocol::{
    JobSpec,
    spec::{Kind, Recipe},
};
use serde_json::{Map, Value};
use std::{collections::BTreeMap, sync::LazyLock};

/// The default of every key, as the form's text.
pub(super) static DEFAULTS: LazyLock<Form> =
    LazyLock::new(|| Form::from_spec(&JobSpec { name: String::new(), ..JobSpec::default() }));

/// The form's content: the text of each field, by its path in the specification.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Form {
    pub(super) values: BTreeMap<String, String>,
    /// The recipe with which the fields were filled; empty if no recipe was chosen. If the user chooses another recipe without a script,
    /// the fields still have this recipe's values.
    pub(super) filled: String,
}

/// Name of the hidden field with [`Form::filled`].
const FILLED: &str = "filled";

impl Form {
    /// Reads the fields of a posted form. Unknown names are ignored.
    pub fn from_pairs(pairs: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut values: BTreeMap<_, _> = FIELDS
            .iter()
            .filter(|f| f.kind == Kind::Bool)
            .map(|f| (f.key.to_owned(), "false".into()))
            .collect();
        let mut filled = String::new();
        for (key, value) in pairs {
            if key == FILLED {
                filled = value;
            } else if FIELDS.iter().any(|f| f.key == key) {
                values.insert(key, value);
            }
        }
        Self { values, filled }
    }

    /// Creates the form that describes `spec`, for submitting a job again with changes.
    pub fn from_spec(spec: &JobSpec) -> Self {
        // Converted through text, so that a 32-bit 0.1 is shown as 0.1 and not as its nearest 64-bit value.
        let document = serde_json::to_string(spec).ok().and_then(|text| serde_json::from_str(&text).ok());
        let mut form = Self::default();
        form.flatten("", &document.unwrap_or(Value::Null));
        form.filled = form.text("train.recipe").to_owned();
        form
    }

    /// Returns the fields as `recipe` (a name, or empty) fills them, before the user changes a field. The field of the learning rate is
    /// empty, because its default depends on the batch size.
    fn untouched(recipe: &str) -> Self {
        let mut form = DEFAULTS.clone();
        for (key, value) in recipe_values(recipe) {
            form.set(&key, value);
        }
        form
    }

    fn flatten(&mut self, path: &str, value: &Value) {
        let is_field = FIELDS.iter().any(|field| field.key == path);
        if let (Value::Object(map), false) = (value, is_field) {
            for (key, value) in map {
                let inner = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                self.flatten(&inner, value);
            }
            return;
        }
        let text = match value {
            // Tables are shown as JSON.
            Value::Array(items) if !items.iter().any(Value::is_object) => {
                items.iter().map(item_text).collect::<Vec<_>>().join(", ")
            }
            Value::Null => String::new(),
            other => setting(other),
        };
        self.values.insert(path.to_owned(), text);
    }

    /// Converts the form to a specification as JSON, for `spec::from_json`. Empty fields are left out. Text of the wrong type stays text,
    /// so that the check reports it.
    pub fn document(&self) -> Value {
        let mut document = Map::new();
        let mut put = |path: &str, value: Value| match path.split_once('.') {
            None => drop(document.insert(path.into(), value)),
            Some((table, key)) => {
                let table = document.entry(table).or_insert_with(|| Value::Object(Map::new()));
                if let Value::Object(table) = table {
                    table.insert(key.into(), value);
                }
            }
        };
        // After a change of the recipe without a script, the fields still have the values of the previous recipe.
        let is_recipe_changed = self.text("train.recipe") != self.filled;
        let recipe_texts = recipe_values(if is_recipe_changed { "" } else { &self.filled });
        let untouched = is_recipe_changed.then(|| Self::untouched(&self.filled));
        for field in FIELDS.iter() {
            let text = self.text(field.key).trim();
            let is_untouched = untouched.as_ref().is_some_and(|form| form.text(field.key) == text);
            let is_scaled = SCALED_WITH_EPOCHS.contains(&field.key)
                && recipe_texts.get(field.key).is_some_and(|value| value == text);
            let is_dataset_default = DATASET_DEFAULTS.contains(&field.key)
                && recipe_texts.get(field.key).map_or(DEFAULTS.text(field.key), String::as_str) == text;
            if text.is_empty()
                || is_scaled
                || is_dataset_default
                || (is_untouched && field.key != "train.recipe")
            {
                continue;
            }
            put(field.key, field.json(text));
        }
        Value::Object(document)
    }

    /// Returns the text in the field of a key such as `train.lr`.
    pub fn text(&self, key: &str) -> &str {
        self.values.get(key).map_or("", String::as_str)
    }

    /// Writes a text into the field of a key such as `train.lr`.
    pub fn set(&mut self, key: &str, value: impl Into<String>) {
        self.values.insert(key.to_owned(), value.into());
    }
}

/// Keys whose value in a recipe is scaled with the job's epochs. These keys are sent only if the user has changed them.
pub(super) const SCALED_WITH_EPOCHS: [&str; 3] =
    ["train.milestones", "train.warmup_epochs", "data.image_size"];

/// Keys whose default depends on the dataset. They are sent only if the user has changed them.
pub(super) const DATASET_DEFAULTS: [&str; 1] = ["data.validation"];

/// Formats an entry of a list: a number, or an epoch and the size that starts there.
fn item_text(value: &Value) -> String {
    match value.as_array().map(Vec::as_slice) {
        Some([epoch, size]) => format!("{epoch}: {size}"),
        _ => setting(value),
    }
}

/// Returns the values with which this recipe fills fields.
pub(super) fn recipe_values(recipe: &str) -> BTreeMap<String, String> {
    let Ok(recipe) = recipe.parse::<Recipe>() else { return BTreeMap::new() };
    let mut form = Form::default();
    form.flatten("", &recipe.settings().keys);
    form.set("train.lr", "");
    form.values
}
