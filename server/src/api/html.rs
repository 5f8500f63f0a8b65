//! Responses with HTML pages.

use crate::{
    auth::access::Caller,
    http::error::{Error, PageError},
};
use axum::response::{Html, IntoResponse, Response};
use lockstep_web::layout::CurrentUser;

pub(crate) type Page = Result<Response, PageError>;

pub(crate) fn html(rendered: Result<String, impl std::fmt::Display>) -> Page {
    let html = rendered.map_err(|e| PageError(Error::Internal(format!("a page could not be made: {e}"))))?;
    Ok(Html(html).into_response())
}

/// Returns the current user of a page for its layout.
pub(crate) fn current_user(caller: &Caller) -> CurrentUser {
    caller.current_user()
}
