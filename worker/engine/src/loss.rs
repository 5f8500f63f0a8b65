//! Settings of the loss, and which classes a step samples: Partial FC (An et al. 2022, "Killing Two Birds with One Stone").
//!
//! A rank's random classes depend only on the seed, the number of updates before the step, and the rank's first class, so a resumed run
//! draws the same classes. `worker/kernels/sample.cu` computes the same numbers.

use crate::net::Network;
use lockstep_data::loader::Batch;
use lockstep_kernels::draws::{GOLDEN, mix};
use lockstep_protocol::spec::{JobSpec, LossKind, LossSpec};
use std::sync::Arc;

/// Settings of the loss, which stay the same during a run.
#[derive(Debug, Clone, PartialEq)]
pub struct LossConfig {
    pub label_smoothing: f32,
    /// See [`lockstep_protocol::spec::LossSpec::sample_share`].
    pub sample_share: f64,
    /// Seed of the classes that are drawn.
    pub seed: u64,
    /// The margin of the label's logit. `None` if logits are the last layer's output.
    pub margin: Option<Margin>,
    /// The weight of each class in the training loss; `None` if all weights are 1. Not supported with sampled or split
    /// classes, or with a margin. A job's weights are computed from its dataset.
    pub class_weights: Option<Arc<[f32]>>,
}

/// A loss whose logits are scaled cosines, with a margin on the label's logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Margin {
    pub(crate) kind: LossKind,
    pub(crate) scale: f32,
    /// For ArcFace an angle in radians, for CosFace a difference of cosines.
    pub(crate) margin: f32,
}

impl Margin {
    /// The margin of a job, if it has one.
    pub fn of(loss: &LossSpec) -> Option<Self> {
        let LossSpec { kind, scale, .. } = *loss;
        (kind != LossKind::Softmax).then(|| Self { kind, scale, margin: loss.margin() })
    }

    /// The margin in the form in which engines compute it.
    pub(crate) fn terms(&self) -> MarginTerms {
        let margin = f64::from(self.margin);
        let (sin, cos) = margin.sin_cos();
        match self.kind {
            // Below this cosine, the angle plus the margin exceeds pi, where the cosine increases again.
            LossKind::ArcFace => MarginTerms { limit: -cos, cos, sin, shift: sin * margin },
            LossKind::CosFace | LossKind::Softmax => {
                MarginTerms { limit: f64::INFINITY, cos: 1.0, sin: 0.0, shift: margin }
            }
        }
    }
}

/// How the cosine of the label's class changes. A cosine above `limit` becomes the cosine of its angle plus the margin, whose sine and
/// cosine are `sin` and `cos`. Any other cosine is reduced by `shift`. CosFace uses only `shift`: its `limit` is never exceeded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MarginTerms {
    pub(crate) limit: f64,
    pub(crate) cos: f64,
    pub(crate) sin: f64,
    pub(crate) shift: f64,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self { label_smoothing: 0.0, sample_share: 1.0, seed: 0, margin: None, class_weights: None }
    }
}

impl From<&JobSpec> for LossConfig {
    fn from(spec: &JobSpec) -> Self {
        let JobSpec { train, loss, .. } = spec;
        let (label_smoothing, sample_share) = (train.label_smoothing, loss.sample_share);
        let (seed, margin) = (train.seed, Margin::of(loss));
        Self { label_smoothing, sample_share, seed, margin, class_weights: None }
    }
}

impl LossConfig {
    /// Whether a step samples classes.
    pub(crate) fn samples_classes(&self) -> bool {
        self.sample_share < 1.0
    }

    /// The divisor of a batch's summed loss for the mean as PyTorch defines it: the sum of the weights of the labels.
    /// Without weights, or if pictures are mixed, it is the number of pictures.
    pub(crate) fn divisor(&self, batch: &Batch) -> f64 {
        match &self.class_weights {
            Some(weights) if batch.mixed_labels.is_empty() => batch
                .labels
                .iter()
                .filter_map(|label| weights.get(*label as usize))
                .map(|w| f64::from(*w))
                .sum(),
            _ => batch.labels.len() as f64,
        }
    }

    /// Checks a rank's part of a network.
    ///
    /// # Errors
    /// The loss needs whole rows of the last layer's weights, but the part has only some values of each row.
    pub fn check_part(&self, part: &Network) -> Result<(), String> {
        let is_plain = !self.samples_classes() && self.margin.is_none();
        if is_plain || !part.is_last_stage() || !part.head().is_empty() {
            return Ok(());
        }
        let key = if self.samples_classes() { "sample_share" } else { "kind" };
        Err(format!(
            "loss.{key}: the last layer is split over its inputs. Split it over its classes (split = \"out\"), or not at all"
        ))
    }

