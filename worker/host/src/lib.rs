//! Facts of this machine and process, its GPUs and their libraries, files, and tensors in memory.

// What a call can fail with is part of what its caller has to know.
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
pub use interfaces::{NCCL_INTERFACE, nccl_variable, of_environment as nccl_interface};
pub use listener_owner::listener_owners;

use std::{
    ffi::c_int,
    fs::{self, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

/// The program that this process runs: this very binary, also when its file has been replaced since.
///
/// # Errors
/// The system does not say which file this process runs.
pub fn own_program() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    Ok(if path.exists() { path } else { PathBuf::from("/proc/self/exe") })
}

/// Variables of a server's or an agent's environment that say how to use it. Processes of jobs, which read what strangers wrote,
/// do not get them.
pub const SECRETS: [&str; 4] =
    ["LOCKSTEP_TOKEN", "LOCKSTEP_TOKEN_FILE", "LOCKSTEP_DATABASE", "LOCKSTEP_OIDC_CLIENT_SECRET"];

/// Ends this process without running what libraries have registered for its end.
#[allow(unsafe_code)] // The system's own function; any number is a status.
pub fn exit_without_handlers(status: i32) -> ! {
    unsafe extern "C" {
        safe fn _exit(status: c_int) -> !;
    }
    let _ = io::stdout().flush();
    _exit(status)
}

/// This machine's name.
pub fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// What the processor calls itself; the architecture where it does not say.
pub fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned()).filter(|name| !name.is_empty())
    };
    value("model name").or_else(|| value("Model")).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Cores that this process may use (its affinity and control group counted).
pub fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// How many processes the kernel has ended so far because memory ran out.
pub fn oom_kills() -> Option<u64> {
    let text = fs::read_to_string("/proc/vmstat").ok()?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

/// The boot id of the running kernel: the same in all containers of a machine, another one after each start. Empty where the
/// system
/// does not say.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Tells network stacks apart: the boot id and the network namespace of this process. Processes of one such stack reach each
/// other over loopback; containers on one machine have one each. `None` where the system does not say.
pub fn network_id() -> Option<String> {
    let namespace = fs::read_link("/proc/self/ns/net").ok()?;
    Some(format!("{} {}", boot_id(), namespace.display()))
}

/// Writes a file that others see complete or not at all, and that its owner alone can read.
///
/// # Errors
/// The sentence names the file.
pub fn write_private(path: &Path, content: &[u8]) -> io::Result<()> {
    write_with(path, content, 0o600)
}

/// Writes a file that others see complete or not at all.
///
/// # Errors
/// The sentence names the file.
pub fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    write_with(path, content, 0o644)
}

/// Several processes may write the same file at the same time: each has a temporary file of its own.
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
    write().map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}
