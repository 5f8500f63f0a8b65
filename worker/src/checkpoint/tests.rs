use super::{
    manifest::{self, size_of},
    tensors::write_json,
    *,
};
use crate::precision::SkippedSteps;
use lockstep_engine::LossScaling;
use lockstep_host::tensors::{HostTensor, NamedTensors};
use lockstep_protocol::{
    dataset::ValidationSet,
    spec::{DataSpec, OptimizerKind, Precision, ValidationDivision},
};
use std::{collections::BTreeMap, fs};

pub(crate) fn snapshot(epoch: u32, step: u64, val_accuracy: Option<f64>) -> Snapshot {
    let tensor = |shape: &[usize], from: f32| HostTensor {
        shape: shape.to_vec(),
        values: (0..shape.iter().product()).map(|i| from + i as f32 * 0.1).collect(),
    };
    let parameters = NamedTensors::from([
        ("conv1.weight".into(), tensor(&[2, 3, 3, 3], step as f32)),
        ("bn1.running_mean".into(), tensor(&[2], 0.0)),
        ("fc.weight".into(), tensor(&[10, 2], f32::MIN_POSITIVE)),
    ]);
    let optimizer = NamedTensors::from([
        ("conv1.weight.exp_avg".into(), tensor(&[2, 3, 3, 3], -1.0)),
        ("conv1.weight.exp_avg_sq".into(), tensor(&[2, 3, 3, 3], 0.0)),
    ]);
    let state = State {
        epoch,
        step,
        data_position: DataPosition { epoch: epoch - 1, step_in_epoch: step, samples_in_epoch: step * 64 },
        random_state: RandomState { seed: 3 },
        world_size: 2,
        global_batch_size: 64,
        steps_per_epoch: 100,
        val_accuracy,
        val_loss: val_accuracy.map(|a| 1.0 - a),
        validation: Some(ValidationSet { pictures: 30, fingerprint: "0011223344556677".into() }),
        divisions: vec![ValidationDivision::of(&DataSpec::default())],
        best: None,
        stop: None,
        versions: BTreeMap::from([("lockstep".into(), "0.1.0".into())]),
        precision: Precision::Fp16,
        loss_scaling: Some(LossScaling { scale: 4096.0, growth_tracker: 17 }),
        skipped_steps: SkippedSteps { total: 3, recent: vec![step.saturating_sub(1)] },
        optimizer: OptimizerNote { kind: OptimizerKind::AdamW, updates: step },
    };
    let metadata =
        ["arch", "classes", "image_size", "mean", "spec", "std"].map(|k| (k.into(), format!("[{k}]")));
    Snapshot { state, parameters, optimizer, average: None, batches: step, metadata: metadata.into() }
}

