//! Weights given by the user (`model.pretrained`): a checkpoint, or a safetensors file with torchvision's names,
//! which timm also uses for these networks.

use super::{TrainError, Training};
use crate::checkpoint;
use lockstep_engine::first_invalid;
use lockstep_host::{
    cache,
    files::allowed,
    tensors::{
        HostTensor, NamedTensors,
        fit::{Mapping, compare, is_in, shapes},
    },
};
use std::path::{Path, PathBuf};

fn pretrained_error(text: String) -> TrainError {
    TrainError::Impossible(format!("model.pretrained: {text}"))
}

/// The path to which `given`, the value of `model.pretrained`, refers on this machine.
///
/// # Errors
/// `given` names weights that have not been downloaded.
pub(super) fn find(given: &str) -> Result<PathBuf, TrainError> {
    cache::find_weights(given).map_err(pretrained_error)
}

/// Replaces `initial` by the weights of the file at `path`. `head`, the last layer, keeps its initial values if the
/// file's last layer does not fit. Also returns log lines about differences between the file and the network.
///
/// # Errors
/// The file cannot be read, or a tensor does not fit, is missing, or does not belong to this network.
pub(super) fn load(
    training: &Training<'_>,
    path: &Path,
    initial: NamedTensors,
    head: &str,
) -> Result<(NamedTensors, Vec<String>), TrainError> {
    let path = allowed::resolve(path, training.pretrained_folders).map_err(pretrained_error)?;
    let files = checkpoint::model_files(&path).map_err(|e| pretrained_error(e.to_string()))?;
    let mut given = NamedTensors::new();
    let every_tensor = |_: &str| true;
    for file in &files {
        let (file, opened) = allowed::open(file, training.pretrained_folders).map_err(pretrained_error)?;
        let tensors = checkpoint::read_opened_tensors(&file, opened, &every_tensor);
        given.extend(tensors.map_err(pretrained_error)?);
    }
    // The only file, or the folder of several files.
    let path = if let [file] = &files[..] { file } else { &path };
    let (weights, mapping) = replace_weights(given, initial, head).map_err(|problems| {
        let arch = training.spec.model.arch.as_str();
        pretrained_error(format!(
            "{} does not fit a {arch} as this job builds it: {problems}",
            path.display()
        ))
    })?;
    if let Some(found) = first_invalid(&weights) {
        return Err(pretrained_error(format!(
            "{}: {found}; its training has diverged, give another file",
            path.display()
        )));
    }
    let notes = mapping.notes(head).into_iter().map(|note| format!("{}: {note}", path.display()));
    Ok((weights, notes.collect()))
}

/// Replaces `initial` by `given`, tensor by tensor.
///
/// # Errors
/// A description of the tensors that do not fit.
fn replace_weights(
    mut given: NamedTensors,
    initial: NamedTensors,
    head: &str,
) -> Result<(NamedTensors, Mapping), String> {
    let mapping = compare(&shapes(&given), &shapes(&initial), Some(head))?;
    let replaced = initial.into_iter().map(|(name, own)| {
        let keeps_initial = mapping.new_head_reason.is_some() && is_in(head, &name);
        let tensor = match given.remove(&format!("{}{name}", mapping.prefix)).filter(|_| !keeps_initial) {
            Some(tensor) if tensor.shape == own.shape => tensor,
            Some(tensor) => sum_channels(&tensor, own.shape),
            None => own,
        };
        (name, tensor)
    });
    Ok((replaced.collect(), mapping))
}

