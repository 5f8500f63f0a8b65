//! Parts that all pages share: the folder of styles and scripts, the current user, and the error page.

use askama::Template;
use std::sync::OnceLock;

static ASSETS: OnceLock<String> = OnceLock::new();

/// Sets the path of styles and scripts (default: `/static`). Only the first call has an effect. The path changes with their content, so
/// that browsers may cache them without a time limit.
pub fn set_assets(path: String) {
    let _ = ASSETS.set(path);
}

pub(crate) fn assets() -> &'static str {
    ASSETS.get().map_or("/static", String::as_str)
}

/// The person or token that looks at a page, with the properties on which the bar at the top depends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CurrentUser {
    /// The name of the person or token. Empty for [`CurrentUser::NOBODY`].
    pub who: String,
    /// Whether the user has a session, which the button "Sign out" ends.
    pub signed_in: bool,
    /// Whether the user sees the audit log, the page People and, in the footer, the link to `/webhooks`.
    pub is_admin: bool,
    /// Whether the user is a person, who has an account page, and not a token.
    pub is_person: bool,
    /// Whether the user may change nothing. Pages then offer no changes.
    pub reads_only: bool,
}

impl CurrentUser {
    /// A user who has not signed in, or a user of a server without sign-in.
    pub const NOBODY: CurrentUser = CurrentUser {
        who: String::new(),
        signed_in: false,
        is_admin: false,
        is_person: false,
        reads_only: false,
    };
}

/// A page that describes an error and what to do.
#[derive(Debug, Clone, Template)]
#[template(path = "message.html")]
pub struct ErrorPage {
    /// HTTP status, in small print.
    pub status: u16,
    /// What happened, such as `No job has this id`.
    pub title: String,
    /// What to do, as a sentence.
    pub detail: String,
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_escaped_and_the_bar_depends_on_the_user() {
        let (title, detail) = ("<b>".into(), "Go to Jobs.".into());
        let page = ErrorPage { status: 404, title, detail, user: CurrentUser::NOBODY };
        let html = page.render().expect("renders");
        assert!(html.contains("&#60;b&#62;") && html.contains("404"), "{html}");
        assert!(!html.contains("Sign out") && !html.contains("View only"), "{html}");
        assert!(!html.contains("href=\"/people\"") && !html.contains("href=\"/audit\""), "{html}");
        let user = CurrentUser { is_admin: true, ..CurrentUser::NOBODY };
        let html = ErrorPage { user, ..page.clone() }.render().expect("renders");
        assert!(html.contains("href=\"/people\"") && html.contains("href=\"/audit\""), "{html}");
        let who = "ada".to_owned();
        let user = CurrentUser { who, signed_in: true, is_admin: false, is_person: true, reads_only: true };
        let html = ErrorPage { user, ..page }.render().expect("renders");
        assert!(
            html.contains("Sign out") && html.contains("/account") && html.contains("View only"),
            "{html}"
        );
        assert!(html.contains(">ada</a>"), "the bar shows the signed-in person: {html}");
    }
}
