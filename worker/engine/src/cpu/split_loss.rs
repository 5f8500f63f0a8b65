//! Cross-entropy of logits whose classes are split over the ranks of a model group. Ranks exchange only the largest
//! logit, the sum of exponentials and the labels' logits of each picture, never all logits.

use super::{exchange::Pictures, groups::Group, loss::Loss, sample::Sample};
use lockstep_comm::CommError;
use lockstep_data::loader::Batch;
use std::ops::Range;

/// The labels of all pictures of a model group.
#[derive(Debug, Default)]
pub(super) struct Labels {
    /// The label of each picture. For mixed pictures: the first label.
    pub(super) first: Vec<u32>,
    /// For mixed pictures: the second label of each picture, and the weight of the first label.
    mixed: Option<(Vec<u32>, f32)>,
}

/// Collective: gathers the number of pictures and the labels of each rank of the group.
pub(super) fn gather_labels(group: &Group, batch: &Batch) -> Result<(Pictures, Labels), CommError> {
    let to_bytes = |values: &[u32]| values.iter().flat_map(|label| label.to_le_bytes()).collect::<Vec<u8>>();
    // A message: the weight of the first labels, the number of pictures, the first labels and, if pictures are mixed, the second labels.
    let lambda = batch.mixed().map_or(0.0, |(_, lambda)| lambda);
    let mut message = lambda.to_le_bytes().to_vec();
    message.extend((batch.labels.len() as u32).to_le_bytes());
    message.extend(to_bytes(&batch.labels));
    message.extend(to_bytes(&batch.mixed_labels));
    let mut counts = Vec::new();
    let mut labels = Labels::default();
    for message in group.call(|comm| comm.all_gather_bytes(&message))? {
        let words: Vec<[u8; 4]> = message.as_chunks::<4>().0.to_vec();
        let count = u32::from_le_bytes(words[1]) as usize;
        let (first, second) = words[2..].split_at(count);
        counts.push(count);
        labels.first.extend(first.iter().map(|word| u32::from_le_bytes(*word)));
        if !second.is_empty() {
            let mixed = labels.mixed.get_or_insert_with(|| (Vec::new(), f32::from_le_bytes(words[0])));
            mixed.0.extend(second.iter().map(|word| u32::from_le_bytes(*word)));
        }
    }
    Ok((Pictures::of_group(counts, group.rank() as usize), labels))
}

/// The classes of a rank's logits: all classes of the rank, or a sample of them.
#[derive(Debug, Clone)]
pub(super) struct Classes<'a> {
    pub(super) own: Range<usize>,
    pub(super) sample: Option<&'a Sample>,
}

impl Classes<'_> {
    pub(super) fn len(&self) -> usize {
        self.sample.map_or(self.own.len(), |sample| sample.rows.len())
    }

    fn class(&self, position: usize) -> usize {
        self.own.start + self.sample.map_or(position, |sample| sample.rows[position] as usize)
    }

    /// The position of a class's logit, if this rank has it.
    pub(super) fn position(&self, class: usize) -> Option<usize> {
        let row = self.own.contains(&class).then(|| class - self.own.start)?;
        self.sample.map_or(Some(row), |sample| sample.position(row))
    }
}

/// Collective: for each picture of the group, the largest logit and its class. Of equal logits, the first class counts.
pub(super) fn largest_logits(
    group: &Group,
    logits: &[f32],
    classes: &Classes<'_>,
) -> Result<Vec<[f64; 2]>, CommError> {
    let own: Vec<f64> = logits
        .chunks_exact(classes.len())
        .flat_map(|row| {
            let mut best = 0;
            for (position, logit) in row.iter().enumerate() {
                if *logit > row[best] {
                    best = position;
                }
            }
            [f64::from(row[best]), classes.class(best) as f64]
        })
        .collect();
    let mut gathered = vec![0.0; own.len() * group.size() as usize];
    group.all_gather((&own).into(), (&mut gathered).into())?;
    let mut best: Vec<[f64; 2]> = own.as_chunks::<2>().0.to_vec();
    for (rank, of_rank) in gathered.chunks_exact(own.len().max(1)).enumerate() {
        for (best, of_rank) in best.iter_mut().zip(of_rank.as_chunks::<2>().0) {
            if rank == 0 || of_rank[0] > best[0] {
                *best = *of_rank;
            }
        }
    }
    Ok(best)
}

