//! Standard output and error: lines for people, JSON for programs, and no panic when a pipe closes.

use serde::Serialize;
use std::{
    fmt,
    io::{self, Write},
};

/// Prints a line to standard output.
///
/// # Errors
/// When standard output is closed or full.
pub(crate) fn line(text: impl fmt::Display) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// Prints a value as indented JSON.
///
/// # Errors
/// As [`line`].
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    line(serde_json::to_string_pretty(value)?)
}

/// Prints a line to standard error; nothing can be done when that fails.
pub(crate) fn warn(text: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Whether the reader of our output has gone (`lockstep list | head -1`): not an error.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe))
}

/// A table with columns as wide as their content, headed by `header`.
///
/// # Errors
/// As [`line`].
pub(crate) fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> anyhow::Result<()> {
    let mut widths = header.map(|h| h.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let print = |cells: Vec<&str>| {
        let padded: Vec<_> =
            cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        line(padded.join("  ").trim_end())
    };
    print(header.to_vec())?;
    rows.iter().try_for_each(|row| print(row.iter().map(String::as_str).collect()))
}
