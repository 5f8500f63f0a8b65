//! The OpenAPI document: the descriptions of all handlers, and parts that all calls have in common.

mod values;

use crate::http::gate::{self, Requirement};
use axum::http::Method;
use lockstep_protocol::access::Scope;
use utoipa::openapi::{
    OpenApi, Ref, RefOr, Required,
    content::ContentBuilder,
    header::HeaderBuilder,
    path::{Operation, ParameterBuilder, ParameterIn, PathItem},
    response::{Response, ResponseBuilder},
    schema::{ObjectBuilder, Type},
    security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme},
};

/// Names of the two security schemes.
const BEARER: &str = "bearer";
const COOKIE: &str = "session";
/// Media type of errors.
const PROBLEM: &str = "application/problem+json";
/// Path of the calls in which agents name an attempt by headers.
const AGENT_ATTEMPTS_PATH: &str = "/api/v1/agent/attempts/";
const AGENT_HEADERS: [(&str, &str); 2] = [
    ("x-lockstep-agent", "The agent's id; the token must belong to this agent"),
    ("x-lockstep-fencing-token", "The fencing token of the attempt, as the agent received it"),
];
/// Statuses of responses with `Retry-After`.
const RETRY_STATUSES: [&str; 2] = ["429", "503"];

/// Adds to each call the refusals that do not come from its handler, and gives errors their media type.
pub(crate) fn complete(mut document: OpenApi) -> OpenApi {
    for (path, item) in &mut document.paths.paths {
        for (method, operation) in operations(item) {
            if path.starts_with(AGENT_ATTEMPTS_PATH) {
                operation.parameters.get_or_insert_default().extend(AGENT_HEADERS.map(|(name, about)| {
                    let text = ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)).build();
                    let header = ParameterBuilder::new().name(name).parameter_in(ParameterIn::Header);
                    let header = header.description(Some(about)).required(Required::True).schema(Some(text));
                    RefOr::T(header.build())
                }));
            }
            let scope = match gate::requirement(&method, Some(path)) {
                Requirement::Nothing => None,
                Requirement::Scope(scope) => Some(scope),
                // A person's token may have any scope.
                Requirement::AdminOrPerson => Some(Scope::Read),
            };
            let mut refusals = common_refusals(path, operation, scope.is_some());
            if let Some(scope) = scope {
                refusals.push(("401", "No valid token"));
                refusals.push((
                    "403",
                    "The scope of the token or the role of the person does not suffice, the object has another owner, the request \
                     comes from a page of another origin, or it bypassed the proxy that terminates TLS",
                ));
                let schemes = [BEARER, COOKIE].map(|name| SecurityRequirement::new(name, [scope.as_str()]));
                operation.security = Some(schemes.into());
            }
            for (status, description) in refusals {
                let responses = &mut operation.responses.responses;
                responses.entry(status.to_owned()).or_insert_with(|| RefOr::T(problem(description)));
            }
            for (status, response) in &mut operation.responses.responses {
                let RefOr::T(response) = response else { continue };
                if status.parse::<u16>().is_ok_and(|status| status >= 400)
                    && let Some(content) = response.content.shift_remove("application/json")
                {
                    response.content.insert(PROBLEM.to_owned(), content);
                }
                if RETRY_STATUSES.contains(&status.as_str()) {
                    let seconds = ObjectBuilder::new().schema_type(Type::Integer).build();
                    let header =
                        HeaderBuilder::new().schema(Some(seconds)).description(Some("Seconds to wait"));
                    response.headers.insert("Retry-After".to_owned(), RefOr::T(header.build()));
                }
            }
        }
    }
    values::complete(&mut document);
    let schemes = &mut document.components.get_or_insert_default().security_schemes;
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
        "A token of `POST /api/v1/tokens`. Its scope is `read`, `submit` (includes `read`), `admin` (includes both) or `agent`.",
    ));
    schemes.insert(BEARER.into(), RefOr::T(SecurityScheme::Http(bearer.build())));
    let cookie = ApiKeyValue::with_description("lockstep_PORT", "A browser that has signed in at `/login`");
    schemes.insert(COOKIE.into(), RefOr::T(SecurityScheme::ApiKey(ApiKey::Cookie(cookie))));
    document
}

/// The calls of a path.
fn operations(item: &mut PathItem) -> impl Iterator<Item = (Method, &mut Operation)> {
    [
        (Method::GET, &mut item.get),
        (Method::PUT, &mut item.put),
        (Method::POST, &mut item.post),
        (Method::PATCH, &mut item.patch),
        (Method::DELETE, &mut item.delete),
    ]
    .into_iter()
    .filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// The responses that do not come from a handler but from [`crate::http::guard`], the extractors, the store and the router. The guard
/// checks every request, so every call may be answered with 400, 403, 421 or 429.
fn common_refusals(
    path: &str,
    operation: &Operation,
    needs_scope: bool,
) -> Vec<(&'static str, &'static str)> {
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
    if operation.request_body.is_some() {
        refusals.push(("408", "The body stopped arriving"));
        refusals.push(("413", "The body is too large"));
        refusals.push(("415", "The body's media type is not supported"));
        refusals.push(("422", "The body has mistakes; `errors` has each mistake with its location"));
    }
    refusals
}

fn problem(description: &str) -> Response {
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    ResponseBuilder::new().description(description).content(PROBLEM, content).build()
}
