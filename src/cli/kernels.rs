//! `lockstep kernels`: writes the GPU kernels' machine code, for packages.

use super::usage_error;
use lockstep_host::gpu::libraries::{Library, reexec_if_needed};
use std::path::PathBuf;

/// Write the kernels for every supported GPU, as packages install them in share/lockstep/cache: copies installed kernels and compiles
/// others, which needs NVRTC and takes minutes
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The folder for the machine code
    out: PathBuf,
}

/// Copies or compiles the kernels.
///
/// # Errors
/// Exit status 2 if NVRTC is needed and missing or rejects the kernels, or the folder cannot be written.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    reexec_if_needed(&[Library::Nvrtc]);
    lockstep_engine::compile_kernels(&args.out).map_err(usage_error)
}