    /// How many of a rank's `classes` are drawn at random: at least one.
    pub(crate) fn drawn_count(&self, classes: usize) -> usize {
        ((self.sample_share * classes as f64).round() as usize).clamp(1, classes)
    }
}

/// Rounds of the Feistel network. With 8 rounds, pairs of few classes are not drawn equally often.
pub(crate) const ROUNDS: usize = 10;

/// A random permutation of a rank's classes, of which a step uses the first ones. It is a Feistel network over the next
/// power of four, applied repeatedly until the result is a class ("cycle walking", Black and Rogaway 2002). So the class at
/// any position, and the position of any class, can be computed directly.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    classes: u32,
    /// Number of bits of each half of a permuted number.
    half_bits: u32,
    keys: [u32; ROUNDS],
}

impl Order {
    /// The order of the `classes` classes from class `first` on, in the step after `updates` updates.
    pub(crate) fn new(seed: u64, updates: u64, first: usize, classes: usize) -> Self {
        let classes = classes as u32;
        let bits = u32::BITS - (classes.max(2) - 1).leading_zeros();
        let key = mix(mix(mix(seed.wrapping_add(GOLDEN)) ^ updates).wrapping_add(GOLDEN) ^ first as u64);
        let of_round =
            |round: usize| (mix(key.wrapping_add(GOLDEN.wrapping_mul(round as u64 + 1))) >> 32) as u32;
        Self { classes, half_bits: bits.div_ceil(2), keys: std::array::from_fn(of_round) }
    }

    /// The round function: the 32-bit hash `lowbias32` (Wellons 2018) of a half plus a round's key.
    fn scramble(&self, half: u32, key: u32) -> u32 {
        let mut h = half.wrapping_add(key);
        h = (h ^ (h >> 16)).wrapping_mul(0x7FEB_352D);
        h = (h ^ (h >> 15)).wrapping_mul(0x846C_A68B);
        (h ^ (h >> 16)) & self.mask()
    }

    fn mask(&self) -> u32 {
        (1 << self.half_bits) - 1
    }

    /// The class at position `index`, relative to the rank's first class.
    pub(crate) fn class(&self, index: u32) -> u32 {
        let mut value = index;
        loop {
            let (mut left, mut right) = (value >> self.half_bits, value & self.mask());
            for key in self.keys {
                (left, right) = (right, left ^ self.scramble(right, key));
            }
            value = left << self.half_bits | right;
            if value < self.classes {
                return value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_a_permutation() {
        for classes in [1, 2, 3, 4, 5, 16, 17, 1000, 4097] {
            let order = Order::new(7, 3, 40, classes);
            let mut all: Vec<u32> = (0..classes as u32).map(|index| order.class(index)).collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..classes as u32), "{classes}");
        }
    }

    /// Classes, and pairs of classes, are drawn equally often. Other seeds, steps and ranks draw other classes.
    #[test]
    fn classes_are_drawn_equally_often() {
        const STEPS: usize = 20_000;
        for (classes, drawn) in [(5, 2), (40, 4), (300, 30)] {
            let mut counts = vec![0usize; classes];
            let mut pairs = 0usize;
            for step in 0..STEPS {
                let order = Order::new(1, step as u64, 0, classes);
                let sample: Vec<u32> = (0..drawn as u32).map(|index| order.class(index)).collect();
                sample.iter().for_each(|class| counts[*class as usize] += 1);
                pairs += usize::from(sample.contains(&0) && sample.contains(&1));
            }
            // Five standard deviations of a binomial count.
            let near = |count: usize, share: f64| {
                let expected = STEPS as f64 * share;
                (count as f64 - expected).abs() < 5.0 * (expected * (1.0 - share)).sqrt()
            };
            let share = drawn as f64 / classes as f64;
            assert!(counts.iter().all(|count| near(*count, share)), "{classes}: {counts:?}");
            let both = share * (drawn - 1) as f64 / (classes - 1) as f64;
            assert!(near(pairs, both), "{classes}: {pairs} instead of {}", STEPS as f64 * both);
        }
        let sample = |seed, step, first| {
            let order = Order::new(seed, step, first, 1000);
            (0..100).map(|index| order.class(index)).collect::<Vec<_>>()
        };
        let one = sample(1, 0, 0);
        assert!([sample(2, 0, 0), sample(1, 1, 0), sample(1, 0, 1000)].iter().all(|other| *other != one));
    }

    #[test]
    fn at_least_one_class_is_drawn_and_at_most_all() {
        let drawn =
            |sample_share, classes| LossConfig { sample_share, ..LossConfig::default() }.drawn_count(classes);
        for (share, classes, expected) in
            [(0.1, 2_000_000, 200_000), (0.1, 10, 1), (0.001, 10, 1), (0.999, 10, 10), (1.0, 7, 7)]
        {
            assert_eq!(drawn(share, classes), expected, "{share} of {classes}");
        }
    }
}
