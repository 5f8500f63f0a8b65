//! Softmax cross-entropy with label smoothing and weights of classes, by log-sum-exp in double precision.

#![allow(clippy::disallowed_methods)] // Ranks add up gradients of different pictures, so last bits may depend on the machine.

/// Loss and correct predictions of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Loss {
    /// Sum of the losses of all pictures.
    pub sum: f64,
    /// Number of pictures whose largest logit (the first of equal ones) is the label's.
    pub correct: u64,
}

/// Loss of `logits` `[pictures, classes]`. If `gradient` is `(values, scale)`, `values` receives the gradient of the logits, times
/// `scale`.
///
/// The target distribution is `1 - smoothing` on the label plus `smoothing / classes` everywhere, as in PyTorch. With `mixed`,
/// which is (second labels, lambda), the fraction lambda of the `1 - smoothing` is on the first label and the rest on the second
/// label, and a prediction is correct if it is the label with the larger part. `weights` has a factor for the terms of each class,
/// like `weight` of PyTorch's `cross_entropy`; `None` means 1. Labels must be below `classes`.
pub fn cross_entropy(
    logits: &[f32],
    labels: &[u32],
    mixed: Option<(&[u32], f32)>,
    classes: usize,
    smoothing: f32,
    weights: Option<&[f32]>,
    gradient: Option<(&mut [f32], f64)>,
) -> Loss {
    let mut loss = Loss::default();
    let smoothing = f64::from(smoothing);
    let uniform = smoothing / classes as f64;
    let weight = |class: usize| weights.map_or(1.0, |weights| f64::from(weights[class]));
    let weight_sum = weights.map_or(classes as f64, |weights| weights.iter().map(|w| f64::from(*w)).sum());
    let (mut gradients, scale) = match gradient {
        Some((values, scale)) => (Some(values.chunks_exact_mut(classes)), scale),
        None => (None, 0.0),
    };
    for (picture, (row, &label)) in logits.chunks_exact(classes).zip(labels).enumerate() {
        let mut label = label as usize;
        let mut best = 0;
        for (class, v) in row.iter().enumerate() {
            if *v > row[best] {
                best = class;
            }
        }
        let max = f64::from(row[best]);
        let total: f64 = row.iter().map(|&v| (f64::from(v) - max).exp()).sum();
        let log_sum = max + total.ln();
        let sum_of_logits: f64 = row.iter().enumerate().map(|(class, &v)| weight(class) * f64::from(v)).sum();
        let (mut label_weight, mut weighted_logit) = (weight(label), weight(label) * f64::from(row[label]));
        // The label with the smaller part of the target, and its part.
        let mut second = None;
        if let Some((labels, lambda)) = mixed {
            let (mut other, mut share) = (labels[picture] as usize, 1.0 - f64::from(lambda));
            if share > 0.5 {
                std::mem::swap(&mut label, &mut other);
                share = f64::from(lambda);
            }
            let (own_part, other_part) = ((1.0 - share) * weight(label), share * weight(other));
            label_weight = own_part + other_part;
            weighted_logit = own_part * f64::from(row[label]) + other_part * f64::from(row[other]);
            second = Some((other, share));
        }
        let own_share = 1.0 - second.map_or(0.0, |(_, share)| share);
        loss.sum += (1.0 - smoothing) * (label_weight * log_sum - weighted_logit)
            + uniform * (weight_sum * log_sum - sum_of_logits);
        loss.correct += u64::from(best == label && !row[label].is_nan());
        // The sum of the target's values times the weights of their classes.
        let target_sum = weights.map_or(1.0, |_| (1.0 - smoothing) * label_weight + uniform * weight_sum);
        if let Some(d) = gradients.as_mut().and_then(Iterator::next) {
            for (class, (d, &v)) in d.iter_mut().zip(row).enumerate() {
                let mut target = uniform + if class == label { (1.0 - smoothing) * own_share } else { 0.0 };
                if let Some((other, share)) = second
                    && class == other
                {
                    target += (1.0 - smoothing) * share;
                }
                *d = (scale * (target_sum * (f64::from(v) - log_sum).exp() - weight(class) * target)) as f32;
            }
        }
    }
    loss
}
