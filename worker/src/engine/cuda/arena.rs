//! Where activations and their gradients lie: places in one piece of memory, given out and taken back in
//! the order of the step. The same step asks in the same order every time, so places are the same, too.

/// A place in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

/// Gives out places; knows no memory.
#[derive(Debug, Default)]
pub(super) struct Arena {
    /// By offset, never touching.
    free: Vec<Place>,
    /// Bytes that were ever in use.
    pub(super) peak: usize,
}

/// What cuDNN and 16-byte loads need, and what keeps tensors off each other's cache lines.
const ALIGN: usize = 256;

impl Arena {
    /// Whether there is a gap for `bytes`, so that no more memory is needed.
    pub(super) fn fits(&self, bytes: usize) -> bool {
        self.free.iter().any(|gap| gap.bytes >= bytes.next_multiple_of(ALIGN).max(ALIGN))
    }

    /// Room for `bytes`: the smallest gap that fits.
    pub(super) fn take(&mut self, bytes: usize) -> Place {
        let bytes = bytes.next_multiple_of(ALIGN).max(ALIGN);
        let fits = (0..self.free.len()).filter(|&i| self.free[i].bytes >= bytes);
        if let Some(gap) = fits.min_by_key(|&i| self.free[i].bytes) {
            let place = Place { offset: self.free[gap].offset, bytes };
            self.free[gap].offset += bytes;
            self.free[gap].bytes -= bytes;
            if self.free[gap].bytes == 0 {
                self.free.remove(gap);
            }
            return place;
        }
        // The gap at the end, if there is one, is made longer.
        let offset = match self.free.last() {
            Some(last) if last.offset + last.bytes == self.peak => {
                let offset = last.offset;
                self.free.pop();
                offset
            }
            _ => self.peak,
        };
        self.peak = offset + bytes;
        Place { offset, bytes }
    }

    /// Takes a place back.
    pub(super) fn give(&mut self, place: Place) {
        let at = self.free.partition_point(|p| p.offset < place.offset);
        self.free.insert(at, place);
        if at + 1 < self.free.len() && place.offset + place.bytes == self.free[at + 1].offset {
            self.free[at].bytes += self.free[at + 1].bytes;
            self.free.remove(at + 1);
        }
        if at > 0 && self.free[at - 1].offset + self.free[at - 1].bytes == place.offset {
            self.free[at - 1].bytes += self.free[at].bytes;
            self.free.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_never_overlap_and_gaps_are_used_again() {
        let mut arena = Arena::default();
        let [a, b, c] = [1000, 2000, 3000].map(|bytes| arena.take(bytes));
        assert_eq!((a.offset, b.offset, c.offset), (0, 1024, 3072));
        arena.give(a);
        arena.give(b);
        let d = arena.take(3000);
        assert_eq!(d.offset, 0, "two gaps side by side are one");
        let e = arena.take(1);
        assert_eq!(e.offset, 6144);
        arena.give(e);
        arena.give(c);
        assert_eq!(arena.take(4000).offset, 3072, "the last gap grows");
        assert_eq!(arena.peak, 3072 + 4096);
    }
}
