//! The sign-in form.

use crate::layout::{Bar, Nav, Viewer};
use askama::Template;

/// `GET /login`.
#[derive(Debug, Clone, Template)]
#[template(path = "login.html")]
pub struct LoginPage {
    /// The page to open after sign-in.
    pub next: String,
    /// Why the last attempt failed; empty for none.
    pub error: String,
    pub name: String,
    /// Whether there are people, who sign in with name and password.
    pub has_people: bool,
    /// Whether the form makes the first person: an admin's token looks, and no person exists.
    pub setup: bool,
    /// The OpenID provider, if any.
    pub provider: Option<ProviderButton>,
}

/// The button for an OpenID provider.
#[derive(Debug, Clone)]
pub struct ProviderButton {
    /// The provider's name for people.
    pub name: String,
    /// Address at which the sign-in begins, without the page to open afterwards.
    pub href: String,
    /// Why the last attempt failed; empty for none.
    pub error: String,
}

impl LoginPage {
    /// The page as HTML.
    ///
    /// # Errors
    /// See [`askama::Template::render`]; no data can cause an error.
    pub fn render(&self) -> Result<String, askama::Error> {
        Template::render(self)
    }

    fn nav(&self) -> Bar<'static> {
        static NOBODY: Viewer = Viewer::NOBODY;
        // A viewer who makes the first admin is already signed in, by a token.
        let nav = if self.setup { Nav::Elsewhere } else { Nav::SignIn };
        nav.seen_by(&NOBODY)
    }
}
