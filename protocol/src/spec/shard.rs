//! Hybrid parallelism: which ranks share one copy of the network, and which operators are split over these ranks.

use super::{
    BrokenFiles, JobSpec, LossKind, ParallelSpec,
    keys::suggest_word,
    mistake::{Mistakes, describe_value},
    named::words,
};
use crate::numbers::plural;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Values of `parallel.mode`.
pub(super) const MODES: [&str; 3] = ["data", "hybrid", "auto"];
/// Maximum number of strategies in a job.
pub const MAX_SHARDS: usize = 64;
/// torchvision's name of the last layer of every network that can be split.
const LAST_LAYER: &str = "fc";
/// torchvision's name of the convolution that reads the pictures.
const FIRST_LAYER: &str = "conv1";
/// Maximum number of characters in a pattern.
const MATCH_CHARS: usize = 100;

/// A strategy: how the operators that a pattern matches are split over the ranks that share a copy of the network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ShardSpec {
    /// Pattern of names of convolutions and linear layers, as in torchvision; `*` stands for any text: `fc`, `layer4.*.conv1`.
    #[serde(rename = "match")]
    pub pattern: String,
    pub split: Split,
}

words! {
    /// The dimension along which an operator is split.
    #[derive(ToSchema)]
    pub enum Split: "split" {
        /// Output channels, or classes: each rank computes some of them for all pictures of its group.
        Out = "out",
        /// Input channels: each rank computes a part of the sum for all pictures of its group.
        In = "in",
        /// The groups of a grouped convolution.
        Groups = "groups",
    }
}

impl ShardSpec {
    /// Whether the pattern is valid.
    pub fn has_valid_pattern(&self) -> bool {
        is_pattern(&self.pattern)
    }

    /// Whether the pattern matches an operator's name.
    pub fn matches(&self, name: &str) -> bool {
        let mut parts = self.pattern.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = name.strip_prefix(first) else { return false };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        for part in parts {
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last)
    }
}

fn is_pattern(text: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._*-".contains(c);
    (1..=MATCH_CHARS).contains(&text.len()) && text.chars().all(is_allowed)
}

impl ParallelSpec {
    /// Whether the ranks search for the best plan when they start.
    pub fn is_auto(&self) -> bool {
        self.mode == "auto"
    }

    /// The same settings with the mesh and the strategies of a plan.
    #[must_use]
    pub fn with_mesh(&self, [pipeline, height, model]: [u32; 3], shard: Vec<ShardSpec>) -> Self {
        let mode = if pipeline * height * model > 1 { "hybrid" } else { "data" };
        Self { mode: mode.into(), pipeline, height, model, shard, ..self.clone() }
    }

    /// Whether the mode is `hybrid`: several ranks may share one copy of the network.
    pub fn is_hybrid(&self) -> bool {
        self.mode == "hybrid"
    }

    /// The units that have their own pictures in a step, as text: `4 ranks`, `2 sets of 2 ranks that share rows` or `2 sets of 2 ranks with
    /// the same pictures`.
    pub fn sets_in_words(&self) -> String {
        let sets = plural(self.data_ranks().into(), "set");
        match (self.height.max(1), self.pipeline.max(1)) {
            (1, 1) => plural(self.ranks.into(), "rank"),
            (height, 1) => format!("{sets} of {height} ranks that share rows"),
            (height, stages) => format!("{sets} of {} ranks with the same pictures", height * stages),
        }
    }

    /// Number of different sets of pictures in a step.
    pub fn data_ranks(&self) -> u32 {
        self.ranks_of_stage() / self.height.max(1)
    }

    /// Index of the set of pictures that `rank` has, from 0. From one rank to the next, the position along `model` changes fastest, then
    /// the position along `height`, then the copy of the network, then the stage.
    pub fn data_rank(&self, rank: u32) -> u32 {
        let (height, model, rank) =
            (self.height.max(1), self.model.max(1), rank % self.ranks_of_stage().max(1));
        rank / (height * model) * model + rank % model
    }

    /// Number of ranks that have the same stage of the network.
    pub fn ranks_of_stage(&self) -> u32 {
        self.ranks / self.pipeline.max(1)
    }

    /// Describes a pipeline's step of `micro_batches` under the schedule 1F1B; `None` if there is one stage.
    pub fn pipeline_in_words(&self, micro_batches: u32) -> Option<String> {
        let (stages, micro_batches) = (self.pipeline, micro_batches.max(1));
        let bubble =
            100.0 * f64::from(stages.saturating_sub(1)) / f64::from(micro_batches + stages.max(1) - 1);
        let kept_batches = plural(stages.min(micro_batches).into(), "micro-batch");
        (stages > 1).then(|| {
            format!(
                "{stages} stages x {}: each stage waits for {bubble:.0} % of a step (the bubble), and the first stage keeps the \
                 activations of {kept_batches}",
                plural(micro_batches.into(), "micro-batch")
            )
        })
    }

