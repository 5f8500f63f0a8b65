//! NVIDIA's libraries: their paths and versions on this machine, and the environment in which a rank process finds them.
//!
//! cudarc opens libraries by bare names and panics if a library is missing, so callers of cudarc call
//! [`check_loadable`] first. cudarc does not try `libnccl.so.2`, the only name in NVIDIA's packages. So [`Libraries::environment`]
//! creates a folder with a link `libnccl.so`, and adds it to `LD_LIBRARY_PATH`, together with the folders of the
//! other libraries.
#![allow(unsafe_code)] // Loading a library runs its initialisers; versions are queried by symbol.

use libloading::os::unix::{Library as Handle, RTLD_LAZY, RTLD_LOCAL};
use sha2::{Digest, Sha256};
use std::{
    ffi::{OsStr, OsString},
    fs, io,
    mem::ManuallyDrop,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use crate::cache;
use folders::{Folders, folders};
use reexec::link;

mod folders;
mod reexec;
#[cfg(test)]
mod tests;
mod version;

pub use reexec::{links_dir, reexec_if_needed};

/// The environment variable for folders to search first, separated by `:`.
pub const FOLDERS_VARIABLE: &str = "LOCKSTEP_CUDA_LIBS";
/// The environment variable for folders that the dynamic linker searches in addition to its own list.
const LIBRARY_PATH_VARIABLE: &str = "LD_LIBRARY_PATH";

/// A library that GPU ranks use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// The driver, `libcuda`.
    Driver,
    /// The driver's management library, which lists GPUs and measures them.
    Nvml,
    /// Compiles Lockstep's kernels for the installed GPU, unless a package has installed them.
    Nvrtc,
    Cudnn,
    /// Matrix products, which some of cuDNN's engines use.
    CublasLt,
    /// Communication between GPUs.
    Nccl,
    /// Decodes JPEG files on the GPU.
    Nvjpeg,
}

impl Library {
    pub const ALL: [Self; 7] =
        [Self::Driver, Self::Nvml, Self::Nvrtc, Self::Cudnn, Self::CublasLt, Self::Nccl, Self::Nvjpeg];

    /// The name for messages, such as `cuDNN`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "CUDA driver",
            Self::Nvml => "NVML",
            Self::Nvrtc => "NVRTC",
            Self::Cudnn => "cuDNN",
            Self::CublasLt => "cuBLASLt",
            Self::Nccl => "NCCL",
            Self::Nvjpeg => "nvJPEG",
        }
    }

    /// The file names of the library, in order of preference.
    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1"],
            Self::Nvml => &["libnvidia-ml.so.1"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Self::Cudnn => &["libcudnn.so.9"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
            Self::Nccl => &["libnccl.so.2"],
            Self::Nvjpeg => &["libnvjpeg.so.13", "libnvjpeg.so.12"],
        }
    }

    /// A sentence that says how to install the library.
    pub fn advice(self) -> String {
        let packages = match self {
            Self::Driver | Self::Nvml => {
                return "Install NVIDIA's driver (nvidia-smi must work); in a container pass the GPUs in (docker run --gpus all, with \
                        NVIDIA_DRIVER_CAPABILITIES=compute,utility)."
                    .into();
            }
            Self::Nvrtc => "pip install nvidia-cuda-nvrtc, or install the CUDA toolkit",
            Self::Cudnn => "pip install nvidia-cudnn-cu13, or apt install libcudnn9-cuda-13",
            Self::CublasLt => "pip install nvidia-cublas, or install the CUDA toolkit",
            Self::Nccl => "pip install nvidia-nccl-cu13, or apt install libnccl2",
            Self::Nvjpeg => {
                "Without it JPEG files are decoded on cores. pip install nvidia-nvjpeg (for CUDA 12: nvidia-nvjpeg-cu12), or \
                 install the CUDA toolkit"
            }
        };
        format!("{packages}, or name its folder in {FOLDERS_VARIABLE}.")
    }

    /// The libraries that a rank needs in a job with `ranks` ranks.
    pub fn needed(ranks: u32) -> &'static [Self] {
        const ALL: [Library; 4] = [Library::Nvrtc, Library::Driver, Library::Cudnn, Library::Nccl];
        // With installed kernels NVRTC is not needed, and with one rank NCCL is not needed.
        let first = usize::from(cache::installed().is_some());
        &ALL[first..if ranks > 1 { 4 } else { 3 }]
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundLibrary {
    pub which: Library,
    pub path: PathBuf,
    /// Whether the dynamic linker finds the library without `LD_LIBRARY_PATH`.
    pub is_on_linker_path: bool,
}

