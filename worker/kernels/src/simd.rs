//! Loops compiled for several vector widths; the widest that the processor supports is chosen at run time.
//!
//! Multiplications and additions stay separate (no fused multiply-add), so a loop gives the same
//! bits at every vector width, and ranks on different processors compute equal weights.

use std::sync::LazyLock;

/// Number of lanes per iteration of channel loops: two 512-bit vectors, or four when summed in float64.
pub(crate) const LANES: usize = 32;

/// Runs the version of `work` that was compiled for this processor's vectors. Functions that `work` calls must be inlined into it, else
/// they are compiled only for the narrowest vectors.
#[inline(always)]
pub(crate) fn with_simd<R>(work: impl FnOnce() -> R) -> R {
    static ARCH: LazyLock<pulp::Arch> = LazyLock::new(pulp::Arch::new);
    ARCH.dispatch(work)
}
