//! Keys and values that were renamed.
//!
//! Names from before the first release ([`KEYS`]) are refused in submissions, with the new name in the error. Names of the last version
//! ([`ACCEPTED`]) are accepted for one more version; giving both names is a mistake. Stored specifications may have any of them.

use super::{document::set_key, mistake::SpecError};
use serde_json::{Value, json};

/// The path of each key before and today.
const KEYS: [(&str, &str); 5] = [
    ("recipe", "train.recipe"),
    ("data.resize", "data.resize_size"),
    ("data.auto_augment", "data.augment"),
    ("train.mixup_alpha", "train.mixup"),
    ("train.cutmix_alpha", "train.cutmix"),
];

/// Section, name in the last version and name today; accepted up to the next version.
pub const ACCEPTED: [(&str, &str, &str); 2] =
    [("train", "rise", "pct_start"), ("train", "final_lr_share", "final_lr_fraction")];

/// Values of `data.augment` before and today.
const AUGMENT: [(&str, &str); 2] = [("trivial_augment", "trivial"), ("rand_augment", "rand")];

/// Whether a path such as `data.resize` is the old name of a key.
pub fn is_renamed(path: &str) -> bool {
    KEYS.iter().any(|(old, _)| *old == path)
}

/// The message for a key with an old name: `data.resize is called data.resize_size`.
pub(super) fn rename_message(section: &str, key: &str, value: &Value) -> Option<String> {
    let path = if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") };
    let (old, new) = KEYS.iter().find(|(old, _)| *old == path)?;
    let mut said = format!("{old} is called {new}");
    if let Some((old, new)) = AUGMENT.iter().find(|(old, _)| value == old) {
        said += &format!(", and {old:?} is {new:?}");
    }
    Some(said)
}

/// Replaces accepted old names by the new ones. If a key has both names, that is added to `errors` and the old one is removed.
pub(super) fn accept(document: &mut Value, errors: &mut Vec<SpecError>) {
    for (section, old, new) in ACCEPTED {
        let Some(table) = document.get_mut(section).and_then(Value::as_object_mut) else { continue };
        // JSON's null is an absent key.
        let Some(value) = table.remove(old).filter(|value| !value.is_null()) else { continue };
        if table.get(new).is_none_or(Value::is_null) {
            table.insert(new.into(), value);
        } else {
            let detail = format!(
                "{section}.{old} is the old name of {section}.{new}: give {section}.{new} alone, not both"
            );
            errors.push(SpecError { pointer: format!("/{section}/{old}"), detail });
        }
    }
}

/// The path of a key today, also where `path` has its accepted old name: `train.pct_start` of `train.rise`, and
/// `train.pct_start.a` of `train.rise.a`.
pub fn name_today(path: &str) -> String {
    let mut parts: Vec<_> = path.split('.').collect();
    if let [section, key, ..] = &mut parts[..]
        && let Some((.., new)) = ACCEPTED.iter().find(|(of, old, _)| (of, old) == (section, key))
    {
        *key = new;
        return parts.join(".");
    }
    path.to_owned()
}

/// Replaces all old names in a stored specification by the new ones. A key that has its new name, too, stays as it is.
pub fn upgrade(document: &mut Value) {
    for (old, new) in KEYS {
        let is_there = document.pointer(&format!("/{}", new.replace('.', "/"))).is_some();
        let (table, key) = match old.split_once('.') {
            Some((section, key)) => (document.get_mut(section), key),
            None => (Some(&mut *document), old),
        };
        let value = table.and_then(Value::as_object_mut).filter(|_| !is_there).and_then(|t| t.remove(key));
        if let Some(value) = value {
            // A section that is not a table is reported by the check of the specification.
            let _ = set_key(document, new, value);
        }
    }
    for (section, old, new) in ACCEPTED {
        if let Some(table) = document.get_mut(section).and_then(Value::as_object_mut)
            && !table.contains_key(new)
            && let Some(value) = table.remove(old)
        {
            table.insert(new.into(), value);
        }
    }
    if let Some(augment) = document.pointer_mut("/data/augment")
        && let Some((_, new)) = AUGMENT.iter().find(|(old, _)| *augment == *old)
    {
        *augment = (*new).into();
    }
    let sizes = document.pointer_mut("/data/image_size").and_then(Value::as_array_mut);
    for entry in sizes.into_iter().flatten() {
        if let (Some(epoch), Some(size)) = (entry.get("epoch"), entry.get("size")) {
            *entry = json!([epoch, size]);
        }
    }
}
