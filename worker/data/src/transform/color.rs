//! Operations on the values of pixels, with the same results as Pillow's `ImageEnhance` and `ImageOps`, as used by
//! torchvision. Pictures with one channel are grey, with three channels RGB.

/// ITU-R BT.601 luma, computed in 65536ths and rounded: Pillow's `convert("L")`.
fn luma(pixel: &[u8]) -> u8 {
    match *pixel {
        [r, g, b] => {
            ((u32::from(r) * 19_595 + u32::from(g) * 38_470 + u32::from(b) * 7_471 + 0x8000) >> 16) as u8
        }
        [grey, ..] => grey,
        [] => 0,
    }
}

/// Interpolates from `degenerate` (factor 0) to the picture (factor 1) and beyond. Computed in float32 and clipped,
/// as in Pillow's `Image.blend`.
fn blend(degenerate: u8, value: u8, factor: f32) -> u8 {
    let (from, to) = (f32::from(degenerate), f32::from(value));
    // Conversion to a byte clips values below 0 and above 255.
    (from + factor * (to - from)) as u8
}

/// torchvision's `adjust_brightness`.
pub(super) fn brightness(pixels: &mut [u8], factor: f64) {
    each_value(pixels, |value| blend(0, value, factor as f32));
}

/// torchvision's `adjust_contrast`.
pub(super) fn contrast(pixels: &mut [u8], channels: usize, factor: f64) {
    let count = (pixels.len() / channels).max(1) as f64;
    let sum: u64 = pixels.chunks_exact(channels).map(|p| u64::from(luma(p))).sum();
    let mean = (sum as f64 / count + 0.5) as u8;
    each_value(pixels, |value| blend(mean, value, factor as f32));
}

/// torchvision's `adjust_saturation`. Grey pictures are unchanged.
pub(super) fn saturation(pixels: &mut [u8], channels: usize, factor: f64) {
    if channels == 3 {
        for pixel in pixels.chunks_exact_mut(3) {
            let grey = luma(pixel);
            pixel.iter_mut().for_each(|v| *v = blend(grey, *v, factor as f32));
        }
    }
}

/// torchvision's `adjust_sharpness`: interpolates from Pillow's `SMOOTH`, which leaves the border unchanged.
pub(super) fn sharpness(pixels: &mut [u8], side: usize, channels: usize, factor: f64, scratch: &mut Vec<u8>) {
    scratch.clear();
    scratch.extend_from_slice(pixels);
    let row = side * channels;
    for y in 1..side.saturating_sub(1) {
        for at in y * row + channels..(y + 1) * row - channels {
            let line = |start: usize| {
                u32::from(scratch[start - channels])
                    + u32::from(scratch[start])
                    + u32::from(scratch[start + channels])
            };
            let sum = line(at - row) + line(at) + line(at + row) + 4 * u32::from(scratch[at]);
            // A thirteenth of the sum, rounded: the nine weights sum to 13.
            let smooth = ((2 * sum + 13) / 26) as u8;
            pixels[at] = blend(smooth, scratch[at], factor as f32);
        }
    }
}

/// torchvision's `adjust_hue`. Grey pictures are unchanged.
pub(super) fn hue(pixels: &mut [u8], channels: usize, turns: f64) {
    if channels != 3 {
        return;
    }
    // Pillow's hue is a byte, and additions wrap around.
    let shift = (turns * 255.0) as i32 as u8;
    for pixel in pixels.chunks_exact_mut(3) {
        let [h, s, v] = hsv([pixel[0], pixel[1], pixel[2]]);
        pixel.copy_from_slice(&rgb([h.wrapping_add(shift), s, v]));
    }
}

