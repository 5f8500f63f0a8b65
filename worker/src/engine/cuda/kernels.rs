//! Our own kernels: compiled for the GPU that is found, by NVRTC, once; then read from a cache on disk.

#![allow(unsafe_code)] // Module loading and launches are C calls; arguments are checked by the kernels' wrappers in `ops`.

mod constants;

use super::{
    cache,
    command::Geometry,
    device::{Device, Stream},
    dtype::DType,
    error::CudaError,
    ops::WARPGROUPS,
    profile::Profile,
};
use cudarc::{driver::sys, nvrtc};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_void},
};

/// Every kernel: files are parts of one source.
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
    include_str!("../../../kernels/loss.cu"),
    include_str!("../../../kernels/optimizer.cu"),
    include_str!("../../../kernels/adam.cu"),
    include_str!("../../../kernels/gather.cu"),
    include_str!("../../../kernels/gather_mixed.cu"),
    include_str!("../../../kernels/planes.cu"),
    include_str!("../../../kernels/crop.cu"),
    include_str!("../../../kernels/step.cu"),
);

/// One argument of a kernel as it is passed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value {
    Ptr(u64),
    U32(u32),
    F32(f32),
    U64(u64),
    F64(f64),
}

impl Value {
    fn bits(self) -> u64 {
        match self {
            Value::Ptr(v) | Value::U64(v) => v,
            Value::U32(v) => u64::from(v),
            Value::F32(v) => u64::from(v.to_bits()),
            Value::F64(v) => v.to_bits(),
        }
    }
}

/// The kernels of one dtype on one GPU.
pub(super) struct Kernels {
    module: sys::CUmodule,
    functions: std::sync::Mutex<HashMap<&'static str, sys::CUfunction>>,
    /// Whether kernels are set up early.
    early: bool,
    pub(super) profile: Profile,
}

// SAFETY: function handles may be used from any thread in whose context they were loaded.
unsafe impl Send for Kernels {}
// SAFETY: as above; all else in it is behind locks or never changes.
unsafe impl Sync for Kernels {}

/// Dynamic shared memory that kernels may ask for: what Hopper gives a block, less some of their own.
const MOST_SHARED_BYTES: i32 = 216 << 10;

impl Kernels {
    /// Loads the kernels, compiling them when the cache does not have them.
    pub(super) fn load(device: &Device, dtype: DType) -> Result<Self, CudaError> {
        let image = compiled(device.capability, dtype)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: a whole cubin; the driver copies it.
        unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) }
            .result()
            .map_err(CudaError::driver("loading kernels"))?;
        let early = device.capability >= 90 && std::env::var_os("LOCKSTEP_CUDA_PLAIN_LAUNCH").is_none();
        Ok(Self { module, functions: Default::default(), early, profile: Profile::default() })
    }

    /// The same, each of which begins when what was started before it has ended.
    pub(super) fn one_by_one(mut self) -> Self {
        self.early = false;
        self
    }

    /// Starts `name` on `stream`. The arguments must be those of the kernel, in order and type, and addresses among them
    /// those of memory that is as long as the kernel's description in `ops` says and is kept until it has ended.
    pub(super) fn launch(
        &self,
        stream: Stream,
        name: &'static str,
        geometry: Geometry,
        args: &[Value],
    ) -> Result<(), CudaError> {
        let function = self.function(name, geometry)?;
        let mut bits = [0u64; 40];
        assert!(args.len() <= bits.len(), "{name} has too many arguments");
        args.iter().zip(&mut bits).for_each(|(arg, bits)| *bits = arg.bits());
        let mut pointers: Vec<*mut c_void> =
            bits[..args.len()].iter_mut().map(|b| std::ptr::from_mut(b).cast()).collect();
        let [grid_x, grid_y, grid_z] = geometry.grid;
        let [block_x, block_y, block_z] = geometry.block;
        let none = sys::CUlaunchAttributeValue { pad: [0; 64] };
        let attribute = |id| sys::CUlaunchAttribute { id, pad: [0; 4], value: none };
        use sys::CUlaunchAttributeID as Id;
        let mut attributes = [
            attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION),
            attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION),
        ];
        // The kernel may be set up while the one before it still runs: its first statement waits.
        attributes[0].value.programmaticStreamSerializationAllowed = 1;
        attributes[1].value.clusterDim =
            sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: geometry.cluster, y: 1, z: 1 };
        let first = usize::from(!self.early);
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
            // SAFETY: `pointers` are as many live values as there are arguments. What the values are is checked elsewhere:
            // that they fit the kernel's parameters by the tests of `program/emitter/tests/signatures.rs`; that operands of a
            // step are alive, ordered and inside of their allocation by `command::verify`, before `Program` starts a list.
            // Regions are buffers of that `Program`, and those of the JPEG cropper its own: both wait for the GPU before they
            // drop them.
            unsafe { sys::cuLaunchKernelEx(&config, function, pointers.as_mut_ptr(), std::ptr::null_mut()) }
                .result()
                .map_err(|error| CudaError::Driver {
                    doing: name,
                    error: format!("{error:?} ({geometry:?})"),
                    retriable: super::error::may_pass(error.0),
                })
        };
        self.profile.around(stream, || name.into(), start)
    }

    fn function(&self, name: &'static str, geometry: Geometry) -> Result<sys::CUfunction, CudaError> {
        let mut functions = self.functions.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(*function);
        }
        let c_name = CString::new(name).unwrap_or_default();
        let mut function = std::ptr::null_mut();
        use sys::CUfunction_attribute_enum as A;
        // SAFETY: the module is loaded; the name ends in zero.
        unsafe {
            sys::cuModuleGetFunction(&mut function, self.module, c_name.as_ptr())
                .result()
                .map_err(CudaError::driver(name))?;
            // Kernels that ask for more than is given unasked; those with much of their own refuse.
            let most = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let _ = sys::cuFuncSetAttribute(function, most, MOST_SHARED_BYTES);
            if geometry.cluster > 8 {
                let _ = sys::cuFuncSetAttribute(
                    function,
                    A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
                    1,
                );
            }
        }
        functions.insert(name, function);
        Ok(function)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// The options of NVRTC for `capability` (90: 9.0) and `dtype`.
