//! Shortens long names and paths in the middle, because names often differ at their ends. The same as `static/cut.js`.

/// A separator is the first character of the word that follows it (`-seed`). A space belongs to no word.
const SEPARATORS: [char; 3] = ['/', '-', '_'];

/// Whether a word begins at `index`. No word begins between two adjacent separators.
fn starts_word(all: &[char], index: usize) -> bool {
    let Some(before) = index.checked_sub(1).map(|before| all[before]) else { return true };
    let first = all[index];
    (SEPARATORS.contains(&first) && !SEPARATORS.contains(&before)) || (before == ' ' && first != ' ')
}

/// The start of a word in `range` that is nearest to `target`; `target` if no word begins in `range`.
fn nearest_start(all: &[char], target: usize, range: std::ops::RangeInclusive<usize>) -> usize {
    let starts = range.filter(|index| *index < all.len() && starts_word(all, *index));
    starts.min_by_key(|index| index.abs_diff(target)).unwrap_or(target)
}

/// Shortens `text` to at most `max` characters: the beginning, `…` and the end, both cut between two words if possible.
pub fn shorten_middle(text: &str, max: usize) -> String {
    // Fewer than three characters would leave nothing of the name.
    let max = max.max(3);
    let all: Vec<char> = text.chars().collect();
    if all.len() <= max {
        return text.to_owned();
    }
    // The end gets half of the space, or 25 to 70 % if it then begins with a word. The beginning gets the rest, or at least two thirds
    // of the rest if it then ends with a word.
    let middle = all.len() - max / 2;
    let tail_start = nearest_start(&all, middle, all.len() - max * 7 / 10..=all.len() - (max / 4).max(1));
    let head_max = max - 1 - (all.len() - tail_start);
    let head_end = nearest_start(&all, head_max, (head_max * 2 / 3).max(1)..=head_max);
    let text_of = |chars: &[char]| chars.iter().collect::<String>();
    format!("{}…{}", text_of(&all[..head_end]), text_of(&all[tail_start..]))
}

/// Maximum length of a path or name in a sentence on a page, in characters.
pub const MAX_WORD_CHARS: usize = 48;

/// A sentence with each of its long words (paths, names) shortened to [`MAX_WORD_CHARS`] characters.
pub fn shorten_long_words(sentence: &str) -> String {
    sentence.split(' ').map(|word| shorten_middle(word, MAX_WORD_CHARS)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_three_keeps_three_characters() {
        assert_eq!([shorten_middle("abc", 1), shorten_middle("abcd", 1)], ["abc", "a…d"]);
    }

    #[test]
    fn shortened_text_never_exceeds_its_limit() {
        for text in ["/".repeat(100), "a/".repeat(50), "a".repeat(100), "-a".repeat(51), " ".repeat(60)] {
            for most in 3..=60 {
                let cut = shorten_middle(&text, most).chars().count();
                assert!(cut <= most, "{cut} of {most}: {text}");
            }
            assert_eq!(shorten_middle(&text, text.chars().count()), text, "at its length it is whole");
        }
    }

    #[test]
    fn only_long_words_of_a_sentence_are_shortened() {
        let path = format!("/data/{}/train", "a".repeat(60));
        let cut = shorten_long_words(&format!("{path} cannot be read: no such file"));
        assert!(cut.starts_with("/data") && cut.ends_with("/train cannot be read: no such file"), "{cut}");
        assert_eq!(cut.split(' ').next().map(|word| word.chars().count()), Some(MAX_WORD_CHARS), "{cut}");
        let short = format!("{} cannot be read", "a".repeat(MAX_WORD_CHARS));
        assert_eq!(shorten_long_words(&short), short);
    }
}
