//! Runs ONNX files in onnxruntime, which `tests/run` installs in `target/onnx`.

use crate::pytorch::{config, network, sgd, weights};
use lockstep_comm::SingleRank;
use lockstep_data::loader::Batch;
use lockstep_engine::{EngineConfig, LossConfig, Margin, build_cpu, net::Network, onnx::encode};
use lockstep_host::tensors::NamedTensors;
use lockstep_kernels::synthetic::values;
use lockstep_protocol::spec::{LossKind, LossSpec};
use std::{collections::BTreeMap, fs, path::Path, process::Command, sync::Arc};

const CLASSES: usize = 7;

/// Computes the outputs of both files, with batch norms (`kept`) and with folded ones, for the first picture and for both pictures.
const SCRIPT: &str = r#"
import sys, numpy, onnxruntime
folder, channels, side, width, case = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
pictures = numpy.fromfile(f"{folder}/pictures", "<f4").reshape(2, side, side, channels).transpose(0, 3, 1, 2)
pictures = numpy.ascontiguousarray(pictures)
with open(f"{folder}/outputs", "wb") as out:
    for name in ["kept", "folded"]:
        session = onnxruntime.InferenceSession(f"{folder}/{name}.onnx", providers=["CPUExecutionProvider"])
        assert session.get_modelmeta().custom_metadata_map == {"classes": case}
        [input], [output] = session.get_inputs(), session.get_outputs()
        assert (input.name, input.shape) == ("input", ["N", channels, side, side]), (input.name, input.shape)
        assert (output.name, output.shape) == ("output", ["N", width]), (output.name, output.shape)
        for batch in [pictures[:1], pictures]:
            [outputs] = session.run(["output"], {"input": batch})
            out.write(outputs.astype("<f4").tobytes())
"#;

/// Checks that onnxruntime and the CPU engine compute the same outputs, to 1e-4 of the largest output.
fn compare(case: &str, network: Network, weights: &NamedTensors, margin: Option<Margin>) {
    let packages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/onnx");
    assert!(packages.exists(), "onnxruntime is not in target/onnx: tests/run installs it");
    let folder = tempfile::tempdir().unwrap();
    let metadata = BTreeMap::from([("classes".to_owned(), case.to_owned())]);
    for (file, fold) in [("kept.onnx", false), ("folded.onnx", true)] {
        let model = encode(&network, weights, margin.as_ref(), fold, &metadata).unwrap();
        fs::write(folder.path().join(file), model).unwrap();
    }
    let (side, channels) = (network.image_size, network.channels);
    let width = network.tensors[network.logits()].len();
    let images = values(&format!("{case}.images"), 2 * side * side * channels);
    fs::write(folder.path().join("pictures"), bytemuck::cast_slice::<f32, u8>(&images)).unwrap();
    let batch = Batch { images, labels: vec![0; 2], indices: vec![0, 1], ..Batch::default() };
    let config = EngineConfig { loss: LossConfig { margin, ..LossConfig::default() }, ..config(2, sgd(0.0)) };
    let mut engine = build_cpu(Arc::new(network), weights, config, Arc::new(SingleRank)).unwrap();
    let computed = engine.predict(&batch).unwrap();

    let mut python = Command::new("python3");
    python.env("PYTHONPATH", &packages).args(["-c", SCRIPT]).arg(folder.path());
    let ran = python.args([channels, side, width].map(|n| n.to_string())).arg(case).output().unwrap();
    assert!(ran.status.success(), "{case}: {}", String::from_utf8_lossy(&ran.stderr));
    let outputs = fs::read(folder.path().join("outputs")).unwrap();
    let outputs: Vec<f32> = bytemuck::pod_collect_to_vec(&outputs);
    let expected = [&computed[..width], &computed[..]].concat().repeat(2);
    assert_eq!(outputs.len(), expected.len());
    let largest = computed.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    for (output, expected) in outputs.iter().zip(&expected) {
        assert!((output - expected).abs() <= 1e-4 * largest, "{case}: {output}, not {expected}");
    }
}

#[test]
fn onnxruntime_computes_logits_cosines_and_embeddings() {
    for arch in ["resnet20", "cifarnet"] {
        let whole = network(arch, "cifar", 17, 1, CLASSES);
        let mut tensors = weights(&whole);
        compare(&format!("logits of {arch}"), whole.clone(), &tensors, None);
        let arc_face = LossSpec { kind: LossKind::ArcFace, ..LossSpec::default() };
        compare(&format!("cosines of {arch}"), whole.clone(), &tensors, Margin::of(&arc_face));
        tensors.retain(|name, _| !name.starts_with(whole.head()));
        compare(&format!("embeddings of {arch}"), whole.without_head(), &tensors, None);
    }
}

/// `tests/run` skips these tests, except `tests/run full`.
mod full {
    use super::*;
    use lockstep_protocol::spec::Arch;

    #[test]
    fn onnxruntime_computes_the_logits_of_every_network() {
        for name in Arch::NAMES {
            // Both stems are tested with one network of each family, which shares its stem. Cifarnet's depends only on the channels.
            let has_both_stems =
                matches!(name, "resnet18" | "resnet20" | "resnet50" | "resnext50_32x4d" | "cifarnet");
            let stems = [("cifar", 17, 1), ("imagenet", 40, 3)];
            for (stem, side, channels) in stems.into_iter().take(1 + usize::from(has_both_stems)) {
                let network = network(name, stem, side, channels, CLASSES);
                let weights = weights(&network);
                compare(&format!("{name}, {stem} stem"), network, &weights, None);
            }
        }
    }
}
