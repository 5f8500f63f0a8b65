//! Compiles every kernel for every supported compute capability. NVRTC needs no GPU.

use super::*;
use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW};
use lockstep_host::gpu::libraries::{FOLDERS_VARIABLE, Libraries};
use std::path::PathBuf;

/// The path at which `tests/run` installs NVRTC.
fn nvrtc_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/nvrtc/nvidia/cu13/lib/libnvrtc.so.13")
}

/// Loads NVRTC before cudarc does, so that dlopen by bare name finds the loaded library.
fn load_nvrtc() {
    let is_set = std::env::var_os(FOLDERS_VARIABLE).is_some();
    let installed = Libraries::find().get(Library::Nvrtc).map(|library| library.path.clone());
    let path = if nvrtc_path().is_file() && !is_set { Some(nvrtc_path()) } else { installed };
    let path = path.unwrap_or_else(|| {
        panic!(
            "NVRTC is not on this machine, so no kernel can be compiled. `bash tests/run` installs it; or, in the \
             repository: python3 -m pip install --no-deps --target target/nvrtc 'nvidia-cuda-nvrtc==13.*'; or name \
             its folder in {FOLDERS_VARIABLE}"
        )
    });
    let load = |path: &Path| {
        // SAFETY: NVRTC's initialisers have no preconditions, and the library is never unloaded.
        let loaded = unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
        std::mem::forget(loaded.unwrap_or_else(|e| panic!("{}: {e}", path.display())));
    };
    // NVRTC opens its library of built-ins by bare name, too.
    for file in path.parent().into_iter().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten()) {
        let file = file.unwrap();
        if file.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.") {
            load(&file.path());
        }
    }
    load(&path);
    libraries::check_loadable(&[Library::Nvrtc]).unwrap();
}

/// Little optimisation, which takes a tenth of the time. The result is still machine code, since only the assembler knows
/// which instructions a GPU has.
const QUICK: &[&str] = &["--Ofast-compile=max"];

#[test]
fn every_kernel_compiles_for_hopper_in_every_number_format() {
    load_nvrtc();
    compile_each(&[90], QUICK, |_, _| Ok(())).unwrap();
}

/// `tests/run` skips these tests, except `tests/run full`.
mod full {
    use super::*;

    #[test]
    fn every_kernel_compiles_for_every_other_capability() {
        let others: Vec<u32> = CAPABILITIES.into_iter().filter(|c| *c != 90).collect();
        load_nvrtc();
        compile_each(&others, QUICK, |_, _| Ok(())).unwrap();
    }

    #[test]
    #[ignore = "takes minutes: optimised as in the engine"]
    fn slow_every_kernel_compiles_as_the_engine_compiles_it() {
        load_nvrtc();
        compile_each(&CAPABILITIES, &[], |_, _| Ok(())).unwrap();
    }
}

/// If kernels defined a constant themselves, it could silently differ from the host's constant.
#[test]
fn kernels_use_the_host_s_constants_and_do_not_redefine_them() {
    for (name, value) in constants::for_dtype(DType::F16) {
        let is_name =
            |text: &str| text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == name);
        assert!(SOURCE.lines().any(is_name), "no kernel uses {name} ({value})");
        let redefinition =
            SOURCE.lines().filter_map(|line| line.trim_start().strip_prefix("#define")).find(|define| {
                define.trim_start().split(|c: char| !c.is_alphanumeric() && c != '_').next() == Some(name)
            });
        assert_eq!(redefinition, None, "{name} is {value} already");
    }
}

#[test]
fn a_kernel_that_does_not_compile_is_an_error_with_the_compiler_s_message() {
    load_nvrtc();
    let mut options = options(90, DType::F16);
    // This macro replaces the name of a function.
    options.push("-Dmax_nan=no such thing".into());
    let error = compile(&options).unwrap_err().to_string();
    assert!(error.contains("sm_90a") && error.contains("lockstep.cu"), "{error}");
}

/// Files damaged by a machine's crash, and a file with a valid header but without machine code.
#[test]
#[ignore = "needs a GPU"]
fn gpu_damaged_kernels_in_the_cache_are_compiled_again() {
    let device = Device::open(0).unwrap();
    let options = options(device.capability, DType::F32);
    let name = cache_name(device.capability, DType::F32, &options);
    drop(Kernels::load(&device, DType::F32).unwrap());
    let path = lockstep_host::cache::dir().unwrap().join(&name);
    let whole = std::fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for (case, damaged) in
        [("emptied", &[][..]), ("cut", &whole[..whole.len() / 2]), ("flipped", &flipped[..])]
    {
        std::fs::write(&path, damaged).unwrap();
        assert!(load_cached(&name).is_none(), "{case}");
        assert!(!path.exists(), "{case}: the file remains");
    }
    cache::write(&name, b"neither machine code nor PTX\0");
    drop(Kernels::load(&device, DType::F32).unwrap());
    assert!(load_cached(&name).is_some(), "the kernel was not compiled again");
}

#[test]
fn a_launch_that_needs_too_much_shared_memory_is_an_error() {
    // An A10 (8.6) has 99 KB for a block, an H100 227.
    for (bytes, max_bytes, fits) in
        [(0, 99 << 10, true), (99 << 10, 99 << 10, true), (164 << 10, 99 << 10, false)]
    {
        let result = check_shared_memory("gather_scaled", bytes, max_bytes);
        assert_eq!(result.is_ok(), fits, "{bytes} of {max_bytes}");
        if let Err(error) = result {
            assert!(error.to_string().starts_with("gather_scaled needs 167936 bytes"), "{error}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_kernels_that_resize_may_use_all_of_the_shared_memory() {
    let device = Device::open(0).unwrap();
    let kernels = Kernels::load(&device, DType::F32).unwrap();
    for name in ["gather_scaled", "crop"] {
        let (_, max_bytes) = kernels.function(name).unwrap();
        assert!(max_bytes > 48 << 10 && max_bytes <= device.shared_bytes, "{name}: {max_bytes}");
    }
}
