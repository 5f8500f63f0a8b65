//! The settings of a job that differ from the defaults.

use crate::numbers::setting;
use lockstep_protocol::spec::JobSpec;
use serde_json::{Map, Value};

/// Keys that the page shows elsewhere, with values that may have changed since the job was submitted.
const SHOWN_ELSEWHERE: [&str; 4] = ["name", "priority", "private", "project"];

/// Returns the settings of a job that differ from the defaults, by keys such as `train.lr`.
pub(super) fn non_default(spec: &JobSpec) -> Vec<(String, String)> {
    let mut settings = flatten(&spec.non_default());
    settings.retain(|(key, _)| !SHOWN_ELSEWHERE.contains(&&key[..]));
    settings
}

/// Returns every value as text, with its key. Keys of nested objects are joined with dots.
pub(super) fn flatten(values: &Map<String, Value>) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (key, value) in values {
        match value {
            Value::Object(inner) => {
                all.extend(flatten(inner).into_iter().map(|(name, value)| (format!("{key}.{name}"), value)));
            }
            value => all.push((key.clone(), setting(value))),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_settings_that_differ_from_the_default_are_shown() {
        let mut spec = JobSpec { name: "mine".into(), priority: 3, ..JobSpec::default() };
        spec.data.dataset = "pictures".into();
        spec.train.lr = 0.25;
        spec.train.milestones = vec![1, 2];
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let shown = non_default(&spec);
        assert_eq!(
            shown,
            [pair("data.dataset", "pictures"), pair("train.lr", "0.25"), pair("train.milestones", "[1,2]")]
        );
    }
}
