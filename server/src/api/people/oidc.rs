//! Signing in with the OpenID provider: the redirect to the provider, and the return. `auth::oidc` has the protocol. This module maps
//! accounts to people.

use super::login::{self, Refused};
use crate::{
    api::{html::Page, people, server_url::ServerUrl},
    auth::{
        Auth,
        access::SignsInAs,
        oidc::{Account, Answer, Oidc, OidcError, OpenRequest, REQUEST_LIFE},
    },
    http::{
        error::{Error, PageError, Result},
        extract::PageQuery,
        gate::{AuditSubject, cookie},
        ingress::{Ingress, Peer},
    },
    store::{JobFilter, PersonRow},
};
use axum::{
    Extension,
    extract::State,
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Redirect, Response},
};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;

/// Duration of a session. It is shorter than that of a session with a password, so that people who are locked out at the provider lose
/// access soon.
const SESSION_LIFE: Duration = Duration::from_secs(24 * 3600);

/// `GET /login/oidc`
#[derive(Debug, Default, Deserialize)]
pub(crate) struct BeginQuery {
    next: Option<String>,
}

/// `GET /login/oidc/callback`: parameters from the provider.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CallbackQuery {
    state: String,
    code: Option<String>,
    error: Option<String>,
    error_description: Option<String>,
    iss: Option<String>,
}

fn provider(auth: &Auth) -> std::result::Result<&Oidc, PageError> {
    let detail = "this server has no OpenID provider (`lockstep serve --oidc-issuer`)";
    auth.oidc.as_ref().ok_or_else(|| PageError(Error::NotFound(detail.into())))
}

/// `GET /login/oidc`: redirects to the provider.
pub(crate) async fn begin(
    State(auth): State<Arc<Auth>>,
    State(ingress): State<Arc<Ingress>>,
    Extension(peer): Extension<Peer>,
    ServerUrl(server): ServerUrl,
    PageQuery(query): PageQuery<BeginQuery>,
) -> Page {
    let oidc = provider(&auth)?;
    let next = login::return_path(query.next.as_deref());
    match oidc.begin(&format!("{server}/login/oidc/callback"), next, peer.address).await {
        Ok(begun) => {
            let mut response = Redirect::to(&begun.location).into_response();
            set_cookie(&auth, &peer, &begun.cookie, REQUEST_LIFE.as_secs(), &mut response);
            Ok(response)
        }
        Err(error) => login::refused(&auth, &ingress, next, error.into()),
    }
}

/// `GET /login/oidc/callback`: handles the return from the provider.
pub(crate) async fn finish(
    State(auth): State<Arc<Auth>>,
    State(ingress): State<Arc<Ingress>>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    PageQuery(query): PageQuery<CallbackQuery>,
) -> Page {
    let oidc = provider(&auth)?;
    let Some(request) = oidc.take(&query.state, cookie(&headers, &own_cookie(&auth))) else {
        let detail = "This sign-in was begun in another browser, is finished already, or is older than ten minutes. Begin again.";
        return login::refused(&auth, &ingress, "/jobs", Refused::not_begun(detail.into()));
    };
    // Counts the attempt before the request to the provider, so that aborted requests count, too.
    let too_often = |wait| PageError(people::too_often(peer.address, wait));
    auth.access.try_sign_in(peer.address).map_err(too_often)?;
    let next = request.next.clone();
    let mut response = match sign_in(&auth, oidc, &peer, request, query).await? {
        Ok(response) => {
            auth.access.sign_in_was_right(peer.address);
            response
        }
        Err(refused) => {
            if !refused.is_failure() {
                auth.access.sign_in_was_right(peer.address);
            }
            login::refused(&auth, &ingress, &next, refused)?
        }
    };
    set_cookie(&auth, &peer, "", 0, &mut response);
    Ok(response)
}

async fn sign_in(
    auth: &Auth,
    oidc: &Oidc,
    peer: &Peer,
    request: OpenRequest,
    query: CallbackQuery,
) -> Result<std::result::Result<Response, Refused>> {
    let answer = Answer {
        code: query.code,
        error: query.error,
        description: query.error_description,
        issuer: query.iss,
    };
    let account = match oidc.finish(&request, answer).await {
        Ok(account) => account,
        Err(error) => return Ok(Err(error.into())),
    };
    let (row, done) = match person(auth, oidc, account).await? {
        Ok(found) => found,
        Err(refused) => return Ok(Err(refused)),
    };
    let mut response = login::sign_in_person(auth, peer, &row, &request.next, SESSION_LIFE).await?;
    if let Some(done) = done {
        response.extensions_mut().insert(AuditSubject(done));
    }
    Ok(Ok(response))
}

