//! Formats numbers for people. `static/numbers.js` uses the same formats, so that a value does not change when the page becomes live.
//! Both are tested with the cases of `texts.json`.

use jiff::Timestamp;
use lockstep_protocol::{
    cut,
    numbers::{format_duration, nouns},
};

pub use lockstep_protocol::numbers::{count, percent, value};

/// A text that is shortened to fit into its element.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShortText {
    /// The text; long names and paths are shortened in the middle.
    pub text: String,
    /// The whole text, for the tooltip; empty if nothing was shortened.
    pub title: String,
}

impl ShortText {
    fn of(whole: &str, text: String) -> Self {
        let title = if text == whole { String::new() } else { whole.to_owned() };
        Self { text, title }
    }

    /// Shortens a name or a path.
    pub fn name(name: &str) -> Self {
        Self::of(name, cut::shorten_middle(name, cut::MAX_WORD_CHARS))
    }

    /// Shortens long names and paths in a sentence.
    pub fn sentence(words: &str) -> Self {
        Self::of(words, cut::shorten_long_words(words))
    }
}

/// Formats a speed in images per second: `38940.2` as `38,940`, `9.73` as `9.7`.
pub fn rate(v: f64) -> String {
    if v >= 99.95 { count(v.round() as u64) } else { lockstep_protocol::numbers::rate(v) }
}

/// Formats `188743680` as `189 MB` (powers of ten, as for disks and networks).
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if n < 1000 {
        return format!("{n} B");
    }
    let mut size = n as f64 / 1000.0;
    let mut unit = 0;
    while size >= 999.5 && unit + 1 < UNITS.len() {
        size /= 1000.0;
        unit += 1;
    }
    if size < 9.95 { format!("{size:.1} {}", UNITS[unit]) } else { format!("{size:.0} {}", UNITS[unit]) }
}

/// Formats a duration in seconds like a clock: `0:12`, `14:02`, `3:14:02`, `2 d 3 h`.
pub fn clock(secs: f64) -> String {
    let s = secs.max(0.0).round() as u64;
    if s >= 48 * 3600 {
        format!("{} d {} h", s / 86_400, s % 86_400 / 3600)
    } else if s >= 3600 {
        format!("{}:{:02}:{:02}", s / 3600, s % 3600 / 60, s % 60)
    } else {
        format!("{}:{:02}", s / 60, s % 60)
    }
}

/// Formats the time since `then`, rounded down: `just now`, `40 s ago`, `12 min ago`, `3 h ago`, `5 d ago`.
pub fn age(then: Timestamp) -> String {
    age_at(then, Timestamp::now())
}

fn age_at(then: Timestamp, now: Timestamp) -> String {
    match now.as_second() - then.as_second() {
        ..5 => "just now".into(),
        secs => format!("{} ago", format_duration(secs)),
    }
}

/// Formats a value of a setting: a text without quotes, otherwise JSON.
pub(crate) fn setting(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Formats a number with a noun: `1 rank`, `4 ranks`, `1,200 classes`.
pub fn plural(n: u64, noun: &str) -> String {
    format!("{} {}", count(n), nouns(n, noun))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::sparkline;
    use lockstep_protocol::{
        agent::CheckpointInfo, best::best_words, job::Measured, metric::quantity, numbers::uncertainty,
    };
    use serde_json::Value;
    use std::collections::BTreeMap;

    /// `tests/browser/figures.spec.mjs` checks the same cases with the functions of the same names in `static/`.
    #[test]
    fn pages_have_the_same_texts_as_their_scripts() {
        let functions: BTreeMap<String, Vec<(Vec<Value>, String)>> =
            serde_json::from_str(include_str!("texts.json")).expect("cases");
        let cases = functions.iter().flat_map(|(name, cases)| cases.iter().map(move |case| (name, case)));
        for (function, (arguments, expected)) in cases {
            let number = |index: usize| arguments[index].as_f64().unwrap_or(f64::NAN);
            let integer = |index: usize| number(index) as u64;
            let text = |index: usize| arguments[index].as_str().expect("a text");
            let time = |index: usize| Timestamp::from_millisecond(number(index) as i64).expect("in range");
            let shown = match function.as_str() {
                "age" => age_at(time(0), time(1)),
                "bestWords" => {
                    let best: Measured = serde_json::from_value(arguments[0].clone()).expect("a value");
                    let val_accuracy = arguments[1]["val_accuracy"].as_f64();
                    let checkpoint = CheckpointInfo { val_accuracy, best: true, ..CheckpointInfo::default() };
                    best_words(best, [&checkpoint])
                }
                "bytes" => bytes(integer(0)),
                "clock" => clock(number(0)),
                "count" => count(integer(0)),
                "percent" => percent(number(0)),
                "plural" => plural(integer(0), text(1)),
                "quantity" => quantity(text(0)).to_owned(),
                "rate" => rate(number(0)),
                "shortenMiddle" => cut::shorten_middle(text(0), integer(1) as usize),
                "sparkline" => {
                    let values: Vec<Option<f32>> =
                        serde_json::from_value(arguments[0].clone()).expect("numbers");
                    sparkline(&values.into_iter().map(|v| v.unwrap_or(f32::NAN)).collect::<Vec<_>>())
                }
                "uncertainty" => uncertainty(number(0), arguments[1].as_u64()),
                "value" => value(number(0)),
                other => panic!("{other} is not a function of the scripts"),
            };
            assert_eq!(shown, *expected, "{function} of {arguments:?}");
        }
    }
}
