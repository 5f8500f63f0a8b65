//! Inspections of a model, compared with PyTorch (`tests/pytorch/fixtures/looking.json`). They read real files with the
//! functions that handle an agent's requests.

mod pictures;

use crate::{pictures::encode, pytorch::weights};
use lockstep_engine::net::resnet;
use lockstep_host::tensors::HostTensor;
use lockstep_kernels::synthetic;
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest},
    inspect::{EvaluateModel, ModelEvaluation, NamedPicture, Pick, Prediction, Samples},
    spec::{Arch, DataSpec, JobSpec, LossKind, LossSpec, ModelSpec, Stem, Validation},
};
use lockstep_worker::inspect;
use safetensors::{Dtype, tensor::TensorView};
use serde::Deserialize;
use serde_json::json;
use std::{fs, path::Path};
use tempfile::TempDir;

/// Results of `looking` in `make_fixtures.py` for `count` grey pictures of `side` x `side` pixels.
#[derive(Deserialize)]
struct Expected {
    count: usize,
    side: usize,
    mean: f32,
    std: f32,
    bias: Vec<f32>,
    probabilities: Vec<Vec<f32>>,
    confusion: Vec<Vec<u64>>,
    loss: f64,
}

fn expected() -> Expected {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/pytorch/fixtures/looking.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A folder with the model and the dataset of the fixture.
fn set_up() -> (Expected, TempDir) {
    let (fixture, dir) = (expected(), tempfile::tempdir().unwrap());
    write_model(dir.path(), &fixture);
    write_dataset(dir.path(), &fixture);
    (fixture, dir)
}

fn spec(fixture: &Expected) -> JobSpec {
    JobSpec {
        model: ModelSpec { arch: Arch::ResNet20, stem: Stem::Cifar, ..ModelSpec::default() },
        data: DataSpec {
            dataset: "synthetic".into(),
            validation: Validation::Split("test".into()),
            mean: Some(vec![fixture.mean]),
            std: Some(vec![fixture.std]),
            crop_padding: 2,
            horizontal_flip: true,
            ..DataSpec::default()
        },
        ..JobSpec::default()
    }
}

/// Writes the file `model.safetensors` of a checkpoint, with the weights of `fill` and `looking` in `make_fixtures.py`.
fn write_model(folder: &Path, fixture: &Expected) {
    write_changed_model(folder, fixture, same_metadata, same_values);
}

fn same_metadata(_: &mut serde_json::Value) {}

fn same_values(_: &str, _: &mut Vec<f32>) {}

/// As [`write_model`], with changed metadata or values.
fn write_changed_model(
    folder: &Path,
    fixture: &Expected,
    change_metadata: impl Fn(&mut serde_json::Value),
    change_values: impl Fn(&str, &mut Vec<f32>),
) {
    let spec = spec(fixture);
    let network = resnet::build(&spec.model, fixture.side, 1, 10).unwrap();
    let names: Vec<String> = (0..10).map(|c| c.to_string()).collect();
    let mut metadata = json!({
        "classes": json!(names).to_string(), "image_size": fixture.side.to_string(), "channels": "1",
        "mean": json!([fixture.mean]).to_string(), "std": json!([fixture.std]).to_string(),
        "spec": serde_json::to_string(&spec).unwrap(),
    });
    change_metadata(&mut metadata);
    let mut weights = weights(&network);
    for (name, HostTensor { values, .. }) in &mut weights {
        match name.as_str() {
            "fc.weight" => values.iter_mut().for_each(|v| *v *= 512.0),
            "fc.bias" => values.clone_from(&fixture.bias),
            _ => {}
        }
        change_values(name, values);
    }
    let views = weights.iter().map(|(name, HostTensor { shape, values })| {
        (name, TensorView::new(Dtype::F32, shape.clone(), bytemuck::cast_slice(values)).unwrap())
    });
    let bytes = safetensors::serialize(views, Some(serde_json::from_value(metadata).unwrap())).unwrap();
    fs::write(folder.join("model.safetensors"), bytes).unwrap();
}

fn pixels(fixture: &Expected) -> Vec<u8> {
    let values = synthetic::values("looking.pictures", fixture.count * fixture.side * fixture.side);
    values.iter().map(|v| ((v + 1.0) * 127.5) as u8).collect()
}

fn write_dataset(folder: &Path, fixture: &Expected) {
    let labels = synthetic::labels("looking.labels", fixture.count, 10);
    let labels: Vec<u8> = labels.into_iter().map(|label| label as u8).collect();
    write_idx(folder, [fixture.count, fixture.side, fixture.side], &pixels(fixture), &labels);
}

/// Writes IDX files of pictures, whose number, height and width are `shape`. They are training and test pictures.
fn write_idx(folder: &Path, shape: [usize; 3], pixels: &[u8], labels: &[u8]) {
    let word = |n: usize| (n as u32).to_be_bytes();
    let images = [&[0, 0, 8, 3][..], &shape.map(word).concat(), pixels].concat();
    let labels = [&[0, 0, 8, 1][..], &word(shape[0]), labels].concat();
    for split in ["train", "t10k"] {
        fs::write(folder.join(format!("{split}-images-idx3-ubyte")), &images).unwrap();
        fs::write(folder.join(format!("{split}-labels-idx1-ubyte")), &labels).unwrap();
    }
}

fn png(fixture: &Expected, index: usize) -> Vec<u8> {
    let size = fixture.side * fixture.side;
    encode_png(fixture.side, fixture.side, &pixels(fixture)[index * size..][..size])
}

/// Predicts the fixture's first picture.
fn predict_first(folder: &Path, fixture: &Expected) -> Result<Vec<Prediction>, String> {
    inspect::predict(folder, vec![("0.png".into(), png(fixture, 0))])
}

fn encode_png(width: usize, height: usize, pixels: &[u8]) -> Vec<u8> {
    let picture = image::GrayImage::from_raw(width as u32, height as u32, pixels.to_vec()).unwrap();
    encode(picture, image::ImageFormat::Png)
}

#[test]
fn predictions_match_pytorch_to_four_digits() {
    let (fixture, dir) = set_up();
    let mut pictures: Vec<_> =
        (0..fixture.probabilities.len()).map(|i| (format!("{i}.png"), png(&fixture, i))).collect();
    pictures.insert(3, ("notes.txt".into(), b"no picture".to_vec()));
    let mut found = inspect::predict(dir.path(), pictures).unwrap();
    let broken = found.remove(3);
    // Only this file has an error.
    assert!(broken.classes.is_empty() && broken.error.unwrap().contains("not a JPEG, PNG"));
    assert_eq!(found.len(), fixture.probabilities.len());
    for (prediction, expected) in found.iter().zip(&fixture.probabilities) {
        assert_eq!(prediction.classes.len(), 10);
        assert!(prediction.classes.is_sorted_by(|a, b| a.probability >= b.probability));
        for predicted in &prediction.classes {
            let pytorch = expected[predicted.class.parse::<usize>().unwrap()];
            assert!(
                (predicted.probability - pytorch).abs() < 1e-4,
                "{}: {predicted:?}, PyTorch says {pytorch}",
                prediction.name
            );
        }
    }
    let missing = inspect::predict(&dir.path().join("nowhere"), Vec::new()).unwrap_err();
    assert!(missing.contains("nowhere"), "{missing}");
}

/// Cosines do not depend on the length of a class's weights, and have no bias.
#[test]
fn predictions_with_a_margin_use_cosines() {
    let fixture = expected();
    let predict = |kind: LossKind, has_other_lengths: bool| {
        let dir = tempfile::tempdir().unwrap();
        let loss = LossSpec { kind, ..LossSpec::default() };
        let change_metadata = |metadata: &mut serde_json::Value| {
            metadata["spec"] =
                serde_json::to_string(&JobSpec { loss: loss.clone(), ..spec(&fixture) }).unwrap().into();
        };
        let change_values = |name: &str, values: &mut Vec<f32>| match name {
            "fc.weight" if has_other_lengths => {
                values.iter_mut().enumerate().for_each(|(at, v)| *v *= (2 << (at / 64)) as f32)
            }
            "fc.bias" if has_other_lengths => values.fill(7.0),
            _ => {}
        };
        write_changed_model(dir.path(), &fixture, change_metadata, change_values);
        let found = predict_first(dir.path(), &fixture).unwrap();
        let predictions = found[0].classes.iter();
        predictions.map(|predicted| (predicted.class.clone(), predicted.probability)).collect::<Vec<_>>()
    };
    let arcface = predict(LossKind::ArcFace, false);
    assert_eq!(predict(LossKind::ArcFace, true), arcface);
    assert_eq!(predict(LossKind::CosFace, false), arcface, "predictions have no margin");
    assert!(predict(LossKind::Softmax, false) != arcface);
}

#[test]
fn the_confusion_matrix_matches_pytorch() {
    let (fixture, dir) = set_up();
    let found = evaluate(dir.path(), spec(&fixture)).unwrap();
    assert_eq!(found.confusion, fixture.confusion);
    assert!((found.loss - fixture.loss).abs() < 1e-3, "{} instead of {}", found.loss, fixture.loss);
    let correct: u64 = (0..10).map(|c| fixture.confusion[c][c]).sum();
    assert_eq!((found.samples, found.accuracy), (200, correct as f64 / 200.0));
    assert_eq!(found.mistakes.len() as u64, 200 - correct);
    assert!(found.mistakes.is_sorted_by(|a, b| a.confidence >= b.confidence));
    let labels = synthetic::labels("looking.labels", fixture.count, 10);
    assert!(found.mistakes.iter().all(|m| m.label != m.predicted && labels[m.index as usize] == m.label));
}

/// A request to evaluate the model in `folder` on the dataset in the same folder.
fn evaluation_request(folder: &Path, spec: JobSpec, neighbours: Option<u32>) -> AgentRequest {
    let folder = folder.to_string_lossy().into_owned();
    AgentRequest::Evaluate(EvaluateModel {
        model: folder.clone(),
        dataset: folder,
        spec: Box::new(spec),
        allowed: None,
        neighbours,
    })
}

fn evaluate(folder: &Path, spec: JobSpec) -> Result<ModelEvaluation, String> {
    match inspect::answer(evaluation_request(folder, spec, None)) {
        Ok(AgentReply::Evaluation(found)) => Ok(*found),
        Ok(other) => panic!("{other:?}"),
        Err(message) => Err(message),
    }
}

#[test]
fn errors_for_a_diverged_model_name_file_and_tensor() {
    let (fixture, dir) = set_up();
    // The CPU's ReLU turns NaN into 0, so the outputs would be finite.
    for (tensor, value, detail) in [
        ("conv1.weight", f32::NAN, "conv1.weight contains NaN at index 3"),
        ("layer2.0.bn1.running_mean", f32::INFINITY, "layer2.0.bn1.running_mean contains inf at index 3"),
        ("bn1.running_var", -0.5, "bn1.running_var contains -0.5 at index 3: a variance is never below zero"),
    ] {
        write_changed_model(dir.path(), &fixture, same_metadata, |name, values| {
            if name == tensor {
                values[3] = value;
            }
        });
        for message in [
            predict_first(dir.path(), &fixture).unwrap_err(),
            evaluate(dir.path(), spec(&fixture)).unwrap_err(),
        ] {
            assert!(message.contains("model.safetensors") && message.contains(detail), "{message}");
        }
    }
    // Finite weights whose sums are infinite: no class may be predicted.
    write_changed_model(dir.path(), &fixture, same_metadata, |name, values| {
        if name == "fc.weight" {
            values.iter_mut().for_each(|v| *v = 3e38);
        }
    });
    let found = predict_first(dir.path(), &fixture).unwrap();
    let message = found[0].error.clone().unwrap();
    assert!(found[0].classes.is_empty() && message.contains("inf for class \"0\""), "{message}");
    let message = evaluate(dir.path(), spec(&fixture)).unwrap_err();
    assert!(message.contains("validation picture 0") && message.contains("inf"), "{message}");
}

#[test]
fn the_loss_of_a_confident_wrong_model_is_finite_and_large() {
    let (fixture, dir) = set_up();
    // Class 0 always has a logit of 1000, so the probabilities of other classes underflow to 0.
    write_changed_model(dir.path(), &fixture, same_metadata, |name, values| match name {
        "fc.weight" => values.fill(0.0),
        "fc.bias" => {
            values.fill(0.0);
            values[0] = 1000.0;
        }
        _ => {}
    });
    let found = evaluate(dir.path(), spec(&fixture)).unwrap();
    assert!((found.loss - 1000.0 * (1.0 - found.accuracy)).abs() < 1e-6, "{}", found.loss);
}

#[test]
fn evaluations_use_the_model_s_transforms_and_classes() {
    let (fixture, dir) = set_up();
    let reference = evaluate(dir.path(), spec(&fixture)).unwrap();
    // As after a fork of the job to another size, without its own normalisation.
    let mut forked = spec(&fixture);
    forked.data.image_size = Some(64.into());
    (forked.data.mean, forked.data.std) = (None, None);
    let found = evaluate(dir.path(), forked).unwrap();
    assert_eq!((found.confusion, found.loss), (reference.confusion, reference.loss));

    let write_names = |order: &[usize]| {
        let all: Vec<String> = order.iter().map(|c| format!("{c}\n")).collect();
        fs::write(dir.path().join("classes.txt"), all.concat()).unwrap();
    };
    write_names(&[0, 1, 2, 3, 4, 5, 6, 7, 9, 8]);
    let message = evaluate(dir.path(), spec(&fixture)).unwrap_err();
    assert!(message.contains("class 8 is \"8\" for the model and \"9\" in the dataset"), "{message}");
    write_names(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 10]);
    let message = evaluate(dir.path(), spec(&fixture)).unwrap_err();
    assert!(message.contains("the dataset lacks the model's \"9\""), "{message}");
    write_names(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert!(evaluate(dir.path(), spec(&fixture)).is_ok());
}

#[test]
fn errors_for_invalid_model_metadata_name_the_file() {
    let (fixture, dir) = set_up();
    let too_many_classes = json!(vec!["c"; 100_001]).to_string();
    for (key, value, detail) in [
        ("image_size", "4097", "4097 pixels"),
        ("image_size", "7", "7 pixels"),
        ("channels", "0", "0 channels"),
        ("channels", "2", "2 channels"),
        ("classes", &too_many_classes, "has 100001 classes"),
        ("mean", "[]", "not valid for 1 channel"),
        ("mean", "[0.5, 0.5, 0.5]", "not valid for 1 channel"),
        ("std", "[0.0]", "not valid for 1 channel"),
        ("resize", "8193", "resized to 8193 pixels"),
        ("resize", "7", "resized to 7 pixels"),
        ("resize", "large", "its resize is not a number"),
        ("classes", "[]", "0 classes"),
        ("classes", "no JSON", "metadata"),
    ] {
        write_changed_model(dir.path(), &fixture, |metadata| metadata[key] = json!(value), same_values);
        let message = predict_first(dir.path(), &fixture).unwrap_err();
        assert!(message.contains("model.safetensors") && message.contains(detail), "{key}: {message}");
    }
}

#[test]
fn embeddings_are_the_last_layer_s_input_without_reading_that_layer() {
    let (fixture, dir) = set_up();
    let pictures =
        || (0..fixture.probabilities.len()).map(|i| (format!("{i}.png"), png(&fixture, i))).collect();
    let found = inspect::embed(dir.path(), pictures()).unwrap();
    let embeddings = dir.path().join("embeddings");
    inspect::write_embeddings(&embeddings, &found).unwrap();
    let why = inspect::predict(&embeddings, pictures()).unwrap_err();
    assert!(why.contains("it has the embeddings of pictures, not a network"), "{why}");
    // Scaled as in `weights` (by 1 / sqrt(64)) and in `write_model`.
    let weight: Vec<f32> =
        synthetic::values("resnet20.fc.weight", 640).iter().map(|v| v * ((1.0 / 8.0) * 512.0)).collect();
    for (prediction, expected) in found.iter().zip(&fixture.probabilities) {
        let embedding = prediction.embedding.as_ref().unwrap();
        assert_eq!((embedding.len(), prediction.classes.len(), &prediction.error), (64, 0, &None));
        let logit = |class: usize| {
            let row = &weight[class * 64..(class + 1) * 64];
            f64::from(fixture.bias[class])
                + row.iter().zip(embedding).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>()
        };
        let sum: f64 = (0..10).map(|class| logit(class).exp()).sum();
        for (class, pytorch) in expected.iter().enumerate() {
            let computed = logit(class).exp() / sum;
            assert!(
                (computed - f64::from(*pytorch)).abs() < 1e-4,
                "{class}: {computed}, PyTorch says {pytorch}"
            );
        }
    }
    // A head that predictions cannot use: invalid class names, and weights that are NaN.
    let invalid_classes = |metadata: &mut serde_json::Value| metadata["classes"] = json!("no list");
    write_changed_model(dir.path(), &fixture, invalid_classes, |name, values| {
        if name.starts_with("fc.") {
            values.fill(f32::NAN);
        }
    });
    assert!(inspect::predict(dir.path(), pictures()).is_err());
    assert_eq!(inspect::embed(dir.path(), pictures()).unwrap(), found);
}

#[test]
fn neighbours_are_training_pictures_with_validation_transforms() {
    let (fixture, dir) = set_up();
    // Training and test pictures are the same, so each picture's nearest neighbour is itself; training would crop and flip it.
    let neighbours = |k: u32| {
        let request = evaluation_request(dir.path(), spec(&fixture), Some(k));
        let Ok(AgentReply::Neighbours(found)) = inspect::answer(request) else {
            panic!("the model can be evaluated")
        };
        found
    };
    let found = neighbours(1);
    assert_eq!((found.k, found.gallery, found.samples), (1, 200, 200));
    assert_eq!((found.weighted, found.majority), (1.0, 1.0));
    // All pictures vote, so the most frequent class is always predicted.
    let labels = synthetic::labels("looking.labels", fixture.count, 10);
    let counts: Vec<usize> =
        (0..10).map(|class| labels.iter().filter(|label| **label == class).count()).collect();
    let max_count = counts.iter().max().copied().unwrap();
    let found = neighbours(500);
    assert_eq!((found.gallery, found.majority), (200, max_count as f64 / 200.0));
}
