//! Signing in and out in a browser: with a name and a password, with a link's code, or with a token that is pasted.

use crate::{
    api::{
        html::Page,
        people::{self, NewPerson},
        server_url::ServerUrl,
    },
    auth::{
        Auth,
        access::{Caller, NotSignedIn, Password, SESSION_LIFE, Secret},
    },
    http::{
        error::{Error, PageError, Problem, Result},
        extract::PageQuery,
        gate::{AuditSubject, SignedIn, set_cookie},
        ingress::{Ingress, Peer},
    },
    store::{PersonRow, SessionRow},
};
use axum::{
    Extension, Form, Json,
    extract::State,
    http::{Method, StatusCode, header},
    response::{Html, IntoResponse, Redirect, Response},
};
use jiff::Timestamp;
use lockstep_protocol::{access::Scope, people::Role};
use lockstep_web::login::{LoginPage, ProviderButton};
use serde::{Deserialize, Serialize};
use std::{net::IpAddr, sync::Arc, time::Duration};
use utoipa::ToSchema;

/// Longest address to return to, in bytes.
const NEXT_BYTES: usize = 2000;
const LINK_LIFE: Duration = Duration::from_secs(600);

/// `GET /login`
#[derive(Debug, Default, Deserialize)]
pub(crate) struct LoginQuery {
    #[serde(default)]
    code: Option<String>,
    #[serde(default)]
    next: Option<String>,
}

/// `POST /login`
#[derive(Debug, Deserialize)]
pub(crate) struct LoginForm {
    #[serde(default)]
    token: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    password: Password,
    /// Makes the first person, as an admin.
    #[serde(default)]
    setup: bool,
    #[serde(default)]
    next: Option<String>,
}

/// A page of this server, whatever the address says: nobody is sent elsewhere after signing in.
pub(crate) fn return_path(next: Option<&str>) -> &str {
    let is_ours = |next: &&str| {
        let plain = next.bytes().all(|byte| (0x21..0x7f).contains(&byte) && byte != b'\\');
        plain && next.len() <= NEXT_BYTES && next.starts_with('/') && !next.starts_with("//")
    };
    next.filter(is_ours).unwrap_or("/jobs")
}

/// Whether this is an admin where there is nobody yet: one who may make the first person.
fn may_set_up(auth: &Auth, caller: Option<&Caller>) -> bool {
    let is_admin = caller.is_some_and(|caller| caller.may(Scope::Admin));
    is_admin && auth.access.is_required() && !auth.access.has_people()
}

/// `GET /login`: with a code, signs in; else the form, or the one for the first person.
pub(crate) async fn show(
    State(auth): State<Arc<Auth>>,
    State(ingress): State<Arc<Ingress>>,
    caller: Option<Extension<Caller>>,
    Extension(peer): Extension<Peer>,
    method: Method,
    PageQuery(query): PageQuery<LoginQuery>,
) -> Page {
    let next = return_path(query.next.as_deref());
    // HEAD, by which links are looked at before a person opens them, signs nobody in: a code is good once.
    let Some(code) = query.code.as_ref().filter(|_| method != Method::HEAD) else {
        return match caller {
            Some(Extension(caller)) if query.next.is_none() && may_set_up(&auth, Some(&caller)) => {
                set_up_form("", StatusCode::OK, "")
            }
            Some(_) => Ok(Redirect::to(next).into_response()),
            None => form(&auth, &ingress, next, "", None),
        };
    };
    match auth.access.take_login_code(code) {
        Some((token_id, until)) => {
            let left =
                until.map(|until| Duration::try_from(until.duration_since(crate::now())).unwrap_or_default());
            let life = left.map_or(SESSION_LIFE, |left| left.min(SESSION_LIFE));
            Ok(sign_in(&auth, &peer, &token_id, next, life).await?)
        }
        // Opened again, in a browser that is signed in.
        None if caller.is_some() => Ok(Redirect::to(next).into_response()),
        None => failed(
            &auth,
            &ingress,
            peer.address,
            next,
            "That link was used, or is older than ten minutes. `lockstep login-link` prints another.",
        ),
    }
}

