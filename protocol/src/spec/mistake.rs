//! A mistake in a specification, and how user input is quoted in its message.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A mistake in a specification and where it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SpecError {
    /// JSON pointer (RFC 6901), such as `/train/batch_size`; empty for the whole document.
    pub pointer: String,
    /// What is wrong and what would be right.
    pub detail: String,
}

/// Collects mistakes: of each key, only the first.
pub(super) struct Mistakes<'a>(pub(super) &'a mut Vec<SpecError>);

impl Mistakes<'_> {
    /// Adds a mistake, unless the key at `pointer` already has one.
    pub(super) fn add(&mut self, pointer: &str, detail: impl Into<String>) {
        if self.0.iter().all(|error| error.pointer != pointer) {
            self.0.push(SpecError { pointer: pointer.into(), detail: detail.into() });
        }
    }
}

/// A key as a part of a JSON pointer.
pub(super) fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// User input, shortened for a message.
pub fn shortened(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// A scalar, shortened for a message; for lists, tables and null only the type.
pub(super) fn describe_value(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) | Value::Null => type_of(value).into(),
        _ => shortened(&value.to_string()),
    }
}

pub(super) fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(n) if n.is_f64() => "a number with a fraction",
        Value::Number(_) => "a whole number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a table",
    }
}
