//! Middleware of every route: authenticates and authorises each request. Access is denied by default.
//!
//! `authorize/rules.rs` has the scope that a request needs, by method and route. A route that is not listed there needs a token.
//! Requests that may change something are written to the audit log here, so no handler can forget it.

mod agents;
mod ownership;
mod rules;

pub(crate) use agents::is_agent;
pub(crate) use rules::{Requirement, is_upload, requirement};

use crate::{
    auth::access::{Caller, Denied},
    http::{
        HttpState,
        error::{Error, PageError, render_for},
        peer::Peer,
        request_id,
    },
    store::principal,
};
use axum::{
    Extension,
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Redirect, Response},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use lockstep_protocol::{
    access::{AuditEntry, Scope},
    people::Role,
    spec::shortened,
};
use lockstep_web::layout::CurrentUser;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use std::sync::Arc;

/// Maximum length of an object in the audit log, in characters.
const OBJECT_CHARS: usize = 300;
/// Instructions for an agent without an agent's token.
const AGENT_TOKEN_ADVICE: &str =
    "give it --token-file with a token from `lockstep token create --scope agent --agent NAME`";

/// Response extension of a successful sign-in, by a person or with a token, for the audit log.
#[derive(Debug, Clone)]
pub(crate) struct SignedIn {
    pub(crate) who: String,
    pub(crate) token_id: String,
}

/// Response extension: the text that the audit log shows after the request's path. It names the object if the path does not, or says what
/// has changed in the object.
#[derive(Debug, Clone)]
pub(crate) struct AuditSubject(pub(crate) String);

impl AuditSubject {
    /// The fields whose values differ: `priority: 5 (was 0), project: "shoes" (was "default")`. Empty if nothing has changed.
    pub(crate) fn of_changes(before: &Value, after: &Value) -> Self {
        let fields = after.as_object().into_iter().flatten();
        let changes = fields.filter(|(key, value)| before[key.as_str()] != **value).map(|(key, value)| {
            let [old, new] = [&before[key.as_str()], value].map(|value| shortened(&value.to_string()));
            if old == "null" { format!("{key}: {new}") } else { format!("{key}: {new} (was {old})") }
        });
        Self(changes.collect::<Vec<_>>().join(", "))
    }
}

/// Passes a request to its handler if the caller may make it, and records it in the audit log if it may change something.
pub(crate) async fn authorize(
    State(http): State<Arc<HttpState>>,
    Extension(peer): Extension<Peer>,
    matched: Option<MatchedPath>,
    mut request: Request,
    next: Next,
) -> Response {
    let tasks = http.tasks.tracker.clone();
    let method = request.method().clone();
    let route = matched.as_ref().map(MatchedPath::as_str);
    let needed = requirement(&method, route);
    let path = request.uri().path().to_owned();
    // Path and query: for the audit log, and as the page to return to after a sign-in.
    let object: String =
        request.uri().path_and_query().map_or("", |p| p.as_str()).chars().take(OBJECT_CHARS).collect();
    let request_id = request_id::read(&request).to_owned();
    let by_certificate = match needed {
        Requirement::Scope(Scope::Agent) => agents::identify_by_certificate(&http, request.headers(), &peer),
        _ => Ok(None),
    };
    let identified = match by_certificate {
        Ok(None) => identify(&http, request.headers(), &path),
        agent_or_error => agent_or_error,
    };
    let caller = match identified {
        Ok(caller) => caller,
        Err(_) if needed == Requirement::Nothing => None,
        Err(error) => return error.into_response(),
    };
    if let Some(caller) = caller.as_ref().filter(|_| needed != Requirement::Nothing)
        && let Err(error) = check_token_rate(&http, caller)
    {
        return error_response(caller, error, &path);
    }
    match (&caller, needed) {
        (Some(caller), Requirement::Scope(scope)) if !caller.may(scope) => {
            return forbidden_response(caller, scope, &path);
        }
        (Some(caller), Requirement::AdminOrPerson)
            if !caller.may(Scope::Admin) && caller.person().is_none() =>
        {
            return forbidden_response(caller, Scope::Admin, &path);
        }
        (None, Requirement::Scope(_) | Requirement::AdminOrPerson) => {
            return sign_in_response(&method, &path, &object);
        }
        _ => {}
    }
    if let (Some(caller), Some(route)) = (&caller, route)
        && let Err(error) = ownership::check(&http.auth, caller, &method, route, &mut request).await
    {
        return error_response(caller, error, &path);
    }
    let user = caller.as_ref().map_or(CurrentUser::NOBODY, Caller::current_user);
    if let Some(caller) = &caller {
        request.extensions_mut().insert(caller.clone());
    }
    let is_recorded = rules::is_recorded(&method, route);
    let is_detached = rules::is_detached(&method, route);
    let work = async move {
        let route = matched.as_ref().map(MatchedPath::as_str);
        let response = render_for(user, next.run(request).await);
        let signed_in = response.extensions().get::<SignedIn>().cloned();
        let status = response.status();
        // A request without a caller is recorded only if it is a sign-in. The number of failed sign-ins is limited; other requests could
        // displace important entries.
        let is_sign_in = rules::is_sign_in(route);
        let is_failed_sign_in = rules::is_failed_sign_in(route, status);
        let is_recorded =
            is_recorded && status != StatusCode::METHOD_NOT_ALLOWED && !rules::is_under_way(route, status);
        if signed_in.is_some() || is_failed_sign_in || (is_recorded && caller.is_some()) {
            let token = caller.as_ref().and_then(Caller::token);
            let action = if is_sign_in {
                "sign in".to_owned()
            } else {
                format!("{method} {}", route.unwrap_or("(no such address)"))
            };
            // The URL of a sign-in may contain a code or a token, which must not be recorded.
            let mut object = if is_sign_in { path } else { object };
            let subject = response.extensions().get::<AuditSubject>().map(|AuditSubject(text)| text.as_str());
            let subject = subject.filter(|text| !text.is_empty());
            if let Some(text) = subject.or_else(|| created_object(&response).filter(|_| !is_sign_in)) {
                object.push_str(": ");
                object.extend(text.chars().take(OBJECT_CHARS));
            }
            let (who, token_id) = match (signed_in, token) {
                (Some(SignedIn { who, token_id }), _) => (who, token_id),
                (None, Some(token)) => (token.who(), token.id.clone()),
                (None, None) => Default::default(),
            };
            http.auth.audit.put(AuditEntry {
                id: uuid::Uuid::now_v7().simple().to_string(),
                at: crate::now(),
                who,
                token_id,
                address: peer.address.to_string(),
                action,
                object,
                status: status.as_u16(),
                request_id,
            });
        }
        response
    };
    if !is_detached {
        return work.await;
    }
    // A separate task, so that the request completes and is recorded even if the client disconnects.
    match tasks.spawn(work).await {
        Ok(response) => response,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(error) => Error::Internal(format!("the work of a request failed: {error}")).into_response(),
        },
    }
}

