//! Sweeps in job files: the section `sweep`, which `--sweep` and `--folds` write.

use super::{job_file, usage_error};
use lockstep_protocol::{
    JobSpec,
    numbers::plural,
    spec::{
        Setting, SpecError, key_mistakes, key_parts, read_sweep, set_key, shortened, split_sweep,
        toml_document, trial_document,
    },
};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Checks a file with a section `sweep` locally. Returns the number of its trials, or `None` for a file without this section.
///
/// # Errors
/// Exit status 2. The message lists every mistake, and the trial that has it; a mistake that trials share is listed once.
pub(crate) fn check(path: &Path, document: &Value) -> anyhow::Result<Option<usize>> {
    let Some((trials, mistakes)) = find_mistakes(document) else { return Ok(None) };
    if mistakes.is_empty() {
        return Ok(Some(trials));
    }
    Err(job_file::mistakes_error(path, &mistakes))
}

/// Returns the number of trials of a job file with a section `sweep` (0 if this section has mistakes), and each distinct mistake. `None`
/// for a file without this section.
pub(crate) fn find_mistakes(document: &Value) -> Option<(usize, Vec<SpecError>)> {
    let (section, job) = split_sweep(document)?;
    let sweep = match read_sweep(&section) {
        Ok(sweep) => sweep,
        Err(mut mistakes) => {
            mistakes.extend(key_mistakes(&section, &job));
            return Some((0, mistakes));
        }
    };
    let settings = sweep.settings();
    // Each distinct mistake, with the indexes of the trials that have it.
    let mut mistakes: Vec<(SpecError, Vec<usize>)> = Vec::new();
    for (index, setting) in settings.iter().enumerate() {
        let trial_mistakes = match trial_document(&job, setting, "sweep") {
            Ok(trial) => {
                job_file::parse(&trial).map_or_else(|mistakes| mistakes, |spec| sweep.check_with_trial(&spec))
            }
            Err(detail) => vec![SpecError { pointer: "/sweep/parameters".into(), detail }],
        };
        for mistake in trial_mistakes {
            match mistakes.iter_mut().find(|(known, _)| *known == mistake) {
                Some((_, trials)) => trials.push(index),
                None => mistakes.push((mistake, vec![index])),
            }
        }
    }
    let with_trials = |(mistake, trials): (SpecError, Vec<usize>)| SpecError {
        detail: format!("{}{}", mistake.detail, format_trials(&trials, &settings)),
        ..mistake
    };
    Some((settings.len(), mistakes.into_iter().map(with_trials).collect()))
}

/// Formats the trials that have a mistake: `, in trial 2 (train.lr=-1) and 3 others`. Empty if all trials have the mistake.
fn format_trials(trials: &[usize], settings: &[Setting]) -> String {
    let [first, others @ ..] = trials else { return String::new() };
    if trials.len() == settings.len() {
        return String::new();
    }
    let others = match others.len() {
        0 => String::new(),
        count => format!(" and {}", plural(count as u64, "other")),
    };
    format!(", in trial {} ({}){others}", first + 1, setting_in_words(&settings[*first]))
}

/// Formats a setting: `train.lr=0.1 train.seed=2`.
pub(crate) fn setting_in_words(setting: &Setting) -> String {
    let pair = |(key, value): (&String, &Value)| format!("{key}={value}");
    setting.iter().map(pair).collect::<Vec<_>>().join(" ")
}

/// Returns the trials' job documents, in the order in which the trials start. Trials with a mistake are left out.
pub(crate) fn trial_documents(document: &Value) -> Vec<Value> {
    let Some((section, job)) = split_sweep(document) else { return Vec::new() };
    let settings = read_sweep(&section).map(|sweep| sweep.settings()).unwrap_or_default();
    settings.iter().filter_map(|setting| trial_document(&job, setting, "sweep").ok()).collect()
}

/// Writes a grid into a job file: the values of each `--sweep`, such as `train.lr=0.1,0.05`, and with `--folds` all folds of a
/// cross-validation. Values are written as in a job file; quotes of texts may be left out. Without these options, the file stays as it is.
///
/// # Errors
/// Exit status 2 if an argument is invalid, a key is repeated, or the file has a section `sweep`.
pub(crate) fn write_grid(
    path: &Path,
    document: &mut Value,
    arguments: &[String],
    folds: Option<u32>,
) -> anyhow::Result<()> {
    if arguments.is_empty() && folds.is_none() {
        return Ok(());
    }
    if document.get("sweep").is_some() {
        return Err(usage_error(format!(
            "--folds and --sweep cannot be combined with a section [sweep], and {} has one: remove the section, or put the values \
             into [sweep.parameters]",
            path.display()
        )));
    }
    let mut arguments = arguments.to_vec();
    if let Some(folds) = folds {
        set_key(document, "data.folds", folds.into()).map_err(|e| usage_error(format!("--folds: {e}")))?;
        let folds: Vec<_> = (1..=folds).map(|fold| fold.to_string()).collect();
        arguments.push(format!("data.fold={}", folds.join(",")));
    }
    let mut parameters = Map::new();
    for argument in &arguments {
        let invalid = |why: &str| usage_error(format!("--sweep {}: {why}", shortened(argument)));
        let Some((key, text)) = argument.split_once('=') else {
            return Err(invalid("the values are missing; write it as train.lr=0.1,0.05"));
        };
        let key = key.trim();
        key_parts(key).map_err(|e| invalid(&e))?;
        let values = parse_values(key, text);
        if values.iter().any(|value| *value == json!("")) {
            return Err(invalid("a value is missing; write it as train.lr=0.1,0.05"));
        }
        if parameters.insert(key.to_owned(), json!({ "values": values })).is_some() {
            return Err(invalid("the key is repeated; give all its values in one --sweep"));
        }
    }
    document["sweep"] = json!({ "method": "grid", "parameters": parameters });
    job_file::make_paths_absolute(document);
    Ok(())
}

