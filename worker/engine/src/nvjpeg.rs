//! Bindings to nvJPEG's hardware decoder: the used part of `nvjpeg.h`, loaded at run time. All errors are sentences.
//!
//! Undocumented behaviour: nvJPEG writes outputs without waiting for earlier work on the stream (seen on H100), so the
//! caller has to wait. A call decodes all pictures or none. Only one thread at a time may use a state.
#![allow(unsafe_code)] // A C API, called through its symbols.

use cudarc::driver::{result, sys::CUstream};
use libloading::os::unix::Library as Handle;
use lockstep_host::gpu::libraries::{self, Libraries, Library, check_loadable};
use std::{
    ffi::{c_int, c_uint, c_void},
    path::Path,
    ptr,
    sync::Arc,
};

type Status = c_int;
type Opaque = *mut c_void;

/// `NVJPEG_BACKEND_HARDWARE`.
const HARDWARE: c_int = 3;
/// `NVJPEG_OUTPUT_YUV`: one plane per component, of the component's size in the file. For other formats nvJPEG launches one
/// kernel per picture, which waits for the kernels of a training step.
const YUV: c_int = 1;
/// `NVJPEG_CSS_444`.
const CSS_444: c_int = 0;
/// `NVJPEG_FLAGS_DEFAULT`.
const FLAGS: c_uint = 0;
/// `NVJPEG_MAX_COMPONENT`.
const COMPONENTS: usize = 4;

/// `nvjpegImage_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Image {
    channel: [*mut u8; COMPONENTS],
    pitch: [usize; COMPONENTS],
}

type CreateEx = unsafe extern "C" fn(c_int, *mut c_void, *mut c_void, c_uint, *mut Opaque) -> Status;
type Create = unsafe extern "C" fn(Opaque, *mut Opaque) -> Status;
type Destroy = unsafe extern "C" fn(Opaque) -> Status;
type Info = unsafe extern "C" fn(Opaque, *mut c_uint, *mut c_uint) -> Status;
type ParseHeader = unsafe extern "C" fn(Opaque, *const u8, usize, Opaque) -> Status;
type Supported = unsafe extern "C" fn(Opaque, Opaque, *mut c_int) -> Status;
type PreAllocate = unsafe extern "C" fn(Opaque, Opaque, c_int, c_int, c_int, c_int, c_int) -> Status;
type Initialize = unsafe extern "C" fn(Opaque, Opaque, c_int, c_int, c_int) -> Status;
type DecodeBatched =
    unsafe extern "C" fn(Opaque, Opaque, *const *const u8, *const usize, *mut Image, CUstream) -> Status;

/// The functions of the loaded library.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Nvjpeg {
    create: CreateEx,
    destroy: Destroy,
    state_create: Create,
    state_destroy: Destroy,
    header_create: Create,
    header_destroy: Destroy,
    /// `None` in old versions, like `pre_allocate`.
    info: Option<Info>,
    pre_allocate: Option<PreAllocate>,
    parse_header: ParseHeader,
    supported: Supported,
    initialize: Initialize,
    decode: DecodeBatched,
}

impl Nvjpeg {
    /// Loads the library found on this machine; also returns its version, e.g. `13.0.1`.
    pub(crate) fn find() -> Result<(Self, String), String> {
        let libraries = Libraries::find();
        let library = libraries.get(Library::Nvjpeg).ok_or("nvJPEG is not found on this machine")?;
        Ok((Self::load(&library.path)?, library.version()?))
    }

