//! Facts about this machine and process, GPUs and their libraries, files, and tensors in host memory.

// Callers need to know how a call can fail.
#![warn(clippy::missing_errors_doc)]

pub mod cache;
mod cgroup;
mod file_lock;
pub mod files;
pub mod gpu;
pub mod interfaces;
mod listener_owner;
pub mod tensors;
pub mod usage;

pub use file_lock::{lock_within, open_lock};
pub use interfaces::{NCCL_INTERFACE_VARIABLE, nccl_variable};
pub use listener_owner::listener_owners;

use rustix::fs::{MemfdFlags, memfd_create};
use std::{
    ffi::c_int,
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Locks a mutex, even if a thread has panicked while it held the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The program that this process runs. It is the same binary even if its file has been replaced since.
///
/// # Errors
/// The system does not report the program of this process.
pub fn own_program() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    Ok(if path.exists() { path } else { PathBuf::from("/proc/self/exe") })
}

/// Creates an anonymous file in memory (memfd), which may be sealed.
///
/// # Errors
/// The system cannot create the file.
pub fn memory_file() -> io::Result<File> {
    let create = |flags| memfd_create("lockstep", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags);
    // The sysctl `vm.memfd_noexec=2` requires this flag, which Linux before 6.3 refuses.
    let created = create(MemfdFlags::NOEXEC_SEAL).or_else(|_| create(MemfdFlags::empty()));
    Ok(created?.into())
}

/// Environment variables of a server or an agent that contain credentials. Processes that read users' files do not get these
/// variables.
pub const SECRET_VARIABLES: [&str; 5] = [
    "LOCKSTEP_TOKEN",
    "LOCKSTEP_TOKEN_FILE",
    "LOCKSTEP_DATABASE",
    "LOCKSTEP_OIDC_CLIENT_SECRET",
    "LOCKSTEP_SMTP",
];

/// Ends this process without running exit handlers of libraries, which may wait for a device.
#[allow(unsafe_code)] // A function of the system's C library; any number is a valid status.
pub fn exit_without_handlers(status: i32) -> ! {
    unsafe extern "C" {
        safe fn _exit(status: c_int) -> !;
    }
    let _ = io::stdout().flush();
    _exit(status)
}

pub fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The processor's model name, or the architecture if the system reports none.
pub fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned()).filter(|name| !name.is_empty())
    };
    value("model name").or_else(|| value("Model")).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// The number of cores that this process may use, according to its affinity and control group.
pub fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// The number of processes that the kernel has killed so far because memory ran out. `None` if the system does not report it.
pub fn oom_kills() -> Option<u64> {
    cgroup::value(&fs::read_to_string("/proc/vmstat").ok()?, "oom_kill")
}

/// The boot id of the running kernel. It is the same in all containers of a machine, and changes with each boot.
/// Empty if the system does not report it.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Identifies a network stack: the boot id and the network namespace of this process. Processes with the same id
/// reach each other over loopback. Each container normally has its own id. `None` if the system does not report it.
pub fn network_id() -> Option<String> {
    let namespace = fs::read_link("/proc/self/ns/net").ok()?;
    Some(format!("{} {}", boot_id(), namespace.display()))
}

/// Writes a file atomically. Only its owner can read the file.
///
/// # Errors
/// The error names the file.
pub fn write_private(path: &Path, content: &[u8]) -> io::Result<()> {
    write_with(path, content, 0o600)
}

/// Writes a file atomically.
///
/// # Errors
/// The error names the file.
pub fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    write_with(path, content, 0o644)
}

/// Writes a file with these permissions atomically. Each process has its own temporary file, because several processes may write
/// the same file at the same time.
fn write_with(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    let write = || -> io::Result<()> {
        let mut file = tempfile::Builder::new()
            .prefix(&name)
            .suffix(".new")
            .permissions(Permissions::from_mode(mode))
            .tempfile_in(path.parent().unwrap_or(Path::new("")))?;
        file.write_all(content)?;
        file.persist(path)?;
        Ok(())
    };
    write().map_err(|error| with_path(path, error))
}

pub fn with_path(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
