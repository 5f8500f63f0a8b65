//! Names of many files in one, as WebDataset's users write them: `train-{000..127}.tar`, `{train,val}-0.tar`.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

/// Shards of a dataset.
pub(super) const SHARDS: usize = 100_000;
/// Names of a pattern that are tried to see whether any exists.
const TRIED: usize = 64;

/// The folder before the first brace, and the pattern behind it. `None` when `path` is no pattern, or a file's own name.
pub(super) fn fixed_part(path: &Path) -> Option<(PathBuf, PathBuf)> {
    let is_pattern = |part: &std::ffi::OsStr| part.as_encoded_bytes().contains(&b'{');
    if !path.iter().any(is_pattern) || path.exists() {
        return None;
    }
    let fixed: PathBuf = path.iter().take_while(|part| !is_pattern(part)).collect();
    let rest = path.iter().skip_while(|part| !is_pattern(part)).collect();
    Some((fixed, rest))
}

/// Whether the files of a pattern are there: a folder may be, on a machine that has none of them.
pub(super) fn exists(folder: &Path, rest: &Path) -> bool {
    match expand(&rest.to_string_lossy(), SHARDS) {
        // Some may be missing, which is reported when they are read.
        Ok(names) => names.iter().take(TRIED).any(|name| folder.join(name).exists()),
        // A mistake in it is reported when it is read.
        Err(_) => folder.is_dir(),
    }
}

/// All names of a pattern, in order, each once.
///
/// # Errors
/// What is wrong with it, to stand after it; also more than `most` names.
pub(super) fn expand(pattern: &str, most: usize) -> Result<Vec<String>, String> {
    let mut names = vec![String::new()];
    let mut rest = pattern;
    while let Some(open) = rest.find('{') {
        let close = rest[open..].find('}').map(|close| open + close);
        let close = close.ok_or("has a { without its }; a pattern looks like train-{000..127}.tar")?;
        let choices = choices(&rest[open + 1..close], most)?;
        if names.len().saturating_mul(choices.len()) > most {
            return Err(format!("names more than {most} files"));
        }
        let before = &rest[..open];
        names = names
            .iter()
            .flat_map(|name| choices.iter().map(move |choice| format!("{name}{before}{choice}")))
            .collect();
        rest = &rest[close + 1..];
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    // `{a,a}` names a file twice, whose samples are there once all the same.
    let mut seen = HashSet::with_capacity(names.len());
    names.retain(|name| seen.insert(name.clone()));
    Ok(names)
}

/// `000..127` with the first number's zeros, or `a,b`.
fn choices(inside: &str, most: usize) -> Result<Vec<String>, String> {
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
    if to - from >= most as u64 {
        return Err(format!("names more than {most} files"));
    }
    let digits = first.len();
    Ok((from..=to).map(|number| format!("{number:0digits$}")).collect())
}
