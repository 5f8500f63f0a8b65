//! What people are told of a model, against PyTorch (`tests/pytorch/fixtures/looking.json`): real files on disk, the
//! same way that the agent's helper takes.

use lockstep_protocol::{
    agent::{Answer, Question},
    look::{EvaluateModel, NamedPicture, Pick, Samples},
    spec::{Arch, DataSpec, JobSpec, ModelSpec, Stem, Validation},
};
use lockstep_worker::{look, made_up, net::resnet};
use serde::Deserialize;
use serde_json::json;
use std::{fs, io::Write, path::Path};

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

fn spec(of: &Expected) -> JobSpec {
    JobSpec {
        model: ModelSpec { arch: Arch::ResNet20, stem: Stem::Cifar, ..ModelSpec::default() },
        data: DataSpec {
            dataset: "made-up".into(),
            validation: Validation::Split("test".into()),
            mean: Some(vec![of.mean]),
            std: Some(vec![of.std]),
            crop_padding: 2,
            horizontal_flip: true,
            ..DataSpec::default()
        },
        ..JobSpec::default()
    }
}

/// `fill` and `looking` of `make_fixtures.py`, written as a checkpoint's model is.
fn write_model(folder: &Path, of: &Expected) {
    let spec = spec(of);
    let network = resnet::build(&spec.model, of.side, 1, 10).unwrap();
    let mut header = serde_json::Map::new();
    let names: Vec<String> = (0..10).map(|c| c.to_string()).collect();
    header.insert(
        "__metadata__".into(),
        json!({
            "classes": json!(names).to_string(), "image_size": of.side.to_string(), "channels": "1",
            "mean": json!([of.mean]).to_string(), "std": json!([of.std]).to_string(),
            "spec": serde_json::to_string(&spec).unwrap(),
        }),
    );
    let mut data: Vec<u8> = Vec::new();
    for p in network.parameters() {
        let mut values = made_up::values(&format!("resnet20.{}", p.name), p.len());
        let (scale, offset) = match p.name.as_str() {
            _ if p.shape.len() == 4 => {
                ((6.0 / (p.shape[0] * p.shape[2] * p.shape[3]) as f64).sqrt() as f32, 0.0)
            }
            "fc.weight" => ((1.0 / 8.0) * 512.0, 0.0),
            name if name.ends_with("running_var") => (0.5, 1.5),
            name if name.ends_with("weight") => (0.25, 0.5),
            _ => (0.125, 0.0),
        };
        values.iter_mut().for_each(|v| *v = *v * scale + offset);
        if p.name == "fc.bias" {
            values.clone_from(&of.bias);
        }
        let start = data.len();
        data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        header.insert(p.name, json!({"dtype": "F32", "shape": p.shape, "data_offsets": [start, data.len()]}));
    }
    let mut text = serde_json::to_vec(&header).unwrap();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = fs::File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&text).unwrap();
    file.write_all(&data).unwrap();
}

fn pixels(of: &Expected) -> Vec<u8> {
    let values = made_up::values("looking.pictures", of.count * of.side * of.side);
    values.iter().map(|v| ((v + 1.0) * 127.5) as u8).collect()
}

/// IDX files; training and test pictures are the same.
fn write_dataset(folder: &Path, of: &Expected) {
    let word = |n: usize| (n as u32).to_be_bytes();
    let mut images = vec![0, 0, 8, 3];
    images.extend([of.count, of.side, of.side].into_iter().flat_map(word));
    images.extend(pixels(of));
    let mut labels = vec![0, 0, 8, 1];
    labels.extend(word(of.count));
    labels.extend(made_up::labels("looking.labels", of.count, 10).into_iter().map(|l| l as u8));
    for split in ["train", "t10k"] {
        fs::write(folder.join(format!("{split}-images-idx3-ubyte")), &images).unwrap();
        fs::write(folder.join(format!("{split}-labels-idx1-ubyte")), &labels).unwrap();
    }
}

fn png(of: &Expected, index: usize) -> Vec<u8> {
    let size = of.side * of.side;
    let side = of.side as u32;
    let picture =
        image::GrayImage::from_raw(side, side, pixels(of)[index * size..][..size].to_vec()).unwrap();
    let mut bytes = std::io::Cursor::new(Vec::new());
    picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}

