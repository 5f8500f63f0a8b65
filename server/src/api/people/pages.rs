//! The page of all people, for admins, and the page of one's own account.

use super::{
    login,
    tokens::{self, NewToken},
};
use crate::api::prelude::*;
use crate::{
    api::{
        html::{Page, form_error, html},
        people::{self, NewPerson, OwnPassword, PersonChange},
    },
    auth::{
        Auth,
        access::{Password, SESSION_LIFE},
    },
    http::{authorize::AuditSubject, error::PageError, extract::PageQuery, peer::Peer},
};
use axum::{Form, response::Redirect};
use lockstep_protocol::{access::Scope, people::Role};
use lockstep_web::people::{AccountPage, PeoplePage};

/// `GET /people`
pub(crate) async fn all(State(auth): State<Arc<Auth>>, Extension(caller): Extension<Caller>) -> Page {
    html(people_page(&auth, &caller))
}

/// Returns the page of all people with no error message.
fn people_page(auth: &Auth, caller: &Caller) -> PeoplePage {
    PeoplePage {
        people: auth.access.people(),
        me: caller.person().unwrap_or_default().to_owned(),
        user: caller.current_user(),
        ..PeoplePage::default()
    }
}

/// Actions of the form on the page of people.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    Add,
    Role,
    Password,
    Disable,
    Enable,
    Remove,
}

/// The form of `POST /people`.
#[derive(Debug, Deserialize)]
pub(crate) struct PeopleForm {
    action: Action,
    name: String,
    role: Option<Role>,
    #[serde(default)]
    password: Password,
}

/// `POST /people`
pub(crate) async fn change(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Form(form): Form<PeopleForm>,
) -> Page {
    let (name, action) = (form.name.trim().to_owned(), form.action);
    let subject = format!("{action:?} {name:?}");
    match apply(&auth, &caller, &name, form).await {
        Ok(changes) => {
            let subject = if changes.is_empty() { subject } else { format!("{subject}: {changes}") };
            Ok((Extension(AuditSubject(subject)), Redirect::to("/people")).into_response())
        }
        Err(error) => {
            let mut page = people_page(&auth, &caller);
            let is_password = matches!(&error, Error::Invalid(mistakes) if mistakes.iter().all(|m| m.pointer == "/password"));
            let (status, text) = form_error(error)?;
            match action {
                Action::Add if is_password => (page.name, page.password_error) = (name, text),
                Action::Add => (page.name, page.name_error) = (name, text),
                _ => page.error = text,
            }
            Ok((status, Extension(AuditSubject(subject)), html(page)?).into_response())
        }
    }
}

/// Performs the action. Returns the changes for the audit log; empty if the name of the action says what has changed.
async fn apply(auth: &Auth, caller: &Caller, name: &str, form: PeopleForm) -> Result<String> {
    let change = match form.action {
        Action::Add => {
            let role = form.role.unwrap_or(Role::Member);
            let new = NewPerson { name: name.to_owned(), role, password: Some(form.password), subject: None };
            let must_be_first_person = false;
            return people::add(auth, new, must_be_first_person).await.map(|_| String::new());
        }
        Action::Remove => return people::remove(auth, caller, name).await.map(|()| String::new()),
        Action::Role => PersonChange { role: form.role, ..Default::default() },
        Action::Password => PersonChange { password: Some(form.password), ..Default::default() },
        Action::Disable => PersonChange { disabled: Some(true), ..Default::default() },
        Action::Enable => PersonChange { disabled: Some(false), ..Default::default() },
    };
    let (_, AuditSubject(changes)) = people::edit(auth, caller, name, change).await?;
    Ok(if matches!(form.action, Action::Role) { changes } else { String::new() })
}

/// Parameters of `GET /account`.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct AccountQuery {
    /// Whether a change was made.
    #[serde(default)]
    done: bool,
}

/// `GET /account`
pub(crate) async fn account(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    PageQuery(query): PageQuery<AccountQuery>,
) -> Page {
    html(AccountPage { done: query.done, ..account_page(&auth, &caller) })
}

/// Returns the page of the caller's account, without messages.
fn account_page(auth: &Auth, caller: &Caller) -> AccountPage {
    let row = caller.person().and_then(|name| auth.access.person(name));
    let (now, mut tokens) = (crate::now(), auth.access.tokens());
    tokens.retain(|token| tokens::is_owned_by(token, caller) && token.is_valid(now));
    let mut scopes = vec![Scope::Submit, Scope::Read, Scope::Admin];
    scopes.retain(|scope| caller.may(*scope));
    AccountPage {
        has_password: row.as_ref().is_some_and(|row| row.hash.is_some()),
        person: row.map(|row| row.person),
        tokens,
        scopes,
        user: caller.current_user(),
        ..AccountPage::default()
    }
}

/// The forms of `POST /account`.
#[derive(Debug, Deserialize)]
#[serde(tag = "action", rename_all = "lowercase")]
pub(crate) enum AccountForm {
    Password {
        current: Password,
        new: Password,
    },
    Token {
        name: String,
        scope: Scope,
        /// Number of days until the token expires; empty for never.
        #[serde(default)]
        days: String,
    },
    Revoke {
        id: String,
    },
}

/// `POST /account`: changes the password and replaces all sessions with a new session, makes a token, or revokes a token.
pub(crate) async fn change_account(
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Extension(peer): Extension<Peer>,
    Form(form): Form<AccountForm>,
) -> Page {
    let subject = AuditSubject(match &form {
        AccountForm::Password { .. } => "Password".into(),
        AccountForm::Token { name, .. } => format!("Token {name:?}"),
        AccountForm::Revoke { id } => format!("Revoke {id:?}"),
    });
    let mut response = match apply_account(&auth, &caller, &peer, form).await {
        Ok(response) => response,
        Err(PageError(error)) => {
            let (status, error) = form_error(error)?;
            (status, html(AccountPage { error, ..account_page(&auth, &caller) })?).into_response()
        }
    };
    response.extensions_mut().insert(subject);
    Ok(response)
}

async fn apply_account(auth: &Auth, caller: &Caller, peer: &Peer, form: AccountForm) -> Page {
    let reload = || Ok(Redirect::to("/account?done=true").into_response());
    match form {
        AccountForm::Password { current, new } => {
            let row =
                people::set_own_password(auth, caller, peer.address, OwnPassword { current, new }).await?;
            match caller.session() {
                Some(_) => {
                    Ok(login::sign_in_person(auth, peer, &row, "/account?done=true", SESSION_LIFE).await?)
                }
                None => reload(),
            }
        }
        AccountForm::Token { name, scope, days } => {
            if caller.person().is_none() {
                let detail = "only a person can have personal tokens; sign in with a name and a password";
                return Err(Error::Conflict(detail.into()).into());
            }
            let days = Some(days.trim()).filter(|days| !days.is_empty()).map(str::parse::<u32>).transpose();
            let days = days.map_err(|_| Error::invalid("/days", "must be a number of days, or empty"))?;
            let expires_in_secs = days.map(|days| u64::from(days) * 24 * 3600);
            let new = NewToken { name, scope, agent: None, expires_in_secs };
            let secret = tokens::make(auth, caller, new).await?.secret;
            html(AccountPage { secret, ..account_page(auth, caller) })
        }
        AccountForm::Revoke { id } => {
            tokens::revoke_token(auth, caller, &id).await?;
            reload()
        }
    }
}
