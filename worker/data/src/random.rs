//! Random numbers that depend only on their seeds: equal on every rank and machine, and in every release.

use lockstep_protocol::random;

/// A generator whose seed is derived from several keys.
#[derive(Debug, Clone)]
pub struct Random(random::Random);

impl Random {
    /// A separate stream for each list of `keys`, such as (seed, epoch, picture).
    pub fn new(keys: &[u64]) -> Self {
        // "lockstep" in ASCII.
        let mut state = random::Random(0x6c6f_636b_7374_6570);
        for key in keys {
            state.0 ^= *key;
            state.0 = state.next_u64();
        }
        Self(state)
    }

    /// 64 random bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number in `0..bound`; 0 if `bound` is 0. Multiply-shift (Lemire 2019), whose bias of bound / 2^64 is
    /// negligible for training.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in `low..high` with 53 random bits; `low` if both are equal.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.0.unit()
    }

    /// `0..len` in random order (Fisher-Yates).
    pub(crate) fn permutation(&mut self, len: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..len as u32).collect();
        for i in (1..len).rev() {
            order.swap(i, self.below(i as u64 + 1) as usize);
        }
        order
    }
}
