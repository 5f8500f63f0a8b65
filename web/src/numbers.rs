//! Formats numbers for people. `static/numbers.js` uses the same formats, so that a value does not change when the page becomes live.

use jiff::Timestamp;
use lockstep_protocol::cut;

use lockstep_protocol::numbers::nouns;
pub use lockstep_protocol::numbers::{count, percent, value};

/// A text, shortened to the space that a page has for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shown {
    /// The text; long names and paths are shortened in the middle.
    pub text: String,
    /// The whole text, for the tooltip; empty if nothing was shortened.
    pub title: String,
}

impl Shown {
    fn of(whole: &str, text: String) -> Self {
        let title = if text == whole { String::new() } else { whole.to_owned() };
        Self { text, title }
    }

    /// Shortens a name or a path.
    pub fn name(name: &str) -> Self {
        Self::of(name, cut::middle(name, cut::WORD))
    }

    /// Shortens long names and paths in a sentence.
    pub fn sentence(words: &str) -> Self {
        Self::of(words, cut::long_words(words))
    }
}

/// Formats a speed: `38940.2` as `38,940`, `9.73` as `9.7`.
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
        s @ 5..60 => format!("{s} s ago"),
        s @ 60..3600 => format!("{} min ago", s / 60),
        s @ 3600..172_800 => format!("{} h ago", s / 3600),
        s => format!("{} d ago", s / 86_400),
    }
}

/// Formats a number with a noun: `1 rank`, `4 ranks`, `1,200 classes`.
pub fn plural(n: u64, noun: &str) -> String {
    format!("{} {}", count(n), nouns(n, noun))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(percent(0.8861), "88.6 %");
        assert_eq!(value(0.412_71), "0.4127");
        assert_eq!(value(3.2e-5), "3.20e-5");
        assert_eq!(value(f64::NAN), "not finite");
        assert_eq!(rate(38_940.2), "38,940");
        assert_eq!(rate(9.73), "9.7");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1_100_000), "1.1 MB");
        assert_eq!(bytes(188_743_680), "189 MB");
        assert_eq!(bytes(999_600), "1.0 MB");
        assert_eq!(clock(12.2), "0:12");
        assert_eq!(clock(11_642.0), "3:14:02");
        assert_eq!(clock(200_000.0), "2 d 7 h");
        assert_eq!(plural(1, "rank"), "1 rank");
        assert_eq!(plural(1200, "class"), "1,200 classes");
    }

    #[test]
    fn old_ages_are_rounded() {
        let at = |s| Timestamp::from_second(s).expect("in range");
        assert_eq!(age_at(at(100), at(103)), "just now");
        assert_eq!(age_at(at(100), at(159)), "59 s ago");
        assert_eq!(age_at(at(100), at(100 + 7200)), "2 h ago");
        assert_eq!(age_at(at(100), at(50)), "just now", "clocks may disagree");
    }
}
