//! Conditions on settings and results in a request: `train.lr>0.1,model.arch=resnet50,best>0.9`.

use crate::{
    api::list,
    http::error::{Error, Result},
    store::{Comparison, Condition, SettingValue, SortBy},
};
use lockstep_protocol::{
    metric,
    spec::{KEYS, Kind, Section, nearest, shortened},
};

/// Maximum number of conditions in a request.
const MAX_CONDITIONS: usize = 10;
/// Parameters of the list of jobs that users may mistake for settings.
const FILTERS: [&str; 3] = ["state", "owner", "tag"];
/// Maximum number of characters of a value.
const MAX_VALUE_CHARS: usize = 200;
/// Comparison operators. Longer operators come before their prefixes.
const COMPARISONS: [(&str, Comparison); 7] = [
    ("!=", Comparison::NotEqual),
    ("<=", Comparison::LessOrEqual),
    (">=", Comparison::GreaterOrEqual),
    ("==", Comparison::Equal),
    ("=", Comparison::Equal),
    ("<", Comparison::Less),
    (">", Comparison::Greater),
];

/// Parses the conditions of a request. A job matches if it fulfils all of them.
///
/// # Errors
/// 400: the request has more than ten conditions, a condition cannot be parsed, its key is neither a setting with one value nor a result,
/// or its value does not fit the key.
pub(super) fn parse(text: Option<&str>) -> Result<Vec<Condition>> {
    let parts: Vec<_> = list::split_list(text).collect();
    let conditions = if parts.len() > MAX_CONDITIONS {
        Err(format!("has {} conditions; give at most {MAX_CONDITIONS}", parts.len()))
    } else {
        parts.into_iter().map(parse_condition).collect()
    };
    conditions.map_err(|mistake| Error::BadRequest(format!("where {mistake}")))
}

/// Parses a condition. The error is the predicate of a sentence about the parameter `where`.
fn parse_condition(text: &str) -> Result<Condition, String> {
    let parts = text.find(['=', '!', '<', '>']).and_then(|at| {
        let (key, rest) = text.split_at_checked(at)?;
        let (sign, comparison) = COMPARISONS.into_iter().find(|(sign, _)| rest.starts_with(sign))?;
        Some((key.trim(), comparison, rest.get(sign.len()..)?.trim()))
    });
    let (path, comparison, value) = parts.ok_or_else(|| {
        let text = shortened(text);
        format!("needs a key, one of = != < <= > >= and a value, such as train.lr>0.1, but is {text:?}")
    })?;
    let results: Vec<_> = result_names().collect();
    let as_result = results.iter().copied().find(|name| *name == path).map(result_sort_key);
    // A name of both a setting and a result means the setting.
    let (key, kind) = match (find_single_setting(path, &results), as_result) {
        (Ok((table, key, kind)), _) => {
            (SortBy::Setting { table, key, is_number: kind.is_number() }, Some(kind))
        }
        (Err(_), Some(result)) => (result, None),
        (Err(_), None) if path == "notes" => {
            let detail = "names notes, which is not a setting; use the parameter q (in the shell --search)";
            return Err(detail.into());
        }
        (Err(_), None) if FILTERS.contains(&path) => {
            return Err(format!(
                "names {path}, which is not a setting; use the parameter {path} (in the shell --{path})"
            ));
        }
        (Err(mistake), None) => return Err(mistake),
    };
    if value.is_empty() {
        return Err(format!("has no value for {path}; give a value, such as {path}=1"));
    }
    let chars = value.chars().count();
    if chars > MAX_VALUE_CHARS {
        return Err(format!("has a value of {chars} characters for {path}; give at most {MAX_VALUE_CHARS}"));
    }
    // Text, such as a name, may contain " and ", but hardly with an operator after it.
    let value_lowercase = value.to_lowercase();
    if value_lowercase.split_once(" and ").is_some_and(|(_, rest)| rest.contains(['=', '<', '>'])) {
        let detail = "joins conditions with \"and\"; separate them with commas (in the shell, give --where once for each condition)";
        return Err(detail.into());
    }
    let shown = shortened(value);
    let is_ordered = !matches!(comparison, Comparison::Equal | Comparison::NotEqual);
    let value = match kind {
        _ if kind.is_none_or(Kind::is_number) => {
            let (digits, divisor) =
                value.strip_suffix('%').map_or((value, 1.0), |digits| (digits.trim_end(), 100.0));
            let number = digits.parse().ok().filter(|number: &f64| number.is_finite());
            let hint = match value.get(..1) {
                Some(">") if comparison == Comparison::Equal => "; write >= instead of =>",
                Some("<") if comparison == Comparison::Equal => "; write <= instead of =<",
                _ => "",
            };
            let mistake = || format!("compares {path} with {shown:?}, which is not a number{hint}");
            SettingValue::Number(number.ok_or_else(mistake)? / divisor)
        }
        _ if is_ordered => {
            return Err(format!("can compare {path} only with = and !=, because {path} is not a number"));
        }
        Some(Kind::Bool) => {
            let mistake = |_| format!("compares {path} with {shown:?}, but {path} is true or false");
            SettingValue::Bool(value.parse().map_err(mistake)?)
        }
        Some(Kind::Word(words)) if !words.contains(&value) => {
            let hint = list::suggest(value, words, "its values are");
            return Err(format!("compares {path} with {shown:?}, which is not a value of {path}; {hint}"));
        }
        _ => SettingValue::Text(value.to_owned()),
    };
    Ok(Condition { key, comparison, value })
}

