use super::*;

#[test]
fn only_incomplete_fetches_of_an_earlier_server_are_removed() {
    let jobs = tempfile::tempdir().unwrap();
    remove_unfinished(&jobs.path().join("none")).unwrap();
    for folder in ["a/fetched/1-10", "a/checkpoints/1-10", "b/checkpoints/1-20"] {
        fs::create_dir_all(jobs.path().join(folder)).unwrap();
    }
    fs::write(jobs.path().join("a/fetched/1-10/model.safetensors"), b"half").unwrap();
    fs::write(jobs.path().join("file"), b"").unwrap();
    remove_unfinished(jobs.path()).unwrap();
    let exists = |path| jobs.path().join(path).exists();
    assert!(!exists("a/fetched") && exists("a/checkpoints/1-10") && exists("b/checkpoints/1-20"));
}
