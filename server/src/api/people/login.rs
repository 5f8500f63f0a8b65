//! Signing in and out in a browser: with a name and a password, with a login link, or with a token.

use crate::api::prelude::*;
use crate::{
    api::{
        html::{Page, form_error, html},
        people::{self, NewPerson},
        server_url::ServerUrl,
    },
    auth::{
        Auth,
        access::{CODE_LIFE, NotSignedIn, Password, SESSION_LIFE, Secret},
    },
    config::ServeConfig,
    http::{
        authorize::{AuditSubject, SignedIn, set_cookie},
        error::PageError,
        extract::PageQuery,
        peer::Peer,
    },
    store::{PersonRow, SessionRow},
};
use axum::{Form, http::Method, response::Redirect};
use jiff::Timestamp;
use lockstep_protocol::{access::Scope, people::Role};
use lockstep_web::{
    layout::CurrentUser,
    login::{FirstAdminPage, LoginPage, ProviderButton},
};
use std::{net::IpAddr, time::Duration};

/// Maximum length of the path to return to, in bytes.
const MAX_NEXT_BYTES: usize = 2000;

/// Parameters of `GET /login`.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct LoginQuery {
    /// The code of a login link.
    code: Option<String>,
    /// Where the browser goes after the sign-in.
    next: Option<String>,
}

/// The forms of `POST /login`: a token, a name and a password, or the first person.
#[derive(Debug, Deserialize)]
pub(crate) struct LoginForm {
    #[serde(default)]
    token: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    password: Password,
    /// Whether the form makes the first person, an admin.
    #[serde(default)]
    setup: bool,
    next: Option<String>,
}

/// Returns the path to go to after signing in, which is always on this server (no open redirect).
pub(crate) fn return_path(next: Option<&str>) -> &str {
    let is_local = |next: &&str| {
        let is_plain = next.bytes().all(|byte| (0x21..0x7f).contains(&byte) && byte != b'\\');
        is_plain && next.len() <= MAX_NEXT_BYTES && next.starts_with('/') && !next.starts_with("//")
    };
    next.filter(is_local).unwrap_or("/jobs")
}

/// Whether the caller may make the first person: the caller is an admin, and the server has no people yet.
fn may_set_up(auth: &Auth, caller: Option<&Caller>) -> bool {
    let is_admin = caller.is_some_and(|caller| caller.may(Scope::Admin));
    is_admin && auth.access.must_authenticate && !auth.access.has_people()
}

/// `GET /login`: signs in with the code of a login link, or shows the form to sign in or to make the first person.
pub(crate) async fn show(
    State(auth): State<Arc<Auth>>,
    State(config): State<Arc<ServeConfig>>,
    caller: Option<Extension<Caller>>,
    Extension(peer): Extension<Peer>,
    method: Method,
    PageQuery(query): PageQuery<LoginQuery>,
) -> Page {
    let next = return_path(query.next.as_deref());
    // HEAD must not use the code, which is valid once, because link previews send HEAD before a person opens the link.
    let Some(code) = query.code.as_ref().filter(|_| method != Method::HEAD) else {
        return match caller {
            Some(Extension(caller)) if query.next.is_none() && may_set_up(&auth, Some(&caller)) => {
                set_up_form("", StatusCode::OK, "")
            }
            Some(_) => Ok(Redirect::to(next).into_response()),
            None => login_form(login_page(&auth, &config, next)),
        };
    };
    match auth.access.take_login_code(code) {
        Some((token_id, session_until)) => {
            let remaining = session_until
                .map(|until| Duration::try_from(until.duration_since(crate::now())).unwrap_or_default());
            let life = remaining.map_or(SESSION_LIFE, |remaining| remaining.min(SESSION_LIFE));
            Ok(sign_in(&auth, &peer, &token_id, next, life).await?)
        }
        // The link was opened again in a browser that is already signed in.
        None if caller.is_some() => Ok(Redirect::to(next).into_response()),
        None => {
            let link_error = "This link was already used, or is older than ten minutes.".into();
            let page = LoginPage { link_error, ..login_page(&auth, &config, next) };
            count_failed_attempt(&auth, peer.address, page)
        }
    }
}

