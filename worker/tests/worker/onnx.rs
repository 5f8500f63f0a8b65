//! ONNX files in onnxruntime.

/// Needs onnxruntime in `target/onnx`, where `tests/run full` installs it.
mod full {
    use crate::pytorch::{engine, network, sgd, weights};
    use lockstep_data::loader::Batch;
    use lockstep_engine::onnx::encode;
    use lockstep_kernels::synthetic::values;
    use lockstep_protocol::spec::Arch;
    use std::{collections::BTreeMap, fs, path::Path, process::Command};

    /// Writes the logits of one picture and of both, by the two files.
    const SCRIPT: &str = r#"
import sys, numpy, onnxruntime
folder, channels, side, meta = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
pictures = numpy.fromfile(f"{folder}/pictures", "<f4").reshape(2, side, side, channels).transpose(0, 3, 1, 2)
pictures = numpy.ascontiguousarray(pictures)
with open(f"{folder}/logits", "wb") as out:
    for name in ["kept", "folded"]:
        session = onnxruntime.InferenceSession(f"{folder}/{name}.onnx", providers=["CPUExecutionProvider"])
        assert session.get_modelmeta().custom_metadata_map == {"classes": meta}
        [given], [made] = session.get_inputs(), session.get_outputs()
        assert given.shape == ["N", channels, side, side] and made.shape[0] == "N", (given.shape, made.shape)
        for batch in [pictures[:1], pictures]:
            [logits] = session.run(["output"], {"input": batch})
            out.write(logits.astype("<f4").tobytes())
"#;

    #[test]
    fn onnxruntime_computes_the_logits_of_every_network() {
        let packages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/onnx");
        assert!(
            packages.join("onnxruntime").exists(),
            "onnxruntime is not in target/onnx: tests/run full installs it"
        );
        const CLASSES: usize = 7;
        for (arch, name) in Arch::ALL {
            for (stem, side, channels) in [("cifar", 17, 1), ("imagenet", 40, 3)] {
                let network = network(name, stem, side, channels, CLASSES);
                let folder = tempfile::tempdir().unwrap();
                let metadata = BTreeMap::from([("classes".to_owned(), name.to_owned())]);
                let weights = weights(&network);
                for (file, fold) in [("kept.onnx", false), ("folded.onnx", true)] {
                    let model = encode(&network, &weights, fold, &metadata).unwrap();
                    fs::write(folder.path().join(file), model).unwrap();
                }
                drop(weights);
                let images = values(&format!("{name}.{stem}.images"), 2 * side * side * channels);
                fs::write(folder.path().join("pictures"), bytemuck::cast_slice::<f32, u8>(&images)).unwrap();
                let batch = Batch { images, labels: vec![0; 2], indices: vec![0, 1], ..Batch::default() };
                let ours = engine(network, 2, sgd(0.0)).predict(&batch).unwrap();

                let mut python = Command::new("python3");
                python.env("PYTHONPATH", &packages).args(["-c", SCRIPT]).arg(folder.path());
                let ran =
                    python.args([channels.to_string(), side.to_string(), name.to_owned()]).output().unwrap();
                assert!(ran.status.success(), "{arch:?}: {}", String::from_utf8_lossy(&ran.stderr));
                let theirs = fs::read(folder.path().join("logits")).unwrap();
                let theirs: Vec<f32> = bytemuck::pod_collect_to_vec(&theirs);
                let expected = [&ours[..CLASSES], &ours[..]].concat().repeat(2);
                assert_eq!(theirs.len(), expected.len());
                let largest = ours.iter().fold(1.0, |largest: f32, logit| largest.max(logit.abs()));
                for (theirs, ours) in theirs.iter().zip(&expected) {
                    assert!((theirs - ours).abs() < 1e-4 * largest, "{arch:?}, {stem}: {theirs}, not {ours}");
                }
            }
        }
    }
}
