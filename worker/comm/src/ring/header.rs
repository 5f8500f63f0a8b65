//! The header of a call or a message.

use crate::{
    CommError,
    values::{DataType, Values},
};

/// The bytes `lockring` as a number. A machine with the other byte order reads another number.
const MAGIC: u64 = 0x6c6f_636b_7269_6e67;
/// Size of a header: four numbers of eight bytes, namely magic, the number of the call, and the two numbers of [`Call::pack`].
pub(super) const HEADER_BYTES: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    AllReduce = 1,
    ReduceScatter = 2,
    Broadcast = 3,
    AllGather = 4,
    Barrier = 5,
    SharedMemory = 6,
    AllToAll = 7,
    Message = 8,
    Split = 9,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::Broadcast => "broadcast",
            Operation::AllGather => "all_gather",
            Operation::Barrier => "barrier",
            Operation::SharedMemory => "shared_memory",
            Operation::AllToAll => "all_to_all",
            Operation::Message => "send",
            Operation::Split => "split",
        }
    }

    fn from_code(code: u32) -> Option<Self> {
        use Operation::*;
        [AllReduce, ReduceScatter, Broadcast, AllGather, Barrier, SharedMemory, AllToAll, Message, Split]
            .into_iter()
            .find(|o| *o as u32 == code)
    }
}

/// The properties of a call that must be equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) operation: Operation,
    pub(crate) data_type: DataType,
    /// Number of values.
    pub(crate) length: usize,
}

impl Call {
    pub(crate) fn empty(operation: Operation) -> Self {
        Self { operation, data_type: DataType::U8, length: 0 }
    }

    pub(crate) fn of(operation: Operation, values: &Values<'_>) -> Self {
        Self { operation, data_type: values.data_type(), length: values.len() }
    }

    /// Encodes the call as two numbers: the operation with the data type, and the length.
    pub(crate) fn pack(&self) -> [u64; 2] {
        [(self.operation as u64) << 40 | (self.data_type as u64) << 32, self.length as u64]
    }

    /// Describes a call encoded by [`Call::pack`]. Another process wrote the numbers, so they may be invalid.
    pub(crate) fn describe([operation_and_type, length]: [u64; 2]) -> String {
        let operation = Operation::from_code((operation_and_type >> 40) as u32);
        let name = operation.map_or("an unknown operation", Operation::name);
        if let Some(Operation::Barrier | Operation::Split) = operation {
            return name.into();
        }
        let data_type = DataType::name_of_code((operation_and_type >> 32) as u32 & 0xff);
        format!("{name} of {length} {data_type} values")
    }
}

/// Encodes the header of call number `sequence` on a connection.
pub(super) fn encode(call: Call, sequence: u64) -> [u8; HEADER_BYTES] {
    let [operation_and_type, length] = call.pack();
    bytemuck::must_cast([MAGIC, sequence, operation_and_type, length])
}

/// Compares the header from `peer` with this rank's header of the call.
pub(super) fn compare(
    operation: &'static str,
    peer: u32,
    theirs: &[u8; HEADER_BYTES],
    (call, sequence): (Call, u64),
) -> Result<(), CommError> {
    if encode(call, sequence) == *theirs {
        return Ok(());
    }
    let [magic, their_sequence, their_call @ ..]: [u64; 4] = bytemuck::must_cast(*theirs);
    let detail = if magic == MAGIC.swap_bytes() {
        "runs on a machine with another byte order".to_string()
    } else if magic != MAGIC {
        "sent bytes that are not the header of a call".to_string()
    } else {
        format!(
            "is at call {their_sequence}: {}; this rank is at call {sequence}: {}",
            Call::describe(their_call),
            Call::describe(call.pack()),
        )
    };
    Err(CommError::Mismatch { operation, peer, detail })
}
