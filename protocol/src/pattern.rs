//! Patterns that stand for many file names, as in WebDataset: `train-{000..127}.tar`, `{train,val}-0.tar`.

use std::{collections::HashSet, ffi::OsStr};

/// Whether a path, or a component of a path, is written as a pattern.
pub fn has_brace(path: &OsStr) -> bool {
    path.as_encoded_bytes().contains(&b'{')
}

/// All names of a pattern, in order, without duplicates.
///
/// # Errors
/// The mistake, as words that follow the pattern in a sentence, such as "has a { without its }". More than
/// `max_names` names are a mistake.
pub fn expand(pattern: &str, max_names: usize) -> Result<Vec<String>, String> {
    let mut names = vec![String::new()];
    let mut rest = pattern;
    while let Some(open) = rest.find('{') {
        let close = rest[open..].find('}').map(|close| open + close);
        let close = close.ok_or("has a { without its }; a pattern looks like train-{000..127}.tar")?;
        let choices = choices(&rest[open + 1..close], max_names)?;
        if names.len().saturating_mul(choices.len()) > max_names {
            return Err(format!("names more than {max_names} files"));
        }
        let before = &rest[..open];
        names = names
            .iter()
            .flat_map(|name| choices.iter().map(move |choice| format!("{name}{before}{choice}")))
            .collect();
        rest = &rest[close + 1..];
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    // `{a,a}` names a file twice, but its samples count once.
    let mut seen = HashSet::with_capacity(names.len());
    names.retain(|name| seen.insert(name.clone()));
    Ok(names)
}

/// Whether a pattern has this name, without expanding the pattern. A malformed pattern has no names. Unlike for
/// [`expand`], a pattern may have any number of names.
pub fn matches(pattern: &str, name: &str) -> bool {
    let Some(open) = pattern.find('{') else { return pattern == name };
    let Some(close) = pattern[open..].find('}').map(|close| open + close) else { return false };
    let Some(name_rest) = name.strip_prefix(&pattern[..open]) else { return false };
    let (inside, pattern_rest) = (&pattern[open + 1..close], &pattern[close + 1..]);
    if inside.contains(['/', '{']) {
        return false;
    }
    let Some((first, last)) = inside.split_once("..") else {
        let mut rests = inside.split(',').filter_map(|choice| name_rest.strip_prefix(choice));
        return inside.contains(',') && rests.any(|name_rest| matches(pattern_rest, name_rest));
    };
    let (Ok(from), Ok(to)) = (first.parse::<u64>(), last.parse::<u64>()) else { return false };
    let digits = first.len();
    let max_digits = name_rest.bytes().take_while(u8::is_ascii_digit).count();
    (1..=max_digits).any(|count| {
        let (written, name_rest) = name_rest.split_at(count);
        let number = written.parse::<u64>().ok().filter(|number| (from..=to).contains(number));
        number.is_some_and(|number| format!("{number:0digits$}") == written)
            && matches(pattern_rest, name_rest)
    })
}

/// Expands `000..127`, padded like the first number, or `a,b`.
fn choices(inside: &str, max_names: usize) -> Result<Vec<String>, String> {
    let wrong =
        || format!("has {{{inside}}}, which is neither a range such as {{000..127}} nor a list {{a,b}}");
    if inside.contains('/') {
        return Err(format!("has {{{inside}}}: a choice is a part of a file's name, without /"));
    }
    let Some((first, last)) = inside.split_once("..") else {
        return if inside.contains(',') && !inside.contains('{') {
            Ok(inside.split(',').map(str::to_owned).collect())
        } else {
            Err(wrong())
        };
    };
    let number = |text: &str| text.parse::<u64>().map_err(|_| wrong());
    let (from, to) = (number(first)?, number(last)?);
    if from > to {
        return Err(format!("has {{{inside}}}, a range that goes down"));
    }
    if to - from >= max_names as u64 {
        return Err(format!("names more than {max_names} files"));
    }
    let digits = first.len();
    Ok((from..=to).map(|number| format!("{number:0digits$}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_exactly_the_names_of_its_expansion() {
        for (pattern, others) in [
            ("train-{000..127}.tar", ["train-128.tar", "train-1.tar", "train-0000.tar", "train-000.tar.gz"]),
            ("{train,val}-{8..11}.tar", ["test-8.tar", "val-08.tar", "train-7.tar", "train-.tar"]),
            ("{a,ab}{b,bc}/x", ["a/x", "abbb/x", "b/x", ""]),
            ("{0..1}{0..10}", ["2", "00x", "011", "0"]),
            ("plain", ["plai", "plainer", "{plain}", ""]),
        ] {
            let all = expand(pattern, 1000).unwrap();
            for name in &all {
                assert!(matches(pattern, name), "{pattern} has {name}");
            }
            for other in others {
                assert!(
                    !all.iter().any(|name| name == other) && !matches(pattern, other),
                    "{pattern}: {other}"
                );
            }
        }
        for wrong in ["a{", "a{x}", "a{1..x}", "a{x,b/c}", "a{x,{b}"] {
            assert!(
                expand(wrong, 1000).is_err() && !matches(wrong, wrong) && !matches(wrong, "ax"),
                "{wrong}"
            );
        }
    }
}
