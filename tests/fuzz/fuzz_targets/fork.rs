//! Fuzzes the settings that a fork changes, and the arguments of `--set`. Each line of the input is a setting.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_protocol::{JobSpec, spec};
use serde_json::Value;

fuzz_target!(|text: &str| {
    let mut document = serde_json::to_value(JobSpec::default()).unwrap();
    for line in text.lines() {
        let _ = spec::apply_set(&mut document, line);
        if let Some((path, value)) = line.split_once('=') {
            let value: Value = serde_json::from_str(value).unwrap_or(Value::Null);
            let _ = spec::set_key(&mut document, path, value);
        }
        let _ = spec::shortened(line);
    }
    let _ = spec::from_json(&document);
    let _ = spec::toml_document(text);
});
