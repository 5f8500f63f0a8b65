//! The shuffled order of a split's pictures in a prepared copy, so that a shard that is read sequentially contains pictures of
//! all classes.
//!
//! Files, and members of tar files, are read individually at any offset. A row of a Parquet file is read together
//! with its page, which has up to some hundred rows. If rows were read individually, a copy would decode each page once
//! per row. So runs of consecutive rows are shuffled, and then the rows of a window of many runs. A window is read at
//! once.

use super::ORDER_SEED;
use crate::{Random, listing::Listing};

/// Number of consecutive rows in a run. The rows of a run stay in one window.
const RUN: usize = 64;
/// Number of pictures in a window. Their JPEG files need 30 MB of memory at 256 pixels.
pub(super) const WINDOW: usize = 1024;

/// The pictures' positions in the listing, in the order of the copy, which is equal in every copy. A shard contains
/// `per_shard` pictures.
pub(super) fn shuffle(split: usize, listing: &Listing, per_shard: u32) -> Vec<u32> {
    if listing.has_parquet_rows() {
        shuffle_runs(split, listing.len(), per_shard.max(1) as usize)
    } else {
        Random::new(&[ORDER_SEED, split as u64]).permutation(listing.len())
    }
}

fn shuffle_runs(split: usize, count: usize, per_shard: usize) -> Vec<u32> {
    let runs = Random::new(&[ORDER_SEED, split as u64]).permutation(count.div_ceil(RUN));
    let run = |index: u32| {
        let first = index as usize * RUN;
        first as u32..(first + RUN).min(count) as u32
    };
    let mut order: Vec<u32> = runs.into_iter().flat_map(run).collect();
    let windows = order.chunks_mut(per_shard).flat_map(|shard| shard.chunks_mut(WINDOW));
    for (number, window) in (1..).zip(windows) {
        let mixed = Random::new(&[ORDER_SEED, split as u64, number]).permutation(window.len());
        let before = window.to_vec();
        window.iter_mut().zip(mixed).for_each(|(position, from)| *position = before[from as usize]);
    }
    order
}

/// Splits ascending positions into runs of at most [`RUN`] consecutive positions.
pub(super) fn runs(ascending: &[u32]) -> impl Iterator<Item = &[u32]> {
    ascending.chunk_by(|a, b| a + 1 == *b).flat_map(|run| run.chunks(RUN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_occurs_once_in_random_order_and_windows_have_whole_runs() {
        for (count, per_shard) in [(1, 1), (63, 7), (20_000, 5000), (20_001, 20_001)] {
            let order = shuffle_runs(0, count, per_shard);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count as u32));
            assert_eq!(shuffle_runs(0, count, per_shard), order, "the same in every copy");
            if count < 1000 {
                continue;
            }
            assert_ne!(shuffle_runs(1, count, per_shard), order);
            // Neighbours in the copy are rarely close in the split.
            let near = order.windows(2).filter(|two| two[0].abs_diff(two[1]) < RUN as u32).count();
            assert!(near < count / 4, "{near} of {count}");
            let mut window = order[..WINDOW].to_vec();
            window.sort_unstable();
            let pieces: Vec<_> = runs(&window).collect();
            assert!(pieces.len() <= WINDOW / RUN + 1, "{} pieces", pieces.len());
            assert_eq!(pieces.concat(), window);
        }
    }
}
