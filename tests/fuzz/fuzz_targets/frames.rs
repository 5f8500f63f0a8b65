//! Fuzzes the messages of agents and the server, and the frames of streams. A decoded message must be the same after it is encoded and
//! decoded again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_protocol::{
    agent::{AttemptEvent, FromAgent, ToAgent},
    stream::Frame,
    wire,
};

fuzz_target!(|bytes: &[u8]| {
    // Compares bytes, as NaN is not equal to itself.
    if let Ok(message) = wire::decode::<FromAgent>(bytes) {
        let sent = wire::encode(&message).unwrap();
        assert_eq!(wire::encode(&wire::decode::<FromAgent>(&sent).unwrap()).unwrap(), sent);
        if let FromAgent::Part(part) = message {
            let mut partial = wire::PartialMessages::default();
            let _ = partial.add(part.clone());
            let _ = partial.add(part);
        }
    }
    if let Ok(message) = wire::decode::<ToAgent>(bytes) {
        let sent = wire::encode(&message).unwrap();
        assert_eq!(wire::encode(&wire::decode::<ToAgent>(&sent).unwrap()).unwrap(), sent);
    }
    // Records that ranks write to disk, and frames that a browser receives.
    let _ = wire::decode::<AttemptEvent>(bytes);
    let _ = serde_json::from_slice::<Frame>(bytes);
});
