//! Views of evaluation pictures (test-time augmentation).

use super::Batch;
use crate::transform::reflected_window;

/// The picture, or its mirror image, shifted by up to one pixel. Pixels beyond the border are mirrored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct View {
    /// Mirrored left to right.
    pub flip: bool,
    /// The first row and column of the view in the picture: -1, 0 or 1.
    pub shift: i8,
    /// Weight of the view's logits in the average over views.
    pub weight: f32,
}

impl View {
    /// The views if `evaluate.views` is `count`: 1, 2 or 6.
    pub fn of(count: u32) -> Vec<Self> {
        let shifts: &[(i8, f32)] = match count {
            6 => &[(0, 0.5), (-1, 0.25), (1, 0.25)],
            _ => &[(0, 1.0)],
        };
        let flips: &[bool] = if count == 1 { &[false] } else { &[false, true] };
        let of_shift = |&(shift, weight): &(i8, f32)| {
            flips.iter().map(move |&flip| Self { flip, shift, weight: weight / flips.len() as f32 })
        };
        shifts.iter().flat_map(of_shift).collect()
    }

    /// The batch of an evaluation in this view. Pictures have `side` x `side` pixels and `channels` channels.
    pub fn apply(&self, batch: &Batch, side: usize, channels: usize) -> Batch {
        let mut made = batch.clone();
        self.copy(&batch.images, side, channels, &mut made.images);
        self.copy(&batch.bytes, side, channels, &mut made.bytes);
        made.augment_params.fill(self.packed());
        made
    }

    fn copy<T: Copy>(&self, from: &[T], side: usize, channels: usize, to: &mut [T]) {
        let (size, shift) = (side * side * channels, [isize::from(self.shift); 2]);
        for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(size)) {
            reflected_window(from, [side, side, channels], shift, self.flip, to);
        }
    }

    /// For an engine that has the pictures: as `AugmentParams::packed` for a border of one pixel, with bit 31 set.
    fn packed(&self) -> u32 {
        let first = (1 + i32::from(self.shift)) as u32;
        first | first << 15 | u32::from(self.flip) << 30 | 1 << 31
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_views_match_pytorch_and_their_weights_sum_to_one() {
        // A picture of 3 x 3 pixels whose values are their positions.
        let batch = Batch { images: (0..9).map(|v| v as f32).collect(), ..Batch::default() };
        let view = |flip, shift| View { flip, shift, weight: 1.0 }.apply(&batch, 3, 1).images;
        assert_eq!(view(false, 0), batch.images);
        // `F.pad(x, (1,) * 4, "reflect")[0:3, 0:3]` and `[2:5, 2:5]`, the second one also mirrored.
        assert_eq!(view(false, -1), [4., 3., 4., 1., 0., 1., 4., 3., 4.]);
        assert_eq!(view(false, 1), [4., 5., 4., 7., 8., 7., 4., 5., 4.]);
        assert_eq!(view(true, 0), [2., 1., 0., 5., 4., 3., 8., 7., 6.]);
        for count in [1, 2, 6] {
            let views = View::of(count);
            assert_eq!(views.len(), count as usize);
            assert_eq!(views.iter().map(|view| view.weight).sum::<f32>(), 1.0);
        }
        assert_eq!(
            View::of(6).iter().filter(|view| view.shift == 0).map(|view| view.weight).sum::<f32>(),
            0.5
        );
    }
}
