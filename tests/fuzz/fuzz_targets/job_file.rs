//! Job files, as TOML and as JSON. One that is taken means the same when it is written down and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_protocol::spec;

fuzz_target!(|text: &str| {
    let json = serde_json::from_str(text).ok().map(|document| {
        let _ = spec::read_leniently(&document);
        spec::from_json(&document)
    });
    for taken in [Some(spec::from_toml(text)), json].into_iter().flatten().flatten() {
        let written = serde_json::to_value(&taken).unwrap();
        assert_eq!(spec::from_json(&written).unwrap(), taken);
        assert_eq!(spec::read_leniently(&written), (taken, Vec::new()));
    }
});
