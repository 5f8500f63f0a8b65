//! Decoding of JPEG files by the GPU's hardware decoder (nvJPEG) into planes. One kernel per group of pictures then converts to RGB, crops
//! and resizes. nvJPEG's own conversion would launch a kernel for each picture, and each would wait for kernels of a training step. The
//! pixels are copied back to the host, where all later transforms are the same for every decoder.

use super::{
    device::{Buffer, Device, Event, Pinned},
    dtype::DType,
    error::CudaError,
    kernels::Kernels,
};
use crate::nvjpeg::{self, Hardware, Nvjpeg, State};
use cropper::{Cropper, grow_buffer, grow_pinned};
use jpeg_encoder::{ColorType, SamplingFactor};
use layout::{Cropping, MAX_DECODED_BYTES, Planes, divide_into_groups, planes_bytes};
use lockstep_data::{
    Picture,
    device::{CpuDecodeReason, DeviceDecoder, Encoded, ScaleTable, for_hardware},
};
use lockstep_host::lock;
use pool::Pool;
use std::{
    fmt,
    sync::{Arc, Mutex},
};

mod cropper;
mod layout;
mod pool;
#[cfg(test)]
mod tests;

/// Number of groups of pictures that are decoded concurrently: one is copied to page-locked memory, one is submitted to the decoders,
/// which takes the driver longer than the decoding itself, and one is cropped and copied back.
const SESSIONS: usize = 3;
/// Maximum number of pictures in a group: enough to keep about seven hardware decoders busy while other groups wait for a
/// training step's kernels, few enough for a short latency.
const MAX_GROUP_PICTURES: usize = 128;

/// Maximum mean difference, of 255, between the test pictures of the GPU's and of the CPU's decoder. Decoders round differently.
const MAX_DIFFERENCE: f64 = 3.0;

/// Value of planes where nothing was decoded: grey.
const GREY: u8 = 128;

/// Opens the decoder of GPU `ordinal`, and tests the decoder with pictures whose pixels are known.
///
/// # Errors
/// The GPU has no decoder, or the decoder does not work. The error is a sentence.
pub(crate) fn open(ordinal: i32, dtype: DType) -> Result<Arc<dyn DeviceDecoder>, String> {
    let decoder = JpegDecoder::open(ordinal, dtype)?;
    decoder.self_test()?;
    Ok(Arc::new(decoder))
}

struct JpegDecoder {
    name: String,
    // Declared before `device`, so that the sessions are dropped first. `close` may drop them earlier.
    sessions: Pool<Session>,
    /// Held while a thread submits a group to the decoders. Because of the driver's locks, concurrent submissions would delay each other
    /// and the training step.
    submission: Mutex<()>,
    kernels: Kernels,
    device: Device,
}

impl fmt::Debug for JpegDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl JpegDecoder {
    fn open(ordinal: i32, dtype: DType) -> Result<Self, String> {
        let (library, version) = Nvjpeg::find()?;
        let library = Arc::new(library);
        let device = Device::open(ordinal).map_err(|e| e.to_string())?;
        let hardware = Arc::new(Hardware::open(&library)?);
        let sessions = (0..SESSIONS).map(|_| Session::open(&hardware)).collect::<Result<Vec<_>, String>>()?;
        let engines = hardware.engines();
        let engines = engines.map(|(engines, _)| format!(", {engines} engines")).unwrap_or_default();
        // No kernel may overlap with work that nvJPEG launches on the stream.
        let kernels = Kernels::load(&device, dtype).map_err(|e| e.to_string())?.without_dependent_launch();
        let sessions = Pool::new(sessions);
        let name = format!("nvJPEG {version}{engines}");
        Ok(Self { name, sessions, submission: Mutex::new(()), kernels, device })
    }

