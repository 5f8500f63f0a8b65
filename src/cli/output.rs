//! Standard output and error: lines for people, JSON for programs, and no panic if a pipe is closed. Text from a server or a file may
//! contain control characters (for colours, titles, the clipboard). On a terminal, control characters and invisible characters are escaped.
//! A pipe receives the text unchanged; errors and warnings are always escaped.

use indicatif::ProgressStyle;
use lockstep_protocol::{cut::shorten_middle, invisible::escape_invisible};
use serde::Serialize;
use std::{
    borrow::Cow,
    fmt,
    io::{self, IsTerminal, Write},
};

/// Prints a line to standard output.
///
/// # Errors
/// Standard output is closed or full. This is the only error of the functions below that print.
pub(crate) fn line(text: impl fmt::Display) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    let text = text.to_string();
    let shown = if out.is_terminal() { escape_invisible(&text) } else { Cow::Borrowed(&text[..]) };
    writeln!(out, "{shown}")?;
    out.flush()?;
    Ok(())
}

/// Prints a value as indented JSON.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    line(serde_json::to_string_pretty(value)?)
}

/// Prints a result: `value` as JSON, or `text` as a line.
pub(crate) fn print(as_json: bool, value: &impl Serialize, text: impl fmt::Display) -> anyhow::Result<()> {
    if as_json { json(value) } else { line(text) }
}

/// Prints a line to standard error. Errors are ignored.
pub(crate) fn warn(text: impl fmt::Display) {
    let mut out = io::stderr().lock();
    let text = text.to_string();
    let _ = writeln!(out, "{}", escape_invisible(&text));
}

/// Prints the warnings of a server's response to standard error.
pub(crate) fn warn_each(warnings: &[String]) {
    warnings.iter().for_each(|warning| warn(format_args!("warning: {warning}")));
}

/// Returns the style of a progress bar.
pub(crate) fn bar_style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Whether the reader of standard output has exited (`lockstep list | head -1`), which is not an error.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe))
}

/// Formats a name from a file or a server for one line: line breaks and tabs become spaces, and other control characters are escaped.
pub(crate) fn one_line(text: &str) -> String {
    escape_invisible(&text.replace(['\n', '\t'], " ")).into_owned()
}

/// Breaks text into lines of at most `width` characters. The first line begins with `first`, and each later line with `later`. A word that
/// is too long for a line has a line of its own.
pub(crate) fn wrap(text: &str, width: usize, first: &str, later: &str) -> String {
    let (mut lines, mut line, mut is_empty) = (String::new(), first.to_owned(), true);
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > width {
            lines += &line;
            lines.push('\n');
            (line, is_empty) = (later.to_owned(), true);
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    lines + &line + "\n"
}

/// Prints a table whose columns are as wide as their content.
pub(crate) fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> anyhow::Result<()> {
    table_of_names(&header, &[], rows)
}

/// Like [`table`]. Each row must have a cell for each column. If the table is wider than the terminal, cells in the columns `names` are
/// shortened in the middle, and a long cell in the last column wraps. A pipe receives whole names.
pub(crate) fn table_of_names(
    header: &[&str],
    names: &[&str],
    rows: impl IntoIterator<Item: AsRef<[String]>>,
) -> anyhow::Result<()> {
    let mut table = Table::new(header, names, rows);
    if let Some(columns) = terminal_columns() {
        table.fit(columns);
    }
    table.print()
}

/// Number of spaces between two columns.
const GAP: usize = 2;
/// Minimum width of a column of names, in characters.
const MIN_NAME_WIDTH: usize = 12;
/// The last column may take the terminal's width divided by this number from the names. Longer cells wrap.
const LAST_COLUMN_SHARE: usize = 3;

struct Table<'a> {
    header: Vec<&'a str>,
    /// The headers of the columns whose cells may be shortened.
    names: &'a [&'a str],
    rows: Vec<Vec<String>>,
    widths: Vec<usize>,
}