#[derive(Debug, Clone, Default)]
pub struct Libraries {
    pub found: Vec<FoundLibrary>,
}

impl Libraries {
    /// Searches for all libraries: in [`FOLDERS_VARIABLE`], the dynamic linker's own list, the usual folders of CUDA, and
    /// Python environments.
    pub fn find() -> Self {
        Self::find_in(&folders(&|name| std::env::var_os(name)), true)
    }

    /// Searches `folders.configured`, the dynamic linker's own list (only if `asks_linker`), and `folders.usual`, in this order.
    fn find_in(folders: &Folders, asks_linker: bool) -> Self {
        let mut found = Vec::new();
        for which in Library::ALL {
            let library = |path, is_on_linker_path| FoundLibrary { which, path, is_on_linker_path };
            let by_name = which.files().iter().find_map(|file| {
                let in_folders = |list: &[PathBuf]| {
                    let path = list.iter().map(|dir| dir.join(file)).find(|path| path.is_file())?;
                    Some(library(path, false))
                };
                let of_linker = || Some(library(asks_linker.then(|| path_of_linker(file)).flatten()?, true));
                in_folders(&folders.configured).or_else(of_linker).or_else(|| in_folders(&folders.usual))
            });
            let copied = || match which {
                Library::Nvjpeg => folders.copied_nvjpeg().map(|path| library(path, false)),
                _ => None,
            };
            found.extend(by_name.or_else(copied));
        }
        Self { found }
    }

    pub fn get(&self, which: Library) -> Option<&FoundLibrary> {
        self.found.iter().find(|library| library.which == which)
    }

    pub fn missing(&self, needed: &[Library]) -> Vec<Library> {
        needed.iter().copied().filter(|which| self.get(*which).is_none()).collect()
    }

    /// The folders that the dynamic linker must search in addition to its own list.
    pub fn folders(&self) -> Vec<&Path> {
        let mut folders: Vec<&Path> = Vec::new();
        // nvJPEG is opened by its path.
        let by_name =
            |library: &&FoundLibrary| !library.is_on_linker_path && library.which != Library::Nvjpeg;
        for library in self.found.iter().filter(by_name) {
            if let Some(dir) = library.path.parent()
                && !folders.contains(&dir)
            {
                folders.push(dir);
            }
        }
        folders
    }

    /// The environment variables for a process that uses these libraries. Creates a folder in `dir`, with links under
    /// the names that cudarc tries.
    ///
    /// # Errors
    /// `dir` cannot be written to.
    pub fn environment(&self, dir: &Path) -> io::Result<Vec<(OsString, OsString)>> {
        let mut path: Vec<PathBuf> = Vec::new();
        let links = self.links();
        if !links.is_empty() {
            // Each set of libraries has its own folder, because processes with different sets may run at the same time.
            let mut hash = Sha256::new();
            links.iter().for_each(|(_, target)| hash.update(target.as_os_str().as_encoded_bytes()));
            let dir = &dir.join(hex::encode(&hash.finalize()[..4]));
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            for (name, target) in links {
                link(&dir.join(name), target)?;
            }
            path.push(dir.to_path_buf());
        }
        path.extend(self.folders().into_iter().map(Path::to_path_buf));
        let given = std::env::var_os(LIBRARY_PATH_VARIABLE).unwrap_or_default();
        for folder in std::env::split_paths(&given) {
            // An empty entry means the working directory, which a rank must not search.
            if !folder.as_os_str().is_empty() && !path.contains(&folder) {
                path.push(folder);
            }
        }
        if path.is_empty() {
            return Ok(Vec::new());
        }
        let joined = std::env::join_paths(&path).map_err(io::Error::other)?;
        Ok(vec![(LIBRARY_PATH_VARIABLE.into(), joined)])
    }