/// The names of results: the best validation accuracy, the speed, and the newest values of metrics.
pub(super) fn result_names() -> impl Iterator<Item = &'static str> {
    ["best", "speed"].into_iter().chain(metric::NAMES)
}

/// The sort key for the result with this name, which is one of [`result_names`].
pub(super) fn result_sort_key(name: &'static str) -> SortBy {
    match name {
        "best" => SortBy::Best,
        // The newest speed is a column of the job.
        "speed" | "images_per_second" => SortBy::Speed,
        _ => SortBy::Metric(name),
    }
}

/// Looks up a setting in [`KEYS`], so that no text of the request becomes SQL. `path` is a table of the job file and a key, such as
/// `train.lr`. The table may be omitted if only one table has the key. Returns the table, the key and the kind. `results`: names that the
/// request may give in place of a setting, for suggestions.
///
/// # Errors
/// The key is unknown or ambiguous. The message continues a sentence that begins with the name of the request's parameter.
pub(super) fn find_setting(
    path: &str,
    results: &[&str],
) -> Result<(&'static str, &'static str, Kind), String> {
    let given = path.strip_prefix("spec.").unwrap_or(path);
    let in_table =
        |table: &'static Section| table.keys.iter().map(move |(key, kind)| (table.name, *key, *kind));
    let settings: Vec<_> = KEYS.iter().flat_map(in_table).collect();
    let all_names: Vec<_> = settings.iter().map(|(table, key, _)| dotted(table, key)).collect();
    if let Some(index) = all_names.iter().position(|name| name == given) {
        return Ok(settings[index]);
    }
    let in_tables: Vec<_> = settings.into_iter().filter(|(_, key, _)| *key == given).collect();
    match in_tables.as_slice() {
        [setting] => return Ok(*setting),
        [] => {}
        several => {
            let names: Vec<_> = several.iter().map(|(table, key, _)| dotted(table, key)).collect();
            return Err(format!(
                "names {given}, which may mean {}; add the table to the name",
                names.join(" or ")
            ));
        }
    }
    let hint = match nearest(given, all_names.iter().map(String::as_str).chain(results.iter().copied())) {
        Some(near) => format!("did you mean {near:?}?"),
        None if results.is_empty() => "name a setting such as train.lr".to_owned(),
        None => format!(
            "name a setting such as train.lr, or a result: {}; other metrics and settings of runs from elsewhere cannot be compared",
            results.join(", ")
        ),
    };
    Err(format!("names {:?}, which is not a setting; {hint}", shortened(path)))
}

fn dotted(table: &str, key: &str) -> String {
    if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") }
}

