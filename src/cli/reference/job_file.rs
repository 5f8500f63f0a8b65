//! Documents every key of a job file: a page, and text for a terminal.

use super::{super::output::wrap, escape, generated_from, table};
use lockstep_protocol::spec::{KeyReference, SectionReference, nearest, recipes, reference, sweep_reference};
use std::fmt::Write as _;

/// Number of columns of the text for a terminal.
const WIDTH: usize = 100;
const INDENT: &str = "  ";
const MEANING_INDENT: &str = "      ";

pub(super) fn markdown() -> String {
    let mut text = generated_from("the specification's types and limits");
    text += "# Keys of a job file\n\n\
        A job is a TOML file, or JSON of the same shape. Every key except `data.dataset` has a default. Unknown keys and values out of \
        range are refused, all at once, with the nearest right name. `lockstep help job` prints this page, and `lockstep help job \
        train.lr` one key; `--set train.lr=0.1` changes a key on the command line.\n";
    for section in sections() {
        let title = title(&section);
        let rows = section.keys.into_iter().map(|key| {
            let default = key.default.map_or_else(|| "none".to_owned(), |default| format!("`{default}`"));
            [format!("`{}`", key.name), key.values, default, escape(&key.meaning)]
        });
        let rows: Vec<_> = rows.collect();
        let _ = write!(text, "\n## {title}\n\n{}\n\n", escape(&section.meaning));
        text += &table(["key", "values", "default", "meaning"], &rows);
    }
    text += "\n## Recipes\n\n\
        `train.recipe` replaces the defaults of these keys; a key that the job gives has precedence. The learning rate is scaled with the \
        pictures of a step, and settings that are epochs are scaled with `train.epochs`, unless the job gives them.\n";
    for recipe in recipes() {
        let (lr, pictures) = recipe.lr;
        let _ = write!(text, "\n### {}\n\n`train.lr`: {lr} for {pictures} pictures a step.\n\n", recipe.name);
        let rows: Vec<_> =
            recipe.keys.into_iter().map(|(key, value)| [format!("`{key}`"), format!("`{value}`")]).collect();
        text += &table(["key", "value"], &rows);
    }
    text
}

/// Returns every table of a job file.
fn sections() -> Vec<SectionReference> {
    reference().into_iter().chain([sweep_reference()]).collect()
}

fn title(section: &SectionReference) -> String {
    if section.name.is_empty() { "Top of the file".into() } else { format!("\\[{}\\]", section.name) }
}

/// Returns the reference for a terminal: the whole reference, a section (`train`), or a key (`train.lr`, or `lr` in any section).
///
/// # Errors
/// `topic` is neither a section nor a key. The error suggests the nearest name.
pub(crate) fn help_text(topic: Option<&str>) -> Result<String, String> {
    let sections = sections();
    let path = |section: &SectionReference, key: &KeyReference| match section.name {
        "" => key.name.to_owned(),
        name => format!("{name}.{}", key.name),
    };
    let mut text = String::new();
    for section in &sections {
        let is_whole_section = topic.is_none_or(|topic| topic == section.name && !topic.is_empty());
        let keys = section.keys.iter().filter(|key| {
            is_whole_section || topic.is_some_and(|topic| topic == key.name || topic == path(section, key))
        });
        let keys: Vec<_> = keys.collect();
        if keys.is_empty() {
            continue;
        }
        if !text.is_empty() {
            text.push('\n');
        }
        if is_whole_section {
            let name = if section.name.is_empty() { String::new() } else { format!("[{}] ", section.name) };
            text += &wrap(&format!("{name}{}", section.meaning), WIDTH, "", "");
            text.push('\n');
        }
        for key in keys {
            let default =
                key.default.as_ref().map_or_else(String::new, |default| format!(", default {default}"));
            let first = format!("{} = {}{default}", path(section, key), key.values);
            text += &wrap(&first, WIDTH, INDENT, MEANING_INDENT);
            text += &wrap(&key.meaning.replace('`', ""), WIDTH, MEANING_INDENT, MEANING_INDENT);
        }
    }
    if !text.is_empty() {
        return Ok(text);
    }
    let topic = topic.unwrap_or_default();
    let paths: Vec<String> =
        sections.iter().flat_map(|section| section.keys.iter().map(move |key| path(section, key))).collect();
    let names = paths.iter().map(String::as_str).chain(sections.iter().map(|section| section.name));
    let keys = sections.iter().flat_map(|section| section.keys.iter().map(|key| key.name));
    let near = nearest(topic, names.chain(keys)).map_or_else(
        || "`lockstep help job` lists all keys".to_owned(),
        |near| format!("did you mean {near:?}?"),
    );
    Err(format!("a job file has no section or key {topic:?}; {near}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_requested_section_or_key_is_shown() {
        let all = help_text(None).unwrap();
        for section in reference() {
            for key in section.keys {
                assert!(all.contains(&format!("{} = ", key.name)), "{}", key.name);
            }
        }
        assert!(all.lines().all(|line| line.chars().count() <= WIDTH), "{all}");
        let lr = help_text(Some("train.lr")).unwrap();
        assert!(lr.starts_with("  train.lr = number, above 0 and at most 10,000, default 0.01\n"), "{lr}");
        assert_eq!(help_text(Some("lr")), Ok(lr));
        let twice = help_text(Some("every_epochs")).unwrap();
        assert!(
            twice.contains("checkpoint.every_epochs") && twice.contains("evaluate.every_epochs"),
            "{twice}"
        );
        let section = help_text(Some("recovery")).unwrap();
        assert!(section.contains("recovery.max_restarts") && !section.contains("train."), "{section}");
        let message = help_text(Some("train.lrs")).unwrap_err();
        assert!(message.contains("train.lr"), "{message}");
        assert!(help_text(Some("")).is_err() && help_text(Some("zzz")).unwrap_err().contains("lists all"));
    }
}