    /// Links under the names that cudarc tries first, for libraries with other names. Without links, cudarc would load
    /// the system's cuDNN instead of the chosen one. If NVRTC 12 was chosen and version 13 is also on the path,
    /// cudarc would load version 13.
    fn links(&self) -> Vec<(&'static str, &Path)> {
        let mut links = Vec::new();
        for (which, name) in [
            (Library::Nccl, "libnccl.so"),
            (Library::Nvrtc, "libnvrtc.so"),
            (Library::Cudnn, "libcudnn.so"),
            (Library::CublasLt, "libcublasLt.so"),
        ] {
            if let Some(library) = self.get(which)
                && (which == Library::Nccl
                    || !library.is_on_linker_path
                    || library.path.file_name() == Some(OsStr::new("libnvrtc.so.12")))
            {
                links.push((name, library.path.as_path()));
            }
        }
        links
    }
}

/// Checks that all libraries in `needed` were found.
///
/// # Errors
/// A sentence that names the missing libraries and how to install them.
pub fn check_found(libraries: &Libraries, needed: &[Library]) -> Result<(), String> {
    let missing = libraries.missing(needed);
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = missing.iter().map(|w| format!("{} ({})", w.name(), w.files()[0])).collect();
    let mut advice: Vec<_> = missing.iter().map(|w| w.advice()).collect();
    advice.dedup();
    let verb = if missing.len() == 1 { "is" } else { "are" };
    Err(format!("{} {verb} not found on this machine. {}", names.join(", "), advice.join(" ")))
}

/// Checks that cudarc finds all libraries in `needed` in this process.
///
/// # Errors
/// A sentence that names the missing libraries and how to install them.
pub fn check_loadable(needed: &[Library]) -> Result<(), String> {
    let absent = |which: &Library| {
        // SAFETY: each call loads a library, as `open` does, and unloads it.
        let present = unsafe {
            match which {
                Library::Driver => cudarc::driver::sys::is_culib_present(),
                Library::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
                Library::Cudnn => cudarc::cudnn::sys::is_culib_present(),
                Library::CublasLt => cudarc::cublaslt::sys::is_culib_present(),
                Library::Nccl => cudarc::nccl::sys::is_culib_present(),
                Library::Nvml | Library::Nvjpeg => true,
            }
        };
        !present
    };
    let absent: Vec<Library> = needed.iter().copied().filter(|which| absent(which)).collect();
    if absent.is_empty() {
        return Ok(());
    }
    let libraries = Libraries::find();
    check_found(&libraries, &absent)?;
    // The libraries exist, but not where this process searches, because its launcher did not set the path.
    let names: Vec<_> = absent.iter().map(|w| w.name()).collect();
    let folders: Vec<_> = libraries.folders().iter().map(|d| d.display().to_string()).collect();
    Err(format!(
        "{} cannot be loaded although it is in {}; {LIBRARY_PATH_VARIABLE} is {:?}",
        names.join(", "),
        folders.join(", "),
        std::env::var_os(LIBRARY_PATH_VARIABLE).unwrap_or_default()
    ))
}

/// Opens one of NVIDIA's libraries, which is never unloaded: unloading can crash.
///
/// # Errors
/// The library cannot be loaded. The error is a sentence.
pub fn open(path: &Path) -> Result<ManuallyDrop<Handle>, String> {
    // SAFETY: the initialisers of NVIDIA's libraries have no preconditions.
    let opened = unsafe { Handle::open(Some(path), RTLD_LAZY | RTLD_LOCAL) };
    opened.map(ManuallyDrop::new).map_err(|e| format!("{} cannot be loaded: {e}", path.display()))
}

/// The path at which the dynamic linker finds `file`. `None` if it does not find it.
fn path_of_linker(file: &str) -> Option<PathBuf> {
    open(Path::new(file)).ok()?;
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    // A mapped file may be the target of a link, such as `libcuda.so.580.65` for `libcuda.so.1`.
    let stem = file.split(".so").next().unwrap_or(file);
    let path = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .map(Path::new)
        .find(|path| {
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or("");
            name.strip_prefix(stem).is_some_and(|rest| rest.starts_with(".so"))
        })
        .map(Path::to_path_buf);
    Some(path.unwrap_or_else(|| PathBuf::from(file)))
}