/// Sums the weights of a convolution (OIHW) over its input channels.
fn sum_channels(weights: &HostTensor, shape: Vec<usize>) -> HostTensor {
    let area: usize = weights.shape[2..].iter().product();
    let filters = weights.values.chunks_exact(area * weights.shape[1]);
    let values =
        filters.flat_map(|filter| (0..area).map(move |offset| filter[offset..].iter().step_by(area).sum()));
    HostTensor { shape, values: values.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_engine::net;
    use lockstep_protocol::spec::{Arch, ModelSpec, Stem};

    fn network(arch: Arch, stem: Stem, channels: usize, classes: usize, seed: u64) -> NamedTensors {
        let model = ModelSpec { arch, stem, ..ModelSpec::default() };
        let network = net::build(&model, 64, channels, classes).unwrap();
        assert_eq!(network.head(), "fc");
        net::init::initial_parameters(&network, false, seed)
    }

    fn small(classes: usize, seed: u64) -> NamedTensors {
        network(Arch::ResNet20, Stem::Cifar, 3, classes, seed)
    }

    fn tensor(shape: &[usize]) -> HostTensor {
        HostTensor { shape: shape.to_vec(), values: vec![0.0; shape.iter().product()] }
    }

    fn with_prefix(prefix: &str, tensors: NamedTensors) -> NamedTensors {
        tensors.into_iter().map(|(name, tensor)| (format!("{prefix}{name}"), tensor)).collect()
    }

    #[test]
    fn weights_fit_under_a_prefix_and_with_another_head() {
        let is_head = |name: &str| name.starts_with("fc.");
        let without_head = |mut all: NamedTensors| {
            all.retain(|name, _| !is_head(name));
            all
        };
        let insert = |mut all: NamedTensors, name: &str, shape: &[usize]| {
            all.insert(name.into(), tensor(shape));
            all
        };
        let no_head = "it has no fc.weight: the last layer (fc) keeps its initial values";
        let other_head =
            |difference: &str| format!("its {difference}: the last layer (fc) keeps its initial values");
        let prefix_note =
            |prefix: &str| format!("its names begin with {prefix}, which this network's do not");
        let left_out =
            |names: &str| format!("left out because they belong to no layer of this network: {names}");
        let lightning = insert(with_prefix("model.", small(10, 1)), "criterion.weight", &[10]);
        let bare = without_head(small(10, 1));
        for (given, takes_head, notes) in [
            (small(10, 1), true, vec![]),
            (with_prefix("module.", small(10, 1)), true, vec![prefix_note("module.")]),
            (with_prefix("module._orig_mod.", small(10, 1)), true, vec![prefix_note("module._orig_mod.")]),
            (with_prefix("backbone.", small(10, 1)), true, vec![prefix_note("backbone.")]),
            (
                insert(with_prefix("net.", small(10, 1)), "queue", &[4]),
                true,
                vec![prefix_note("net."), left_out("queue")],
            ),
            (bare.clone(), false, vec![no_head.into()]),
            (
                insert(insert(bare.clone(), "head.fc.weight", &[10, 64]), "head.fc.bias", &[10]),
                false,
                vec![left_out("head.fc.bias, head.fc.weight"), no_head.into()],
            ),
            (small(12, 1), false, vec![other_head("fc.weight is [12, 64], this job's is [10, 64]")]),
            (
                insert(small(10, 1), "fc.weight", &[10, 32]),
                false,
                vec![other_head("fc.weight is [10, 32], this job's is [10, 64]")],
            ),
            (
                insert(small(10, 1), "fc.bias", &[12]),
                false,
                vec![other_head("fc.bias is [12], this job's is [10]")],
            ),
            (
                insert(with_prefix("backbone.", bare), "fc.weight", &[10, 64]),
                false,
                vec![prefix_note("backbone."), left_out("fc.weight"), no_head.into()],
            ),
            (lightning, true, vec![prefix_note("model."), left_out("criterion.weight")]),
        ] {
            let (weights, mapping) = replace_weights(given, small(10, 2), "fc").unwrap();
            assert_eq!(mapping.notes("fc"), notes);
            let (pretrained, initial) = (small(10, 1), small(10, 2));
            assert!(weights.keys().eq(initial.keys()));
            for (name, tensor) in &weights {
                let from = if is_head(name) && !takes_head { &initial } else { &pretrained };
                assert!(*tensor == from[name], "{name}: {notes:?}");
            }
        }
    }

    #[test]
    fn weights_that_do_not_fit_are_refused_by_name() {
        let problems = |change: &dyn Fn(&mut NamedTensors)| {
            let mut given = small(10, 1);
            change(&mut given);
            replace_weights(given, small(10, 2), "fc").unwrap_err()
        };
        let put = |name: &'static str, shape: &'static [usize]| {
            problems(&|given| drop(given.insert(name.into(), tensor(shape))))
        };
        for (problem, expected) in [
            (
                put("layer1.0.conv2.weight", &[128, 128, 3, 3]),
                "layer1.0.conv2.weight is [128, 128, 3, 3], wanted [16, 16, 3, 3]",
            ),
            (put("layer4.0.conv1.weight", &[1]), "layer4.0.conv1.weight is not in this network"),
            (put("conv1.0.weight", &[1]), "conv1.0.weight is not in this network"),
            (
                problems(&|given| drop(given.remove("layer3.2.bn2.running_var"))),
                "layer3.2.bn2.running_var is missing",
            ),
            (
                problems(&|given| {
                    let renamed = small(10, 1).into_iter();
                    *given = renamed.map(|(name, own)| (name.replace("layer", "stage"), own)).collect();
                }),
                "layer1.0.bn1.bias, layer1.0.bn1.running_mean, layer1.0.bn1.running_var and 97 more are missing; \
                 stage1.0.bn1.bias, stage1.0.bn1.running_mean, stage1.0.bn1.running_var and 97 more are not in this network",
            ),
            (
                problems(&|given| given.extend(with_prefix("ema.", small(10, 1)))),
                "it contains several networks, under \"\" and \"ema.\": keep the tensors of one",
            ),
        ] {
            assert!(problem.ends_with(expected), "{problem}");
        }
        let deeper = with_prefix("module.", network(Arch::ResNet32, Stem::Cifar, 3, 10, 1));
        let problem = replace_weights(deeper, small(10, 2), "fc").unwrap_err();
        assert!(
            problem.starts_with("module.layer1.3.bn1.bias, ") && problem.contains(" and 57 more are not in "),
            "{problem}"
        );
    }

    #[test]
    fn a_colour_convolution_is_summed_for_grey_and_others_are_refused() {
        let weights_of = |stem: Stem, channels: usize| network(Arch::ResNet18, stem, channels, 10, 1);
        let (weights, mapping) =
            replace_weights(weights_of(Stem::Imagenet, 3), weights_of(Stem::Imagenet, 1), "fc").unwrap();
        assert!(mapping.notes("fc")[0].contains("conv1.weight takes RGB and the pictures are grey"));
        let (colour, grey) = (&weights_of(Stem::Imagenet, 3)["conv1.weight"], &weights["conv1.weight"]);
        assert_eq!(grey.shape, [64, 1, 7, 7]);
        for (index, sum) in grey.values.iter().enumerate() {
            let (filter, position) = (index / 49, index % 49);
            let channels = [0, 1, 2].map(|channel| colour.values[(filter * 3 + channel) * 49 + position]);
            assert_eq!(*sum, channels.iter().sum::<f32>());
        }
        for (given, initial, problem) in [
            (
                weights_of(Stem::Imagenet, 3),
                weights_of(Stem::Cifar, 3),
                "conv1.weight is [64, 3, 7, 7], wanted [64, 3, 3, 3] (set model.stem = \"imagenet\")",
            ),
            (
                weights_of(Stem::Cifar, 3),
                weights_of(Stem::Imagenet, 1),
                "conv1.weight is [64, 3, 3, 3], wanted [64, 1, 7, 7] (set model.stem = \"cifar\")",
            ),
            (
                weights_of(Stem::Cifar, 1),
                weights_of(Stem::Cifar, 3),
                "conv1.weight is [64, 1, 3, 3], wanted [64, 3, 3, 3] (these weights are for pictures of 1 channel, and \
                 those of data.dataset have 3)",
            ),
        ] {
            assert_eq!(replace_weights(given, initial, "fc").unwrap_err(), problem);
        }
    }
}
