//! Signing in with the OpenID provider: the redirect to the provider, and the return. `auth::oidc` has the protocol. This module maps
//! accounts to people.

use super::login::{self, FailedSignIn};
use crate::api::prelude::*;
use crate::{
    api::{html::Page, people, server_url::ServerUrl},
    auth::{
        Auth,
        access::SignsInAs,
        oidc::{Account, Answer, Oidc, OidcError, PendingSignIn, SIGN_IN_LIFE},
    },
    config::ServeConfig,
    http::{
        authorize::{AuditSubject, cookie, set_cookie},
        error::PageError,
        extract::PageQuery,
        peer::Peer,
    },
    store::{JobFilter, PersonRow},
};
use axum::{http::HeaderMap, response::Redirect};
use std::time::Duration;

/// Lifetime of a session. It is shorter than the lifetime of a session with a password, so that people who are locked out at the provider
/// lose access soon.
const SESSION_LIFE: Duration = Duration::from_secs(24 * 3600);

/// Path of the cookie that a browser keeps while it is at the provider.
const COOKIE_PATH: &str = "/login/oidc";

/// Parameters of `GET /login/oidc`.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct BeginQuery {
    /// Where the browser goes after the sign-in.
    next: Option<String>,
}

fn provider(auth: &Auth) -> Result<&Oidc, PageError> {
    let detail = "this server has no OpenID provider (`lockstep serve --oidc-issuer`)";
    auth.oidc.as_ref().ok_or_else(|| PageError(Error::NotFound(detail.into())))
}

/// `GET /login/oidc`: redirects to the provider.
pub(crate) async fn begin(
    State(auth): State<Arc<Auth>>,
    State(config): State<Arc<ServeConfig>>,
    Extension(peer): Extension<Peer>,
    ServerUrl(server): ServerUrl,
    PageQuery(query): PageQuery<BeginQuery>,
) -> Page {
    let oidc = provider(&auth)?;
    let next = login::return_path(query.next.as_deref());
    match oidc.begin(&format!("{server}/login/oidc/callback"), next, peer.address).await {
        Ok((location, cookie_value)) => {
            let mut response = Redirect::to(&location).into_response();
            let cookie_name = provider_cookie_name(&auth);
            let seconds = SIGN_IN_LIFE.as_secs();
            set_cookie(&mut response, &peer, (&cookie_name, COOKIE_PATH), &cookie_value, seconds);
            Ok(response)
        }
        Err(error) => login::provider_failure_page(&auth, &config, next, error.into()),
    }
}

/// `GET /login/oidc/callback`: handles the return from the provider.
pub(crate) async fn finish(
    State(auth): State<Arc<Auth>>,
    State(config): State<Arc<ServeConfig>>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    PageQuery(answer): PageQuery<Answer>,
) -> Page {
    let oidc = provider(&auth)?;
    let cookie_name = provider_cookie_name(&auth);
    let Some(pending) = oidc.take_sign_in(&answer.state, cookie(&headers, &cookie_name)) else {
        let detail = "This sign-in was begun in another browser, is finished already, or is older than ten minutes. Begin again.";
        let refused = FailedSignIn { status: StatusCode::BAD_REQUEST, detail: detail.into(), about: None };
        return login::provider_failure_page(&auth, &config, "/jobs", refused);
    };
    let too_often = |wait| PageError(people::too_often_error(peer.address, wait));
    // The attempt is counted before the provider is asked, so that requests that the client aborts are also counted.
    auth.access.attempts.count_attempt(peer.address).map_err(too_often)?;
    let next = pending.next.clone();
    let mut response = match sign_in(&auth, oidc, &peer, pending, answer).await {
        Ok(response) => {
            auth.access.attempts.uncount_attempt(peer.address);
            response
        }
        Err(refused) => {
            if !refused.is_counted() {
                auth.access.attempts.uncount_attempt(peer.address);
            }
            login::provider_failure_page(&auth, &config, &next, refused)?
        }
    };
    set_cookie(&mut response, &peer, (&cookie_name, COOKIE_PATH), "", 0);
    Ok(response)
}

/// Finishes a sign-in.
async fn sign_in(
    auth: &Auth,
    oidc: &Oidc,
    peer: &Peer,
    pending: PendingSignIn,
    answer: Answer,
) -> Result<Response, FailedSignIn> {
    let account = oidc.finish(&pending, answer).await?;
    let (row, change) = find_or_add_person(auth, oidc, account).await?;
    let mut response = login::sign_in_person(auth, peer, &row, &pending.next, SESSION_LIFE).await?;
    if let Some(change) = change {
        response.extensions_mut().insert(AuditSubject(change));
    }
    Ok(response)
}

