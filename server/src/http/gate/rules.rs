//! What each request needs, in one table.

use axum::http::{Method, StatusCode};
use lockstep_protocol::access::Scope;

/// What a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Requirement {
    /// It is open to everybody.
    Nothing,
    Scope(Scope),
    /// An admin, or a person for their own objects, which the handler checks.
    AdminOrPerson,
}

/// Which methods a rule is for.
#[derive(Debug, Clone, Copy)]
enum Methods {
    All,
    Safe,
}

use Methods::{All, Safe};
use Requirement::{AdminOrPerson, Nothing, Scope as S};

/// The exceptions. Everything else needs `read` to look and `submit` to change.
const RULES: [(Methods, &str, Requirement); 43] = [
    // What a browser needs to sign in, and health checks, which have no token. `/readyz` shows no details without one.
    (All, "/login", Nothing),
    (Safe, "/login/oidc", Nothing),
    (Safe, "/login/oidc/callback", Nothing),
    (Safe, "/static/{*path}", Nothing),
    // Other methods do not exist: everybody gets 405.
    (All, "/healthz", Nothing),
    (All, "/readyz", Nothing),
    // Anybody who is signed in may sign out, and may get a sign-in link with their own scope.
    (All, "/logout", S(Scope::Read)),
    (All, "/api/v1/login-links", S(Scope::Read)),
    // Everybody's own password.
    (All, "/account", S(Scope::Read)),
    (All, "/api/v1/password", S(Scope::Read)),
    // An agent's connection reports results and learns paths of files: for agents only.
    (All, "/api/v1/agent/socket", S(Scope::Agent)),
    // Checkpoints go from agent to server and back; the handlers compare the attempt's fencing token.
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
    // They send to other machines what this server knows.
    (All, "/api/v1/webhooks", S(Scope::Admin)),
    (All, "/api/v1/webhooks/{id}", S(Scope::Admin)),
    (All, "/api/v1/webhooks/{id}/test", S(Scope::Admin)),
    (All, "/api/v1/webhooks/{id}/attempts", S(Scope::Admin)),
    (All, "/webhooks", S(Scope::Admin)),
    // Machines are shared by all users.
    (All, "/api/v1/agents/{id}", S(Scope::Admin)),
    (All, "/api/v1/agents/{id}/drain", S(Scope::Admin)),
    (All, "/api/v1/agents/{id}/undrain", S(Scope::Admin)),
    // Listed although this is the default, because they expose much: metrics of jobs, and the streams of the dashboard.
    (Safe, "/metrics", S(Scope::Read)),
    (Safe, "/api/v1/metrics/query", S(Scope::Read)),
    (Safe, "/api/v1/projects", S(Scope::Read)),
    (Safe, "/api/v1/projects/{name}/panels", S(Scope::Read)),
    (Safe, "/api/v1/jobs/groups", S(Scope::Read)),
    (Safe, "/api/v1/queue", S(Scope::Read)),
    (Safe, "/api/v1/jobs/{id}/events", S(Scope::Read)),
    (Safe, "/api/v1/stream", S(Scope::Read)),
    // As MLflow has them: requests that only look, with a body.
    (All, "/api/2.0/mlflow/experiments/search", S(Scope::Read)),
    (All, "/api/2.0/mlflow/runs/search", S(Scope::Read)),
    (All, "/api/2.0/mlflow/logged-models/search", S(Scope::Read)),
];

fn is_safe(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// What a request needs. `route` is the router's pattern; `None` for an unknown address.
pub(crate) fn needed(method: &Method, route: Option<&str>) -> Requirement {
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

/// Requests that check a form and change nothing.
const CHECKS: [&str; 2] = ["/api/v1/jobs/validate", "/api/v1/jobs/{id}/fork/check"];

/// What a run's program tells while it trains, many times a minute. That it was made or deleted is recorded, and its history has when it
/// ended.
const TOLD: [&str; 6] = [
    "/api/v1/runs/{id}",
    "/api/v1/runs/{id}/records",
    "/api/2.0/mlflow/{*call}",
    "/api/2.0/mlflow/experiments/search",
    "/api/2.0/mlflow/runs/search",
    "/api/2.0/mlflow/logged-models/search",
];

/// Whether a request uploads a file of a run, which takes as long as its client sends.
pub(crate) fn is_upload(method: &Method, route: Option<&str>) -> bool {
    let routes = ["/api/v1/runs/{id}/file", "/api/2.0/mlflow-artifacts/artifacts/{*path}"];
    *method == Method::PUT && route.is_some_and(|route| routes.contains(&route))
}

/// Whether a request is written to the audit log: it may change something. Checking a form while somebody types changes nothing.
pub(super) fn is_recorded(method: &Method, route: Option<&str>) -> bool {
    // What an agent does for its job is not recorded either: nobody asked for it, and there would be an entry for each part of a file.
    let is_agents = route.is_some_and(|route| route.starts_with("/api/v1/agent/attempts/"));
    let is_listed = CHECKS.iter().chain(&TOLD).any(|listed| route == Some(*listed));
    !is_safe(method) && !is_agents && !is_listed && !is_upload(method, route)
}

/// Whether a request runs to its end and into the audit log, also when its client disconnects: those that may change something,
/// including the return from an OpenID provider, which may add a person.
pub(super) fn is_carried_out(method: &Method, route: Option<&str>) -> bool {
    is_recorded(method, route) || signs_in(route)
}

/// Whether a route signs somebody in.
pub(super) fn signs_in(route: Option<&str>) -> bool {
    matches!(route, Some("/login" | "/login/oidc/callback"))
}

/// Whether a response is that of a failed sign-in: an unknown user, or one whom the provider knows and we do not admit. Both count.
pub(super) fn is_failed_sign_in(route: Option<&str>, status: StatusCode) -> bool {
    let is_provider_s = route == Some("/login/oidc/callback") && status == StatusCode::FORBIDDEN;
    is_provider_s || (signs_in(route) && status == StatusCode::UNAUTHORIZED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_listed_is_not_open() {
        for (method, route, expected) in [
            (Method::GET, None, S(Scope::Read)),
            (Method::POST, None, S(Scope::Submit)),
            (Method::GET, Some("/jobs"), S(Scope::Read)),
            (Method::DELETE, Some("/api/v1/jobs/{id}"), S(Scope::Submit)),
            (Method::GET, Some("/login"), Nothing),
            (Method::POST, Some("/login"), Nothing),
            (Method::TRACE, Some("/healthz"), Nothing),
            (Method::POST, Some("/static/{*path}"), S(Scope::Submit)),
            (Method::GET, Some("/login/x"), S(Scope::Read)),
        ] {
            assert_eq!(needed(&method, route), expected, "{method} {route:?}");
        }
    }
}
