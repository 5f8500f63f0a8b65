//! Allocator of memory for activations and their gradients. Every step allocates and frees in the same order, and gets the same offsets.

use super::command::{Operand, Region};

/// A best-fit allocator of ranges of [`Region::Arena`].
#[derive(Debug, Default)]
pub(super) struct Arena {
    /// Free ranges below `peak`, by offset; adjacent gaps are merged.
    gaps: Vec<Operand>,
    /// End of the highest allocation so far, in bytes: the memory that the arena needs.
    pub(super) peak: usize,
}

/// Alignment for cuDNN and for 16-byte loads, which also puts tensors on separate cache lines.
const ALIGN: usize = 256;

/// Size of an allocation of `bytes`.
fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN).max(ALIGN)
}

impl Arena {
    /// Whether an allocation of `bytes` fits into a gap, so that the arena does not grow.
    pub(super) fn fits(&self, bytes: usize) -> bool {
        self.gaps.iter().any(|gap| gap.bytes >= aligned(bytes))
    }

    /// Allocates `bytes` in the smallest gap that fits.
    pub(super) fn alloc(&mut self, bytes: usize) -> Operand {
        let bytes = aligned(bytes);
        let large_enough = (0..self.gaps.len()).filter(|&gap| self.gaps[gap].bytes >= bytes);
        if let Some(gap) = large_enough.min_by_key(|&gap| self.gaps[gap].bytes) {
            let allocation = Operand { bytes, ..self.gaps[gap] };
            self.gaps[gap].offset += bytes;
            self.gaps[gap].bytes -= bytes;
            if self.gaps[gap].bytes == 0 {
                self.gaps.remove(gap);
            }
            return allocation;
        }
        // No gap fits: extends the gap at the end, if there is one.
        let last = self.gaps.pop_if(|last| last.end() == self.peak);
        let offset = last.map_or(self.peak, |last| last.offset);
        self.peak = offset + bytes;
        Operand::new(Region::Arena, offset, bytes)
    }

    /// Frees a whole allocation.
    pub(super) fn free(&mut self, allocation: Operand) {
        let at = self.gaps.partition_point(|gap| gap.offset < allocation.offset);
        self.gaps.insert(at, allocation);
        if at + 1 < self.gaps.len() && allocation.end() == self.gaps[at + 1].offset {
            self.gaps[at].bytes += self.gaps[at + 1].bytes;
            self.gaps.remove(at + 1);
        }
        if at > 0 && self.gaps[at - 1].end() == allocation.offset {
            self.gaps[at - 1].bytes += self.gaps[at].bytes;
            self.gaps.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_never_overlap_and_gaps_are_reused() {
        let mut arena = Arena::default();
        let [a, b, c] = [1000, 2000, 3000].map(|bytes| arena.alloc(bytes));
        assert_eq!((a.offset, b.offset, c.offset), (0, 1024, 3072));
        arena.free(a);
        arena.free(b);
        let d = arena.alloc(3000);
        assert_eq!(d.offset, 0, "adjacent gaps are merged");
        let e = arena.alloc(1);
        assert_eq!(e.offset, 6144);
        arena.free(e);
        arena.free(c);
        assert_eq!(arena.alloc(4000).offset, 3072, "the last gap grows");
        assert_eq!(arena.peak, 3072 + 4096);
    }
}
