//! Folders with NVIDIA's libraries: CUDA toolkits, Python environments, and folders mounted into a container.

use super::FOLDERS_VARIABLE;
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

/// Folders to search, in the order of the fields.
#[derive(Debug, Default)]
pub(super) struct Folders {
    /// Folders in [`FOLDERS_VARIABLE`], searched before the dynamic linker's own list.
    pub(super) configured: Vec<PathBuf>,
    /// Usual folders, searched after the dynamic linker's own list.
    pub(super) usual: Vec<PathBuf>,
    /// Folders with torchvision's copies of libraries, which have other file names.
    pub(super) torchvision: Vec<PathBuf>,
}

impl Folders {
    /// The newest copy of nvJPEG, such as `libnvjpeg.4a0b5c81.so.13`.
    pub(super) fn copied_nvjpeg(&self) -> Option<PathBuf> {
        let major = |path: &PathBuf| path.extension()?.to_str()?.parse::<u32>().ok();
        let copies = self.torchvision.iter().flat_map(|dir| matching(dir, "libnvjpeg."));
        copies.filter(|path| major(path).is_some()).max_by_key(major)
    }
}

/// The folders that exist. `variable` returns the value of an environment variable.
pub(super) fn folders(variable: &dyn Fn(&str) -> Option<OsString>) -> Folders {
    let mut folders = Folders::default();
    let given = variable(FOLDERS_VARIABLE).unwrap_or_default();
    folders.configured = std::env::split_paths(&given).filter(|dir| dir.is_dir()).collect();

    let mut usual: Vec<PathBuf> =
        vec!["/usr/local/nvidia/lib64".into(), "/usr/local/nvidia/lib".into(), "/usr/lib/wsl/lib".into()];
    for root in variable("CUDA_HOME").into_iter().chain(variable("CUDA_PATH")).map(PathBuf::from) {
        usual.push(root.join("lib64"));
    }
    // `/usr/local/cuda` first, then other versions from the newest on.
    let mut toolkits = matching(Path::new("/usr/local"), "cuda-");
    toolkits.sort_by_key(|dir| std::cmp::Reverse(numbers(dir)));
    toolkits.insert(0, "/usr/local/cuda".into());
    for toolkit in toolkits {
        usual.push(toolkit.join("lib64"));
        usual.push(toolkit.join("targets/x86_64-linux/lib"));
        usual.push(toolkit.join("targets/sbsa-linux/lib"));
    }
    for prefix in python_prefixes(variable) {
        for lib in ["lib", "lib64"] {
            for python in matching(&prefix.join(lib), "python3") {
                for packages in ["site-packages", "dist-packages"] {
                    let copies = python.join(packages).join("torchvision.libs");
                    if copies.is_dir() && !folders.torchvision.contains(&copies) {
                        folders.torchvision.push(copies);
                    }
                    for part in matching(&python.join(packages).join("nvidia"), "") {
                        usual.push(part.join("lib"));
                    }
                }
            }
        }
        // In a Conda environment, `lib` also has the CUDA libraries.
        if prefix.join("conda-meta").is_dir() {
            usual.push(prefix.join("lib"));
        }
    }
    for dir in usual {
        if dir.is_dir() && !folders.usual.contains(&dir) {
            folders.usual.push(dir);
        }
    }
    folders
}

/// The folders of Python environments: the active environment, the environment of the first `python3` on the path,
/// environments in `/opt`, and the system's Python.
fn python_prefixes(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name)).map(PathBuf::from).collect();
    let path = variable("PATH").unwrap_or_default();
    let program = std::env::split_paths(&path).map(|dir| dir.join("python3")).find(|p| p.is_file());
    // `python3` may be a link into an environment, in which `python3` is again a link, to the system's Python. Each of
    // these folders counts, for at most 8 links.
    let mut next = program;
    for _ in 0..8 {
        let Some(program) = next else { break };
        prefixes.extend(program.parent().and_then(Path::parent).map(Path::to_path_buf));
        next = fs::read_link(&program)
            .ok()
            .and_then(|target| Some(program.parent()?.join(target)))
            .filter(|target| target.exists());
    }
    for dir in matching(Path::new("/opt"), "") {
        prefixes.push(dir.join(".venv"));
        prefixes.push(dir.join("venv"));
        prefixes.push(dir);
    }
    if let Some(home) = variable("HOME") {
        prefixes.push(Path::new(&home).join(".local"));
    }
    prefixes.extend(["/usr/local".into(), "/usr".into()]);
    prefixes
}

/// The entries of a folder whose names begin with `start`, in the order of names. Empty if the folder does not exist.
fn matching(dir: &Path, start: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(start.as_bytes()))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

/// The version in a name, such as `[13, 0]` for `cuda-13.0`.
fn numbers(dir: &Path) -> Vec<u32> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}
