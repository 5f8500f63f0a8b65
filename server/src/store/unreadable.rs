//! Rows that this version cannot read, or can read only in part. Each such row is logged once, and all other rows are read.

use super::{error::Result, values::from_json};
use crate::util::lock;
use lockstep_protocol::spec::{self, JobSpec};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::{
    collections::HashSet,
    sync::{LazyLock, Mutex},
};

/// Maximum number of logged messages that are remembered. Lists are read several times per second.
const MAX_REMEMBERED: usize = 10_000;
/// Maximum size of the description of an unreadable specification, in bytes.
const MAX_DETAIL_BYTES: usize = 500;

static LOGGED: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

/// The value in a job's column of JSON. If it cannot be read, logs an error and returns the default.
pub(super) fn json_or_default<T: DeserializeOwned + Default>(job: &str, column: &str, text: &str) -> T {
    from_json(text).unwrap_or_else(|error| {
        log_once(&format!("{column} of job {job}: {error}"));
        T::default()
    })
}

/// Logs an error in a row when it is found for the first time.
pub(crate) fn log_once(what: &str) {
    let mut logged = lock(&LOGGED);
    if logged.len() < MAX_REMEMBERED && logged.insert(what.to_owned()) {
        tracing::error!(what, "a stored value cannot be read; it is skipped and left unchanged");
    }
}

/// The rows that can be read. Errors of the other rows are logged.
pub(super) fn readable<T>(rows: impl IntoIterator<Item = Result<T>>) -> Vec<T> {
    rows.into_iter().filter_map(|row| row.map_err(|error| log_once(&error.to_string())).ok()).collect()
}

/// Reads a stored specification, which another version may have written. Settings that this version cannot read have their defaults. Also
/// returns a description of these settings, if there are any.
pub(super) fn read_spec(stored: &str) -> (JobSpec, Option<String>) {
    let error = match serde_json::from_str::<JobSpec>(stored) {
        Ok(spec) => return (spec, None),
        Err(error) => error,
    };
    let Ok(document) = serde_json::from_str::<Value>(stored) else {
        return (JobSpec::default(), Some(format!("its specification: {error}")));
    };
    let (spec, mistakes) = spec::read_leniently(&document);
    let mistakes: Vec<_> =
        mistakes.iter().map(|m| format!("{} {}", m.pointer, m.detail).trim().to_owned()).collect();
    let mut detail = mistakes.join("; ");
    detail.truncate(detail.floor_char_boundary(MAX_DETAIL_BYTES));
    (spec, (!detail.is_empty()).then_some(detail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn known_keys_of_specifications_of_other_versions_are_read() {
        let mut document = serde_json::to_value(JobSpec::default()).unwrap();
        assert_eq!(read_spec(&document.to_string()), (JobSpec::default(), None));
        document["train"]["optimizer"] = "unknown".into();
        document["train"]["lr"] = json!(0.5);
        document["moon"] = json!({"phase": 1});
        let (spec, flaw) = read_spec(&document.to_string());
        let flaw = flaw.unwrap();
        assert!(flaw.contains("/train/optimizer") && flaw.contains("/moon"), "{flaw}");
        assert_eq!((spec.train.lr, spec.train.optimizer), (0.5, JobSpec::default().train.optimizer));
        let many: serde_json::Map<_, _> = (0..50).map(|n| (format!("key{n:02}"), json!(1))).collect();
        let long = read_spec(&json!({"train": many}).to_string()).1.unwrap();
        assert_eq!(long.len(), MAX_DETAIL_BYTES, "the message is shortened: {long}");
        for broken in ["", "nonsense", "[1]", "{\"train\": 3}", "null"] {
            let (spec, flaw) = read_spec(broken);
            assert!(spec == JobSpec::default() && flaw.is_some(), "{broken}");
        }
    }
}