fn options(capability: u32, dtype: DType) -> Vec<String> {
    let own = if capability == WARPGROUPS { "a" } else { "" };
    let mut options = vec![
        format!("--gpu-architecture=sm_{capability}{own}"),
        "--std=c++17".into(),
        "-default-device".into(),
        "--extra-device-vectorization".into(),
    ];
    options.extend(constants::of(dtype).map(|(name, value)| format!("-D{name}={value}")));
    options
}

/// The machine code for `capability`.
fn compiled(capability: u32, dtype: DType) -> Result<Vec<u8>, CudaError> {
    let options = options(capability, dtype);
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two places for two numbers.
    let _ = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    let mut hash = Sha256::new();
    hash.update(SOURCE);
    options.iter().for_each(|o| hash.update(o));
    hash.update([major as u8, minor as u8]);
    let key: String = hash.finalize().iter().take(12).map(|b| format!("{b:02x}")).collect();
    let name = format!("kernels-sm{capability}-{}-{key}.cubin", dtype.name());
    if let Some(image) = cache::read(&name) {
        return Ok(image);
    }
    let image = compile(&options)?;
    cache::write(&name, &image);
    Ok(image)
}

/// Compiles [`SOURCE`].
fn compile(options: &[String]) -> Result<Vec<u8>, CudaError> {
    use nvrtc::result;
    let failed = |log: String| CudaError::Compile { target: options[0].clone(), log };
    let source = CString::new(SOURCE).map_err(|e| failed(e.to_string()))?;
    let program =
        result::create_program(&source, Some(c"lockstep.cu")).map_err(|e| failed(format!("{e:?}")))?;
    // SAFETY: the program was just created, and is destroyed below.
    unsafe {
        let done = result::compile_program(program, options);
        let outcome = match done {
            Ok(()) => {
                let mut size = 0;
                let _ = nvrtc::sys::nvrtcGetCUBINSize(program, &mut size);
                let mut image = vec![0u8; size];
                let _ = nvrtc::sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast());
                if size > 0 { Ok(image) } else { Err(failed("no machine code came out".into())) }
            }
            Err(error) => {
                let log = result::get_program_log(program)
                    .ok()
                    .and_then(|log| CStr::from_ptr(log.as_ptr()).to_str().map(str::to_owned).ok())
                    .unwrap_or_default();
                Err(failed(format!("{error:?}: {log}")))
            }
        };
        let _ = result::destroy_program(program);
        outcome
    }
}

#[cfg(test)]
mod tests;
