//! Documents every call of the REST interface, from the OpenAPI document.

use super::{escape, generated_from, table};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

pub(super) fn markdown(document: &Value) -> String {
    let mut text = generated_from("the OpenAPI document");
    text += "# REST interface\n\n";
    let _ = writeln!(text, "{}\n", prose(&document["info"]["description"]));
    text += "`GET /api/v1/openapi.json` returns the OpenAPI document, for programs that generate clients. Requests carry a token \
             (`Authorization: Bearer TOKEN`) with at least the scope that the call names; `admin` includes `submit`, which includes \
             `read`. Times are RFC 3339 in UTC, ids are opaque.\n";
    let mut tags: BTreeMap<String, Vec<(String, String, &Value)>> = BTreeMap::new();
    for (path, item) in entries(&document["paths"]) {
        for (method, call) in entries(item).filter(|(m, _)| METHODS.contains(&m.as_str())) {
            let tag = call["tags"][0].as_str().unwrap_or("server").to_owned();
            tags.entry(tag).or_default().push((method.to_uppercase(), path.clone(), call));
        }
    }
    let shared = shared_errors(tags.values().flatten().map(|(_, _, call)| *call));
    text += "\n## Answers that many calls share\n\nEach call lists only its other answers.\n\n";
    let rows: Vec<_> = shared.iter().map(|(status, words)| [format!("`{status}`"), words.clone()]).collect();
    text += &table(["status", "meaning"], &rows);
    for (tag, calls) in &tags {
        let _ = write!(text, "\n## {}\n", capitalise(tag));
        for (method, path, call) in calls {
            add_call(&mut text, method, path, call, &shared);
        }
    }
    text += "\n## Types\n";
    for (name, schema) in entries(&document["components"]["schemas"]) {
        add_type(&mut text, name, schema);
    }
    text
}

const METHODS: [&str; 5] = ["get", "put", "post", "patch", "delete"];

/// A response that at least this number of calls share is listed once for all calls.
const MIN_SHARED_CALLS: usize = 5;

/// Returns error statuses, with their meanings, that many calls share.
fn shared_errors<'a>(calls: impl Iterator<Item = &'a Value>) -> BTreeSet<(String, String)> {
    let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
    for call in calls {
        for (status, response) in entries(&call["responses"]).filter(|(s, _)| s.as_str() >= "400") {
            *counts.entry((status.clone(), prose(&response["description"]))).or_default() += 1;
        }
    }
    counts
        .into_iter()
        .filter(|((_, words), count)| *count >= MIN_SHARED_CALLS && !words.is_empty())
        .map(|(key, _)| key)
        .collect()
}

fn add_call(text: &mut String, method: &str, path: &str, call: &Value, shared: &BTreeSet<(String, String)>) {
    let _ = write!(text, "\n### {method} {path}\n\n{}.", prose(&call["summary"]).trim_end_matches('.'));
    let scope = call["security"][0].as_object().and_then(|schemes| schemes.values().next()?.get(0)?.as_str());
    let _ = match scope {
        Some(scope) => writeln!(text, " Scope: `{scope}`."),
        None => writeln!(text, " Open to everybody."),
    };
    let description = prose(&call["description"]);
    if !description.is_empty() {
        let _ = write!(text, "\n{description}\n");
    }
    let parameters: Vec<_> = items(&call["parameters"])
        .map(|parameter| {
            let optional = if parameter["required"] == true { "" } else { ", optional" };
            [
                format!("`{}`", parameter["name"].as_str().unwrap_or_default()),
                format!("{}{optional}", parameter["in"].as_str().unwrap_or_default()),
                type_in_words(&parameter["schema"]),
                prose(&parameter["description"]),
            ]
        })
        .collect();
    if !parameters.is_empty() {
        let _ = write!(text, "\n{}", table(["parameter", "in", "type", "meaning"], &parameters));
    }
    let bodies = describe_body(&call["requestBody"]);
    if !bodies.is_empty() {
        let _ = write!(text, "\nBody: {bodies}.\n");
    }
    let answers: Vec<_> = entries(&call["responses"])
        .filter(|(status, response)| !shared.contains(&((*status).clone(), prose(&response["description"]))))
        .map(|(status, response)| {
            [format!("`{status}`"), describe_body(response), prose(&response["description"])]
        })
        .collect();
    let _ = write!(text, "\n{}", table(["status", "body", "meaning"], &answers));
}

/// Returns the types of a body, each with its media type.
fn describe_body(body: &Value) -> String {
    let kinds = entries(&body["content"]).map(|(media, content)| match type_in_words(&content["schema"]) {
        kind if kind.is_empty() => format!("`{media}`"),
        kind => format!("{kind} (`{media}`)"),
    });
    kinds.collect::<Vec<_>>().join(" or ")
}

