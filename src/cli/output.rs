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
    Table { header, names: &[], spare: &[] }.print(rows)
}

/// A table that is fitted to the terminal. A pipe gets all columns whole.
pub(crate) struct Table<'a, const N: usize> {
    pub(crate) header: [&'a str; N],
    /// Columns that are cut in the middle where the table is wider than the terminal.
    pub(crate) names: &'a [&'a str],
    /// Columns that are left out, the first of these first, where cutting names is not enough.
    pub(crate) spare: &'a [&'a str],
}

impl<const N: usize> Table<'_, N> {
    /// Prints it with these rows.
    ///
    /// # Errors
    /// As [`line`].
    pub(crate) fn print(&self, rows: &[[String; N]]) -> anyhow::Result<()> {
        self.lines(rows, terminal_columns()).into_iter().try_for_each(line)
    }

    fn lines(&self, rows: &[[String; N]], columns: Option<usize>) -> Vec<String> {
        // A row is a line, whatever is in it.
        let rows: Vec<[String; N]> =
            rows.iter().map(|row| row.each_ref().map(|cell| one_line(cell))).collect();
        let mut widths = self.header.map(|header| header.chars().count());
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let shown = match columns {
            Some(columns) => self.fit(&mut widths, columns),
            None => (0..N).collect(),
        };
        let row = |cells: [&str; N]| {
            let padded = shown.iter().map(|&column| {
                let width = widths[column];
                format!("{:<width$}", middle(cells[column], width))
            });
            padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        let header = row(self.header);
        [header]
            .into_iter()
            .chain(rows.iter().map(|cells| row(cells.each_ref().map(String::as_str))))
            .collect()
    }

    /// Leaves spare columns out and narrows names, the widest first, until the table has at most `columns` characters a line.
    /// Returns the columns that stay.
    fn fit(&self, widths: &mut [usize; N], columns: usize) -> Vec<usize> {
        let is_name = |column: &usize| self.names.contains(&self.header[*column]);
        let narrowest = |column: usize| NAME.max(self.header[column].chars().count());
        let total = |shown: &[usize], width: &dyn Fn(usize) -> usize| {
            let sentence = |column: usize| match column + 1 == N && !is_name(&column) {
                true => width(column).min(columns / SENTENCE),
                false => width(column),
            };
            shown.iter().map(|&column| sentence(column)).sum::<usize>() + 2 * shown.len().saturating_sub(1)
        };
        let mut shown: Vec<usize> = (0..N).collect();
        for spare in self.spare {
            let least = |column: usize| match is_name(&column) {
                true => widths[column].min(narrowest(column)),
                false => widths[column],
            };
            if total(&shown, &least) <= columns {
                break;
            }
            shown.retain(|&column| self.header[column] != *spare);
        }
        while total(&shown, &|column| widths[column]) > columns {
            let names = shown.iter().copied().filter(is_name);
            match names.filter(|&name| widths[name] > narrowest(name)).max_by_key(|&name| widths[name]) {
                Some(widest) => widths[widest] -= 1,
                None => break,
            }
        }
        shown
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: [&str; 6] = ["PLACE", "JOB", "NAME", "OWNER", "SLOTS", "WAITS FOR"];
    const TABLE: Table<6> = Table { header: HEADER, names: &["NAME", "OWNER"], spare: &["OWNER", "SLOTS"] };

    fn rows(reason: usize) -> [[String; 6]; 1] {
        let text = |of: &str, length: usize| of.repeat(length);
        [["1".into(), text("j", 27), text("n", 200), text("o", 30), "2".into(), text("r", reason)]]
    }

    #[test]
    fn a_table_has_the_width_of_the_terminal_and_a_pipe_gets_it_whole() {
        for columns in [60, 66, 79, 80, 96, 100, 120, 200] {
            for line in TABLE.lines(&rows(20), Some(columns)) {
                let length = line.chars().count();
                assert!(length <= columns, "{length} in {columns}: {line}");
            }
        }
        let header = |columns| TABLE.lines(&rows(20), columns).remove(0);
        let words = |columns| {
            header(columns)
                .split("  ")
                .map(str::trim)
                .filter(|w| !w.is_empty())
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(words(Some(120)), HEADER);
        assert_eq!(words(Some(85)), ["PLACE", "JOB", "NAME", "SLOTS", "WAITS FOR"]);
        assert_eq!(words(Some(70)), ["PLACE", "JOB", "NAME", "WAITS FOR"]);
        assert_eq!(words(Some(20)), words(Some(70)), "what a row is about stays");
        let [whole] = rows(300);
        let lines = TABLE.lines(&rows(300), None);
        assert!(whole.iter().all(|cell| lines[1].contains(cell)), "{lines:?}");
    }

    #[test]
    fn names_take_the_room_that_there_is_and_ids_and_sentences_are_whole() {
        let cells = |reason, columns| {
            let line = TABLE.lines(&rows(reason), Some(columns)).remove(1);
            line.split_whitespace().map(|cell| cell.chars().count()).collect::<Vec<_>>()
        };
        assert_eq!(cells(20, 300), [1, 27, 200, 30, 1, 20], "it has the room");
        assert_eq!(cells(20, 120), [1, 27, 27, 26, 1, 20]);
        // A sentence goes on in the next line.
        assert_eq!(cells(300, 140), [1, 27, 22, 25, 1, 300]);
    }
}
