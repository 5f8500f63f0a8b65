//! Floating-point formats of the GPU.

use lockstep_comm::DataType;

/// The formats of [`DataType`] for which kernels exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum DType {
    F32,
    F16,
    Bf16,
}

impl DType {
    /// Size of a value in bytes.
    pub(super) fn size(self) -> usize {
        DataType::from(self).size_bytes()
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            DType::F32 => "fp32",
            DType::F16 => "fp16",
            DType::Bf16 => "bf16",
        }
    }

    /// The format's number in kernels (`DTYPE`).
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
