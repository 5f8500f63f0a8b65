//! Sharded optimizer state (ZeRO-1, Rajbhandari et al. 2020): which part of each bucket of parameters a rank updates.
//!
//! The ranks that reduce the gradients of a bucket divide the bucket into parts of equal length, one per rank (reduce-scatter). Each rank
//! receives the reduced gradients of its own part, keeps the optimizer state of that part and updates the part's weights. An all-gather
//! then distributes the new weights. Parts may end inside a parameter, because a last layer with very many classes is one parameter. So
//! all ranks keep equally many values, up to a bucket's padding of at most one value per rank.

use std::ops::Range;

/// A rank's position among the ranks that reduce a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl Share {
    /// The share of a rank that updates all parameters.
    pub(crate) const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// Length of each part of a bucket of `len` values. The last parts may extend past the bucket's end.
    pub(crate) fn part_len(self, len: usize) -> usize {
        len.div_ceil(self.ranks)
    }

    /// The rank's part of a bucket of `len` values, cut off at the bucket's end.
    pub(crate) fn of(self, len: usize) -> Range<usize> {
        let part = self.part_len(len);
        let [start, end] = [self.rank, self.rank + 1].map(|rank| (rank * part).min(len));
        start..end
    }
}

/// The memory that sharding saves a rank that has `own_bytes` of the `all_bytes` of optimizer state, as text for the log.
pub(crate) fn saving_in_words(own_bytes: usize, all_bytes: usize) -> String {
    let megabytes = |bytes: usize| bytes as f64 / 1e6;
    format!("a rank keeps {:.2} of {:.2} MB of optimizer state", megabytes(own_bytes), megabytes(all_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_bucket_cover_it_and_are_equally_long() {
        for len in [0, 1, 5, 6, 7, 1000] {
            for ranks in 1..9 {
                let parts: Vec<_> = (0..ranks).map(|rank| Share { rank, ranks }.of(len)).collect();
                assert!(parts.iter().flat_map(Clone::clone).eq(0..len), "{len} over {ranks}: {parts:?}");
                let part_len = Share { rank: 0, ranks }.part_len(len);
                assert!(parts.iter().all(|part| part.len() <= part_len) && part_len * ranks < len + ranks);
            }
        }
    }
}
