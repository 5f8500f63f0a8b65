//! What the GPU computes in.

use lockstep_comm::DataType;

/// What activations and weights are computed in: those of [`DataType`] for which there are kernels, so that a `match` names
/// them all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum DType {
    F32,
    F16,
    Bf16,
}

impl DType {
    /// Bytes of a value.
    pub(super) fn size(self) -> usize {
        DataType::from(self).size_bytes()
    }

    /// `fp32`, `fp16` or `bf16`.
    pub(super) fn name(self) -> &'static str {
        match self {
            DType::F32 => "fp32",
            DType::F16 => "fp16",
            DType::Bf16 => "bf16",
        }
    }

    /// The number that kernels know it by.
    pub(super) fn number(self) -> u32 {
        match self {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::Bf16 => 2,
        }
    }
}

impl From<DType> for DataType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => DataType::F32,
            DType::F16 => DataType::F16,
            DType::Bf16 => DataType::Bf16,
        }
    }
}
