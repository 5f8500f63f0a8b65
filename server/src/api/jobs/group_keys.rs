//! Parameters of requests for groups of jobs: the keys to group by (`project,train.lr`) and the values of a group (`["vision",0.1]`).

use super::conditions::find_single_setting;
use crate::{
    api::list::{self, Key},
    http::error::{Error, Result},
    store::{GroupBy, GroupValue, SettingKind},
};
use lockstep_protocol::spec::{Kind, shortened};

/// Maximum number of keys to group by.
pub(super) const MAX_KEYS: usize = 3;
/// Maximum size of a group's values as JSON, in bytes. Text settings may be long.
const MAX_VALUES_BYTES: usize = 16_384;
/// Number of leading characters of a text by which groups are ordered. Cursors contain these characters.
const ORDERED_CHARS: usize = 100;

fn invalid_by(detail: impl std::fmt::Display) -> Error {
    Error::BadRequest(format!("by {detail}"))
}

/// Parses the keys of `by`.
///
/// # Errors
/// 400: `by` has no key, more than three, a key twice, or a key that is not a setting with one value.
pub(super) fn parse_by(text: &str) -> Result<Vec<GroupBy>> {
    let parts: Vec<_> = list::split_list(Some(text)).collect();
    if !(1..=MAX_KEYS).contains(&parts.len()) {
        return Err(invalid_by(format!(
            "must name 1 to {MAX_KEYS} of project, owner, tag, state, name and keys such as train.lr, but names {}",
            parts.len()
        )));
    }
    let mut keys: Vec<GroupBy> = Vec::new();
    for part in parts {
        let key = parse_key(part)?;
        if keys.contains(&key) {
            return Err(invalid_by(format!("names {part:?} twice")));
        }
        keys.push(key);
    }
    Ok(keys)
}

fn parse_key(part: &str) -> Result<GroupBy> {
    Ok(match part {
        "project" => GroupBy::Project,
        "owner" => GroupBy::Owner,
        "tag" => GroupBy::Tag,
        "state" => GroupBy::State,
        "name" => GroupBy::Name,
        path => {
            let (table, key, kind) = find_single_setting(path, &[]).map_err(invalid_by)?;
            match (table, key, kind) {
                ("", "project", _) => GroupBy::Project,
                ("", "name", _) => GroupBy::Name,
                (_, _, kind) if kind.is_number() => {
                    GroupBy::Setting { table, key, kind: SettingKind::Number }
                }
                (_, _, Kind::Bool) => GroupBy::Setting { table, key, kind: SettingKind::Bool },
                _ => GroupBy::Setting { table, key, kind: SettingKind::Text },
            }
        }
    })
}

/// Parses the group of a request; empty if the request names no group.
///
/// # Errors
/// 400: only one of `by` and `group` is given, or the values do not fit the keys.
pub(super) fn parse_group(by: Option<&str>, values: Option<&str>) -> Result<Vec<(GroupBy, GroupValue)>> {
    let (by, values) = (by.filter(|by| !by.is_empty()), values.filter(|values| !values.is_empty()));
    let (keys, values) = match (by, values) {
        (Some(by), Some(values)) => (parse_by(by)?, values),
        (None, None) => return Ok(Vec::new()),
        _ => {
            return Err(Error::BadRequest(
                "by and group belong together: by=train.lr&group=[0.1] lists the jobs of one group".into(),
            ));
        }
    };
    let invalid_group = || {
        Error::BadRequest(format!(
            "group must be the values of a group as JSON, one for each key of by, such as [\"resnet20\",0.1] or [null], but is {:?}",
            shortened(values)
        ))
    };
    if values.len() > MAX_VALUES_BYTES {
        return Err(Error::BadRequest(format!(
            "group has {} bytes; give at most {MAX_VALUES_BYTES}",
            values.len()
        )));
    }
    let values: Vec<GroupValue> = serde_json::from_str(values).map_err(|_| invalid_group())?;
    let all_fit =
        values.len() == keys.len() && keys.iter().zip(&values).all(|(key, value)| fits(*key, value));
    if all_fit { Ok(keys.into_iter().zip(values).collect()) } else { Err(invalid_group()) }
}

