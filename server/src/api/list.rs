//! The parameters of all lists: `limit`, `cursor` and `next_cursor`, `sort`, `fields`, `count` and `total`, and times of creation. [`List`]
//! sorts and pages lists that fit into memory. Queries to the store sort and page jobs and events.

mod cursor;

pub(super) use cursor::Pages;

use crate::http::{
    error::{Error, Result},
    extract::check_count,
};
use jiff::{Timestamp, civil::DateTime, tz::TimeZone};
use lockstep_protocol::{
    JobId,
    spec::{nearest, shortened},
};
use serde::{Deserialize, Serialize, Serializer, ser::Error as _};
use serde_json::Value;
use std::{cell::LazyCell, cmp::Ordering, collections::BTreeSet};
use utoipa::{
    IntoParams, ToSchema,
    openapi::{RefOr, schema::Schema},
};

/// Maximum page size. The documentation of each list's parameters repeats this number.
pub(super) const MAX_LIMIT: u32 = 1000;

/// Parameters of lists that fit into memory.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListParams {
    /// Page size, 1 to 1000 (default 1000).
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// `next_cursor` of the previous page, requested with the same `sort`.
    cursor: Option<String>,
    /// Sort key, with a leading `-` for descending order.
    sort: Option<String>,
    /// Comma-separated names of the fields to return of each element.
    fields: Option<String>,
    /// Whether to return the number of elements on all pages as `total`.
    count: Option<bool>,
    /// Only elements created at this time or later (RFC 3339).
    #[param(format = DateTime)]
    created_after: Option<String>,
    /// Only elements created before this time (RFC 3339).
    #[param(format = DateTime)]
    created_before: Option<String>,
}

/// The elements of a page. Serializing them includes only the requested fields.
#[derive(Debug)]
pub(crate) struct Elements<T> {
    pub(super) items: Vec<T>,
    pub(super) fields: Option<Fields>,
}

impl<T: Serialize> Serialize for Elements<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(fields) = &self.fields else { return self.items.serialize(serializer) };
        let select = |item| fields.select(item).map_err(S::Error::custom);
        self.items.iter().map(select).collect::<Result<Vec<Value>, _>>()?.serialize(serializer)
    }
}

/// A page of a list that fits into memory.
#[derive(Debug)]
pub(super) struct Page<T> {
    pub(super) elements: Elements<T>,
    pub(super) next_cursor: Option<String>,
    pub(super) total: Option<u64>,
}

