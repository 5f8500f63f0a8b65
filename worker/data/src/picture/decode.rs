//! Decodes a file to RGB pixels, with Pillow's semantics:
//! `ImageOps.exif_transpose(Image.open(file)).convert("RGB")`.
//!
//! The alpha channel is dropped, and transparent pixels keep their colour. Colour profiles and gamma are not applied.
//! Of 16 bits, the upper 8 are used. A JPEG file with more pixels than allowed is decoded at half, a quarter or an
//! eighth of its sides.

use super::{
    MAX_BYTES, PictureRef, format_of,
    jpeg::{CpuDecodeReason, Frame, Stored},
    not_a_picture_detail, size_refusal, whole,
};
use image::{ColorType, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits, metadata::Orientation};
use jpeg_decoder::PixelFormat;
use std::io::Cursor;
use zune_jpeg::{
    JpegDecoder,
    zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions},
};

/// Buffers larger than this are freed before the next picture.
const MAX_KEPT_BYTES: usize = 64 << 20;

/// The index of the upper byte of a 16-bit sample, in this machine's byte order.
const UPPER: usize = if cfg!(target_endian = "little") { 1 } else { 0 };

/// Decodes pictures, and keeps its buffers. Used by one thread.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    /// Pixels in the file's colour type.
    stored: Vec<u8>,
    /// RGB.
    pixels: Vec<u8>,
    /// RGB, upright.
    turned: Vec<u8>,
}

/// A file whose header has been read.
pub(super) struct Header<'a> {
    pub(super) format: ImageFormat,
    /// The stored width, before `orientation` is applied.
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) orientation: Orientation,
    body: Body<'a>,
}

enum Body<'a> {
    Jpeg(Box<JpegDecoder<ZCursor<&'a [u8]>>>),
    /// A JPEG file that `zune-jpeg` does not decode correctly, or that is scaled down while it is decoded.
    RareJpeg(Box<jpeg_decoder::Decoder<&'a [u8]>>),
    Other(Box<dyn ImageDecoder + 'a>),
}

impl<'a> Header<'a> {
    /// The error is a phrase to follow the picture's name.
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, String> {
        let format = format_of(bytes).ok_or_else(|| not_a_picture_detail(bytes))?;
        if !whole::is_whole(format, bytes) {
            return Err(format!("is cut off: a {} picture without its end; get it again", name_of(format)));
        }
        if format == ImageFormat::Jpeg { jpeg_header(bytes) } else { other_header(format, bytes) }
    }

    /// Width and height of the upright picture.
    pub(super) fn dimensions(&self) -> (u32, u32) {
        if swaps_sides(self.orientation) { (self.height, self.width) } else { (self.width, self.height) }
    }
}

fn jpeg_header(bytes: &[u8]) -> Result<Header<'_>, String> {
    let frame = Frame::read(bytes).map_err(|_| cannot_be_decoded("its header is damaged; get it again"))?;
    if let Some(words) = frame.refusal() {
        return Err(words);
    }
    let Frame { mut width, mut height, exif, .. } = frame;
    // The picture is decoded at 1 / 2^shift of its sides, with the smallest shift for which its size is allowed.
    let side = |length: u32, shift: u32| length.div_ceil(1 << shift);
    let fits = |shift: &u32| size_refusal(side(width, *shift), side(height, *shift)).is_none();
    let shift = (0..=3).find(fits).filter(|_| frame.is_sequential()).unwrap_or(0);
    let body = if shift == 0 && frame.is_decoded_by_zune() {
        let options = DecoderOptions::default()
            .set_strict_mode(false)
            .set_max_width(usize::MAX)
            .set_max_height(usize::MAX)
            .jpeg_set_out_colorspace(ColorSpace::RGB);
        let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
        decoder.decode_headers().map_err(cannot_be_decoded)?;
        Body::Jpeg(Box::new(decoder))
    } else {
        let mut decoder = jpeg_decoder::Decoder::new(bytes);
        decoder.set_color_transform(frame.colours());
        let scaled = decoder.scale(side(width, shift) as u16, side(height, shift) as u16);
        let scaled = scaled.map_err(cannot_be_decoded)?;
        (width, height) = (scaled.0.into(), scaled.1.into());
        Body::RareJpeg(Box::new(decoder))
    };
    if let Some(words) = size_refusal(width, height) {
        return Err(format!("{words}: save it as baseline JPEG, which is scaled down as it is read"));
    }
    Ok(Header { format: ImageFormat::Jpeg, width, height, orientation: orientation(exif), body })
}

/// The properties of a JPEG file that a hardware decoder can decode.
///
/// # Errors
/// Why CPU cores decode the file.
pub fn for_hardware(bytes: &[u8]) -> Result<Stored, CpuDecodeReason> {
    let frame = Frame::read(bytes)?;
    let subsampling = frame.for_hardware()?;
    // Reading the header also checks that the file is complete.
    let header = Header::read(bytes).map_err(|_| CpuDecodeReason::Damaged)?;
    let orientation = header.orientation.to_exif();
    Ok(Stored { width: frame.width, height: frame.height, orientation, subsampling })
}

/// The name of a format, such as `JPEG`.
fn name_of(format: ImageFormat) -> String {
    format!("{format:?}").to_uppercase()
}

fn other_header(format: ImageFormat, bytes: &[u8]) -> Result<Header<'_>, String> {
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::default();
    limits.max_alloc = Some(MAX_BYTES);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(|error| match error {
        // Palettes, YCbCr, Lab, 32 bits, and unsupported compressions.
        ImageError::Unsupported(_) => format!(
            "is a {} picture of an unsupported kind ({error}); save it as RGB or grey of 8 or 16 bits, or as PNG",
            name_of(format)
        ),
        _ => cannot_be_decoded(error),
    })?;
    let (width, height) = decoder.dimensions();
    if let Some(words) = size_refusal(width, height) {
        return Err(format!(
            "{words}: scale it down, or save it as baseline JPEG, which is scaled down as it is read"
        ));
    }
    if decoder.total_bytes() > MAX_BYTES {
        return Err(format!(
            "is {width} x {height} pixels of {:?}, {} MiB; at most {} MiB are allowed",
            decoder.color_type(),
            decoder.total_bytes() >> 20,
            MAX_BYTES >> 20
        ));
    }
    let orientation = match format {
        ImageFormat::Tiff => decoder.orientation().unwrap_or(Orientation::NoTransforms),
        // Unreadable metadata is ignored.
        _ => orientation(decoder.exif_metadata().ok().flatten().as_deref()),
    };
    Ok(Header { format, width, height, orientation, body: Body::Other(Box::new(decoder)) })
}

