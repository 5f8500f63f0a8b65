use super::*;

fn storage(dir: &std::path::Path) -> ObjectStorage {
    ObjectStorage::open(dir.to_str().unwrap()).unwrap()
}

#[test]
fn only_checkpoint_ids_have_a_path() {
    let dir = tempfile::tempdir().unwrap();
    let (storage, job) = (storage(dir.path()), JobId::generate());
    assert_eq!(storage.prefix_of(&format!("{job}-1-20")).unwrap().path.as_ref(), format!("jobs/{job}/1-20"));
    for id in ["", "x", job.as_str(), &format!("{job}-1"), &format!("{job}-1-../2"), &format!("{job}/1-20")] {
        assert!(storage.prefix_of(id).is_none(), "{id}");
    }
}

#[test]
fn manifests_that_are_too_large_or_invalid_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = storage(dir.path()).prefix_of(&format!("{}-1-20", JobId::generate())).unwrap();
    let text = |name: &str, sum: &str, step: u64| {
        format!(r#"{{"epoch":1,"step":{step},"files":{{"{name}":{{"size_bytes":1,"sha256":"{sum}"}}}}}}"#)
    };
    let sum = "a".repeat(64);
    let good = text("model.safetensors", &sum, 20);
    assert_eq!(prefix.parse_manifest(good.as_bytes()).unwrap().files.len(), 1);
    let padded = |bytes: usize| good.clone() + &" ".repeat(bytes - good.len());
    assert!(prefix.parse_manifest(padded(MANIFEST_BYTES).as_bytes()).is_ok());
    assert!(prefix.parse_manifest(padded(MANIFEST_BYTES + 1).as_bytes()).unwrap_err().contains("1048576"));
    for (wrong, expected) in [
        (text("model.safetensors", &sum, 21), "1-21"),
        (text("../model", &sum, 20), "../model"),
        (text("MANIFEST.json", &sum, 20), "MANIFEST.json"),
        (text("model.safetensors", "../x", 20), "../x"),
        (r#"{"epoch":1,"step":20,"files":{}}"#.into(), "no file"),
        ("{".into(), "cannot be read"),
    ] {
        let detail = prefix.parse_manifest(wrong.as_bytes()).unwrap_err();
        assert!(detail.contains(expected), "{wrong}: {detail}");
    }
}

#[test]
fn the_number_of_parts_stays_below_the_limit_of_buckets() {
    assert_eq!(part_size_for(1), MIN_PART_BYTES);
    assert_eq!(part_size_for(MIN_PART_BYTES * MAX_PARTS), MIN_PART_BYTES);
    assert_eq!(part_size_for(MIN_PART_BYTES * MAX_PARTS + 1), MIN_PART_BYTES + 1);
    let largest = 1_u64 << 40;
    assert!(u64::div_ceil(largest, part_size_for(largest)) <= MAX_PARTS);
}

#[test]
fn buckets_of_different_servers_have_different_urls() {
    let url = |endpoint: Option<&str>, root: &str| bucket_url(endpoint, "weights", &Path::from(root));
    assert_eq!(url(None, "team/a"), "s3://weights/team/a");
    assert_eq!(url(None, ""), "s3://weights");
    assert_eq!(url(Some("https://one.example:9000/"), "a"), "s3+https://one.example:9000/weights/a");
    assert_eq!(url(Some("http://key:secret@two"), ""), "s3+http://two/weights");
}

#[tokio::test]
async fn a_store_keeps_its_marker() {
    let dir = tempfile::tempdir().unwrap();
    let storage = storage(dir.path());
    assert_eq!(storage.marker().await, Ok(None));
    let id = uuid::Uuid::new_v4();
    storage.write_marker(id).await.unwrap();
    assert_eq!(storage.marker().await, Ok(Some(id.to_string())));
    std::fs::write(dir.path().join("LOCKSTEP.json"), "{}").unwrap();
    assert!(storage.marker().await.unwrap_err().why.contains("cannot be read"));
}