/// The id or name of the created object: the last part of the response's `Location`.
fn created_object(response: &Response) -> Option<&str> {
    let location = response.headers().get(header::LOCATION)?.to_str().ok()?;
    let is_new = match response.status() {
        StatusCode::CREATED => true,
        // A form that is sent without scripts redirects to the page of the new job.
        StatusCode::SEE_OTHER => location.starts_with("/jobs/"),
        _ => false,
    };
    location.rsplit('/').next().filter(|_| is_new)
}

/// The caller that these headers authenticate; `None` without credentials. A token in `Authorization` is preferred to a cookie.
fn identify(http: &HttpState, headers: &HeaderMap, path: &str) -> Result<Option<Caller>, Error> {
    if !http.auth.access.must_authenticate {
        return Ok(Some(Caller::anybody()));
    }
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let Some(token) = bearer(value).map(str::to_owned).or_else(|| mlflow_password(value, path)) else {
            let detail = "the Authorization header must be: Bearer TOKEN";
            return Err(Error::Unauthorized(detail.into()));
        };
        return http.auth.access.authenticate_token(&token).map(Some).map_err(|denied| {
            Error::Unauthorized(match denied {
                Denied::Unknown if is_for_agents(path) => {
                    format!("this server does not know the agent's token; {AGENT_TOKEN_ADVICE}")
                }
                Denied::Unknown => {
                    "this server does not know that token, for example because it was restored from a \
                    backup without it; on the server's machine, `lockstep token create` makes another"
                        .into()
                }
                Denied::Revoked => "that token was revoked; ask for another token".into(),
                Denied::RevokedUntilRestart => {
                    "the server's own token was revoked; restart the server, which then writes another token"
                        .into()
                }
                Denied::Expired => "that token has expired; ask for another token".into(),
                Denied::Disabled => "the owner of that token may not use this server; ask an admin".into(),
            })
        });
    }
    Ok(cookie(headers, &http.auth.cookie_name)
        .and_then(|secret| http.auth.access.authenticate_session(secret)))
}

