//! The version of a library, as the library itself reports it.

use super::{FoundLibrary, Library};
use libloading::os::unix::{Library as Handle, RTLD_LAZY, RTLD_LOCAL};

impl FoundLibrary {
    /// The version, such as `13.0`, `9.19.0` or `2.28.9`. NVML's version is not queried here.
    ///
    /// # Errors
    /// The library cannot be loaded, lacks the symbol, or fails; a sentence.
    pub fn version(&self) -> Result<String, String> {
        let shown = self.path.display();
        // SAFETY: loading one of NVIDIA's libraries runs initialisers that have no preconditions.
        let handle = unsafe { Handle::open(Some(&self.path), RTLD_LAZY | RTLD_LOCAL) }
            .map_err(|e| format!("{shown} cannot be loaded: {e}"))?;
        let lacks = |e: libloading::Error| format!("{shown}: {e}");
        let failed = |status: i32| format!("{shown} does not report its version (error {status})");
        let three = |v: usize| format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100);
        type Pointer = unsafe extern "C" fn(*mut i32) -> i32;
        type Pair = unsafe extern "C" fn(*mut i32, *mut i32) -> i32;
        type Plain = unsafe extern "C" fn() -> usize;
        type Property = unsafe extern "C" fn(i32, *mut i32) -> i32;
        let (mut a, mut b) = (0, 0);
        let pointer = |name: &str, value: &mut i32| -> Result<(), String> {
            // SAFETY: these functions take a pointer to an int and return an enumeration.
            let status = unsafe {
                let ask = handle.get::<Pointer>(name.as_bytes()).map_err(lacks)?;
                ask(value)
            };
            if status == 0 { Ok(()) } else { Err(failed(status)) }
        };
        let plain = |name: &str| -> Result<usize, String> {
            // SAFETY: these functions take no arguments and return a size_t.
            unsafe { Ok(handle.get::<Plain>(name.as_bytes()).map_err(lacks)?()) }
        };
        let version = match self.which {
            Library::Driver => {
                pointer("cuDriverGetVersion", &mut a)?;
                format!("{}.{}", a / 1000, a % 1000 / 10)
            }
            Library::Nvrtc => {
                // SAFETY: nvrtcVersion takes two pointers to ints.
                let status = unsafe {
                    let ask = handle.get::<Pair>(b"nvrtcVersion").map_err(lacks)?;
                    ask(&mut a, &mut b)
                };
                if status != 0 {
                    return Err(failed(status));
                }
                format!("{a}.{b}")
            }
            Library::Nccl => {
                pointer("ncclGetVersion", &mut a)?;
                three(usize::try_from(a).unwrap_or(0))
            }
            Library::Cudnn => three(plain("cudnnGetVersion")?),
            Library::CublasLt => three(plain("cublasLtGetVersion")?),
            Library::Nvjpeg => {
                let of = |which: i32| {
                    let mut value = 0;
                    // SAFETY: nvjpegGetProperty takes a number and a pointer to an int.
                    let status = unsafe {
                        let ask = handle.get::<Property>(b"nvjpegGetProperty").map_err(lacks)?;
                        ask(which, &mut value)
                    };
                    if status == 0 { Ok(value) } else { Err(failed(status)) }
                };
                format!("{}.{}.{}", of(0)?, of(1)?, of(2)?)
            }
            Library::Nvml => String::new(),
        };
        // Unloading CUDA's libraries can crash.
        std::mem::forget(handle);
        Ok(version)
    }
}