    fn load(path: &Path) -> Result<Self, String> {
        Self::load_symbols(&*libraries::open(path)?).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn load_symbols(library: &Handle) -> Result<Self, String> {
        fn symbol<T: Copy>(library: &Handle, name: &str) -> Result<T, String> {
            // SAFETY: each symbol has the type that nvjpeg.h gives it.
            unsafe { library.get::<T>(name.as_bytes()) }.map(|s| *s).map_err(|e| format!("{name}: {e}"))
        }
        Ok(Self {
            create: symbol(library, "nvjpegCreateEx")?,
            destroy: symbol(library, "nvjpegDestroy")?,
            state_create: symbol(library, "nvjpegJpegStateCreate")?,
            state_destroy: symbol(library, "nvjpegJpegStateDestroy")?,
            header_create: symbol(library, "nvjpegJpegStreamCreate")?,
            header_destroy: symbol(library, "nvjpegJpegStreamDestroy")?,
            info: symbol(library, "nvjpegGetHardwareDecoderInfo").ok(),
            pre_allocate: symbol(library, "nvjpegDecodeBatchedPreAllocate").ok(),
            parse_header: symbol(library, "nvjpegJpegStreamParseHeader")?,
            supported: symbol(library, "nvjpegDecodeBatchedSupported")?,
            initialize: symbol(library, "nvjpegDecodeBatchedInitialize")?,
            decode: symbol(library, "nvjpegDecodeBatched")?,
        })
    }
}

/// A picture to decode: a file with three components, and the destinations of its planes on the GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Picture<'a> {
    pub(crate) bytes: &'a [u8],
    /// Planes of luma, blue and red chroma.
    pub(crate) planes: [Plane; 3],
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Plane {
    /// Address of a buffer with `pitch` bytes for each row of the component.
    pub(crate) address: u64,
    /// Bytes from one row to the next; at least the component's number of columns.
    pub(crate) pitch: usize,
}

/// The hardware decoders of the GPU that was current on the opening thread. The same GPU must be current whenever the value
/// is used or dropped.
#[derive(Debug)]
pub(crate) struct Hardware {
    library: Arc<Nvjpeg>,
    handle: Opaque,
}

// SAFETY: nvJPEG's documentation, "Thread safety": threads may share a handle, but each thread needs its own states.
unsafe impl Send for Hardware {}
// SAFETY: as above.
unsafe impl Sync for Hardware {}

impl Hardware {
    /// Opens the hardware decoders of the current GPU.
    pub(crate) fn open(library: &Arc<Nvjpeg>) -> Result<Self, String> {
        let mut handle = ptr::null_mut();
        // SAFETY: null allocators mean cudaMalloc and cudaHostAlloc; `drop` destroys the handle.
        match unsafe { (library.create)(HARDWARE, ptr::null_mut(), ptr::null_mut(), FLAGS, &mut handle) } {
            0 => Ok(Self { library: library.clone(), handle }),
            // ARCH_MISMATCH, IMPLEMENTATION_NOT_SUPPORTED
            7 | 9 => Err("this GPU has no JPEG decoder that nvJPEG can use".into()),
            status => Err(error_text("opening the GPU's JPEG decoder", status)),
        }
    }

    /// Number of decoders of the GPU, and number of pictures that each decodes at a time; `None` if nvJPEG does not report them.
    pub(crate) fn engines(&self) -> Option<(u32, u32)> {
        let (mut engines, mut cores) = (0, 0);
        // SAFETY: writes two integers.
        let status = unsafe { (self.library.info?)(self.handle, &mut engines, &mut cores) };
        (status == 0).then_some((engines, cores))
    }
}

impl Drop for Hardware {
    fn drop(&mut self) {
        // SAFETY: created by `open`; all states, which hold a reference to `self`, have been dropped.
        let _ = unsafe { (self.library.destroy)(self.handle) };
    }
}

/// State for decoding groups of pictures. The next group may begin after the stream has completed the previous one.
#[derive(Debug)]
pub(crate) struct State {
    hardware: Arc<Hardware>,
    state: Opaque,
    header: Opaque,
}

// SAFETY: any single thread may use a state; all methods take `&mut self`.
unsafe impl Send for State {}

impl State {
    /// A state for the decoders `hardware`.
    pub(crate) fn new(hardware: &Arc<Hardware>) -> Result<Self, String> {
        let null = ptr::null_mut();
        let mut this = Self { hardware: hardware.clone(), state: null, header: null };
        let Nvjpeg { state_create, header_create, pre_allocate, .. } = *hardware.library;
        // SAFETY: the handle is open; `drop` destroys what was created.
        unsafe {
            check("a decoding state", state_create(hardware.handle, &mut this.state))?;
            check("a header's state", header_create(hardware.handle, &mut this.header))?;
            if let Some(pre_allocate) = pre_allocate {
                // Pre-allocation of any size makes the decoder keep its memory between batches.
                let status = pre_allocate(hardware.handle, this.state, 1, 1, 1, CSS_444, YUV);
                if status != 0 {
                    tracing::debug!("{}", error_text("pre-allocating memory", status));
                }
            }
        }
        Ok(this)
    }

    /// Whether the decoder supports this file.
    pub(crate) fn supports(&mut self, bytes: &[u8]) -> bool {
        let Hardware { library, handle } = &*self.hardware;
        let Nvjpeg { parse_header, supported, .. } = **library;
        let mut unsupported = -1;
        // SAFETY: the bytes are only read during the call.
        let answered = unsafe {
            parse_header(*handle, bytes.as_ptr(), bytes.len(), self.header) == 0
                && supported(*handle, self.header, &mut unsupported) == 0
        };
        // 0 means yes.
        answered && unsupported == 0
    }