/// The token of an `Authorization` header.
fn bearer(value: &HeaderValue) -> Option<&str> {
    let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// The token that an MLflow client sends as a password (`MLFLOW_TRACKING_PASSWORD`).
fn mlflow_password(value: &HeaderValue, path: &str) -> Option<String> {
    let (scheme, sent) = value.to_str().ok()?.split_once(' ')?;
    let is_accepted = scheme.eq_ignore_ascii_case("basic") && is_mlflow(path);
    let decoded = BASE64_STANDARD.decode(sent.trim()).ok().filter(|_| is_accepted)?;
    let (_, password) = std::str::from_utf8(&decoded).ok()?.split_once(':')?;
    Some(password.to_owned())
}

/// Whether a path belongs to MLflow's REST interface. The server has only some calls of version 2.0; other calls get an error in MLflow's
/// format.
pub(crate) fn is_mlflow(path: &str) -> bool {
    ["/api/2.0/mlflow", "/api/3.0/mlflow"].iter().any(|prefix| path.starts_with(prefix))
}

pub(crate) fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let lines = headers.get_all(header::COOKIE).into_iter().filter_map(|value| value.to_str().ok());
    let mut pairs = lines.flat_map(|text| text.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
}

/// Whether errors of a path are problem details in JSON rather than pages.
fn is_for_programs(path: &str) -> bool {
    path.starts_with("/api/") || ["/metrics", "/healthz", "/readyz"].contains(&path)
}

/// Whether only agents send requests to a path.
fn is_for_agents(path: &str) -> bool {
    path.starts_with("/api/v1/agent/")
}

fn sign_in_response(method: &Method, path: &str, object: &str) -> Response {
    if is_for_agents(path) {
        return Error::Unauthorized(format!("agents need a token; {AGENT_TOKEN_ADVICE}")).into_response();
    }
    if is_for_programs(path) {
        let detail = "this needs an access token: send it as Authorization: Bearer TOKEN (the server's own token is in the file \
            `token` of its data directory), or sign in at /login";
        return Error::Unauthorized(detail.into()).into_response();
    }
    let back = if matches!(*method, Method::GET | Method::HEAD) { object } else { "/" };
    Redirect::to(&login_address(back)).into_response()
}

/// The URL of the sign-in page, with the page that is opened afterwards.
pub(crate) fn login_address(back: &str) -> String {
    const ENCODED: &AsciiSet =
        &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');
    match back {
        "" | "/" => "/login".to_owned(),
        _ => format!("/login?next={}", utf8_percent_encode(back, ENCODED)),
    }
}

fn forbidden_response(caller: &Caller, scope: Scope, path: &str) -> Response {
    let name = caller.token().map_or("", |token| &token.name);
    let has = caller.scope().map_or("none", Scope::as_str);
    // Whether the person signed in with the person's own account. A session that began with a token's login link has only the token's rights.
    let is_own_session = |person: &&str| {
        caller.session().is_some() && caller.token().is_some_and(|token| token.id == principal(person))
    };
    let detail = if let Some(person) = caller.person().filter(is_own_session) {
        let roles = Role::ALL.into_iter().filter(|role| role.scope().allows(scope)).map(Role::as_str);
        let roles = roles.collect::<Vec<_>>().join(" or ");
        let what = if roles.is_empty() { "an agent's token".to_owned() } else { format!("the role {roles}") };
        format!("this needs {what}, which {person} does not have; ask an admin")
    } else if scope == Scope::Agent {
        format!(
            "agents join with a token of their own; the token {name:?} has the scope {has}; {AGENT_TOKEN_ADVICE}"
        )
    } else if let Some(person) =
        caller.person().filter(|_| caller.token().is_some_and(|token| token.scope.allows(scope)))
    {
        format!(
            "this needs the scope {scope}: the token {name:?} has it, but the role of the token's owner {person} allows only {has}; ask \
             an admin"
        )
    } else {
        format!("this needs a token of the scope {scope}, and the token {name:?} has the scope {has}")
    };
    error_response(caller, Error::Forbidden(detail), path)
}

/// The response of a refusal: problem details, or a page.
fn error_response(caller: &Caller, error: Error, path: &str) -> Response {
    if is_for_programs(path) {
        error.into_response()
    } else {
        render_for(caller.current_user(), PageError(error).into_response())
    }
}

/// Counts a request against the rate limit of its token or person. Requests of agents are limited by size instead (`agents/inbox.rs`,
/// `checkpoints/uploads.rs`).
fn check_token_rate(http: &HttpState, caller: &Caller) -> Result<(), Error> {
    let Some(token) = caller.token().filter(|_| caller.scope() != Some(Scope::Agent)) else { return Ok(()) };
    http.token_limit.take(token.id.as_str()).map_err(|seconds| {
        let detail = format!(
            "too many requests with this token or of this person; ask again in {seconds} s (`lockstep serve --token-requests-per-second` \
             sets how many are answered)"
        );
        Error::TooMany(detail, seconds)
    })
}

/// Sets a cookie for the URLs below `path`, or removes the cookie if `seconds` is 0. The cookie must be `SameSite=Lax`, because browsers
/// return from an OpenID provider through a link from the provider's site.
pub(crate) fn set_cookie(
    response: &mut Response,
    peer: &Peer,
    (name, path): (&str, &str),
    value: &str,
    seconds: u64,
) {
    let secure = if peer.is_https { "; Secure" } else { "" };
    let text = format!("{name}={value}; Path={path}; Max-Age={seconds}; HttpOnly; SameSite=Lax{secure}");
    if let Ok(value) = HeaderValue::from_str(&text) {
        response.headers_mut().append(header::SET_COOKIE, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_are_found_by_their_whole_name() {
        let mut headers = HeaderMap::new();
        headers.append("cookie", "a=1; lockstep_70=no; lockstep_7070=yes; b=2".parse().unwrap());
        headers.append("cookie", "xlockstep_7071=no;lockstep_7071=too".parse().unwrap());
        assert_eq!(cookie(&headers, "lockstep_7070"), Some("yes"));
        assert_eq!(cookie(&headers, "lockstep_7071"), Some("too"));
        assert_eq!(cookie(&headers, "lockstep_707"), None);
    }
}
