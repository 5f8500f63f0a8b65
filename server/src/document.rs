//! The OpenAPI document: what handlers say of themselves, and what every call has in common with others.

use utoipa::openapi::{
    OpenApi, Ref, RefOr,
    content::ContentBuilder,
    path::{Operation, ParameterIn, PathItem},
    response::{Response, ResponseBuilder},
};

const PROBLEM: &str = "application/problem+json";

/// Adds to each call the refusals that do not come from its handler, and gives errors their media type.
pub(crate) fn complete(mut document: OpenApi) -> OpenApi {
    for item in document.paths.paths.values_mut() {
        for (is_safe, operation) in operations(item) {
            for (status, description) in common(is_safe, operation) {
                let responses = &mut operation.responses.responses;
                responses.entry(status.to_owned()).or_insert_with(|| RefOr::T(problem(description)));
            }
            for (status, response) in &mut operation.responses.responses {
                if let RefOr::T(response) = response
                    && status.parse::<u16>().is_ok_and(|status| status >= 400)
                    && let Some(content) = response.content.shift_remove("application/json")
                {
                    response.content.insert(PROBLEM.to_owned(), content);
                }
            }
        }
    }
    document
}

/// The calls of an address, and whether they change nothing.
fn operations(item: &mut PathItem) -> impl Iterator<Item = (bool, &mut Operation)> {
    let safe = item.get.as_mut().map(|operation| (true, operation));
    let unsafe_ones = [&mut item.put, &mut item.post, &mut item.patch, &mut item.delete];
    safe.into_iter().chain(unsafe_ones.into_iter().flatten().map(|operation| (false, operation)))
}

/// What [`crate::guard`], the extractors, the store and the router answer on behalf of a handler.
fn common(is_safe: bool, operation: &Operation) -> Vec<(&'static str, &'static str)> {
    let mut all = vec![
        ("421", "The Host is none of this machine's"),
        ("500", "A fault of the server; its log says more"),
        ("503", "The database or an agent is not available; try again"),
        ("504", "It took too long"),
    ];
    let parameters = operation.parameters.iter().flatten();
    let has_parameters = parameters.into_iter().any(|parameter| match parameter {
        RefOr::T(parameter) => {
            matches!(parameter.parameter_in, ParameterIn::Path | ParameterIn::Query | ParameterIn::Header)
        }
        RefOr::Ref(_) => true,
    });
    if has_parameters || operation.request_body.is_some() {
        all.push(("400", "The request cannot be read"));
    }
    let is_socket = operation.responses.responses.contains_key("101");
    if !is_safe || is_socket {
        all.push(("403", "From a page of another origin"));
    }
    if operation.request_body.is_some() {
        all.push(("408", "The body stopped coming"));
        all.push(("413", "The body is too large"));
        all.push(("415", "The body is of a type that is not taken"));
    }
    all
}

fn problem(description: &str) -> Response {
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    ResponseBuilder::new().description(description).content(PROBLEM, content).build()
}
