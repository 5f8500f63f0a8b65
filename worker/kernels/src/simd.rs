//! Loops compiled for the widest vectors of the processor they run on, chosen once at run time.
//!
//! Multiplications and additions stay separate (no fused multiply-add), so a loop gives the same
//! bits at every vector width, and ranks on different processors stay in step.

use std::sync::LazyLock;

/// Lanes that the channel loops work on at a time: two 512-bit vectors, four when summed in float64.
pub(crate) const LANES: usize = 32;

/// Runs `work` with everything inlined into it compiled for this processor's vectors.
#[inline(always)]
pub(crate) fn with_simd<R>(work: impl FnOnce() -> R) -> R {
    static ARCH: LazyLock<pulp::Arch> = LazyLock::new(pulp::Arch::new);
    ARCH.dispatch(work)
}
