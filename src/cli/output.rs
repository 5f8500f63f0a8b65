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
/// shortened in the middle. A pipe receives whole names.
pub(crate) fn table_of_names(
    header: &[&str],
    names: &[&str],
    rows: impl IntoIterator<Item: AsRef<[String]>>,
) -> anyhow::Result<()> {
    Table::new(header, names, rows).print()
}

/// Like [`table_of_names`], with sentences in the last column. If a terminal is too narrow for this column, each sentence is printed below
/// its row.
pub(crate) fn table_of_sentences(
    header: &[&str],
    names: &[&str],
    rows: &[Vec<String>],
) -> anyhow::Result<()> {
    Table { has_sentences: true, ..Table::new(header, names, rows) }.print()
}

/// Number of spaces between two columns.
const GAP: usize = 2;
/// Minimum width of a column of names, in characters.
const MIN_NAME_WIDTH: usize = 12;
/// A column of sentences gets at least the terminal's width divided by this number. Longer sentences wrap.
const SENTENCE_SHARE: usize = 3;

struct Table<'a> {
    header: Vec<&'a str>,
    /// The headers of the columns whose cells may be shortened.
    names: &'a [&'a str],
    rows: Vec<Vec<String>>,
    widths: Vec<usize>,
    /// Whether the last column contains sentences.
    has_sentences: bool,
    /// The sentence below each row, or an empty text. Empty if the sentences have a column.
    sentences_below: Vec<String>,
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
        Self {
            header: header.to_vec(),
            names,
            rows,
            widths,
            has_sentences: false,
            sentences_below: Vec::new(),
        }
    }

    fn print(mut self) -> anyhow::Result<()> {
        if let Some(columns) = terminal_columns() {
            self.fit(columns);
        }
        let print = |cells: Vec<&str>| {
            let padded: Vec<_> =
                cells.iter().zip(&self.widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            line(padded.join(&" ".repeat(GAP)).trim_end())
        };
        print(self.header.clone())?;
        for (index, row) in self.rows.iter().enumerate() {
            print(row.iter().map(String::as_str).collect())?;
            if let Some(sentence) = self.sentences_below.get(index).filter(|sentence| !sentence.is_empty()) {
                line(format!("{:GAP$}{sentence}", ""))?;
            }
        }
        Ok(())
    }

    /// Reduces the rows to `columns` characters as far as possible: removes empty columns, moves sentences below their rows, and shortens
    /// names.
    fn fit(&mut self, columns: usize) {
        if width(&self.widths) <= columns {
            return;
        }
        for column in (0..self.header.len()).rev() {
            if !self.rows.is_empty() && self.rows.iter().all(|row| row[column].is_empty()) {
                self.has_sentences &= column + 1 < self.header.len();
                self.remove(column);
            }
        }
        let last = self.widths.len().saturating_sub(1);
        let (mut widths, mut fits) = (self.widths.clone(), false);
        if self.has_sentences && last > 0 {
            let available = columns.saturating_sub(GAP + widths[last].min(columns / SENTENCE_SHARE));
            fits = narrow(&self.header, self.names, &mut widths[..last], available);
            if !fits {
                self.sentences_below = self.remove(last);
                widths.clone_from(&self.widths);
            }
        }
        if !fits {
            narrow(&self.header, self.names, &mut widths, columns);
        }
        self.widths = widths;
        for row in &mut self.rows {
            for (column, cell) in row.iter_mut().enumerate() {
                let is_name = self.names.contains(&self.header[column]);
                if is_name && cell.chars().count() > self.widths[column] {
                    *cell = shorten(cell, self.widths[column]);
                }
            }
        }
    }

    /// Removes a column and returns its cells.
    fn remove(&mut self, column: usize) -> Vec<String> {
        self.header.remove(column);
        self.widths.remove(column);
        self.rows.iter_mut().map(|row| row.remove(column)).collect()
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

/// Returns the number of characters in a row.
fn width(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
}

/// Narrows columns of `names`, the widest first, until a row has at most `columns` characters. Returns false if that is impossible.
fn narrow(header: &[&str], names: &[&str], widths: &mut [usize], columns: usize) -> bool {
    while width(widths) > columns {
        let is_name = |column: &usize| names.contains(&header[*column]);
        let widest = (0..widths.len()).filter(is_name).max_by_key(|column| widths[*column]);
        let Some(widest) = widest.filter(|c| widths[*c] > MIN_NAME_WIDTH.max(header[*c].chars().count()))
        else {
            return false;
        };
        widths[widest] -= 1;
    }
    true
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

    /// Returns a table with one row whose cells have these lengths, fitted to a terminal with this number of columns.
    fn table(lengths: [usize; 5], columns: usize) -> Table<'static> {
        let row = lengths.map(|length| "x".repeat(length));
        let table = Table::new(&HEADER, &["NAME", "OWNER"], &[row]);
        let mut table = Table { has_sentences: true, ..table };
        table.fit(columns);
        table
    }

    #[test]
    fn a_table_is_narrowed_to_the_terminal_by_its_longest_names() {
        let widths = |lengths, columns| table(lengths, columns).widths;
        assert_eq!(widths([27, 40, 10, 4, 30], 119), [27, 40, 10, 4, 30], "the table fits exactly");
        assert_eq!(widths([27, 40, 10, 4, 30], 118), [27, 39, 10, 4, 30], "one character too wide");
        assert_eq!(widths([27, 40, 10, 0, 30], 118), [27, 40, 10, 30], "an empty column goes first");
        assert_eq!(widths([27, 200, 30, 0, 30], 120), [27, 29, 28, 30]);
        // A long sentence wraps, and ids stay whole.
        assert_eq!(widths([27, 200, 30, 0, 300], 120), [27, 24, 23, 300]);
    }

    #[test]
    fn a_trials_settings_are_kept_longer_than_the_text_before_them() {
        let trial = "cifar-lr lr=0.01 weight_decay=0.0";
        assert_eq!(shorten(trial, 30), "cifar…lr=0.01 weight_decay=0.0");
        assert_eq!(shorten(trial, 20), "…lr=0.01 …_decay=0.0");
        assert_eq!(shorten("lr=0.01 weight_decay=0.0", 19), "lr=0.01 …_decay=0.0");
    }

    #[test]
    fn a_sentence_that_does_not_fit_stands_below_its_row() {
        let narrow = table([27, 200, 30, 0, 300], 80);
        assert_eq!(narrow.header, HEADER[..3]);
        assert_eq!(narrow.widths, [27, 25, 24], "names get the sentence's space");
        assert_eq!(narrow.sentences_below, ["x".repeat(300)]);
        assert_eq!(table([27, 200, 30, 0, 300], 20).widths, [27, 12, 12], "names do not get narrower");
    }
}
