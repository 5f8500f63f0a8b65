//! A specification before it is checked: TOML as JSON, and single keys set from a command line or a fork. Nesting is
//! limited before values are built, because nested values are also copied, compared and dropped by recursion.

use super::{
    keys::Kind,
    mistake::{SpecError, shortened},
};
use crate::limits::{KEY_BYTES, KEY_PARTS, TOML_NESTING};
use serde_json::{Map, Value};
use toml_parser::{Source, lexer::TokenKind};

/// Converts a TOML document to JSON without further checks.
///
/// # Errors
/// A syntax error, or nesting beyond the limits, with its line and column.
pub fn toml_document(text: &str) -> Result<Value, SpecError> {
    let error = |offset: Option<usize>, detail: &str| {
        let place = offset.map_or_else(String::new, |offset| {
            let before = text.get(..offset).unwrap_or(text);
            let line = before.matches('\n').count() + 1;
            let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
            format!("line {line}, column {column}: ")
        });
        SpecError { pointer: String::new(), detail: format!("{place}{detail}") }
    };
    check_nesting(text).map_err(|(offset, detail)| error(Some(offset), &detail))?;
    let table: toml::Table = toml::from_str(text).map_err(|e| {
        let mut detail = e.message().replace('\n', " ");
        // JSON, or YAML.
        if text.trim_start().starts_with('{') || detail.contains("expected `=`") {
            detail += "; the format is TOML, with lines such as epochs = 10";
        }
        error(e.span().map(|span| span.start), &detail)
    })?;
    Ok(json_of(toml::Value::Table(table)))
}

/// Checks the nesting depth of a document, token by token. An error has the byte offset of the token that is nested too deep.
fn check_nesting(text: &str) -> Result<(), (usize, String)> {
    let (mut nesting, mut parts) = (0, 1);
    for token in Source::new(text).lex() {
        match token.kind() {
            TokenKind::Dot => parts += 1,
            TokenKind::Whitespace | TokenKind::Atom | TokenKind::LiteralString | TokenKind::BasicString => {}
            TokenKind::LeftSquareBracket | TokenKind::LeftCurlyBracket => (parts, nesting) = (1, nesting + 1),
            TokenKind::RightSquareBracket | TokenKind::RightCurlyBracket => {
                (parts, nesting) = (1, usize::saturating_sub(nesting, 1));
            }
            _ => parts = 1,
        }
        if parts > KEY_PARTS {
            return Err((token.span().start(), format!("a key has more than {KEY_PARTS} parts")));
        }
        if nesting > TOML_NESTING {
            let detail = format!("lists and tables are nested more than {TOML_NESTING} deep");
            return Err((token.span().start(), detail));
        }
    }
    Ok(())
}

/// JSON has no NaN, infinity or dates: they become text, which no check of a number accepts.
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

/// Applies `key.path=value` to a document. The value is TOML, or plain text if it is not valid TOML. The value of a key for text, such as
/// `name=1e3`, is TOML only with quotation marks. `key.path=` removes the key, so the default applies.
///
/// # Errors
/// A sentence that says what is wrong with the argument.
pub fn apply_set(document: &mut Value, argument: &str) -> Result<(), String> {
    let (path, text) = argument
        .split_once('=')
        .ok_or_else(|| format!("{:?} has no '='; write it as train.lr=0.1", shortened(argument)))?;
    let (path, text) = (path.trim(), text.trim());
    let is_text_key = matches!(Kind::of_path(path), Some(Kind::Text { .. } | Kind::Project | Kind::Notes));
    let value = if text.is_empty() {
        Value::Null
    } else if is_text_key && !text.starts_with(['"', '\'']) {
        Value::String(text.to_owned())
    } else {
        toml_document(&format!("value = {text}"))
            .ok()
            .and_then(|mut document| document.as_object_mut()?.remove("value"))
            .unwrap_or_else(|| Value::String(text.to_owned()))
    };
    set_key(document, path, value)
}

/// The parts of a path such as `train.lr`, none of them empty.
///
/// # Errors
/// The path names no key, is too long or has too many parts. The error is a sentence.
pub fn key_parts(path: &str) -> Result<Vec<&str>, String> {
    let shown = shortened(path);
    // The parts are counted before they are collected.
    if path.len() > KEY_BYTES || path.split('.').count() > KEY_PARTS {
        return Err(format!(
            "{shown:?} names no key: a path has at most {KEY_PARTS} parts and {KEY_BYTES} bytes"
        ));
    }
    if path.split('.').any(str::is_empty) {
        return Err(format!("{shown:?} names no key; write it as train.lr=0.1"));
    }
    Ok(path.split('.').collect())
}

/// Sets the value at a path such as `train.lr`, and adds missing tables on the way.
///
/// # Errors
/// As [`key_parts`], or a part of the path before the last is not a table.
pub fn set_key(document: &mut Value, path: &str, value: Value) -> Result<(), String> {
    let shown = shortened(path);
    let parts = key_parts(path)?;
    let Some((last, parents)) = parts.split_last() else { return Ok(()) };
    let mut table = document;
    for name in parents {
        let Value::Object(entries) = table else {
            return Err(format!("{shown:?}: the part before {name:?} is not a table"));
        };
        table = entries.entry(*name).or_insert(Value::Null);
        if table.is_null() {
            *table = Value::Object(Map::new());
        }
    }
    let Value::Object(table) = table else {
        return Err(format!("{shown:?}: the part before {last:?} is not a table"));
    };
    table.insert((*last).to_owned(), value);
    Ok(())
}
