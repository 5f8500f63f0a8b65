//! Weights given by the user (`model.pretrained`): a checkpoint of ours, or a safetensors file with torchvision's names.
//! timm has the same names for these networks.

use super::{TrainError, Training};
use crate::{
    checkpoint,
    engine::{NamedTensors, first_not_finite},
    files::allowed,
    tensors::fit::{Fit, compare, first_of, shapes},
};
use std::path::Path;

/// Differences between a file and the network that are named.
const NAMED: usize = 5;

/// Replaces `initial` by the weights of the file at `path`. If the file has another number of classes, the last layer `head`, which
/// has a row for each class, keeps its initial values, which is logged.
///
/// # Errors
/// The file cannot be read, or a tensor of it does not fit, is missing or is not of this network.
pub(super) fn weights(
    training: &Training<'_>,
    path: &Path,
    initial: NamedTensors,
    head: &str,
) -> Result<NamedTensors, TrainError> {
    let wrong = |text: String| TrainError::Impossible(format!("model.pretrained: {text}"));
    let path = allowed::resolve(path, training.weights_in).map_err(wrong)?;
    let path = checkpoint::model_file(&path).map_err(|e| wrong(e.to_string()))?;
    let (path, opened) = allowed::open(&path, training.weights_in).map_err(wrong)?;
    let given = checkpoint::read_opened_tensors(&path, opened).map_err(wrong)?;
    if let Some(found) = first_not_finite(&given) {
        return Err(wrong(format!(
            "{}: {found}; its training has diverged, give another file",
            path.display()
        )));
    }
    let taken = take_over(given, initial, head).map_err(|problems| {
        let (arch, text) = (training.spec.model.arch.name(), some_of(&problems));
        wrong(format!("{} does not hold a {arch} as this job builds it: {text}", path.display()))
    })?;
    if let Some([theirs, ours]) = taken.other_head {
        training.observer.log(&format!(
            "{head}.weight of {} is {theirs:?}, this job's is {ours:?}: the last layer ({head}) keeps its initial values",
            path.display()
        ));
    }
    Ok(taken.weights)
}

#[derive(Debug)]
struct FittedWeights {
    weights: NamedTensors,
    /// Shapes of the head's weights in the file and in the network, where classes differ.
    other_head: Option<[Vec<usize>; 2]>,
}

/// Replaces `initial` by `given`, tensor by tensor.
///
/// # Errors
/// The names of all tensors that do not fit.
fn take_over(
    mut given: NamedTensors,
    initial: NamedTensors,
    head: &str,
) -> Result<FittedWeights, Vec<String>> {
    let Fit { problems, other_head } = compare(&shapes(&given), &shapes(&initial), Some(head));
    if !problems.is_empty() {
        return Err(problems);
    }
    // Only a head for another number of classes still has another shape.
    let taken = initial.into_iter().map(|(name, own)| {
        let tensor = given.remove(&name).filter(|tensor| tensor.shape == own.shape).unwrap_or(own);
        (name, tensor)
    });
    Ok(FittedWeights { weights: taken.collect(), other_head })
}

/// The first [`NAMED`] problems, and the number of further ones.
pub(super) fn some_of(problems: &[String]) -> String {
    first_of(problems, NAMED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{engine::HostTensor, net};
    use lockstep_protocol::spec::{Arch, ModelSpec, Stem};

    fn network(arch: Arch, stem: Stem, classes: usize, seed: u64) -> NamedTensors {
        let model = ModelSpec { arch, stem, ..ModelSpec::default() };
        let network = net::build(&model, 64, 3, classes).unwrap();
        assert_eq!(network.head(), "fc");
        net::init::initial_parameters(&network, false, seed)
    }

    fn resnext(classes: usize, seed: u64) -> NamedTensors {
        network(Arch::ResNeXt50_32x4d, Stem::Imagenet, classes, seed)
    }

    #[test]
    fn all_that_a_file_of_the_same_network_has_is_taken() {
        let taken = take_over(resnext(10, 1), resnext(10, 2), "fc").unwrap();
        assert!(taken.weights == resnext(10, 1) && taken.other_head.is_none());
    }

    #[test]
    fn a_head_of_other_classes_keeps_its_initial_values_and_nothing_else_does() {
        let (theirs, ours) = (resnext(1000, 1), resnext(10, 2));
        let taken = take_over(theirs.clone(), ours.clone(), "fc").unwrap();
        assert_eq!(taken.other_head, Some([vec![1000, 2048], vec![10, 2048]]));
        assert_eq!(taken.weights.len(), ours.len());
        for (name, tensor) in &taken.weights {
            let from = if name.starts_with("fc.") { &ours } else { &theirs };
            assert!(*tensor == from[name], "{name}");
        }
    }

    fn problems(change: impl FnOnce(&mut NamedTensors)) -> Vec<String> {
        let mut given = resnext(10, 1);
        change(&mut given);
        take_over(given, resnext(10, 2), "fc").unwrap_err()
    }

    fn tensor(shape: &[usize]) -> HostTensor {
        HostTensor { shape: shape.to_vec(), values: vec![0.0; shape.iter().product()] }
    }

    #[test]
    fn every_other_mismatch_names_its_tensor() {
        let put = |name: &'static str, shape: &'static [usize]| {
            problems(|given| {
                given.insert(name.into(), tensor(shape));
            })
        };
        assert_eq!(
            put("layer1.0.conv2.weight", &[128, 128, 3, 3]),
            ["layer1.0.conv2.weight is [128, 128, 3, 3], wanted [128, 4, 3, 3]"]
        );
        assert_eq!(put("layer5.0.conv1.weight", &[1]), ["layer5.0.conv1.weight is not in this network"]);
        assert_eq!(
            problems(|given| drop(given.remove("layer4.2.bn3.running_var"))),
            ["layer4.2.bn3.running_var is missing"]
        );
        // A head that is not whole, or of another width, is no head of other classes.
        assert_eq!(put("fc.weight", &[12, 2048]), ["fc.weight is [12, 2048], wanted [10, 2048]"]);
        assert_eq!(put("fc.bias", &[12]), ["fc.bias is [12], wanted [10]"]);
        let narrow = problems(|given| {
            given.insert("fc.weight".into(), tensor(&[12, 512]));
            given.insert("fc.bias".into(), tensor(&[12]));
        });
        assert_eq!(narrow, ["fc.bias is [12], wanted [10]", "fc.weight is [12, 512], wanted [10, 2048]"]);
        assert_eq!(problems(|given| given.retain(|name, _| !name.starts_with("fc."))).len(), 2);
    }

    #[test]
    fn another_stem_is_refused_with_what_to_set() {
        let [imagenet, cifar] =
            [Stem::Imagenet, Stem::Cifar].map(|stem| network(Arch::ResNet18, stem, 10, 1));
        let found = take_over(imagenet.clone(), cifar.clone(), "fc").unwrap_err();
        let wanted = "conv1.weight is [64, 3, 7, 7], wanted [64, 3, 3, 3] (set model.stem = \"imagenet\")";
        assert_eq!(found, [wanted]);
        assert!(take_over(cifar, imagenet, "fc").unwrap_err()[0].ends_with("(set model.stem = \"cifar\")"));
    }
}