/// Collective: [`super::loss::cross_entropy`] of all `pictures` of the group. `logits` has a logit for each of this rank's `classes`.
/// `all_classes` is the number of classes of all ranks, which only `smoothing` uses. `best` is the result of
/// [`largest_logits`] for the logits without a margin. `gradient` receives the gradient of the logits of all
/// pictures, times `scale`. Returns the loss of this rank's own pictures.
pub(super) fn cross_entropy(
    group: &Group,
    logits: &[f32],
    (pictures, labels): (&Pictures, &Labels),
    (classes, all_classes): (&Classes<'_>, usize),
    best: &[[f64; 2]],
    smoothing: f32,
    (gradient, scale): (&mut [f32], f64),
) -> Result<Loss, CommError> {
    let rows = || logits.chunks_exact(classes.len());
    let logit_of =
        |row: &[f32], class: usize| classes.position(class).map_or(0.0, |position| f64::from(row[position]));
    let label = |picture: usize| labels.first[picture] as usize;
    let other = |picture: usize| labels.mixed.as_ref().map(|(others, _)| others[picture] as usize);
    let mut sums: Vec<f64> = rows()
        .enumerate()
        .flat_map(|(picture, row)| {
            let largest = best[picture][0];
            let exponentials: f64 = row.iter().map(|v| (f64::from(*v) - largest).exp()).sum();
            let logits: f64 = row.iter().map(|v| f64::from(*v)).sum();
            let other = other(picture).map_or(0.0, |other| logit_of(row, other));
            [exponentials, logits, logit_of(row, label(picture)), other]
        })
        .collect();
    group.all_reduce((&mut sums).into())?;

    let smoothing = f64::from(smoothing);
    let uniform = smoothing / all_classes as f64;
    let mut loss = Loss::default();
    for (picture, (row, gradient)) in rows().zip(gradient.chunks_exact_mut(classes.len())).enumerate() {
        let [largest, predicted] = best[picture];
        let [exponentials, sum_of_logits, label_logit, other_logit] = sums.as_chunks::<4>().0[picture];
        let log_sum = largest + exponentials.ln();
        // The weight of the first label in the target.
        let lambda = labels.mixed.as_ref().map_or(1.0, |(_, lambda)| f64::from(*lambda));
        let (label, other) = (label(picture), other(picture));
        if pictures.own_range().contains(&picture) {
            let target_logit = lambda * label_logit + (1.0 - lambda) * other_logit;
            loss.sum += (1.0 - smoothing) * (log_sum - target_logit)
                + uniform * (all_classes as f64 * log_sum - sum_of_logits);
            // The label with the larger weight.
            let (target, logit) = match other {
                Some(other) if 1.0 - lambda > 0.5 => (other, other_logit),
                _ => (label, label_logit),
            };
            loss.correct += u64::from(predicted == target as f64 && !logit.is_nan());
        }
        let (label, other) = (classes.position(label), other.and_then(|other| classes.position(other)));
        for (position, (gradient, logit)) in gradient.iter_mut().zip(row).enumerate() {
            let mut target = uniform;
            if label == Some(position) {
                target += (1.0 - smoothing) * lambda;
            }
            if other == Some(position) {
                target += (1.0 - smoothing) * (1.0 - lambda);
            }
            *gradient = (scale * ((f64::from(*logit) - log_sum).exp() - target)) as f32;
        }
    }
    Ok(loss)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::loss;
    use lockstep_comm::rendezvous::loopback::on_connected_ranks;
    use lockstep_kernels::synthetic::{labels, values};
    use std::time::Duration;

    #[test]
    fn split_classes_have_the_loss_of_all_classes() {
        let (classes, counts, bounds) = (7, [3, 0, 2], [0, 3, 5, 7]);
        let logits: Vec<f32> = values("split_loss", 5 * classes).iter().map(|v| v * 8.0).collect();
        let (own, others) = (labels("split_loss.own", 5, 7), labels("split_loss.others", 5, 7));
        for (mixed, lambda) in [(false, 0.0), (true, 0.7), (true, 0.2)] {
            let batch_of = |from: usize, to: usize| Batch {
                labels: own[from..to].to_vec(),
                mixed_labels: if mixed { others[from..to].to_vec() } else { Vec::new() },
                lambda,
                ..Batch::default()
            };
            let (all, mut expected) = (batch_of(0, 5), vec![0.0; 5 * classes]);
            let into = Some((&mut expected[..], 0.2));
            let whole = loss::cross_entropy(&logits, &all.labels, all.mixed(), classes, 0.1, None, into);
            let ranks = on_connected_ranks(3, Duration::from_secs(60), |_, ring| {
                let group = Group::of_all_ranks(ring);
                let rank = group.rank() as usize;
                let first: usize = counts[..rank].iter().sum();
                let batch = batch_of(first, first + counts[rank]);
                let (pictures, labels) = gather_labels(&group, &batch).unwrap();
                let range = bounds[rank]..bounds[rank + 1];
                let part: Vec<f32> =
                    logits.chunks(classes).flat_map(|row| row[range.clone()].to_vec()).collect();
                let mut gradient = vec![0.0; part.len()];
                let (inputs, into) = ((&pictures, &labels), (&mut gradient[..], 0.2));
                let own = Classes { own: range, sample: None };
                let best = largest_logits(&group, &part, &own).unwrap();
                let all_classes = (&own, classes);
                let loss = cross_entropy(&group, &part, inputs, all_classes, &best, 0.1, into).unwrap();
                (loss, gradient)
            });
            let sum: f64 = ranks.iter().map(|(loss, _)| loss.sum).sum();
            assert!((sum - whole.sum).abs() < 1e-12 * whole.sum, "{sum} {}", whole.sum);
            assert_eq!(ranks.iter().map(|(loss, _)| loss.correct).sum::<u64>(), whole.correct);
            for (rank, (_, gradient)) in ranks.iter().enumerate() {
                let width = bounds[rank + 1] - bounds[rank];
                for (row, expected) in gradient.chunks(width).zip(expected.chunks(classes)) {
                    assert!(row.iter().zip(&expected[bounds[rank]..]).all(|(a, b)| (a - b).abs() < 1e-7));
                }
            }
        }
    }
}