/// Changes the last byte of a file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn checkpoints_are_read_back_and_deterministic() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let saved = snapshot(2, 120, Some(0.5));
    let size = write(first.path(), &saved, None).unwrap();
    write(second.path(), &saved, None).unwrap();
    let folder = first.path().join("2-120");
    let LoadedCheckpoint { state, parameters, optimizer } = load(&folder).unwrap();
    assert_eq!((state, parameters, optimizer), (saved.state, saved.parameters, saved.optimizer));
    let mut total = 0;
    for file in [MODEL, OPTIMIZER, STATE, MANIFEST] {
        let bytes = fs::read(folder.join(file)).unwrap();
        total += bytes.len() as u64;
        assert_eq!(bytes, fs::read(second.path().join("2-120").join(file)).unwrap(), "{file}");
    }
    assert_eq!(size, total);
    // The safetensors crate can read the file.
    let bytes = fs::read(folder.join(MODEL)).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tracked = file.tensor("bn1.num_batches_tracked").unwrap();
    assert_eq!((tracked.dtype(), tracked.shape().len()), (safetensors::Dtype::I64, 0));
    assert_eq!(tracked.data(), 120i64.to_le_bytes());
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["mean"], "[mean]");
    assert_eq!(fs::read_dir(first.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn the_state_file_is_limited_to_a_mebibyte() {
    let dir = tempfile::tempdir().unwrap();
    let saved = snapshot(1, 7, None);
    write(dir.path(), &saved, None).unwrap();
    let folder = dir.path().join("1-7");
    let mut state = fs::read(folder.join(STATE)).unwrap();
    let mut load_padded = |bytes: usize| {
        fs::remove_file(folder.join(STATE)).unwrap();
        state.resize(bytes, b' ');
        fs::write(folder.join(STATE), &state).unwrap();
        let mut manifest: Manifest =
            serde_json::from_slice(&fs::read(folder.join(MANIFEST)).unwrap()).unwrap();
        manifest.files.insert(STATE.into(), manifest::checksum(&folder.join(STATE)).unwrap());
        fs::remove_file(folder.join(MANIFEST)).unwrap();
        write_json(&folder.join(MANIFEST), &manifest).unwrap();
        (load(&folder).map(|loaded| loaded.state), unverified_state(&folder).map(|state| state.precision))
    };
    let (loaded, precision) = load_padded(1 << 20);
    assert_eq!((loaded.unwrap(), precision), (saved.state, Some(Precision::Fp16)));
    let (loaded, precision) = load_padded((1 << 20) + 1);
    assert_eq!(precision, None);
    assert_eq!(
        loaded.unwrap_err().to_string(),
        "checkpoint 1-7 is damaged: state.json has 1048577 bytes; at most 1048576 are allowed"
    );
}

#[test]
fn averaged_weights_are_in_a_separate_file_and_verified() {
    let dir = tempfile::tempdir().unwrap();
    let mut saved = snapshot(1, 3, None);
    write(dir.path(), &saved, None).unwrap();
    assert!(load_average(&dir.path().join("1-3")).unwrap().is_none());
    saved.state.step = 4;
    let mut average = saved.parameters.clone();
    average.get_mut("fc.weight").unwrap().values[0] = 0.25;
    saved.average = Some(average.clone());
    write(dir.path(), &saved, None).unwrap();
    let folder = dir.path().join("1-4");
    assert_eq!(load_average(&folder).unwrap(), Some(average));
    assert_eq!(load(&folder).unwrap().parameters, saved.parameters);
    // The average has the same metadata as the weights.
    let file = folder.join(AVERAGE);
    assert_eq!(metadata(&file).unwrap(), metadata(&folder.join(MODEL)).unwrap());
    assert_eq!(model_files(&file).unwrap(), std::slice::from_ref(&file));
    damage(&file);
    for error in [model_files(&file).unwrap_err(), validate(&folder).unwrap_err()] {
        let message = "checkpoint 1-4 is damaged: ema.safetensors: its checksum does not match";
        assert_eq!(error.to_string(), message);
    }
    let mut saved = snapshot(1, 5, None);
    let mut average = saved.parameters.clone();
    average.get_mut("fc.weight").unwrap().values[1] = f32::NAN;
    saved.average = Some(average);
    assert!(saved.first_invalid().unwrap().starts_with("of the average fc.weight contains NaN"));
    write(dir.path(), &saved, None).unwrap();
    let error = load_average(&dir.path().join("1-5")).unwrap_err();
    assert!(matches!(&error, CheckpointError::NotFinite { .. }), "{error}");
}

#[test]
fn errors_name_damaged_checkpoints_and_the_newest_intact_one_is_found() {
    let dir = tempfile::tempdir().unwrap();
    assert!(newest(&dir.path().join("none")).unwrap().0.is_none());
    for step in [9, 10, 11, 100] {
        write(dir.path(), &snapshot(1, step, None), None).unwrap();
    }
    fs::create_dir(dir.path().join(".tmp-1-200")).unwrap();
    damage(&dir.path().join("1-100").join(MODEL));
    fs::remove_file(dir.path().join("1-11").join(MANIFEST)).unwrap();
    let (found, damaged) = newest(dir.path()).unwrap();
    assert_eq!(found.unwrap().file_name().unwrap(), "1-10");
    let damaged: Vec<_> = damaged.iter().map(ToString::to_string).collect();
    assert_eq!(damaged[0], "checkpoint 1-100 is damaged: model.safetensors: its checksum does not match");
    assert!(damaged[1].starts_with("checkpoint 1-11 is damaged: MANIFEST.json:"), "{damaged:?}");
    let absent = dir.path().join("1-12");
    let words = format!("checkpoint 1-12 is missing: {} does not exist", absent.display());
    assert_eq!(load(&absent).unwrap_err().to_string(), words);
    // Writing that step again repairs it.
    write(dir.path(), &snapshot(1, 100, None), None).unwrap();
    assert_eq!(newest(dir.path()).unwrap().0.unwrap().file_name().unwrap(), "1-100");
    remove_leftovers(dir.path()).unwrap();
    assert!(!dir.path().join(".tmp-1-200").exists());
}

/// If a rank is lost while rank 0 writes a checkpoint of the last step, another rank may write the same checkpoint.
#[test]
fn concurrent_writers_of_the_same_step_do_not_interfere() {
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=20 {
        let begin = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let writers = [(); 2].map(|()| {
                scope.spawn(|| {
                    begin.wait();
                    write(dir.path(), &snapshot(1, step, None), None).map(|_| ())
                })
            });
            writers.into_iter().for_each(|writer| writer.join().unwrap().unwrap());
        });
        assert_eq!(validate(&dir.path().join(format!("1-{step}"))).unwrap().step, step);
    }
    assert!(!is_being_written(dir.path()));
}

