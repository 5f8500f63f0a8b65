//! Tensors of safetensors files.

use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;

/// The bytes of each tensor, without the file's metadata, which has the number of ranks.
pub(crate) fn tensors(file: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let file = SafeTensors::deserialize(file).expect("safetensors");
    file.tensors().into_iter().map(|(name, tensor)| (name, tensor.data().to_vec())).collect()
}

/// The values of each float32 tensor: of all tensors except `num_batches_tracked`.
pub(crate) fn floats(file: &[u8]) -> BTreeMap<String, Vec<f32>> {
    let file = SafeTensors::deserialize(file).expect("safetensors");
    let floats = file.tensors().into_iter().filter(|(_, tensor)| tensor.dtype() == Dtype::F32);
    let values = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    floats.map(|(name, tensor)| (name, values(tensor.data()))).collect()
}

/// The largest absolute difference between the values of two files.
pub(crate) fn max_difference(a: &[u8], b: &[u8]) -> f32 {
    let (a, b) = (floats(a), floats(b));
    assert!(!a.is_empty() && a.keys().eq(b.keys()));
    let pairs = a.iter().flat_map(|(name, values)| values.iter().zip(&b[name]));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
