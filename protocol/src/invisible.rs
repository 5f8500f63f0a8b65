//! Finds and escapes invisible characters. With them, two names that look the same can differ, and text can control a terminal.

use std::{borrow::Cow, fmt::Write as _};

/// Control characters, and characters that only control layout: spaces without width, marks that change the direction
/// of text, invisible operators, tags, fillers.
const fn is_invisible(c: char) -> bool {
    matches!(c,
        '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}'
        | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e0fff}')
}

/// The invisible characters of `text`, with their byte offsets.
fn invisible_chars(text: &str) -> impl Iterator<Item = (usize, char)> {
    let mut before = None;
    text.char_indices().filter(move |&(at, c)| {
        let after = text[at + c.len_utf8()..].chars().next();
        let is_joinable = |c: Option<char>| c.is_some_and(|c| !c.is_ascii() && !is_invisible(c));
        // Zero-width joiners and non-joiners between two visible non-ASCII characters have a purpose: in emoji, and in Persian and Indic
        // scripts.
        let is_useful_joiner =
            matches!(c, '\u{200c}' | '\u{200d}') && is_joinable(before) && is_joinable(after);
        before = Some(c);
        is_invisible(c) && !is_useful_joiner
    })
}

/// The first invisible character of a text.
pub fn first_invisible(text: &str) -> Option<char> {
    invisible_chars(text).next().map(|(_, c)| c)
}

/// Text for display, in which invisible characters and control characters are JSON escapes (`\u200b`), except line feed
/// and tab.
pub fn escape_invisible(text: &str) -> Cow<'_, str> {
    let mut all = invisible_chars(text).filter(|(_, c)| !matches!(c, '\n' | '\t')).peekable();
    if all.peek().is_none() {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    let mut from = 0;
    for (at, c) in all {
        out.push_str(&text[from..at]);
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(out, "\\u{unit:04x}");
        }
        from = at + c.len_utf8();
    }
    out.push_str(&text[from..]);
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invisible_characters_are_found_and_escaped() {
        for (text, written) in [
            ("plain, ümläut, 猫, a\ttab\nand a line", "plain, ümläut, 猫, a\ttab\nand a line"),
            ("\u{1b}[31mred\u{1b}[0m", "\\u001b[31mred\\u001b[0m"),
            ("\u{1b}]52;c;ZXZpbA==\u{7}", "\\u001b]52;c;ZXZpbA==\\u0007"),
            ("over\rwritten\u{8}", "over\\u000dwritten\\u0008"),
            ("\u{9b}2J\u{7f}\0", "\\u009b2J\\u007f\\u0000"),
            ("gnp.\u{202e}exe", "gnp.\\u202eexe"),
            ("cat\u{200b}.jpg", "cat\\u200b.jpg"),
            ("\u{feff}a\u{2060}b\u{ad}c\u{2028}", "\\ufeffa\\u2060b\\u00adc\\u2028"),
            ("a\u{200d}b", "a\\u200db"),
            ("\u{e0041}", "\\udb40\\udc41"),
            // A family, a Persian word, a red heart: without joiners these are displayed differently.
            ("\u{1f468}\u{200d}\u{1f469}", "\u{1f468}\u{200d}\u{1f469}"),
            ("\u{645}\u{6cc}\u{200c}\u{62e}", "\u{645}\u{6cc}\u{200c}\u{62e}"),
            ("\u{2764}\u{fe0f}", "\u{2764}\u{fe0f}"),
            ("\u{1f468}\u{200d}", "\u{1f468}\\u200d"),
        ] {
            assert_eq!(escape_invisible(text), written);
        }
        assert_eq!(first_invisible("ümläut 猫"), None);
        assert_eq!(first_invisible("a\tb\u{200b}"), Some('\t'), "a name may not have a tab");
        assert_eq!(first_invisible("a\u{200b}"), Some('\u{200b}'));
    }
}
