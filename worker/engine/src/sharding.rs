//! Sharded optimizer state (ZeRO-1, Rajbhandari et al. 2020): which part of each bucket of parameters a rank updates.
//!
//! The ranks that add up the gradients of a bucket cut it into equally long parts, one a rank. A rank gets the sum of its own part alone,
//! keeps the optimizer's state of that part, and updates its weights. Then the ranks give each other the new weights. A part ends
//! anywhere in a parameter: a last layer with very many classes is one parameter. So no rank has more than the others, but for the
//! padding of a bucket, which is at most one value a rank.

use std::ops::Range;

/// A rank among those that add up a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl Share {
    /// Of a rank that updates everything.
    pub(crate) const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// Values of each part of a bucket of `len` values. The last parts may reach behind the bucket.
    pub(crate) fn part_len(self, len: usize) -> usize {
        len.div_ceil(self.ranks)
    }

    /// The rank's part of a bucket of `len` values, without what lies behind the bucket.
    pub(crate) fn of(self, len: usize) -> Range<usize> {
        let part = self.part_len(len);
        let [start, end] = [self.rank, self.rank + 1].map(|rank| (rank * part).min(len));
        start..end
    }
}

/// What sharding saves a rank that keeps `own` of `all` bytes, for the log.
pub(crate) fn saving_in_words(own: usize, all: usize) -> String {
    let megabytes = |bytes: usize| bytes as f64 / 1e6;
    format!("a rank keeps {:.2} of {:.2} MB of optimizer state", megabytes(own), megabytes(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_bucket_are_all_of_it_and_equally_long() {
        for len in [0, 1, 5, 6, 7, 1000] {
            for ranks in 1..9 {
                let parts: Vec<_> = (0..ranks).map(|rank| Share { rank, ranks }.of(len)).collect();
                assert!(parts.iter().flat_map(Clone::clone).eq(0..len), "{len} over {ranks}: {parts:?}");
                let most = Share { rank: 0, ranks }.part_len(len);
                assert!(parts.iter().all(|part| part.len() <= most) && most * ranks < len + ranks);
            }
        }
    }
}