/// Returns the person for an account, and a text for the audit log if the person was added or changed. A new person is added if the
/// configuration allows new people.
async fn find_or_add_person(
    auth: &Auth,
    oidc: &Oidc,
    account: Account,
) -> Result<(PersonRow, Option<String>), FailedSignIn> {
    let Account { identity, name, role } = account;
    let subject = identity.subject.clone();
    // Quoting fails only for NUL, which no subject contains.
    let quoted_subject = shlex::try_quote(&subject).unwrap_or_default();
    let refuse = |detail: String| {
        let about = Some(format!("subject {subject:?}"));
        Err(FailedSignIn { status: StatusCode::FORBIDDEN, detail, about })
    };
    let _one_at_a_time = auth.access.change_lock.lock().await;
    match auth.access.find_by_identity(&identity) {
        SignsInAs::Person(row) if row.person.disabled_at.is_some() => {
            return refuse(format!("{} may no longer use this server; ask an admin.", row.person.name));
        }
        SignsInAs::Person(mut row) => {
            if oidc.config.groups.is_none() {
                return Ok((row, None));
            }
            let Some(role) = role else {
                return refuse(
                    "You are in none of the groups that may use this server; ask an admin.".into(),
                );
            };
            if row.person.role == role {
                return Ok((row, None));
            }
            row.person.role = role;
            auth.store.put_person(&row).await?;
            auth.access.put_person(row.clone());
            return Ok((row, Some(format!("now {role}, by the groups"))));
        }
        SignsInAs::Removed => {
            return refuse(format!(
                "An admin removed the person of this account. To add the account again, an admin runs: \
                 lockstep user add NAME --subject {quoted_subject}"
            ));
        }
        SignsInAs::Nobody => {}
    }
    let advice = |name: &str| {
        format!(
            "An admin adds you with: lockstep user add {name} --subject {quoted_subject} (or, if you already have a name here: \
             lockstep user link NAME --subject {quoted_subject})"
        )
    };
    let name_to_add = name.as_deref().unwrap_or("NAME");
    let Some(role) = role else {
        return refuse(format!("No person has this account yet. {}", advice(name_to_add)));
    };
    let name = match name {
        Ok(name) => name,
        Err(why) => return refuse(format!("You cannot be added: {why}. {}", advice("NAME"))),
    };
    if let Some(why) = why_taken(auth, &name).await? {
        return refuse(format!("You cannot be added as {name:?}: {why}. {}", advice("ANOTHER-NAME")));
    }
    if let Err(error) = people::check_can_add(auth, &name, Some(&identity)) {
        return refuse(format!("You cannot be added: {}.", error.detail()));
    }
    let row = people::insert(auth, name, role, None, Some(identity)).await?;
    Ok((row, Some(format!("added, {role}, subject {subject:?}"))))
}

/// Returns the reason why a sign-in cannot add a person with this name; `None` if it can. Names are chosen at the provider, and a new
/// person would own the jobs and datasets of a removed person or a token with the same name.
async fn why_taken(auth: &Auth, name: &str) -> Result<Option<&'static str>> {
    if auth.access.person(name).is_some() {
        return Ok(Some("another person has this name"));
    }
    let has_name = |owner: Option<&String>| owner.is_some_and(|owner| owner == name);
    let of_name = JobFilter { owner: Some(name.to_owned()), limit: 1, ..JobFilter::default() };
    let is_owner = auth
        .access
        .tokens()
        .iter()
        .any(|token| (token.owner.is_none() && token.name == name) || has_name(token.owner.as_ref()))
        || !auth.store.jobs(&of_name).await?.jobs.is_empty()
        || auth.store.datasets().await?.iter().any(|dataset| has_name(dataset.owner.as_ref()));
    Ok(is_owner.then_some("tokens, jobs or datasets have an owner with this name, and would become yours"))
}

impl From<OidcError> for Error {
    fn from(error: OidcError) -> Self {
        match error {
            OidcError::Unavailable(detail) => Error::Unavailable(detail),
            OidcError::Declined(detail) => Error::BadRequest(detail),
            OidcError::Refused(detail) => Error::Unauthorized(detail),
        }
    }
}

/// Name of the cookie that a browser keeps while it is at the provider.
fn provider_cookie_name(auth: &Auth) -> String {
    format!("{}_oidc", auth.cookie_name)
}
