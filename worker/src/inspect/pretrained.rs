//! Checks whether a job can start from given weights (`model.pretrained`), when it is submitted. Only the file's
//! header is read. Ranks also check the values, with the same messages for names and shapes (`train/pretrained.rs`).

use crate::checkpoint;
use lockstep_engine::net;
use lockstep_host::{
    cache,
    files::allowed,
    tensors::fit::{Shapes, compare},
};
use lockstep_protocol::{agent::AllowedFolders, inspect::FitWeights, spec::KNOWN_WEIGHTS};
use std::path::{Path, PathBuf};

/// Why a network cannot start from these weights. `None` if the weights fit.
pub(super) fn find_mistake(request: &FitWeights) -> Option<String> {
    let path = cache::find_weights(&request.weights);
    let (file, given) = match path.and_then(|path| read_shapes(&path, request.allowed.as_ref())) {
        Ok(given) => given,
        Err(why) => return Some(why),
    };
    let FitWeights { model, image_size, channels, classes, .. } = request;
    // Validation of the job reports a network that cannot be built.
    let network = net::build(model, *image_size as usize, *channels as usize, *classes as usize).ok()?;
    let expected: Shapes = network.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
    let problems = compare(&given, &expected, Some(network.head())).err()?;
    Some(format!(
        "{} does not fit a {} as this job builds it: the file has {} tensors, the network {}; {problems}",
        file.display(),
        model.arch.as_str(),
        given.len(),
        expected.len(),
    ))
}

/// Returns the first file of the weights at `path`, and the shapes of all their tensors.
fn read_shapes(path: &Path, allowed: Option<&AllowedFolders>) -> Result<(PathBuf, Shapes), String> {
    if path.try_exists().is_ok_and(|exists| !exists) {
        return Err(format!(
            "{} does not exist on the training machine; give the path of a safetensors file there, a model (models:/NAME@ALIAS), a \
             checkpoint's id, or a name of public weights ({})",
            path.display(),
            KNOWN_WEIGHTS.join(", ")
        ));
    }
    let path = allowed::resolve(path, allowed)?;
    let files =
        if path.is_dir() { checkpoint::files_of(&path, checkpoint::MODEL)? } else { vec![path.clone()] };
    let (mut first, mut given) = (path, Shapes::new());
    // In reverse order, so that `first` is the first file in the end.
    for file in files.iter().rev() {
        let (file, opened) = allowed::open(file, allowed)?;
        given.extend(checkpoint::shapes_opened(&file, opened)?);
        first = file;
    }
    Ok((first, given))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::spec::{Arch, ModelSpec, Stem};
    use std::collections::BTreeMap;

    fn model(arch: Arch, stem: Stem) -> ModelSpec {
        ModelSpec { arch, stem, ..ModelSpec::default() }
    }

    fn fit_request(file: &Path, model: ModelSpec, classes: u32) -> FitWeights {
        let weights = file.to_str().unwrap().to_owned();
        FitWeights { weights, model, image_size: 32, channels: 3, classes, allowed: None }
    }

    fn resnet20() -> ModelSpec {
        model(Arch::ResNet20, Stem::Auto)
    }

    /// Writes a file with the weights of a ResNet-20.
    fn write_resnet20(dir: &Path) -> PathBuf {
        let network = net::build(&resnet20(), 32, 3, 10).unwrap();
        let tensors = net::init::initial_parameters(&network, false, 1);
        let file = dir.join("weights.safetensors");
        checkpoint::write_tensors(&file, &tensors, None, &BTreeMap::new()).unwrap();
        file
    }

    #[test]
    fn matching_weights_fit_with_other_classes_and_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = write_resnet20(dir.path());
        assert_eq!(find_mistake(&fit_request(&file, resnet20(), 10)), None);
        assert_eq!(find_mistake(&fit_request(&file, resnet20(), 131)), None, "the head may differ");
        let message = find_mistake(&fit_request(&file, model(Arch::ResNet32, Stem::Auto), 10)).unwrap();
        for part in
            ["does not fit a resnet32", "tensors, the network", "layer1.3.bn1.bias, ", "more are missing"]
        {
            assert!(message.contains(part), "{part:?} in {message}");
        }
        let message = find_mistake(&fit_request(Path::new("foo"), resnet20(), 10)).unwrap();
        assert!(
            message.starts_with("foo does not exist on the training machine; give the path"),
            "{message}"
        );
    }

    #[test]
    fn a_link_to_a_file_outside_the_allowed_folders_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let outside = write_resnet20(dir.path());
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("folder")).unwrap();
        let allowed = AllowedFolders { below: vec![root.display().to_string()], except: Vec::new() };
        let check = |file: &Path| {
            find_mistake(&FitWeights { allowed: Some(allowed.clone()), ..fit_request(file, resnet20(), 10) })
        };
        let inside = root.join("w.safetensors");
        std::fs::copy(&outside, &inside).unwrap();
        assert_eq!(check(&inside), None);
        std::fs::remove_file(&inside).unwrap();
        for link in [&inside, &root.join("folder/model.safetensors")] {
            std::os::unix::fs::symlink(&outside, link).unwrap();
        }
        for path in [inside, root.join("folder"), outside] {
            let why = check(&path).unwrap();
            assert!(why.contains("--dataset-root"), "{why}");
        }
    }

    #[test]
    fn another_file_format_is_named_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let whole = std::fs::read(write_resnet20(dir.path())).unwrap();
        let file = dir.path().join("other.safetensors");
        let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let numbers =
            String::from_utf8_lossy(&whole[8..8 + header]).replace("\"F32\"", "\"I32\"").into_bytes();
        let whole_numbers = [&whole[..8], &numbers[..], &whole[8 + header..]].concat();
        for (content, detail) in [
            (&whole[..whole.len() - 1], "not a whole safetensors file: it has "),
            (&whole[..100], "not a whole safetensors file"),
            (&b"PK\x03\x04 and so on"[..], "is a PyTorch pickle"),
            (
                &b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"[..],
                "run `git lfs pull`",
            ),
            (&b""[..], "it has no header"),
            (&b"a letter to my aunt"[..], "it has no header"),
            (&whole_numbers[..], "is of type I32; supported are float32, float64, bfloat16 and float16"),
        ] {
            std::fs::write(&file, content).unwrap();
            let message = find_mistake(&fit_request(&file, resnet20(), 10)).unwrap();
            assert!(message.contains(detail), "{detail:?} in {message}");
        }
        std::fs::remove_file(&file).unwrap();
        let message = find_mistake(&fit_request(&file, resnet20(), 10)).unwrap();
        assert!(message.contains("other.safetensors"), "{message}");
    }
}