/// A link to itself cannot be opened (ELOOP). This error does not mean a missing file.
#[test]
fn a_temporarily_unreadable_checkpoint_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let saved = snapshot(1, 9, None);
    write(dir.path(), &saved, None).unwrap();
    let folder = dir.path().join("1-9");
    let (model, elsewhere) = (folder.join(MODEL), dir.path().join("elsewhere"));
    fs::rename(&model, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&model, &model).unwrap();
    for error in [
        validate(&folder).unwrap_err(),
        load(&folder).unwrap_err(),
        write(dir.path(), &saved, None).unwrap_err(),
        newest(dir.path()).unwrap_err(),
    ] {
        assert!(matches!(&error, CheckpointError::Io { path, .. } if *path == model), "{error}");
    }
    fs::rename(&elsewhere, &model).unwrap();
    assert_eq!(load(&folder).unwrap().parameters, saved.parameters);
}

#[test]
fn the_weights_of_a_checkpoint_are_verified_before_they_are_used() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &snapshot(1, 9, None), None).unwrap();
    let folder = dir.path().join("1-9");
    let file = folder.join(MODEL);
    assert_eq!(
        [model_files(&folder).unwrap(), model_files(&file).unwrap()],
        [[file.clone()], [file.clone()]]
    );
    // The optimizer's file is not needed.
    fs::write(folder.join(OPTIMIZER), "").unwrap();
    model_files(&folder).unwrap();
    damage(&file);
    let message = model_files(&folder).unwrap_err().to_string();
    assert_eq!(message, "checkpoint 1-9 is damaged: model.safetensors: its checksum does not match");
    fs::remove_file(folder.join(MANIFEST)).unwrap();
    assert_eq!(model_files(&folder).unwrap(), [file], "without a manifest, the file is not verified");
}

#[test]
fn only_checkpoint_folder_names_are_accepted() {
    for name in ["1-2", "10-4000"] {
        assert!(parse_folder_name(name).is_some(), "{name}");
    }
    for name in ["", "1", "-1-2", "01-2", "1-+2", ".tmp-1-2", "1-2-3", "../1-2"] {
        assert_eq!(parse_folder_name(name), None, "{name}");
    }
}

#[test]
fn errors_name_an_unwritable_directory() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("checkpoints");
    fs::write(&file, "").unwrap();
    let error = write(&file, &snapshot(1, 1, None), None).unwrap_err().to_string();
    assert!(error.contains("checkpoints"), "{error}");
}

#[test]
fn evaluated_checkpoints_replace_only_unevaluated_ones() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("1-40");
    let accuracy = || load(&folder).unwrap().state.val_accuracy;
    let model = || fs::read(folder.join(MODEL)).unwrap();
    write(dir.path(), &snapshot(1, 40, None), None).unwrap();
    let before = model();
    for (written, expected) in
        [(None, None), (Some(0.5), Some(0.5)), (None, Some(0.5)), (Some(0.7), Some(0.5))]
    {
        let size = write(dir.path(), &snapshot(1, 40, written), None).unwrap();
        assert_eq!(accuracy(), expected, "{written:?}");
        assert_eq!(size, size_of(&folder, &validate(&folder).unwrap()));
        assert_eq!(model(), before);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }
}

