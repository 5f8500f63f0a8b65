//! Standard output and error: lines for people, JSON for programs, and no panic when a pipe closes. Text of a server or a file
//! may hold control characters (colours, titles, the clipboard). On a terminal these are shown escaped, and so are invisible
//! characters. A pipe gets the text unchanged; errors and warnings are escaped everywhere.

use lockstep_protocol::{cut::middle, unseen};
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
    table_of_names(header, &[], rows)
}

/// As [`table`], with columns of `names` that are cut in the middle where the table is wider than the terminal. A pipe gets them whole.
///
/// # Errors
/// As [`line`].
pub(crate) fn table_of_names<const N: usize>(
    header: [&str; N],
    names: &[&str],
    rows: &[[String; N]],
) -> anyhow::Result<()> {
    // A row is a line, whatever is in it.
    let mut rows: Vec<[String; N]> =
        rows.iter().map(|row| row.each_ref().map(|cell| one_line(cell))).collect();
    let mut widths = widths(&header, &rows);
    if let Some(columns) = terminal_columns() {
        fit(&header, names, &mut widths, columns);
        for row in &mut rows {
            for (cell, width) in row.iter_mut().zip(widths) {
                if cell.chars().count() > width {
                    *cell = middle(cell, width);
                }
            }
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

fn widths<const N: usize>(header: &[&str; N], rows: &[[String; N]]) -> [usize; N] {
    let mut widths = header.map(|h| h.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    widths
}

/// Of the terminal that standard output is, if it is one that says so.
fn terminal_columns() -> Option<usize> {
    let out = io::stdout();
    let size = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok())??;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// No name is cut to less.
const NAME: usize = 12;
/// Of the terminal's width, what the last column has at least: sentences, which go on in the next line.
const SENTENCE: usize = 3;

/// Narrows columns of `names`, the widest first, until the table has at most `columns` characters a line.
fn fit<const N: usize>(header: &[&str; N], names: &[&str], widths: &mut [usize; N], columns: usize) {
    let last = widths.last().copied().unwrap_or_default();
    let sentence =
        if names.contains(header.last().unwrap_or(&"")) { last } else { last.min(columns / SENTENCE) };
    let mut total = widths.iter().sum::<usize>() + 2 * N.saturating_sub(1) - (last - sentence);
    while total > columns {
        let is_name = |column: &usize| names.contains(&header[*column]);
        let Some(widest) = (0..N).filter(is_name).max_by_key(|column| widths[*column]) else { return };
        if widths[widest] <= NAME.max(header[widest].chars().count()) {
            return;
        }
        widths[widest] -= 1;
        total -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_narrowed_to_the_terminal_by_its_longest_names() {
        let header = ["JOB", "NAME", "OWNER", "WAITS FOR"];
        let narrowed = |widths: [usize; 4], columns| {
            let mut widths = widths;
            fit(&header, &["NAME", "OWNER"], &mut widths, columns);
            widths
        };
        assert_eq!(narrowed([27, 40, 10, 30], 113), [27, 40, 10, 30], "it has just the room");
        assert_eq!(narrowed([27, 40, 10, 30], 112), [27, 39, 10, 30], "one more would not");
        assert_eq!(narrowed([27, 200, 30, 30], 120), [27, 29, 28, 30]);
        // A long sentence goes on in the next line, and ids stay whole.
        assert_eq!(narrowed([27, 200, 30, 300], 120), [27, 24, 23, 300]);
        assert_eq!(narrowed([27, 200, 30, 300], 20), [27, 12, 12, 300], "it does not get narrower");
    }
}