/// Returns the person for an account, and a text for the audit log if the person was added or changed. New people are added if the
/// configuration allows it.
async fn person(
    auth: &Auth,
    oidc: &Oidc,
    account: Account,
) -> Result<std::result::Result<(PersonRow, Option<String>), Refused>> {
    let Account { identity, name, role } = account;
    let subject = identity.subject.clone();
    let refuse = |detail: String| Ok(Err(Refused::not_let_in(detail, format!("subject {subject:?}"))));
    let _one_at_a_time = auth.access.changing.lock().await;
    match auth.access.by_identity(&identity) {
        SignsInAs::Person(row) if row.person.disabled_at.is_some() => {
            return refuse(format!("{} may no longer use this server; ask an admin.", row.person.name));
        }
        SignsInAs::Person(mut row) => {
            if oidc.config.groups.is_none() {
                return Ok(Ok((row, None)));
            }
            let Some(role) = role else {
                return refuse(
                    "You are in none of the groups that may use this server; ask an admin.".into(),
                );
            };
            if row.person.role == role {
                return Ok(Ok((row, None)));
            }
            row.person.role = role;
            auth.store.put_person(&row).await?;
            auth.access.put_person(row.clone());
            return Ok(Ok((row, Some(format!("now {role}, by the groups")))));
        }
        SignsInAs::Removed => {
            return refuse(format!(
                "An admin removed the person of this account. To add the account again, an admin runs: \
                 lockstep user add NAME --subject {}",
                quoted(&subject)
            ));
        }
        SignsInAs::Nobody => {}
    }
    let by_admin = |name: &str| {
        let subject = quoted(&subject);
        format!(
            "An admin adds you with: lockstep user add {name} --subject {subject} (or, if you already have a name here: \
             lockstep user link NAME --subject {subject})"
        )
    };
    let named = name.as_deref().unwrap_or("NAME");
    let Some(role) = role else {
        return refuse(format!("No person has this account yet. {}", by_admin(named)));
    };
    let name = match name {
        Ok(name) => name,
        Err(why) => return refuse(format!("You cannot be added: {why}. {}", by_admin("NAME"))),
    };
    if let Some(why) = taken(auth, &name).await? {
        return refuse(format!("You cannot be added as {name:?}: {why}. {}", by_admin("ANOTHER-NAME")));
    }
    match people::room_for(auth, &name, Some(&identity)) {
        Ok(()) => {}
        Err(Error::Conflict(why, _)) => return refuse(format!("You cannot be added: {why}.")),
        Err(other) => return Err(other),
    }
    let row = people::insert(auth, name, role, None, Some(identity)).await?;
    let done = format!("added, {role}, subject {subject:?}");
    Ok(Ok((row, Some(done))))
}

/// Returns why a sign-in cannot add a person with this name, if so. Names are chosen at the provider, and a new person with the name would
/// own the jobs and datasets of removed people and of tokens with that name.
async fn taken(auth: &Auth, name: &str) -> Result<Option<&'static str>> {
    if auth.access.person(name).is_some() {
        return Ok(Some("another person has this name"));
    }
    let is_it = |owner: Option<&String>| owner.is_some_and(|owner| owner == name);
    let of_name = JobFilter { owner: Some(name.to_owned()), limit: 1, ..JobFilter::default() };
    let owns = auth
        .access
        .tokens()
        .iter()
        .any(|token| (token.owner.is_none() && token.name == name) || is_it(token.owner.as_ref()))
        || !auth.store.jobs(&of_name).await?.jobs.is_empty()
        || auth.store.datasets().await?.iter().any(|dataset| is_it(dataset.owner.as_ref()));
    Ok(owns.then_some("there are tokens, jobs or datasets of this name, which would become yours"))
}

/// Quotes a subject for a shell. Subjects consist of visible ASCII characters.
fn quoted(subject: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:@/".contains(c);
    match subject.chars().all(is_plain) && !subject.starts_with('-') {
        true => subject.to_owned(),
        false => format!("'{}'", subject.replace('\'', r"'\''")),
    }
}

impl From<OidcError> for Refused {
    fn from(error: OidcError) -> Self {
        match error {
            OidcError::Unavailable(detail) => Self::unavailable(detail),
            OidcError::Declined(detail) => Self::not_begun(detail),
            OidcError::Refused(detail) => Self::unknown(detail),
        }
    }
}

/// Name of the cookie that a browser keeps while it is at the provider.
fn own_cookie(auth: &Auth) -> String {
    format!("{}_oidc", auth.cookie_name)
}

/// Sets the cookie. It must be `SameSite=Lax`, because the browser returns through a link from the provider's site.
fn set_cookie(auth: &Auth, peer: &Peer, value: &str, seconds: u64, response: &mut Response) {
    let secure = if peer.https { "; Secure" } else { "" };
    let name = own_cookie(auth);
    let text = format!("{name}={value}; Path=/login/oidc; Max-Age={seconds}; HttpOnly; SameSite=Lax{secure}");
    if let Ok(value) = HeaderValue::from_str(&text) {
        response.headers_mut().append(header::SET_COOKIE, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_are_quoted_for_a_shell() {
        assert_eq!(quoted("2489-a_b"), "2489-a_b");
        assert_eq!(quoted("auth0|5; rm -rf /"), "'auth0|5; rm -rf /'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted("--role=admin"), "'--role=admin'");
    }
}