/// Same as [`find_setting`], but refuses settings with several values.
pub(super) fn find_single_setting(
    path: &str,
    results: &[&str],
) -> Result<(&'static str, &'static str, Kind), String> {
    let (table, key, kind) = find_setting(path, results)?;
    let is_single = matches!(kind, Kind::Bool | Kind::Word(_) | Kind::Text { .. } | Kind::Project);
    if is_single || kind.is_number() {
        return Ok((table, key, kind));
    }
    Err(format!("names {}, which has several values; name a setting that has one value", dotted(table, key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Condition {
        let mut conditions = parse(Some(text)).unwrap();
        assert_eq!(conditions.len(), 1, "{text}");
        conditions.remove(0)
    }

    fn mistake(text: &str) -> String {
        match parse(Some(text)) {
            Err(Error::BadRequest(detail)) => detail,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn every_comparison_is_read_with_and_without_spaces() {
        let lr = || SortBy::Setting { table: "train", key: "lr", is_number: true };
        for (text, comparison) in [
            ("train.lr=0.5", Comparison::Equal),
            ("train.lr == 0.5", Comparison::Equal),
            ("train.lr != 0.5", Comparison::NotEqual),
            ("train.lr<0.5", Comparison::Less),
            ("train.lr <=0.5", Comparison::LessOrEqual),
            ("train.lr> 0.5", Comparison::Greater),
            ("spec.train.lr>=5e-1", Comparison::GreaterOrEqual),
        ] {
            let value = SettingValue::Number(0.5);
            assert_eq!(one(text), Condition { key: lr(), comparison, value }, "{text}");
        }
        // The name of a setting is not taken as the metric of the same name.
        for (text, key) in [
            ("lr > 0.1", lr()),
            ("best > 0.1", SortBy::Best),
            ("speed > 0.1", SortBy::Speed),
            ("val_loss > 0.1", SortBy::Metric("val_loss")),
            ("best > 10 %", SortBy::Best),
            ("best>10%", SortBy::Best),
        ] {
            let value = SettingValue::Number(0.1);
            assert_eq!(one(text), Condition { key, comparison: Comparison::Greater, value }, "{text}");
        }
        assert_eq!(one("model.arch=resnet50").value, SettingValue::Text("resnet50".into()));
        assert_eq!(one("private!=true").value, SettingValue::Bool(true));
        assert_eq!(
            one("data.dataset=a'; DROP TABLE jobs").value,
            SettingValue::Text("a'; DROP TABLE jobs".into())
        );
        assert_eq!(parse(None).unwrap(), []);
        assert_eq!(parse(Some(" , ")).unwrap(), []);
    }

    #[test]
    fn invalid_conditions_are_refused_with_a_suggestion() {
        for (text, expected) in [
            ("train.lr", "needs a key"),
            ("train.lr!0.1", "needs a key"),
            ("train.lr>", "no value for train.lr"),
            ("train.lr>big", "which is not a number"),
            ("best=high", "which is not a number"),
            ("best => 0.9", "write >= instead of =>"),
            ("lr > 0.1 and best > 0.9", "give --where once for each condition"),
            ("name = photos and epochs > 2", "joins conditions with \"and\""),
            ("notes = x", "in the shell --search"),
            ("best>%", "which is not a number"),
            ("state = failed", "use the parameter state (in the shell --state)"),
            ("train.lr>nan", "which is not a number"),
            ("train.lr>inf", "which is not a number"),
            ("train.lrr>1", "did you mean \"train.lr\"?"),
            ("bestt > 0.72", "did you mean \"best\"?"),
            ("zzzzzzzz>1", "or a result: best, speed"),
            ("zzzzzzzz>1", "runs from elsewhere cannot be compared"),
            ("every_steps>1", "checkpoint.every_steps or log.every_steps"),
            ("milestones=1", "one value"),
            ("model.arch>resnet50", "only with = and !="),
            ("model.arch=resnet5", "did you mean \"resnet50\"?"),
            ("private=yes", "true or false"),
            ("data.mean=1", "one value"),
            ("'; DROP TABLE jobs; --=1", "is not a setting"),
        ] {
            let reported = mistake(text);
            assert!(reported.contains(expected), "{text}: {reported}");
        }
    }

    #[test]
    fn conditions_and_the_length_of_values_are_limited() {
        let many = |n: usize| vec!["train.lr>0"; n].join(",");
        assert_eq!(parse(Some(&many(10))).unwrap().len(), 10);
        assert!(mistake(&many(11)).contains("at most 10"));
        let long = |n: usize| format!("data.dataset={}", "é".repeat(n));
        assert_eq!(one(&long(200)).value, SettingValue::Text("é".repeat(200)));
        assert!(mistake(&long(201)).contains("at most 200"));
    }
}
