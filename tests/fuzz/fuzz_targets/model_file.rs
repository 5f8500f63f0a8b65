//! Fuzzes safetensors files, as `model.pretrained`, as a checkpoint's file, and as the model of a prediction.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_worker::checkpoint;
use std::io::Write as _;

fuzz_target!(|bytes: &[u8]| {
    let mut file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.write_all(bytes).unwrap();
    if let Ok(tensors) = checkpoint::read_tensors(file.path()) {
        for tensor in tensors.values() {
            assert_eq!(tensor.shape.iter().product::<usize>(), tensor.values.len());
        }
    }
    let _ = checkpoint::metadata(file.path());
    // Builds the network that the metadata names, and predicts no pictures.
    let _ = lockstep_worker::inspect::predict(file.path(), Vec::new());
});
