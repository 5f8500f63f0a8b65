//! The seeds of the fuzzers (`tests/fuzz/seeds.py`) are valid messages of the current protocol. With invalid seeds, the fuzzers would
//! hardly reach the code after decoding.

use lockstep_protocol::{
    agent::{AttemptEvent, FromAgent, ToAgent},
    wire,
};
use std::{fs, path::Path, process::Command};

#[test]
fn seeds_are_valid_messages() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz-seeds");
    let _ = fs::remove_dir_all(&folder);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/seeds.py");
    let output = Command::new("python3").arg(script).arg(&folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut counts = [0; 3];
    for seed in fs::read_dir(folder.join("frames")).unwrap() {
        let path = seed.unwrap().path();
        let (name, bytes) =
            (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap());
        let (kind, error) = match name.split('-').next().unwrap() {
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
        assert!(error.is_none(), "{name}: {error:?}");
        counts[kind] += 1;
    }
    assert!(counts.iter().all(|count| *count >= 10), "{counts:?}");
}
