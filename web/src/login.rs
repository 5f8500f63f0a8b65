//! The sign-in form.

use crate::layout::{Bar, CurrentUser, Nav};
use askama::Template;

/// `GET /login`.
#[derive(Debug, Clone, Template)]
#[template(path = "login.html")]
pub struct LoginPage {
    /// The page to open after sign-in.
    pub next: String,
    /// Why the last attempt failed. Empty if no attempt failed.
    pub error: String,
    pub name: String,
    /// Whether the server has people, who sign in with name and password.
    pub has_people: bool,
    /// Whether the form adds the first person: the user has an admin's token, and no person exists.
    pub setup: bool,
    /// The OpenID provider, if any.
    pub provider: Option<ProviderButton>,
}

/// The button for an OpenID provider.
#[derive(Debug, Clone)]
pub struct ProviderButton {
    /// The provider's display name.
    pub name: String,
    /// Address at which the sign-in starts, without the page to open afterwards.
    pub href: String,
    /// Why the last attempt failed. Empty if no attempt failed.
    pub error: String,
}

impl LoginPage {
    fn nav(&self) -> Bar<'static> {
        static NOBODY: CurrentUser = CurrentUser::NOBODY;
        // The user who adds the first admin is already signed in with a token.
        let nav = if self.setup { Nav::None } else { Nav::SignIn };
        nav.bar_for(&NOBODY)
    }
}