/// `POST /login`
pub(crate) async fn submit(
    State(auth): State<Arc<Auth>>,
    State(ingress): State<Arc<Ingress>>,
    caller: Option<Extension<Caller>>,
    Extension(peer): Extension<Peer>,
    Form(input): Form<LoginForm>,
) -> Page {
    let next = return_path(input.next.as_deref());
    if input.setup {
        return set_up(&auth, caller.as_deref(), &peer, input).await;
    }
    let name = input.name.trim();
    if !name.is_empty() {
        return match auth.access.by_password(name, input.password, peer.address).await {
            Ok(row) => Ok(sign_in_person(&auth, &peer, &row, next, SESSION_LIFE).await?),
            Err(NotSignedIn::Wrong) => {
                form(&auth, &ingress, next, name, Some("The name or the password is wrong."))
            }
            Err(other) => Err(PageError(people::refusal(other, peer.address))),
        };
    }
    let caller = auth.access.by_token(input.token.trim()).ok();
    match caller.as_ref().and_then(Caller::token) {
        Some(token) if token.scope != Scope::Agent => {
            Ok(sign_in(&auth, &peer, &token.id, next, SESSION_LIFE).await?)
        }
        Some(_) => failed(
            &auth,
            &ingress,
            peer.address,
            next,
            "That token is an agent's. Sign in with one of another scope.",
        ),
        None => failed(
            &auth,
            &ingress,
            peer.address,
            next,
            "This server does not know that token, or it is no longer valid.",
        ),
    }
}

/// Makes the first person, an admin, and signs it in.
async fn set_up(auth: &Auth, caller: Option<&Caller>, peer: &Peer, input: LoginForm) -> Page {
    if !may_set_up(auth, caller) {
        let detail = "only an admin's token makes the first person, and only where there is nobody yet";
        return Err(PageError(Error::Forbidden(detail.into())));
    }
    let name = input.name.trim().to_owned();
    let new =
        NewPerson { name: name.clone(), role: Role::Admin, password: Some(input.password), subject: None };
    match people::add(auth, new, true).await {
        Ok(row) => Ok(sign_in_person(auth, peer, &row, "/people", SESSION_LIFE).await?),
        Err(Error::Invalid(mistakes)) => {
            let each = mistakes.iter().map(|m| format!("{} {}", m.pointer.trim_start_matches('/'), m.detail));
            let error = each.collect::<Vec<_>>().join("; ");
            set_up_form(&name, StatusCode::UNPROCESSABLE_ENTITY, &error)
        }
        Err(other) => Err(PageError(other)),
    }
}

fn set_up_form(name: &str, status: StatusCode, error: &str) -> Page {
    let page = LoginPage {
        next: "/jobs".into(),
        error: error.to_owned(),
        name: name.to_owned(),
        has_people: false,
        setup: true,
        provider: None,
    };
    let html = page.render().map_err(|e| PageError(Error::Internal(e.to_string())))?;
    Ok((status, Html(html)).into_response())
}

fn form(auth: &Auth, ingress: &Ingress, next: &str, name: &str, error: Option<&str>) -> Page {
    let page = LoginPage {
        next: next.to_owned(),
        error: error.unwrap_or_default().to_owned(),
        name: name.to_owned(),
        has_people: auth.access.has_people(),
        setup: false,
        provider: button(auth, ingress, ""),
    };
    let html = page.render().map_err(|e| PageError(Error::Internal(e.to_string())))?;
    let status = if error.is_some() { StatusCode::UNAUTHORIZED } else { StatusCode::OK };
    Ok((status, Html(html)).into_response())
}

/// The way to the OpenID provider, where there is one. It begins at the address that people use, to which the provider sends them back.
fn button(auth: &Auth, ingress: &Ingress, error: &str) -> Option<ProviderButton> {
    let server = ingress.public_url.as_ref().map(ToString::to_string).unwrap_or_default();
    auth.oidc.as_ref().map(|oidc| ProviderButton {
        name: oidc.name().to_owned(),
        href: format!("{server}/login/oidc"),
        error: error.to_owned(),
    })
}

/// Why nobody was signed in with the OpenID provider.
pub(crate) struct Refused {
    status: StatusCode,
    detail: String,
    /// For the audit log.
    about: Option<String>,
}

impl Refused {
    /// What the browser brings is not to be believed.
    pub(crate) fn unknown(detail: String) -> Self {
        Self { status: StatusCode::UNAUTHORIZED, detail, about: None }
    }

    /// Nothing that somebody could guess with: a sign-in that was not begun in this browser, or that the provider did not make.
    pub(crate) fn not_begun(detail: String) -> Self {
        Self { status: StatusCode::BAD_REQUEST, detail, about: None }
    }

    /// The account is real, and may not come in.
    pub(crate) fn not_let_in(detail: String, about: String) -> Self {
        Self { status: StatusCode::FORBIDDEN, detail, about: Some(about) }
    }

    pub(crate) fn unavailable(detail: String) -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, detail, about: None }
    }

    /// Whether it counts as an attempt that failed.
    pub(crate) fn is_failure(&self) -> bool {
        matches!(self.status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
    }
}