/// Whether `bytes` are a JPEG picture with three channels and without rotation, so that its decoder outputs upright
/// RGB.
pub(crate) fn is_plain_jpeg(bytes: &[u8]) -> bool {
    let plain = |header: Header<'_>| match &header.body {
        Body::Jpeg(decoder) => {
            let channels = decoder.info().map(|info| info.components);
            header.orientation == Orientation::NoTransforms && channels == Some(3)
        }
        Body::RareJpeg(_) | Body::Other(_) => false,
    };
    format_of(bytes) == Some(ImageFormat::Jpeg) && jpeg_header(bytes).is_ok_and(plain)
}

/// The orientation in an EXIF block. Some writers begin the block as in a JPEG file.
fn orientation(exif: Option<&[u8]>) -> Orientation {
    exif.map(|exif| exif.strip_prefix(b"Exif\0\0").unwrap_or(exif))
        .and_then(Orientation::from_exif_chunk)
        .unwrap_or(Orientation::NoTransforms)
}

fn swaps_sides(orientation: Orientation) -> bool {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}

fn cannot_be_decoded(error: impl std::fmt::Display) -> String {
    format!("cannot be decoded: {error}")
}

impl Decoder {
    /// Decodes a picture of any size and colour type as RGB. The error is a phrase to follow the picture's name.
    pub(crate) fn decode(&mut self, bytes: &[u8]) -> Result<PictureRef<'_>, String> {
        let (width, height, pixels) = self.pixels_of(Header::read(bytes)?)?;
        Ok(PictureRef { width, height, channels: 3, pixels })
    }

    /// Width and height of the upright picture, and the buffer with its RGB pixels.
    pub(super) fn pixels_of(&mut self, header: Header<'_>) -> Result<(u32, u32, &mut Vec<u8>), String> {
        for buffer in [&mut self.stored, &mut self.pixels, &mut self.turned] {
            if buffer.capacity() > MAX_KEPT_BYTES {
                *buffer = Vec::new();
            }
        }
        let (width, height) = header.dimensions();
        let (stored_width, orientation) = (header.width as usize, header.orientation);
        let size = header.width as usize * header.height as usize * 3;
        self.pixels.resize(size, 0);
        match header.body {
            Body::Jpeg(mut decoder) => decoder.decode_into(&mut self.pixels).map_err(cannot_be_decoded)?,
            Body::RareJpeg(mut decoder) => {
                let stored = decoder.decode().map_err(cannot_be_decoded)?;
                let kind = decoder.info().map(|info| info.pixel_format);
                match kind {
                    Some(PixelFormat::RGB24) => self.pixels.copy_from_slice(&stored),
                    Some(PixelFormat::CMYK32) => cmyk_to_rgb(&stored, &mut self.pixels),
                    _ => to_rgb(ColorType::L8, &stored, &mut self.pixels)?,
                }
            }
            Body::Other(decoder) => {
                let kind = decoder.color_type();
                match kind {
                    ColorType::Rgb8 => decoder.read_image(&mut self.pixels).map_err(cannot_be_decoded)?,
                    _ => {
                        self.stored.resize(decoder.total_bytes() as usize, 0);
                        decoder.read_image(&mut self.stored).map_err(cannot_be_decoded)?;
                        to_rgb(kind, &self.stored, &mut self.pixels)?;
                    }
                }
            }
        }
        let pixels = if orientation == Orientation::NoTransforms {
            &mut self.pixels
        } else {
            turn(orientation, stored_width, &self.pixels, &mut self.turned);
            &mut self.turned
        };
        Ok((width, height, pixels))
    }
}

