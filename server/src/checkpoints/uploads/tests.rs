use super::*;
use lockstep_protocol::limits::MANIFEST_BYTES;

fn manifest(files: &[(&str, &[u8])]) -> Vec<u8> {
    let files: serde_json::Map<String, serde_json::Value> = files
        .iter()
        .map(|(name, bytes)| {
            let entry = serde_json::json!({"size_bytes": bytes.len(), "sha256": sha256(bytes)});
            ((*name).to_owned(), entry)
        })
        .collect();
    serde_json::to_vec(&serde_json::json!({"version": 1, "epoch": 1, "step": 20, "files": files})).unwrap()
}

const FILES: [(&str, &[u8]); 3] =
    [("model.safetensors", b"weights"), ("optimizer.safetensors", b"slots"), ("state.json", b"{}")];

/// The attempt may still write.
const LIVE: bool = true;
const ENDED: bool = false;

/// Sends the manifest, and of each file the bytes that have not arrived yet.
fn send(upload: &Upload, files: &[(&str, &[u8])], is_live: bool) {
    upload.begin(&manifest(files), is_live).unwrap();
    for (name, bytes) in files {
        let received = upload.state().unwrap().received.get(*name).copied().unwrap_or(0);
        upload.append(name, received, &bytes[received as usize..]).unwrap();
    }
}

/// The text of a refusal.
fn detail_of<T: std::fmt::Debug>(refused: Result<T>) -> String {
    match refused.unwrap_err() {
        UploadError::Wrong(detail) | UploadError::Damaged(detail) => detail,
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_are_appended_in_order_and_the_checkpoint_appears_when_complete() {
    let dir = tempfile::tempdir().unwrap();
    let upload = Upload::of(dir.path(), "1-20");
    assert!(detail_of(upload.append("model.safetensors", 0, b"w")).contains("first"));
    upload.begin(&manifest(&FILES), LIVE).unwrap();
    assert_eq!(upload.append("model.safetensors", 0, b"wei").unwrap(), 3);
    assert!(matches!(upload.append("model.safetensors", 0, b"weights"), Err(UploadError::Offset(3))));
    assert!(matches!(upload.append("model.safetensors", 4, b"hts"), Err(UploadError::Offset(3))));
    // One byte more than in the manifest.
    assert!(detail_of(upload.append("model.safetensors", 3, b"ghtsX")).contains("7 bytes"));
    assert!(detail_of(upload.append("../x", 0, b"")).contains("names no"));
    // The same manifest again, like after an interruption: the received bytes stay.
    upload.begin(&manifest(&FILES), LIVE).unwrap();
    assert_eq!(upload.state().unwrap().received["model.safetensors"], 3);
    assert_eq!(upload.state().unwrap().stored, None);
    send(&upload, &FILES, LIVE);
    upload.commit(LIVE).unwrap();
    let state = upload.state().unwrap();
    assert_eq!(state.stored, Some(sha256(&manifest(&FILES))));
    assert_eq!((state.manifest, state.received.len()), (None, 0));
    assert_eq!(fs::read(dir.path().join("checkpoints/1-20/model.safetensors")).unwrap(), b"weights");
    assert!(!dir.path().join("uploads/1-20").join(MANIFEST).exists());
    // The agent did not receive the response and repeats the request.
    upload.commit(LIVE).unwrap();
}

#[test]
fn damaged_files_are_refused_and_can_be_sent_again() {
    let dir = tempfile::tempdir().unwrap();
    let upload = Upload::of(dir.path(), "1-20");
    for damaged in [&b"weighTs"[..], b"weight"] {
        upload.begin(&manifest(&FILES), LIVE).unwrap();
        upload.append("model.safetensors", 0, damaged).unwrap();
        let refused = upload.commit(LIVE).unwrap_err();
        let is_named = matches!(&refused, UploadError::Damaged(why) if why.contains("model.safetensors"));
        assert!(is_named, "{refused:?}");
        assert_eq!(upload.state().unwrap(), UploadState::default());
    }
    send(&upload, &FILES, LIVE);
    upload.commit(LIVE).unwrap();
}

#[test]
fn a_later_upload_of_the_same_step_replaces_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let upload = Upload::of(dir.path(), "1-20");
    send(&upload, &FILES, LIVE);
    upload.commit(LIVE).unwrap();
    let mut later = FILES;
    later[2] = ("state.json", b"{\"val_accuracy\": 1}");
    send(&upload, &later, LIVE);
    upload.commit(LIVE).unwrap();
    let state = fs::read(dir.path().join("checkpoints/1-20/state.json")).unwrap();
    assert_eq!(state, later[2].1);
    assert!(!dir.path().join("uploads/1-20/model.safetensors").exists());
}

#[test]
fn sharded_checkpoints_are_uploaded() {
    let dir = tempfile::tempdir().unwrap();
    let upload = Upload::of(dir.path(), "1-20");
    let mut sharded: Vec<(&str, &[u8])> = vec![
        ("model.safetensors.index.json", b"{}"),
        ("model-00001-of-00002.safetensors", b"some"),
        ("model-00002-of-00002.safetensors", b"others"),
        ("optimizer.safetensors", b"slots"),
        ("state.json", b"{}"),
    ];
    upload.begin(&manifest(&sharded), LIVE).unwrap();
    upload.append("model-00002-of-00002.safetensors", 0, b"oth").unwrap();
    assert_eq!(upload.state().unwrap().received, [("model-00002-of-00002.safetensors".into(), 3)].into());
    // Another manifest: the received bytes are removed.
    sharded[1].1 = b"more";
    upload.begin(&manifest(&sharded), LIVE).unwrap();
    assert!(upload.state().unwrap().received.is_empty());
    send(&upload, &sharded, LIVE);
    upload.commit(LIVE).unwrap();
    let path = dir.path().join("checkpoints/1-20/model-00002-of-00002.safetensors");
    assert_eq!(fs::read(path).unwrap(), b"others");
    for name in ["model-00003-of-00002.safetensors", "model-1-of-2.safetensors"] {
        sharded[1].0 = name;
        assert!(detail_of(upload.begin(&manifest(&sharded), LIVE)).contains("is not a file"), "{name}");
    }
    sharded.remove(0);
    sharded.remove(0);
    assert!(detail_of(upload.begin(&manifest(&sharded), LIVE)).contains("names no model.safetensors"));
}

#[test]
fn invalid_manifests_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let upload = Upload::of(dir.path(), "1-20");
    let refused = |text: &[u8]| detail_of(upload.begin(text, LIVE));
    let mut with_outside_file = FILES.to_vec();
    with_outside_file.push(("../token", b"x"));
    assert!(refused(&manifest(&with_outside_file)).contains("../token"));
    assert!(refused(&manifest(&FILES[..2])).contains("state.json"));
    assert!(refused(b"{}").contains("0-0"));
    assert!(refused(b"no").contains("MANIFEST.json"));
    // At the limits and one above them.
    let mut text = manifest(&FILES);
    text.resize(MANIFEST_BYTES, b' ');
    upload.begin(&text, LIVE).unwrap();
    text.push(b' ');
    assert!(refused(&text).contains("more than 1048576 bytes"));
    let sized = |file: &str, size: u64| {
        let mut value: serde_json::Value = serde_json::from_slice(&manifest(&FILES)).unwrap();
        value["files"][file]["size_bytes"] = size.into();
        serde_json::to_vec(&value).unwrap()
    };
    // The other two files have 7 bytes together.
    let model = |total: u64| sized("model.safetensors", total - 7);
    upload.begin(&model(MAX_CHECKPOINT_BYTES), LIVE).unwrap();
    assert!(refused(&model(MAX_CHECKPOINT_BYTES + 1)).contains("at most"));
    upload.begin(&sized(STATE, STATE_FILE_BYTES), LIVE).unwrap();
    let detail = refused(&sized(STATE, STATE_FILE_BYTES + 1));
    assert!(detail.contains("a state.json of 1048577 bytes; at most 1048576 are allowed"), "{detail}");
}

