//! Random positions of crops and of erased rectangles.

use crate::{picture::Region, random::Random};

/// Number of attempts before the fallback, as in torchvision.
const MAX_TRIES: usize = 10;

/// `RandomResizedCrop.get_params`: a rectangle with an area in `scale` (fraction of the picture's area) and an aspect
/// ratio in `ratio` (width / height). If ten attempts do not fit, the result is the largest centred rectangle with an allowed ratio.
pub(super) fn random_resized_crop(
    random: &mut Random,
    (width, height): (u32, u32),
    scale: [f64; 2],
    ratio: [f64; 2],
) -> Region {
    for _ in 0..MAX_TRIES {
        let (area, aspect) = draw(random, f64::from(width) * f64::from(height), scale, ratio);
        let (w, h) = (rounded((area * aspect).sqrt()), rounded((area / aspect).sqrt()));
        // Drawn even if unused, so that each attempt consumes the same number of values.
        let (top, left) = (random.next_u64(), random.next_u64());
        if (1..=u64::from(width)).contains(&w) && (1..=u64::from(height)).contains(&h) {
            let (w, h) = (w as u32, h as u32);
            return Region {
                left: scale_to(left, width - w),
                top: scale_to(top, height - h),
                width: w,
                height: h,
            };
        }
    }
    let [narrowest, widest] = ratio;
    let picture_ratio = f64::from(width) / f64::from(height);
    let (w, h) = if picture_ratio < narrowest {
        (width, rounded(f64::from(width) / narrowest).clamp(1, height.into()) as u32)
    } else if picture_ratio > widest {
        (rounded(f64::from(height) * widest).clamp(1, width.into()) as u32, height)
    } else {
        (width, height)
    };
    Region { left: (width - w) / 2, top: (height - h) / 2, width: w, height: h }
}

/// `RandomErasing.get_params` on a square of `side` pixels; `ratio` is height / width. Nothing is erased if ten
/// attempts do not fit.
pub(super) fn random_erasing(
    random: &mut Random,
    side: u32,
    scale: [f64; 2],
    ratio: [f64; 2],
) -> Option<Region> {
    (0..MAX_TRIES).find_map(|_| {
        let (area, aspect) = draw(random, f64::from(side) * f64::from(side), scale, ratio);
        let (h, w) = (rounded((area * aspect).sqrt()), rounded((area / aspect).sqrt()));
        let (top, left) = (random.next_u64(), random.next_u64());
        (h < side.into() && w < side.into()).then(|| {
            let (w, h) = (w as u32, h as u32);
            Region { left: scale_to(left, side - w), top: scale_to(top, side - h), width: w, height: h }
        })
    })
}

/// Draws an area, and an aspect ratio whose logarithm is uniformly distributed.
fn draw(random: &mut Random, picture_area: f64, scale: [f64; 2], ratio: [f64; 2]) -> (f64, f64) {
    let area = picture_area * random.uniform(scale[0], scale[1]);
    // `libm` gives the same bits on every machine.
    let aspect = libm::exp(random.uniform(libm::log(ratio[0]), libm::log(ratio[1])));
    (area, aspect)
}

/// Rounds as Python does.
fn rounded(length: f64) -> u64 {
    length.round_ties_even() as u64
}

/// Converts 64 random bits to a number in `0..=last`.
fn scale_to(bits: u64, last: u32) -> u32 {
    ((u128::from(bits) * (u128::from(last) + 1)) >> 64) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALE: [f64; 2] = [0.08, 1.0];
    const RATIO: [f64; 2] = [0.75, 4.0 / 3.0];

    #[test]
    fn crops_cover_the_allowed_scales_and_ratios() {
        let side = 300;
        let (mut areas, mut wide, mut lefts) = (Vec::new(), 0, Vec::new());
        for picture in 0..4000 {
            let mut random = Random::new(&[1, picture]);
            let crop = random_resized_crop(&mut random, (side, side), SCALE, RATIO);
            assert!(crop.left + crop.width <= side && crop.top + crop.height <= side, "{crop:?}");
            let area = f64::from(crop.width * crop.height) / f64::from(side * side);
            let ratio = f64::from(crop.width) / f64::from(crop.height);
            // Sides are whole numbers of pixels.
            assert!((0.078..=1.0).contains(&area) && (0.74..=1.35).contains(&ratio), "{crop:?}");
            areas.push(area);
            wide += u32::from(ratio > 1.0);
            lefts.push(f64::from(crop.left) / f64::from((side - crop.width).max(1)));
        }
        areas.sort_by(f64::total_cmp);
        // Uniform from 0.08 to 0.75. Larger areas fit only if the rectangle is almost square.
        assert!(areas[0] < 0.085 && areas[3999] > 0.95, "{} {}", areas[0], areas[3999]);
        assert!((0.44..0.51).contains(&areas[2000]), "the median is {}", areas[2000]);
        assert!((1850..2150).contains(&wide), "{wide} of 4000 are wider than high");
        let mean = lefts.iter().sum::<f64>() / 4000.0;
        assert!((0.47..0.53).contains(&mean), "positions are spread evenly: {mean}");
    }

    #[test]
    fn pictures_that_no_crop_fits_are_cropped_at_their_centre() {
        let crop = |width, height, scale, ratio| {
            random_resized_crop(&mut Random::new(&[7]), (width, height), scale, ratio)
        };
        // No rectangle of an allowed ratio has so large an area.
        let wide = crop(1000, 10, [0.9, 1.0], RATIO);
        assert_eq!(wide, Region { left: 493, top: 0, width: 13, height: 10 });
        let high = crop(10, 1000, [0.9, 1.0], RATIO);
        assert_eq!(high, Region { left: 0, top: 493, width: 10, height: 13 });
        // The picture's ratio is allowed, but the requested areas are larger than the picture.
        let whole = crop(100, 100, [1.0, 1.0], [1.2, 1.3]);
        assert_eq!((whole.left, whole.top, whole.width, whole.height), (0, 8, 100, 83));
        let pixel = crop(1, 1, SCALE, RATIO);
        assert_eq!(pixel, Region { left: 0, top: 0, width: 1, height: 1 });
    }

    #[test]
    fn erased_rectangles_keep_the_scale_and_never_cover_a_whole_side() {
        let mut areas = Vec::new();
        for picture in 0..2000 {
            let erased = random_erasing(&mut Random::new(&[3, picture]), 64, [0.02, 0.33], [0.3, 3.3]);
            let Some(Region { left, top, width, height }) = erased else { continue };
            assert!(width < 64 && height < 64 && left + width <= 64 && top + height <= 64, "{erased:?}");
            areas.push(f64::from(width * height) / 4096.0);
        }
        assert!(areas.len() > 1900, "nearly all fit: {}", areas.len());
        assert!(areas.iter().all(|a| (0.017..0.34).contains(a)));
        let mean = areas.iter().sum::<f64>() / areas.len() as f64;
        assert!((0.15..0.19).contains(&mean), "{mean}");
    }
}
