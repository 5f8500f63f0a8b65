//! Job specifications of the tests.

use serde_json::{Value, json};

/// A job of about `steps` x 10 ms: ResNet-20 on pictures of 8 x 8, 8 per rank, with no randomness except
/// the seed.
pub(crate) fn short(name: &str, dataset: &str, ranks: u32, steps: u64) -> Value {
    json!({
        "name": name,
        "model": {"arch": "resnet20"},
        "data": {"dataset": dataset, "image_size": 8},
        "train": {"steps": steps, "batch_size": 8},
        "parallel": {"ranks": ranks, "device": "cpu"},
        "checkpoint": {"every_epochs": 0},
        "evaluate": {"every_epochs": 0},
        "log": {"every_steps": 1},
    })
}

/// Merges `changes` into `spec`, key by key.
pub(crate) fn with(mut spec: Value, changes: Value) -> Value {
    merge(&mut spec, changes);
    spec
}

fn merge(into: &mut Value, changes: Value) {
    match (into, changes) {
        (Value::Object(into), Value::Object(changes)) => {
            for (key, change) in changes {
                merge(into.entry(key).or_insert(Value::Null), change);
            }
        }
        (into, change) => *into = change,
    }
}
