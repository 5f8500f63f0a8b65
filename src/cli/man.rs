//! `lockstep man`: writes man pages.

use super::{output, reference::visible_subcommands, usage_error};
use clap::Command;
use clap_mangen::Man;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Write man pages: lockstep.1, and one page for each command
///
/// `lockstep man --out ~/.local/share/man/man1` writes the pages to a folder that `man` searches.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The folder for the pages
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Writes the pages.
///
/// # Errors
/// Exit status 2 if the folder cannot be written.
pub(crate) fn run(args: &Args, mut program: Command) -> anyhow::Result<()> {
    let failed = |e: std::io::Error| usage_error(format!("--out {}: {e}", args.out.display()));
    fs::create_dir_all(&args.out).map_err(failed)?;
    program.build();
    let pages = write(&program, &args.out).map_err(failed)?;
    output::line(format_args!("{pages} pages in {}", args.out.display()))
}

/// Writes the pages of a command and its subcommands. Returns the number of pages.
fn write(command: &Command, folder: &Path) -> std::io::Result<usize> {
    let mut pages = 1;
    for inner in visible_subcommands(command) {
        pages += write(inner, folder)?;
    }
    Man::new(command.clone()).generate_to(folder)?;
    Ok(pages)
}