#[test]
fn predictions_are_pytorch_s_to_four_digits() {
    let of = expected();
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &of);
    let mut pictures: Vec<_> =
        (0..of.probabilities.len()).map(|i| (format!("{i}.png"), png(&of, i))).collect();
    pictures.insert(3, ("notes.txt".into(), b"no picture".to_vec()));
    let mut found = look::predict(dir.path(), pictures).unwrap();
    let broken = found.remove(3);
    assert!(
        broken.classes.is_empty() && broken.error.unwrap().contains("not a JPEG or PNG"),
        "one bad file alone"
    );
    assert_eq!(found.len(), of.probabilities.len());
    for (prediction, expected) in found.iter().zip(&of.probabilities) {
        assert_eq!(prediction.classes.len(), 10);
        assert!(prediction.classes.is_sorted_by(|a, b| a.probability >= b.probability));
        for one in &prediction.classes {
            let theirs = expected[one.class.parse::<usize>().unwrap()];
            assert!(
                (one.probability - theirs).abs() < 1e-4,
                "{}: {one:?}, PyTorch says {theirs}",
                prediction.name
            );
        }
    }
    let missing = look::predict(&dir.path().join("nowhere"), Vec::new()).unwrap_err();
    assert!(missing.contains("nowhere"), "{missing}");
}

#[test]
fn the_confusion_matrix_is_the_one_that_pytorch_counts() {
    let of = expected();
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &of);
    write_dataset(dir.path(), &of);
    let here = dir.path().to_string_lossy().into_owned();
    let question =
        Question::Evaluate(EvaluateModel { model: here.clone(), dataset: here, spec: Box::new(spec(&of)) });
    let Ok(Answer::Evaluation(found)) = look::answer(question) else { panic!("it can be evaluated") };
    assert_eq!(found.confusion, of.confusion);
    assert!((found.loss - of.loss).abs() < 1e-3, "{} instead of {}", found.loss, of.loss);
    let correct: u64 = (0..10).map(|c| of.confusion[c][c]).sum();
    assert_eq!((found.samples, found.accuracy), (200, correct as f64 / 200.0));
    assert_eq!(found.mistakes.len() as u64, 200 - correct);
    assert!(found.mistakes.is_sorted_by(|a, b| a.confidence >= b.confidence));
    let labels = made_up::labels("looking.labels", of.count, 10);
    assert!(found.mistakes.iter().all(|m| m.label != m.predicted && labels[m.index as usize] == m.label));
}

fn samples(path: &Path, pick: Pick) -> Samples {
    let path = path.to_string_lossy().into_owned();
    match look::answer(Question::Samples { path, pick }) {
        Ok(Answer::Samples(samples)) => samples,
        other => panic!("{other:?}"),
    }
}

#[test]
fn pictures_are_shown_as_they_are_and_as_training_sees_them() {
    let of = expected();
    let dir = tempfile::tempdir().unwrap();
    write_dataset(dir.path(), &of);
    let labels = made_up::labels("looking.labels", of.count, 10);
    let decoded = |png: &str| {
        use base64::Engine as _;
        let bytes = base64::engine::general_purpose::STANDARD.decode(png).unwrap();
        image::load_from_memory(&bytes).unwrap().into_luma8().into_raw()
    };
    let size = of.side * of.side;
    let stored = Pick::Stored { split: "train".into(), class: Some("3".into()), offset: 1, limit: 4 };
    let found = samples(dir.path(), stored);
    let threes: Vec<usize> = (0..of.count).filter(|i| labels[*i] == 3).collect();
    assert_eq!(found.total, threes.len() as u64);
    for (sample, index) in found.samples.iter().zip(&threes[1..]) {
        assert_eq!((sample.index, sample.label), (*index as u64, 3));
        assert_eq!(decoded(&sample.png), pixels(&of)[index * size..][..size], "to the last bit");
    }
    let seen = |epochs: Vec<u32>| {
        let data = Box::new(spec(&of).data);
        samples(dir.path(), Pick::Seen { data, seed: 1, validation: false, places: vec![7], epochs })
    };
    assert_eq!(
        decoded(&seen(vec![]).samples[0].png),
        pixels(&of)[7 * size..][..size],
        "and back from the network"
    );
    let versions = seen(vec![0, 1, 2, 3, 4]);
    assert_eq!(versions.samples.len(), 5);
    assert!(versions.samples.iter().any(|s| s.png != versions.samples[0].png), "epochs differ");
    assert_eq!(versions, seen(vec![0, 1, 2, 3, 4]), "seeded: the same again");
    let wrong = Pick::Stored { split: "test2".into(), class: None, offset: 0, limit: 1 };
    let path = dir.path().to_string_lossy().into_owned();
    assert!(look::answer(Question::Samples { path, pick: wrong }).unwrap_err().contains("train, test"));
    let picture = NamedPicture { name: "a".into(), content: String::new() };
    let none = Question::Predict { model: "/nowhere".into(), pictures: vec![picture] };
    assert!(look::answer(none).is_err());
}
