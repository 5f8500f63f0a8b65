//! Checks of a JSON body before it is deserialised: its depth is limited, and no object has a key twice. Parsers differ in which of two
//! equal keys they use, so a proxy that checks a body could check another value than the value that is used here.

use lockstep_protocol::{limits::JSON_NESTING, spec::shortened};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::{collections::HashSet, fmt};

/// Checks a JSON body.
///
/// # Errors
/// The body is not JSON, is nested too deep, or has a key twice. The text names the line and the column.
pub(super) fn check(bytes: &[u8]) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    NestedValue { depth: 0 }.deserialize(&mut deserializer)?;
    deserializer.end()
}

/// A value at some depth, which is checked and not stored.
#[derive(Clone, Copy)]
struct NestedValue {
    depth: usize,
}

impl NestedValue {
    fn inner<E: Error>(self) -> Result<Self, E> {
        if self.depth == JSON_NESTING {
            return Err(E::custom(format!("lists and objects are nested more than {JSON_NESTING} deep")));
        }
        Ok(Self { depth: self.depth + 1 })
    }
}

impl<'de> DeserializeSeed<'de> for NestedValue {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Defines methods of [`Visitor`] that accept every value of a type.
macro_rules! accept {
    ($($method:ident: $type:ty),*) => { $(fn $method<E>(self, _: $type) -> Result<(), E> { Ok(()) })* };
}

impl<'de> Visitor<'de> for NestedValue {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    accept! { visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let inner = self.inner()?;
        while list.next_element_seed(inner)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<(), A::Error> {
        let inner = self.inner()?;
        let mut keys = HashSet::new();
        while let Some(key) = object.next_key::<String>()? {
            object.next_value_seed(inner)?;
            if let Some(twice) = keys.replace(key) {
                return Err(A::Error::custom(format!("the key {:?} appears twice", shortened(&twice))));
            }
        }
        Ok(())
    }
}