/// `POST /login`
pub(crate) async fn submit(
    State(auth): State<Arc<Auth>>,
    State(config): State<Arc<ServeConfig>>,
    caller: Option<Extension<Caller>>,
    Extension(peer): Extension<Peer>,
    Form(input): Form<LoginForm>,
) -> Page {
    let next = return_path(input.next.as_deref());
    if input.setup {
        return set_up(&auth, caller.as_deref(), &peer, input).await;
    }
    // Names have no upper case, but phones begin words with it.
    let name = input.name.trim().to_lowercase();
    if !name.is_empty() {
        return match auth.access.authenticate_password(&name, input.password, peer.address).await {
            Ok(row) => Ok(sign_in_person(&auth, &peer, &row, next, SESSION_LIFE).await?),
            Err(NotSignedIn::Wrong) => {
                let password_error = "The name or the password is wrong.".into();
                login_form(LoginPage { name, password_error, ..login_page(&auth, &config, next) })
            }
            Err(other) => Err(PageError(people::refusal(other, peer.address))),
        };
    }
    let failed = |why: &str| {
        let page = LoginPage { token_error: why.into(), ..login_page(&auth, &config, next) };
        count_failed_attempt(&auth, peer.address, page)
    };
    let caller = auth.access.authenticate_token(input.token.trim()).ok();
    match caller.as_ref().and_then(Caller::token) {
        Some(token) if token.scope != Scope::Agent => {
            Ok(sign_in(&auth, &peer, &token.id, next, SESSION_LIFE).await?)
        }
        Some(_) => failed("A token with the scope agent cannot sign in. Use a token with another scope."),
        None => failed("This token is unknown to the server, or no longer valid."),
    }
}

/// Makes the first person, an admin, and signs that person in.
async fn set_up(auth: &Auth, caller: Option<&Caller>, peer: &Peer, input: LoginForm) -> Page {
    if !may_set_up(auth, caller) {
        let detail =
            "only an admin's token can make the first person, and only if the server has no people yet";
        return Err(PageError(Error::Forbidden(detail.into())));
    }
    let name = input.name.trim().to_owned();
    let new =
        NewPerson { name: name.clone(), role: Role::Admin, password: Some(input.password), subject: None };
    let must_be_first_person = true;
    match people::add(auth, new, must_be_first_person).await {
        Ok(row) => Ok(sign_in_person(auth, peer, &row, "/people", SESSION_LIFE).await?),
        // Somebody else has made the first person.
        Err(error @ Error::Conflict(_)) => Err(error.into()),
        Err(error) => {
            let (status, text) = form_error(error)?;
            set_up_form(&name, status, &text)
        }
    }
}

fn set_up_form(name: &str, status: StatusCode, error: &str) -> Page {
    let page = FirstAdminPage { name: name.to_owned(), error: error.to_owned(), user: CurrentUser::NOBODY };
    Ok((status, html(page)?).into_response())
}

fn login_form(page: LoginPage) -> Page {
    let is_refused =
        [&page.link_error, &page.password_error, &page.token_error].iter().any(|e| !e.is_empty());
    let status = if is_refused { StatusCode::UNAUTHORIZED } else { StatusCode::OK };
    Ok((status, html(page)?).into_response())
}

/// Returns the page to sign in with no error message. If the server has an OpenID provider, the page shows the provider's button. The button's
/// link uses the public URL, to which the provider redirects.
fn login_page(auth: &Auth, config: &ServeConfig, next: &str) -> LoginPage {
    let server = config.public_url.as_ref().map(ToString::to_string).unwrap_or_default();
    let provider = auth.oidc.as_ref().map(|oidc| ProviderButton {
        name: oidc.name().to_owned(),
        href: format!("{server}/login/oidc"),
        error: String::new(),
    });
    LoginPage {
        next: next.to_owned(),
        has_people: auth.access.has_people(),
        provider,
        ..LoginPage::default()
    }
}

/// Why a sign-in with the OpenID provider failed. The sign-in page shows the reason.
pub(crate) struct FailedSignIn {
    pub(super) status: StatusCode,
    pub(super) detail: String,
    /// Subject of the entry in the audit log.
    pub(super) about: Option<String>,
}

impl<E: Into<Error>> From<E> for FailedSignIn {
    fn from(error: E) -> Self {
        let (status, detail) = error.into().status_and_detail();
        Self { status, detail, about: None }
    }
}

