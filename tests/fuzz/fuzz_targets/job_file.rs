//! Fuzzes job files, as TOML and as JSON. An accepted job file must mean the same after it is written as JSON and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_protocol::spec;

fuzz_target!(|text: &str| {
    let json = serde_json::from_str(text).ok().map(|document| {
        let _ = spec::read_leniently(&document);
        spec::from_json(&document)
    });
    for accepted in [Some(spec::from_toml(text)), json].into_iter().flatten().flatten() {
        let written = serde_json::to_value(&accepted).unwrap();
        assert_eq!(spec::from_json(&written).unwrap(), accepted);
        assert_eq!(spec::read_leniently(&written), (accepted, Vec::new()));
    }
});