    /// Checks that pictures are decoded as on the CPU, in each supported subsampling.
    fn self_test(&self) -> Result<(), String> {
        // Odd sides, so that planes of a wrong size are detected.
        let (width, height) = (95, 63);
        let drawn = image::RgbImage::from_fn(width, height, |x, y| {
            image::Rgb([(x * 2) as u8, (y * 3) as u8, (200 - x - y) as u8])
        });
        // For each picture: its file, the file's description (`Stored`), the expected pixels and the subsampling.
        let mut pictures = Vec::new();
        for sampling in [SamplingFactor::R_4_2_0, SamplingFactor::R_4_2_2, SamplingFactor::R_4_4_4] {
            let file = encode(&drawn, sampling)?;
            let expected = Picture::decode(&file)?;
            let stored = for_hardware(&file).map_err(|why| format!("the test picture is {why}"))?;
            pictures.push((file, stored, expected, sampling));
        }
        let (rows, columns) = (ScaleTable::new(height, height), ScaleTable::new(width, width));
        let mut encoded: Vec<Encoded<'_>> = pictures
            .iter()
            .map(|(bytes, stored, ..)| Encoded {
                bytes,
                stored: *stored,
                left: 0,
                top: 0,
                rows: &rows,
                columns: &columns,
                flip: false,
            })
            .collect();
        let mut differences = Vec::new();
        self.decode((width, height), &mut |_| std::mem::take(&mut encoded), &mut |decoded| {
            for ((_, _, expected, sampling), pixels) in pictures.iter().zip(decoded) {
                let pairs = || pixels.iter().flat_map(|pixels| pixels.iter().zip(&expected.pixels));
                let sum: u64 = pairs().map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
                if pixels.is_some() {
                    differences.push((sum as f64 / expected.pixels.len() as f64, *sampling));
                }
            }
        })?;
        if differences.is_empty() {
            return Err(format!("every test picture is {}", CpuDecodeReason::Refused));
        }
        match differences.iter().find(|(difference, _)| *difference > MAX_DIFFERENCE) {
            None => Ok(()),
            Some((difference, sampling)) => Err(format!(
                "nvJPEG's pixels differ from the CPU decoder's by {difference:.1} of 255 on average ({sampling:?})"
            )),
        }
    }
}

impl DeviceDecoder for JpegDecoder {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn concurrent_calls(&self) -> usize {
        SESSIONS
    }

    fn decode<'a>(
        &self,
        size: (u32, u32),
        take_pictures: &mut dyn FnMut(usize) -> Vec<Encoded<'a>>,
        use_results: &mut dyn FnMut(&[Option<&[u8]>]),
    ) -> Result<(), String> {
        let mut session = self.sessions.take().ok_or("the decoder is closed")?;
        self.device.bind().map_err(|e| e.to_string())?;
        let pictures = take_pictures(MAX_GROUP_PICTURES);
        if pictures.is_empty() {
            return Ok(());
        }
        let supported = session.decode(self, &pictures, size)?;
        let bytes = size.0 as usize * size.1 as usize * 3;
        let all = session.cropper.pixels(pictures.len() * bytes);
        let decoded: Vec<Option<&[u8]>> = all
            .chunks_exact(bytes)
            .zip(&supported)
            .map(|(pixels, supported)| supported.then_some(pixels))
            .collect();
        use_results(&decoded);
        Ok(())
    }

    fn close(&self) {
        if self.device.bind().is_ok() {
            self.sessions.close();
        }
    }
}

impl Drop for JpegDecoder {
    fn drop(&mut self) {
        self.close();
    }
}

/// Memory for decoding one group of pictures at a time.
struct Session {
    state: State,
    /// Decoded planes, reset to [`GREY`] between groups, because the decoder may write only a part of a damaged picture. The rest must not
    /// show another picture's pixels.
    decoded: Option<Buffer>,
    /// The files of a group, in page-locked memory. A copy from other memory would block the driver, and so the training step, until all
    /// earlier work on the stream is done.
    files: Option<Pinned>,
    cropper: Cropper,
    done: Event,
}

impl Session {
    fn open(hardware: &Arc<Hardware>) -> Result<Self, String> {
        let describe = |error: CudaError| error.to_string();
        let state = State::new(hardware)?;
        let cropper = Cropper::new().map_err(describe)?;
        Ok(Self { state, decoded: None, files: None, cropper, done: Event::sleeping().map_err(describe)? })
    }