impl FailedSignIn {
    /// Whether the failure counts towards the maximum number of attempts to sign in.
    pub(crate) fn is_counted(&self) -> bool {
        matches!(self.status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
    }
}

/// Returns the form to sign in, with the reason why the sign-in with the OpenID provider failed.
pub(crate) fn provider_failure_page(
    auth: &Auth,
    config: &ServeConfig,
    next: &str,
    why: FailedSignIn,
) -> Page {
    let mut page = login_page(auth, config, next);
    if let Some(provider) = &mut page.provider {
        provider.error = why.detail;
    }
    let mut response = (why.status, html(page)?).into_response();
    if let Some(about) = why.about {
        response.extensions_mut().insert(AuditSubject(about));
    }
    Ok(response)
}

/// Counts a failed attempt to sign in, and returns `page`, which has the reason, or an error after too many attempts.
fn count_failed_attempt(auth: &Auth, from: IpAddr, page: LoginPage) -> Page {
    match auth.access.attempts.count_failure(from) {
        Ok(()) => login_form(page),
        Err(wait) => Err(PageError(people::too_often_error(from, wait))),
    }
}

/// Makes a session of the lifetime `life` for a person who has just been authenticated.
///
/// # Errors
/// The person was changed since the authentication, or the store cannot be written.
pub(crate) async fn sign_in_person(
    auth: &Auth,
    peer: &Peer,
    row: &PersonRow,
    next: &str,
    life: Duration,
) -> Result<Response> {
    // The lock prevents changes of the person between this check and the session.
    let _one_at_a_time = auth.access.change_lock.lock().await;
    if auth.access.person(&row.person.name).as_ref() != Some(row) {
        return Err(Error::Unauthorized("this person was changed a moment ago; sign in again".into()));
    }
    sign_in(auth, peer, &row.principal(), next, life).await
}

/// Makes a session of the lifetime `life`. `token_id` is a token's id or a person's principal.
async fn sign_in(auth: &Auth, peer: &Peer, token_id: &str, next: &str, life: Duration) -> Result<Response> {
    let secret = Secret::new_plain()?;
    let now = crate::now();
    let session = SessionRow {
        hash: secret.hash,
        token_id: token_id.to_owned(),
        created_at: now,
        expires_at: now + life,
    };
    auth.store.add_session(&session).await?;
    if let Some(removed) = auth.access.put_session(session) {
        auth.store.remove_session(&removed).await?;
    }
    let who = auth.access.name_of(token_id).unwrap_or_default();
    let mut response = Redirect::to(next).into_response();
    set_cookie(&mut response, peer, (&auth.cookie_name, "/"), &secret.text, life.as_secs());
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
    set_cookie(&mut response, &peer, (&auth.cookie_name, "/"), "", 0);
    Ok(response)
}

/// A link that signs a browser in.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LoginLink {
    /// The link's URL, which is valid once.
    url: String,
    expires_at: Timestamp,
}

/// Make a link that signs a browser in
///
/// The link is valid once, for ten minutes. The session that it makes has the rights of this request's token and ends when that token
/// expires. If this request belongs to a session, the new session expires no later than that session.
#[utoipa::path(post, path = "/login-links", tag = "access",
    responses((status = 201, body = LoginLink), (status = 409, body = Problem, description = "The server runs without authentication")))]
pub(crate) async fn link(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    ServerUrl(server): ServerUrl,
) -> Result<(StatusCode, Json<LoginLink>)> {
    let Some(token) = caller.token() else {
        let detail = "this server runs with --no-auth, so nobody needs to sign in; open the server's URL";
        return Err(Error::Conflict(detail.into()));
    };
    let code = auth.access.codes.make(&token.id, caller.expires_at())?;
    let url = format!("{server}/login?code={code}");
    Ok((StatusCode::CREATED, Json(LoginLink { url, expires_at: crate::now() + CODE_LIFE })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_return_path_stays_on_this_server() {
        for path in ["/", "/jobs", "/jobs?state=running", "/login"] {
            assert_eq!(return_path(Some(path)), path);
        }
        let (longest, longer) =
            (format!("/{}", "a".repeat(MAX_NEXT_BYTES - 1)), format!("/{}", "a".repeat(MAX_NEXT_BYTES)));
        assert_eq!(return_path(Some(&longest)), longest);
        for other in [
            "",
            "//evil.example",
            "/\\evil.example",
            "/\t/evil.example",
            "http://evil.example",
            "javascript:alert(1)",
            "/a\nb",
            "jobs",
            &longer,
        ] {
            assert_eq!(return_path(Some(other)), "/jobs", "{other}");
        }
        assert_eq!(return_path(None), "/jobs");
    }
}
