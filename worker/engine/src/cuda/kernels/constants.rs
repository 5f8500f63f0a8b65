//! Constants that kernels and the host share: defined in Rust, and passed to NVRTC as options.

use crate::{
    cuda::{
        dtype::DType,
        ops::{LOSS_ROWS, NORM_PARTS, ROW_PADDING, SMALL_GROUPS, TILE_CHANNELS, TILE_ROWS, in_flight},
    },
    fuse::{EXPANDED, REDUCED},
    loss::ROUNDS,
};
use lockstep_comm::peers::MAX_PEERS;
use lockstep_kernels::{
    batch_norm::EPSILON,
    orthogonal::{self, QUINTIC},
};

/// Names, and values in C++ syntax, for kernels that compute in `dtype`.
pub(super) fn for_dtype(dtype: DType) -> [(&'static str, String); 17] {
    [
        ("DTYPE", dtype.number().to_string()),
        ("IN_FLIGHT", in_flight(dtype).to_string()),
        // A double: `{:?}` gives the shortest text that parses as the same number.
        ("EPSILON", format!("{EPSILON:?}")),
        ("SMALL_GROUPS", SMALL_GROUPS.to_string()),
        ("EXPANDED", EXPANDED.to_string()),
        ("REDUCED", REDUCED.to_string()),
        ("TILE_ROWS", TILE_ROWS.to_string()),
        ("TILE_CHANNELS", TILE_CHANNELS.to_string()),
        ("ROW_PADDING", ROW_PADDING.to_string()),
        ("NORM_PARTS", NORM_PARTS.to_string()),
        ("LOSS_ROWS", LOSS_ROWS.to_string()),
        ("MAX_PEERS", MAX_PEERS.to_string()),
        ("ORDER_ROUNDS", ROUNDS.to_string()),
        ("MUON_EPSILON", format!("{:?}", orthogonal::EPSILON)),
        ("QUINTIC_A", format!("{:?}f", QUINTIC[0])),
        ("QUINTIC_B", format!("{:?}f", QUINTIC[1])),
        ("QUINTIC_C", format!("{:?}f", QUINTIC[2])),
    ]
}
