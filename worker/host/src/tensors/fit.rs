//! Whether tensors fit a network, decided by names and shapes only. The header of a file is checked when a job is
//! submitted, and the tensors when the job starts.

use super::NamedTensors;
use lockstep_protocol::numbers::plural;
use std::collections::{BTreeMap, BTreeSet};

pub type Shapes = BTreeMap<String, Vec<usize>>;

/// The weights of the first convolution, which every network has.
const FIRST_CONVOLUTION: &str = "conv1.weight";
/// Another tensor that every network has. No other tensor's name ends with this name.
const IN_FIRST_BLOCK: &str = "layer1.0.conv1.weight";
/// Maximum number of tensors of a kind that a message names.
const MAX_NAMES: usize = 3;

pub fn shapes(tensors: &NamedTensors) -> Shapes {
    tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone())).collect()
}

/// How the tensors of a file are mapped to the tensors of a network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mapping {
    /// The prefix of names in the file, such as `module.` (DistributedDataParallel), `_orig_mod.` (`torch.compile`)
    /// or `model.` (Lightning).
    pub prefix: String,
    /// Why the head keeps its initial values. `None` if the head comes from the file.
    pub new_head_reason: Option<String>,
    /// Tensors of the file that belong to no layer of the network, such as a head of another name.
    pub left_out: Vec<String>,
    /// Whether the first convolution takes RGB pictures in the file and grey pictures in the network. Its weights are
    /// then summed over the input channels, which is equivalent to repeating a grey picture three times.
    pub sums_channels: bool,
}

/// Compares the tensors `given` with the tensors `wanted`. If `head` names the last layer, they may differ in the ways
/// that [`Mapping`] describes.
///
/// # Errors
/// The tensors do not fit. The text names some of the differences.
pub fn compare(given: &Shapes, wanted: &Shapes, head: Option<&str>) -> Result<Mapping, String> {
    let is_head = |name: &str| head.is_some_and(|head| is_in(head, name));
    let trunk: Vec<_> = wanted.iter().filter(|(name, _)| !is_head(name)).collect();
    let prefix = if head.is_some() { prefix(given, &trunk)? } else { String::new() };
    let mut sums_channels = false;
    let (mut missing, mut differing) = (Vec::new(), Vec::new());
    for (name, wanted_shape) in &trunk {
        let name_in_file = format!("{prefix}{name}");
        match given.get(&name_in_file) {
            None => missing.push(name_in_file),
            Some(shape) if shape == *wanted_shape => {}
            Some(shape)
                if head.is_some() && *name == FIRST_CONVOLUTION && is_rgb_for_grey(shape, wanted_shape) =>
            {
                sums_channels = true;
            }
            Some(shape) => {
                let hint = hint(name, shape, wanted_shape);
                differing.push(format!("{name_in_file} is {shape:?}, wanted {wanted_shape:?}{hint}"));
            }
        }
    }
    let layers: BTreeSet<_> = trunk.iter().map(|(name, _)| first_part(name)).collect();
    let is_of_trunk = |name: &str| layers.contains(first_part(name)) || name.starts_with("layer");
    let name_in_network = |name: &String| name.strip_prefix(&prefix).map(str::to_owned);
    let others =
        given.keys().filter(|name| name_in_network(name).is_none_or(|name| !wanted.contains_key(&name)));
    let (unknown, left_out): (Vec<String>, Vec<String>) = others
        .cloned()
        .partition(|name| head.is_none() || name_in_network(name).is_some_and(|name| is_of_trunk(&name)));
    if missing.is_empty() && differing.is_empty() && unknown.is_empty() {
        let new_head_reason = head.and_then(|head| head_mistake(given, wanted, &prefix, head));
        return Ok(Mapping { prefix, new_head_reason, left_out, sums_channels });
    }
    let unknown = [unknown, left_out].concat();
    let are = |names: &[String]| if names.len() == 1 { "is" } else { "are" };
    let mut problems = Vec::new();
    if !differing.is_empty() {
        problems.push(some_of(&differing, "; "));
    }
    if !missing.is_empty() {
        problems.push(format!("{} {} missing", some_of(&missing, ", "), are(&missing)));
    }
    if !unknown.is_empty() {
        problems.push(format!("{} {} not in this network", some_of(&unknown, ", "), are(&unknown)));
    }
    Err(problems.join("; "))
}