    /// Decodes supported pictures into planes, asynchronously on `stream`.
    /// If a picture cannot be decoded, the call fails, and nvJPEG does not report which picture it was.
    pub(crate) fn decode(&mut self, pictures: &[Picture<'_>], stream: CUstream) -> Result<(), String> {
        let Hardware { library, handle } = &*self.hardware;
        let Nvjpeg { initialize, decode, .. } = **library;
        let data: Vec<*const u8> = pictures.iter().map(|p| p.bytes.as_ptr()).collect();
        let lengths: Vec<usize> = pictures.iter().map(|p| p.bytes.len()).collect();
        let mut images: Vec<Image> = pictures
            .iter()
            .map(|p| {
                let mut image = Image { channel: [ptr::null_mut(); COMPONENTS], pitch: [0; COMPONENTS] };
                for (channel, plane) in p.planes.iter().enumerate() {
                    image.channel[channel] = plane.address as *mut u8;
                    image.pitch[channel] = plane.pitch;
                }
                image
            })
            .collect();
        let count = c_int::try_from(pictures.len()).map_err(|e| e.to_string())?;
        // SAFETY: each list has `count` entries; callers keep the planes and files until the stream has completed the call.
        unsafe {
            check("beginning a batch", initialize(*handle, self.state, count, 1, YUV))?;
            check(
                "decoding a batch",
                decode(*handle, self.state, data.as_ptr(), lengths.as_ptr(), images.as_mut_ptr(), stream),
            )
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let Nvjpeg { state_destroy, header_destroy, .. } = *self.hardware.library;
        // SAFETY: handles created by `new`, or null.
        unsafe {
            for (created, destroy) in [(self.header, header_destroy), (self.state, state_destroy)] {
                if !created.is_null() {
                    let _ = destroy(created);
                }
            }
        }
    }
}

fn check(doing: &str, status: Status) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(error_text(doing, status)) }
}

fn error_text(doing: &str, status: Status) -> String {
    // `nvjpegStatus_t`.
    let names = [
        "SUCCESS",
        "NOT_INITIALIZED",
        "INVALID_PARAMETER",
        "BAD_JPEG",
        "JPEG_NOT_SUPPORTED",
        "ALLOCATOR_FAILURE",
        "EXECUTION_FAILED",
        "ARCH_MISMATCH",
        "INTERNAL_ERROR",
        "IMPLEMENTATION_NOT_SUPPORTED",
        "INCOMPLETE_BITSTREAM",
    ];
    let name = usize::try_from(status).ok().and_then(|s| names.get(s)).unwrap_or(&"an unknown status");
    format!("{doing}: nvJPEG returned {name} ({status})")
}

/// The hardware decoders of CUDA's GPU 0, e.g. `8 engines`. Temporarily opens a context on this GPU.
///
/// # Errors
/// The GPU has no decoder, or this cannot be determined. The error is a sentence.
pub fn hardware() -> Result<String, String> {
    check_loadable(&[Library::Driver])?;
    let library = Arc::new(Nvjpeg::find()?.0);
    let open_error = |error: result::DriverError| format!("GPU 0 cannot be opened: {error}");
    result::init().map_err(open_error)?;
    let device = result::device::get(0).map_err(open_error)?;
    // SAFETY: released below, after the decoder is dropped.
    unsafe {
        let context = result::primary_ctx::retain(device).map_err(open_error)?;
        let found = result::ctx::set_current(context).map_err(open_error).and_then(|()| {
            let hardware = Hardware::open(&library)?;
            Ok(match hardware.engines() {
                Some((engines, _)) => format!("{engines} engines"),
                None => "engines, whose number nvJPEG does not report".into(),
            })
        });
        let _ = result::primary_ctx::release(device);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_library_is_named_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("libnvjpeg.so.13");
        std::fs::write(&path, "not a library").unwrap();
        let error = Nvjpeg::load(&path).unwrap_err();
        assert!(error.contains("libnvjpeg.so.13"), "{error}");
    }

    #[test]
    fn a_missing_symbol_is_named_in_the_error() {
        let error = Nvjpeg::load(Path::new("libc.so.6")).unwrap_err();
        assert!(error.contains("libc.so.6") && error.contains("nvjpegCreateEx"), "{error}");
    }

    #[test]
    fn errors_contain_the_name_of_the_status() {
        assert_eq!(error_text("decoding a batch", 3), "decoding a batch: nvJPEG returned BAD_JPEG (3)");
        assert!(error_text("x", 99).contains("unknown status (99)"));
        assert_eq!(check("x", 0), Ok(()));
    }

    /// The layout of nvjpeg.h on 64-bit machines.
    #[test]
    fn the_layout_of_an_image_matches_the_header() {
        assert_eq!(size_of::<Image>(), 64);
        assert_eq!(std::mem::offset_of!(Image, pitch), 32);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn gpu_hardware_decoders_are_found() {
        let found = hardware();
        eprintln!("nvJPEG {}: {found:?}", Nvjpeg::find().unwrap().1);
        found.unwrap();
    }
}
