//! Our own kernels. A package installs their machine code. Otherwise NVRTC compiles them once for the GPU in use, and
//! later runs load them from a cache on disk.

#![allow(unsafe_code)] // Module loading and launches are C calls; the methods in `ops` check arguments.

mod constants;

use super::{
    command::Geometry,
    device::{Device, Stream},
    dtype::DType,
    error::{CudaError, Result},
    ops::WGMMA_CAPABILITY,
    profile::Profile,
};
use cudarc::{driver::sys, nvrtc};
use lockstep_host::{
    cache,
    gpu::libraries::{self, Library},
    lock,
};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_void},
    path::Path,
    sync::Mutex,
    time::Duration,
};

/// The compute capabilities, times 10, for which packages have kernels: Ampere (8.0, 8.6), Ada (8.9), Hopper (9.0, compiled as
/// sm_90a), Blackwell (10.0).
const CAPABILITIES: [u32; 5] = [80, 86, 89, 90, 100];
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// The source of all kernels: all files form one translation unit.
pub(super) const SOURCE: &str = concat!(
    include_str!("../../../kernels/instructions.cu"),
    include_str!("../../../kernels/numbers.cu"),
    include_str!("../../../kernels/peers.cu"),
    include_str!("../../../kernels/channel_sums.cu"),
    include_str!("../../../kernels/norm_forward.cu"),
    include_str!("../../../kernels/norm_backward.cu"),
    include_str!("../../../kernels/norm_frozen.cu"),
    include_str!("../../../kernels/norm_through.cu"),
    include_str!("../../../kernels/bottleneck.cu"),
    include_str!("../../../kernels/bottleneck_forward.cu"),
    include_str!("../../../kernels/block_end.cu"),
    include_str!("../../../kernels/pool.cu"),
    include_str!("../../../kernels/elementwise.cu"),
    include_str!("../../../kernels/rows.cu"),
    include_str!("../../../kernels/loss.cu"),
    include_str!("../../../kernels/optimizer.cu"),
    include_str!("../../../kernels/sample.cu"),
    include_str!("../../../kernels/channels.cu"),
    include_str!("../../../kernels/margin.cu"),
    include_str!("../../../kernels/split_loss.cu"),
    include_str!("../../../kernels/adam.cu"),
    include_str!("../../../kernels/muon.cu"),
    include_str!("../../../kernels/gather.cu"),
    include_str!("../../../kernels/gather_mixed.cu"),
    include_str!("../../../kernels/planes.cu"),
    include_str!("../../../kernels/crop.cu"),
    include_str!("../../../kernels/step.cu"),
);

/// The loaded kernels of one floating-point format on one GPU.
pub(super) struct Kernels {
    module: sys::CUmodule,
    /// By name: the function, and its maximum dynamic shared memory per block, in bytes.
    functions: Mutex<HashMap<&'static str, (sys::CUfunction, u32)>>,
    /// The GPU's maximum shared memory per block, in bytes.
    shared_bytes: u32,
    /// Whether kernels use programmatic dependent launch.
    uses_dependent_launch: bool,
    pub(super) profile: Profile,
}

// SAFETY: function handles may be used from any thread with the context in which they were loaded.
unsafe impl Send for Kernels {}
// SAFETY: as above; all other fields are behind locks or never change.
unsafe impl Sync for Kernels {}

/// Maximum wait for another rank of this machine that compiles the kernels, which takes up to 25 seconds.
const MAX_COMPILE_WAIT: Duration = Duration::from_secs(60);

impl Kernels {
    /// Loads the kernels. If they are not in the cache, one rank of a machine compiles them while the others wait.
    pub(super) fn load(device: &Device, dtype: DType) -> Result<Self> {
        let options = options(device.capability, dtype);
        let name = cache_name(device.capability, dtype, &options);
        let module = load_cached(&name).map_or_else(|| load_or_compile(&name, &options), Ok)?;
        let uses_dependent_launch =
            device.capability >= 90 && std::env::var_os("LOCKSTEP_CUDA_PLAIN_LAUNCH").is_none();
        Ok(Self {
            module,
            functions: Default::default(),
            shared_bytes: device.shared_bytes,
            uses_dependent_launch,
            profile: Profile::default(),
        })
    }

    /// The same kernels without programmatic dependent launch: each starts after all earlier work has completed.
    pub(super) fn without_dependent_launch(mut self) -> Self {
        self.uses_dependent_launch = false;
        self
    }

