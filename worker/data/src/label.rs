//! The labels that samples may have, in every kind of file.

use unicode_normalization::UnicodeNormalization;

/// Classes of a dataset whose labels are numbers: a large one is a mistake, not so many classes.
pub(super) const CLASSES: u32 = 100_000;
/// A class's number or name.
pub(super) const LABEL_BYTES: u64 = 4096;

/// Numbers are written in one way.
pub(super) fn class_name(text: &str) -> String {
    text.parse::<u32>().map_or_else(|_| composed(text), |number| number.to_string())
}

/// A name with its letters and their accents in one (Unicode's NFC): macOS takes them apart in the names of files.
pub(super) fn composed(name: &str) -> String {
    name.nfc().collect()
}
