//! Sort keys of jobs: columns, metrics, tags and keys of the specification.

use super::conditions;
use crate::{
    api::list,
    http::error::{Error, Result},
    store::{JobSort, SortBy},
};
use lockstep_protocol::{
    labels,
    spec::{Kind, shortened},
};

/// Columns as sort keys. Further keys are results, `tag:` with a tag, and `spec.` with a key of the specification.
const COLUMNS: [(&str, SortBy); 12] = [
    ("created", SortBy::Created),
    ("started", SortBy::Started),
    ("finished", SortBy::Finished),
    ("name", SortBy::Name),
    ("state", SortBy::State),
    ("project", SortBy::Project),
    ("owner", SortBy::Owner),
    ("priority", SortBy::Priority),
    ("step", SortBy::Step),
    ("epoch", SortBy::Epoch),
    ("attempt", SortBy::Attempt),
    ("ranks", SortBy::Ranks),
];

/// Parses the parameter `sort` of a request.
pub(super) fn parse_sort(text: &str) -> Result<JobSort> {
    let (name, descending) = list::split_sort_key(text);
    let by = if let Some(path) = name.strip_prefix("spec.") {
        setting_sort_key(path)?
    } else if let Some(tag) = name.strip_prefix("tag:") {
        if tag.trim().is_empty() {
            return Err(Error::BadRequest("sort: name a tag, as in tag:baseline".into()));
        }
        if let Some(mistake) = labels::tags_mistake(&[tag.to_owned()]) {
            return Err(Error::BadRequest(format!("sort: tag {mistake}")));
        }
        SortBy::Tag(tag.to_owned())
    } else {
        let names: Vec<_> = COLUMNS.iter().map(|(name, _)| *name).chain(conditions::result_names()).collect();
        let name = list::find_known_name("sort", name, &names)?;
        let column = COLUMNS.into_iter().find(|(known, _)| *known == name);
        column.map_or_else(|| conditions::result_sort_key(name), |(_, by)| by)
    };
    Ok(JobSort { by, descending })
}

/// Parses a name in the parameter `metrics` of a request for groups: a sort key whose values are numbers.
pub(super) fn numeric_sort_key(name: &str) -> Result<SortBy> {
    let JobSort { by, descending } = parse_sort(name)?;
    let is_number = match by {
        SortBy::Created | SortBy::Started | SortBy::Finished => false,
        SortBy::Name | SortBy::State | SortBy::Project | SortBy::Owner | SortBy::Tag(_) => false,
        SortBy::Setting { is_number, .. } => is_number,
        _ => true,
    };
    if descending || !is_number {
        return Err(Error::BadRequest(format!(
            "metrics names {:?}, which is not a number; name numbers such as loss, best or spec.train.lr",
            shortened(name)
        )));
    }
    Ok(by)
}

/// Parses a key of the specification as a sort key.
///
/// # Errors
/// 400: the key is unknown, or its values are not stored with the specification (project, tags and notes).
fn setting_sort_key(path: &str) -> Result<SortBy> {
    let sort_error = |detail: String| Error::BadRequest(format!("sort {detail}"));
    let (table, key, kind) = conditions::find_setting(path, &[]).map_err(sort_error)?;
    if matches!(kind, Kind::Project | Kind::Tags | Kind::Notes) {
        return Err(sort_error(format!(
            "names spec.{key}, which is not part of the stored specification; sort by project or tag:NAME"
        )));
    }
    // A list is sorted by its text.
    Ok(SortBy::Setting { table, key, is_number: kind.is_number() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_can_be_sorted_by_single_settings() {
        for (path, expected) in [
            ("train.lr", Some(true)),
            ("train.seed", Some(true)),
            ("train.optimizer", Some(false)),
            ("data.horizontal_flip", Some(false)),
            ("priority", Some(true)),
            ("project", None),
            ("data.mean", Some(false)),
            ("train.milestones", Some(false)),
            ("tags", None),
            ("lr", Some(true)),
            ("every_steps", None),
            ("train.lr'", None),
            ("train", None),
            ("x.y", None),
            ("", None),
        ] {
            let found = setting_sort_key(path).ok();
            let is_number = found.map(|by| matches!(by, SortBy::Setting { is_number: true, .. }));
            assert_eq!(is_number, expected, "{path}");
        }
        assert_eq!(parse_sort("-loss").unwrap(), JobSort { by: SortBy::Metric("loss"), descending: true });
        assert_eq!(parse_sort("grad_norm").unwrap().by, SortBy::Metric("grad_norm"));
        assert_eq!(parse_sort("images_per_second").unwrap().by, SortBy::Speed);
        assert_eq!(
            parse_sort("-tag:warm up").unwrap(),
            JobSort { by: SortBy::Tag("warm up".into()), descending: true }
        );
        assert!(parse_sort("tag:").is_err() && parse_sort(&format!("tag:{}", "é".repeat(40))).is_ok());
        assert!(parse_sort(&format!("tag:{}", "é".repeat(41))).is_err());
        assert!(parse_sort("losss").is_err() && parse_sort("").is_err() && parse_sort("-").is_err());
    }

    #[test]
    fn an_unknown_sort_is_refused_with_all_names() {
        let Err(Error::BadRequest(detail)) = parse_sort("xxxxxxxxxxxx") else { panic!("it is refused") };
        let names: Vec<_> = detail.split_once("the names are ").expect("all names").1.split(", ").collect();
        let mut once = names.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!((names.len(), names.contains(&"grad_norm")), (once.len(), true), "{detail}");
    }
}
