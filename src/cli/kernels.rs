//! `lockstep kernels`: the GPU kernels as machine code, for packages.

use super::wrong;
use lockstep_host::gpu::libraries::{Library, reexec_if_needed};
use std::path::PathBuf;

/// Compile the kernels for every supported GPU, as packages install them in share/lockstep/cache. Needs NVRTC, and takes
/// minutes
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The folder for the machine code
    out: PathBuf,
}

/// Compiles.
///
/// # Errors
/// Exit status 2 when NVRTC is missing, does not accept the kernels, or the folder cannot be written.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    reexec_if_needed(&[Library::Nvrtc]);
    lockstep_engine::compile_kernels(&args.out).map_err(wrong)
}
