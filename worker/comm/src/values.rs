//! Typed buffers in host memory, for collectives.

use super::CommError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    /// Bytes, which are moved but never reduced.
    U8,
    /// IEEE binary16. Only in device memory.
    F16,
    /// bfloat16: the upper half of a float32. Only in device memory.
    Bf16,
    F32,
    F64,
}

impl DataType {
    pub fn size_bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The name, such as `float16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
            Self::F64 => "float64",
        }
    }

    /// The name of the type whose code (`as u32`) a peer has sent.
    pub(super) fn name_of_code(code: u32) -> &'static str {
        let all = [Self::U8, Self::F16, Self::Bf16, Self::F32, Self::F64];
        all.into_iter().find(|t| *t as u32 == code).map_or("an unknown type", Self::name)
    }
}

#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    U8(&'a [u8]),
    F32(&'a [f32]),
    F64(&'a [f64]),
}

/// Values that are written, or read and replaced.
#[derive(Debug)]
pub enum ValuesMut<'a> {
    U8(&'a mut [u8]),
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
}

impl<'a> Values<'a> {
    pub fn data_type(&self) -> DataType {
        match self {
            Self::U8(_) => DataType::U8,
            Self::F32(_) => DataType::F32,
            Self::F64(_) => DataType::F64,
        }
    }

    pub fn len(&self) -> usize {
        self.bytes().len() / self.data_type().size_bytes()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values in the byte order of this machine.
    pub fn bytes(&self) -> &'a [u8] {
        match self {
            Self::U8(values) => values,
            Self::F32(values) => bytemuck::cast_slice(values),
            Self::F64(values) => bytemuck::cast_slice(values),
        }
    }
}

impl ValuesMut<'_> {
    pub(crate) fn as_values(&self) -> Values<'_> {
        match self {
            Self::U8(values) => Values::U8(values),
            Self::F32(values) => Values::F32(values),
            Self::F64(values) => Values::F64(values),
        }
    }

    pub fn data_type(&self) -> DataType {
        self.as_values().data_type()
    }

    pub fn len(&self) -> usize {
        self.as_values().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values in the byte order of this machine.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::U8(values) => values,
            Self::F32(values) => bytemuck::cast_slice_mut(values),
            Self::F64(values) => bytemuck::cast_slice_mut(values),
        }
    }
}

macro_rules! from_slices {
    ($($variant:ident of $number:ty),*) => {$(
        impl<'a> From<&'a [$number]> for Values<'a> {
            fn from(values: &'a [$number]) -> Self {
                Self::$variant(values)
            }
        }
        impl<'a> From<&'a Vec<$number>> for Values<'a> {
            fn from(values: &'a Vec<$number>) -> Self {
                Self::$variant(values)
            }
        }
        impl<'a, const N: usize> From<&'a [$number; N]> for Values<'a> {
            fn from(values: &'a [$number; N]) -> Self {
                Self::$variant(values)
            }
        }
        impl<'a> From<&'a mut [$number]> for ValuesMut<'a> {
            fn from(values: &'a mut [$number]) -> Self {
                Self::$variant(values)
            }
        }
        impl<'a> From<&'a mut Vec<$number>> for ValuesMut<'a> {
            fn from(values: &'a mut Vec<$number>) -> Self {
                Self::$variant(values)
            }
        }
        impl<'a, const N: usize> From<&'a mut [$number; N]> for ValuesMut<'a> {
            fn from(values: &'a mut [$number; N]) -> Self {
                Self::$variant(values)
            }
        }
    )*};
}

from_slices!(U8 of u8, F32 of f32, F64 of f64);

/// The checks that every implementation makes before it sends anything to other ranks.
pub(super) mod check {
    use super::{CommError, DataType, Values, ValuesMut};

    fn invalid<T>(operation: &'static str, detail: String) -> Result<T, CommError> {
        Err(CommError::Invalid { operation, detail })
    }

    /// Fails for bytes, which can be moved but not reduced.
    pub(crate) fn reducible(operation: &'static str, data_type: DataType) -> Result<(), CommError> {
        match data_type {
            DataType::U8 => invalid(operation, "bytes cannot be reduced; use float32 or float64".into()),
            _ => Ok(()),
        }
    }

    /// Fails unless `input` has `input_parts` and `output` has `output_parts` parts of equal length and type.
    pub(crate) fn parts(
        operation: &'static str,
        (input, input_parts): (&Values<'_>, u32),
        (output, output_parts): (&ValuesMut<'_>, u32),
    ) -> Result<(), CommError> {
        if input.data_type() != output.data_type() {
            let (from, to) = (input.data_type().name(), output.data_type().name());
            return invalid(
                operation,
                format!("the input is {from} and the output is {to}; the types must be equal"),
            );
        }
        let (input_len, output_len) = (input.len() as u128, output.len() as u128);
        if !input_len.is_multiple_of(input_parts.into()) {
            return invalid(
                operation,
                format!(
                    "an input of {input_len} values cannot be divided into {input_parts} equal parts, one for each rank"
                ),
            );
        }
        let required_len = input_len / u128::from(input_parts) * u128::from(output_parts);
        if output_len != required_len {
            return invalid(
                operation,
                format!(
                    "an input of {input_len} values requires an output of {required_len}, not {output_len}"
                ),
            );
        }
        Ok(())
    }

    /// Fails unless `peer` is another rank of the group.
    pub(crate) fn peer(operation: &'static str, peer: u32, own: u32, size: u32) -> Result<(), CommError> {
        if peer >= size {
            return invalid(operation, format!("there is no rank {peer} in a group of {size}"));
        }
        if peer == own {
            return invalid(operation, format!("rank {peer} is this rank itself"));
        }
        Ok(())
    }
}
