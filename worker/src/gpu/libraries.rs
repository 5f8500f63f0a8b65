//! NVIDIA's libraries: where they are on this machine, in which versions, what is missing, and the
//! environment in which a rank process finds them.
//!
//! cudarc opens its libraries by bare names and panics when one is not there, so whoever is about to
//! use it asks [`ready`] first. It never tries `libnccl.so.2`, the only name that NVIDIA's packages
//! ship: [`Libraries::environment`] makes a folder that holds `libnccl.so` and puts it, with the
//! folders of everything else that was found, on `LD_LIBRARY_PATH`.
#![allow(unsafe_code)] // Loading a library runs its initialisers; versions are asked of it by symbol.

use libloading::os::unix::{Library as Handle, RTLD_LAZY, RTLD_LOCAL};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use folders::{Folders, folders};
use start_anew::link;

mod folders;
mod start_anew;

pub use start_anew::{links_dir, start_anew_if_needed};

/// Folders to look in first, separated by `:`.
pub const SETTING: &str = "LOCKSTEP_CUDA_LIBS";
/// Where the dynamic linker looks, beside its own list.
const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";

/// A library that GPU ranks use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Which {
    /// The driver's own, `libcuda`.
    Driver,
    /// The driver's management library: which GPUs there are and how they fare.
    Nvml,
    /// Compiles Lockstep's kernels for the GPU at hand.
    Nvrtc,
    /// Convolutions.
    Cudnn,
    /// Matrix products; some of cuDNN's engines use it.
    CublasLt,
    /// Communication between GPUs.
    Nccl,
    /// Decodes JPEG files by the GPU.
    Nvjpeg,
}

impl Which {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Driver, Self::Nvml, Self::Nvrtc, Self::Cudnn, Self::CublasLt, Self::Nccl, Self::Nvjpeg];

    /// `cuDNN`.
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

    /// The file names it goes by, the best first.
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

    /// How to get it.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Driver | Self::Nvml => {
                "Install NVIDIA's driver (nvidia-smi must work); in a container pass the GPUs in \
                 (docker run --gpus all, with NVIDIA_DRIVER_CAPABILITIES=compute,utility)."
            }
            Self::Nvrtc => {
                "pip install nvidia-cuda-nvrtc, or install the CUDA toolkit, or name its folder in \
                 LOCKSTEP_CUDA_LIBS."
            }
            Self::Cudnn => {
                "pip install nvidia-cudnn-cu13, or apt install libcudnn9-cuda-13, or name its folder in \
                 LOCKSTEP_CUDA_LIBS."
            }
            Self::CublasLt => {
                "pip install nvidia-cublas, or install the CUDA toolkit, or name its folder in \
                 LOCKSTEP_CUDA_LIBS."
            }
            Self::Nccl => {
                "pip install nvidia-nccl-cu13, or apt install libnccl2, or name its folder in \
                 LOCKSTEP_CUDA_LIBS."
            }
            Self::Nvjpeg => {
                "Without it JPEG files are decoded on cores. pip install nvidia-nvjpeg (for CUDA 12: \
                 nvidia-nvjpeg-cu12), or install the CUDA toolkit, or name its folder in LOCKSTEP_CUDA_LIBS."
            }
        }
    }

    /// What a rank of a job of `ranks` ranks cannot do without.
    pub fn needed(ranks: u32) -> &'static [Self] {
        const ALONE: [Which; 3] = [Which::Driver, Which::Nvrtc, Which::Cudnn];
        const TOGETHER: [Which; 4] = [Which::Driver, Which::Nvrtc, Which::Cudnn, Which::Nccl];
        if ranks > 1 { &TOGETHER } else { &ALONE }
    }
}

/// A library that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Library {
    pub which: Which,
    pub path: PathBuf,
    /// The dynamic linker finds it without help.
    pub by_itself: bool,
}

/// What was found, and where was looked for the rest.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Libraries {
    pub found: Vec<Library>,
    /// Folders that exist and were looked in, beside the dynamic linker's own.
    pub searched: Vec<PathBuf>,
}

impl Libraries {
    /// Looks for all of them: the setting, the dynamic linker's own list, CUDA's usual folders, and
    /// what Python environments bring along.
    pub fn find() -> Self {
        Self::find_in(&folders(&|name| std::env::var_os(name)), true)
    }

