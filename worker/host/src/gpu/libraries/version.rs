//! The version of a library, as the library itself reports it.

use super::{FoundLibrary, Library, open};

impl FoundLibrary {
    /// The version, such as `13.0`, `9.19.0` or `2.28.9`. NVML's version is not queried here.
    ///
    /// # Errors
    /// The library cannot be loaded, lacks the function that reports its version, or this function fails. The error is a sentence.
    pub fn version(&self) -> Result<String, String> {
        let shown = self.path.display();
        let handle = open(&self.path)?;
        let symbol_error = |e: libloading::Error| format!("{shown}: {e}");
        let check = |status: i32| match status {
            0 => Ok(()),
            _ => Err(format!("{shown} does not report its version (error {status})")),
        };
        let three_parts = |v: usize| format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100);
        type Pointer = unsafe extern "C" fn(*mut i32) -> i32;
        type Pair = unsafe extern "C" fn(*mut i32, *mut i32) -> i32;
        type Plain = unsafe extern "C" fn() -> usize;
        type Property = unsafe extern "C" fn(i32, *mut i32) -> i32;
        let (mut a, mut b) = (0, 0);
        // SAFETY: each symbol has the type that NVIDIA's headers declare, and the pointers are valid.
        unsafe {
            Ok(match self.which {
                Library::Driver => {
                    check(handle.get::<Pointer>(b"cuDriverGetVersion").map_err(symbol_error)?(&mut a))?;
                    format!("{}.{}", a / 1000, a % 1000 / 10)
                }
                Library::Nvrtc => {
                    check(handle.get::<Pair>(b"nvrtcVersion").map_err(symbol_error)?(&mut a, &mut b))?;
                    format!("{a}.{b}")
                }
                Library::Nccl => {
                    check(handle.get::<Pointer>(b"ncclGetVersion").map_err(symbol_error)?(&mut a))?;
                    three_parts(usize::try_from(a).unwrap_or(0))
                }
                Library::Cudnn => {
                    three_parts(handle.get::<Plain>(b"cudnnGetVersion").map_err(symbol_error)?())
                }
                Library::CublasLt => {
                    three_parts(handle.get::<Plain>(b"cublasLtGetVersion").map_err(symbol_error)?())
                }
                Library::Nvjpeg => {
                    let get_property = handle.get::<Property>(b"nvjpegGetProperty").map_err(symbol_error)?;
                    let mut parts = [0; 3];
                    for (property, part) in (0..).zip(&mut parts) {
                        check(get_property(property, part))?;
                    }
                    parts.map(|part| part.to_string()).join(".")
                }
                Library::Nvml => String::new(),
            })
        }
    }
}
