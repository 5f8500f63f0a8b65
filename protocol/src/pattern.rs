//! Names of many files in one, as WebDataset's users write them: `train-{000..127}.tar`, `{train,val}-0.tar`.

use std::collections::HashSet;

/// All names of a pattern, in order, each once.
///
/// # Errors
/// What is wrong with it, to stand after it; also more than `most` names.
pub fn expand(pattern: &str, most: usize) -> Result<Vec<String>, String> {
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
