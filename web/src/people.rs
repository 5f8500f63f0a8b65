//! The page People, for admins, and the page of one's own account.

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
    /// All people, sorted by name.
    pub people: Vec<Person>,
    /// The name in the form.
    pub name: String,
    /// Why the last change was not made; empty for none.
    pub error: String,
    /// The person who looks; empty for a token.
    pub me: String,
    /// Rights of the person who looks at the page.
    pub viewer: Viewer,
}

impl PeoplePage {
    /// The page as HTML.
    ///
    /// # Errors
    /// See [`askama::Template::render`]; no data can cause an error.
    pub fn render(&self) -> Result<String, askama::Error> {
        Template::render(self)
    }

    fn nav(&self) -> Bar<'_> {
        Nav::People.seen_by(&self.viewer)
    }

    /// Each role. For the first person, the highest role comes first.
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
    /// The person who looks; `None` for a token without an owner.
    pub person: Option<Person>,
    /// Whether the person has a password, and not only an account at an OpenID provider.
    pub has_password: bool,
    /// The token's name, if no person looks.
    pub token: String,
    /// The person's valid tokens.
    pub tokens: Vec<Token>,
    /// Scopes that a token of the person may have.
    pub scopes: Vec<Scope>,
    /// The secret of a token that was just made, shown only once; empty for none.
    pub secret: String,
    /// Whether the last change was made.
    pub done: bool,
    /// Why the last change was not made; empty if it was.
    pub error: String,
    /// Rights of the person who looks at the page.
    pub viewer: Viewer,
}

impl AccountPage {
    /// The page as HTML.
    ///
    /// # Errors
    /// See [`askama::Template::render`]; no data can cause an error.
    pub fn render(&self) -> Result<String, askama::Error> {
        Template::render(self)
    }

    fn nav(&self) -> Bar<'_> {
        Nav::Elsewhere.seen_by(&self.viewer)
    }
}
