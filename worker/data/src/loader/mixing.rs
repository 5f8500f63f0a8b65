//! mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019), with the semantics of torchvision's `RandomMixUp` and
//! `RandomCutMix`.
//!
//! Each picture of an optimizer step is mixed with the previous picture of the step, and the first with the last:
//! torchvision's `batch.roll(1, 0)`, where the batch consists of the pictures of all ranks and micro-batches in the
//! step. The pictures of a rank's micro-batch are consecutive in this batch, so a rank opens one more picture for each
//! micro-batch: the picture before its first picture. The parameters are drawn once per step, from (seed, epoch, the
//! step's first position in the order of the epoch).

use super::Batch;
use crate::random::Random;
use lockstep_protocol::spec::TrainSpec;
use std::ops::Range;

/// Purpose number of the random stream (see `shard.rs` and `transform/params.rs` for others).
const MIXING: u64 = 9;

/// The sum of both weights in fixed-point arithmetic on bytes.
const ONE: u32 = 1 << 16;

/// For mixup and for cutmix, the parameter alpha of lambda's distribution Beta(alpha, alpha). 0 disables mixup or cutmix.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Mixing {
    pub mixup: f64,
    pub cutmix: f64,
}

impl From<&TrainSpec> for Mixing {
    fn from(spec: &TrainSpec) -> Self {
        Self { mixup: spec.mixup.into(), cutmix: spec.cutmix.into() }
    }
}

/// How the pictures of one step are mixed.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// The weight of the picture itself, from 0 to 1. With cutmix, the fraction of its remaining pixels.
    pub lambda: f32,
    /// With cutmix, the rows and columns that come from the other picture. `None` with mixup.
    pub cut: Option<[Range<usize>; 2]>,
}

/// How an engine mixes the pictures of a batch in its memory: each picture with the previous picture of the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct MixParams {
    pub mix: Mix,
    /// The position in the split of the picture with which the first picture is mixed, as in `indices` of the batch.
    pub previous_index: u64,
    /// The augmentation parameters of this picture, as in `augment_params` of the batch.
    pub previous_params: u32,
}

impl Mixing {
    pub fn is_on(self) -> bool {
        self.mixup > 0.0 || self.cutmix > 0.0
    }

    /// Draws the parameters for the step of `epoch` (from 0) that begins at position `first` of its order. `None` if
    /// both are disabled.
    pub(super) fn draw(self, seed: u64, epoch: u32, first: usize, side: usize) -> Option<Mix> {
        if !self.is_on() {
            return None;
        }
        let mut random = Random::new(&[seed, MIXING, u64::from(epoch), first as u64]);
        let coin = random.below(2) == 1;
        let centre = [(); 2].map(|()| random.below(side as u64) as usize);
        let is_cutmix = self.mixup <= 0.0 || (coin && self.cutmix > 0.0);
        Some(if is_cutmix {
            Mix::cutmix(draw_beta(&mut random, self.cutmix), centre, side)
        } else {
            Mix { lambda: draw_beta(&mut random, self.mixup) as f32, cut: None }
        })
    }
}

impl Mix {
    /// A square with the fraction `1 - lambda` of the area of a picture of `side` x `side` pixels, around `centre` (row, column). It
    /// is clipped at the picture's borders: lambda becomes the fraction of pixels that remain.
    pub fn cutmix(lambda: f64, centre: [usize; 2], side: usize) -> Self {
        let half = (0.5 * (1.0 - lambda).sqrt() * side as f64) as usize;
        let [rows, columns] = centre.map(|at| at.saturating_sub(half)..(at + half).min(side));
        let area = (rows.len() * columns.len()) as f64;
        let lambda = (1.0 - area / (side * side) as f64) as f32;
        Self { lambda, cut: Some([rows, columns]) }
    }

    /// Mixes each picture of `batch` (NHWC, `side` pixels) with the previous picture. The first picture is mixed with
    /// the last picture, which is then removed from the batch. Pictures in the engine's memory are left to the engine.
    pub fn apply(&self, mut batch: Batch, side: usize, channels: usize) -> Batch {
        let (lambda, rest) = (self.lambda, 1.0 - self.lambda);
        self.mix(&mut batch.images, side, channels, |own, other| own * lambda + other * rest);
        let weight = (f64::from(lambda) * f64::from(ONE)).round() as u32;
        self.mix(&mut batch.bytes, side, channels, |own, other| {
            ((u32::from(own) * weight + u32::from(other) * (ONE - weight) + ONE / 2) / ONE) as u8
        });
        let previous_index = batch.indices.pop().unwrap_or_default();
        if let Some(previous_params) = batch.augment_params.pop() {
            batch.mix_params = Some(MixParams { mix: self.clone(), previous_index, previous_params });
        }
        if let Some(before) = batch.labels.pop() {
            let others = std::iter::once(before).chain(batch.labels.iter().copied());
            batch.mixed_labels = others.take(batch.labels.len()).collect();
        }
        batch.lambda = lambda;
        batch
    }

    fn mix<T: Copy>(
        &self,
        values: &mut Vec<T>,
        side: usize,
        channels: usize,
        blend: impl Fn(T, T) -> T + Copy,
    ) {
        let (row, size) = (side * channels, side * side * channels);
        let Some(count) = (values.len() / size).checked_sub(1) else { return };
        // From the last to the first, so that each picture is mixed with the unmixed previous picture.
        for index in (0..count).rev() {
            let (own, other) = match index {
                0 => {
                    let (own, others) = values.split_at_mut(size);
                    (own, &others[others.len() - size..])
                }
                _ => {
                    let (others, own) = values.split_at_mut(index * size);
                    (&mut own[..size], &others[others.len() - size..])
                }
            };
            match &self.cut {
                None => own.iter_mut().zip(other).for_each(|(own, other)| *own = blend(*own, *other)),
                Some([rows, columns]) => {
                    for y in rows.clone() {
                        let range = y * row + columns.start * channels..y * row + columns.end * channels;
                        own[range.clone()].copy_from_slice(&other[range]);
                    }
                }
            }
        }
        values.truncate(count * size);
    }
}