    /// Looks in these folders, those of the setting first; and where the linker looks if `linker`.
    fn find_in(folders: &Folders, linker: bool) -> Self {
        let mut found = Vec::new();
        for which in Which::ALL {
            let beside = |list: &[PathBuf], file: &str| {
                list.iter().map(|dir| dir.join(file)).find(|path| path.is_file())
            };
            let library = which.files().iter().find_map(|file| {
                let elsewhere = |path| Library { which, path, by_itself: false };
                beside(&folders.setting, file)
                    .map(elsewhere)
                    .or_else(|| {
                        let path = linker.then(|| by_linker(file)).flatten()?;
                        Some(Library { which, path, by_itself: true })
                    })
                    .or_else(|| beside(&folders.usual, file).map(elsewhere))
            });
            let copied = || {
                let path = (which == Which::Nvjpeg).then(|| folders.copied_nvjpeg()).flatten()?;
                Some(Library { which, path, by_itself: false })
            };
            found.extend(library.or_else(copied));
        }
        let searched = folders.setting.iter().chain(&folders.usual).cloned().collect();
        Self { found, searched }
    }

    /// One of them.
    pub fn get(&self, which: Which) -> Option<&Library> {
        self.found.iter().find(|library| library.which == which)
    }

    /// Those of `needed` that are not there.
    pub fn missing(&self, needed: &[Which]) -> Vec<Which> {
        needed.iter().copied().filter(|which| self.get(*which).is_none()).collect()
    }

    /// The folders in which the dynamic linker must look, beside its own, for what was found.
    pub fn folders(&self) -> Vec<&Path> {
        let mut folders: Vec<&Path> = Vec::new();
        // nvJPEG is opened by its path.
        let by_name = |library: &&Library| !library.by_itself && library.which != Which::Nvjpeg;
        for library in self.found.iter().filter(by_name) {
            if let Some(dir) = library.path.parent()
                && !folders.contains(&dir)
            {
                folders.push(dir);
            }
        }
        folders
    }

    /// The variables to set for a process that is to use these libraries; in `dir` (made when absent) is a folder
    /// for links under the names that cudarc knows.
    ///
    /// # Errors
    /// `dir` cannot be written.
    pub fn environment(&self, dir: &Path) -> io::Result<Vec<(OsString, OsString)>> {
        let mut path: Vec<PathBuf> = Vec::new();
        let links = self.links();
        if !links.is_empty() {
            // A folder for each choice: processes that were given others run beside each other.
            let mut hash = Sha256::new();
            links.iter().for_each(|(_, target)| hash.update(target.as_os_str().as_encoded_bytes()));
            let choice: String = hash.finalize().iter().take(4).map(|b| format!("{b:02x}")).collect();
            let dir = &dir.join(choice);
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            for (name, target) in links {
                link(&dir.join(name), target)?;
            }
            path.push(dir.to_path_buf());
        }
        path.extend(self.folders().into_iter().map(Path::to_path_buf));
        let given = std::env::var_os(LIBRARY_PATH).unwrap_or_default();
        for folder in std::env::split_paths(&given) {
            // An empty entry means the working directory: not with a rank's.
            if !folder.as_os_str().is_empty() && !path.contains(&folder) {
                path.push(folder);
            }
        }
        if path.is_empty() {
            return Ok(Vec::new());
        }
        let joined = std::env::join_paths(&path).map_err(io::Error::other)?;
        Ok(vec![(LIBRARY_PATH.into(), joined)])
    }

    /// Names under which cudarc looks first, for what is there under another one: without them it would take
    /// the system's `libcudnn.so` where another cuDNN was chosen, and CUDA 13's NVRTC where both are on the path.
    fn links(&self) -> Vec<(&'static str, &Path)> {
        let mut links = Vec::new();
        for (which, name) in [
            (Which::Nccl, "libnccl.so"),
            (Which::Nvrtc, "libnvrtc.so"),
            (Which::Cudnn, "libcudnn.so"),
            (Which::CublasLt, "libcublasLt.so"),
        ] {
            if let Some(library) = self.get(which)
                && (which == Which::Nccl
                    || !library.by_itself
                    || library.path.file_name() == Some(OsStr::new("libnvrtc.so.12")))
            {
                links.push((name, library.path.as_path()));
            }
        }
        links
    }
}

