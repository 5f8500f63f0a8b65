//! The form to sign in.

use crate::layout::{Bar, Nav, Viewer};
use askama::Template;

/// `GET /login`.
#[derive(Debug, Clone, Template)]
#[template(path = "login.html")]
pub struct LoginPage {
    /// The page to go to then.
    pub next: String,
    /// Why the last attempt failed; empty for none.
    pub error: String,
    /// The name that stands in the form.
    pub name: String,
    /// There are people, who sign in by name and password.
    pub has_people: bool,
    /// An admin's token looks and there is nobody yet: the form is for the first person.
    pub setup: bool,
    /// The OpenID provider, where there is one.
    pub provider: Option<ProviderButton>,
}

/// The way to an OpenID provider.
#[derive(Debug, Clone)]
pub struct ProviderButton {
    /// What people call it.
    pub name: String,
    /// Where the way begins, without the page to go to then.
    pub href: String,
    /// Why the last attempt failed; empty for none.
    pub error: String,
}

impl LoginPage {
    /// The page as HTML.
    ///
    /// # Errors
    /// As [`askama::Template::render`]; none that data can cause.
    pub fn render(&self) -> Result<String, askama::Error> {
        Template::render(self)
    }

    fn nav(&self) -> Bar {
        // Who sets up the first admin is signed in, by a token.
        let nav = if self.setup { Nav::Elsewhere } else { Nav::SignIn };
        nav.seen_by(Viewer::NOBODY)
    }
}
