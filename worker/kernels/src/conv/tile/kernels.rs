//! The loops of the tiles, generic over the vector type `S` and the arithmetic `A` of the number format. Everything is inlined into
//! functions that enable the instructions of the vector type.
//!
//! # Safety
//! The pointers of an argument must be valid for everything that the argument describes. The functions access nothing else.

use super::{Arithmetic, Outer, Pack, Product, Vector};

/// Adds the products of one unit of input channels of all pictures. This is a function instead of a closure, because a closure might
/// not be inlined into the function that enables the instructions; then every vector operation would be a call.
#[inline(always)]
unsafe fn step<S: Vector, A: Arithmetic<S>, const P: usize, const V: usize, const PART: bool>(
    t: &Product<'_>,
    sum: &mut [[S; V]; P],
    x: *const f32,
    w: *const f32,
) {
    let mut weights = [S::zero(); V];
    for (v, weights) in weights.iter_mut().enumerate() {
        *weights = if PART { S::load_first(w, t.lanes) } else { S::load(w.add(v * t.w_block)) };
    }
    for (p, sum) in sum.iter_mut().enumerate() {
        let x = S::splat(x.add(p * 16));
        for (sum, weights) in sum.iter_mut().zip(weights) {
            *sum = A::multiply_add(x, weights, *sum);
        }
    }
}

/// Computes `P` pictures and `V` blocks of output channels. `PART`: the only block is not full.
#[inline(always)]
pub(super) unsafe fn product<
    S: Vector,
    A: Arithmetic<S>,
    const P: usize,
    const V: usize,
    const PART: bool,
>(
    t: &Product<'_>,
) {
    let lanes = if PART { t.lanes } else { 16 };
    // The cache lines of the output are far apart and not in the cache: prefetch them during the sums.
    for p in 0..P {
        for v in 0..V {
            S::prefetch(t.prefetch.add(p * t.prefetch_picture + v * 16));
        }
    }
    let mut sum = [[S::zero(); V]; P];
    for tap in t.taps {
        let mut x = t.x.add(tap.position as usize * t.units_per_position * P);
        let mut w = t.w.add(tap.offset as usize * t.units * lanes);
        for _ in 0..t.units / 16 {
            let end = x.add(16);
            while x < end {
                step::<S, A, P, V, PART>(t, &mut sum, x, w);
                step::<S, A, P, V, PART>(t, &mut sum, x.add(1), w.add(lanes));
                step::<S, A, P, V, PART>(t, &mut sum, x.add(2), w.add(2 * lanes));
                step::<S, A, P, V, PART>(t, &mut sum, x.add(3), w.add(3 * lanes));
                x = x.add(4);
                w = w.add(4 * lanes);
            }
            x = x.add((P - 1) * 16);
        }
        for _ in 0..t.units % 16 {
            step::<S, A, P, V, PART>(t, &mut sum, x, w);
            x = x.add(1);
            w = w.add(lanes);
        }
    }
    if !t.sums.is_null() {
        for v in 0..V {
            let to = t.sums.add(v * 48);
            let mut sums = BlockSums::begin(to, t.starts_sums, sum[0][v]);
            for sum in &sum {
                sums.add(sum[v]);
            }
            sums.store(to);
        }
    }
    for (p, sum) in sum.iter().enumerate() {
        let y = t.y.add(p * t.y_picture);
        for (v, sum) in sum.iter().enumerate() {
            if PART {
                sum.store_first(y, lanes);
            } else {
                sum.store(y.add(v * 16));
            }
        }
    }
}

/// The sums of a block of channels, see [`Product::sums`].
pub(super) struct BlockSums<S> {
    pivot: S,
    differences: S,
    squares: S,
}

impl<S: Vector> BlockSums<S> {
    /// The sums at `to`. `starts`: the sums are 0, and `first` becomes the pivot.
    #[inline(always)]
    pub(super) unsafe fn begin(to: *mut f32, starts: bool, first: S) -> Self {
        if starts {
            first.store(to);
            return Self { pivot: first, differences: S::zero(), squares: S::zero() };
        }
        Self { pivot: S::load(to), differences: S::load(to.add(16)), squares: S::load(to.add(32)) }
    }

    #[inline(always)]
    pub(super) unsafe fn add(&mut self, output: S) {
        let difference = output.sub(self.pivot);
        self.differences = self.differences.add(difference);
        self.squares = difference.mul_add(difference, self.squares);
    }

    #[inline(always)]
    pub(super) unsafe fn store(self, to: *mut f32) {
        self.differences.store(to.add(16));
        self.squares.store(to.add(32));
    }
}

