//! Generates the reference in `docs/reference/` from the program itself: the job file's table of keys, clap's commands, and the OpenAPI
//! document. `cargo run -- reference --out docs/reference` writes the pages, and a test compares them with the files in the tree.

mod command_line;
pub(crate) mod job_file;
mod rest;

pub(crate) use command_line::visible_subcommands;

use super::{output, usage_error};
use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

/// Write the pages of docs/reference
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The folder for the pages
    #[arg(long, value_name = "DIR", default_value = "docs/reference")]
    out: PathBuf,
}

/// Writes the pages.
///
/// # Errors
/// Exit status 2 if the folder cannot be written.
pub(crate) fn run(args: &Args, program: clap::Command) -> anyhow::Result<()> {
    let failed = |path: &Path, e: std::io::Error| usage_error(format!("{}: {e}", path.display()));
    fs::create_dir_all(&args.out).map_err(|e| failed(&args.out, e))?;
    let api = lockstep_server::openapi();
    for (name, text) in [
        ("job-file.md", job_file::markdown()),
        ("command-line.md", command_line::markdown(program)),
        ("rest.md", rest::markdown(&api)),
    ] {
        let path = args.out.join(name);
        fs::write(&path, text).map_err(|e| failed(&path, e))?;
        output::line(path.display())?;
    }
    Ok(())
}

/// Returns the first line of a page that is generated from `source`.
fn generated_from(source: &str) -> String {
    format!("<!-- Made from {source} by `cargo run -- reference`. Do not edit. -->\n")
}

/// Formats a Markdown table. Each cell is one line.
fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let mut text = format!("| {} |\n|{}\n", header.join(" | "), "---|".repeat(N));
    for row in rows {
        let cells = row.each_ref().map(|cell| cell.replace('|', "\\|").replace('\n', " "));
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// Escapes a text for Markdown: `<name>` outside of code must not become a tag.
fn escape(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let escaped = parts.map(|(i, part)| {
        // Every second part is code.
        if i % 2 == 1 { part.to_owned() } else { part.replace('<', "&lt;").replace('*', "\\*") }
    });
    escaped.collect::<Vec<_>>().join("`")
}