/// As `Image.convert("RGB")`.
fn to_rgb(kind: ColorType, stored: &[u8], rgb: &mut [u8]) -> Result<(), String> {
    let mut grey = |bytes: usize, value: fn(&[u8]) -> u8| {
        for (to, from) in rgb.chunks_exact_mut(3).zip(stored.chunks_exact(bytes)) {
            to.fill(value(from));
        }
    };
    let is_of_16_bits =
        matches!(kind, ColorType::L16 | ColorType::La16 | ColorType::Rgb16 | ColorType::Rgba16);
    if is_of_16_bits {
        let channels = usize::from(kind.channel_count());
        let colours = channels - usize::from(kind.has_alpha());
        let values = || {
            let pixels =
                stored.chunks_exact(2 * channels).flat_map(|pixel| pixel[..2 * colours].chunks_exact(2));
            pixels.map(|value| u16::from_ne_bytes([value[0], value[1]]))
        };
        let (least, most) = (values().min().unwrap_or(0), values().max().unwrap_or(0));
        // A picture with a single value may be intended.
        if most < 1 << 12 && least < most {
            return Err(format!(
                "has values of up to {most} in 16 bits, of which only the upper 8 are used, so it would be nearly black; scale its \
                 values up to 65535"
            ));
        }
    }
    match kind {
        ColorType::L8 => grey(1, |p| p[0]),
        ColorType::La8 => grey(2, |p| p[0]),
        ColorType::L16 => grey(2, |p| p[UPPER]),
        ColorType::La16 => grey(4, |p| p[UPPER]),
        ColorType::Rgba8 => {
            for (to, from) in rgb.chunks_exact_mut(3).zip(stored.chunks_exact(4)) {
                to.copy_from_slice(&from[..3]);
            }
        }
        ColorType::Rgb16 | ColorType::Rgba16 => {
            let bytes = usize::from(kind.bytes_per_pixel());
            for (to, from) in rgb.chunks_exact_mut(3).zip(stored.chunks_exact(bytes)) {
                (0..3).for_each(|c| to[c] = from[2 * c + UPPER]);
            }
        }
        other => {
            return Err(format!(
                "has pixels of {other:?}, whose range is not known; convert it to 8 or 16 bits"
            ));
        }
    }
    Ok(())
}

/// As `Image.convert("RGB")`.
fn cmyk_to_rgb(stored: &[u8], rgb: &mut [u8]) {
    for (to, from) in rgb.chunks_exact_mut(3).zip(stored.chunks_exact(4)) {
        let white = 255 - u32::from(from[3]);
        for (to, from) in to.iter_mut().zip(from) {
            *to = (white - (u32::from(*from) * white + 127) / 255) as u8;
        }
    }
}

/// As `ImageOps.exif_transpose`: `from` is stored in rows of `width` pixels.
fn turn(orientation: Orientation, width: usize, from: &[u8], to: &mut Vec<u8>) {
    let height = from.len() / 3 / width.max(1);
    to.resize(from.len(), 0);
    let (w, h) = if swaps_sides(orientation) { (height, width) } else { (width, height) };
    for (y, row) in to.chunks_exact_mut(w * 3).enumerate() {
        for (x, pixel) in row.chunks_exact_mut(3).enumerate() {
            // The column and row in the stored picture of the upright pixel (x, y).
            let (column, line) = match orientation {
                Orientation::NoTransforms => (x, y),
                Orientation::FlipHorizontal => (w - 1 - x, y),
                Orientation::Rotate180 => (w - 1 - x, h - 1 - y),
                Orientation::FlipVertical => (x, h - 1 - y),
                // EXIF's 5: mirrored along the diagonal.
                Orientation::Rotate90FlipH => (y, x),
                // EXIF's 6: the picture lies on its left side.
                Orientation::Rotate90 => (y, w - 1 - x),
                // EXIF's 7: mirrored along the other diagonal.
                Orientation::Rotate270FlipH => (h - 1 - y, w - 1 - x),
                // EXIF's 8: the picture lies on its right side.
                Orientation::Rotate270 => (h - 1 - y, x),
            };
            pixel.copy_from_slice(&from[(line * width + column) * 3..][..3]);
        }
    }
}