/// Computes `I` input channels and `V` blocks of output channels.
#[inline(always)]
pub(super) unsafe fn outer<S: Vector, A: Arithmetic<S>, const I: usize, const V: usize>(t: &Outer<'_>) {
    let mut sum = [[S::zero(); V]; I];
    for run in t.runs {
        let mut x = t.x.add(run.x as usize * 16);
        let mut dy = t.dy.add(run.dy as usize * 16);
        for _ in 0..run.len {
            let mut gradients = [S::zero(); V];
            for (v, gradients) in gradients.iter_mut().enumerate() {
                *gradients = S::load(dy.add(v * t.dy_block));
            }
            for (i, sum) in sum.iter_mut().enumerate() {
                let x = S::splat(x.add(i));
                for (sum, gradients) in sum.iter_mut().zip(gradients) {
                    *sum = A::multiply_add(x, gradients, *sum);
                }
            }
            x = x.add(16);
            dy = dy.add(16);
        }
    }
    for v in 0..V {
        for (i, sum) in sum.iter().enumerate().take(t.channels) {
            add_to_weights(t, v, i, sum[v]);
        }
    }
}

/// Stores the sum of an input channel and a block of output channels, or adds it.
#[inline(always)]
pub(super) unsafe fn add_to_weights<S: Vector>(t: &Outer<'_>, block: usize, channel: usize, sum: S) {
    let dw = t.dw.add(block * t.dw_block + channel * t.lanes);
    if t.lanes == 16 {
        let sum = if t.accumulate { sum.add(S::load(dw)) } else { sum };
        sum.store(dw);
    } else {
        let sum = if t.accumulate { sum.add(S::load_first(dw, t.lanes)) } else { sum };
        sum.store_first(dw, t.lanes);
    }
}

/// Packs units of consecutive channels of one picture.
#[inline(always)]
pub(super) unsafe fn pack_channels<S: Vector, A: Arithmetic<S>>(t: &Pack) {
    let (full, rest) = (t.channels / (16 * A::VALUES), t.channels % (16 * A::VALUES));
    for pixel in 0..t.pixels {
        let mut from = t.from.add(pixel * t.channels);
        let mut to = t.to.add(pixel * t.to_pixel);
        for _ in 0..full {
            let second = if A::VALUES == 1 { S::zero() } else { S::load(from.add(16)) };
            A::consecutive(S::load(from), second).store(to);
            from = from.add(16 * A::VALUES);
            to = to.add(t.to_block);
        }
        if rest > 16 {
            A::consecutive(S::load(from), S::load_first(from.add(16), rest - 16)).store(to);
        } else if rest > 0 {
            A::consecutive(S::load_first(from, rest), S::zero()).store(to);
        }
    }
}

/// Packs units of the same channel of one or two pictures.
#[inline(always)]
pub(super) unsafe fn pack_pictures<S: Vector, A: Arithmetic<S>>(t: &Pack) {
    let (full, rest) = (t.channels / 16, t.channels % 16);
    for pixel in 0..t.pixels {
        let from = t.from.add(pixel * t.channels);
        let second = t.second_picture.map(|second| second.add(pixel * t.channels));
        let to = t.to.add(pixel * t.to_pixel);
        for block in 0..full {
            let second = match second {
                Some(second) => S::load(second.add(block * 16)),
                None => S::zero(),
            };
            A::pairs(S::load(from.add(block * 16)), second).store(to.add(block * t.to_block));
        }
        if rest > 0 {
            let second = match second {
                Some(second) => S::load_first(second.add(full * 16), rest),
                None => S::zero(),
            };
            A::pairs(S::load_first(from.add(full * 16), rest), second).store(to.add(full * t.to_block));
        }
    }
}

/// Packs rows of `lanes` weights each. A unit has the same lane of one or two rows; the second value of an incomplete unit is 0.
#[inline(always)]
pub(super) unsafe fn pack_rows<S: Vector, A: Arithmetic<S>>(from: &[f32], lanes: usize, to: &mut [f32]) {
    let rows = from.len() / lanes;
    for unit in 0..rows.div_ceil(A::VALUES) {
        let row = unit * A::VALUES;
        let (from, to) = (from.as_ptr().add(row * lanes), to.as_mut_ptr().add(unit * lanes));
        let has_second = A::VALUES == 2 && row + 1 < rows;
        if lanes == 16 {
            let second = if has_second { S::load(from.add(16)) } else { S::zero() };
            A::pairs(S::load(from), second).store(to);
        } else {
            let second = if has_second { S::load_first(from.add(lanes), lanes) } else { S::zero() };
            A::pairs(S::load_first(from, lanes), second).store_first(to, lanes);
        }
    }
}