    /// The split of the last layer over the ranks of `model`; `None` if there are strategies and none of them matches the layer.
    fn last_layer_split(&self) -> Option<Split> {
        if self.shard.is_empty() {
            return Some(Split::Out);
        }
        self.split_of(LAST_LAYER)
    }

    /// The split that the strategies give a layer.
    fn split_of(&self, layer: &str) -> Option<Split> {
        self.shard.iter().rev().find(|shard| shard.matches(layer)).map(|shard| shard.split)
    }

    /// The error for a first convolution that is split over its inputs among more ranks than pictures have `channels`; `None` if it can be
    /// split.
    pub fn too_few_channels(&self, channels: u32) -> Option<String> {
        let is_split = self.is_hybrid() && self.split_of(FIRST_LAYER) == Some(Split::In);
        (is_split && channels < self.model).then(|| {
            format!(
                "{FIRST_LAYER} cannot be split by \"in\" over {} ranks, because the pictures have {}: give it split = \"out\", or no \
                 strategy",
                self.model,
                plural(channels.into(), "channel")
            )
        })
    }

    /// The error for a last layer that is split over its classes among more ranks than there are `classes`; `None` if it can be split.
    pub fn too_many_ranks(&self, classes: usize) -> Option<String> {
        let is_split = self.is_hybrid() && self.model > 1 && self.last_layer_split() == Some(Split::Out);
        (is_split && classes < self.model as usize).then(|| {
            let largest_divisor =
                (1..=classes as u32).rev().find(|model| self.model.is_multiple_of(*model)).unwrap_or(1);
            format!(
                "{} cannot be divided over {} ranks: set parallel.model to {largest_divisor}",
                plural(classes as u64, "class"),
                self.model
            )
        })
    }

    /// The error for pictures with fewer `rows` than ranks that share them; `None` if every rank has a row. GPUs also need a row of each
    /// activation, which the ranks check.
    pub fn too_few_rows(&self, rows: u32) -> Option<String> {
        (self.height > rows).then(|| {
            format!(
                "{} ranks cannot share the {rows} rows of a picture: give at most {rows}, or a larger data.image_size",
                self.height
            )
        })
    }

    /// Whether `rank` counts its pictures: among the ranks of a stage that have the same pictures, only the first does.
    pub fn counts_pictures(&self, rank: u32) -> bool {
        (rank / self.model.max(1)).is_multiple_of(self.height.max(1))
    }
}

/// Checks the value of `parallel.shard`. The error lists every mistake.
pub(super) fn check(value: &Value) -> Result<(), String> {
    let Some(list) = value.as_array().filter(|list| list.len() <= MAX_SHARDS) else {
        return Err(format!(
            "must be a list of at most {MAX_SHARDS} tables with match and split, is {}",
            describe_value(value)
        ));
    };
    let mut mistakes = Vec::new();
    for (number, entry) in (1..).zip(list) {
        let Some(table) = entry.as_object() else {
            mistakes.push(format!(
                "entry {number} must be a table with match and split, is {}",
                describe_value(entry)
            ));
            continue;
        };
        if !table.get("match").and_then(Value::as_str).is_some_and(is_pattern) {
            let given = table.get("match").map_or_else(|| "missing".into(), describe_value);
            mistakes.push(format!(
                "entry {number}: match must be the name of an operator, such as \"fc\" or \"layer4.*\", is {given}"
            ));
        }
        let split = table.get("split").and_then(Value::as_str);
        if !split.is_some_and(|split| Split::NAMES.contains(&split)) {
            let given = table.get("split").map_or_else(|| "missing".into(), describe_value);
            let meant = split.map(|split| suggest_word(&Split::NAMES, split)).unwrap_or_default();
            mistakes.push(format!(
                "entry {number}: split must be one of {}, is {given}{meant}",
                Split::NAMES.join(", ")
            ));
        }
        for key in table.keys().filter(|key| !["match", "split"].contains(&key.as_str())) {
            mistakes
                .push(format!("entry {number}: no key is called {key:?} here; the keys are match and split"));
        }
    }
    if mistakes.is_empty() { Ok(()) } else { Err(mistakes.join("; ")) }
}

