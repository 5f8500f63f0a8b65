//! A cursor has the position where a page ends, and the list and order of the page. A cursor is valid only for the same list in the same
//! order, because its position would be meaningless in another list, such as another job's log.

use crate::api::prelude::*;
use crate::http::error::Code;
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Maximum length of a cursor, in bytes. A cursor may contain a name of 200 characters.
const CURSOR_BYTES: usize = 4096;

/// A list in one order, which is returned in pages.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct Pages<'a> {
    /// Name of the list in responses, such as `jobs`.
    list: &'static str,
    /// Kind and id of the owner of the list, such as `job` and the job's id; `None` if the server has only one such list.
    owner: Option<(&'static str, &'a str)>,
    sort: &'a str,
}

/// Contents of a cursor. Clients must return cursors unchanged.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CursorPosition<K> {
    list: String,
    /// Id of the list's owner.
    of: Option<String>,
    sort: String,
    /// Position at which the next page begins, such as the sort key and id of the last element.
    at: K,
}

impl<'a> Pages<'a> {
    /// Pages of a list that exists once in the server.
    pub(in crate::api) const fn new(list: &'static str, sort: &'a str) -> Self {
        Self { list, owner: None, sort }
    }

    /// Pages of the list of an owner, such as the `kind` `job` and a job's id.
    pub(in crate::api) fn owned_by(self, kind: &'static str, id: &'a str) -> Self {
        Self { owner: Some((kind, id)), ..self }
    }

    pub(in crate::api) fn sort(self) -> &'a str {
        self.sort
    }

    /// Encodes a position as a cursor.
    pub(in crate::api) fn encode<K: Serialize>(self, at: &K) -> Result<String> {
        let of = self.owner.map(|(_, id)| id.to_owned());
        let position = CursorPosition { list: self.list.to_owned(), of, sort: self.sort.to_owned(), at };
        Ok(BASE64_URL_SAFE_NO_PAD.encode(serde_json::to_vec(&position)?))
    }

    /// Decodes a client's cursor into a position; `None` without a cursor.
    ///
    /// # Errors
    /// 400: the text is not a cursor, or belongs to another list, job, dataset or order.
    pub(in crate::api) fn decode<K: DeserializeOwned>(self, cursor: Option<&str>) -> Result<Option<K>> {
        let Some(text) = cursor else { return Ok(None) };
        let invalid = |what: &str| {
            let detail = format!("the cursor is {what}: leave it out to begin with the first page");
            Error::WithCode(Code::WrongCursor, detail)
        };
        let bytes = (text.len() <= CURSOR_BYTES).then(|| BASE64_URL_SAFE_NO_PAD.decode(text).ok()).flatten();
        let position: Option<CursorPosition<Value>> =
            bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let Some(position) = position else { return Err(invalid("not valid for this list")) };
        if position.list != self.list {
            return Err(invalid("of another list"));
        }
        if let Some((kind, id)) = self.owner
            && position.of.as_deref() != Some(id)
        {
            return Err(invalid(&format!("of the {} of another {kind}", self.list)));
        }
        if position.sort != self.sort {
            return Err(invalid("of another query"));
        }
        // No stored text has a NUL, and a query with a NUL would fail in Postgres.
        let at = (!has_nul(&position.at)).then(|| serde_json::from_value(position.at).ok()).flatten();
        at.map(Some).ok_or_else(|| invalid("not valid for this list"))
    }
}

fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().any(has_nul),
        Value::Object(fields) => fields.values().any(has_nul),
        _ => false,
    }
}