impl Mapping {
    /// The differences between the file and the network, one sentence each.
    pub fn notes(&self, head: &str) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.prefix.is_empty() {
            notes.push(format!("its names begin with {}, which this network's do not", self.prefix));
        }
        if self.sums_channels {
            notes.push(format!(
                "its {FIRST_CONVOLUTION} takes RGB and the pictures are grey: the weights are summed over the input channels, which is \
                 equivalent to repeating each picture three times"
            ));
        }
        if !self.left_out.is_empty() {
            let names = some_of(&self.left_out, ", ");
            notes.push(format!("left out because they belong to no layer of this network: {names}"));
        }
        if let Some(why) = &self.new_head_reason {
            notes.push(format!("{why}: the last layer ({head}) keeps its initial values"));
        }
        notes
    }
}

/// Whether a tensor belongs to `layer`.
pub fn is_in(layer: &str, name: &str) -> bool {
    name.strip_prefix(layer).is_some_and(|rest| rest.starts_with('.'))
}

fn first_part(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

/// The prefix under which most tensors of the `trunk` (all layers except the head) are found.
fn prefix(given: &Shapes, trunk: &[(&String, &Vec<usize>)]) -> Result<String, String> {
    let count_found = |prefix: &str| {
        trunk.iter().filter(|(name, _)| given.contains_key(&format!("{prefix}{name}"))).count()
    };
    let candidates: BTreeSet<&str> = given
        .keys()
        .filter_map(|name| name.strip_suffix(IN_FIRST_BLOCK))
        .filter(|prefix| prefix.ends_with('.'))
        .chain([""])
        .collect();
    let highest = candidates.iter().map(|prefix| count_found(prefix)).max().unwrap_or(0);
    let best: Vec<_> = candidates.into_iter().filter(|prefix| count_found(prefix) == highest).collect();
    match &best[..] {
        [first, second, ..] if highest == trunk.len() => Err(format!(
            "it contains several networks, under {first:?} and {second:?}: keep the tensors of one"
        )),
        _ => Ok(best.first().copied().unwrap_or_default().to_owned()),
    }
}

/// Why the file's head cannot be used. `None` if it can.
fn head_mistake(given: &Shapes, wanted: &Shapes, prefix: &str, head: &str) -> Option<String> {
    ["weight", "bias"].into_iter().find_map(|suffix| {
        let name = format!("{head}.{suffix}");
        let wanted_shape = wanted.get(&name)?;
        match given.get(&format!("{prefix}{name}")) {
            Some(shape) if shape == wanted_shape => None,
            Some(shape) => Some(format!("its {name} is {shape:?}, this job's is {wanted_shape:?}")),
            None => Some(format!("it has no {name}")),
        }
    })
}

fn is_rgb_for_grey(given: &[usize], wanted: &[usize]) -> bool {
    matches!((given, wanted), ([out, 3, given @ ..], [own_out, 1, wanted @ ..]) if out == own_out && given == wanted)
}

/// The setting to change if the first convolution belongs to the other stem or to another number of channels.
fn hint(name: &str, given: &[usize], wanted: &[usize]) -> String {
    match (name, given, wanted) {
        (FIRST_CONVOLUTION, [.., 7, 7], [.., 3, 3]) => " (set model.stem = \"imagenet\")".into(),
        (FIRST_CONVOLUTION, [.., 3, 3], [.., 7, 7]) => " (set model.stem = \"cifar\")".into(),
        (FIRST_CONVOLUTION, [_, theirs, ..], [_, own, ..]) if theirs != own => format!(
            " (these weights are for pictures of {}, and those of data.dataset have {own})",
            plural(*theirs as u64, "channel")
        ),
        _ => String::new(),
    }
}

/// The first [`MAX_NAMES`] names, and the number of further names.
fn some_of(all: &[String], separator: &str) -> String {
    let omitted = all.len().saturating_sub(MAX_NAMES);
    let text = all[..all.len() - omitted].join(separator);
    if omitted > 0 { format!("{text} and {omitted} more") } else { text }
}