/// Reports combinations of `[parallel]` with other keys that cannot work.
pub(super) fn check_combinations(spec: &JobSpec, errors: &mut Mistakes<'_>) {
    let parallel = &spec.parallel;
    let ParallelSpec { ranks, model, height, pipeline, .. } = *parallel;
    if !parallel.is_hybrid() && !parallel.is_auto() {
        for (key, is_set) in [
            ("model", model > 1),
            ("height", height > 1),
            ("pipeline", pipeline > 1),
            ("shard", !parallel.shard.is_empty()),
        ] {
            if is_set {
                let detail = "needs parallel.mode = \"hybrid\" or \"auto\": with \"data\" every rank has the whole network";
                errors.add(&format!("/parallel/{key}"), detail);
            }
        }
        return;
    }
    let all_ranks = plural(ranks.into(), "rank");
    // The largest divisor of `count` that is at most `given`.
    let divisor =
        |count: u32, given: u32| (1..=count.min(given)).rev().find(|n| count.is_multiple_of(*n)).unwrap_or(1);
    // Groups of `model` ranks, then groups of `height` such groups, then groups of `pipeline` such groups.
    let (mut undivided, mut group, mut keys, mut sizes) = (ranks, 1_u64, String::new(), String::new());
    for (key, size) in [("model", model), ("height", height), ("pipeline", pipeline)] {
        let times = if keys.is_empty() { "" } else { " x " };
        (keys, sizes) = (format!("{key}{times}{keys}"), format!("{size}{times}{sizes}"));
        group *= u64::from(size);
        if !undivided.is_multiple_of(size) {
            let near = divisor(undivided, size);
            // The smallest number of whole groups that has at least the given ranks, if a job may have as many ranks.
            let enough = u64::from(ranks).next_multiple_of(group.max(1));
            let or_more = if enough <= 1024 { format!(", or {enough} ranks") } else { String::new() };
            let detail = format!(
                "{all_ranks} cannot be divided into groups of {keys} = {sizes}: give a {key} such as {near}{or_more}"
            );
            errors.add(&format!("/parallel/{key}"), detail);
            break;
        }
        undivided /= size;
    }
    // In mode `auto`, the search for a plan takes the settings below into account.
    if parallel.is_auto() {
        return;
    }
    if model == 1 && !parallel.shard.is_empty() {
        errors
            .add("/parallel/shard", "splits operators over parallel.model = 1 rank: set model to 2 or more");
    }
    if !parallel.shard.is_empty() && !parallel.sync_batch_norm && !spec.model.freeze_norm {
        errors.add(
            "/parallel/sync_batch_norm",
            "parallel.shard needs true: a rank with some of a layer's channels computes them for the pictures of its whole group",
        );
    }
    if model > 1 && parallel.last_layer_split() == Some(Split::In) {
        let loss = &spec.loss;
        for (key, is_set) in
            [("sample_share", loss.sample_share < 1.0), ("kind", loss.kind != LossKind::Softmax)]
        {
            if is_set {
                let detail = "needs whole rows of the last layer's weights, but a strategy splits this layer over its inputs: give it \
                              split = \"out\", or no strategy";
                errors.add(&format!("/loss/{key}"), detail);
            }
        }
    }
    let key = if height > 1 { "height" } else { "pipeline" };
    if height * pipeline > 1 && spec.data.broken_files == BrokenFiles::Skip {
        errors.add(
            "/data/broken_files",
            format!(
                "\"skip\" cannot be combined with parallel.{key}: ranks that have the same pictures may not all be able to \
                 read them. Give \"fail\", and remove the broken files"
            ),
        );
    }
    if model * pipeline > 1 && spec.log.histograms > 0 {
        errors.add(
            "/log/histograms",
            "no rank has all weights of a network that is split (parallel.model, parallel.pipeline): leave histograms out",
        );
    }
    if spec.recovery.min_ranks.is_some() {
        errors.add(
            "/recovery/min_ranks",
            "a job of mode \"hybrid\" waits for all its ranks: leave min_ranks out",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_names() {
        for (pattern, name, is_match) in [
            ("fc", "fc", true),
            ("fc", "fc2", false),
            ("*", "layer1.0.conv1", true),
            ("layer4.*", "layer4.2.conv3", true),
            ("layer4.*", "layer3.2.conv3", false),
            ("layer4.*.conv1", "layer4.0.conv1", true),
            ("layer4.*.conv1", "layer4.0.conv2", false),
            ("*conv1", "conv1", true),
            ("layer*.0.conv*", "layer2.0.conv2", true),
            ("a*a", "a", false),
        ] {
            let shard = ShardSpec { pattern: pattern.into(), split: Split::Out };
            assert_eq!(shard.matches(name), is_match, "{pattern} {name}");
        }
    }
}
