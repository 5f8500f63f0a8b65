//! Tables, columns and values in a backup, the same for both databases.

use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Table {
    #[serde(rename = "table")]
    pub(super) name: String,
    pub(super) columns: Vec<Column>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Column {
    pub(super) name: String,
    pub(super) kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    Integer,
    Real,
    Text,
    Bytes,
}

impl Kind {
    /// The kind of a column, from the name of its type in either database.
    pub(super) fn of_column_type(declared: &str) -> Self {
        match declared.to_ascii_lowercase().as_str() {
            "integer" | "bigint" => Kind::Integer,
            "real" | "double precision" => Kind::Real,
            "blob" | "bytea" => Kind::Bytes,
            _ => Kind::Text,
        }
    }
}

/// A value of a row.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Cell {
    Integer(Option<i64>),
    Real(Option<f64>),
    Text(Option<String>),
    Bytes(Option<Vec<u8>>),
}

impl Cell {
    /// The value as JSON. Floating-point numbers are written as text, so that parsing restores them exactly. Bytes are hexadecimal.
    pub(super) fn json(&self) -> Value {
        match self {
            Cell::Integer(value) => (*value).into(),
            Cell::Real(value) => value.map(|v| format!("{v:?}")).into(),
            Cell::Text(value) => value.clone().into(),
            Cell::Bytes(value) => value.as_deref().map(hex::encode).into(),
        }
    }

    /// Reads the result of [`Cell::json`]. `None` if the value is not of this kind.
    pub(super) fn read(kind: Kind, value: Value) -> Option<Self> {
        let text = |value: Value| match value {
            Value::Null => Some(None),
            Value::String(text) => Some(Some(text)),
            _ => None,
        };
        Some(match kind {
            Kind::Integer if value.is_null() => Cell::Integer(None),
            Kind::Integer => Cell::Integer(Some(value.as_i64()?)),
            Kind::Real => Cell::Real(text(value)?.map(|text| text.parse::<f64>()).transpose().ok()?),
            Kind::Text => Cell::Text(text(value)?),
            Kind::Bytes => Cell::Bytes(text(value)?.map(hex::decode).transpose().ok()?),
        })
    }
}
