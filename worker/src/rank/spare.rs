//! A process that has opened a GPU before a job needs it, and becomes a rank.

use super::{EXIT_FAILED, EXIT_FINISHED, run};
use lockstep_engine::registry;
use lockstep_host::{exit_without_handlers, gpu::RankGpu, own_program};
use lockstep_protocol::spec::Device;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read},
    os::unix::{ffi::OsStringExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

/// Opens `gpu`, waits until the program that started this process writes the path of a rank's configuration to the standard
/// input, and becomes this rank. If the input is closed without a path, that program has ended, and this process ends too.
pub fn run_spare(gpu: &RankGpu) -> ! {
    let device = registry::device_of(Some(gpu), Device::Auto);
    let (world_size, precision) = (gpu.visible.len() as u32, None);
    device.backend.warm_up(device.ordinal, world_size, precision);
    let mut path = Vec::new();
    if io::stdin().read_to_end(&mut path).is_err() || path.is_empty() {
        exit_without_handlers(EXIT_FINISHED);
    }
    let path = PathBuf::from(OsString::from_vec(path));
    if let Err(error) = redirect_streams(&path) {
        tracing::error!("{}: {error}", path.display());
        exit_without_handlers(EXIT_FAILED);
    }
    if !device.backend.is_sound() {
        // The GPU could not be opened, or has been reset. Executing the program again opens the GPU again and reports
        // errors.
        let error = restart(&path);
        tracing::error!("the rank's program cannot be started: {error}");
        exit_without_handlers(EXIT_FAILED);
    }
    run(&path)
}

/// Connects the standard input to `/dev/null` and the other standard streams to the rank's output file.
fn redirect_streams(config_path: &Path) -> io::Result<()> {
    let output = File::options().append(true).open(config_path.with_extension("stderr"))?;
    dup2_stdin(File::open("/dev/null")?)?;
    dup2_stdout(&output)?;
    dup2_stderr(&output)?;
    Ok(())
}

/// Replaces this process's program by a new rank's program (exec). Returns only if this fails.
fn restart(config_path: &Path) -> io::Error {
    match own_program() {
        Ok(program) => Command::new(program).arg("rank").arg(config_path).exec(),
        Err(error) => error,
    }
}
