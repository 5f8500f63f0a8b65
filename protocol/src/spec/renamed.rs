//! Keys and values that are called something else today. A specification that is submitted with an old name is refused,
//! with the new one in the words; one that was stored with it is read.

use super::document::set_key;
use serde_json::{Value, json};

/// The path of each key before and today.
const KEYS: [(&str, &str); 5] = [
    ("recipe", "train.recipe"),
    ("data.resize", "data.resize_size"),
    ("data.auto_augment", "data.augment"),
    ("train.mixup_alpha", "train.mixup"),
    ("train.cutmix_alpha", "train.cutmix"),
];

/// Values of `data.augment` before and today.
const AUGMENT: [(&str, &str); 2] = [("trivial_augment", "trivial"), ("rand_augment", "rand")];

/// Whether a path such as `data.resize` is the old name of a key.
pub fn is_renamed(path: &str) -> bool {
    KEYS.iter().any(|(old, _)| *old == path)
}

/// What is said of a key that has an old name: `data.resize is called data.resize_size`.
pub(super) fn said_of(section: &str, key: &str, value: &Value) -> Option<String> {
    let path = if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") };
    let (old, new) = KEYS.iter().find(|(old, _)| *old == path)?;
    let mut said = format!("{old} is called {new}");
    if let Some((old, new)) = AUGMENT.iter().find(|(old, _)| value == old) {
        said += &format!(", and {old:?} is {new:?}");
    }
    Some(said)
}

/// Gives a specification that was stored with old names today's. A key that has its new name, too, stays as it is.
pub fn upgrade(document: &mut Value) {
    for (old, new) in KEYS {
        let is_there = document.pointer(&format!("/{}", new.replace('.', "/"))).is_some();
        let (table, key) = match old.split_once('.') {
            Some((section, key)) => (document.get_mut(section), key),
            None => (Some(&mut *document), old),
        };
        let value = table.and_then(Value::as_object_mut).filter(|_| !is_there).and_then(|t| t.remove(key));
        if let Some(value) = value {
            // A section that is no table is told of by whoever reads it.
            let _ = set_key(document, new, value);
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
