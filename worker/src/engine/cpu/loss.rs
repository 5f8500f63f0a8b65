//! Softmax cross-entropy with label smoothing, by log-sum-exp in double precision.

/// What a batch's logits say.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Loss {
    /// Sum over the pictures.
    pub(super) sum: f64,
    /// Pictures whose largest logit (the first of equals) is their label's.
    pub(super) correct: u64,
}

/// Loss of `logits` `[labels, classes]`; with `gradient`, that of the logits times `scale` is written.
///
/// The target distribution is `1 - smoothing` on the label plus `smoothing / classes` everywhere,
/// as PyTorch's. Labels are below `classes`.
pub(super) fn cross_entropy(
    logits: &[f32],
    labels: &[u32],
    classes: usize,
    smoothing: f32,
    gradient: Option<(&mut [f32], f64)>,
) -> Loss {
    let mut loss = Loss::default();
    let smoothing = f64::from(smoothing);
    let even = smoothing / classes as f64;
    let (mut gradients, scale) = match gradient {
        Some((values, scale)) => (Some(values.chunks_exact_mut(classes)), scale),
        None => (None, 0.0),
    };
    for (row, &label) in logits.chunks_exact(classes).zip(labels) {
        let label = label as usize;
        let mut best = 0;
        for (c, v) in row.iter().enumerate() {
            if *v > row[best] {
                best = c;
            }
        }
        let max = f64::from(row[best]);
        let total: f64 = row.iter().map(|&v| (f64::from(v) - max).exp()).sum();
        let log_sum = max + total.ln();
        let sum_of_logits: f64 = row.iter().map(|&v| f64::from(v)).sum();
        loss.sum += (1.0 - smoothing) * (log_sum - f64::from(row[label]))
            + even * (classes as f64 * log_sum - sum_of_logits);
        loss.correct += u64::from(best == label && !row[label].is_nan());
        if let Some(d) = gradients.as_mut().and_then(Iterator::next) {
            for (c, (d, &v)) in d.iter_mut().zip(row).enumerate() {
                let target = even + if c == label { 1.0 - smoothing } else { 0.0 };
                *d = (scale * ((f64::from(v) - log_sum).exp() - target)) as f32;
            }
        }
    }
    loss
}
