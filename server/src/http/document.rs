//! The OpenAPI document: the descriptions of all handlers, and parts that all calls have in common.

use crate::http::authorize::{Requirement, requirement};
use axum::http::Method;
use lockstep_protocol::access::Scope;
use serde_json::{Map, Value, json};
use utoipa::openapi::OpenApi;

/// Media type of errors.
const PROBLEM: &str = "application/problem+json";
/// Path of the calls in which agents name an attempt by headers.
const AGENT_ATTEMPTS_PATH: &str = "/api/v1/agent/attempts/";
const AGENT_HEADERS: [(&str, &str); 2] = [
    ("x-lockstep-agent", "The agent's id; the token must belong to this agent"),
    ("x-lockstep-fencing-token", "The fencing token of the attempt, as the agent received it"),
];
/// Parameters that have the same pattern in all calls.
const PATTERNS: [(&str, &str); 6] = [
    ("sort", "^(-?([a-z][A-Za-z0-9_.]*|tag:.+))?$"),
    ("fields", "^[a-z_]+(,[a-z_]+)*$"),
    ("cursor", "^[A-Za-z0-9_-]+$"),
    ("kind", "^(weight|gradient)$"),
    ("format", "^text$"),
    ("Idempotency-Key", "^[!-~]([ -~]{0,253}[!-~])?$"),
];

/// Adds what the generated document lacks: the credentials that each call needs, refusals that do not come from its handler, the media type
/// of errors, and limits of parameters and fields.
pub(crate) fn complete(document: OpenApi) -> Value {
    let mut document = json!(document);
    for (path, item) in document["paths"].as_object_mut().into_iter().flatten() {
        for (method, call) in item.as_object_mut().into_iter().flatten() {
            if let (Ok(method), Value::Object(call)) = (method.to_uppercase().parse(), call) {
                complete_call(path, &method, call);
            }
        }
    }
    complete_schemas(&mut document);
    document["components"]["securitySchemes"] = json!({
        "bearer": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token of `POST /api/v1/tokens`. Its scope is `read`, `submit` (includes `read`), `admin` (includes both) or \
                            `agent`.",
        },
        "session": {
            "type": "apiKey",
            "in": "cookie",
            "name": "lockstep_PORT",
            "description": "A browser that has signed in at `/login`",
        },
    });
    document
}

fn complete_call(path: &str, method: &Method, call: &mut Map<String, Value>) {
    if path.starts_with(AGENT_ATTEMPTS_PATH)
        && let Value::Array(parameters) = call.entry("parameters").or_insert_with(|| json!([]))
    {
        parameters.extend(AGENT_HEADERS.map(|(name, about)| {
            let schema = json!({ "type": "string", "minLength": 1 });
            json!({ "name": name, "in": "header", "description": about, "required": true, "schema": schema })
        }));
    }
    for parameter in call.get_mut("parameters").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some((_, pattern)) = PATTERNS.iter().find(|(name, _)| parameter["name"] == *name)
            && parameter["schema"].get("type").is_some()
        {
            parameter["schema"]["pattern"] = (*pattern).into();
        }
    }
    let scope = match requirement(method, Some(path)) {
        Requirement::Nothing => None,
        Requirement::Scope(scope) => Some(scope),
        // A person's token may have any scope.
        Requirement::AdminOrPerson => Some(Scope::Read),
    };
    let mut refusals = common_refusals(path, call.contains_key("requestBody"), scope.is_some());
    if let Some(scope) = scope {
        refusals.push(("401", "No valid token"));
        refusals.push((
            "403",
            "The scope of the token or the role of the person does not suffice, the object has another owner, the request \
             comes from a page of another origin, or it bypassed the proxy that terminates TLS",
        ));
        let scopes = [scope.as_str()];
        call.insert("security".into(), json!([{ "bearer": scopes }, { "session": scopes }]));
    }
    let Some(Value::Object(responses)) = call.get_mut("responses") else { return };
    for (status, description) in refusals {
        let problem = json!({ "schema": { "$ref": "#/components/schemas/Problem" } });
        let response = json!({ "description": description, "content": { PROBLEM: problem } });
        responses.entry(status).or_insert(response);
    }
    for (status, response) in responses {
        if status.parse::<u16>().is_ok_and(|status| status >= 400)
            && let Some(Value::Object(content)) = response.get_mut("content")
            && let Some(problem) = content.remove("application/json")
        {
            content.insert(PROBLEM.into(), problem);
        }
        if ["429", "503"].contains(&status.as_str()) {
            response["headers"]["Retry-After"] =
                json!({ "description": "Seconds to wait", "schema": { "type": "integer" } });
        }
    }
}

/// The responses that do not come from a handler but from [`crate::http::request_checks`], the extractors, the store and the router.
/// Every request is checked, so every call may be answered with 400, 403, 421 or 429.
fn common_refusals(path: &str, has_body: bool, needs_scope: bool) -> Vec<(&'static str, &'static str)> {
    let mut refusals = vec![
        ("400", "The request cannot be read"),
        ("421", "The Host is not a name of this server"),
        ("429", "Too many requests from this address or with this token; `Retry-After` says when to retry"),
        ("500", "A fault of the server; the server's log has the details"),
        ("503", "The database or an agent is not available; try again"),
        ("504", "The request exceeded its time limit"),
    ];
    if !needs_scope {
        refusals.push((
            "403",
            "The request comes from a page of another origin, or bypassed the proxy that terminates TLS",
        ));
    }
    if path.contains('{') {
        refusals.push(("404", "No object has this id or name, or the caller may not see it"));
    }
    if has_body {
        refusals.push(("408", "The body stopped arriving"));
        refusals.push(("413", "The body is too large"));
        refusals.push(("415", "The body's media type is not supported"));
        refusals.push(("422", "The body has mistakes; `errors` has each mistake with its location"));
    }
    refusals
}

/// Completes all schemas in `part`, a part of the document. The generated schema of an unsigned integer has a signed format and no maximum,
/// and the generated schema of `Vec<u8>` is a list of numbers.
fn complete_schemas(part: &mut Value) {
    match part {
        Value::Object(fields) => {
            let is_unlimited =
                fields.get("minimum").and_then(Value::as_f64) == Some(0.0) && !fields.contains_key("maximum");
            let limit = match fields.get("format").and_then(Value::as_str) {
                Some("int32") if is_unlimited => Some(("uint32", u64::from(u32::MAX))),
                Some("int64") if is_unlimited => Some(("uint64", u64::MAX)),
                _ => None,
            };
            if let Some((format, maximum)) = limit {
                fields.insert("format".into(), format.into());
                fields.insert("maximum".into(), maximum.into());
            }
            if let Some(content) = fields.get_mut("application/octet-stream") {
                content["schema"] = json!({ "type": "string", "format": "binary" });
            }
            fields.values_mut().for_each(complete_schemas);
        }
        Value::Array(parts) => parts.iter_mut().for_each(complete_schemas),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_have_the_limits_and_patterns_of_their_types() {
        let document = crate::openapi();
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
