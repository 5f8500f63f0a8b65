//! Standard output and error: lines for people, JSON for programs, and no panic when a pipe closes. What a server or a
//! file says may hold characters that a terminal obeys (colours, titles, the clipboard): on a terminal they are shown
//! as what they are. A pipe gets what there is.

use serde::Serialize;
use std::{
    borrow::Cow,
    fmt,
    fmt::Write as _,
    io::{self, IsTerminal, Write},
};

/// Prints a line to standard output.
///
/// # Errors
/// When standard output is closed or full.
pub(crate) fn line(text: impl fmt::Display) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    let text = text.to_string();
    let shown = if out.is_terminal() { harmless(&text) } else { Cow::Borrowed(&text[..]) };
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
    let shown = if out.is_terminal() { harmless(&text) } else { Cow::Borrowed(&text[..]) };
    let _ = writeln!(out, "{shown}");
}

/// Text without what a terminal would obey: control characters but line feed and tab, and those that turn the
/// direction of text, are written as JSON writes them.
pub(crate) fn harmless(text: &str) -> Cow<'_, str> {
    let obeyed = |c: char| {
        c.is_control() && c != '\n' && c != '\t'
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(obeyed) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if obeyed(c) {
            let _ = write!(shown, "\\u{:04x}", u32::from(c));
        } else {
            shown.push(c);
        }
    }
    shown.into()
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
    // A row is a line, whatever is in it.
    let cell = |cell: &String| harmless(&cell.replace(['\n', '\t'], " ")).into_owned();
    let rows: Vec<[String; N]> = rows.iter().map(|row| row.each_ref().map(cell)).collect();
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

#[cfg(test)]
mod tests {
    use super::harmless;

    #[test]
    fn a_terminal_obeys_nothing_that_is_printed() {
        for (text, shown) in [
            ("plain, ümläut, 猫, a\ttab\nand a line", "plain, ümläut, 猫, a\ttab\nand a line"),
            ("\u{1b}[31mred\u{1b}[0m", "\\u001b[31mred\\u001b[0m"),
            ("\u{1b}]52;c;ZXZpbA==\u{7}", "\\u001b]52;c;ZXZpbA==\\u0007"),
            ("over\rwritten\u{8}", "over\\u000dwritten\\u0008"),
            ("\u{9b}2J\u{7f}\0", "\\u009b2J\\u007f\\u0000"),
            ("gnp.\u{202e}exe", "gnp.\\u202eexe"),
        ] {
            assert_eq!(harmless(text), shown);
        }
    }
}