/// Parses values: `0.1,0.05`, `"a","b"` or `[[0, 32], [5, 64]],[[0, 64]]`. Text that is not TOML is split at commas. For a key with numbers
/// or booleans, each part is then parsed as TOML.
fn parse_values(key: &str, text: &str) -> Vec<Value> {
    let parse_list = |text: &str| {
        let mut document = toml_document(&format!("value = [{text}]")).ok()?;
        match document.as_object_mut()?.remove("value")? {
            Value::Array(values) if !values.is_empty() => Some(values),
            _ => None,
        }
    };
    let pointer = format!("/{}", key.replace('.', "/"));
    let defaults = serde_json::to_value(JobSpec::default()).unwrap_or_default();
    let is_text = defaults.pointer(&pointer).is_none_or(|default| default.is_string() || default.is_null());
    let parse_value = |part: &str| match parse_list(part).as_deref() {
        Some([value]) if !is_text => value.clone(),
        _ => part.into(),
    };
    parse_list(text).unwrap_or_else(|| text.split(',').map(|part| parse_value(part.trim())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(document: Value, arguments: &[&str], folds: Option<u32>) -> anyhow::Result<Value> {
        let mut document = document;
        let arguments: Vec<_> = arguments.iter().map(ToString::to_string).collect();
        write_grid(Path::new("job.toml"), &mut document, &arguments, folds)?;
        Ok(document)
    }

    #[test]
    fn every_combination_is_a_trial_with_its_values_in_its_name() {
        let job = json!({"name": "wide", "tags": ["paper"], "train": {"lr": 1.0, "steps": 5}});
        let wide = grid(job, &["train.lr=0.1,0.05", "model.arch=resnet18, resnet34"], None).expect("a grid");
        let trials = trial_documents(&wide);
        let names: Vec<_> = trials.iter().filter_map(|trial| trial["name"].as_str()).collect();
        assert_eq!(
            names,
            [
                "wide arch=resnet18 lr=0.1",
                "wide arch=resnet18 lr=0.05",
                "wide arch=resnet34 lr=0.1",
                "wide arch=resnet34 lr=0.05"
            ]
        );
        assert_eq!(trials[1]["train"], json!({"lr": 0.05, "steps": 5}));
        let folds = grid(json!({"name": "x"}), &[], Some(2)).expect("a grid");
        assert_eq!(folds["data"], json!({"folds": 2}));
        assert_eq!(folds["sweep"]["parameters"], json!({"data.fold": {"values": [1, 2]}}));
    }

    #[test]
    fn values_are_as_in_a_job_file() {
        for (key, text, expected) in [
            ("train.image_size", "[[0, 32], [5, 64]],[[0, 64]]", json!([[[0, 32], [5, 64]], [[0, 64]]])),
            ("train.ema", "true,false", json!([true, false])),
            ("train.seed", "1,2,x", json!([1, 2, "x"])),
            ("train.deterministic", "true,maybe", json!([true, "maybe"])),
            // Texts, one of which happens to be a number.
            ("data.dataset", "mnist,2024", json!(["mnist", "2024"])),
        ] {
            assert_eq!(Value::from(parse_values(key, text)), expected, "{key}={text}");
        }
    }

    #[test]
    fn an_argument_without_values_and_a_second_sweep_are_refused() {
        let long = format!("train.seed={}", (0..501).map(|n| n.to_string()).collect::<Vec<_>>().join(","));
        for (job, arguments, words) in [
            (json!({}), &["train.lr"][..], "write it as train.lr=0.1,0.05"),
            (json!({}), &["train.lr="], "a value is missing"),
            (json!({}), &["train.lr=a,,b"], "a value is missing"),
            (json!({}), &["train.lr=1", "train.lr=2"], "the key is repeated"),
            (json!({}), &["train..lr=1"], "names no key"),
            (json!({}), &["train.lr=1,-1,2"], "in trial 2 (train.lr=-1)"),
            (
                json!({}),
                &["train.lr=1,-1", "train.seed=1,2"],
                "in trial 3 (train.lr=-1 train.seed=1) and 1 other",
            ),
            (json!({"sweep": {}}), &["train.lr=1"], "cannot be combined with a section [sweep]"),
            (json!({}), &[long.as_str()], "a list of 1 to 500 values"),
        ] {
            let path = Path::new("job.toml");
            let result = grid(job, arguments, None).and_then(|document| check(path, &document));
            let message = result.expect_err("it is refused").to_string();
            assert!(message.contains(words), "{arguments:?}: {message}");
        }
        let job_with_mistakes = json!({"train": {"lrr": 1}, "sweep": {"method": "grid", "metric": {"name": "acc"},
            "parameters": {"train.momentumm": {"values": [0.9]}}}});
        let (_, mistakes) = find_mistakes(&job_with_mistakes).expect("a sweep");
        for pointer in ["/sweep/metric/name", "/train/lrr", "/train/momentumm"] {
            assert!(mistakes.iter().any(|mistake| mistake.pointer == pointer), "{pointer}: {mistakes:?}");
        }
    }
}