fn add_type(text: &mut String, name: &str, schema: &Value) {
    let _ = write!(text, "\n### {name}\n\n");
    let description = prose(&schema["description"]);
    if !description.is_empty() {
        let _ = write!(text, "{description}\n\n");
    }
    let required: Vec<_> = items(&schema["required"]).filter_map(Value::as_str).collect();
    let fields: Vec<_> = entries(&schema["properties"])
        .map(|(field, schema)| {
            let optional = if required.contains(&field.as_str()) { "" } else { ", optional" };
            [format!("`{field}`"), format!("{}{optional}", type_in_words(schema)), meaning(schema)]
        })
        .collect();
    if let Some((tag, rows)) = variants(schema) {
        text.push_str(&table([format!("`{tag}`").as_str(), "other fields", "meaning"], &rows));
    } else if fields.is_empty() {
        let _ = writeln!(text, "{}.", type_in_words(schema));
    } else {
        text.push_str(&table(["field", "type", "meaning"], &fields));
    }
}

/// Returns the variants of a type, and the field whose value names the variant. `None` if the type has no such field.
fn variants(schema: &Value) -> Option<(&str, Vec<[String; 3]>)> {
    let mut tag = "";
    let mut rows = Vec::new();
    for variant in schema["oneOf"].as_array()? {
        let parts = variant["allOf"].as_array().map_or(std::slice::from_ref(variant), Vec::as_slice);
        let mut fields = parts.iter().filter_map(|part| part["properties"].as_object()).flatten();
        let is_tag = |field: &Value| field["enum"].as_array().is_some_and(|values| values.len() == 1);
        let (name, value) = fields.find(|(_, field)| is_tag(field))?;
        tag = name;
        let describe_fields = |part: &Value| -> Vec<String> {
            let Some(fields) = part["properties"].as_object() else { return vec![type_in_words(part)] };
            let others = fields.iter().filter(|(name, _)| name.as_str() != tag);
            others.map(|(name, field)| format!("`{name}`: {}", type_in_words(field))).collect()
        };
        let others: Vec<_> = parts.iter().flat_map(describe_fields).collect();
        rows.push([type_in_words(value), others.join("; "), meaning(variant)]);
    }
    Some((tag, rows))
}

/// Returns the description of a field or a variant. An optional field has its description in one of its choices (`oneOf`).
fn meaning(schema: &Value) -> String {
    let description = prose(&schema["description"]);
    if !description.is_empty() {
        return description;
    }
    let mut choices = items(&schema["oneOf"]).map(|choice| prose(&choice["description"]));
    choices.find(|text| !text.is_empty()).unwrap_or_default()
}

/// Describes a schema in words, with links to named types.
fn type_in_words(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(choices) =
        schema["oneOf"].as_array().or(schema["allOf"].as_array()).or(schema["anyOf"].as_array())
    {
        let mut named: Vec<_> = choices.iter().map(type_in_words).filter(|kind| !kind.is_empty()).collect();
        named.dedup();
        return named.join(" or ");
    }
    if let Some(words) = schema["enum"].as_array() {
        let words: Vec<_> =
            words.iter().map(|word| format!("`{}`", word.as_str().unwrap_or_default())).collect();
        return words.join(", ");
    }
    let kind_in_words = |kind: &str| match kind {
        "array" => match type_in_words(&schema["items"]) {
            items if items.is_empty() => "list".to_owned(),
            items => format!("list of {items}"),
        },
        "integer" => "whole number".into(),
        "string" if schema["format"] == "binary" => "bytes".into(),
        "string" => "text".into(),
        "boolean" => "true or false".into(),
        "object" => match schema["properties"].as_object() {
            Some(fields) if !fields.is_empty() => {
                let named =
                    fields.iter().map(|(field, schema)| format!("`{field}`: {}", type_in_words(schema)));
                format!("object of {}", named.collect::<Vec<_>>().join("; "))
            }
            _ => "object".into(),
        },
        other => other.into(),
    };
    match &schema["type"] {
        Value::String(kind) => kind_in_words(kind),
        Value::Array(kinds) => {
            let kinds = kinds.iter().filter_map(Value::as_str).map(kind_in_words);
            kinds.collect::<Vec<_>>().join(" or ")
        }
        _ => String::new(),
    }
}

/// The entries of an object. Empty for another value.
fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

/// The items of a list. Empty for another value.
fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Returns a text of the document as Markdown without line breaks. Empty if the text is absent.
fn prose(text: &Value) -> String {
    escape(&text.as_str().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" "))
}

fn capitalise(word: &str) -> String {
    let mut characters = word.chars();
    characters.next().map_or_else(String::new, |first| first.to_uppercase().chain(characters).collect())
}
