//! Converts the form's texts to a specification, and a specification to the form's texts.

use super::fields::FIELDS;
use crate::numbers::setting;
use lockstep_protocol::{
    JobSpec,
    dataset::DatasetInfo,
    spec::{ImageSize, KNOWN_WEIGHTS, Kind, Recipe, TrainSpec, set_key},
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::LazyLock};

/// The default of every key, as the form's text.
pub(super) static DEFAULTS: LazyLock<Form> =
    LazyLock::new(|| Form::from_spec(&JobSpec { name: String::new(), ..JobSpec::default() }));

/// The form's content: the text of each field, by its path in the specification.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Form {
    pub(super) values: BTreeMap<String, String>,
    /// The recipe whose values the fields have; empty if no recipe was chosen. If the user chooses another recipe without a script, the
    /// fields still have this recipe's values.
    pub(super) filled_recipe: String,
}

/// Name of the hidden field with [`Form::filled_recipe`].
const FILLED_RECIPE: &str = "filled";

impl Form {
    /// Reads the fields of a posted form. Unknown names are ignored.
    pub fn from_pairs(pairs: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut values: BTreeMap<_, _> = FIELDS
            .iter()
            .filter(|f| f.kind == Kind::Bool)
            .map(|f| (f.key.to_owned(), "false".into()))
            .collect();
        let mut filled_recipe = String::new();
        for (key, value) in pairs {
            if key == FILLED_RECIPE {
                filled_recipe = value;
            } else if FIELDS.iter().any(|f| f.key == key) {
                values.insert(key, value);
            }
        }
        Self { values, filled_recipe }
    }

    /// Creates the form that describes `spec`, for submitting a job again with changes.
    pub fn from_spec(spec: &JobSpec) -> Self {
        // Converted through text, so that a 32-bit 0.1 is shown as 0.1 and not as its nearest 64-bit value.
        let document = serde_json::to_string(spec).ok().and_then(|text| serde_json::from_str(&text).ok());
        // A switch that the specification does not name is off.
        let mut form = Self::from_pairs([]);
        form.flatten("", &document.unwrap_or(Value::Null));
        form.filled_recipe = form.text("train.recipe").to_owned();
        form
    }

    /// Writes out the settings that are the dataset's own by default.
    pub fn write_dataset_defaults(spec: &mut JobSpec, info: &DatasetInfo) {
        spec.data.mean.get_or_insert_with(|| info.mean.clone());
        spec.data.std.get_or_insert_with(|| info.std.clone());
        spec.data.image_size.get_or_insert(ImageSize::Fixed(info.height));
    }

    /// Creates the form of a job with the recipe finetune that begins with `weights` of the job `spec`. Pictures are prepared as for that job,
    /// because its network expects them; `info` describes its dataset, if it is still registered. Public weights, such as `resnet18`, have
    /// their own network, and pictures are prepared as in the recipe.
    pub fn finetuning(mut spec: JobSpec, weights: &str, info: Option<&DatasetInfo>) -> Self {
        let is_public = KNOWN_WEIGHTS.contains(&weights);
        // An empty field would mean the recipe's value.
        if let Some(info) = info.filter(|_| !is_public) {
            Self::write_dataset_defaults(&mut spec, info);
        }
        let TrainSpec { batch_size, global_batch_size, accumulate, precision, .. } = spec.train;
        spec.train =
            TrainSpec { batch_size, global_batch_size, accumulate, precision, ..TrainSpec::default() };
        let mut form = Self::from_spec(&spec);
        let recipe = Recipe::Finetune.as_str();
        for (key, value) in recipe_values(recipe) {
            if is_public || key.starts_with("train.") || key == "data.broken_files" {
                form.set(&key, value);
            }
        }
        if is_public {
            form.set("model.arch", weights);
            form.set("model.stem", "auto");
        }
        form.set("train.recipe", recipe);
        form.set("model.pretrained", weights);
        form.filled_recipe = recipe.into();
        form
    }

    /// Returns the form as `recipe` (a name, or empty) fills it, before the user changes a field. With a recipe, the field of the learning
    /// rate is empty, because the recipe's learning rate depends on the batch size.
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

    /// Converts the form to a job file as JSON, for `spec::from_json`: the settings that differ from the defaults and from the recipe's
    /// values. Text of the wrong type stays text, so that the check reports it.
    pub fn document(&self) -> Value {
        let mut document = json!({});
        // After a change of the recipe without a script, the fields still have the values of the previous recipe.
        let is_recipe_changed = self.text("train.recipe") != self.filled_recipe;
        let untouched = Self::untouched(&self.filled_recipe);
        for field in FIELDS.iter() {
            let text = self.text(field.key).trim();
            let is_always_written = !is_recipe_changed && ALWAYS_WRITTEN.contains(&field.key);
            if !text.is_empty() && (is_always_written || text != untouched.text(field.key)) {
                // The path of a field is always valid.
                set_key(&mut document, field.key, field.json(text)).ok();
            }
        }
        document
    }

    /// Says how the form differs from `cloned`, the form of the job `job`, apart from its name and tags.
    pub fn differences(&self, job: &str, cloned: &Form) -> String {
        let shown = |text: &str| if text.is_empty() { "default".to_owned() } else { text.to_owned() };
        let texts = FIELDS.iter().filter(|field| !["name", "tags"].contains(&field.key));
        let texts = texts.map(|field| (field.label, cloned.text(field.key), self.text(field.key)));
        let changes = texts.filter(|(_, before, after)| before != after);
        let changes =
            changes.map(|(label, before, after)| format!("{label} {} → {}", shown(before), shown(after)));
        match changes.collect::<Vec<_>>().join(", ") {
            changes if changes.is_empty() => format!("As {job}."),
            changes => format!("As {job}, except {changes}."),
        }
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

/// Keys that are written even if they have the recipe's value. Without them, `train.steps` or `data.image_size` would replace this value.
const ALWAYS_WRITTEN: [&str; 3] = ["train.epochs", "data.validation_size", "data.resize_size"];

/// Formats a job file as TOML, or as JSON if a value has no TOML form.
pub fn job_file(document: &Value) -> String {
    let toml = toml::Table::try_from(document).and_then(|table| toml::to_string(&table));
    toml.or_else(|_| serde_json::to_string_pretty(document)).unwrap_or_default()
}

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
