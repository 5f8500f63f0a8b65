//! What the fuzzers start from (`tests/fuzz/seeds.py`) are messages of today: of an old protocol they would reach no further than
//! the first refusal.

use lockstep_protocol::{
    agent::{AttemptEvent, FromAgent, ToAgent},
    wire,
};
use std::{fs, path::Path, process::Command};

#[test]
fn seeds_are_messages_that_are_understood() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz-seeds");
    let _ = fs::remove_dir_all(&folder);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/seeds.py");
    let written = Command::new("python3").arg(script).arg(&folder).output().unwrap();
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let mut kinds = [0; 3];
    for seed in fs::read_dir(folder.join("frames")).unwrap() {
        let path = seed.unwrap().path();
        let (name, bytes) =
            (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap());
        let (kind, refused) = match name.split('-').next().unwrap() {
            "from" => (0, wire::decode::<FromAgent>(&bytes).err()),
            "to" => (1, wire::decode::<ToAgent>(&bytes).err()),
            _ => match wire::decode::<AttemptEvent>(&bytes) {
                Ok(event) => {
                    assert_ne!(event, AttemptEvent::Unknown, "{name}");
                    (2, None)
                }
                Err(error) => (2, Some(error)),
            },
        };
        assert!(refused.is_none(), "{name}: {refused:?}");
        kinds[kind] += 1;
    }
    assert!(kinds.iter().all(|count| *count >= 10), "{kinds:?}");
}
