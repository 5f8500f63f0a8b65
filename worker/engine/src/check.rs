//! Checks that tensors and batches fit a network, for all engines.

use super::EngineError;
use crate::net::{Network, Parameter};
use lockstep_data::loader::Batch;
use lockstep_host::tensors::TensorSource;
use std::collections::{BTreeMap, BTreeSet};

/// Checks that `tensors` are exactly the parameters and running statistics of the network.
///
/// # Errors
/// Tensors are missing, unknown or of another shape; the error names the first three.
pub(super) fn check(network: &Network, tensors: &dyn TensorSource) -> Result<(), EngineError> {
    let expected = network.parameters().into_iter().map(|p| (p.name, p.shape));
    check_shapes(network, tensors, expected)
}

/// Checks that `tensors` have exactly the names and shapes of `expected`.
pub(super) fn check_shapes(
    network: &Network,
    tensors: &dyn TensorSource,
    expected: impl IntoIterator<Item = (String, Vec<usize>)>,
) -> Result<(), EngineError> {
    let given: BTreeMap<_, _> =
        tensors.list().into_iter().map(|(name, shape, len)| (name, (shape, len))).collect();
    let mut mistakes = Vec::new();
    let mut known = BTreeSet::new();
    for (name, shape) in expected {
        match given.get(name.as_str()) {
            None => mistakes.push(format!("{name} is missing")),
            Some((given_shape, len)) if *given_shape != shape || *len != shape.iter().product::<usize>() => {
                mistakes.push(format!(
                    "{name} has shape {given_shape:?} ({len} values) where {} needs {shape:?}",
                    network.arch
                ));
            }
            Some(_) => {}
        }
        known.insert(name);
    }
    mistakes.extend(
        given.keys().filter(|n| !known.contains(**n)).map(|n| format!("{} has no {n}", network.arch)),
    );
    if mistakes.is_empty() {
        return Ok(());
    }
    let omitted =
        if mistakes.len() > 3 { format!("; and {} more", mistakes.len() - 3) } else { String::new() };
    mistakes.truncate(3);
    Err(EngineError::Parameters(format!("{}{omitted}", mistakes.join("; "))))
}

/// Checks that a batch fits the network. Engines use batches without further checks. `values` is the number of values of the
/// batch's pictures, if the engine reads pictures.
pub(super) fn check_batch(
    network: &Network,
    batch: &Batch,
    values: Option<usize>,
) -> Result<(), EngineError> {
    let (pictures, picture_len) = (batch.labels.len(), network.tensors[network.input()].len());
    if let Some(values) = values.filter(|values| *values != pictures * picture_len) {
        return Err(EngineError::Parameters(format!(
            "a batch of {pictures} labels has {values} values instead of {picture_len} per picture"
        )));
    }
    batch.check_labels(network.classes).map_err(EngineError::Parameters)
}

/// A rank's part of whole tensors.
pub(super) struct PartOf<'a> {
    whole: &'a dyn TensorSource,
    parameters: BTreeMap<String, Parameter>,
}

impl<'a> PartOf<'a> {
    /// The tensors of `part`, a rank's part of `network`. Fails if `whole` does not fit `network`.
    pub(super) fn new(
        whole: &'a dyn TensorSource,
        network: &Network,
        part: &Network,
    ) -> Result<Self, EngineError> {
        check(network, whole)?;
        let parameters = part.parameters().into_iter().map(|p| (p.name.clone(), p)).collect();
        Ok(Self { whole, parameters })
    }
}

impl TensorSource for PartOf<'_> {
    fn list(&self) -> Vec<(&str, &[usize], usize)> {
        self.parameters.values().map(|p| (p.name.as_str(), &p.shape[..], p.len())).collect()
    }

    fn read(&self, name: &str, from: usize, to: &mut [f32]) -> bool {
        let Some(slice) = self.parameters.get(name).and_then(|p| p.slice.as_ref()) else {
            return self.whole.read(name, from, to);
        };
        let mut exists = true;
        slice.read(from, to, |index, to| exists &= self.whole.read(name, index, to));
        exists
    }
}
