//! What agents, the server and readers of a stream send. A message that is understood is the same when it is sent on.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_protocol::{
    agent::{AttemptEvent, FromAgent, ToAgent},
    stream::Frame,
    wire,
};

fuzz_target!(|bytes: &[u8]| {
    // NaN is not equal to itself, its bytes are.
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
    // Records on disk, and frames that a browser gets.
    let _ = wire::decode::<AttemptEvent>(bytes);
    let _ = serde_json::from_slice::<Frame>(bytes);
});
