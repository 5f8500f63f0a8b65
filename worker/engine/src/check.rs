//! Checks that tensors fit a network, for all engines.

use super::{EngineError, NamedTensors};
use crate::net::Network;
use std::collections::BTreeSet;

/// Checks that `tensors` are exactly the parameters and running statistics of the network.
///
/// # Errors
/// Tensors are missing, unknown or of another shape; the error names the first three.
pub(super) fn check(network: &Network, tensors: &NamedTensors) -> Result<(), EngineError> {
    let wanted = network.parameters().into_iter().map(|p| (p.name, p.shape));
    check_shapes(network, tensors, wanted)
}

/// Checks that `tensors` have exactly the names and shapes of `wanted`.
///
/// # Errors
/// As for [`check`].
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
