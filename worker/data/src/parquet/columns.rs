//! Chooses the columns with the pictures and their classes.

use crate::{MAX_NAMES_BYTES, label::MAX_CLASSES};
use ::parquet::{
    basic::{ConvertedType, LogicalType, Type},
    file::metadata::FileMetaData,
    schema::types::ColumnDescriptor,
};
use serde_json::Value;

/// Usual names of picture columns, in order of preference.
const PICTURE_NAMES: [&str; 8] = ["image", "img", "picture", "jpg", "jpeg", "png", "webp", "bytes"];
/// Usual names of class columns, in order of preference. CIFAR-100 has `fine_label` and `coarse_label`.
const LABEL_NAMES: [&str; 7] = ["label", "labels", "fine_label", "cls", "class", "target", "label_name"];
/// The metadata key under which Hugging Face's library `datasets` describes the columns.
const FEATURES_KEY: &str = "huggingface";
/// Maximum number of columns that a message names.
const MAX_NAMED_COLUMNS: usize = 20;

/// Indices of leaf columns.
#[derive(Debug)]
pub(super) struct Columns {
    pub(super) picture: usize,
    pub(super) label: usize,
    /// The names of the classes, in the order of their numbers.
    pub(super) names: Option<Vec<String>>,
}

/// The error is a phrase to follow the file's name.
pub(super) fn choose(metadata: &FileMetaData) -> Result<Columns, String> {
    let all: Vec<&ColumnDescriptor> = metadata.schema_descr().columns().iter().map(AsRef::as_ref).collect();
    let features = features(metadata)?;
    let is_class = |column: &ColumnDescriptor| {
        let feature = features.as_ref().and_then(|features| features.get(top_name(column)));
        feature.is_some_and(|feature| feature["_type"] == "ClassLabel")
    };
    let with_columns = |why: &str| format!("{why}: its columns are {}", describe_columns(&all));
    let is_struct =
        |column: &ColumnDescriptor| can_contain_pictures(column) && column.path().parts().len() == 2;
    let picture = find_named(&all, &PICTURE_NAMES, can_contain_pictures)
        .or_else(|| find_only(&all, is_struct))
        .or_else(|| find_only(&all, can_contain_pictures))
        .ok_or_else(|| {
            with_columns(
                "has no unambiguous column of pictures (called image or img, of bytes or structs {bytes, path})",
            )
        })?;
    let label = find_named(&all, &LABEL_NAMES, can_contain_labels)
        .or_else(|| find_only(&all, |column| can_contain_labels(column) && is_class(column)))
        .ok_or_else(|| {
            with_columns("has no unambiguous column of classes (called label, of whole numbers or text)")
        })?;
    let names = match features.as_ref().map(|features| &features[top_name(all[label])]["names"]) {
        Some(Value::Array(names)) if is_class(all[label]) => Some(class_names(names)?),
        _ => None,
    };
    Ok(Columns { picture, label, names })
}

/// Tries `names` in order, and returns the index of the first column that has the name and for which `fits` is true.
fn find_named(
    all: &[&ColumnDescriptor],
    names: &[&str],
    fits: impl Fn(&ColumnDescriptor) -> bool,
) -> Option<usize> {
    let position_of = |name: &&str| {
        all.iter().position(|column| top_name(column).eq_ignore_ascii_case(name) && fits(column))
    };
    names.iter().find_map(position_of)
}

/// The only column for which `fits` is true.
fn find_only(all: &[&ColumnDescriptor], fits: impl Fn(&ColumnDescriptor) -> bool) -> Option<usize> {
    let mut fitting = (0..all.len()).filter(|i| fits(all[*i]));
    fitting.next().filter(|_| fitting.next().is_none())
}

/// The name of the top-level column of a leaf.
fn top_name(column: &ColumnDescriptor) -> &str {
    column.path().parts().first().map_or("", String::as_str)
}

fn can_contain_pictures(column: &ColumnDescriptor) -> bool {
    let fits = match column.path().parts() {
        [_] => true,
        [_, leaf] => leaf == "bytes",
        _ => false,
    };
    fits && column.max_rep_level() == 0 && column.physical_type() == Type::BYTE_ARRAY && !is_text(column)
}

fn can_contain_labels(column: &ColumnDescriptor) -> bool {
    let fits = match column.physical_type() {
        Type::INT32 | Type::INT64 => true,
        Type::BYTE_ARRAY => is_text(column),
        _ => false,
    };
    fits && column.max_rep_level() == 0 && column.path().parts().len() == 1
}

fn is_text(column: &ColumnDescriptor) -> bool {
    matches!(column.logical_type_ref(), Some(LogicalType::String))
        || column.converted_type() == ConvertedType::UTF8
}

/// The columns, for a message.
fn describe_columns(all: &[&ColumnDescriptor]) -> String {
    let describe = |column: &&ColumnDescriptor| {
        let kind = match column.physical_type() {
            Type::BYTE_ARRAY if is_text(column) => "text".to_owned(),
            Type::BYTE_ARRAY => "bytes".to_owned(),
            other => other.to_string().to_lowercase(),
        };
        let list = if column.max_rep_level() > 0 { "list of " } else { "" };
        format!("{} ({list}{kind})", column.path().string())
    };
    let mut words: Vec<String> = all.iter().take(MAX_NAMED_COLUMNS).map(describe).collect();
    if all.len() > MAX_NAMED_COLUMNS {
        words.push(format!("and {} more", all.len() - MAX_NAMED_COLUMNS));
    }
    words.join(", ")
}

/// The description of the columns by Hugging Face's library `datasets`.
fn features(metadata: &FileMetaData) -> Result<Option<Value>, String> {
    let pairs = metadata.key_value_metadata().into_iter().flatten();
    let Some(text) = pairs.filter(|pair| pair.key == FEATURES_KEY).find_map(|pair| pair.value.as_ref())
    else {
        return Ok(None);
    };
    if text.len() as u64 > MAX_NAMES_BYTES {
        return Err(format!("has {} bytes of metadata; at most {MAX_NAMES_BYTES} are allowed", text.len()));
    }
    let parsed: Value = serde_json::from_str(text)
        .map_err(|error| format!("has metadata ({FEATURES_KEY}) that is not JSON: {error}"))?;
    Ok(parsed.get("info").and_then(|info| info.get("features")).cloned())
}

fn class_names(names: &[Value]) -> Result<Vec<String>, String> {
    if names.len() > MAX_CLASSES as usize {
        return Err(format!("names {} classes; at most {MAX_CLASSES} are allowed", names.len()));
    }
    let text = |name: &Value| name.as_str().map(str::to_owned);
    names.iter().map(text).collect::<Option<_>>().ok_or_else(|| "has a class whose name is not text".into())
}