/// Draws from Beta(alpha, alpha), as a / (a + b) for two draws a and b from Gamma(alpha).
fn draw_beta(random: &mut Random, alpha: f64) -> f64 {
    let [a, b] = [(); 2].map(|()| draw_ln_gamma(random, alpha));
    1.0 / (1.0 + libm::exp(b - a))
}

/// Draws the logarithm of a Gamma(alpha, 1) variate (Marsaglia, Tsang 2000). For alpha below 1, the variate is obtained
/// from Gamma(alpha + 1) and a power of a uniform variate. The logarithm is finite even if the variate would round to
/// 0.
fn draw_ln_gamma(random: &mut Random, alpha: f64) -> f64 {
    let positive = |random: &mut Random| 1.0 - random.uniform(0.0, 1.0);
    let (shape, boost) =
        if alpha < 1.0 { (alpha + 1.0, libm::log(positive(random)) / alpha) } else { (alpha, 0.0) };
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        // Box, Muller 1958.
        let radius = (-2.0 * libm::log(positive(random))).sqrt();
        let x = radius * libm::cos(std::f64::consts::TAU * random.uniform(0.0, 1.0));
        let (v, u) = ((1.0 + c * x).powi(3), positive(random));
        if v > 0.0 && libm::log(u) < 0.5 * x * x + d * (1.0 - v + libm::log(v)) {
            return libm::log(d) + libm::log(v) + boost;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(mixing: Mixing) -> Vec<Mix> {
        (0..20_000).map(|first| mixing.draw(7, 3, first, 20).expect("mixing is on")).collect()
    }

    #[test]
    fn lambda_has_the_moments_of_its_beta_distribution() {
        for alpha in [0.05, 0.2, 1.0, 4.0, 100.0] {
            let all = draws(Mixing { mixup: alpha, cutmix: 0.0 });
            let lambdas: Vec<f64> = all.iter().map(|mix| f64::from(mix.lambda)).collect();
            assert!(lambdas.iter().all(|l| (0.0..=1.0).contains(l)), "alpha {alpha}");
            let mean = lambdas.iter().sum::<f64>() / lambdas.len() as f64;
            let variance = lambdas.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / lambdas.len() as f64;
            let wanted = 0.25 / (2.0 * alpha + 1.0);
            assert!((mean - 0.5).abs() < 5.0 * (wanted / 20_000.0).sqrt(), "alpha {alpha}: mean {mean}");
            assert!(
                (variance / wanted - 1.0).abs() < 0.05,
                "alpha {alpha}: variance {variance}, not {wanted}"
            );
        }
    }

    #[test]
    fn the_smallest_alpha_gives_lambda_near_0_or_1() {
        let mixing = Mixing { mixup: f64::from(f32::from_bits(1)), cutmix: 0.0 };
        assert!(draws(mixing).iter().all(|mix| mix.lambda == 0.0 || mix.lambda == 1.0));
    }

    #[test]
    fn a_fair_coin_chooses_between_mixup_and_cutmix() {
        let all = draws(Mixing { mixup: 0.2, cutmix: 1.0 });
        let cuts = all.iter().filter(|mix| mix.cut.is_some()).count();
        assert!((9_650..=10_350).contains(&cuts), "{cuts} of 20,000 are cut");
        assert!(draws(Mixing { mixup: 0.0, cutmix: 1.0 }).iter().all(|mix| mix.cut.is_some()));
        assert!(draws(Mixing { mixup: 1.0, cutmix: 0.0 }).iter().all(|mix| mix.cut.is_none()));
        assert!(Mixing::default().draw(7, 3, 0, 20).is_none());
    }

    #[test]
    fn lambda_of_cutmix_is_the_fraction_of_remaining_pixels() {
        for mix in draws(Mixing { mixup: 0.0, cutmix: 1.0 }) {
            let bytes: Vec<u8> = [[1u8; 400], [0u8; 400]].concat();
            let batch = Batch { bytes, labels: vec![3, 5], indices: vec![0, 1], ..Batch::default() };
            let mixed = mix.apply(batch, 20, 1);
            let stay = mixed.bytes.iter().filter(|v| **v == 1).count();
            assert_eq!(mix.lambda, (stay as f64 / 400.0) as f32, "{mix:?}");
            assert_eq!((mixed.labels, mixed.mixed_labels, mixed.indices), (vec![3], vec![5], vec![0]));
        }
    }

    #[test]
    fn mixed_bytes_are_rounded_to_the_nearest() {
        for lambda in [0.0f32, 0.1, 0.37, 0.5, 0.999, 1.0] {
            let pairs: Vec<[u8; 2]> = (0..=255u8).flat_map(|a| [0, 1, 100, 255].map(|b| [a, b])).collect();
            let bytes = [0, 1].iter().flat_map(|i| pairs.iter().map(|pair| pair[*i])).collect();
            let batch = Batch { bytes, labels: vec![0, 1], indices: vec![0, 1], ..Batch::default() };
            let mixed = Mix { lambda, cut: None }.apply(batch, 32, 1);
            for ([a, b], found) in pairs.iter().zip(mixed.bytes) {
                let wanted = f64::from(*a) * f64::from(lambda) + f64::from(*b) * f64::from(1.0 - lambda);
                assert!((f64::from(found) - wanted).abs() < 0.51, "{lambda} {a} {b}: {found}, not {wanted}");
            }
        }
    }
}
