//! Responses with HTML pages.

use crate::http::error::{Error, PageError};
use axum::response::{Html, IntoResponse, Response};

pub(crate) type Page = Result<Response, PageError>;

pub(crate) fn html(rendered: Result<String, impl std::fmt::Display>) -> Page {
    let html = rendered.map_err(|e| PageError(Error::Internal(format!("a page could not be made: {e}"))))?;
    Ok(Html(html).into_response())
}