/// Converts RGB to HSV as Pillow's `convert("HSV")`, which computes in float32 and truncates. A hue of 255 is a full turn.
fn hsv([r, g, b]: [u8; 3]) -> [u8; 3] {
    let (max, min) = (r.max(g).max(b), r.min(g).min(b));
    if max == min {
        return [0, 0, max];
    }
    let range = f32::from(max - min);
    let share = |v: u8| f32::from(max - v) / range;
    // As in Pillow's C code: `2.0` and `4.0` are doubles, so these sums are computed in float64.
    let hue = if r == max {
        share(b) - share(g)
    } else if g == max {
        (2.0 + f64::from(share(r)) - f64::from(share(b))) as f32
    } else {
        (4.0 + f64::from(share(g)) - f64::from(share(r))) as f32
    };
    let hue = ((f64::from(hue) / 6.0 + 1.0) % 1.0) as f32;
    let saturation = range / f32::from(max);
    [(f64::from(hue) * 255.0) as u8, (f64::from(saturation) * 255.0) as u8, max]
}

/// Converts HSV to RGB as Pillow does.
fn rgb([h, s, v]: [u8; 3]) -> [u8; 3] {
    if s == 0 {
        return [v, v, v];
    }
    let sixths = f64::from(h) * 6.0 / 255.0;
    let sector = sixths.floor();
    let rest = (sixths - sector) as f32;
    let saturation = (f64::from(s) / 255.0) as f32;
    let value = |less: f64| (f64::from(v) * (1.0 - less)).round() as u8;
    let p = value(saturation.into());
    let q = value((saturation * rest).into());
    let t = value(f64::from(saturation) * (1.0 - f64::from(rest)));
    match sector as u32 % 6 {
        0 => [v, t, p],
        1 => [q, v, p],
        2 => [p, v, t],
        3 => [p, q, v],
        4 => [t, p, v],
        _ => [v, p, q],
    }
}

/// torchvision's `posterize`: keeps the upper `bits` of each value.
pub(super) fn posterize(pixels: &mut [u8], bits: u32) {
    let mask = !(0xffu32 >> bits) as u8;
    each_value(pixels, |value| value & mask);
}

/// torchvision's `solarize`.
pub(super) fn solarize(pixels: &mut [u8], threshold: f64) {
    each_value(pixels, |value| if f64::from(value) < threshold { value } else { 255 - value });
}

/// torchvision's `autocontrast`: stretches each channel from its darkest to its lightest value.
pub(super) fn autocontrast(pixels: &mut [u8], channels: usize) {
    each_channel(pixels, channels, |counts| {
        let (lowest, highest) = occurring_range(counts);
        if highest <= lowest {
            return None;
        }
        let scale = 255.0 / (highest - lowest) as f64;
        let offset = -(lowest as f64) * scale;
        Some(std::array::from_fn(|v| (v as f64 * scale + offset) as u8))
    });
}

/// torchvision's `equalize`: makes the values of each channel equally frequent.
pub(super) fn equalize(pixels: &mut [u8], channels: usize) {
    each_channel(pixels, channels, |counts| {
        let (_, highest) = occurring_range(counts);
        let total: u64 = counts.iter().sum();
        let step = (total - counts[highest]) / 255;
        if step == 0 {
            return None;
        }
        let mut before = step / 2;
        Some(std::array::from_fn(|v| {
            let level = (before / step).min(255) as u8;
            before += counts[v];
            level
        }))
    });
}

/// The lowest and the highest value that occur.
fn occurring_range(counts: &[u64; 256]) -> (usize, usize) {
    let occurs = |count: &u64| *count > 0;
    (counts.iter().position(occurs).unwrap_or(0), counts.iter().rposition(occurs).unwrap_or(0))
}

/// Maps the values of each channel by the table that `table` computes from the channel's histogram.
fn each_channel(pixels: &mut [u8], channels: usize, table: impl Fn(&[u64; 256]) -> Option<[u8; 256]>) {
    for channel in 0..channels {
        let mut counts = [0; 256];
        pixels[channel..].iter().step_by(channels).for_each(|v| counts[usize::from(*v)] += 1);
        if let Some(table) = table(&counts) {
            pixels[channel..].iter_mut().step_by(channels).for_each(|v| *v = table[usize::from(*v)]);
        }
    }
}

fn each_value(pixels: &mut [u8], change: impl Fn(u8) -> u8) {
    let table: [u8; 256] = std::array::from_fn(|v| change(v as u8));
    pixels.iter_mut().for_each(|v| *v = table[usize::from(*v)]);
}
