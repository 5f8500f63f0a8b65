//! A table with the scope that each request needs.

use axum::http::{Method, StatusCode};
use lockstep_protocol::access::Scope;

/// The requirement of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Requirement {
    /// None: the request is open to everybody.
    Nothing,
    Scope(Scope),
    /// An admin, or a person for their own objects, which the handler checks.
    AdminOrPerson,
}

/// The methods of a rule.
#[derive(Debug, Clone, Copy)]
enum Methods {
    All,
    Safe,
}

use Methods::{All, Safe};
use Requirement::{AdminOrPerson, Nothing, Scope as S};

/// The exceptions. All other requests need `read` if their method is safe, and else `submit`.
const RULES: [(Methods, &str, Requirement); 35] = [
    // Needed by browsers to sign in, and by health checks, which have no token. `/readyz` shows no details without a token.
    (All, "/login", Nothing),
    (Safe, "/login/oidc", Nothing),
    (Safe, "/login/oidc/callback", Nothing),
    (Safe, "/static/{*path}", Nothing),
    // Other methods do not exist, so the response is 405.
    (All, "/healthz", Nothing),
    (All, "/readyz", Nothing),
    // Every signed-in caller may sign out, and get a sign-in link with the caller's own scope.
    (All, "/logout", S(Scope::Read)),
    (All, "/api/v1/login-links", S(Scope::Read)),
    // The caller's own password.
    (All, "/account", S(Scope::Read)),
    (All, "/api/v1/password", S(Scope::Read)),
    // An agent reports results and gets paths of files: for agents only.
    (All, "/api/v1/agent/socket", S(Scope::Agent)),
    // An attempt's checkpoints, dataset and uploads. The handlers check the attempt's fencing token.
    (All, "/api/v1/agent/attempts/{job}/{attempt}", S(Scope::Agent)),
    (All, "/api/v1/agent/attempts/{job}/{attempt}/checkpoints/{id}/{file}", S(Scope::Agent)),
    (All, "/api/v1/agent/attempts/{job}/{attempt}/dataset", S(Scope::Agent)),
    (All, "/api/v1/agent/attempts/{job}/{attempt}/dataset/files", S(Scope::Agent)),
    (All, "/api/v1/agent/attempts/{job}/{attempt}/uploads/{name}", S(Scope::Agent)),
    (All, "/api/v1/agent/attempts/{job}/{attempt}/uploads/{name}/{file}", S(Scope::Agent)),
    // Tokens, people and the audit log.
    (All, "/api/v1/tokens", AdminOrPerson),
    (All, "/api/v1/tokens/{id}", AdminOrPerson),
    (All, "/api/v1/people", S(Scope::Admin)),
    (All, "/api/v1/people/{name}", S(Scope::Admin)),
    (All, "/people", S(Scope::Admin)),
    (All, "/api/v1/audit", S(Scope::Admin)),
    (All, "/audit", S(Scope::Admin)),
    // Webhooks send data of this server to other machines.
    (All, "/api/v1/webhooks", S(Scope::Admin)),
    (All, "/api/v1/webhooks/{id}", S(Scope::Admin)),
    (All, "/api/v1/webhooks/{id}/test", S(Scope::Admin)),
    (All, "/api/v1/webhooks/{id}/deliveries", S(Scope::Admin)),
    (All, "/webhooks", S(Scope::Admin)),
    // Machines are shared by all users.
    (All, "/api/v1/agents/{id}", S(Scope::Admin)),
    (All, "/api/v1/agents/{id}/drain", S(Scope::Admin)),
    (All, "/api/v1/agents/{id}/undrain", S(Scope::Admin)),
    // MLflow's read requests that have a body.
    (All, "/api/2.0/mlflow/experiments/search", S(Scope::Read)),
    (All, "/api/2.0/mlflow/runs/search", S(Scope::Read)),
    (All, "/api/2.0/mlflow/logged-models/search", S(Scope::Read)),
];

fn is_safe(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// The requirement of a request. `route` is the router's pattern; `None` for an unknown path.
pub(crate) fn requirement(method: &Method, route: Option<&str>) -> Requirement {
    let rule = RULES.iter().find(|(methods, path, _)| {
        Some(*path) == route
            && match methods {
                All => true,
                Safe => is_safe(method),
            }
    });
    match rule {
        Some((_, _, needed)) => *needed,
        None if is_safe(method) => S(Scope::Read),
        None => S(Scope::Submit),
    }
}

/// Routes whose requests are not recorded, except with DELETE: checks of a specification, and requests that a program sends many times a
/// minute (reports of a run, parts of an upload). The creation of a run, and an upload that becomes a dataset, are recorded. A run's end is
/// in the run's history.
const NOT_AUDITED: [&str; 10] = [
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

/// Whether a request uploads a file of a run, which may take as long as its client sends.
pub(crate) fn is_upload(method: &Method, route: Option<&str>) -> bool {
    let routes = ["/api/v1/runs/{id}/file", "/api/2.0/mlflow-artifacts/artifacts/{*path}"];
    *method == Method::PUT && route.is_some_and(|route| routes.contains(&route))
}

/// Whether a request is written to the audit log, because it may change something.
pub(super) fn is_recorded(method: &Method, route: Option<&str>) -> bool {
    // Requests of an agent for its job are not recorded, because no person made them, and each part of a file would have an entry.
    let is_agents = route.is_some_and(|route| route.starts_with("/api/v1/agent/attempts/"));
    let is_listed = method != Method::DELETE && route.is_some_and(|route| NOT_AUDITED.contains(&route));
    !is_safe(method) && !is_agents && !is_listed && !is_upload(method, route)
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
