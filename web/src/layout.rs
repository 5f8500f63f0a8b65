//! Parts that all pages share: the navigation, the data block for the page's script, and the error page.

use askama::Template;
use serde::Serialize;
use std::sync::OnceLock;

static ASSETS: OnceLock<String> = OnceLock::new();

/// Sets the path of styles and scripts, once. The path changes with their content, so that browsers may cache them without a time limit.
/// Default: `/static`.
pub fn set_assets(path: String) {
    let _ = ASSETS.set(path);
}

pub(crate) fn assets() -> &'static str {
    ASSETS.get().map_or("/static", String::as_str)
}

/// Returns the server's time, from which pages compute ages. A reader's clock may be wrong.
pub(crate) fn now() -> jiff::Timestamp {
    jiff::Timestamp::now()
}

/// The navigation entry to which a page belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nav {
    /// The list of jobs, the form for a new job, and the page of each job.
    Jobs,
    /// `/queue`.
    Queue,
    /// `/compare`.
    Compare,
    /// `/datasets`.
    Datasets,
    /// `/models` and each model.
    Models,
    /// `/machines`.
    Machines,
    /// `/people`, for admins.
    People,
    /// `/audit`, for admins.
    Audit,
    /// A page without a navigation entry, such as an error.
    None,
    /// The sign-in form, which has no navigation: other pages would lead back to the form.
    SignIn,
}

/// The person or token that looks at a page, with the properties on which the bar at the top depends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CurrentUser {
    /// The name of the person or token. Empty if the server requires no sign-in.
    pub who: String,
    /// Whether there is a session to end.
    pub signed_in: bool,
    /// Whether the user sees the audit log, the page People and, in the footer, the link to `/webhooks`.
    pub is_admin: bool,
    /// Whether the user is a person, who has an account page, and not a token.
    pub is_person: bool,
    /// Whether the user may change nothing. Pages then offer no changes.
    pub reads_only: bool,
}

impl CurrentUser {
    /// A user who has not signed in, or on a server without sign-in.
    pub const NOBODY: CurrentUser = CurrentUser {
        who: String::new(),
        signed_in: false,
        is_admin: false,
        is_person: false,
        reads_only: false,
    };
}

/// The bar at the top of a page.
#[derive(Debug, Clone, Copy)]
pub struct Bar<'a> {
    nav: Nav,
    user: &'a CurrentUser,
}

impl Nav {
    /// Returns the bar of a page with this entry, for this user.
    pub fn bar_for(self, user: &CurrentUser) -> Bar<'_> {
        Bar { nav: self, user }
    }
}

impl<'a> Bar<'a> {
    /// Returns URL and label of each entry, and whether it is the current page. Empty before sign-in.
    pub fn entries(self) -> Vec<(&'static str, &'static str, bool)> {
        if self.nav == Nav::SignIn {
            return Vec::new();
        }
        let all = [
            ("/jobs", "Jobs", Nav::Jobs),
            ("/queue", "Queue", Nav::Queue),
            ("/compare", "Compare", Nav::Compare),
            ("/datasets", "Datasets", Nav::Datasets),
            ("/models", "Models", Nav::Models),
            ("/machines", "Machines", Nav::Machines),
            ("/people", "People", Nav::People),
            ("/audit", "Audit", Nav::Audit),
        ];
        let is_for_admins = |nav: &Nav| matches!(nav, Nav::People | Nav::Audit);
        let shown = all.into_iter().filter(|(_, _, nav)| !is_for_admins(nav) || self.user.is_admin);
        shown.map(|(address, label, nav)| (address, label, nav == self.nav)).collect()
    }

    /// Returns the person or token that looks at the page.
    pub fn user(self) -> &'a CurrentUser {
        self.user
    }
}

/// Formats JSON for a `<script type="application/json">` block. `<`, `>` and `&` are escaped, so that no text can end the block.
///
/// # Errors
/// The value has no JSON form, such as a map whose keys are not strings.
pub(crate) fn data_block<T: Serialize>(value: &T) -> Result<String, askama::Error> {
    let json = serde_json::to_string(value).map_err(askama::Error::custom)?;
    Ok(json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026"))
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

impl ErrorPage {
    fn nav(&self) -> Bar<'_> {
        Nav::None.bar_for(&self.user)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_block_cannot_be_closed_by_its_content() {
        let block = data_block(&"</script><script>alert(1)</script>&").expect("a string is JSON");
        assert!(!block.contains('<') && !block.contains('&'), "{block}");
        assert_eq!(
            serde_json::from_str::<String>(&block).expect("still JSON"),
            "</script><script>alert(1)</script>&"
        );
    }

    #[test]
    fn only_admins_see_links_to_people_and_the_audit_log() {
        let shown = |is_admin| {
            let user = CurrentUser { is_admin, is_person: true, ..CurrentUser::NOBODY };
            Nav::Jobs.bar_for(&user).entries()
        };
        assert!(shown(false).iter().all(|(address, _, _)| !["/people", "/audit"].contains(address)));
        assert_eq!(shown(true).last(), Some(&("/audit", "Audit", false)));
        assert_eq!(shown(true).first(), Some(&("/jobs", "Jobs", true)));
    }

    #[test]
    fn a_message_is_escaped() {
        let (title, detail) = ("<b>".into(), "Go to Jobs.".into());
        let page = ErrorPage { status: 404, title, detail, user: CurrentUser::NOBODY };
        let html = page.render().expect("renders");
        assert!(html.contains("&#60;b&#62;") && html.contains("404"), "{html}");
        assert!(!html.contains("Sign out") && !html.contains("View only"), "{html}");
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