impl Library {
    /// Asks the library itself: `13.0`, `9.19.0`, `2.28.9`. NVML is asked elsewhere: no version.
    ///
    /// # Errors
    /// It cannot be loaded, lacks the symbol, or fails; a sentence.
    pub fn version(&self) -> Result<String, String> {
        let shown = self.path.display();
        // SAFETY: loading one of NVIDIA's libraries runs initialisers that have no preconditions.
        let handle = unsafe { Handle::open(Some(&self.path), RTLD_LAZY | RTLD_LOCAL) }
            .map_err(|e| format!("{shown} cannot be loaded: {e}"))?;
        let lacks = |e: libloading::Error| format!("{shown}: {e}");
        let failed = |status: i32| format!("{shown} does not tell its version (error {status})");
        let three = |v: usize| format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100);
        type Pointer = unsafe extern "C" fn(*mut i32) -> i32;
        type Pair = unsafe extern "C" fn(*mut i32, *mut i32) -> i32;
        type Plain = unsafe extern "C" fn() -> usize;
        type Property = unsafe extern "C" fn(i32, *mut i32) -> i32;
        let (mut a, mut b) = (0, 0);
        let pointer = |name: &str, value: &mut i32| -> Result<(), String> {
            // SAFETY: these symbols take a pointer to an int and return an enumeration.
            let status = unsafe {
                let ask = handle.get::<Pointer>(name.as_bytes()).map_err(lacks)?;
                ask(value)
            };
            if status == 0 { Ok(()) } else { Err(failed(status)) }
        };
        let plain = |name: &str| -> Result<usize, String> {
            // SAFETY: these symbols take nothing and return a size_t.
            unsafe { Ok(handle.get::<Plain>(name.as_bytes()).map_err(lacks)?()) }
        };
        let version = match self.which {
            Which::Driver => {
                pointer("cuDriverGetVersion", &mut a)?;
                format!("{}.{}", a / 1000, a % 1000 / 10)
            }
            Which::Nvrtc => {
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
            Which::Nccl => {
                pointer("ncclGetVersion", &mut a)?;
                three(usize::try_from(a).unwrap_or(0))
            }
            Which::Cudnn => three(plain("cudnnGetVersion")?),
            Which::CublasLt => three(plain("cublasLtGetVersion")?),
            Which::Nvjpeg => {
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
            Which::Nvml => String::new(),
        };
        // CUDA's libraries do not like to be unloaded.
        std::mem::forget(handle);
        Ok(version)
    }
}

/// What is missing of `needed`, as one sentence a person can act on.
///
/// # Errors
/// Something is.
pub fn complete(libraries: &Libraries, needed: &[Which]) -> Result<(), String> {
    let missing = libraries.missing(needed);
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = missing.iter().map(|w| format!("{} ({})", w.name(), w.files()[0])).collect();
    let mut advice: Vec<&str> = missing.iter().map(|w| w.advice()).collect();
    advice.dedup();
    let verb = if missing.len() == 1 { "is" } else { "are" };
    Err(format!("{} {verb} not found on this machine. {}", names.join(", "), advice.join(" ")))
}

/// Whether cudarc, in this very process, finds what it is about to use.
///
/// # Errors
/// A sentence that names what is missing and how to get it.
pub fn ready(needed: &[Which]) -> Result<(), String> {
    let absent = |which: &Which| {
        // SAFETY: these load the library (and unload it again): as above.
        let present = unsafe {
            match which {
                Which::Driver => cudarc::driver::sys::is_culib_present(),
                Which::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
                Which::Cudnn => cudarc::cudnn::sys::is_culib_present(),
                Which::CublasLt => cudarc::cublaslt::sys::is_culib_present(),
                Which::Nccl => cudarc::nccl::sys::is_culib_present(),
                Which::Nvml | Which::Nvjpeg => true,
            }
        };
        !present
    };
    let absent: Vec<Which> = needed.iter().copied().filter(|which| absent(which)).collect();
    if absent.is_empty() {
        return Ok(());
    }
    let libraries = Libraries::find();
    complete(&libraries, &absent)?;
    // There, but not where this process looks: its launcher did not set the path.
    let names: Vec<_> = absent.iter().map(|w| w.name()).collect();
    let folders: Vec<_> = libraries.folders().iter().map(|d| d.display().to_string()).collect();
    Err(format!(
        "{} cannot be loaded although it is in {}; {LIBRARY_PATH} is {:?}",
        names.join(", "),
        folders.join(", "),
        std::env::var_os(LIBRARY_PATH).unwrap_or_default()
    ))
}

/// Where the dynamic linker finds `file`, when it does.
fn by_linker(file: &str) -> Option<PathBuf> {
    // SAFETY: as in `version`.
    let handle = unsafe { Handle::open(Some(file), RTLD_LAZY | RTLD_LOCAL) }.ok()?;
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    // The mapped file may be what a link points to: `libcuda.so.580.65` for `libcuda.so.1`.
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
    std::mem::forget(handle);
    Some(path.unwrap_or_else(|| PathBuf::from(file)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "not a library").unwrap();
    }

    /// A Python environment reached by a link on the path, as on machines for PyTorch.
    fn environment(root: &Path) -> impl Fn(&str) -> Option<OsString> {
        let site = root.join("opt/venv/lib/python3.12/site-packages/nvidia");
        touch(&site.join("cudnn/lib/libcudnn.so.9"));
        touch(&site.join("nccl/lib/libnccl.so.2"));
        touch(&site.join("cu13/lib/libnvrtc.so.13"));
        touch(&root.join("opt/venv/bin/python3"));
        fs::create_dir_all(root.join("bin")).unwrap();
        symlink("../opt/venv/bin/python3", root.join("bin/python3")).unwrap();
        let bin = root.join("bin").into_os_string();
        move |name| (name == "PATH").then(|| bin.clone())
    }

    #[test]
    fn libraries_of_a_python_environment_are_found_through_the_link_on_the_path() {
        let root = tempfile::tempdir().unwrap();
        let libraries = Libraries::find_in(&folders(&environment(root.path())), false);
        let nccl = libraries.get(Which::Nccl).unwrap();
        assert!(nccl.path.ends_with("nvidia/nccl/lib/libnccl.so.2"), "{nccl:?}");
        assert!(libraries.get(Which::Cudnn).is_some() && libraries.get(Which::Nvrtc).is_some());

        let cache = root.path().join("cache/libraries");
        let variables = libraries.environment(&cache).unwrap();
        let (name, value) = &variables[0];
        assert_eq!(name, LIBRARY_PATH);
        let path: Vec<_> = std::env::split_paths(value).collect();
        assert_eq!(path[0].parent(), Some(&*cache));
        let dir = &path[0];
        assert!(path.iter().any(|p| p.ends_with("nvidia/cudnn/lib")), "{path:?}");
        assert_eq!(fs::read_link(dir.join("libnccl.so")).unwrap(), nccl.path);
        // Where the system has a cuDNN of its own, cudarc must not take that one.
        assert_eq!(
            fs::read_link(dir.join("libcudnn.so")).unwrap(),
            libraries.get(Which::Cudnn).unwrap().path
        );
        // A second time, also when NCCL has moved meanwhile.
        symlink("/elsewhere", dir.join("other")).unwrap();
        fs::rename(dir.join("other"), dir.join("libnccl.so")).unwrap();
        libraries.environment(&cache).unwrap();
        assert_eq!(fs::read_link(dir.join("libnccl.so")).unwrap(), nccl.path);
    }

    #[test]
    fn torchvision_s_copy_of_nvjpeg_is_found_where_there_is_no_other() {
        let root = tempfile::tempdir().unwrap();
        let variables = environment(root.path());
        let packages = root.path().join("opt/venv/lib/python3.12/site-packages");
        let found = || {
            // What this machine has itself does not count.
            let mut folders = folders(&variables);
            folders.usual.retain(|dir| dir.starts_with(root.path()));
            folders.torchvision.retain(|dir| dir.starts_with(root.path()));
            let libraries = Libraries::find_in(&folders, false);
            (libraries.get(Which::Nvjpeg).map(|nvjpeg| nvjpeg.path.clone()), libraries)
        };
        assert_eq!(found().0, None);
        let copy = packages.join("torchvision.libs/libnvjpeg.4a0b5c81.so.13");
        touch(&copy);
        touch(&packages.join("torchvision.libs/libjpeg.ceea7512.so.62"));
        let (path, libraries) = found();
        assert_eq!(path.and_then(|p| p.canonicalize().ok()), copy.canonicalize().ok());
        // It is opened by its path: what else lies there must not get in the way of other libraries.
        assert!(libraries.folders().iter().all(|dir| !dir.ends_with("torchvision.libs")));
        let own = packages.join("nvidia/cu13/lib/libnvjpeg.so.13");
        touch(&own);
        assert_eq!(found().0.and_then(|p| p.canonicalize().ok()), own.canonicalize().ok());
    }

    #[test]
    fn the_setting_comes_first() {
        let root = tempfile::tempdir().unwrap();
        let plain = environment(root.path());
        let own = root.path().join("own");
        touch(&own.join("libcudnn.so.9"));
        let with = |name: &str| {
            if name == SETTING { Some(own.clone().into_os_string()) } else { plain(name) }
        };
        let libraries = Libraries::find_in(&folders(&with), false);
        assert_eq!(libraries.get(Which::Cudnn).unwrap().path, own.join("libcudnn.so.9"));
        assert!(libraries.get(Which::Nccl).is_some());
    }

    #[test]
    fn what_is_missing_is_named_with_a_way_to_get_it() {
        let root = tempfile::tempdir().unwrap();
        let bare = |_: &str| None;
        let _ = root;
        let nothing = Libraries { searched: folders(&bare).usual, ..Libraries::default() };
        let error = complete(&nothing, Which::needed(2)).unwrap_err();
        for part in ["cuDNN (libcudnn.so.9)", "nvidia-cudnn-cu13", "NCCL", "driver", SETTING] {
            assert!(error.contains(part), "{part}: {error}");
        }
        assert!(!complete(&nothing, Which::needed(1)).unwrap_err().contains("NCCL"));
    }

    #[test]
    fn a_file_that_is_no_library_is_an_error_and_not_the_end() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("libcudnn.so.9");
        touch(&path);
        for which in Which::ALL {
            let error = Library { which, path: path.clone(), by_itself: false }.version().unwrap_err();
            assert!(error.contains("libcudnn.so.9"), "{error}");
        }
    }
}