impl<'a> Table<'a> {
    fn new(header: &[&'a str], names: &'a [&'a str], rows: impl IntoIterator<Item: AsRef<[String]>>) -> Self {
        // Each row must stay on one line, even if a cell contains a line break.
        let one_lines = |row: &[String]| row.iter().map(|cell| one_line(cell)).collect();
        let rows: Vec<Vec<String>> = rows.into_iter().map(|row| one_lines(row.as_ref())).collect();
        let width = |column: usize, title: &str| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or_default().max(title.chars().count())
        };
        let widths = header.iter().enumerate().map(|(column, title)| width(column, title)).collect();
        Self { header: header.to_vec(), names, rows, widths }
    }

    fn print(&self) -> anyhow::Result<()> {
        let print = |cells: &[&str]| {
            let padded: Vec<_> =
                cells.iter().zip(&self.widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            line(padded.join(&" ".repeat(GAP)).trim_end())
        };
        print(&self.header)?;
        self.rows.iter().try_for_each(|row| print(&row.iter().map(String::as_str).collect::<Vec<_>>()))
    }

    /// Reduces the rows to `columns` characters as far as possible: shortens names, in the widest column first.
    fn fit(&mut self, columns: usize) {
        let Some((last, others)) = self.widths.split_last() else { return };
        let last = (*last).min(columns / LAST_COLUMN_SHARE);
        let mut width = others.iter().map(|width| width + GAP).sum::<usize>() + last;
        let is_name = |column: usize| self.names.contains(&self.header[column]);
        while width > columns {
            let min_width = |column: usize| MIN_NAME_WIDTH.max(self.header[column].chars().count());
            let can_narrow = |column: &usize| is_name(*column) && self.widths[*column] > min_width(*column);
            let narrowed =
                (0..self.widths.len()).filter(can_narrow).max_by_key(|column| self.widths[*column]);
            let Some(widest) = narrowed else { break };
            self.widths[widest] -= 1;
            width -= 1;
        }
        for row in &mut self.rows {
            for (column, cell) in row.iter_mut().enumerate() {
                if is_name(column) && cell.chars().count() > self.widths[column] {
                    *cell = shorten(cell, self.widths[column]);
                }
            }
        }
    }
}

/// Shortens a name to `max` characters. The name of a trial ends with its settings (`key=value`), which distinguish it from other trials:
/// first the text before the settings is shortened.
fn shorten(name: &str, max: usize) -> String {
    let title_words = name.split_inclusive(' ').take_while(|word| !word.contains('='));
    let (title, settings) = name.split_at(title_words.map(str::len).sum());
    if title.is_empty() || settings.is_empty() {
        return shorten_middle(name, max);
    }
    let settings = shorten_middle(settings, max.saturating_sub(1));
    let available = max.saturating_sub(1 + settings.chars().count());
    format!("{}…{settings}", title.chars().take(available).collect::<String>())
}

/// Returns the width of the terminal on standard output, or `None` if it is not a terminal or reports no width.
fn terminal_columns() -> Option<usize> {
    let out = io::stdout();
    let size = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok())??;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: [&str; 5] = ["JOB", "NAME", "OWNER", "KEPT", "WAITS FOR"];

    #[test]
    fn a_table_is_narrowed_to_the_terminal_by_its_longest_names() {
        // The widths of a table with one row whose cells have these lengths, on a terminal with this number of columns.
        let widths = |lengths: [usize; 5], columns| {
            let row = lengths.map(|length| "x".repeat(length));
            let mut table = Table::new(&HEADER, &["NAME", "OWNER"], &[row]);
            table.fit(columns);
            table.widths
        };
        assert_eq!(widths([27, 40, 10, 4, 30], 119), [27, 40, 10, 4, 30], "the table fits exactly");
        assert_eq!(widths([27, 40, 10, 4, 30], 118), [27, 39, 10, 4, 30], "one character too wide");
        assert_eq!(widths([27, 200, 30, 4, 30], 120), [27, 26, 25, 4, 30]);
        // A long sentence wraps, and ids stay whole.
        assert_eq!(widths([27, 200, 30, 4, 300], 120), [27, 21, 20, 4, 300]);
        assert_eq!(widths([27, 200, 30, 4, 300], 20), [27, 12, 12, 4, 300], "names do not get narrower");
    }

    #[test]
    fn a_trials_settings_are_kept_longer_than_the_text_before_them() {
        let trial = "cifar-lr lr=0.01 weight_decay=0.0";
        assert_eq!(shorten(trial, 30), "cifar…lr=0.01 weight_decay=0.0");
        assert_eq!(shorten(trial, 20), "…lr=0.01 …_decay=0.0");
        assert_eq!(shorten("lr=0.01 weight_decay=0.0", 19), "lr=0.01 …_decay=0.0");
    }
}
