//! Signing in and out in a browser: with a link's code, or with a token that is pasted.

use super::{extract::PageQuery, pages::Page, server_url::ServerUrl};
use crate::{
    access::{Caller, SESSION_LIFE, Secret},
    app::App,
    error::{Error, PageError, Problem, Result},
    gate::{SignedIn, set_cookie},
    ingress::Peer,
    store::SessionRow,
};
use axum::{
    Extension, Form, Json,
    extract::State,
    http::{StatusCode, header},
    response::{Html, IntoResponse, Redirect, Response},
};
use jiff::Timestamp;
use lockstep_protocol::access::Scope;
use lockstep_web::login::LoginPage;
use serde::{Deserialize, Serialize};
use std::{net::IpAddr, time::Duration};
use utoipa::ToSchema;

/// Longest way back, in bytes.
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
    next: Option<String>,
}

/// A page of this server, whatever the address says: the way back must not lead elsewhere.
fn way_back(next: Option<&str>) -> &str {
    let is_ours = |next: &&str| {
        let plain = next.bytes().all(|byte| (0x21..0x7f).contains(&byte) && byte != b'\\');
        plain && next.len() <= NEXT_BYTES && next.starts_with('/') && !next.starts_with("//")
    };
    next.filter(is_ours).unwrap_or("/jobs")
}

/// `GET /login`: with a code, signs in; else the form.
pub(crate) async fn show(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    Extension(peer): Extension<Peer>,
    PageQuery(query): PageQuery<LoginQuery>,
) -> Page {
    let next = way_back(query.next.as_deref());
    let Some(code) = &query.code else {
        return match caller {
            Some(_) => Ok(Redirect::to(next).into_response()),
            None => form(next, None),
        };
    };
    match app.access.take_login_code(code) {
        Some(token_id) => Ok(sign_in(&app, &peer, &token_id, next).await?),
        // Opened again, in a browser that is signed in.
        None if caller.is_some() => Ok(Redirect::to(next).into_response()),
        None => failed(
            &app,
            peer.address,
            next,
            "That link was used, or is older than ten minutes. `lockstep login-link` prints another.",
        ),
    }
}

/// `POST /login`
pub(crate) async fn submit(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Form(input): Form<LoginForm>,
) -> Page {
    let next = way_back(input.next.as_deref());
    let caller = app.access.by_token(input.token.trim()).ok();
    match caller.as_ref().and_then(Caller::token) {
        Some(token) if token.scope != Scope::Agent => Ok(sign_in(&app, &peer, &token.id, next).await?),
        Some(_) => {
            failed(&app, peer.address, next, "That token is an agent's. Sign in with one of another scope.")
        }
        None => failed(
            &app,
            peer.address,
            next,
            "This server does not know that token, or it is no longer valid.",
        ),
    }
}

fn form(next: &str, error: Option<&str>) -> Page {
    let page = LoginPage { next: next.to_owned(), error: error.unwrap_or_default().to_owned() };
    let html = page.render().map_err(|e| PageError(Error::Internal(e.to_string())))?;
    let status = if error.is_some() { StatusCode::UNAUTHORIZED } else { StatusCode::OK };
    Ok((status, Html(html)).into_response())
}

fn failed(app: &App, from: IpAddr, next: &str, why: &str) -> Page {
    match app.access.sign_in_failed(from) {
        Ok(()) => form(next, Some(why)),
        Err(wait) => Err(PageError(Error::TooMany(
            format!("too many attempts to sign in from {}; try again in {} s", from, wait.as_secs() + 1),
            wait.as_secs() + 1,
        ))),
    }
}

async fn sign_in(app: &App, peer: &Peer, token_id: &str, next: &str) -> Result<Response> {
    let secret = Secret::plain()?;
    let now = crate::now();
    let session = SessionRow {
        hash: secret.hash,
        token_id: token_id.to_owned(),
        created_at: now,
        expires_at: now + SESSION_LIFE,
    };
    app.store.add_session(&session).await?;
    for gone in app.access.put_session(session) {
        app.store.remove_session(&gone).await?;
    }
    let who = app.access.token(token_id).map(|row| row.token.name).unwrap_or_default();
    let mut response = Redirect::to(next).into_response();
    if let Some(cookie) = set_cookie(app, peer, &secret.text, SESSION_LIFE.as_secs()) {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response.extensions_mut().insert(SignedIn { who, token_id: token_id.to_owned() });
    Ok(response)
}

/// `POST /logout`
pub(crate) async fn sign_out(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Extension(peer): Extension<Peer>,
) -> Page {
    if let Some(session) = caller.session() {
        app.store.remove_session(session).await?;
        app.access.remove_session(session);
    }
    let mut response = Redirect::to("/login").into_response();
    if let Some(cookie) = set_cookie(&app, &peer, "", 0) {
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
/// Once, within ten minutes, with what the token of this request may do.
#[utoipa::path(post, path = "/login-links", tag = "access",
    responses((status = 201, body = LoginLink), (status = 409, body = Problem, description = "This server asks nobody who they are")))]
pub(crate) async fn link(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server): ServerUrl,
) -> Result<(StatusCode, Json<LoginLink>)> {
    let Some(token) = caller.token() else {
        let detail = "this server runs with --no-auth: open its address, there is nothing to sign in to";
        return Err(Error::Conflict(detail.into(), None));
    };
    let code = app.access.login_code(&token.id)?;
    let url = format!("{server}/login?code={code}");
    Ok((StatusCode::CREATED, Json(LoginLink { url, expires_at: crate::now() + LINK_LIFE })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_back_stays_on_this_server() {
        for ours in ["/", "/jobs", "/jobs?state=running", "/login"] {
            assert_eq!(way_back(Some(ours)), ours);
        }
        let (longest, longer) =
            (format!("/{}", "a".repeat(NEXT_BYTES - 1)), format!("/{}", "a".repeat(NEXT_BYTES)));
        assert_eq!(way_back(Some(&longest)), longest);
        for other in
            ["", "//evil.example", "/\\evil.example", "http://evil.example", "/a\nb", "jobs", &longer]
        {
            assert_eq!(way_back(Some(other)), "/jobs", "{other}");
        }
        assert_eq!(way_back(None), "/jobs");
    }
}
