//! Operations that move pixels: flips, and affine maps with nearest-neighbour sampling, black outside the picture.

/// Mirrors left to right.
pub(super) fn flip_horizontal(pixels: &mut [u8], side: usize, channels: usize) {
    for row in pixels.chunks_exact_mut(side * channels) {
        for x in 0..side / 2 {
            for c in 0..channels {
                row.swap(x * channels + c, (side - 1 - x) * channels + c);
            }
        }
    }
}

/// Mirrors top to bottom.
pub(super) fn flip_vertical(pixels: &mut [u8], side: usize, channels: usize) {
    let row = side * channels;
    for y in 0..side / 2 {
        let (above, below) = pixels.split_at_mut((side - 1 - y) * row);
        above[y * row..][..row].swap_with_slice(&mut below[..row]);
    }
}

/// The matrix of Pillow's `rotate` about the centre.
pub(super) fn rotation(degrees: f64, side: usize) -> [f64; 6] {
    let angle = -degrees.to_radians();
    // `libm` gives the same bits on every machine.
    let (cos, sin) = (libm::cos(angle), libm::sin(angle));
    let centre = side as f64 / 2.0;
    [cos, sin, centre - (cos + sin) * centre, -sin, cos, centre - (cos - sin) * centre]
}

/// Pillow's `transform(AFFINE, NEAREST)`: the pixel at column x and row y is taken from (a x + b y + c, d x + e y +
/// f), where coordinates are those of pixel centres. As in Pillow, coordinates are fixed-point numbers in 65536ths of
/// a pixel.
pub(super) fn affine(
    pixels: &mut [u8],
    side: usize,
    channels: usize,
    matrix: [f64; 6],
    scratch: &mut Vec<u8>,
) {
    const BITS: u32 = 16;
    let fixed = |v: f64| (v * f64::from(1u32 << BITS) + 0.5).floor() as i64;
    let [a, b, c, d, e, f] = matrix;
    let first = [fixed(c + a * 0.5 + b * 0.5), fixed(f + d * 0.5 + e * 0.5)];
    let (along_row, along_column) = ([fixed(a), fixed(d)], [fixed(b), fixed(e)]);
    scratch.clear();
    scratch.extend_from_slice(pixels);
    let inside = |v: i64| usize::try_from(v >> BITS).ok().filter(|v| *v < side);
    for (y, row) in pixels.chunks_exact_mut(side * channels).enumerate() {
        for (x, pixel) in row.chunks_exact_mut(channels).enumerate() {
            let (x, y) = (x as i64, y as i64);
            let at = |i: usize| first[i] + along_row[i] * x + along_column[i] * y;
            match (inside(at(0)), inside(at(1))) {
                (Some(x), Some(y)) => {
                    pixel.copy_from_slice(&scratch[(y * side + x) * channels..][..channels])
                }
                _ => pixel.fill(0),
            }
        }
    }
}
