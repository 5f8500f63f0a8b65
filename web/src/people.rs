//! People, for admins; and the own account.

use crate::layout::{Bar, Nav, Viewer};
use askama::Template;
use lockstep_protocol::{
    access::{Scope, Token},
    people::{Person, Role},
};

/// `GET /people`.
#[derive(Debug, Clone, Template)]
#[template(path = "people.html")]
pub struct PeoplePage {
    /// By name.
    pub people: Vec<Person>,
    /// What stands in the form.
    pub name: String,
    /// Why the last change was not made; empty for none.
    pub error: String,
    /// The person who looks; empty for a token.
    pub me: String,
    /// Who looks.
    pub viewer: Viewer,
}

impl PeoplePage {
    /// The page as HTML.
    ///
    /// # Errors
    /// As [`askama::Template::render`]; none that data can cause.
    pub fn render(&self) -> Result<String, askama::Error> {
        Template::render(self)
    }

    fn nav(&self) -> Bar {
        Nav::People.seen_by(self.viewer)
    }

    /// Each role, the highest first where it is the first person's.
    fn roles(&self) -> Vec<Role> {
        let mut roles = vec![Role::Member, Role::Viewer, Role::Admin];
        if self.people.is_empty() {
            roles.reverse();
        }
        roles
    }
}

/// `GET /account`.
#[derive(Debug, Clone, Template)]
#[template(path = "account.html")]
pub struct AccountPage {
    /// Who looks; `None` for a token that no person owns.
    pub person: Option<Person>,
    /// The person has a password, and not an account at an OpenID provider alone.
    pub has_password: bool,
    /// The name of the token, otherwise.
    pub token: String,
    /// The person's valid tokens.
    pub tokens: Vec<Token>,
    /// What a token of the person may be for.
    pub scopes: Vec<Scope>,
    /// A token that was made just now, shown this once; empty for none.
    pub secret: String,
    /// The last change was made.
    pub done: bool,
    /// Why it was not; empty for none.
    pub error: String,
    /// Who looks.
    pub viewer: Viewer,
}

impl AccountPage {
    /// The page as HTML.
    ///
    /// # Errors
    /// As [`askama::Template::render`]; none that data can cause.
    pub fn render(&self) -> Result<String, askama::Error> {
        Template::render(self)
    }

    fn nav(&self) -> Bar {
        Nav::Elsewhere.seen_by(self.viewer)
    }
}
