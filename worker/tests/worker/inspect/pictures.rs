//! Pictures are resized and cropped as in training, for predictions and for previews.

use super::*;
use lockstep_protocol::agent::AllowedFolders;
use std::os::unix::fs::symlink;

/// Evaluates IDX files of pictures that are half as high as wide, with a model in the same folder. Checks that PNG files of these
/// pictures get the same predictions.
fn evaluate_and_predict(dir: &Path, fixture: &Expected, job: JobSpec) -> ModelEvaluation {
    let (height, width, count) = (fixture.side / 2, fixture.side, 40);
    let size = height * width;
    let all = pixels(fixture);
    let pictures = &all[..count * size];
    let labels: Vec<u8> = (0..count).map(|i| i as u8 % 10).collect();
    write_idx(dir, [count, height, width], pictures, &labels);
    let evaluated = evaluate(dir, job).unwrap();
    let files: Vec<_> =
        pictures.chunks(size).map(|pixels| (String::new(), encode_png(width, height, pixels))).collect();
    let mut confusion = vec![vec![0; 10]; 10];
    for (i, prediction) in inspect::predict(dir, files).unwrap().iter().enumerate() {
        confusion[i % 10][prediction.classes[0].class.parse::<usize>().unwrap()] += 1;
    }
    assert_eq!(confusion, evaluated.confusion);
    evaluated
}

#[test]
fn non_square_pictures_are_classified_with_training_s_transforms() {
    let (fixture, dir) = set_up();
    let whole_pictures = |metadata: &mut serde_json::Value| metadata["whole_pictures"] = json!("true");
    write_changed_model(dir.path(), &fixture, whole_pictures, same_values);
    // Jobs scale such pictures to a square as a whole.
    let mut job = spec(&fixture);
    job.data.image_size = Some((fixture.side as u32).into());
    evaluate_and_predict(dir.path(), &fixture, job);
}

#[test]
fn pictures_are_resized_and_cropped_as_in_training() {
    let (fixture, dir) = set_up();
    let resize = fixture.side + 5;
    let resized = |metadata: &mut serde_json::Value| metadata["resize"] = json!(resize.to_string());
    write_changed_model(dir.path(), &fixture, resized, same_values);
    // The job's own keys may have changed since the training.
    let mut job = spec(&fixture);
    job.data.resize_size = Some(2 * fixture.side as u32);
    let evaluated = evaluate_and_predict(dir.path(), &fixture, job.clone());

    // A model without `resize` was trained on stretched pictures, so the job's `resize_size` is ignored.
    let whole_pictures = |metadata: &mut serde_json::Value| metadata["whole_pictures"] = json!("true");
    write_changed_model(dir.path(), &fixture, whole_pictures, same_values);
    let scaled = evaluate(dir.path(), JobSpec { data: spec(&fixture).data, ..job.clone() });
    job.data.image_size = Some((fixture.side as u32).into());
    job.data.random_resized_crop = true;
    assert_eq!(evaluate(dir.path(), job).unwrap().loss, scaled.unwrap().loss);
    assert_ne!(evaluated.loss, evaluate(dir.path(), spec(&fixture)).unwrap().loss);
}

