//! Pages about people: all of them, for admins, and one's own.

use super::{
    extract::PageQuery,
    login,
    pages::{Page, html, viewer},
    people::{self, NewPerson, OwnPassword, PersonChange},
};
use crate::{
    access::{Caller, Password},
    app::App,
    error::{Error, Result},
    ingress::Peer,
};
use axum::{
    Extension, Form,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Redirect},
};
use lockstep_protocol::people::Role;
use lockstep_web::people::{AccountPage, PeoplePage};
use serde::Deserialize;

/// `GET /people`
pub(crate) async fn all(State(app): State<App>, Extension(caller): Extension<Caller>) -> Page {
    people_page(&app, &caller, "", "")
}

fn people_page(app: &App, caller: &Caller, name: &str, error: &str) -> Page {
    html(
        PeoplePage {
            people: app.access.people(),
            name: name.to_owned(),
            error: error.to_owned(),
            me: caller.person().unwrap_or_default().to_owned(),
            viewer: viewer(caller),
        }
        .render(),
    )
}

/// What the page of people asks for.
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

/// `POST /people`
#[derive(Debug, Deserialize)]
pub(crate) struct PeopleForm {
    action: Action,
    name: String,
    #[serde(default)]
    role: Option<Role>,
    #[serde(default)]
    password: Password,
}

/// `POST /people`
pub(crate) async fn change(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Form(form): Form<PeopleForm>,
) -> Page {
    let name = form.name.trim().to_owned();
    match done(&app, &name, form).await {
        Ok(()) => Ok(Redirect::to("/people").into_response()),
        Err(error) => {
            let (status, words) = in_words(error)?;
            Ok((status, people_page(&app, &caller, &name, &words)?).into_response())
        }
    }
}

async fn done(app: &App, name: &str, form: PeopleForm) -> Result<()> {
    let change = |change| people::edit(app, name, change);
    match form.action {
        Action::Add => {
            let role = form.role.unwrap_or(Role::Member);
            let new = NewPerson { name: name.to_owned(), role, password: form.password };
            people::add(app, new, false).await.map(drop)
        }
        Action::Role => change(PersonChange { role: form.role, ..Default::default() }).await.map(drop),
        Action::Password => {
            change(PersonChange { password: Some(form.password), ..Default::default() }).await.map(drop)
        }
        Action::Disable => {
            change(PersonChange { disabled: Some(true), ..Default::default() }).await.map(drop)
        }
        Action::Enable => {
            change(PersonChange { disabled: Some(false), ..Default::default() }).await.map(drop)
        }
        Action::Remove => people::remove(app, name).await,
    }
}

/// What is said on the form again, and with which status.
///
/// # Errors
/// What the form cannot mend.
fn in_words(error: Error) -> Result<(StatusCode, String)> {
    match error {
        Error::Invalid(mistakes) => {
            let each = mistakes.iter().map(|m| format!("{} {}", m.pointer.trim_start_matches('/'), m.detail));
            Ok((StatusCode::UNPROCESSABLE_ENTITY, each.collect::<Vec<_>>().join("; ")))
        }
        Error::Conflict(detail, _) => Ok((StatusCode::CONFLICT, detail)),
        Error::NotFound(detail) => Ok((StatusCode::NOT_FOUND, detail)),
        other => Err(other),
    }
}

/// `GET /account`
#[derive(Debug, Default, Deserialize)]
pub(crate) struct AccountQuery {
    /// Something was changed.
    #[serde(default)]
    done: bool,
}

/// `GET /account`
pub(crate) async fn account(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    PageQuery(query): PageQuery<AccountQuery>,
) -> Page {
    account_page(&app, &caller, query.done, "")
}

fn account_page(app: &App, caller: &Caller, done: bool, error: &str) -> Page {
    let person = caller.person().and_then(|name| app.access.person(name)).map(|row| row.person);
    let token = caller.token().map(|token| token.name.clone()).unwrap_or_default();
    html(AccountPage { person, token, done, error: error.to_owned(), viewer: viewer(caller) }.render())
}

/// `POST /account`
#[derive(Debug, Deserialize)]
pub(crate) struct AccountForm {
    #[serde(default)]
    current: Password,
    #[serde(default)]
    new: Password,
}

/// `POST /account`: another password, and a new session in place of all that there were.
pub(crate) async fn change_account(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Extension(peer): Extension<Peer>,
    Form(form): Form<AccountForm>,
) -> Page {
    let passwords = OwnPassword { current: form.current, new: form.new };
    match people::set_own(&app, &caller, peer.address, passwords).await {
        Ok(row) if caller.session().is_some() => {
            Ok(login::sign_in_person(&app, &peer, &row, "/account?done=true").await?)
        }
        Ok(_) => Ok(Redirect::to("/account?done=true").into_response()),
        Err(error) => {
            let (status, words) = in_words(error)?;
            Ok((status, account_page(&app, &caller, false, &words)?).into_response())
        }
    }
}
