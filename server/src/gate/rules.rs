//! What each request needs, in one table.

use axum::http::{Method, StatusCode};
use lockstep_protocol::access::Scope;

/// What a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Requirement {
    /// It is open to everybody.
    Nothing,
    Scope(Scope),
    /// An admin, or a person for what is its own: the handler tells the two apart.
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
const RULES: [(Methods, &str, Requirement); 35] = [
    // What a browser needs to sign in, and what supervisors ask who have no token. `/readyz` tells strangers no details.
    (All, "/login", Nothing),
    (Safe, "/login/oidc", Nothing),
    (Safe, "/login/oidc/callback", Nothing),
    (Safe, "/static/{*path}", Nothing),
    // They have no other method, which is said to everybody (405).
    (All, "/healthz", Nothing),
    (All, "/readyz", Nothing),
    // Whoever is signed in may leave, and get a link with what they may do already.
    (All, "/logout", S(Scope::Read)),
    (All, "/api/v1/login-links", S(Scope::Read)),
    // Everybody's own password.
    (All, "/account", S(Scope::Read)),
    (All, "/api/v1/password", S(Scope::Read)),
    // An agent's connection reports results and learns where files are: nobody else speaks there.
    (All, "/api/v1/agent/socket", S(Scope::Agent)),
    // Checkpoints go from agent to server and back; the handlers compare the attempt's fencing token.
    (All, "/api/v1/agent/attempts/{job}/{attempt}", S(Scope::Agent)),
    (All, "/api/v1/agent/attempts/{job}/{attempt}/checkpoints/{id}/{file}", S(Scope::Agent)),
    (All, "/api/v1/agent/attempts/{job}/{attempt}/dataset", S(Scope::Agent)),
    (All, "/api/v1/agent/attempts/{job}/{attempt}/dataset/files", S(Scope::Agent)),
    (All, "/api/v1/agent/attempts/{job}/{attempt}/uploads/{name}", S(Scope::Agent)),
    (All, "/api/v1/agent/attempts/{job}/{attempt}/uploads/{name}/{file}", S(Scope::Agent)),
    // Who may do what, and who did what.
    (All, "/api/v1/tokens", AdminOrPerson),
    (All, "/api/v1/tokens/{id}", AdminOrPerson),
    (All, "/api/v1/people", S(Scope::Admin)),
    (All, "/api/v1/people/{name}", S(Scope::Admin)),
    (All, "/people", S(Scope::Admin)),
    (All, "/api/v1/audit", S(Scope::Admin)),
    (All, "/audit", S(Scope::Admin)),
    // Machines are everybody's.
    (All, "/api/v1/agents/{id}", S(Scope::Admin)),
    (All, "/api/v1/agents/{id}/drain", S(Scope::Admin)),
    (All, "/api/v1/agents/{id}/undrain", S(Scope::Admin)),
    // Named here though they are the default: numbers about jobs, and the streams of the dashboard.
    (Safe, "/metrics", S(Scope::Read)),
    (Safe, "/api/v1/metrics/query", S(Scope::Read)),
    (Safe, "/api/v1/projects", S(Scope::Read)),
    (Safe, "/api/v1/projects/{name}/panels", S(Scope::Read)),
    (Safe, "/api/v1/jobs/groups", S(Scope::Read)),
    (Safe, "/api/v1/queue", S(Scope::Read)),
    (Safe, "/api/v1/jobs/{id}/events", S(Scope::Read)),
    (Safe, "/api/v1/stream", S(Scope::Read)),
];

fn is_safe(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// What a request needs; `route` as the router knows it, none for an address that there is not.
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

/// Whether a request is written to the audit log: it may change something. Checking a form while somebody types changes nothing.
pub(super) fn is_recorded(method: &Method, route: Option<&str>) -> bool {
    // Nor is what an agent does for the job that it runs anybody's change, and there would be a line for each piece of a file.
    let is_agents = route.is_some_and(|route| route.starts_with("/api/v1/agent/attempts/"));
    !is_safe(method) && !is_agents && route != Some("/api/v1/jobs/validate")
}

/// Whether a request is carried out to its end, and into the audit log, also when its client hangs up: it may change something, as
/// the return from an OpenID provider does, which adds people.
pub(super) fn is_carried_out(method: &Method, route: Option<&str>) -> bool {
    is_recorded(method, route) || signs_in(route)
}

/// Whether a route signs somebody in.
pub(super) fn signs_in(route: Option<&str>) -> bool {
    matches!(route, Some("/login" | "/login/oidc/callback"))
}

/// Whether an answer says that nobody was signed in: not known, or known to the provider and not let in. Both are counted.
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