fn samples(path: &Path, pick: Pick) -> Samples {
    let path = path.to_string_lossy().into_owned();
    match inspect::answer(AgentRequest::Samples { path, pick, allowed: None }) {
        Ok(AgentReply::Samples(samples)) => samples,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_dataset_behind_a_link_must_be_in_an_allowed_folder() {
    let (fixture, dir) = set_up();
    let path_of = |name: &str| dir.path().canonicalize().unwrap().join(name);
    for folder in ["root", "root/set", "root/other", "outside"] {
        std::fs::create_dir(path_of(folder)).unwrap();
    }
    for folder in ["root/set", "root/other", "outside"] {
        write_dataset(&path_of(folder), &fixture);
    }
    let allowed = AllowedFolders { below: vec![path_of("root").display().to_string()], except: Vec::new() };
    let ask = |path: &str| {
        let (path, allowed) = (path_of(path).display().to_string(), Some(allowed.clone()));
        let pick = Pick::Stored { split: "train".into(), class: None, shuffle: None, offset: 0, limit: 1 };
        let evaluation = EvaluateModel {
            model: dir.path().display().to_string(),
            dataset: path.clone(),
            spec: Box::new(spec(&fixture)),
            allowed: allowed.clone(),
            neighbours: None,
        };
        [
            AgentRequest::InspectDataset { path: path.clone(), allowed: allowed.clone() },
            AgentRequest::Samples { path, pick, allowed },
            AgentRequest::Evaluate(evaluation),
        ]
        .map(inspect::answer)
    };
    assert!(ask("root/set").iter().all(Result::is_ok));
    let missing = ask("root/nothing").into_iter().next().unwrap().unwrap_err();
    assert!(
        missing.contains("nothing does not exist on the training machine; give the path there"),
        "{missing}"
    );
    // A dataset that was registered before folders were restricted can be read, because no part of its path is a link.
    assert_eq!(ask("outside").map(|response| response.is_ok()), [false, true, true]);
    std::fs::remove_dir_all(path_of("root/set")).unwrap();
    symlink(path_of("root/other"), path_of("root/set")).unwrap();
    assert!(ask("root/set").iter().all(Result::is_ok), "the link stays below the root");
    std::fs::remove_file(path_of("root/set")).unwrap();
    symlink(path_of("outside"), path_of("root/set")).unwrap();
    for response in ask("root/set") {
        let why = response.unwrap_err();
        assert!(why.contains("root/set, or where its links lead, is not below"), "{why}");
    }
}

#[test]
fn pictures_are_shown_stored_and_augmented() {
    let (fixture, dir) = set_up();
    let labels = synthetic::labels("looking.labels", fixture.count, 10);
    let decoded = |png: &str| {
        use base64::Engine as _;
        let bytes = base64::engine::general_purpose::STANDARD.decode(png).unwrap();
        image::load_from_memory(&bytes).unwrap().into_luma8().into_raw()
    };
    let size = fixture.side * fixture.side;
    let of_class = |shuffle, offset, limit| Pick::Stored {
        split: "train".into(),
        class: Some("3".into()),
        shuffle,
        offset,
        limit,
    };
    let found = samples(dir.path(), of_class(None, 1, 4));
    let threes: Vec<usize> = (0..fixture.count).filter(|i| labels[*i] == 3).collect();
    assert_eq!(found.total, threes.len() as u64);
    for (sample, index) in found.samples.iter().zip(&threes[1..]) {
        assert_eq!((sample.index, sample.label), (*index as u64, 3));
        assert_eq!(decoded(&sample.png), pixels(&fixture)[index * size..][..size], "equal bits");
    }
    // Shuffled: the parts together have each picture once, in an order that depends on the seed.
    let shuffled = |seed| -> Vec<u64> {
        let parts = [(0, 2), (2, 200)]
            .map(|(offset, limit)| samples(dir.path(), of_class(Some(seed), offset, limit)));
        parts.iter().flat_map(|part| part.samples.iter().map(|s| s.index)).collect()
    };
    let mut order = shuffled(1);
    assert_eq!(order, shuffled(1), "the same seed, the same order");
    assert_ne!(order, shuffled(2));
    order.sort_unstable();
    assert_eq!(order, threes.iter().map(|i| *i as u64).collect::<Vec<_>>());
    let seen_at = |places: Vec<u64>, epochs: Vec<u32>| {
        let data = Box::new(spec(&fixture).data);
        samples(dir.path(), Pick::Seen { data, seed: 1, validation: false, places, epochs })
    };
    let seen = |epochs: Vec<u32>| seen_at(vec![7], epochs);
    // The network's input, converted back.
    assert_eq!(decoded(&seen(vec![]).samples[0].png), pixels(&fixture)[7 * size..][..size]);
    let versions = seen(vec![0, 1, 2, 3, 4]);
    assert_eq!(versions.samples.len(), 5);
    assert!(versions.samples.iter().any(|s| s.png != versions.samples[0].png), "epochs differ");
    assert_eq!(versions, seen(vec![0, 1, 2, 3, 4]), "equal in each call");
    let total = versions.total;
    let last: Vec<_> =
        seen_at(vec![total - 1, total], vec![0, 1]).samples.iter().map(|s| (s.index, s.epoch)).collect();
    assert_eq!(last, [(total - 1, Some(0)), (total - 1, Some(1))], "the last page is shorter");
    let wrong = Pick::Stored { split: "test2".into(), class: None, shuffle: None, offset: 0, limit: 1 };
    let path = dir.path().to_string_lossy().into_owned();
    assert!(
        inspect::answer(AgentRequest::Samples { path, pick: wrong, allowed: None })
            .unwrap_err()
            .contains("train, test")
    );
    let picture = NamedPicture { name: "a".into(), content: String::new() };
    let none = AgentRequest::Predict { model: "/nowhere".into(), pictures: vec![picture], embed: false };
    assert!(inspect::answer(none).is_err());
}
