//! The names of a checkpoint's files. Tensors of one kind are in one file, or in several parts with an index: the
//! layout of Hugging Face's sharded checkpoints (<https://huggingface.co/docs/transformers/big_models>).

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Weights, biases and running statistics.
pub const MODEL: &str = "model.safetensors";
/// The optimizer's state: `<parameter>.<slot>`, such as `conv1.weight.momentum` or `conv1.weight.exp_avg`.
pub const OPTIMIZER: &str = "optimizer.safetensors";
/// The moving average of the tensors in [`MODEL`], under the same names; for jobs with `train.ema_decay`.
pub const AVERAGE: &str = "ema.safetensors";
/// All other state from which training continues.
pub const STATE: &str = "state.json";
/// Sizes and checksums of the other files.
pub const MANIFEST: &str = "MANIFEST.json";

/// A [`MANIFEST`]. A missing field is read as 0 or empty, which is invalid in every checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Manifest {
    /// Version of the format: 1.
    pub version: u32,
    pub epoch: u32,
    pub step: u64,
    /// The checkpoint's other files, by their names.
    pub files: Files,
}

/// Files by their names.
pub type Files = BTreeMap<String, ManifestFile>;

/// A file in the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    pub size_bytes: u64,
    /// SHA-256 of the file, hexadecimal.
    pub sha256: String,
}

/// The name of a checkpoint's folder: `<epoch>-<step>`.
pub fn folder_name(epoch: u32, step: u64) -> String {
    format!("{epoch}-{step}")
}

/// The epoch and step in the name of a checkpoint's folder.
pub fn parse_folder_name(name: &str) -> Option<(u32, u64)> {
    let (epoch, step) = name.split_once('-')?;
    let parsed = (epoch.parse().ok()?, step.parse().ok()?);
    // Only the format of [`folder_name`]: no signs, no leading zeros.
    (folder_name(parsed.0, parsed.1) == name).then_some(parsed)
}

/// The name of part `number` (from 1) of `count` parts of `file`: `model-00002-of-00004.safetensors`.
pub fn part_name(file: &str, number: usize, count: usize) -> String {
    let kind = file.trim_end_matches(".safetensors");
    format!("{kind}-{number:05}-of-{count:05}.safetensors")
}

/// The name of the index for the parts of `file`: `model.safetensors.index.json`.
pub fn index_name(file: &str) -> String {
    format!("{file}.index.json")
}

/// The kind of a file, [`MODEL`], [`OPTIMIZER`] or [`AVERAGE`], if `name` is that file, a part of it, or its index.
pub fn kind_of(name: &str) -> Option<&'static str> {
    let numbers = || {
        let (number, count) = name.split_once('-')?.1.split_once(".safetensors")?.0.split_once("-of-")?;
        Some((number.parse::<usize>().ok()?, count.parse::<usize>().ok()?))
    };
    let numbers = numbers().filter(|(number, count)| (1..=*count).contains(number));
    let is_part = |file: &str| numbers.is_some_and(|(number, count)| part_name(file, number, count) == name);
    let is_of_kind = |file: &&str| name == *file || name == index_name(file) || is_part(file);
    [MODEL, OPTIMIZER, AVERAGE].into_iter().find(is_of_kind)
}

/// The first required file that a checkpoint lacks. `has` says whether the checkpoint has a file of the given name. A file in parts is
/// not missing if the checkpoint has its index.
pub fn first_missing(has: impl Fn(&str) -> bool) -> Option<&'static str> {
    [MODEL, OPTIMIZER, STATE].into_iter().find(|file| !has(file) && !has(&index_name(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_checkpoint_are_recognised_by_name() {
        for (name, is) in [
            ("model.safetensors", Some(MODEL)),
            ("model.safetensors.index.json", Some(MODEL)),
            ("model-00001-of-00002.safetensors", Some(MODEL)),
            ("optimizer-00002-of-00002.safetensors", Some(OPTIMIZER)),
            ("ema-00100-of-100000.safetensors", Some(AVERAGE)),
            ("model-00003-of-00002.safetensors", None),
            ("model-00000-of-00002.safetensors", None),
            ("model-1-of-2.safetensors", None),
            ("model-00001-of-00002.safetensors.index.json", None),
            ("model-00001-of-00002.safetensors/../x", None),
            ("weights-00001-of-00002.safetensors", None),
            ("state.json", None),
            ("../model.safetensors", None),
            ("", None),
        ] {
            assert_eq!(kind_of(name), is, "{name}");
        }
        let missing = |names: &[&str]| first_missing(|name| names.contains(&name));
        assert_eq!(missing(&[MODEL, STATE, "optimizer.safetensors.index.json"]), None);
        assert_eq!(missing(&[OPTIMIZER, STATE]), Some(MODEL));
    }
}