/// Declares the body of a response with a page of a list, which is made from a [`Page`].
macro_rules! list_of {
    (
        $(#[$about:meta])* $list:ident
        $(#[$order:meta])* $elements:ident: $element:ident
    ) => {
        $(#[$about])*
        #[derive(Debug, serde::Serialize, utoipa::ToSchema)]
        pub(crate) struct $list {
            $(#[$order])*
            #[schema(value_type = Vec<$element>)]
            $elements: $crate::api::list::Elements<$element>,
            /// Value of `cursor` for the next page; null on the last page.
            next_cursor: Option<String>,
            /// Number of elements on all pages; absent without `count=true`.
            #[serde(skip_serializing_if = "Option::is_none")]
            total: Option<u64>,
        }

        impl From<$crate::api::list::Page<$element>> for $list {
            fn from(page: $crate::api::list::Page<$element>) -> Self {
                Self { $elements: page.elements, next_cursor: page.next_cursor, total: page.total }
            }
        }
    };
}
pub(super) use list_of;

/// Names of the requested fields.
#[derive(Debug)]
pub(crate) struct Fields(BTreeSet<String>);

impl Fields {
    /// Parses the parameter `fields` of a list of `T`; `None` if it is absent.
    pub(super) fn parse<T: ToSchema>(text: Option<&str>) -> Result<Option<Self>> {
        let Some(text) = text else { return Ok(None) };
        let components = LazyCell::new(|| {
            let mut components = Vec::new();
            T::schemas(&mut components);
            components
        });
        let known = field_names(&T::schema(), &components);
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        let requested =
            text.split(',').map(|name| find_known_name("field", name.trim(), &known).map(str::to_owned));
        Ok(Some(Self(requested.collect::<Result<_>>()?)))
    }

    /// Whether a field is requested.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    /// Serializes the requested fields of an element.
    pub(super) fn select(&self, item: &impl Serialize) -> serde_json::Result<Value> {
        // Converts through text, so that an f32 of 0.1 stays 0.1.
        let mut item: Value = serde_json::from_str(&serde_json::to_string(item)?)?;
        if let Value::Object(fields) = &mut item {
            fields.retain(|name, _| self.0.contains(name));
        }
        Ok(item)
    }
}

type Components = Vec<(String, RefOr<Schema>)>;

/// Names of the fields of an object with this schema. `components` has the schemas to which the schema refers.
fn field_names(
    schema: &RefOr<Schema>,
    components: &LazyCell<Components, impl FnOnce() -> Components>,
) -> BTreeSet<String> {
    let names_of_all = |parts: &[RefOr<Schema>]| -> BTreeSet<String> {
        parts.iter().flat_map(|part| field_names(part, components)).collect()
    };
    match schema {
        RefOr::T(Schema::Object(object)) => object.properties.keys().cloned().collect(),
        // A struct with flattened fields.
        RefOr::T(Schema::AllOf(parts)) => names_of_all(&parts.items),
        // An enum.
        RefOr::T(Schema::OneOf(variants)) => names_of_all(&variants.items),
        RefOr::T(_) => BTreeSet::new(),
        RefOr::Ref(reference) => {
            let name = reference.ref_location.rsplit('/').next();
            let component = components.iter().find(|(component, _)| Some(component.as_str()) == name);
            component.map(|(_, schema)| field_names(schema, components)).unwrap_or_default()
        }
    }
}

/// Looks up a name of a request in `known`.
///
/// # Errors
/// 400: the name is unknown. The message suggests the most similar known name.
pub(super) fn find_known_name<'a>(what: &str, name: &str, known: &[&'a str]) -> Result<&'a str> {
    if let Some(found) = known.iter().find(|known| **known == name) {
        return Ok(*found);
    }
    let hint = suggest(name, known, "the names are");
    Err(Error::BadRequest(format!("there is no {what} {:?} here; {hint}", shortened(name))))
}

/// Returns the end of an error about an unknown name: a question with the most similar known name, or `intro` and all known names.
pub(super) fn suggest(name: &str, known: &[&str], intro: &str) -> String {
    match nearest(name, known.iter().copied()) {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("{intro} {}", known.join(", ")),
    }
}

/// The non-empty parts of a comma-separated list.
pub(super) fn split_list(text: Option<&str>) -> impl Iterator<Item = &str> {
    text.unwrap_or_default().split(',').map(str::trim).filter(|part| !part.is_empty())
}

/// The different non-empty parts of a comma-separated list.
pub(super) fn split_unique(text: Option<&str>) -> Vec<&str> {
    let mut seen = BTreeSet::new();
    split_list(text).filter(|part| seen.insert(*part)).collect()
}

/// Splits a sort key of a request into the name and whether the order is descending.
pub(super) fn split_sort_key(sort: &str) -> (&str, bool) {
    sort.strip_prefix('-').map_or((sort, false), |name| (name, true))
}

/// Parses a time of a request. A time without an offset is in UTC, and a date is the start of its day.
pub(super) fn parse_time(key: &str, text: Option<&str>) -> Result<Option<Timestamp>> {
    let Some(text) = text else { return Ok(None) };
    let at = text.parse::<Timestamp>().or_else(|_| TimeZone::UTC.to_timestamp(text.parse::<DateTime>()?));
    at.map(Some).map_err(|_| {
        let text = shortened(text);
        Error::BadRequest(format!(
            "{key} is {text:?}, but must be a time such as 2026-01-31T12:00:00Z (RFC 3339), or a date such as 2026-01-31 (UTC)"
        ))
    })
}

/// A value by which elements are sorted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Key {
    Number(f64),
    Text(String),
    Missing,
    /// Several values, which are compared in this order.
    Each(Vec<Key>),
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Key::Text(text.to_owned())
    }
}

impl From<Option<f64>> for Key {
    fn from(number: Option<f64>) -> Self {
        // JSON, and so a cursor, cannot represent other numbers.
        number.filter(|number| number.is_finite()).map_or(Key::Missing, Key::Number)
    }
}

impl From<Timestamp> for Key {
    fn from(at: Timestamp) -> Self {
        Key::Number(at.as_millisecond() as f64)
    }
}