#[test]
fn an_attempt_that_has_ended_does_not_replace_weights() {
    let dir = tempfile::tempdir().unwrap();
    let upload = Upload::of(dir.path(), "1-20");
    // A new checkpoint is accepted.
    send(&upload, &FILES, LIVE);
    upload.commit(ENDED).unwrap();
    // The same weights with the results of a later evaluation are also accepted.
    let mut later = FILES;
    later[2] = ("state.json", b"{\"val_accuracy\": 1}");
    send(&upload, &later, ENDED);
    upload.commit(ENDED).unwrap();
    // Other weights are refused, also if their upload began while the attempt was running.
    let mut other_weights = later;
    other_weights[0] = (other_weights[0].0, b"other weights");
    assert!(matches!(upload.begin(&manifest(&other_weights), ENDED), Err(UploadError::OtherWeightsStored)));
    send(&upload, &other_weights, LIVE);
    assert!(matches!(upload.commit(ENDED), Err(UploadError::OtherWeightsStored)));
    let stored = fs::read(dir.path().join("checkpoints/1-20").join(other_weights[0].0)).unwrap();
    assert_eq!(stored, later[0].1);
    upload.commit(LIVE).unwrap();
}

#[test]
fn a_request_is_refused_while_another_one_runs() {
    let dir = tempfile::tempdir().unwrap();
    let upload = Upload::of(dir.path(), "1-20");
    upload.begin(&manifest(&FILES), LIVE).unwrap();
    let lock = upload.lock().unwrap();
    assert!(matches!(upload.append(FILES[0].0, 0, FILES[0].1), Err(UploadError::Busy)));
    assert!(matches!(upload.commit(LIVE), Err(UploadError::Busy)));
    drop(lock);
    upload.append(FILES[0].0, 0, FILES[0].1).unwrap();
}