    /// Launches the kernel `name` on `stream`. `args` are the bits of each argument, and must match the kernel's parameters in number,
    /// order and types. Addresses must refer to memory of the size that `ops` documents. The memory must stay allocated until the kernel
    /// has completed.
    pub(super) fn launch(
        &self,
        stream: Stream,
        name: &'static str,
        geometry: Geometry,
        args: &[u64],
    ) -> Result {
        let (function, max_bytes) = self.function(name)?;
        check_shared_memory(name, geometry.shared_bytes, max_bytes)?;
        // The driver only reads the arguments.
        let mut pointers: Vec<*mut c_void> =
            args.iter().map(|arg| std::ptr::from_ref(arg).cast_mut().cast()).collect();
        let [grid_x, grid_y, grid_z] = geometry.grid;
        let [block_x, block_y, block_z] = geometry.block;
        let zeros = sys::CUlaunchAttributeValue { pad: [0; 64] };
        let attribute = |id| sys::CUlaunchAttribute { id, pad: [0; 4], value: zeros };
        use sys::CUlaunchAttributeID as Id;
        let mut attributes = [
            attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION),
            attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION),
        ];
        // The kernel may start while the preceding kernel still runs, and waits for that kernel in its first statement (`pdl_wait`).
        attributes[0].value.programmaticStreamSerializationAllowed = 1;
        attributes[1].value.clusterDim =
            sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: geometry.cluster, y: 1, z: 1 };
        // Leaves out the attributes that do not apply.
        let first = usize::from(!self.uses_dependent_launch);
        let attributes = &mut attributes[first..1 + usize::from(geometry.cluster > 1)];
        let config = sys::CUlaunchConfig {
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: block_x,
            blockDimY: block_y,
            blockDimZ: block_z,
            sharedMemBytes: geometry.shared_bytes,
            hStream: stream.0,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let start = || {
            // SAFETY: `pointers` has one pointer to a live value per argument. The tests in `program/emitter/tests/signatures.rs` check
            // that arguments fit the kernel's parameters. Before `Program` launches a list, `command::verify` checks that operands are
            // allocated, ordered and in bounds. `Program` and the JPEG cropper own the buffers, and wait for the GPU before dropping them.
            unsafe { sys::cuLaunchKernelEx(&config, function, pointers.as_mut_ptr(), std::ptr::null_mut()) }
                .result()
                .map_err(|error| CudaError::Driver {
                    doing: name,
                    error: format!("{error:?} ({geometry:?})"),
                    retriable: super::error::may_be_temporary(error.0),
                })
        };
        self.profile.time(stream, start)
    }

    /// A kernel, loaded on its first use, and its maximum dynamic shared memory per block in bytes.
    fn function(&self, name: &'static str) -> Result<(sys::CUfunction, u32)> {
        let mut functions = lock(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(*function);
        }
        let c_name = CString::new(name).unwrap_or_default();
        let (mut function, mut static_bytes) = (std::ptr::null_mut(), 0);
        use sys::CUfunction_attribute_enum as A;
        // SAFETY: the module is loaded; the name is zero-terminated.
        unsafe {
            sys::cuModuleGetFunction(&mut function, self.module, c_name.as_ptr())
                .result()
                .map_err(CudaError::driver(name))?;
            sys::cuFuncGetAttribute(&mut static_bytes, A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
                .result()
                .map_err(CudaError::driver(name))?;
        }
        // The kernel may use all shared memory of a block, except what its static shared memory takes.
        let max_bytes = self.shared_bytes.saturating_sub(static_bytes as u32);
        let attribute = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module.
        unsafe { sys::cuFuncSetAttribute(function, attribute, max_bytes.cast_signed()) }
            .result()
            .map_err(CudaError::driver(name))?;
        functions.insert(name, (function, max_bytes));
        Ok((function, max_bytes))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// Checks that a block's dynamic shared memory, `bytes`, fits. Only kernels that resize wide pictures can need too much.
fn check_shared_memory(kernel: &str, bytes: u32, max_bytes: u32) -> Result {
    if bytes <= max_bytes {
        return Ok(());
    }
    Err(CudaError::Unsupported(format!(
        "{kernel} needs {bytes} bytes of shared memory for pictures of this width, but this GPU has {max_bytes}. Train from a copy \
         with smaller pictures (lockstep dataset prepare)"
    )))
}

/// NVRTC's options for a compute capability, times 10, and a floating-point format.
fn options(capability: u32, dtype: DType) -> Vec<String> {
    let suffix = if capability == WGMMA_CAPABILITY { "a" } else { "" };
    let mut options = vec![
        format!("--gpu-architecture=sm_{capability}{suffix}"),
        "--std=c++17".into(),
        "-default-device".into(),
        "--extra-device-vectorization".into(),
    ];
    options.extend(constants::for_dtype(dtype).map(|(name, value)| format!("-D{name}={value}")));
    options
}

/// Writes the kernels for every GPU of [`CAPABILITIES`] in every floating-point format into `dir`, under the names that [`Kernels::load`]
/// reads. Copies installed kernels, and compiles others, which needs NVRTC but no GPU, and takes minutes.
///
/// # Errors
/// NVRTC is missing or rejects the kernels, or `dir` cannot be written.
pub fn compile_all(dir: &Path) -> Result<(), String> {
    if lockstep_host::cache::installed().is_none() {
        libraries::check_loadable(&[Library::Nvrtc])?;
    }
    compile_each(&CAPABILITIES, &[], |name, image| {
        cache::write_file(dir, name, image).map_err(|e| format!("{}: {e}", dir.join(name).display()))
    })
}

/// Compiles the kernels for these compute capabilities in every floating-point format. With `extra_options`, also compiles installed
/// kernels. Calls `write` with the name and the content of each file.
fn compile_each(
    capabilities: &[u32],
    extra_options: &[&str],
    write: impl Fn(&str, &[u8]) -> Result<(), String> + Sync,
) -> Result<(), String> {
    let cases: Vec<_> = capabilities.iter().flat_map(|c| DTYPES.map(|dtype| (*c, dtype))).collect();
    let compile_one = |(capability, dtype)| {
        let mut options = options(capability, dtype);
        let name = cache_name(capability, dtype, &options);
        options.extend(extra_options.iter().map(|option| (*option).to_owned()));
        let installed = if extra_options.is_empty() { cache::read_installed(&name) } else { None };
        let image = installed.map_or_else(|| compile(&options), Ok);
        write(&name, &image.map_err(|e| format!("{capability} {}: {e}", dtype.name()))?)
    };
    let failures: Vec<String> = cases.into_par_iter().filter_map(|case| compile_one(case).err()).collect();
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

/// Name of the machine code in the cache.
fn cache_name(capability: u32, dtype: DType, options: &[String]) -> String {
    let mut hash = Sha256::new();
    hash.update(SOURCE);
    options.iter().for_each(|o| hash.update(o));
    let key = hex::encode(&hash.finalize()[..12]);
    format!("kernels-sm{capability}-{}-{key}.cubin", dtype.name())
}

/// Loads the installed module, or else the module in the cache. Removes a file of the cache that the driver cannot load.
fn load_cached(name: &str) -> Option<sys::CUmodule> {
    let warn = |e: &CudaError| tracing::warn!("the installed {name} cannot be used: {e}");
    let installed = cache::read_installed(name).and_then(|image| load_module(&image).inspect_err(warn).ok());
    installed.or_else(|| load_module(&cache::read(name)?).inspect_err(|e| cache::remove(name, e)).ok())
}

/// Compiles the kernels. If another rank of this machine is compiling them, waits and loads that rank's module instead.
fn load_or_compile(name: &str, options: &[String]) -> Result<sys::CUmodule> {
    let _one_at_a_time = cache::lock(cache::dir(), name, MAX_COMPILE_WAIT);
    if let Some(module) = load_cached(name) {
        return Ok(module);
    }
    let image = compile(options)?;
    cache::write(name, &image);
    load_module(&image)
}

/// Loads machine code. `image` must be undamaged: the driver crashes on truncated or damaged machine code.
fn load_module(image: &[u8]) -> Result<sys::CUmodule> {
    let mut module = std::ptr::null_mut();
    // SAFETY: NVRTC produced the image; the driver copies it.
    unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) }
        .result()
        .map_err(CudaError::driver("loading kernels"))?;
    Ok(module)
}

/// Compiles [`SOURCE`] to machine code.
fn compile(options: &[String]) -> Result<Vec<u8>> {
    use nvrtc::result;
    libraries::check_loadable(&[Library::Nvrtc]).map_err(CudaError::Missing)?;
    let compile_error = |log: String| CudaError::Compile { target: options[0].clone(), log };
    let source = CString::new(SOURCE).map_err(|e| compile_error(e.to_string()))?;
    let program =
        result::create_program(&source, Some(c"lockstep.cu")).map_err(|e| compile_error(format!("{e:?}")))?;
    // SAFETY: the program was just created and is destroyed below.
    unsafe {
        let outcome = match result::compile_program(program, options) {
            Ok(()) => {
                let mut size = 0;
                let size_result = nvrtc::sys::nvrtcGetCUBINSize(program, &mut size).result();
                let mut image = vec![0u8; size];
                let copied = size_result
                    .and_then(|()| nvrtc::sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()).result());
                match copied {
                    Ok(()) if size > 0 => Ok(image),
                    copied => Err(compile_error(format!("there is no machine code: {copied:?}"))),
                }
            }
            Err(error) => {
                let log = result::get_program_log(program)
                    .ok()
                    .and_then(|log| CStr::from_ptr(log.as_ptr()).to_str().map(str::to_owned).ok())
                    .unwrap_or_default();
                Err(compile_error(format!("{error:?}: {log}")))
            }
        };
        let _ = result::destroy_program(program);
        outcome
    }
}

#[cfg(test)]
mod tests;
