//! The page People, for admins, and the page of the user's own account.

use crate::layout::CurrentUser;
use askama::Template;
use lockstep_protocol::{
    access::{Scope, Token},
    people::{Person, Role},
};

/// `GET /people`.
#[derive(Debug, Clone, Default, Template)]
#[template(path = "people.html")]
pub struct PeoplePage {
    /// All people, sorted by name.
    pub people: Vec<Person>,
    /// The text in the field Name.
    pub name: String,
    /// Why a change of a person failed. Empty if no change failed.
    pub error: String,
    /// Why a person was not added, beside the fields of the form. Empty if the form was not refused.
    pub name_error: String,
    pub password_error: String,
    /// The name of the user; empty for a token.
    pub me: String,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

impl PeoplePage {
    /// Returns all roles. For the first person, the highest role comes first.
    fn roles(&self) -> Vec<Role> {
        let mut roles = vec![Role::Member, Role::Viewer, Role::Admin];
        if self.people.is_empty() {
            roles.reverse();
        }
        roles
    }
}

/// `GET /account`.
#[derive(Debug, Clone, Default, Template)]
#[template(path = "account.html")]
pub struct AccountPage {
    /// The user; `None` for a token without an owner.
    pub person: Option<Person>,
    /// Whether the person has a password, and not only an account at an OpenID provider.
    pub has_password: bool,
    /// The person's valid tokens.
    pub tokens: Vec<Token>,
    /// Scopes that a token of the person may have.
    pub scopes: Vec<Scope>,
    /// Secret of a token that was just created, shown only once. Empty otherwise.
    pub secret: String,
    /// Whether the last change was successful.
    pub done: bool,
    /// Why the last change failed. Empty if no change failed.
    pub error: String,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}
