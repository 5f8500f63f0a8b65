//! The sign-in form, and the form for the first admin.

use crate::layout::CurrentUser;
use askama::Template;

/// `GET /login`.
#[derive(Debug, Clone, Default, Template)]
#[template(path = "login.html")]
pub struct LoginPage {
    /// URL of the page that the browser opens after sign-in.
    pub next: String,
    /// Why the link of the URL does not sign in. Empty otherwise.
    pub link_error: String,
    /// Why the name and the password were refused. Empty otherwise.
    pub password_error: String,
    /// Why the token was refused. Empty otherwise.
    pub token_error: String,
    /// The text in the field Name.
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
    /// The text in the field Name.
    pub name: String,
    /// Why the first person could not be added, if the form was sent. Empty otherwise.
    pub error: String,
    /// Always [`CurrentUser::NOBODY`].
    pub user: CurrentUser,
}

/// The button for an OpenID provider.
#[derive(Debug, Clone)]
pub struct ProviderButton {
    /// The provider's display name.
    pub name: String,
    /// URL that starts the sign-in. The template appends the query, with [`LoginPage::next`].
    pub href: String,
    /// Why the sign-in at the provider failed. Empty if no sign-in failed.
    pub error: String,
}
