//! Suggests a known name for a mistyped one.

use crate::limits::KEY_BYTES;
use std::cmp::Reverse;

/// Names are suggested only above this Jaro-Winkler similarity.
const MIN_SIMILARITY: f64 = 0.8;

/// The name that a person who typed `word` most likely meant. Among the similar names, the first criterion is the smallest edit distance,
/// which counts as 0 for a name that begins with `word`. Ties go to the nearest number (`resnet21` is `resnet20` rather than `resnet24`),
/// then to the highest similarity.
pub fn nearest<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // Bounds the time of the comparison. No name has more than `KEY_BYTES` bytes.
    let word = Some(word.to_lowercase()).filter(|word| word.len() <= KEY_BYTES)?;
    let rank = |name: &str| {
        let name = name.to_lowercase();
        let similarity = strsim::jaro_winkler(&word, &name);
        let edits = if name.starts_with(&word) { 0 } else { strsim::damerau_levenshtein(&word, &name) };
        let number_distance = number(&word).zip(number(&name)).map_or(0, |(a, b)| a.abs_diff(b));
        (similarity > MIN_SIMILARITY).then_some((edits, number_distance, Reverse((similarity * 1e6) as u32)))
    };
    names.filter_map(|name| Some((rank(name)?, name))).min_by_key(|(rank, _)| *rank).map(|(_, name)| name)
}

/// The first number in a name.
fn number(name: &str) -> Option<u64> {
    let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Arch;

    #[test]
    fn a_mistyped_name_gets_the_intended_name() {
        for (typed, meant) in [
            ("resnet21", "resnet20"),
            ("resnet22", "resnet20"),
            ("resnet51", "resnet50"),
            ("resnet5", "resnet50"),
            ("resnet100", "resnet101"),
            ("resnet151", "resnet152"),
            ("ResNet-50", "resnet50"),
            ("resent18", "resnet18"),
            ("resnext50", "resnext50_32x4d"),
            ("resnext50-32x4d", "resnext50_32x4d"),
            ("wide_resnet50", "wide_resnet50_2"),
        ] {
            assert_eq!(nearest(typed, Arch::NAMES.into_iter()), Some(meant), "{typed}");
        }
        let keys = ["name", "batch_size", "global_batch_size", "lr", "epochs", "epsilon"];
        for (typed, meant) in [
            ("batchsize", Some("batch_size")),
            ("epoch", Some("epochs")),
            ("nmae", Some("name")),
            ("lrr", Some("lr")),
            ("optimizer", None),
            ("", None),
        ] {
            assert_eq!(nearest(typed, keys.into_iter()), meant, "{typed}");
        }
    }

    #[test]
    fn words_longer_than_any_name_have_no_suggestion() {
        let longest = "a".repeat(KEY_BYTES);
        assert_eq!(nearest(&longest, [longest.as_str()].into_iter()), Some(longest.as_str()));
        let longer = format!("{longest}a");
        assert_eq!(nearest(&longer, [longer.as_str()].into_iter()), None);
    }
}
