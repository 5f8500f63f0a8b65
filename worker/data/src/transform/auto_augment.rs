//! Automatic augmentation policies, with torchvision's tables.

use super::op::Op;
use crate::random::Random;

/// The highest strength bin of an operation. Bins start at 0.
const LAST_BIN: f64 = 30.0;
/// Number of operations in both policies.
const OPERATIONS: u64 = 14;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Policy {
    /// One operation with wide ranges (Müller, Hutter 2021): torchvision's `TrivialAugmentWide()`.
    TrivialAugmentWide,
    /// Two operations of strength 9 (Cubuk et al. 2019): torchvision's `RandAugment(2, 9)`.
    RandAugment,
}

/// The maximum strength of each operation.
struct Ranges {
    shear: f64,
    /// In pixels.
    translate: f64,
    /// In degrees.
    rotate: f64,
    /// Brightness, colour, contrast and sharpness: the maximum difference from 1.
    enhance: f64,
    /// Number of bits removed.
    posterize: f64,
}

impl Policy {
    /// Draws the operations for a picture of `side` x `side` pixels.
    pub(super) fn draw(self, random: &mut Random, side: usize) -> Vec<Op> {
        match self {
            Policy::TrivialAugmentWide => {
                let ranges =
                    Ranges { shear: 0.99, translate: 32.0, rotate: 135.0, enhance: 0.99, posterize: 6.0 };
                let operation = random.below(OPERATIONS);
                let strength = random.below(LAST_BIN as u64 + 1) as f64 / LAST_BIN;
                vec![ranges.operation(operation, strength, random.below(2) == 1)]
            }
            Policy::RandAugment => {
                let ranges = Ranges {
                    shear: 0.3,
                    translate: 150.0 / 331.0 * side as f64,
                    rotate: 30.0,
                    enhance: 0.9,
                    posterize: 4.0,
                };
                let mut draw_one = || {
                    let operation = random.below(OPERATIONS);
                    ranges.operation(operation, 9.0 / LAST_BIN, random.below(2) == 1)
                };
                vec![draw_one(), draw_one()]
            }
        }
    }
}

impl Ranges {
    /// The operation with this index, in the order of torchvision's table. `strength` is between 0 and 1.
    fn operation(&self, index: u64, strength: f64, is_negative: bool) -> Op {
        let signed = |limit: f64| if is_negative { -limit * strength } else { limit * strength };
        match index {
            0 => Op::Identity,
            1 => Op::ShearX(signed(self.shear)),
            2 => Op::ShearY(signed(self.shear)),
            3 => Op::TranslateX(signed(self.translate) as i32),
            4 => Op::TranslateY(signed(self.translate) as i32),
            5 => Op::Rotate(signed(self.rotate)),
            6 => Op::Brightness(1.0 + signed(self.enhance)),
            7 => Op::Saturation(1.0 + signed(self.enhance)),
            8 => Op::Contrast(1.0 + signed(self.enhance)),
            9 => Op::Sharpness(1.0 + signed(self.enhance)),
            10 => Op::Posterize(8 - (self.posterize * strength).round_ties_even() as u32),
            11 => Op::Solarize(255.0 * (1.0 - strength)),
            12 => Op::AutoContrast,
            _ => Op::Equalize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn trivial_augment_matches_torchvision_s_distribution() {
        let (mut counts, mut limit) = (BTreeMap::new(), BTreeMap::new());
        for picture in 0..14_000 {
            let ops = Policy::TrivialAugmentWide.draw(&mut Random::new(&[picture]), 224);
            assert_eq!(ops.len(), 1);
            let (name, strength) = named(&ops[0]);
            *counts.entry(name.clone()).or_insert(0) += 1;
            let largest = limit.entry(name).or_insert(0.0f64);
            *largest = largest.max(strength.abs());
        }
        assert!(counts.len() == 14 && counts.values().all(|n| (850..1150).contains(n)), "{counts:?}");
        for (name, expected) in [
            ("ShearX", 0.99),
            ("TranslateY", 32.0),
            ("Rotate", 135.0),
            ("Contrast", 1.99),
            ("Solarize", 255.0),
        ] {
            assert!((limit[name] - expected).abs() < 1e-9, "{name} up to {}", limit[name]);
        }
    }

    #[test]
    fn rand_augment_draws_two_operations_of_equal_strength() {
        let mut found = BTreeMap::new();
        for picture in 0..2000 {
            let ops = Policy::RandAugment.draw(&mut Random::new(&[picture]), 224);
            assert_eq!(ops.len(), 2);
            for op in &ops {
                let (name, strength) = named(op);
                found.entry(name).or_insert_with(Vec::new).push(strength);
            }
        }
        assert_eq!(found.len(), 14);
        // The entry `magnitudes[9]` of torchvision's 31.
        for (name, expected) in [
            ("ShearY", [-0.09, 0.09]),
            ("TranslateX", [-30.0, 30.0]),
            ("Rotate", [-9.0, 9.0]),
            ("Sharpness", [0.73, 1.27]),
            ("Posterize", [7.0, 7.0]),
            ("Solarize", [178.5, 178.5]),
        ] {
            let near = |v: &f64| expected.iter().any(|e| (v - e).abs() < 1e-9);
            assert!(found[name].iter().all(near), "{name}: {:?}", &found[name][..4]);
            assert!(expected.iter().all(|e| found[name].iter().any(|v| (v - e).abs() < 1e-9)), "{name}");
        }
    }

    /// The name of an operation, and its strength: 0 if it has none.
    fn named(op: &Op) -> (String, f64) {
        let text = format!("{op:?}");
        let (name, strength) = text.trim_end_matches(')').split_once('(').unwrap_or((text.as_str(), "0"));
        (name.to_owned(), strength.parse().unwrap())
    }
}