/// Whether a value has the type of a key.
fn fits(key: GroupBy, value: &GroupValue) -> bool {
    match (key, value) {
        (GroupBy::Setting { kind: SettingKind::Bool, .. }, value) => matches!(value, GroupValue::Bool(_)),
        (_, GroupValue::Missing) => true,
        (GroupBy::Setting { kind: SettingKind::Number, .. }, value) => {
            matches!(value, GroupValue::Number(_))
        }
        (_, value) => matches!(value, GroupValue::Text(_)),
    }
}

/// Sort key of a group, from the values that the group's jobs have in common.
pub(super) fn sort_key(values: &[GroupValue]) -> Key {
    let part = |value: &GroupValue| match value {
        GroupValue::Bool(value) => Key::Number(f64::from(u8::from(*value))),
        GroupValue::Number(number) => Key::Number(*number),
        GroupValue::Text(text) => Key::Text(text.chars().take(ORDERED_CHARS).collect()),
        GroupValue::Missing => Key::Missing,
    };
    Key::Each(values.iter().map(part).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistake<T: std::fmt::Debug>(found: Result<T>) -> String {
        match found {
            Err(Error::BadRequest(detail)) => detail,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn jobs_are_grouped_by_one_to_three_different_keys() {
        let lr = GroupBy::Setting { table: "train", key: "lr", kind: SettingKind::Number };
        assert_eq!(parse_by("train.lr").unwrap(), [lr]);
        assert_eq!(parse_by("lr").unwrap(), [lr], "only one table has this key");
        assert_eq!(parse_by("tag, spec.train.lr,project").unwrap(), [GroupBy::Tag, lr, GroupBy::Project]);
        assert_eq!(parse_by("spec.project").unwrap(), [GroupBy::Project]);
        for (text, expected) in [
            ("", "1 to 3"),
            ("tag,owner,state,name", "names 4"),
            ("train.lr,spec.train.lr", "twice"),
            ("project,spec.project", "twice"),
            ("data.mean", "one value"),
            ("x'; DROP TABLE jobs", "not a setting"),
        ] {
            let reported = mistake(parse_by(text));
            assert!(reported.contains(expected), "{text}: {reported}");
        }
    }

    #[test]
    fn a_group_has_one_value_of_the_right_type_for_each_key() {
        let parse = |by, values| parse_group(Some(by), Some(values));
        assert_eq!(parse_group(None, None).unwrap(), []);
        assert_eq!(parse_group(Some(""), Some("")).unwrap(), []);
        assert_eq!(parse("owner", "[null]").unwrap(), [(GroupBy::Owner, GroupValue::Missing)]);
        assert_eq!(parse("train.lr,tag", "[0.1,\"a\"]").unwrap()[0].1, GroupValue::Number(0.1));
        for (by, values) in [
            ("train.lr", "[\"0.1\"]"),
            ("train.lr", "[true]"),
            ("train.lr", "0.1"),
            ("train.lr", "[0.1,0.2]"),
            ("train.lr", "[]"),
            ("project", "[1]"),
            ("private", "[null]"),
            ("private", "[0]"),
            ("project", "[[\"a\"]]"),
            ("project", "vision"),
        ] {
            assert!(mistake(parse(by, values)).contains("one for each key of by"), "{by} {values}");
        }
        assert!(mistake(parse_group(Some("tag"), None)).contains("belong together"));
        assert!(mistake(parse_group(None, Some("[1]"))).contains("belong together"));
        let long = |bytes: usize| format!("[\"{}\"]", "x".repeat(bytes - 4));
        assert!(parse_group(Some("name"), Some(&long(MAX_VALUES_BYTES))).is_ok());
        let too_long = long(MAX_VALUES_BYTES + 1);
        assert!(mistake(parse_group(Some("name"), Some(&too_long))).contains("at most 16384"));
    }
}
