//! Labels by which people sort jobs: projects, tags and notes. They do not change what a job computes.

use crate::{
    invisible::first_invisible,
    limits::{MAX_TAGS, NOTES_BYTES, PROJECT_CHARS, TAG_CHARS},
};

/// The project of a job that does not name one.
pub const DEFAULT_PROJECT: &str = "default";

/// Whether this is the default project, which serialised specifications leave out.
#[allow(clippy::ptr_arg)] // `skip_serializing_if` passes `&String`.
pub(crate) fn is_default_project(name: &String) -> bool {
    name == DEFAULT_PROJECT
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

/// A valid project name, made from the name that another program gives its project: invalid characters become `-`. `init` in
/// `python/src/lockstep/session.py` does the same.
pub fn to_project_name(name: &str) -> String {
    let plain = |c| if is_plain(c) { c } else { '-' };
    let name: String = name.trim_start_matches('.').chars().map(plain).take(PROJECT_CHARS).collect();
    if name.is_empty() { DEFAULT_PROJECT.into() } else { name }
}

/// Why a project cannot have this name; `None` if it can.
pub fn project_mistake(name: &str) -> Option<String> {
    plain_name_mistake(name, PROJECT_CHARS)
}

/// Why a text is not a plain name: at most `max` characters, none of which has a special meaning in URLs and paths. The text begins with
/// a verb (`has a space: ...`). `None` if the text is a plain name.
pub fn plain_name_mistake(name: &str, max: usize) -> Option<String> {
    let problem = match name.chars().find(|c| !is_plain(*c)) {
        _ if name.is_empty() => "is empty".to_owned(),
        Some(' ') => "has a space".into(),
        Some(special) => format!("has {special:?}"),
        None if name.len() > max => format!("has {} characters", name.len()),
        None if name.starts_with('.') => "begins with a dot".into(),
        None => return None,
    };
    // The name with its special characters replaced, if the name would then be valid.
    let parts: Vec<_> = name.split(|c: char| !is_plain(c)).filter(|part| !part.is_empty()).collect();
    let similar = parts.join("-");
    let similar = similar.trim_start_matches(['.', '-']).trim_end_matches('-');
    let similar =
        if (1..=max).contains(&similar.len()) { format!("; for example `{similar}`") } else { String::new() };
    Some(format!(
        "{problem}: use 1 to {max} letters (a to z, A to Z), digits, '-', '_' and '.', the first not a dot{similar}"
    ))
}

/// Part of the error for a name that differs from an existing name only in upper and lower case; follows the existing name.
pub const CASE_IS_IGNORED: &str = " (names that differ only in upper and lower case count as the same)";

/// Why these cannot be a job's tags; `None` if they can.
pub fn tags_mistake<T: AsRef<str>>(tags: &[T]) -> Option<String> {
    let is_invalid = |tag: &T| {
        let tag = tag.as_ref().trim();
        tag.chars().count() > TAG_CHARS || tag.contains(',') || first_invisible(tag).is_some()
    };
    (tags.len() > MAX_TAGS || tags.iter().any(is_invalid)).then(|| {
        format!(
            "must be at most {MAX_TAGS} tags, each of at most {TAG_CHARS} characters, without commas and invisible characters"
        )
    })
}

/// Tags in their stored form: trimmed and sorted, without duplicates and empty tags.
pub fn normalise_tags(tags: &[String]) -> Vec<String> {
    let mut tags: Vec<String> = tags.iter().map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()).collect();
    tags.sort();
    tags.dedup();
    tags
}

/// Why this text cannot be a job's notes; `None` if it can.
pub fn notes_mistake(notes: &str) -> Option<String> {
    (notes.len() > NOTES_BYTES).then(|| format!("has more than {NOTES_BYTES} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn project_names_have_no_special_characters() {
        for name in ["a", "default", "Cifar-10_v2.1", &"x".repeat(PROJECT_CHARS)] {
            assert_eq!(project_mistake(name), None, "{name}");
        }
        for name in ["", ".", ".x", "a b", "a/b", "ümläut", "a,b", "a\n", &"x".repeat(PROJECT_CHARS + 1)] {
            assert!(project_mistake(name).is_some(), "{name}");
            assert_eq!(project_mistake(&to_project_name(name)), None, "{name}");
        }
        assert_eq!(["my shoes/ä", "..x", "..."].map(to_project_name), ["my-shoes--", "x", "default"]);
    }
}
