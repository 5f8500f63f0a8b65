//! Whether tensors fit a network, by names and shapes alone: checked with a file's header when a job is submitted, and with the
//! tensors themselves when the job starts.

use super::NamedTensors;
use std::collections::BTreeMap;

/// Shapes of tensors under their names.
pub type Shapes = BTreeMap<String, Vec<usize>>;

/// The shapes of `tensors`.
pub fn shapes(tensors: &NamedTensors) -> Shapes {
    tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone())).collect()
}

/// What a comparison has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fit {
    /// Every tensor that does not fit, by name, in words.
    pub problems: Vec<String>,
    /// Shapes of the head's weights as given and as wanted, where the given head is whole and differs in its number of
    /// classes alone: it can be initialised anew, and is no problem.
    pub other_head: Option<[Vec<usize>; 2]>,
}

/// Compares the tensors `given` with those `wanted`. `head`: the last layer, which has a row for each class, where it may have
/// another number of them.
pub fn compare(given: &Shapes, wanted: &Shapes, head: Option<&str>) -> Fit {
    let head = head.map(|head| ["weight", "bias"].map(|suffix| format!("{head}.{suffix}")));
    let other_head = head.as_ref().and_then(|head| other_head(given, wanted, head));
    let head = head.unwrap_or_default();
    let mut problems = Vec::new();
    for (name, own) in wanted {
        match given.get(name) {
            None => problems.push(format!("{name} is missing")),
            Some(_) if other_head.is_some() && head.contains(name) => {}
            Some(shape) if shape == own => {}
            Some(shape) => {
                let hint = stem_hint(name, shape, own);
                problems.push(format!("{name} is {shape:?}, wanted {own:?}{hint}"));
            }
        }
    }
    let unknown = given.keys().filter(|name| !wanted.contains_key(*name));
    problems.extend(unknown.map(|name| format!("{name} is not in this network")));
    Fit { problems, other_head }
}

/// The first `most` of them, and how many more there are.
pub fn first_of(problems: &[String], most: usize) -> String {
    let more = problems.len().saturating_sub(most);
    let mut text = problems[..problems.len() - more].join("; ");
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    text
}

fn other_head(given: &Shapes, wanted: &Shapes, head: &[String; 2]) -> Option<[Vec<usize>; 2]> {
    let [weight, bias] = head.each_ref().map(|name| given.get(name));
    let (weight, bias, own) = (weight?, bias?, wanted.get(&head[0])?);
    let (&[classes, inputs], &[own_classes, own_inputs]) = (&weight[..], &own[..]) else { return None };
    (*bias == [classes] && inputs == own_inputs && classes != own_classes)
        .then(|| [weight.clone(), own.clone()])
}

/// What to change where the first convolution has the kernel of the other stem.
fn stem_hint(name: &str, given: &[usize], wanted: &[usize]) -> &'static str {
    match (name, given, wanted) {
        ("conv1.weight", [.., 7, 7], [.., 3, 3]) => " (set model.stem = \"imagenet\")",
        ("conv1.weight", [.., 3, 3], [.., 7, 7]) => " (set model.stem = \"cifar\")",
        _ => "",
    }
}