    /// Decodes the supported pictures, and returns for each picture whether it is supported. Waits for all GPU work.
    fn decode(
        &mut self,
        decoder: &JpegDecoder,
        pictures: &[Encoded<'_>],
        size: (u32, u32),
    ) -> Result<Vec<bool>, String> {
        let supported: Vec<bool> =
            pictures.iter().map(|picture| self.state.supports(picture.bytes)).collect();
        let outcome = self.decode_supported(decoder, pictures, &supported, size);
        if outcome.is_err() {
            // The caller frees the files, which unfinished work, also on nvJPEG's streams, may still read.
            let _ = decoder.device.synchronize();
            self.decoded = None;
        }
        outcome.map(|()| supported)
    }

    /// Decodes the pictures whose entry in `supported` is true, in groups that fit in memory.
    fn decode_supported(
        &mut self,
        decoder: &JpegDecoder,
        pictures: &[Encoded<'_>],
        supported: &[bool],
        size: (u32, u32),
    ) -> Result<(), String> {
        let JpegDecoder { submission, kernels, device, .. } = decoder;
        let describe = |error: CudaError| error.to_string();
        let numbered: Vec<(usize, &Encoded<'_>)> =
            pictures.iter().enumerate().filter(|(number, _)| supported[*number]).collect();
        let sizes: Vec<usize> = numbered.iter().map(|(_, picture)| planes_bytes(picture.stored)).collect();
        let stream = self.cropper.stream.0;
        self.cropper.allocate(device, pictures.len(), size).map_err(describe)?;
        for (index, group) in divide_into_groups(&sizes, MAX_DECODED_BYTES).into_iter().enumerate() {
            if index > 0 {
                // The decoder does not wait for this stream, so earlier users of the memory must have finished.
                self.wait()?;
            }
            let bytes = sizes[group.clone()].iter().sum();
            let allocate_grey = |bytes: usize| device.filled(bytes, GREY);
            let mut address = grow_buffer(&mut self.decoded, bytes, allocate_grey).map_err(describe)?.ptr;
            let mut tables = Vec::new();
            let (mut decoded, mut croppings) = (Vec::new(), Vec::new());
            let group = &numbered[group];
            let files: Vec<&[u8]> = group.iter().map(|(_, picture)| picture.bytes).collect();
            let files = copy_to_page_locked(&mut self.files, &files).map_err(describe)?;
            for ((number, picture), bytes) in group.iter().zip(files) {
                let planes = Planes::new(picture.stored, address);
                decoded.push(nvjpeg::Picture { bytes, planes: planes.destinations() });
                croppings.push(Cropping::new(picture, planes, *number as u32, &mut tables));
                address += planes_bytes(picture.stored) as u64;
            }
            let submitting = lock(submission);
            self.state.decode(&decoded, stream.0)?;
            drop(submitting);
            self.cropper.run(device, kernels, &croppings, &tables).map_err(describe)?;
            if let Some(decoded) = &self.decoded {
                stream.fill(decoded, bytes, GREY).map_err(describe)?;
            }
        }
        self.cropper.start_download(pictures.len()).map_err(describe)?;
        self.wait()
    }

    /// Blocks, without spinning, until all work on the stream is done.
    fn wait(&self) -> Result<(), String> {
        self.done.record(self.cropper.stream.0).and_then(|()| self.done.wait()).map_err(|e| e.to_string())
    }
}

/// A picture as a JPEG file.
fn encode(picture: &image::RgbImage, sampling: SamplingFactor) -> Result<Vec<u8>, String> {
    let mut file = Vec::new();
    let mut encoder = jpeg_encoder::Encoder::new(&mut file, 90);
    encoder.set_sampling_factor(sampling);
    let [width, height] = [picture.width(), picture.height()].map(|side| side as u16);
    encoder.encode(picture, width, height, ColorType::Rgb).map_err(|error| error.to_string())?;
    Ok(file)
}

/// Copies `files` to page-locked memory, which must not be in use, and returns the copies.
fn copy_to_page_locked<'a>(
    memory: &'a mut Option<Pinned>,
    files: &[&[u8]],
) -> Result<Vec<&'a [u8]>, CudaError> {
    let bytes: usize = files.iter().map(|file| file.len()).sum();
    let memory = grow_pinned(memory, bytes)?;
    let mut offset = 0;
    for file in files {
        memory.write(offset, file);
        offset += file.len();
    }
    let mut rest = memory.bytes(bytes);
    let split_off = |file: &&[u8]| {
        let (copy, others) = rest.split_at(file.len());
        rest = others;
        copy
    };
    Ok(files.iter().map(split_off).collect())
}
