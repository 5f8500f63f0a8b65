//! Cursors: where a page ended, and what it was a page of. A cursor is good for the next page of the same list in the same
//! order, and for nothing else: the same place of another job's log would be a page that nobody asked for.

use crate::http::error::{Code, Error, Result};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

/// The longest cursor: a name of 200 characters is in one.
const CURSOR_BYTES: usize = 4096;
const BEGIN_ANEW: &str = "leave it out to begin with the first page";

/// A list in one order, of which there are pages.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct Pages<'a> {
    /// By its name in the answer: `jobs`.
    list: &'static str,
    /// Whose list it is (`job` and its id), where each of several has one.
    of: Option<(&'static str, &'a str)>,
    sort: &'a str,
}

/// What a cursor says. Clients hand it back as it is.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CursorPosition<K> {
    list: String,
    of: Option<String>,
    sort: String,
    at: K,
}

impl<'a> Pages<'a> {
    /// Of a list that the server has one of.
    pub(in crate::api) const fn new(list: &'static str, sort: &'a str) -> Self {
        Self { list, of: None, sort }
    }

    pub(in crate::api) fn of_job(self, id: &'a str) -> Self {
        Self { of: Some(("job", id)), ..self }
    }

    pub(in crate::api) fn of_dataset(self, id: &'a str) -> Self {
        Self { of: Some(("dataset", id)), ..self }
    }

    /// `by`: what the jobs of each group have in common.
    pub(in crate::api) fn of_grouping(self, by: &'a str) -> Self {
        Self { of: Some(("grouping", by)), ..self }
    }

    pub(in crate::api) fn sort(self) -> &'a str {
        self.sort
    }

    /// A cursor for the client.
    ///
    /// # Errors
    /// The place cannot be written as JSON.
    pub(in crate::api) fn cursor<K: Serialize>(self, at: &K) -> Result<String> {
        let of = self.of.map(|(_, id)| id.to_owned());
        let place = CursorPosition { list: self.list.to_owned(), of, sort: self.sort.to_owned(), at };
        let text = serde_json::to_vec(&place).map_err(|e| Error::Internal(format!("a cursor: {e}")))?;
        Ok(BASE64_URL_SAFE_NO_PAD.encode(text))
    }

    /// The place that a client's cursor names.
    ///
    /// # Errors
    /// 400: it is no cursor, or one of another list, job, dataset or order.
    pub(in crate::api) fn read<K: DeserializeOwned>(self, cursor: Option<&str>) -> Result<Option<K>> {
        let Some(text) = cursor else { return Ok(None) };
        let wrong = |what: &str| Error::Of(Code::WrongCursor, format!("the cursor is {what}: {BEGIN_ANEW}"));
        let bytes = (text.len() <= CURSOR_BYTES).then(|| BASE64_URL_SAFE_NO_PAD.decode(text).ok()).flatten();
        let place: Option<CursorPosition<Value>> =
            bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let Some(place) = place else { return Err(wrong("none of this list")) };
        if place.list != self.list {
            return Err(wrong("of another list"));
        }
        match self.of {
            Some((kind, id)) if place.of.as_deref() != Some(id) => {
                return Err(wrong(&format!("of the {} of another {kind}", self.list)));
            }
            _ => {}
        }
        if place.sort != self.sort {
            return Err(wrong("of another sort"));
        }
        // No database of ours has it, and Postgres takes it for a fault.
        let at = (!has_nul(&place.at)).then(|| serde_json::from_value(place.at).ok()).flatten();
        at.map(Some).ok_or_else(|| wrong("none of this list"))
    }
}

fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(all) => all.iter().any(has_nul),
        Value::Object(fields) => fields.values().any(has_nul),
        _ => false,
    }
}