/// The form, which says why nobody was signed in with the OpenID provider.
pub(crate) fn refused(auth: &Auth, ingress: &Ingress, next: &str, why: Refused) -> Page {
    let page = LoginPage {
        next: next.to_owned(),
        error: String::new(),
        name: String::new(),
        has_people: auth.access.has_people(),
        setup: false,
        provider: button(auth, ingress, &why.detail),
    };
    let html = page.render().map_err(|e| PageError(Error::Internal(e.to_string())))?;
    let mut response = (why.status, Html(html)).into_response();
    if let Some(about) = why.about {
        response.extensions_mut().insert(AuditSubject(about));
    }
    Ok(response)
}

fn failed(auth: &Auth, ingress: &Ingress, from: IpAddr, next: &str, why: &str) -> Page {
    match auth.access.sign_in_failed(from) {
        Ok(()) => form(auth, ingress, next, "", Some(why)),
        Err(wait) => Err(PageError(people::too_often(from, wait))),
    }
}

/// Signs a person in who has shown a moment ago who it is, for so long.
///
/// # Errors
/// The person has changed since, or the store's.
pub(crate) async fn sign_in_person(
    auth: &Auth,
    peer: &Peer,
    row: &PersonRow,
    next: &str,
    life: Duration,
) -> Result<Response> {
    // Nobody changes the password, or disables the person, between this check and the session.
    let _one_at_a_time = auth.access.changing.lock().await;
    if auth.access.person(&row.person.name).as_ref() != Some(row) {
        return Err(Error::Unauthorized("this person was changed a moment ago; sign in again".into()));
    }
    sign_in(auth, peer, &row.principal(), next, life).await
}

async fn sign_in(auth: &Auth, peer: &Peer, token_id: &str, next: &str, life: Duration) -> Result<Response> {
    let secret = Secret::plain()?;
    let now = crate::now();
    let session = SessionRow {
        hash: secret.hash,
        token_id: token_id.to_owned(),
        created_at: now,
        expires_at: now + life,
    };
    auth.store.add_session(&session).await?;
    for gone in auth.access.put_session(session) {
        auth.store.remove_session(&gone).await?;
    }
    let who = auth.access.name_of(token_id).unwrap_or_default();
    let mut response = Redirect::to(next).into_response();
    if let Some(cookie) = set_cookie(auth, peer, &secret.text, life.as_secs()) {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response.extensions_mut().insert(SignedIn { who, token_id: token_id.to_owned() });
    Ok(response)
}

/// `POST /logout`
pub(crate) async fn sign_out(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Extension(peer): Extension<Peer>,
) -> Page {
    if let Some(session) = caller.session() {
        auth.store.remove_session(session).await?;
        auth.access.remove_session(session);
    }
    let mut response = Redirect::to("/login").into_response();
    if let Some(cookie) = set_cookie(&auth, &peer, "", 0) {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    Ok(response)
}

/// A link that signs a browser in.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LoginLink {
    /// Good once.
    url: String,
    #[schema(value_type = String)]
    expires_at: Timestamp,
}

/// Make a link that signs a browser in
///
/// Once, within ten minutes, with what the token of this request may do, and until it expires: a session that is made by a link of another
/// session ends with that one.
#[utoipa::path(post, path = "/login-links", tag = "access",
    responses((status = 201, body = LoginLink), (status = 409, body = Problem, description = "This server asks nobody who they are")))]
pub(crate) async fn link(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server): ServerUrl,
) -> Result<(StatusCode, Json<LoginLink>)> {
    let Some(token) = caller.token() else {
        let detail = "this server runs with --no-auth: open its address, there is nothing to sign in to";
        return Err(Error::Conflict(detail.into(), None));
    };
    let code = auth.access.login_code(&token.id, caller.expires_at())?;
    let url = format!("{server}/login?code={code}");
    Ok((StatusCode::CREATED, Json(LoginLink { url, expires_at: crate::now() + LINK_LIFE })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_back_stays_on_this_server() {
        for ours in ["/", "/jobs", "/jobs?state=running", "/login"] {
            assert_eq!(return_path(Some(ours)), ours);
        }
        let (longest, longer) =
            (format!("/{}", "a".repeat(NEXT_BYTES - 1)), format!("/{}", "a".repeat(NEXT_BYTES)));
        assert_eq!(return_path(Some(&longest)), longest);
        for other in
            ["", "//evil.example", "/\\evil.example", "http://evil.example", "/a\nb", "jobs", &longer]
        {
            assert_eq!(return_path(Some(other)), "/jobs", "{other}");
        }
        assert_eq!(return_path(None), "/jobs");
    }
}
