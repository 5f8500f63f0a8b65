//! Compares the weights of ranks by checksums.

use super::{TrainError, Training};
use lockstep_engine::Engine;
use std::collections::BTreeSet;

/// Collective: compares the weights of ranks with the same part of the network by checksums. Returns a sentence without a
/// full stop if they differ.
pub(super) fn compare_replicas(
    training: &Training<'_>,
    engine: &dyn Engine,
) -> Result<Option<String>, TrainError> {
    let group = &training.group;
    if group.size() == 1 {
        return Ok(None);
    }
    let own = engine.checksum()?.map(u64::to_le_bytes);
    let mut all = vec![0u8; 16 * group.size() as usize];
    group.all_gather(own.as_flattened().into(), (&mut all).into())?;
    // Checksums of the weights that all ranks of a stage have, and of each rank's part of the split weights.
    let (common, split): (Vec<_>, Vec<_>) =
        all.as_chunks::<8>().0.as_chunks::<2>().0.iter().map(|[common, split]| (*common, *split)).unzip();
    let parallel = &training.spec.parallel;
    let (stage_ranks, model_ranks) = (parallel.ranks_of_stage() as usize, parallel.model as usize);
    let differing_parts =
        || describe_differing_ranks(&split, |rank| (rank / stage_ranks, rank % model_ranks));
    Ok(describe_differing_ranks(&common, |rank| (rank / stage_ranks, 0)).or_else(differing_parts))
}

/// Compares the checksums of all ranks. Names the ranks whose weights differ from the majority's, in a sentence
/// without a full stop. `None` if all ranks with the same part of the network (according to `part_of`) have the same
/// weights.
fn describe_differing_ranks(
    checksums: &[[u8; 8]],
    part_of: impl Fn(usize) -> (usize, usize),
) -> Option<String> {
    let (mut ranks, mut has_majority) = (Vec::new(), true);
    let parts: BTreeSet<_> = (0..checksums.len()).map(&part_of).collect();
    for part in parts {
        let of_part = || checksums.iter().enumerate().filter(|(rank, _)| part_of(*rank) == part);
        let count = |checksum: &[u8; 8]| of_part().filter(|(_, other)| *other == checksum).count();
        let most_frequent = of_part().map(|(_, checksum)| checksum).max_by_key(|checksum| count(checksum))?;
        let is_majority = 2 * count(most_frequent) > of_part().count();
        has_majority &= is_majority;
        let differs = |checksum: &[u8; 8]| !is_majority || checksum != most_frequent;
        ranks.extend(of_part().filter(|(_, checksum)| differs(checksum)).map(|(rank, _)| rank));
    }
    ranks.sort_unstable();
    let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match &ranks[..] {
        [] => None,
        [one] => Some(format!("the weights of rank {one} differ from those of the others")),
        [first @ .., last] => {
            let others = if has_majority { "those of the others" } else { "each other" };
            Some(format!("the weights of ranks {} and {last} differ from {others}", first.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_differ_are_named_or_all_ranks_without_a_majority() {
        for (checksums, named) in [
            (&[7, 7][..], None),
            (&[7, 8][..], Some("the weights of ranks 0 and 1 differ from each other")),
            (&[8, 7, 7][..], Some("the weights of rank 0 differ from those of the others")),
            (&[7, 7, 8, 9, 7][..], Some("the weights of ranks 2 and 3 differ from those of the others")),
            (&[7, 7, 8, 8][..], Some("the weights of ranks 0, 1, 2 and 3 differ from each other")),
        ] {
            let checksums: Vec<_> = checksums.iter().map(|checksum: &u64| checksum.to_le_bytes()).collect();
            assert_eq!(describe_differing_ranks(&checksums, |_| (0, 0)).as_deref(), named);
        }
        let of_two_parts: Vec<_> = [7, 8, 7, 8, 7, 9].map(u64::to_le_bytes).to_vec();
        let part = |rank| (0, rank % 2);
        assert_eq!(describe_differing_ranks(&of_two_parts[..4], part), None);
        let named = describe_differing_ranks(&of_two_parts, part);
        assert_eq!(named.as_deref(), Some("the weights of rank 5 differ from those of the others"));
        let of_two_stages = [7, 7, 7, 8, 8, 9].map(u64::to_le_bytes);
        let stage = |rank| (rank / 3, 0);
        assert_eq!(
            describe_differing_ranks(&[&of_two_stages[..3], &[of_two_stages[3]; 3]].concat(), stage),
            None
        );
        assert_eq!(describe_differing_ranks(&of_two_stages, stage), named);
    }
}
