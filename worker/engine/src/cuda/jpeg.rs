//! Decoding of JPEG files by the GPU's hardware decoder (nvJPEG) into planes. One kernel per group of pictures then converts to
//! RGB, crops and resizes: nvJPEG's own conversion would launch one kernel per picture, each of which waits for the kernels of a
//! training step. The pixels are copied back to the host, where batches are assembled from all decoders; these copies are small,
//! and all later transforms are the same for every decoder.

use super::{
    device::{Buffer, Device, Event, Pinned},
    dtype::DType,
    error::CudaError,
    kernels::Kernels,
};
use crate::nvjpeg::{self, Hardware, Nvjpeg, State};
use cropper::{Cropper, grow_buffer, grow_pinned};
use jpeg_encoder::{ColorType, SamplingFactor};
use layout::{Cropping, MAX_DECODED, Planes, groups, planes_bytes};
use lockstep_data::{
    Picture,
    device::{CpuDecodeReason, DeviceDecoder, Encoded, ScaleTable, for_hardware},
};
use sessions::Sessions;
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

mod cropper;
mod layout;
mod sessions;
#[cfg(test)]
mod tests;

/// Number of groups of pictures under way at a time: one is submitted to the decoders, which takes the driver longer than the
/// decoding itself, one is copied to page-locked memory, and one is cropped and copied back.
const SESSIONS: usize = 3;
/// Maximum number of pictures in a group: enough to keep about seven hardware decoders busy while other groups wait for a
/// training step's kernels, few enough for a short latency.
const GROUP: usize = 128;

/// Maximum mean difference, of 255, between the pixels of the GPU's and the CPU's decoder for the test pictures. Decoders round
/// differently.
const MAX_DIFFERENCE: f64 = 3.0;

/// Value of planes where nothing was decoded: grey.
const GREY: u8 = 128;

/// Opens the decoder of GPU `ordinal`, and tests it with pictures whose pixels are known.
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
    // Declared before `device`, so that it is dropped first; `close` may drop it earlier.
    sessions: Sessions<Session>,
    /// Held while a thread submits a group to the decoders: two submissions at a time would delay each other, and the training
    /// step, by the driver's locks.
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
        // No programmatic dependent launch: no kernel may overlap with work that nvJPEG launches on the stream.
        let kernels = Kernels::load(&device, dtype).map_err(|e| e.to_string())?.without_early_launch();
        let sessions = Sessions::new(sessions);
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
        let mut pictures = Vec::new();
        for sampling in [SamplingFactor::R_4_2_0, SamplingFactor::R_4_2_2, SamplingFactor::R_4_4_4] {
            let mut file = Vec::new();
            let mut encoder = jpeg_encoder::Encoder::new(&mut file, 90);
            encoder.set_sampling_factor(sampling);
            encoder
                .encode(&drawn, width as u16, height as u16, ColorType::Rgb)
                .map_err(|error| error.to_string())?;
            let expected = Picture::decode(&file)?;
            let stored = for_hardware(&file).map_err(|why| format!("the first picture is {why}"))?;
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
            return Err(format!("the first picture is {}", CpuDecodeReason::Refused));
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
        next: &mut dyn FnMut(usize) -> Vec<Encoded<'a>>,
        then: &mut dyn FnMut(&[Option<&[u8]>]),
    ) -> Result<(), String> {
        let mut session = self.sessions.take().ok_or("the decoder is closed")?;
        self.device.bind().map_err(|e| e.to_string())?;
        let pictures = next(GROUP);
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
        then(&decoded);
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

/// Memory of a group of pictures that is under way.
struct Session {
    state: State,
    /// Decoded planes, reset to [`GREY`] between groups: of a damaged picture the decoder may write only a part, and the rest
    /// must be grey instead of another picture's pixels.
    decoded: Option<Buffer>,
    /// The files of a group, page-locked: a copy from pageable memory would block the driver, and so the training step, until all
    /// earlier work on the stream is done.
    files: Option<Pinned>,
    cropper: Cropper,
    /// The event with which [`Session::wait`] waits.
    done: Event,
}

impl Session {
    fn open(hardware: &Arc<Hardware>) -> Result<Self, String> {
        let describe = |error: CudaError| error.to_string();
        let state = State::new(hardware)?;
        let cropper = Cropper::new().map_err(describe)?;
        Ok(Self { state, decoded: None, files: None, cropper, done: Event::sleeping().map_err(describe)? })
    }

    /// Decodes the supported pictures, and returns for each picture whether it is supported. All GPU work has completed
    /// on return.
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
            // Work may still be under way, also on nvJPEG's streams, and callers free the files.
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
        self.cropper.begin(device, pictures.len(), size).map_err(describe)?;
        for (index, group) in groups(&sizes, MAX_DECODED).into_iter().enumerate() {
            if index > 0 {
                // The decoder does not wait for this stream, so earlier users of the memory must have finished.
                self.wait()?;
            }
            let bytes = sizes[group.clone()].iter().sum();
            let grey = |bytes: usize| device.filled(bytes, GREY);
            let mut at = grow_buffer(&mut self.decoded, bytes, grey).map_err(describe)?.ptr;
            let mut tables = Vec::new();
            let (mut decoded, mut croppings) = (Vec::new(), Vec::new());
            let files: Vec<&[u8]> =
                numbered[group.clone()].iter().map(|(_, picture)| picture.bytes).collect();
            let files = copy_to_page_locked(&mut self.files, &files).map_err(describe)?;
            for (((number, picture), size), bytes) in
                numbered[group.clone()].iter().zip(&sizes[group]).zip(files)
            {
                let planes = Planes::new(picture.stored, at);
                decoded.push(nvjpeg::Picture { bytes, planes: planes.all() });
                croppings.push(Cropping::new(picture, planes, *number as u32, &mut tables));
                at += *size as u64;
            }
            let turn = submission.lock().unwrap_or_else(PoisonError::into_inner);
            self.state.decode(&decoded, stream.0)?;
            drop(turn);
            self.cropper.run(device, kernels, &croppings, &tables).map_err(describe)?;
            if let Some(decoded) = &self.decoded {
                stream.fill(decoded, bytes, GREY).map_err(describe)?;
            }
        }
        self.cropper.end(pictures.len()).map_err(describe)?;
        self.wait()
    }

    /// Blocks, without spinning, until all work on the stream is done.
    fn wait(&self) -> Result<(), String> {
        self.done.record(self.cropper.stream.0).and_then(|()| self.done.wait()).map_err(|e| e.to_string())
    }
}

/// Copies `files` to page-locked memory, which must not be in use.
fn copy_to_page_locked<'a>(
    memory: &'a mut Option<Pinned>,
    files: &[&[u8]],
) -> Result<Vec<&'a [u8]>, CudaError> {
    let bytes: usize = files.iter().map(|file| file.len()).sum();
    let memory = grow_pinned(memory, bytes)?;
    let mut at = 0;
    for file in files {
        memory.write(at, file);
        at += file.len();
    }
    let mut rest = memory.bytes(bytes);
    let next = |file: &&[u8]| {
        let (copy, others) = rest.split_at(file.len());
        rest = others;
        copy
    };
    Ok(files.iter().map(next).collect())
}
