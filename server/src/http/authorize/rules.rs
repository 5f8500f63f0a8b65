//! The scope that each request needs, and which requests are recorded.

use axum::http::{Method, StatusCode};
use lockstep_protocol::access::Scope;

/// What a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Requirement {
    /// The request is open to everybody.
    Nothing,
    Scope(Scope),
    /// The caller must be an admin or a person. The handler restricts a person to the person's own objects.
    AdminOrPerson,
}

/// Returns the requirement of a request. `route` is the router's pattern; `None` for an unknown path.
pub(crate) fn requirement(method: &Method, route: Option<&str>) -> Requirement {
    match route.unwrap_or_default() {
        // Needed by browsers to sign in, and by health checks, which have no token. `/readyz` shows no details without a token.
        "/login" | "/login/oidc" | "/login/oidc/callback" | "/static/{*path}" | "/healthz" | "/readyz" => {
            Requirement::Nothing
        }
        // Every signed-in caller may sign out, get a sign-in link with the caller's own scope, and change the caller's own password.
        "/logout" | "/api/v1/login-links" | "/account" | "/api/v1/password" => {
            Requirement::Scope(Scope::Read)
        }
        // An agent reports results and transfers files of its attempts. The handlers check the attempt's fencing token.
        path if path.starts_with("/api/v1/agent/") => Requirement::Scope(Scope::Agent),
        "/api/v1/tokens" | "/api/v1/tokens/{id}" => Requirement::AdminOrPerson,
        "/api/v1/people" | "/api/v1/people/{name}" | "/people" | "/api/v1/audit" | "/audit" => {
            Requirement::Scope(Scope::Admin)
        }
        // Webhooks send data of this server to other machines.
        path if path.starts_with("/api/v1/webhooks") || path == "/webhooks" => {
            Requirement::Scope(Scope::Admin)
        }
        // Machines are shared by all users.
        "/api/v1/agents/{id}" | "/api/v1/agents/{id}/drain" | "/api/v1/agents/{id}/undrain" => {
            Requirement::Scope(Scope::Admin)
        }
        // Requests that change nothing, although their method is POST.
        "/api/v1/jobs/form"
        | "/api/2.0/mlflow/experiments/search"
        | "/api/2.0/mlflow/runs/search"
        | "/api/2.0/mlflow/logged-models/search" => Requirement::Scope(Scope::Read),
        _ if method.is_safe() => Requirement::Scope(Scope::Read),
        _ => Requirement::Scope(Scope::Submit),
    }
}

/// Routes whose requests are not recorded, except with DELETE: checks and conversions of a specification, and requests that a program sends
/// many times a minute (reports of a run, parts of an upload). The creation of a run, and an upload that becomes a dataset, are recorded. A
/// run's end is in the run's history.
const NOT_RECORDED: [&str; 11] = [
    "/api/v1/jobs/form",
    "/api/v1/jobs/validate",
    "/api/v1/jobs/{id}/fork/check",
    "/api/v1/runs/{id}",
    "/api/v1/runs/{id}/records",
    "/api/v1/datasets/uploads/{name}/archive",
    "/api/2.0/mlflow/{*call}",
    "/api/3.0/mlflow/{*call}",
    "/api/2.0/mlflow/experiments/search",
    "/api/2.0/mlflow/runs/search",
    "/api/2.0/mlflow/logged-models/search",
];

/// Whether a request uploads a file of a run. Such a request has no time limit as long as its client sends.
pub(crate) fn is_upload(method: &Method, route: Option<&str>) -> bool {
    let routes = ["/api/v1/runs/{id}/file", "/api/2.0/mlflow-artifacts/artifacts/{*path}"];
    *method == Method::PUT && route.is_some_and(|route| routes.contains(&route))
}

/// Whether a request is written to the audit log, because it may change something.
pub(super) fn is_recorded(method: &Method, route: Option<&str>) -> bool {
    // Requests of an agent for its job are not recorded, because no person made them, and each part of a file would have an entry.
    let is_by_agent = route.is_some_and(|route| route.starts_with("/api/v1/agent/attempts/"));
    let is_exempt = method != Method::DELETE && route.is_some_and(|route| NOT_RECORDED.contains(&route));
    !method.is_safe() && !is_by_agent && !is_exempt && !is_upload(method, route)
}

/// Whether a response says that the inspection of a dataset is under way. Only the response that ends the inspection is recorded.
pub(super) fn is_under_way(route: Option<&str>, status: StatusCode) -> bool {
    let is_of_datasets = |route: &str| route == "/datasets" || route.starts_with("/api/v1/datasets");
    status == StatusCode::ACCEPTED && route.is_some_and(is_of_datasets)
}

/// Whether a request runs to its end even if its client disconnects: a request that may change something, including the return from an
/// OpenID provider, which may add a person.
pub(super) fn is_detached(method: &Method, route: Option<&str>) -> bool {
    is_recorded(method, route) || is_sign_in(route)
}

/// Whether a route signs somebody in.
pub(super) fn is_sign_in(route: Option<&str>) -> bool {
    matches!(route, Some("/login" | "/login/oidc/callback"))
}

/// Whether a response is a failed sign-in: wrong credentials, or a person of the provider who may not use this server.
pub(super) fn is_failed_sign_in(route: Option<&str>, status: StatusCode) -> bool {
    let is_refused_person = route == Some("/login/oidc/callback") && status == StatusCode::FORBIDDEN;
    is_refused_person || (is_sign_in(route) && status == StatusCode::UNAUTHORIZED)
}
