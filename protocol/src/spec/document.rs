//! A specification before it is checked: TOML as JSON, and single keys set from a command line.

use super::SpecError;
use serde_json::{Map, Value};

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
