//! Labels of samples, for every kind of file.

use unicode_normalization::UnicodeNormalization;

/// Maximum number of classes if labels are numbers. Larger labels are refused.
pub(super) const MAX_CLASSES: u32 = 100_000;
/// Maximum length of a class's number or name, in bytes.
pub(super) const MAX_LABEL_BYTES: u64 = 4096;

/// The number of times that each class occurs in `labels`.
pub(super) fn class_counts(classes: usize, labels: impl Iterator<Item = u32>) -> Vec<u64> {
    let mut counts = vec![0; classes];
    labels.for_each(|label| counts[label as usize] += 1);
    counts
}

/// The name of a class. Numbers are normalised to one spelling.
pub(super) fn class_name(text: &str) -> String {
    text.parse::<u32>().map_or_else(|_| normalise_nfc(text), |number| number.to_string())
}

/// The name in Unicode normalisation form NFC. macOS decomposes accented letters in file names.
pub(super) fn normalise_nfc(name: &str) -> String {
    name.nfc().collect()
}