/// File systems that cannot exchange two folders atomically, such as NFS, return one of the first three errors.
#[test]
fn evaluated_checkpoints_are_stored_without_atomic_exchange() {
    use rustix::io::Errno;
    let dir = tempfile::tempdir().unwrap();
    let (folder, aside) = (dir.path().join("1-40"), dir.path().join(".tmp-1-40"));
    let accuracy = || load(&folder).unwrap().state.val_accuracy;
    for (errno, succeeds) in
        [(Errno::INVAL, true), (Errno::NOSYS, true), (Errno::OPNOTSUPP, true), (Errno::IO, false)]
    {
        write(dir.path(), &snapshot(1, 40, Some(0.5)), None).unwrap();
        fs::rename(&folder, &aside).unwrap();
        write(dir.path(), &snapshot(1, 40, None), None).unwrap();
        let renamed = files::rename_to_final(&aside, &folder, |_, _| Err(errno));
        assert_eq!(
            (renamed.ok(), accuracy()),
            if succeeds { (Some(true), Some(0.5)) } else { (None, None) },
            "{errno}"
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), if succeeds { 1 } else { 2 }, "{errno}");
        fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn errors_for_a_diverged_checkpoint_name_file_and_tensor() {
    let dir = tempfile::tempdir().unwrap();
    for (step, file, tensor, value) in [
        (1, MODEL, "fc.weight", f32::NAN),
        (2, MODEL, "bn1.running_mean", f32::INFINITY),
        (3, OPTIMIZER, "conv1.weight.exp_avg", f32::NEG_INFINITY),
        (4, OPTIMIZER, "conv1.weight.exp_avg_sq", -1.0),
    ] {
        let mut saved = snapshot(1, step, None);
        let tensors = if file == MODEL { &mut saved.parameters } else { &mut saved.optimizer };
        tensors.get_mut(tensor).unwrap().values[1] = value;
        // The files are intact, with the right checksums.
        write(dir.path(), &saved, None).unwrap();
        let folder = dir.path().join(folder_name(1, step));
        validate(&folder).unwrap();
        let message = load(&folder).unwrap_err().to_string();
        for word in [&format!("checkpoint 1-{step}"), file, tensor, &format!("{value}"), "index 1"] {
            assert!(message.contains(word), "{word} in {message}");
        }
    }
}

#[test]
fn tensors_of_every_float_type_are_read_as_float32() {
    use half::{bf16, f16};
    use safetensors::{Dtype, tensor::TensorView};
    let values = [1.5f32, -0.25, 65504.0, 0.0];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights.safetensors");
    for (dtype, bytes) in [
        (Dtype::F32, values.map(|v| v.to_le_bytes()).concat()),
        (Dtype::F64, values.map(|v| f64::from(v).to_le_bytes()).concat()),
        (Dtype::BF16, values.map(|v| bf16::from_f32(v).to_le_bytes()).concat()),
        (Dtype::F16, values.map(|v| f16::from_f32(v).to_le_bytes()).concat()),
    ] {
        let view = TensorView::new(dtype, vec![4], &bytes).unwrap();
        fs::write(&path, safetensors::serialize([("bn1.bias", view)], None).unwrap()).unwrap();
        // The nearest bfloat16 to 65504 is 65536.
        let third = if dtype == Dtype::BF16 { 65536.0 } else { 65504.0 };
        assert_eq!(read_tensors(&path).unwrap()["bn1.bias"].values, [1.5, -0.25, third, 0.0], "{dtype:?}");
        assert_eq!(shapes(&path).unwrap()["bn1.bias"], [4]);
    }
}

#[test]
fn a_pickle_is_refused_with_a_command_to_convert_it() {
    let dir = tempfile::tempdir().unwrap();
    // Files written by PyTorch since 1.6, and before.
    for (name, bytes) in
        [("new.pth", &b"PK\x03\x04\0\0\x08\x08archive/data.pkl"[..]), ("old.pth", b"\x80\x02\x8a\nl\xfc")]
    {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        let error = read_tensors(&path).unwrap_err();
        let converted = path.with_extension("safetensors");
        assert!(error.contains("pickle") && error.contains("weights_only=True"), "{error}");
        assert!(error.ends_with(&format!("{} {}", path.display(), converted.display())), "{error}");
    }
    // A shell would not read this path as a single word.
    let path = dir.path().join("my $(weights).pth");
    fs::write(&path, b"PK\x03\x04").unwrap();
    assert!(read_tensors(&path).unwrap_err().ends_with(" FILE.pth FILE.safetensors"));
    // A safetensors file may begin with the same byte: its header has 640 bytes here.
    let path = dir.path().join("whole.safetensors");
    let mut bytes = 640u64.to_le_bytes().to_vec();
    bytes.extend(format!("{:<640}", r#"{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#).bytes());
    bytes.extend(1f32.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    assert_eq!(read_tensors(&path).unwrap()["a"].values, [1.0]);
    fs::write(&path, b"nothing of the kind").unwrap();
    assert!(read_tensors(&path).unwrap_err().contains("not a whole safetensors file"));
}

/// Each of two ranks writes a part of a checkpoint.
#[test]
fn parts_are_read_as_one_checkpoint_and_joined_to_the_same_bytes() {
    let (whole, sharded) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut saved = snapshot(1, 9, Some(0.5));
    saved.average = Some(saved.parameters.clone());
    write(whole.path(), &saved, None).unwrap();
    let write_parts = |divides_average: bool| {
        let unique = format!("x.{divides_average}");
        let folder = temporary_folder(sharded.path(), &saved.state, &unique);
        // The first part has all tensors but those of `fc`.
        let part_of = |is_first: bool| {
            let mut part = saved.clone();
            let keeps = |name: &str| name.starts_with("fc.") != is_first;
            part.parameters.retain(|name, _| keeps(name));
            part.optimizer.retain(|name, _| keeps(name));
            part.average = part.average.filter(|_| divides_average || is_first);
            if let Some(average) = part.average.as_mut().filter(|_| divides_average) {
                average.retain(|name, _| keeps(name));
            }
            part
        };
        let parts = [(1, true), (2, false)].map(|(number, is_first)| {
            write_part(&folder, &part_of(is_first), Some((number, 2)), divides_average).unwrap()
        });
        let files = parts.into_iter().flatten().collect();
        let size = complete_parts(sharded.path(), &folder, &saved.state, None, files).unwrap();
        assert_eq!(
            size,
            size_of(&sharded.path().join("1-9"), &validate(&sharded.path().join("1-9")).unwrap())
        );
        assert_eq!(fs::read_dir(sharded.path()).unwrap().count(), 1, "no temporary file is left");
    };
    for divides_average in [false, true] {
        write_parts(divides_average);
        let folder = sharded.path().join("1-9");
        assert_eq!(folder.join(AVERAGE).exists(), !divides_average);
        let LoadedCheckpoint { state, parameters, optimizer } = load(&folder).unwrap();
        assert_eq!(
            (state, parameters, optimizer),
            (saved.state.clone(), saved.parameters.clone(), saved.optimizer.clone())
        );
        assert_eq!(load_average(&folder).unwrap(), saved.average);
        assert_eq!(folder_metadata(&folder).unwrap()["mean"], "[mean]");
        for (kind, files) in [(MODEL, model_files(&folder)), (AVERAGE, model_files(&folder.join(AVERAGE)))] {
            let joined = folder.join("joined");
            join(&files.unwrap(), &joined).unwrap();
            let [joined, expected] =
                [joined, whole.path().join("1-9").join(kind)].map(|path| fs::read(path).unwrap());
            assert!(joined == expected, "{kind}");
            fs::remove_file(folder.join("joined")).unwrap();
        }
        let index = fs::read(folder.join("model.safetensors.index.json")).unwrap();
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
        // 54, 2 and 20 values of 4 bytes, and the number of batches.
        assert_eq!(index["metadata"]["total_size"], 4 * 76 + 8);
        assert_eq!(index["weight_map"].as_object().unwrap().len(), 4);
        assert_eq!(index["weight_map"]["fc.weight"], "model-00002-of-00002.safetensors");
        // Writing the same step again changes nothing.
        let before = fs::read(folder.join(MANIFEST)).unwrap();
        write(sharded.path(), &saved, None).unwrap();
        assert_eq!(fs::read(folder.join(MANIFEST)).unwrap(), before);
        fs::remove_file(folder.join("optimizer-00002-of-00002.safetensors")).unwrap();
        let message = load(&folder).unwrap_err().to_string();
        assert!(
            message.starts_with("checkpoint 1-9 is damaged: optimizer-00002-of-00002.safetensors: "),
            "{message}"
        );
        fs::remove_dir_all(&folder).unwrap();
    }
    // An index must not name files outside its folder.
    let folder = sharded.path().join("foreign");
    fs::create_dir(&folder).unwrap();
    for (text, detail) in [
        (r#"{"weight_map": {"a": "../model.safetensors"}}"#, "not a plain file name"),
        (r#"{"weight_map": {}}"#, "it names no file"),
        ("{}", "weight_map"),
    ] {
        fs::write(folder.join("model.safetensors.index.json"), text).unwrap();
        let message = model_files(&folder).unwrap_err().to_string();
        assert!(message.contains(detail), "{message}");
    }
}
