//! Random numbers that depend only on their seeds: equal on every rank and machine, and in every release.

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A separate stream for each list of `keys`, such as (seed, epoch, picture).
    pub fn new(keys: &[u64]) -> Self {
        // "lockstep" in ASCII.
        let mut state = Self(0x6c6f_636b_7374_6570);
        for key in keys {
            state.0 ^= *key;
            state.0 = state.next_u64();
        }
        state
    }

    /// 64 random bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..bound`; 0 if `bound` is 0. Multiply-shift (Lemire 2019), whose bias of bound / 2^64 is
    /// negligible for training.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in `low..high` with 53 random bits; `low` if both are equal.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * ((self.next_u64() >> 11) as f64 / (1u64 << 53) as f64)
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