impl Key {
    /// Compares two keys. Missing values come last in both directions.
    fn order(&self, other: &Self, is_descending: bool) -> Ordering {
        let precedence = |key: &Key| match key {
            Key::Number(_) => 0,
            Key::Text(_) => 1,
            Key::Missing => 2,
            Key::Each(_) => 3,
        };
        let order = match (self, other) {
            (Key::Number(a), Key::Number(b)) => a.total_cmp(b),
            (Key::Text(a), Key::Text(b)) => a.cmp(b),
            (Key::Each(a), Key::Each(b)) => {
                let parts = a.iter().zip(b).map(|(a, b)| a.order(b, is_descending));
                return parts.fold(Ordering::Equal, Ordering::then);
            }
            _ => return precedence(self).cmp(&precedence(other)),
        };
        if is_descending { order.reverse() } else { order }
    }
}

/// A list that fits into memory.
pub(super) struct List<T: 'static> {
    /// Name of the list in responses, for cursors.
    pub(super) name: &'static str,
    /// Sort keys.
    pub(super) sorts: &'static [(&'static str, fn(&T) -> Key)],
    /// Sort key if `sort` is absent.
    pub(super) default_sort: &'static str,
    /// Id of an element, which orders elements with equal sort keys.
    pub(super) id: fn(&T) -> &str,
    /// Time of creation of an element. If `None`, the parameters for times of creation are refused.
    pub(super) created: Option<fn(&T) -> Timestamp>,
}

impl<T: ToSchema> List<T> {
    /// Returns the requested page of a list. `job`: the job to which the list belongs; `None` if the server has only one such list.
    pub(super) fn page(
        &self,
        job: Option<&JobId>,
        mut items: Vec<T>,
        params: &ListParams,
    ) -> Result<Page<T>> {
        let pages = Pages::new(self.name, params.sort.as_deref().unwrap_or(self.default_sort));
        let pages = job.map_or(pages, |job| pages.owned_by("job", job.as_str()));
        let limit = check_count("limit", params.limit, MAX_LIMIT, MAX_LIMIT)? as usize;
        let (sort, _) = split_sort_key(pages.sort());
        let names: Vec<_> = self.sorts.iter().map(|(name, _)| *name).collect();
        find_known_name("sort", sort, &names)?;
        let key = self.sorts.iter().find(|(name, _)| *name == sort).map(|(_, key)| key);
        let key = |item: &T| key.map_or(Key::Missing, |key| key(item));
        let fields = Fields::parse::<T>(params.fields.as_deref())?;
        let after = parse_time("created_after", params.created_after.as_deref())?;
        let before = parse_time("created_before", params.created_before.as_deref())?;
        match self.created {
            Some(created) => items.retain(|item| {
                after.is_none_or(|after| created(item) >= after)
                    && before.is_none_or(|before| created(item) < before)
            }),
            None if after.or(before).is_some() => {
                let detail = format!(
                    "{} have no time of creation; leave out created_after and created_before",
                    self.name
                );
                return Err(Error::BadRequest(detail));
            }
            None => {}
        }
        let total = (params.count == Some(true)).then_some(items.len() as u64);
        let next_cursor = sort_and_cut(&mut items, pages, key, self.id, params.cursor.as_deref(), limit)?;
        Ok(Page { elements: Elements { items, fields }, next_cursor, total })
    }
}

/// Sorts `items` by `key` and then by `id`, and keeps at most `limit` items after the position of `cursor`. Returns the cursor of the next
/// page; `None` if this is the last page.
pub(super) fn sort_and_cut<T>(
    items: &mut Vec<T>,
    pages: Pages,
    key: impl Fn(&T) -> Key,
    id: impl Fn(&T) -> &str,
    cursor: Option<&str>,
    limit: usize,
) -> Result<Option<String>> {
    let (_, is_descending) = split_sort_key(pages.sort());
    let compare = |a_key: &Key, a_id: &str, b_key: &Key, b_id: &str| {
        let ids = if is_descending { b_id.cmp(a_id) } else { a_id.cmp(b_id) };
        a_key.order(b_key, is_descending).then(ids)
    };
    items.sort_by(|a, b| compare(&key(a), id(a), &key(b), id(b)));
    let previous: Option<(Key, String)> = pages.decode(cursor)?;
    if let Some((previous_key, previous_id)) = &previous {
        items.retain(|item| compare(&key(item), id(item), previous_key, previous_id) == Ordering::Greater);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    items.last().filter(|_| has_more).map(|last| pages.encode(&(key(last), id(last)))).transpose()
}

#[cfg(test)]
mod tests;
