//! Standard output and error: lines for people, JSON for programs, and no panic when a pipe closes. Text of a server or a file
//! may hold control characters (colours, titles, the clipboard). On a terminal these are shown escaped, and so are invisible
//! characters. A pipe gets the text unchanged; errors and warnings are escaped everywhere.

use lockstep_protocol::unseen;
use serde::Serialize;
use std::{
    borrow::Cow,
    fmt,
    io::{self, IsTerminal, Write},
};

/// Prints a line to standard output.
///
/// # Errors
/// When standard output is closed or full.
pub(crate) fn line(text: impl fmt::Display) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    let text = text.to_string();
    let shown = if out.is_terminal() { unseen::shown(&text) } else { Cow::Borrowed(&text[..]) };
    writeln!(out, "{shown}")?;
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
    let mut out = io::stderr().lock();
    let text = text.to_string();
    let _ = writeln!(out, "{}", unseen::shown(&text));
}

/// Whether the reader of our output has gone (`lockstep list | head -1`): not an error.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe))
}

/// A name from a file or a server as part of a line: without line breaks and tabs, and with characters that a terminal obeys
/// as JSON writes them.
pub(crate) fn one_line(text: &str) -> String {
    unseen::shown(&text.replace(['\n', '\t'], " ")).into_owned()
}

/// A table with columns as wide as their content, headed by `header`.
///
/// # Errors
/// As [`line`].
pub(crate) fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> anyhow::Result<()> {
    // A row is a line, whatever is in it.
    let rows: Vec<[String; N]> = rows.iter().map(|row| row.each_ref().map(|cell| one_line(cell))).collect();
    let mut widths = header.map(|h| h.chars().count());
    for row in &rows {
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
