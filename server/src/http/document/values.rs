//! Values of parameters and fields that the schemas generated from Rust types leave open: limits of unsigned integers, patterns of short
//! texts, and bodies of bytes.

use super::operations;
use utoipa::{
    Number,
    openapi::{
        Content, KnownFormat, OpenApi, RefOr, Schema, SchemaFormat,
        schema::{AdditionalProperties, ArrayItems, Object, ObjectBuilder, SchemaType, Type},
    },
};

/// Parameters that have the same pattern in all calls.
const PATTERNS: [(&str, &str); 6] = [
    ("sort", "^(-?([a-z][A-Za-z0-9_.]*|tag:.+))?$"),
    ("fields", "^[a-z_]+(,[a-z_]+)*$"),
    ("cursor", "^[A-Za-z0-9_-]+$"),
    ("kind", "^(weight|gradient)$"),
    ("format", "^text$"),
    ("Idempotency-Key", "^[!-~]([ -~]{0,253}[!-~])?$"),
];

pub(super) fn complete(document: &mut OpenApi) {
    for item in document.paths.paths.values_mut() {
        for (_, operation) in operations(item) {
            for parameter in operation.parameters.iter_mut().flatten() {
                let RefOr::T(parameter) = parameter else { continue };
                let pattern = PATTERNS.iter().find(|(name, _)| *name == parameter.name);
                if let (Some((_, pattern)), Some(RefOr::T(Schema::Object(object)))) =
                    (pattern, &mut parameter.schema)
                {
                    object.pattern = Some((*pattern).to_owned());
                }
                parameter.schema.iter_mut().for_each(complete_schema);
            }
            if let Some(RefOr::T(body)) = &mut operation.request_body {
                body.content.iter_mut().for_each(complete_content);
            }
            for response in operation.responses.responses.values_mut() {
                if let RefOr::T(response) = response {
                    response.content.iter_mut().for_each(complete_content);
                }
            }
        }
    }
    if let Some(components) = &mut document.components {
        components.schemas.values_mut().for_each(complete_schema);
    }
}

fn complete_content((media, content): (&String, &mut RefOr<Content>)) {
    let RefOr::T(content) = content else { return };
    // The generated schema of `Vec<u8>` is a list of numbers.
    if media == "application/octet-stream" {
        let bytes = ObjectBuilder::new().schema_type(Type::String);
        let bytes = bytes.format(Some(SchemaFormat::KnownFormat(KnownFormat::Binary)));
        content.schema = Some(bytes.into());
    }
    content.schema.iter_mut().for_each(complete_schema);
}

fn complete_schema(schema: &mut RefOr<Schema>) {
    let RefOr::T(schema) = schema else { return };
    match schema {
        Schema::Object(object) => {
            set_limits(object);
            object.properties.values_mut().for_each(complete_schema);
            if let Some(AdditionalProperties::RefOr(values)) = object.additional_properties.as_deref_mut() {
                complete_schema(values);
            }
        }
        Schema::Array(array) => {
            if let ArrayItems::RefOrSchema(items) = &mut array.items {
                complete_schema(items);
            }
        }
        Schema::OneOf(schemas) => schemas.items.iter_mut().for_each(complete_schema),
        Schema::AllOf(schemas) => schemas.items.iter_mut().for_each(complete_schema),
        Schema::AnyOf(schemas) => schemas.items.iter_mut().for_each(complete_schema),
        _ => {}
    }
}

/// Sets the format and the maximum of an unsigned integer, whose generated format is the signed `int32` or `int64`.
fn set_limits(object: &mut Object) {
    let is_integer = match &object.schema_type {
        SchemaType::Type(kind) => *kind == Type::Integer,
        SchemaType::Array(kinds) => kinds.contains(&Type::Integer),
        SchemaType::AnyValue => false,
    };
    let is_unsigned = match object.minimum {
        Some(Number::Int(minimum)) => minimum == 0,
        Some(Number::UInt(minimum)) => minimum == 0,
        Some(Number::Float(minimum)) => minimum == 0.0,
        None => false,
    };
    if !is_integer || !is_unsigned || object.maximum.is_some() {
        return;
    }
    let (format, maximum) = match object.format {
        Some(SchemaFormat::KnownFormat(KnownFormat::Int32)) => ("uint32", u32::MAX as usize),
        Some(SchemaFormat::KnownFormat(KnownFormat::Int64)) => ("uint64", u64::MAX as usize),
        _ => return,
    };
    object.format = Some(SchemaFormat::Custom(format.to_owned()));
    object.maximum = Some(Number::UInt(maximum));
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    /// Collects schemas of integers that have a minimum of 0 but no maximum.
    fn without_maximum(value: &Value, found: &mut Vec<Value>) {
        match value {
            Value::Object(fields) => {
                let is_format = |format: &str| fields.get("format").is_some_and(|is| is == format);
                if (is_format("int32") || is_format("int64"))
                    && fields.get("minimum") == Some(&json!(0))
                    && !fields.contains_key("maximum")
                {
                    found.push(value.clone());
                }
                fields.values().for_each(|value| without_maximum(value, found));
            }
            Value::Array(all) => all.iter().for_each(|value| without_maximum(value, found)),
            _ => {}
        }
    }

    #[test]
    fn schemas_have_the_limits_and_patterns_of_their_types() {
        let document = serde_json::to_value(crate::openapi()).unwrap();
        let mut found = Vec::new();
        without_maximum(&document, &mut found);
        assert!(found.is_empty(), "{found:?}");
        let parameter = |path: &str, name: &str| {
            let all = document["paths"][path]["get"]["parameters"].as_array().unwrap();
            all.iter().find(|parameter| parameter["name"] == name).unwrap()["schema"].clone()
        };
        let shuffle = parameter("/api/v1/datasets/{name}/samples", "shuffle");
        assert_eq!((&shuffle["format"], &shuffle["maximum"]), (&json!("uint64"), &json!(u64::MAX)));
        assert_eq!(parameter("/api/v1/jobs", "limit")["maximum"], 1000);
        assert_eq!(parameter("/api/v1/jobs", "sort")["pattern"], "^(-?([a-z][A-Za-z0-9_.]*|tag:.+))?$");
        let archive = &document["paths"]["/api/v1/datasets/uploads/{name}/archive"]["put"]["requestBody"];
        let schema = &archive["content"]["application/octet-stream"]["schema"];
        assert_eq!(*schema, json!({"type": "string", "format": "binary"}));
        let attempt = &document["components"]["schemas"]["Attempt"]["properties"]["attempt"];
        assert_eq!((&attempt["format"], &attempt["maximum"]), (&json!("uint32"), &json!(u32::MAX)));
    }
}
