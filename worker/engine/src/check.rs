//! Whether tensors are those of a network: for every engine, before it takes them.

use super::{EngineError, NamedTensors};
use crate::net::Network;
use std::collections::BTreeSet;

/// Whether `tensors` are exactly the parameters and running statistics of the network.
///
/// # Errors
/// Every tensor that is missing, unknown or of another shape (the first three are named).
pub(super) fn check(network: &Network, tensors: &NamedTensors) -> Result<(), EngineError> {
    let wanted = network.parameters().into_iter().map(|p| (p.name, p.shape));
    check_shapes(network, tensors, wanted)
}

/// Whether `tensors` are exactly those of `wanted`, names and shapes.
///
/// # Errors
/// As [`check`].
pub(super) fn check_shapes(
    network: &Network,
    tensors: &NamedTensors,
    wanted: impl IntoIterator<Item = (String, Vec<usize>)>,
) -> Result<(), EngineError> {
    let mut mistakes = Vec::new();
    let mut known = BTreeSet::new();
    for (name, shape) in wanted {
        match tensors.get(&name) {
            None => mistakes.push(format!("{name} is missing")),
            Some(t) if t.shape != shape || t.values.len() != shape.iter().product::<usize>() => {
                mistakes.push(format!(
                    "{name} has shape {:?} ({} values) where {} needs {shape:?}",
                    t.shape,
                    t.values.len(),
                    network.arch
                ));
            }
            Some(_) => {}
        }
        known.insert(name);
    }
    mistakes.extend(
        tensors.keys().filter(|n| !known.contains(*n)).map(|n| format!("{} has no {n}", network.arch)),
    );
    if mistakes.is_empty() {
        return Ok(());
    }
    let more = if mistakes.len() > 3 { format!("; and {} more", mistakes.len() - 3) } else { String::new() };
    mistakes.truncate(3);
    Err(EngineError::Parameters(format!("{}{more}", mistakes.join("; "))))
}
