//! The sign-in form, and the form for the first admin.

use crate::layout::CurrentUser;
use askama::Template;

/// `GET /login`.
#[derive(Debug, Clone, Template)]
#[template(path = "login.html")]
pub struct LoginPage {
    /// The page to open after sign-in.
    pub next: String,
    /// Why the last attempt failed. Empty if no attempt failed.
    pub error: String,
    /// The name in the form.
    pub name: String,
    /// Whether the server has people, who sign in with name and password.
    pub has_people: bool,
    /// The OpenID provider, if any.
    pub provider: Option<ProviderButton>,
    /// Always [`CurrentUser::NOBODY`].
    pub user: CurrentUser,
}

/// `GET /login` with an admin's token, while the server has no people: the form that adds the first person.
#[derive(Debug, Clone, Template)]
#[template(path = "first-admin.html")]
pub struct FirstAdminPage {
    /// The name in the form.
    pub name: String,
    /// Why the last attempt failed. Empty if no attempt failed.
    pub error: String,
    /// Always [`CurrentUser::NOBODY`].
    pub user: CurrentUser,
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
